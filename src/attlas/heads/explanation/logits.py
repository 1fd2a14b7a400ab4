"""A logit as a factor times the dot product of a query and a key, plus what its score and mask add."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.errors import OutOfRangeError, RecordingError
from attlas.matrix import AttentionMatrix
from attlas.recording.atlas import Entry
from attlas.scores.base import Dot


class Terms(NamedTuple):
    """What one logit is made of.

    Parameters
    ----------
    logit : float
        The logit.
    weight : float
        Its weight.
    factor : float
        What the dot product of query and key is multiplied with: the scale, and the effect of a cap at this cell.
    bias : float, optional
        What is added to it; None where nothing is.
    cap : float
        The cap of the score, 0 for none.
    scale : float
        What the dot product is multiplied with before the cap.
    """

    logit: float
    weight: float
    factor: float
    bias: float | None
    cap: float
    scale: float

    def factors(self, products: Tensor) -> Tensor:
        """Return the factor of each dot product of a query and a key: a cap leaves less of large ones."""
        if not self.cap:
            return torch.full_like(products, self.scale)
        return torch.where(products == 0, self.scale, self._capped(products) / products)

    def change(self, products: Tensor, lost: Tensor) -> Tensor:
        """Return by how much logits change where dot products of queries and keys lose a part of them."""
        if not self.cap:
            return -self.factor * lost.double()
        return self._capped(products - lost.double()) - self._capped(products)

    def _capped(self, products: Tensor) -> Tensor:
        """Return what the cap leaves of scaled dot products."""
        return self.cap * (self.scale * products / self.cap).tanh()


def dot_of(entry: Entry) -> Dot:
    """Return the score of a recorded attention as a dot product.

    Raises
    ------
    RecordingError
        If it is none.
    """
    matrix = entry.need_matrix()
    weights = matrix.weights.softmax
    problem: Any = None if weights is None else weights.problem
    if problem is not None:
        q, k = problem.q[:, :, :0], problem.k[:, :, :0]
        dot: Dot | None = problem.score.as_dot(*problem.score.project(q, k))
        if dot is not None and dot.q.shape[-1] == q.shape[-1] and dot.row is None:
            return dot
    rule = "parts sum to the logits of dot products, as ScaledDot has them, with a cap or a bias."
    found = matrix.weights.description if problem is None else type(problem.score).__name__
    raise RecordingError(rule, found, "choose a layer whose score is a dot product.", layer=entry.path)


def terms_of(A: AttentionMatrix, entry: Entry, dot: Dot, i: int, j: int) -> Terms:
    """Return what the logit of one cell of one head is made of; A has the shape (m, n).

    Raises
    ------
    OutOfRangeError
        If there is no such cell, or the query may not see the key.
    """
    logit = float(A.logits[i, j])
    if logit == -torch.inf:
        rule, found = "the query must be allowed to see the key.", f"query {i}, key {j}: hidden by the mask"
        raise OutOfRangeError(rule, found, f"cell=({max(i, j)}, {min(i, j)}), or a key that the mask allows.")
    problem = A.softmax_weights.problem
    product = problem.q[0, 0, i].double() @ problem.k[0, 0, j].double()
    terms = Terms(logit, float(A[i, j]), dot.scale, None, dot.cap, dot.scale)
    factor = float(terms.factors(product))
    bias = logit - factor * float(product) if adds_to_products(A, dot) else None
    return terms._replace(factor=factor, bias=bias)


def adds_to_products(A: AttentionMatrix, dot: Dot) -> bool:
    """Return whether the score or the mask adds something to the products of queries and keys."""
    mask = A.mask
    return dot.bias is not None or (mask is not None and bool(mask.log_weights()))


def check_sum(A: AttentionMatrix, remainder: float, table: Tensor, i: Tensor, j: Tensor, scale: float) -> None:
    """Raise an error where parts do not sum to what was recorded: nobody reads a table that explains something else.

    Parameters
    ----------
    A : AttentionMatrix, shape (m, n)
        The head.
    remainder : float
        What is left of the logit.
    table : Tensor
        The terms.
    i, j : Tensor of int
        Queries and keys that were explained.
    scale : float
        Factor of their products.

    Raises
    ------
    RecordingError
        If more is left than rounding leaves.
    """
    problem = A.softmax_weights.problem
    lengths = (problem.q[0, 0, i].float().norm(dim=-1).mean(), problem.k[0, 0, j].float().norm(dim=-1).max())
    size = max(abs(scale) * float(lengths[0] * lengths[1]), float(table.abs().max()))
    if abs(remainder) > (5e-2 if problem.q.element_size() < 4 else 1e-3) * size:
        rule = "parts must sum to the recorded logit, and the weights of the model must be those of the recording."
        found = f"{remainder:.3g} is left of {size:.3g}"
        raise RecordingError(
            rule, found, "record the model again: its weights have changed since, or its layout is not known."
        )


def allowed_keys(A: AttentionMatrix, i: int) -> Tensor:
    """Return the keys that a query may see, shape (keys,)."""
    return (A.logits[i, :] > -torch.inf).nonzero().flatten()
