"""A network that moves packets one by one, each with an envelope that the receiver verifies.

Slower than `Network`, which shares memory and has nothing to verify; this one is for finding out what a faulty
transport does to a dialect. `FaultyNetwork` adds the faults.
"""

import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parallel.ledger import Ledger, Tag
from parallel.messages import Outgoing, describe, join_parts
from parallel.network import Network
from parallel.topology import Topology

FAULTS = ("drop", "duplicate", "reorder", "corrupt", "truncate", "stale", "replay")


class DamagedMessage(ValueError):
    """What arrived is not what was sent; names the rank, the layer, the message and the source."""


class Packet(NamedTuple):
    """One source's part for one destination. `sequence` counts the packets between the two ranks."""

    src: int
    dst: int
    tag: Tag
    sequence: int
    rows: int
    part: Outgoing
    checksum: int


@dataclass(frozen=True)
class Fault:
    """What happens to the first packet with rows for another rank that a stage sends in a step (`every`: to each one).

    drop: it never arrives. duplicate: it arrives twice. reorder: it arrives after all others of the exchange. corrupt:
    one bit of its arrays is flipped. truncate: its last row is missing. stale: its envelope is right, its arrays are
    those of the same exchange one step earlier (a buffer read too soon). replay: the whole packet of the earlier step
    arrives in its place.
    """

    kind: str
    stage: str
    step: int = 1
    every: bool = False

    def __post_init__(self):
        if self.kind not in FAULTS:
            raise ValueError(f"fault {self.kind!r} is none of {', '.join(FAULTS)}")


class PacketNetwork(Network):
    """`Network` with verified packets: a duplicate is ignored, any order will do, damage is an error."""

    def __init__(self, topology: Topology, ledger: Ledger | None = None):
        super().__init__(topology, ledger)
        self._sequence: dict[tuple[int, int], int] = {}
        self._mail: dict[tuple[int, Tag], dict[int, Packet]] = {}
        self._seen: set[tuple[int, int, int]] = set()
        self.ignored = 0  # packets that had come before

    def ready(self, dst, tag, sources=None):
        return not self.missing(dst, tag, sources)

    def missing(self, dst, tag, sources=None):
        mail = self._mail.get((dst, tag), ())
        return [source for source in (self._all if sources is None else sources) if source not in mail]

    def pending(self):
        return [(tag, len(mail)) for (_, tag), mail in self._mail.items() if mail]

    def _post(self, src: int, outgoing: Outgoing, tag: Tag) -> None:
        self._sent.setdefault(tag, {})[src] = outgoing  # remembered so that sending twice is noticed
        for dst in outgoing.destinations:
            number = self._sequence.get((src, dst), 0)
            self._sequence[src, dst] = number + 1
            part = _for_one(outgoing, dst)
            packet = Packet(src, dst, tag, number, int(outgoing.splits[dst]), part, 0)
            self._carry(packet._replace(checksum=checksum(packet)))

    def _carry(self, packet: Packet) -> None:
        """Take a packet to its destination."""
        key = (packet.src, packet.dst, packet.sequence)
        if key in self._seen:
            self.ignored += 1
            return
        self._seen.add(key)
        self._mail.setdefault((packet.dst, packet.tag), {})[packet.src] = packet

    def _join(self, dst, tag, sources, gathered):
        for source in sources:
            self._verify(self._mail[dst, tag][source], dst, tag)
        return join_parts(dst, sources, self._parts(dst, tag, sources))

    def _take(self, dst, tag, sources):
        for source in sources:
            del self._mail[dst, tag][source]

    def _parts(self, dst, tag, sources):
        return [self._mail[dst, tag][source].part for source in sources]

    def _verify(self, packet: Packet, dst: int, tag: Tag) -> None:
        what = f"rank {dst}, {describe(tag)}: the packet from rank {packet.src}"
        for name, array in packet.part.arrays.items():
            rows = len(packet.part.offsets[name]) - 1 if name in packet.part.offsets else len(array)
            if rows != packet.rows:
                raise DamagedMessage(f"{what} has {rows} rows of {name}, its envelope says {packet.rows}")
        if checksum(packet) != packet.checksum:
            raise DamagedMessage(f"{what} is not what was sent: its checksum differs")


