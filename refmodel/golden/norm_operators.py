"""Operators that every layer has: norms, additions, the ends of the model. Keywords are mistakes (see `mistakes`)."""

import ml_dtypes
import numpy as np

from refmodel.linear import linear
from refmodel.norm import rms_norm
from refmodel.numerics import round_to

_INNER = ("q_a_norm", "kv_a_norm")


def embed(context, *, scale=1.0, shift=0):
    """Rows of the embedding table."""
    ids = np.roll(context.token_ids, shift) if shift else context.token_ids
    rows = context.weights.embedding[ids]
    if scale != 1.0:
        rows = context.numerics.widen(rows) * (np.sqrt(rows.shape[1]) if scale == "sqrt" else scale)
    return (context.numerics.store(rows, "embedding"),)


def norm(context, x, *, layer, weight, eps=None, weighted=1, plus_one=False, centred=False, skipped=False, twice=False):
    """RMSNorm with the weight of that name of the layer, or the model's own; eps "config" is its rms_norm_eps."""
    numerics = context.numerics
    owner = context.weights if layer is None else context.weights.layer(layer)
    if skipped:
        return (numerics.store(x, "norm"),)
    eps = context.config.rms_norm_eps if eps == "config" else eps
    w = numerics.widen(getattr(owner, weight))
    w = np.ones_like(w) if weighted == 0 else w**weighted
    w = w + 1 if plus_one else w
    inner = numerics.switches.inner_norm_eps if weight in _INNER else None
    usual = context.config.rms_norm_eps if inner is None else inner
    for _ in range(2 if twice else 1):
        wide = numerics.widen(x)
        if centred:
            wide = wide - wide.mean(axis=-1, keepdims=True)
        y = rms_norm(
            wide, w, usual if eps is None else eps, dtype=numerics.compute, cast_before_weight=numerics.norm_cast
        )
        x = numerics.store(y, "norm")
    return (x,)


def stream_norm(context, *stream, layer, weight, **mistake):
    """RMSNorm of the residual stream: of the stored sum, or (`norm_input = "sum"`) of what was added, unrounded."""
    x = stream[0] if len(stream) == 1 else context.numerics.widen(stream[0]) + context.numerics.widen(stream[1])
    return norm(context, x, layer=layer, weight=weight, **mistake)


def hidden_norm(context, hidden, *, layer, other_side=False, **mistake):
    """The norm of the main model's state on its way into the MTP layer. `other_side`: of the state on the other side
    of the final norm, which differs from it by that norm's weight, because a norm takes out any factor."""
    numerics = context.numerics
    if other_side and numerics.switches.mtp_hidden == "post_norm":
        w = numerics.widen(context.weights.norm)
        hidden = np.divide(numerics.widen(hidden), w, out=np.zeros(hidden.shape, w.dtype), where=w != 0)
    elif other_side:
        (hidden,) = norm(context, hidden, layer=None, weight="norm")
    return norm(context, hidden, layer=layer, weight="hnorm", **mistake)


def add(context, a, b, *, point, first=1.0, second=1.0):
    """first * a + second * b, rounded once; both factors are 1 where it is right."""
    numerics = context.numerics
    wide = numerics.compute.type
    return (numerics.store(wide(first) * numerics.widen(a) + wide(second) * numerics.widen(b), point),)


def logits(context, x, *, tied=False, cap=None, narrow=False):
    """The language-model head."""
    numerics, weights = context.numerics, context.weights
    out = linear(numerics.widen(x), weights.head)
    if tied:
        out = numerics.widen(x) @ numerics.widen(weights.embedding).T
    if cap is not None:
        out = np.tanh(out / cap) * cap
    if narrow:
        out = numerics.widen(round_to(out, np.dtype(ml_dtypes.bfloat16)))
    return (numerics.store(out, "logits"),)


def mtp_join(context, *inputs, layer, part, swapped=False, unshifted=False, zero_first=False):
    """The MTP layer's entry: the norm of the next token's embedding, and the join with the main model's state."""
    numerics, weights = context.numerics, context.weights.layer(layer)
    if part == "enorm":
        ids = np.roll(context.token_ids, 1) if unshifted else context.token_ids
        rows = numerics.store(context.weights.embedding[ids], "embedding")
        first = numerics.switches.mtp_zero_position_0 != zero_first
        if first:
            rows = np.where((context.slots() == 0)[:, None], rows.dtype.type(0), rows)
        return norm(context, rows, layer=layer, weight="enorm")
    e, h = reversed(inputs) if swapped else inputs
    joined = numerics.widen(np.concatenate([e, h], axis=1))  # [T, 2 D]
    return (numerics.store(linear(joined, weights.eh_proj), "linear"),)
