"""Every dialect against its buffer-free reduction at published numbers of ranks."""

import numpy as np
import pytest
from dispatch_oracle import BF16, all_outputs, random_batch, run_exchange

from parallel.dispatch import elastic_reduce, low_latency_reduce, normal_reduce
from parallel.dispatch.volumes import count_volumes
from parallel.topology import Topology

CASES = (
    ("normal", {}, normal_reduce),
    ("low_latency", {}, low_latency_reduce),
    ("low_latency", {"arrival_seed": 1}, low_latency_reduce),
    ("elastic", {"mode": "hybrid"}, elastic_reduce),
    ("elastic", {"mode": "direct"}, elastic_reduce),
    ("elastic", {"mode": "single"}, elastic_reduce),
    ("allgather", {}, None),
    ("alltoallv", {}, None),
)


def check(dialect, options, reduction, ranks, dtype):
    num_experts = {144: 288, 320: 320}.get(ranks, 256)
    topology, rng = Topology(ranks), np.random.default_rng(ranks)
    tokens = rng.integers(0, 4, ranks)
    x, idx, weights = random_batch(rng, tokens, num_experts, 8, 4, dtype)
    y, _, network = run_exchange(dialect, topology, num_experts, x, idx, weights, **options)
    mode = {"mode": options["mode"]} if "mode" in options else {}
    flat = Topology(ranks, ranks) if reduction is None else topology  # the collectives reduce as on one node
    for rank in range(ranks):
        outputs = all_outputs(x[rank], idx[rank])
        expected = (reduction or normal_reduce)(
            outputs, idx[rank], num_experts, flat, topk_weights=weights[rank], **mode
        )
        assert y[rank].tobytes() == expected.tobytes()
    payload = {2: "bf16", 4: "fp32", 8: "fp64"}[np.dtype(dtype).itemsize]
    volumes = count_volumes(idx, num_experts, topology, 4, dialect, payload, **mode)
    np.testing.assert_array_equal(network.ledger.matrix(), volumes.matrix())


@pytest.mark.parametrize(("dialect", "options", "reduction"), CASES)
def test_thirty_two_ranks(dialect, options, reduction):
    check(dialect, options, reduction, 32, BF16)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [16, 64, 144, 320])
@pytest.mark.parametrize("dtype", [BF16, np.float32, np.float64])
@pytest.mark.parametrize(("dialect", "options", "reduction"), CASES)
def test_published_numbers_of_ranks(dialect, options, reduction, ranks, dtype):
    check(dialect, options, reduction, ranks, dtype)
