"""Engines that are wrong: our model with another config, weights or switches than the checkpoint's.

What each of them gets wrong is made here by other means than `refmodel.golden.mistakes`, whose names are expected.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from refmodel.model import Model
from refmodel.rope import yarn_mscale


@dataclass(frozen=True)
class Wrong:
    """`change(model)` is the engine; `mistake` is what the check must call it; `like` whose side the check takes."""

    mistake: str
    change: Callable[[Model], Model]
    like: str = "hf"
    mtp: bool = False


class ChangedTensors:
    """A source of tensors in which those whose names have one of `endings` are replaced by `change(float32 array)`."""

    def __init__(self, source, endings: tuple[str, ...], change: Callable[[np.ndarray], np.ndarray]):
        self._source, self._endings, self._change = source, endings, change

    def is_fp8(self, name: str) -> bool:
        return self._source.is_fp8(name)

    def array(self, name: str) -> np.ndarray:
        array = self._source.array(name)
        return self._change(array.astype(np.float32)) if name.endswith(self._endings) else array


def engine(model: Model, source=None, config=None, switches=None) -> Model:
    numerics = model.numerics if switches is None else replace(model.numerics, switches=switches)
    return Model(source or model.weights.source, config or model.config, numerics, model.notices)


def config(mistake: str, **fields) -> Wrong:
    """Config fields read wrongly or not at all; a function is given the config."""

    def change(model):
        values = {key: value(model.config) if callable(value) else value for key, value in fields.items()}
        return engine(model, config=replace(model.config, **values))

    return Wrong(mistake, change)


def switch(mistake: str, like: str = "hf", mtp: bool = False, **fields) -> Wrong:
    """The other side of a legitimate difference than the one that the check takes."""
    return Wrong(mistake, lambda model: engine(model, switches=replace(model.numerics.switches, **fields)), like, mtp)


def tensors(mistake: str, *endings: str, change: Callable, mtp: bool = False) -> Wrong:
    """Tensors used wrongly: `change(array, config)` instead of those with one of `endings`."""

    def changed(model):
        source = ChangedTensors(model.weights.source, endings, lambda array: change(array, model.config))
        return engine(model, source=source)

    return Wrong(mistake, changed, mtp=mtp)


def without_mscale(config):
    return replace(config.rope_scaling, mscale=1e-12, mscale_all_dim=1e-12)


def rope_rows_scaled(array, config):
    """q_b [H (N + P), Q] or kv_a [C + P, D] with the rows that RoPE rotates times YaRN's mscale."""
    heads = config.num_attention_heads if len(array) == config.num_attention_heads * config.qk_head_dim else 1
    array = array.copy()
    array.reshape(heads, len(array) // heads, -1)[:, -config.qk_rope_head_dim :] *= yarn_mscale(40, 1.0)
    return array


def swap_halves(array, config):
    return np.concatenate(np.split(array, 2, axis=1)[::-1], axis=1)


WRONG = (
    config("rope_plain", rope_scaling=None),
    config("rope_base", rope_theta=10000.0),
    config("rope_pairing", rope_interleave=lambda config: not config.rope_interleave),
    config("mscale_missing", rope_scaling=without_mscale),
    tensors(
        "rope_amplitude", "self_attn.q_b_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", change=rope_rows_scaled
    ),
    config("factor_missing", routed_scaling_factor=1.0),
    config("factor_squared", routed_scaling_factor=lambda config: config.routed_scaling_factor**2),
    config("weights_not_normalised", norm_topk_prob=False),
    config("groups_ignored", n_group=1, topk_group=1),
    config("shared_missing", n_shared_experts=0),
    tensors(
        "down_rescaled",
        "mlp.shared_experts.down_proj.weight",
        change=lambda array, config: array / np.float32(config.routed_scaling_factor),
    ),
    tensors("bias_missing", "e_score_correction_bias", change=lambda array, config: array * 0),
    tensors(
        "bias_bfloat16",
        "e_score_correction_bias",
        change=lambda array, config: array.astype(ml_dtypes.bfloat16).astype(np.float32),
    ),
    tensors("norm_without_weight", "kv_a_layernorm.weight", change=lambda array, config: array * 0 + 1),
    tensors("norm_without_weight", "q_a_layernorm.weight", change=lambda array, config: array * 0 + 1),
    switch("inner_eps_of_config", inner_norm_eps=None),
    switch("inner_eps_fixed", like="vllm", inner_norm_eps=1e-6),
    tensors("eh_proj_order", "eh_proj.weight", change=swap_halves, mtp=True),
    switch("mtp_hidden_side", mtp=True, mtp_hidden="pre_norm"),
    switch("mtp_zero_first", mtp=True, mtp_zero_position_0=True),
    switch("mtp_zero_first", like="vllm", mtp=True, mtp_zero_position_0=False),
)


@dataclass(frozen=True)
class WrongRouting:
    """One way to get the selection of experts wrong, from the engine's own router logits."""

    mistake: str
    masked: float = -np.inf  # what stands for the choices of groups that were not selected
    best: int = 2  # how many choices of a group make its score
    weigh_choice: bool = False  # weights from the biased scores
    biased: bool = True


WRONG_ROUTING = (
    WrongRouting("group_mask_zero", masked=0.0),
    WrongRouting("group_score_max", best=1),
    WrongRouting("bias_in_weights", weigh_choice=True),
    WrongRouting("bias_missing", biased=False),
)


def routes(logits, bias, config, wrong: WrongRouting) -> tuple[np.ndarray, np.ndarray]:
    """(ids [T, K] ascending, weights [T, K]) of router logits [T, E], in float64."""
    scores = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    choice = scores + (np.asarray(bias, np.float64) if wrong.biased else 0.0)
    grouped = choice.reshape(len(choice), config.n_group, -1)  # [T, G, E / G]
    group_score = np.sort(grouped, axis=2)[:, :, -wrong.best :].sum(axis=2)
    chosen = np.argsort(-group_score, axis=1, kind="stable")[:, : config.topk_group]
    keep = np.zeros(group_score.shape, bool)
    np.put_along_axis(keep, chosen, True, axis=1)
    masked = np.where(keep[:, :, None], grouped, wrong.masked).reshape(choice.shape)
    ids = np.sort(np.argsort(-masked, axis=1, kind="stable")[:, : config.num_experts_per_tok], axis=1)
    weights = np.take_along_axis(choice if wrong.weigh_choice else scores, ids, axis=1)
    return ids, weights / weights.sum(axis=1, keepdims=True) * config.routed_scaling_factor
