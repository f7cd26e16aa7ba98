"""Speed of the model at size A: against transformers where it is installed, against BLAS, against itself."""

from dataclasses import replace
from unittest import mock

import numpy as np

from refmodel.rowcounts import RowCounts
from scripts.benches import transformers_peer, vendor_peer
from scripts.benches.environment import blas_kernel, blas_on, threads_at_work
from scripts.benches.size_a import QUICK, STANDARD, Size, decode, flop_per_token, make_model, prefill
from scripts.benches.timing import Row, Session

_NAIVE_PEER, _ABSORBED_PEER = "transformers", "DeepSeek's inference code"
_AVX2_KERNELS = ("Haswell", "Zen")  # on these a row's bits depend on the rows beside it in most calls
_DECODE_LIMITS = {  # batch -> peer -> our speed over the peer's
    1: {_NAIVE_PEER: ">= 3.5", _ABSORBED_PEER: ">= 2.2"},
    32: {_NAIVE_PEER: ">= 8", _ABSORBED_PEER: ">= 1.9"},
    128: {_NAIVE_PEER: ">= 8", _ABSORBED_PEER: ">= 1.6"},
}
_WIDE = replace(
    STANDARD.config,
    hidden_size=2048,
    moe_intermediate_size=768,
    intermediate_size=4096,
    n_routed_experts=64,  # 1.2 GB of weights in one layer
    num_hidden_layers=2,
)


def measure(session: Session) -> list[Row]:
    """Prefill, decode, the price of bit-invariant rows, the other numerics, and a wider model."""
    size = QUICK if session.quick else STANDARD
    model = make_model(size.config)
    source = model.weights.source
    peers = (
        transformers_peer.Peer.found(size.config, source),
        vendor_peer.Peer.found(size.config, source, session.vendor),
    )
    rows = _prefill(session, size, model, peers) + _decode(session, size, model, peers)
    return rows + _invariance(session, size, model) + _numerics(session, size, model) + _wide(session, size)


def _square(side: int):
    """A function that multiplies two square float32 matrices, on as many BLAS threads as work at a time."""
    a = np.random.default_rng(0).standard_normal((side, side)).astype(np.float32)

    def run():
        with blas_on(threads_at_work()):
            return a @ a

    return run


def _prefill(session, size: Size, model, peers):
    ours = {_prefill_name(size, batch): prefill(model, batch, size.tokens) for batch in size.prompts}
    theirs = {batch: _of_peers(peers, "prefill", batch, size.tokens) for batch in size.prompts}
    for batch in size.prompts:
        _agree(ours[_prefill_name(size, batch)], theirs[batch])
    flat = {f"{peer}, {batch} prompts": run for batch, runs in theirs.items() for peer, run in runs.items()}
    times = session.interleave({"sgemm": _square(size.square), **ours, **flat})
    peak = 2 * size.square**3 / times["sgemm"].seconds
    rows = [Row(f"sgemm {size.square}", peak, "FLOP/s", spread=times["sgemm"].spread)]
    for batch in size.prompts:
        name = _prefill_name(size, batch)
        limit = "" if batch == 1 else _peak_limit()
        work = batch * size.tokens * flop_per_token(size.config, size.tokens / 2)
        rows.append(_share_of_peak(session, name, times[name], work, peak, limit))
        found = {peer: times[f"{peer}, {batch} prompts"] for peer in theirs[batch]}
        rows += _against(session, name, times[name], found, {_NAIVE_PEER: ">= 1.4"})
    return rows


def _prefill_name(size: Size, batch: int) -> str:
    return f"prefill {batch} x {size.tokens}"


def _peak_limit() -> str:
    return ">= 0.6" if threads_at_work() == 1 else ">= 0.45"


def _share_of_peak(session, name, timing, work, peak, limit) -> Row:
    against = f"sgemm rate, {threads_at_work()} thread(s)"
    return Row(name, timing.seconds, "s", work / timing.seconds / peak, against, session.limit(limit), timing.spread)


def _decode(session, size: Size, model, peers):
    rows = []
    for batch in size.decoding:
        name = f"decode {batch}, context {size.tokens}"
        theirs = _of_peers(peers, "decode", batch, size.tokens)
        ours = decode(model, batch, size.tokens)
        _agree(ours, theirs)
        times = session.interleave({name: ours, **theirs})
        rows.append(Row(name, times[name].seconds, "s", spread=times[name].spread))
        rows += _against(session, name, times.pop(name), times, _DECODE_LIMITS.get(batch, {}))
    return rows


