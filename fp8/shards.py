"""Cutting and joining block-scaled matrices, where the grid of blocks allows it.

A shard that starts inside a block needs a scale row or column of its own, and a joined matrix whose first part ends
inside a block has no single grid. Both are refused, never guessed (vllm-project/vllm#52997, sgl-project/sglang#3345).
"""

from collections.abc import Sequence

import numpy as np

from fp8.blockscaled import BlockScaled

_NAMES = ("rows", "columns")


def _check_axis(axis: int) -> None:
    if axis not in (0, 1):
        raise ValueError(f"axis = {axis}: 0 for rows or 1 for columns")


def split(matrix: BlockScaled, parts: int, axis: int) -> list[BlockScaled]:
    """`parts` equal shards of a matrix [M, K] along rows (0) or columns (1); views, not copies.

    Raises ValueError if the size does not divide, or a shard would start inside a block.
    """
    _check_axis(axis)
    size, block = matrix.shape[axis], matrix.block[axis]
    if parts < 1 or size % parts:
        raise ValueError(f"{size} {_NAMES[axis]} do not split into {parts} equal shards")
    step = size // parts
    if parts > 1 and step % block:
        raise ValueError(
            f"shards of {step} {_NAMES[axis]} would start inside a block of {block}: shard by multiples of {block}, or "
            "quantise each shard on a grid of its own"
        )
    shards = []
    for index in range(parts):
        rows, blocks = (
            slice(index * step, (index + 1) * step),
            slice(index * step // block, -(-(index + 1) * step // block)),
        )
        where = ((rows, slice(None)), (blocks, slice(None)))
        if axis == 1:
            where = tuple(pair[::-1] for pair in where)
        shards.append(BlockScaled(matrix.codes[where[0]], matrix.scale[where[1]], matrix.block))
    return shards


def concatenate(parts: Sequence[BlockScaled], axis: int) -> BlockScaled:
    """Matrices [M, K] joined along rows (0) or columns (1); the scale rows are the sum of the parts' scale rows.

    Raises ValueError if blocks, formats or the other axis differ, or a part before the last ends inside a block.
    """
    _check_axis(axis)
    if not parts:
        raise ValueError("nothing to concatenate: at least one matrix is needed")
    kinds = {(part.block, part.codes.dtype, part.shape[1 - axis]) for part in parts}
    if len(kinds) > 1:
        raise ValueError(
            f"parts do not fit each other: blocks, dtypes and {_NAMES[1 - axis]} are {sorted(map(str, kinds))}"
        )
    block = parts[0].block
    for index, part in enumerate(parts[:-1]):
        if part.shape[axis] % block[axis]:
            raise ValueError(
                f"part {index} has {part.shape[axis]} {_NAMES[axis]}, no multiple of the block of {block[axis]}: what "
                "follows it would start inside a block; put it last, or keep a grid per part"
            )
    codes, scale = (np.concatenate([getattr(part, name) for part in parts], axis) for name in ("codes", "scale"))
    return BlockScaled(codes, scale, block)
