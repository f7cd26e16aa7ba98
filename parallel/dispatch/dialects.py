"""The dialects by name."""

from parallel.dispatch.collectives import AllGatherExchange, AllToAllVExchange
from parallel.dispatch.elastic_direct import ElasticDirectExchange
from parallel.dispatch.elastic_hybrid import ElasticHybridExchange
from parallel.dispatch.exchange import Exchange
from parallel.dispatch.low_latency import LowLatencyExchange
from parallel.dispatch.normal_internode import NormalInternodeExchange
from parallel.dispatch.normal_intranode import NormalIntranodeExchange
from parallel.network import Network

DIALECTS = ("normal", "low_latency", "elastic", "allgather", "alltoallv")
ELASTIC_MODES = ("hybrid", "direct", "single")


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

    `num_experts` counts physical experts. `options` are the dialect's own: `arrival_seed` and
    `num_max_tokens_per_rank` for low_latency and elastic, `logfmt` for low_latency, `mode` for elastic ("hybrid" by
    default; on one node that is "direct").
    Raises ValueError for an unknown dialect, mode or option.
    """
    several = network.topology.num_nodes > 1
    mode = options.get("mode", "hybrid")
    if dialect == "elastic" and mode not in ELASTIC_MODES:
        raise ValueError(f"mode = {mode!r} is none of {', '.join(ELASTIC_MODES)}")
    classes = {
        "normal": NormalInternodeExchange if several else NormalIntranodeExchange,
        "low_latency": LowLatencyExchange,
        "elastic": ElasticHybridExchange if several and mode == "hybrid" else ElasticDirectExchange,
        "allgather": AllGatherExchange,
        "alltoallv": AllToAllVExchange,
    }
    if dialect not in classes:
        raise ValueError(f"dispatch = {dialect!r} is none of {', '.join(DIALECTS)}")
    try:
        return classes[dialect](network, rank, num_experts, layer, micro_batch, step, **options)
    except TypeError as error:
        raise ValueError(f"dispatch {dialect!r} does not take the options {sorted(options)}: {error}") from None
