"""Bytes that an exchange moves per rank and link: from closed forms, or from counts of a real routing table."""

from math import comb, prod
from typing import NamedTuple

import numpy as np

from parallel.timing.costs import V3, combine_row_bytes, dispatch_row_bytes
from parallel.timing.hardware import Hardware
from parallel.timing.imbalance import Loads
from parallel.topology import Topology


class Traffic(NamedTuple):
    """Bytes of one exchange, float64 [R] each: what a rank sends and receives by RDMA and by NVLink."""

    rdma_out: np.ndarray
    rdma_in: np.ndarray
    nvlink_out: np.ndarray
    nvlink_in: np.ndarray

    def received_by(self, loads: Loads) -> "Traffic":
        """The same bytes sent, but received in proportion to the rows that each rank computes.

        For combine read it as sent: both directions of a link are priced alike.
        """
        share = loads.rows / loads.rows.mean()
        return self._replace(rdma_in=self.rdma_in * share, nvlink_in=self.nvlink_in * share)

    def seconds(self, gpu: Hardware, link: float = 1.0, sync: float = 0.0) -> np.ndarray:
        """[R]: alpha plus the slower of both links, both directions at once; `link` is the fraction of the rate."""
        rdma = np.maximum(self.rdma_out, self.rdma_in) / (gpu.nic * link)
        nvlink = np.maximum(self.nvlink_out, self.nvlink_in) / (gpu.nvlink * link)
        return sync + np.maximum(rdma, nvlink)


def _even(topology, rdma, nvlink):
    ranks = topology.num_ranks
    return Traffic(np.full(ranks, rdma), np.full(ranks, rdma), np.full(ranks, nvlink), np.full(ranks, nvlink))


def every_copy_by_rdma(tokens: float, topology: Topology, shape=V3) -> dict[str, Traffic]:
    """The simplest count: each token sent to `top_k` experts, all of them by the NIC, own rank included."""
    rows = tokens * shape.num_experts_per_tok
    return {
        "dispatch": _even(topology, rows * dispatch_row_bytes(shape), 0.0),
        "combine": _even(topology, rows * combine_row_bytes(shape), 0.0),
    }


def low_latency(tokens: float, topology: Topology, shape=V3) -> dict[str, Traffic]:
    """One message per (token, expert), experts drawn evenly: 1/R stays, the rest of the node goes by NVLink."""
    rows = tokens * shape.num_experts_per_tok
    ranks = topology.num_ranks
    node = min(topology.ranks_per_node, ranks)
    rdma, nvlink = rows * (ranks - node) / ranks, rows * (node - 1) / ranks
    return {
        "dispatch": _even(topology, rdma * dispatch_row_bytes(shape), nvlink * dispatch_row_bytes(shape)),
        "combine": _even(topology, rdma * combine_row_bytes(shape), nvlink * combine_row_bytes(shape)),
    }


def distinct_nodes(nodes: int, shape=V3) -> float:
    """Expected nodes that hold a token's experts: groups and experts drawn evenly, whole groups on a node.

    A token takes `topk_group` of `n_group` groups, then `top_k` experts within them.
    Raises ValueError where the groups do not divide over the nodes.
    """
    if shape.n_group % nodes:
        raise ValueError(f"{nodes} nodes do not divide {shape.n_group} expert groups: no closed form")
    groups, chosen, here = shape.n_group, shape.topk_group, shape.n_group // nodes
    per_group = shape.n_routed_experts // groups
    pool, k = chosen * per_group, shape.num_experts_per_tok
    hit = 0.0
    for count in range(max(0, chosen - (groups - here)), min(here, chosen) + 1):
        share = comb(here, count) * comb(groups - here, chosen - count) / comb(groups, chosen)
        hit += share * (1 - comb(pool - count * per_group, k) / comb(pool, k))
    return nodes * hit


def distinct_ranks(ranks: int, shape=V3) -> float:
    """Expected ranks that hold a token's experts, drawn as in `distinct_nodes`; experts stand in order on the ranks.

    A rank within one group is hit if the group is chosen and not all of the token's experts are others.
    """
    if ranks <= shape.n_group:
        return distinct_nodes(ranks, shape)
    here, pool = shape.n_routed_experts / ranks, shape.topk_group * (shape.n_routed_experts // shape.n_group)
    missed = prod(1 - here / (pool - drawn) for drawn in range(shape.num_experts_per_tok))
    return ranks * shape.topk_group / shape.n_group * (1 - missed)


def node_limited(tokens: float, topology: Topology, shape=V3) -> dict[str, Traffic]:
    """The normal dialect: one row per (token, node) by RDMA, then one per (token, rank) within the node by NVLink."""
    ranks, nodes = topology.num_ranks, topology.num_nodes
    node = min(topology.ranks_per_node, ranks)
    rdma = tokens * distinct_nodes(nodes, shape) * (nodes - 1) / nodes
    nvlink = tokens * distinct_ranks(ranks, shape) * (node - 1) / node
    return {
        "dispatch": _even(topology, rdma * dispatch_row_bytes(shape), nvlink * dispatch_row_bytes(shape)),
        "combine": _even(topology, rdma * combine_row_bytes(shape), nvlink * combine_row_bytes(shape)),
    }


def counted(volumes) -> dict[str, Traffic]:
    """From anything with `matrix(direction, link=..., unit="bytes") -> [R, R]`, such as `count_volumes` gives."""
    traffic = {}
    for direction in ("dispatch", "combine"):
        rdma, nvlink = (
            np.asarray(volumes.matrix(direction, link=link, unit="bytes"), dtype=np.float64)
            for link in ("rdma", "nvlink")
        )
        traffic[direction] = Traffic(rdma.sum(axis=1), rdma.sum(axis=0), nvlink.sum(axis=1), nvlink.sum(axis=0))
    return traffic
