"""Recordings on disk: complete entries are written to the folder, growing ones to a temporary file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attlas.recording.atlas.storage import Writer

_SMALL = 2**18  # bytes of an entry that waits in memory: the first step of a generation is most often one
_TAIL = 2**22  # bytes of one sequence that are collected in memory before they are written


class RecordingFolder(Writer):
    """Writer of a recording, with one temporary file for the tokens of texts that may still grow.

    Parameters
    ----------
    folder : Path
        Folder of the atlas; it exists only after the recording has ended without an error.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, asked_by="record()")
        # The system removes it, however this process ends.
        self._growing = tempfile.TemporaryFile(dir=self.folder.parent)  # noqa: SIM115 - closed in close()

    def close(self) -> None:
        self._growing.close()
        super().close()

    @staticmethod
    def are_small(*pieces: Tensor) -> bool:
        """Return whether tensors stay in memory until their entry is complete."""
        return sum(t.nbytes for t in pieces) < _SMALL

    def spill(self, pieces: list[Tensor]) -> list[Tensor]:
        """Write the pieces in memory to the temporary file, once they are large enough.

        Parameters
        ----------
        pieces : list of Tensor
            Parts of one tensor along its third axis.
        """
        fresh = [t for t in pieces if not _is_spilled(t)]
        if sum(t.nbytes for t in fresh) < _TAIL:
            return pieces
        return [t for t in pieces if _is_spilled(t)] + [self._spilled(torch.cat(fresh, dim=2))]

    def _spilled(self, t: Tensor) -> Tensor:
        """Append a tensor to the temporary file, and return it as a memory map."""
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
        numbers = t.contiguous().view(bits).numpy()
        start = self._growing.seek(0, 2)
        self._growing.write(numbers.data)
        self._growing.flush()
        # Copy on write: torch then takes it without a warning, and nobody writes.
        mapped = np.memmap(self._growing, dtype=numbers.dtype, mode="c", offset=start, shape=numbers.shape)
        out = torch.from_numpy(mapped).view(t.dtype)
        out.on_disk = True  # type: ignore[attr-defined]
        return out


def _is_spilled(t: Tensor) -> bool:
    return getattr(t, "on_disk", False)
