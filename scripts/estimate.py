"""Reproduce the figures of the published inference system: every formula is shown with its inputs, each a flag.

Sections: memory, step, experts, prefill, cost, checks, gqa, faster, isca. `--gap` says where the factor between bound
and published step can go, as a range; `--published` lays the model beside other published throughputs.

Example: refmodel estimate --nic 100e9 --mtp 1.8 --section step --target-tps 20
"""

import argparse
import json
import re

from parallel.timing.estimate import Quantity, evaluate, solve
from parallel.timing.hardware import HARDWARE, hardware
from parallel.timing.inputs import INPUTS, defaults
from parallel.timing.quantities import QUANTITIES, SECTIONS

OF_HARDWARE = {"bf16": "bf16_flops", "fp8": "fp8_flops", "hbm": "hbm", "nic": "nic", "memory": "memory"}
EXPERTS = 256  # logical experts of V3
MOST_REQUESTS = 1e7  # no search for a batch goes beyond this
SPREAD = 0.5  # with it the balancer gains about what SGLang published: 2.5 in decode, 1.5 in prefill
PUBLISHED_TPS = (22.0, 20.0)  # output speed in the source: 20 to 22 tokens per second


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `refmodel estimate`."""
    parser.add_argument("--section", action="append", choices=SECTIONS, help="show only this section; may be repeated")
    parser.add_argument("--hardware", choices=HARDWARE, help="take bf16, fp8, hbm, nic and memory from a GPU")
    parser.add_argument(
        "--target-tps", type=float, metavar="T", help="solve for the batch that gives a request T tokens/s"
    )
    parser.add_argument("--gap", action="store_true", help="where the factor between bound and published step can go")
    parser.add_argument("--link", type=float, default=39 / 50, help="--gap: fraction of the NIC's peak (default 0.78)")
    parser.add_argument(
        "--attention", type=float, default=660 / 989, help="--gap: fraction of the BF16 peak in core attention"
    )
    parser.add_argument(
        "--sync", type=float, default=10e-6, help="--gap: seconds per exchange, assumed (default 10e-6)"
    )
    parser.add_argument(
        "--spread", type=float, default=SPREAD, help=f"--gap: log-normal spread of expert popularity (default {SPREAD})"
    )
    parser.add_argument(
        "--loads", metavar="FILE", help="--gap: loads per expert (text, .npy) or recorded routing instead"
    )
    parser.add_argument("--published", action="store_true", help="the model beside SGLang's and the profile's figures")
    parser.add_argument("--json", action="store_true", help="print one JSON object: bytes, seconds, dollars, fractions")
    group = parser.add_argument_group("inputs (defaults are the source's)")
    for name, entry in INPUTS.items():
        flag = "--" + name.replace("_", "-")
        help_text = f"{entry.meaning} [{entry.unit}] (default {entry.value:g}; {entry.source})".replace("%", "%%")
        group.add_argument(flag, type=float, dest=f"input_{name}", metavar="X", help=help_text)


def read_inputs(args: argparse.Namespace) -> dict[str, float]:
    """Defaults, the hardware's rates over them, flags over both. Raises ValueError for a negative or endless input."""
    values = defaults()
    if args.hardware:
        gpu = hardware(args.hardware)
        values |= {name: float(getattr(gpu, field)) for name, field in OF_HARDWARE.items()}
    for name in INPUTS:
        given = getattr(args, f"input_{name}", None)
        if given is not None:
            if not 0 <= given < float("inf"):
                raise ValueError(f"--{name.replace('_', '-')} {given}: a count, rate or price is a number from 0 up")
            values[name] = given
    return values


def run(args: argparse.Namespace) -> int:
    """Print the estimates; 0."""
    inputs = read_inputs(args)
    results = evaluate(QUANTITIES, inputs)
    content = {"inputs": inputs, "quantities": {q.name: _entry(q, results) for q in QUANTITIES}}
    content["bottleneck"] = "network" if results["comm"] > results["attn"] + results["moe"] else "computation"
    if args.target_tps is not None:
        content["target"] = target(inputs, results, args.target_tps)
    if args.gap:
        content["gap"] = gap(args, inputs)
    if args.published:
        content["published"] = published()
    if args.json:
        print(json.dumps(content, indent=1))
    else:
        show(args, content, {**inputs, **results})
    return 0


