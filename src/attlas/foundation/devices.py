"""Small tensors of the CPU on another device, copied without a wait and kept; and answers of a device, kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.errors import DeviceError
from attlas.foundation.checks import has_float64
from attlas.foundation.compat import changes, tracing

LARGEST_COPY = 1 << 28  # bytes of a tensor that is copied whole, for all tiles together, on any device
_MOST_COMPARED_BYTES = 1 << 16  # bytes of a tensor that is compared with what was copied, where torch counts no changes


def check_float64(what: str, device: torch.device, fix: str) -> None:
    """Raise a DeviceError where a device has no float64, in which something is computed."""
    if not has_float64(device):
        raise DeviceError(f"{what} computed in float64.", f"{device}, which has no float64", fix)


def changes_of(t: object) -> int | None:
    """Return how often a tensor was changed in place; None where torch does not count that, and for other values."""
    return None if not isinstance(t, Tensor) or tracing() or t.is_inference() else changes(t)


def to_device(t: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on a device, the tensor itself where it is there.

    A copy to a GPU does not wait until the GPU has done its work.

    Parameters
    ----------
    t : Tensor
        The tensor.
    device : torch.device
        Where it shall be.
    dtype : torch.dtype, optional
        Its dtype; the default is that of `t`.

    Examples
    --------
    >>> import torch
    >>> from attlas.foundation.devices import to_device
    >>> t = torch.arange(3)
    >>> to_device(t, torch.device("cpu")) is t
    True
    """
    dtype = t.dtype if dtype is None else dtype
    if t.device == device:
        return t.to(dtype)
    # CUDA has read pageable memory when the call returns. It reads pinned memory later, and mps reads any memory later:
    # by then its numbers may be others.
    waits_not = device.type == "cuda" and t.device.type == "cpu" and not tracing() and not t.is_pinned()
    return t.to(device, dtype, non_blocking=waits_not)


class _DeviceCopy(NamedTuple):
    """A tensor, how often it was changed, its copy, and its numbers where changes are not counted."""

    of: Tensor
    changes: int | None
    copy: Tensor
    numbers: Tensor | None


def _has_numbers(t: Tensor, numbers: Tensor | None) -> bool:
    """Return whether a tensor of the CPU has the numbers that were copied."""
    return numbers is not None and t.device.type == "cpu" and torch.equal(t, numbers)


def _has_room(t: Tensor, device: torch.device) -> bool:
    """Return whether a device has room for a copy that is kept: where it is large, four times as much as it takes."""
    return t.nbytes <= LARGEST_COPY or 4 * t.nbytes <= free_bytes(device)


def free_bytes(device: torch.device) -> int:
    """Return how much memory of a GPU is free, or held by torch without a use; 0 where torch does not say."""
    if device.type == "cuda" and torch.cuda.is_available():
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + spare
    if device.type == "mps" and torch.backends.mps.is_available():
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return 0


