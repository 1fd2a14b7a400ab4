"""Tables that are written chunk by chunk."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attlas.errors import DtypeError, ShapeError
from attlas.estimators.parquet import write_parquet

SUFFIXES = (".npy", ".csv", ".parquet", ".pq")


def write_chunks(path: Path, names: Sequence[str], chunks: Iterable[NDArray[Any]], where: str) -> None:
    r"""Write arrays one below another, in the format that the suffix of the file names.

    Parameters
    ----------
    path : Path
        The file, of one of `SUFFIXES`.
    names : sequence of str
        Names of the columns; an array on disk has none.
    chunks : iterable of ndarray, shape (rows,) or (rows, columns)
        What is written.
    where : str
        The public function, for errors.

    Raises
    ------
    ShapeError
        If there are more or fewer columns than names.
    DtypeError
        If chunks of an array differ in dtype, or hold objects.

    Examples
    --------
    >>> import numpy as np
    >>> file = getfixture("tmp_path") / "out.csv"
    >>> write_chunks(file, ["y"], [np.array([0.1, 2.0])], "here")
    >>> file.read_text()
    'y\n0.1\n2.0\n'
    """
    suffix = path.suffix.lower()
    if suffix == ".npy":
        _write_array(path, chunks, where)
    elif suffix == ".csv":
        _write_text(path, names, _of_width(chunks, names, where))
    else:
        write_parquet(path, names, _of_width(chunks, names, where), where)


def _of_width(chunks: Iterable[NDArray[Any]], names: Sequence[str], where: str) -> Iterator[NDArray[Any]]:
    for chunk in chunks:
        table = chunk.reshape(len(chunk), -1)
        if table.shape[1] != len(names):
            rule = "every column that is written must have a name."
            given, fix = {"names": ", ".join(names)}, "names=[...], one for each output."
            raise ShapeError(where, rule, given, found=f"{len(names)} names, {table.shape[1]} columns", fix=fix)
        yield table


def _write_array(path: Path, chunks: Iterable[NDArray[Any]], where: str) -> None:
    """Append raw numbers after a header, which has room for a first axis that grows."""
    shape, dtype = (0,), np.dtype(np.float64)
    with path.open("wb") as file:
        _header(file, shape, dtype)
        for place, chunk in enumerate(chunks):
            if chunk.dtype.hasobject or (place and chunk.dtype != dtype):
                rule, fix = "all chunks of an .npy file must be of one dtype that is no object.", 'out="out.csv"'
                raise DtypeError(where, rule, found=f"{chunk.dtype}{f' after {dtype}' if place else ''}", fix=fix)
            if place == 0:
                shape, dtype = (0, *chunk.shape[1:]), chunk.dtype
                file.seek(0)
                _header(file, shape, dtype)
            file.write(np.ascontiguousarray(chunk, dtype=dtype).data)
            shape = (shape[0] + len(chunk), *shape[1:])
        file.seek(0)
        _header(file, shape, dtype)


def _header(file: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, facts)


def _write_text(path: Path, names: Sequence[str], chunks: Iterable[NDArray[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for chunk in chunks:
            # repr() of a float is the shortest text that is read back as the same number.
            writer.writerows(chunk.tolist())
