"""scikit-learn's own contract, whole, and its tools: pipelines, searches, clones, data frames."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is in the extra `sklearn`")

from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from attlas.estimators import AttentionClassifier, AttentionRegressor

CHECK = """
import json
from sklearn.utils.estimator_checks import check_estimator
from attlas import estimators
for name in ("AttentionRegressor", "AttentionClassifier"):
    results = check_estimator(getattr(estimators, name)(), on_fail=None)
    print(json.dumps([[r["check_name"], r["status"], repr(r["exception"])[:300]] for r in results]))
"""


@pytest.mark.slow
def test_every_check_of_scikit_learn_passes():
    """In a process of its own: one check is skipped unless SciPy is told of the array API before it is imported."""
    environment = os.environ | {"SCIPY_ARRAY_API": "1"}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines()[-2:]:
        results = json.loads(line)
        assert len(results) >= 50
        assert not [result for result in results if result[1] != "passed"]


@pytest.fixture
def waves():
    rng = np.random.default_rng(1)
    X = rng.uniform(-2, 2, size=(80, 2))
    return X, np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=80)


def test_pipelines_searches_and_clones(waves):
    X, y = waves
    model = make_pipeline(StandardScaler(), AttentionRegressor(bandwidth="scott"))
    grid = {
        "attentionregressor__bandwidth": ["scott", 0.1, [0.1, 10.0]],
        "attentionregressor__kernel": ["gaussian", "laplace"],
    }
    found = GridSearchCV(model, grid, cv=4, scoring="neg_mean_absolute_error", error_score="raise").fit(X, y)
    assert found.best_params_["attentionregressor__bandwidth"] == [0.1, 10.0]
    copy = clone(found.best_estimator_)
    assert not hasattr(copy[-1], "bandwidth_")
    np.testing.assert_array_equal(copy.fit(X, y).predict(X), found.predict(X))
    assert cross_val_score(AttentionRegressor(), X, y, cv=3).mean() > 0.9


def test_data_frames_of_pandas_and_polars_go_in_with_their_names(waves):
    X, y = waves
    plain = AttentionRegressor(bandwidth=0.3).fit(X, y).predict(X)
    for library in ("pandas", "polars"):
        frames = pytest.importorskip(library, reason=f"{library} is not installed")
        frame = frames.DataFrame({"east": X[:, 0], "north": X[:, 1]})
        model = AttentionRegressor(bandwidth=0.3).fit(frame, frames.Series(y))
        assert model.feature_names_in_.tolist() == ["east", "north"]
        np.testing.assert_array_equal(model.predict(frame), plain)
        with pytest.raises(ValueError, match="feature names should match"):
            model.predict(frame[["north", "east"]])


def test_classes_may_be_texts_numbers_or_booleans():
    X, y = load_iris(return_X_y=True)
    names = load_iris().target_names[y]
    for labels in (y, names, names.astype(object), y == 1):
        model = AttentionClassifier(bandwidth="scott").fit(X, labels)
        assert model.predict(X).dtype == labels.dtype
        assert model.score(X, labels) > 0.9
        np.testing.assert_allclose(model.predict_proba(X).sum(1), 1.0, atol=1e-12)


def test_classifier_learns_bandwidths_by_either_criterion():
    X, y = load_iris(return_X_y=True)
    X = np.column_stack([X, np.random.default_rng(0).normal(size=len(X))])
    smooth = AttentionClassifier().fit(X, y)
    counted = AttentionClassifier(criterion="accuracy", bandwidth="loo").fit(X, y)
    rule = AttentionClassifier(bandwidth="scott").fit(X, y)
    proba = rule.leave_one_out()
    rule_loss = -np.log(proba[np.arange(len(y)), y]).mean()
    assert smooth.loo_loss_ < rule_loss
    assert counted.loo_score_ >= (proba.argmax(1) == y).mean()
    # The loss of the search is that of the predictions, and its score is their accuracy.
    proba = smooth.leave_one_out()
    assert smooth.loo_loss_ == pytest.approx(-np.log(proba[np.arange(len(y)), y]).mean(), rel=1e-6)
    assert smooth.loo_score_ == (proba.argmax(1) == y).mean()


@pytest.mark.parametrize("order", [0, 1])
def test_a_search_does_not_depend_on_the_order_of_the_data_or_on_how_repeats_are_written(waves, order):
    X, y = waves
    counts = np.random.default_rng(3).integers(0, 4, size=len(X))
    weighted = AttentionRegressor().fit(X, y, sample_weight=counts)
    rows = np.repeat(np.arange(len(X)), counts)
    rows = np.random.default_rng(order).permutation(rows)
    repeated = AttentionRegressor().fit(X[rows], y[rows])
    np.testing.assert_array_equal(weighted.bandwidth_, repeated.bandwidth_)
    np.testing.assert_allclose(weighted.predict(X), repeated.predict(X), rtol=0, atol=1e-12)
    assert weighted.loo_loss_ == pytest.approx(repeated.loo_loss_, rel=1e-12)


def test_importance_weights_know_no_unit(waves):
    X, y = waves
    w = np.random.default_rng(3).uniform(0.5, 2.0, size=len(X))
    one, many = (AttentionRegressor(weights_are="importance").fit(X, y, sample_weight=w * c) for c in (1.0, 4096.0))
    np.testing.assert_array_equal(one.bandwidth_, many.bandwidth_)
    np.testing.assert_allclose(one.predict(X), many.predict(X), rtol=0, atol=1e-12)
