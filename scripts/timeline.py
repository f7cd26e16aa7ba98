"""Draw an overlap schedule and price it: text Gantt, SVG, and a Chrome trace that opens in Perfetto.

Without arguments: decode on 144 H800, two micro-batches half a layer apart. `--print` lists a rank's program instead.
`--schedule dualpipe` and `dualpipev` are training pipelines in units of a forward.

Example: refmodel timeline --phase prefill --svg prefill.svg --trace prefill.json
"""

import argparse
import json

from parallel.schedule import BUILDERS, check
from parallel.timing.hardware import HARDWARE, hardware
from scripts import timeline_training
from scripts.timeline_output import numbers, print_programs, write

PIPELINES = ("dualpipe", "dualpipev")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `refmodel timeline`."""
    parser.add_argument("--phase", choices=("decode", "prefill"), default="decode", help="EP144 decode or EP32 prefill")
    parser.add_argument("--schedule", choices=(*BUILDERS, *PIPELINES), help="default: the published one of the phase")
    parser.add_argument("--hardware", choices=HARDWARE, default="h800", help="GPU (default h800)")
    parser.add_argument(
        "--ranks", type=int, help="GPUs of the unit (default 144 for decode, 32 for prefill, 8 training)"
    )
    parser.add_argument("--layers", type=int, default=61, help="layers of the main model (default 61)")
    parser.add_argument("--requests", type=float, default=1850 / 21, help="decode: requests per GPU (default 88.1)")
    parser.add_argument("--context", type=float, default=4989, help="decode: keys per request (default 4989)")
    parser.add_argument("--drafts", type=int, default=1, help="decode: draft tokens per step (default 1)")
    parser.add_argument("--prompts", default="4096,4096,4096,4096", help="prefill: new tokens per prompt of a GPU")
    parser.add_argument("--redundant-experts", type=int, default=32, metavar="N", help="extra experts (default 32)")
    parser.add_argument(
        "--spread", type=float, default=0.0, help="log-normal spread of expert popularity (default 0: even)"
    )
    parser.add_argument("--no-balancer", action="store_true", help="with --spread: place experts without the balancer")
    parser.add_argument("--loads", metavar="FILE", help="loads per expert (text, .npy) or recorded routing, by layer")
    parser.add_argument("--link", type=float, default=1.0, help="fraction of the link rate that is reached (default 1)")
    parser.add_argument(
        "--attention", type=float, default=1.0, help="fraction of the BF16 peak in attention (default 1)"
    )
    parser.add_argument("--sync", type=float, default=0.0, help="seconds that every exchange takes besides (default 0)")
    parser.add_argument("--no-waits", action="store_true", help="perfect overlap: streams do not wait for each other")
    parser.add_argument("--micro-batches", type=int, default=20, help="training: micro-batches (default 20)")
    parser.add_argument(
        "--measured", metavar="FILE", help="CSV of stage durations, or a PyTorch profiler trace (.json)"
    )
    parser.add_argument("--print", action="store_true", help="print the program of --show-ranks and stop")
    parser.add_argument("--svg", metavar="FILE", help="write a drawing of --show-ranks")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace for Perfetto, of all ranks")
    parser.add_argument("--show-ranks", default="0", metavar="R,...", help="ranks to print and draw (default 0)")
    parser.add_argument("--window", metavar="MS,MS", help="part to draw (default: two layers in the middle)")
    parser.add_argument("--json", action="store_true", help="print one JSON object; times in seconds")


def run(args: argparse.Namespace) -> int:
    """Price, draw, and print; 0."""
    if args.measured and args.measured.endswith(".json"):
        return timeline_training.profile(args)
    if args.schedule in PIPELINES:
        return timeline_training.pipeline(args)
    scenario, schedule = build_scenario(args)
    shown = numbers(args.show_ranks, "--show-ranks", scenario.topology.num_ranks)
    programs = scenario.programs(schedule)
    check(programs, scenario.layers, len(scenario.batches))
    if args.print:
        return print_programs(args, programs, shown)
    content = price(args, scenario, programs, schedule, shown)
    if args.json:
        print(json.dumps(content, indent=1))
    return 0


def build_scenario(args: argparse.Namespace):
    """(scenario, schedule name) that the arguments describe."""
    from parallel.timing.costs import Efficiency
    from parallel.timing.prices import PRESETS

    preset = PRESETS[args.phase]
    options = {
        "gpu": hardware(args.hardware),
        "ranks": args.ranks if args.ranks is not None else {"decode": 144, "prefill": 32}[args.phase],
        "num_layers": args.layers,
        "redundant": args.redundant_experts,
        "efficiency": Efficiency(attention=args.attention, link=args.link, sync=args.sync),
    }
    if args.layers < 1 or options["ranks"] < 1 or args.requests < 0 or args.context < 0 or args.drafts < 0:
        raise ValueError("--layers and --ranks start at 1, --requests, --context and --drafts at 0")
    if args.phase == "decode":
        options |= {"requests": args.requests, "context": args.context, "draft_tokens": args.drafts}
    else:
        options["prompts"] = numbers(args.prompts, "--prompts")
    scenario = preset.build(**options)
    if args.spread or args.loads:
        scenario = preset.build(**options, loads=expert_loads(args, scenario))
    return scenario, args.schedule or preset.schedule


def expert_loads(args: argparse.Namespace, scenario):
    """Loads of every MoE layer: from a file, or drawn anew for each."""
    import numpy as np

    from parallel.timing.imbalance import drawn_popularity, even_placement, loads_of_vector, read_loads

    ranks, shape = scenario.topology.num_ranks, scenario.shape
    experts, physical = shape.n_routed_experts, shape.n_routed_experts + args.redundant_experts
    rows = round(sum(batch.tokens for batch in scenario.batches) * ranks * shape.num_experts_per_tok)
    moe = scenario.layers.moe
    if args.loads:
        given = read_loads(args.loads, experts)
        seen = counts = given[np.arange(len(moe)) % len(given)]  # [L, E]; a file with fewer layers starts again
    else:
        seen = np.stack([drawn_popularity(experts, args.spread, layer) for layer in moe])
        counts = np.stack([np.random.default_rng([7, layer]).multinomial(rows, p) for layer, p in zip(moe, seen)])
    if args.no_balancer:
        placed = np.tile(even_placement(counts.shape[1], physical), (len(moe), 1))
    else:
        from parallel.eplb import rebalance_experts

        placed = rebalance_experts(seen.astype(np.float32), physical, 1, 1, ranks)[0]
    return {layer: loads_of_vector(count, phy2log, ranks) for layer, count, phy2log in zip(moe, counts, placed)}


def price(args, scenario, programs, schedule, shown) -> dict:
    """Run the timeline, write what was asked for, and print or return the figures."""
    from parallel.timing.prices import Prices, stage_table
    from parallel.timing.timeline import timeline

    prices = Prices(scenario)
    result = timeline(programs, prices.compute, prices.transfer, not args.no_waits)
    bound = timeline(programs, prices.compute, prices.transfer, waits=False).makespan
    content = {
        "name": scenario.name,
        "schedule": schedule,
        "makespan": result.makespan,
        "perfect_overlap": bound,
        "exposed_communication": {"mean": sum(result.exposed) / len(result.exposed), "max": max(result.exposed)},
        "layer": {name: {"mean": float(t.mean()), "max": float(t.max())} for name, t in stage_table(scenario).items()},
        "left_out": list(scenario.notes),
    }
    window = _window(args, result, len(scenario.layers.layers))
    if args.measured:
        content["measured"] = measured(args, programs, result, window, shown)
    write(args, result, shown, window, f"{scenario.name}, {schedule}", content)
    if not args.json:
        _show(content, result, shown, window)
    return content


def _window(args, result, layers):
    """Seconds to draw: as given in milliseconds, or two layers' worth in the middle."""
    if args.window:
        try:
            start, end = (float(word) * 1e-3 for word in args.window.split(","))
        except ValueError:
            raise ValueError(f"--window {args.window!r}: two times in milliseconds, as in 10,12.5") from None
        return start, end
    length = min(2 * result.makespan / layers, result.makespan)
    start = (result.makespan - length) / 2
    return start, start + length


