"""Hold what a run makes to a golden, tensor by tensor, as it is made."""

import re

import numpy as np

from refmodel.golden.bundle import is_golden, read_bundle
from refmodel.golden.compare import check_golden_schema
from refmodel.golden.dump import Dump, from_arrays, open_dump
from refmodel.golden.judge import Options, judge_tensor
from refmodel.golden.report import TensorResult
from refmodel.golden.rules import Rules
from refmodel.golden.tolerance import TIE_MARGINS


class Golden:
    """A golden or any dump with our names, as the check of `Stepper.until`: it stops at the first difference.

    source: a path, or a mapping of arrays. exact: any other bit is a difference; else the golden's own tolerances hold
    (for a plain dump, those that dtype and depth suggest). compared: how many tensors (or a rank's parts of them) were
    held to the golden. Raises ValueError or OSError for what cannot be read.
    """

    def __init__(self, source, exact: bool = False):
        self.dump = open_dump(source)
        self.source = self.dump.source
        check_golden_schema(self.dump)
        tolerances, numerics = {}, None
        if is_golden(self.dump.metadata):
            bundle = read_bundle(self.dump.source)
            tolerances, numerics = bundle.tolerances, bundle.numerics
        rules = Rules.make("exact" if exact else None, tolerances, numerics, (self.dump, self.dump))
        dtypes = "error" if exact else "ignore"  # a golden in other numerics is held to by its values
        self._options = Options(rules, 0.0 if exact else TIE_MARGINS[rules.numerics], dtypes)
        self.compared = 0

    def __call__(self, made, name: str) -> TensorResult | None:
        """The result where a tensor of an operation differs; None where it holds or the golden does not have it."""
        if name not in self.dump:
            return None
        self.compared += 1
        result = self.judge(made, name)
        return None if result.ok else result

    def judge(self, made, name: str) -> TensorResult:
        """Compare tensor `name` of a recording with the same rows of the golden.

        Indices in the result count the rows that were compared. Raises ValueError if the golden has no such tensor.
        """
        if name not in self.dump:
            raise ValueError(f"{self.source} has no tensor {name!r}")
        beside = name[: name.rfind(".") + 1]  # ids, weights and margins are judged together
        names = [n for n in made if n.startswith(beside) and n in self.dump]
        left = Dump({n: (lambda n=n: _rows(self.dump[n], made.rows(n))) for n in names}, self.source)
        right = from_arrays({n: made[n] for n in names}, "this run")
        return judge_tensor(name, left, right, self._options)

    def check_rows(self, tokens: int, top_k: int, name: str):
        """Raise ValueError unless the golden has as many rows as a run over `tokens` tokens."""
        wanted = tokens * top_k if re.search(r"(^|\.)experts\.", name) else tokens
        if name in self.dump and len(self.dump[name]) != wanted:
            raise ValueError(
                f"{self.source}: {name} has {len(self.dump[name])} rows, this run makes {wanted}: "
                "a golden of the same prompts is needed"
            )


def _rows(golden: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
    """The golden's rows; all of them where it has too few, so that the shapes differ."""
    if rows is None or (len(rows) and rows[-1] >= len(golden)) or golden.ndim == 0:
        return golden
    return golden[rows]
