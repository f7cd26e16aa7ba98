"""Run an inference engine beside this project, in the engine's own environment, and bring back what it computed."""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from refmodel.checkpoint import Checkpoint
from refmodel.tensor_file import load_tensors
from scripts.adapters.request import Request, Result
from scripts.engine_copy import plain_copy
from scripts.engine_join import join_ranks

ADAPTERS = Path(__file__).parent / "adapters"
RELEASED_MTP_LAYER = 61  # the only index at which MLX-LM knows that a layer is an MTP layer and leaves it out


@dataclass(frozen=True)
class Engine:
    """One engine that can be captured: its adapter file, and whether it runs the MTP layer."""

    name: str
    title: str
    adapter: str
    has_mtp: bool = True


ENGINES = {
    "hf": Engine("hf", "Hugging Face transformers", "hf_adapter.py"),
    "vllm": Engine("vllm", "vLLM", "vllm_adapter.py"),
    "mlx": Engine("mlx", "MLX-LM", "mlx_adapter.py", has_mtp=False),
    "sglang": Engine("sglang", "SGLang (adapter untested)", "sglang_adapter.py", has_mtp=False),
}


@dataclass(frozen=True)
class Capture:
    """What an engine computed: tensors under our names (ranks joined), the parts of each rank, and its answer."""

    tensors: Mapping[str, np.ndarray]
    ranks: tuple[Mapping[str, np.ndarray], ...]
    result: Result
    model: str  # the directory that the engine read
    notes: tuple[str, ...] = ()


def find_python(engine: str, given: str | None) -> str:
    """The interpreter that has the engine: `given`, else $REFMODEL_<ENGINE>_PYTHON, else .venv-<engine>.

    Raises ValueError that says how to make such an environment.
    """
    variable, usual = f"REFMODEL_{engine.upper()}_PYTHON", f".venv-{engine}/bin/python"
    path = given or os.environ.get(variable) or usual
    if not os.access(path, os.X_OK):
        made = "" if engine == "sglang" else f"make one with scripts/adapters/make_venv.sh {engine} .venv-{engine}, or "
        raise ValueError(
            f"no Python with {ENGINES[engine].title} at {path}: {made}name one with --python or {variable}"
        )
    return path


def parse_engine_args(pairs: list[str]) -> dict:
    """`k=v` pairs as a dict; v is JSON where it can be (true, 2, {"a": 1}), else the text itself."""
    parsed = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--engine-args {pair!r}: must be name=value, as tensor_parallel_size=2")
        try:
            parsed[key] = json.loads(value)
        except json.JSONDecodeError:
            parsed[key] = {"True": True, "False": False, "None": None}.get(value, value)
    return parsed


def readable_copy(engine: str, folder: Path, scratch: Path, dtype: str, mtp: bool) -> Path:
    """The directory for the engine to read: `folder` itself if the engine reads it as we do, else a plain copy.

    FP8 weights are multiplied out (on a CPU no engine runs them as codes), and MLX-LM, which takes an unknown MTP
    layer for an error, gets a copy without it.
    """
    checkpoint = Checkpoint.open(folder)
    foreign_mtp = engine == "mlx" and checkpoint.has_mtp and checkpoint.config.num_hidden_layers != RELEASED_MTP_LAYER
    if checkpoint.dtype_of_weights != "fp8" and not foreign_mtp:
        return folder
    return plain_copy(folder, scratch / "model", dtype, mtp=not foreign_mtp and mtp)


def run_engine(engine: str, request: Request, python: str, timeout: float | None = None, show: bool = False) -> Capture:
    """Run the adapter of `engine` with `python` and read its answer.

    `show` lets the engine write to this terminal. Raises ValueError with the engine's last words if it fails, and if
    it takes more than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="refmodel-capture-") as scratch:
        request = replace(request, out=scratch)
        command = [python, str(ADAPTERS / ENGINES[engine].adapter), str(request.save())]
        log = Path(scratch) / "log"
        with open(log, "wb") as sink:
            output = None if show else sink
            try:
                code = subprocess.run(
                    command, stdout=output, stderr=output, env=_environment(request), timeout=timeout, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                raise ValueError(f"{engine}: no answer in {timeout:g} s (--timeout)") from None
        if code:
            how = "refuses" if code == 2 else f"stopped with status {code}"
            raise ValueError(f"{engine} {how}: {_last_words(log, show)}")
        result = Result.load(scratch)
        ranks = _read_ranks(Path(scratch)) if request.tensors else ()
    tensors, notes = join_ranks(ranks, result.joins)
    return Capture(tensors, ranks, result, request.model, tuple(result.notes) + tuple(notes))


def _read_ranks(folder: Path) -> tuple[dict[str, np.ndarray], ...]:
    """Every rank's tensors, copied out of the folder, which is about to be removed."""
    files = sorted(folder.glob("rank.*.safetensors"), key=lambda file: int(file.name.split(".")[1]))
    return tuple({name: np.array(array) for name, array in load_tensors(file).items()} for file in files)


def _environment(request: Request) -> dict[str, str]:
    """This process's environment without what would make the engine see our packages."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    ranks = request.engine_args.get("tensor_parallel_size", 1)
    if isinstance(ranks, int) and ranks > 1:  # vLLM on a CPU: one core each; a GPU build does not look at it
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(ranks))))
    return env


def _last_words(log: Path, shown: bool) -> str:
    if shown:
        return "see above"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("adapter: ")]
    crash = [line for line in lines if "Segfault" in line or "Segmentation fault" in line]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception): \S", line)]  # the first is the cause
    own = [line.removeprefix("adapter: ") for line in own]
    return (own[-1:] or crash[:1] or errors[:1] or lines[-1:] or ["it said nothing"])[0][:400]
