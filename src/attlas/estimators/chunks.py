"""Rows of arrays and data frames in memory, of arrays on disk, and of Parquet files, some at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attlas.errors import ShapeError, public
from attlas.estimators.parquet import ParquetFile
from attlas.foundation.checks import whole_number

ROWS = 65_536
Source: TypeAlias = "NDArray[Any] | Chunks | Path | str | Iterable[ArrayLike]"


class Chunks:
    """Rows of a source, some at a time; a source that can be read again can be iterated again.

    Parameters
    ----------
    source : array, data frame, Path, str, or iterable of arrays or data frames
        An array or a tensor, a ``numpy.memmap`` among them; the path of an ``.npy`` file, which is mapped, or of a
        ``.parquet`` file, which is read through pyarrow; or arrays of shape (rows, columns), one after another. Chunks
        of a data frame are data frames, so that a model can tell its columns by their names.
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

    @public("Chunks()")
    def __init__(self, source: Source, columns: Sequence[str] | None = None, rows: int = ROWS) -> None:
        self.rows = whole_number("rows", rows, "leave rows out.")
        self.columns = None if columns is None else list(columns)
        self.source: Any = self._opened_source(source)
        if self.columns is not None and not isinstance(self.source, ParquetFile):
            fix = "pick columns of an array by their positions: array[:, [0, 2]]."
            raise ShapeError("columns are named in a Parquet file only.", f"columns = {self.columns!r}", fix)

    @public("Chunks()")
    def _opened_source(self, source: Source) -> NDArray[Any] | ParquetFile | Iterable[Any]:
        """Return what chunks are read from: an array (of a .npy file: mapped), a ParquetFile, or an iterable."""
        path = Path(source) if isinstance(source, str | Path) else None
        if path is not None and path.suffix.lower() in (".parquet", ".pq"):
            return ParquetFile(path, self.columns)
        if path is not None and path.suffix.lower() == ".npy":
            source = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path is not None:
            raise ShapeError("a path must end in .npy or .parquet.", str(path), "np.save(path, array)")
        if hasattr(source, "__array__") and not _is_frame(source):
            source = np.asanyarray(source)
            if source.ndim not in (1, 2):
                rule = "an array must have rows and columns."
                raise ShapeError(rule, f"shape {source.shape}", "array.reshape(len(array), -1)")
        if not isinstance(source, Iterable):
            rule = "the source must be an array, a path, or arrays one after another."
            raise ShapeError(rule, type(source).__name__, "np.asarray(source)")
        return source

    @property
    def total(self) -> int | None:
        """How many rows there are, or None where that is not known before the end."""
        if isinstance(self.source, ParquetFile):
            return self.source.rows
        return len(self.source) if _is_table(self.source) else None

    def __iter__(self) -> Iterator[Any]:
        """Yield arrays or data frames of shape (rows, columns)."""
        if isinstance(self.source, ParquetFile):
            yield from self.source.batches(self.columns or self.source.names, self.rows)
            return
        for given in [self.source] if _is_table(self.source) else self.source:
            table = given if _is_frame(given) else np.asarray(given)
            for start in range(0, len(table), self.rows):
                part = getattr(table, "iloc", table)[start : start + self.rows]
                yield part[:, None] if part.ndim == 1 else part


def _is_frame(table: object) -> bool:
    """Tell whether a table is a data frame, of pandas or another library."""
    return hasattr(table, "columns") and hasattr(table, "__array__")


def _is_table(source: object) -> bool:
    """Tell whether a source is one table, and not several."""
    return isinstance(source, np.ndarray) or _is_frame(source)
