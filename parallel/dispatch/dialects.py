"""The dialects by name."""

from parallel.dispatch.exchange import Exchange
from parallel.dispatch.low_latency import LowLatencyExchange
from parallel.dispatch.normal_internode import NormalInternodeExchange
from parallel.dispatch.normal_intranode import NormalIntranodeExchange
from parallel.network import Network

DIALECTS = ("normal", "low_latency")


def make_exchange(
    dialect: str,
    network: Network,
    rank: int,
    num_experts: int,
    layer: int = 0,
    micro_batch: int = 0,
    step: int = 0,
    **options,
) -> Exchange:
    """One rank's exchange of one layer and micro-batch, in the named dialect.

    `num_experts` counts physical experts. `options` are the dialect's own (`arrival_seed`, ...).
    Raises ValueError for an unknown dialect or option.
    """
    several = network.topology.num_nodes > 1
    classes = {
        "normal": NormalInternodeExchange if several else NormalIntranodeExchange,
        "low_latency": LowLatencyExchange,
    }
    if dialect not in classes:
        raise ValueError(f"dispatch = {dialect!r} is none of {', '.join(DIALECTS)}")
    try:
        return classes[dialect](network, rank, num_experts, layer, micro_batch, step, **options)
    except TypeError as error:
        raise ValueError(f"dispatch {dialect!r} does not take the options {sorted(options)}: {error}") from None
