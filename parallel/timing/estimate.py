"""Estimates as data: every number has a formula over named inputs, so that what is shown is what is computed.

A formula is a Python expression over inputs and quantities above it, and it is evaluated as it stands. The case-study
notebook of the V3/R1 inference system, its exercises, and the bound of the ISCA paper are written this way in
`quantities.py`; the inputs stand in `inputs.py`.
"""

import ast
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Input(NamedTuple):
    """A number that anyone may change: its value, unit, meaning, and source."""

    value: float
    unit: str
    meaning: str
    source: str


class Quantity(NamedTuple):
    """A number that follows from a formula. note: what the formula leaves out, or where other sources differ."""

    name: str
    section: str
    unit: str
    formula: str
    meaning: str
    note: str = ""

    @property
    def uses(self) -> tuple[str, ...]:
        """Names in the formula, in the order in which they stand."""
        names = [node.id for node in ast.walk(ast.parse(self.formula, mode="eval")) if isinstance(node, ast.Name)]
        return tuple(dict.fromkeys(name for name in names if name not in FUNCTIONS))


FUNCTIONS = {"max": max, "min": min}


def evaluate(
    quantities: Iterable[Quantity], inputs: Mapping[str, float], fixed: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Values of all quantities, in order.

    inputs: name -> value. fixed: quantities that are set instead of computed, as when solving for one.
    Raises ValueError where a formula uses a name that is not known yet, or divides by zero.
    """
    fixed = dict(fixed or {})
    values = {name: float(value) for name, value in inputs.items()}
    results = {}
    for quantity in quantities:
        missing = [name for name in quantity.uses if name not in values]
        if missing:
            raise ValueError(f"{quantity.name} = {quantity.formula} uses {', '.join(missing)}, which has no value")
        if quantity.name in fixed:
            value = float(fixed[quantity.name])
        else:
            try:
                # The expression comes from our own table, and it sees nothing but numbers, max and min.
                value = float(eval(quantity.formula, {"__builtins__": {}}, {**FUNCTIONS, **values}))
            except ZeroDivisionError:
                raise ValueError(f"{quantity.name} = {quantity.formula} divides by zero with these inputs") from None
        values[quantity.name] = results[quantity.name] = value
    return results


def solve(
    quantities: Iterable[Quantity], inputs: Mapping[str, float], free: str, goal: str, target: float, upper: float
) -> float:
    """The largest value of quantity `free`, from 0 to `upper`, at which the rising quantity `goal` is at most `target`.

    By halving, to the last bit of a float64. Raises ValueError where even a tiny `free` gives more than `target`.
    """
    quantities = list(quantities)

    def reached(value):
        return evaluate(quantities, inputs, {free: value})[goal]

    low, high = upper * 2.0**-60, upper
    if reached(low) > target:
        raise ValueError(f"{goal} stays above {target:g} however small {free} is: it is {reached(low):g}")
    if reached(high) <= target:
        return high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if reached(middle) <= target else (low, middle)
    return low
