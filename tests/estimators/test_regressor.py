"""Predictions, their spread, quantiles and neighbours against numpy; data that are hard."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.compose import make_column_transformer
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

import attlas
from attlas.errors import DeviceError, DtypeError, ShapeError
from attlas.estimators import AttentionClassifier, AttentionRegressor
from attlas.estimators.sums.task import KERNELS

NAMES = list(KERNELS)
WEIGHTED_QUANTILES = int(np.__version__.split(".")[0]) >= 2  # before, np.quantile takes no weights


def data(n=60, d=2, e=None, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, size=(n, d))
    y = np.sin(3 * X[:, 0]) + 0.1 * rng.normal(size=n)
    return X, y if e is None else np.column_stack([y, *(100 + X[:, 0] * i for i in range(1, e))])


def shares(kernel, X, keys, h, w=None):
    score = kernel if isinstance(kernel, attlas.Score) else KERNELS[kernel]()
    x, k = (torch.tensor(points / h) for points in (X, keys))
    p = attlas.attend(x, k, score=score).to_dense().numpy() * (1.0 if w is None else w)
    return p / p.sum(1, keepdims=True)


@pytest.mark.parametrize("kernel", [*NAMES, attlas.Cosine(0.5)])
@pytest.mark.parametrize("weighted", [False, True])
def test_everything_is_read_from_one_matrix_of_weights(kernel, weighted):
    X, y = data(e=2)
    h = np.array([0.5, 0.9])
    w = np.random.default_rng(1).uniform(0.2, 3.0, size=len(X)) if weighted else None
    model = AttentionRegressor(kernel, bandwidth=h).fit(X, y, sample_weight=w)
    new = X[:17] * 0.8
    # A score that is no distance sees the points from the centre of the data.
    centre = np.average(X, axis=0, weights=w)
    p = shares(kernel, new - centre, X - centre, h, w)
    mean, std = model.predict(new, return_std=True)
    np.testing.assert_allclose(mean, p @ y, rtol=0, atol=2e-6)
    expected = np.sqrt((p[..., None] * np.square(y - (p @ y)[:, None])).sum(1))
    np.testing.assert_allclose(std, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(model.weights(new).to_dense().numpy(), p, atol=1e-12)
    np.testing.assert_allclose(model.effective_neighbours(new), 1 / np.square(p).sum(1), rtol=1e-9)
    largest, who = model.top_neighbours(new, 3)
    np.testing.assert_allclose(largest, -np.sort(-p, axis=1)[:, :3], atol=1e-12)
    np.testing.assert_allclose(np.take_along_axis(p, who, 1), largest, atol=1e-12)
    if not WEIGHTED_QUANTILES:
        return
    levels = [0.0, 0.1003, 0.4997, 0.93, 1.0]  # none that a sum of equal weights meets exactly
    found = model.predict_quantile(new, levels)
    assert found.shape == (17, 2, 5)
    for i in range(len(new)):
        some = p[i] > 0
        exact = np.quantile(y[some], levels, axis=0, weights=p[i][some], method="inverted_cdf")
        np.testing.assert_allclose(found[i], exact.T, atol=1e-9)


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("tolerance", [0, 1e-7])
def test_local_lines_are_weighted_least_squares(kernel, tolerance):
    X, y = data(n=80)
    h = np.array([0.7, 0.9])
    model = AttentionRegressor(kernel, bandwidth=h, degree=1, tolerance=tolerance).fit(X, y)
    new = X[:10] * 0.8
    p = shares(kernel, new, X, h)
    mean, std = model.predict(new, return_std=True)
    for i, point in enumerate(new):
        design = np.column_stack([np.ones(len(X)), X - point])
        root = np.sqrt(p[i])[:, None]
        line = np.linalg.lstsq(root * design, root[:, 0] * y, rcond=None)[0]
        assert mean[i] == pytest.approx(line[0], abs=1e-9 if tolerance == 0 else 1e-5)
        moved = y - (X - point) @ line[1:]
        assert std[i] == pytest.approx(np.sqrt(p[i] @ np.square(moved - line[0])), abs=1e-8)
        if not WEIGHTED_QUANTILES:
            continue
        some = p[i] > 0
        exact = np.quantile(moved[some], 0.3, weights=p[i][some], method="inverted_cdf")
        assert model.predict_quantile(point[None], 0.3)[0] == pytest.approx(exact, abs=1e-8)


def test_a_line_is_exact_for_linear_data_and_level_where_neighbours_do_not_vary():
    X, _ = data(d=3)
    y = 2.0 + X @ [1.0, -2.0, 0.5]
    model = AttentionRegressor(bandwidth=0.4, degree=1, tolerance=0).fit(X, y)
    np.testing.assert_allclose(model.predict(X), y, atol=1e-9)
    # Beyond the data the line goes on. All its neighbours have one value of the second feature: it is level there.
    flat = np.column_stack([X[:, 0], np.full(len(X), 7.0)])
    model = AttentionRegressor(bandwidth=[0.4, 1.0], degree=1, tolerance=0).fit(flat, 3.0 * X[:, 0])
    np.testing.assert_allclose(model.predict([[0.2, 7.0], [0.2, 7.5], [1.5, 7.0]]), [0.6, 0.6, 4.5], atol=1e-7)
    # How the sums round does not decide: no distance from that value, no unit of it, and no direction makes a slope.
    for unit in (1e-6, 1.0, 1e6):
        scaled = flat * [1.0, unit]
        model = AttentionRegressor(bandwidth=[0.4, unit], degree=1).fit(scaled, 3.0 * X[:, 0])
        away = np.column_stack([np.full(40, 0.2), (7.0 + np.linspace(-3.0, 3.0, 40)) * unit])
        np.testing.assert_allclose(model.predict(away), 0.6, atol=1e-6)
    turned = np.column_stack([X[:, 0], 2.0 * X[:, 0]])
    model = AttentionRegressor(bandwidth=[0.4, 0.8], degree=1).fit(turned, 3.0 * X[:, 0])
    off = 0.2 * np.array([[1.0, 2.0]]) + np.linspace(-1.0, 1.0, 40)[:, None] * [2.0, -1.0]
    # In bandwidths the data run along (1, 1): a step of (2, -1) there is one of (5, -1.25) and moves by its part of it.
    along = 0.2 + np.linspace(-1.0, 1.0, 40) * (2.0 / 0.4 - 1.0 / 0.8) * 0.4 / 2.0
    np.testing.assert_allclose(model.predict(off), 3.0 * along, atol=1e-5)
    # One neighbour in reach: a local mean of one.
    lone = AttentionRegressor("boxcar", bandwidth=0.5, degree=1).fit([[0.0], [5.0]], [1.0, 3.0])
    np.testing.assert_allclose(lone.predict([[0.3], [4.8]]), [1.0, 3.0])


@pytest.mark.parametrize("kernel", ["epanechnikov", "boxcar", "triangular"])
def test_points_without_neighbours_are_nan_with_one_warning_or_take_the_nearest(kernel):
    X, y = np.array([[0.0], [1.0], [10.0]]), np.array([1.0, 2.0, 5.0])
    far = [[0.5], [4.0], [7.0], [-9.0]]
    model = AttentionRegressor(kernel, bandwidth=2.0).fit(X, y)
    with pytest.warns(UserWarning, match="3 of 4 points have no training point within one bandwidth") as caught:
        mean, std = model.predict(far, return_std=True)
    assert len(caught) == 1
    np.testing.assert_array_equal(np.isnan(mean), [False, True, True, True])
    np.testing.assert_array_equal(np.isnan(std), [False, True, True, True])
    with pytest.warns(UserWarning, match="NaN"):
        assert np.isnan(model.predict_quantile(far, [0.1, 0.5])[1:]).all()
    model.set_params(outside="nearest").fit(X, y)
    with pytest.warns(UserWarning, match="standard deviations of 3 of 4 points are NaN"):
        mean, std = model.predict(far, return_std=True)
    np.testing.assert_allclose(mean[1:], [2.0, 5.0, 1.0])
    assert np.isnan(std[1:]).all()
    with pytest.warns(UserWarning, match="quantiles of 3 of 4 points are NaN"):
        assert np.isnan(model.predict_quantile(far, [0.1, 0.5])[1:]).all()
    np.testing.assert_array_equal(model.effective_neighbours(far)[1:], 0.0)


def test_classes_of_points_without_neighbours():
    X, y = np.array([[0.0], [1.0], [10.0]]), np.array(["a", "a", "b"])
    model = AttentionClassifier("boxcar", bandwidth=2.0).fit(X, y)
    assert model.predict([[0.5], [8.0], [5.0]]).tolist() == ["a", "b", "a"]
    # One neighbour, the nearest, and the frequencies of the classes as a tenth of one: no probability is 0.
    np.testing.assert_allclose(model.predict_proba([[5.0]]), [[(1 + 0.2 / 3) / 1.1, 0.1 / 3 / 1.1]])
    np.testing.assert_allclose(model.set_params(outside="prior").predict_proba([[5.0]]), [[2 / 3, 1 / 3]])
    with pytest.warns(UserWarning, match="probabilities are NaN"):
        assert np.isnan(model.set_params(outside="nan").predict_proba([[5.0]])).all()
    with pytest.warns(UserWarning, match="probabilities are NaN"):
        assert model.predict([[5.0]]).tolist() == ["a"]


def test_a_gaussian_reaches_far_points():
    model = AttentionRegressor(bandwidth=1.0).fit([[0.0], [1.0], [2.0]], [1.0, 2.0, 3.0])
    np.testing.assert_allclose(model.predict([[1e6], [-1e6]]), [3.0, 1.0])


@pytest.mark.parametrize("kernel", ["gaussian", "laplace", attlas.Gaussian(1.0)])
@pytest.mark.parametrize("degree", [0, 1])
def test_far_from_all_data_nothing_is_known_of_the_spread(kernel, degree):
    X = np.linspace(0.0, 1.0, 80)[:, None]
    y = np.sin(6.0 * X[:, 0]) + np.random.default_rng(0).normal(scale=0.1, size=80)
    model = AttentionRegressor(kernel, bandwidth=0.05, degree=degree).fit(X, y)
    inside = [[0.2], [0.5], [0.97]]
    std = model.predict(inside, return_std=True)[1]
    assert ((std > 0.02) & (std < 0.5)).all()
    width = np.diff(model.predict_quantile(inside, [0.05, 0.95]))
    assert (width > 0.05).all()
    far = [[40.0], [-30.0]] if isinstance(kernel, str) else [[1e6], [-1e6]]
    with pytest.warns(UserWarning, match="effective_neighbours"):
        mean, std = model.predict(far, return_std=True)
    assert np.isfinite(mean).all()
    assert np.isnan(std).all()
    with pytest.warns(UserWarning, match="effective_neighbours"):
        assert np.isnan(model.predict_quantile(far, [0.05, 0.95])).all()


def test_one_output_has_no_spread():
    """Without noise, the search ends at bandwidths so narrow that each prediction rests on one point."""
    X = np.linspace(0.0, 6.0, 100)[:, None]
    model = AttentionRegressor().fit(X, np.sin(X[:, 0]))
    assert (model.effective_neighbours(X) < 2).all()
    told = rf"of 100 of 100 points are NaN: .* sqrt\(loo_loss_\) is {np.sqrt(model.loo_loss_):.4g}\."
    with pytest.warns(UserWarning, match=told):
        mean, std = model.predict(X, return_std=True)
    assert np.isfinite(mean).all()
    assert np.isnan(std).all()


def test_no_class_is_impossible_far_from_it():
    X, y = np.array([[0.0], [1.0], [2.0], [50.0]]), np.array([0, 0, 0, 1])
    model = AttentionClassifier(bandwidth=1.0).fit(X, y)
    p = model.predict_proba([[1.0], [50.0]])
    # Beside m neighbours of one class stand the frequencies of both, as a tenth of one.
    weights = np.exp([-0.5, 0.0, -0.5])
    m = weights.sum() ** 2 / np.square(weights).sum()
    np.testing.assert_allclose(p, [[(m + 0.075) / (m + 0.1), 0.025 / (m + 0.1)], [0.075 / 1.1, 1.025 / 1.1]], atol=1e-6)
    twice = AttentionClassifier(bandwidth=1.0).fit(X, y, sample_weight=np.full(4, 2.0))
    copies = AttentionClassifier(bandwidth=1.0).fit(np.r_[X, X], np.r_[y, y])
    np.testing.assert_allclose(twice.predict_proba(X), copies.predict_proba(X), rtol=1e-9)


@pytest.mark.parametrize("unit", [1e-30, 1e30])
@pytest.mark.parametrize("output", [1e-30, 1e30])
def test_units_change_nothing(unit, output):
    X, y = data(n=40)
    plain = AttentionRegressor().fit(X, y)
    scaled = AttentionRegressor().fit(X * unit, y * output)
    np.testing.assert_allclose(scaled.bandwidth_, plain.bandwidth_ * unit, rtol=1e-5)
    with pytest.warns(UserWarning, match="deviations of 1 of 40 points are NaN"):  # this one stands alone
        found, expected = scaled.predict(X * unit, return_std=True)[1], plain.predict(X, return_std=True)[1]
    np.testing.assert_allclose(found, expected * output, rtol=1e-4)
    assert scaled.loo_score_ == pytest.approx(plain.loo_score_, rel=1e-6)


def test_float32_stays_float32_and_is_near_float64():
    X, y = data()
    double = AttentionRegressor(bandwidth=0.3).fit(X, y)
    single = AttentionRegressor(bandwidth=0.3).fit(X.astype(np.float32), y.astype(np.float32))
    assert (double.predict(X).dtype, single.predict(X).dtype) == (np.float64, np.float32)
    np.testing.assert_allclose(single.predict(X), double.predict(X), atol=1e-5)
    assert AttentionRegressor(bandwidth=0.3, dtype=torch.float32).fit(X, y).predict(X).dtype == np.float32


def test_a_search_without_a_choice_has_an_error():
    """Where no feature varies, each row is predicted by the mean of the others."""
    y = np.array([1.0, 2.0, 6.0, 4.0])
    others = (y.sum() - y) / 3
    for weights in (None, np.ones(4)):
        model = AttentionRegressor().fit(np.ones((4, 2)), y, sample_weight=weights)
        assert model.loo_loss_ == pytest.approx(np.square(y - others).mean())
        np.testing.assert_allclose(model.leave_one_out(), others)
    assert math.isnan(model.fit(np.ones((1, 2)), [3.0]).loo_loss_)  # and nothing is left of the fit before
    counted = AttentionRegressor().fit(np.ones((2, 1)), [1.0, 4.0], sample_weight=[1.0, 3.0])
    assert counted.loo_loss_ == pytest.approx((1 * (1 - 4) ** 2 + 3 * (4 - 3) ** 2) / 4)


def test_constant_features_and_outputs_one_row_and_duplicates():
    X, y = data(n=30)
    plain = AttentionRegressor().fit(X, y)
    wide = np.column_stack([X[:, 0], np.full(30, 4.2), X[:, 1]])
    model = AttentionRegressor().fit(wide, y)
    assert np.isinf(model.bandwidth_).tolist() == [False, True, False]
    assert model.loo_score_ > 0.5
    assert plain.loo_score_ == pytest.approx(model.loo_score_, abs=0.05)
    other = wide.copy()
    other[:, 1] = 99.0
    np.testing.assert_array_equal(model.predict(wide), model.predict(other))
    assert AttentionRegressor().fit(X, np.full(30, 2.5)).predict(X) == pytest.approx(2.5)
    for kernel in NAMES:
        one = AttentionRegressor(kernel).fit([[1.0, 2.0]], [3.0])
        np.testing.assert_allclose(one.predict([[9.0, 9.0], [1.0, 2.0]]), 3.0)
        same = AttentionRegressor(kernel).fit(np.ones((4, 2)), [1.0, 2.0, 3.0, 4.0])
        np.testing.assert_allclose(same.predict([[1.0, 1.0]]), 2.5)
    repeated = AttentionRegressor().fit(np.repeat(X, 2, axis=0), np.repeat(y, 2))
    assert np.isfinite(repeated.predict(X)).all()
    assert np.isfinite(
        AttentionRegressor().fit(data(n=4, d=6)[0], [1.0, 2.0, 3.0, 4.0]).predict(data(n=4, d=6)[0])
    ).all()


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"kernel": "cosine"}, ShapeError, "kernel must be 'gaussian'"),
        ({"kernel": attlas.Gaussian}, DtypeError, "kernel=Gaussian\\(\\), an object and not its class"),
        ({"bandwidth": "best"}, ShapeError, "bandwidth='loo'"),
        ({"bandwidth": -1.0}, ShapeError, "finite number above 0"),
        ({"bandwidth": [1.0, np.inf]}, ShapeError, "finite number above 0"),
        ({"bandwidth": [1.0, 2.0, 3.0]}, ShapeError, "2 features in X, 3 bandwidths"),
        ({"bandwidth": None}, DtypeError, "bandwidth must be"),
        ({"degree": 2}, ShapeError, "degree must be 0 or 1"),
        ({"outside": "mean"}, ShapeError, "outside must be 'nan' or 'nearest'"),
        ({"max_iter": 0}, ShapeError, "max_iter must be a whole number, 1 or more"),
        ({"tol": -1.0}, ShapeError, "tol must be a number, 0 or more"),
        ({"tolerance": 1.0}, ShapeError, "tolerance must be a number, 0 or more and below 1"),
        ({"device": "toaster"}, DeviceError, "device = 'toaster'"),
        ({"loo_rows": "some"}, ShapeError, "loo_rows"),
        ({"weights_are": "odd"}, ShapeError, "weights_are must be 'counts' or 'importance'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, error, words):
    X, y = data(n=10)
    with pytest.raises(error, match=words):
        AttentionRegressor(**settings).fit(X, y)


def test_quantile_levels_rows_and_weights_are_checked():
    X, y = data(n=10)
    for estimator in (AttentionRegressor(), AttentionClassifier()):
        with pytest.raises(ValueError, match="inconsistent numbers of samples"):
            estimator.fit(X, y[1:] > 0)
    model = AttentionRegressor(bandwidth=1.0).fit(X, y)
    with pytest.raises(ShapeError, match="level from 0 to 1"):
        model.predict_quantile(X, 1.5)
    with pytest.raises(ValueError, match=r"[Nn]egative"):
        AttentionRegressor().fit(X, y, sample_weight=-np.ones(10))
    with pytest.raises(ValueError, match=r"weight.*(above 0|zero)"):
        AttentionRegressor().fit(X, y, sample_weight=np.zeros(10))


def test_parts_of_the_data_add_up():
    X, y = data()
    whole = AttentionRegressor(bandwidth=0.3, tolerance=0).fit(X, y)
    parts = [AttentionRegressor(bandwidth=0.3, tolerance=0).fit(X[i::3], y[i::3]).partial_sums(X) for i in range(3)]
    merged = parts[0].merge(parts[1]).merge(parts[2]).mean().numpy()[:, 0]
    np.testing.assert_allclose(merged, whole.predict(X), atol=1e-12)
    with pytest.raises(ShapeError, match="sums that add up"):
        AttentionRegressor(bandwidth=0.3, degree=1).fit(X, y).partial_sums(X)


@pytest.mark.parametrize("kernel", [*NAMES, attlas.Gaussian(1.0)])
@pytest.mark.parametrize("degree", [0, 1])
def test_a_search_beats_the_rule_and_leaves_out_a_feature_that_tells_nothing(kernel, degree):
    if degree and isinstance(kernel, attlas.Score):
        X, y = data(n=80)
        with pytest.raises(ShapeError, match="local lines needs a kernel that has a name"):
            AttentionRegressor(kernel, degree=1).fit(X, y)
        given = AttentionRegressor(kernel, degree=1, bandwidth="scott").fit(X, y)
        np.testing.assert_allclose(
            given.predict(X), AttentionRegressor(degree=1, bandwidth="scott").fit(X, y).predict(X), atol=1e-9
        )
        with pytest.raises(ShapeError, match="local lines needs a kernel that has a name"):
            given.leave_one_out()
        return
    X, y = data(n=80)
    X = np.column_stack([X[:, 0], 50 * np.random.default_rng(5).normal(size=80)])
    model = AttentionRegressor(kernel, degree=degree).fit(X, y)
    rule = AttentionRegressor(kernel, degree=degree, bandwidth="scott").fit(X, y)
    left_out = rule.leave_one_out()
    assert model.loo_loss_ < np.mean((y - left_out) ** 2)
    np.testing.assert_allclose(model.loo_loss_, np.mean((y - model.leave_one_out()) ** 2), rtol=1e-5)
    assert model.loo_score_ > 0.8
    assert model.path_["scale"].shape == model.path_["loss"].shape
    assert len(model.path_["bandwidth"]) == len(model.path_["bandwidth_loss"]) > 0
    assert model.n_iter_ >= 1


def test_searches_repeat_themselves_and_start_warm():
    X, y = data(n=80)
    first, second = (AttentionRegressor().fit(X, y) for _ in range(2))
    np.testing.assert_array_equal(first.bandwidth_, second.bandwidth_)
    warm = AttentionRegressor(warm_start=True).fit(X, y)
    steps = warm.n_iter_
    found = warm.bandwidth_.copy()
    warm.fit(X, y)
    assert warm.n_iter_ < steps
    assert not len(warm.path_["scale"])
    np.testing.assert_allclose(warm.bandwidth_, found, rtol=0.1)


def test_a_sample_of_rows_is_nearly_as_good_as_all():
    X, y = data(n=300)
    every = AttentionRegressor(loo_rows="all").fit(X, y)
    some = AttentionRegressor(loo_rows=100).fit(X, y)
    assert (every.loo_rows_, some.loo_rows_) == (300, 100)
    assert np.mean((y - some.leave_one_out()) ** 2) < 1.2 * every.loo_loss_


def test_larger_searches_compare_starts_in_float32(monkeypatch):
    X, y = data(n=300)
    exact = AttentionRegressor().fit(X, y)
    monkeypatch.setattr("attlas.estimators.base._COARSE_PAIRS", 300 * 100)
    coarse = AttentionRegressor().fit(X, y)
    assert coarse.loo_loss_ == pytest.approx(exact.loo_loss_, rel=1e-3)


def test_a_line_keeps_the_slope_of_a_feature_with_a_very_large_bandwidth():
    """Its variance in squared bandwidths is 1e-16 of the other's."""
    X = np.random.default_rng(0).normal(size=(60, 2))
    y = np.sin(X[:, 0]) + 2.0 * X[:, 1]
    wide, wider = (AttentionRegressor(degree=1, bandwidth=[0.5, h]).fit(X, y) for h in (1e4, 1e8))
    np.testing.assert_allclose(wide.predict(X), wider.predict(X), rtol=0, atol=1e-6)
    assert np.mean((wider.leave_one_out() - y) ** 2) < 0.01


