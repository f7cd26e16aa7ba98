"""Which tolerance holds for which tensor of a comparison."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from refmodel.golden.tolerance import EXACT, UNIT_ROUNDOFF, Tolerance, depth_of, reproduce, suggest_for

_FP8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e4m3fnuz), np.dtype(ml_dtypes.float8_e5m2))
_KEYS = ("rtol", "atol", "rms", "ulps", "differing", "scale", "norm", "row", "reason")


def parse_rule(text: str) -> tuple[str, Tolerance]:
    """'REGEX=rtol:1e-2,atol:1e-3' or 'REGEX=exact' as a pattern and its rule; for the command line.

    Raises ValueError if the text has another form.
    """
    pattern, sign, body = text.rpartition("=")
    if not sign or not pattern or not body:
        raise ValueError(f"rule {text!r}: the form 'REGEX=rtol:1e-2,atol:1e-3' or 'REGEX=exact' is required")
    if body == "exact":
        return pattern, EXACT
    values: dict = {"reason": "given"}
    for part in body.split(","):
        key, colon, number = part.partition(":")
        try:
            if key not in _KEYS[:-1] or not colon:
                raise ValueError
            values[key] = int(number) if key == "ulps" else float(number)
        except ValueError:
            raise ValueError(
                f"rule {text!r}: {part!r} is not one of {', '.join(f'{k}:NUMBER' for k in _KEYS[:-1])}"
            ) from None
    return pattern, Tolerance(**values)


def compile_pattern(pattern: str, what: str) -> re.Pattern:
    """The compiled pattern; ValueError naming `what` if it is no regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{what} {pattern!r} is not a regular expression ({error})") from None


def _checked(patterns: Mapping) -> tuple:
    rules = []
    for pattern, rule in patterns.items():
        compiled = compile_pattern(pattern, "tolerance pattern")
        if isinstance(rule, Mapping):
            rule = Tolerance.from_dict({"reason": "given", **rule})
        if not isinstance(rule, Tolerance):
            raise ValueError(
                f"tolerance of {pattern!r} is {rule!r}; a Tolerance or a mapping of its fields is required"
            )
        rules.append((compiled, rule))
    return tuple(rules)


@dataclass(frozen=True)
class Rules:
    """Tried in this order: patterns, one rule for all floating-point tensors, the golden's own, the default."""

    patterns: tuple
    everywhere: Tolerance | None
    golden: Mapping[str, Tolerance]
    default: str
    numerics: str
    layers: int

    @classmethod
    def make(cls, tolerances, golden: Mapping[str, Tolerance], numerics: str | None, dumps) -> "Rules":
        """From the argument `tolerances` of `compare`; `numerics` None is guessed from the dtypes in the dumps."""
        if numerics is None:
            numerics = guess_numerics(dumps)
        layers = max((depth_of(name) for name in dumps[0]), default=0)
        patterns: tuple = ()
        everywhere, default = None, "suggested"
        if isinstance(tolerances, str):
            if tolerances not in ("suggested", "reproduce", "exact"):
                raise ValueError(f"tolerances={tolerances!r}: 'suggested', 'reproduce' or 'exact' is required")
            golden, default = {}, tolerances
        elif isinstance(tolerances, Tolerance):
            everywhere = tolerances
        elif isinstance(tolerances, Mapping):
            patterns = _checked(tolerances)
        elif tolerances is not None:
            raise ValueError(f"tolerances is a {type(tolerances).__name__}; None, a name, a Tolerance or a mapping")
        return cls(patterns, everywhere, golden, default, numerics, layers)

    def of(self, name: str, reference: np.ndarray, actual: np.ndarray) -> Tolerance:
        """The rule for one tensor."""
        for pattern, rule in self.patterns:
            if pattern.search(name):
                return rule
        roundoff = {d: UNIT_ROUNDOFF.get(d, 0.0) for d in (reference.dtype, actual.dtype)}
        coarse = max(roundoff, key=lambda d: (roundoff[d], d == reference.dtype))
        if not roundoff[coarse]:
            return Tolerance(reason=f"{coarse}: exact")
        if self.everywhere is not None:
            return self.everywhere
        if name in self.golden:
            return self.golden[name]
        if self.default == "exact":
            return EXACT
        if self.default == "reproduce":
            return reproduce(coarse)
        return suggest_for(name, coarse, reference.size, self.numerics, self.layers)


def guess_numerics(dumps) -> str:
    """What dumps without metadata were computed in: the narrowest floating-point dtype that either of them has.

    A float32 tensor (router logits, final logits) of a bfloat16 run carries bfloat16 noise.
    """
    dtypes = {dump[name].dtype for dump in dumps for name in dump}
    if dtypes & set(_FP8):
        return "fp8"
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32)):
        if np.dtype(dtype) in dtypes:
            return name
    return "float64"
