"""Join what ranks hold of one tensor, by a short layout string.

`dp2 tp4 : t[dp] h[tp] d` reads: eight ranks, data-parallel groups outermost; the token axis is split over dp, the head
axis over tp, the last axis is whole. A group that no axis names holds replicas, which must be equal to the bit;
`+tp` after the axes says that the ranks of tp hold partial sums. `t[dp,tp]` splits one axis over both, dp outermost.
Parts need not be equally long.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from refmodel.golden.dump import Dump
from refmodel.golden.rules import compile_pattern
from refmodel.golden.ulp import has_ulp, widen

FORM = "a layout like 'dp2 tp4 : t[dp] h[tp] d' or 'ep8 : e[ep] d' or 'tp2 : t d +tp' is required"
_RANK = re.compile(r"^(?P<step>step\.\d+\.)?rank\.(?P<rank>\d+)\.(?P<rest>.+)$")


@dataclass(frozen=True)
class Layout:
    """groups: name -> size, outermost first; axes: for each axis the groups it is split over; sums: groups that hold
    partial sums."""

    groups: dict[str, int]
    axes: tuple[tuple[str, ...], ...]
    sums: tuple[str, ...]

    @property
    def ranks(self) -> int:
        return int(np.prod([*self.groups.values(), 1]))


def parse_layout(text: str) -> Layout:
    """Read a layout string. Raises ValueError that says what is wrong with it."""
    mesh, colon, dims = text.partition(":")
    if not colon:
        raise ValueError(f"layout {text!r} has no colon; {FORM}")
    groups: dict[str, int] = {}
    for item in mesh.split():
        match = re.fullmatch(r"([a-z]+)(\d+)", item)
        if match is None or int(match[2]) < 1 or match[1] in groups:
            raise ValueError(f"layout {text!r}: {item!r} is no group with its size, or occurs twice; {FORM}")
        groups[match[1]] = int(match[2])
    axes, sums = [], []
    for item in dims.split():
        match = re.fullmatch(r"(?:\+([a-z]+)|[a-z]+(?:\[([a-z]+(?:,[a-z]+)*)\])?)", item)
        if match is None:
            raise ValueError(f"layout {text!r}: {item!r} is no axis; {FORM}")
        if match[1]:
            sums.append(match[1])
        else:
            axes.append(tuple(match[2].split(",")) if match[2] else ())
    used = [*sums, *(group for axis in axes for group in axis)]
    for group in used:
        if group not in groups or used.count(group) > 1:
            raise ValueError(f"layout {text!r}: group {group!r} is not declared, or is used twice; {FORM}")
    if not groups or not axes:
        raise ValueError(f"layout {text!r} has no groups or no axes; {FORM}")
    return Layout(groups, tuple(axes), tuple(sums))


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _add(parts: list[np.ndarray], name: str) -> np.ndarray:
    """Partial sums added in float64 and rounded once; an engine adds them in some order of its own."""
    from fp8.rounding import to_bfloat16

    if len({p.shape for p in parts}) > 1:
        raise ValueError(f"{name}: partial sums have shapes {sorted({p.shape for p in parts})}; one shape is required")
    total = np.sum([widen(np.ascontiguousarray(p)) for p in parts], axis=0)
    dtype = parts[0].dtype
    if dtype.itemsize == 2 and has_ulp(dtype) and dtype != np.float16:
        return to_bfloat16(total)
    return total.astype(dtype)


def unshard(parts: Sequence[np.ndarray], layout: str | Layout, name: str = "tensor") -> np.ndarray:
    """The whole tensor from its parts in rank order. bfloat16 and FP8 keep their bits.

    Raises ValueError for another number of parts or axes than the layout says, and for replicas that differ.
    """
    layout = parse_layout(layout) if isinstance(layout, str) else layout
    if len(parts) != layout.ranks:
        raise ValueError(f"{name}: {len(parts)} ranks hold a part; the layout has {layout.ranks}")
    wrong = next((i for i, p in enumerate(parts) if p.ndim != len(layout.axes)), None)
    if wrong is not None:
        raise ValueError(f"{name}: rank {wrong} has shape {parts[wrong].shape}; the layout has {len(layout.axes)} axes")
    names = list(layout.groups)
    held = {tuple(index): parts[rank] for rank, index in enumerate(np.ndindex(*layout.groups.values()))}
    split = [(group, axis) for axis, groups in enumerate(layout.axes) for group in reversed(groups)]
    for group in [g for g in names if g not in [s[0] for s in split]]:
        held = _reduce(held, names, group, lambda p, g=group: _replica(p, g, name, g in layout.sums))
        names = [n for n in names if n != group]
    for group, axis in split:
        held = _reduce(held, names, group, lambda p, a=axis: np.concatenate(p, axis=a))
        names = [n for n in names if n != group]
    return held[()]


def _replica(parts: list[np.ndarray], group: str, name: str, summed: bool) -> np.ndarray:
    if summed:
        return _add(parts, name)
    odd = next((i for i, p in enumerate(parts) if not _same(p, parts[0])), None)
    if odd is not None:
        raise ValueError(
            f"{name}: replicas over {group} differ between index 0 and {odd}; the layout says that they are equal "
            f"(write an axis as x[{group}] if it is split, or +{group} for partial sums)"
        )
    return parts[0]


def _reduce(held: dict, names: list[str], group: str, join) -> dict:
    """Join the parts that differ only in their index of `group`."""
    place = names.index(group)
    together: dict[tuple, list] = {}
    for index in sorted(held):
        together.setdefault(index[:place] + index[place + 1 :], []).append(held[index])
    return {index: join(parts) for index, parts in together.items()}


def join_ranks(dump: Dump, layouts: Mapping[str, str]) -> tuple[Dump, list[str]]:
    """Join `rank.R.NAME` into NAME where NAME matches a pattern of `layouts` (the first that does); others stay.

    Raises ValueError for a bad layout or pattern, a pattern that joins nothing, and missing ranks.
    """
    rules = [(compile_pattern(p, "layout pattern"), parse_layout(text)) for p, text in layouts.items()]
    joined: dict[str, dict[int, str]] = {}
    chosen: dict[str, int] = {}
    loaders: dict = {}
    for name in dump:
        match = _RANK.match(name)
        rest = (match["step"] or "") + match["rest"] if match else name
        rule = next((i for i, (p, _) in enumerate(rules) if match and p.search(rest)), None)
        if rule is None:
            loaders[name] = lambda n=name: dump[n]
            continue
        joined.setdefault(rest, {})[int(match["rank"])] = name
        chosen[rest] = rule
        loaders.setdefault(rest, None)
    for i, pattern in enumerate(layouts):
        if i not in chosen.values():
            raise ValueError(
                f"{dump.source}: layout pattern {pattern!r} joins nothing; names like rank.0.NAME are joined"
            )
    for rest, ranks in joined.items():
        layout = rules[chosen[rest]][1]
        if sorted(ranks) != list(range(layout.ranks)):
            raise ValueError(f"{dump.source}: {rest} is there for ranks {sorted(ranks)}; the layout has {layout.ranks}")
        loaders[rest] = lambda r=ranks, y=layout, n=rest: unshard([dump[r[i]] for i in range(y.ranks)], y, n)
    return Dump(loaders, dump.source, list(loaders), dump.metadata), [f"{len(joined)} tensors joined from ranks"]
