"""What emulated ranks cost beside one rank with the same batch, and what recording costs."""

from refmodel import record
from scripts.benches.size_a import QUICK, STANDARD, make_model, one_pass, prefill
from scripts.benches.timing import Row, Session

_CASES = (  # ranks, redundant experts, dialect, limit
    (32, 0, "low_latency", "<= 1.25"),
    (144, 32, "low_latency", "<= 1.6"),
    (32, 0, "normal", ""),
    (144, 32, "normal", ""),
)
_TOKENS = 4608  # of the global batch


def measure(session: Session) -> list[Row]:
    """CPU time of a prefill on emulated ranks over that on one rank; `record()` over a plain run."""
    size = QUICK if session.quick else STANDARD
    model = make_model(size.config)
    cases = ((4, 0, "low_latency", ""), (4, 4, "normal", "")) if session.quick else _CASES
    tokens = 64 if session.quick else _TOKENS
    return _ranks(session, model, cases, tokens) + _recording(session, model, size)


def _ranks(session, model, cases, tokens):
    """One request for each rank; one rank computes the same requests in one batch."""
    rows = []
    for ranks in dict.fromkeys(case[0] for case in cases):
        mine = [case for case in cases if case[0] == ranks]
        runs = {"one rank": one_pass(model, ranks, tokens // ranks)}
        runs |= {
            dialect: one_pass(model, ranks, tokens // ranks, redundant, dialect) for _, redundant, dialect, _ in mine
        }
        times = session.interleave({f"{ranks} requests, {name}": run for name, run in runs.items()})
        alone = times.pop(f"{ranks} requests, one rank")
        rows.append(Row(f"{tokens} tokens of {ranks} requests, one rank", alone.seconds, "s", spread=alone.spread))
        moe_layers = sum(map(model.config.is_moe_layer, range(model.config.num_hidden_layers)))
        for (_, redundant, dialect, limit), timing in zip(mine, times.values()):
            name = f"EP{ranks}, {model.config.n_routed_experts + redundant} physical experts, {dialect}"
            ratio = timing.seconds / alone.seconds
            rows.append(Row(name, timing.seconds, "s", ratio, "one rank", session.limit(limit), timing.spread))
            extra = max(0.0, timing.seconds - alone.seconds) / (ranks * moe_layers)
            rows.append(Row(f"{name}: beyond one rank, by rank and MoE layer", extra, "s"))
    return rows


def _recording(session, model, size):
    plain = prefill(model, size.prompts[-1], size.tokens)

    def recorded():
        with record():
            plain()

    times = session.interleave({"plain": plain, "record()": recorded})
    ratio = times["record()"].seconds / times["plain"].seconds
    name = f"prefill {size.prompts[-1]} x {size.tokens} under record()"
    return [
        Row(
            name, times["record()"].seconds, "s", ratio, "plain run", session.limit("<= 1.25"), times["record()"].spread
        )
    ]