def _entry(quantity: Quantity, results: dict[str, float]) -> dict:
    return {
        "value": results[quantity.name],
        "unit": quantity.unit,
        "section": quantity.section,
        "formula": quantity.formula,
        "meaning": quantity.meaning,
        "note": quantity.note,
    }


def target(inputs: dict[str, float], results: dict[str, float], tps: float) -> dict:
    """Requests per GPU at which a request still gets `tps` tokens/s: by the bound, and by the published gap."""
    if not 0 < tps < float("inf"):
        raise ValueError(f"--target-tps {tps}: a speed is above 0")
    allowed = inputs["mtp"] / tps
    fits = solve(QUANTITIES, inputs, "requests", "used_with_left", inputs["memory"], MOST_REQUESTS)
    rows = {}
    for name, factor in (("bound", 1.0), ("published_gap", results["gap"])):
        requests = solve(QUANTITIES, inputs, "requests", "step_bound", allowed / factor, MOST_REQUESTS)
        served = min(requests, fits)
        rows[name] = {
            "requests": requests,
            "tokens_per_second_and_node": requests * tps * inputs["gpus"],
            "requests_that_fit": served,
            "limited_by": "memory" if fits < requests else "speed",
        }
    return {"tokens_per_second": tps, "step": allowed, "memory_allows": fits, **rows}


def gap(args: argparse.Namespace, inputs: dict[str, float]) -> dict:
    """The decomposition with and without the expert balancer."""
    from parallel.timing import gap as model
    from parallel.timing.imbalance import read_loads

    ranks, physical = int(inputs["decode_gpus"]), int(inputs["physical_experts"])
    per_gpu = inputs["decode_node"] / inputs["gpus"] / inputs["user_tps"]
    if args.loads:
        found = [model.balanced_and_not(loads, loads, ranks, physical) for loads in read_loads(args.loads, EXPERTS)]
        imbalance = tuple(sum(column) / len(found) for column in zip(*found))
        source = f"of {args.loads}, mean over {len(found)} layers"
    else:
        rows = round(ranks * per_gpu * inputs["verified"] * inputs["routed"])
        imbalance = model.drawn_imbalance(args.spread, ranks, rows, physical=physical)
        source = f"drawn, log-normal popularity with spread {args.spread:g}"
    shared = {name: inputs[name] for name in model.GapInputs.__dataclass_fields__ if name in inputs}
    shared["step_layers"] = int(inputs["step_layers"])
    chosen = model.GapInputs(**shared, requests=per_gpu, link=args.link, attention=args.attention, sync=args.sync)
    published = tuple(inputs["mtp"] / tps for tps in PUBLISHED_TPS)
    found = model.gap_range(chosen, imbalance, published)
    return {
        "imbalance": {"balanced": imbalance[0], "unbalanced": imbalance[1], "source": source},
        "factors": model.FACTORS,
        **{
            name: {
                "bound": each.bound,
                "modelled": each.modelled,
                "explained": each.modelled / each.bound,
                "shares": {factor: share._asdict() for factor, share in each.shares.items()},
            }
            for name, each in (("balanced", found.balanced), ("unbalanced", found.unbalanced))
        },
        "published": found.published,
        "residual": found.residual,
    }


def published() -> list[dict]:
    """Rows of the comparison with other published throughputs."""
    from parallel.timing.published import beside_published

    return [{**row._asdict(), "ratio": row.ratio} for row in beside_published()]


def with_numbers(formula: str, values: dict[str, float]) -> str:
    """The formula with every name replaced by its value."""
    return re.sub(r"[a-z_][a-z_0-9]*(?![\w.])", lambda m: _number(values.get(m[0], m[0])), formula)


def _number(value) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


SCALES = {
    "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "FLOP/s": ((1e12, "TFLOPS"),),
}


