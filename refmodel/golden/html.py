"""A comparison as one HTML page that needs no network: headline, error by tensor, heat maps, tables."""

from html import escape

import numpy as np

from refmodel.golden.picture import LEVELS, levels
from refmodel.golden.report import Report, TensorResult, number, place, worst_text

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6470; --line: #d5dae1; --paper: #fff; --band: #f4f6f8;
 --bad: #b3261e; --good: #1c6b3c; --l1: #dbe7f3; --l2: #a9cbe6; --l3: #6fa8d3; --l4: #3c80b8; --l5: #1d5a92;
 --l6: #0b3866; --l7: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa4b0; --line: #3a424c; --paper: #14171b;
 --band: #1c2127; --bad: #ff8a80; --good: #7fd6a0; --l1: #1d2c3a; --l2: #244a6b; --l3: #2f6ea3; --l4: #4d95cc;
 --l5: #86bce6; --l6: #cfe6f8; --l7: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
 font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; line-height: 1.35; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere; }
p, ul { margin: .3rem 0; overflow-wrap: anywhere; }
.soft { color: var(--soft); font-size: .9rem; }
.bad { color: var(--bad); } .good { color: var(--good); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { background: var(--band); } td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.name { overflow-wrap: anywhere; min-width: 12rem; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
.key { white-space: nowrap; } .key svg { display: inline; width: .8em; height: .8em; }
.maps { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem 2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .4rem 0; font-size: .9rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
"""


def _relative_error(result: TensorResult) -> float | None:
    """Of the whole tensor; 1 where NaN or infinity stands on one side only."""
    d = result.difference
    if d is None or d.difference is None:
        return None
    return 1.0 if d.unequal_nonfinite else float(np.sqrt(d.difference))


def _growth(results: list[TensorResult]) -> str:
    """Relative error (norm of the difference over norm of both) by tensor in execution order, on a log scale."""
    points = [(i, _relative_error(r), r) for i, r in enumerate(results)]
    points = [point for point in points if point[1]]
    if not points:
        return "<p>No tensor differs.</p>"
    width, height, left, top = 960, 260, 52, 10
    low = int(np.floor(np.log10(min(p[1] for p in points))))
    high = max(int(np.ceil(np.log10(max(p[1] for p in points)))), low + 1)

    def x(i):
        return left + (width - left - 10) * (i + 0.5) / len(results)

    def y(value):
        return top + (height - top - 34) * (high - np.log10(value)) / (high - low)

    parts = []
    for power in range(low, high + 1, max(1, (high - low) // 6)):
        at = y(10.0**power)
        parts.append(f'<line x1="{left}" x2="{width - 10}" y1="{at:.1f}" y2="{at:.1f}" stroke="var(--line)"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>')
    line = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v, _ in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="var(--l4)" stroke-width="1.5"/>')
    for i, value, result in points:
        colour, radius = ("var(--bad)", 4) if not result.ok else ("var(--l5)", 2.5)
        title = escape(f"{result.name}: {value:.3g}, {result.status}")
        parts.append(
            f'<circle cx="{x(i):.1f}" cy="{y(value):.1f}" r="{radius}" fill="{colour}"><title>{title}</title></circle>'
        )
    parts += _layer_marks(results, x, height)
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="relative error by tensor in execution order">'
        + "".join(parts)
        + "</svg>"
    )


def _layer_marks(results, x, height: int) -> list[str]:
    """A label where each layer begins, as many as there is room for."""
    seen: dict[str, int] = {}
    for i, result in enumerate(results):
        if ".layers." in f".{result.name}":
            seen.setdefault(f".{result.name}".split(".layers.")[1].split(".")[0], i)
    step = max(1, len(seen) // 16)
    return [f'<text x="{x(i):.1f}" y="{height - 8}">layer {layer}</text>' for layer, i in list(seen.items())[::step]]


def _heat_map(result: TensorResult) -> str:
    picture = result.picture
    height, width = picture.shape
    found = levels(picture)
    cell = 960 / width
    tall = min(max(cell, 300 / height), 24.0)
    parts = []
    for level in range(1, len(LEVELS)):
        cells = "".join(
            f"M{c * cell:.1f} {r * tall:.1f}h{cell:.1f}v{tall:.1f}h-{cell:.1f}z" for r, c in np.argwhere(found == level)
        )
        if cells:
            parts.append(f'<path fill="var(--l{level})" d="{cells}"/>')
    frame = f'<rect width="960" height="{height * tall:.1f}" fill="none" stroke="var(--line)"/>'
    label = escape(f"error of {result.name} by row and column")
    return (
        f'<svg viewBox="0 0 960 {height * tall:.1f}" role="img" aria-label="{label}">'
        + "".join(parts)
        + frame
        + "</svg>"
    )


def _axes(result: TensorResult) -> str:
    columns = result.reference_shape[-1] if result.reference_shape else 1
    rows = result.difference.total // max(columns, 1)
    return f'<p class="soft">{rows} rows downwards, {columns} columns across</p>'


def _legend() -> str:
    words = ["none"] + [f"up to {v:g}" for v in LEVELS[1:-1]] + ["above 1 or NaN"]
    items = ""
    for k, word in enumerate(words):
        fill = "none" if k == 0 else f"var(--l{k})"
        box = f'<rect width="12" height="12" fill="{fill}" stroke="var(--line)"/>'
        items += f'<span class="key"><svg viewBox="0 0 12 12">{box}</svg> {word}</span> '
    return f'<p class="soft">Worst error in the cell, as part of the root mean square of the reference: {items}</p>'


def _facts(result: TensorResult) -> str:
    d = result.difference
    rows = {
        "outside tolerance": f"{d.violations} of {d.total}, first at {place(d.first_violation)}",
        "rows": f"{d.bad_rows} outside, {d.differing_rows} differing of {d.rows}; worst {worst_text(d.worst_row)}",
        "worst absolute": worst_text(d.worst_abs),
        "worst relative": worst_text(d.worst_rel),
        "worst ulp": worst_text(d.worst_ulp),
        "difference": f"{number(d.difference)}; cosine {number(d.cosine)}, norm ratio {number(d.norm_ratio)}",
        "fitted scale": f"{number(d.scale)}, leaves {number(d.scale_residual)}",
        "NaN": f"{d.nan_reference} in the reference, {d.nan_actual} in the actual tensor, {d.nan_both} in both",
        "tolerance": f"{result.tolerance} ({result.tolerance.reason})",
    }
    return "<dl>" + "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in rows.items()) + "</dl>"


def _row(result: TensorResult) -> str:
    d = result.difference
    shape = result.reference_shape if result.reference_shape is not None else result.actual_shape
    cells = [
        f'<td class="name">{escape(result.name)}</td>',
        f'<td class="{"good" if result.ok else "bad"}">{result.status}</td>',
        f'<td class="n">{"x".join(map(str, shape))}</td>',
        f"<td>{escape(result.reference_dtype or result.actual_dtype or '')}</td>",
        f'<td class="n">{"" if d is None else d.violations}</td>',
        f'<td class="n">{"" if d is None or d.worst_abs is None else number(d.worst_abs.error)}</td>',
        f'<td class="n">{"" if d is None or d.difference is None else f"{d.difference**0.5:.2g}"}</td>',
        f"<td>{escape(result.note)}</td>",
    ]
    return "<tr>" + "".join(cells) + "</tr>"


def render(report: Report) -> str:
    """The page as text. Heat maps are shown for the results that carry a picture (`compare(..., pictures=N)`)."""
    counts = ", ".join(f"{count} {status}" for status, count in report.counts().items())
    heads = ("tensor", "status", "shape", "dtype", "outside", "worst absolute", "relative error", "looks")
    maps = "".join(
        f"<section><h2>{escape(r.name)}</h2><p>{escape(r.note)}</p>{_heat_map(r)}{_axes(r)}{_facts(r)}</section>"
        for r in report.results
        if r.picture is not None and r.picture.size
    )
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        "<link rel='icon' href='data:,'>",
        f"<title>{escape(report.headline[:80])}</title><style>{_STYLE}</style></head><body>",
        f"<h1 class='{'good' if report.ok else 'bad'}'>{escape(report.headline)}</h1>",
        f"<p class='soft'>reference {escape(report.reference)}, actual {escape(report.actual)}; {counts}</p>",
        "".join(f"<p class='soft'>note: {escape(note)}</p>" for note in report.notes),
        "<h2>Relative error by tensor, in execution order</h2>",
        _growth(list(report.results)),
        f"<h2>Errors by row and column</h2>{_legend()}<div class='maps'>{maps}</div>" if maps else "",
        "<h2>All tensors, in execution order</h2><div class='scroll'><table><thead><tr>",
        "".join(f"<th scope='col'>{head}</th>" for head in heads),
        "</tr></thead><tbody>",
        "".join(_row(r) for r in report.results),
        "</tbody></table></div></body></html>\n",
    ]
    return "".join(parts)
