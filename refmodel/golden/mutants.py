"""Engines of our own with one planted fault each, to see whether `locate` finds it.

`python -m refmodel.golden.mutants` prints the score; with `--plant` it writes what one such engine would capture.
An engine is the chain of operators, computed in float32 so that it has rounding noise of its own, with one mistake at
one layer, for all tokens or for those of one rank.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from refmodel.golden.bundle import read_bundle
from refmodel.golden.judge import status_of
from refmodel.golden.locate import Location, locate, operator_rule
from refmodel.golden.metrics import measure
from refmodel.golden.mistakes import MISTAKES, Mistake, mistakes_of
from refmodel.golden.operators import Context, Operator, mtp_operators, operators
from refmodel.golden.passes import stated_passes
from refmodel.golden.replay import Replay
from refmodel.golden.topk import compare_routes, ids_of, is_topk_idx
from refmodel.model import Model
from refmodel.presets import EXAMPLE
from refmodel.tensor_file import save_tensors

RANKS = 4


@dataclass(frozen=True)
class Mutant:
    """A mistake in the operator that makes `tensor`; `rank` is None or the one of four ranks that has it."""

    mistake: Mistake
    tensor: str
    rank: int | None

    def __str__(self) -> str:
        return f"{self.mistake.name} at {self.tensor}" + ("" if self.rank is None else f" on rank {self.rank}")


@dataclass(frozen=True)
class Outcome:
    """What `locate` said about one mutant: the tensor that changed first, and the location.

    changed: the first output of the faulty operator that changed by more than the rounding of one operator may; None
    where nothing changed with these weights and inputs, or too little for anybody to tell it from a sound engine (an
    epsilon of 1e-5 in bfloat16).
    """

    mutant: Mutant
    changed: str | None
    location: Location | None

    @property
    def equal(self) -> bool:
        return self.changed is None

    @property
    def located(self) -> bool:
        return (
            self.location is not None and self.location.first is not None and self.location.first.name == self.changed
        )

    @property
    def diagnosed(self) -> bool:
        best = self.location.findings[:1] if self.located else ()
        places = (self.mutant.tensor, self.changed)
        return any(f.mistake == self.mutant.mistake.name and f.tensor in places for f in best)


class Engine:
    """A chain of operators over some tokens, run once without a fault and then again from wherever one is planted."""

    def __init__(self, judge: Model, engine: Model, token_ids, lengths: tuple[int, ...]):
        self.judge, self.token_ids, self.lengths = judge, np.asarray(token_ids), lengths
        self.context = Context(engine, self.token_ids, lengths)
        self.mtp = engine.config.num_nextn_predict_layers > 0
        shift = engine.numerics.switches.mtp_position_shift
        self.mtp_context = Context(engine, np.roll(self.token_ids, -1), lengths, position_shift=shift)
        self.operators = operators(engine)
        self.mtp_operators = mtp_operators(engine) if self.mtp else []
        self.clean = self._run({}, {}, None)

    def _run(self, captured: dict, wrong: dict, rank: int | None) -> dict[str, np.ndarray]:
        tensors = dict(captured)
        for context, ops in ((self.context, self.operators), (self.mtp_context, self.mtp_operators)):
            for op in ops:
                if all(name in tensors for name in op.outputs):
                    continue
                outputs = Replay(context, tensors, ops, wrong).run(op)
                if rank is not None and op.outputs[0] in wrong:
                    right = Replay(context, tensors, ops).run(op)
                    outputs = tuple(self._on_rank(r, w, rank) for r, w in zip(right, outputs))
                tensors |= dict(zip(op.outputs, outputs))
        return tensors

    def _on_rank(self, right: np.ndarray, wrong: np.ndarray, rank: int) -> np.ndarray:
        """Rows of that rank's tokens from `wrong`, the others from `right`."""
        rank_of_token = np.arange(len(self.token_ids)) * RANKS // len(self.token_ids)
        rows = np.repeat(rank_of_token == rank, len(right) // len(self.token_ids))
        return np.where(rows.reshape(-1, *[1] * (right.ndim - 1)), wrong, right)

    def mutants(self) -> Iterator[Mutant]:
        """Every mistake at every kind of operator that can have it: in the first layer that has the operator for all
        tokens, and in the last one for one rank."""
        places: dict[str, list[Operator]] = {}
        for op in self.operators + self.mtp_operators:
            places.setdefault(op.kind, []).append(op)
        for kind, ops in places.items():
            for number, mistake in enumerate(mistakes_of(kind)):
                yield Mutant(mistake, ops[0].outputs[0], None)
                if len(ops) > 1:
                    yield Mutant(mistake, ops[-1].outputs[0], number % RANKS)

    def run(self, mutant: Mutant) -> dict[str, np.ndarray]:
        """All tensors of the engine with that fault. Raises ValueError where it is not possible with these shapes."""
        before: dict[str, np.ndarray] = {}
        for op in self.operators + self.mtp_operators:
            if mutant.tensor in op.outputs:
                break
            before |= {name: self.clean[name] for name in op.outputs}
        return self._run(before, {mutant.tensor: mutant.mistake.how}, mutant.rank)

    def locate(self, tensors: dict[str, np.ndarray], diagnose: bool = True) -> Location:
        """`locate` on the engine's tensors, by the judge's model."""
        shifted = self.mtp_context.token_ids if self.mtp else None
        return locate(
            self.judge,
            tensors,
            token_ids=self.token_ids,
            lengths=self.lengths,
            mtp_token_ids=shifted,
            diagnose=diagnose,
        )

    def try_mutant(self, mutant: Mutant) -> Outcome | None:
        """What becomes of one mutant; None where it is not possible."""
        try:
            tensors = self.run(mutant)
        except (ValueError, IndexError, TypeError):
            return None
        changed = self._first_changed(mutant, tensors)
        return Outcome(mutant, changed, None if changed is None else self.locate(tensors))

    def _first_changed(self, mutant: Mutant, tensors: dict[str, np.ndarray]) -> str | None:
        op = next(o for o in self.operators + self.mtp_operators if mutant.tensor in o.outputs)
        for name in op.outputs:
            before, after = self.clean[name], tensors[name]
            if name.endswith("margin") or before.tobytes() == after.tobytes():
                continue
            if before.shape != after.shape:
                return name
            if is_topk_idx(name):
                if (np.sort(before) != np.sort(after)).any():
                    return name
                continue
            if (ids := ids_of(name, tensors)) is not None:
                order = compare_routes(self.clean[ids], tensors[ids], None, 0.0).order
                after = np.take_along_axis(after, order, axis=-1)
            rule = operator_rule([op], before.dtype, before.size, self.judge.numerics.name)
            if status_of(measure(before, after, rule), rule) == "differs":
                return name
        return None


def example_engine(numerics: str, tokens: int = 40) -> Engine:
    """The example model judged in float64 arithmetic, as an engine in float32 arithmetic; two requests."""
    text = b"A cat sat on the mat. 12 + 30 = 42, and so on to the very end of the line."
    ids = np.frombuffer(text, np.uint8)[:tokens].astype(np.int64)
    judge = Model.from_pretrained(EXAMPLE, numerics=numerics)
    engine = Model.from_pretrained(EXAMPLE, numerics=numerics, compute="float32")
    return Engine(judge, engine, ids, (tokens * 2 // 3, tokens - tokens * 2 // 3))


def score(engine: Engine, mutants=None) -> list[Outcome]:
    """The outcomes of all possible mutants, or of those given."""
    outcomes = (engine.try_mutant(m) for m in (engine.mutants() if mutants is None else mutants))
    return [outcome for outcome in outcomes if outcome is not None]


def summary(outcomes: list[Outcome]) -> str:
    """The score as text, with every miss by name."""
    real = [o for o in outcomes if not o.equal]
    kinds = {o.mutant.mistake.name for o in real}
    located, diagnosed = sum(o.located for o in real), sum(o.diagnosed for o in real)
    lines = [
        f"{len(real)} planted faults of {len(kinds)} kinds: {located} located at their first tensor, {diagnosed} "
        f"diagnosed; {len(outcomes) - len(real)} more change nothing here, or no more than rounding does"
    ]
    for o in real:
        if not o.located:
            lines.append(f"not located: {o.mutant}, changed {o.changed}: {o.location.headline[:150]}")
        elif not o.diagnosed:
            others = ", ".join(f.mistake for f in o.location.findings[:3]) or "none"
            lines.append(f"not diagnosed: {o.mutant}: found {others}")
    return "\n".join(lines)


def plant(golden_path, mistake: str, tensor: str, out) -> None:
    """Write what an engine with one mistake would have captured for the prompts of a golden of the example model.

    Its arithmetic is ours, so that the same file comes out on every machine.
    Raises ValueError for a mistake or a tensor that do not exist or do not go together.
    """
    golden = read_bundle(golden_path)
    known = {m.name: m for m in MISTAKES}
    if mistake not in known:
        raise ValueError(f"no mistake {mistake!r}; there are {', '.join(known)}")
    stated = stated_passes(golden)
    judge = Model.from_pretrained(EXAMPLE, numerics=golden.numerics)
    made = Engine(judge, judge, stated["token_ids"], stated["lengths"])
    op = next((o for o in made.operators if tensor in o.outputs), None)
    if op is None or op.kind not in known[mistake].kinds:
        raise ValueError(
            f"mistake {mistake} is one of {', '.join(known[mistake].kinds)}; {tensor!r} is not made by one"
        )
    tensors = made.run(Mutant(known[mistake], op.outputs[0], None))
    save_tensors(out, {name: tensors[name] for name in golden.order if name in tensors})


def main(argv: list[str] | None = None) -> None:
    """Print the score, or write the tensors of one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plant", metavar="MISTAKE", help="write the tensors of an engine with this mistake")
    parser.add_argument("--at", metavar="TENSOR", help="an output of the operator that has it")
    parser.add_argument("--golden", metavar="FILE", help="golden of the example model, for its prompts and numerics")
    parser.add_argument("--out", metavar="FILE", help="file to write")
    args = parser.parse_args(argv)
    if args.plant is None:
        for name in ("float32", "fp8"):
            print(f"{name}: {summary(score(example_engine(name)))}")
    elif None in (args.at, args.golden, args.out):
        parser.error("--plant needs --at, --golden and --out")
    else:
        try:
            plant(args.golden, args.plant, args.at, args.out)
        except (ValueError, OSError) as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
