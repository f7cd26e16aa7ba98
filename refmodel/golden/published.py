"""The published goldens, as hashes: the example model in the narrow numerics, and every operator case.

`python -m refmodel.golden.published` prints them as JSON, `--write DIR` writes the golden files, and
`--numerics float32 --write DIR` those of the wide numerics, which other machines reproduce only within the rules of
`tolerance.reproduce`. `published.json` holds the hashes that a test compares; CHANGES.md says which bits changed.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from refmodel.golden.bundle import content_hash, write_bundle
from refmodel.golden.opcases import OPERATORS
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


def sets(numerics=NARROW) -> Iterator[tuple[str, Model | None, Mapping[str, np.ndarray]]]:
    """(name, model or None, tensors) of each published golden."""
    for name in numerics:
        yield (f"example.{name}", *example_tensors(name))
    for spec in OPERATORS.values():
        for case in spec.cases():
            outputs = spec.run(**case.inputs)
            tensors = {f"inputs.{k}": x for k, x in case.inputs.items()} | {
                f"outputs.{k}": x for k, x in outputs.items()
            }
            yield f"{spec.name}.{case.name}", None, tensors


def hashes(tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    """One hash over the tensors that must be equal byte for byte on every machine (integers, bfloat16, FP8), one over
    the others: float32 and float64, of which single last bits may differ."""
    wide = {n: x for n, x in tensors.items() if x.dtype in (np.float32, np.float64)}
    return {"narrow": content_hash({n: x for n, x in tensors.items() if n not in wide}), "wide": content_hash(wide)}


def main(argv: list[str] | None = None) -> None:
    """Print the hashes, or write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="DIR", help="write golden files")
    parser.add_argument("--numerics", nargs="+", default=NARROW, help="of the example model (default: the narrow ones)")
    args = parser.parse_args(argv)
    listed = {}
    for name, model, tensors in sets(args.numerics):
        listed[name] = hashes(tensors)
        if args.write is not None:
            args.write.mkdir(parents=True, exist_ok=True)
            config = None if model is None else model.config
            numerics = OPERATORS[name.split(".")[0]].numerics if model is None else model.numerics.name
            write_bundle(args.write / f"{name}.safetensors", tensors, config, numerics, extra={"set": name})
    print(json.dumps(listed, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
