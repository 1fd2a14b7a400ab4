"""Estimators as files: the same numbers come back, and a file that was touched is named with what is wrong."""

import numpy as np
import pytest
import torch

import attlas
from attlas.errors import CheckpointError, DtypeError
from attlas.estimators import AttentionClassifier, AttentionRegressor


def fitted(**settings):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    return X, AttentionRegressor(**settings).fit(X, X[:, 0] ** 2)


@pytest.mark.parametrize(
    "settings",
    [{}, {"degree": 1, "bandwidth": [0.5, 0.7]}, {"kernel": "boxcar", "dtype": torch.float32, "outside": "nearest"}],
)
def test_regressors_come_back_the_same(tmp_path, settings):
    X, model = fitted(**settings)
    model.save(tmp_path / "model.safetensors")
    again = AttentionRegressor.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert again.get_params() == model.get_params()
    for name in ("bandwidth_", "X_", "y_", "support_"):
        np.testing.assert_array_equal(getattr(again, name), getattr(model, name))
    if "bandwidth" not in settings:
        assert (again.loo_loss_, again.n_iter_) == (model.loo_loss_, model.n_iter_)
        assert {name: array.shape for name, array in again.path_.items()} == {
            name: array.shape for name, array in model.path_.items()
        }
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("labels", [["no", "yes"], [3, 7], [False, True], [0.5, 2.0]])
def test_classifiers_come_back_with_their_labels_names_and_weights(tmp_path, labels):
    frames = pytest.importorskip("pandas", reason="pandas is not installed")
    rng = np.random.default_rng(0)
    X = frames.DataFrame(rng.normal(size=(40, 2)), columns=["a", "b"])
    if labels == [0.5, 2.0]:
        labels = np.array(["x", "y"], dtype=object)
    y = np.array(labels)[(X["a"].to_numpy() > 0).astype(int)]
    model = AttentionClassifier(bandwidth="scott").fit(X, y, sample_weight=rng.integers(0, 3, size=40))
    model.save(tmp_path / "model")
    again = AttentionClassifier.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert again.classes_.dtype == model.classes_.dtype
    assert again.predict(X).tolist() == model.predict(X).tolist()
    with pytest.raises(ValueError, match="feature names"):
        again.predict(X[["b", "a"]])


def test_a_constant_feature_comes_back(tmp_path):
    X = np.column_stack([np.arange(9.0), np.ones(9)])
    model = AttentionRegressor(bandwidth="scott").fit(X, np.arange(9.0))
    model.save(tmp_path / "model")
    assert np.isinf(AttentionRegressor.load(tmp_path / "model").bandwidth_[1])


def test_a_score_is_given_again(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 2))
    model = AttentionRegressor(attlas.Laplace(0.5), bandwidth=1.0).fit(X, X[:, 0])
    model.save(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"kernel=attlas\.Laplace"):
        AttentionRegressor.load(tmp_path / "model")
    again = AttentionRegressor.load(tmp_path / "model", kernel=attlas.Laplace(0.5))
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


def test_files_that_are_broken_are_named_with_what_is_wrong(tmp_path):
    path = tmp_path / "model"
    with pytest.raises(CheckpointError, match="no such file"):
        AttentionRegressor.load(path)
    _, model = fitted(bandwidth=1.0)
    model.save(path)
    whole = path.read_bytes()
    with pytest.raises(CheckpointError, match="AttentionRegressor, not a AttentionClassifier"):
        AttentionClassifier.load(path)
    for wrong, words in (
        (whole[:-20], "cut off"),
        (b"", "cut off"),
        (b"hello, world, this is no tensor", "cut off"),
        (whole[:-8] + bytes(8), "not what was written"),
        (whole.replace(b"max_iter", b"min_iter"), "header that is not the one"),
    ):
        assert wrong != whole
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=words) as caught:
            AttentionRegressor.load(path)
        assert str(path) in str(caught.value)


def test_what_cannot_be_written_says_so_and_leaves_the_old_file(tmp_path):
    labels = np.empty(4, dtype=object)
    labels[:] = [("a",), ("b",), ("a",), ("b",)]
    odd = AttentionClassifier(bandwidth=1.0).fit(np.arange(4.0)[:, None], [0, 1, 0, 1])
    odd.classes_ = labels[:2]
    odd.y_ = labels
    (tmp_path / "model").write_text("old")
    with pytest.raises(DtypeError, match="labels must be texts"):
        odd.save(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "old"
