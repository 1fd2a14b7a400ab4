"""The score of forget gates: a key counts the less, the more was forgotten after it."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from attlas.errors import ShapeError, public
from attlas.foundation.checks import (
    as_plain,
    check_floating,
    heads_of_three_axes,
    holds_numbers,
    is_one_or,
    sum_dtype,
    waits_for,
)
from attlas.foundation.compat import tracing, transforming
from attlas.foundation.devices import to_device
from attlas.foundation.tiles import Tile
from attlas.scores.base import Score
from attlas.scores.bias import Bias
from attlas.scores.position import heads_of

__all__ = ["Forget"]


class Forget(Score):
    """Forget gates of the Forgetting Transformer, ``s_ij = c_i' - c_j`` with ``c = cumsum(log_gate)``.

    Parameters
    ----------
    log_gate : Tensor, shape (heads, n) or (batch, heads, n)
        Logarithm of the forget gate of each token, finite and at most 0. Sizes of 1 stand for every batch and every
        head.

    Raises
    ------
    ShapeError
        If `log_gate` has another number of axes, or a number above 0 or one that is not finite (asked on the CPU
        only); at `attend`, if its sizes are not those of the matrix.
    DtypeError
        If `log_gate` is not a floating-point tensor.

    See Also
    --------
    Alibi : the same rate at every token.
    TensorBias : any tensor of log-weights.

    Notes
    -----
    Query i stands at key ``i' = i + n - m``, the last query at the last key. A key before it gets the sum of the log
    gates after the key, up to that of the query; keys after it get the opposite sign, so the score is meant for a
    causal mask: ``ScaledDot() + Forget(log_gate)`` with ``mask=Causal()``. Where there are more queries than keys,
    the first queries stand before every key, and their c is 0. Gradients reach the gates. The tensor is learned
    where it requires a gradient, but it is a parameter of the score only if it is an ``nn.Parameter``.

    Sums and their differences are computed in float64 (float32 on Apple's GPUs, which have no float64), because c may
    be large where the difference is small. Cost: one sum over the tokens and one subtraction a pair.

    References
    ----------
    .. [1] Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", 2025.

    Examples
    --------
    >>> import torch, attlas
    >>> q = torch.ones(1, 3, 4)
    >>> log_gate = torch.tensor([[-1.0, -0.5, -0.25]])
    >>> attlas.attend(q, q, score=attlas.Forget(log_gate), mask=attlas.Causal()).logits[:, :, :]
    tensor([[[ 0.0000,    -inf,    -inf],
             [-0.5000,  0.0000,    -inf],
             [-0.7500, -0.2500,  0.0000]]])
    """

    positional = True
    rounds_tokens = True
    scratch = 3  # differences in float64, and their rounded copy

    @public("Forget()")
    def __init__(self, log_gate: Tensor) -> None:
        super().__init__()
        rule = "log_gate must be a floating-point tensor of log gates."
        check_floating(rule, "log_gate", log_gate, "functional.logsigmoid(x), in floating point.")
        if log_gate.ndim not in (2, 3):
            rule = "log_gate must have the axes heads and n, or batch, heads and n."
            found = f"{log_gate.ndim} axes"
            raise ShapeError(rule, found, "give a tensor of shape (heads, n).", log_gate=log_gate)
        self.log_gate = as_plain("log_gate", log_gate)
        _check_numbers(self.log_gate)

    def to_dict(self) -> dict[str, Any]:
        # With the axes (batch, heads, 1, n) of a tensor of log-weights: recordings join parts of one along each axis.
        t = self.log_gate[(None,) * (3 - self.log_gate.ndim)].unsqueeze(-2)
        return {"log_gate": t, "learn": isinstance(self.log_gate, nn.Parameter)}

    @classmethod
    def batch_axis(cls, t: Tensor) -> int | None:
        # Of the tensor that `to_dict` returns.
        return 0

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        t = settings["log_gate"].squeeze(-2)
        return cls(nn.Parameter(t) if settings["learn"] else t)

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        # c of each query less c of each key, in float64; the difference is rounded to the dtype of the tile.
        queries, keys = self._cumulative_log_gates(at)
        return (queries.unsqueeze(-1) - keys.unsqueeze(-2)).to(at.dtype)

    def bias(self, at: Tile) -> Bias:
        # ``c_i' - c_j`` is a term of the query plus a term of the key.
        queries, keys = self._cumulative_log_gates(at)
        return Bias(key=-keys, query=queries)

    def check(self, q: Tensor, k: Tensor, heads: int) -> None:
        # Only tokens of four axes or more have heads; theirs is axis -3.
        batch_stop = -2 if max(q.ndim, k.ndim) < 4 else -3
        batch = torch.broadcast_shapes(q.shape[:batch_stop], k.shape[:batch_stop]).numel()
        sizes, whole = tuple(self.log_gate.shape), (batch, heads, k.shape[-2])
        leading = all(is_one_or(size, full) for size, full in zip(sizes[-2::-1], whole[-2::-1], strict=False))
        if leading and sizes[-1] == whole[-1]:
            return
        rule = "log_gate of Forget() must have one number for each batch, head and key."
        found = f"{sizes} in log_gate, (batch, heads, n) = {whole}"
        fix = heads_of_three_axes(sizes[-2], tuple(q.shape[:-2]))
        fix = fix or f"give a tensor of shape ({heads}, {whole[-1]}) or {whole}."
        given = {"log_gate": self.log_gate, "q (..., m, d)": q, "k (..., n, d)": k}
        raise ShapeError(rule, found, fix, arguments=given, where="attend()")

    def extra_repr(self) -> str:
        return f"log_gate={tuple(self.log_gate.shape)}"

    def _cumulative_log_gates(self, at: Tile) -> tuple[Tensor, Tensor]:
        """Return the cumulative sums of log gates (`c` in the formula) at a tile's queries and at its keys.

        Shapes (batches or 1, heads or 1, rows) and (batches or 1, heads or 1, columns).
        """
        # As (batch, heads, n), then the tile's batches and heads on its device.
        gates = self.log_gate[(None,) * (3 - self.log_gate.ndim)]
        gates = heads_of(to_device(gates, at.device, sum_dtype(at.device)), at)
        sums = functional.pad(gates.cumsum(-1), (1, 0))  # number p + 1 is that of place p
        queries, keys = (
            sums.index_select(-1, places.flatten().clamp(-1, gates.shape[-1] - 1) + 1)
            for places in (at.i + (at.n - at.m), at.j)
        )
        return queries, keys


def _check_numbers(log_gate: Tensor) -> None:
    """Raise a ShapeError where a log gate is above 0 or not finite.

    Skipped where reading the numbers would wait for a device.
    """
    if tracing() or transforming() or not holds_numbers(log_gate) or waits_for(log_gate.device):
        return
    t = log_gate.detach()
    if bool((t.isfinite() & (t <= 0)).all()):
        return
    found = "a number above 0" if bool((t > 0).any()) else "a number that is not finite"
    rule, fix = "log_gate must hold finite numbers of at most 0.", "functional.logsigmoid(x) is finite and below 0."
    raise ShapeError(rule, found, fix, log_gate=log_gate)
