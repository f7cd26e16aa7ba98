"""Operators of the feed-forward part: router, experts, combine. Keywords are mistakes (see `mistakes`)."""

import ml_dtypes
import numpy as np

from fp8 import BlockScaled, decode
from refmodel.experts import Expert, Pairs, linear_input, project, run_pairs, swiglu, weighted_sum
from refmodel.golden.norm_operators import add
from refmodel.linear import Fp8Weight, linear
from refmodel.numerics import round_to
from refmodel.router import route


def router_logits(context, x, *, layer, narrow=False):
    """[T, E], in the wide dtype."""
    numerics = context.numerics
    out = linear(numerics.widen(x), context.weights.layer(layer).router)
    if narrow or numerics.switches.router_dtype == "activation":
        out = round_to(out, np.dtype(ml_dtypes.bfloat16)) if narrow else numerics.store(out, "linear")
        out = numerics.widen(out)
    return (numerics.store(out, "router_logits"),)


def router(context, logits, *, layer, bias=None, weights=None, fill=None, power=1, **settings):
    """(topk_idx [T, K], topk_weights [T, K], margin [T])."""
    config = context.config
    on_weights = context.numerics.switches.routed_scale_on == "weights"
    factor = config.routed_scaling_factor**power if on_weights else 1.0
    given = context.weights.layer(layer).correction_bias
    correction = given
    if bias is not None and given is not None:
        changed = {"none": 0 * given, "negative": -given, "bfloat16": round_to(given, np.dtype(ml_dtypes.bfloat16))}
        correction = changed[bias].astype(np.float64)
    keywords = dict(
        top_k=config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        routed_scaling_factor=factor,
        norm_topk_prob=config.norm_topk_prob,
        scoring_func=config.scoring_func,
        topk_method=config.topk_method,
        norm_eps=context.numerics.switches.router_norm_eps,
    )
    keywords |= settings
    if keywords["topk_method"] == "group_max":  # the score of a group is its best expert
        keywords["topk_method"] = "group_limited_greedy"
    if fill == "zero":
        return _zero_filled(logits, correction, keywords, context)
    idx, w, margin = route(logits, correction, **keywords)
    if weights is not None:
        w = _wrong_weights(np.asarray(logits, np.float64), given, idx, weights, keywords).astype(w.dtype)
    return idx, w, margin


def _wrong_weights(logits, bias, idx, kind, keywords):
    scores = 1 / (1 + np.exp(-logits))
    if kind == "biased" and bias is not None:
        scores = scores + bias
    if kind == "softmax":
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    chosen = np.take_along_axis(scores, idx, axis=1)
    total = scores.sum(axis=1, keepdims=True) if kind == "over_all" else chosen.sum(axis=1, keepdims=True)
    chosen = np.sort(chosen, axis=1) if kind == "ascending" else chosen
    return chosen / total * keywords["routed_scaling_factor"]


