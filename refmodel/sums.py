"""Sums whose order is part of the result."""

import math

import numpy as np


def add_in_order(x: np.ndarray) -> np.ndarray:
    """x [n, m, ...] summed over axis 1, one after the other from +0 on: [n, ...].

    NumPy adds along an axis in order where whole rows of memory are added up, and in pairs where the numbers of one
    sum lie side by side. Starting at +0 an added +0 changes no sum, not even one of -0.
    """
    if math.prod(x.shape[2:]) > 1:
        return np.add.reduce(x, axis=1, initial=0)
    return np.add.reduce(np.add.accumulate(x, axis=1)[:, -1:], axis=1, initial=0)
