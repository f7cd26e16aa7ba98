"""From one placement to another: which expert weights move, over which link, and how many bytes that is."""

from typing import NamedTuple

import numpy as np

from parallel.placement import Placement
from parallel.topology import LINKS, Topology

SOURCES = ("sglang", "vllm")
KINDS = ("unchanged", "copy", "receive")


class Rearrangement(NamedTuple):
    """For each new slot [S]: `source`, the OLD slot whose weights it takes (int64), and `kind` (index into KINDS):
    0 unchanged in place, 1 copied within the rank, 2 received from another rank. `rank_slots`: slots of each rank.

    A second slot of a received expert on the same rank is a copy of the first one: `source` names the same old slot."""

    source: np.ndarray
    kind: np.ndarray
    rank_slots: int

    def matrix(self, expert_bytes: int, num_ranks: int) -> np.ndarray:
        """Bytes from each rank to each rank, int64 [R, R]; copies within a rank stand on the diagonal."""
        moved = self.kind > 0
        src, dst = self.source // self.rank_slots, np.arange(len(self.source)) // self.rank_slots
        src = np.where(self.kind == 2, src, dst)
        pairs = np.bincount((src * num_ranks + dst)[moved], minlength=num_ranks**2)
        return pairs.reshape(num_ranks, num_ranks) * expert_bytes

    def link_bytes(self, expert_bytes: int, topology: Topology) -> dict[str, int]:
        """Bytes by link: copies within ranks (`local`), within nodes (`nvlink`) and between them (`rdma`)."""
        matrix, links = self.matrix(expert_bytes, topology.num_ranks), topology.link_matrix()
        return {name: int(matrix[links == i].sum()) for i, name in enumerate(LINKS)}


def expert_bytes(hidden: int, intermediate: int, payload: str = "fp8") -> int:
    """Bytes of one expert's gate, up and down projections; `fp8` with its float32 scales per 128 x 128 block.

    Scales must move with the codes (vllm-project/vllm#47588): 44,040,192 + 10,752 bytes for V3's 7168 x 2048."""
    sizes = {"fp8": 1, "bf16": 2, "fp32": 4, "fp64": 8}
    if payload not in sizes:
        raise ValueError(f"payload = {payload!r}: must be one of {', '.join(sizes)}")
    if hidden < 1 or intermediate < 1:
        raise ValueError(f"hidden = {hidden}, intermediate = {intermediate}: both must be at least 1")
    scales = 3 * 4 * -(-hidden // 128) * -(-intermediate // 128) if payload == "fp8" else 0
    return 3 * hidden * intermediate * sizes[payload] + scales


def plan_rearrangement(old: Placement, new: Placement, topology: Topology, source: str = "sglang") -> Rearrangement:
    """What must move to turn `old` into `new`. Receives are minimal: each rank receives each expert it lacks once.

    source: who sends. `sglang`: holders on the receiver's own node first, each serving a contiguous share of its
    receivers; receivers on nodes without a holder are shared over all holders (SGLang expert_location_updater).
    `vllm`: receivers are dealt to holders in order of first appearance, topology-blind (vLLM rebalance_execute).
    Raises ValueError when the placements or the topology do not match."""
    if source not in SOURCES:
        raise ValueError(f"source = {source!r}: must be one of {', '.join(SOURCES)}")
    if old.shape != new.shape:
        raise ValueError(f"(experts, physical experts, ranks) must not change: {old.shape} before, {new.shape} after")
    if topology.num_ranks != old.num_ranks:
        raise ValueError(f"the topology has {topology.num_ranks} ranks, the placements {old.num_ranks}")
    slot = np.arange(old.num_physical)
    before = _first_slot(old)  # [R, E]: a slot of the rank that holds the expert, -1 if none
    local = before[old.rank(slot), new.phy2log]
    kind = np.where(local >= 0, 1, 2)
    chosen = local.copy()
    for expert in np.unique(new.phy2log[kind == 2]):
        receivers = np.unique(new.rank(slot[(kind == 2) & (new.phy2log == expert)]))
        holders = np.flatnonzero(before[:, expert] >= 0)
        assign = _assign_by_node(receivers, holders, topology) if source == "sglang" else _assign(receivers, holders)
        for receiver, sender in assign.items():
            mine = (new.phy2log == expert) & (new.rank(slot) == receiver)
            chosen[mine] = before[sender, expert]
            kind[slot[mine][1:]] = 1
    stays = old.phy2log == new.phy2log
    return Rearrangement(np.where(stays, slot, chosen), np.where(stays, 0, kind), old.slots_per_rank)


def apply_rearrangement(plan: Rearrangement, tensors: dict) -> dict:
    """The tensors of all slots after the move, each [S, ...]: every read is of the OLD ones, codes and scales alike."""
    return {name: np.asarray(tensor)[plan.source] for name, tensor in tensors.items()}


def _first_slot(placement: Placement) -> np.ndarray:
    table = np.full((placement.num_ranks, placement.num_experts), -1, dtype=np.int64)
    slot = np.arange(placement.num_physical)[::-1]  # the lowest slot is written last
    table[placement.rank(slot), placement.phy2log[slot]] = slot
    return table


def _shares(receivers, senders) -> dict[int, int]:
    """Contiguous shares of the receivers for each sender, the first shares one longer: {receiver: sender}."""
    return {int(r): int(s) for s, part in zip(senders, np.array_split(receivers, len(senders))) for r in part}


def _assign_by_node(receivers, holders, topology: Topology) -> dict[int, int]:
    assign, abroad = {}, []
    for node in np.unique(topology.node(receivers)):
        mine = receivers[topology.node(receivers) == node]
        near = holders[topology.node(holders) == node]
        if len(near):
            assign |= _shares(mine, near)
        else:
            abroad += list(mine)
    return assign | _shares(abroad, holders)


def _assign(receivers, senders) -> dict[int, int]:
    """vLLM: with q receivers per sender, receiver i is served by sender i // q, and the rest by one sender each."""
    share = len(receivers) // len(senders)
    return {
        int(r): int(senders[i // share] if i < share * len(senders) else senders[i - share * len(senders)])
        for i, r in enumerate(receivers)
    }
