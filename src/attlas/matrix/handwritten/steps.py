"""What code does with logits before softmax: a list of steps, each of which sees one cell at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from attlas.errors import ModifiedError
from attlas.foundation.compat import changes
from attlas.foundation.devices import to_device
from attlas.foundation.tiles import Tile
from attlas.masks import Mask
from attlas.scores import Score
from attlas.scores.position import cells_of

Kind = Literal[
    "add", "shift", "multiply", "scale", "divide", "divide_by_number", "fill", "keep", "choose", "tanh", "clamp",
    "cast", "hide"
]  # fmt: skip
_STORED_KINDS = {"divide_by_number": "part"}  # kinds that recordings have under another name
_TENSORS_OF_STEP = {"add": 1, "multiply": 1, "divide": 1, "fill": 1, "keep": 1, "choose": 2}


@dataclass(frozen=True, eq=False)
class Step:
    """One step.

    Parameters
    ----------
    kind : str
        "add" (a tensor times a number), "shift" (by a number), "multiply" and "divide" (by a tensor), "scale" and
        "divide_by_number" (by one that is not 0), "fill" (a number where a tensor is True), "keep" (a number where it
        is False), "choose" (the logit where the first tensor is True, the second tensor elsewhere), "tanh", "clamp"
        (between two numbers or None), "cast" (to a dtype), "hide" (a lazy mask is added).
    tensors : tuple of Tensor
        Its tensors, broadcastable to (batch, heads, m, n).
    numbers : tuple of float or None
        Its numbers.
    dtype : torch.dtype, optional
        Of a cast.
    mask : Mask, optional
        What a lazy mask allows; None allows all.
    """

    kind: Kind
    tensors: tuple[Tensor, ...] = ()
    numbers: tuple[float | None, ...] = ()
    dtype: torch.dtype | None = None
    mask: Mask | None = None

    def __post_init__(self) -> None:
        counts = [None if t.is_inference() else changes(t) for t in self.tensors]
        object.__setattr__(self, "_changes", counts)

    def check_unchanged(self) -> None:
        """Raise a ModifiedError if one of the tensors was changed in place since."""
        counts: list[int | None] = vars(self)["_changes"]
        for t, count in zip(self.tensors, counts, strict=True):
            if count is not None and changes(t) != count:
                rule = "what is added to logits must stay as it is until their softmax."
                fix = "mask = mask + t in place of mask += t, or leave attlas.lazily() out."
                raise ModifiedError(rule, "a tensor that was changed in place", fix, t=t, where="lazily()")

    def detach(self) -> Step:
        """Return the same step without a graph."""
        return replace(self, tensors=tuple(t.detach() for t in self.tensors))

    def of_part(self, cut: tuple[slice, ...], sizes: tuple[int, int, int, int]) -> Step:
        """Return the step for some batches, heads, queries and keys of a matrix of these sizes."""
        if self.kind != "hide":
            return replace(self, tensors=tuple(cut_of(t, cut) for t in self.tensors))
        (t,) = self.tensors
        batches, heads, rows, keys = (range(*part.indices(size)) for part, size in zip(cut, sizes, strict=True))
        if self.mask is None:
            return replace(self, tensors=(torch.zeros((), dtype=t.dtype, device=t.device),))
        own = torch.tensor(batches), torch.tensor(heads)
        allowed = self.mask.allows(Tile(batches, heads, rows, keys, *sizes[2:], *own, t.device))
        added = torch.zeros(allowed.shape, dtype=t.dtype, device=t.device)
        return replace(self, tensors=(added.masked_fill(~allowed, torch.finfo(t.dtype).min),))

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits after this step."""
        return x.to(self.dtype) if self.kind == "cast" else applied(self.kind, self.numbers, x, self.tensors)