class DeviceCopies:
    """The last tensor that each device and dtype asked for, and its copy there.

    A tensor that was changed in place is copied again, and so is one that may get a gradient: its copy belongs to a
    graph. One of inference mode, whose changes torch does not count, is compared with what was copied; a large one is
    copied again. Copies are not copied or stored with the object that has them.

    Examples
    --------
    >>> import torch
    >>> from attlas.foundation.devices import DeviceCopies
    >>> table, copies = torch.arange(3), DeviceCopies()
    >>> there = copies.of(table, torch.device("meta"))
    >>> copies.of(table, torch.device("meta")) is there
    True
    """

    def __init__(self) -> None:
        self._known: dict[tuple[torch.device, torch.dtype], _DeviceCopy] = {}

    def of(self, t: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor on a device, in a dtype; by default in its own."""
        dtype = t.dtype if dtype is None else dtype
        if t.device == device:
            return t.to(dtype)
        counted = changes_of(t) is not None
        if t.requires_grad or tracing() or not (counted or t.nbytes <= _MOST_COMPARED_BYTES):
            return to_device(t, device, dtype)
        return self._kept_copy(t, device, dtype, compares=not counted)

    def for_tiles(self, t: Tensor, device: torch.device) -> Tensor:
        """Return a tensor of which tiles need parts on a device: one copy, or itself where none is kept.

        Numbers of float64 become float32 where the device has no other. A tensor of inference mode may change between
        two matrices only: `forget` is to be called there.
        """
        if t.device == device or t.requires_grad or tracing() or not _has_room(t, device):
            return t
        lacks = t.dtype is torch.float64 and not has_float64(device)
        return self._kept_copy(t, device, torch.float32 if lacks else t.dtype)

    def forget(self, t: Tensor) -> None:
        """Forget the copies of a tensor whose changes are not counted: another matrix is made."""
        if self._known and t.is_inference():
            self._known = {}

    def _kept_copy(self, t: Tensor, device: torch.device, dtype: torch.dtype, *, compares: bool = False) -> Tensor:
        """Return the copy of a tensor, a new one where it was changed; `compares` is whether its numbers say that."""
        count, known = changes_of(t), self._known.get((device, dtype))
        same = known is not None and known.of is t and known.changes == count
        if not same or (compares and known is not None and not _has_numbers(t, known.numbers)):
            with torch.inference_mode(False):  # a graph cannot keep tensors of inference mode
                copy, numbers = to_device(t, device, dtype), t.clone() if compares else None
            known = self._known[device, dtype] = _DeviceCopy(t, count, copy, numbers)
        return known.copy  # type: ignore[union-attr]  # it is known by now

    def __eq__(self, other: object) -> bool:
        # What was copied makes no difference between two objects.
        return isinstance(other, DeviceCopies)

    def __hash__(self) -> int:
        return hash(DeviceCopies)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceCopies:
        return DeviceCopies()

    def __getstate__(self) -> dict[str, Any]:
        return {"_known": {}}


class IdCopies:
    """Numbers of batches and heads on the device of a matrix: one copy, of which tiles get parts.

    Parameters
    ----------
    device : torch.device
        Where the copies are.
    batch_ids, head_ids : Tensor of int64, shapes (batch,) and (heads,)
        The numbers of the whole matrix, on the CPU.
    counted : bool
        Whether both count from 0, so that they can be made on the device.
    """

    def __init__(self, device: torch.device, batch_ids: Tensor, head_ids: Tensor, counted: bool) -> None:
        self.device = device
        self._whole = batch_ids, head_ids
        self._counted = counted
        self._copies: list[Tensor | None] = [None, None]
        self._others: dict[tuple[int, ...], Tensor] = {}

    def of(self, ids: Tensor, axis: int) -> Tensor:
        """Return ids of batches (`axis` 0) or heads (1) on the device.

        Ids that are a view of those of the whole matrix cost no copy.
        """
        whole = self._whole[axis]
        # Where in the whole numbers these begin, if they are a view of them.
        first = (ids.data_ptr() - whole.data_ptr()) // whole.element_size()
        if 0 <= first <= len(whole) - len(ids) and ids.is_contiguous():
            return self._ids_on_device(axis)[first : first + len(ids)]
        key = tuple(ids.tolist())
        if key not in self._others:
            with torch.inference_mode(False):
                self._others[key] = to_device(ids, self.device)
        return self._others[key]

    def _ids_on_device(self, axis: int) -> Tensor:
        """Return the ids of all batches (`axis` 0) or heads (1) on the device; copied when first asked for."""
        copy = self._copies[axis]
        if copy is None:
            whole = self._whole[axis]
            with torch.inference_mode(False):
                made = torch.arange(len(whole), device=self.device) if self._counted else to_device(whole, self.device)
            copy = self._copies[axis] = made
        return copy


def ids_on(device: torch.device, ids: Tensor, axis: int, copies: IdCopies | None) -> Tensor:
    """Return ids of batches (`axis` 0) or heads (1) on a device.

    A view of `copies`, where these are for that device.
    """
    if copies is None or copies.device != device or tracing():
        return to_device(ids, device)
    return copies.of(ids, axis)


_known_answers: ContextVar[Iterator[tuple[dict[int, float], int]] | None] = ContextVar("attlas_answers", default=None)


def answers_kept(owner: Any) -> AbstractContextManager[None]:
    """Let `answer_of` take its answers from those of an earlier time, in the same order, and add new ones to them.

    On the CPU nothing is kept, since nobody waits for it, and in a program that is traced nothing is asked.

    Parameters
    ----------
    owner : Problem
        What the questions are about; it keeps the answers.
    """
    return nullcontext() if owner.device.type == "cpu" or owner.is_symbolic else _keep_answers(owner)


@contextmanager
def _keep_answers(owner: Any) -> Iterator[None]:
    """Take answers from the owner and keep new ones there, by the order of the questions, within a ``with`` block."""
    answers: dict[int, float] = vars(owner).setdefault("answers", {})
    token = _known_answers.set((answers, place) for place in range(1 << 62))
    try:
        yield
    finally:
        _known_answers.reset(token)


def answer_of(ask: Callable[[], float]) -> float:
    """Return a number that a device is asked for, or the answer that is kept.

    Parameters
    ----------
    ask : callable
        Asks the device, and waits.

    Examples
    --------
    >>> from attlas.foundation.devices import answer_of
    >>> answer_of(lambda: 1.0)
    1.0
    """
    places = _known_answers.get()
    if places is None:
        return ask()
    answers, place = next(places)
    if place not in answers:
        answers[place] = ask()
    return answers[place]