@pytest.mark.parametrize("rule", ["loo", "scott", 1.0])
@pytest.mark.parametrize(("n", "d"), [(8, 3), (6, 10), (15, 30)])
def test_local_lines_do_not_depend_on_how_repeats_are_written(rule, n, d):
    """So few points that many lines fit: two ways to find one must not find two."""
    rng = np.random.default_rng(2)
    X, y, counts, new = rng.normal(size=(n, d)), rng.normal(size=n), rng.integers(0, 4, n), rng.normal(size=(20, d))
    one = AttentionRegressor(degree=1, bandwidth=rule).fit(X, y, counts)
    other = AttentionRegressor(degree=1, bandwidth=rule).fit(np.repeat(X, counts, 0), np.repeat(y, counts))
    np.testing.assert_allclose(one.bandwidth_, other.bandwidth_, rtol=1e-12)
    for points in (X, new):
        np.testing.assert_allclose(one.predict(points), other.predict(points), rtol=0, atol=3e-6 * y.std())


@pytest.mark.parametrize("degree", [0, 1])
@pytest.mark.parametrize(("of_x", "of_y"), [(1e200, 1.0), (1e300, 1.0), (1.0, 1e300), (1e-300, 1e-300)])
def test_any_scale_is_fitted_and_left_out(degree, of_x, of_y):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(12, 2)) * of_x, rng.normal(size=12) * of_y
    for bandwidth in ("loo", "scott", 0.5):
        model = AttentionRegressor(degree=degree, bandwidth=bandwidth).fit(X, y)
        assert np.isfinite(model.predict(X)).all()
        assert np.isfinite(model.leave_one_out()).all()


