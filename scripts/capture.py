"""Run another engine on the same tokens and write its tensors under our names.

The engine runs in an environment of its own, which scripts/adapters/make_venv.sh makes. Tensors are those of the first
prompt's prefill. The file can be compared with `refmodel dump` of the same tokens by `refmodel compare`;
`refmodel check-engine` does all of it at once.

Example: refmodel capture vllm --engine-args tensor_parallel_size=2 --out out/vllm.safetensors
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from refmodel.checkpoint import EXAMPLE
from refmodel.config import ModelConfig
from refmodel.tensor_file import save_tensors
from scripts.adapters.request import Request
from scripts.engines import ENGINES, Capture, find_python, parse_engine_args, readable_copy, run_engine

DTYPES = ("float32", "bfloat16")
DEFAULT_LENGTH = 48  # tokens of the prompt where none is given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `refmodel capture`."""
    add_engine_arguments(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="file to write: .safetensors")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `capture` and `check-engine` share: the engine, the checkpoint, the prompt."""
    parser.add_argument("engine", choices=sorted(ENGINES), help="which engine")
    parser.add_argument(
        "directory", nargs="?", metavar="DIR", help="checkpoint directory (default: the packaged example)"
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--tokens", action="append", metavar="IDS", help="token ids like 17,4,256; repeat")
    prompt.add_argument("--prompt", action="append", metavar="TEXT", help="UTF-8 text, for byte-level models; repeat")
    prompt.add_argument("--prompts", metavar="FILE", help="JSON list of texts or of lists of ids")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="arithmetic of the engine (float32)")
    parser.add_argument("--mtp", action="store_true", help="capture the MTP layer too; vLLM then drafts with it")
    parser.add_argument("--new-tokens", type=int, default=0, metavar="N", help="greedy tokens after the prompt (0)")
    parser.add_argument("--python", metavar="FILE", help="interpreter of the environment that has the engine")
    parser.add_argument(
        "--engine-args", nargs="+", default=[], metavar="K=V", help="options for the engine, tensor_parallel_size=2"
    )
    parser.add_argument("--as-stored", action="store_true", help="let the engine read FP8 weights itself")
    parser.add_argument("--timeout", type=float, metavar="S", help="give up after so many seconds")
    parser.add_argument("--verbose", action="store_true", help="show what the engine prints")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Capture, write the file, say what is in it; 0."""
    with tempfile.TemporaryDirectory(prefix="refmodel-copy-") as scratch:
        captured = capture(args, Path(scratch))
    metadata = {"engine": captured.result.engine, "notes": json.dumps(captured.notes)}
    save_tensors(args.out, dict(captured.tensors), metadata)
    summary = {
        "engine": captured.result.engine,
        "out": args.out,
        "ranks": len(captured.ranks),
        "tensors": len(captured.tensors),
        "bytes": sum(array.nbytes for array in captured.tensors.values()),
        "generated": captured.result.generated,
        "notes": list(captured.notes),
    }
    if args.json:
        print(json.dumps(summary))
        return 0
    print(f"{summary['engine']}: {summary['tensors']} tensors of {summary['ranks']} rank(s) in {args.out}")
    for note in captured.notes:
        print(f"note: {note}")
    for tokens in captured.result.generated if args.new_tokens else ():
        print(f"generated: {','.join(map(str, tokens))}")
    return 0


def capture(args: argparse.Namespace, scratch: Path) -> Capture:
    """What `args` ask for. `scratch` holds the copy that the engine reads while it runs, and afterwards."""
    folder = Path(args.directory) if args.directory else EXAMPLE
    config = ModelConfig.from_pretrained(folder)
    if args.new_tokens < 0:
        raise ValueError(f"--new-tokens {args.new_tokens}: must be 0 or more")
    if args.mtp and not ENGINES[args.engine].has_mtp:
        raise ValueError(f"--mtp: {ENGINES[args.engine].title} has no MTP layer")
    python = find_python(args.engine, args.python)
    engine_args = parse_engine_args(args.engine_args)
    prompts = read_prompts(args, config)
    model = folder if args.as_stored else readable_copy(args.engine, folder, scratch, args.dtype, args.mtp)
    request = Request(
        model=str(model.resolve()),
        out="",
        tokens=prompts,
        dtype=args.dtype,
        new_tokens=args.new_tokens,
        mtp=args.mtp,
        engine_args=engine_args,
    )
    captured = run_engine(args.engine, request, python, args.timeout, args.verbose)
    return with_engine_outputs(captured)


def with_engine_outputs(captured: Capture) -> Capture:
    """The capture with what the engine's own API returned: `engine.logprobs`, `engine.routed_experts`."""
    tensors, result = dict(captured.tensors), captured.result
    if result.logprobs:
        tensors["engine.logprobs"] = np.array(result.logprobs, np.float32)  # [T - 1], of tokens 1 .. T - 1
    if result.routed_experts:
        tensors["engine.routed_experts"] = np.array(result.routed_experts, np.int64)  # [T, MoE layers, K]
    return Capture(tensors, captured.ranks, result, captured.model, captured.notes)


def read_prompts(args: argparse.Namespace, config: ModelConfig) -> list[list[int]]:
    """Token ids of each prompt: given, or the same pseudo-random ones every time. ValueError for ids out of range."""
    if args.tokens is not None:
        prompts = [_split_ids(text) for text in args.tokens]
    elif args.prompt is not None:
        prompts = [_bytes_of(text, config) for text in args.prompt]
    elif args.prompts is not None:
        prompts = _read_file(Path(args.prompts), config)
    elif args.directory is None:
        prompts = [list("".join(_packaged_prompts()).encode()[:DEFAULT_LENGTH])]
    else:
        text = 128 <= config.vocab_size <= 512  # perhaps bytes: printable ones
        low, high = (32, 127) if text else (0, config.vocab_size)
        prompts = [np.random.default_rng(0).integers(low, high, DEFAULT_LENGTH).tolist()]
    for number, tokens in enumerate(prompts):
        bad = [token for token in tokens if not 0 <= token < config.vocab_size]
        if bad:
            raise ValueError(f"prompt {number}: token {bad[0]} is outside the vocabulary of {config.vocab_size}")
        if len(tokens) < 2:
            raise ValueError(f"prompt {number} has {len(tokens)} tokens: 2 or more are required")
    return prompts


def _packaged_prompts() -> list[str]:
    return json.loads((EXAMPLE / "prompts.json").read_text(encoding="utf-8"))["prompts"]


def _split_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--tokens {text!r}: integers separated by commas are required") from None


def _bytes_of(text: str, config: ModelConfig) -> list[int]:
    if not 256 <= config.vocab_size <= 512:
        raise ValueError(f"a vocabulary of {config.vocab_size} is not bytes: give ids instead of text (--tokens)")
    return list(text.encode())


def _read_file(path: Path, config: ModelConfig) -> list[list[int]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    content = content.get("prompts") if isinstance(content, dict) else content
    if not isinstance(content, list) or not content:
        raise ValueError(f"{path}: a JSON list of texts or of lists of ids is required, alone or as 'prompts'")
    prompts = [_bytes_of(item, config) if isinstance(item, str) else item for item in content]
    if any(not isinstance(ids, list) or any(type(token) is not int for token in ids) for ids in prompts):
        raise ValueError(f"{path}: every prompt must be a text or a list of integers")
    return prompts
