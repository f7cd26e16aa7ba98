"""Stop anywhere in a run, look at any tensor, go back: a debugger over the stages of a model.

    from refmodel import Model
    from refmodel.stepper import Stepper

    stepper = Stepper(Model.from_pretrained(path), [[100, 101, 102]])
    stepper.next()                                   # one operation
    stepper.until("layers.3.attn_core.router.*")     # the next tensor of that name
    stepper.tensors["layers.3.attn_core.norm"]       # any tensor that was made
    stepper.back()                                   # before the operation that was last
    stepper.until(check=has_nan)                     # or check=Golden("golden.safetensors"): the first difference

There are no threads and no callbacks: it is an ordinary object, for a script, for pdb or for a notebook. Where ranks
exist, `parallel.stepper.RankStepper` adds what is between them.
"""

from refmodel.stepper.engine import Stepper
from refmodel.stepper.golden import Golden
from refmodel.stepper.look import Histogram, Statistics, has_nan, histogram, parse_selection, select, statistics
from refmodel.stepper.origin import Origin, origins_of_row, origins_of_tensor_row, whereabouts
from refmodel.stepper.target import STAGE_NAMES, Stop

__all__ = [
    "STAGE_NAMES",
    "Golden",
    "Histogram",
    "Origin",
    "Statistics",
    "Stepper",
    "Stop",
    "has_nan",
    "histogram",
    "origins_of_row",
    "origins_of_tensor_row",
    "parse_selection",
    "select",
    "statistics",
    "whereabouts",
]
