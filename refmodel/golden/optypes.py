"""What an operator golden is: a reference, and cases whose inputs are made when they are asked for."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

SHAPES = ("toy", "v3", "all")
V3 = "v3_"  # what the names of cases at V3's shapes begin with


@dataclass(frozen=True)
class Case:
    """One call. valid: for outputs with rows that nothing defines, booleans over their leading axes."""

    name: str
    inputs: dict[str, np.ndarray]
    valid: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorSpec:
    """An operator: `run(**inputs) -> dict of outputs` is the reference, which may give more than `outputs` name.

    makers: name of a case -> a function that makes its inputs; those at V3's shapes are called `v3_...`.
    batched: the inputs whose first axis are rows (tokens, requests) that must not know each other; the first axis of
    every output goes with it. valid: inputs -> `Case.valid`.
    """

    name: str
    outputs: tuple[str, ...]
    run: Callable[..., dict[str, np.ndarray]]
    makers: Mapping[str, Callable[[], dict[str, np.ndarray]]]
    batched: tuple[str, ...]
    numerics: str = "bfloat16"
    valid: Callable[..., dict[str, np.ndarray]] | None = None

    def names(self, shapes: str = "toy") -> tuple[str, ...]:
        """Names of the cases at "toy" shapes, "v3" shapes, or "all". Raises ValueError for another word."""
        if shapes not in SHAPES:
            raise ValueError(f"shapes={shapes!r}: one of {', '.join(SHAPES)} is required")
        return tuple(n for n in self.makers if shapes == "all" or n.startswith(V3) == (shapes == "v3"))

    def case(self, name: str) -> Case:
        """The case of that name. Raises ValueError, which lists the names, if there is none."""
        if name not in self.makers:
            raise ValueError(f"operator {self.name} has no case {name!r}; there are {', '.join(self.makers)}")
        inputs = self.makers[name]()
        return Case(name, inputs, {} if self.valid is None else self.valid(**inputs))

    def cases(self, shapes: str = "toy") -> Iterator[Case]:
        """The cases one after the other, each made when its turn comes."""
        return (self.case(name) for name in self.names(shapes))
