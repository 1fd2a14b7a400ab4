"""From a product and its steps to an attention matrix: scale, cap, biases and masks where it is that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from attlas.foundation.tiles import cut
from attlas.masks import Mask, from_tensor
from attlas.matrix.attend import attend
from attlas.matrix.handwritten.scope import current, left
from attlas.matrix.handwritten.state import State
from attlas.matrix.handwritten.steps import Step, StepScore
from attlas.matrix.matrix import AttentionMatrix
from attlas.scores import ScaledDot, Score, SoftCap, TensorBias

_CELLS_AT_ONCE = 1 << 22  # cells that are computed at once to find the largest of each row
# exp of a logit that is this far below another one of its row is 0 in float32.
_UNDERFLOW_DISTANCE = 110.0
# A number below this is a mask whatever the tokens are.
_SURELY_MASK = -1e30
# A number above this may be a bias.
_MAYBE_MASK = -1e3
# Up to here a number that is the same for a whole row changes no weight by more than rounding.
_LARGEST_SHIFT = 1e4


def matrix_of(state: State, *, as_computed: bool = False) -> AttentionMatrix | None:
    """Return the matrix of weights of some logits; None where only all numbers give it.

    Parameters
    ----------
    state : State
        The logits.
    as_computed : bool, default False
        Whether its logits must be those that the model computes; by default, weights are enough.

    Notes
    -----
    A number that is added or filled in counts as a mask where it makes the weight exactly 0, by the lengths of queries
    and keys. Where a row has nothing but such numbers, every step is computed tile by tile, so that its weights are
    those that the model computes.
    """
    with left():
        q, k = state.tokens()
        hidden = [place for place, step in enumerate(state.steps) if step.kind == "hide"]
        if not as_computed:
            folded = Folded(q, k)
            if all(folded.take(step) for step in state.steps):
                made = folded.score_and_mask()
                if made is not None:
                    return attend(folded.q, folded.k, score=made[0], mask=made[1])
        elif hidden:
            return None
        if hidden and not all(map(_keeps_hidden, state.steps[hidden[0] :])):
            return None  # what a mask hides may be seen again
        masks = [step.mask for step in state.steps if step.kind == "hide" and step.mask is not None]
        k = k if k.shape[1] == q.shape[1] else k.expand(-1, q.shape[1], -1, -1)
        matrix = attend(q, k, score=StepScore.of(state.steps), mask=_conjunction(masks))
        return matrix if as_computed or not _may_swallow(state.steps) else _with_row_maxima_zero(matrix, state.steps)


def _may_swallow(steps: Sequence[Step]) -> bool:
    """Return whether a step adds numbers so large that logits are rounded away beside them.

    Masks do so in a row without a key.
    """
    numbers = (abs(number) for step in steps for number in step.numbers if number is not None)
    tensors = (t for step in steps if step.kind == "add" for t in step.tensors)
    return any(x > -_MAYBE_MASK for x in numbers) or any(bool(t.detach().abs().amax() > -_MAYBE_MASK) for t in tensors)


@torch.no_grad()
def largest_of_rows(matrix: AttentionMatrix) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row and its key, each (batch, heads, m), some rows at a time."""
    batch, heads, m, n = matrix.weights.shape
    found = [
        matrix.weights.cells(part, range(n), logits=True).max(dim=-1)
        for part in cut(m, max(_CELLS_AT_ONCE // (batch * heads * n), 1))
    ]
    return torch.cat([part.values for part in found], dim=-1), torch.cat([part.indices for part in found], dim=-1)


def _with_row_maxima_zero(matrix: AttentionMatrix, steps: Sequence[Step]) -> AttentionMatrix:
    """Return the same weights of logits whose largest in each row is 0.

    The log-sum-exp of a row, by which weights are computed again, would be rounded to its largest logit otherwise.
    """
    largest = largest_of_rows(matrix)[0].unsqueeze(-1)
    shift = Step("add", (largest.masked_fill(largest == -math.inf, 0.0),), (-1.0,))
    return attend(matrix.q, matrix.k, score=StepScore.of([*steps, shift]), mask=matrix.mask)


def _keeps_hidden(step: Step) -> bool:
    """Return whether what was hidden before a step is hidden after it."""
    if step.kind in ("fill", "keep"):
        return (step.numbers[0] or 0.0) <= 10 * _MAYBE_MASK
    return step.kind in ("hide", "add", "shift", "cast")


def _conjunction(masks: list[Mask]) -> Mask | None:
    """Return the mask of what all masks allow; None for no mask."""
    return reduce(lambda a, b: a & b, masks) if masks else None


class _BiasFacts(NamedTuple):
    """What is known of a tensor that is added to logits.

    Parameters
    ----------
    whole : Tensor
        The tensor, times its factor.
    cut : float
        Numbers up to this one are taken for a mask.
    hidden : Tensor or None
        Where they are; None where there are none.
    rest : Tensor or None
        The tensor with 0 in their places; None where nothing else is left.
    largest : float
        The largest absolute number in `rest`.
    """

    whole: Tensor
    cut: float
    hidden: Tensor | None
    rest: Tensor | None
    largest: float

    def hides_below(self, limit: float) -> bool:
        """Return whether its mask gives weights of 0 beside logits of at most `limit`; True where it has none."""
        return self.hidden is None or self.cut <= _SURELY_MASK or self.cut < -2.0 * limit - _UNDERFLOW_DISTANCE

    def as_bias(self) -> _BiasFacts:
        """Return it as numbers that hide nothing."""
        largest = float(self.whole.detach().abs().amax()) if self.whole.numel() else 0.0
        return self._replace(hidden=None, rest=self.whole, largest=largest)


class Folded:
    """Steps, put together as ``cap * tanh(scale * q k / cap) + biases``, with masks.

    `biases` are tensors that are added, with their factors; `fills` are (where, number, whether it is filled in where
    False); `bounds` are those of clamps. `shifted` says that a number was added to whole rows, which softmax does not
    see.

    Parameters
    ----------
    q, k : Tensor, shape (batch, heads, m, d) and (batch, heads or 1, n, d)
        Queries and keys.
    """

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.q, self.k = q, k
        self.scale, self.cap = 1.0, 0.0
        self.biases: list[tuple[Tensor, float]] = []
        self.fills: list[tuple[Tensor, float, bool]] = []
        self.masks: list[Mask] = []
        self.shifted = False
        self.bounds: list[tuple[float | None, float | None]] = []

    @property
    def is_product(self) -> bool:
        """Whether nothing was added or hidden so far, and nothing bounded."""
        return not (self.biases or self.fills or self.masks or self.shifted or self.bounds or self.cap)

    def take(self, step: Step) -> bool:
        """Take one step into account; False where `Folded` cannot hold it."""
        match step.kind:
            case "cast":
                return True
            case "scale":
                return self._multiply_by(step.numbers[0] or 0.0)
            case "divide_by_number":
                return self._multiply_by(1.0 / (step.numbers[0] or math.nan))  # there is one, and it is not 0
            case "multiply" | "divide":
                return self._times_tensor(step.tensors[0], inverse=step.kind == "divide")
            case "shift":
                self.shifted = True
                return abs(step.numbers[0] or 0.0) <= _LARGEST_SHIFT
            case "add":
                return self._add_bias(step.tensors[0], step.numbers[0] or 0.0)
            case "hide":
                self.masks += [] if step.mask is None else [step.mask]
                return True
            case "fill" | "keep":
                self.fills.append((step.tensors[0], step.numbers[0] or 0.0, step.kind == "keep"))
                return True
            case "tanh":
                fits, self.cap = self.is_product, 1.0
                return fits
            case "clamp":
                self.bounds.append((step.numbers[0], step.numbers[1]))
                return True
        return False

    def _multiply_by(self, factor: float) -> bool:
        """Multiply everything so far by a number; False where the form cannot hold that."""
        if not math.isfinite(factor) or factor == 0.0 or (factor < 0.0 and not self.is_product) or self.bounds:
            return False
        self.biases = [(t, own * factor) for t, own in self.biases]
        self.fills = [(t, value * factor, keeps) for t, value, keeps in self.fills]
        if self.cap:
            self.cap *= factor
        else:
            self.scale *= factor
        return self.cap >= 0.0  # a soft cap is above 0

    def _times_tensor(self, t: Tensor, *, inverse: bool) -> bool:
        """Multiply by a number for each query or each key; False where the form cannot hold that."""
        if not self.is_product or (t.shape[-1] != 1 and t.shape[-2] != 1):
            return False
        of_queries = t.shape[-1] == 1
        factor = (t if of_queries else t.mT).to(self.q.dtype)
        if of_queries:
            self.q = self.q / factor if inverse else self.q * factor
        else:
            self.k = self.k / factor if inverse else self.k * factor
            if self.k.shape[1] not in (1, self.q.shape[1]):
                return False
        return True

    def _add_bias(self, t: Tensor, factor: float) -> bool:
        """Add a tensor as a bias; one that is the same for a whole row is left out.

        False where the form cannot hold it.
        """
        if t.shape[-1] == 1 and t.numel() and self.k.shape[-2] > 1:  # softmax does not see what a whole row shares
            self.shifted = True
            return bool(t.detach().abs().amax() <= _LARGEST_SHIFT) and not t.requires_grad
        dtype = torch.promote_types(t.dtype, torch.float32) if t.dtype is not torch.float64 else self.q.dtype
        self.biases.append((t.to(dtype) if not t.is_floating_point() or t.dtype is torch.float64 else t, factor))
        return math.isfinite(factor) and factor != 0.0

    # ------------------------------------------------------------------------------------------------ what comes of it

    def score_and_mask(self) -> tuple[Score, Mask | None] | None:
        """Return the score and the mask; None where only all steps give the weights."""
        score: Score = SoftCap(ScaledDot(self.scale * self.cap), self.cap) if self.cap else ScaledDot(self.scale)
        if self.is_product:
            return score, None
        facts = [_mask_and_bias_of(t, factor) for t, factor in self.biases]
        floors = [low for low, _ in self.bounds if low is not None]
        ceilings = [high for _, high in self.bounds if high is not None]
        # Numbers that hide a key only if they are far below each logit of its row.
        weak = [
            *floors,
            *(value for _, value, _ in self.fills),
            *(fact.cut for fact in facts if fact.hidden is not None),
        ]
        if ceilings or any(value > _SURELY_MASK for value in weak):
            # What surely gives a weight of 0 beside any logit of the row; a bias that does not stays a bias.
            limit = self._largest_logit() + sum(fact.largest for fact in facts)
            facts = [fact if fact.hides_below(limit) else fact.as_bias() for fact in facts]
            limit = self._largest_logit() + sum(fact.largest for fact in facts)
            weakest = max([*floors, *(value for _, value, _ in self.fills)], default=-math.inf)
            if not (math.isfinite(limit) and weakest < -2.0 * limit - _UNDERFLOW_DISTANCE):
                return None
            if any(high < limit for high in ceilings) or not all(fact.hides_below(limit) for fact in facts):
                return None
        return self._score_and_mask(score, facts)

    def _largest_logit(self) -> float:
        """Return a number that no product of queries and keys exceeds."""
        if self.cap:
            return self.cap
        q, k = (
            torch.linalg.vector_norm(t.detach().to(torch.promote_types(t.dtype, torch.float32)), dim=-1).amax()
            for t in (self.q, self.k)
        )
        return float(q * k) * abs(self.scale)

    def _score_and_mask(self, score: Score, facts: list[_BiasFacts]) -> tuple[Score, Mask | None] | None:
        """Return score and mask; None where a row sees no key at all."""
        hidden = [(fact.hidden, False) for fact in facts if fact.hidden is not None]
        hidden += [(t, keeps) for t, _, keeps in self.fills]
        masks = list(self.masks)
        if hidden:
            mask = _mask_of_unhidden(hidden)
            if mask is None:
                return None
            masks.append(mask)
        for fact in facts:
            if fact.rest is not None:
                score = score + TensorBias(fact.rest)
        return score, _conjunction(masks)


def _mask_and_bias_of(t: Tensor, factor: float) -> _BiasFacts:
    """Split ``factor * t``, which is added to logits, into a mask and a bias; remembered, as layers share it."""
    if t.requires_grad:
        scaled = t if factor == 1.0 else t * factor
        return _BiasFacts(scaled, -math.inf, None, scaled, 0.0).as_bias()
    scope = current()
    if scope is None:
        return _split_bias(t, factor)
    found: _BiasFacts = scope.known((t,), ("bias", factor), lambda: _split_bias(t, factor))
    return found


@torch.no_grad()
def _split_bias(t: Tensor, factor: float) -> _BiasFacts:
    """Split a tensor that is added to logits into what hides keys (very negative numbers) and the rest.

    They are the tensor times its factor, the bound up to which numbers hide, where they hide, the rest, and its largest
    absolute value. A tensor with NaN hides nothing.
    """
    scaled = t if factor == 1.0 else t * factor
    lowest, highest = (float(x) for x in torch.aminmax(scaled)) if t.numel() else (0.0, 0.0)
    if lowest >= _MAYBE_MASK or math.isnan(lowest):  # no number is low enough for a mask
        return _BiasFacts(scaled, -math.inf, None, scaled if lowest or highest else None, max(-lowest, highest))
    # What hides is below half of the lowest number, and surely what is below `_SURELY_MASK`.
    cut = max(lowest / 2, _SURELY_MASK)
    hidden = scaled <= cut
    rest = scaled.masked_fill(hidden, 0.0)
    largest = float(rest.abs().amax())
    return _BiasFacts(scaled, cut, hidden, rest if largest else None, largest)


def _mask_of_unhidden(hidden: list[tuple[Tensor, bool]]) -> Mask | None:
    """Return the mask of what none of some tensors hides, by its True or by its False; None for a row without a key."""

    def find() -> Mask | None:
        allowed = reduce(lambda a, b: a & b, [t if keeps else ~t for t, keeps in hidden])
        return from_tensor(allowed) if bool(allowed.any(-1).all()) else None

    scope = current()
    tensors, keeps = zip(*hidden, strict=True)
    found: Mask | None = find() if scope is None else scope.known(tensors, ("hidden", keeps), find)
    return found
