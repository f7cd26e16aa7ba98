"""Mistakes that real implementations made, each as a change of our model that reproduces it.

When an engine disagrees with us, the change under which we agree with it names the cause. Sources: public issues of
vLLM, SGLang, transformers and others, named beside each entry.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from refmodel.model import Model
from refmodel.rope import softmax_scale


@dataclass(frozen=True)
class Mistake:
    """`text` says what is wrong; `change(model)` is our model with it, or None where it makes no difference."""

    text: str
    change: Callable[[Model], Model | None]


class ChangedTensors:
    """A source of tensors in which those whose names have one of `endings` are replaced by `change(float32 array)`."""

    def __init__(self, source, endings: tuple[str, ...], change: Callable[[np.ndarray], np.ndarray]):
        self._source, self._endings, self._change = source, endings, change

    def is_fp8(self, name: str) -> bool:
        return self._source.is_fp8(name) and not name.endswith(self._endings)

    def block_scaled(self, name: str):
        return self._source.block_scaled(name)

    def array(self, name: str) -> np.ndarray:
        if not name.endswith(self._endings):
            return self._source.array(name)
        if self._source.is_fp8(name):
            return self._change(self._source.block_scaled(name).dequantize(np.float32))
        return self._change(self._source.array(name).astype(np.float32))


def _config(text: str, **fields) -> Mistake:
    """A config field read wrongly or not at all."""

    def change(model):
        values = {key: value(model.config) if callable(value) else value for key, value in fields.items()}
        if all(getattr(model.config, key) == value for key, value in values.items()):
            return None
        return _with(model, config=replace(model.config, **values))

    return Mistake(text, change)


def _switch(text: str, **fields) -> Mistake:
    """Another side of a legitimate difference."""

    def change(model):
        switches = model.numerics.switches
        if all(getattr(switches, key) == value for key, value in fields.items()):
            return None
        return _with(model, numerics=replace(model.numerics, switches=replace(switches, **fields)))

    return Mistake(text, change)


def _tensors(text: str, endings: str | tuple[str, ...], change: Callable) -> Mistake:
    """Tensors whose name has one of `endings` are used wrongly: `change(array, config)` instead of them."""
    endings = (endings,) if isinstance(endings, str) else endings

    def changed(model):
        source = ChangedTensors(model.weights.source, endings, lambda array: change(array, model.config))
        return _with(model, source=source)

    return Mistake(text, changed)


def _with(model: Model, source=None, config=None, numerics=None) -> Model:
    return Model(source or model.weights.source, config or model.config, numerics or model.numerics, model.notices)


def _swap_halves(array, config):
    return np.concatenate(np.split(array, 2, axis=1)[::-1], axis=1)


def _rope_rows(array, config, factor):
    """The rope rows of every query head times `factor`."""
    array = array.copy()
    array.reshape(config.num_attention_heads, config.qk_head_dim, -1)[:, -config.qk_rope_head_dim :] *= factor
    return array


def _mscale(config) -> float:
    return float(np.sqrt(softmax_scale(config) * np.sqrt(config.qk_head_dim)))


def _query(text: str, factor: Callable, rope_only: bool = False) -> Mistake:
    """A wrong factor on the scores, put on the query projection, whichever the model has."""

    def scale(array, config):
        return _rope_rows(array, config, factor(config)) if rope_only else array * np.float32(factor(config))

    return _tensors(text, ("self_attn.q_b_proj.weight", "self_attn.q_proj.weight"), scale)


MISTAKES = (
    _config("RoPE ignores rope_scaling: plain frequencies, no YaRN", rope_scaling=None),
    _config("RoPE uses a base of 10000 whatever rope_theta says", rope_theta=10000.0),
    _config(
        "RoPE pairs halves although the weights are interleaved (or the reverse)",
        rope_interleave=lambda config: not config.rope_interleave,
    ),
    _query("the softmax scale lacks YaRN's mscale squared", lambda config: 1 / _mscale(config) ** 2),
    _query("cos and sin are scaled by mscale as well", lambda config: _mscale(config) ** 2, rope_only=True),
    _config("routed_scaling_factor is not applied", routed_scaling_factor=1.0),
    _config(
        "routed_scaling_factor is applied twice (vllm-project/vllm#24119)",
        routed_scaling_factor=lambda config: config.routed_scaling_factor**2,
    ),
    _config("norm_topk_prob is read the other way round", norm_topk_prob=lambda config: not config.norm_topk_prob),
    _config("experts are selected without groups", n_group=1, topk_group=1),
    _config("the shared experts are left out (sgl-project/sglang#38963)", n_shared_experts=0),
    _tensors(
        "the shared experts' output is divided by routed_scaling_factor (sgl-project/sglang#28237)",
        "mlp.shared_experts.down_proj.weight",
        lambda array, config: array / np.float32(config.routed_scaling_factor),
    ),
    _tensors("the correction bias is ignored", "e_score_correction_bias", lambda array, config: array * 0),
    _tensors(
        "the correction bias is rounded to bfloat16 (vllm-project/vllm#23640)",
        "e_score_correction_bias",
        lambda array, config: array.astype(ml_dtypes.bfloat16).astype(np.float32),
    ),
    _tensors("kv_a_layernorm's weight is left out", "kv_a_layernorm.weight", lambda array, config: array * 0 + 1),
    _tensors("q_a_layernorm's weight is left out", "q_a_layernorm.weight", lambda array, config: array * 0 + 1),
    _switch("q_a and kv_a norms use rms_norm_eps instead of 1e-6", inner_norm_eps=None),
    _switch("q_a and kv_a norms use 1e-6 instead of rms_norm_eps", inner_norm_eps=1e-6),
    _tensors("eh_proj takes the hidden state first (deepseek-ai/DeepSeek-V3#712)", "eh_proj.weight", _swap_halves),
    _switch("the MTP layer is fed the state before the final norm", mtp_hidden="pre_norm"),
    _switch("the MTP layer's embedding at position 0 is zeroed", mtp_zero_position_0=True),
    _switch("the MTP layer's embedding at position 0 is kept", mtp_zero_position_0=False),
)


@dataclass(frozen=True)
class RoutingVariant:
    """One way to get the selection of experts wrong, from the engine's own router logits."""

    text: str
    masked: float = -np.inf  # what stands for the choices of groups that were not selected
    best: int = 2  # how many choices of a group make its score
    weigh_choice: bool = False  # weights from the biased scores
    biased: bool = True


