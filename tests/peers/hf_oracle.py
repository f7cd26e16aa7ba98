"""One checkpoint, run by Hugging Face transformers and by this project, with what each of them computed."""

import sys
from functools import cached_property
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from refmodel.model import Model
from refmodel.trace import record

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "adapters"))

import hf_adapter
import hf_mtp

torch.set_num_threads(1)

TOLERANCE = 1e-4  # of the root mean square of the tensor


class Peer:
    """Both implementations of one checkpoint directory, on one prompt."""

    def __init__(self, folder: Path, tokens: list[int]):
        self.folder, self.tokens, self._greedy = folder, tokens, []

    @cached_property
    def hf(self):
        return hf_adapter.load(str(self.folder))

    @cached_property
    def ours(self) -> Model:
        return Model.from_pretrained(self.folder, numerics="float32", like="hf")

    @cached_property
    def exact(self) -> Model:
        return Model.from_pretrained(self.folder, numerics="float64", like="hf")

    @cached_property
    def theirs(self) -> dict[str, np.ndarray]:
        """What transformers computed, prefill of all tokens."""
        return self.capture_theirs()

    @cached_property
    def cache(self):
        """transformers' cache after the prefill."""
        return hf_adapter.capture(self.hf, self.tokens)[1]

    def greedy(self, new_tokens: int) -> list[int]:
        """transformers' greedy continuation, computed once for its length."""
        if len(self._greedy) < new_tokens:
            self._greedy = hf_adapter.generate(self.hf, self.tokens, new_tokens)
        return self._greedy[:new_tokens]

    def gap(self, continuation) -> str:
        """How far apart the two best tokens are after a continuation, for the report of a mismatch."""
        best = np.sort(self.exact.forward([*self.tokens, *continuation])[-1])[::-1]
        return f"the two best logits are {best[0] - best[1]:.3g} apart; {self.margins()}"

    @cached_property
    def mine(self):
        """What we recorded, prefill of all tokens."""
        return recorded(self.ours, self.tokens)

    @cached_property
    def mine_exact(self):
        """The same in float64."""
        return recorded(self.exact, self.tokens)

    def capture_theirs(self, chunks=None) -> dict[str, np.ndarray]:
        return arrays(hf_adapter.capture(self.hf, self.tokens, chunks)[0])

    def theirs_mtp(self) -> dict[str, np.ndarray]:
        """The MTP layer by transformers, slots 0 to T - 2."""
        mtp = hf_mtp.load_mtp(self.hf, str(self.folder))
        return arrays(hf_mtp.capture_mtp(self.hf, mtp, self.tokens))

    def mine_mtp(self, model: Model, recording):
        """The MTP layer by `model`, fed with the hidden states of `recording`."""
        with record() as tensors:
            model.mtp_logits(self.tokens[1:], recording["final.norm"][:-1])
        return tensors

    def margins(self) -> str:
        """The smallest router margins of our run, for the report of a mismatch: near zero a flip is no fault."""
        found = [(float(a.min()), n, int(a.argmin())) for n, a in self.mine.items() if n.endswith("router.margin")]
        return "; ".join(f"{name} smallest margin {margin:.3g} at token {token}" for margin, name, token in found)


def recorded(model: Model, tokens, cache=None):
    """Every tensor of one prefill."""
    with record() as tensors:
        model.forward(tokens, cache)
    return tensors


def captured_with_mtp(folder, tokens, dtype: str) -> dict[str, np.ndarray]:
    """What the adapter brings back of one prompt, the MTP layer's tensors among it."""
    hf = hf_adapter.load(str(folder), dtype)
    main = hf_adapter.capture(hf, tokens)[0]
    return arrays(main | hf_mtp.capture_mtp(hf, hf_mtp.load_mtp(hf, str(folder)), tokens))


def arrays(tensors: dict) -> dict[str, np.ndarray]:
    """NumPy arrays of torch tensors."""
    return {
        name: tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        if tensor.dtype == torch.bfloat16
        else tensor.numpy()
        for name, tensor in tensors.items()
    }


def distance(actual, reference) -> float:
    """Largest difference, relative to the root mean square of the reference; infinite for another shape."""
    actual, reference = np.asarray(actual, np.float64), np.asarray(reference, np.float64)
    if actual.shape != reference.shape:
        return float("inf")
    return float(np.abs(actual - reference).max() / np.sqrt(np.square(reference).mean()))


def by_expert(tensors, name: str) -> np.ndarray:
    """A routing tensor with each token's slots in ascending order of expert: the order of a top-k means nothing."""
    order = np.argsort(tensors[name.rsplit(".", 1)[0] + ".topk_idx"], axis=-1, kind="stable")
    return np.take_along_axis(tensors[name], order, axis=-1)


def distances(actual, reference) -> dict[str, float]:
    """Distance of every tensor of `reference`, in its order."""
    return {
        name: distance(by_expert(actual, name), by_expert(reference, name))
        if ".topk_" in name
        else distance(actual[name], reference[name])
        for name in reference
    }
