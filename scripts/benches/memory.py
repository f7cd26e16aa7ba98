"""Peak memory of many emulated ranks against one rank with the same batch, each in a process of its own."""

from scripts.benches.children import in_child
from scripts.benches.timing import Row, Session


def measure(session: Session) -> list[Row]:
    """Weights are shared by all ranks and never copied, so that 144 ranks need little more than one."""
    cases = ((4, 4),) if session.quick else ((32, 0), (144, 32))
    rows = []
    for ranks, redundant in cases:
        size = "quick" if session.quick else "standard"
        session.note(f"{ranks} requests on one rank")
        alone = in_child("scripts.benches.memory_once", size, ranks, redundant, "none")["peak"]
        session.note(f"{ranks} ranks")
        spread = in_child("scripts.benches.memory_once", size, ranks, redundant, "low_latency")["peak"]
        rows.append(Row(f"{ranks} requests on one rank, peak memory", alone, "B"))
        limit = session.limit("<= 1.25")
        rows.append(Row(f"{ranks} ranks, peak memory", spread, "B", spread / alone, "one rank", limit))
    return rows
