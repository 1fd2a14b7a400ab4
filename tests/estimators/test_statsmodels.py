"""An outside oracle: statsmodels' KernelReg, which computes the same one point at a time."""

import numpy as np
import pytest

kernel_regression = pytest.importorskip(
    "statsmodels.nonparametric.kernel_regression", reason="statsmodels is the oracle here; it is in the extra `dev`"
)

from attlas.estimators import AttentionRegressor  # noqa: E402


def problem(seed, n=120, d=3, units=1.0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d)) * units + rng.normal(size=d)
    y = 3.0 + np.sin(X[:, 0] / X[:, 0].std()) + 0.2 * rng.normal(size=n)
    return X, y, X.std(0) * rng.uniform(0.3, 1.0, size=d)


def reference(X, y, h, kind):
    return kernel_regression.KernelReg(y, X, "c" * X.shape[1], reg_type=kind, bw=h, rng=0)


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize(("degree", "kind"), [(0, "lc"), (1, "ll")])
@pytest.mark.parametrize("tolerance", [0, 1e-9])
def test_predictions_are_those_of_statsmodels(d, degree, kind, tolerance):
    for seed in range(2):
        X, y, h = problem(seed, d=d)
        model = AttentionRegressor(bandwidth=h, degree=degree, tolerance=tolerance).fit(X, y)
        new = X[:20] + 0.1 * h
        oracle = reference(X, y, h, kind).fit(new)[0].ravel()
        np.testing.assert_allclose(model.predict(new), oracle, rtol=0, atol=1e-8)


def test_local_lines_keep_their_digits_where_features_have_units_of_many_sizes():
    """statsmodels inverts the moments in the units of the features, and is off by 1e-8 and more here."""
    X, y, h = problem(0, d=4, units=10.0 ** np.array([-3, 0, 2, 4]))
    new = X[:10] + 0.1 * h
    predicted = AttentionRegressor(bandwidth=h, degree=1, tolerance=0).fit(X, y).predict(new)
    exact = [in_long_double(X, y, h, point) for point in new]
    np.testing.assert_allclose(predicted, exact, rtol=0, atol=1e-11)


def in_long_double(X, y, h, point):
    """Solve the normal equations of one point by elimination, with 64 bits of mantissa."""
    gap = (X.astype(np.longdouble) - point.astype(np.longdouble)) / h.astype(np.longdouble)
    weight = np.exp(-np.square(gap).sum(1) / 2)
    design = np.column_stack([np.ones(len(gap), np.longdouble), gap])
    table = np.column_stack([(design.T * weight) @ design, (design.T * weight) @ y.astype(np.longdouble)])
    for i in range(len(table)):
        table[i] /= table[i, i]
        for j in range(len(table)):
            if j != i:
                table[j] -= table[j, i] * table[i]
    return float(table[0, -1])


@pytest.mark.parametrize(("degree", "kind"), [(0, "lc"), (1, "ll")])
def test_leave_one_out_loss_is_that_of_statsmodels(degree, kind):
    X, y, h = problem(7, n=60, d=2)
    oracle = reference(X, y, h, kind)
    expected = oracle.cv_loo(h, oracle.est[kind])
    model = AttentionRegressor(bandwidth=h, degree=degree, tolerance=0).fit(X, y)
    assert np.mean((y - model.leave_one_out()) ** 2) == pytest.approx(float(np.squeeze(expected)), abs=1e-8)


@pytest.mark.parametrize(("degree", "kind"), [(0, "lc"), (1, "ll")])
def test_search_ends_where_the_loss_of_statsmodels_is_no_larger_than_its_own_end(degree, kind):
    X, y, _ = problem(3, n=30, d=2)
    model = AttentionRegressor(degree=degree, tol=1e-9, n_restarts=4).fit(X, y)
    oracle = reference(X, y, model.bandwidth_, kind)
    loss = float(np.squeeze(oracle.cv_loo(model.bandwidth_, oracle.est[kind])))
    assert model.loo_loss_ == pytest.approx(loss, rel=1e-8)
    with np.errstate(divide="ignore", invalid="ignore"):  # its search tries bandwidths below 0
        own = kernel_regression.KernelReg(y, X, "cc", reg_type=kind, bw="cv_ls", rng=0).bw
    assert loss <= float(np.squeeze(oracle.cv_loo(own, oracle.est[kind]))) * (1 + 1e-4)
