"""Write goldens: every named tensor of a model, of one layer from a captured input, or FP8 products at V3's shapes.

Without DIR the packaged example model. A golden is a .safetensors file whose metadata hold config, numerics, versions,
the order of the tensors and a tolerance for each.

Example: refmodel dump --numerics bfloat16 --prompt "def main(" --out out/main.safetensors
         refmodel dump DIR --layers 3 --input hidden.safetensors --out out/layer3.safetensors
         refmodel dump --ops fp8 --case q_b.m64 --out out/ops
"""

import argparse
import json
import re
from pathlib import Path

from scripts.run import add_model_arguments, add_prompt_arguments, open_model, read_prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `refmodel dump`."""
    parser.add_argument("directory", nargs="?", metavar="DIR", help="checkpoint (default: the packaged example)")
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument("--phase", default="prefill", help="prefill (naive MLA) or decode (absorbed MLA)")
    parser.add_argument("--mtp", action="store_true", help="run the MTP layer behind the model, too")
    parser.add_argument("--layers", metavar="L", help="only these layers (3 or 3,4), each from --input")
    parser.add_argument("--input", metavar="FILE", help="tensor file with the rows that enter the layer")
    parser.add_argument("--tensor", metavar="NAME", help="which tensor of --input (default: the only one)")
    parser.add_argument("--part", default="layer", help="layer, attention or ffn (default: layer)")
    parser.add_argument("--ops", choices=["fp8"], help="operator goldens at V3's shapes instead of a model's tensors")
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
    import numpy as np

    from refmodel import record
    from refmodel.generate import Item

    model, path = open_model(args, args.directory)
    prompts, _ = read_prompts(args, model, path)
    prompts = [model.check_ids(ids) for ids in prompts]
    items = [Item(i, ids, model.new_cache(), 0) for i, ids in enumerate(prompts)]
    with record() as tensors:
        steps = model.step(items, args.phase)
        if args.mtp:
            # the last slot of each prompt takes the greedy token
            shifted = [np.append(ids[1:], step.logits[-1].argmax()) for ids, step in zip(prompts, steps)]
            pairs = [i._replace(token_ids=t, hidden=s.hidden) for i, t, s in zip(items, shifted, steps)]
            model.mtp_step(pairs, args.phase)
    named = {**tensors, **{f"request.{i}.prompt": ids for i, ids in enumerate(prompts)}}
    return _write(args, model, named, {"command": "dump", "checkpoint": path.name, "phase": args.phase})


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
    from fp8.goldens import v3_cases
    from refmodel.golden.bundle import write_bundle

    cases = [case for case in v3_cases() if re.search(args.case or "", case.name)]
    if not cases:
        raise ValueError(f"--case {args.case!r} matches none of {', '.join(case.name for case in v3_cases())}")
    if args.list:
        return {"files": [{"name": case.name, "tensors": len(s), "bytes": _bytes(s)} for case in cases
                          if (s := case.specification())]}  # fmt: skip
    if args.out is None:
        raise ValueError("--out DIR is needed: where the operator goldens go")
    args.out.mkdir(parents=True, exist_ok=True)
    files = []
    for case in cases:
        path, tensors = args.out / f"{case.name}.safetensors", dict(case.build())
        facts = case.metadata()
        write_bundle(
            path, tensors, None, "fp8", recipe=facts["recipe"], seed=case.seed, valid=case.valid(), extra=facts
        )
        files.append({"name": str(path), "tensors": len(tensors), "bytes": path.stat().st_size})
    return {"files": files}


def _bytes(specification):
    sizes = {"float8_e4m3fn": 1, "bool": 1, "bfloat16": 2, "float32": 4, "int32": 4}
    total = 0
    for dtype, shape in specification.values():
        count = sizes[dtype]
        for size in shape:
            count *= size
        total += count
    return total