def parts_of(key: Any, shape: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[int | slice, ...]] | None:
    """Return an index as slices that keep all axes, and what then takes single entries out; None for other indices."""
    entries = list(key) if isinstance(key, tuple) else [key]
    if not all(part is Ellipsis or (isinstance(part, int | slice) and not isinstance(part, bool)) for part in entries):
        return None
    missing = len(shape) - len(entries) + entries.count(Ellipsis)
    if missing < 0 or entries.count(Ellipsis) > 1:
        return None
    at = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    entries[at : at + 1] = [slice(None)] * missing
    slices: list[slice] = []
    index: list[int | slice] = []
    for part, size in zip(entries, shape, strict=True):
        if isinstance(part, slice):
            if part.step not in (None, 1):
                return None
            slices.append(part)
            index.append(slice(None))
        elif not -size <= part < size:
            return None  # torch says what is wrong
        else:
            slices.append(slice(part % size, part % size + 1))
            index.append(0)
    return tuple(slices), tuple(index)


def cut_of(t: Tensor, cut: Sequence[slice]) -> Tensor:
    """Return a part of a tensor that broadcasts over axes of size 1, which stay."""
    shape = (1,) * (len(cut) - t.ndim) + tuple(t.shape)
    return t.reshape(shape)[tuple(slice(None) if size == 1 else part for part, size in zip(cut, shape, strict=True))]


def applied(kind: str, numbers: Sequence[float | None], x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return logits, or a tile of them, after one step that is no cast."""
    number: Any = numbers[0] if numbers else None
    compute: Callable[..., Tensor] = _STEP_FUNCTIONS[kind]
    if kind in ("add", "clamp"):
        return compute(x, *tensors, *numbers)
    return compute(x, *tensors) if number is None else compute(x, *tensors, number)


def _add_multiple(x: Tensor, t: Tensor, factor: float) -> Tensor:
    """Return ``x + factor * t``, by the operation that the model itself would use."""
    return x + t if factor == 1.0 else x - t if factor == -1.0 else x + t * factor


_STEP_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": _add_multiple,
    "shift": torch.add,
    "multiply": torch.mul,
    "scale": torch.mul,
    "divide": torch.div,
    "divide_by_number": torch.div,
    "fill": torch.masked_fill,
    "keep": lambda x, mask, number: x.masked_fill(~mask, number),
    "choose": lambda x, mask, other: torch.where(mask, x, other),
    "tanh": torch.tanh,
    "clamp": torch.clamp,
    "hide": torch.add,
}


class StepScore(Score):
    """Dot products, and the steps that code did with them, tile by tile.

    It computes what no other score says: a learned bias below a soft cap, a clamp that bites, rows without a key.

    Parameters
    ----------
    steps : str
        Kind and numbers of each step, as JSON.
    tensors : sequence of Tensor
        The tensors of all steps, in order.
    """

    rounds_tokens = True

    def __init__(self, steps: str, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps, self.tensors = steps, list(tensors)
        kinds = {stored: kind for kind, stored in _STORED_KINDS.items()}
        self._parsed = [
            (kinds.get(kind, kind), [None if text is None else float(text) for text in row])
            for kind, row in json.loads(steps)
        ]
        self.scratch = 2 + len(self.tensors)

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Self:
        """Return the score of some steps. A cast changes nothing: tiles are computed in the dtype of the sums."""
        kept = [step for step in steps if step.kind not in ("cast", "hide")]
        rows = [
            (
                _STORED_KINDS.get(step.kind, step.kind),
                [None if number is None else repr(number) for number in step.numbers],
            )
            for step in kept
        ]
        return cls(json.dumps(rows), [t for step in kept for t in step.tensors])

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        """Multiply queries and keys of a tile, and apply each step to its cells."""
        x, tensors = torch.matmul(q, k.mT), iter(self.tensors)
        for kind, numbers in self._parsed:
            x = applied(
                kind, numbers, x, [self._cells_of_tile(next(tensors), at) for _ in range(_TENSORS_OF_STEP.get(kind, 0))]
            )
        return x

    def _cells_of_tile(self, t: Tensor, at: Tile) -> Tensor:
        """Return the cells of a tile, numbers in the dtype of the sums."""
        return to_device(cells_of(t, at), at.device, at.dtype if t.is_floating_point() else None)

    def to_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, **{f"t{i}": t for i, t in enumerate(self.tensors)}}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        steps = settings.pop("steps")
        return cls(steps, [settings[f"t{i}"] for i in range(len(settings))])

    @classmethod
    def batch_axis(cls, t: Tensor) -> int | None:
        return 0 if t.ndim == 4 else None

    def extra_repr(self) -> str:
        return ", ".join(kind for kind, _ in self._parsed)
