"""Hardware, work of stages, rooflines, and bytes on links: literal values, then slow counts beside the closed forms."""

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

from parallel.dispatch.draw import draw_routing
from parallel.dispatch.volumes import count_volumes
from parallel.timing.costs import (
    V3,
    Batch,
    Efficiency,
    ModelShape,
    Work,
    attention_parameters,
    combine_row_bytes,
    core_flop_per_pair,
    decode_batch,
    dispatch_row_bytes,
    expert_parameters,
    latent_bytes,
    prefill_batch,
    roofline,
    stage_work,
)
from parallel.timing.hardware import HARDWARE, Hardware, hardware
from parallel.timing.imbalance import Loads
from parallel.timing.prices import decode_scenario, time_of
from parallel.timing.traffic import (
    counted,
    distinct_nodes,
    distinct_ranks,
    every_copy_by_rdma,
    low_latency,
    node_limited,
)
from parallel.topology import Topology

TINY = ModelShape(
    hidden_size=4,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_attention_heads=2,
    q_lora_rank=3,
    kv_lora_rank=2,
    qk_nope_head_dim=2,
    qk_rope_head_dim=2,
    v_head_dim=3,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=5,
    intermediate_size=6,
    vocab_size=10,
)


def test_counts_of_v3_that_the_reports_print():
    assert attention_parameters() == 187_105_280
    assert expert_parameters() == 44_040_192
    assert core_flop_per_pair("decode") == 278_528
    assert core_flop_per_pair("prefill") == 81_920
    assert latent_bytes() * 61 == 70_272
    assert (dispatch_row_bytes(), combine_row_bytes()) == (7392, 14336)


def test_every_number_of_hardware_has_a_source():
    for gpu in HARDWARE.values():
        for name, figure in gpu.figures().items():
            assert figure.value > 0
            assert figure.unit
            assert figure.source != "given", (gpu.name, name)
    assert set(HARDWARE) == {"h800", "h20", "h100", "gb200_nvl72"}
    assert HARDWARE["h800"].nic == 50e9
    assert HARDWARE["gb200_nvl72"].nvlink == 900e9


def test_hardware_can_be_changed_and_is_validated():
    faster = hardware("h800").with_rates(nic=100e9)
    assert (faster.nic, faster.figures()["nic"].source) == (100e9, "given")
    with pytest.raises(ValueError, match="known are h800"):
        hardware("h900")
    with pytest.raises(ValueError, match="nic = 0"):
        hardware("h800").with_rates(nic=0)


def test_work_of_a_tiny_decode_layer_by_hand():
    batch = decode_batch(requests=1, context=5)  # 2 tokens, 10 pairs, 5 keys
    assert batch == Batch(2, 10, 5, 2, "decode")
    # q_a 4x3, kv_a 4x(2+2), q_b 3x2x(2+2) in FP8; absorbed keys 2 heads x 2 x 2 in BF16; 2 latents of 8 B
    assert stage_work("attn_proj", batch, TINY) == Work(2 * 2 * 52, 2 * 2 * 8, 52 + 16 + 16)
    # core: 2 x 2 heads x (4 + 2) per pair; value half of kv_b 2 x 3 x 2, gate 4 x 8 in BF16; o 6 x 4 in FP8
    assert stage_work("attn_core", batch, TINY) == Work(2 * 2 * 24, 240 + 2 * 2 * (12 + 32), 24 + 2 * 44 + 5 * 8)
    # 3 rows through experts of 3 x 4 x 5 parameters; a row moves 12 B
    assert stage_work("experts", batch, TINY, expert_rows=3, experts=2) == Work(2 * 3 * 60, 0, 120 + 36)
    assert stage_work("shared", batch, TINY) == Work(2 * 2 * 60, 0, 60 + 24)
    assert stage_work("mlp", batch, TINY) == Work(2 * 2 * 72, 0, 72 + 32)
    assert stage_work("merge", batch, TINY) == Work(0, 0, 64)
    assert stage_work("final", batch, TINY) == Work(0, 2 * 2 * 40, 80)


