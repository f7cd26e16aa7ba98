"""Measured durations: tables of stages and profiler traces."""

import json

import pytest

from parallel.schedule import BUILDERS, LayerPlan, Op
from parallel.timing.measured import Kernel, families, family_of, overlap, read_csv, read_profile
from parallel.timing.prices import decode_scenario, time_of
from parallel.timing.published import PUBLISHED, beside_published, one_rank, training_model
from parallel.timing.timeline import timeline


def op(stage, micro_batch=0, layer=5, rank=0):
    return Op("F", rank, micro_batch, layer, stage)


def test_the_most_specific_row_counts(tmp_path):
    path = tmp_path / "stages.csv"
    path.write_text(
        "stage,seconds,micro_batch,layer,rank\n"
        "experts,1.0,,,\nexperts,2.0,1,,\nexperts,3.0,,5,\nexperts,4.0,,,2\ndispatch,0.5,,,\ncombine_recv,0.25,,,\n"
    )
    table = read_csv(path)
    assert table.compute(op("experts", layer=4)) == 1.0
    assert table.compute(op("experts", micro_batch=1, layer=4)) == 2.0
    assert table.compute(op("experts", micro_batch=1)) == 3.0
    assert table.compute(op("experts", rank=2)) == 4.0
    assert table.compute(op("shared")) == 0.0
    assert table.transfer(op("dispatch_send")) == 0.5
    assert table.transfer(op("dispatch_forward")) == 0.0
    assert table.compute(op("combine_recv")) == 0.25


def test_a_timeline_of_measured_durations(tmp_path):
    path = tmp_path / "stages.csv"
    path.write_text("stage,seconds\nattn_core,3\nexperts,2\ndispatch,1\ncombine,4\n")
    table = read_csv(path)
    result = timeline([BUILDERS["decode_overlap"](LayerPlan.of(1, 0), 0)], table.compute, table.transfer)
    # attention 3; dispatch 1, experts 2; combine 4 beside attention 3; dispatch 1, experts 2, combine 4
    assert result.makespan == 3 + 1 + 2 + 4 + 1 + 2 + 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage,seconds\nattention,1\n", "row 2: stage 'attention' is none of"),
        ("stage,seconds\nexperts,fast\n", "needs a number of seconds"),
        ("stage,seconds\nexperts,-1\n", "not a duration"),
        ("stage,seconds,layer\nexperts,1,two\n", "whole micro_batch, layer, rank"),
        ("stage,seconds\n", "has no rows"),
    ],
)
def test_bad_tables_are_refused(tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_csv(path)


def small_trace():
    names = [
        ("void lib::internode::dispatch<false, 8, false, 8>(int4*)", 27, 100, 30),
        ("void lib::grouped_gemm::m_grouped_fp8::GemmKernel", 7, 110, 40),
        ("void lib::internode::combine<false>(int4*)", 27, 160, 20),
        ("void at::elementwise_kernel<4>", 7, 170, 5),
    ]
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "tid": stream, "args": {"stream": stream}}
        for name, stream, ts, dur in names
    ]
    return {"traceEvents": [*events, {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1, "dur": 1}]}


def test_kernels_of_a_profiler_trace_by_hand(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(small_trace()))
    kernels = read_profile(path)
    assert [kernel.stream for kernel in kernels] == [27, 7, 27, 7]
    assert kernels[1].start == pytest.approx(10e-6)
    found = families(kernels)
    assert list(found) == ["grouped_gemm", "dispatch", "combine", "other"]
    assert found["dispatch"].mean == pytest.approx(30e-6)
    hidden = overlap(kernels)
    # dispatch 100..130 is covered from 110 on; combine 160..180 from 170 to 175
    assert hidden.span == pytest.approx(80e-6)
    assert hidden.communication == pytest.approx(50e-6)
    assert hidden.computation == pytest.approx(45e-6)
    assert hidden.hidden == pytest.approx(25e-6)


def test_overlapping_kernels_of_one_kind_count_once():
    kernels = [Kernel("gemm", 7, 0.0, 2.0), Kernel("gemm", 23, 1.0, 2.0), Kernel("internode::combine", 27, 0.0, 5.0)]
    assert overlap(kernels) == (5.0, 3.0, 5.0, 3.0)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*", "dispatch_cached"),
        ("deep_ep::internode_ll::combine<false>", "combine"),
        ("deep_ep::internode::notify_dispatch<false, 8>", "notify"),
        ("flash::FlashAttnBwdPreprocess<", "attention_other"),
        ("flash::FlashAttnBwd<flash::Collective", "attention_backward"),
        ("void flash::compute_attn_ws<Flash_fwd", "attention_forward"),
        ("fp8_dptp128c_acc::GemmKernel", "weight_gradient_gemm"),
        ("sm90_xmma_gemm_bf16f32", "gemm"),
        ("rotary_kernel", "other"),
    ],
)
def test_kernels_are_known_by_their_names(name, family):
    assert family_of(name) == family


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "no list traceEvents"), ('{"traceEvents": []}', "no GPU kernel")],
)
def test_files_that_are_no_trace_are_refused(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_profile(path)


def test_the_training_model_at_peak_rates():
    model = training_model()
    # 4096 tokens, 3.629 nodes of 8, seven of eight by RDMA, 7392 B a row at 50 GB/s
    assert model["dispatch"] == pytest.approx(4096 * 3.6290109 * 7 / 8 * 7392 / 50e9, rel=1e-6)
    assert model["combine"] / model["dispatch"] == pytest.approx(14336 / 7392)
    assert model["attention_forward"] == pytest.approx(4096 * 4097 / 2 * 81920 / 989e12)


def test_the_model_is_faster_than_every_published_throughput():
    rows = beside_published()
    assert [row.name for row in rows] == [entry.name for entry in PUBLISHED]
    for row in rows:
        assert row.bound > row.modelled > row.published, row.name
        assert 1 < row.ratio < 2.5


def test_one_rank_stands_for_all_of_them():
    scenario = decode_scenario(ranks=16, num_layers=4)
    assert time_of(one_rank(scenario), "decode_overlap").makespan == time_of(scenario, "decode_overlap").makespan
