"""Sums of matrices with factors, lazy: ``A - 0.3 * B``, ``A + A.mT``, a mean over heads or layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attlas.engine.dropout import Dropout
from attlas.engine.outputs import MISSING
from attlas.engine.problem import spread_heads
from attlas.engine.statistic import Statistic
from attlas.errors import BackendError, public
from attlas.foundation.checks import holds_numbers
from attlas.foundation.compat import cached_property
from attlas.masks.base import Mask
from attlas.matrix.gradient import WeightGradient
from attlas.matrix.sweep import SweptWeights, each_once, is_sum
from attlas.matrix.weights import Weights, check_kind

# One number for all weights, or a tensor of shape (batch or 1, heads or 1, m or 1, n or 1), in which at most one of the
# last two sizes is above 1.
Factor: TypeAlias = float | Tensor


class Term(NamedTuple):
    """A matrix in a sum: its factor, its weights, and whether they are transposed."""

    factor: Factor
    weights: Weights
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes of the term: batch, heads, queries, keys."""
        batch, heads, m, n = self.weights.shape
        return (batch, heads, n, m) if self.transposed else self.weights.shape

    @property
    def is_of_heads(self) -> bool:
        """Whether the factor is one number a head, or one for all."""
        return not isinstance(self.factor, Tensor) or tuple(self.factor.shape[2:]) == (1, 1)

    def scaled(self, factor: Factor) -> Term:
        """Return the same matrix times another factor: a new tensor, so that the user may change theirs."""
        return self._replace(factor=self.factor * factor)

    def flipped(self) -> Term:
        """Return the transposed term."""
        factor = self.factor.mT if isinstance(self.factor, Tensor) else self.factor
        return Term(factor, self.weights, not self.transposed)

    def product(self, v: Tensor, dropout: Dropout | None) -> Tensor:
        """Return the term times values of shape (batch, value heads, n, e), in at least the precision of sums."""
        of_rows = self.factor
        if isinstance(of_rows, Tensor) and of_rows.shape[3] > 1:  # one for each column: it belongs to the values
            v, of_rows = spread_heads(v, self.shape[1]) * of_rows.mT.to(v.dtype), 1.0
        if not self.transposed:
            out = self.weights.product(v, dropout)
        elif dropout is None:
            out = self.weights.transposed_product(spread_heads(v, self.shape[1]))
        else:
            rule = "dropout acts on the weights of rows, and a matrix of the sum is transposed."
            raise BackendError(rule, "A.mT in the sum", "dropout on each product: A @ v + A.mT @ v")
        return out.to(self.weights.dtype) * of_rows

    def cells(self, rows: range | Tensor, columns: range | Tensor) -> Tensor:
        """Return weights, shape (batch, heads, len(rows), len(columns))."""
        if self.transposed:
            found = self.weights.cells(columns, rows).mT
        else:
            found = self.weights.cells(rows, columns)
        return found * _factor_of_block(self.factor, rows, columns)

    def part(self, batches: Any, heads: Any, rows: range | None, columns: range | None) -> Term:
        """Return the term of some batches, heads, queries and keys; None stands for all of an axis."""
        sides = (columns, rows) if self.transposed else (rows, columns)
        factor = self.factor
        if isinstance(factor, Tensor):
            for axis, some in enumerate((batches, heads)):
                if some is not None and factor.shape[axis] > 1:
                    factor = factor[(slice(None),) * axis + (some,)]
            every = [range(size) for size in self.shape[2:]]
            factor = _factor_of_block(
                factor, *(own if some is None else some for own, some in zip(every, (rows, columns), strict=True))
            )
        return Term(factor, self.weights.part(batches, heads, *sides), self.transposed)


def _factor_of_block(factor: Factor, rows: range | Tensor, columns: range | Tensor) -> Factor:
    """Return the factor of some rows and columns."""
    if not isinstance(factor, Tensor):
        return factor
    for axis, some in ((2, rows), (3, columns)):
        if factor.shape[axis] > 1:
            if isinstance(some, range):
                factor = factor.narrow(axis, some.start, len(some))
            else:
                factor = factor.index_select(axis, some.to(factor.device))
    return factor


