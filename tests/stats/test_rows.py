"""Statistics of rows against their formulas on the dense matrix."""

import numpy as np
import pytest
import torch
from tests.stats.definitions import entropy, moments

import attlas
from attlas import stats


def effective_keys(case):
    squares = np.square(case.weights).sum(-1)
    return np.divide(np.square(case.weights.sum(-1)), squares, out=np.zeros_like(squares), where=squares > 0)


ROWS = [
    (stats.row_mass, lambda case: case.weights.sum(-1)),
    (stats.entropy, lambda case: entropy(case.weights)),
    (stats.effective_keys, effective_keys),
    (stats.max_weight, lambda case: case.weights.max(-1, initial=0.0)),
    (stats.max_logit, lambda case: case.logits.max(-1, initial=-np.inf)),
    (lambda A: stats.logit_moments(A).mean, lambda case: moments(case)[0]),
    (lambda A: stats.logit_moments(A).variance, lambda case: moments(case)[1]),
]


def test_numbers_of_rows(fresh):
    for statistic, definition in ROWS:
        case = fresh()
        case.close(statistic(case.A), definition(case))
    assert bool((stats.entropy(fresh().A) >= 0).all())


@pytest.mark.parametrize("mask", [None, attlas.Causal(), attlas.Window(40, 3)], ids=["none", "causal", "window"])
@pytest.mark.parametrize("score", [attlas.ScaledDot(), attlas.SoftCap(attlas.ScaledDot(), 1e4)], ids=["dot", "capped"])
def test_a_small_variance_survives_a_large_mean(make, score, mask):
    case = make(200, 600, score=score, mask=mask, offset=30.0)
    mean, variance = moments(case)
    ratio = np.square(mean) / np.maximum(variance, 1e-9)
    assert np.median(ratio) > 100  # E[s²] - E[s]² would lose these digits
    found = stats.logit_moments(case.A)
    several = variance > 1e-3  # a causal row of one key has none
    error = np.abs(found.variance.double().numpy() - variance)[several] / variance[several]
    assert error.max() < 1e-3
    np.testing.assert_allclose(found.mean.double().numpy(), mean, rtol=1e-5)


def test_a_huge_sink_leaves_the_moments_alone(make):
    case = make(63, 130, score=attlas.SoftCap(attlas.ScaledDot(), 50.0), sink=torch.full((4,), 3e4))
    mean, variance = moments(case)
    found = stats.logit_moments(case.A)
    assert np.abs(found.mean.double().numpy() - mean).max() < 4e-3  # the sink stands above the logits by 3e4
    assert np.abs(found.variance.double().numpy() - variance).max() < 4e-3


@pytest.mark.parametrize("sink", [40.0, 46.0, 49.0, 50.0, 51.0, 52.0])
def test_effective_keys_under_a_sink_are_exact_or_none(sink):
    A = attlas.attend(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 70, 4), sink=torch.full((2,), sink))
    torch.testing.assert_close(stats.effective_keys(A), torch.full((1, 2, 3), 70.0 if sink == 40.0 else 0.0))


def test_entropy_of_the_extremes():
    n = 1000
    even = attlas.attend(torch.zeros(3, 4), torch.zeros(n, 4))
    torch.testing.assert_close(stats.entropy(even), torch.full((3,), float(np.log(n))))
    torch.testing.assert_close(stats.effective_keys(even), torch.full((3,), float(n)))
    one = attlas.attend(torch.full((3, 4), 100.0), torch.eye(4))
    sharp = attlas.attend(100 * torch.eye(4), 100 * torch.eye(4))
    assert one.shape == (3, 4)
    assert stats.entropy(sharp).tolist() == [0.0] * 4
    assert stats.effective_keys(sharp).tolist() == [1.0] * 4
