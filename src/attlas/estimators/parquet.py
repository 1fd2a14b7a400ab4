"""Parquet files as numbers, some rows at a time, through polars or pyarrow; neither is needed for anything else."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attlas.errors import MissingExtraError, ShapeError

__all__ = ["ParquetFile", "write_parquet"]


class ParquetFile:
    """Columns of a Parquet file as numbers, some rows at a time.

    Parameters
    ----------
    path : Path
        The file.
    where : str
        Who asks, for errors.
    columns : sequence of str, optional
        Columns that must be there.

    Raises
    ------
    MissingExtraError
        If neither polars nor pyarrow is installed.
    ShapeError
        If the file cannot be read, or a column is not there.

    Notes
    -----
    Memory: a chunk, and the row group that it is cut from. `kinds` says of each column whether it holds a
    "number", a "bool", or else the type that the file gives it.
    """

    def __init__(self, path: Path, where: str, columns: Sequence[str] | None = None) -> None:
        self.path = path
        self._reader = self._open(where)
        self.names, self.kinds, self.rows = self._reader.describe()
        absent = [name for name in columns or () if name not in self.names]
        if absent:
            raise _error(
                where, "every column must be in the file.", f"no column {absent[0]!r} in {path.name}",
                f"one of {', '.join(self.names[:12])}",
            )  # fmt: skip

    def _open(self, where: str) -> _Polars | _Arrow:
        for name, reader in (("polars", _Polars), ("pyarrow", _Arrow)):
            if importlib.util.find_spec(name) is not None:
                try:
                    return reader(self.path)
                except Exception as error:  # noqa: BLE001  # each library has errors of its own
                    found = (str(error).splitlines() or [type(error).__name__])[0]
                    raise _error(
                        where, "the file must be Parquet.", f"{self.path}: {found}", "a Parquet file"
                    ) from None
        raise _missing(where, "read", self.path)

    def batches(self, columns: Sequence[str], rows: int = 65_536) -> Iterator[NDArray[np.float64]]:
        """Yield float64 arrays of shape (rows, columns); a missing value is NaN."""
        for whole in self._reader.arrays(list(columns), rows):
            for start in range(0, len(whole), rows):
                yield whole[start : start + rows]


class _Polars:
    def __init__(self, path: Path) -> None:
        self.polars: Any = importlib.import_module("polars")
        self.frame = self.polars.scan_parquet(path, glob=False)
        self.schema = self.frame.collect_schema()

    def describe(self) -> tuple[list[str], dict[str, str], int]:
        kinds = {
            name: "number" if kind.is_numeric() else "bool" if kind == self.polars.Boolean else str(kind).lower()
            for name, kind in self.schema.items()
        }
        rows = int(self.frame.select(self.polars.len()).collect().item())
        return list(self.schema), kinds, rows

    def arrays(self, columns: list[str], rows: int) -> Iterator[NDArray[np.float64]]:
        chosen = self.frame.select(self.polars.col(columns).cast(self.polars.Float64))
        if hasattr(chosen, "collect_batches"):
            frames = chosen.collect_batches(chunk_size=rows, maintain_order=True, engine="streaming")
        else:  # before polars 1.32
            total = int(self.frame.select(self.polars.len()).collect().item())
            frames = (chosen.slice(start, rows).collect() for start in range(0, total, rows))
        for frame in frames:
            yield np.ascontiguousarray(frame.fill_null(float("nan")).to_numpy())


class _Arrow:
    def __init__(self, path: Path) -> None:
        self.arrow: Any = importlib.import_module("pyarrow")
        self.file: Any = importlib.import_module("pyarrow.parquet").ParquetFile(path, pre_buffer=False)

    def describe(self) -> tuple[list[str], dict[str, str], int]:
        types = self.arrow.types
        kinds = {}
        for field in self.file.schema_arrow:
            number = types.is_integer(field.type) or types.is_floating(field.type) or types.is_decimal(field.type)
            kinds[field.name] = "number" if number else "bool" if types.is_boolean(field.type) else str(field.type)
        return list(kinds), kinds, int(self.file.metadata.num_rows)

    def arrays(self, columns: list[str], rows: int) -> Iterator[NDArray[np.float64]]:
        double = self.arrow.float64()
        for batch in self.file.iter_batches(batch_size=rows, columns=columns):
            # A batch has its columns in the order of the file.
            found = [batch.column(batch.schema.get_field_index(name)) for name in columns]
            whole = [c.cast(self.arrow.int8()) if self.arrow.types.is_boolean(c.type) else c for c in found]
            yield np.column_stack([c.cast(double, safe=False).to_numpy(zero_copy_only=False) for c in whole])


def write_parquet(path: Path, names: Sequence[str], chunks: Iterable[NDArray[Any]], where: str) -> None:
    """Write arrays of shape (rows, len(names)) one below another: the memory of a chunk.

    Raises
    ------
    MissingExtraError
        If neither polars nor pyarrow is installed.
    """
    if importlib.util.find_spec("pyarrow") is not None:
        _write_with_arrow(path, names, chunks)
    elif importlib.util.find_spec("polars") is not None:
        _write_with_polars(path, names, chunks)
    else:
        raise _missing(where, "write", path)


def _write_with_arrow(path: Path, names: Sequence[str], chunks: Iterable[NDArray[Any]]) -> None:
    arrow: Any = importlib.import_module("pyarrow")
    schema = arrow.schema([(name, arrow.float64()) for name in names])
    with importlib.import_module("pyarrow.parquet").ParquetWriter(path, schema) as writer:
        for chunk in chunks:
            columns = np.asarray(chunk, dtype=np.float64).reshape(len(chunk), -1).T
            writer.write_table(arrow.table([np.ascontiguousarray(column) for column in columns], schema=schema))


def _write_with_polars(path: Path, names: Sequence[str], chunks: Iterable[NDArray[Any]]) -> None:
    polars: Any = importlib.import_module("polars")
    schema = dict.fromkeys(names, polars.Float64)

    def frames(columns: object, predicate: object, most: object, size: object) -> Iterator[Any]:
        for chunk in chunks:
            whole = np.asarray(chunk, dtype=np.float64).reshape(len(chunk), -1)
            yield polars.DataFrame(whole, schema=schema)

    # The engine pulls one frame after another: nothing has to be held.
    source = importlib.import_module("polars.io.plugins").register_io_source(frames, schema=schema)
    source.sink_parquet(path)


def _missing(where: str, verb: str, path: Path) -> MissingExtraError:
    return MissingExtraError(
        where,
        f"polars or pyarrow must be installed to {verb} Parquet.",
        {"file": str(path)},
        found="no module named polars or pyarrow",
        fix="pip install polars",
    )


def _error(where: str, rule: str, found: str, fix: str) -> ShapeError:
    return ShapeError(where, rule, found=found, fix=fix)
