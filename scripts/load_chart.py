"""Draws loads of experts and of ranks, a row of bar charts per layer: SVG without any library, PNG by matplotlib."""

from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Colours of the bars, from the ramp of the heat map: an expert, a rank before the plan, a rank after it.
EXPERT, BEFORE, AFTER = "#3b528b", "#b8bcc4", "#21918c"
WIDTH, HEIGHT, GAP, ABOVE = 520, 100, 70, 70  # of one chart, between charts, and over the first row


class Bars(NamedTuple):
    """One series of a chart: what it is, its loads [N] in tokens, the colour of its bars."""

    name: str
    loads: np.ndarray
    colour: str


class Chart(NamedTuple):
    """Bars of one or more series side by side: the `item` that is numbered from 0 across, and the series."""

    title: str
    item: str
    series: list[Bars]


def check(path) -> None:
    """Raises ValueError for an ending other than .svg and .png, and where matplotlib is missing for .png."""
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"{path}: a plot must end in .svg or .png")
    if path.suffix == ".png":
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError:
            raise ValueError(
                f"{path}: PNG needs matplotlib (pip install 'refmodel[plot]'); a name that ends in .svg needs nothing"
            ) from None


def draw(path, loads: np.ndarray, before: np.ndarray, after: np.ndarray, layers: list[str], title: str) -> None:
    """Writes, for each layer, its loads by expert id and its loads by rank before and after the plan.

    loads [L, E], before and after [L, R], all in tokens; `layers` names each layer. Raises as `check` does."""
    check(path)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        (
            Chart(f"{name}: tokens by expert", "expert", [Bars("load", of_experts, EXPERT)]),
            Chart(f"{name}: tokens by rank", "rank", [Bars("before", old, BEFORE), Bars("after", new, AFTER)]),
        )
        for name, of_experts, old, new in zip(layers, loads, before, after, strict=True)
    ]
    if path.suffix == ".svg":
        path.write_text(_svg(rows, title))
    else:
        _png(path, rows, title)


def _number(load: float) -> str:
    """Tokens as text: a replica's share of a load need not be whole."""
    return f"{load:,.0f}" if float(load).is_integer() else f"{load:,.2f}"


def _legend(series: Bars) -> str:
    """The name of a series with its largest and its mean load."""
    return f"{series.name}: max {_number(series.loads.max())}, mean {_number(series.loads.mean())}"


def _top(chart: Chart) -> float:
    return max(float(series.loads.max()) for series in chart.series) or 1.0


def _svg(rows: list[tuple[Chart, ...]], title: str) -> str:
    width = GAP + 2 * (WIDTH + GAP)
    height = ABOVE + len(rows) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{GAP}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for row, charts in enumerate(rows):
        for column, chart in enumerate(charts):
            parts += _panel(chart, GAP + column * (WIDTH + GAP), ABOVE + row * (HEIGHT + GAP))
    return "\n".join([*parts, "</svg>", ""])


def _panel(chart: Chart, x: int, y: int) -> list[str]:
    """One chart with its top left corner at (x, y); each bar says its number when pointed at."""
    top, count = _top(chart), len(chart.series[0].loads)
    slot = WIDTH / count
    bar = slot * 0.9 / len(chart.series)
    parts = [
        f'<text x="{x}" y="{y - 8}">{escape(chart.title)}</text>',
        f'<text x="{x - 8}" y="{y + 10}" text-anchor="end">{_number(top)}</text>',
        f'<text x="{x - 8}" y="{y + HEIGHT}" text-anchor="end">0</text>',
        f'<path d="M{x} {y}v{HEIGHT}h{WIDTH}" stroke="#7f7f7f" fill="none"/>',
        f'<text x="{x}" y="{y + HEIGHT + 16}">{chart.item} 0</text>',
        f'<text x="{x + WIDTH}" y="{y + HEIGHT + 16}" text-anchor="end">{count - 1}</text>',
    ]
    for number, series in enumerate(chart.series):
        parts.append(f'<g fill="{series.colour}">')
        for item, load in enumerate(series.loads):
            left, tall = x + item * slot + number * bar, HEIGHT * load / top
            parts.append(
                f'<rect x="{left:.2f}" y="{y + HEIGHT - tall:.2f}" width="{bar:.2f}" height="{tall:.2f}">'
                f"<title>{chart.item} {item}, {series.name}: {_number(load)}</title></rect>"
            )
        parts.append("</g>")
        left = x + WIDTH // 2 * number
        parts += [
            f'<rect x="{left}" y="{y + HEIGHT + 24}" width="10" height="10" fill="{series.colour}"/>',
            f'<text x="{left + 14}" y="{y + HEIGHT + 33}">{escape(_legend(series))}</text>',
        ]
    return parts


def _png(path: Path, rows: list[tuple[Chart, ...]], title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 1 + 2.2 * len(rows)), layout="constrained")
    figure.suptitle(title)
    for number, chart in enumerate(chart for row in rows for chart in row):
        axes = figure.add_subplot(len(rows), 2, number + 1)
        items, beside = len(chart.series[0].loads), len(chart.series)
        edges = np.arange(items * beside + 1) / beside - 0.5
        for place, series in enumerate(chart.series):
            steps = np.zeros((items, beside))  # zero where the bars of the other series stand
            steps[:, place] = series.loads
            axes.stairs(steps.ravel(), edges, fill=True, color=series.colour, label=_legend(series))
        axes.set(xlabel=chart.item, ylabel="tokens", xlim=(-0.5, items - 0.5), ylim=(0, 1.3 * _top(chart)))
        axes.set_title(chart.title, fontsize=10)
        axes.legend(loc="upper left", fontsize=7, ncols=beside, columnspacing=1)  # in the room above the bars
    figure.savefig(path, dpi=100)
