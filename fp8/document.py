"""The page that shows recipes and kernels side by side: `python -m fp8.document > docs/fp8_recipes.md`."""

import numpy as np

from fp8.blockscaled import quantize
from fp8.gemm import KERNELS
from fp8.recipes import RECIPES, recipe_table

_EXAMPLES = (1.0, 449.0, 1e-6, 0.0, float(np.nextafter(np.float32(448 * 2**-10), np.float32(1))))

_TEXT = """# FP8 recipes and kernels

Generated from the data in `fp8/recipes.py` and `fp8/gemm.py` by `python -m fp8.document`; a test holds it to them.

## Quantisers

`fp8.quantize(x, block, recipe=...)`. Arithmetic is float32 unless a formula says float64. With a power of two the
scale is rounded first and the values are scaled by the rounded one, whatever "applied as" says. `bits`: the exponent
plus one if any mantissa bit is set; `log2`: exp2(ceil(log2(scale))), which is half as large just above a power of two
far from 1; `floor quant scale`: 448 / amax with its mantissa cleared.

{recipes}

## What a block becomes

The stored scale and the code of the largest value, for a block whose largest value is as given.

{examples}

## Products

`fp8.gemm(a, b, **fp8.KERNELS[name]._asdict())`. The partial sum p of a block of K is what the accumulator gives; sa and
sb are the block's scales. `fma` rounds the last product and the addition once.

{kernels}
"""


def _example_table() -> str:
    head = ["recipe, scale format", *(f"amax {amax:.9g}" for amax in _EXAMPLES)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for recipe in RECIPES.values():
        for scale_format in recipe.scale_formats:
            cells = [f"`{recipe.name}`, {scale_format}"]
            for amax in _EXAMPLES:
                block = quantize(np.full((1, 128), amax, np.float32), recipe=recipe, scale_format=scale_format)
                cells.append(f"{block.scale[0, 0]:.9g}, {float(block.codes[0, 0]):g}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _kernel_table() -> str:
    orders = {"a_then_b": "(p sa) sb", "b_then_a": "(p sb) sa", "scales_first": "p (sa sb)"}
    lines = ["| kernel | accumulator | promotion | scales |", "|---|---|---|---|"]
    for name, rule in KERNELS.items():
        inside = rule.accumulator == "blackwell"
        promotion, order = ("none", "inside the instruction") if inside else (rule.promotion, orders[rule.scale_order])
        lines.append(f"| `{name}` | {rule.accumulator} | {promotion} | {order} |")
    return "\n".join(lines)


def recipes_document() -> str:
    """The whole page as Markdown."""
    return _TEXT.format(recipes=recipe_table(), examples=_example_table(), kernels=_kernel_table())


if __name__ == "__main__":
    print(recipes_document(), end="")
