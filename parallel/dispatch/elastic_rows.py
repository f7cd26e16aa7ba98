"""The rows of DeepEP V2's elastic buffer: what stands in one, and how a capacity is checked.

Source: DeepEP csrc/elastic/buffer.hpp (token layout) and deep_ep/utils/refs.py (order of the reductions).
"""

import numpy as np

from parallel.dispatch.payload import filler

ALIGNMENT = 32  # bytes: hidden, scale factors and metadata are each aligned to it


class CapacityError(ValueError):
    """A rank holds more tokens than its buffers; names the rank, what is needed, what there is and what would do."""


def check_capacity(where: str, needed: int, capacity: int) -> None:
    """Raise CapacityError where `needed` tokens exceed `capacity`; `where` names the rank, the layer, the message."""
    if needed > capacity:
        raise CapacityError(
            f"{where}: needed {needed} tokens, have {capacity}: num_max_tokens_per_rank, the same on all ranks, "
            f"must be at least {needed}"
        )


def align(size: int, multiple: int = ALIGNMENT) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def metadata_arrays(payload: dict, topk_idx: np.ndarray, topk_weights: np.ndarray, src_token: np.ndarray) -> dict:
    """Arrays that travel beside the payload rows [n]: routing, a reserved linked list, the global token index, padding.

    The linked list is filled in by the forwarding kernels; here it is -1.
    """
    rows, top_k = topk_idx.shape
    parts = [array.itemsize * int(np.prod(array.shape[1:])) for array, _ in payload.values()]
    parts.append(top_k * (4 + topk_weights.itemsize + 4) + 4)
    return {
        "topk_idx": (topk_idx.astype(np.int32), "routing"),
        "topk_weights": (topk_weights, "routing"),
        "linked_list": (np.full((rows, top_k), -1, np.int32), "routing"),
        "src_token_global_idx": (src_token.astype(np.int32), "header"),
        **filler(rows, sum(align(size) - size for size in parts)),
    }


def return_padding(is_rdma: np.ndarray, top_k: int) -> tuple[dict, dict]:
    """(arrays, lengths) of the room for weights that rows [n] carry back by RDMA and only there."""
    lengths = np.where(is_rdma, align(8 * top_k), 0)
    return {"padding": (np.zeros(int(lengths.sum()), np.uint8), "padding")}, {"padding": lengths}


def last_slot(topk_idx: np.ndarray, unit: np.ndarray, experts_per_unit: int) -> np.ndarray:
    """int64 [n]: the last slot of each row's token that selects an expert of its unit (rank or node).

    A partial sum stands at that slot when the next reduction adds in slot order.
    """
    selected = np.where(topk_idx >= 0, topk_idx // experts_per_unit, -1) == unit[:, None]
    return topk_idx.shape[1] - 1 - np.argmax(selected[:, ::-1], axis=1)