def test_work_of_a_tiny_prefill_layer_by_hand():
    batch = prefill_batch([2, 1], cached=[3, 0])  # pairs 2*3 + 3 and 1; keys 5 and 1
    assert batch == Batch(3, 10, 6, 2, "prefill")
    # kv_b 2x2x(2+3) joins the FP8 weights
    assert stage_work("attn_proj", batch, TINY) == Work(2 * 3 * 72, 0, 72 + 24)
    assert stage_work("attn_core", batch, TINY).bf16_flop == 10 * 2 * 2 * (4 + 3) + 2 * 3 * 32


def test_a_stage_that_only_moves_data_has_no_work():
    with pytest.raises(ValueError, match="dispatch_send"):
        stage_work("dispatch_send", decode_batch(1, 1), TINY)


def test_roofline_takes_the_slower_of_arithmetic_and_memory():
    gpu = Hardware("toy", 10.0, 20.0, 5.0, 1.0, 1.0, 1.0, 1, 1)
    assert roofline(Work(40, 30, 10), gpu) == 5.0  # 2 s + 3 s against 2 s
    assert roofline(Work(0, 10, 10), gpu) == 2.0
    half = Efficiency(attention=0.5, matmul=0.25, sms=0.5)
    assert roofline(Work(0, 10, 0), gpu, half, attention=True) == 4.0
    assert roofline(Work(0, 10, 0), gpu, half) == 8.0
    with pytest.raises(ValueError, match="fraction above 0"):
        Efficiency(link=1.5)
    with pytest.raises(ValueError, match="negative"):
        Efficiency(sync=-1.0)


def test_low_latency_bytes_of_the_decode_deployment():
    topology = Topology(144, 8)
    traffic = low_latency(176, topology)
    assert traffic["dispatch"].rdma_out[0] == pytest.approx(1408 * 7392 * 136 / 144, rel=1e-15)
    assert round(traffic["dispatch"].rdma_out[0]) == 9_829_717
    assert traffic["combine"].rdma_in[0] == pytest.approx(1408 * 14336 * 136 / 144, rel=1e-15)
    assert traffic["dispatch"].nvlink_out[5] == pytest.approx(1408 * 7392 * 7 / 144, rel=1e-15)
    simple = every_copy_by_rdma(176, topology)
    assert simple["dispatch"].rdma_out[0] == 1408 * 7392
    assert simple["dispatch"].nvlink_in[0] == 0


