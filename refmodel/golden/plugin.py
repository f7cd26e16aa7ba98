"""A pytest plugin for kernel authors: `pytest -p refmodel.golden.plugin`, then take the fixture `golden`.

def test_my_kernel(golden):
    inputs = golden.inputs("mla_decode/page_end")
    golden.check("mla_decode/page_end", out=my_kernel(**inputs)[0], lse=...)
    golden.opcheck(my_kernel, "mla_decode")  # or shapes="v3"
"""

import pytest

from refmodel.golden.compare import compare
from refmodel.golden.opcases import OPERATORS, case
from refmodel.golden.opcheck import OperatorMismatch, check, opcheck


class Golden:
    """What the fixture gives. Every check raises AssertionError with the whole report."""

    operators = tuple(OPERATORS)

    def inputs(self, name: str, torch: bool = False) -> dict:
        """Inputs of one case (`operator/case`, or the operator's first case) as NumPy arrays or torch tensors."""
        arrays = {key: x.copy() for key, x in case(name)[1].inputs.items()}
        if not torch:
            return arrays
        from refmodel.golden.torch_files import to_torch

        return {key: to_torch(x) for key, x in arrays.items()}

    def check(self, name: str, tolerances=None, **outputs):
        """Judge the outputs of one case; all of them must be given. Returns the report."""
        __tracebackhide__ = True
        return check(name, outputs, tolerances)

    def opcheck(self, fn, name: str, **options) -> int:
        """Run `fn` over all edge cases of the operator, see `refmodel.golden.opcheck`."""
        __tracebackhide__ = True
        return opcheck(fn, name, **options)

    def check_dump(self, reference, actual, *args, **options):
        """Compare a dump with a golden file, as `refmodel compare` does; an empty or partial dump does not pass."""
        __tracebackhide__ = True
        report = compare(reference, actual, *args, **options)
        if not report.ok:
            raise OperatorMismatch(report.to_text())
        return report


@pytest.fixture(scope="session")
def golden() -> Golden:
    """Golden inputs and outputs of operators, and the checks that hold a kernel to them."""
    return Golden()
