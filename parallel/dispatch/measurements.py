"""What a user can measure of dispatch and combine, read from the files in which it comes.

- CSV with a header. Pairs: `src,dst,bytes`. Ranks: `rank` and any of `sent_bytes`, `received_bytes` (everything that
  leaves or enters the GPU), `nic_sent_bytes`, `nic_received_bytes`, `nvlink_sent_bytes`, `nvlink_received_bytes`,
  or a NIC's counters before and after, `port_xmit_data_before`, `port_xmit_data_after`, `port_rcv_data_before`,
  `port_rcv_data_after`
  (words of 4 bytes). A column `direction` (dispatch, combine) tells the two apart; without it both are in the number.
- Text: what DeepEP's test scripts print, GB/s and times; their product is the bytes that the test counted.
- JSON (also .gz): a Kineto trace; the split sizes of its ragged all-to-alls, in order, are rows.
"""

import csv
import gzip
import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

WORD = 4  # bytes that a NIC's data counters count as one
COUNTERS = {"port_xmit_data": "nic_sent", "port_rcv_data": "nic_received"}
RANK_QUANTITIES = ("sent", "received", "nic_sent", "nic_received", "nvlink_sent", "nvlink_received")
NO_COLUMN = (
    f"no known column beside rank; known are {', '.join(f'{quantity}_bytes' for quantity in RANK_QUANTITIES)}, and "
    f"{' and '.join(f'{counter}_before, {counter}_after' for counter in COUNTERS)}"
)


class Measurement(NamedTuple):
    """One measured number: `quantity` at `place` (a rank, a (source, destination), or None) lies in [low, high].

    quantity: `pair`, one of RANK_QUANTITIES, a name of DeepEP's metric, or `splits` (low = high = rows to each rank).
    direction: dispatch, combine, or None for both together. where: file and line, for messages."""

    quantity: str
    direction: str | None
    place: int | tuple[int, int] | None
    low: float | np.ndarray
    high: float | np.ndarray
    where: str


def read_measurements(path) -> list[Measurement]:
    """Everything measured in one file. Raises ValueError where nothing is found or a line cannot be read."""
    path = Path(path)
    suffixes = path.suffixes
    if ".json" in suffixes[-2:]:
        found = _read_trace(path)
    elif path.suffix == ".csv":
        found = _read_csv(path)
    else:
        found = _read_log(path)
    if not found:
        raise ValueError(
            f"{path} holds nothing that can be checked: a .csv of counters, a .json trace with all_to_allv events, or "
            "the output of a DeepEP test is needed"
        )
    return found


def _read_csv(path: Path) -> list[Measurement]:
    with path.open(newline="") as file:
        reader = csv.DictReader(line for line in file if not line.startswith("#"))
        columns = {(name or "").strip().lower(): name for name in reader.fieldnames or ()}
        if {"src", "dst", "bytes"} <= columns.keys():
            read_row = _pair_row
        elif "rank" in columns:
            read_row = _rank_row
        else:
            raise ValueError(f"{path}: columns {', '.join(columns)}; `src,dst,bytes` or `rank,...` are needed")
        found = []
        for line, row in enumerate(reader, 2):
            cells = {name: (row[original] or "").strip() for name, original in columns.items()}
            where = f"{path}, line {line}"
            try:
                found += read_row(cells, _direction(cells), where)
            except (ValueError, KeyError) as error:
                raise ValueError(f"{where}: {error}") from None
    return found


def _direction(cells: dict) -> str | None:
    direction = cells.get("direction") or None
    if direction not in (None, "dispatch", "combine"):
        raise ValueError(f"direction = {direction!r}: must be dispatch, combine or empty")
    return direction


def _pair_row(cells, direction, where):
    value = float(cells["bytes"])
    return [Measurement("pair", direction, (int(cells["src"]), int(cells["dst"])), value, value, where)]


def _rank_row(cells, direction, where):
    rank, found = int(cells["rank"]), []
    for quantity in RANK_QUANTITIES:
        if cells.get(f"{quantity}_bytes"):
            value = float(cells[f"{quantity}_bytes"])
            found.append(Measurement(quantity, direction, rank, value, value, where))
    for counter, quantity in COUNTERS.items():
        before, after = cells.get(f"{counter}_before"), cells.get(f"{counter}_after")
        if before and after:
            words = int(after) - int(before)
            if words < 0:
                raise ValueError(f"{counter} went from {before} to {after}: the counter wrapped or was reset")
            found.append(Measurement(quantity, direction, rank, words * WORD, (words + 1) * WORD, where))
    if not found:
        raise ValueError(NO_COLUMN)
    return found


