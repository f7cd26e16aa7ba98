"""Count the bytes that dispatch and combine move, exactly, from routing tables alone; hold measured bytes against them.

Without arguments: the published decode deployment (144 ranks, 176 tokens each, 58 layers). Presets: prefill-ep32,
decode-ep144, paper-ep320, profile-ep128; every size is a flag. Routing is drawn (uniform, group_limited, balanced),
taken from the model's own run (model), or read from files that an engine recorded: vLLM's routed_experts (.npy, .npz),
SGLang's meta_info.routed_experts (.json, .jsonl) and expert-distribution records (.pt), or tensors named as record()
names them (.safetensors). Exit code 1: a measurement given by --check lies outside its interval.

Example: refmodel volumes prefill-ep32 --tokens 1024 --plot out/volumes.svg
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from parallel.dispatch.check_counters import check_measurements
from parallel.dispatch.counter_model import Options
from parallel.dispatch.measurements import read_measurements
from parallel.dispatch.routing_file import UNWRITTEN
from parallel.dispatch.row_bytes import DISPATCHES, MODES, PAYLOADS
from parallel.dispatch.volumes import DIRECTIONS, Volumes, count_volumes
from parallel.dispatch.workload import PRESETS
from parallel.eplb import chosen_policy
from parallel.replicas import RULES
from parallel.topology import LINKS
from scripts.volumes_source import Source, add_model_source, current_placement, open_source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `refmodel volumes`."""
    parser.add_argument("preset", nargs="?", choices=PRESETS, help="a published deployment (default: decode-ep144)")
    sizes = parser.add_argument_group("deployment (defaults are the preset's)")
    for flag, meaning in (
        ("ranks", "ranks (GPUs)"),
        ("ranks-per-node", "ranks that share a node"),
        ("tokens", "tokens per rank"),
        ("experts", "logical experts"),
        ("redundant", "physical experts beyond the logical ones"),
        ("top-k", "experts per token"),
        ("hidden", "hidden size"),
        ("layers", "layers with experts"),
        ("num-groups", "expert groups"),
        ("topk-group", "groups that a token may use (group_limited)"),
    ):
        sizes.add_argument(f"--{flag}", type=int, metavar="N", help=meaning)
    sizes.add_argument("--dispatch", choices=DISPATCHES, help="dialect")
    sizes.add_argument("--mode", choices=MODES, help="how elastic moves rows over several nodes")
    sizes.add_argument("--payload", choices=PAYLOADS, help="what dispatch carries; fp8 comes back as bf16")
    sizes.add_argument("--replica-rule", choices=RULES, help="which replica of an expert serves a token")
    routing = parser.add_argument_group("routing")
    routing.add_argument("--routing", nargs="+", metavar="R", help="uniform, group_limited, balanced, model, or files")
    routing.add_argument("--ids", choices=("logical", "physical"), help="what the ids of the files are")
    routing.add_argument(
        "--unwritten", choices=UNWRITTEN, default="refuse", help="rows that the engine never wrote (default: refuse)"
    )
    routing.add_argument("--recorded-layers", type=int, metavar="N", help="layers in base64 answers")
    routing.add_argument("--recorded-top-k", type=int, metavar="N", help="top-k in base64 answers")
    routing.add_argument("--seed", type=int, default=0, help="of drawn routing and of the replica rule (default: 0)")
    add_model_source(parser.add_argument_group("the model's own run (--routing model)"))
    check = parser.add_argument_group("measured bytes")
    check.add_argument(
        "--check", nargs="+", metavar="FILE", help="counters (.csv), DeepEP test output, Kineto trace (.json)"
    )
    check.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="how often the layers ran meanwhile (default: 1)"
    )
    check.add_argument(
        "--mtu", type=int, default=4096, metavar="BYTES", help="payload of an RDMA packet (default: 4096)"
    )
    check.add_argument(
        "--slack", type=float, default=0.002, metavar="X", help="fraction of other traffic (default: 0.002)"
    )
    parser.add_argument("--plot", metavar="FILE", help="heat map of bytes by pair: .svg, or .png with matplotlib")
    parser.add_argument("--out", metavar="FILE", help="write bytes and rows of every layer, link and pair (.npz)")
    parser.add_argument("--json", action="store_true", help="print one JSON object: bytes, rows, fractions")


def run(args: argparse.Namespace) -> int:
    """Count, report and check; 1 if a measurement lies outside its interval."""
    from scripts.volumes_report import findings_json, print_findings, print_report, summary

    source = open_source(args)
    layers, total = _count(source, keep=bool(args.out or args.check))
    workload = source.workload
    notices = list(source.notices)
    if current_placement(workload):
        groups = workload.num_groups if workload.experts % workload.num_groups == 0 else 1
        policy = chosen_policy(groups, total.topology.num_nodes)
        notices.append(
            f"{workload.redundant} redundant experts placed by the {policy} policy, replicas chosen by the "
            f"{workload.replica_rule} rule"
        )
    content = summary(workload, total, source.routing, notices)
    findings = None
    if args.check:
        if min(args.repeat, args.mtu) < 1 or args.slack < 0:
            raise ValueError(
                f"--repeat {args.repeat} --mtu {args.mtu} --slack {args.slack}: counts of at least 1, slack of 0"
            )
        measured = [m for path in args.check for m in read_measurements(path)]
        findings = check_measurements(measured, layers, Options(args.repeat, args.mtu, args.slack))
        content["check"] = findings_json(findings)
    if args.out:
        _write(args.out, layers)
    if args.plot:
        from scripts.heatmap import draw

        title = f"{args.preset or workload.dispatch}: {total.counts.layers} layers, {workload.ranks} ranks"
        draw(args.plot, {d: total.matrix(d) for d in DIRECTIONS}, title, workload.ranks_per_node)
    if args.json:
        print(json.dumps(content))
    else:
        print_report(content)
        if findings is not None:
            print_findings(findings)
    return int(findings is not None and not all(f.holds for f in findings))


def _count(source: Source, keep: bool) -> tuple[list[Volumes], Volumes]:
    """(volumes of each layer, if kept; their sum)."""
    workload, layers, total = source.workload, [], None
    for tables in _progress(source.layers, workload.layers):
        arguments = (workload.num_physical, workload.topology, workload.hidden)
        volumes = count_volumes(tables, *arguments, workload.dispatch, workload.payload, workload.mode)
        total = volumes if total is None else total + volumes
        if keep:
            layers.append(volumes)
    return layers, total


def _progress(layers, number: int):
    if not sys.stderr.isatty():
        return layers
    from rich.console import Console
    from rich.progress import track

    return track(layers, "counting layers", total=number, console=Console(stderr=True), transient=True)


def _write(path: str, layers: list[Volumes]) -> None:
    """`dispatch.rdma.bytes` and the like: int64 [layers, ranks, ranks]."""
    arrays = {
        f"{direction}.{link}.{unit}": np.stack([volumes.matrix(direction, link, unit) for volumes in layers])
        for direction in DIRECTIONS
        for link in LINKS
        for unit in ("bytes", "rows")
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)
