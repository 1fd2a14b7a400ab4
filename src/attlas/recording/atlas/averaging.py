"""The mean of several recorded matrices, lazy."""

from __future__ import annotations

from collections.abc import Sequence

from attlas.errors import DeviceError, ShapeError
from attlas.matrix import AttentionMatrix
from attlas.matrix.kinds.algebra import mean_over
from attlas.matrix.kinds.combination import Combination, Term


def mean_of(matrices: Sequence[AttentionMatrix], names: Sequence[str], *, over_heads: bool) -> AttentionMatrix:
    """Return the mean of matrices of shape (batch, heads, m, n), each of which has a name for errors.

    Raises
    ------
    ShapeError
        If there is none, or their shapes differ.
    DeviceError
        If they are on several devices.
    """
    if not matrices:
        raise ShapeError("there must be a layer to take the mean of.", "no layer", "atlas.mean()")
    if over_heads:
        matrices = [mean_over(A, {1}, keepdim=True, divisor=A.shape[1]) for A in matrices]
    found = ", ".join(f"{tuple(A.shape)} of {name}" for A, name in zip(matrices, names, strict=True))
    if len({tuple(A.shape) for A in matrices}) > 1:
        rule = "the matrices of the layers must have one shape, (batch, heads, m, n)."
        fix = "atlas.mean(over_heads=True) where only the heads differ; or layers=[...] of one shape."
        raise ShapeError(rule, found, fix)
    if len({A.device for A in matrices}) > 1:
        rule, fix = "the matrices of the layers must be on one device.", 'record(model, keep="cpu")'
        raise DeviceError(rule, ", ".join(sorted({str(A.device) for A in matrices})), fix)
    share = 1.0 / len(matrices)
    return AttentionMatrix(Combination([Term(share, A.weights) for A in matrices]), matrices[0].axes)
