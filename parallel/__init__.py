"""What happens between ranks: buffers, messages, placement, schedules, time, the serving system."""

from parallel.deployment import Deployment
from parallel.dispatch.layout import DispatchLayout, get_dispatch_layout
from parallel.topology import Topology

__all__ = ["Deployment", "DispatchLayout", "Topology", "get_dispatch_layout"]
