"""Charts of a day as SVG text: a stepped line, and bars in pairs. No library, so that a command needs none."""

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 960, 320
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 40
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#7f7f7f")


def step_chart(title: str, edges: Sequence[float], series: dict[str, Sequence[float]], unit: str) -> str:
    """Values that hold from each edge (hours) to the next; `edges` has one more number than a series."""
    top = _nice_top(max((max(values) for values in series.values()), default=1))
    parts = _frame(title, edges[0], edges[-1], top, unit, list(series))
    for colour, values in zip(COLOURS, series.values()):
        points = []
        for start, end, value in zip(edges, edges[1:], values):
            points += [(_x(start, edges), _y(value, top)), (_x(end, edges), _y(value, top))]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
    return "\n".join([*parts, "</svg>\n"])


def bar_chart(title: str, edges: Sequence[float], series: dict[str, Sequence[float]], unit: str) -> str:
    """One bar per series in every interval between `edges` (hours), side by side."""
    top = _nice_top(max((max(values) for values in series.values()), default=1))
    parts = _frame(title, edges[0], edges[-1], top, unit, list(series))
    for number, (colour, values) in enumerate(zip(COLOURS, series.values())):
        for start, end, value in zip(edges, edges[1:], values):
            slot = (_x(end, edges) - _x(start, edges)) * 0.9
            x = _x(start, edges) + slot * number / len(series)
            y = _y(value, top)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{slot / len(series):.1f}" height="{_y(0, top) - y:.1f}" '
                f'fill="{colour}"/>'
            )
    return "\n".join([*parts, "</svg>\n"])


def _frame(title, first: float, last: float, top: float, unit: str, names: list[str]) -> list[str]:
    """Opening tag, title, legend, and axes with their numbers."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="20" text-anchor="middle" font-size="15">{escape(title)}</text>',
    ]
    for number, name in enumerate(names):
        x = LEFT + 10 + 170 * number
        parts.append(f'<rect x="{x}" y="{TOP - 12}" width="10" height="10" fill="{COLOURS[number]}"/>')
        parts.append(f'<text x="{x + 14}" y="{TOP - 3}">{escape(name)}</text>')
    for fifth in range(6):
        value, y = top * fifth / 5, _y(top * fifth / 5, top)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,.0f}</text>')
    parts.append(f'<text x="14" y="{TOP - 3}">{escape(unit)}</text>')
    every = max(1, round((last - first) / 12))
    hour = int(-(-first // every)) * every
    while hour <= last:
        x = _x(hour, (first, last))
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 18}" text-anchor="middle">{hour % 24:02d}:00</text>')
        hour += every
    return parts


def _x(hour: float, edges: Sequence[float]) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (hour - edges[0]) / (edges[-1] - edges[0])


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / top


def _nice_top(most: float) -> float:
    """The next round number above."""
    if most <= 0:
        return 1.0
    power = 1.0
    while power * 10 <= most:
        power *= 10
    while power > most:
        power /= 10
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= most)