def _zero_filled(logits, bias, keywords, context):
    """Experts of excluded groups get the score 0 instead of minus infinity (vllm-project/vllm#13474)."""
    E, G, K = logits.shape[1], keywords["n_group"], keywords["top_k"]
    scores = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    choice = scores + (0 if bias is None else bias)
    grouped = choice.reshape(len(choice), G, E // G)
    best = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    kept = np.argsort(-best, axis=1, kind="stable")[:, : keywords["topk_group"]]
    mask = np.zeros((len(choice), G), bool)
    np.put_along_axis(mask, kept, True, axis=1)
    masked = np.where(np.repeat(mask, E // G, axis=1), choice, 0.0)
    idx = np.argsort(-masked, axis=1, kind="stable")[:, :K]
    w = np.take_along_axis(scores, idx, axis=1)
    w = w / w.sum(axis=1, keepdims=True) * keywords["routed_scaling_factor"]
    wide = np.float64 if logits.dtype == np.float64 else np.float32
    return idx.astype(np.int64), w.astype(wide), np.zeros(len(idx))


def quantize_rows(context, x, *, scale=None, codes=None):
    """(codes [T, D], scale [T, D / 128]): the expert input, quantised once."""
    out = linear_input(x, Fp8Weight(np.zeros((x.shape[1], 0)), np.zeros((0, 0))), context.numerics)
    if scale == "row":  # one scale per row instead of one per 128
        s = np.repeat(out.scale.max(axis=1, keepdims=True), out.scale.shape[1], axis=1)
        return _requantised(context, x, s)
    if scale == "power_of_two":  # rounded up after the codes were made with the exact scale
        return out.codes, np.exp2(np.ceil(np.log2(out.scale))).astype(np.float32)
    if scale == "inverse":
        return out.codes, (1 / out.scale).astype(np.float32)
    if scale == "shifted":  # the scales of the block beside
        return out.codes, np.roll(out.scale, 1, axis=1)
    if codes == "fnuz":  # the bits of the other E4M3, whose values are half as large
        fnuz = round_to_fnuz(decode(out.codes, np.float64))
        return fnuz.view(np.uint8).view(out.codes.dtype), out.scale
    return out.codes, out.scale


def round_to_fnuz(values: np.ndarray) -> np.ndarray:
    """float64 -> E4M3 FNUZ, whose largest value is 240."""
    return np.clip(values, -240, 240).astype(np.float32).astype(ml_dtypes.float8_e4m3fnuz)


def _requantised(context, x, scale):
    wide = np.asarray(context.numerics.widen(x), np.float64)
    spread = np.repeat(scale, 128, axis=1)[:, : wide.shape[1]].astype(np.float64)
    codes = np.clip(wide / spread, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return codes, scale.astype(np.float32)


def _expert_input(inputs):
    return BlockScaled(inputs[0], inputs[1], (1, 128)) if len(inputs) == 2 else inputs[0]


def gate_up(context, x, *, layer, weight, swapped=False):
    """(gate [T, I], up [T, I]) of a dense or shared MLP."""
    out = project(x, getattr(context.weights.layer(layer), weight).gate_up, context.numerics)
    half = out.shape[1] // 2
    gate, up = out[:, :half], out[:, half:]
    return (up, gate) if swapped else (gate, up)


def product(context, gate, up, *, activation="silu"):
    """silu(gate) * up."""
    numerics = context.numerics
    g, u = numerics.widen(gate), numerics.widen(up)
    changed = {
        "none": lambda: g * u,
        "sigmoid": lambda: u / (1 + np.exp(-g)),
        "on_up": lambda: swiglu(u, g, dtype=numerics.compute),
        "gelu": lambda: 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u,
        "relu": lambda: np.maximum(g, 0) * u,
        "silu": lambda: swiglu(gate, up, dtype=numerics.compute, cast_silu=numerics.silu_cast),
    }
    return (numerics.store(changed[activation](), "activation_product"),)


def down(context, x, *, layer, weight, factor=1.0):
    """The second product of a dense or shared MLP."""
    out = project(x, getattr(context.weights.layer(layer), weight).down, context.numerics)
    if factor != 1.0:
        out = context.numerics.store(context.numerics.widen(out) * factor, "linear")
    return (out,)


def _pairs(idx: np.ndarray, x) -> tuple[Pairs, np.ndarray]:
    """Pairs by expert, and the slot token * K + k of each."""
    flat = idx.reshape(-1)
    order = np.argsort(flat, kind="stable")
    order = order[np.count_nonzero(flat < 0) :]
    return Pairs(x, order // idx.shape[1], flat[order]), order


def _changed_experts(idx: np.ndarray, experts, E: int) -> np.ndarray:
    """Ids after a mistake: `local` takes ids within one of 8 ranks for global ones, `next` is off by one, `strided`
    deals experts to ranks in turn where they lie in blocks."""
    ranks = 8 if E % 8 == 0 else 2
    return {
        None: idx,
        "local": idx % (E // ranks),
        "next": (idx + 1) % E,
        "strided": idx % ranks * (E // ranks) + idx // ranks,
    }[experts]


def _run_experts(context, idx, x, layer, apply, width: int) -> np.ndarray:
    """[T * K, width] by slot; slots without an expert stay 0."""
    pairs, slots = _pairs(idx, x)
    experts = context.weights.layer(layer).experts
    rows = np.empty((len(pairs.row), width), context.numerics.activation)
    run_pairs(pairs, lambda e, part: apply(experts[e], part), rows)
    out = np.zeros((idx.size, width), rows.dtype)
    out[slots] = rows
    return out


def expert_gate_up(context, idx, *inputs, layer, swapped=False, experts=None, scales_ignored=False):
    """(gate, up), each [T * K, I]: row token * K + k is expert topk_idx[token, k] on the token."""
    width, numerics = context.config.moe_intermediate_size, context.numerics
    idx = _changed_experts(np.asarray(idx), experts, context.config.n_routed_experts)
    if scales_ignored and len(inputs) == 2:
        inputs = (inputs[0], np.ones_like(inputs[1]))

    def apply(expert: Expert, rows):
        return project(rows, expert.gate_up, numerics)

    out = _run_experts(context, idx, _expert_input(inputs), layer, apply, 2 * width)
    gate, up = out[:, :width], out[:, width:]
    return (up, gate) if swapped else (gate, up)


def expert_down(context, idx, x, *, layer, experts=None):
    """[T * K, D]: the second product of each expert, on its own rows."""
    numerics, K = context.numerics, idx.shape[1]
    flat = _changed_experts(np.asarray(idx), experts, context.config.n_routed_experts).reshape(-1)
    ids = flat.reshape(-1, 1)  # each row of x is a token of its own with one slot

    def apply(expert: Expert, rows):
        return numerics.store(project(rows, expert.down, numerics), "expert_row")

    out = _run_experts(context, ids, x, layer, apply, context.config.hidden_size)
    return (out.reshape(len(idx) * K, -1),)


def combine(context, idx, weights, rows, *, layer, weighting=None, slots=None):
    """The weighted sum over the slots of each token [T, D]."""
    T, K = idx.shape
    slots_of = np.where(np.asarray(idx) >= 0, np.arange(T * K).reshape(T, K), -1)  # rows are in slot order
    w = np.asarray(weights)
    w = {
        None: w,
        "none": np.ones_like(w),
        "twice": w * w,
        "rescaled": w * w.dtype.type(context.config.routed_scaling_factor),
        "unscaled": w / w.dtype.type(context.config.routed_scaling_factor),
        "by_id": np.take_along_axis(w, np.argsort(idx, axis=1, kind="stable"), axis=1),
        "narrow": round_to(w, np.dtype(ml_dtypes.bfloat16)).astype(w.dtype),
    }[weighting]
    if slots == "last_missing":
        w = np.where(np.arange(K) == K - 1, 0, w).astype(w.dtype)
    if slots == "first_twice":
        w = np.where(np.arange(K) == 0, 2 * w, w).astype(w.dtype)
    return (weighted_sum(rows, slots_of, w, context.numerics),)


def merge(context, routed, shared=None, *, first=1.0, second=1.0):
    """routed + shared, where there are shared experts; the routed part first takes the factor that is not in the
    weights."""
    numerics = context.numerics
    if numerics.switches.routed_scale_on == "output":
        scaled = numerics.widen(routed) * numerics.compute.type(context.config.routed_scaling_factor)
        routed = numerics.store(scaled, "combined_row")
    if shared is None:
        return (routed,)
    return add(context, routed, shared, point="moe_output", first=first, second=second)
