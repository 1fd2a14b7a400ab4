"""Weights as 16-bit codes of their logarithm: what a tile of the picture carries.

Shares of a row are from 0 to 1. Other weights may be negative and of any size; their codes tell the sign, and a size
relative to the largest that is known of their matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array: TypeAlias = NDArray[Any]  # of a dtype that the text says

MASKED = 0  # no pair of the block may attend
ZERO = 1  # some pair may, and the weight is 0 or below 2 ** LOG2_MIN
FIRST = 2
LAST = 65534
PENDING = 65535  # not computed yet
LOG2_MIN = -64.0
# Of codes with a sign: positive weights from FIRST to LAST_POSITIVE, negative ones as many codes behind it.
LAST_POSITIVE = 32767
SIGNED_LOG2 = -48.0, 16.0

_CODES_PER_OCTAVE = (LAST - FIRST) / -LOG2_MIN  # codes for each factor of two
_SIGNED_STEPS = (LAST_POSITIVE - FIRST) / (SIGNED_LOG2[1] - SIGNED_LOG2[0])


def finite_or_none(value: float) -> float | None:
    """Return a number for JSON, which has no infinity and no NaN: None for these."""
    return float(value) if math.isfinite(value) else None


def reduce_blocks(
    values: Array, rows: Array | Sequence[int], columns: Array | Sequence[int], reduce: np.ufunc, dtype: DTypeLike
) -> Array:
    """Reduce each block to one number; `rows` and `columns` are the first places of the blocks."""
    across = reduce.reduceat(values, columns, axis=1, dtype=dtype)
    whole: Array = reduce.reduceat(across, rows, axis=0, dtype=dtype)
    return whole


def larger(a: Array, b: Array) -> Array:
    """Return, place by place, the number of larger size, with its sign."""
    return np.where(np.abs(b) > np.abs(a), b, a)


def largest_of_blocks(
    values: Array, rows: Array | Sequence[int], columns: Array | Sequence[int], dtype: DTypeLike
) -> Array:
    """Return the number of largest size of each block, with its sign; arguments as of `reduce_blocks`."""
    high = reduce_blocks(values, rows, columns, np.maximum, dtype)
    return larger(high, reduce_blocks(values, rows, columns, np.minimum, dtype)) if (values < 0).any() else high


def encode(weights: Array, allowed: Array) -> Array:
    """Return the code of each weight.

    Parameters
    ----------
    weights : array of float
        Weights, from 0 to 1.
    allowed : array of bool, same shape
        Whether any pair of the block may attend.

    Returns
    -------
    array of uint16, same shape
        0 where nothing is allowed, 1 for a weight of 0 (or one below 2^-64, or NaN), else
        ``2 + 65532 (64 + log2 w) / 64`` rounded to the nearest.

    See Also
    --------
    decode : the way back.

    Notes
    -----
    One step is a factor of 2^(64 / 65532), so that rounding changes a weight by 0.034 % at most, from 1 down to
    5.4e-20. float16 underflows long before that.

    Examples
    --------
    >>> import numpy as np
    >>> from attlas.view.codes import decode, encode
    >>> codes = encode(np.array([0.0, 0.25, 1.0, 0.5]), np.array([True, True, True, False]))
    >>> codes.tolist(), decode(codes).round(3).tolist()
    ([1, 63486, 65534, 0], [0.0, 0.25, 1.0, 0.0])
    """
    seen = weights >= 2.0**LOG2_MIN  # not so where it is NaN
    log = np.log2(weights, out=np.full(weights.shape, LOG2_MIN, dtype=np.float64), where=seen)
    codes = np.rint((log - LOG2_MIN) * _CODES_PER_OCTAVE + FIRST).clip(FIRST, LAST).astype(np.uint16)
    return np.where(allowed, np.where(seen, codes, np.uint16(ZERO)), np.uint16(MASKED))


def encode_signed(weights: Array, allowed: Array) -> Array:
    """Return the code of each weight that may be negative.

    Parameters
    ----------
    weights : array of float
        Weights relative to a size that is typical of the largest ones.
    allowed : array of bool, same shape
        Whether any pair of the block may attend.

    Returns
    -------
    array of uint16, same shape
        0 where nothing is allowed, 1 for a weight of 0 (or of a size below 2^-48, or NaN), else
        ``2 + 32765 (48 + log2 |w|) / 64`` rounded to the nearest, and 32767 more for a negative weight.

    Notes
    -----
    Rounding changes a weight by 0.068 % at most, for sizes from 3.6e-15 to 65,536.

    Examples
    --------
    >>> import numpy as np
    >>> from attlas.view.codes import decode_signed, encode_signed
    >>> codes = encode_signed(np.array([0.0, 0.25, -1.0]), np.array([True, True, True]))
    >>> codes.tolist(), decode_signed(codes).round(3).tolist()
    ([1, 23552, 57343], [0.0, 0.25, -1.0])
    """
    size, (least, most) = np.abs(weights), SIGNED_LOG2
    seen = size >= 2.0**least
    log = np.log2(size, out=np.full(weights.shape, least, dtype=np.float64), where=seen).clip(max=most)
    codes = np.rint((log - least) * _SIGNED_STEPS + FIRST).astype(np.uint16)
    codes = np.where(weights < 0, codes + np.uint16(LAST_POSITIVE), codes)
    return np.where(allowed, np.where(seen, codes, np.uint16(ZERO)), np.uint16(MASKED))


def decode_signed(codes: Array) -> Array:
    """Return the weight of each code of `encode_signed`: 0 where masked or zero, NaN where it is not computed yet.

    Parameters
    ----------
    codes : array of uint16
        Codes.

    Returns
    -------
    array of float64, same shape

    Examples
    --------
    >>> import numpy as np
    >>> decode_signed(np.array([0, 1, 24578, 57345], dtype=np.uint16)).round(3).tolist()
    [0.0, 0.0, 1.003, -1.003]
    """
    negative = codes > LAST_POSITIVE
    # log2 |w| = SIGNED_LOG2[0] + steps / _SIGNED_STEPS; negative weights have the codes above LAST_POSITIVE.
    steps = codes.astype(np.float64) - FIRST - LAST_POSITIVE * negative
    weights = np.exp2(SIGNED_LOG2[0] + steps / _SIGNED_STEPS) * np.where(negative, -1.0, 1.0)
    weights[codes < FIRST] = 0.0
    weights[codes == PENDING] = np.nan
    return weights


def decode(codes: Array) -> Array:
    """Return the weight of each code: 0 where masked or zero, NaN where it is not computed yet.

    Parameters
    ----------
    codes : array of uint16
        Codes.

    Returns
    -------
    array of float64, same shape

    Examples
    --------
    >>> import numpy as np
    >>> decode(np.array([0, 1, 65534], dtype=np.uint16)).tolist()
    [0.0, 0.0, 1.0]
    """
    weights = np.exp2(LOG2_MIN + (codes.astype(np.float64) - FIRST) / _CODES_PER_OCTAVE)
    weights[codes < FIRST] = 0.0
    weights[codes == PENDING] = np.nan
    return weights
