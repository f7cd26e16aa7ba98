"""Plan redundant experts from a load table: loads before and after, duplicates, and the bytes that move.

Loads come from a file (.npy, .npz, .safetensors or .csv [layers, experts]; SGLang's expert-distribution records,
.pt), from recorded routing (--routing, as in refmodel volumes), or, without either, from the model's own run, the MTP
layer last.
"Before" is a placement without knowledge of loads (physical expert i is logical i mod E), or the plan in --current.
--plot draws, for each layer, the load of each logical expert, sorted by id, and the load of each rank before and after.

Example: refmodel experts loads.npy --ranks 32 --policy balanced --out out/plan.npz --plot out/loads.svg
"""

import argparse
import json
from pathlib import Path

import numpy as np

from parallel.dispatch.routing_file import UNWRITTEN, load_arrays, load_expert_loads, load_routing
from parallel.eplb import POLICIES, balancedness, chosen_policy, count_duplicates, gpu_loads, rebalance_experts
from parallel.placement import Placement
from parallel.rearrange import SOURCES, expert_bytes, plan_rearrangement
from parallel.replicas import expert_loads
from parallel.topology import LINKS, Topology
from scripts.load_chart import check, draw
from scripts.volumes_source import add_model_source, model_routing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `refmodel experts`."""
    parser.add_argument("loads", nargs="?", metavar="FILE", help="load of each logical expert by layer")
    parser.add_argument("--ranks", type=int, default=32, metavar="N", help="ranks (default: 32)")
    parser.add_argument(
        "--ranks-per-node", type=int, default=8, metavar="N", help="ranks that share a node (default: 8)"
    )
    parser.add_argument("--redundant", type=int, default=32, metavar="N", help="redundant experts (default: 32)")
    parser.add_argument("--groups", type=int, metavar="N", help="expert groups (default: the model's, or 8 for a file)")
    parser.add_argument("--policy", choices=POLICIES, default="deepseek", help="packer (default: deepseek)")
    parser.add_argument(
        "--current", metavar="FILE", help="plan in use: .npz of --out, or phy2log [layers, slots] as .npy"
    )
    parser.add_argument(
        "--senders", choices=SOURCES, default="sglang", help="who sends a moved expert (default: sglang)"
    )
    parser.add_argument("--hidden", type=int, metavar="N", help="hidden size (default: the model's, or 7168)")
    parser.add_argument("--intermediate", type=int, metavar="N", help="expert width (default: the model's, or 2048)")
    parser.add_argument(
        "--weights", choices=("fp8", "bf16", "fp32", "fp64"), default="fp8", help="dtype (default: fp8)"
    )
    parser.add_argument("--routing", nargs="+", metavar="FILE", help="take the loads from recorded logical ids")
    parser.add_argument(
        "--experts", type=int, metavar="N", help="logical experts in recorded routing (default: largest id + 1)"
    )
    parser.add_argument("--unwritten", choices=UNWRITTEN, default="refuse", help="rows never written (default: refuse)")
    parser.add_argument("--recorded-layers", type=int, metavar="N", help="layers in base64 answers")
    parser.add_argument("--recorded-top-k", type=int, metavar="N", help="top-k in base64 answers")
    parser.add_argument("--plot", metavar="FILE", help="bars of loads by layer: .svg, or .png with matplotlib")
    parser.add_argument("--out", metavar="FILE", help="write phy2log, log2phy, logcnt and loads (.npz)")
    parser.add_argument("--json", action="store_true", help="print one JSON object: tokens, bytes, fractions")
    add_model_source(parser.add_argument_group("the model's own run (without a file)"))


def run(args: argparse.Namespace) -> int:
    """Plan, report and draw."""
    if args.plot:
        check(args.plot)
    loads, sizes = _loads(args)
    topology = Topology(args.ranks, args.ranks_per_node)
    layers, experts = loads.shape
    if args.redundant < 0:
        raise ValueError(f"--redundant {args.redundant}: must not be negative")
    arguments = (experts + args.redundant, sizes["groups"], topology.num_nodes, args.ranks)
    plan = rebalance_experts(loads, *arguments, policy=args.policy)
    before = _current(args, layers, experts)
    content = {
        "layers": layers,
        "mtp_layers": sizes["mtp_layers"],
        "experts": experts,
        "redundant": args.redundant,
        "ranks": args.ranks,
        "nodes": topology.num_nodes,
        "groups": sizes["groups"],
        "policy": args.policy,
        "groups_policy": chosen_policy(sizes["groups"], topology.num_nodes),
        "before": _describe(loads, before, args.ranks),
        "after": _describe(loads, plan.phy2log, args.ranks),
        "moved": _moved(before, plan.phy2log, topology, sizes, args),
    }
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(args.out, **plan._asdict(), loads=loads)
    if args.plot:
        by_rank = (gpu_loads(loads, phy2log, args.ranks) for phy2log in (before, plan.phy2log))
        draw(args.plot, loads, *by_rank, _layer_names(content), _title(content))
    if args.json:
        print(json.dumps(content | {"phy2log": plan.phy2log.tolist()}))
    else:
        _print(content)
    return 0


def _loads(args) -> tuple[np.ndarray, dict]:
    """(loads [L, E], sizes of groups and experts, and how many of the last layers are MTP layers)."""
    sizes = {"mtp_layers": 0, "groups": 8, "hidden": 7168, "intermediate": 2048}
    if args.loads and args.routing:
        raise ValueError("give a load table or --routing, not both")
    if args.loads:
        loads = load_expert_loads(args.loads)
    elif args.routing:
        arguments = (args.experts, args.recorded_layers, args.recorded_top_k, args.unwritten)
        recorded = load_routing(args.routing, *arguments)
        loads = _counted(recorded, args.experts)
    else:
        config, layers, num_mtp = model_routing(args)
        sizes = {
            "mtp_layers": num_mtp,
            "groups": config.n_group or 1,
            "hidden": config.hidden_size,
            "intermediate": config.moe_intermediate_size,
        }
        loads = np.stack([expert_loads(np.concatenate(requests), config.n_routed_experts) for requests in layers])
    given = {name: value for name in sizes if (value := getattr(args, name, None)) is not None}
    return loads, sizes | given


def _counted(recorded, experts: int | None) -> np.ndarray:
    """Loads of logical experts [L, E]; physical ids are mapped back where the file holds the placement."""
    if recorded.phy2log is None:
        count = experts or int(recorded.ids.max()) + 1
        return np.stack([expert_loads(layer, count) for layer in recorded.ids])
    count = int(recorded.phy2log.max()) + 1
    physical = [expert_loads(layer, recorded.phy2log.shape[1]) for layer in recorded.ids]
    return np.stack([np.bincount(row, load, count) for row, load in zip(recorded.phy2log, physical)]).astype(np.int64)


def _current(args, layers: int, experts: int) -> np.ndarray:
    """phy2log [L, S] of the plan in use."""
    if args.current is None:
        return np.tile(Placement.contiguous(experts, args.ranks, args.redundant).phy2log, (layers, 1))
    stored = load_arrays(args.current)
    if len(stored) > 1 and "phy2log" not in stored:
        raise ValueError(f"{args.current} holds {', '.join(stored)}: phy2log is needed")
    phy2log = stored.get("phy2log", next(iter(stored.values())))
    if phy2log.shape != (layers, experts + args.redundant):
        raise ValueError(
            f"{args.current}: phy2log of shape {list(phy2log.shape)}, but there are {layers} layers and "
            f"{experts} + {args.redundant} physical experts"
        )
    return phy2log


def _describe(loads, phy2log, ranks: int) -> dict:
    by_rank = gpu_loads(loads, phy2log, ranks)
    return {
        "max_load": by_rank.max(axis=1).tolist(),
        "mean_load": by_rank.mean(axis=1).tolist(),
        "mean_over_max": balancedness(by_rank).tolist(),
        "duplicates": count_duplicates(phy2log, ranks).tolist(),
    }


def _moved(before, after, topology: Topology, sizes: dict, args) -> dict:
    """Bytes of all layers by link, and experts received."""
    size = expert_bytes(sizes["hidden"], sizes["intermediate"], args.weights)
    moved, received = dict.fromkeys(LINKS, 0), 0
    for old, new in zip(before, after):
        plan = plan_rearrangement(Placement(old, args.ranks), Placement(new, args.ranks), topology, args.senders)
        received += int((plan.kind == 2).sum())
        for link, amount in plan.link_bytes(size, topology).items():
            moved[link] += amount
    return {"expert_bytes": size, "received_experts": received, "bytes": moved}


def _layer_names(content: dict) -> list[str]:
    """Names for the plot: counted among the layers with experts, not all of the model's."""
    layers, main = content["layers"], content["layers"] - content["mtp_layers"]
    return [f"layer {row} of {layers}" + ", MTP" * (row > main) for row in range(1, layers + 1)]


