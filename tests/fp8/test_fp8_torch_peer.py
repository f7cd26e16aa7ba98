"""The steps that PyTorch implements on a CPU, against ours: the casts, and DeepGEMM's and TransformerEngine's formulas.

Skipped where torch is not installed.
"""

import ml_dtypes
import numpy as np
import pytest

from fp8 import E4M3, E4M3FNUZ, E5M2, BlockScaled, GemmRule, decode, encode, order_free_bound, quantize, to_bfloat16

torch = pytest.importorskip("torch", reason="torch is not installed: the casts are held to ml_dtypes only")

TORCH = {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2", "E4M3FNUZ": "float8_e4m3fnuz"}
SATURATES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)  # pytorch/pytorch#178817


def cast(x, fmt):
    return torch.from_numpy(x).to(getattr(torch, TORCH[fmt.name])).view(torch.uint8).numpy()


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M3FNUZ], ids=lambda fmt: fmt.name)
def test_cast_equals_torch_within_range(fmt):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)])
    x = x[np.abs(x) <= fmt.max]
    np.testing.assert_array_equal(encode(x, fmt).view(np.uint8), cast(x, fmt))


@pytest.mark.skipif(not SATURATES, reason="torch before 2.12 gives NaN beyond 464")
def test_overflow_saturates_as_in_torch():
    x = np.array([449, 464, 465, 1e30, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(encode(x, E4M3).view(np.uint8), cast(x, E4M3))


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M3FNUZ], ids=lambda fmt: fmt.name)
def test_decode_equals_torch(fmt):
    raw = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(raw).view(getattr(torch, TORCH[fmt.name])).to(torch.float32).numpy()
    np.testing.assert_array_equal(decode(raw.view(fmt.dtype), np.float32), expected)


def test_bfloat16_equals_torch():
    x = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32)
    x = x[~np.isnan(x)]
    expected = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(to_bfloat16(x), expected)


def torch_quantize(x, recipe, ue8m0):
    """The published formulas on torch tensors: x [M, K] in 1 x 128 blocks, K a multiple of 128."""
    blocks = torch.from_numpy(x).view(x.shape[0], -1, 128)
    amax = blocks.abs().amax(dim=2, keepdim=True)
    if recipe == "deepgemm":
        scale = amax.clamp(1e-4) / 448.0
        if ue8m0:
            bits = scale.view(torch.int32)
            scale = ((((bits >> 23) & 0xFF) + (bits & 0x7FFFFF).bool().int()).clamp(1, 254) << 23).view(torch.float32)
        values = blocks * (1.0 / scale)
    else:
        quant = torch.div(torch.tensor(448.0), amax)  # 448.0 / amax would be reciprocal, then multiply
        quant = torch.where(amax == 0, torch.tensor(1.0), quant)
        if ue8m0:
            quant = torch.ldexp(torch.ones_like(quant), torch.frexp(quant).exponent - 1)
        scale, values = torch.reciprocal(quant), blocks * quant
    codes = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.view(x.shape).numpy(), scale.view(x.shape[0], -1).numpy()


@pytest.mark.parametrize("recipe", ["deepgemm", "transformer_engine"])
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_recipe_equals_its_torch_formulas(recipe, scale_format):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((200, 512)) * 2.0 ** rng.integers(-30, 30, (200, 1))).astype(np.float32)
    x[3] = 0
    codes, scale = torch_quantize(x, recipe, scale_format == "ue8m0")
    got = quantize(x, recipe=recipe, scale_format=scale_format)
    np.testing.assert_array_equal(got.scale, scale)
    np.testing.assert_array_equal(got.codes.view(np.uint8), codes)


@pytest.mark.parametrize("k", [32, 256, 4096])
def test_scaled_mm_on_the_cpu_lies_within_the_order_free_bound(k):
    """Torch's CPU kernel adds float32 products in an order of its own: one chain over all of K, or several."""
    rng = np.random.default_rng(k)
    a, b = (encode(rng.standard_normal((16, k)) * 30, E4M3) for _ in range(2))
    left, right = (torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn) for codes in (a, b))
    one = torch.ones(())
    try:
        got = torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"no FP8 product on this CPU: {str(error).splitlines()[0]}")
    scale = np.ones((16, 1), np.float32)
    pair = BlockScaled(a, scale, (1, k)), BlockScaled(b, scale, (1, k))
    product = order_free_bound(*pair, GemmRule("float32_sequential"), np.float32)
    assert (np.abs(got.numpy() - product.value) <= product.bound).all()
