"""Replay a day of traffic through a fleet: nodes by hour, hit rate, cost, theoretical income.

Without arguments it is the published day of DeepSeek-V3/R1; with --csv any other (columns time as HH:MM,
input_tokens, hit_tokens, output_tokens and, if recorded, nodes). Two charts are written as SVG.

Example: refmodel day --paid-share 0.3 --v3-share 0.5 --off-peak
"""

import argparse
import json
from pathlib import Path

from parallel.serving import published
from parallel.serving.charts import bar_chart, step_chart
from parallel.serving.day_report import day_figures, decode_ranges
from parallel.serving.economics import Market, revenue_range
from parallel.serving.fleet import Day, Rates, load_day


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", metavar="FILE", help="another day than the published one")
    parser.add_argument("--paid-share", type=float, default=1.0, help="fraction of tokens that are paid (default 1)")
    parser.add_argument("--v3-share", type=float, default=0.0, help="fraction billed at V3's prices (default 0)")
    parser.add_argument("--off-peak", action="store_true", help="apply the night discount of 00:30 to 08:30")
    parser.add_argument("--prefill-rate", type=float, default=Rates.prefill, help="input tokens/s of a prefill node")
    parser.add_argument("--decode-rate", type=float, default=Rates.decode, help="output tokens/s of a decode node")
    parser.add_argument("--gpu-hour", type=float, default=2.0, help="dollars per GPU hour (default 2)")
    parser.add_argument("--max-nodes", type=int, help="size of the fleet, which bounds the autoscaler")
    parser.add_argument("--charts", metavar="DIR", default="out/day", help="where the SVG files go (default out/day)")
    parser.add_argument("--json", action="store_true", help="print figures in base units as JSON")


def run(args: argparse.Namespace) -> int:
    own = args.csv is None
    day = published.published_day() if own else load_day(args.csv)
    rates = Rates(args.prefill_rate, args.decode_rate)
    market = Market(args.paid_share, args.v3_share, args.off_peak)
    if not args.gpu_hour > 0:
        raise ValueError(f"--gpu-hour {args.gpu_hour}: dollars per GPU hour must be positive")
    most = args.max_nodes if args.max_nodes is not None or not own else published.PEAK_NODES
    figures = day_figures(day, rates, market, args.gpu_hour, most)
    if own:
        figures["income_list_range_dollars"] = list(revenue_range(day.traffic))
        figures["decode"] = decode_ranges(published.SPEED, rates, published.CONTEXT, published.TOKENS_PER_STEP)
    figures["charts"] = write_charts(Path(args.charts), day, figures)
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures, market, own)
    return 0


