"""From a product and its steps to an attention matrix: scale, cap, biases and masks where it is that, else all steps."""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attlas.masks import Mask, from_tensor
from attlas.matrix.attend import attend
from attlas.matrix.handwritten.scope import current, left
from attlas.matrix.handwritten.steps import Step, StepScore
from attlas.matrix.matrix import AttentionMatrix
from attlas.scores import ScaledDot, Score, SoftCap, TensorBias

if TYPE_CHECKING:
    from attlas.matrix.handwritten.logits import State

# exp of a logit that is this far below another one of its row is 0 in float32.
_UNDERFLOW = 110.0
# A number below this is a mask whatever the tokens are.
_SURELY_MASK = -1e30
# A number above this may be a bias.
_MAYBE_MASK = -1e3
# Up to here a number that is the same for a whole row changes no weight by more than rounding.
_LARGEST_SHIFT = 1e4


def matrix_of(state: State) -> AttentionMatrix | None:
    """Return the matrix of weights of some logits; None where only all numbers give it.

    Notes
    -----
    A number that is added or filled in counts as a mask where it makes the weight exactly 0, by the lengths of queries
    and keys. Where a row has nothing but such numbers, every step is computed tile by tile, so that its weights are
    those that the model computes.
    """
    with left():
        q, k = state.tokens()
        folded = _Folded(q, k)
        if all(folded.take(step) for step in state.steps):
            made = folded.score_and_mask(state.sizes)
            if made is not None:
                return attend(folded.q, folded.k, score=made[0], mask=made[1])
        hidden = [place for place, step in enumerate(state.steps) if step.kind == "hide"]
        after = state.steps[hidden[0] :] if hidden else ()
        if any(step.kind not in ("hide", "add", "shift", "cast", "fill") for step in after):
            return None  # what a mask hides may be seen again
        masks = [step.mask for step in state.steps if step.kind == "hide" and step.mask is not None]
        mask = reduce(lambda a, b: a & b, masks) if masks else None
        if k.shape[1] != q.shape[1]:
            k = k.expand(-1, q.shape[1], -1, -1)
        return attend(q, k, score=StepScore.of(state.steps), mask=mask)


class _Bias(NamedTuple):
    """What is known of a tensor that is added: its lowest number, what it hides, and what is left."""

    lowest: float
    hidden: Tensor | None
    rest: Tensor | None
    largest: float


