"""Recordings on disk: complete entries are written to the folder, growing ones to a temporary file."""

from __future__ import annotations

import tempfile
import warnings
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attlas.recording.atlas import Atlas
from attlas.recording.atlas.storage import Writer
from attlas.recording.growing import GrowingTensor

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
    def is_small(size: int) -> bool:
        """Return whether an entry of some bytes stays in memory until it is complete."""
        return size < _SMALL

    def spill(self, tensor: GrowingTensor) -> None:
        """Write what a tensor has in memory to the temporary file, once it is large enough."""
        if tensor.bytes_in_memory >= _TAIL:
            tensor.store(self._spilled)

    def mapped(self, t: Tensor) -> Tensor:
        """Return a tensor on the CPU as a memory map of the temporary file; a small one as it is."""
        return t if t.nbytes < _SMALL else self._spilled(t)

    def _spilled(self, t: Tensor) -> Tensor:
        """Append a tensor to the temporary file, and return it as a memory map."""
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
        numbers = t.contiguous().view(bits).numpy()
        start = self._growing.seek(0, 2)
        self._growing.write(numbers.data)
        self._growing.flush()
        # Copy on write: torch then takes it without a warning, and nobody writes.
        mapped = np.memmap(self._growing, dtype=numbers.dtype, mode="c", offset=start, shape=numbers.shape)
        return torch.from_numpy(mapped).view(t.dtype)


def temporary_folder(atlas: Atlas) -> Path:
    """Return a folder that is deleted with an atlas, and say so in a warning, which names the caller's caller."""
    holder = tempfile.TemporaryDirectory(prefix="attlas-", ignore_cleanup_errors=True)
    weakref.finalize(atlas, holder.cleanup)
    folder = Path(holder.name) / "recording.atlas"
    text = f'record(): keep="disk" without a folder writes to {folder}, which is deleted with the atlas; '
    warnings.warn(text + "folder= keeps it.", stacklevel=3)
    return folder
