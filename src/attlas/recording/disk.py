"""Recordings on disk: entries written as they are complete, and what is still growing put aside."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from attlas.atlas import Atlas, Entry
from attlas.atlas.storage import Writer

__all__ = ["Disk"]

_SMALL = 2**18  # bytes of an entry that waits in memory: the first step of a generation is most often one
_TAIL = 2**22  # bytes of one strand that come together before they are put aside


class Disk:
    """The folder of a recording, and one nameless file for tokens of texts that may still go on.

    Parameters
    ----------
    folder : Path
        Where the atlas goes; it is there when the recording has ended well, and not before.
    """

    def __init__(self, folder: Path) -> None:
        self._writer = Writer(folder, asked_by="record()")
        # The system removes it, however this process ends.
        self._file = tempfile.TemporaryFile(dir=self._writer.folder.parent)  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> Disk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._writer.close()

    def write(self, entry: Entry) -> Entry:
        """Write an entry, and return it as it lies on disk."""
        return self._writer.add(entry)

    def finish(self, atlas: Atlas) -> None:
        """Give the folder its name."""
        self._writer.finish(atlas)

    @staticmethod
    def waits(*pieces: Tensor) -> bool:
        """Return whether tensors are so small that they are written when their entry is complete."""
        return sum(t.nbytes for t in pieces) < _SMALL

    def put_aside(self, pieces: list[Tensor]) -> list[Tensor]:
        """Put tensors that were added to others since the last time on disk, if they are many.

        Parameters
        ----------
        pieces : list of Tensor
            Parts of one tensor along its third axis.
        """
        fresh = [t for t in pieces if not _aside(t)]
        if sum(t.nbytes for t in fresh) < _TAIL:
            return pieces
        return [t for t in pieces if _aside(t)] + [self._spilled(torch.cat(fresh, dim=2))]

    def _spilled(self, t: Tensor) -> Tensor:
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
        numbers = t.contiguous().view(bits).numpy()
        start = self._file.seek(0, 2)
        self._file.write(numbers.data)
        self._file.flush()
        # Copy on write: torch then takes it without a warning, and nobody writes.
        mapped = np.memmap(self._file, dtype=numbers.dtype, mode="c", offset=start, shape=numbers.shape)
        out = torch.from_numpy(mapped).view(t.dtype)
        out.on_disk = True  # type: ignore[attr-defined]
        return out


def _aside(t: Tensor) -> bool:
    return getattr(t, "on_disk", False)
