"""Kernel regression on real data: how diabetes progresses, predicted from patients who are alike.

Each prediction is a mean over the other patients, weighted by how alike they are; how alike decides a bandwidth for
each feature, found by leaving every patient out in turn. Nothing else is fitted, so that a prediction can say whom it
rests on.

    python examples/kernel_regression.py              # writes kernel-regression.png
    python examples/kernel_regression.py --quick      # two features instead of four
"""

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import KFold, cross_val_score

from attlas import pictures
from attlas.estimators import AttentionRegressor

FEATURES = ("bmi", "s5", "bp", "sex")


def draw(X: np.ndarray, y: np.ndarray, names: tuple[str, ...], model: AttentionRegressor, who: int, out: Path) -> Path:
    """Draw predictions against what was observed, and the patients that one prediction rests on."""
    figure = pictures.sheet(10.4, 4.6)
    left, right = figure.subplots(1, 2)
    predicted = model.leave_one_out()
    left.scatter(predicted, y, s=12, color=pictures.SOFT, alpha=0.6, linewidths=0)
    ends = [predicted.min(), predicted.max()]
    left.plot(ends, ends, color=pictures.ACCENT, linewidth=1.4)
    left.set_title("each patient from all others", fontsize=10, loc="left", color=pictures.INK)
    left.set_xlabel("predicted progression", fontsize=9)
    left.set_ylabel("observed", fontsize=9)
    weights = model.weights(X[[who]])[0, :].numpy()
    right.scatter(X[:, 0], X[:, 1], s=6, color="#cfd8da", linewidths=0)
    shown = right.scatter(
        X[:, 0], X[:, 1], s=3000 * weights, c=y, cmap=pictures.depth(), alpha=0.85, linewidths=0.4, edgecolors="white"
    )
    right.plot(*X[who, :2], marker="x", color=pictures.ACCENT, markersize=9, markeredgewidth=2)
    right.set_title("one patient, and who speaks for him: area is weight", fontsize=10, loc="left", color=pictures.INK)
    right.set_xlabel(names[0], fontsize=9)
    right.set_ylabel(names[1], fontsize=9)
    figure.colorbar(shown, ax=right, label="observed progression", shrink=0.8)
    return pictures.save(figure, out, dpi=160)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("kernel-regression.png"), help="picture (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="two features instead of four")
    options = parser.parse_args(argv)

    names = FEATURES[:2] if options.quick else FEATURES
    data = load_diabetes()
    X, y = data.data[:, [data.feature_names.index(name) for name in names]], data.target
    model = AttentionRegressor(n_restarts=0).fit(X, y)

    # The judge is cross-validation, which leaves patients out of the search for bandwidths too.
    folds = KFold(5, shuffle=True, random_state=0)
    judged = {
        name: float(cross_val_score(estimator, X, y, cv=folds).mean())
        for name, estimator in (("linear", LinearRegression()), ("kernel", AttentionRegressor(n_restarts=0)))
    }
    who = int(np.argmin(np.abs(X - np.median(X, axis=0)).sum(1)))
    weights, rows = model.top_neighbours(X[[who]], k=5)
    rest = float(model.effective_neighbours(X[[who]])[0])

    print(f"{len(y)} patients; bandwidths of least leave-one-out error, in standard deviations")
    for name, h, spread in zip(names, model.bandwidth_, X.std(0), strict=True):
        print(f"  {name:4s} {h / spread:6.2f}")
    print(f"  R², cross-validated: linear {judged['linear']:.3f}, kernel {judged['kernel']:.3f}")
    print(f"  the middle patient: {model.predict(X[[who]])[0]:.0f}, a mean over {rest:.0f} patients; the nearest five:")
    print("  " + "  ".join(f"{y[row]:.0f} ({weight:.1%})" for weight, row in zip(weights[0], rows[0], strict=True)))
    print(f"  {draw(X, y, names, model, who, options.out)}")
    return {**judged, "loo": model.loo_score_, "rest": rest, "weight": float(weights.sum())}


if __name__ == "__main__":
    main()
