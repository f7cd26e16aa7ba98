"""Golden files: named tensors with all that a reader needs to judge another implementation by them.

A golden is a `.safetensors` file that any reader of that format opens; the rest stands in its metadata:
schema number, config, numerics, quantisation recipe, seed, versions, the order in which the tensors came to be,
and for each tensor a tolerance with its reason. Equal input gives an equal file, byte for byte.
"""

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib.metadata import PackageNotFoundError, version

import ml_dtypes
import numpy as np

from refmodel.golden.dump import Dump, open_dump
from refmodel.golden.tolerance import NUMERICS_ROUNDOFF, Tolerance, suggest_for
from refmodel.tensor_file import TensorFile, save_tensors

FORMAT = "refmodel-golden"
SCHEMA = 1


@dataclass(frozen=True)
class Bundle:
    """A golden file: `tensors` (read when asked for) and what its metadata say.

    valid: for tensors with rows that hold nothing, the name of the boolean or count tensor that says which.
    """

    tensors: Mapping[str, np.ndarray]
    order: tuple[str, ...]
    config: dict | None
    numerics: str
    recipe: str | None
    seed: int | None
    versions: dict[str, str]
    tolerances: dict[str, Tolerance]
    valid: dict[str, str] = field(default_factory=dict)
    extra: dict = field(default_factory=dict)
    schema: int = SCHEMA


def versions() -> dict[str, str]:
    """The versions that a golden's bits may depend on."""
    try:
        own = version("refmodel")
    except PackageNotFoundError:
        own = "source tree"
    return {
        "refmodel": own,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
    }


def _plain(config) -> dict | None:
    if config is None or isinstance(config, dict):
        return config
    if hasattr(config, "to_dict"):
        return config.to_dict()
    if is_dataclass(config):
        return asdict(config)
    raise ValueError(f"config is a {type(config).__name__}; a dict or a dataclass is required")


def _json(value) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=True)


def _rules(tensors: Mapping, given: Mapping | None, numerics: str, layers: int) -> dict[str, Tolerance]:
    rules = {name: suggest_for(name, x.dtype, x.size, numerics, layers) for name, x in tensors.items()}
    for pattern, rule in (given or {}).items():
        matched = [name for name in tensors if re.search(pattern, name)]
        if not matched:
            raise ValueError(f"tolerance pattern {pattern!r} matches none of the {len(tensors)} tensor names")
        for name in matched:
            rules[name] = rule
    return rules


def write_bundle(
    path,
    tensors: Mapping[str, np.ndarray],
    config,
    numerics: str,
    *,
    recipe: str | None = None,
    seed: int | None = None,
    tolerances: Mapping[str, Tolerance] | None = None,
    valid: Mapping[str, str] | None = None,
    extra: Mapping | None = None,
) -> None:
    """Write a golden file. The order of `tensors` is the execution order.

    config: a dict, a dataclass or None. tolerances: regular expression -> rule, for the names where the
    suggested rule is not the right one; later patterns win. extra: any JSON value (prompt, command).
    Raises ValueError for no tensors, unknown numerics, a pattern without a match, a `valid` that names no tensor.
    """
    if not tensors:
        raise ValueError("golden: no tensors given; a golden with at least one tensor is required")
    if numerics not in NUMERICS_ROUNDOFF:
        raise ValueError(f"golden numerics {numerics!r} is unknown; one of {', '.join(NUMERICS_ROUNDOFF)} is required")
    for name, mask in (valid or {}).items():
        if name not in tensors or mask not in tensors:
            raise ValueError(f"golden valid {name!r}: {mask!r}: both must be names of tensors in the golden")
    tensors = {name: np.asarray(array) for name, array in tensors.items()}
    plain = _plain(config)
    layers = int((plain or {}).get("num_hidden_layers", 0))
    rules = _rules(tensors, tolerances, numerics, layers)
    metadata = {
        "format": FORMAT,
        "schema": str(SCHEMA),
        "config": _json(plain),
        "numerics": numerics,
        "recipe": _json(recipe),
        "seed": _json(seed),
        "versions": _json(versions()),
        "order": json.dumps(list(tensors)),
        "tolerances": _json({name: rule.to_dict() for name, rule in rules.items()}),
        "valid": _json(dict(valid or {})),
        "extra": _json(dict(extra or {})),
    }
    save_tensors(path, tensors, metadata)


def is_golden(metadata: Mapping[str, str]) -> bool:
    """Whether the metadata of a tensor file are those of a golden, of whatever schema."""
    return metadata.get("format") == FORMAT


def check_schema(metadata: Mapping[str, str], source: str) -> None:
    """Raise ValueError unless the golden's schema is the one that this version reads."""
    if metadata.get("schema") != str(SCHEMA):
        raise ValueError(
            f"{source}: golden schema {metadata.get('schema')!r}, this version reads schema {SCHEMA}; "
            "write the golden again with `refmodel dump`, or read it with the version that wrote it"
        )


def read_bundle(path) -> Bundle:
    """Open a golden file; tensors are memory mapped and read when asked for.

    Raises ValueError if the file is no golden, has another schema, or its metadata contradict its tensors.
    """
    metadata = TensorFile(path).metadata
    if not is_golden(metadata):
        raise ValueError(f"{path}: no golden (metadata format is {metadata.get('format')!r}, {FORMAT!r} is required)")
    check_schema(metadata, str(path))
    try:
        values = {k: json.loads(metadata[k]) for k in ("config", "recipe", "seed", "versions", "order", "tolerances")}
        values |= {k: json.loads(metadata.get(k, "{}")) for k in ("valid", "extra")}
        numerics = metadata["numerics"]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: golden metadata are incomplete or broken ({error})") from None
    dump: Dump = open_dump(path)
    if sorted(values["order"]) != sorted(dump):
        raise ValueError(f"{path}: metadata 'order' lists other names than the file holds")
    values["tolerances"] = {name: Tolerance.from_dict(rule) for name, rule in values["tolerances"].items()}
    values["order"] = tuple(values["order"])
    return Bundle(tensors=dump, numerics=numerics, **values)


def content_hash(tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in name order: equal bits on every machine and version."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(f"{name}\0{array.dtype.name}\0{array.shape}\0".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
