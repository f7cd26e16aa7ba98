"""The training half of `refmodel timeline`: DualPipe pipelines, and profiler traces beside the model."""

import json

from parallel.schedule import dualpipe
from parallel.schedule.pipeline import Durations, check_pipeline, dualpipe_bubble, simulate
from parallel.timing.measured import families, overlap, read_profile
from parallel.timing.published import training_model
from parallel.timing.render import gantt
from parallel.timing.timeline import pipeline_timeline
from scripts.timeline_output import numbers, print_programs, write

FORWARDS = ("F", 1.0)  # a pipeline's times are in units of one forward


def profile(args) -> int:
    """A profiler trace by kernel kind, beside what the model gives to a training layer."""
    if args.svg or args.trace:
        raise ValueError("--measured with a profiler trace gives a table of kernels: --svg and --trace draw schedules")
    kernels = read_profile(args.measured)
    found, hidden = families(kernels), overlap(kernels)
    model = training_model(ranks=args.ranks or 64, gpu=args.hardware)
    content = {
        "overlap": hidden._asdict(),
        "families": {name: {**family._asdict(), "model": model.get(name)} for name, family in found.items()},
    }
    if args.json:
        print(json.dumps(content, indent=1))
        return 0
    span, computing, exchanging, behind = (1e3 * seconds for seconds in hidden)
    print(f"{len(kernels)} kernels in {span:.2f} ms: computing {computing:.2f} ms, exchanging {exchanging:.2f} ms,")
    print(f"of which {behind:.2f} ms behind computation")
    print(f"{'kind':<22} {'count':>5} {'total ms':>9} {'mean ms':>8} {'model ms':>8} {'ratio':>6}  streams")
    for name, family in found.items():
        expected = model.get(name)
        beside = f"{expected * 1e3:8.3f} {family.mean / expected:6.2f}" if expected else f"{'-':>8} {'-':>6}"
        print(f"{name:<22} {family.count:5d} {family.seconds * 1e3:9.3f} {family.mean * 1e3:8.3f} {beside}  "
              f"{','.join(map(str, family.streams))}")  # fmt: skip
    print(
        "model: 4096 tokens per GPU at peak rates, node-limited exchanges. In training a dispatch's gradient runs the"
    )
    print("combine kernel, and a combine's gradient runs dispatch with the forward's layout (dispatch_cached).")
    return 0


def pipeline(args) -> int:
    """DualPipe and DualPipeV: programs, peaks, bubble, and a drawing."""
    ranks = args.ranks or 8
    folded = args.schedule == "dualpipev"
    programs = (dualpipe.build_v if folded else dualpipe.build)(ranks, args.micro_batches)
    stages = 2 * ranks if folded else ranks
    check_pipeline(programs, stages, args.micro_batches)
    shown = numbers(args.show_ranks, "--show-ranks", ranks) if args.show_ranks != "0" or args.print else range(ranks)
    if args.print:
        return print_programs(args, programs, shown)
    times = Durations(1.0, 2.0, 1.0, 2.5)
    found = simulate(programs, stages, times)
    result = pipeline_timeline(programs, stages, times)
    content = {
        "schedule": args.schedule,
        "durations": times._asdict(),
        "makespan": found.makespan,
        "bubble": found.bubble,
        "bubble_formula": dualpipe_bubble(stages, times),
        "peak_activations": found.activations,
        "peak_weight_queue": found.queue,
    }
    window = (0.0, result.makespan)
    write(
        args,
        result,
        shown,
        window,
        f"{args.schedule}, {ranks} ranks, {args.micro_batches} micro-batches",
        content,
        FORWARDS,
    )
    if args.json:
        print(json.dumps(content, indent=1))
        return 0
    print(f"{args.schedule} on {ranks} ranks, {args.micro_batches} micro-batches; F 1, B 2, W 1, F&B 2.5 (B - W = F)")
    formula = content["bubble_formula"]
    print(f"makespan {found.makespan:g} forwards; largest bubble {max(found.bubble):g}, formula {formula:g}")
    print(f"peak activations {max(found.activations)}, longest weight-gradient queue {max(found.queue)}")
    print(gantt(result, shown, width=min(150, round(2 * result.makespan)), unit=FORWARDS))
    return 0
