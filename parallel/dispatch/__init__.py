"""Dispatch and combine: how token rows reach their experts' ranks and come back."""

from parallel.dispatch.compare_rows import SourceRows, expanded_rows, low_latency_rows, row_differences
from parallel.dispatch.deepep_elastic import elastic_dispatch, elastic_expand
from parallel.dispatch.deepep_elastic_combine import elastic_combine
from parallel.dispatch.deepep_low_latency import (
    get_next_low_latency_combine_buffer,
    low_latency_combine,
    low_latency_dispatch,
)
from parallel.dispatch.deepep_normal import normal_combine, normal_dispatch
from parallel.dispatch.dialects import DIALECTS, make_exchange
from parallel.dispatch.elastic_rows import CapacityError
from parallel.dispatch.exchange import STAGES, Exchange, Pairs
from parallel.dispatch.hints import get_low_latency_rdma_size_hint
from parallel.dispatch.layout import DispatchLayout, get_dispatch_layout
from parallel.dispatch.limits import deepep_limits
from parallel.dispatch.reduce import elastic_reduce, low_latency_reduce, normal_reduce
from parallel.dispatch.volumes import Volumes, count_volumes

__all__ = [
    "DIALECTS",
    "STAGES",
    "CapacityError",
    "DispatchLayout",
    "Exchange",
    "Pairs",
    "SourceRows",
    "Volumes",
    "count_volumes",
    "deepep_limits",
    "elastic_combine",
    "elastic_dispatch",
    "elastic_expand",
    "elastic_reduce",
    "expanded_rows",
    "get_dispatch_layout",
    "get_low_latency_rdma_size_hint",
    "get_next_low_latency_combine_buffer",
    "low_latency_combine",
    "low_latency_dispatch",
    "low_latency_reduce",
    "low_latency_rows",
    "make_exchange",
    "normal_combine",
    "normal_dispatch",
    "normal_reduce",
    "row_differences",
]
