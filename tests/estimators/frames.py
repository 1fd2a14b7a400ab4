"""Tables that Dask cuts into partitions."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

__all__ = ["FEATURES", "UNIT", "dask", "frames", "table"]

dask = pytest.importorskip("dask", reason="Dask, of the extra attlas[dask], is not installed")
frames = pytest.importorskip("dask.dataframe", reason="Dask's data frames, of attlas[dask], are not installed")

FEATURES = ["north", "east"]
UNIT = np.array([1.0, 50.0])


def table(n: int = 400, outputs: int = 1, seed: int = 3) -> pd.DataFrame:
    """Return places, and numbers that depend on them."""
    random = np.random.default_rng(seed)
    found = pd.DataFrame(random.normal(size=(n, 2)) * UNIT + [0.0, 1e3], columns=FEATURES)
    for i in range(outputs):
        found[f"y{i}"] = np.sin(3 * found.north + i) + found.east / 50 + 1e4
    return found
