"""Additive attention: a small network of one hidden layer looks at query and key together."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from attlas.errors import public
from attlas.foundation.checks import whole_number
from attlas.foundation.compat import tracing
from attlas.foundation.tiles import Tile, cut
from attlas.foundation.trees import recorded_gradients
from attlas.scores.base import Score, Tokens, check_sizes, with_parameters

__all__ = ["Additive"]

# Hidden units times cells held at once. On a processor this block stays in a core's cache, which is 1.5 times
# faster than the whole tile; an accelerator needs enough work for each launch.
_UNIT_CELLS_AT_ONCE = {"cpu": 1 << 17}
_BLOCK_ACCELERATOR = 1 << 24


class Additive(Score):
    """Additive score, ``s_ij = w_vᵀ tanh(W_q q_i + W_k k_j)``, for queries and keys of any two sizes.

    Parameters
    ----------
    query_size, key_size : int
        Sizes of the tokens.
    hidden_size : int
        Number of hidden units.
    bias : bool
        Whether the hidden units have a bias, ``tanh(W_q q + W_k k + b)``. The default is no, as in the paper.

    Attributes
    ----------
    W_q, W_k : nn.Linear
        The projections to the hidden units, initialised as torch does; `b` is the bias of `W_q`.
    w_v : nn.Parameter, shape (hidden_size,)
        The weight of each hidden unit, uniform in ``±1 / sqrt(hidden_size)`` at the start.

    Raises
    ------
    ShapeError
        If a size is not a whole number above 0.

    See Also
    --------
    Bilinear : two sizes as well, and as fast as a dot product.

    Notes
    -----
    The tokens are projected once. A pair then costs one tanh a hidden unit, and twice that backward. The usual
    broadcast needs ``m n hidden_size`` numbers, 34 GB for 8192 queries and keys and 128 units; here it is never
    made, forward or backward: a block of 0.5 MiB is (64 MiB on an accelerator).

    References
    ----------
    .. [1] Bahdanau et al., "Neural machine translation by jointly learning to align and translate", 2015,
       appendix A.1.2.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k = torch.randn(5, 3), torch.randn(7, 4)
    >>> attlas.attend(q, k, score=attlas.Additive(3, 4, hidden_size=8)).shape
    torch.Size([5, 7])
    """

    finite = True
    position_free = True
    rounds_tokens = True
    scratch = 2

    @public("Additive()")
    def __init__(self, query_size: int, key_size: int, hidden_size: int, bias: bool = False) -> None:
        super().__init__()
        for name, size in (("query_size", query_size), ("key_size", key_size), ("hidden_size", hidden_size)):
            whole_number(name, size, "give Additive(q.shape[-1], k.shape[-1], hidden_size=128).")
        self.query_size, self.key_size, self.hidden_size = query_size, key_size, hidden_size
        self.W_q = nn.Linear(query_size, hidden_size, bias=bias)
        self.W_k = nn.Linear(key_size, hidden_size, bias=False)
        self.w_v = nn.Parameter(torch.empty(hidden_size).uniform_(-1, 1) / math.sqrt(hidden_size))

    def to_dict(self) -> dict[str, Any]:
        return {"W_q": self.W_q.weight, "W_k": self.W_k.weight, "w_v": self.w_v, "b": self.W_q.bias}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        # The score of settings that `to_dict` gave.
        names = {"W_q": "W_q.weight", "W_k": "W_k.weight", "w_v": "w_v", "b": "W_q.bias"}
        parameters = {name: settings[key] for key, name in names.items() if settings[key] is not None}
        hidden, query_size = settings["W_q"].shape
        key_size, bias = settings["W_k"].shape[1], settings["b"] is not None
        return with_parameters(lambda: cls(query_size, key_size, hidden, bias), parameters)

    def project(self, q: Tensor, k: Tensor) -> tuple[Tokens, Tokens]:
        bias = self.W_q.bias
        hidden_q = nn.functional.linear(q, self.W_q.weight.to(q), None if bias is None else bias.to(q))
        return hidden_q, nn.functional.linear(k, self.W_k.weight.to(k))

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        # The log-weights of a tile.
        if tracing():  # a program that torch records is made of torch's own operations
            return _score_by_definition(q, k, self.w_v.to(q))
        logits: Tensor = _SumOfUnits.apply(q, k, self.w_v.to(q))  # type: ignore[no-untyped-call]
        return logits

    def check(self, q: Tensor, k: Tensor, heads: int) -> None:
        fix = f"use score=Additive({q.shape[-1]}, {k.shape[-1]}, {self.hidden_size})."
        check_sizes(self._name_in_errors(), q, k, (self.query_size, self.key_size), fix)

    def extra_repr(self) -> str:
        return f"query_size={self.query_size}, key_size={self.key_size}, hidden_size={self.hidden_size}"

    def _name_in_errors(self) -> str:
        """Return the score as it is written, for errors."""
        return f"Additive({self.query_size}, {self.key_size}, {self.hidden_size})"


class _SumOfUnits(torch.autograd.Function):
    """``Σ_u w_u tanh(q_iu + k_ju)`` in blocks of rows; the backward makes each block again and keeps none.

    The derivative of tanh is ``1 - tanh²``, so both gradients are sums of ``grad * tanh²``. Against autograd on
    the broadcast the backward takes 0.4 of the time, on a tile of 128 × 256 cells and 128 units.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        # The score of each pair, shape (..., m, n). The hidden units of a block of rows exist at a time, not those of
        # all.
        ctx.save_for_backward(q, k, w)
        total = q.new_empty(*q.shape[:-1], k.shape[-2])
        for rows in _bands_of_rows(q, k):
            total[..., rows.start : rows.stop, :] = _hidden_units(q, k, rows) @ w
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Gradients of q, k and w. Where they are to be differentiated again, autograd records the formula instead.
        q, k, w = ctx.saved_tensors
        if torch.is_grad_enabled():
            return recorded_gradients(_score_by_definition(q, k, w), (q, k, w), grad)
        grad_q, grad_k, grad_w = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(w)
        for rows in _bands_of_rows(q, k):
            units, grad_rows = _hidden_units(q, k, rows), grad[..., rows.start : rows.stop, :]
            grad_w += grad_rows.reshape(-1) @ units.flatten(0, -2)
            # From here on `units` holds grad * tanh²: the sum of grad * (1 - tanh²) is that of grad less that of units.
            units.mul_(units).mul_(grad_rows.unsqueeze(-1))
            grad_q[..., rows.start : rows.stop, :] = grad_rows.sum(-1, keepdim=True) - units.sum(-2)
            grad_k += grad_rows.sum(-2).unsqueeze(-1) - units.sum(-3)
        return grad_q * w, grad_k * w, grad_w


def _score_by_definition(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Return the score of each pair by the plain formula; holds all hidden units, (rows, columns, hidden), at once."""
    return torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)) @ w


def _bands_of_rows(q: Tensor, k: Tensor) -> list[range]:
    """Return ranges of rows of `q`, so short that one range's hidden units, for all keys, fit into a block."""
    block = _UNIT_CELLS_AT_ONCE.get(q.device.type, _BLOCK_ACCELERATOR)
    return list(cut(q.shape[-2], max(1, block // max(1, k.numel()))))


def _hidden_units(q: Tensor, k: Tensor, rows: range) -> Tensor:
    """Return the hidden units of some rows and all keys, shape (..., rows, n, hidden)."""
    return (q[..., rows.start : rows.stop, :].unsqueeze(-2) + k.unsqueeze(-3)).tanh_()