class _Folded:
    """Steps, put together as ``cap * tanh(scale * q k / cap) + biases``, with masks.

    Parameters
    ----------
    q, k : Tensor, shape (batch, heads, m, d) and (batch, heads or 1, n, d)
        Queries and keys.
    """

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.q, self.k = q, k
        self.scale, self.cap = 1.0, 0.0
        self.biases: list[tuple[Tensor, float]] = []
        self.fills: list[tuple[Tensor, float]] = []
        self.masks: list[Mask] = []
        self.shifted = False
        self.bounds: list[tuple[float | None, float | None]] = []

    @property
    def is_product(self) -> bool:
        """Whether nothing was added or hidden so far, and nothing bounded."""
        return not (self.biases or self.fills or self.masks or self.shifted or self.bounds or self.cap)

    def take(self, step: Step) -> bool:
        """Take one step into account; False where the form cannot hold it."""
        match step.kind:
            case "cast":
                return True
            case "scale" | "part":
                number = step.numbers[0] or 0.0
                return self._times(1.0 / number if step.kind == "part" and number else number)
            case "multiply" | "divide":
                return self._times_tensor(step.tensors[0], inverse=step.kind == "divide")
            case "shift":
                self.shifted = True
                return abs(step.numbers[0] or 0.0) <= _LARGEST_SHIFT
            case "add":
                return self._plus(step.tensors[0], step.numbers[0] or 0.0)
            case "hide":
                self.masks += [] if step.mask is None else [step.mask]
                return True
            case "fill":
                self.fills.append((step.tensors[0], step.numbers[0] or 0.0))
                return True
            case "tanh":
                fits, self.cap = self.is_product, 1.0
                return fits
            case "clamp":
                self.bounds.append((step.numbers[0], step.numbers[1]))
                return True
        return False

    def _times(self, factor: float) -> bool:
        """Multiply everything with a number."""
        if not math.isfinite(factor) or factor == 0.0 or (factor < 0.0 and not self.is_product) or self.bounds:
            return False
        self.biases = [(t, own * factor) for t, own in self.biases]
        self.fills = [(t, value * factor) for t, value in self.fills]
        if self.cap:
            self.cap *= factor
        else:
            self.scale *= factor
        return self.cap >= 0.0

    def _times_tensor(self, t: Tensor, *, inverse: bool) -> bool:
        """Multiply with a number of each query or of each key."""
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

    def _plus(self, t: Tensor, factor: float) -> bool:
        """Add a tensor."""
        if t.shape[-1] == 1 and t.numel() and self.k.shape[-2] > 1:  # softmax does not see what a whole row shares
            self.shifted = True
            return bool(t.detach().abs().amax() <= _LARGEST_SHIFT) and not t.requires_grad
        dtype = torch.promote_types(t.dtype, torch.float32) if t.dtype is not torch.float64 else self.q.dtype
        self.biases.append((t.to(dtype) if not t.is_floating_point() or t.dtype is torch.float64 else t, factor))
        return math.isfinite(factor) and factor != 0.0

    # ------------------------------------------------------------------------------------------------ what comes of it

    def score_and_mask(self, sizes: tuple[int, int, int, int]) -> tuple[Score, Mask | None] | None:
        """Return the score and the mask; None where only all steps give the weights."""
        score: Score = SoftCap(ScaledDot(self.scale * self.cap), self.cap) if self.cap else ScaledDot(self.scale)
        if self.is_product:
            return score, None
        facts = [_about(t, factor) for t, factor in self.biases]
        values = [value for _, value in self.fills]
        floor = max((low for low, _ in self.bounds if low is not None), default=-math.inf)
        hiding = [*values, *(fact.lowest for fact in facts if fact.hidden is not None)]
        # What a clamp leaves of a hidden number.
        weakest = max([*hiding, floor]) if hiding or floor > -math.inf else -math.inf
        largest = sum(fact.largest for fact in facts)
        needs_bound = weakest > _SURELY_MASK or any(high is not None for _, high in self.bounds)
        bound = self._largest_logit() + largest if needs_bound and weakest > -math.inf or needs_bound else 0.0
        if weakest > -math.inf and weakest > _SURELY_MASK and not weakest < -2.0 * bound - _UNDERFLOW:
            return None
        if any(high is not None and high < bound for _, high in self.bounds) or not math.isfinite(bound):
            return None
        return self._combined(score, facts, sizes)

    def _largest_logit(self) -> float:
        """Return a number that no product of queries and keys exceeds."""
        if self.cap:
            return self.cap
        q, k = (
            torch.linalg.vector_norm(t.detach(), dim=-1, dtype=torch.float32).amax() if t.numel() else t.new_zeros(())
            for t in (self.q, self.k)
        )
        return float(q * k) * abs(self.scale)

    def _combined(
        self, score: Score, facts: list[_Bias], sizes: tuple[int, int, int, int]
    ) -> tuple[Score, Mask | None] | None:
        """Return score and mask; None where a row sees no key at all."""
        hidden = [fact.hidden for fact in facts if fact.hidden is not None] + [t for t, _ in self.fills]
        masks = list(self.masks)
        if hidden:
            mask = _allowed(hidden)
            if mask is None:
                return None
            masks.append(mask)
        for fact in facts:
            if fact.rest is not None:
                score = score + TensorBias(fact.rest)
        return score, reduce(lambda a, b: a & b, masks) if masks else None


def _about(t: Tensor, factor: float) -> _Bias:
    """Return what is known of a tensor times a factor that is added to logits."""
    if t.requires_grad:
        scaled = t if factor == 1.0 else t * factor
        return _Bias(0.0, None, scaled, float(scaled.detach().abs().amax()) if t.numel() else 0.0)
    scope = current()
    return _looked_at(t, factor) if scope is None else scope.known((t,), ("bias", factor), lambda: _looked_at(t, factor))


@torch.no_grad()
def _looked_at(t: Tensor, factor: float) -> _Bias:
    """Return what is known of a tensor without a gradient."""
    scaled = t if factor == 1.0 else t * factor
    lowest, highest = (float(x) for x in torch.aminmax(scaled)) if t.numel() else (0.0, 0.0)
    if lowest >= _MAYBE_MASK or math.isnan(lowest):
        return _Bias(0.0, None, None if lowest == highest == 0.0 else scaled, max(-lowest, highest))
    # Below the half of the lowest number all is mask; its own largest number is the weakest of them.
    cut = max(lowest / 2, _SURELY_MASK) if lowest < 2 * _SURELY_MASK else lowest / 2
    hidden = scaled <= cut
    rest = scaled.masked_fill(hidden, 0.0)
    largest = float(rest.abs().amax())
    return _Bias(cut, hidden, rest if largest else None, largest)


def _allowed(hidden: list[Tensor]) -> Mask | None:
    """Return the mask of what none of some tensors hides; None where a row has no key left."""

    def find() -> Mask | None:
        whole = reduce(lambda a, b: a | b, hidden)
        return None if bool(whole.all(-1).any()) else from_tensor(~whole)

    scope = current()
    return find() if scope is None else scope.known(tuple(hidden), ("hidden",), find)


