"""The report of a run: tables with ratios first, one JSON object, and the progress bar while it runs."""

import sys

from scripts.benches.environment import notice
from scripts.benches.timing import Row

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))


def content(where: dict, rows: dict[str, list[Row]], seconds: float, repeats: int, quick: bool) -> dict:
    """The run as one JSON object, in base units."""
    groups = {name: [row._asdict() | {"holds": row.holds} for row in found] for name, found in rows.items()}
    return {
        "environment": where,
        "notice": notice(where),
        "quick": quick,
        "repeats": repeats,
        "seconds": seconds,
        "groups": groups,
        "missed": [f"{name}: {row.name}" for name, found in rows.items() for row in found if row.holds is False],
    }


def print_report(where: dict, rows: dict[str, list[Row]], about: dict, seconds: float, repeats: int) -> None:
    """One table per group, the environment, what in it disturbs, and how many limits hold."""
    from rich.table import Table

    from scripts.tables import console

    out = console()
    for name, found in rows.items():
        table = Table(title=f"{name}: {about[name]}", title_justify="left")
        table.add_column("ratio", justify="right")
        table.add_column("limit", no_wrap=True)
        table.add_column("")
        table.add_column("what")
        table.add_column("of what")
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("spread", justify="right", no_wrap=True)
        for row in found:
            table.add_row(*_cells(row))
        out.print(table)
    out.print("; ".join(f"{key}: {value}" for key, value in where.items()), highlight=False, markup=False)
    if reason := notice(where):
        out.print(reason, highlight=False, markup=False)
    verdicts = [row.holds for found in rows.values() for row in found if row.holds is not None]
    held = f"{sum(verdicts)} of {len(verdicts)} limits hold" if verdicts else "no limits are stated at these sizes"
    out.print(f"{held}; medians of {repeats}; {seconds:.0f} s in all")


def _cells(row: Row) -> tuple[str, ...]:
    verdict = {None: "", True: "holds", False: "misses"}[row.holds]
    ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
    spread = "" if row.spread is None else f"{100 * row.spread:.0f} %"
    return ratio, row.limit, verdict, row.name, row.against, quantity(row.value, row.unit), spread


def quantity(value: float, unit: str) -> str:
    """Three digits with a decimal prefix: 0.0123 s is "12.3 ms"."""
    if not unit:
        return f"{value:.3g}"
    scale, prefix = next(((s, p) for s, p in _PREFIXES if abs(value) >= s), _PREFIXES[-1])
    return f"{value / scale:.4g} {prefix}{unit}"


def progress(names: list[str]):
    """A context that yields (begin(group), note(text)): a bar where standard error is a terminal, else nothing."""
    return _Bar(names) if sys.stderr.isatty() else _Silent()


class _Silent:
    """Stands in for the bar where standard error is no terminal."""

    def __enter__(self):
        return (lambda name: None), (lambda text: None)

    def __exit__(self, *error):
        return None


class _Bar:
    """One step of the bar for each group, and the name of what is being timed beside it."""

    def __init__(self, names):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
        # drawn only when there is news: a thread that redraws would take part of the processor's time that is measured
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
        self._task = self._bar.add_task("", total=len(names))
        self._group, self._begun = "", 0

    def __enter__(self):
        self._bar.__enter__()
        return self._begin, self._note

    def __exit__(self, *error):
        return self._bar.__exit__(*error)

    def _begin(self, name):
        self._bar.update(self._task, completed=self._begun, description=name, refresh=True)
        self._group, self._begun = name, self._begun + 1

    def _note(self, text):
        self._bar.update(self._task, description=f"{self._group}: {text}", refresh=True)
