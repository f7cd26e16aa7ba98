"""Slow, plain versions of what refmodel/golden computes."""

from fractions import Fraction

import numpy as np


def all_values(dtype):
    """Every code of an 8- or 16-bit dtype, in code order."""
    width = np.dtype(dtype).itemsize
    return np.arange(256**width, dtype=f"u{width}").view(dtype)


def sorted_numbers(dtype):
    """The distinct finite or infinite values of a narrow dtype, ascending, as floats."""
    with np.errstate(invalid="ignore"):
        values = all_values(dtype).astype(np.float64)
    return sorted({float(v) for v in values if not np.isnan(v)})


def measure_slowly(reference, actual, rtol=0.0, atol=0.0):
    """Counts and worst errors by a loop over elements; sums as exact fractions."""
    out = {"differing": 0, "violations": 0, "nan_both": 0, "unequal_nonfinite": 0, "worst_abs": 0.0, "worst_rel": 0.0}
    out |= {"first_differing": None, "first_violation": None}
    dd, rr, aa, ra = Fraction(0), Fraction(0), Fraction(0), Fraction(0)
    for index in np.ndindex(reference.shape):
        r, a = float(reference[index]), float(actual[index])
        if np.isnan(r) and np.isnan(a):
            out["nan_both"] += 1
            continue
        if r == a and np.isinf(r):
            continue
        if not (np.isfinite(r) and np.isfinite(a)):
            out["unequal_nonfinite"] += 1
            bad = True
        else:
            d = abs(a - r)
            out["worst_abs"] = max(out["worst_abs"], d)
            out["worst_rel"] = max(out["worst_rel"], d / abs(r) if r else d)
            bad = d > max(atol, rtol * abs(r))
            fr, fa = Fraction(r), Fraction(a)
            dd, rr, aa, ra = dd + (fa - fr) ** 2, rr + fr**2, aa + fa**2, ra + fr * fa
            if r == a:
                continue
        out["differing"] += 1
        out["first_differing"] = out["first_differing"] or index
        if bad:
            out["violations"] += 1
            out["first_violation"] = out["first_violation"] or index
    out["difference"] = float(dd / (aa + rr)) if aa + rr else None
    out["scale"] = float(ra / rr) if rr else None
    return out