class FaultyNetwork(PacketNetwork):
    """A `PacketNetwork` on which the given faults happen; `happened` counts them."""

    def __init__(self, topology: Topology, faults=(), ledger: Ledger | None = None):
        super().__init__(topology, ledger)
        self.faults, self.happened = tuple(faults), 0
        self._late: list[Packet] = []
        self._history: dict[tuple, Packet] = {}
        self._hit: set[Fault] = set()

    def missing(self, dst, tag, sources=None):
        if self._late and all(len(self._sent.get(late.tag, ())) == len(self._all) for late in self._late):
            late, self._late = self._late, []
            for packet in late:
                super()._carry(packet)
        return super().missing(dst, tag, sources)

    def _carry(self, packet):
        slot = (packet.src, packet.dst, packet.tag._replace(step=0))
        before, self._history[slot] = self._history.get(slot), packet
        fault = next((fault for fault in self.faults if self._strikes(fault, packet, before)), None)
        if fault is None:
            super()._carry(packet)
            return
        self.happened += 1
        self._hit.add(fault)
        if fault.kind == "reorder":
            self._late.append(packet)
        elif fault.kind == "duplicate":
            super()._carry(packet)
            super()._carry(packet)
        elif fault.kind != "drop":
            super()._carry(_damaged(fault.kind, packet, before))

    def _strikes(self, fault: Fault, packet: Packet, before: Packet | None) -> bool:
        if (fault.stage, fault.step) != (packet.tag.stage, packet.tag.step) or (fault in self._hit and not fault.every):
            return False
        return (
            packet.rows > 0
            and packet.src != packet.dst
            and (before is not None or fault.kind not in ("stale", "replay"))
        )


def checksum(packet: Packet) -> int:
    """CRC-32 over the envelope, the layout and the bytes of a packet."""
    part = packet.part
    envelope = (packet.src, packet.dst, tuple(packet.tag), packet.sequence, packet.rows, sorted(part.terms.items()))
    value = zlib.crc32(repr(envelope).encode())
    for name in sorted(part.arrays):
        array = np.ascontiguousarray(part.arrays[name])
        value = zlib.crc32(repr((name, array.dtype.name, array.shape)).encode(), value)
        value = zlib.crc32(array.reshape(-1).view(np.uint8).tobytes(), value)
    for name in sorted(part.offsets):
        value = zlib.crc32(part.offsets[name].tobytes(), value)
    return value if part.control is None else zlib.crc32(np.ascontiguousarray(part.control).tobytes(), value)


def _for_one(outgoing: Outgoing, dst: int) -> Outgoing:
    """A destination's own copy of its part."""
    arrays = {name: outgoing.part(name, dst).copy() for name in outgoing.arrays}
    words = outgoing.control_for(dst)
    offsets = {name: np.cumsum([0, *outgoing.row_lengths(name, dst)]) for name in outgoing.offsets}
    splits = np.zeros_like(outgoing.splits)
    splits[dst] = outgoing.splits[dst]
    return Outgoing(
        arrays,
        outgoing.classes,
        np.zeros_like(splits),
        splits,
        (dst,),
        None if words is None else words[None].copy(),
        () if words is None else (dst,),
        offsets,
        outgoing.terms,
    )


def _damaged(kind: str, packet: Packet, before: Packet | None) -> Packet:
    """The packet as it arrives after the fault; the envelope keeps the checksum of what was sent."""
    if kind == "replay":
        return before
    arrays = {name: array.copy() for name, array in packet.part.arrays.items()}
    if kind == "stale":
        arrays = dict(before.part.arrays)
    elif kind == "truncate":
        arrays = {name: array if name in packet.part.offsets else array[:-1] for name, array in arrays.items()}
    else:
        name = max(arrays, key=lambda name: arrays[name].nbytes)
        arrays[name].reshape(-1).view(np.uint8)[0] ^= 1
    return packet._replace(part=packet.part._replace(arrays=arrays))