@pytest.mark.filterwarnings("ignore:the standard deviations")
@pytest.mark.parametrize("kernel", ["gaussian", "epanechnikov", attlas.ScaledDot()], ids=str)
def test_autocast_changes_no_fit(kernel) -> None:
    """A regression is no part of a network: inside torch.autocast its numbers are what they are outside."""
    X, y = np.random.default_rng(0).uniform(0, 2, (60, 2)).astype(np.float32), np.arange(60) % 7
    tests = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            bandwidth = {} if isinstance(kernel, str) else {"bandwidth": 1.0}
            model = AttentionRegressor(kernel=kernel, outside="nearest", **bandwidth).fit(X, y.astype(np.float32))
            weights = model.weights(X[:5])
            tests.append([*model.predict(X[:9], return_std=True), model.leave_one_out(), weights.to_dense().numpy()])
            classes = AttentionClassifier().fit(X, y % 2)
            tests[-1] += [classes.predict_proba(X[:5]), classes.leave_one_out()]
    for plain, cast in zip(*tests, strict=True):
        np.testing.assert_array_equal(cast, plain)


def test_warnings_name_the_line_of_the_user() -> None:
    X = np.arange(20.0)[:, None]
    regressor = AttentionRegressor(kernel="epanechnikov", bandwidth=1.5, outside="nan").fit(X, X[:, 0])
    classifier = AttentionClassifier(kernel="epanechnikov", bandwidth=1.5, outside="nan").fit(X, X[:, 0] > 5)
    for call in (regressor.predict, lambda x: regressor.predict_quantile(x, [0.5]), classifier.predict_proba):
        with pytest.warns(UserWarning, match="points") as caught:
            call([[100.0], [3.0]])
        assert {warning.filename for warning in caught} == {__file__}


