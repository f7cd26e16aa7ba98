"""Shapes that DeepEP's kernels refuse, as a report: nothing here is enforced, the reference takes any shape."""

from parallel.topology import Topology

LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
LOW_LATENCY_TOP_K = 11
TOP_K = 32
INTRANODE_RANKS = (2, 4, 8)
INTERNODE_NODES = (2, 3, 4, 6, 8, 12, 16, 18, 20)
RANKS_PER_NODE = 8
LOCAL_EXPERTS = 1024
ROW_BYTES = 16  # rows are moved in pieces of an int4
QP_DEPTH = 1024  # NVSHMEM_QP_DEPTH by default


def deepep_limits(
    dispatch: str,
    topology: Topology,
    hidden: int,
    top_k: int,
    num_experts: int,
    num_max_tokens_per_rank: int | None = None,
    payload_bytes: int = 2,
) -> list[str]:
    """What DeepEP would refuse about a deployment, one sentence each; empty where its kernels take it.

    `payload_bytes` are those of one element (1 for FP8 rows). Dialects that are not DeepEP's have no limits.
    Sources: DeepEP csrc/kernels/legacy/launch.cuh, internode_ll.cu, intranode.cu, csrc/legacy/buffer.hpp,
    deep_ep/buffers/legacy.py, deep_ep/include/deep_ep/impls/dispatch_copy_epilogue.cuh.
    """
    if dispatch == "low_latency":
        return _low_latency(hidden, top_k, num_max_tokens_per_rank)
    if dispatch == "elastic":
        return _unless(top_k <= TOP_K, f"top-k {top_k}: at most {TOP_K}")
    if dispatch != "normal":
        return []
    local = num_experts // topology.num_ranks
    return [
        *_unless(top_k <= TOP_K, f"top-k {top_k}: at most {TOP_K}"),
        *_unless(
            hidden * payload_bytes % ROW_BYTES == 0, f"rows of {hidden * payload_bytes} B: multiples of {ROW_BYTES} B"
        ),
        *_unless(local <= LOCAL_EXPERTS, f"{local} experts on a rank: at most {LOCAL_EXPERTS}"),
        *_ranks(topology),
    ]


def _low_latency(hidden: int, top_k: int, capacity: int | None) -> list[str]:
    deep_enough = capacity is None or 2 * (capacity + 1) <= QP_DEPTH
    return [
        *_unless(hidden in LOW_LATENCY_HIDDEN, f"hidden {hidden}: one of {', '.join(map(str, LOW_LATENCY_HIDDEN))}"),
        *_unless(top_k <= LOW_LATENCY_TOP_K, f"top-k {top_k}: at most {LOW_LATENCY_TOP_K}"),
        *_unless(
            deep_enough,
            f"{capacity} tokens a rank: NVSHMEM_QP_DEPTH = {QP_DEPTH} allows {QP_DEPTH // 2 - 1}",
        ),
    ]


def _ranks(topology: Topology) -> list[str]:
    ranks, nodes, width = topology.num_ranks, topology.num_nodes, topology.ranks_per_node
    if nodes == 1:
        return _unless(
            ranks in INTRANODE_RANKS, f"{ranks} ranks on a node: one of {', '.join(map(str, INTRANODE_RANKS))}"
        )
    return [
        *_unless(width == RANKS_PER_NODE, f"{width} ranks on each node: {RANKS_PER_NODE}"),
        *_unless(nodes in INTERNODE_NODES, f"{nodes} nodes: one of {', '.join(map(str, INTERNODE_NODES))}"),
    ]


def _unless(holds: bool, sentence: str) -> list[str]:
    return [] if holds else [sentence]
