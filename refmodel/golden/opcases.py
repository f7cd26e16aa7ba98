"""Operators as kernel authors meet them: inputs at the edges, what must come out, and what must not be read.

Each has cases at toy shapes and at V3's. Inputs come from raw words of PCG64 and are the same on every machine.
"""

from refmodel.golden.attention_opcases import ATTENTION_OPERATORS
from refmodel.golden.expert_opcases import EXPERT_OPERATORS
from refmodel.golden.optypes import Case, OperatorSpec
from refmodel.golden.token_opcases import TOKEN_OPERATORS

OPERATORS = {spec.name: spec for spec in (*TOKEN_OPERATORS, *ATTENTION_OPERATORS, *EXPERT_OPERATORS)}


def operator(name: str) -> OperatorSpec:
    """The operator of that name; ValueError lists the names if there is none."""
    if name not in OPERATORS:
        raise ValueError(f"no operator {name!r}; there are {', '.join(OPERATORS)}")
    return OPERATORS[name]


def case(name: str) -> tuple[OperatorSpec, Case]:
    """`mla_decode/page_end`, or `mla_decode` for its first case. Raises ValueError for an unknown one."""
    base, _, wanted = name.partition("/")
    spec = operator(base)
    return spec, spec.case(wanted or next(iter(spec.makers)))
