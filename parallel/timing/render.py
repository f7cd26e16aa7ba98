"""A timeline as text, as SVG, and as a Chrome trace that opens in Perfetto."""

import json
from collections.abc import Iterable
from xml.sax.saxutils import escape

from parallel.timing.timeline import COMM, COMPUTE, Span, Timeline

LETTERS = {
    "embed": "I",
    "mtp_embed": "I",
    "attn_proj": "P",
    "attn_core": "A",
    "experts": "E",
    "shared": "S",
    "merge": "M",
    "mlp": "F",
    "final": "O",
    "dispatch": "D",
    "combine": "C",
    "dispatch_send": "<",
    "combine_send": "<",
    "dispatch_recv": ">",
    "combine_recv": ">",
    "forward": "F",
    "backward": "B",
    "input": "b",
    "weight": "W",
    "pair": "X",
}
PIPELINE_COLOURS = {
    "forward": "#f7ce5b",
    "backward": "#8fb8de",
    "input": "#b9d3ec",
    "weight": "#c8c8c8",
    "pair": "#c2d94c",
}
COLOURS = ("#f7ce5b", "#c2d94c")  # micro-batch 0 yellow, micro-batch 1 green, as in the published drawings
LABELS = {
    "attn_proj": "ATTN-0",
    "attn_core": "ATTN-1",
    "experts": "MLP",
    "shared": "SHARED",
    "mlp": "DENSE MLP",
    "dispatch": "DISPATCH",
    "combine": "COMBINE",
    "embed": "EMBED",
    "final": "HEAD",
    "merge": "",
}


MILLISECONDS = ("ms", 1e3)


def gantt(
    result: Timeline,
    ranks: Iterable[int],
    window: tuple[float, float] | None = None,
    width: int = 100,
    unit: tuple[str, float] = MILLISECONDS,
) -> str:
    """A line of text per rank and stream: letters of LETTERS, capital for micro-batch 0 and small for micro-batch 1.

    window: seconds from and to; the whole timeline by default. unit: name, and how many of it a second is.
    Raises ValueError for an empty window.
    """
    start, end = _window(result, window)
    name, scale = unit
    column = (end - start) / width * scale
    lines = [f"{start * scale:.6g} to {end * scale:.6g} {name}, {column:.4g} {name} per column"]
    for rank in ranks:
        mine = result.of_rank(rank)
        for stream in _streams(mine):
            row = ["."] * width
            for span in mine:
                if span.stream == stream and span.end > start and span.start < end:
                    _fill(row, span, start, (end - start) / width)
            lines.append(f"rank {rank:3d} {stream:7s} |{''.join(row)}|")
    return "\n".join([*lines, LEGENDS[any(span.name in PIPELINE_COLOURS for span in result.spans)]])


LEGENDS = {
    False: "P attention projections, A core attention, E experts, S shared, M merge, F dense MLP, I embedding, O head, "
    "D dispatch, C combine; capitals: micro-batch 0, small: micro-batch 1, . idle",
    True: "F forward, B backward, b input gradient, W weight gradient, X forward and backward together, . idle",
}


def _streams(spans):
    """Compute, and communication where there is any."""
    return (COMPUTE, COMM) if any(span.stream == COMM for span in spans) else (COMPUTE,)


def _window(result, window):
    start, end = window or (0.0, result.makespan)
    if not start < end:
        raise ValueError(f"window from {start} s to {end} s: its end must come after its start")
    return start, end


def _fill(row, span, start, column):
    """Write a span's letter into every column whose middle it covers."""
    letter = LETTERS[span.name]
    if span.name not in PIPELINE_COLOURS and span.op.micro_batch == 1:
        letter = letter.lower()
    for place in range(len(row)):
        if span.start <= start + (place + 0.5) * column < span.end:
            row[place] = letter


