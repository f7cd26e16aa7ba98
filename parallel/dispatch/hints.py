"""How large DeepEP's buffers must be, for the version of DeepEP that is named.

Sources: DeepEP csrc/config.hpp at the commits below, csrc/legacy/config.hpp and csrc/elastic/buffer.hpp of V2.
"""

from typing import NamedTuple

NVLINK_PEERS = 8  # ranks of a node in DeepEP's legacy buffers
ALIGNMENT = 128
MAX_TOP_K, MAX_SCALES = 128, 128  # room that the legacy buffers keep for each token
SOURCE_META = 8
ELASTIC_ALIGNMENT = 2 * 1024**2
ELASTIC_ROW_ALIGNMENT = 32
ELASTIC_MAX_CHANNELS = 8 * 160  # channels per SM times SMs

# What the low-latency layout of each version holds; the newest one without a release is named by its commit.
LOW_LATENCY_VERSIONS = {
    "ebfe47e": "first release, 2025-02-24: fp8 dispatch only",
    "ed7487c": "2025-03-10: bf16 dispatch",
    "4249486": "2025-04-07: no header on combine messages",
    "c5facf5": "2025-08-07: LogFMT combine, aligned signals",
    "v1.2.1": "as c5facf5",
    "v2": "the legacy buffer of V2, as c5facf5",
}
_AGE = {version: age for age, version in enumerate(LOW_LATENCY_VERSIONS)}


