"""Parquet files as numbers, some rows at a time, through pyarrow; the other estimators do not need it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attlas.errors import DtypeError, ShapeError, import_extra


class ParquetFile:
    """Columns of a Parquet file as numbers, some rows at a time.

    Parameters
    ----------
    path : Path
        The file.
    columns : sequence of str, optional
        Columns that must be there.

    Raises
    ------
    MissingExtraError
        If pyarrow is not installed.
    ShapeError
        If the file cannot be read, or a column is not there.

    Notes
    -----
    Memory: a chunk, and the row group that it is cut from.
    """

    def __init__(self, path: Path, columns: Sequence[str] | None = None) -> None:
        self.path = path
        try:
            self._file = _pyarrow_parquet(path).ParquetFile(path, pre_buffer=False)
        except (OSError, ValueError) as error:  # pyarrow's own errors about files are of these classes
            found = f"{path}: {(str(error).splitlines() or [type(error).__name__])[0]}"
            raise ShapeError("the file must be Parquet.", found, "a Parquet file") from None
        self.names: list[str] = self._file.schema_arrow.names
        self.rows = int(self._file.metadata.num_rows)
        absent = [name for name in columns or () if name not in self.names]
        if absent:
            found = f"no column {absent[0]!r} in {path.name}"
            raise ShapeError("every column must be in the file.", found, f"one of {', '.join(self.names[:12])}")

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[NDArray[np.float64]]:
        """Yield float64 arrays of shape (at most `rows`, columns); a missing value is NaN."""
        columns = list(columns)
        for batch in self._file.iter_batches(batch_size=rows, columns=columns):
            # A batch has its columns in the order of the file.
            yield np.ascontiguousarray(
                batch.to_pandas(ignore_metadata=True)[columns].to_numpy(np.float64, na_value=np.nan)
            )


def write_parquet(path: Path, names: Sequence[str], chunks: Iterable[NDArray[Any]]) -> None:
    """Write arrays of shape (rows, len(names)) one below another: the memory of a chunk.

    Raises
    ------
    DtypeError
        If they do not hold numbers.
    MissingExtraError
        If pyarrow is not installed.
    """
    parquet, arrow = _pyarrow_parquet(path), importlib.import_module("pyarrow")
    schema = arrow.schema([(name, arrow.float64()) for name in names])
    with parquet.ParquetWriter(path, schema) as writer:
        for chunk in chunks:
            if chunk.dtype.kind not in "fiub":
                raise DtypeError("predictions in a Parquet file must be numbers.", str(chunk.dtype), 'out="out.csv"')
            columns = np.ascontiguousarray(chunk.T, dtype=np.float64)
            writer.write_table(arrow.table(list(columns), schema=schema))


def _pyarrow_parquet(path: Path) -> Any:
    """Return the module ``pyarrow.parquet``, or raise a MissingExtraError."""
    rule = "pyarrow must be installed for Parquet files."
    return import_extra("pyarrow.parquet", rule, "pip install pyarrow", file=str(path))
