"""Speed of the model at size A: against transformers where it is installed, against BLAS, against itself."""

from unittest import mock

import numpy as np

from refmodel.rowcounts import RowCounts
from scripts.benches.size_a import SIZE_A, decode, flop_per_token, make_model, prefill
from scripts.benches.timing import Row, interleave

_SIDE = 2048  # of the square product that stands for the machine's peak


def measure(repeats: int) -> list[Row]:
    """Prefill, decode, the price of bit-invariant rows, and the other numerics."""
    fast = make_model("float32", "float32")
    rows = _prefill(fast, repeats) + _decode(fast, repeats)
    return rows + _invariance(fast, repeats) + _numerics(fast, repeats)


def _square(dtype):
    a = np.random.default_rng(0).standard_normal((_SIDE, _SIDE)).astype(dtype)
    return lambda: a @ a


def _prefill(model, repeats):
    candidates = {"sgemm": _square(np.float32)}
    candidates |= {f"prefill {batch} x 512": prefill(model, batch) for batch in (1, 4)}
    peers = _peers("prefill")
    times = interleave({**candidates, **peers}, repeats)
    peak = 2 * _SIDE**3 / times["sgemm"].cpu
    rows = [Row("sgemm 2048", peak / 1e9, "GFLOP/s")]
    for batch, limit in ((1, ""), (4, ">= 0.6")):
        name = f"prefill {batch} x 512"
        rate = batch * 512 * flop_per_token(SIZE_A, 256) / times[name].cpu
        rows.append(Row(name, times[name].cpu * 1e3, "ms", rate / peak, "sgemm rate, one thread", limit))
        rows += _against_peers(name, times, peers, ">= 1.4")
    return rows


def _decode(model, repeats):
    rows = []
    for batch, limit in ((1, ">= 3.5"), (32, ">= 8"), (128, ">= 8")):
        name = f"decode {batch}, context 512"
        peers = _peers("decode", batch)
        times = interleave({name: decode(model, batch), **peers}, repeats)
        rows.append(Row(name, times[name].cpu * 1e3, "ms"))
        rows += _against_peers(name, times, peers, limit)
    return rows


def _peers(kind, batch=None):
    from scripts.benches.transformers_peer import candidates

    return candidates(kind, batch)


def _against_peers(name, times, peers, limit):
    mine = [peer for peer in peers if peer.startswith(name)]
    if not mine:
        return []
    best = min(mine, key=lambda peer: times[peer].cpu)
    return [Row(name, times[best].cpu * 1e3, "ms", times[best].cpu / times[name].cpu, f"us; {best}", limit)]


def _invariance(model, repeats):
    """The same model with whatever row counts come: what the rules of `refmodel.rowcounts` cost."""
    rows = []
    cases = [("prefill 4 x 512", prefill(model, 4), "<= 1.2"), ("decode 1", decode(model, 1), "<= 2.0")]
    cases += [(f"decode {batch}", decode(model, batch), "<= 1.5") for batch in (8, 32, 128)]
    for name, run, limit in cases:

        def free(run=run):
            with mock.patch.object(RowCounts, "plan", lambda self, rows: [(0, rows)] if rows else []):
                run()

        times = interleave({"ruled": run, "free": free}, repeats)
        ratio = times["ruled"].cpu / times["free"].cpu
        rows.append(Row(f"{name}, rows independent", times["ruled"].cpu * 1e3, "ms", ratio, "plain products", limit))
    return rows


def _numerics(fast, repeats):
    exact, narrow = make_model("float32", "float64"), make_model("fp8", "float64")
    runs = {"float32": prefill(fast, 4), "float64": prefill(exact, 4), "fp8": prefill(narrow, 4)}
    times = interleave(runs, max(1, repeats // 2))
    return [
        Row(f"prefill 4 x 512, {name}", times[name].cpu * 1e3, "ms", times["float32"].cpu / times[name].cpu,
            "speed of float32 compute", limit)
        for name, limit in (("float64", ">= 0.45"), ("fp8", ">= 0.2"))
    ]  # fmt: skip
