"""What each fault of the network does to each dialect: the same result, or an error that names the place.

`python -m parallel.dispatch.fault_matrix > docs/faults.md` writes the table that the documentation shows.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from parallel.dispatch.dialects import make_exchange
from parallel.network import Network
from parallel.packets import FAULTS, Fault, FaultyNetwork
from parallel.topology import Topology

TOPOLOGY, NUM_EXPERTS, TOP_K, HIDDEN = Topology(4, 2), 8, 3, 128
TOKENS = (5, 3, 4, 6)
SENDS = ("dispatch_send", "dispatch_forward", "combine_send", "combine_forward")
COLUMNS = {
    "normal, one node": ("normal", Topology(4), {}),
    "normal": ("normal", TOPOLOGY, {}),
    "low_latency": ("low_latency", TOPOLOGY, {"num_max_tokens_per_rank": 6}),
    "elastic hybrid": ("elastic", TOPOLOGY, {"mode": "hybrid", "num_max_tokens_per_rank": 6}),
    "elastic direct": ("elastic", TOPOLOGY, {"mode": "direct", "num_max_tokens_per_rank": 6}),
    "allgather": ("allgather", TOPOLOGY, {}),
    "alltoallv": ("alltoallv", TOPOLOGY, {}),
}
CIRCUMSTANCES = {
    "capacity too small": "one rank has a token more than num_max_tokens_per_rank",
    "different maximum": "one rank has another num_max_tokens_per_rank",
    "different top-k": "one rank sends one slot fewer for each token",
    "different rows": "one rank sends float32 rows, the others bfloat16",
    "no tokens": "one rank has no tokens",
    "no tokens anywhere": "no rank has tokens",
    "nothing selected": "one rank's slots are all -1",
}


class Outcome(NamedTuple):
    """How a run with a fault ended."""

    stage: str
    result: str  # "same result", "different result" or the name of the error
    message: str  # of the error, or empty


def outcomes(fault: str, column: str) -> list[Outcome]:
    """The outcomes of a fault in a dialect: one for each stage that sends, or one for a circumstance."""
    dialect, topology, options = COLUMNS[column]
    if fault in CIRCUMSTANCES:
        if fault in ("capacity too small", "different maximum") and "num_max_tokens_per_rank" not in options:
            return []
        return [_with_circumstance(fault, dialect, topology, options)]
    found = []
    for stage in SENDS:
        network = FaultyNetwork(topology, [Fault(fault, stage)])
        outcome = _attempt(stage, network, dialect, topology, [options] * topology.num_ranks, _batches(TOKENS))
        if network.happened:
            found.append(outcome)
    return found


def document() -> str:
    """The page about faults, in Markdown."""
    faults = {fault: text.strip() for fault, text in _fault_texts().items()} | CIRCUMSTANCES
    lines = [
        "# Faults between ranks",
        "",
        "Written by `python -m parallel.dispatch.fault_matrix > docs/faults.md`; a test holds it to what happens.",
        "Each fault is put into each stage that sends, one after the other, in the second step of a small run",
        f"({TOPOLOGY.num_ranks} ranks on {TOPOLOGY.num_nodes} nodes, or on one). All ranks come to the same result,",
        "bit for bit, or one stops with an error that names the rank, the layer and the message: never a wrong number.",
        "",
        "| fault | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    examples = {}
    for fault in faults:
        cells = []
        for column in COLUMNS:
            ends = outcomes(fault, column)
            cells.append(", ".join(sorted({end.result for end in ends})) or "does not apply")
            for end in ends:
                examples.setdefault((fault, end.result), end.message)
        lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    lines += ["", "What the faults are:", ""]
    lines += [f"- {fault}: {text}" for fault, text in faults.items()]
    lines += ["", "What the errors say:", ""]
    lines += [f"- {fault}, {name}: `{message}`" for (fault, name), message in examples.items() if message]
    return "\n".join(lines) + "\n"


def _fault_texts() -> dict[str, str]:
    """What each fault of the transport is, from the docstring of `Fault`."""
    text = " ".join(Fault.__doc__.split())
    starts = [text.index(f" {fault}: ") for fault in FAULTS]
    return {
        fault: text[start + len(fault) + 3 : stop].rstrip(". ")
        for fault, start, stop in zip(FAULTS, starts, [*starts[1:], len(text)])
    }


def _with_circumstance(fault, dialect, topology, options) -> Outcome:
    ranks = topology.num_ranks
    batches, each = _batches(TOKENS), [dict(options) for _ in range(ranks)]
    if fault == "capacity too small":
        each = [dict(options, num_max_tokens_per_rank=5)] * ranks
    elif fault == "different maximum":
        each[1]["num_max_tokens_per_rank"] = 7
    elif fault == "different top-k":
        batches = [_only_rank(batch, 1, lambda x, idx, w: (x, idx[:, :-1], w[:, :-1])) for batch in batches]
    elif fault == "different rows":
        batches = [_only_rank(batch, 1, lambda x, idx, w: (x.astype(np.float32), idx, w)) for batch in batches]
    elif fault == "nothing selected":
        batches = [_only_rank(batch, 1, lambda x, idx, w: (x, np.full_like(idx, -1), w)) for batch in batches]
    else:
        batches = _batches((5, 0, 4, 6) if fault == "no tokens" else (0, 0, 0, 0))
    return _attempt("", Network(topology), dialect, topology, each, batches)


def _attempt(stage, network, dialect, topology, options, batches) -> Outcome:
    expected = [_expected(dialect, topology, options[0].get("mode"), batch) for batch in batches]
    try:
        results = [_run(network, dialect, topology, options, step, batch) for step, batch in enumerate(batches)]
    except ValueError as error:
        return Outcome(stage, type(error).__name__, str(error))
    same = all(
        left.tobytes() == right.tobytes() for step, truth in zip(results, expected) for left, right in zip(step, truth)
    )
    return Outcome(stage, "same result" if same else "different result", "")


def _expected(dialect, topology, mode, batch) -> list[np.ndarray]:
    """What every rank's tokens come to when each rank is alone with all experts that it needs."""
    options = [{"mode": mode} if mode else {}] * topology.num_ranks
    whole = []
    for rank, (x, idx, weights) in enumerate(batch):
        alone = [
            (x, idx, weights)
            if other == rank
            else (x[:0], np.zeros((0, idx.shape[1]), np.int64), np.zeros((0, idx.shape[1]), np.float32))
            for other in range(topology.num_ranks)
        ]
        whole.append(_run(Network(topology), dialect, topology, options, 0, alone)[rank])
    return whole


