"""Number formats: what a value becomes when it is stored narrow, and what a narrow matrix product yields."""

from fp8.blockscaled import BlockScaled, quantize
from fp8.codec import decode, encode
from fp8.formats import E4M3, E4M3FNUZ, E5M2, E8M0
from fp8.gemm import block_product, gemm
from fp8.recipes import RECIPES, Recipe
from fp8.rounding import to_bfloat16
from fp8.scales import ceil_power_of_two

__all__ = [
    "E4M3",
    "E4M3FNUZ",
    "E5M2",
    "E8M0",
    "RECIPES",
    "BlockScaled",
    "Recipe",
    "block_product",
    "ceil_power_of_two",
    "decode",
    "encode",
    "gemm",
    "quantize",
    "to_bfloat16",
]