def _show(content, result, shown, window):
    from parallel.timing.render import gantt

    print(f"{content['name']}, {content['schedule']}: {content['makespan'] * 1e3:.3f} ms; "
          f"with perfect overlap {content['perfect_overlap'] * 1e3:.3f} ms")  # fmt: skip
    exposed = content["exposed_communication"]
    print(f"exposed communication per rank: mean {exposed['mean'] * 1e3:.3f} ms, most {exposed['max'] * 1e3:.3f} ms")
    print("one MoE layer, both micro-batches [us]: mean over ranks (most)")
    print(
        "  " + ", ".join(f"{name} {t['mean'] * 1e6:.1f} ({t['max'] * 1e6:.1f})" for name, t in content["layer"].items())
    )
    if "measured" in content:
        _show_measured(content["measured"])
    print(gantt(result, shown, window))
    for note in content["left_out"]:
        print(f"left out: {note}")
    for name in ("svg", "trace"):
        if name in content:
            print(f"wrote {content[name] if name == 'svg' else content[name]['file']}")


def measured(args, programs, modelled, window, shown) -> dict:
    """The same programs with measured stage durations, beside the model's."""
    from parallel.timing.measured import read_csv
    from parallel.timing.render import gantt
    from parallel.timing.timeline import timeline

    table = read_csv(args.measured)
    result = timeline(programs, table.compute, table.transfer, not args.no_waits)
    stages = {}
    for name, source in (("model", modelled), ("measured", result)):
        for span in source.spans:
            stages.setdefault(span.name, {"model": 0.0, "measured": 0.0})[name] += span.end - span.start
    ranks = len(programs)
    per_rank = {stage: {name: seconds / ranks for name, seconds in both.items()} for stage, both in stages.items()}
    drawn = gantt(result, shown, window if window[1] <= result.makespan else None) if result.makespan > 0 else ""
    return {"makespan": result.makespan, "stages": per_rank, "gantt": drawn}


def _show_measured(found):
    print(f"measured durations give {found['makespan'] * 1e3:.3f} ms; per rank and stage [ms], model | measured:")
    for stage, both in found["stages"].items():
        print(f"  {stage:<14} {both['model'] * 1e3:9.3f} | {both['measured'] * 1e3:9.3f}")
    print(found["gantt"])
