"""Each library's quantiser against scalar formulas written down independently, beside powers of two and at floors."""

import math
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from fp8_oracle import nearest_code

from fp8 import E4M3, RECIPES, Recipe, quantize
from fp8.document import recipes_document
from fp8.recipes import block_scaling, find_recipe

F = np.float32
MAX = F(448)


def ceil_bits(scale):
    """By Fractions: the smallest power of two not below a positive scale, 2^-126 at least."""
    exponent = math.frexp(float(scale))[1] - 1
    if Fraction(float(scale)) > Fraction(2) ** exponent:
        exponent += 1
    return F(2.0 ** max(exponent, -126))


def ceil_log2(scale):
    return F(2.0 ** math.ceil(F(math.log2(float(scale)))))


def floor_bits(scale):
    return F(2.0 ** (math.frexp(float(scale))[1] - 1))


def deepseek(amax, x, ue8m0, ceil=ceil_bits):
    scale = max(amax, F(1e-4)) / MAX
    scale = ceil(scale) if ue8m0 else scale
    return scale, [value / scale for value in x]


def deepgemm(amax, x, ue8m0):
    scale = max(amax, F(1e-4)) / MAX
    scale = ceil_bits(scale) if ue8m0 else scale
    return scale, [value * (F(1) / scale) for value in x]


def sglang(amax, x, ue8m0):
    amax = max(amax, F(1e-10))
    inverse = amax * (F(1) / MAX)
    if ue8m0:
        inverse = ceil_bits(inverse)
        return inverse, [value * F(1 / float(inverse)) for value in x]
    return inverse, [value * (MAX / amax) for value in x]


def sglang_triton(amax, x, ue8m0):
    scale = max(amax, F(1e-10)) / MAX
    return scale, [value * (F(1) / scale) for value in x]


def divide_log2(amax, x, ue8m0):
    scale = max(amax, F(1e-10)) / MAX
    scale = ceil_log2(scale) if ue8m0 else scale
    return scale, [value / scale for value in x]


def transformer_engine(amax, x, ue8m0):
    if amax == 0:
        return F(1), list(x)
    quant = min(MAX / amax, np.finfo(F).max)
    quant = floor_bits(quant) if ue8m0 else quant
    return F(1) / quant, [value * quant for value in x]


def torchao(amax, x, ue8m0):
    quant = F(448.0 / float(max(amax, F(1e-12))))
    return F(1) / quant, [value * quant for value in x]


ORACLES = {
    "deepseek_v3": deepseek,
    "deepseek_v3_log2": lambda amax, x, ue8m0: deepseek(amax, x, ue8m0, ceil_log2),
    "deepgemm": deepgemm,
    "sglang": sglang,
    "sglang_triton": sglang_triton,
    "sglang_triton_column": divide_log2,
    "vllm": divide_log2,
    "transformer_engine": transformer_engine,
    "torchao": torchao,
}
CASES = [(recipe.name, scale_format) for recipe in RECIPES.values() for scale_format in recipe.scale_formats]


def beside(value) -> list[np.float32]:
    value = F(value)
    return [np.nextafter(value, F(0)), value, np.nextafter(value, F(np.inf))]


def sample_amax(step: int) -> list[np.float32]:
    """Largest magnitudes next to powers of two, to 448 times those, and at every library's floor."""
    samples = [F(0), F(1e-40)]
    for floor in (1e-4, 1e-10, 1e-12):
        samples += beside(floor)
    for exponent in range(-126, 127, step):
        samples += beside(2.0**exponent)
        if exponent < 119:
            samples += beside(448 * 2.0**exponent)
    return samples


def hold(name, scale_format, samples):
    rng = np.random.default_rng(5)
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        for amax in samples:
            fractions = np.array([1, -1, 0.5, -(2.0**-3) * 1.06, 2.0**-9, *rng.uniform(-1, 1, 3)], F)
            x = (fractions * amax).astype(F)
            block = quantize(x[None], recipe=name, scale_format=scale_format)
            scale, scaled = ORACLES[name](amax, x, scale_format == "ue8m0")
            assert block.scale.tolist() == [[scale]], (name, amax)
            codes = [nearest_code(Fraction(float(value)), "E4M3") & 0x7F for value in scaled]
            assert (block.codes.view(np.uint8) & 0x7F)[0].tolist() == codes, (name, amax)
            np.testing.assert_array_equal(np.signbit(block.codes.astype(F))[0], np.signbit(x))


