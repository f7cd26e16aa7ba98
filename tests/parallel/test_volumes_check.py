"""Measured bytes against counted ones: what holds, what does not, where, and the likely cause."""

import gzip
import json

import numpy as np
import pytest

from parallel.dispatch.check_counters import check_measurements
from parallel.dispatch.counter_model import Options
from parallel.dispatch.measurements import read_measurements
from parallel.dispatch.volumes import count_volumes, volumes_of
from parallel.dispatch.workload import Workload
from parallel.topology import Topology

TOPOLOGY = Topology(4, 2)
HIDDEN = 7168


def layers(dispatch="low_latency", number=2, payload="fp8", none=0.0):
    rng = np.random.default_rng(0)
    found = []
    for _ in range(number):
        tables = [rng.permuted(np.tile(np.arange(16), (40, 1)), axis=1)[:, :4] for _ in range(4)]
        for table in tables:
            table[rng.random(table.shape) < none] = -1
        found.append(count_volumes(tables, 16, TOPOLOGY, HIDDEN, dispatch, payload))
    return found


def summed(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def check(tmp_path, text, parts, name="a.csv", **options):
    (tmp_path / name).write_text(text)
    return check_measurements(read_measurements(tmp_path / name), parts, Options(**options))


def nic_csv(values):
    return "rank,nic_sent_bytes\n" + "".join(f"{rank},{value}\n" for rank, value in enumerate(values))


def test_pairs_hold_exactly_within_a_node_and_with_headers_between_nodes(tmp_path):
    parts = layers()
    matrix = summed(parts).matrix()
    lines = [f"{s},{d},{matrix[s, d]}" for s in range(4) for d in range(4)]
    findings = check(tmp_path, "src,dst,bytes\n" + "\n".join(lines), parts)
    assert all(f.holds for f in findings)
    assert findings[0].allowed == (matrix[0, 0], pytest.approx(matrix[0, 0] * 1.002))  # no transport adds to a copy
    low, high = findings[2].allowed  # rank 0 to rank 2 on another node: up to two packets' headers to a row
    assert low == matrix[0, 2]
    assert 1.01 < high / low < 1.06


def test_each_rank_s_counters(tmp_path):
    total = summed(layers())
    off_rank = total.matrix() - np.diag(np.diag(total.matrix()))
    nic, nvlink = total.matrix(link="rdma"), total.matrix(link="nvlink")
    columns = {
        "sent_bytes": off_rank.sum(1),
        "received_bytes": off_rank.sum(0),
        "nic_sent_bytes": nic.sum(1) * 1.02,  # headers
        "nic_received_bytes": nic.sum(0) * 1.02,
        "nvlink_sent_bytes": nvlink.sum(1) // 1024 * 1024,
        "nvlink_received_bytes": nvlink.sum(0) * 1.1,
    }
    rows = [",".join([str(rank), *(str(values[rank]) for values in columns.values())]) for rank in range(4)]
    findings = check(tmp_path, "\n".join(["rank," + ",".join(columns), *rows]), layers())
    assert [f.holds for f in findings] == [True] * 24
    assert {f.measurement.quantity for f in findings} == {name.removesuffix("_bytes") for name in columns}


def test_nic_counters_are_words_of_four_bytes(tmp_path):
    parts = layers()
    words = [int(v * 1.015) // 4 for v in summed(parts).nic()]
    text = "rank,port_xmit_data_before,port_xmit_data_after\n"
    text += "".join(f"{rank},1000,{1000 + value * 7}\n" for rank, value in enumerate(words))
    findings = check(tmp_path, text, parts, repeat=7)
    assert all(f.holds for f in findings)
    assert findings[3].measured == (words[3] * 7 * 4, words[3] * 7 * 4 + 4)  # the last word may be half full
    assert not any(f.holds for f in check(tmp_path, nic_csv(summed(parts).nic()), parts, repeat=7))
    assert not any(f.holds for f in check(tmp_path, nic_csv(summed(parts).nic() * 7), parts))
    findings = check(tmp_path, nic_csv(words), parts)
    assert {f.cause for f in findings} == {"words of 4 bytes were taken for bytes"}
    assert not any(f.holds for f in findings)
    assert findings[0].ratio == pytest.approx(1.015 / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("dispatch", "change", "cause"),
    [
        ("normal", lambda v: v.nic() + own_node(v), "rows for the own node are included, as in DeepEP's metric"),
        ("low_latency", lambda v: v.nic() + v.matrix(link="nvlink").sum(1), "traffic by NVLink is included"),
        ("low_latency", lambda v: v.nic() - v.matrix(link="rdma", classes="scales").sum(1), "scales are left out"),
        ("low_latency", lambda v: v.nic() * 5 // 4, "5 targets per token instead of 4"),
        ("low_latency", lambda v: v.nic("dispatch"), "only dispatch is measured"),
        ("low_latency", lambda v: v.nic("combine"), "only combine is measured"),
        ("low_latency", lambda v: other(v, "bf16").nic(), "rows travel as bf16 instead of fp8"),
        ("elastic", lambda v: v.nic() - v.matrix(link="rdma", classes="padding").sum(1), "padding is left out"),
        ("low_latency", lambda v: v.nic() - logfmt_saves(v, 1.0), "rows come back as LogFMT-10"),
        ("low_latency", lambda v: v.nic() - logfmt_saves(v, 0.8), "rows come back as LogFMT-10"),
        ("low_latency", lambda v: v.nic() // 100, None),
    ],
)
def test_likely_causes(tmp_path, dispatch, change, cause):
    parts = layers(dispatch)
    findings = check(tmp_path, nic_csv(change(summed(parts))), parts)
    assert [f.holds for f in findings] == [False] * 4
    assert {f.cause and f.cause.split(", or ")[0] for f in findings} == {cause}


def own_node(volumes):
    rank = np.arange(4)
    rows = volumes.counts.tokens_to_node[rank, TOPOLOGY.node(rank)]
    return rows * (7168 + 224 + 8 + 32) + rows * (14336 + 8 + 8)  # both rows are multiples of 16: 7432 -> 7440, 14352


def logfmt_saves(volumes, cast):
    """Bytes by which rows are shorter where a share of them is cast: 9,184 or 14,560 instead of 14,336."""
    rows = volumes.matrix("combine", "rdma", "rows").sum(axis=1)
    return (rows * (14336 - 9184 * cast - 14560 * (1 - cast))).astype(int)


def other(volumes, payload):
    return volumes_of(volumes.counts, volumes.hidden, volumes.dispatch, payload, volumes.mode)


def test_copies_in_place_and_padding(tmp_path):
    parts = layers(none=0.3)
    total = summed(parts)
    text = "rank,direction,sent_bytes\n"
    wire = total.wire("dispatch")
    findings = check(tmp_path, text + "".join(f"{r},dispatch,{wire[r]}\n" for r in range(4)), parts)
    assert {f.cause.split(", or ")[0] for f in findings} == {"the own rank's traffic is included"}
    off_rank = (total.matrix("dispatch") - np.diag(np.diag(total.matrix("dispatch")))).sum(1)
    padded = off_rank * (total.counts.tokens.sum() * 4 / total.counts.slots_to_rank.sum())
    findings = check(tmp_path, text + "".join(f"{r},dispatch,{padded[r]}\n" for r in range(4)), parts)
    assert all("padding is counted: ids of -1 are sent" in f.cause for f in findings)


LOW_LATENCY_LOG = """
[rank 0] Dispatch + combine bandwidth: 41.00 GB/s, avg_t=500.00 us, min_t=1 us, max_t=2 us
[rank 0] Dispatch bandwidth: {:.2f} GB/s, avg_t=77.00 us | Combine bandwidth: 128.77 GB/s, avg_t=114.00 us
"""


def test_low_latency_test_logs(tmp_path):
    """128 tokens, top-8, hidden 7168: 7,585,792 and 14,680,064 bytes (deepseek-ai/DeepEP tests/legacy)."""
    workload = Workload(ranks=8, tokens=128, dispatch="low_latency", layers=1)
    parts = [count_volumes(workload.tables(0), 256, workload.topology, HIDDEN, "low_latency")]
    findings = check(tmp_path, LOW_LATENCY_LOG.format(98.52), parts, "log.txt")
    assert [f.holds for f in findings] == [True, True]
    assert findings[0].allowed == (7_585_792, 7_585_792)
    scales_left_out = 128 * 8 * (7168 + 16) / 77e3
    findings = check(tmp_path, LOW_LATENCY_LOG.format(scales_left_out), parts, "log.txt")
    assert [(f.holds, f.cause) for f in findings] == [(False, "scales are left out"), (True, None)]
    findings = check(tmp_path, LOW_LATENCY_LOG.format(98.52 * 9 / 8), parts, "log.txt")
    assert findings[0].cause == "9 targets per token instead of 8"
    logfmt = LOW_LATENCY_LOG.format(98.52).replace("128.77", f"{1024 * 9184 / 114e3:.2f}")
    findings = check(tmp_path, logfmt, parts, "log.txt")
    assert [(f.holds, f.cause) for f in findings] == [(True, None), (False, "rows come back as LogFMT-10")]


def test_normal_test_logs(tmp_path):
    parts = layers("normal", number=1)
    metric = parts[0].deepep()
    bf16 = other(parts[0], "bf16").deepep()
    times = {"rdma": 500, "combine": 900}
    lines = [
        "[tuning] SMs 24, NVL chunk 4, RDMA chunk 4: 50 + 500 us, 1.00 GB/s (RDMA), 2.00 GB/s (NVL) ",
        *(
            f"[tuning] Best dispatch ({name}): SMs 24, NVL chunk 4, RDMA chunk 8: 50 + {times['rdma']} us, "
            f"{m['rdma_send_bytes'][0] / 5e5:.2f} GB/s (RDMA), {m['nvl_recv_bytes'][0] / 5e5:.2f} GB/s (NVL)"
            for name, m in (("FP8", metric), ("BF16", bf16))
        ),
        f"[tuning] Best combine: SMs 24, NVL chunk 1, RDMA chunk 12, 50.00 + 900.00 us, "
        f"{metric['combine_bf16_rdma_recv_bytes'][0] / 9e5:.2f} GB/s (RDMA), 9.99 GB/s (NVL)",
    ]
    findings = check(tmp_path, "\n".join(lines), parts, "internode.log")
    assert [f.holds for f in findings] == [True] * 5 + [False]
    assert [f.measurement.quantity for f in findings][:3] == [
        "rdma_send_bytes:fp8",
        "nvl_recv_bytes:fp8",
        "rdma_send_bytes:bf16",
    ]
    with pytest.raises(ValueError, match="num_dispatch_comm_bytes is no figure of normal"):
        check(tmp_path, LOW_LATENCY_LOG.format(98.52), parts, "log.txt")


def trace(splits, rank=1, factor=1):
    events = [{"name": "other", "ts": 0, "args": {}}]
    for number, rows in enumerate(splits):
        for part in range(2):  # values and scales travel in two calls
            args = {
                "Collective name": "all_to_allv",
                "In split size": str([int(n) * factor for n in rows]),
                "dtype": "BFloat16",
            }
            events.append({"name": "record_param_comms", "cat": "cpu_op", "ts": 100 - 10 * number - part, "args": args})
    return {"distributedInfo": {"rank": rank}, "traceEvents": events}


def test_split_sizes_of_a_trace(tmp_path):
    parts = layers("alltoallv")
    rows = [part.matrix(direction, unit="rows") for part in parts for direction in ("dispatch", "combine")]
    right = [matrix[1] for matrix in rows][::-1]  # the trace's events are not in order of time
    assert all(f.holds for f in check(tmp_path, json.dumps(trace(right)), parts, "a.json"))
    with gzip.open(tmp_path / "b.json.gz", "wt") as file:
        json.dump(trace(right), file)
    found = check_measurements(read_measurements(tmp_path / "b.json.gz"), parts)
    assert (len(found), all(f.holds for f in found)) == (4, True)
    wrong = right[-1] + np.array([0, 0, 3, 0])
    (finding,) = check(tmp_path, json.dumps(trace([wrong])), parts, "a.json")
    assert finding.cause == f"to rank 2: {wrong[2]} rows measured, {right[-1][2]} counted"
    (finding,) = check(tmp_path, json.dumps(trace([right[-1]], factor=HIDDEN)), parts, "a.json")
    assert finding.cause.startswith("every split is 7168 times the rows")
    more = check(tmp_path, json.dumps(trace([right[1], *right])), parts, "a.json")
    assert [f.cause for f in more][-1] == "more exchanges than the layers have"
    (finding,) = check(tmp_path, json.dumps(trace([[1, 2]])), parts, "a.json")
    assert finding.cause == "2 split sizes for 4 ranks: another group of ranks"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "rank,temperature\n0,60\n", "line 2: no known column beside rank; known are sent_bytes"),
        ("a.csv", "from,to\n0,1\n", "columns from, to; `src,dst,bytes`"),
        ("a.csv", "src,dst,bytes\n0,x,1\n", "line 2: invalid literal"),
        ("a.csv", "rank,direction,sent_bytes\n0,up,1\n", "direction = 'up'"),
        ("a.csv", "rank,port_rcv_data_before,port_rcv_data_after\n0,9,1\n", "port_rcv_data went from 9 to 1"),
        ("a.csv", "rank,sent_bytes\n7,1\n", "rank 7, but there are 4 ranks"),
        ("a.txt", "nothing here\n", "holds nothing that can be checked"),
        ("a.json", "{}", "holds nothing that can be checked"),
        ("a.json", "[1]", "is no Kineto trace"),
        (
            "a.json",
            json.dumps({"traceEvents": [{"args": {"Collective name": "all_to_allv", "In split size": "[1, ...]"}}]}),
            "all-to-all 0: the profiler cut the split sizes off",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, text, words):
    with pytest.raises(ValueError, match=words):
        check(tmp_path, text, layers(number=1), name)
