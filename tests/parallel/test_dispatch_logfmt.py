"""LogFMT-10 against a scalar twin, bit by bit."""

import math

import ml_dtypes
import numpy as np
import pytest
from dispatch_oracle import random_batch, run_exchange

from parallel.dispatch import logfmt
from parallel.topology import Topology

BF16 = ml_dtypes.bfloat16
F32 = np.float32


def log2(value):
    return F32(-math.inf) if value == 0 else F32(math.log2(value))


def slow_row(row):
    """(bytes, decoded values) of one row, value by value."""
    hidden = len(row)
    meta, chunks, decoded = b"", b"", []
    blocks = [row[i : i + 128].astype(F32) for i in range(0, hidden, 128)]
    for block in blocks:
        meta += np.array([np.abs(block).max(), np.abs(block).min()]).astype(BF16).tobytes()
    size = logfmt.chunk_size(hidden)
    for first in range(0, hidden, size):
        mine = blocks[first // 128 : (first + size) // 128]
        spans = []
        for block in mine:
            high = log2(np.abs(block).max())
            spans.append((high, max(log2(np.abs(block).min()), high - F32(32))))
        if all(high < 0 and low < high for high, low in spans):
            for block, (high, low) in zip(mine, spans):
                packed, values = slow_block(block, high, low)
                chunks += packed
                decoded += values
        else:
            chunks += row[first : first + size].tobytes()
            decoded += [float(value) for value in row[first : first + size]]
    return meta + chunks, decoded


def slow_block(block, high, low):
    step = (high - low) / F32(510)
    inverse = F32(1) / step
    rounding = F32(2) - np.log2((F32(1) + np.exp2(step)) * F32(0.5)) * inverse
    packed, values = b"", []
    for first in range(0, len(block), 16):
        bits = 0
        for k, value in enumerate(block[first : first + 16]):
            scaled = log2(abs(value)) * inverse + (rounding - low * inverse)
            code = 0 if scaled < 0 else min(math.floor(scaled), 511)
            bits |= code << (9 * k)
            bits |= int(np.signbit(value)) << (144 + k)
            magnitude = 0.0 if code == 0 else float(F32(2.0 ** float(F32(code - 1) * step + low)))
            values.append(-magnitude if np.signbit(value) else magnitude)
        packed += bits.to_bytes(20, "little")
    return packed, values


def sample_rows(rng, count, hidden):
    rows = rng.standard_normal((count, hidden)) * 0.05
    rows[1] *= 1000  # not cast
    rows[2, :128] = 0.25  # amax = amin: its chunk is not cast
    rows[3] = 0
    rows[4, ::3] = 0  # zeros among values: the minimum is clipped
    rows[5] *= 2.0 ** rng.integers(-60, 0, hidden)
    rows[6, 600:] *= 100  # some chunks cast, some not
    return rows.astype(BF16)


@pytest.mark.parametrize("hidden", [1024, 1536, 256])
def test_rows_are_their_scalar_twins(hidden):
    rows = sample_rows(np.random.default_rng(0), 8, hidden)
    encoded = logfmt.encode(rows)
    decoded = logfmt.decode(encoded, hidden)
    start = 0
    for row, length, values in zip(rows, encoded.lengths, decoded):
        data, expected = slow_row(row)
        assert data == encoded.data[start : start + length].tobytes()
        np.testing.assert_array_equal(np.array(expected, F32), values)
        start += length
    assert start == len(encoded.data)


def test_lengths_at_the_models_width():
    rng = np.random.default_rng(0)
    small, large = (rng.standard_normal((2, 7168)) * 0.01).astype(BF16), np.full((2, 7168), 2.0, BF16)
    assert logfmt.encode(small).lengths.tolist() == [9184, 9184]
    assert logfmt.encode(large).lengths.tolist() == [14560, 14560]
    assert logfmt.encode(small[:0]).lengths.tolist() == []
    assert logfmt.row_bounds(7168) == (9184, 14560)


def test_cast_values_are_near_and_large_ones_exact():
    rng = np.random.default_rng(1)
    rows = (rng.standard_normal((4, 1024)) * 0.01).astype(BF16)
    decoded = logfmt.decode(logfmt.encode(rows), 1024)
    np.testing.assert_allclose(decoded, rows.astype(F32), rtol=0.03, atol=1e-9)
    large = (rows.astype(F32) * 1000).astype(BF16)
    np.testing.assert_array_equal(logfmt.decode(logfmt.encode(large), 1024), large.astype(F32))


def test_combine_sends_fewer_bytes():
    rng = np.random.default_rng(2)
    x, idx, weights = random_batch(rng, [5, 0, 7, 3], 8, 3, 512, BF16)
    x = [(row.astype(F32) * 2.0**-13).astype(BF16) for row in x]

    def scaled(pairs, first):
        return pairs.x[pairs.row]

    plain, _, plain_network = run_exchange("low_latency", Topology(4), 8, x, idx, weights, expert=scaled)
    packed, _, network = run_exchange("low_latency", Topology(4), 8, x, idx, weights, expert=scaled, logfmt=True)
    for left, right in zip(plain, packed):
        np.testing.assert_allclose(left.astype(F32), right.astype(F32), atol=0.02 * 2.0**-5)
    rows = network.ledger.matrix("combine", unit="rows")
    assert (rows == plain_network.ledger.matrix("combine", unit="rows")).all()
    sent = network.ledger.matrix("combine", classes="payload")
    assert (sent >= rows * (16 + 640)).all()
    assert (sent <= rows * (16 + 1024)).all()
    assert sent.sum() < plain_network.ledger.matrix("combine", classes="payload").sum()


def test_damaged_rows_are_refused():
    rows = sample_rows(np.random.default_rng(0), 8, 1024)
    encoded = logfmt.encode(rows)
    with pytest.raises(ValueError, match="damaged"):
        logfmt.decode(logfmt.Encoded(encoded.data, encoded.lengths[::-1]), 1024)
    with pytest.raises(ValueError, match="multiple of 128"):
        logfmt.encode(rows[:, :100])
