"""Golden files, and the comparison of anything dumped with them."""

from refmodel.golden.bundle import Bundle, content_hash, read_bundle, write_bundle
from refmodel.golden.compare import compare
from refmodel.golden.dump import Dump, open_dump
from refmodel.golden.locate import Location, locate
from refmodel.golden.metrics import Difference, measure
from refmodel.golden.replay import Step
from refmodel.golden.report import Report, TensorResult
from refmodel.golden.tolerance import EXACT, Tolerance, reproduce, suggest

__all__ = [
    "EXACT",
    "Bundle",
    "Difference",
    "Dump",
    "Location",
    "Report",
    "Step",
    "TensorResult",
    "Tolerance",
    "compare",
    "content_hash",
    "locate",
    "measure",
    "open_dump",
    "read_bundle",
    "reproduce",
    "suggest",
    "write_bundle",
]
