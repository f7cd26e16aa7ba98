"""Experts: the gated MLP, the rows of tokens through their experts, and the one-rank exchange around them."""

from typing import NamedTuple

import numpy as np

from fp8 import BlockScaled, quantize
from refmodel.linear import DenseWeight, Fp8Weight, grouped_linear, linear
from refmodel.numerics import Numerics, round_to, widen
from refmodel.sums import add_in_order
from refmodel.threads import MULTIPLY_ADD, NUMBER, each, row_pieces

_CACHED = 1 << 15  # elements that are worked on at a time, so that passes over them stay in a core's cache
_GATHERED = 1 << 17  # elements of rows that are fetched from anywhere at a time


class Expert(NamedTuple):
    """Weights of one gated MLP: gate and up side by side in one product [D, 2 I], and down [I, D]."""

    gate_up: DenseWeight | Fp8Weight
    down: DenseWeight | Fp8Weight


class Pairs(NamedTuple):
    """(row, expert) pairs sorted by expert: `row[p]` of `x` goes through expert `expert[p]`."""

    x: np.ndarray | BlockScaled  # rows as they arrived
    row: np.ndarray  # int [P]
    expert: np.ndarray  # int [P], ascending


@np.errstate(over="ignore")  # an exponential that overflows gives the 0 that it should
def swiglu(gate, up, *, dtype=np.float64, cast_silu=None):
    """silu(gate) * up, unrounded, in `dtype`; any equal shapes [..., I].

    `cast_silu` names a dtype to which silu(gate) is rounded before it meets `up` (deepseek-ai/DeepSeek-V3
    inference/model.py, transformers, vLLM).
    """
    gate, up = np.asarray(gate), np.asarray(up)
    out = np.empty(gate.shape, np.dtype(dtype))

    def multiply(part):
        g, o = widen(gate[part], out.dtype), out[part]
        np.negative(g, out=o)
        np.exp(o, out=o)
        o += 1
        np.divide(g, o, out=o)
        if cast_silu is not None:
            o[...] = widen(round_to(o, np.dtype(cast_silu)), out.dtype)
        o *= widen(up[part], out.dtype)

    if gate.size <= _CACHED:
        multiply(...)
    else:
        each(multiply, _slabs(gate), out.size * NUMBER)
    return out


