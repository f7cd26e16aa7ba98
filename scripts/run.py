"""Run a checkpoint on emulated expert-parallel ranks, and hold the result to one rank bit for bit.

Without arguments: the packaged example model, its eight prompts on 8 ranks, speculative decoding with its MTP layer.
Prints the text, whether the run equals the single-rank run, the bytes that crossed each link, and writes a golden file
with every named tensor. Exit code 0: identical; 1: not; 2: could not run.

Example: refmodel run --ranks 16 --dispatch normal --numerics bfloat16 --prompt "def main(" --new-tokens 32
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

DEFAULT_OUT = Path("out/run.safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `refmodel run`."""
    parser.add_argument("--checkpoint", metavar="DIR", help="Hugging Face directory (default: the packaged example)")
    add_model_arguments(parser)
    parser.add_argument("--ranks", type=int, default=8, help="emulated ranks (default: 8)")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="ranks that share a node (default: 8)")
    parser.add_argument("--dispatch", default="low_latency", help="dialect of dispatch and combine")
    parser.add_argument("--schedule", default="sequential", help="order of stages and micro-batches")
    parser.add_argument("--redundant-experts", type=int, default=0, metavar="N", help="extra physical experts")
    parser.add_argument("--transport", default="memory", help="'memory', or 'mpi' under mpiexec")
    add_prompt_arguments(parser)
    parser.add_argument("--new-tokens", type=int, default=48, metavar="N", help="tokens per prompt (default: 48)")
    parser.add_argument("--greedy", action="store_true", help="take the most probable token instead of sampling")
    parser.add_argument("--drafts", type=int, default=1, metavar="K", help="MTP drafts per step; 0: plain decoding")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"golden file (default: {DEFAULT_OUT})")
    parser.add_argument("--json", action="store_true", help="print one JSON object: bytes, tokens, fractions")


def add_model_arguments(parser) -> None:
    """Arguments that say how a model computes."""
    parser.add_argument("--numerics", help="float64, float32, bfloat16 or fp8 (default: the checkpoint's own)")
    parser.add_argument("--compute", default="float64", help="dtype inside operators: float64 or float32")
    parser.add_argument("--like", help="an engine's choices where implementations differ: hf, vllm, sglang, official")


def add_prompt_arguments(parser) -> None:
    """Arguments that say what goes in."""
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="UTF-8 text, for byte-level models; repeat")
    parser.add_argument("--tokens", action="append", metavar="IDS", help="token ids like 17,4,256; repeat")


def open_model(args, directory=None):
    """The model that the arguments name."""
    from refmodel import Model
    from refmodel.checkpoint import EXAMPLE

    path = directory or EXAMPLE
    return Model.from_pretrained(path, numerics=args.numerics, compute=args.compute, like=args.like), Path(path)


def read_prompts(args, model, path: Path):
    """(prompts as id arrays, sampling settings). Defaults come from the checkpoint's `prompts.json`."""
    byte_level = model.config.vocab_size == 258  # bytes, then bos and eos
    if args.prompt and not byte_level:
        raise ValueError(
            f"--prompt: this model has a vocabulary of {model.config.vocab_size} and no tokenizer here; give --tokens"
        )
    ids = [_bytes_of(text) for text in args.prompt or ()]
    ids += [_parse_ids(text) for text in args.tokens or ()]
    stored = path / "prompts.json"
    settings = json.loads(stored.read_text()) if stored.exists() else {}
    if not ids:
        if not byte_level or "prompts" not in settings:
            raise ValueError(f"{path} has no prompts.json for a byte-level model: give --tokens")
        ids = [_bytes_of(text) for text in settings["prompts"]]
    for number, prompt in enumerate(ids):
        if not len(prompt):
            raise ValueError(f"prompt {number} is empty: at least one token is needed")
    sampling = {key: settings[key] for key in ("temperature", "top_p", "seed") if key in settings}
    return ids, ({} if getattr(args, "greedy", False) else sampling)


def _bytes_of(text):
    """The token ids of a byte-level model."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)


def _parse_ids(text):
    try:
        return np.array([int(part) for part in text.replace(",", " ").split()], np.int64)
    except ValueError:
        raise ValueError(f"--tokens {text!r}: must be integers separated by commas or spaces") from None


def run(args: argparse.Namespace) -> int:
    """Generate on ranks and on one rank, compare, print, write the golden."""
    from parallel.deployment import Deployment
    from parallel.topology import Topology
    from refmodel import record

    topology = Topology(args.ranks, min(args.ranks_per_node, max(args.ranks, 1)))
    model, path = open_model(args, args.checkpoint)
    prompts, sampling = read_prompts(args, model, path)
    drafts = args.drafts if model.config.num_nextn_predict_layers else 0
    settings = {"speculative": drafts > 0, "num_drafts": max(drafts, 1), **sampling}
    deployment = Deployment(model, topology, args.redundant_experts, args.dispatch, args.schedule, args.transport)
    with record() as tensors:
        done = deployment.generate_batch(prompts, args.new_tokens, **settings)
    with record() as expected:
        alone = deployment.reference().generate_batch(prompts, args.new_tokens, **settings)
    own = [request for request in range(len(prompts)) if deployment.rank_of(request) in deployment.local_ranks]
    first = cache_difference(alone, done, own)
    ledger, agreed = deployment.ledger, None
    if args.transport == "mpi":
        first, ledger, agreed = _gather(deployment, tensors, first)
        if deployment.network.comm.Get_rank() != 0:
            return 0 if first is None else 1
        expected = {name: expected[name] for name in expected if name in tensors}  # no rows by expert over MPI
    first = first_difference(expected, tensors) or first
    _write_golden(args, model, path, prompts, sampling, done, tensors)
    result = _result(args, model, deployment, ledger, prompts, done, len(tensors), first)
    if agreed is not None:
        result["ledger_equals_mpi"] = agreed
    print(json.dumps(result, indent=1)) if args.json else _show(result, deployment)
    return 0 if first is None and agreed in (None, True) else 1


def _gather(deployment, tensors, first):
    """Over MPI: the first difference of any process, all ranks' ledger, whether it equals what MPI was handed."""
    comm, ours = deployment.network.comm, list(deployment.local_ranks)
    handed, counted = deployment.network.handed_over[ours], deployment.ledger.matrix()[ours]
    everyone = comm.allgather((first, bool((handed == counted).all())))
    parts = comm.gather(tensors.parts())
    if comm.Get_rank() == 0:
        tensors.join(parts[1:])
    first = next((difference for difference, _ in everyone if difference is not None), None)
    return first, deployment.network.gathered_ledger(), all(agreed for _, agreed in everyone)


