"""How each library turns a block of values into codes and a scale, as data that one quantiser reads.

Libraries differ in the floor under the block's largest magnitude (amax), in how the scale is computed and applied, in
how it is rounded to a power of two, and in layout. Each difference shows in bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fp8.scales import ceil_power_of_two, ceil_power_of_two_by_log2, floor_power_of_two

_MAX = np.float32(448.0)  # the largest E4M3 value
_INVERSE_MAX = np.float32(1.0) / _MAX
_FLOAT32_MAX = np.finfo(np.float32).max

SCALES = ("amax / 448", "amax * (1 / 448)", "1 / (448 / amax)", "1 / (448 / float64(amax))")
APPLICATIONS = ("x / scale", "x * (1 / scale)", "x * (448 / amax)", "x * quant_scale")
POWER_OF_TWO = ("bits", "log2", "floor_quant_scale", "none")
LAYOUTS = (
    "row-major",
    "column-major",
    "column-major, rows padded to 4",
    "row- or column-major; ue8m0 packed by four",
    "blocks as rows, padded to 4",
)


@dataclass(frozen=True)
class Recipe:
    """One implementation's way to quantise a block. Every field is a choice that shows in bits.

    amax_floor: amax is raised to this (0.0: no floor). scale: the formula of the stored multiplier, in float32 unless
    it says float64. apply: how a value is scaled with a float32 scale; with a power of two all forms are the same.
    power_of_two: the rule for scale_format="ue8m0". zero_amax_is_one: a block whose amax is 0, infinite or NaN gets
    scale 1. scale_formats: those that the implementation offers, its default first. layout: of the stored scales.
    """

    name: str
    source: str
    amax_floor: float
    scale: str
    apply: str
    power_of_two: str
    scale_formats: tuple[str, ...]
    layout: str = "row-major"
    overflow: str = "saturate"
    zero_amax_is_one: bool = False

    def __post_init__(self):
        choices = (("scale", SCALES), ("apply", APPLICATIONS), ("power_of_two", POWER_OF_TWO), ("layout", LAYOUTS))
        for field, allowed in choices:
            if getattr(self, field) not in allowed:
                raise ValueError(f"recipe {self.name}: {field} = {getattr(self, field)!r} is not one of {allowed}")
        if self.amax_floor < 0:
            raise ValueError(f"recipe {self.name}: amax_floor = {self.amax_floor} is negative")
        if not self.scale_formats or set(self.scale_formats) - {"float32", "ue8m0"}:
            raise ValueError(f"recipe {self.name}: scale_formats = {self.scale_formats} must name float32 and/or ue8m0")


class Scaling(NamedTuple):
    """`scale`: the stored multiplier. Values become codes as x / `factor` if `divide`, else x * `factor`."""

    scale: np.ndarray
    factor: np.ndarray
    divide: bool


def block_scaling(amax: np.ndarray, recipe: Recipe, scale_format: str, largest=_FLOAT32_MAX) -> Scaling:
    """The scales of blocks with these largest magnitudes (float32, any shape), by the recipe's formulas.

    largest: the input dtype's largest value, which replaces an infinite quantisation scale where the recipe has one.
    Raises ValueError if the implementation does not offer `scale_format`.
    """
    if scale_format not in recipe.scale_formats:
        raise ValueError(
            f"recipe {recipe.name!r} has no scale_format {scale_format!r}; it offers {', '.join(recipe.scale_formats)}"
        )
    amax = np.maximum(amax, np.float32(recipe.amax_floor))
    with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
        if recipe.scale.startswith("1 /"):
            return _by_quant_scale(amax, recipe, scale_format, largest)
        scale = amax / _MAX if recipe.scale == "amax / 448" else amax * _INVERSE_MAX
        if scale_format == "ue8m0":
            scale = ceil_power_of_two(scale) if recipe.power_of_two == "bits" else ceil_power_of_two_by_log2(scale)
            return Scaling(scale, scale, divide=True)
        if recipe.apply == "x / scale":
            return Scaling(scale, scale, divide=True)
        factor = np.float32(1.0) / scale if recipe.apply == "x * (1 / scale)" else _MAX / amax
        return Scaling(scale, factor, divide=False)


def _by_quant_scale(amax: np.ndarray, recipe: Recipe, scale_format: str, largest) -> Scaling:
    """Libraries that compute the quantisation scale first and store its reciprocal."""
    if recipe.scale == "1 / (448 / amax)":
        quant = _MAX / amax
    else:
        quant = (np.float64(448.0) / amax.astype(np.float64)).astype(np.float32)
    if recipe.zero_amax_is_one:
        quant = np.where(np.isinf(quant), np.float32(largest), quant)
        quant = np.where((amax == 0) | ~np.isfinite(amax), np.float32(1.0), quant)
    if scale_format == "ue8m0":
        quant = floor_power_of_two(quant)
    return Scaling(np.float32(1.0) / quant, quant, divide=False)


_ALL = (
    Recipe(
        "deepseek_v3",
        "DeepSeek-V3 inference/kernel.py act_quant; powers of two by exponent bits",
        amax_floor=1e-4,
        scale="amax / 448",
        apply="x / scale",
        power_of_two="bits",
        scale_formats=("float32", "ue8m0"),
    ),
    Recipe(
        "deepseek_v3_log2",
        "DeepSeek-V3 inference/kernel.py act_quant, scale_fmt = ue8m0",
        amax_floor=1e-4,
        scale="amax / 448",
        apply="x / scale",
        power_of_two="log2",
        scale_formats=("ue8m0", "float32"),
    ),
    Recipe(
        "deepgemm",
        "DeepGEMM deep_gemm/utils/math.py per_token_cast_to_fp8, per_block_cast_to_fp8",
        amax_floor=1e-4,
        scale="amax / 448",
        apply="x * (1 / scale)",
        power_of_two="bits",
        scale_formats=("float32", "ue8m0"),
        layout="column-major, rows padded to 4",
    ),
    Recipe(
        "sglang",
        "SGLang sgl-kernel csrc/gemm/per_token_group_quant_8bit.cu",
        amax_floor=1e-10,
        scale="amax * (1 / 448)",
        apply="x * (448 / amax)",
        power_of_two="bits",
        scale_formats=("float32", "ue8m0"),
        layout="row- or column-major; ue8m0 packed by four",
    ),
    Recipe(
        "sglang_triton",
        "SGLang fp8_kernel.py _per_token_group_quant_8bit (row-major)",
        amax_floor=1e-10,
        scale="amax / 448",
        apply="x * (1 / scale)",
        power_of_two="none",
        scale_formats=("float32",),
    ),
    Recipe(
        "sglang_triton_column",
        "SGLang fp8_kernel.py _per_token_group_quant_8bit_colmajor",
        amax_floor=1e-10,
        scale="amax / 448",
        apply="x / scale",
        power_of_two="log2",
        scale_formats=("float32", "ue8m0"),
        layout="column-major",
    ),
    Recipe(
        "vllm",
        "vLLM fp8_utils.py _per_token_group_quant_fp8 (Triton)",
        amax_floor=1e-10,
        scale="amax / 448",
        apply="x / scale",
        power_of_two="log2",
        scale_formats=("float32", "ue8m0"),
    ),
    Recipe(
        "transformer_engine",
        "TransformerEngine Float8BlockScaling",
        amax_floor=0.0,
        scale="1 / (448 / amax)",
        apply="x * quant_scale",
        power_of_two="floor_quant_scale",
        scale_formats=("ue8m0", "float32"),
        layout="blocks as rows, padded to 4",
        zero_amax_is_one=True,
    ),
    Recipe(
        "torchao",
        "torchao prototype/blockwise_fp8_training/kernels.py",
        amax_floor=1e-12,
        scale="1 / (448 / float64(amax))",
        apply="x * quant_scale",
        power_of_two="none",
        scale_formats=("float32",),
        layout="column-major",
    ),
)
RECIPES = {recipe.name: recipe for recipe in _ALL}


def find_recipe(recipe: str | Recipe) -> Recipe:
    """A recipe by its name (or a recipe of your own, as it is). Raises ValueError for an unknown name."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"recipe {recipe!r} is unknown; known are {', '.join(RECIPES)}")
    return RECIPES[recipe]


def recipe_table() -> str:
    """The recipes side by side, as a Markdown table."""
    columns = {
        "recipe": lambda r: f"`{r.name}`",
        "amax floor": lambda r: f"{r.amax_floor:g}" if r.amax_floor else "none; 0, inf, NaN: scale 1",
        "scale": lambda r: r.scale,
        "applied as": lambda r: r.apply,
        "power of two": lambda r: r.power_of_two.replace("_", " "),
        "scale formats (default first)": lambda r: ", ".join(r.scale_formats),
        "overflow": lambda r: r.overflow,
        "scale layout": lambda r: r.layout,
        "source": lambda r: r.source,
    }
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(recipe) for cell in columns.values()) + " |" for recipe in RECIPES.values()]
    return "\n".join(lines)
