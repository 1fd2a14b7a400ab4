"""A tensor that grows along one axis: the first part as it was given, later ones in one buffer with room for more."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attlas.recording.copies import HostCopies
from attlas.recording.snapshot import same_bits

_LEAST_ROOM = 64  # slices along the axis that the first buffer has room for, at least


class GrowingTensor:
    """Parts of one tensor along one of its axes, in their order.

    Parameters
    ----------
    axis : int, default 2
        The axis, counted from the first.
    keep : callable, optional
        Returns the first part as it is kept; as it is given, by default. Later parts are copied to its device.
    copies : HostCopies, optional
        Copies later parts of a GPU that are kept on the CPU, so that nobody waits for them.

    Notes
    -----
    The first part is most often a whole prompt, and the only one: it is not copied. The buffer of the later ones
    doubles when it is full, so that a step copies its own part and nothing else, and the number of parts does not grow
    with the number of steps. What `joined` and `joined_with_room` have returned never changes: later parts are written
    behind it, or elsewhere.
    """

    def __init__(
        self,
        axis: int = 2,
        keep: Callable[[Tensor], Tensor] = lambda t: t,
        copies: HostCopies | None = None,
    ) -> None:
        self._axis, self._keep, self._copies = axis, keep, copies
        self._marks = 0  # of `copies` when the last part was copied
        self._stored: list[Tensor] = []  # parts on disk
        self._first: Tensor | None = None  # the first part in memory,
        self._tail: Tensor | None = None  # and all later ones: what is written of the buffer
        self._buffer: Tensor | None = None

    def append(self, t: Tensor) -> None:
        """Add a part, and copy it unless it is the first."""
        # `moves`: the part comes from another device than the parts before, whose copies may still be written.
        t = t.detach()
        written = self._marks
        if self._copies is not None:
            self._marks = self._copies.marks
        if self._first is None and self._tail is None and not self._stored:
            # `_keep` moves it to where parts are kept.
            self._first = self._keep(t)
            return
        known = self.parts[-1]  # what the new part must fit
        used = 0 if self._tail is None else self._size_of_axis(self._tail)
        stop = used + self._size_of_axis(t)
        moves = self._copies is not None and t.device != known.device
        buffer = self._buffer_with_room(known, t, stop, written if moves else None)
        target = self._slices_of_tensor(buffer, used, stop)
        if target.shape != t.shape:
            torch.cat([known, t.to(known.device)], dim=self._axis)  # raises torch's error, which names both sizes
        if self._copies is not None and moves:
            source = t.to(target.dtype).movedim(self._axis, 0).contiguous()
            self._copies.write(target.movedim(self._axis, 0), source)
        else:
            target.data.copy_(t)  # what was handed out of the buffer does not count as changed
        self._tail = self._slices_of_tensor(buffer, 0, stop)

    def _buffer_with_room(self, known: Tensor, t: Tensor, size: int, written: int | None) -> Tensor:
        """Return the buffer with some room, in a dtype that holds the numbers of both tensors.

        Where parts come from another device, `written` is the mark after which those in the buffer are complete. The
        axis is then the outermost in memory: a part is contiguous, and the device writes it by itself.
        """
        dtype = torch.promote_types(known.dtype, t.dtype)
        room = 0 if self._buffer is None else self._size_of_axis(self._buffer)
        if self._buffer is not None and size <= room and self._buffer.dtype is dtype:
            return self._buffer
        sizes = list(known.shape)
        sizes[self._axis] = max(size, 2 * room, _LEAST_ROOM)
        with torch.inference_mode(False):  # a later pass may write into it outside of inference mode
            if self._copies is None or written is None:
                self._buffer = torch.empty(sizes, dtype=dtype, device=known.device)
            else:
                sizes.insert(0, sizes.pop(self._axis))
                self._buffer = self._copies.empty(sizes, dtype, t.device).movedim(0, self._axis)
                if self._tail is not None:
                    self._copies.wait(written)
        if self._tail is not None:
            self._slices_of_tensor(self._buffer, 0, self._size_of_axis(self._tail)).copy_(self._tail)
        return self._buffer

    def _size_of_axis(self, t: Tensor) -> int:
        """Return the size along the axis that grows."""
        return t.shape[self._axis]

    def _slices_of_tensor(self, t: Tensor, start: int, stop: int) -> Tensor:
        """Return some slices of a tensor; itself where they are all."""
        return t if stop - start == self._size_of_axis(t) else t.narrow(self._axis, start, stop - start)

    @property
    def _parts_in_memory(self) -> list[Tensor]:
        """The parts that are not on disk."""
        return [part for part in (self._first, self._tail) if part is not None]

    @property
    def parts(self) -> list[Tensor]:
        """All parts: one for each piece on disk, and at most two in memory."""
        return [*self._stored, *self._parts_in_memory]

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of the parts that are not on disk."""
        return sum(part.nbytes for part in self._parts_in_memory)

    def equals(self, t: Tensor, start: int) -> bool | Tensor:
        """Return whether `t` has the bits of as many slices from `start` on; one comparison for each part.

        On a device other than the CPU the answer is a tensor on it, which nobody has waited for.
        """
        at = -start  # the place in `t` of the first slice of a part
        answers: list[Tensor] = []
        for part in self.parts:
            size = self._size_of_axis(part)
            low, high = max(at, 0), min(at + size, self._size_of_axis(t))
            if low < high:
                old, new = self._slices_of_tensor(part, low - at, high - at), self._slices_of_tensor(t, low, high)
                same = same_bits(old, new.to(old.device))
                if isinstance(same, Tensor):
                    answers.append(same)
                elif not same:
                    return False
            at += size
        return torch.stack(answers).all() if answers else True

    def joined(self) -> Tensor:
        """Return all parts as one tensor of exactly their size, and keep it in their place."""
        if self._copies is not None:
            self._copies.wait(self._marks)
        whole = self._stored[0] if self._stored else self._first
        if self._tail is None and not self._stored and whole is not None:  # one part, in memory
            return whole
        if whole is None or len(self.parts) > 1:
            whole = torch.cat(self.parts, dim=self._axis)
        self._hold_only(whole)
        return whole

    def joined_with_room(self) -> Tensor:
        """Return all parts as one tensor, a part of a buffer into which later parts are written behind it."""
        parts = self._parts_in_memory
        if self._copies is not None or self._stored:  # of another device, or on disk: each time anew
            return self.joined()
        if len(parts) == 1:
            return parts[0]
        axis, size = self._axis, sum(map(self._size_of_axis, parts))
        sizes = list(parts[-1].shape)
        sizes[axis] = size + max(size // 2, _LEAST_ROOM)
        with torch.inference_mode(False):  # a later pass may write into it outside of inference mode
            self._buffer = parts[-1].new_empty(sizes)
        self._tail = self._slices_of_tensor(self._buffer, 0, size)
        self._first = None
        torch.cat(parts, dim=axis, out=self._tail)
        return self._tail

    def store(self, write: Callable[[Tensor], Tensor]) -> None:
        """Replace the parts in memory by what `write` returns of them: one tensor with the same numbers, on disk."""
        if self._copies is not None:
            self._copies.wait(self._marks)
        self._hold_only(None, *self._stored, write(torch.cat(self._parts_in_memory, dim=self._axis)))

    def replace(self, stored: Tensor) -> None:
        """Replace all parts by one tensor on disk with the same numbers."""
        self._hold_only(None, stored)

    def _hold_only(self, first: Tensor | None, *stored: Tensor) -> None:
        """Hold one tensor in memory, or some on disk, and nothing else."""
        self._stored, self._first, self._tail, self._buffer = [*stored], first, None, None