def first_difference(expected, actual) -> str | None:
    """The first named tensor whose bytes differ, in execution order; None when all are the same."""
    for name in expected:
        if name not in actual or not same_bytes(expected[name], actual[name]):
            return name
    return next((name for name in actual if name not in expected), None)


def cache_difference(expected, actual, own) -> str | None:
    """The first request and layer whose tokens, or whose cache rows (of the requests in `own`), differ."""
    for request, (a, b) in enumerate(zip(expected.caches, actual.caches)):
        if expected.tokens[request] != actual.tokens[request]:
            return f"tokens of request {request}"
        if request not in own:
            continue
        for layer, written in enumerate(a.written):
            if b.written[layer] != written or not same_bytes(a.rows(layer, written), b.rows(layer, written)):
                return f"cache of request {request}, layer {layer}"
    return None


def same_bytes(a, b) -> bool:
    """Equal dtype, shape and bytes: NaN equals itself, -0 does not equal +0."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _write_golden(args, model, path, prompts, sampling, done, tensors):
    from refmodel.golden.bundle import write_bundle

    named = dict(tensors)
    for request, (prompt, tokens) in enumerate(zip(prompts, done.tokens)):
        named[f"request.{request}.prompt"] = prompt
        named[f"request.{request}.tokens"] = np.array(tokens, np.int64)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    extra = {"command": "run", "checkpoint": path.name, "sampling": sampling, "dispatch": args.dispatch}
    write_bundle(
        args.out,
        named,
        model.config,
        model.numerics.name,
        recipe=model.numerics.recipe if model.numerics.fp8 else None,
        seed=sampling.get("seed"),
        extra=extra,
    )


def _result(args, model, deployment, ledger, prompts, done, num_tensors, first):
    from parallel.ledger import CLASSES
    from parallel.topology import LINKS

    volumes = {
        direction: {
            link: {name: int(ledger.matrix(direction, link=link, classes=name).sum()) for name in CLASSES}
            for link in LINKS
        }
        for direction in ("dispatch", "combine")
    }
    texts = [_text(model, prompt, tokens) for prompt, tokens in zip(prompts, done.tokens)]
    return {
        "numerics": model.numerics.name,
        "ranks": args.ranks,
        "dispatch": args.dispatch,
        "schedule": args.schedule,
        "redundant_experts": args.redundant_experts,
        "requests": [
            {"prompt": prompt, "text": text, "tokens": tokens} for (prompt, text), tokens in zip(texts, done.tokens)
        ],
        "drafted": done.drafted,
        "accepted": done.accepted,
        "acceptance_rate": done.acceptance_rate if done.drafted else None,
        "tokens_per_step": done.tokens_per_step if done.steps else None,
        "identical": first is None,
        "first_difference": first,
        "reference": deployment.reference_name,
        "bytes": volumes,
        "matrix_bytes": ledger.matrix().tolist(),
        "golden": str(args.out),
        "golden_tensors": num_tensors,
        "notices": list(model.notices),
    }


def _text(model, prompt, tokens):
    if model.config.vocab_size != 258:
        return None, None
    return tuple(bytes(int(t) for t in ids if t < 256).decode("utf-8", "replace") for ids in (prompt, tokens))


def _show(result, deployment):
    from scripts.tables import console, matrix_table, volume_table

    out = console()
    for notice in result["notices"]:
        out.print(f"note: {notice}", style="yellow", markup=False)
    for number, request in enumerate(result["requests"]):
        rank = deployment.rank_of(number)
        shown = str(request["tokens"]) if request["text"] is None else request["prompt"] + request["text"]
        out.print(f"[bold]request {number}[/] on rank {rank}")
        out.print("  " + shown.replace("\t", "    ").replace("\n", "\n  "), markup=False, highlight=False)
    out.print()
    if result["drafted"]:
        out.print(
            f"MTP drafts accepted: {result['accepted']} of {result['drafted']} ({result['acceptance_rate']:.1%}), "
            f"{result['tokens_per_step']:.2f} tokens per step"
        )
    out.print(volume_table(result["bytes"], f"bytes moved, {result['dispatch']} dispatch, {result['ranks']} ranks"))
    if result["ranks"] <= 16:
        out.print(matrix_table(result["matrix_bytes"], "bytes from rank (row) to rank (column)"))
    verdict = "yes" if result["identical"] else f"no, first at {result['first_difference']}"
    out.print(f"identical to {result['reference']}: [bold]{verdict}[/]  ({result['numerics']}, all tensors and caches)")
    if "ledger_equals_mpi" in result:
        out.print(f"ledger equals the bytes handed to MPI: {'yes' if result['ledger_equals_mpi'] else 'no'}")
    out.print(f"golden: {result['golden']} ({result['golden_tensors']} tensors)", highlight=False)
    sys.stdout.flush()
