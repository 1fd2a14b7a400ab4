"""Scores as FlexAttention takes them: tokens of a dot product, and a function of its value and the pair.

A score of places is read in the forms that `Score.bias` gives: a table of distances, numbers of keys and of queries,
and a tensor of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attlas.engine.backends.flex.masks import numbers_of, on_cpu
from attlas.engine.backends.flex.places import Kind, OfPair, Untranslatable, code_of, of_ids, reader, whole
from attlas.engine.problem import Problem
from attlas.foundation.devices import to_device
from attlas.foundation.tiles import Tile
from attlas.scores.base import Dot, Scaled, ScaledByTensor, Score, Sum
from attlas.scores.bias import Bias, scaled
from attlas.scores.dot import SoftCap
from attlas.scores.function import ScoreMod

#: A function of the value of a pair and its batch, head, query and key.
OfValue: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Values:
    """A score as a function of the dot product of one pair.

    Parameters
    ----------
    q, k : Tensor, shape (batch, heads, m, d) and (batch, key heads, n, d)
        Tokens of the dot product.
    scale : float
        Its factor.
    change : callable, optional
        What is done to the scaled dot product; None for nothing.
    kind : tuple
        What that is made of.
    row : Tensor, optional, shape (batch, heads, m)
        A constant of each query that is missing; the log-sum-exp counts it.
    """

    q: Tensor
    k: Tensor
    scale: float
    change: OfValue | None
    kind: Kind
    row: Tensor | None

    def then(self, f: OfValue, kind: Kind) -> Values:
        """Return this score followed by a function `f` of its value and the pair.

        The constant per query is added before `f`.
        """
        first, own = self.change, self.kind
        if self.row is not None:
            first, own = self._with_row(self.row)
        if first is None:
            return replace(self, change=f, kind=(*own, kind), row=None)
        inner = first
        changed = lambda s, b, h, i, j: f(inner(s, b, h, i, j), b, h, i, j)  # noqa: E731
        return replace(self, change=changed, kind=(*own, kind), row=None)

    def _with_row(self, row: Tensor) -> tuple[OfValue, Kind]:
        """Return `change` followed by the addition of a constant per query, as a function and its kind."""
        (read, kind), first = reader(row), self.change
        if first is None:
            return lambda s, b, h, i, j: s + read(b, h, i), ("row", kind)
        return lambda s, b, h, i, j: first(s, b, h, i, j) + read(b, h, i), (*self.kind, "row", kind)


def values_of(score: Score, q: Any, k: Any, problem: Problem) -> Values:
    """Return a score as a function of the dot product of one pair.

    Parameters
    ----------
    score : Score
        The score of the problem, or a part of it.
    q, k : Tokens
        Its projected queries and keys, in its own form.
    problem : Problem
        The matrix.

    Raises
    ------
    Untranslatable
        If the score is no function of a dot product of its tokens.
    """
    dot = score.as_dot(q, k)
    if dot is not None:
        return _translate_dot(dot, problem)
    if type(score) is Sum and score.left.positional != score.right.positional:
        side, part, places = (1, score.right, score.left) if score.left.positional else (0, score.left, score.right)
        return _values_plus_biases(values_of(part, q[side], k[side], problem), places, problem)
    if type(score) not in _TRANSLATORS:
        raise Untranslatable(f"the score {type(score).__name__} is no function of a dot product of its tokens")
    inner: Score = score.inner  # type: ignore[assignment]  # each of them has one
    f, kind = _TRANSLATORS[type(score)](score, problem)
    return values_of(inner, q, k, problem).then(f, (kind, inner.finite))


def _translate_dot(dot: Dot, problem: Problem) -> Values:
    """Translate a dot product: first its soft cap, then its positional bias."""
    found = Values(dot.q, dot.k, float(dot.scale), None, (), dot.row)
    if dot.cap:
        cap = dot.cap
        found = found.then(lambda s, b, h, i, j: cap * torch.tanh(s / cap), ("cap",))
    if dot.bias is None:
        return found
    row, found = found.row, replace(found, row=None)  # softmax does not see it: it need not be added to each pair
    return replace(_values_plus_biases(found, dot.bias, problem), row=row)


def _values_plus_biases(values: Values, places: Score, problem: Problem) -> Values:
    """Add a positional score to a score, one table after the other."""
    for bias in _biases_of_score(places, whole(problem)):
        added, kind = _bias_of_pair(bias, problem)
        values = values.then(_value_plus(added), kind)
    return values


def _value_plus(added: OfPair) -> OfValue:
    """Return a function that adds the number of a pair to its value."""
    return lambda s, b, h, i, j: s + added(b, h, i, j)


def _biases_of_score(score: Score, at: Tile) -> list[Bias]:
    """Return a positional score as a list of tables that fused kernels read."""
    found = score.bias(at)
    if found is not None:
        return [found]
    if type(score) is Sum:
        return _biases_of_score(score.left, at) + _biases_of_score(score.right, at)
    if type(score) is Scaled:
        terms = [scaled(term, score.factor) for term in _biases_of_score(score.inner, at)]
        return [term for term in terms if term is not None]
    raise Untranslatable(f"{type(score).__name__} adds numbers of places that have no table")


def _bias_of_pair(bias: Bias, problem: Problem) -> tuple[OfPair, Kind]:
    """Return the function of a pair that reads all tables of a bias and adds them up."""
    terms: list[OfPair] = []
    kinds: list[object] = []
    device, dtype, last = problem.device, problem.dtype, problem.shape[2] - 1
    if bias.distance is not None:
        distance, kind = reader(to_device(bias.distance, device))  # its first number is that of j - i = -last
        terms.append(lambda b, h, i, j: distance(b, h, j - i + last))
        kinds += ["distance", kind]
    if bias.query is not None and bias.key is not None:
        # Their sum may be small where both are large.
        (query, kind), (key, of_key) = (reader(to_device(t, device, torch.float64)) for t in (bias.query, bias.key))
        terms.append(lambda b, h, i, j: (query(b, h, i) + key(b, h, j)).to(dtype))
        kinds += ["tokens", kind, of_key]
    elif bias.query is not None:
        query, kind = reader(to_device(bias.query, device, dtype))
        terms.append(lambda b, h, i, j: query(b, h, i))
        kinds += ["query", kind]
    elif bias.key is not None:
        key, kind = reader(to_device(bias.key, device, dtype))
        terms.append(lambda b, h, i, j: key(b, h, j))
        kinds += ["key", kind]
    if bias.cell is not None:
        factor = bias.factor
        cell, kind = reader(to_device(bias.cell, device, dtype))
        terms.append(lambda b, h, i, j: cell(b, h, i, j) * factor)
        kinds += ["cell", kind]

    def added(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return the sum of all terms for one pair."""
        total = terms[0](b, h, i, j)
        for number in range(1, len(terms)):
            total = total + terms[number](b, h, i, j)
        return total

    if not terms:
        raise Untranslatable("a score of places adds nothing that has a table")
    return added, tuple(kinds)