ROUTING_VARIANTS = (
    RoutingVariant(
        "choices outside the selected groups are set to 0 instead of -inf, and win where the others are negative "
        "(vllm-project/vllm#13474)",
        masked=0.0,
    ),
    RoutingVariant("a group's score is its best choice, not the sum of its two best", best=1),
    RoutingVariant("weights are taken from the biased scores (vllm-project/vllm#12002)", weigh_choice=True),
    RoutingVariant("the correction bias is ignored", biased=False),
)


def routes(logits, bias, config, variant: RoutingVariant) -> tuple[np.ndarray, np.ndarray]:
    """(ids [T, K] ascending, weights [T, K]) of router logits [T, E] under a variant, in float64."""
    scores = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    choice = scores + (np.asarray(bias, np.float64) if variant.biased and bias is not None else 0.0)
    grouped = choice.reshape(len(choice), config.n_group, -1)  # [T, G, E / G]
    group_score = np.sort(grouped, axis=2)[:, :, -variant.best :].sum(axis=2)
    chosen = np.argsort(-group_score, axis=1, kind="stable")[:, : config.topk_group]
    keep = np.zeros(group_score.shape, bool)
    np.put_along_axis(keep, chosen, True, axis=1)
    masked = np.where(keep[:, :, None], grouped, variant.masked).reshape(choice.shape)
    ids = np.sort(np.argsort(-masked, axis=1, kind="stable")[:, : config.num_experts_per_tok], axis=1)
    weights = np.take_along_axis(choice if variant.weigh_choice else scores, ids, axis=1)
    if config.norm_topk_prob:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return ids, weights * config.routed_scaling_factor


def changed_models(model: Model) -> Iterator[tuple[str, Model]]:
    """Each mistake that can make a difference here, with our model that makes it."""
    for mistake in MISTAKES:
        try:
            changed = mistake.change(model)
        except ValueError:  # the change contradicts another field of this config
            continue
        if changed is not None:
            yield mistake.text, changed