@pytest.mark.parametrize(("name", "scale_format"), CASES)
def test_recipe_equals_its_formulas(name, scale_format):
    hold(name, scale_format, sample_amax(step=7))


@pytest.mark.long
@pytest.mark.parametrize(("name", "scale_format"), CASES)
def test_recipe_equals_its_formulas_at_every_power_of_two(name, scale_format):
    rng = np.random.default_rng(6)
    random = [F(value) for value in np.exp(rng.uniform(-40, 40, 2000))]
    hold(name, scale_format, sample_amax(step=1) + random)


@pytest.mark.parametrize(("name", "scale_format"), CASES)
def test_recipe_equals_its_formulas_on_bfloat16(name, scale_format):
    """bfloat16 inputs make ties common: dividing, and multiplying by either reciprocal, then differ in some codes."""
    x = np.random.default_rng(4).standard_normal((400, 128)).astype(ml_dtypes.bfloat16)
    got = quantize(x, recipe=name, scale_format=scale_format)
    for row, values in enumerate(x.astype(F)):
        scale, (scaled,) = ORACLES[name](np.abs(values).max(), [values], scale_format == "ue8m0")
        assert got.scale[row, 0] == scale
        expected = np.clip(scaled, F(-448), F(448)).astype(E4M3.dtype)
        np.testing.assert_array_equal(got.codes[row].view(np.uint8), expected.view(np.uint8))


def test_every_recipe_has_an_oracle():
    assert set(ORACLES) == set(RECIPES)


@pytest.mark.parametrize(
    ("amax", "name", "code", "scale"),
    [
        (1e-6, "deepseek_v3", 4.5, 2.2321429e-7),  # the floor of 1e-4 shows: 1e-6 comes back as 1.0044643e-6
        (1e-6, "sglang", 448, 2.2321429e-9),
        (5e-5, "deepgemm", 224, 2.2321429e-7),
        (5e-5, "vllm", 448, 1.1160714e-7),
        (1e-12, "deepseek_v3", 0, 2.2321429e-7),
        (1e-12, "vllm", 4.5, 2.2321429e-13),
        (1e-12, "torchao", 448, 2.2321429e-15),
    ],
)
def test_floors_by_hand(amax, name, code, scale):
    block = quantize(np.full((1, 128), amax, F), recipe=name, scale_format="float32")
    assert float(block.codes[0, 0]) == code
    assert block.scale[0, 0] == pytest.approx(scale, rel=1e-6)
    if (amax, name) == (1e-6, "deepseek_v3"):
        assert block.dequantize(np.float64)[0, 0] == pytest.approx(1.0044643e-6, rel=1e-7)


@pytest.mark.parametrize(("amax", "scale"), [(448, 1), (447, 1), (449, 2), (224, 0.5), (1, 2**-8)])
def test_power_of_two_scales_by_hand(amax, scale):
    # huggingface/transformers#46763, sgl-project/sglang#26766
    for name in ("deepseek_v3", "deepseek_v3_log2", "deepgemm", "sglang", "vllm", "transformer_engine"):
        assert quantize(np.full((1, 4), amax, F), recipe=name, scale_format="ue8m0").scale[0, 0] == scale


def test_scale_is_rounded_before_values_are_scaled():
    # huggingface/transformers#46763, #47030; sgl-project/sglang#28418: codes of 448 beside a scale of 2^-8 mean 1.75
    block = quantize(np.ones((1, 128), F), scale_format="ue8m0")
    assert float(block.codes[0, 0]) == 256
    assert block.dequantize()[0].tolist() == [1.0] * 128
    x = np.random.default_rng(0).standard_normal((128, 128)).astype(F)
    back = quantize(x, (128, 128), scale_format="ue8m0").dequantize()
    assert np.abs(back - x).mean() / np.abs(x).mean() < 0.03  # 0.6 in the wrong order