class Combination(SweptWeights):
    """A sum of matrices of one shape, each times a factor.

    Parameters
    ----------
    terms : sequence of Term
        The matrices; those that are sums themselves are taken apart.
    whole : WeightGradient, optional
        The gradient of the weights that these are a part of.

    Notes
    -----
    Products, transposed products, cells and sums are those of the terms. A statistic that adds up weights is computed
    of each term, by its own kernels, and added up. Others see tiles, to which each term brings its own.
    """

    def __init__(self, terms: Sequence[Term], whole: WeightGradient | None = None) -> None:
        self.terms = tuple(own for term in terms for own in _flattened_terms(term))
        first = self.terms[0]
        self.shape = first.shape
        self.dtype = reduce(torch.promote_types, (term.weights.dtype for term in self.terms))
        self.device = first.weights.device
        sides = first.weights.queries, first.weights.keys
        self.queries, self.keys = sides[::-1] if first.transposed else sides
        self.key_heads = self.keys.shape[1]
        self.batch_ids, self.head_ids = first.weights.batch_ids, first.weights.head_ids
        self._whole = whole

    def to_dict(self) -> dict[str, Any]:
        return {"terms": [list(term) for term in self.terms]}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Combination:
        # The weights of settings that a file has; a ValueError where they do not fit together.
        terms = [Term(*term) for term in settings["terms"]]
        for term in terms:
            check_kind("a term", term.weights, Weights)
            check_kind("transposed", term.transposed, bool)
            check_kind("a factor", term.factor, int | float | Tensor)
            own = term.factor.shape if isinstance(term.factor, Tensor) else (1, 1, 1, 1)
            fits = len(own) == 4 and all(size in (1, whole) for size, whole in zip(own, term.shape, strict=True))
            if term.shape != terms[0].shape or not fits or (own[2] > 1 and own[3] > 1):
                raise ValueError(f"a term of shape {term.shape}, a factor of shape {tuple(own)}")
        return cls(terms)

    # ---------------------------------------------------------------------------------------------------------- facts

    @property
    def _factor_tensors(self) -> list[Tensor]:
        """The factors of terms that are tensors, and may get a gradient."""
        return [term.factor for term in self.terms if isinstance(term.factor, Tensor)]

    @property
    def inputs(self) -> list[Tensor]:
        return each_once([*self._factor_tensors, *(t for term in self.terms for t in term.weights.inputs)])

    @property
    def requires_grad(self) -> bool:
        return any(t.requires_grad for t in self._factor_tensors) or any(t.weights.requires_grad for t in self.terms)

    @property
    def needs_graph(self) -> bool:
        of_factors = torch.is_grad_enabled() and any(t.requires_grad for t in self._factor_tensors)
        return of_factors or any(term.weights.needs_graph for term in self.terms)

    @property
    def is_symbolic(self) -> bool:
        return any(term.weights.is_symbolic for term in self.terms)

    @cached_property
    def mask(self) -> Mask | None:  # type: ignore[override]  # computed here
        """The mask that all terms have; None where theirs differ, or a term is transposed."""
        masks = [None if term.transposed else term.weights.mask for term in self.terms]
        return masks[0] if all(_are_equal(masks[0], mask) for mask in masks[1:]) else None

    @cached_property
    def _negativity_and_largest_sum(self) -> tuple[bool, float | None]:
        """Whether a weight may be negative; if none is, also the sum of the largest factor of each term, else None."""
        numbers = [_least_and_largest(term.factor) for term in self.terms]
        of_terms = any(term.weights.are_signed for term in self.terms)
        if of_terms or any(low is None or low < 0 for low, _ in numbers):
            return True, None
        return False, sum(high for _, high in numbers if high is not None)

    @cached_property
    def are_signed(self) -> bool:  # type: ignore[override]  # computed here
        """Whether a weight may be negative."""
        return self._negativity_and_largest_sum[0]

    @cached_property
    def are_shares(self) -> bool:  # type: ignore[override]  # computed here
        """Whether the rows are distributions, or parts of one: a mean of matrices is."""
        total = self._negativity_and_largest_sum[1]
        rows = all(term.weights.are_shares and not term.transposed for term in self.terms)
        return rows and total is not None and total <= 1 + 1e-6

    @property
    def counts_other_keys(self) -> bool:  # type: ignore[override]  # computed here
        """Whether the rows of a term are parts of longer ones."""
        return any(term.weights.counts_other_keys for term in self.terms)

    def check_unchanged(self) -> None:
        for term in self.terms:
            term.weights.check_unchanged()

    def check_numbers(self) -> None:
        for term in self.terms:
            term.weights.check_numbers()

    @property
    def description(self) -> str:
        # The first three terms, as text.
        most = 3
        texts = [_term_text(term, first=number == 0) for number, term in enumerate(self.terms[:most])]
        more = f" + {len(self.terms) - most} more" if len(self.terms) > most else ""
        return "".join(texts) + more

    def rows_with_keys(self) -> Tensor | None:
        found = [None if term.transposed else term.weights.rows_with_keys() for term in self.terms]
        known = [rows for rows in found if rows is not None]
        return reduce(torch.logical_or, known) if len(known) == len(found) else None

    # ---------------------------------------------------------------------------------------------------------- verbs

    @public("A @ v")
    def product(self, v: Tensor, dropout: Dropout | None = None) -> Tensor:
        self.check_unchanged()
        out = _sum_of_tensors([term.product(v, dropout) for term in self.terms]).to(v.dtype)
        return self.with_product(out, v, dropout)

    @public("A.mT @ x")
    def transposed_product(self, x: Tensor) -> Tensor:
        # The sum of the products of all terms, each transposed.
        self.check_unchanged()
        x = spread_heads(x, self.shape[1])
        out = _sum_of_tensors([term.flipped().product(x, None) for term in self.terms]).to(x.dtype)
        return self.with_product(out, x, transposed=True)

    @public("A[...]")
    def cells(self, rows: range | Tensor, columns: range | Tensor, *, logits: bool = False) -> Tensor:
        # The sum of the cells of all terms.
        self.check_no_logits(logits)
        self.check_unchanged()
        found = _sum_of_tensors([term.cells(rows, columns) for term in self.terms]).to(self.dtype)
        return self.with_cells(rows, columns, found)

    def defined_cells(self, rows: Tensor) -> Tensor:
        # Some whole rows by the definition; of a transposed term these are columns, of which 64 rows are made at a
        # time.
        found = []
        for term in self.terms:
            n = term.shape[3]
            if term.transposed:
                every = torch.arange(term.weights.shape[2]).split(64)
                own = torch.cat([term.weights.defined_cells(some)[..., rows] for some in every], dim=2).mT
            else:
                own = term.weights.defined_cells(rows)
            factor = _factor_of_block(term.factor, rows, range(n))
            found.append(own * (factor.to(own) if isinstance(factor, Tensor) else factor))
        return _sum_of_tensors(found)

    @public("A.sum()")
    def sums(self, *, over_keys: bool) -> Tensor:
        # Sums of weights need no cells where each factor is one number, or one for each head.
        if all(term.is_of_heads for term in self.terms):
            sums = (term.weights.sums(over_keys=over_keys is not term.transposed) * term.factor for term in self.terms)
            return _sum_of_tensors(list(sums)).to(self.dtype)
        return super().sums(over_keys=over_keys)

    def without_sweep(self, statistic: Statistic) -> Any:
        """Return the sum of the results of all terms for a statistic that is linear in the weights.

        MISSING for others.
        """
        found = super().without_sweep(statistic)
        if found is not MISSING or not all(term.is_of_heads and not term.transposed for term in self.terms):
            return found
        # A mean over allowed cells adds up only where the same cells are allowed.
        one_mask = self.mask is not None or all(term.weights.mask is None for term in self.terms)
        if not (is_sum(statistic) or (statistic.is_mean and one_mask and statistic.describes("outputs"))):
            return MISSING
        results = [term.weights.collect([statistic])[0] for term in self.terms]
        return _sum_of_tensors(
            [_times_head_factor(result, term.factor) for result, term in zip(results, self.terms, strict=True)]
        )

    # ----------------------------------------------------------------------------------------------- parts and copies

    def part(
        self,
        batches: Tensor | slice | None = None,
        heads: Tensor | slice | None = None,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Combination:
        # The same combination of the parts of its terms.
        if batches is None and heads is None and rows is None and columns is None:
            return self
        whole = self.gradient if self.requires_grad else None
        return Combination([term.part(batches, heads, rows, columns) for term in self.terms], whole)

    def detach(self) -> Combination:
        if not self.requires_grad:
            return self
        return Combination(
            [Term(_factor_without_graph(t.factor), t.weights.detach(), t.transposed) for t in self.terms]
        )

    def full_precision(self) -> Combination:
        # The same combination of matrices in full precision; itself where they are so.
        terms = [term._replace(weights=term.weights.full_precision()) for term in self.terms]
        if all(new.weights is old.weights for new, old in zip(terms, self.terms, strict=True)):
            return self
        return Combination(terms, self.gradient if self.requires_grad else None)

    def moved(self, device: torch.device, dtype: torch.dtype | None) -> Combination | None:
        # None where one of its matrices cannot be moved.
        terms = []
        for term in self.terms:
            weights = term.weights.moved(device, dtype)
            if weights is None:
                return None
            factor = term.factor.to(device, dtype) if isinstance(term.factor, Tensor) else term.factor
            terms.append(Term(factor, weights, term.transposed))
        return Combination(terms)


def _flattened_terms(term: Term) -> list[Term]:
    """Return the terms of a sum in a sum, so that sums do not nest."""
    if not isinstance(term.weights, Combination):
        return [term]
    inner = term.weights.terms
    outer = term.factor
    if not all(one.is_of_heads for one in inner) and not term.is_of_heads:
        return [term]  # a product of a factor for each row and one for each key is none of the two
    return [(one.flipped() if term.transposed else one).scaled(outer) for one in inner]


def _sum_of_tensors(tensors: list[Tensor]) -> Tensor:
    """Return the sum of several tensors."""
    return reduce(torch.add, tensors)


def _times_head_factor(result: Tensor, factor: Factor) -> Tensor:
    """Return the result of a statistic, axes (batch, heads, ...), times one factor a head."""
    if not isinstance(factor, Tensor):
        return result * factor
    return result * factor.reshape(*factor.shape[:2], *(1,) * (result.ndim - 2))


def _factor_without_graph(factor: Factor) -> Factor:
    """Return a factor without a graph."""
    return factor.detach() if isinstance(factor, Tensor) else factor


def _term_text(term: Term, *, first: bool) -> str:
    """Return a term as it stands in a sum: ``[score=ScaledDot]``, and after others `` - 0.3 * [score=ScaledDot]``."""
    factor, name = term.factor, f"[{term.weights.description}]{'.mT' * term.transposed}"
    if isinstance(factor, Tensor):
        return f"{'' if first else ' + '}factors * {name}"
    sign = ("-" if factor < 0 else "") if first else (" - " if factor < 0 else " + ")
    return f"{sign}{'' if abs(factor) == 1.0 else f'{abs(factor):.4g} * '}{name}"


def _least_and_largest(factor: Factor) -> tuple[float | None, float | None]:
    """Return the smallest and the largest number of a factor; twice None where they cannot be read without waiting."""
    if not isinstance(factor, Tensor):
        return factor, factor
    if factor.device.type != "cpu" or factor.requires_grad or not holds_numbers(factor) or not factor.numel():
        return None, None
    return float(factor.amin()), float(factor.amax())


def _are_equal(a: Any, b: Any) -> bool:
    """Return whether two masks, or values in their settings, are the same. No device is asked for numbers."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Mask):
        settings = a.to_dict()
        return settings is not None and _are_equal(settings, b.to_dict())
    if isinstance(a, Tensor):
        return a.device.type == b.device.type == "cpu" and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_are_equal(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    return bool(a == b)
