"""Exact volumes from the routing table alone: who sends how many rows and bytes to whom, over which link.

Nothing is moved: rows are counted by bincount and sorted ids, and weighed by the layouts of `row_bytes`. A run's
ledger, which records what was really moved, must hold the same integers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parallel.dispatch.routing import Routing, check_routing
from parallel.dispatch.row_bytes import (
    CLASSES,
    DISPATCHES,
    MODES,
    ControlBytes,
    RowBytes,
    combine_row,
    control_bytes,
    dispatch_row,
)
from parallel.topology import LINKS, Topology

DIRECTIONS = ("dispatch", "combine")


class Hop(NamedTuple):
    """One hop of one direction: rows int64 [R, R] (source, destination), and the bytes of a row."""

    direction: str
    rows: np.ndarray
    row_bytes: RowBytes


@dataclass(frozen=True, eq=False)
class Volumes:
    """Counted volumes of one layer, or of several added up (`a + b`).

    `counts` holds the rows by (token, rank), (token, node) and (slot, rank), own rank and node included; `hops` and
    `control` (direction -> bytes int64 [R, R]) are what the dialect makes of them."""

    counts: Routing
    hidden: int
    dispatch: str
    payload: str
    mode: str
    hops: tuple[Hop, ...]
    control: dict[str, np.ndarray]

    @property
    def topology(self) -> Topology:
        return self.counts.topology

    def matrix(self, direction=None, link=None, unit: str = "bytes", classes=None) -> np.ndarray:
        """int64 [R, R] (source, destination).

        direction `dispatch` or `combine`, link `local`, `nvlink` or `rdma`, classes some of CLASSES: None sums over
        all. unit `rows` counts a row once on every hop it takes; control words are no rows.
        Raises ValueError for a name that does not exist, and for classes together with rows."""
        wanted = _checked_names(direction, link, unit, classes)
        links = self.topology.link_matrix()
        total = np.zeros(links.shape, np.int64)
        for hop in self.hops:
            if direction in (None, hop.direction):
                total += hop.rows * (1 if unit == "rows" else _weight(hop.row_bytes, wanted, links))
        if unit == "bytes" and "control" in wanted:
            total += sum(self.control[d] for d in DIRECTIONS if direction in (None, d))
        if link is not None:
            total[links != LINKS.index(link)] = 0
        return total

    def __add__(self, other: "Volumes") -> "Volumes":
        """Volumes of two layers (or steps) of the same deployment together."""
        mine, theirs = ((v.hidden, v.dispatch, v.payload, v.mode) for v in (self, other))
        if mine != theirs:
            raise ValueError(f"volumes of {mine} and {theirs} (hidden, dispatch, payload, mode) cannot be added up")
        return volumes_of(self.counts.plus(other.counts), *mine)

    def wire(self, direction=None) -> np.ndarray:
        """View 1, bytes that move at all: int64 [R] sent by each rank over every link, copies within a rank
        included."""
        return self.matrix(direction).sum(axis=1)

    def nic(self, direction=None) -> np.ndarray:
        """View 3, bytes that cross between nodes: int64 [R] sent by each rank's NIC. What a rank receives is
        `matrix(direction, link="rdma").sum(axis=0)`."""
        return self.matrix(direction, link="rdma").sum(axis=1)

    def deepep(self) -> dict[str, np.ndarray]:
        """View 2, the figures that DeepEP's own tests divide by time, under their names: int64 [R].

        Payload and scales (low_latency: the header too) of rows by unit, own rank and own node included, so that
        `rdma_send_bytes` is more than the NIC moves. Sources: DeepEP
        tests/legacy/test_{intranode,internode,low_latency}.py, tests/elastic/test_ep.py. Raises ValueError for what
        DeepEP does not measure."""
        if self.payload not in ("fp8", "bf16") or self.dispatch not in ("normal", "low_latency", "elastic"):
            raise ValueError(
                f"DeepEP measures normal, low_latency and elastic dispatch of fp8 and bf16 rows, "
                f"not {self.dispatch} of {self.payload}"
            )
        return _deepep_metric(self)


def count_volumes(
    topk_idx,
    num_experts: int,
    topology: Topology,
    hidden: int,
    dispatch: str = "normal",
    payload: str = "fp8",
    mode: str = "hybrid",
) -> Volumes:
    """Rows and bytes of one layer's dispatch and combine.

    topk_idx: one int array [T_r, K] for each rank, physical expert ids, -1 for none. num_experts: physical experts, a
    multiple of the ranks; rank r holds r * E/R ... (r+1) * E/R - 1. payload: what dispatch carries; fp8 comes back
    as bf16. mode: how `elastic` moves rows over several nodes: `hybrid` (by node, then by rank), `direct`, or
    `single` (direct, with one row back per slot); one node knows no hybrid.
    Rows that come back as LogFMT-10 are as long as their values allow and cannot be counted from a table.
    Raises ValueError for wrong names, shapes, ids (naming rank, token, slot and id) and ranks that do not divide
    experts."""
    return volumes_of(check_routing(topk_idx, num_experts, topology), hidden, dispatch, payload, mode)


def volumes_of(routing: Routing, hidden: int, dispatch: str, payload: str = "fp8", mode: str = "hybrid") -> Volumes:
    """As `count_volumes`, from a routing table that is already checked and counted."""
    if dispatch not in DISPATCHES:
        raise ValueError(f"dispatch = {dispatch!r}: must be one of {', '.join(DISPATCHES)}")
    if mode not in MODES:
        raise ValueError(f"mode = {mode!r}: must be one of {', '.join(MODES)}")
    topology, several = routing.topology, routing.topology.num_nodes > 1
    there = dispatch_row(dispatch, several, hidden, routing.top_k, payload)
    back = combine_row(dispatch, several, hidden, routing.top_k, payload)
    hops = [Hop("dispatch", rows, there) for rows in _dispatch_rows(routing, topology, dispatch, mode)]
    hops += [Hop("combine", rows, back) for rows in _combine_rows(routing, topology, dispatch, mode)]
    control = {
        direction: routing.layers
        * _control_matrix(control_bytes(dispatch, direction, routing.num_experts, topology), topology)
        for direction in DIRECTIONS
    }
    return Volumes(routing, hidden, dispatch, payload, mode, tuple(hops), control)


def _dispatch_rows(routing: Routing, topology: Topology, dispatch: str, mode: str) -> list[np.ndarray]:
    """Rows of each hop, int64 [R, R]."""
    if dispatch == "low_latency":
        return [routing.slots_to_rank]
    if dispatch == "allgather":
        return [np.tile(routing.tokens[:, None], (1, topology.num_ranks))]
    two_hops = topology.num_nodes > 1 and (dispatch == "normal" or (dispatch, mode) == ("elastic", "hybrid"))
    if not two_hops:
        return [routing.tokens_to_rank]
    return _hop_rows(routing, topology, own_node=dispatch == "normal")


def _combine_rows(routing: Routing, topology: Topology, dispatch: str, mode: str) -> list[np.ndarray]:
    """Rows of each hop back: those of dispatch the other way, but one per slot for a single reduction."""
    if (dispatch, mode) == ("elastic", "single"):
        return [routing.slots_to_rank.T]
    return [rows.T for rows in reversed(_dispatch_rows(routing, topology, dispatch, mode))]


def _hop_rows(routing: Routing, topology: Topology, own_node: bool) -> list[np.ndarray]:
    """First hop (n, i) -> (m, i): one row per (token, node). Second hop (m, i) -> (m, h): one per (token, rank).

    Without `own_node` rows for the own node do not take the first hop."""
    nodes, width, ranks = topology.num_nodes, topology.ranks_per_node, topology.num_ranks
    node, index = np.divmod(np.arange(ranks), width)
    first = np.zeros((ranks, nodes, width), np.int64)  # [source, node, index]
    first[np.arange(ranks), :, index] = routing.tokens_to_node
    if not own_node:
        first[np.arange(ranks), node] = 0
    by_index = routing.tokens_to_rank.reshape(nodes, width, nodes, width).sum(axis=0)  # [i, m, h]: over source nodes
    second = np.zeros((nodes, width, nodes, width), np.int64)  # [m, i, m, h]
    second[np.arange(nodes), :, np.arange(nodes), :] = by_index.transpose(1, 0, 2)
    return [first.reshape(ranks, ranks), second.reshape(ranks, ranks)]


def _control_matrix(control: ControlBytes, topology: Topology) -> np.ndarray:
    rank = np.arange(topology.num_ranks)
    same_node = topology.node(rank)[:, None] == topology.node(rank)
    rail = ~same_node & (topology.local_index(rank)[:, None] == topology.local_index(rank))
    return control.everyone + control.node * same_node.astype(np.int64) + control.rail * rail.astype(np.int64)


def _weight(row_bytes: RowBytes, classes, links: np.ndarray) -> np.ndarray:
    """Bytes of a row between each pair, int64 [R, R]."""
    everywhere = sum(row_bytes.classes.get(c, 0) for c in classes)
    rdma = sum(row_bytes.only_rdma.get(c, 0) for c in classes)
    return everywhere + rdma * (links == LINKS.index("rdma")).astype(np.int64)


def _checked_names(direction, link, unit: str, classes) -> tuple[str, ...]:
    for name, value, known in (("direction", direction, DIRECTIONS), ("link", link, LINKS)):
        if value is not None and value not in known:
            raise ValueError(f"{name} = {value!r}: must be one of {', '.join(known)}, or None for all")
    if unit not in ("rows", "bytes"):
        raise ValueError(f'unit = {unit!r}: must be "rows" or "bytes"')
    wanted = CLASSES if classes is None else (classes,) if isinstance(classes, str) else tuple(classes)
    unknown = [c for c in wanted if c not in CLASSES]
    if unknown:
        raise ValueError(f"class {unknown[0]!r}: must be one of {', '.join(CLASSES)}")
    if unit == "rows" and classes is not None:
        raise ValueError("rows are counted once, whatever classes of bytes they carry: leave classes out")
    return wanted


def _deepep_metric(volumes: Volumes) -> dict[str, np.ndarray]:
    counts, hidden, top_k = volumes.counts, volumes.hidden, volumes.counts.top_k
    scales = 4 * -(-hidden // 128)
    received = counts.tokens_to_rank.sum(axis=0)
    per_node = counts.tokens_to_node.sum(axis=1)
    if volumes.dispatch == "low_latency":
        message = hidden + scales + 16 if volumes.payload == "fp8" else 2 * hidden
        slots = counts.slots_to_rank.sum(axis=1)
        return {"num_dispatch_comm_bytes": slots * message, "num_combine_comm_bytes": slots * 2 * hidden}
    if volumes.dispatch == "elastic":
        row = (hidden + scales if volumes.payload == "fp8" else 2 * hidden) + 8 * top_k + 4 * top_k
        back = 2 * hidden + 4 * top_k
        return {
            "dispatch_scaleout_bytes": per_node * row,
            "dispatch_scaleup_bytes": received * row,
            "combine_scaleout_bytes": per_node * back,
            "combine_scaleup_bytes": received * back,
        }
    row = hidden * 33 // 32 if volumes.payload == "fp8" else 2 * hidden  # times (1 + 4 / 128) / 2 of the bf16 bytes
    metric = {"nvl_recv_bytes": received * row, "combine_bf16_nvl_send_bytes": received * 2 * hidden}
    if volumes.topology.num_nodes > 1:
        metric |= {"rdma_send_bytes": per_node * row, "combine_bf16_rdma_recv_bytes": per_node * 2 * hidden}
    return metric
