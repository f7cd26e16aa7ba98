"""DeepEP's low-latency calls in their own shapes, for a whole cluster at once: lists with one entry per rank.

Source: DeepEP deep_ep/buffers/legacy.py (low_latency_dispatch, low_latency_combine) and
csrc/kernels/legacy/internode_ll.cu.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp8 import Recipe, pack_ue8m0, quantize
from parallel.dispatch import logfmt
from parallel.dispatch.elastic_rows import check_capacity
from parallel.dispatch.layout import check_topk_idx, experts_per_rank
from parallel.dispatch.low_latency import Messages, arrival_order, received_experts
from parallel.dispatch.payload import payload_arrays
from parallel.network import Network, Tag
from parallel.topology import Topology

CAST = Recipe(
    "deepep_low_latency",
    "DeepEP csrc/kernels/legacy/utils.cuh calculate_fp8_scales",
    amax_floor=1e-4,
    scale="amax * (1 / 448)",
    apply="x * (448 / amax)",
    power_of_two="bits",
    scale_formats=("float32", "ue8m0"),
)
_FULL = 1 << 32


class LowLatencyHandle(NamedTuple):
    """What combine needs of one rank's dispatch; DeepEP's tuple, in its order."""

    src_info: np.ndarray  # int32 [e, R * max] the token's index on its rank; defined where packed_recv_x is
    layout_range: np.ndarray  # int64 [e, R] low 32 bits: rows from the source, high 32 bits: where they begin
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int


class LowLatencyDispatch(NamedTuple):
    """What one rank received. Rows from `packed_recv_count[expert]` on are undefined."""

    packed_recv_x: Any  # [e, R * max, H] bfloat16, or (E4M3 codes, scales float32 [e, R * max, H / 128])
    packed_recv_count: np.ndarray  # int32 [e]
    handle: LowLatencyHandle


def low_latency_dispatch(
    x: list,
    topk_idx: list,
    num_max_dispatch_tokens_per_rank: int,
    num_experts: int,
    topology: Topology,
    use_fp8: bool = True,
    round_scale: bool = False,
    use_ue8m0: bool = False,
    arrival_seed: int | None = None,
    fill: float | None = None,
    cumulative_local_expert_recv_stats: list | None = None,
    network: Network | None = None,
) -> list[LowLatencyDispatch]:
    """Send every token to each of its experts.

    `x` [T, H] and `topk_idx` [T, K] (-1: none) per rank. With `use_fp8` rows are cast on the way: amax at least 1e-4,
    scale amax * (1/448) in float32, or a power of two (`round_scale`); `use_ue8m0` packs four such exponents to an
    int32 on the receiver (they travel as float32). `arrival_seed` picks one of the legal orders, see
    LowLatencyExchange. `fill` is put into undefined rows (NaN shows who reads them); None leaves them 0.
    `cumulative_local_expert_recv_stats` int32 [e] per rank is added to in place.
    Raises CapacityError where a rank has more tokens than `num_max_dispatch_tokens_per_rank`, ValueError for
    `use_ue8m0` without `round_scale`.
    """
    if use_ue8m0 and not (use_fp8 and round_scale):
        raise ValueError("use_ue8m0 packs power-of-two scales: it needs use_fp8=True and round_scale=True")
    local = experts_per_rank(num_experts, topology)
    network, tag = network or Network(topology), Tag("dispatch_send", hop="low_latency_dispatch")
    for rank, (rows, ids) in enumerate(zip(x, topk_idx)):
        check_capacity(f"rank {rank}", len(rows), num_max_dispatch_tokens_per_rank)
        messages = Messages.of(check_topk_idx(ids, num_experts, topology), num_experts, topology.num_ranks)
        payload = quantize(rows, recipe=CAST, scale_format="ue8m0" if round_scale else "float32") if use_fp8 else rows
        arrays = messages.send(payload_arrays(payload))
        network.send_rows(rank, arrays, messages.counts.sum(axis=1), tag, control=messages.counts)
    results = []
    for rank in range(topology.num_ranks):
        received = network.receive(rank, tag)
        expert = received_experts(received)
        seed = None if arrival_seed is None else [arrival_seed, rank]
        order = arrival_order(expert, received.counts, local, seed)
        results.append(_pack(received, expert, order, num_max_dispatch_tokens_per_rank, num_experts, use_ue8m0, fill))
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats[rank] += results[-1].packed_recv_count
    return results


def low_latency_combine(
    x: list,
    topk_idx: list,
    topk_weights: list,
    handles: list[LowLatencyHandle],
    topology: Topology,
    zero_copy: bool = False,
    use_logfmt: bool = False,
    network: Network | None = None,
) -> list[np.ndarray]:
    """Send the experts' rows `x` [e, R * max, H] back and add them up, weighted, in top-k order: [T, H] per rank.

    `zero_copy` says that the rows were written into `get_next_low_latency_combine_buffer`: what crosses is the same.
    Rows beyond the counts are never read. Raises ValueError for `zero_copy` with `use_logfmt`, as DeepEP does.
    """
    if zero_copy and use_logfmt:
        raise ValueError("zero_copy sends the buffer as it is, so that use_logfmt has nowhere to encode: choose one")
    network, tag = network or Network(topology), Tag("combine_send", hop="low_latency_combine")
    for rank, (rows, handle) in enumerate(zip(x, handles)):
        slots, splits = _by_source(handle)
        back, lengths = np.asarray(rows).reshape(-1, handle.hidden)[slots], None
        if use_logfmt:
            back, length = logfmt.encode(back)
            lengths = {"x": length}
        flags = np.ones((topology.num_ranks, handle.layout_range.shape[0]), np.int32)
        network.send_rows(rank, {"x": (back, "payload")}, splits, tag, control=flags, lengths=lengths)
    results = []
    for rank, (ids, weights) in enumerate(zip(topk_idx, topk_weights)):
        received, handle = network.receive(rank, tag), handles[rank]
        rows = received.arrays["x"]
        if use_logfmt:
            rows = logfmt.decode(logfmt.Encoded(rows, received.lengths["x"]), handle.hidden)
        messages = Messages.of(np.asarray(ids), handle.num_experts, topology.num_ranks)
        results.append(messages.reduce(rows, np.asarray(weights), np.asarray(x[rank]).dtype))
    return results


def get_next_low_latency_combine_buffer(handle: LowLatencyHandle, topology: Topology) -> np.ndarray:
    """The bfloat16 buffer [e, R * max, H] that a zero-copy combine sends from."""
    rows = topology.num_ranks * handle.num_max_dispatch_tokens_per_rank
    return np.zeros((handle.layout_range.shape[0], rows, handle.hidden), ml_dtypes.bfloat16)


def _pack(received, expert, order, capacity, num_experts, use_ue8m0, fill) -> LowLatencyDispatch:
    """Put received rows, in arrival order by expert, into the buffers [e, R * max, ...]."""
    sources = len(received.counts)
    local, room = received.control.shape[1], sources * capacity
    counts = np.bincount(expert, minlength=local)
    sorted_expert = expert[order]
    place = np.arange(len(order)) - (np.cumsum(counts) - counts)[sorted_expert]

    def packed(array, empty=None):
        out = np.zeros((local, room, *array.shape[1:]), array.dtype)
        if empty is not None:
            out[...] = empty
        out[sorted_expert, place] = array[order]
        return out

    arrays = received.arrays
    source = np.repeat(np.arange(sources), received.counts)[order]
    begin = np.full((local, sources), room)
    np.minimum.at(begin, (sorted_expert, source), place)
    layout_range = np.where(received.control.T > 0, begin, 0) * _FULL + received.control.T
    handle = LowLatencyHandle(
        packed(arrays["header"][:, 0], None if fill is None else -1),
        layout_range,
        capacity,
        next(arrays[name].shape[1] for name in ("codes", "x") if name in arrays),
        num_experts,
    )
    if "codes" not in arrays:
        return LowLatencyDispatch(packed(arrays["x"], fill), counts.astype(np.int32), handle)
    scale = packed(arrays["scale"], fill)
    codes = packed(arrays["codes"], fill)
    if use_ue8m0:
        defined = np.arange(room) < counts[:, None]
        scale = pack_ue8m0(np.where(defined[..., None], scale, np.float32(1)))
    return LowLatencyDispatch((codes, scale), counts.astype(np.int32), handle)


def _by_source(handle: LowLatencyHandle) -> tuple[np.ndarray, np.ndarray]:
    """(rows of the flat buffer by (source, expert, token), rows per source)."""
    counts = handle.layout_range % _FULL  # [e, R]
    begin = handle.layout_range // _FULL
    local, sources = counts.shape
    flat = counts.T.reshape(-1)  # by (source, expert)
    source, expert = np.divmod(np.repeat(np.arange(local * sources), flat), local)
    place = np.arange(int(flat.sum())) - np.repeat(np.cumsum(flat) - flat, flat) + begin[expert, source]
    order = np.lexsort((handle.src_info[expert, place], expert, source))
    return (expert * handle.src_info.shape[1] + place)[order], counts.sum(axis=0)
