"""Data that do not fit in memory: predictions and kernel sums chunk by chunk."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attlas.errors import DtypeError, ShapeError, public
from attlas.estimators.chunks import ROWS, Chunks, Source
from attlas.estimators.parquet import ParquetFile, write_parquet
from attlas.foundation.files import whole_file

if TYPE_CHECKING:
    from attlas.estimators.sums import Sums

__all__ = ["predict_chunks", "predict_file", "sum_chunks"]


class Predicts(Protocol):
    """What can predict: an AttentionRegressor, a Pipeline that ends in one, any estimator of scikit-learn."""

    def predict(self, X: Any, /) -> Any:
        """Return predictions for rows of X."""


def predict_chunks(
    model: Predicts,
    source: Source,
    *,
    return_std: bool = False,
    rows: int = ROWS,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[NDArray[Any]]:
    """Predict chunk by chunk: the same numbers as in one call, in the memory of one chunk.

    Parameters
    ----------
    model : AttentionRegressor, or any estimator of scikit-learn
        What predicts.
    source : array, data frame, Path, str, Chunks, or iterable of arrays or data frames
        Rows to predict for, as `Chunks` takes them. Of a Parquet file the columns that the model was fitted on
        are read, where it knows their names.
    return_std : bool
        Whether standard deviations are asked for, too.
    rows : int
        Rows of a chunk.
    progress : callable, optional
        Called with (rows done, rows in all; 0 where that is not known) after each chunk.

    Yields
    ------
    ndarray, shape (rows,) or (rows, outputs)
        Predictions. With `return_std`, of shape (rows, 2) or (rows, 2 · outputs): predictions, then their
        standard deviations.

    See Also
    --------
    predict_file : writes them to a file.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> x = np.arange(10.0)[:, None]
    >>> model = LinearRegression().fit(x, 2.0 * x[:, 0])
    >>> [chunk.shape for chunk in predict_chunks(model, x, rows=4)]
    [(4,), (4,), (2,)]
    """
    chunks = source if isinstance(source, Chunks) else Chunks(source, rows=rows)
    known: Any = getattr(model, "feature_names_in_", None)
    named = known is not None and chunks.columns is None and isinstance(chunks.source, ParquetFile)
    if named:
        chunks = Chunks(chunks.source.path, columns=list(map(str, known)), rows=chunks.rows)
    done = 0
    for chunk in chunks:
        X = _frame_of_numbers(chunk, chunks.columns) if named else chunk
        if return_std:
            both = model.predict(X, return_std=True)  # type: ignore[call-arg]  # of those that can
            found = np.column_stack([np.asarray(part) for part in both])
        else:
            found = np.asarray(model.predict(X))
        done += len(chunk)
        yield found
        if progress is not None:
            progress(done, chunks.total or 0)


@public("predict_file()")
def predict_file(
    model: Predicts,
    source: Source,
    out: Path | str,
    *,
    return_std: bool = False,
    names: Sequence[str] = ("prediction",),
    rows: int = ROWS,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Predict chunk by chunk into a file, which is whole or is not there.

    Parameters
    ----------
    model : AttentionRegressor, or any estimator of scikit-learn
        What predicts.
    source : array, data frame, Path, str, Chunks, or iterable of arrays or data frames
        Rows to predict for, as `Chunks` takes them.
    out : Path or str
        Where predictions go: ``.npy``, ``.csv``, or ``.parquet`` (with pyarrow).
    return_std : bool
        Whether standard deviations are written, too.
    names : sequence of str
        Names of the outputs, for files whose columns have names; ``_std`` is added for standard deviations.
    rows : int
        Rows of a chunk.
    progress : callable, optional
        Called with (rows done, rows in all; 0 where that is not known) after each chunk.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ShapeError
        If the file has another suffix or is the one that is read, or there are more or fewer outputs than names.
    DtypeError
        If predictions for ``.npy`` are objects or change their dtype, or those for Parquet are no numbers.
    MissingExtraError
        If Parquet is asked for and pyarrow is not installed.
    FileError
        If `out` cannot be written.

    Notes
    -----
    Predictions are appended to a hidden file beside `out`, which takes the name when it is complete: whoever
    stops the process leaves an older `out` as it was. Memory: one chunk and its predictions.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> x = np.arange(10.0)[:, None]
    >>> model = LinearRegression().fit(x, 2.0 * x[:, 0])
    >>> folder = getfixture("tmp_path")
    >>> np.load(predict_file(model, x, folder / "out.npy", rows=4))[-2:]
    array([16., 18.])
    """
    path = Path(out)
    if path.suffix.lower() not in SUFFIXES:
        raise ShapeError("out must end in .npy, .csv or .parquet.", f"out = {str(path)!r}", 'out="out.npy"')
    if isinstance(source, str | Path) and path.exists() and path.samefile(source):
        rule = "out must be another file than the one that is read."
        raise ShapeError(rule, f"out = {str(path)!r}", 'out="predicted.npy"')
    labels = [*names, *(f"{name}_std" for name in names)] if return_std else list(names)
    with whole_file(path) as unfinished:
        chunks = predict_chunks(model, source, return_std=return_std, rows=rows, progress=progress)
        write_chunks(unfinished, labels, chunks)
    return path


