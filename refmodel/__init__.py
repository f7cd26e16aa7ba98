"""The model: what one rank computes. Pure functions on NumPy arrays; state is passed in."""

from refmodel.attention import attend, merge_states
from refmodel.checkpoint import Checkpoint
from refmodel.config import ModelConfig
from refmodel.experts import moe, swiglu
from refmodel.generate import accept
from refmodel.model import Model
from refmodel.norm import rms_norm
from refmodel.numerics import Numerics
from refmodel.rope import apply_rope, softmax_scale, yarn_frequencies
from refmodel.router import Routing, route
from refmodel.tensor_file import load_tensors, save_tensors
from refmodel.trace import record

__all__ = [
    "Checkpoint",
    "Model",
    "ModelConfig",
    "Numerics",
    "Routing",
    "accept",
    "apply_rope",
    "attend",
    "compare",
    "load_tensors",
    "merge_states",
    "moe",
    "record",
    "rms_norm",
    "route",
    "save_tensors",
    "softmax_scale",
    "swiglu",
    "yarn_frequencies",
]


def __getattr__(name: str):
    """`compare` is imported when it is first asked for: running a model needs none of its parts."""
    if name != "compare":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from refmodel.golden.compare import compare

    globals()[name] = compare
    return compare
