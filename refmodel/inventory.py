"""How many parameters and bytes a model has, and how many one token uses; each figure says what it includes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from refmodel.checkpoint import Checkpoint, StoredSize
from refmodel.checkpoint_checks import FP8, block_size
from refmodel.config import ModelConfig
from refmodel.names import layer_of
from refmodel.schema import needed_tensors

PARTS = (
    "embedding",
    "attention",
    "dense_mlp",
    "router",
    "shared_experts",
    "routed_experts",
    "eh_proj",
    "norms",
    "head",
)


class Amount(NamedTuple):
    """Parameters (scales are not parameters) and bytes (scales included)."""

    parameters: int | Fraction = 0
    nbytes: int | Fraction = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.parameters + other.parameters, self.nbytes + other.nbytes)

    def times(self, share: Fraction) -> "Amount":
        """That share of both."""
        return Amount(self.parameters * share, self.nbytes * share)


@dataclass(frozen=True)
class Inventory:
    """What each part of a model holds: `main` the model itself, `mtp` its MTP layers; part name -> Amount.

    Router counts include the correction bias. `mtp` holds the copies of embedding and head that a file may carry; what
    is unique to the MTP layers leaves them out (DeepSeek-V3 README_WEIGHTS.md).
    """

    config: ModelConfig
    main: dict[str, Amount]
    mtp: dict[str, Amount]

    @property
    def total(self) -> Amount:
        """The main model: embedding and head included, MTP layers not."""
        return sum(self.main.values(), Amount())

    @property
    def stored(self) -> Amount:
        """Everything in the files that belongs to the model, MTP layers and their copies included."""
        return self.total + sum(self.mtp.values(), Amount())

    @property
    def mtp_unique(self) -> Amount:
        """The MTP layers without their copies of embedding and head."""
        return sum((amount for part, amount in self.mtp.items() if part not in ("embedding", "head")), Amount())

    def activated(self, embedding: bool = False, head: bool = True) -> Amount:
        """What one token of the main model uses: all but the experts that it does not choose.

        The embedding is a lookup of one row, so that it is left out unless asked for.
        """
        amount = self._used(self.main)
        if embedding:
            amount += self.main["embedding"]
        if head:
            amount += self.main["embedding" if self.config.tie_word_embeddings else "head"]
        return amount

    def mtp_activated(self) -> Amount:
        """What one drafted token uses of the MTP layers, shared embedding and head left out."""
        return self._used(self.mtp)

    def _used(self, parts: dict[str, Amount]) -> Amount:
        chosen = Fraction(self.config.num_experts_per_tok, self.config.n_routed_experts)
        used = (
            amount.times(chosen) if part == "routed_experts" else amount
            for part, amount in parts.items()
            if part not in ("embedding", "head")
        )
        total = sum(used, Amount())
        return Amount(int(total.parameters), int(total.nbytes))


def take_inventory(checkpoint: Checkpoint) -> Inventory:
    """What a checkpoint holds, from its headers alone."""
    return _collect(checkpoint.config, checkpoint.stored_sizes())


def expected_inventory(config: ModelConfig) -> Inventory:
    """What a checkpoint of this config holds if it is stored as the family does.

    That is FP8 with float32 scales for attention, MLPs and experts where `quantization_config` is set, float32
    correction biases, `torch_dtype` for the rest; without copies of embedding and head in the MTP layers.
    """
    return _collect(config, _expected_sizes(config))


def _expected_sizes(config: ModelConfig) -> Iterable[StoredSize]:
    width = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[config.torch_dtype]
    rows, columns = block_size(config)
    for name, need in needed_tensors(config):
        count = math.prod(need.shape)
        if need.quantized and config.quantization_config is not None:
            scales = -(-need.shape[0] // rows) * -(-need.shape[1] // columns)
            yield StoredSize(name, FP8, need.shape, count, 4 * scales)
        else:
            bytes_each = 4 if name.endswith("e_score_correction_bias") else width
            yield StoredSize(name, "", need.shape, count * bytes_each, 0)


def _collect(config: ModelConfig, sizes: Iterable[StoredSize]) -> Inventory:
    counts = {False: dict.fromkeys(PARTS, (0, 0)), True: dict.fromkeys(PARTS, (0, 0))}
    for name, _, shape, nbytes, scale_nbytes in sizes:
        layer = layer_of(name)
        parts = counts[layer is not None and layer >= config.num_hidden_layers]
        part = part_of(name)
        parameters, total = parts[part]
        parts[part] = (parameters + math.prod(shape), total + nbytes + scale_nbytes)
    main, mtp = ({part: Amount(*pair) for part, pair in parts.items()} for parts in counts.values())
    return Inventory(config, main, mtp)


def part_of(name: str) -> str:
    """The part of the model that a canonical name belongs to, one of PARTS."""
    if ".mlp.experts." in name:
        return "routed_experts"
    if ".mlp.shared_experts." in name:
        return "shared_experts"
    if ".mlp.gate." in name:
        return "router"
    if ".mlp." in name:
        return "dense_mlp"
    if ".self_attn." in name:
        return "attention"
    if name.endswith("embed_tokens.weight"):
        return "embedding"
    if name.endswith(("lm_head.weight", "shared_head.head.weight")):
        return "head"
    return "eh_proj" if name.endswith("eh_proj.weight") else "norms"


def kv_bytes_per_token(config: ModelConfig, itemsize: int = 2, mtp: bool = False) -> int:
    """Bytes of latent cache per token: (kv_lora_rank + qk_rope_head_dim) values in each layer.

    `itemsize` 2 is bfloat16; `mtp` counts the MTP layers' own cache too.
    """
    layers = config.num_layers if mtp else config.num_hidden_layers
    return (config.kv_lora_rank + config.qk_rope_head_dim) * itemsize * layers
