"""How cost grows: slopes of log(CPU time) over log(size), where 1 is linear and 0 is constant."""

from dataclasses import replace

from scripts.benches.size_a import QUICK, STANDARD, decode, make_model, one_pass, prefill
from scripts.benches.timing import Row, Session, slope


def measure(session: Session) -> list[Row]:
    """Over tokens, ranks at a fixed global batch, experts at a fixed top-k, and context."""
    size = QUICK if session.quick else STANDARD
    model = make_model(size.config)
    rows = [_tokens(session, model, size), _ranks(session, model)]
    return [*rows, _experts(session, size), *_context(session, model, size)]


def _slope(session, what, runs, limit) -> Row:
    """`runs` maps a size to what takes the time; the value is the seconds at the largest size."""
    times = session.interleave({f"{what}: {number}": run for number, run in runs.items()})
    seconds = [timing.seconds for timing in times.values()]
    name = f"slope in {what}: {', '.join(f'{number:,}' for number in runs)}"
    spread = max(timing.spread for timing in times.values())
    return Row(name, seconds[-1], "s", slope(list(runs), seconds), "log-log slope", session.limit(limit), spread)


def _tokens(session, model, size):
    batches = (1, 2) if session.quick else (1, 2, 4, 8)
    runs = {batch * size.tokens: prefill(model, batch, size.tokens) for batch in batches}
    return _slope(session, f"tokens, prompts of {size.tokens}", runs, "<= 1.05")


def _ranks(session, model):
    """The requests stay the same: R ranks hold requests / R of them each."""
    ranks, requests, tokens = ((2, 4), 4, 16) if session.quick else ((8, 16, 32, 64, 128), 128, 36)
    runs = {count: one_pass(model, requests, tokens, 0, "low_latency", count) for count in ranks}
    return _slope(session, f"ranks, {requests * tokens:,} tokens in all", runs, "<= 0.25")


def _experts(session, size):
    counts = (16, 32) if session.quick else (32, 64, 128, 256)
    runs = {}
    for count in counts:
        model = make_model(replace(size.config, n_routed_experts=count))
        runs[count] = prefill(model, size.prompts[-1], size.tokens)
    return _slope(session, f"experts, {size.prompts[-1]} x {size.tokens} tokens", runs, "<= 0.6")


def _context(session, model, size):
    """No limit: attention is linear in the context of a decode step and quadratic in a prefill's prompt."""
    contexts = (16, 32) if session.quick else (512, 1024, 2048, 4096)
    decoding = {context: decode(model, size.decoding[1], context) for context in contexts}
    prompts = {context: prefill(model, 1, context) for context in contexts}
    return [
        _slope(session, f"context, decode of {size.decoding[1]}", decoding, ""),
        _slope(session, "tokens of one prompt", prompts, ""),
    ]