def _slabs(x):
    """Index expressions that cover a matrix a few rows at a time, so that several passes over them stay in cache."""
    if x.ndim != 2:
        return [...]
    return row_pieces(len(x), max(1, _CACHED // max(1, x.shape[1])))


def quantize_rows(x, numerics: Numerics) -> BlockScaled:
    """Activation rows [T, K] in blocks of (1, 128), by the model's recipe."""
    return quantize(x, (1, 128), numerics.recipe, numerics.scale_format)


def linear_input(x, weight, numerics: Numerics):
    """`x` as `weight` takes it: quantised rows for FP8, else the compute dtype. Already quantised rows pass through."""
    if isinstance(weight, Fp8Weight):
        return x if isinstance(x, BlockScaled) else quantize_rows(x, numerics)
    if isinstance(x, BlockScaled):
        raise ValueError("quantised rows met a weight that is not FP8: one expert input serves all experts of a layer")
    return numerics.widen(x)


def project(x, weight, numerics: Numerics):
    """One linear of the model: quantise where the weight is FP8, multiply, round to the activation dtype."""
    return numerics.store(linear(linear_input(x, weight, numerics), weight), "linear")


def activate(gate_up, numerics: Numerics):
    """(gate, up, silu(gate) * up, rounded), each [n, I], from the product of both [n, 2 I]."""
    width = gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    product = swiglu(gate, up, dtype=numerics.compute, cast_silu=numerics.silu_cast)
    return gate, up, numerics.store(product, "activation_product")


def gated_mlp(x, expert: Expert, numerics: Numerics, emit=None) -> np.ndarray:
    """down(silu(gate(x)) * up(x)) with its rounding points: [T, D] (or quantised rows) -> [T, D]."""
    gate, up, product = activate(project(x, expert.gate_up, numerics), numerics)
    if emit is not None:
        emit("gate", gate), emit("up", up), emit("product", product)
    return project(product, expert.down, numerics)  # [T, D]


def run_experts(pairs: Pairs, expert_of, numerics: Numerics, out: np.ndarray, together: int, emit=None) -> np.ndarray:
    """Every pair through its expert, into `out` [P, D] in the order of the pairs; returns `out`.

    `expert_of(e)` is the Expert of id e; experts without rows are not asked for. Experts that follow each other and
    have up to `together` rows share what is done row by row (gathering, quantising, activation); each multiplies its
    own rows. `emit(name, array, start, stop)` gets the tensors in between, of pairs start .. stop - 1.
    """
    direct = out.dtype == numerics.compute  # nothing to round

    def run(spans):
        first, last = spans[0][1], spans[-1][2]
        experts = [expert_of(e) for e, _, _ in spans]
        cuts = [slice(start - first, stop - first) for _, start, stop in spans]
        x = linear_input(take_rows(pairs.x, pairs.row[first:last]), experts[0].gate_up, numerics)
        gate_up = numerics.store(grouped_linear(x, [expert.gate_up for expert in experts], cuts), "linear")  # [n, 2 I]
        gate, up, product = activate(gate_up, numerics)
        if emit is not None:
            for name, array in (("gate", gate), ("up", up), ("product", product)):
                emit(name, array, first, last)
        x = linear_input(product, experts[0].down, numerics)
        down = [expert.down for expert in experts]
        if direct:
            grouped_linear(x, down, cuts, out[first:last])
        else:
            out[first:last] = numerics.store(grouped_linear(x, down, cuts), "expert_row")

    seconds = out.size * out.shape[1] * MULTIPLY_ADD  # at least: an expert has more weights than D * D
    each(run, _neighbours(pairs.expert, together), 0 if emit is not None else seconds)  # a recording wants its order
    return out


def _neighbours(expert, together):
    """Lists of (expert, start, stop) of sorted pairs, of neighbours that have up to `together` rows, or of one."""
    counts = np.bincount(expert) if len(expert) else expert
    ids, start, spans = counts.nonzero()[0], 0, []
    for e, stop in zip(ids.tolist(), counts[ids].cumsum().tolist()):
        if spans and stop - spans[0][1] > together:
            yield spans
            spans = []
        spans.append((e, start, stop))
        start = stop
    if spans:
        yield spans


def run_pairs(pairs: Pairs, apply, out: np.ndarray) -> np.ndarray:
    """`run_experts` for any function: `apply(e, rows)` is expert e on rows [n, D] (an array, or quantised rows)."""
    for ((e, start, stop),) in _neighbours(pairs.expert, 0):
        out[start:stop] = apply(e, take_rows(pairs.x, pairs.row[start:stop]))
    return out


def take_rows(x, index):
    """Rows of an array or of quantised rows."""
    return x.rows(index) if isinstance(x, BlockScaled) else x.take(index, axis=0)


def weighted_sum(rows, index, topk_weights, numerics: Numerics) -> np.ndarray:
    """The one-reduction combine: sum over slots in top-k order of weight * row, then one rounding.

    rows [P, D] expert outputs; index int [T, K] names the row of each slot, -1 for a slot without an expert;
    topk_weights [T, K]; result [T, D]. Product and running sum are each rounded to the wide dtype (float32; float64
    in float64 numerics), as DeepEP's low-latency combine does on the token's own rank
    (csrc/kernels/legacy/internode_ll.cu).
    """
    (T, K), D = index.shape, rows.shape[1]
    if not len(rows):
        return np.zeros((T, D), numerics.activation)
    complete = np.minimum.reduce(index, axis=None, initial=0) == 0

    def combine(part):
        products = widen(rows.take(index[part], axis=0, mode="clip"), numerics.wide)  # [t, K, D]
        products *= topk_weights[part][..., None]
        if not complete:
            products[index[part] < 0] = 0
        return numerics.store(add_in_order(products), "combined_row")

    size = max(1, _GATHERED // max(1, K * D))
    if size >= T:
        return combine(slice(None))
    out = np.empty((T, D), numerics.activation)

    def place(part):
        out[part] = combine(part)

    each(place, row_pieces(T, size), K * out.size * NUMBER)
    return out


class LocalExchange:
    """The exchange of a model that is alone: nothing moves. Its stages are those of `parallel.dispatch.exchange`."""

    def __init__(self, numerics: Numerics):
        self._numerics = numerics

    def dispatch_send(self, x, topk_idx, topk_weights):
        """Keep the expert input (array [T, D] or quantised rows) and the routing [T, K]."""
        self._x, self._topk_idx, self._topk_weights = x, topk_idx, topk_weights

    def dispatch_forward(self):
        """No hop in between."""

    def dispatch_recv(self) -> Pairs:
        """All (token, slot) pairs with an expert, by expert and then by token."""
        flat = self._topk_idx.reshape(-1)
        order = flat.astype(np.int16).argsort(kind="stable")  # radix sort: ids are small
        expert = flat[order]
        first = expert.searchsorted(0)  # slots without an expert come before
        self._slots = order[first:]
        # flat slots are token * K + slot
        return Pairs(self._x, self._slots // self._topk_idx.shape[1], expert[first:])

    def pair_slots(self) -> np.ndarray:
        """token * K + slot of each pair: its row in a recorded tensor [T * K, ...]."""
        return self._slots

    def logical_expert(self, e: int) -> int:
        """One rank without redundancy: slots are the logical experts."""
        return e

    def combine_send(self, rows):
        """Keep the pairs' rows [P, D], and which of them each slot gets."""
        self._rows = rows
        index = np.full(self._topk_idx.size, -1, np.int64)
        index[self._slots] = np.arange(len(rows))
        self._index = index.reshape(self._topk_idx.shape)

    def combine_forward(self):
        """No hop in between."""

    def combine_recv(self) -> np.ndarray:
        """Combined rows [T, D]."""
        return weighted_sum(self._rows, self._index, self._topk_weights, self._numerics)


def moe(x, routing, experts, numerics: Numerics | None = None) -> np.ndarray:
    """The routed part of one MoE layer on one rank: y[t] = sum over slots j of topk_weights[t, j] * f_j(x[t]).

    x [T, D]; `routing` as `route` returns it, id -1 selects nothing; `experts[e]` is any callable on rows [n, D].
    Rounded as `numerics` says (default: float64, nothing). Returns [T, D] in its activation dtype.
    """
    numerics = numerics or Numerics("float64")
    exchange = LocalExchange(numerics)
    exchange.dispatch_send(np.asarray(x), routing.topk_idx, routing.topk_weights)
    pairs = exchange.dispatch_recv()
    out = np.empty((len(pairs.row), x.shape[1]), numerics.activation)
    run_pairs(pairs, lambda e, rows: numerics.store(np.asarray(experts[e](rows)), "expert_row"), out)
    exchange.combine_send(out)
    return exchange.combine_recv()
