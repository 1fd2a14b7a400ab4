"""How well kernel regression predicts beside other regressions: cross-validated on data that scikit-learn carries.

Run with ``make bench`` or ``python benchmarks/regression_quality.py``. docs/guides/regression.md quotes the results.
Every model sees the same folds and scaled features; what a model has to choose is chosen inside the fold: the
number of neighbours by cross-validation, bandwidths by the leave-one-out error. No timings: quality only.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import sklearn
from sklearn.datasets import load_diabetes, make_friedman1, make_friedman2, make_friedman3
from sklearn.dummy import DummyRegressor
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, KFold
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from attlas.estimators import AttentionRegressor
from harness import save

Data = tuple[np.ndarray, np.ndarray]


def sine(n: int = 400) -> Data:
    """One feature, a wave whose frequency grows: smooth, and anything but a line."""
    generator = np.random.default_rng(0)
    x = generator.uniform(0.0, 3.0, (n, 1))
    return x, np.sin(2.0 * x[:, 0] ** 2) + 0.3 * generator.normal(size=n)


def steps(n: int = 500) -> Data:
    """Five features, jumps along two of them: what trees are made of."""
    generator = np.random.default_rng(1)
    x = generator.uniform(0.0, 1.0, (n, 5))
    height = np.floor(4.0 * x[:, 0]) * (x[:, 1] > 0.5) + 2.0 * (x[:, 2] > 0.3)
    return x, height + 0.5 * generator.normal(size=n)


def additive(n: int = 500) -> Data:
    """Ten features that all matter, each by itself: too many for any neighbourhood."""
    generator = np.random.default_rng(2)
    x = generator.uniform(-1.0, 1.0, (n, 10))
    return x, np.sin(np.pi * x).sum(1) + generator.normal(size=n)


DATA: dict[str, Callable[[], Data]] = {
    "sine": sine,
    "diabetes": lambda: load_diabetes(return_X_y=True),
    "friedman1": lambda: make_friedman1(500, 10, noise=1.0, random_state=0),
    "friedman2": lambda: make_friedman2(500, noise=125.0, random_state=0),
    "friedman3": lambda: make_friedman3(500, noise=0.1, random_state=0),
    "steps": steps,
    "additive": additive,
}

MODELS: dict[str, Callable[[], Any]] = {
    "mean": DummyRegressor,
    "linear": LinearRegression,
    "nearest neighbours": lambda: GridSearchCV(
        KNeighborsRegressor(weights="distance"), {"n_neighbors": [3, 5, 8, 12, 20, 35]}, cv=5
    ),
    "random forest": lambda: RandomForestRegressor(200, random_state=0),
    "gradient boosting": lambda: HistGradientBoostingRegressor(random_state=0),
    "kernel, Scott": lambda: AttentionRegressor(bandwidth="scott"),
    "kernel": AttentionRegressor,
    "kernel, local lines": lambda: AttentionRegressor(degree=1),
}


def judge(data: Data, make: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Return R² over the left-out folds, its mean and standard deviation over repeats with other folds."""
    X, y = data
    scores = []
    for repeat in range(repeats):
        left = np.empty_like(y, dtype=float)
        for train, test in KFold(5, shuffle=True, random_state=repeat).split(X):
            model = make_pipeline(StandardScaler(), make()).fit(X[train], y[train])
            left[test] = model.predict(X[test])
        scores.append(1.0 - np.square(y - left).sum() / np.square(y - y.mean()).sum())
    return {"r2": round(float(np.mean(scores)), 3), "std": round(float(np.std(scores)), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1, help="times with other folds (default: %(default)s)")
    parser.add_argument("--only", help="one data set, printed and not saved")
    options = parser.parse_args()
    warnings.simplefilter("error")
    results: dict[str, Any] = {}
    for name, make in DATA.items():
        if options.only not in (None, name):
            continue
        data = make()
        start = time.process_time()
        found = {model: judge(data, build, options.repeats) for model, build in MODELS.items()}
        results[name] = {"rows": len(data[1]), "features": data[0].shape[1], "r2": found}
        told = "  ".join(f"{model} {score['r2']:.3f}" for model, score in found.items())
        print(f"{name:10s} {told}  ({time.process_time() - start:.0f} s of processor time)", flush=True)
        if options.only is None:
            facts = {"folds": 5, "repeats": options.repeats, "scikit-learn": sklearn.__version__}
            save("regression-quality", {**facts, "data": results})  # after each: the rest takes minutes


if __name__ == "__main__":
    main()