_NUMBER = r"(\d+(?:\.\d+)?)"
_RANK = re.compile(r"\[rank (\d+)\]")
_LOW_LATENCY = {
    "num_dispatch_comm_bytes": ("dispatch", re.compile(rf"Dispatch bandwidth: {_NUMBER} GB/s, avg_t={_NUMBER} us")),
    "num_combine_comm_bytes": ("combine", re.compile(rf"Combine bandwidth: {_NUMBER} GB/s, avg_t={_NUMBER} us")),
}
_BEST = re.compile(r"Best (dispatch|combine)(?: \((\w+)\))?:")
_TIME = re.compile(rf"\+ {_NUMBER} us|t: {_NUMBER} us")
_NORMAL = {
    ("dispatch", "RDMA"): "rdma_send_bytes",
    ("dispatch", "NVL"): "nvl_recv_bytes",
    ("combine", "RDMA"): "combine_bf16_rdma_recv_bytes",
    ("combine", "NVL"): "combine_bf16_nvl_send_bytes",
}
_PAYLOADS = {"FP8": "fp8", "BF16": "bf16"}


def _read_log(path: Path) -> list[Measurement]:
    """DeepEP tests/legacy/test_{low_latency,intranode,internode}.py: bandwidths with two decimals, and their times."""
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is neither text, .csv nor .json") from None
    found = []
    for number, line in enumerate(lines, 1):
        where, rank = f"{path}, line {number}", _RANK.search(line)
        place = int(rank[1]) if rank else None
        for metric, (direction, pattern) in _LOW_LATENCY.items():
            if match := pattern.search(line):
                found.append(Measurement(metric, direction, place, *_bytes(match[1], match[2]), where))
        best, time = _BEST.search(line), _TIME.search(line)
        if best and time:
            for speed, link in re.findall(rf"{_NUMBER} GB/s \((RDMA|NVL)\)", line):
                metric = _NORMAL[best[1], link]
                payload = f":{_PAYLOADS[best[2]]}" if best[2] in _PAYLOADS else ""
                found.append(Measurement(metric + payload, best[1], place, *_bytes(speed, time[1] or time[2]), where))
    return found


def _bytes(speed: str, time_us: str) -> tuple[float, float]:
    """Bytes of GB/s times microseconds, as an interval: both were rounded when they were printed."""
    (low_s, high_s), (low_t, high_t) = _rounded(speed), _rounded(time_us)
    return low_s * low_t * 1e3, high_s * high_t * 1e3


def _rounded(text: str) -> tuple[float, float]:
    half = 0.5 * 10.0 ** -len(text.partition(".")[2])
    return max(float(text) - half, 0.0), float(text) + half


def _read_trace(path: Path) -> list[Measurement]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt") as file:
            trace = json.load(file)
        rank = trace.get("distributedInfo", {}).get("rank") if isinstance(trace, dict) else None
        events = trace.get("traceEvents", []) if isinstance(trace, dict) else trace
        ragged = [e for e in events if "all_to_all" in str(e.get("args", {}).get("Collective name", "")).lower()]
    except (EOFError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no Kineto trace: {error}") from None
    splits = [(e.get("ts", 0), e["args"].get("In split size")) for e in ragged if e.get("cat", "cpu_op") == "cpu_op"]
    splits = splits or [(e.get("ts", 0), e["args"].get("In split size")) for e in ragged]
    found = []
    for number, (_, text) in enumerate(sorted((s for s in splits if s[1]), key=lambda pair: pair[0])):
        if "..." in str(text):
            raise ValueError(f"{path}, all-to-all {number}: the profiler cut the split sizes off: {text}")
        rows = np.array(json.loads(text) if isinstance(text, str) else text, np.int64)
        if rows.size and (not found or not np.array_equal(found[-1].low, rows)):  # one exchange moves several tensors
            found.append(Measurement("splits", None, rank, rows, rows, f"{path}, all-to-all {number}"))
    return found