def test_columns_of_texts_are_named_and_the_fix_works():
    frame = pd.DataFrame({"a": [1.0, 2, 3, 4], "town": list("uvuv"), "day": pd.to_datetime(["2024-01-01"] * 4)})
    y = [1.0, 2, 3, 4]
    for estimator in (AttentionRegressor(bandwidth=1.0), AttentionClassifier(bandwidth=1.0)):
        with pytest.raises(DtypeError, match=r"fit\(\)") as caught:
            estimator.fit(frame[["a", "town"]], [0, 1, 0, 1])
        assert caught.value.found == "texts in column 'town'"
        assert "make_column_transformer((OneHotEncoder(), ['town']), remainder='passthrough')" in caught.value.fix
    columns = make_column_transformer((OneHotEncoder(), ["town"]), remainder="passthrough")
    assert len(make_pipeline(columns, AttentionRegressor()).fit(frame[["a", "town"]], y).predict(frame)) == 4
    with pytest.raises(DtypeError, match="found: dates in column 'day'") as caught:
        AttentionRegressor(bandwidth=1.0).fit(frame[["a", "day"]], y)
    days = eval(caught.value.fix.partition(": ")[2], {"X": frame})
    fitted = AttentionRegressor(bandwidth=1.0).fit(frame[["a"]].assign(day=days), y)
    with pytest.raises(DtypeError, match=r"predict\(\).*\n.*\n *found: texts in column 'a'"):
        fitted.predict(frame[["town", "a"]].set_axis(["a", "day"], axis=1))
    with pytest.raises(DtypeError, match="AttentionClassifier"):
        AttentionRegressor(bandwidth=1.0).fit(frame[["a"]], list("uvuv"))
    numbers = frame[["a"]].assign(o=np.array([1, 2.5, "3", 4], dtype=object))
    assert AttentionRegressor(bandwidth=1.0).fit(numbers, y).n_features_in_ == 2
    with pytest.raises(ValueError, match="contains NaN"):  # what is no text keeps scikit-learn's error
        AttentionRegressor(bandwidth=1.0).fit(frame[["a"]], [1.0, 2, np.nan, 4])


