"""Which row counts a BLAS product may be called with, so that a row's bits do not depend on its neighbours.

BLAS picks kernels by shape, and on some processors a row's last bits depend on how many rows are multiplied with it
or on where it stands. So products over token rows are called only with row counts from an allowed set: ANCHOR, and
every candidate whose result on a probe equals the anchor's bit for bit in every position.
"""

import numpy as np

from refmodel.products import FEW, FEW_IN_TILES, K_STEP, SMALL_PRODUCT, multiply, multiply_tiles, tiles_of

ANCHOR = 8
CANDIDATES = (1, 2, 4, *range(16, 129, 8), *range(144, 257, 16), *range(288, 513, 32))
_MOST_STEPS = 4  # beyond, adding the steps of many rows costs more than few rows gain
_ASCENDING = sorted((ANCHOR, *CANDIDATES))
MOST_ROWS = _ASCENDING[-1]
_PROBE_ROWS = 32
# Above this many weights the probe multiplies with the caller's own matrix instead of building one of its size.
_OWN_MATRIX = 1 << 22


class RowCounts:
    """How to multiply by one (K, N, dtype, layout): allowed row counts, each probed when it is first wanted.

    `k_step`: K is cut into steps of this; None: K at once. With steps OpenBLAS's two kernels (`refmodel.products`) give
    the same bits, so that few rows need no padding. Many rows take K at once where the large kernel stops at the same
    places. The probe decides.

    `panel`: the matrix is a panel of columns, which lies by itself and is multiplied by the kernel for small products
    only: K at once, and never more rows than that takes.
    """

    def __init__(self, matrix: np.ndarray, panel: bool = False):
        self._matrix = matrix if matrix.size > _OWN_MATRIX else _like(matrix)
        self._rows = _probe_rows(matrix.shape[0], matrix.dtype)  # [32, K]
        self._plans: dict = {}
        in_small = max(ANCHOR, SMALL_PRODUCT // max(1, matrix.size) // ANCHOR * ANCHOR)
        self._panel, self._most = panel, in_small if panel else MOST_ROWS
        self._choose(None)
        if self.anchored and not panel and K_STEP < matrix.shape[0] <= _MOST_STEPS * K_STEP:
            self._choose(K_STEP)
            if not all(self.allowed(count) for count in (2, 4, 64)):
                self._choose(None)

    def _choose(self, k_step):
        step = k_step or self._matrix.shape[0]
        self.k_step = k_step
        self._steps = {ANCHOR: step}  # row count -> its K step, or 0: not allowed
        self._in_tiles: dict[int, int] = {}
        self._expected = multiply(self._rows.reshape(-1, ANCHOR, len(self._matrix)), self._matrix, step)
        self._expected = self._expected.reshape(_PROBE_ROWS, -1)  # [32, N]
        #: False where even ANCHOR rows depend on their position: then every row is multiplied alone
        self.anchored = self._steps_hold(ANCHOR, step)

    def multiply(self, rows, matrix, out=None) -> np.ndarray:
        """rows [..., count, K] @ matrix [..., K, N] as one call of a plan."""
        return multiply(rows, matrix, self._steps.get(rows.shape[-2]) or matrix.shape[-2], out)

    def allowed(self, count: int) -> bool:
        """Whether `count` rows at once give each row the anchor's bits."""
        if not self.anchored:
            return count == 1
        if count not in self._steps:
            # the counts between powers of two are worth a probe only where those hold
            worth = count & (count - 1) == 0 or (self.allowed(16) and (self._panel or self.allowed(64)))
            self._steps[count] = self._probe(count) if worth else 0
        return self._steps[count] > 0

    def _probe(self, count):
        """The K step with which `count` rows give the anchor's bits, or 0."""
        K = self._matrix.shape[0]
        steps = [K] if self.k_step is None else [self.k_step, K] if count <= FEW else [K, self.k_step]
        return next((step for step in steps if self._steps_hold(count, step)), 0)

    def _steps_hold(self, count, step):
        return self._holds(count, lambda rows: multiply(rows, self._matrix, step))

    def _tiles_hold(self, count):
        K, N = self._matrix.shape
        in_steps = K <= K_STEP or (self.k_step is not None and K % K_STEP == 0)  # one step, or some whole ones
        if self._panel or not self.anchored or not in_steps:
            return False
        tiles = tiles_of(self._matrix)
        return self._holds(count, lambda rows: np.stack([multiply_tiles(call, tiles, count)[:, :N] for call in rows]))

    def _holds(self, count: int, product) -> bool:
        """Whether `product` of probe rows [calls, count, K] has the anchor's bits."""
        # whole calls of `count` rows; a short one shows every probe row in every position, a long one holds each in
        # many positions already
        cycle = np.arange(-(-_PROBE_ROWS // count) * count) % _PROBE_ROWS
        for shift in range(count) if count <= ANCHOR else (0, 1, 6, 11) if count <= _PROBE_ROWS else (0, 5):
            turned = np.roll(cycle, shift)
            got = product(self._rows[turned].reshape(-1, count, self._rows.shape[1]))
            if not np.array_equal(got.reshape(len(turned), -1), self._expected[turned]):
                return False
        return True

    def in_tiles(self, rows: int) -> int:
        """How many rows `rows` are padded to, to be multiplied by tiles in one call; 0: by tiles they are not."""
        count = self._in_tiles.get(rows)
        if count is None:
            calls = self.plan(rows) if rows <= FEW_IN_TILES else []
            holds = len(calls) == 1 and self._tiles_hold(calls[0][1])
            count = self._in_tiles[rows] = calls[0][1] if holds else 0
        return count

    def plan(self, rows: int, most: int = MOST_ROWS) -> list[tuple[int, int]]:
        """Split `rows` into calls (first row, row count) of allowed counts; the last may reach past the end.

        `most`: no call of more rows than this (ANCHOR or more).
        """
        calls = self._plans.get((rows, most))
        if calls is None:
            calls, start = [], 0
            while start < rows:
                calls.append((start, self._next(rows - start, min(most, self._most))))
                start += calls[-1][1]
            self._plans[rows, most] = calls
        return calls

    def _next(self, left: int, most: int) -> int:
        if not self.anchored:
            return 1
        counts = [count for count in _ASCENDING if count <= most]
        for count in counts:  # the smallest count that takes all that is left, unless padding would cost too much
            padding_pays = count - left < ANCHOR or (count < 2 * left if count <= 32 else count <= left + left // 8)
            if count >= left and padding_pays and self.allowed(count):
                return count
        return next(count for count in reversed(counts) if count <= max(left, ANCHOR) and self.allowed(count))


def _like(matrix):
    """A matrix of the same shape and layout, filled from a short irregular pattern: a probe must not be special."""
    rng = np.random.default_rng(12345)
    pattern = rng.standard_normal(4099) * np.exp2(rng.integers(-8, 9, 4099))
    filled = np.resize(pattern, matrix.size).astype(matrix.dtype)
    if matrix.strides[-1] == matrix.itemsize:
        return filled.reshape(matrix.shape)
    return filled.reshape(matrix.shape[::-1]).T


def _probe_rows(K, dtype):
    rng = np.random.default_rng(54321)
    rows = rng.standard_normal((_PROBE_ROWS, K)) * np.exp2(rng.integers(-12, 13, (_PROBE_ROWS, K)))
    return rows.astype(dtype)


_KNOWN: dict = {}  # a fact about the BLAS of this process, found once


def row_counts(matrix: np.ndarray, panel: bool = False) -> RowCounts:
    """RowCounts for [..., K, N] operands: C-contiguous in the last two axes, or transposed views of such."""
    key = (matrix.shape[-2], matrix.shape[-1], matrix.dtype, matrix.strides[-1] == matrix.itemsize, panel)
    known = _KNOWN.get(key)
    if known is None:
        known = _KNOWN[key] = RowCounts(matrix[(0,) * (matrix.ndim - 2)], panel)
    return known
