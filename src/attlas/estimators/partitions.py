"""Kernel regression over the partitions of a Dask frame: each is summed where it is, and the sums are merged."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attlas.errors import DtypeError, ShapeError, import_extra, kind, public
from attlas.estimators.bandwidth import in_bandwidths
from attlas.estimators.sums import Sums, kernel_sums
from attlas.foundation.installation import install_command

_MERGED_AT_ONCE = 8  # partial sums that one task merges


def is_dask(data: object) -> bool:
    """Return whether data are a collection of Dask, which is computed later and elsewhere."""
    return hasattr(data, "__dask_graph__")


def refuse_dask(*data: object) -> None:
    """Raise a DtypeError if data are a collection of Dask: they would be pulled into this process."""
    for one in data:
        if is_dask(one):
            fix = "fit on a sample, frame.sample(frac=0.01).compute(), then predict(queries, memory=frame)."
            raise DtypeError("data must be in memory here.", f"a Dask {kind(one)}", fix)


def features_of(model: Any, frame: Any, outputs: int) -> tuple[list[str], list[str]]:
    """Return the columns of the features and of the outputs of a frame.

    Parameters
    ----------
    model : AttentionRegressor
        It was fitted on a frame of named features.
    frame : dask.dataframe.DataFrame
        Features and outputs; every other column is an output.
    outputs : int
        How many outputs there are.

    Raises
    ------
    DtypeError
        If it is no Dask data frame, or the model knows no names.
    ShapeError
        If its columns do not fit.
    """
    names = list(names_of(model, frame))
    others = [name for name in frame.columns if name not in names]
    absent = [name for name in names if name not in frame.columns]
    if absent or len(others) != outputs:
        rule = "memory must have the columns of the features, and one more for each output."
        found = f"no column {absent[0]!r}" if absent else f"{len(others)} more for {outputs}: {others}"
        raise ShapeError(rule, found, f"memory[{[*names, 'y']}]", where="predict()")
    return names, others


@public("predict()")
def names_of(model: Any, frame: Any) -> NDArray[Any]:
    """Return the columns of the features of a Dask frame, or raise an error for other collections."""
    if not (is_dask(frame) and hasattr(frame, "columns") and hasattr(frame, "map_partitions")):
        raise DtypeError("Dask collections must be data frames.", kind(frame), "dask.dataframe.read_parquet(path)")
    names: NDArray[Any] | None = getattr(model, "feature_names_in_", None)
    if names is None:
        fix = "fit on a data frame with the same columns."
        raise DtypeError("columns are told by their names.", "an estimator that was fitted on an array", fix)
    return names


def predicted_partitions(model: Any, frame: Any, outputs: int) -> Any:
    """Return predictions for a Dask frame, partition by partition, as a Dask series or data frame."""
    names, shape = list(names_of(model, frame)), model.y_.shape[1:]

    def predicted(part: Any) -> Any:
        """Return the predictions for one partition."""
        # An empty partition has no points that scikit-learn would take.
        found = model.predict(part[names]) if len(part) else np.zeros((0, outputs))
        return predictions_of(part, found.reshape(len(part), outputs), shape)

    return frame.map_partitions(predicted, meta=predictions_of(frame._meta, np.zeros((0, outputs)), shape))


def predictions_of(part: Any, values: NDArray[Any], shape: tuple[int, ...]) -> Any:
    """Return predictions (rows, outputs) with the index of a partition; a series where a query has one number."""
    pandas = importlib.import_module("pandas")
    values = values.astype(np.float64)
    return pandas.DataFrame(values, index=part.index) if shape else pandas.Series(values[:, 0], index=part.index)


@dataclass(frozen=True, eq=False)
class Partition:
    """What a worker must know to sum a kernel over one partition.

    Parameters
    ----------
    kernel : str
        Name of the kernel.
    x : Tensor, shape (m, d)
        Queries in bandwidths.
    centre, bandwidth : ndarray, shape (d,)
        What is taken off the points, and what they are divided by.
    shift, unit : ndarray, shape (e,)
        What is taken off the outputs, and what they are divided by.
    tolerance : float
        As of `kernel_sums`.
    names : tuple of two lists of str
        Columns of the features, and of the outputs.
    """

    kernel: str
    x: Tensor
    centre: NDArray[np.float64]
    bandwidth: NDArray[np.float64]
    shift: NDArray[np.float64]
    unit: NDArray[np.float64]
    tolerance: float
    names: tuple[list[str], list[str]]

    def sums(self, frame: Any) -> Sums | None:
        """Return numerators and denominators over a partition; None for one without rows."""
        if not len(frame):
            return None
        points = torch.from_numpy(self.points(frame, self.names[0])).to(self.x)
        outputs = torch.as_tensor((finite(frame, self.names[1]) - self.shift) / self.unit).to(self.x)
        return kernel_sums(self.kernel, self.x, points, outputs, 1.0, tolerance=self.tolerance)

    def points(self, frame: Any, names: list[str]) -> NDArray[np.float64]:
        """Return some columns of a partition, the features, in bandwidths."""
        return in_bandwidths(finite(frame, names), self.centre, self.bandwidth)


def finite(frame: Any, names: list[str]) -> NDArray[np.float64]:
    """Return some columns of a partition as numbers, or raise an error where one is not finite."""
    numbers: NDArray[np.float64] = frame[names].to_numpy(dtype=np.float64)
    if not np.isfinite(numbers).all():
        rule = "Dask frames must be finite."
        raise ShapeError(rule, "NaN or infinity in a partition", "frame.dropna()", where="predict()")
    return numbers


def merged_partitions(frame: Any, part: Partition) -> Sums:
    """Return the sums over all partitions of a Dask frame, merged on the workers.

    Raises
    ------
    MissingExtraError
        If Dask is not installed.
    ShapeError
        If the frame has no rows.
    """
    dask = dask_module()
    known = dask.delayed(part, pure=False)
    parts = [dask.delayed(Partition.sums)(known, one) for one in frame.to_delayed()]
    while len(parts) > 1:
        parts = [
            dask.delayed(_merged_sums)(parts[i : i + _MERGED_AT_ONCE]) for i in range(0, len(parts), _MERGED_AT_ONCE)
        ]
    whole = parts[0].compute() if parts else None
    if whole is None:
        raise no_rows()
    return whole


def no_rows() -> ShapeError:
    """Return the error for a memory that is empty."""
    return ShapeError("memory must have rows.", "no row", "dask.dataframe.read_parquet(path)", where="predict()")


@public("predict()")
def dask_module() -> Any:
    """Return Dask, or raise a MissingExtraError."""
    return import_extra("dask", "Dask must be installed.", install_command("dask"))


def _merged_sums(parts: list[Sums | None]) -> Sums | None:
    """Return the sums of some partitions; None where none has rows."""
    known = [part for part in parts if part is not None]
    for other in known[1:]:
        known[0] = known[0].merge(other)
    return known[0] if known else None
