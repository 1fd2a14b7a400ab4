"""A score that a function of one pair changes, as FlexAttention takes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attlas.errors import DtypeError, kind
from attlas.foundation.pairwise import TileFunction
from attlas.foundation.tiles import Tile
from attlas.scores.base import Derived, Score
from attlas.scores.dot import ScaledDot

__all__ = ["ScoreMod"]


class ScoreMod(Derived):
    """A score changed by a FlexAttention ``score_mod(score, b, h, i, j)``, as it is.

    ``attend(q, k, score=score_mod)`` makes one of the scaled dot product.

    Parameters
    ----------
    score_mod : callable
        Takes the log-weight of one pair, and its batch, head, query and key as integer tensors, and returns the new
        log-weight; ``-inf`` forbids the pair. Arithmetic, `torch.where` and indexing of tensors work, Python's ``if``,
        ``and`` and ``or`` do not.
    score : Score, optional
        The score that is changed; the default is ``ScaledDot()``.

    Raises
    ------
    DtypeError
        If `score_mod` is no function of five arguments, or `score` no score.
    ShapeError
        At the first tile, if the function fails, or returns a wrong shape.

    Notes
    -----
    Tensors that the function reads are differentiated where they require it, however it holds them: in its closure, in
    an object, in a list, in a function that it calls. `attend` finds them by running it on a few cells. The function is
    called with whole tiles, after a few pairs were compared with `torch.vmap`. Cost: a tile of the scores and what the
    function makes of it; no tile is skipped, so give what is forbidden as a mask beside it.

    References
    ----------
    .. [1] Dong et al., "FlexAttention: a programming model for generating optimized attention kernels", 2024.

    Examples
    --------
    >>> import torch, attlas
    >>> def relative(score, b, h, i, j):
    ...     return score + (j - i)
    >>> q, k = torch.zeros(1, 2, 4), torch.zeros(1, 3, 4)
    >>> attlas.attend(q, k, score=relative).logits.to_dense()
    tensor([[[ 0.,  1.,  2.],
             [-1.,  0.,  1.]]])
    """

    def __init__(self, score_mod: Callable[..., Tensor], score: Score | None = None) -> None:
        if not isinstance(score, Score | None):
            fix = "ScoreMod(score_mod, attlas.ScaledDot())"
            raise DtypeError("score must be an attlas.Score.", kind(score), fix, where="ScoreMod()")
        super().__init__(ScaledDot() if score is None else score)
        # It may look at positions, and forbid pairs.
        self.scratch, self.finite, self.positional, self.position_free = 3, False, False, False
        # A module is registered, so that its parameters are parameters of this score.
        self.module = score_mod if isinstance(score_mod, nn.Module) else None
        self._function = TileFunction(
            score_mod, f"score_mod {_name_of_function(score_mod)}", ("score", "b", "h", "i", "j")
        )

    @property
    def score_mod(self) -> Callable[..., Tensor]:
        """The function."""
        return self._function.f

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        # The function changes a tile of log-weights; it may return one number for all pairs.
        logits = self.inner(q, k, at).expand(at.shape)
        if 0 in at.shape:
            return logits
        changed = self._function(at, logits)
        return changed if isinstance(changed, Tensor) else torch.full_like(logits, changed)

    def extra_repr(self) -> str:
        return _name_of_function(self.score_mod)


def _name_of_function(function: object) -> str:
    """Return the name of a function; of another callable object that of its class."""
    return str(getattr(function, "__name__", type(function).__name__))
