"""What a counter adds up, and what the transport may add to it."""

from typing import NamedTuple

import numpy as np

from parallel.dispatch.measurements import Measurement
from parallel.dispatch.volumes import Hop, Volumes
from parallel.topology import LINKS

PACKET_HEADER = 102  # most bytes around an RDMA packet: Ethernet 18 with VLAN, IPv6 40, UDP 8, BTH 12, RETH 16, CRCs 8
ACKNOWLEDGE = 70  # most bytes of the packet that acknowledges one: the same without RETH, with AETH, rounded up
NVLINK_HEADER = 0.125  # most of what NVLink adds to data: 16 bytes to 128
NVLINK_UNIT = 1024  # NVLink counters count KiB
ROWS_PER_ATOMIC = 4  # normal dispatch updates heads and tails by RDMA at most once in so many rows
CHANNEL_MESSAGES = 40  # of normal dispatch per pair of ranks and layer: channels' metadata and last updates
CONTROL_WORD = 4


class Options(NamedTuple):
    """repeat: how often the counted layers ran; mtu: bytes of payload in a packet; slack: fraction of other traffic."""

    repeat: int = 1
    mtu: int = 4096
    slack: float = 0.002


def matrix_of(volumes: Volumes, m: Measurement, classes=None) -> np.ndarray:
    """Counted bytes [R, R] of what the quantity adds up (`sent` and `received` leave out copies within a rank)."""
    link = {"nic": "rdma", "nvlink": "nvlink"}.get(m.quantity.split("_")[0])
    matrix = volumes.matrix(m.direction, link, classes=classes)
    return matrix - np.diag(np.diag(matrix)) if m.quantity in ("sent", "received") else matrix


def at(matrix: np.ndarray, m: Measurement) -> float:
    """The part of a matrix that the measurement covers: an entry, a row (sent) or a column (received)."""
    if m.quantity == "pair":
        return float(matrix[m.place])
    return float(matrix.sum(axis=0 if m.quantity.endswith("received") else 1)[m.place])


def overhead(volumes: Volumes, m: Measurement, mtu: int) -> float:
    """Most bytes that the transport adds: headers of the packets, and acknowledgements of those that go the other
    way."""
    extra = 0.0
    if not m.quantity.startswith("nvlink"):
        packets = _packets(volumes, m.direction, mtu)
        extra = at(packets, m) * PACKET_HEADER + at(packets.T, m) * ACKNOWLEDGE
    if not m.quantity.startswith("nic"):
        extra += NVLINK_HEADER * at(volumes.matrix(m.direction, "nvlink"), m)
    return extra


def allowed(volumes: Volumes, m: Measurement, options: Options) -> tuple[float, float]:
    """Interval in which the counter must lie: from the counted bytes alone to all that the transport may add."""
    counted = at(matrix_of(volumes, m), m)
    unit = NVLINK_UNIT if m.quantity.startswith("nvlink") else 0
    high = (counted + overhead(volumes, m, options.mtu)) * options.repeat * (1 + options.slack)
    return counted * options.repeat - unit, high + unit


def _packets(volumes: Volumes, direction, mtu: int) -> np.ndarray:
    """Most RDMA packets between each pair, float64 [R, R]."""
    packets = np.zeros((volumes.topology.num_ranks,) * 2)
    for hop in volumes.hops:
        if direction in (None, hop.direction):
            packets += hop.rows * _packets_of_row(hop, mtu)
            if volumes.dispatch == "normal":
                packets += hop.rows / ROWS_PER_ATOMIC + CHANNEL_MESSAGES * volumes.counts.layers
    for name, control in volumes.control.items():
        if direction in (None, name):
            packets += control / CONTROL_WORD
    return packets * (volumes.topology.link_matrix() == LINKS.index("rdma"))


def _packets_of_row(hop: Hop, mtu: int) -> int:
    size = sum(hop.row_bytes.classes.values()) + sum(hop.row_bytes.only_rdma.values())
    return -(-size // mtu)