def readable(value: float, unit: str) -> str:
    """A value in a unit of a fitting size; fractions as percent, dollars with commas."""
    if unit == "fraction":
        return f"{100 * value:.4g} %"
    if unit.startswith("$"):
        return f"${value:,.2f}" + unit[1:] if value < 100 else f"${value:,.0f}" + unit[1:]
    for scale, name in SCALES.get(unit, ()):
        if abs(value) >= scale:
            return f"{value / scale:.5g} {name}"
    return f"{value:.5g}" if unit == "ratio" else f"{value:,.5g} {unit}" if value < 1e5 else f"{value:.5g} {unit}"


def show(args, content: dict, values: dict[str, float]) -> None:
    """Print sections, then what was asked for besides."""
    for section, title in SECTIONS.items():
        if args.section and section not in args.section:
            continue
        print(f"{title}")
        for name, entry in content["quantities"].items():
            if entry["section"] == section:
                print(f"  {entry['meaning']}: {readable(entry['value'], entry['unit'])}")
                print(f"      {name} = {entry['formula']} = {with_numbers(entry['formula'], values)}")
                if entry["note"]:
                    print(f"      note: {entry['note']}")
        if section == "step":
            print(f"  The bound is set by the {content['bottleneck']}.")
        print()
    if "target" in content:
        _show_target(content["target"])
    if "gap" in content:
        _show_gap(content["gap"])
    if "published" in content:
        _show_published(content["published"])


def _show_target(found):
    print(
        f"Batch for {found['tokens_per_second']:g} tokens/s per request: a step may take {found['step'] * 1e3:.4g} ms"
    )
    for name, label in (("bound", "by the bound"), ("published_gap", "if steps keep the published gap")):
        row = found[name]
        node, limit = row["tokens_per_second_and_node"], row["limited_by"]
        print(f"  {label}: {row['requests']:.1f} requests per GPU, {node:,.0f} tokens/s per node")
        print(f"      limited by {limit}: memory holds {found['memory_allows']:.1f} requests per GPU")
    print()


def _show_gap(found):
    imbalance = found["imbalance"]
    print("Where the factor between bound and published step can go")
    print(f"  imbalance {imbalance['source']}: {imbalance['balanced']:.3f} with the balancer, "
          f"{imbalance['unbalanced']:.3f} without")  # fmt: skip
    for name, label in (("balanced", "with the balancer"), ("unbalanced", "without the balancer")):
        each = found[name]
        print(f"  {label}: {each['bound'] * 1e3:.2f} ms bound -> {each['modelled'] * 1e3:.2f} ms with every factor "
              f"({each['explained']:.2f} times)")  # fmt: skip
        print("      added [ms]     alone    last   mean over orders")
        for factor, share in each["shares"].items():
            alone, last, mean = (1e3 * share[key] for key in ("alone", "last", "mean"))
            print(f"      {factor:<12} {alone:7.2f} {last:7.2f} {mean:7.2f}   {found['factors'][factor]}")
    low, high = (1e3 * step for step in found["published"])
    print(f"  published: {low:.1f} to {high:.1f} ms; residual {found['residual'][0]:.2f} to {found['residual'][1]:.2f} "
          "times what the factors give with the balancer")  # fmt: skip
    print("  The residual is not identified by the data: host time, arrivals, headroom for latency, kernels.")
    print("  The source's own rule of thumb is that real steps take 1.5 to 2.5 times the bound.\n")


def _show_published(rows):
    print("Beside other published throughputs [tokens/s per node]")
    print(f"  {'deployment':<40} {'published':>9} {'bound':>8} {'modelled':>8} {'ratio':>6}")
    for row in rows:
        print(f"  {row['name']:<40} {row['published']:9,.0f} {row['bound']:8,.0f} {row['modelled']:8,.0f} "
              f"{row['ratio']:6.2f}  {row['note']}")  # fmt: skip
    print(
        "  modelled: the schedule at 39 of 50 GB/s and attention at 660 of 989 TFLOPS; no imbalance, host or waiting.\n"
    )
