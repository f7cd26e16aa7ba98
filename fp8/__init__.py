"""Number formats: what a value becomes when it is stored narrow, and what a narrow matrix product yields."""

from fp8.blockscaled import BlockScaled, quantize
from fp8.codec import decode, encode
from fp8.formats import E4M3, E4M3FNUZ, E5M2, E8M0
from fp8.gemm import KERNELS, GemmRule, block_product, gemm
from fp8.recipes import RECIPES, Recipe
from fp8.rounding import fma32, to_bfloat16
from fp8.scales import ceil_power_of_two, is_power_of_two
from fp8.tensorcore import mma_step

__all__ = [
    "E4M3",
    "E4M3FNUZ",
    "E5M2",
    "E8M0",
    "KERNELS",
    "RECIPES",
    "BlockScaled",
    "GemmRule",
    "Recipe",
    "block_product",
    "ceil_power_of_two",
    "decode",
    "encode",
    "fma32",
    "gemm",
    "is_power_of_two",
    "mma_step",
    "quantize",
    "to_bfloat16",
]
