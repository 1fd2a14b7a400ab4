"""Weights that are a function of each logit by itself: sigmoid, ReLU and SiLU attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from attlas.engine import operations
from attlas.engine.tiling import ColumnBlock
from attlas.errors import DtypeError, ShapeError, kind, public
from attlas.foundation.checks import one_of
from attlas.foundation.compat import cached_property
from attlas.foundation.tiles import Tile
from attlas.masks.base import Mask
from attlas.matrix.gradient import WeightGradient
from attlas.matrix.kinds.of_logits import WeightsOfLogits
from attlas.matrix.softmax import SoftmaxWeights, cut_out
from attlas.matrix.weights import check_kind

Function: TypeAlias = Literal["sigmoid", "relu", "silu"]

_POINTWISE_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
}


@dataclass(frozen=True)
class Pointwise:
    """A function of each logit in the place of softmax: ``A_ij = f(s_ij + bias) / divisor``.

    Parameters
    ----------
    function : {"sigmoid", "relu", "silu"}
        What is taken of each logit.
    bias : float, optional
        Added to each logit. The default is -ln n for the sigmoid of n keys [1]_, and 0 for the others.
    divisor : float, optional
        Divides each weight. The default is 1 for the sigmoid, and the number of keys n for the others [2]_ [3]_.

    Raises
    ------
    ShapeError
        If `function` is not one of the three, or `divisor` is no number above 0.
    DtypeError
        If `bias` or `divisor` is no number.

    References
    ----------
    .. [1] Ramapuram et al., "Theory, analysis, and best practices for sigmoid self-attention", 2024.
    .. [2] Wortsman et al., "Replacing softmax with ReLU in vision transformers", 2023.
    .. [3] Zhai et al., "Actions speak louder than words: trillion-parameter sequential transducers for generative
       recommendations", 2024 (HSTU, SiLU).

    Examples
    --------
    >>> import torch, attlas
    >>> A = attlas.attend(
    ...     torch.zeros(2, 4), torch.zeros(3, 4), normalise=attlas.Pointwise("sigmoid", bias=0.0)
    ... )
    >>> A[0]
    tensor([0.5000, 0.5000, 0.5000])
    """

    function: Function
    bias: float | None = None
    divisor: float | None = None

    @public("Pointwise()")
    def __post_init__(self) -> None:
        # Check the settings.
        one_of("function", self.function, get_args(Function))
        for name, value in (("bias", self.bias), ("divisor", self.divisor)):
            if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
                raise DtypeError(f"{name} must be a number.", kind(value), f"{name}=1.0")
        if self.divisor is not None and not self.divisor > 0:
            raise ShapeError("divisor must be above 0.", f"divisor = {self.divisor}", "divisor=1.0")

    def of(self, logits: Tensor, keys: int) -> Tensor:
        """Return the weights of logits, 0 where a logit is -inf because the mask hides its key."""
        bias, divisor = self.settings(keys)
        weights = _POINTWISE_FUNCTIONS[self.function](logits.masked_fill(logits == -math.inf, 0.0) + bias)
        return torch.where(logits == -math.inf, 0.0, weights) / divisor

    def settings(self, keys: int) -> tuple[float, float]:
        """Return bias and divisor for a matrix of so many keys."""
        is_sigmoid = self.function == "sigmoid"
        bias = (-math.log(max(keys, 1)) if is_sigmoid else 0.0) if self.bias is None else self.bias
        divisor = (1.0 if is_sigmoid else float(max(keys, 1))) if self.divisor is None else self.divisor
        return bias, divisor


class PointwiseWeights(WeightsOfLogits):
    """A function of each logit of a problem, by itself.

    Parameters
    ----------
    of_logits : SoftmaxWeights
        Gives the logits; its softmax is not computed.
    function : Pointwise
        What is taken of each logit.
    keys : int
        Number of keys that the default of bias and divisor counts: those of the whole matrix.
    whole : WeightGradient, optional
        The gradient of the weights that these are a part of.

    Notes
    -----
    A cell needs no other cell of its row. A product computes tiles of logits, once, and its backward once more.
    """

    def __init__(
        self, of_logits: SoftmaxWeights, function: Pointwise, keys: int, whole: WeightGradient | None = None
    ) -> None:
        inner = of_logits
        self.of_logits, self.function, self.whole_keys = inner, function, keys
        self.shape, self.dtype, self.device = inner.shape, inner.dtype, inner.device
        self.queries, self.keys, self.key_heads = inner.queries, inner.keys, inner.key_heads
        self.are_shares, self.are_signed = False, function.function == "silu"
        self._whole = whole

    def to_dict(self) -> dict[str, Any]:
        function = self.function
        settings = {"function": function.function, "bias": function.bias, "divisor": function.divisor}
        return {"of_logits": self.of_logits, "keys": self.whole_keys, **settings}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> PointwiseWeights:
        # The weights of settings that a file has; a ValueError where they do not fit together.
        inner, keys = settings["of_logits"], settings["keys"]
        check_kind("of_logits", inner, SoftmaxWeights)
        check_kind("keys", keys, int)
        return cls(inner, Pointwise(settings["function"], settings["bias"], settings["divisor"]), keys)

    # ---------------------------------------------------------------------------------------------------------- facts

    @cached_property
    def mask(self) -> Mask | None:  # type: ignore[override]  # computed here
        """Which pairs may have a weight."""
        return self.of_logits.mask

    @property
    def description(self) -> str:
        bias, divisor = self.function.settings(self.whole_keys)
        settings = f"bias={bias:.4g}" if divisor == 1.0 else f"bias={bias:.4g}, divisor={divisor:.4g}"
        return f"{self.function.function}({settings}), {self.of_logits.description}"

    # ---------------------------------------------------------------------------------------------------------- verbs

    @public("A[...]")
    def cells(self, rows: range | Tensor, columns: range | Tensor, *, logits: bool = False) -> Tensor:
        # The function of the logits, which the matrix `of_logits` gives.
        found = self.of_logits.cells(rows, columns, logits=True)
        if logits:
            return found
        return self.with_cells(rows, columns, self.function.of(found, self.whole_keys))

    def row_tiles(self, at: Tile, blocks: Sequence[ColumnBlock]) -> Iterator[Tensor]:
        """Yield the function of the logits of each block of columns."""
        problem = self.of_logits.problem
        for block in blocks:
            logits = operations.cells(problem, at.narrow(block.columns), self.of_logits.plan, None, "logits")
            yield self.function.of(logits, self.whole_keys)

    def defined_cells(self, rows: Tensor) -> Tensor:
        return self.function.of(operations.defined(self.of_logits.problem, rows)[0], self.whole_keys)

    # ----------------------------------------------------------------------------------------------- parts and copies

    def part(
        self,
        batches: Tensor | slice | None = None,
        heads: Tensor | slice | None = None,
        rows: range | None = None,
        columns: range | None = None,
    ) -> PointwiseWeights:
        # The weights of some batches, heads, queries and keys; None stands for all of an axis.
        if batches is None and heads is None and rows is None and columns is None:
            return self
        inner = self.of_logits.part(batches, heads, rows)
        if columns is not None and len(columns) < self.shape[3]:  # no weight depends on the keys that are left out
            window = cut_out(inner.problem, range(inner.shape[2]), columns)
            inner = inner.derived(replace(window, partial=inner.problem.partial))
        return self._with_logits(inner)

    def _with_logits(self, inner: SoftmaxWeights) -> PointwiseWeights:
        """Return the same function of other logits, as a part of this matrix."""
        return PointwiseWeights(inner, self.function, self.whole_keys, self.gradient if self.requires_grad else None)

    def detach(self) -> PointwiseWeights:
        return PointwiseWeights(self.of_logits.detach(), self.function, self.whole_keys)
