"""Slow, obvious twins of dispatch and combine: loops over tokens and slots, no buffers."""

import ml_dtypes
import numpy as np

from parallel.dispatch import make_exchange
from parallel.network import Network

BF16 = ml_dtypes.bfloat16


def wide(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def add_up(terms, dtype, start=0.0):
    """Terms in order in the accumulator's dtype, rounded once to the storage dtype."""
    total = np.zeros(terms[0].shape, wide(dtype)) if len(terms) else None
    total += wide(dtype)(start)
    for term in terms:
        total = total + term.astype(wide(dtype))
    return total.astype(dtype)


def plain_sum(outputs, topk_idx, topk_weights):
    """Single reduction, slots in top-k order: outputs [T, K, D]."""
    tokens, slots, width = outputs.shape
    dtype = outputs.dtype
    y = np.zeros((tokens, width), dtype)
    for t in range(tokens):
        total = np.zeros(width, wide(dtype))
        for j in range(slots):
            if topk_idx[t, j] >= 0:
                total = total + outputs[t, j].astype(wide(dtype)) * wide(dtype)(topk_weights[t, j])
        y[t] = total.astype(dtype)
    return y


def tree_sum(outputs, topk_idx, topk_weights, num_experts, topology, by_node):
    """Weighted sum within each rank, then ranks ascending (within each node, then nodes, if `by_node`)."""
    tokens, slots, width = outputs.shape
    dtype = outputs.dtype
    per_rank = num_experts // topology.num_ranks
    y = np.zeros((tokens, width), dtype)
    for t in range(tokens):
        nodes = {}
        for r in range(topology.num_ranks):
            mine = [j for j in range(slots) if topk_idx[t, j] >= 0 and topk_idx[t, j] // per_rank == r]
            if mine:
                terms = [outputs[t, j].astype(wide(dtype)) * wide(dtype)(topk_weights[t, j]) for j in mine]
                nodes.setdefault(topology.node(r) if by_node else 0, []).append(add_up(terms, dtype))
        sums = [add_up(nodes[n], dtype) for n in sorted(nodes)]
        if sums:
            y[t] = add_up(sums, dtype)
    return y


def expert_output(rows, expert):
    """What the tests' experts compute, elementwise: a row's bits depend on the row and the expert alone."""
    dtype = rows.dtype
    gain = (np.asarray(expert) % 7 + 1).astype(wide(dtype))[:, None]
    return (rows.astype(wide(dtype)) * gain + 0.1 * gain).astype(dtype)


def all_outputs(x, topk_idx):
    """[T, K, D] expert outputs of every slot; NaN where there is no selection."""
    slots = [expert_output(x, topk_idx[:, j]) for j in range(topk_idx.shape[1])]
    outputs = np.stack(slots, axis=1) if slots else np.zeros((len(x), 0, x.shape[1]), x.dtype)
    outputs[topk_idx < 0] = np.nan
    return outputs


def random_batch(rng, tokens_per_rank, num_experts, top_k, width, dtype, drop=0.2):
    """Lists per rank of x [T, D], topk_idx [T, K] and topk_weights [T, K]."""
    x, idx, weights = [], [], []
    for tokens in tokens_per_rank:
        x.append((rng.standard_normal((tokens, width)) * 2.0 ** rng.integers(-6, 6, (tokens, 1))).astype(dtype))
        ids = np.array([rng.permutation(num_experts)[:top_k] for _ in range(tokens)], np.int64).reshape(tokens, top_k)
        ids[rng.random(ids.shape) < drop] = -1
        idx.append(ids)
        weights.append(rng.random((tokens, top_k)).astype(wide(dtype)))
    return x, idx, weights


def run_exchange(dialect, topology, num_experts, x, idx, weights, network=None, rng=None, expert=None, **options):
    """Drive every rank through all stages, in a shuffled order if `rng`; returns (y per rank, exchanges, network)."""
    network = network or Network(topology)
    ranks = list(range(topology.num_ranks))
    exchanges = [make_exchange(dialect, network, r, num_experts, **options) for r in ranks]
    per_rank = num_experts // topology.num_ranks
    expert = expert or (lambda pairs, first: expert_output(pairs.x[pairs.row], pairs.expert + first))
    pairs = {}

    def each(action):
        for r in rng.permutation(ranks) if rng is not None else ranks:
            action(int(r))

    each(lambda r: exchanges[r].dispatch_send(x[r], idx[r], weights[r]))
    each(lambda r: exchanges[r].dispatch_forward())
    each(lambda r: pairs.update({r: exchanges[r].dispatch_recv()}))
    each(lambda r: exchanges[r].combine_send(expert(pairs[r], r * per_rank)))
    each(lambda r: exchanges[r].combine_forward())
    y = {}
    each(lambda r: y.update({r: exchanges[r].combine_recv()}))
    assert network.pending() == []
    return [y[r] for r in ranks], exchanges, network


def elastic_tree(outputs, topk_idx, topk_weights, num_experts, topology, mode):
    """Partial sums stand at the last slot that they serve; every sum runs over the slots in order."""
    tokens, slots, width = outputs.shape
    dtype = outputs.dtype
    per_rank = num_experts // topology.num_ranks
    units = {"single": [], "direct": [per_rank], "hybrid": [per_rank, per_rank * topology.ranks_per_node]}[mode]
    y = np.zeros((tokens, width), dtype)
    for t in range(tokens):
        terms = {}
        for j in range(slots):
            if topk_idx[t, j] >= 0:
                terms[j] = outputs[t, j].astype(wide(dtype)) * wide(dtype)(topk_weights[t, j])
        for size in units:
            groups = {}
            for j in sorted(terms):
                groups.setdefault(topk_idx[t, j] // size, []).append(j)
            terms = {slots[-1]: add_up([terms[j] for j in slots], dtype) for slots in groups.values()}
        if terms:
            y[t] = add_up([terms[j] for j in sorted(terms)], dtype)
    return y