def units_by_counting(shape, units):
    """Average number of units (nodes or ranks) hit, over every choice of groups and of experts within them."""
    per_group, here = shape.n_routed_experts // shape.n_group, shape.n_routed_experts // units
    found = total = 0
    for groups in combinations(range(shape.n_group), shape.topk_group):
        pool = [group * per_group + i for group in groups for i in range(per_group)]
        for chosen in combinations(pool, shape.num_experts_per_tok):
            total += len({expert // here for expert in chosen})
            found += 1
    return total / found


@pytest.mark.parametrize("units", [1, 2, 4, 8])
def test_distinct_nodes_and_ranks_equal_a_count_of_every_choice(units):
    exact = units_by_counting(TINY, units)
    assert distinct_ranks(units, TINY) == pytest.approx(exact, rel=1e-14)
    if units <= TINY.n_group:
        assert distinct_nodes(units, TINY) == pytest.approx(exact, rel=1e-14)


def test_distinct_nodes_of_v3():
    assert distinct_nodes(4) == pytest.approx(2.928, abs=5e-4)
    assert distinct_nodes(8) == pytest.approx(3.629, abs=5e-4)
    with pytest.raises(ValueError, match="do not divide 8"):
        distinct_nodes(3)


def test_node_limited_traffic_by_hand():
    # 2 nodes of 2 ranks: half of the rows to a node leave the own one, half of the rows within it leave the own rank
    nodes, ranks = units_by_counting(TINY, 2), units_by_counting(TINY, 4)
    traffic = node_limited(10, Topology(4, 2), TINY)["dispatch"]
    assert traffic.rdma_out[0] == pytest.approx(10 * nodes / 2 * (4 + 4))
    assert traffic.nvlink_out[0] == pytest.approx(10 * ranks / 2 * (4 + 4))
    traffic = node_limited(10, Topology(4, 2), TINY)["combine"]
    assert traffic.rdma_in[3] == pytest.approx(10 * nodes / 2 * 8)
    assert traffic.nvlink_in[3] == pytest.approx(10 * ranks / 2 * 8)
    assert node_limited(10, Topology(2, 2), TINY)["dispatch"].rdma_out[0] == 0


def test_seconds_take_the_slower_link_and_direction():
    traffic = counted(
        SimpleNamespace(
            matrix=lambda direction, link, unit: (
                np.array([[0, 30], [10, 0]]) if link == "rdma" else np.array([[0, 400], [0, 0]])
            )
        )
    )["combine"]
    assert traffic.rdma_out.tolist() == [30, 10]
    assert traffic.rdma_in.tolist() == [10, 30]
    gpu = Hardware("toy", 1, 1, 1, 1, 10.0, 1.0, 1, 2)
    assert traffic.seconds(gpu).tolist() == [40.0, 40.0]
    assert traffic.seconds(gpu, link=0.5, sync=1.0).tolist() == [81.0, 81.0]
    uneven = traffic.received_by(Loads(np.array([3.0, 1.0]), np.ones(2)))
    assert uneven.rdma_in.tolist() == [15.0, 15.0]


def test_a_model_config_may_take_the_place_of_the_shape():
    assert V3.num_hidden_layers == 61
    assert stage_work("shared", decode_batch(1, 1), SimpleNamespace(**vars(TINY))) == stage_work(
        "shared", decode_batch(1, 1), TINY
    )


def drawn_volumes(kind, topology, dispatch, tokens=400):
    rng = np.random.default_rng(5)
    tables = [draw_routing(kind, rng, tokens, 256, 8, 8, 4) for _ in range(topology.num_ranks)]
    return count_volumes(tables, 256, topology, 7168, dispatch)


def test_low_latency_bytes_are_near_a_count_of_drawn_routing():
    topology = Topology(32, 8)
    volumes = drawn_volumes("uniform", topology, "low_latency")
    closed, exact = low_latency(400, topology), counted(volumes)
    for direction in ("dispatch", "combine"):
        assert closed[direction].rdma_out.mean() == pytest.approx(exact[direction].rdma_out.mean(), rel=0.01)
        assert closed[direction].nvlink_in.mean() == pytest.approx(exact[direction].nvlink_in.mean(), rel=0.02)


def test_node_limited_bytes_are_near_a_count_of_drawn_routing():
    topology = Topology(32, 8)
    volumes = drawn_volumes("group_limited", topology, "normal")
    closed, exact = node_limited(400, topology), counted(volumes)
    # a real row carries scales, weights and a header: about 1.5 % more than payload and scales
    assert closed["dispatch"].rdma_out.mean() == pytest.approx(exact["dispatch"].rdma_out.mean(), rel=0.02)
    assert closed["combine"].rdma_in.mean() == pytest.approx(exact["combine"].rdma_in.mean(), rel=0.02)
    assert closed["dispatch"].nvlink_out.mean() == pytest.approx(exact["dispatch"].nvlink_out.mean(), rel=0.02)


def test_a_scenario_takes_counted_traffic():
    topology = Topology(16, 8)
    traffic = counted(drawn_volumes("uniform", topology, "low_latency", tokens=88))
    even = decode_scenario(ranks=16, num_layers=4)
    real = replace(even, traffic=(traffic, traffic))
    assert time_of(real, "decode_overlap").makespan == pytest.approx(time_of(even, "decode_overlap").makespan, rel=0.1)
    assert time_of(real, "decode_overlap").makespan != time_of(even, "decode_overlap").makespan