def svg(
    result: Timeline,
    ranks: Iterable[int],
    title: str,
    window: tuple[float, float] | None = None,
    unit: tuple[str, float] = MILLISECONDS,
) -> str:
    """A drawing with one row per rank and stream, coloured by micro-batch (inference) or by kind (training)."""
    start, end = _window(result, window)
    ranks = list(ranks)
    left, width, height, gap = 130, 1120, 30, 8
    scale = width / (end - start)
    order = [(rank, stream) for rank in ranks for stream in _streams(result.spans)]
    rows = {place: 40 + index * (height + gap) for index, place in enumerate(order)}
    bottom = 40 + len(rows) * (height + gap)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 40}" height="{bottom + 50}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
    ]
    for (rank, stream), y in rows.items():
        parts.append(f'<text x="10" y="{y + height * 0.65:.1f}">rank {rank} {stream}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{width}" height="{height}" fill="#f2f2f2"/>')
    for span in result.spans:
        if (span.rank, span.stream) in rows and span.end > start and span.start < end:
            parts += _box(span, rows[span.rank, span.stream], height, left, start, end, scale)
    parts += _axis(start, end, left, scale, bottom, unit)
    parts.append(
        f'<text x="{left}" y="{bottom + 42}">{KEYS[any(span.name in PIPELINE_COLOURS for span in result.spans)]}'
        "</text></svg>"
    )
    return "\n".join(parts) + "\n"


KEYS = {
    False: "yellow: micro-batch 0, green: micro-batch 1; number: layer; grey: idle",
    True: "yellow: forward, blue: backward, light blue: input gradient, grey with a frame: weight gradient, "
    "green: forward and backward together; number: micro-batch",
}


def _colour(span):
    return PIPELINE_COLOURS.get(span.name) or COLOURS[span.op.micro_batch % 2]


def _label(span, width):
    """The longest text that fits into `width` pixels, perhaps none."""
    if span.name in PIPELINE_COLOURS:
        numbers = span.op.micro_batch if span.name == "pair" else (span.op.micro_batch,)
        texts = ["+".join(map(str, numbers))]
    else:
        name = LABELS.get(span.name, span.name)
        texts = [f"{name} {span.op.layer}", name] if name else []
    return next((text for text in texts if 6.5 * len(text) + 4 < width), "")


def _box(span, y, height, left, start, end, scale):
    x0, x1 = left + (max(span.start, start) - start) * scale, left + (min(span.end, end) - start) * scale
    label = _label(span, x1 - x0)
    parts = [
        f'<rect x="{x0:.2f}" y="{y}" width="{x1 - x0:.2f}" height="{height}" fill="{_colour(span)}" '
        f'stroke="#333" stroke-width="0.6"><title>{escape(str(span.op))}: {(span.end - span.start) * 1e6:.1f} us'
        "</title></rect>"
    ]
    if label:
        middle = f'x="{(x0 + x1) / 2:.1f}" y="{y + height * 0.65:.1f}" text-anchor="middle"'
        parts.append(f"<text {middle}>{label}</text>")
    return parts


def _axis(start, end, left, scale, bottom, unit):
    parts = []
    for tick in range(6):
        time = start + (end - start) * tick / 5
        x = left + (time - start) * scale
        parts.append(f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 6}" stroke="#333"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{time * unit[1]:.5g} {unit[0]}</text>')
    return parts


def chrome_trace(result: Timeline, ranks: Iterable[int], name: str) -> dict:
    """The Trace Event Format object that Perfetto and chrome://tracing open: a process per rank, a thread per stream.

    Source of the format: the public "Trace Event Format" document; times are microseconds.
    """
    shown = set(ranks)
    threads = {COMPUTE: 0, COMM: 1}
    events = []
    for rank in sorted(shown):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        for stream, thread in threads.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": stream}})
    events += [_event(span, threads) for span in result.spans if span.rank in shown]
    return {"displayTimeUnit": "ms", "otherData": {"name": name}, "traceEvents": events}


def _event(span: Span, threads):
    return {
        "ph": "X",
        "name": f"{LABELS.get(span.name) or span.name} m{span.op.micro_batch} l{span.op.layer}",
        "cat": span.stream,
        "pid": span.rank,
        "tid": threads[span.stream],
        "ts": span.start * 1e6,
        "dur": (span.end - span.start) * 1e6,
        "args": {"stage": span.op.stage, "layer": span.op.layer, "micro_batch": span.op.micro_batch},
    }


def write_trace(result: Timeline, ranks: Iterable[int], name: str, path) -> int:
    """Write the Chrome trace as compact JSON; returns the number of events."""
    trace = chrome_trace(result, ranks, name)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file, separators=(",", ":"))
    return len(trace["traceEvents"])
