"""The stepper over many ranks: what `refmodel.stepper` shows of one, and what is between them.

from parallel import Deployment, Topology
from parallel.stepper import RankStepper

stepper = RankStepper(Deployment(model, Topology(8, 4)), prompts)
stepper.until(stage="dispatch_recv", rank=3)
stepper.mailbox()                                # what was sent and not taken
stepper.volumes()                                # what was sent so far
"""

from itertools import pairwise
from typing import NamedTuple

from parallel.deployment import Deployment
from parallel.ledger import CLASSES, DIRECTIONS, Ledger
from parallel.messages import describe
from parallel.network import Parcel
from parallel.topology import LINKS
from refmodel.stepper import Origin, Stepper


class Letter(NamedTuple):
    """One exchange that is under way: `senders` have sent, `readers` have not taken all of it."""

    message: str
    senders: tuple[int, ...]
    readers: tuple[int, ...]
    parcels: int
    rows: int


class Hop(NamedTuple):
    """One link that a row crosses."""

    src: int
    dst: int
    link: str


class RankStepper(Stepper):
    """A run of a deployment over prompts; request i is on rank i mod ranks. See `Stepper`.

    Raises ValueError for a deployment whose ranks are spread over processes.
    """

    engine: Deployment

    def __init__(self, deployment: Deployment, prompts, new_tokens: int = 0, **settings):
        if deployment.transport != "memory":
            raise ValueError(f"transport = {deployment.transport!r}: a run is stepped through in one process, 'memory'")
        super().__init__(deployment, prompts, new_tokens, **settings)

    @property
    def num_ranks(self) -> int:
        return self.engine.topology.num_ranks

    def rank_of(self, request: int) -> int:
        return self.engine.rank_of(request)

    @property
    def ledger(self) -> Ledger:
        """Everything that was sent so far."""
        return self.engine.ledger

    def volumes(self) -> dict[str, dict[str, dict[str, int]]]:
        """Bytes sent so far: direction -> link -> class."""
        ledger = self.ledger
        return {
            direction: {
                link: {name: int(ledger.matrix(direction, link=link, classes=name).sum()) for name in CLASSES}
                for link in LINKS
            }
            for direction in DIRECTIONS
        }

    def parcels(self) -> list[Parcel]:
        """Every packet that was sent and not taken."""
        return self.engine.network.under_way()

    def mailbox(self) -> list[Letter]:
        """The exchanges that are under way, in the order of sending."""
        by_tag: dict = {}
        for parcel in self.parcels():
            by_tag.setdefault(parcel.tag, []).append(parcel)
        return [
            Letter(
                describe(tag),
                tuple(sorted({parcel.src for parcel in parcels})),
                tuple(sorted({parcel.dst for parcel in parcels})),
                len(parcels),
                sum(parcel.rows for parcel in parcels),
            )
            for tag, parcels in by_tag.items()
        ]

    def path(self, origin: Origin) -> list[Hop]:
        """The links that the row of an `Origin` crossed from its token's rank to its expert's; none before it arrived.

        Where the dialect has a middle hop, rows to another node go to the rank with the own GPU index there first.
        """
        if origin.rank is None:
            return []
        topology = self.engine.topology
        stops = [origin.source, origin.rank]
        forwards = self.ledger.matrix(unit="rows", stage="dispatch_forward", layer=origin.layer).any()
        if forwards and topology.link(*stops) == "rdma":
            through = topology.node(origin.rank) * topology.ranks_per_node + topology.local_index(origin.source)
            if through != origin.rank:
                stops.insert(1, through)
        return [Hop(src, dst, topology.link(src, dst)) for src, dst in pairwise(stops)]