def _of_peers(peers, kind, batch, tokens) -> dict:
    """name -> function of all peers that are here; a name begins with its peer's."""
    return {name: run for peer in peers if peer for name, run in peer.candidates(kind, batch, tokens).items()}


def _agree(ours, theirs) -> None:
    """A peer is one only if it computes the same: the worst logit of most rows within 1e-3 of their RMS."""
    mine = ours()
    for name, run in theirs.items():
        worst = np.abs(run() - mine).max(axis=1) / np.sqrt(np.mean(mine**2))
        if np.median(worst) > 1e-3:  # single rows may choose another expert at a near tie
            raise ValueError(f"{name} gives other logits than we do (by {np.median(worst):.2g} of their RMS)")


def _against(session, name, mine, theirs, limits):
    """Our speed over each peer's best setting."""
    rows = []
    for peer in (_NAIVE_PEER, _ABSORBED_PEER):
        settings = {setting: timing for setting, timing in theirs.items() if setting.startswith(peer)}
        if settings:
            best = min(settings, key=lambda setting: settings[setting].seconds)
            ratio = settings[best].seconds / mine.seconds
            limit = session.limit(limits.get(peer, ""))
            rows.append(Row(name, settings[best].seconds, "s", ratio, f"speed of {best}", limit, settings[best].spread))
    return rows


def _invariance(session, size: Size, model):
    """The same model with whatever row counts come: what the rules of `refmodel.rowcounts` cost."""
    batch, limit = size.prompts[-1], "<= 2.1" if blas_kernel() in _AVX2_KERNELS else "<= 1.2"
    cases = [(_prefill_name(size, batch), prefill(model, batch, size.tokens), limit)]
    for batch in size.decoding if session.quick else (1, 8, 32, 128):
        limit = "<= 2" if batch == 1 else "<= 1.5"
        cases.append((f"decode {batch}, context {size.tokens}", decode(model, batch, size.tokens), limit))
    rows = []
    for name, run, limit in cases:
        times = session.interleave({f"{name}, by the rules": run, f"{name}, plain products": _without_rules(run)})
        ruled, free = times.values()
        ratio = ruled.seconds / free.seconds
        rows.append(Row(f"{name}, rows independent", ruled.seconds, "s", ratio, "plain products", session.limit(limit),
                        ruled.spread))  # fmt: skip
    return rows


def _without_rules(run):
    """`run` with every product as one plain call, whatever its rows."""

    def free():
        with (
            mock.patch.object(RowCounts, "in_tiles", return_value=0),
            mock.patch.object(RowCounts, "plan", lambda self, rows, most=0: [(0, rows)] if rows else []),
            mock.patch.object(
                RowCounts, "multiply", lambda self, rows, matrix, out=None: np.matmul(rows, matrix, out=out)
            ),
        ):
            run()

    return free


def _numerics(session, size: Size, fast):
    batch = size.prompts[-1]
    runs = {"float32": prefill(fast, batch, size.tokens)}
    for name in ("float64", "fp8"):
        model = make_model(size.config, "float32" if name == "float64" else name, "float64")
        runs[name] = prefill(model, batch, size.tokens)
    times = session.interleave(runs)
    return [
        Row(f"{_prefill_name(size, batch)}, {what}", times[name].seconds, "s",
            times["float32"].seconds / times[name].seconds, "speed of float32 compute", session.limit(limit),
            times[name].spread)
        for name, what, limit in (("float64", "float64 compute", ">= 0.45"), ("fp8", "fp8 numerics", ">= 0.2"))
    ]  # fmt: skip


def _wide(session, size: Size):
    """Hidden 2048 with expert width 768, where products are large enough to come near the peak."""
    config = size.config if session.quick else _WIDE
    model = make_model(config)
    batch = size.prompts[-1]
    name = f"{_prefill_name(size, batch)}, hidden {config.hidden_size}"
    times = session.interleave({"sgemm": _square(size.square), name: prefill(model, batch, size.tokens)})
    peak = 2 * size.square**3 / times["sgemm"].seconds
    work = batch * size.tokens * flop_per_token(config, size.tokens / 2)
    return [_share_of_peak(session, name, times[name], work, peak, ">= 0.6")]
