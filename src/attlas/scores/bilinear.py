"""The bilinear score: a dot product after a learned change of coordinates."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from attlas.errors import public
from attlas.foundation.checks import finite_number, whole_number
from attlas.foundation.tiles import Tile
from attlas.scores.base import Dot, Score, Tokens, check_sizes, with_parameters

__all__ = ["Bilinear"]


class Bilinear(Score):
    """Bilinear score, ``s_ij = scale * q_iᵀ W k_j``, Luong's "general" score.

    Parameters
    ----------
    query_size, key_size : int
        Sizes of the tokens.
    scale : float, optional
        Factor of the score; the default is 1.

    Attributes
    ----------
    weight : nn.Parameter, shape (query_size, key_size)
        W, normal at the start with variance ``1 / (query_size key_size)``: for tokens of independent
        coordinates with variance 1, the scores then have variance 1 too (at `scale` 1).

    Raises
    ------
    ShapeError
        If a size is not a whole number above 0, or `scale` is not finite.

    See Also
    --------
    Additive : two sizes as well, and not linear in the tokens.
    ScaledDot : W is the identity.

    Notes
    -----
    The longer tokens are projected to the size of the shorter ones, once for each; a pair then costs that of
    a plain dot product, ``2 min(query_size, key_size)`` operations.

    References
    ----------
    .. [1] Luong et al., "Effective approaches to attention-based neural machine translation", 2015,
       section 3.1.

    Examples
    --------
    >>> import torch, attlas
    >>> score = attlas.Bilinear(2, 3)
    >>> score.weight.data.fill_(1.0)
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    >>> attlas.attend(torch.ones(1, 2), torch.ones(2, 3), score=score).logits[:, :].detach()
    tensor([[6., 6.]])
    """

    finite = True
    position_free = True
    rounds_tokens = True
    stored = ("scale", "weight")

    @public("Bilinear()")
    def __init__(self, query_size: int, key_size: int, scale: float | None = None) -> None:
        super().__init__()
        for name, size in (("query_size", query_size), ("key_size", key_size)):
            whole_number(name, size, "give Bilinear(q.shape[-1], k.shape[-1]).")
        self.query_size, self.key_size = query_size, key_size
        self.scale = 1.0 if scale is None else finite_number("scale", scale, "leave scale out for 1.")
        self.weight = nn.Parameter(torch.randn(query_size, key_size) / math.sqrt(query_size * key_size))

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        # The weight has the shape (query_size, key_size).
        weight = settings["weight"]
        return with_parameters(lambda: cls(weight.shape[0], weight.shape[1], settings["scale"]), {"weight": weight})

    def project(self, q: Tensor, k: Tensor) -> tuple[Tokens, Tokens]:
        # The longer tokens are projected to the size of the shorter ones.
        weight = self.weight.to(q)
        return (q, k @ weight.mT) if self.query_size < self.key_size else (q @ weight, k)

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        return torch.matmul(q * self.scale, k.mT)

    def as_dot(self, q: Tensor, k: Tensor) -> Dot | None:
        # The tokens are projected already: one of them has the weight in it.
        return Dot(q, k, self.scale)

    def check(self, q: Tensor, k: Tensor, heads: int) -> None:
        sizes, fix = (self.query_size, self.key_size), f"use score=Bilinear({q.shape[-1]}, {k.shape[-1]})."
        check_sizes(f"Bilinear{sizes}", q, k, sizes, fix)

    def extra_repr(self) -> str:
        scale = "" if self.scale == 1.0 else f", scale={self.scale}"
        return f"query_size={self.query_size}, key_size={self.key_size}{scale}"
