"""What the `capture` command asks of an adapter, and how the adapter answers: files in one folder.

The command writes `request.json`; the adapter, in the engine's own environment, writes `rank.R.safetensors` for every
worker process and `result.json`. Only the standard library is used here, because engines pin their own versions.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """One run of an engine: the checkpoint, the prompt, and what to keep."""

    model: str  # checkpoint directory
    out: str  # folder for the answer
    tokens: list[list[int]]  # prompts; tensors are captured for the first one
    dtype: str = "float32"
    new_tokens: int = 0  # greedy tokens after each prompt
    tensors: bool = True
    mtp: bool = False  # also the MTP layer: its tensors, or its drafts where the engine speculates
    engine_args: dict = field(default_factory=dict)

    def save(self) -> Path:
        """Write `request.json` in the answer's folder and return its path."""
        path = Path(self.out) / "request.json"
        path.write_text(json.dumps(asdict(self)))
        return path


@dataclass
class Result:
    """What an engine answered besides tensors.

    `joins` says for each tensor how the ranks' parts make the whole: `same` (every rank holds it), `sum`, or
    `concat:AXIS`; tensors not named there are `same`.
    """

    engine: str
    generated: list[list[int]] = field(default_factory=list)
    joins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of each prompt token after the first, as the engine gives it
    routed_experts: list = field(default_factory=list)  # [T][layers][K], where the engine returns it
    drafts: list[list[int]] = field(default_factory=list)  # per prompt, the drafted token of every draft
    counters: dict[str, float] = field(default_factory=dict)

    def save(self, folder: str) -> None:
        """Write `result.json`."""
        (Path(folder) / "result.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder) -> "Result":
        """Read `result.json`."""
        return cls(**json.loads((Path(folder) / "result.json").read_text()))


def main(answer: Callable[[Request], Result]) -> None:
    """Run an adapter: read the request named on the command line, answer it, turn a refusal into exit status 2."""
    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    try:
        answer(request).save(request.out)
    except (ValueError, OSError) as error:
        print(f"adapter: {error}", file=sys.stderr)
        raise SystemExit(2) from error
