"""Buffer sizes of the named DeepEP versions, against numbers worked out by hand from its sources."""

import pytest

from parallel.dispatch.hints import (
    LOW_LATENCY_VERSIONS,
    default_config,
    get_elastic_buffer_size_hint,
    get_low_latency_rdma_size_hint,
    get_nvl_buffer_size_hint,
    get_rdma_buffer_size_hint,
)


@pytest.mark.parametrize(
    ("tokens", "experts", "size"), [(128, 288, 2_146_961_792), (176, 288, 2_952_071_552), (256, 256, 3_816_818_816)]
)
def test_low_latency_at_the_published_sizes(tokens, experts, size):
    for version in ("c5facf5", "v1.2.1", "v2"):
        for ranks in (8, 32):
            assert get_low_latency_rdma_size_hint(tokens, 7168, ranks, experts, version) == size


@pytest.mark.parametrize(
    ("version", "size"),
    [
        # 2 tokens, H 128, 4 experts, 2 ranks: send 8 combine messages, receive 8 of the larger kind, twice.
        ("ebfe47e", 2 * (8 * 272 + 8 * 272 + 16 + 8)),  # fp8 148, combine 272; counters of 2 local experts
        ("ed7487c", 2 * (8 * 272 + 8 * 272 + 16)),  # bf16 272
        ("4249486", 2 * (8 * 256 + 8 * 272 + 16)),  # combine without header
        ("c5facf5", 2 * (8 * 260 + 8 * 272 + 128)),  # 4 bytes of amax and amin for each 128
    ],
)
def test_low_latency_by_hand(version, size):
    expected = (size + 128) // 128 * 128
    assert get_low_latency_rdma_size_hint(2, 128, 2, 4, version) == expected


def test_versions_are_named():
    assert list(LOW_LATENCY_VERSIONS)[-1] == "v2"
    with pytest.raises(ValueError, match=r"version = 'v9': must be one of ebfe47e.*v1\.2\.1, v2"):
        get_low_latency_rdma_size_hint(1, 128, 1, 1, "v9")
    with pytest.raises(ValueError, match="num_experts = 0"):
        get_low_latency_rdma_size_hint(1, 128, 1, 0)


def test_normal_buffers():
    assert get_nvl_buffer_size_hint(2 * 7168, 8, default_config("dispatch", 8)) == 335_709_824
    assert get_rdma_buffer_size_hint(2 * 7168, 32, default_config("dispatch", 32)) == 168_023_680
    assert get_rdma_buffer_size_hint(2 * 7168, 8, default_config("dispatch", 8)) == 0
    assert default_config("combine", 144) == (20, 2, 720, 8, 128)
    # chunk rows are rounded up to a multiple of what is sent at once: 128 to 132
    config = default_config("dispatch", 144)
    assert config.rdma_recv == 128
    by_hand = 10 * 2 * 2 * (72 + 132 * (16 + 8 + 1024 + 512 + 512 + 16))  # channels, nodes, both directions
    assert get_rdma_buffer_size_hint(16, 16, config) == (by_hand + 127) // 128 * 128


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: default_config("dispatch", 12), "num_ranks = 12: DeepEP recommends .* 2, 4, 8, 16"),
        (lambda: default_config("both", 8), "direction = 'both'"),
        (lambda: get_nvl_buffer_size_hint(16, 12, default_config("dispatch", 8)), "num_ranks = 12"),
        (lambda: get_rdma_buffer_size_hint(0, 16, default_config("dispatch", 8)), "hidden_bytes = 0"),
        (lambda: get_elastic_buffer_size_hint(0, 128, 8), "num_max_tokens_per_rank = 0"),
    ],
)
def test_wrong_sizes_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_elastic_in_direct_mode():
    mib2 = 2 * 1024**2
    # fp8: 7168 + 4 * 224 = 896 for the scales' room + align32(64 + 36) = 128: 8192 a row, 64 ranks of 128 tokens
    assert get_elastic_buffer_size_hint(128, 7168, 64, 8, use_fp8_dispatch=True) == 8192 * 128 * 64
    # bf16 in 8 ranks: dispatch rows 14336 + 128, combine rows 14336 + 64
    rows = 8 * 128 * (14336 + 128)
    assert get_elastic_buffer_size_hint(128, 7168, 8, 8) == -(-rows // mib2) * mib2
    single = 128 * 8 * (1 + 2) * 14400  # top-k copies, and send buffers of two ranks
    found = get_elastic_buffer_size_hint(128, 7168, 2, 8, allow_multiple_reduction=False, all_nvlink=False)
    assert found == -(-single // mib2) * mib2
    assert get_elastic_buffer_size_hint(1, 32, 1) == mib2


def test_elastic_in_hybrid_mode():
    """4 nodes of 8 ranks, 128 tokens, top-8, bf16 of 7168: rows received by NVLink, sent once, received by RDMA."""
    dispatch = (14336 + 128) * (32 * 128 + 128 + 4 * (128 + 1280))
    combine = (14336 + 64) * (8 * 4 * 128 + 4 * 128 + 4 * (128 + 1280))
    found = get_elastic_buffer_size_hint(128, 7168, 32, 8, num_nodes=4)
    assert found == -(-max(dispatch, combine) // 2**21) * 2**21
    single = (14336 + 64) * (8 * 4 * 128 + 8 * 128 + 8 * 4 * (128 + 1280))
    found = get_elastic_buffer_size_hint(128, 7168, 32, 8, allow_multiple_reduction=False, num_nodes=4)
    assert found == -(-single // 2**21) * 2**21
    with pytest.raises(ValueError, match="num_ranks = 32 is not a multiple of num_nodes = 3"):
        get_elastic_buffer_size_hint(128, 7168, 32, num_nodes=3)
