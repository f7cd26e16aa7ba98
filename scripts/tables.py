"""Tables that several commands print."""

from rich import box
from rich.console import Console
from rich.table import Table


def console() -> Console:
    """A console for standard output, as wide as the tables need when it is not a terminal."""
    out = Console()
    return out if out.is_terminal else Console(width=120)


def volume_table(volumes: dict, title: str) -> Table:
    """`volumes[direction][link][class]` bytes: one line per direction and link, one column per class that occurs."""
    used = [
        name
        for name in next(iter(next(iter(volumes.values())).values()))
        if any(classes[name] for links in volumes.values() for classes in links.values())
    ]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("direction")
    table.add_column("link")
    for name in (*used, "total"):
        table.add_column(name, justify="right")
    for direction, links in volumes.items():
        for link, classes in links.items():
            cells = [classes[name] for name in used]
            table.add_row(direction, link, *(f"{cell:,}" for cell in (*cells, sum(cells))))
    return table


def matrix_table(matrix, title: str) -> Table:
    """A rank-by-rank matrix of integers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for rank in range(len(matrix)):
        table.add_column(str(rank), justify="right")
    for rank, row in enumerate(matrix):
        table.add_row(str(rank), *(f"{cell:,}" for cell in row))
    return table
