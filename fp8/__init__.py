"""Number formats: what a value becomes when it is stored narrow, and what a narrow matrix product yields."""

from fp8.blockscaled import BlockScaled, quantize
from fp8.bounds import BoundedProduct, order_free_bound, ordered_bound
from fp8.codec import decode, encode
from fp8.fnuz import from_fnuz, to_fnuz
from fp8.formats import E4M3, E4M3FNUZ, E5M2, E8M0, Format
from fp8.gemm import KERNELS, GemmRule, block_product, gemm
from fp8.grouped import (
    ContiguousLayout,
    GroupedProduct,
    contiguous_as_read,
    contiguous_layout,
    grouped_gemm_contiguous,
    grouped_gemm_masked,
    grouped_gemm_prefix_sum,
)
from fp8.layouts import column_major_aligned, pack_ue8m0, unpack_ue8m0
from fp8.recipes import RECIPES, Recipe, recipe_table
from fp8.rounding import fma32, to_bfloat16
from fp8.scales import ceil_power_of_two, is_power_of_two
from fp8.tensorcore import mma_step
from fp8.verdict import Verdict, calc_diff, judge

__all__ = [
    "E4M3",
    "E4M3FNUZ",
    "E5M2",
    "E8M0",
    "KERNELS",
    "RECIPES",
    "BlockScaled",
    "BoundedProduct",
    "ContiguousLayout",
    "Format",
    "GemmRule",
    "GroupedProduct",
    "Recipe",
    "Verdict",
    "block_product",
    "calc_diff",
    "ceil_power_of_two",
    "column_major_aligned",
    "contiguous_as_read",
    "contiguous_layout",
    "decode",
    "encode",
    "fma32",
    "from_fnuz",
    "gemm",
    "grouped_gemm_contiguous",
    "grouped_gemm_masked",
    "grouped_gemm_prefix_sum",
    "is_power_of_two",
    "judge",
    "mma_step",
    "order_free_bound",
    "ordered_bound",
    "pack_ue8m0",
    "quantize",
    "recipe_table",
    "to_bfloat16",
    "to_fnuz",
    "unpack_ue8m0",
]
