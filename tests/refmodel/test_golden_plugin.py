import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from refmodel.golden.opcases import OPERATORS, case, operator
from refmodel.golden.opcheck import OperatorMismatch, check, opcheck

BF16 = ml_dtypes.bfloat16


def reference(name):
    spec = operator(name)

    def kernel(**inputs):
        outputs = spec.run(**inputs)
        return tuple(outputs[n] for n in spec.outputs)

    return kernel


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_the_reference_holds_to_itself_over_all_cases(name):
    cases = list(operator(name).cases())
    assert len({c.name for c in cases}) == len(cases) >= 3
    assert opcheck(reference(name), name) == len(cases)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_the_reference_holds_to_itself_at_v3_shapes(name):
    assert opcheck(reference(name), name, shapes="v3") == len(operator(name).names("v3")) >= 1


def norm(x, weight):
    """A sound kernel in float32."""
    wide = x.astype(np.float32)
    y = wide / np.sqrt(np.vecdot(wide, wide)[:, None] / np.float32(x.shape[1]) + np.float32(1e-6))
    return (y * weight.astype(np.float32)).astype(BF16)


def changes_input(x, weight):
    out = norm(x, weight)
    x *= 2
    return out


def knows_its_batch(x, weight):
    out = norm(x, weight)
    if len(x) > 1:
        out[:, 0] = np.nextafter(out[:, 0], BF16(9))
    return out


class ForgetsItself:
    calls = 0

    def __call__(self, x, weight):
        self.calls += 1
        out = norm(x, weight)
        return np.nextafter(out, BF16(9)) if self.calls % 2 == 0 else out


def without_weight(x, weight):
    return norm(x, np.ones_like(weight))


def half_of_it(x, weight):
    return norm(x, weight)[:-1]


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (changes_input, "changed its input x"),
        (knows_its_batch, r"row 0 computed alone, out has other bits"),
        (ForgetsItself(), "called again, out has other bits"),
        (without_weight, "out diverges first"),
        (half_of_it, r"shape \[0, 256\], \[1, 256\] is expected"),
        (lambda x, weight: {}, r"missing \['out'\]"),
        (lambda x, weight: None, r"missing \['out'\]"),
        (lambda x, weight: (1, 2), "returned 2 values"),
        (lambda x, weight: {"out": norm(x, weight), "more": x}, r"not known \['more'\]"),
    ],
)
def test_each_broken_duty_is_named(kernel, words):
    with pytest.raises(OperatorMismatch, match=words):
        opcheck(kernel, "rms_norm")


def test_a_sound_kernel_of_other_arithmetic_holds():
    assert opcheck(norm, "rms_norm") == len(list(operator("rms_norm").cases()))


# flashinfer-ai/flashinfer#3057: what stands past the length reaches the output
def test_reading_past_the_length_meets_nan():
    def reads_whole_pages(q, k_cache, block_table, cache_seqlens, softmax_scale):
        whole = -(-np.maximum(cache_seqlens, 1) // 64) * 64
        return tuple(operator("mla_decode").run(q, k_cache, block_table, whole, softmax_scale).values())

    with pytest.raises(OperatorMismatch, match="NaN on one side"):
        opcheck(reads_whole_pages, "mla_decode")


# vllm-project/vllm#13474: excluded groups masked with 0 win where choices are negative
def test_the_router_cases_expose_a_mask_of_zero():
    def masked_with_zero(logits, correction_bias):
        scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
        choice = (scores + correction_bias).reshape(len(logits), 8, 8)
        best = np.sort(choice, axis=2)[:, :, -2:].sum(axis=2)
        kept = np.zeros_like(best, bool)
        np.put_along_axis(kept, np.argsort(-best, axis=1, kind="stable")[:, :4], True, axis=1)
        masked = np.where(kept[:, :, None], choice, 0.0).reshape(scores.shape)
        idx = np.argsort(-masked, axis=1, kind="stable")[:, :8]
        weights = np.take_along_axis(scores, idx, axis=1)
        return idx, (2.5 * weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)

    with pytest.raises(OperatorMismatch, match="topk_idx diverges first"):
        opcheck(masked_with_zero, "router")


# deepseek-ai/DeepGEMM#38: rows past masked_m may hold anything, and must not be read
def test_undefined_rows_of_a_masked_product_are_not_compared():
    def fills_with_nan(**inputs):
        out = operator("grouped_gemm_masked").run(**inputs)["out"].copy()
        out[~(np.arange(64) < inputs["masked_m"][:, None])] = np.nan
        return out

    assert opcheck(fills_with_nan, "grouped_gemm_masked") == 3


def test_one_case_by_name():
    spec, given = case("mla_decode/page_end")
    outputs = spec.run(**given.inputs)
    assert check("mla_decode/page_end", outputs).ok
    with pytest.raises(OperatorMismatch, match="lse diverges first"):
        check("mla_decode/page_end", outputs | {"lse": outputs["lse"] / np.log(2)})
    with pytest.raises(OperatorMismatch, match=r"missing \['lse'\]"):
        check("mla_decode/page_end", {"out": outputs["out"]})
    with pytest.raises(ValueError, match="no operator 'x'"):
        case("x")
    with pytest.raises(ValueError, match="has no case 'x'; there are one_key"):
        case("mla_decode/x")


def test_kernels_on_torch_tensors():
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def kernel(gate, up):
        assert gate.dtype == torch.bfloat16
        wide = gate.double()
        return (wide * torch.sigmoid(wide) * up.double()).bfloat16()

    assert opcheck(kernel, "swiglu", torch=True, rows_independent=False) >= 3


USE = """
import numpy as np
from refmodel.golden.opcases import operator

def test_right(golden):
    inputs = golden.inputs("swiglu/rows_64")
    golden.check("swiglu/rows_64", out=operator("swiglu").run(**inputs)["out"])
    golden.opcheck(lambda **i: operator("swiglu").run(**i), "swiglu")
    golden.check_dump({"x": np.ones(3)}, {"x": np.ones(3)})

def test_wrong(golden):
    inputs = golden.inputs("swiglu/rows_64")
    golden.check("swiglu/rows_64", out=inputs["up"])

def test_empty(golden):
    golden.check_dump({"x": np.ones(3)}, {})

def test_partial(golden):
    golden.check_dump({"x": np.ones(3), "y": np.ones(3)}, {"x": np.ones(3)})
"""


def test_the_plugin_in_a_run_of_its_own(tmp_path):
    (tmp_path / "test_use.py").write_text(USE)
    command = [sys.executable, "-m", "pytest", "-p", "refmodel.golden.plugin", "-q", "-p", "no:cacheprovider"]
    environment = {"PYTHONPATH": str(__import__("pathlib").Path(__file__).parents[2]), "PATH": ""}
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, env=environment, check=False)
    assert "3 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "swiglu/rows_64: out diverges first" in done.stdout
    assert "holds no tensor" in done.stdout
    assert "y is missing from the actual dump" in done.stdout
