"""What happens between ranks: buffers, messages, placement, schedules, time, the serving system."""

import importlib

_HOMES = {
    "parallel.deployment": ("Deployment",),
    "parallel.dispatch": (
        "CapacityError",
        "DispatchLayout",
        "Volumes",
        "count_volumes",
        "elastic_combine",
        "elastic_dispatch",
        "elastic_expand",
        "elastic_reduce",
        "get_dispatch_layout",
        "get_low_latency_rdma_size_hint",
        "get_next_low_latency_combine_buffer",
        "low_latency_combine",
        "low_latency_dispatch",
        "low_latency_reduce",
        "normal_combine",
        "normal_dispatch",
        "normal_reduce",
    ),
    "parallel.eplb": ("Plan", "rebalance_experts"),
    "parallel.ledger": ("Ledger",),
    "parallel.topology": ("Topology",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str):
    """Public names are imported when they are first asked for: a count of volumes needs no model."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return value


def __dir__():
    return sorted({*globals(), *__all__})
