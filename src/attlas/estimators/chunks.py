"""Rows of arrays in memory, of arrays on disk, and of Parquet files, some at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attlas.errors import ShapeError
from attlas.estimators.parquet import ParquetFile
from attlas.inputs import whole_number

__all__ = ["ROWS", "Chunks", "Source"]

ROWS = 65_536
Source: TypeAlias = "NDArray[Any] | Chunks | Path | str | Iterable[ArrayLike]"


class Chunks:
    """Rows of a source, some at a time; a source that can be read again can be iterated again.

    Parameters
    ----------
    source : ndarray, Path, str, or iterable of arrays
        An array, a ``numpy.memmap`` among them; the path of an ``.npy`` file, which is mapped, or of a ``.parquet``
        file, which is read through pyarrow; or arrays of shape (rows, columns), one after another.
    columns : sequence of str, optional
        Columns of a Parquet file, in this order; the default is all of them.
    rows : int
        Rows of a chunk, at most; 65,536 by default. Arrays of an iterable are cut where they are longer.

    Raises
    ------
    ShapeError
        If the source is no such thing, or has no such columns.
    MissingExtraError
        If a Parquet file is given and pyarrow is not installed.

    Notes
    -----
    Memory: one chunk. A mapped array belongs to the system's cache of files, which gives its memory away when
    another process needs it.

    Examples
    --------
    >>> import numpy as np
    >>> [len(chunk) for chunk in Chunks(np.zeros((5, 2)), rows=2)]
    [2, 2, 1]
    """

    def __init__(self, source: Source, columns: Sequence[str] | None = None, rows: int = ROWS) -> None:
        self.rows = whole_number("Chunks()", "rows", rows, "leave rows out.")
        self.columns = None if columns is None else list(columns)
        self.source = self._opened(source)
        if self.columns is not None and not isinstance(self.source, ParquetFile):
            rule, found = "columns are named in a Parquet file only.", f"columns = {self.columns!r}"
            fix = "pick columns of an array by their positions: array[:, [0, 2]]."
            raise ShapeError("Chunks()", rule, found=found, fix=fix)

    def _opened(self, source: Source) -> NDArray[Any] | ParquetFile | Iterable[Any]:
        path = Path(source) if isinstance(source, str | Path) else None
        if path is not None and path.suffix.lower() in (".parquet", ".pq"):
            return ParquetFile(path, "Chunks()", self.columns)
        if path is not None and path.suffix.lower() == ".npy":
            source = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path is not None:
            rule, fix = "a path must end in .npy or .parquet.", "np.save(path, array)"
            raise ShapeError("Chunks()", rule, found=str(path), fix=fix)
        if isinstance(source, np.ndarray) and source.ndim not in (1, 2):
            rule, fix = "an array must have rows and columns.", "array.reshape(len(array), -1)"
            raise ShapeError("Chunks()", rule, found=f"shape {source.shape}", fix=fix)
        if not isinstance(source, Iterable):
            rule, fix = "the source must be an array, a path, or arrays one after another.", "np.asarray(source)"
            raise ShapeError("Chunks()", rule, found=type(source).__name__, fix=fix)
        return source

    @property
    def total(self) -> int | None:
        """How many rows there are, or None where that is not known before the end."""
        if isinstance(self.source, ParquetFile):
            return self.source.rows
        return len(self.source) if isinstance(self.source, np.ndarray) else None

    @property
    def parts(self) -> int:
        """How many chunks there will be, 0 where that is not known."""
        return -(-(self.total or 0) // self.rows)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """Yield arrays of shape (rows, columns)."""
        if isinstance(self.source, ParquetFile):
            yield from self.source.batches(self.columns or self.source.names, self.rows)
            return
        arrays = [self.source] if isinstance(self.source, np.ndarray) else self.source
        for given in arrays:
            array = np.asarray(given)
            for start in range(0, len(array), self.rows):
                part = array[start : start + self.rows]
                yield part[:, None] if part.ndim == 1 else part