def write_charts(directory: Path, day: Day, figures: dict) -> list[str]:
    """`nodes.svg` and `cost_income.svg`; their paths."""
    rows = figures["hours"]
    end = float(day.start_hour[-1] + day.hours[-1])
    charts = {
        "nodes.svg": step_chart("Nodes in use", [*day.start_hour, end], {"nodes": figures["nodes"]}, "nodes"),
        "cost_income.svg": bar_chart(
            "Cost and income by hour",
            [*(row["start_hour"] for row in rows), end],
            {
                "cost": [row["cost_dollars"] for row in rows],
                "income at list prices": [row["income_list_dollars"] for row in rows],
                "what remains": [row["income_dollars"] for row in rows],
            },
            "$",
        ),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in charts.items():
        (directory / name).write_text(text)
    return [str(directory / name) for name in charts]


def show(figures: dict, market: Market, own: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has no width of its own
    console.print(_hour_table(figures))
    console.print(_total_table(figures, market, own))
    if own:
        console.print(_notes(figures))
    console.print("Charts: " + ", ".join(figures["charts"]))


def _notes(figures: dict) -> str:
    low, high = figures["income_list_range_dollars"]
    return (
        f"Income: ${figures['income_list_dollars']:,.0f} here, ${published.INCOME:,.0f} published. The published token "
        "totals are rounded to a billion; within that\n"
        f"rounding the income lies between ${low:,.0f} and ${high:,.0f}, so both hold, and the margins differ for the "
        "same reason.\n"
        "Hit rate: 342/608 is 0.5625 exactly, halfway between 56.2 and 56.3 %. Margin: income over cost, less one.\n"
        "Hours: tokens follow the published hourly income, with one mix of hits, misses and output all day.\n"
        "Autoscaler: the fewest units of 18 decode and 12 prefill nodes, above 8 prefill nodes, that carry the hour's "
        "tokens\nat the published average rates, within the fleet."
    )


def _hour_table(figures: dict):
    from rich.table import Table

    table = Table(title="Hour by hour", pad_edge=False)
    for name in ("hour", "nodes", "input Gtok", "hit Gtok", "output Gtok", "cost $", "income at list $", "remains $"):
        table.add_column(name, justify="right")
    for row in figures["hours"]:
        tokens = [f"{row[name] / 1e9:.2f}" for name in ("input_tokens", "hit_tokens", "output_tokens")]
        dollars = [f"{row[name]:,.0f}" for name in ("cost_dollars", "income_list_dollars", "income_dollars")]
        table.add_row(f"{row['hour']:02d}:00", f"{row['nodes']:.1f}", *tokens, *dollars)
    return table


def _total_table(figures: dict, market: Market, own: bool):
    from rich.table import Table

    table = Table(title="The day", pad_edge=False)
    table.add_column("figure")
    table.add_column("here", justify="right")
    if own:
        table.add_column("published", justify="right")
    for name, value, printed in _total_rows(figures, market):
        table.add_row(name, value, *([printed] if own else []))
    if own:
        for name, value, printed in _decode_rows(figures["decode"]):
            table.add_row(name, value, printed)
    return table


def _total_rows(f: dict, market: Market) -> list[tuple[str, str, str]]:
    """(figure, value here, value as published)."""
    source = "recorded" if f["nodes_recorded"] else "autoscaled"
    by_units = [f["prefill_nodes_by_units"], f["decode_nodes_by_units"]]
    shares = f"paid {market.paid_share:g}, V3 {market.v3_share:g}, night discount {'on' if market.off_peak else 'off'}"
    even, cold = f["break_even_share_of_list"], f["prefill_nodes_without_cache"]
    return [
        (f"nodes, mean ({source})", f"{f['mean_nodes']:.2f}", f"{published.MEAN_NODES}"),
        ("nodes, peak", f"{f['peak_nodes']:.0f}", f"{published.PEAK_NODES}"),
        ("prefill nodes, tokens over rate", f"{f['prefill_nodes_by_tokens']:.2f}", ""),
        ("decode nodes, tokens over rate", f"{f['decode_nodes_by_tokens']:.2f}", ""),
        (
            "prefill and decode nodes, whole units",
            "-" if None in by_units else f"{by_units[0]:.2f} + {by_units[1]:.2f}",
            "",
        ),
        ("prefill nodes without the cache", "-" if cold is None else f"{cold:.1f}", ""),
        ("autoscaler: mean, peak", f"{f['autoscaled_mean_nodes']:.2f}, {f['autoscaled_peak_nodes']:.0f}", ""),
        ("autoscaler: share of time at the nodes above", f"{f['autoscaled_equal_share']:.1%}", ""),
        ("freed below the peak, node hours", f"{f['freed_node_hours']:,.0f} (${f['freed_dollars']:,.0f})", ""),
        ("hit rate", f"{f['hit_rate']:.4f}", f"{published.HIT_RATE:.1%}"),
        ("cost", f"${f['cost_dollars']:,.0f}", f"${published.COST:,.0f}"),
        ("cost per million output tokens", f"${f['cost_per_million_output_dollars']:.4f}", ""),
        ("income at list prices", f"${f['income_list_dollars']:,.0f}", f"${published.INCOME:,.0f}"),
        (
            "margin at list prices",
            f"{f['margin_list']:.2%}",
            f"{published.INCOME / published.COST - 1:.2%}, printed as {published.MARGIN:.0%}",
        ),
        (f"income that remains ({shares})", f"${f['income_dollars']:,.0f}", ""),
        ("margin that remains", f"{f['margin']:.2%}", ""),
        ("share of list income that pays the cost", "-" if even is None else f"{even:.2%}", ""),
    ]


def _decode_rows(decode: dict) -> list[tuple[str, str, str]]:
    """What the published output speed means for a decode GPU: ranges, because the speed is one."""
    (slow, fast), (few, many) = decode["tokens_per_second"], decode["requests_per_gpu"]
    (quick, long), (least, most) = decode["step_seconds"], decode["latent_bytes_per_gpu"]
    return [
        ("output speed of one user, tokens/s", f"{slow:g} to {fast:g}", "20 to 22"),
        ("requests per decode GPU", f"{few:.1f} to {many:.1f}", ""),
        ("decode step", f"{quick * 1e3:.1f} to {long * 1e3:.1f} ms", ""),
        ("latent cache per decode GPU", f"{least / 1e9:.1f} to {most / 1e9:.1f} GB", ""),
    ]
