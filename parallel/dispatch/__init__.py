"""Dispatch and combine: how token rows reach their experts' ranks and come back."""

from parallel.dispatch.dialects import DIALECTS, make_exchange
from parallel.dispatch.elastic_rows import CapacityError
from parallel.dispatch.exchange import STAGES, Exchange, Pairs
from parallel.dispatch.layout import DispatchLayout, get_dispatch_layout
from parallel.dispatch.reduce import elastic_reduce, low_latency_reduce, normal_reduce

__all__ = [
    "DIALECTS",
    "STAGES",
    "CapacityError",
    "DispatchLayout",
    "Exchange",
    "Pairs",
    "elastic_reduce",
    "get_dispatch_layout",
    "low_latency_reduce",
    "make_exchange",
    "normal_reduce",
]