def _run(network, dialect, topology, options, step, batch) -> list[np.ndarray]:
    """One step of all ranks in order; the experts scale rows by their id."""
    ranks = range(topology.num_ranks)
    local = NUM_EXPERTS // topology.num_ranks
    exchanges = [make_exchange(dialect, network, rank, NUM_EXPERTS, step=step, **options[rank]) for rank in ranks]
    for exchange, arrays in zip(exchanges, batch):
        exchange.dispatch_send(*arrays)
    for exchange in exchanges:
        exchange.dispatch_forward()
    for rank, exchange in enumerate(exchanges):
        pairs = exchange.dispatch_recv()
        gain = (pairs.expert + rank * local + 1).astype(np.float32)[:, None]
        exchange.combine_send((pairs.x[pairs.row].astype(np.float32) * gain).astype(pairs.x.dtype))
    for exchange in exchanges:
        exchange.combine_forward()
    return [exchange.combine_recv() for exchange in exchanges]


def _batches(tokens) -> list[list[tuple]]:
    """Two steps of (x, topk_idx, topk_weights) per rank."""
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(2):
        batch = []
        for count in tokens:
            x = rng.standard_normal((count, HIDDEN)).astype(np.float32).astype(ml_dtypes.bfloat16)
            idx = np.argsort(rng.random((count, NUM_EXPERTS)), axis=1)[:, :TOP_K]
            batch.append((x, idx, rng.random((count, TOP_K)).astype(np.float32)))
        steps.append(batch)
    return steps


def _only_rank(batch, rank, change) -> list[tuple]:
    return [change(*arrays) if number == rank else arrays for number, arrays in enumerate(batch)]


if __name__ == "__main__":
    print(document(), end="")
