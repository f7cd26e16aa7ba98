"""Dispatch and combine: how token rows reach their experts' ranks and come back."""

from parallel.dispatch.dialects import DIALECTS, make_exchange
from parallel.dispatch.exchange import STAGES, Exchange, Pairs
from parallel.dispatch.layout import DispatchLayout, get_dispatch_layout

__all__ = ["DIALECTS", "STAGES", "DispatchLayout", "Exchange", "Pairs", "get_dispatch_layout", "make_exchange"]
