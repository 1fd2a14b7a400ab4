"""What is true for the time of a block: which thread it belongs to, and what was computed densely in it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from attlas.foundation.blocks import BlockValue
from attlas.foundation.compat import changes

#: Of the details of an atlas: what was computed densely.
DENSE_USES = "dense_attention"
_HEAD_COUNT_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "h")
_ATTENTION_NAME = re.compile(r"att", re.IGNORECASE)
_MOST_KEPT = 8  # what was found out about masks: all layers of a pass share a few,
_LARGEST_KEPT = 1 << 26  # of at most so many bytes


class DenseUse(NamedTuple):
    """One kind of operation that a lazy tensor does not know, so that it was computed from all numbers.

    Parameters
    ----------
    module : str
        Path of the module that ran; "" where none did, or the model itself.
    kind : str
        Class of the module.
    operation : str
        The operation, as torch calls it, and what it was applied to.
    times : int
        How often.

    Examples
    --------
    >>> from attlas.recording import DenseUse
    >>> DenseUse("layer.0", "OwnAttention", "gather of logits", 2).operation
    'gather of logits'
    """

    module: str
    kind: str
    operation: str
    times: int


class DenseUses(tuple[DenseUse, ...]):
    """What was computed densely in a block, in the order in which it was first met; printed as text.

    Examples
    --------
    >>> from attlas.recording import DenseUse, DenseUses
    >>> DenseUses([DenseUse("layer.0", "OwnAttention", "gather of logits", 2)])
    computed densely, as without attlas:
      layer.0 (OwnAttention): gather of logits, 2 times
    """

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "nothing was computed densely"
        lines = [
            f"  {use.module or 'the model itself'} ({use.kind}): {use.operation}, "
            + ("once" if use.times == 1 else f"{use.times} times")
            for use in self
        ]
        return "\n".join(["computed densely, as without attlas:", *lines])


@dataclass(eq=False)
class Scope:
    """One block: the model, and the counts.

    Parameters
    ----------
    model : nn.Module
        The model.
    innermost : callable, optional
        Returns the module that runs; by default, it is looked for among the callers.
    offer : callable, optional
        Takes the matrix of weights that are computed densely, for a recording.
    """

    model: nn.Module
    innermost: Callable[[], nn.Module | None] | None = None
    offer: Callable[[Any], None] | None = None
    counts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    # What was found out about a mask tensor, by its place in memory, and the tensor itself.
    facts: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._paths = {id(module): path for path, module in self.model.named_modules()}

    @property
    def dense_uses(self) -> DenseUses:
        """What was computed densely so far."""
        return DenseUses(DenseUse(*key, count) for key, count in self.counts.items())

    def module(self) -> nn.Module | None:
        """Return the innermost module of the model that runs."""
        found = None if self.innermost is None else self.innermost()
        if found is not None:
            return found
        frame = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
            if isinstance(owner, nn.Module) and id(owner) in self._paths:
                return owner
            frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
        return None

    def count(self, operation: str) -> None:
        """Note that an operation was computed densely in the module that runs."""
        module = self.module()
        path = "" if module is None else self._paths.get(id(module), "")
        key = (path, type(self.model if module is None else module).__name__, operation)
        self.counts[key] = self.counts.get(key, 0) + 1

    def softmax_of(self, x: Tensor) -> None:
        """Note a softmax of numbers, in a module that attends by its name, or of batches and heads."""
        module = self.module()
        name = "" if module is None else type(module).__name__ + self._paths.get(id(module), "").rpartition(".")[2]
        if x.ndim > 3 or _ATTENTION_NAME.search(name):
            self.count("softmax of numbers")

    def heads(self, count: int) -> int:
        """Return how many heads lie in one axis with the batch, by what the running module says; 1 where unknown."""
        module, given = self.module(), _heads_of_torch()
        for heads in [getattr(module, name, None) for name in _HEAD_COUNT_NAMES] if given is None else [given]:
            if isinstance(heads, int) and not isinstance(heads, bool) and heads > 1 and count % heads == 0:
                return heads
        return 1

    def known(self, tensors: tuple[Tensor, ...], settings: tuple[Any, ...], find: Callable[[], Any]) -> Any:
        """Return what `find` gives for some tensors.

        Kept as long as they are unchanged, since all layers share a mask.
        """
        if any(t.requires_grad or t.is_inference() or t.nbytes > _LARGEST_KEPT for t in tensors):
            return find()
        key = (settings, *((t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, changes(t)) for t in tensors))
        if key not in self.facts:
            while len(self.facts) >= _MOST_KEPT:
                self.facts.pop(next(iter(self.facts)))
            self.facts[key] = (tensors, find())
        return self.facts[key][1]


def _heads_of_torch() -> Any:
    """Return the number of heads that torch's function with weights was given, where it runs; else None."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "multi_head_attention_forward":
            return frame.f_locals.get("num_heads")
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return None


def uses_from(details: Mapping[str, Any]) -> DenseUses:
    """Return the dense uses that the details of a recording hold."""
    found = details.get(DENSE_USES)
    return DenseUses(DenseUse(**use) for use in found) if isinstance(found, list) else DenseUses()


_scopes: BlockValue[Scope | None] = BlockValue("handwritten", None)
current: Callable[[], Scope | None] = _scopes.get
entered = _scopes.held  # makes a scope that of this thread, for a block


def left() -> AbstractContextManager[None]:
    """Let this thread have no scope for a ``with`` block: products in it are computed at once."""
    return _scopes.held(None)
