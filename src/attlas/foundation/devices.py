"""Small tensors of the CPU on another device: copied without waiting for the device, and kept there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attlas.foundation.checks import has_float64
from attlas.foundation.compat import changes, tracing

LARGEST_COPY = 1 << 28  # bytes of a tensor that is copied whole, for all tiles together


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


class DeviceCopies:
    """The last tensor that each device and dtype asked for, and its copy there.

    A tensor that was changed in place is copied again, and so is one that may get a gradient: its copy belongs to a
    graph. Copies are not copied or stored with the object that has them.

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
        self._known: dict[tuple[torch.device, torch.dtype], tuple[Tensor, int | None, Tensor]] = {}

    def of(self, t: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor on a device, in a dtype; by default in its own."""
        dtype = t.dtype if dtype is None else dtype
        if t.device == device:
            return t.to(dtype)
        count = changes_of(t)
        if t.requires_grad or count is None:
            return to_device(t, device, dtype)
        known, of_count, copy = self._known.get((device, dtype), (None, None, t))
        if known is not t or of_count != count:
            with torch.inference_mode(False):  # a graph cannot keep tensors of inference mode
                copy = to_device(t, device, dtype)
            self._known[device, dtype] = t, count, copy
        return copy

    def for_tiles(self, t: Tensor, device: torch.device) -> Tensor:
        """Return a tensor from which tiles take parts.

        Its copy on the device, or the tensor itself where none is kept.
        """
        lacks_dtype = t.dtype is torch.float64 and not has_float64(device)
        if t.device == device or lacks_dtype or t.requires_grad or t.nbytes > LARGEST_COPY or changes_of(t) is None:
            return t
        return self.of(t, device)

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
            return self._copy(axis)[first : first + len(ids)]
        key = tuple(ids.tolist())
        if key not in self._others:
            with torch.inference_mode(False):
                self._others[key] = to_device(ids, self.device)
        return self._others[key]

    def _copy(self, axis: int) -> Tensor:
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