def test_bounded_kernels_in_a_search_say_why_they_have_no_score():
    X, y = np.random.default_rng(0).normal(size=(2, 60, 4))
    y = X[:, 0] + 0.1 * y[:, 0]
    kernels = {"kernel": ["gaussian", "epanechnikov"], "bandwidth": [1.5]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search = GridSearchCV(AttentionRegressor(), kernels, cv=3).fit(X, y)
    assert np.isnan(search.cv_results_["mean_test_score"][1])
    told = [str(warning.message) for warning in caught]
    assert any("which searches such as GridSearchCV need" in text for text in told)
    failed = [text for text in told if "Scoring failed" in text]
    assert failed
    assert all("AttentionRegressor(kernel='epanechnikov', outside='nearest')" in text for text in failed)
    search = GridSearchCV(AttentionRegressor(outside="nearest"), kernels, cv=3).fit(X, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    weights = np.linspace(1, 2, 60)
    model = AttentionRegressor(bandwidth=1.0).fit(X, y, weights)
    assert model.score(X, y, weights) == pytest.approx(r2_score(y, model.predict(X), sample_weight=weights))
    with pytest.warns(UserWarning, match="1 of 2"), pytest.raises(ShapeError, match="found: 1 of 2 points"):
        AttentionRegressor(kernel="boxcar", bandwidth=1.0).fit(X, y).score([[99.0] * 4, X[0]], [0, 1])
