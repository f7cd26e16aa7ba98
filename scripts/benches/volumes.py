"""Speed of counting: the published decode deployment, 144 ranks with 176 tokens each, over 58 layers."""

from dataclasses import replace

from parallel.dispatch.volumes import count_volumes
from parallel.dispatch.workload import PRESETS
from scripts.benches.timing import Row, Session


def measure(session: Session) -> list[Row]:
    """Drawing the routing, counting it, and both, for all layers."""
    workload = PRESETS["decode-ep144"]
    if session.quick:
        workload = replace(workload, ranks=16, redundant=0, tokens=8, layers=2)
    arguments = (workload.num_physical, workload.topology, workload.hidden)
    drawn = list(workload.tables(0))

    def count(tables):
        return count_volumes(tables, *arguments, dispatch=workload.dispatch, payload=workload.payload)

    def all_counts():
        for _ in range(workload.layers):
            count(drawn)

    def everything():
        total = None
        for layer in range(workload.layers):
            volumes = count(workload.tables(layer))
            total = volumes if total is None else total + volumes
        return total.matrix("dispatch", "rdma").sum(), total.matrix("combine", "rdma").sum()

    times = session.interleave({"count": all_counts, "draw, count and sum": everything})
    what = f"{workload.ranks} ranks x {workload.tokens} tokens x {workload.layers} layers"
    limits = {"count": "<= 0.5", "draw, count and sum": "<= 6"}
    return [
        Row(f"{name}, {what}", timing.seconds, "s", None, "", session.limit(limits[name]), timing.spread)
        for name, timing in times.items()
    ]
