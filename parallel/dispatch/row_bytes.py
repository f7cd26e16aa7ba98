"""What one row of each dialect weighs, by byte class, from the layouts alone: the counting side of the ledger.

H hidden, K top-k, e physical experts per rank, E physical experts, N nodes, g ranks per node. Sources: DeepEP
csrc/kernels/legacy/{intranode,internode,internode_ll}.cu, csrc/elastic/buffer.hpp (token layout).
"""

from typing import NamedTuple

from parallel.dispatch.logfmt import row_bounds
from parallel.topology import Topology

CLASSES = ("payload", "scales", "routing", "header", "padding", "control")
DISPATCHES = ("normal", "low_latency", "elastic", "allgather", "alltoallv")
MODES = ("hybrid", "direct", "single")  # of elastic
PAYLOADS = {"fp8": 1, "bf16": 2, "fp32": 4, "fp64": 8}  # bytes of an element
COMBINE_PAYLOAD = {"fp8": "bf16", "bf16": "bf16", "fp32": "fp32", "fp64": "fp64"}
SCALE_BLOCK = 128
RANK_WORDS = 8  # words that DeepEP's notification between nodes reserves for the ranks of a node


class RowBytes(NamedTuple):
    """Bytes of one row by class; `only_rdma` is added to rows that cross between nodes."""

    classes: dict[str, int]
    only_rdma: dict[str, int]


def payload_classes(hidden: int, payload: str) -> dict[str, int]:
    """One token's values: `fp8` carries a float32 scale for each 128 of them."""
    if payload.startswith("logfmt"):
        least, most = row_bounds(hidden)
        raise ValueError(
            f"payload = {payload!r}: a LogFMT-10 row of {hidden} values is {least} to {most} bytes long, as its values "
            "allow, so that no routing table says how many: count with fp8 or bf16, whose rows come back as bf16"
        )
    if payload not in PAYLOADS:
        raise ValueError(f"payload = {payload!r}: must be one of {', '.join(PAYLOADS)}")
    if hidden < 1:
        raise ValueError(f"hidden = {hidden}: must be at least 1")
    scales = {"scales": 4 * -(-hidden // SCALE_BLOCK)} if payload == "fp8" else {}
    return {"payload": hidden * PAYLOADS[payload], **scales}


def weight_bytes(payload: str) -> int:
    """A top-k weight is a float32, and a float64 beside float64 rows."""
    return 8 if payload == "fp64" else 4


def dispatch_row(dispatch: str, several_nodes: bool, hidden: int, top_k: int, payload: str) -> RowBytes:
    """One row on its way to the experts, on every hop of the dialect."""
    values, weights = payload_classes(hidden, payload), top_k * weight_bytes(payload)
    if dispatch == "low_latency":
        return RowBytes({**values, "header": 16}, {})
    if dispatch == "elastic":
        routing = 4 * top_k + weights + 4 * top_k  # ids, weights, linked list
        parts = [*values.values(), routing + 4]
        padding = sum(-part % 32 for part in parts)
        return RowBytes({**values, "routing": routing, "header": 4, "padding": padding}, {})
    if dispatch == "normal" and several_nodes:
        row = {**values, "header": 8, "routing": 4 * top_k + weights}
        return RowBytes({**row, "padding": -sum(row.values()) % 16}, {})
    if dispatch == "normal":
        return RowBytes({**values, "header": 4, "routing": 8 * top_k + weights}, {})
    return RowBytes({**values, "routing": 4 * top_k + weights}, {})


def combine_row(dispatch: str, several_nodes: bool, hidden: int, top_k: int, payload: str) -> RowBytes:
    """One row on its way back, without top-k weights; rows sent as fp8 come back as bf16."""
    values = payload_classes(hidden, COMBINE_PAYLOAD[payload])
    if dispatch == "elastic":
        return RowBytes(values, {"padding": -(-8 * top_k // 32) * 32})
    if dispatch == "normal" and several_nodes:
        row = {**values, "header": 8}
        return RowBytes({**row, "padding": -sum(row.values()) % 16}, {})
    if dispatch == "normal":
        return RowBytes({**values, "header": 4}, {})
    return RowBytes(values, {})


class ControlBytes(NamedTuple):
    """Bytes of control words that one rank sends to each rank of a set: `everyone` to all ranks, `node` to those of its
    node (itself included in both), `rail` to the same GPU index of every other node."""

    everyone: int
    node: int
    rail: int


def control_bytes(dispatch: str, direction: str, num_experts: int, topology: Topology) -> ControlBytes:
    """Counts and flags that travel whether there are rows or not."""
    local, nodes = num_experts // topology.num_ranks, topology.num_nodes
    if dispatch == "low_latency":
        return ControlBytes(4 * local, 0, 0)  # counts there, flags back
    if direction == "combine":
        return ControlBytes(0, 0, 0)
    if dispatch == "normal" and nodes > 1:
        rank_words = max(RANK_WORDS, topology.ranks_per_node)
        return ControlBytes(0, 4 * (nodes + local), 4 * (rank_words + num_experts // nodes + 1))
    if dispatch in ("normal", "elastic"):
        return ControlBytes(4 * (1 + local), 0, 0)
    return ControlBytes(8, 0, 0)  # allgather, alltoallv
