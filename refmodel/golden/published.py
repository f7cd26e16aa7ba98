"""The published goldens, as hashes: the example model in the narrow numerics, and every operator case.

`python -m refmodel.golden.published` prints them as JSON, `--write DIR` writes the golden files, and
`--numerics float32 --write DIR` those of the wide numerics, which other machines reproduce only within the rules of
`tolerance.reproduce`. `published.json` holds the hashes that a test compares; CHANGES.md says which bits changed.
`refmodel dump --ops model` writes the same files by name.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from refmodel.golden.bundle import content_hash, write_bundle
from refmodel.golden.opcases import OPERATORS
from refmodel.golden.optypes import SHAPES
from refmodel.model import Model
from refmodel.presets import EXAMPLE
from refmodel.trace import record

TEXT = b"Seven times six is forty-two; a model that says so has learnt to count. def f(x): return x + 1\n"
NARROW = ("bfloat16", "fp8")
LISTED = Path(__file__).with_name("published.json")


def example_tensors(numerics: str) -> tuple[Model, dict[str, np.ndarray]]:
    """Every named tensor of one prefill of the example model, and of the absorbed form on the same tokens."""
    model = Model.from_pretrained(EXAMPLE, numerics=numerics)
    ids = np.frombuffer(TEXT, np.uint8).astype(np.int64)
    with record() as prefill:
        model.forward(ids)
    with record() as decode:
        model.forward(ids, model.new_cache(), phase="decode")
    tensors = {"request.0.prompt": ids} | {name: prefill[name] for name in prefill}
    return model, tensors | {f"absorbed.{name}": decode[name] for name in decode}


def names(numerics: Sequence[str] = NARROW, shapes: str = "all") -> list[str]:
    """What the sets are called: `example.fp8`, `rms_norm.rows_64`, `rms_norm.v3_rows_64`."""
    cases = [f"{spec.name}.{case}" for spec in OPERATORS.values() for case in spec.names(shapes)]
    return [*(f"example.{name}" for name in numerics), *cases]


def build(name: str) -> tuple[Model | None, dict[str, np.ndarray]]:
    """(model or None, tensors) of the set of that name. Raises ValueError for a name that there is not.

    An operator's are `inputs.X`, `outputs.X`, and `valid.X`, booleans, where an output has rows that nothing defines.
    """
    first, _, rest = name.partition(".")
    if first == "example":
        return example_tensors(rest)
    if first not in OPERATORS:
        raise ValueError(f"no published set {name!r}; names begin with example, {', '.join(OPERATORS)}")
    spec = OPERATORS[first]
    case = spec.case(rest)
    parts = {"inputs": case.inputs, "outputs": spec.run(**case.inputs), "valid": case.valid}
    return None, {f"{part}.{key}": x for part, tensors in parts.items() for key, x in tensors.items()}


def sets(numerics: Sequence[str] = NARROW, shapes: str = "all") -> Iterator[tuple[str, Model | None, Mapping]]:
    """(name, model or None, tensors) of each published golden, one at a time."""
    return ((name, *build(name)) for name in names(numerics, shapes))


def write_set(folder: Path, name: str, model: Model | None, tensors: Mapping[str, np.ndarray]) -> Path:
    """Write one set as a golden file into a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    config = None if model is None else model.config
    numerics = OPERATORS[name.split(".")[0]].numerics if model is None else model.numerics.name
    masks = [key for key in tensors if key.startswith("valid.")]
    valid = {key.replace("valid.", "outputs."): key for key in masks}
    write_bundle(path, tensors, config, numerics, valid=valid, extra={"set": name})
    return path


def entry(tensors: Mapping[str, np.ndarray]) -> dict:
    """What is listed of a set: its size, and hashes over the inputs and the narrow tensors (integers, bfloat16, FP8),
    which must be equal byte for byte on every machine, and over the float32 and float64 results, of which single last
    bits may differ."""
    inputs = {n: x for n, x in tensors.items() if n.startswith("inputs.")}
    rest = {n: x for n, x in tensors.items() if n not in inputs}
    wide = {n: x for n, x in rest.items() if x.dtype in (np.float32, np.float64)}
    return {
        "tensors": len(tensors),
        "bytes": sum(x.nbytes for x in tensors.values()),
        "inputs": content_hash(inputs),
        "narrow": content_hash({n: x for n, x in rest.items() if n not in wide}),
        "wide": content_hash(wide),
    }


def changed(found: Mapping[str, dict], listed: Mapping[str, dict]) -> list[str]:
    """Names of the sets in `found` whose inputs or narrow results are not the listed ones."""
    keys = ("inputs", "narrow")
    return [n for n, x in found.items() if n not in listed or any(x[key] != listed[n][key] for key in keys)]


def main(argv: list[str] | None = None) -> None:
    """Print the hashes, or write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="DIR", help="write golden files")
    parser.add_argument("--numerics", nargs="+", default=NARROW, help="of the example model (default: the narrow ones)")
    parser.add_argument("--shapes", choices=SHAPES, default="all", help="of the operators (default: all)")
    args = parser.parse_args(argv)
    listed = {}
    for name, model, tensors in sets(args.numerics, args.shapes):
        listed[name] = entry(tensors)
        if args.write is not None:
            write_set(args.write, name, model, tensors)
    print(json.dumps(listed, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
