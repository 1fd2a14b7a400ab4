"""What weights share that are made of the logits of a softmax matrix, and not of its softmax."""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

import torch
from torch import Tensor

from attlas.engine.dropout import Dropout
from attlas.errors import public
from attlas.matrix.softmax import SoftmaxWeights
from attlas.matrix.sweep import SweptWeights, pooled


class WeightsOfLogits(SweptWeights):
    """Weights of the logits that `of_logits` gives; its softmax is not computed."""

    of_logits: SoftmaxWeights

    @abstractmethod
    def _with_logits(self, inner: SoftmaxWeights) -> Self:
        """Return the same weights of other logits, as a part of this matrix."""

    @property
    def inputs(self) -> list[Tensor]:
        return self.of_logits.inputs

    @property
    def batch_ids(self) -> Tensor:  # type: ignore[override]  # computed here
        return self.of_logits.batch_ids

    @property
    def head_ids(self) -> Tensor:  # type: ignore[override]  # computed here
        return self.of_logits.head_ids

    @property
    def requires_grad(self) -> bool:
        return self.of_logits.requires_grad

    @property
    def is_symbolic(self) -> bool:
        return self.of_logits.is_symbolic

    def check_unchanged(self) -> None:
        self.of_logits.check_unchanged()

    @public("A @ v")
    def product(self, v: Tensor, dropout: Dropout | None = None) -> Tensor:
        return self.with_product(pooled(self, v, dropout), v, dropout)

    @public("A.mT @ x")
    def transposed_product(self, x: Tensor) -> Tensor:
        return self.with_product(pooled(self, x, transposed=True), x, transposed=True)

    def full_precision(self) -> Self:
        inner = self.of_logits.full_precision()
        return self if inner is self.of_logits else self._with_logits(inner)

    def moved(self, device: torch.device, dtype: torch.dtype | None) -> Self | None:
        inner = self.of_logits.moved(device, dtype)
        return None if inner is None else self._with_logits(inner)
