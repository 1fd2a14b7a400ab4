"""Rules of thumb against SciPy, and what local lines do with moments."""

import numpy as np
import pytest
import torch
from scipy.stats import gaussian_kde

from attlas.estimators import AttentionRegressor
from attlas.estimators.bandwidth import rule_of_thumb, spread_of
from attlas.estimators.local import lines_from_moments, lines_through


@pytest.mark.parametrize("rule", ["scott", "silverman"])
@pytest.mark.parametrize("weighted", [False, True])
def test_rules_are_those_of_scipy(rule, weighted):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, 3)) * [1.0, 1e-3, 1e3] + 5
    w = rng.uniform(0.1, 2.0, size=50) if weighted else None
    density = gaussian_kde(X.T, bw_method=rule, weights=w)
    found = rule_of_thumb(rule, spread_of(X, w, counts=False))
    np.testing.assert_allclose(found, np.sqrt(np.diag(density.covariance)), rtol=1e-12)
    if not weighted:
        model = AttentionRegressor(bandwidth=rule).fit(X, X[:, 0])
        np.testing.assert_array_equal(model.bandwidth_, found)


def test_counts_spread_as_repeats_do_and_squares_do_not_overflow():
    rng = np.random.default_rng(0)
    X, w = rng.normal(size=(20, 2)), rng.integers(1, 4, size=20).astype(float)
    one, other = spread_of(X, w), spread_of(np.repeat(X, w.astype(int), axis=0))
    np.testing.assert_allclose(one.deviation, other.deviation, rtol=1e-12)
    np.testing.assert_allclose(one.centre, other.centre, rtol=1e-12, atol=1e-15)
    assert one.count == other.count
    np.testing.assert_allclose(spread_of(X * 1e250).deviation, spread_of(X).deviation * 1e250, rtol=1e-12)


def test_a_constant_feature_has_no_deviation_whatever_its_value():
    X = np.full((1000, 1), 0.1)
    assert spread_of(X).deviation[0] == 0.0
    assert np.isinf(rule_of_thumb("scott", spread_of(X))[0])


def test_lines_from_moments_are_those_through_the_points():
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(5, 30, generator=generator, dtype=torch.float64)
    gaps = torch.randn(5, 30, 2, generator=generator, dtype=torch.float64)
    values = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    direct = lines_through(weight, gaps, values)
    moments = lines_from_moments(
        weight.sum(-1),
        torch.einsum("rn,rnd->rd", weight, gaps),
        torch.einsum("rn,rnd,rnc->rdc", weight, gaps, gaps),
        weight @ values,
        torch.einsum("rn,rnd,ne->rde", weight, gaps, values),
    )
    torch.testing.assert_close(moments.at_zero, direct.at_zero)
    torch.testing.assert_close(moments.slopes, direct.slopes)
    # The line at the query is a sum over the values, whose weights are the leverages times the kernel.
    torch.testing.assert_close((direct.leverage() * weight) @ values, direct.at_zero)
