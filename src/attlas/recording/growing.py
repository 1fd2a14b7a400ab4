"""A tensor that grows along one axis: the first part as it was given, later ones in one buffer with room for more."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attlas.recording.snapshot import same_bits

_ROOM = 64  # slices along the axis that the first buffer has room for, at least


class GrowingTensor:
    """Parts of one tensor along one of its axes, in their order.

    Parameters
    ----------
    axis : int, default 2
        The axis, counted from the first.
    keep : callable, optional
        Returns the first part as it is kept; as it is given, by default. Later parts are copied to its device.

    Notes
    -----
    The first part is most often a whole prompt, and the only one: it is not copied. The buffer of the later ones doubles
    when it is full, so that a step copies its own part and nothing else, and the number of parts does not grow with the
    number of steps.
    """

    def __init__(self, axis: int = 2, keep: Callable[[Tensor], Tensor] = lambda t: t) -> None:
        self._axis, self._keep = axis, keep
        self._stored: list[Tensor] = []  # parts on disk
        self._first: Tensor | None = None  # the first part in memory
        self._buffer: Tensor | None = None
        self._used = 0  # slices of the buffer that are written

    def append(self, t: Tensor) -> None:
        """Add a part, and copy it unless it is the first."""
        t = t.detach()
        if self._first is None and not self._stored:
            self._first = self._keep(t)
            return
        known, stop = self.parts[-1], self._used + t.shape[self._axis]
        place = self._narrow(self._with_room(known, t), self._used, stop)
        if place.shape != t.shape:
            torch.cat([known, t], dim=self._axis)  # torch's error names both sizes; a copy might repeat numbers
        place.copy_(t)
        self._used = stop

    def _with_room(self, known: Tensor, t: Tensor) -> Tensor:
        """Return the buffer with room for one more part, in a dtype that holds its numbers and the known ones."""
        old = self._buffer
        needed = self._used + t.shape[self._axis]
        dtype = torch.promote_types(known.dtype, t.dtype)
        if old is not None and needed <= old.shape[self._axis] and old.dtype is dtype:
            return old
        sizes = list(known.shape)
        sizes[self._axis] = max(needed, 2 * self._used, _ROOM)
        with torch.inference_mode(False):  # a later pass may write into it outside of inference mode
            buffer = torch.empty(sizes, dtype=dtype, device=known.device)
        if old is not None:
            self._narrow(buffer, 0, self._used).copy_(self._narrow(old, 0, self._used))
        self._buffer = buffer
        return buffer

    def _narrow(self, t: Tensor, start: int, stop: int) -> Tensor:
        return t.narrow(self._axis, start, stop - start)

    @property
    def _in_memory(self) -> list[Tensor]:
        """The parts that are not on disk."""
        parts = [] if self._first is None else [self._first]
        return parts if self._buffer is None else [*parts, self._narrow(self._buffer, 0, self._used)]

    @property
    def parts(self) -> list[Tensor]:
        """All parts: one for each piece on disk, and at most two in memory."""
        return [*self._stored, *self._in_memory]

    def __len__(self) -> int:
        """Return the size along the axis."""
        return sum(part.shape[self._axis] for part in self.parts)

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of the parts that are not on disk."""
        return sum(part.nbytes for part in self._in_memory)

    def equals(self, t: Tensor, start: int) -> bool:
        """Return whether `t` has the bits of as many slices from `start` on; one comparison for each part."""
        stop, part_start = start + t.shape[self._axis], 0
        for part in self.parts:
            low, high = max(part_start, start), min(part_start + part.shape[self._axis], stop)
            if low < high:
                old = self._narrow(part, low - part_start, high - part_start)
                if not same_bits(old, self._narrow(t, low - start, high - start).to(old.device)):
                    return False
            part_start += part.shape[self._axis]
        return True

    def joined(self) -> Tensor:
        """Return all parts as one tensor of exactly their size, and keep it in their place."""
        parts = self.parts
        whole = parts[0] if len(parts) == 1 and self._buffer is None else torch.cat(parts, dim=self._axis)
        self._stored, self._first, self._buffer, self._used = [], whole, None, 0
        return whole

    def store(self, write: Callable[[Tensor], Tensor]) -> None:
        """Replace the parts in memory by what `write` returns of them: one tensor with the same numbers, on disk."""
        parts = self._in_memory
        written = write(parts[0] if len(parts) == 1 else torch.cat(parts, dim=self._axis))
        self._stored.append(written)
        self._first, self._buffer, self._used = None, None, 0

    def replace(self, stored: Tensor) -> None:
        """Replace all parts by one tensor on disk with the same numbers."""
        self._stored, self._first, self._buffer, self._used = [stored], None, None, 0

