"""Names the columns of a data frame that hold no numbers, where scikit-learn's error shows a cell only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from attlas.errors import AttlasError, DtypeError, listed


@contextmanager
def naming_text_columns(X: Any, y: Any = None) -> Iterator[None]:
    """Raise a DtypeError in place of an error in a ``with`` block, if a column of data is no number.

    Parameters
    ----------
    X, y : array-like
        Features and targets; only a data frame has names for its columns.
    """
    try:
        yield
    except AttlasError:
        raise
    except (TypeError, ValueError) as error:
        dates, texts = _columns_without_numbers(X)
        rule = "every feature must be a number."
        if texts:
            names = ", ".join(map(repr, texts))
            fix = (
                f"make_pipeline(make_column_transformer((OneHotEncoder(), [{names}]), remainder='passthrough'), "
                "AttentionRegressor()) of scikit-learn, or attlas regress, which does so by itself."
            )
            raise DtypeError(rule, f"texts in column {listed([*map(repr, texts)])}", fix, X=type(X).__name__) from error
        if dates:
            fix = f"days since the first one: (X[{dates[0]!r}] - X[{dates[0]!r}].min()).dt.days"
            raise DtypeError(rule, f"dates in column {listed([*map(repr, dates)])}", fix, X=type(X).__name__) from error
        if y is not None and np.asarray(y).dtype.kind in "OUS" and not _are_numbers(y):
            fix = "AttentionClassifier, which predicts classes."
            raise DtypeError("the target of a regression must be a number.", "texts", fix) from error
        raise


def _columns_without_numbers(X: Any) -> tuple[list[Any], list[Any]]:
    """Return the names of the columns of dates, and of the others that are no numbers; none of what is no frame."""
    names = list(X.columns) if hasattr(X, "columns") and hasattr(X, "dtypes") else []
    columns = [X.iloc[:, i] if hasattr(X, "iloc") else X[name] for i, name in enumerate(names)]
    dates = [name for name, column in zip(names, columns, strict=True) if np.asarray(column).dtype.kind in "mM"]
    others = [name for name, column in zip(names, columns, strict=True) if not _are_numbers(column)]
    return dates, [name for name in others if name not in dates]


def _are_numbers(values: Any) -> bool:
    """Return whether values can be converted to float64."""
    try:
        np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        return False
    return True
