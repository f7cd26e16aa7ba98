"""Where `refmodel volumes` takes its routing from: drawn at random, recorded by an engine, or the model's own run."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from parallel.dispatch.draw import KINDS
from parallel.dispatch.routing_file import Recorded, load_routing
from parallel.dispatch.workload import PRESETS, Workload
from parallel.placement import Placement


class Source(NamedTuple):
    """The workload, its layers as physical ids by rank (made one at a time), where they come from (`recorded`,
    `model` or how they are drawn), and what the user should know."""

    workload: Workload
    layers: Iterator[list[np.ndarray]]
    routing: str
    notices: tuple[str, ...] = ()


def open_source(args) -> Source:
    """The routing that the arguments name. Raises ValueError where they contradict each other."""
    chosen = {f.name: getattr(args, f.name) for f in fields(Workload) if getattr(args, f.name, None) is not None}
    chosen.pop("routing", None)
    preset = (
        PRESETS[args.preset] if args.preset else (Workload() if chosen or args.routing else PRESETS["decode-ep144"])
    )
    kinds = [kind for kind in args.routing or () if kind in (*KINDS, "model")]
    if kinds and len(args.routing) > 1:
        raise ValueError(f"--routing {' '.join(args.routing)}: give one of {', '.join((*KINDS, 'model'))}, or files")
    if kinds == ["model"]:
        return _from_model(args, preset, chosen)
    if args.routing and not kinds:
        return _from_files(args, preset, chosen)
    if kinds:
        chosen["routing"] = kinds[0]
    workload = replace(preset, **chosen)
    return Source(workload, (workload.tables(layer, args.seed) for layer in range(workload.layers)), workload.routing)


def _from_files(args, preset: Workload, chosen: dict) -> Source:
    recorded = load_routing(args.routing, None, args.recorded_layers, args.recorded_top_k, args.unwritten)
    sizes = {"layers": len(recorded.ids), "top_k": recorded.ids.shape[2], "over_physical": False, "shared_replicas": 0}
    workload = replace(preset, **{**chosen, **sizes})
    if args.ids is None:
        raise ValueError(
            "recorded ids: say whether they are logical or physical experts (--ids logical or --ids physical)"
        )
    if args.ids == "physical" and recorded.phy2log is not None and "experts" not in chosen:
        experts = int(recorded.phy2log.max()) + 1
        workload = replace(workload, experts=experts, redundant=recorded.phy2log.shape[1] - experts)
    limit = workload.num_physical if args.ids == "physical" else workload.experts
    if recorded.ids.max(initial=-1) >= limit:
        raise ValueError(
            f"the files hold id {recorded.ids.max()}, but there are {limit} {args.ids} experts: "
            "set --experts and --redundant, or --ids"
        )
    return Source(workload, _recorded_layers(recorded, workload, args), "recorded", recorded.notices)


def _recorded_layers(recorded: Recorded, workload: Workload, args):
    for layer in range(len(recorded.ids)):
        tables = recorded.tables(layer, workload.ranks)
        yield tables if args.ids == "physical" else workload.to_physical(tables, layer, args.seed)


def _from_model(args, preset: Workload, chosen: dict) -> Source:
    config, layers, num_mtp = model_routing(args)
    notices = ("the last layer is the MTP layer (--no-mtp leaves it out)",) if num_mtp else ()
    sizes = {
        "experts": config.n_routed_experts,
        "top_k": config.num_experts_per_tok,
        "hidden": config.hidden_size,
        "layers": len(layers),
        "num_groups": config.n_group or 1,
    }
    workload = replace(preset, **{"ranks": 8, **chosen, **sizes, "over_physical": False, "shared_replicas": 0})
    placed = (
        workload.to_physical(_by_rank(requests, workload.ranks), layer, args.seed)
        for layer, requests in enumerate(layers)
    )
    return Source(workload, placed, "model", notices)


def _by_rank(requests: list[np.ndarray], ranks: int) -> list[np.ndarray]:
    """Request i on rank i mod R."""
    none = np.empty((0, requests[0].shape[1]), np.int64)
    return [np.concatenate([none, *requests[rank::ranks]]) for rank in range(ranks)]


def add_model_source(parser) -> None:
    """Arguments that say which model runs on which prompts."""
    from scripts.run import add_model_arguments

    parser.add_argument("--checkpoint", metavar="DIR", help="Hugging Face directory (default: the packaged example)")
    add_model_arguments(parser)
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="UTF-8 text, for byte-level models; repeat")
    parser.add_argument("--prompt-ids", action="append", metavar="IDS", help="token ids like 17,4,256; repeat")
    parser.add_argument("--no-mtp", action="store_true", help="without the MTP layer (default: with it, as last layer)")


def model_routing(args):
    """(config, one list per MoE layer of the requests' logical ids [T, K], MTP layers) of one prefill of each prompt.

    The MTP layer, where there is one and `args.no_mtp` does not leave it out, is the last: its experts are others, and
    so are its tokens' choices (vllm-project/vllm-ascend#8710). Row i reads token i + 1; the last reads the greedy one.
    """
    from refmodel import record
    from refmodel.generate import Item
    from scripts.run import open_model, read_prompts

    model, path = open_model(args, args.checkpoint)
    prompts, _ = read_prompts(Namespace(prompt=args.prompt, tokens=args.prompt_ids), model, path)
    num_mtp = 0 if args.no_mtp else min(model.config.num_nextn_predict_layers, 1)
    layers: dict[str, list[np.ndarray]] = {}
    for prompt in prompts:
        item = Item(0, model.check_ids(prompt), model.new_cache(), 0)
        with record() as recording:
            (step,) = model.step([item], "prefill")
            if num_mtp:
                following = np.append(item.token_ids[1:], step.logits[-1].argmax())
                model.mtp_step([item._replace(token_ids=following, hidden=step.hidden)], "prefill")
        for name in recording:
            if name.endswith("topk_idx"):
                layers.setdefault(name, []).append(recording[name])
    if not layers:
        raise ValueError(f"{path}: the model has no layer with experts")
    return model.config, list(layers.values()), num_mtp


def current_placement(workload: Workload) -> Placement | None:
    """The plan by which logical ids became physical ones, where there was one."""
    placement = workload.placement
    return placement if placement.num_ranks == workload.ranks and workload.redundant else None
