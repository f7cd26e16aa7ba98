"""DeepEP V2's elastic dispatch in its own shapes, for a whole cluster at once: lists with one entry per rank.

Source: DeepEP deep_ep/utils/refs.py (dispatch) and deep_ep/include/deep_ep/impls/dispatch_copy_epilogue.cuh.
"""

from typing import Any, NamedTuple

import numpy as np

from parallel.dispatch.dialects import make_exchange
from parallel.dispatch.layout import experts_per_rank
from parallel.dispatch.payload import join_like
from parallel.network import Network
from parallel.topology import Topology


class ElasticDispatch(NamedTuple):
    """What one rank received, by (source rank, token) unless an `arrival_seed` picked another order."""

    recv_x: Any  # [M, H], or (codes, scales) as it was sent
    recv_topk_idx: np.ndarray  # [M, K] local ids, -1 elsewhere, in the dtype that was sent
    recv_topk_weights: np.ndarray  # [M, K] as sent: weights of other ranks' experts are kept
    recv_src_token_idx: np.ndarray  # int32 [M] src_rank * num_max_tokens_per_rank + token
    num_recv_tokens_per_rank: np.ndarray  # int32 [R] rows from each rank


class ElasticExpanded(NamedTuple):
    """Received rows copied to each of their experts: groups by local expert, each padded to the alignment."""

    recv_x: Any  # [sum of aligned counts, H] or (codes, scales); padding rows are undefined
    recv_topk_weights: np.ndarray  # float [sum of aligned counts]
    recv_src_metadata: (
        np.ndarray
    )  # int32 [M, 2 + K]: source token, source rank * K + last slot here, row per slot or -1
    psum_num_recv_tokens_per_expert: np.ndarray  # int32 [e] end of each group's rows; the next begins aligned


def elastic_dispatch(
    x: list,
    topk_idx: list,
    topk_weights: list,
    num_experts: int,
    topology: Topology,
    num_max_tokens_per_rank: int,
    mode: str = "hybrid",
    arrival_seed: int | None = None,
    network: Network | None = None,
) -> list[ElasticDispatch]:
    """Send every token once to each rank that holds one of its experts (its own rank included).

    `x` per rank: rows [T, H] or a pair (codes, scales); `topk_idx` and `topk_weights` [T, K] per rank. The order is
    that of `deterministic=True`; `arrival_seed` picks one that may come about without. `mode` chooses the hops:
    "hybrid" (once to each other node, then to its ranks) or "direct"; the result is the same.
    Raises CapacityError where a rank has more tokens than `num_max_tokens_per_rank`.
    """
    network = network or Network(topology)
    options = {"mode": mode, "num_max_tokens_per_rank": num_max_tokens_per_rank, "arrival_seed": arrival_seed}
    exchanges = [make_exchange("elastic", network, r, num_experts, **options) for r in range(topology.num_ranks)]
    for exchange, rows, ids, weights in zip(exchanges, x, topk_idx, topk_weights):
        exchange.dispatch_send(rows, ids, weights)
    for exchange in exchanges:
        exchange.dispatch_forward()
    results = []
    for rank, exchange in enumerate(exchanges):
        exchange.dispatch_recv()
        source = exchange.recv_src_token_idx
        order = np.argsort(source, kind="stable") if arrival_seed is None else exchange.recv_order
        arrays = {
            name: exchange.recv_arrays[name][order] for name in ("x", "codes", "scale") if name in exchange.recv_arrays
        }
        counts = np.bincount(source // num_max_tokens_per_rank, minlength=topology.num_ranks).astype(np.int32)
        ids = exchange.recv_topk_idx[order].astype(np.asarray(topk_idx[rank]).dtype)
        rows = join_like(x[rank], arrays)
        results.append(ElasticDispatch(rows, ids, exchange.recv_topk_weights[order], source[order], counts))
    return results


def elastic_expand(
    received: ElasticDispatch,
    num_experts: int,
    topology: Topology,
    num_max_tokens_per_rank: int,
    expert_alignment: int = 1,
    fill: float | None = None,
) -> ElasticExpanded:
    """One rank's rows copied to each of their experts (`do_expand`), by expert and then in receive order.

    Groups begin at multiples of `expert_alignment`; `fill` is put into the padding rows (NaN shows who reads them).
    """
    local, ids = experts_per_rank(num_experts, topology), received.recv_topk_idx
    row, slot = np.nonzero(ids >= 0)
    expert = ids[row, slot]
    counts = np.bincount(expert, minlength=local)
    aligned = -(-counts // expert_alignment) * expert_alignment
    begin = np.cumsum(aligned) - aligned
    by_expert = np.argsort(expert, kind="stable")
    place = np.empty(len(expert), np.int64)
    place[by_expert] = np.arange(len(expert)) + np.repeat(begin - (np.cumsum(counts) - counts), counts)

    def expanded(array, index):
        out = np.zeros((int(aligned.sum()), *array.shape[1:]), array.dtype)
        if fill is not None:
            out[...] = fill
        out[place] = array[index]
        return out

    rows = received.recv_x
    rows = tuple(expanded(part, row) for part in rows) if isinstance(rows, tuple) else expanded(rows, row)
    top_k = ids.shape[1]
    metadata = np.full((len(ids), 2 + top_k), -1, np.int32)
    metadata[:, 0] = received.recv_src_token_idx
    last = top_k - 1 - np.argmax(ids[:, ::-1] >= 0, axis=1) if len(ids) else 0
    metadata[:, 1] = received.recv_src_token_idx // num_max_tokens_per_rank * top_k + last
    metadata[row, 2 + slot] = place
    weights = expanded(received.recv_topk_weights[row, slot], np.arange(len(row)))
    return ElasticExpanded(rows, weights, metadata, (begin + counts).astype(np.int32))
