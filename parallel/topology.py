"""Ranks, nodes, and the link that a byte between two ranks crosses."""

from dataclasses import dataclass

import numpy as np

LINKS = ("local", "nvlink", "rdma")


@dataclass(frozen=True)
class Topology:
    """`num_ranks` ranks on nodes of `ranks_per_node`; ranks of a node are contiguous.

    Fewer ranks than a node holds are one node, partly filled.
    Raises ValueError when more ranks than one node holds do not fill whole nodes.
    """

    num_ranks: int
    ranks_per_node: int = 8

    def __post_init__(self):
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks = {self.num_ranks}: there must be at least one rank")
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node = {self.ranks_per_node}: a node holds at least one rank")
        if self.num_ranks > self.ranks_per_node and self.num_ranks % self.ranks_per_node:
            raise ValueError(
                f"num_ranks = {self.num_ranks} is not a multiple of ranks_per_node = {self.ranks_per_node}: "
                "every node holds the same number of ranks"
            )

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_per_node)

    def node(self, rank):
        """Node of a rank (or of an array of ranks)."""
        return rank // self.ranks_per_node

    def local_index(self, rank):
        """Position of a rank within its node: its GPU index."""
        return rank % self.ranks_per_node

    def link(self, src: int, dst: int) -> str:
        """`local` within a rank, `nvlink` within a node, `rdma` between nodes."""
        if src == dst:
            return "local"
        return "nvlink" if self.node(src) == self.node(dst) else "rdma"

    def link_matrix(self) -> np.ndarray:
        """Index into LINKS for each (source, destination): int8 [R, R]."""
        rank = np.arange(self.num_ranks)
        node = self.node(rank)
        links = np.where(node[:, None] == node[None, :], 1, 2).astype(np.int8)
        np.fill_diagonal(links, 0)
        return links
