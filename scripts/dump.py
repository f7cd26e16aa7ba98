"""Write goldens: every named tensor of a model, of one layer from a captured input, or of operators at V3's shapes.

Without DIR the packaged example model. A golden is a .safetensors file whose metadata hold config, numerics, versions,
the order of the tensors and a tolerance for each. With --ops: `fp8` FP8 products at V3's shapes (2.8 GB, minutes for
those of 4096 rows), `model` the published set, which is every operator of the model at toy and at V3's shapes and the
example model (0.25 GB, seconds), `all` both.

Example: refmodel dump --numerics bfloat16 --prompt "def main(" --out out/main.safetensors
         refmodel dump DIR --layers 3 --input hidden.safetensors --out out/layer3.safetensors
         refmodel dump --ops fp8 --case q_b.m64 --out out/ops
         refmodel dump --ops model --case 'mla_decode\\.v3_' --out out/ops
"""

import argparse
import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from scripts.run import add_model_arguments, add_prompt_arguments, open_model, read_prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `refmodel dump`."""
    parser.add_argument("directory", nargs="?", metavar="DIR", help="checkpoint (default: the packaged example)")
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument("--phase", default="prefill", help="prefill (naive MLA) or decode (absorbed MLA)")
    parser.add_argument("--mtp", action="store_true", help="run the MTP layer behind the model, too")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="then N greedy decode steps, as step.S.NAME")
    parser.add_argument("--layers", metavar="L", help="only these layers (3 or 3,4), each from --input")
    parser.add_argument("--input", metavar="FILE", help="tensor file with the rows that enter the layer")
    parser.add_argument("--tensor", metavar="NAME", help="which tensor of --input (default: the only one)")
    parser.add_argument("--part", default="layer", help="layer, attention or ffn (default: layer)")
    parser.add_argument("--ops", choices=("fp8", "model", "all"), help="operator goldens instead of a model's tensors")
    parser.add_argument("--case", metavar="REGEX", help="with --ops: only the cases whose name matches")
    parser.add_argument("--list", action="store_true", help="with --ops: name the cases and their bytes, write nothing")
    parser.add_argument("--out", type=Path, help="file to write (with --ops: a folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object: files, tensors, bytes")


def run(args: argparse.Namespace) -> int:
    """Write what was asked for; 0."""
    if args.ops:
        result = _dump_ops(args)
    else:
        if args.out is None:
            raise ValueError("--out FILE is needed: where the golden goes")
        result = _dump_layers(args) if args.layers else _dump_model(args)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        for entry in result["files"]:
            print(f"{entry['name']}: {entry['tensors']} tensors, {entry['bytes']:,} bytes")
    return 0


def _dump_model(args):
    from refmodel import record

    if args.steps < 0:
        raise ValueError(f"--steps {args.steps}: must be 0 or more")
    model, path = open_model(args, args.directory)
    prompts, _ = read_prompts(args, model, path)
    prompts = [model.check_ids(ids) for ids in prompts]
    with record() as tensors:
        tokens = _pass_by_pass(args, model, prompts)
    named = {**tensors, **{f"request.{i}.prompt": ids for i, ids in enumerate(prompts)}}
    extra = {"command": "dump", "checkpoint": path.name, "phase": args.phase}
    if args.steps or args.mtp:
        named |= {f"request.{i}.tokens": ids for i, ids in enumerate(tokens)}
        extra |= {"steps": args.steps, "mtp": args.mtp}
    return _write(args, model, named, extra)


def _pass_by_pass(args, model, prompts):
    """A pass over the prompts and `--steps` greedy ones of one token each; the new tokens of each request."""
    import numpy as np

    from refmodel.generate import Item

    items = [Item(i, ids, model.new_cache(), 0) for i, ids in enumerate(prompts)]
    tokens, phase, prefix = [[] for _ in prompts], args.phase, ""
    for number in range(args.steps + 1):
        steps = model.step(items, phase, prefix)
        for new, step in zip(tokens, steps):
            new.append(int(step.logits[-1].argmax()))
        if args.mtp:  # the last slot takes the token that was just chosen
            shifted = [np.append(item.token_ids[1:], new[-1]) for item, new in zip(items, tokens)]
            pairs = [i._replace(token_ids=t, hidden=s.hidden) for i, t, s in zip(items, shifted, steps)]
            model.mtp_step(pairs, phase, prefix)
        phase, prefix = "decode", f"step.{number + 1}."
        items = [Item(i.request, np.int64([new[-1]]), i.cache, i.cache.length) for i, new in zip(items, tokens)]
    return [np.int64(new) for new in tokens]


def _dump_layers(args):
    from refmodel.single_layer import run_layer

    if not re.fullmatch(r"\d+(,\d+)*", args.layers):
        raise ValueError(f"--layers {args.layers!r}: must be layer numbers like 3 or 3,4")
    if args.input is None:
        raise ValueError("--layers needs --input FILE: the rows that enter the layer")
    model, path = open_model(args, args.directory)
    rows, named = _input_rows(args), {}
    for layer in map(int, args.layers.split(",")):
        named |= run_layer(model, layer, rows, args.part, args.phase)
    return _write(args, model, named, {"command": "dump", "checkpoint": path.name, "part": args.part})


def _input_rows(args):
    from refmodel.golden.dump import open_dump

    tensors = open_dump(args.input)
    if args.tensor is None and len(tensors) != 1:
        raise ValueError(f"{args.input} holds {len(tensors)} tensors: name one with --tensor")
    name = args.tensor or next(iter(tensors))
    if name not in tensors:
        raise ValueError(f"{args.input} has no tensor {name!r}; it holds {', '.join(list(tensors)[:8])}")
    return tensors[name]


def _write(args, model, named, extra):
    from refmodel.golden.bundle import write_bundle

    args.out.parent.mkdir(parents=True, exist_ok=True)
    recipe = model.numerics.recipe if model.numerics.fp8 else None
    write_bundle(args.out, named, model.config, model.numerics.name, recipe=recipe, extra=extra)
    return {"files": [{"name": str(args.out), "tensors": len(named), "bytes": args.out.stat().st_size}]}


def _dump_ops(args):
    choices = {"fp8": (_fp8_ops,), "model": (_model_ops,), "all": (_fp8_ops, _model_ops)}[args.ops]
    ops = [op for make in choices for op in make()]
    chosen = [op for op in ops if re.search(args.case or "", op.name)]
    if not chosen:
        few = ", ".join(op.name for op in ops[:: max(1, len(ops) // 8)])
        raise ValueError(f"--case {args.case!r} matches none of {len(ops)} cases ({few}, ...): --list names them all")
    if args.list:
        return {"files": [{"name": op.name, "tensors": op.tensors, "bytes": op.bytes} for op in chosen]}
    if args.out is None:
        raise ValueError("--out DIR is needed: where the operator goldens go")
    files = []
    for op in chosen:
        path = op.write(args.out)
        files.append({"name": str(path), "tensors": op.tensors, "bytes": path.stat().st_size})
    return {"files": files}


class _Op(NamedTuple):
    """A golden that can be written: its name, what it holds, and `write(folder) -> path`."""

    name: str
    tensors: int
    bytes: int
    write: Callable[[Path], Path]


def _fp8_ops():
    from fp8.goldens import v3_cases

    for case in v3_cases():
        specification = case.specification()
        yield _Op(case.name, len(specification), _bytes(specification), partial(_write_fp8, case))


def _write_fp8(case, folder):
    from refmodel.golden.bundle import write_bundle

    folder.mkdir(parents=True, exist_ok=True)
    path, facts = folder / f"{case.name}.safetensors", case.metadata()
    tensors, valid = dict(case.build()), case.valid()
    write_bundle(path, tensors, None, "fp8", recipe=facts["recipe"], seed=case.seed, valid=valid, extra=facts)
    return path


def _model_ops():
    from refmodel.golden.published import LISTED, build, names, write_set

    listed = json.loads(LISTED.read_text())
    for name in names():
        entry = listed[name]
        yield _Op(
            name, entry["tensors"], entry["bytes"], lambda folder, name=name: write_set(folder, name, *build(name))
        )


def _bytes(specification):
    import ml_dtypes
    import numpy as np

    types = {name: np.dtype(getattr(ml_dtypes, name, name)) for name, _ in specification.values()}
    return sum(types[dtype].itemsize * math.prod(shape) for dtype, shape in specification.values())
