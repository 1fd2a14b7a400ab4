"""A fitted estimator as one file: safetensors, with everything that is no array as JSON in its header."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from sklearn.base import BaseEstimator

from attlas.errors import AttlasError, CheckpointError, DtypeError, public
from attlas.foundation.files import whole_file
from attlas.scores import Score

_FORMAT_NAME, _FORMAT_VERSION = "attlas-estimator", 1
_METADATA_KEY = "attlas"
_ARRAY_NAMES = ("X_", "support_", "bandwidth_")
_NUMBER_NAMES = ("n_features_in_", "target_name_", "table_columns_", "n_iter_", "loo_loss_", "loo_score_", "loo_rows_")
_READ_ERRORS = (
    SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError,
    MemoryError,
)  # fmt: skip

Array = NDArray[Any]
Kind = TypeVar("Kind", bound=BaseEstimator)


@public("save()")
def write_fit(estimator: BaseEstimator, path: str | os.PathLike[str]) -> None:
    """Write a fitted estimator; the file appears, or replaces an older one, when it is complete.

    Raises
    ------
    CheckpointError, DtypeError
        As `AttentionEstimator.save` says.
    """
    arrays, facts = _to_arrays(estimator)
    facts["sha256"] = {name: _checksum_of_array(array) for name, array in arrays.items()}
    text = json.dumps(facts, sort_keys=True)
    metadata = {_METADATA_KEY: text, "format": _FORMAT_NAME, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    with whole_file(path, kind=CheckpointError) as unfinished:
        save_file(arrays, unfinished, metadata)


def read_fit(kind: type[Kind], path: str | os.PathLike[str], kernel: Score | None) -> Kind:
    """Return the estimator in a file.

    Raises
    ------
    CheckpointError
        As `AttentionEstimator.load` says.
    """
    arrays, facts = _read_checked(Path(path))
    if facts["class"] != kind.__name__:
        raise _broken_file_error(
            Path(path), f"a fitted {facts['class']}, not a {kind.__name__}", f"{facts['class']}.load(path)"
        )
    stored = facts["parameters"]["kernel"]
    if (stored is None) != (kernel is not None):
        found = f"a kernel that was the score {facts['score']}" if stored is None else f"the kernel {stored!r}"
        fix = f"load(path, kernel=attlas.{facts['score']}(...))" if stored is None else "leave kernel out."
        raise _broken_file_error(Path(path), found, fix)
    try:
        return _from_arrays(kind, arrays, facts, kernel)
    except (*_READ_ERRORS, AttlasError) as error:
        raise _broken_file_error(Path(path), f"contents that do not fit together ({error})") from error


def _to_arrays(estimator: Any) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the arrays of a fitted estimator by name, and its settings and further facts as plain data."""
    arrays = {name: np.ascontiguousarray(getattr(estimator, name)) for name in _ARRAY_NAMES}
    if estimator.sample_weight_ is not None:
        arrays["sample_weight_"] = np.ascontiguousarray(estimator.sample_weight_)
    facts: dict[str, Any] = {"version": _FORMAT_VERSION, "class": type(estimator).__name__, "score": None}
    labels = getattr(estimator, "classes_", None)
    if labels is None:
        arrays["y_"] = np.ascontiguousarray(estimator.y_)
    else:
        arrays["y_"] = np.searchsorted(labels, estimator.y_)
        facts["classes"] = {"dtype": labels.dtype.str, "labels": _plain_labels(labels)}
    arrays |= {f"path_{name}": np.ascontiguousarray(array) for name, array in getattr(estimator, "path_", {}).items()}
    parameters = {name: _as_json(value) for name, value in estimator.get_params(deep=False).items()}
    if isinstance(estimator.kernel, Score):
        facts["score"], parameters["kernel"] = type(estimator.kernel).__name__, None
    names = getattr(estimator, "feature_names_in_", None)
    facts |= {"parameters": parameters, "feature_names": None if names is None else list(names)}
    facts["facts"] = {name: _as_json(getattr(estimator, name)) for name in _NUMBER_NAMES if hasattr(estimator, name)}
    return arrays, facts


