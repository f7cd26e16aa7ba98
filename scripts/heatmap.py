"""Draws a rank-by-rank matrix of bytes: SVG without any library, PNG by matplotlib."""

import base64
import struct
import zlib
from pathlib import Path

import numpy as np

# Points of a perceptually even ramp from dark violet over green to yellow (viridis), red, green, blue.
_RAMP = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], float)


def draw(path, matrices: dict[str, np.ndarray], title: str, ranks_per_node: int) -> None:
    """Writes one heat map per entry of `matrices` (name -> [R, R] bytes, source by destination) beside each other.

    Raises ValueError for an ending other than .svg and .png, and where matplotlib is missing for .png."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        path.write_text(_svg(matrices, title, ranks_per_node))
    elif path.suffix == ".png":
        _png_by_matplotlib(path, matrices, title, ranks_per_node)
    else:
        raise ValueError(f"{path}: a plot must end in .svg or .png")


def _colours(matrix: np.ndarray, top: float) -> np.ndarray:
    """uint8 [R, R, 3]."""
    at = matrix / (top or 1) * (len(_RAMP) - 1)
    low = np.minimum(at.astype(int), len(_RAMP) - 2)
    part = (at - low)[..., None]
    return np.rint(_RAMP[low] * (1 - part) + _RAMP[low + 1] * part).astype(np.uint8)


def _png_bytes(pixels: np.ndarray) -> bytes:
    """A PNG file of pixels uint8 [height, width, 3]."""
    height, width, _ = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _svg(matrices: dict[str, np.ndarray], title: str, ranks_per_node: int) -> str:
    size, gap, above = 400, 90, 60
    width = len(matrices) * (size + gap) + gap
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{size + above + 90}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{gap}" y="24" font-size="15">{_escape(title)}</text>',
    ]
    for number, (name, matrix) in enumerate(matrices.items()):
        parts += _panel(name, matrix, gap + number * (size + gap), above, size, ranks_per_node)
    return "\n".join([*parts, "</svg>", ""])


def _panel(name: str, matrix: np.ndarray, x: int, y: int, size: int, ranks_per_node: int) -> list[str]:
    ranks, top = len(matrix), float(matrix.max())
    picture = base64.b64encode(_png_bytes(_colours(matrix, top))).decode()
    ramp = base64.b64encode(_png_bytes(_colours(np.linspace(0, 1, 256)[None], 1.0))).decode()
    pixelated = 'preserveAspectRatio="none" style="image-rendering:pixelated"'
    parts = [
        f'<text x="{x}" y="{y - 8}">{_escape(name)}: bytes from source (down) to destination (across)</text>',
        f'<image x="{x}" y="{y}" width="{size}" height="{size}" {pixelated} href="data:image/png;base64,{picture}"/>',
        f'<text x="{x - 8}" y="{y + 10}" text-anchor="end">0</text>',
        f'<text x="{x - 8}" y="{y + size}" text-anchor="end">{ranks - 1}</text>',
        f'<image x="{x}" y="{y + size + 20}" width="{size}" height="12" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{ramp}"/>',
        f'<text x="{x}" y="{y + size + 48}">0</text>',
        f'<text x="{x + size}" y="{y + size + 48}" text-anchor="end">{top:,.0f} bytes</text>',
    ]
    for rank in range(ranks_per_node, ranks, ranks_per_node):
        at = size * rank / ranks
        lines = f"M{x + at:.2f} {y}v{size}M{x} {y + at:.2f}h{size}"
        parts.append(f'<path d="{lines}" stroke="white" stroke-width="0.4" fill="none"/>')
    return parts


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _png_by_matplotlib(path: Path, matrices: dict[str, np.ndarray], title: str, ranks_per_node: int) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            f"{path}: PNG needs matplotlib (pip install 'refmodel[plot]'); a name that ends in .svg needs nothing"
        ) from None
    figure = Figure(figsize=(6 * len(matrices), 5.5), layout="constrained")
    figure.suptitle(title)
    for number, (name, matrix) in enumerate(matrices.items()):
        axes = figure.add_subplot(1, len(matrices), number + 1)
        figure.colorbar(axes.imshow(matrix, interpolation="nearest", vmin=0), label="bytes")
        axes.set(title=name, xlabel="destination rank", ylabel="source rank")
        for rank in range(ranks_per_node, len(matrix), ranks_per_node):
            axes.axvline(rank - 0.5, color="white", linewidth=0.3)
            axes.axhline(rank - 0.5, color="white", linewidth=0.3)
    figure.savefig(path, dpi=150)