# ------------------------------------------------------------------------------------- scores made of another one


def _translate_multiple(score: Scaled, problem: Problem) -> tuple[OfValue, Kind]:
    """Translate a score times a number; -inf stays -inf also where the number is not positive."""
    factor = score.factor
    if score.inner.finite or factor > 0:
        return lambda s, b, h, i, j: s * factor, ("times",)
    return _where_allowed(lambda s, h: s * factor), ("times, allowed",)


def _translate_head_multiple(score: ScaledByTensor, problem: Problem) -> tuple[OfValue, Kind]:
    """Translate a score times a learned number per head."""
    factors = score.factor.reshape(-1)
    read, kind = reader(to_device(of_ids(factors, 0, problem.head_ids), problem.device, problem.dtype))
    if score.inner.finite:
        return lambda s, b, h, i, j: s * read(h), ("times tensor", kind)
    return _where_allowed(lambda s, h: s * read(h)), ("times tensor, allowed", kind)


def _translate_soft_cap(score: SoftCap, problem: Problem) -> tuple[OfValue, Kind]:
    """Translate a soft cap, ``cap * tanh(s / cap)``; -inf stays -inf."""
    cap = score.cap
    if score.inner.finite:
        return lambda s, b, h, i, j: cap * torch.tanh(s / cap), ("cap",)
    return _where_allowed(lambda s, h: cap * torch.tanh(s / cap)), ("cap, allowed",)


def _where_allowed(f: Callable[[Tensor, Tensor], Tensor]) -> OfValue:
    """Return a function of values that leaves -inf as it is, and gives it no part in a gradient."""

    def change(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        forbidden = s == -math.inf
        return torch.where(forbidden, s, f(torch.where(forbidden, torch.zeros_like(s), s), h))

    return change


def _translate_score_mod(score: ScoreMod, problem: Problem) -> tuple[OfValue, Kind]:
    """Translate a ``score_mod`` of the user."""
    f = score.score_mod
    numbers = numbers_of(on_cpu(whole(problem)), problem.device)

    def change(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        changed: Any = f(s, *numbers(b, h), i, j)
        return changed if isinstance(changed, Tensor) else torch.full_like(s, changed)

    return change, ("function", code_of(f))


_TRANSLATORS: dict[type[Score], Callable[[Any, Problem], tuple[OfValue, Kind]]] = {
    Scaled: _translate_multiple,
    ScaledByTensor: _translate_head_multiple,
    SoftCap: _translate_soft_cap,
    ScoreMod: _translate_score_mod,
}