def _from_arrays(kind: type[Kind], arrays: dict[str, Array], facts: dict[str, Any], kernel: Score | None) -> Kind:
    """Return a fitted estimator from stored arrays and facts; `kernel` is given where it is a Score."""
    parameters = dict(facts["parameters"])
    dtype = parameters["dtype"]
    parameters["dtype"] = None if dtype is None else {"float32": torch.float32, "float64": torch.float64}[dtype]
    parameters["kernel"] = parameters["kernel"] if kernel is None else kernel
    estimator: Any = kind(**parameters)
    path = {name.removeprefix("path_"): array for name, array in arrays.items() if name.startswith("path_")}
    for name in (*_ARRAY_NAMES, "y_"):
        setattr(estimator, name, arrays[name])
    estimator.sample_weight_ = arrays.get("sample_weight_")
    for name, value in facts["facts"].items():
        if name not in _NUMBER_NAMES:
            raise ValueError(name)
        setattr(estimator, name, float("nan") if value is None else value)
    if path:
        estimator.path_ = path
    if "classes" in facts:
        labels = facts["classes"]
        estimator.classes_ = np.array(labels["labels"], dtype=np.dtype(labels["dtype"]))
        estimator.y_ = estimator.classes_[arrays["y_"]]
    if facts["feature_names"] is not None:
        estimator.feature_names_in_ = np.array(facts["feature_names"], dtype=object)
    # Rebuilds, in the estimator, what predictions need and the file does not have.
    estimator.resume()
    return estimator


def _read_checked(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """Check the checksums of a file, and return its contents."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT_NAME:
                raise _broken_file_error(path, "a safetensors file that no estimator wrote")
            text = metadata.get(_METADATA_KEY, "")
            if hashlib.sha256(text.encode()).hexdigest() != metadata.get("sha256"):
                raise _broken_file_error(path, "a header that is not the one that was written: it was changed")
            facts = json.loads(text)
            if facts["version"] > _FORMAT_VERSION:
                found = f"format version {facts['version']}, this attlas reads up to {_FORMAT_VERSION}"
                raise _broken_file_error(path, found, "update attlas.")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
        for name, digest in facts["sha256"].items():
            if name not in arrays or _checksum_of_array(arrays[name]) != digest:
                raise _broken_file_error(path, f"{name} is not what was written: it was changed")
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise _broken_file_error(path, "no such file", "give the path of save().") from error
    except _READ_ERRORS as error:
        found = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise _broken_file_error(path, f"{found}: it was cut off, changed, or is no safetensors file") from error
    return arrays, facts


def _checksum_of_array(array: Array) -> str:
    """Return the checksum of an array with its dtype and shape."""
    total = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    total.update(np.ascontiguousarray(array).data if array.size else b"")
    return total.hexdigest()


def _as_json(value: Any) -> Any:
    """Return a setting or a number as JSON knows it."""
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    # A generator of random numbers has a state, not a name: a loaded estimator starts from no seed.
    return value if isinstance(value, str | int | float | bool) else None


def _plain_labels(labels: Array) -> list[Any]:
    """Return labels as plain data; raise where one is neither text, number nor bool."""
    found: list[Any] = labels.tolist()
    if all(isinstance(label, str | int | float | bool) for label in found):
        return found
    rule, kinds = "labels must be texts, numbers or True and False.", sorted({type(label).__name__ for label in found})
    raise DtypeError(rule, f"labels of the kinds {kinds}", "fit to y.astype(str).", where="save()")


def _broken_file_error(path: Path, found: str, fix: str = "save() the estimator again.") -> CheckpointError:
    """Return the error of a file that `save()` did not write."""
    rule = "the file must be one that save() wrote, as it wrote it."
    return CheckpointError(rule, found, fix, path=str(path), where="load()")