def get_low_latency_rdma_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int, version: str = "v1.2.1"
) -> int:
    """Bytes of the low-latency RDMA buffer: two send, two receive and two signal buffers.

    Only the first release depends on `num_ranks`. An aligned total still grows by one alignment, as in DeepEP.
    Raises ValueError for a version that LOW_LATENCY_VERSIONS does not name, and for sizes that are not positive."""
    if version not in _AGE:
        raise ValueError(f"version = {version!r}: must be one of {', '.join(LOW_LATENCY_VERSIONS)}")
    tokens, experts = num_max_dispatch_tokens_per_rank, num_experts
    _check_positive(num_max_dispatch_tokens_per_rank=tokens, hidden=hidden, num_ranks=num_ranks, num_experts=experts)
    age, scales = _AGE[version], hidden // 128 * 4
    dispatch = 16 + (hidden + scales if age < _AGE["ed7487c"] else max(2 * hidden, hidden + scales))
    combine = 2 * hidden + (16 if age < _AGE["4249486"] else 0) + (scales if age >= _AGE["c5facf5"] else 0)
    send = max(tokens * dispatch, experts * tokens * combine)
    receive = experts * tokens * max(dispatch, combine)
    signals = 4 * experts + (4 * (experts // num_ranks) if age == 0 else 0)
    if age >= _AGE["c5facf5"]:
        signals = _align(signals, ALIGNMENT)
    return (2 * (send + receive + signals) + ALIGNMENT) // ALIGNMENT * ALIGNMENT


class NormalConfig(NamedTuple):
    """DeepEP's `Config`: SMs, and chunk sizes in tokens."""

    num_sms: int
    nvl_send: int
    nvl_recv: int
    rdma_send: int
    rdma_recv: int


_DISPATCH = {
    2: (24, 256, 6, 128), 4: (6, 256, 6, 128), 8: (6, 256, 6, 128), 16: (36, 288, 20, 128), 24: (32, 288, 8, 128),
    32: (32, 288, 8, 128), 48: (32, 288, 8, 128), 64: (32, 288, 8, 128), 96: (20, 480, 12, 128), 128: (20, 560, 12,
    128), 144: (32, 720, 12, 128), 160: (28, 720, 12, 128),
}  # fmt: skip
_COMBINE = {
    2: (10, 256, 6, 128), 4: (9, 256, 6, 128), 8: (4, 256, 6, 128), 16: (4, 288, 12, 128), 24: (1, 288, 8, 128),
    32: (1, 288, 8, 128), 48: (1, 288, 8, 128), 64: (1, 288, 8, 128), 96: (1, 480, 8, 128), 128: (1, 560, 8, 128),
    144: (2, 720, 8, 128), 160: (2, 720, 8, 128),
}  # fmt: skip


def default_config(direction: str, num_ranks: int, num_sms: int = 20) -> NormalConfig:
    """The chunk sizes that DeepEP V1 recommends (`Buffer.get_dispatch_config`, `get_combine_config`).

    Raises ValueError for numbers of ranks that DeepEP has none for."""
    tables = {"dispatch": _DISPATCH, "combine": _COMBINE}
    if direction not in tables:
        raise ValueError(f"direction = {direction!r}: must be one of {', '.join(tables)}")
    if num_ranks not in tables[direction]:
        known = ", ".join(map(str, tables[direction]))
        raise ValueError(f"num_ranks = {num_ranks}: DeepEP recommends chunk sizes for {known} ranks only")
    return NormalConfig(num_sms, *tables[direction][num_ranks])


def get_nvl_buffer_size_hint(hidden_bytes: int, num_ranks: int, config: NormalConfig) -> int:
    """Bytes of the NVLink buffer of normal dispatch (V1.2 and later legacy buffers).

    hidden_bytes: bytes of a row, hidden * max(element size, 2)."""
    _check_normal(hidden_bytes, num_ranks, config)
    channels, peers = config.num_sms // 2, min(num_ranks, NVLINK_PEERS)
    nodes = max(num_ranks // NVLINK_PEERS, 1)
    row = hidden_bytes + SOURCE_META + MAX_TOP_K * (8 + 4) + MAX_SCALES * 4
    return _align(channels * peers * ((2 * nodes + 3) * 4 + config.nvl_recv * row), ALIGNMENT)


def get_rdma_buffer_size_hint(hidden_bytes: int, num_ranks: int, config: NormalConfig) -> int:
    """Bytes of the RDMA buffer of normal dispatch; none within a node."""
    _check_normal(hidden_bytes, num_ranks, config)
    if num_ranks <= NVLINK_PEERS:
        return 0
    channels, nodes = config.num_sms // 2, num_ranks // NVLINK_PEERS
    row = hidden_bytes + SOURCE_META + MAX_TOP_K * (8 + 4) + MAX_SCALES * 4 + 16
    chunk = _align(config.rdma_recv, config.rdma_send)
    return _align(channels * nodes * 2 * ((NVLINK_PEERS * 2 + 2) * 4 + chunk * row), ALIGNMENT)


def get_elastic_buffer_size_hint(
    num_max_tokens_per_rank: int,
    hidden: int,
    num_ranks: int,
    num_topk: int = 0,
    use_fp8_dispatch: bool = False,
    allow_multiple_reduction: bool = True,
    num_nodes: int = 1,
    all_nvlink: bool = True,
) -> int:
    """Bytes of V2's elastic buffer, rounded up to 2 MiB: in direct mode (num_nodes 1: one domain), or hybrid over
    nodes.

    num_topk 0 reserves room for 32. all_nvlink, in direct mode: every rank reaches every other by NVLink, so that
    no send buffers are kept. Raises ValueError for sizes that are not positive and nodes that do not divide the
    ranks."""
    tokens = num_max_tokens_per_rank
    _check_positive(num_max_tokens_per_rank=tokens, hidden=hidden, num_ranks=num_ranks, num_nodes=num_nodes)
    if num_ranks % num_nodes:
        raise ValueError(f"num_ranks = {num_ranks} is not a multiple of num_nodes = {num_nodes}")
    top_k = num_topk or 32
    scales = 4 * -(-hidden // 32) if use_fp8_dispatch else 0
    there = _elastic_row(hidden * (1 if use_fp8_dispatch else 2), scales, 8 * top_k + 4 * (1 + top_k))
    back = _elastic_row(2 * hidden, 0, 8 * top_k)
    sent = 1 if allow_multiple_reduction else top_k  # rows that go back for a token of a rank
    copies, nodes = (
        (min(n, top_k) if allow_multiple_reduction else top_k) for n in (num_ranks // num_nodes, num_nodes)
    )
    if num_nodes == 1:
        rows_there = tokens * (num_ranks + (0 if all_nvlink else 1))
        rows_back = tokens * (copies + (0 if all_nvlink else num_ranks * sent))
    else:
        channels = tokens + ELASTIC_MAX_CHANNELS
        rows_there = num_ranks * tokens + tokens + num_nodes * channels
        rows_back = copies * num_nodes * tokens + nodes * tokens + sent * num_nodes * channels
    return _align(max(there * rows_there, back * rows_back), ELASTIC_ALIGNMENT)


def _elastic_row(*parts: int) -> int:
    return sum(_align(part, ELASTIC_ROW_ALIGNMENT) for part in parts)


def _align(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1")


def _check_normal(hidden_bytes: int, num_ranks: int, config: NormalConfig) -> None:
    _check_positive(hidden_bytes=hidden_bytes, num_ranks=num_ranks)
    if num_ranks > NVLINK_PEERS and (num_ranks % NVLINK_PEERS or config.num_sms % 2):
        raise ValueError(
            f"num_ranks = {num_ranks}, num_sms = {config.num_sms}: more than {NVLINK_PEERS} ranks must be "
            f"a multiple of {NVLINK_PEERS}, and the SMs an even number"
        )
