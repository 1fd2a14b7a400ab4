"""Copies from a GPU to the CPU that nobody waits for; `_pinned_memory` and `_event_after_work` need CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class HostCopies:
    """Copies of tensors in the memory of the CPU, which a GPU writes while the program goes on.

    Notes
    -----
    A GPU writes to pinned memory by itself. An event in its stream, one for each pass, tells when all copies before it
    are complete. Other devices are waited for.
    """

    def __init__(self) -> None:
        self.marks = 0  # passes that were marked; a copy is complete when the event of its pass is
        self._streams: set[torch.device] = set()  # devices with copies since the last mark
        self._events: list[tuple[int, Any]] = []  # events that were not seen complete, by the number of their mark

    def copy(self, t: Tensor) -> Tensor:
        """Return a copy of a tensor of a device on the CPU; read it after `wait`."""
        if not _copies_by_itself(t.device):
            return t.to("cpu")
        out = _pinned_memory(t.shape, t.dtype)
        self.write(out, t.contiguous())
        return out

    def empty(self, shape: Sequence[int], dtype: torch.dtype, source: torch.device) -> Tensor:
        """Return memory of the CPU into which tensors of a device can be written."""
        return (
            _pinned_memory(shape, dtype) if _copies_by_itself(source) else torch.empty(shape, dtype=dtype, device="cpu")
        )

    def write(self, target: Tensor, t: Tensor) -> None:
        """Copy a tensor of a device to contiguous memory of `empty` of the same dtype; read it after `wait`."""
        later = _copies_by_itself(t.device)
        target.copy_(t, non_blocking=later)
        if later:
            self._streams.add(t.device)

    def mark(self) -> None:
        """End the copies of a pass: one event for each device."""
        self._events = [(number, event) for number, event in self._events if not event.query()]
        self._events += [(self.marks, _event_after_work(device)) for device in self._streams]
        self._streams.clear()
        self.marks += 1

    def wait(self, until: int | None = None) -> None:
        """Wait for the copies up to those of the mark with a number; by default, for all."""
        if until is None or until >= self.marks:
            self.mark()
        for number, event in self._events:
            if (until is None or number <= until) and not event.query():
                event.synchronize()
        self._events = [] if until is None else [(number, event) for number, event in self._events if number > until]


def _copies_by_itself(device: torch.device) -> bool:
    """Return whether a device writes to memory of the CPU while the program goes on."""
    return device.type == "cuda"


def _pinned_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory of the CPU that a GPU can write to by itself."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)


def _event_after_work(device: torch.device) -> Any:
    """Return an event that is complete when all work so far on the current stream of a GPU is."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
