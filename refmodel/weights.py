"""Checkpoint tensors made ready to multiply with: transposed, merged and decoded when first touched.

A source is a `Checkpoint` or `RandomTensors`: `array(name)`, `block_scaled(name)`, `is_fp8(name)` under Hugging Face's
names. What is decoded is kept while the whole model fits DECODED_BUDGET; of a larger model only what a call touches is
decoded, and dropped again.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from fp8 import quantize
from refmodel.experts import Expert
from refmodel.linear import DenseWeight, Fp8Weight
from refmodel.memory import aligned_empty, side_by_side
from refmodel.numerics import Numerics, round_to, widen
from refmodel.rope import softmax_scale, yarn_frequencies
from refmodel.schema import needed_tensors

#: bytes of decoded weights that may be kept
DECODED_BUDGET = 8 << 30


class Weights:
    """All weights of one model under one preset; shared by every rank, never written."""

    def __init__(self, source, config, numerics: Numerics):
        self.source, self.config, self.numerics = source, config, numerics
        parameters = sum(math.prod(needed.shape) for _, needed in needed_tensors(config))
        self.keep = parameters * numerics.compute.itemsize <= DECODED_BUDGET
        self._layers: dict[int, LayerWeights] = {}

    def layer(self, layer: int) -> "LayerWeights":
        """Weights of one layer; the MTP layer follows the last hidden layer."""
        if layer not in self._layers:
            made = LayerWeights(self, layer)
            if not self.keep:
                return made
            self._layers[layer] = made
        return self._layers[layer]

    def stored(self, name: str) -> np.ndarray:
        """A plain tensor in the activation dtype: norms and embedding tables."""
        return round_to(_as_float(self.source.array(name)), self.numerics.activation)

    def linear(self, *names: str, quantized: bool = True) -> DenseWeight | Fp8Weight:
        """Tensors [N_i, K] as one weight, side by side along N. `quantized`: FP8 numerics multiply codes."""
        if self.numerics.fp8 and quantized:
            return Fp8Weight.from_parts([self._block_scaled(name) for name in names], decoded=self.keep)
        return DenseWeight.from_rows(np.concatenate([self.dense(name) for name in names]))

    def dense(self, name: str) -> np.ndarray:
        """One tensor [N, K] in the compute dtype, holding the values that the preset stores.

        An FP8 tensor is code * scale, rounded to bfloat16 in the bfloat16 and fp8 numerics, to float32 in float32.
        """
        stored = self.numerics.activation
        if self.source.is_fp8(name):
            return widen(self.source.block_scaled(name).dequantize(stored), self.numerics.compute)
        return widen(round_to(_as_float(self.source.array(name)), stored), self.numerics.compute)

    def _block_scaled(self, name):
        if self.source.is_fp8(name):
            return self.source.block_scaled(name)
        # a bfloat16 copy of an FP8 model, or a random one: quantised as the released weights were
        return quantize(_as_float(self.source.array(name)), (128, 128), self.numerics.recipe, "float32")

    @cached_property
    def rope_config(self):
        """The config that RoPE and the softmax scale read: without YaRN where the demo's rule leaves it out."""
        longest, scaling = self.numerics.switches.yarn_max_seq_len, self.config.rope_scaling
        if longest is None or scaling is None or longest > scaling.original_max_position_embeddings:
            return self.config
        return replace(self.config, rope_scaling=None)

    @cached_property
    def frequencies(self) -> tuple[np.ndarray, float]:
        """`yarn_frequencies` of the model."""
        return yarn_frequencies(self.rope_config)

    @cached_property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by."""
        return softmax_scale(self.rope_config)

    @cached_property
    def embedding(self) -> np.ndarray:
        """[vocab, D]"""
        return self.stored("model.embed_tokens.weight")

    @cached_property
    def norm(self) -> np.ndarray:
        """[D] weight of the final norm."""
        return self.stored("model.norm.weight")

    @cached_property
    def head(self) -> DenseWeight:
        """[D, vocab]; never FP8."""
        tied = self.config.tie_word_embeddings
        return self.linear("model.embed_tokens.weight" if tied else "lm_head.weight", quantized=False)


class LayerWeights:
    """Weights of one layer, each made when first read."""

    def __init__(self, weights: Weights, layer: int):
        self._weights, self._prefix = weights, f"model.layers.{layer}."
        self._config = weights.config

    def _linear(self, *names, quantized=True):
        full = [f"{self._prefix}{name}.weight" for name in names]
        return self._weights.linear(*full, quantized=quantized)

    def _stored(self, name):
        return self._weights.stored(f"{self._prefix}{name}.weight")

    def _mlp(self, name):
        return Expert(self._linear(f"{name}.gate_proj", f"{name}.up_proj"), self._linear(f"{name}.down_proj"))

    def _expert(self, e):
        weights = self._mlp(f"mlp.experts.{e}")
        return Expert(*(weight.in_panels() if isinstance(weight, DenseWeight) else weight for weight in weights))

    input_norm = cached_property(lambda self: self._stored("input_layernorm"))
    post_norm = cached_property(lambda self: self._stored("post_attention_layernorm"))
    q_a_norm = cached_property(lambda self: self._stored("self_attn.q_a_layernorm"))
    kv_a_norm = cached_property(lambda self: self._stored("self_attn.kv_a_layernorm"))
    q_b = cached_property(lambda self: self._linear("self_attn.q_b_proj"))
    kv_b = cached_property(lambda self: self._linear("self_attn.kv_b_proj"))
    o = cached_property(lambda self: self._linear("self_attn.o_proj"))
    mlp = cached_property(lambda self: self._mlp("mlp"))
    shared = cached_property(lambda self: self._mlp("mlp.shared_experts"))
    router = cached_property(lambda self: self._linear("mlp.gate", quantized=False))

    @cached_property
    def down(self) -> DenseWeight | Fp8Weight:
        """q_a (or q, without a q latent) and kv_a in one product: both read the same input."""
        query = "q_proj" if self._config.q_lora_rank is None else "q_a_proj"
        return self._linear(f"self_attn.{query}", "self_attn.kv_a_proj_with_mqa")

    @cached_property
    def correction_bias(self) -> np.ndarray | None:
        """[E] float32 (as stored): never rounded to bfloat16, real biases are near 2 and differ in the last bits."""
        if self._config.topk_method != "noaux_tc":
            return None
        bias = _as_float(self._weights.source.array(f"{self._prefix}mlp.gate.e_score_correction_bias"))
        return widen(bias, np.dtype(np.float64))

    @cached_property
    def _kv_b_parts(self):
        """W_UK [H, N, C] and W_UV [H, C, V] in the compute dtype: per head kv_b has the rows of W_UK, then of W_UV."""
        config, N = self._config, self._config.qk_nope_head_dim
        rows = self._weights.dense(f"{self._prefix}self_attn.kv_b_proj.weight")
        heads = rows.reshape(config.num_attention_heads, N + config.v_head_dim, -1)  # [H, N + V, C]
        return side_by_side(heads[:, :N]), side_by_side(heads[:, N:].swapaxes(1, 2))

    @property
    def w_uk(self) -> np.ndarray:
        """[H, N, C]: takes a query head into the latent space, or a latent to the key head."""
        return self._kv_b_parts[0]

    @property
    def w_uv(self) -> np.ndarray:
        """[H, C, V]: takes a latent, attended or not, to the value head."""
        return self._kv_b_parts[1]

    @cached_property
    def experts(self) -> "Experts":
        """The routed experts by logical id."""
        return Experts(self._expert, self._config.n_routed_experts, self._weights.keep)

    # the MTP layer's own tensors
    enorm = cached_property(lambda self: self._stored("enorm"))
    hnorm = cached_property(lambda self: self._stored("hnorm"))
    eh_proj = cached_property(lambda self: self._linear("eh_proj", quantized=False))
    shared_head_norm = cached_property(lambda self: self._stored("shared_head.norm"))


class Experts(Sequence):
    """Experts by id, made when first touched, and kept if the model is small enough.

    The matrices that are kept lie side by side in one array for all experts: the system backs an array of many
    megabytes with large pages, and reads from them a third faster.
    """

    def __init__(self, make, count: int, keep: bool):
        self._make, self.kept = make, keep
        self._made: list[Expert | None] = [None] * count
        self._arrays: dict[str, np.ndarray] = {}  # field of Expert -> [count, ...], written where experts are made

    def __len__(self):
        return len(self._made)

    def __getitem__(self, e: int) -> Expert:
        made = self._made[e]
        if made is None:
            made = self._make(e)
            if self.kept:
                made = Expert(*(self._beside(e, field, weight) for field, weight in zip(Expert._fields, made)))
                self._made[e] = made
        return made

    def _beside(self, e, field, weight):
        """The weight with its matrix in its place among those of the other experts."""
        matrix = weight.matrix
        if field not in self._arrays:
            self._arrays[field] = aligned_empty((len(self), *matrix.shape), matrix.dtype)
        place = self._arrays[field][e]
        place[...] = matrix
        place.flags.writeable = False
        return replace(weight, matrix=place)


def _as_float(array):
    """A checkpoint tensor as bfloat16, float32 or float64 (float16 widens to float32 exactly)."""
    return array.astype(np.float32) if array.dtype == np.float16 else array