def sum_chunks(
    x: Tensor,
    pairs: Iterable[tuple[Any, Any]],
    bandwidth: float | Tensor,
    *,
    kernel: str = "gaussian",
    tolerance: float = 1e-7,
    progress: Callable[[int], None] | None = None,
) -> Sums:
    """Return the kernel sums of queries over keys that come in chunks.

    Parameters
    ----------
    x : Tensor, shape (m, d)
        Queries, all of them at once.
    pairs : iterable of (keys, values)
        Chunks of keys, shape (n_c, d), and of their values, shape (n_c,) or (n_c, e): arrays or tensors.
    bandwidth : float or Tensor, shape (d,)
        Bandwidth of the kernel.
    kernel : str
        Its name, as `attlas.estimators.sums.kernel_sums` takes it.
    tolerance : float
        Relative error that a chunk's sums may have.
    progress : callable, optional
        Called with the number of keys seen, after each chunk.

    Returns
    -------
    Sums
        Numerator and denominator of every query; ``mean()`` of it is the Nadaraya-Watson estimate.

    Raises
    ------
    ShapeError
        If there is no chunk.

    Notes
    -----
    Sums of two sets of keys are added, with the larger of their scales, which is exact: in which chunks the keys
    come does not matter, and machines that hold parts of the keys can merge what each has. Memory: one chunk, and
    ``m · (e + 2)`` numbers.

    Examples
    --------
    >>> import torch
    >>> x, keys = torch.rand(5, 2), torch.rand(100, 2)
    >>> values = keys.sum(1)
    >>> parts = sum_chunks(x, zip(keys.split(30), values.split(30)), 0.2)
    >>> whole = sum_chunks(x, [(keys, values)], 0.2)
    >>> torch.allclose(parts.mean(), whole.mean())
    True
    """
    from attlas.estimators.sums import kernel_sums

    total: Sums | None = None
    seen = 0
    for keys, values in pairs:
        k, v = (torch.as_tensor(part).to(x) for part in (keys, values))
        part = kernel_sums(kernel, x, k, v[:, None] if v.ndim == 1 else v, bandwidth, tolerance=tolerance)
        total = part if total is None else total.merge(part)
        seen += len(k)
        if progress is not None:
            progress(seen)
    if total is None:
        raise ShapeError("there must be a chunk of keys.", "no chunk", "pairs=[(keys, values)]", where="sum_chunks()")
    return total


def _frame_of_numbers(values: NDArray[Any], names: Sequence[str] | None) -> Any:
    """Return numbers with the names of their columns, which a model that was fitted with names asks for."""
    import pandas as pd

    return pd.DataFrame(values, columns=names)


SUFFIXES = (".npy", ".csv", ".parquet", ".pq")


def write_chunks(path: Path, names: Sequence[str], chunks: Iterable[NDArray[Any]]) -> None:
    r"""Write arrays one below another, in the format that the suffix of the file names.

    Parameters
    ----------
    path : Path
        The file, of one of `SUFFIXES`.
    names : sequence of str
        Names of the columns; an array on disk has none.
    chunks : iterable of ndarray, shape (rows,) or (rows, columns)
        What is written.

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
    >>> write_chunks(file, ["y"], [np.array([0.1, 2.0])])
    >>> file.read_text()
    'y\n0.1\n2.0\n'
    """
    suffix = path.suffix.lower()
    if suffix == ".npy":
        _write_array(path, chunks)
    elif suffix == ".csv":
        _write_text(path, names, _chunks_of_width(chunks, names))
    else:
        write_parquet(path, names, _chunks_of_width(chunks, names))


def _chunks_of_width(chunks: Iterable[NDArray[Any]], names: Sequence[str]) -> Iterator[NDArray[Any]]:
    """Yield chunks as tables of shape (rows, columns); raise where there is not one name for each column."""
    for chunk in chunks:
        table = chunk.reshape(len(chunk), -1)
        if table.shape[1] != len(names):
            rule, fix = "every column that is written must have a name.", "names=[...], one for each output."
            raise ShapeError(rule, f"{len(names)} names, {table.shape[1]} columns", fix, names=", ".join(names))
        yield table


def _write_array(path: Path, chunks: Iterable[NDArray[Any]]) -> None:
    """Append raw numbers after a header, which has room for a first axis that grows."""
    shape, dtype = (0,), np.dtype(np.float64)  # of a file without a chunk
    with path.open("wb") as file:
        _write_npy_header(file, shape, dtype)
        for place, chunk in enumerate(chunks):
            if chunk.dtype.hasobject or (place and chunk.dtype != dtype):
                rule = "all chunks of an .npy file must be of one dtype that is no object."
                raise DtypeError(rule, f"{chunk.dtype}{f' after {dtype}' if place else ''}", 'out="out.csv"')
            if place == 0:
                shape, dtype = (0, *chunk.shape[1:]), chunk.dtype
                file.seek(0)
                _write_npy_header(file, shape, dtype)
            file.write(np.ascontiguousarray(chunk, dtype=dtype).data)
            shape = (shape[0] + len(chunk), *shape[1:])
        file.seek(0)
        _write_npy_header(file, shape, dtype)


def _write_npy_header(file: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Write the header of a .npy file."""
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, facts)


def _write_text(path: Path, names: Sequence[str], chunks: Iterable[NDArray[Any]]) -> None:
    """Write chunks as CSV, the names as its first line."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for chunk in chunks:
            # repr() of a float is the shortest text that is read back as the same number.
            writer.writerows(chunk.tolist())