def _title(content: dict) -> str:
    return (
        f"{content['experts']} experts + {content['redundant']} redundant on {content['ranks']} ranks, "
        f"policy {content['policy']}: {content['groups_policy']}"
    )


def _print(content: dict) -> None:
    from rich.table import Table

    from scripts.tables import console

    out = console()
    out.print(
        f"{content['experts']} experts + {content['redundant']} redundant on {content['ranks']} ranks, "
        f"{content['nodes']} nodes, {content['groups']} groups, {content['layers']} layers"
        + (", the last one the MTP layer" if content["mtp_layers"] else ""),
        highlight=False,
    )
    where = {
        "hierarchical": "groups stay within nodes",
        "global": "nodes do not divide the groups, so nodes are ignored",
    }[content["groups_policy"]]
    out.print(f"policy {content['policy']}: {content['groups_policy']} ({where})\n", highlight=False)
    table = Table(title="load of ranks, over layers", title_justify="left")
    for name in ("", "mean of mean/max", "worst mean/max", "largest max/mean", "duplicates"):
        table.add_column(name, justify="left" if not name else "right")
    for when in ("before", "after"):
        part = content[when]
        ratio = part["mean_over_max"]
        cells = (
            f"{sum(ratio) / len(ratio):.4f}",
            f"{min(ratio):.4f}",
            f"{1 / min(ratio):.3f}",
            f"{sum(part['duplicates']):,}",
        )
        table.add_row(when, *cells)
    out.print(table)
    moved = content["moved"]
    out.print(
        f"{moved['received_experts']:,} experts of {moved['expert_bytes']:,} bytes move between ranks: "
        + ", ".join(f"{amount:,} bytes {link}" for link, amount in moved["bytes"].items()),
        highlight=False,
    )