def test_log2_and_bits_differ_just_above_a_power_of_two():
    # sgl-project/sglang#29954: amax = nextafter(448 * 2^-10, inf)
    x = np.full((1, 128), np.nextafter(F(448 * 2.0**-10), F(1)))
    by_bits, by_log2 = (quantize(x, recipe=name, scale_format="ue8m0") for name in ("deepseek_v3", "deepseek_v3_log2"))
    assert (by_bits.scale[0, 0], float(by_bits.codes[0, 0])) == (2.0**-9, 224)
    assert (by_log2.scale[0, 0], float(by_log2.codes[0, 0])) == (2.0**-10, 448)


def test_the_floor_is_a_maximum():
    # deepseek-ai/DeepSeek-V3#964, #968: min(amax, 1e-4) made every code saturate
    assert quantize(np.ones((1, 128), F)).scale[0, 0] == F(1) / F(448)


def test_transformer_engine_extremes():
    tiny = np.full((1, 128), 1e-38).astype(ml_dtypes.bfloat16)  # 448 / amax overflows
    assert quantize(tiny, recipe="transformer_engine").scale[0, 0] == F(2.0**-127)  # NVIDIA/TransformerEngine#2589
    largest = F(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    assert quantize(tiny, recipe="transformer_engine", scale_format="float32").scale[0, 0] == F(1) / largest
    for value in (0.0, np.inf, np.nan):
        block = quantize(np.array([[value, 1.0]], F), recipe="transformer_engine")
        assert block.scale[0, 0] == (1.0 if value != 0 else 2.0**-8)
    assert quantize(np.zeros((1, 8), F), recipe="transformer_engine").scale[0, 0] == 1.0
    assert quantize(np.array([[np.inf, 3.0]], F), recipe="transformer_engine").dequantize()[0].tolist() == [448.0, 3.0]


@pytest.mark.parametrize(("name", "scale_format"), CASES)
def test_no_finite_block_gives_nan_and_zero_blocks_give_zero(name, scale_format):
    # huggingface/kernels-community#681, THUDM/slime#2256: scale 0, then 0 / 0
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((64, 128)) * 2.0 ** rng.integers(-120, 120, (64, 1))).astype(F)
    x[::5] = 0
    block = quantize(x, recipe=name, scale_format=scale_format)
    assert not ((block.codes.view(np.uint8) & 0x7F) == 0x7F).any()
    assert (np.isfinite(block.scale) & (block.scale > 0)).all()
    assert not block.dequantize()[::5].any()


def test_own_recipe_and_errors():
    own = Recipe("own", "here", 0.5, "amax / 448", "x / scale", "bits", ("float32",))
    assert quantize(np.full((1, 2), 0.25, F), recipe=own).scale[0, 0] == F(0.5) / MAX
    assert find_recipe(own) is own
    with pytest.raises(ValueError, match=r"recipe 'v3' is unknown; known are deepseek_v3"):
        quantize(np.ones((1, 2), F), recipe="v3")
    with pytest.raises(ValueError, match="'torchao' has no scale_format 'ue8m0'; it offers float32"):
        quantize(np.zeros((0, 2), F), recipe="torchao", scale_format="ue8m0")
    with pytest.raises(ValueError, match="apply = 'x'"):
        Recipe("own", "", 0.5, "amax / 448", "x", "bits", ("float32",))
    with pytest.raises(ValueError, match="is negative"):
        Recipe("own", "", -0.5, "amax / 448", "x / scale", "bits", ("float32",))
    with pytest.raises(ValueError, match="scale_formats"):
        Recipe("own", "", 0.5, "amax / 448", "x / scale", "bits", ("fp32",))
    assert block_scaling(np.zeros(0, F), RECIPES["vllm"], "float32").scale.shape == (0,)
    assert quantize(np.ones((1, 1), F)).codes.dtype == E4M3.dtype


def test_document_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "fp8_recipes.md"
    assert page.read_text() == recipes_document(), "run: python -m fp8.document > docs/fp8_recipes.md"
