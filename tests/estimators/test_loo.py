"""The leave-one-out error against its definition, its gradient against differences, autograd and attention."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="scikit-learn is in the extra `sklearn`")

from sklearn.ensemble import BaggingRegressor

import attlas
from attlas.estimators import AttentionClassifier, AttentionRegressor
from attlas.estimators.loo import LeaveOneOut, LooTask, accuracy, log_loss, squared_error
from attlas.estimators.scored import ScoredLeaveOneOut
from attlas.estimators.search import Settings, search
from attlas.estimators.summed import SummedLeaveOneOut, objective
from attlas.estimators.sums.task import KERNELS

THETA = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)


def task(kernel, degree=0, loss=squared_error, counts=False, n=40):
    generator = torch.Generator().manual_seed(4)
    keys = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    if loss is squared_error:
        values = torch.randn(n, 2, generator=generator, dtype=torch.float64) + keys[:, :2] ** 2
    else:
        values = torch.eye(3, dtype=torch.float64)[torch.randint(0, 3, (n,), generator=generator)]
    weights = torch.randint(1, 4, (n,), generator=generator).double() if counts else torch.ones(n, dtype=torch.float64)
    if kernel in ("epanechnikov", "triangular", "boxcar"):
        keys = keys / 3.0
    return LooTask(kernel, keys, values, weights, weights - 1.0, loss, degree)


def by_definition(problem, theta):
    """Leave each observation out by hand, and predict it with attention over all others."""
    keys = problem.keys / theta.exp()
    score = KERNELS[problem.kernel]()
    total, mass = 0.0, problem.weights.sum()
    for i in range(len(keys)):
        weights = problem.weights.clone()
        weights[i] = problem.kept[i]
        rows = weights > 0
        logs = attlas.attend(keys[i : i + 1], keys[rows], score=score).logits[:, :][0] + weights[rows].log()
        if logs.max() == -math.inf:
            others = weights.clone()
            predicted = (others @ problem.values) / others.sum()
        elif problem.degree == 0:
            predicted = logs.softmax(0) @ problem.values[rows]
        else:
            root = (logs - logs.max()).exp().sqrt().unsqueeze(-1)
            gaps = keys[rows] - keys[i]
            centre = (root**2 * gaps).sum(0) / (root**2).sum()
            mean = (root**2 * problem.values[rows]).sum(0) / (root**2).sum()
            slopes = torch.linalg.lstsq(root * (gaps - centre), root * (problem.values[rows] - mean), driver="gelsd")
            predicted = mean - centre @ slopes.solution
        loss = problem.loss(predicted.unsqueeze(0), problem.values[i : i + 1]).loss
        total += float(problem.weights[i] / mass * loss[0])
    return total


@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("degree", [0, 1])
@pytest.mark.parametrize("counts", [False, True])
def test_loss_is_that_of_the_definition(kernel, degree, counts):
    problem = task(kernel, degree, counts=counts)
    loss, _ = LeaveOneOut(problem).value(THETA)
    assert loss == pytest.approx(by_definition(problem, THETA), rel=1e-9)


@pytest.mark.parametrize("loss", [log_loss, accuracy])
def test_losses_of_classes_are_those_of_the_definition(loss):
    problem = task("gaussian", loss=loss, counts=True)
    assert LeaveOneOut(problem).value(THETA)[0] == pytest.approx(by_definition(problem, THETA), rel=1e-9)


@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "epanechnikov", "triangular"])
@pytest.mark.parametrize("degree", [0, 1])
@pytest.mark.parametrize("loss", [squared_error, log_loss])
@pytest.mark.parametrize("rows", [None, range(3, 20)])
def test_gradient_is_that_of_differences(kernel, degree, loss, rows):
    if loss is log_loss and degree:
        pytest.skip("a line gives no probabilities")
    objective = LeaveOneOut(task(kernel, degree, loss, counts=True), None if rows is None else torch.tensor([*rows]))
    _, slope = objective.value(THETA)
    step = 1e-6
    for c in range(3):
        move = torch.zeros(3, dtype=torch.float64)
        move[c] = step
        ends = [objective.value(THETA + sign * move, gradient=False)[0] for sign in (1, -1)]
        # A kernel that ends somewhere has kinks there; a key crosses one within a step now and then.
        assert float(slope[c]) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "epanechnikov", "triangular"])
def test_gradient_is_that_of_attention_without_the_diagonal(kernel):
    problem = task(kernel)
    loss, slope = LeaveOneOut(problem).value(THETA)
    other, through_attention = ScoredLeaveOneOut(KERNELS[kernel](), problem).value(THETA)
    assert loss == pytest.approx(other, rel=1e-12)
    torch.testing.assert_close(slope, through_attention, rtol=1e-9, atol=1e-12)


def summable(kernel, d, loss=squared_error, counts=False, n=200):
    generator = torch.Generator().manual_seed(5)
    width = 2.0 if kernel in ("gaussian", "laplace") else 0.7
    keys = width * torch.randn(n, d, generator=generator, dtype=torch.float64)
    keys[0] += 60.0  # alone, or with weights that all underflow but for their ratios
    values = torch.randn(n, 2, generator=generator, dtype=torch.float64) + keys[:, :1] ** 2 / 100
    if loss is not squared_error:
        values = torch.eye(2, dtype=torch.float64)[(values[:, 0] > 0).long()]
    weights = torch.randint(1, 4, (n,), generator=generator).double() if counts else torch.ones(n, dtype=torch.float64)
    return LooTask(kernel, keys, values, weights, weights - 1.0, loss)


@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("loss", [squared_error, log_loss])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("rows", [None, range(0, 200, 3)])
def test_sums_give_the_loss_and_the_gradient_of_row_blocks(kernel, d, loss, counts, rows):
    problem = summable(kernel, d, loss, counts)
    rows = None if rows is None else torch.tensor([*rows])
    fast, slow = objective(problem, rows), LeaveOneOut(problem, rows)
    if kernel in ("laplace", "triangular") and d > 1:
        assert isinstance(fast, LeaveOneOut)  # their slopes are no sums of a kernel that is there
        return
    # Where no kernels were compiled blocks of rows are faster; the sums are right there too.
    fast = SummedLeaveOneOut(problem, rows)
    theta = torch.linspace(-0.3, 0.3, d, dtype=torch.float64)
    found, known = fast.value(theta), slow.value(theta)
    assert found[0] == pytest.approx(known[0], rel=1e-11)
    torch.testing.assert_close(found[1], known[1], rtol=1e-8, atol=1e-9)
    assert fast.value(theta, gradient=False)[0] == pytest.approx(found[0], rel=1e-12)
    torch.testing.assert_close(fast.predictions(theta), slow.predictions(theta), rtol=1e-10, atol=1e-10)
    scales = torch.tensor([0.05, 0.5, 2.0], dtype=torch.float64)
    torch.testing.assert_close(fast.grid(scales), slow.grid(scales), rtol=1e-10, atol=0.0)


def test_compiled_kernels_do_a_long_search_where_there_are_any():
    problem = summable("gaussian", 5, n=4000)
    matrix = attlas.attend(problem.keys, problem.keys, score=attlas.Gaussian())
    native = attlas.explain(matrix).backend == "native"
    assert isinstance(objective(problem), SummedLeaveOneOut if native else LeaveOneOut)


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_long_lines_give_the_loss_and_the_gradient_of_row_blocks(kernel):
    """Enough pairs that sums on a line are those of sorted keys, with keys that stand in one place, and repeats."""
    problem = summable(kernel, 1, counts=True, n=3000)
    problem.keys[1:] = (problem.keys[1:] * 50).round() / 50
    fast, slow = objective(problem), LeaveOneOut(problem)
    theta = torch.tensor([-2.0], dtype=torch.float64)
    found, known = fast.value(theta), slow.value(theta)
    assert found[0] == pytest.approx(known[0], rel=1e-10)
    torch.testing.assert_close(found[1], known[1], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(fast.predictions(theta), slow.predictions(theta), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slopes_keep_their_digits_where_squares_would_lose_them(dtype):
    problem = summable("gaussian", 2)
    problem.keys[0] = 1e7
    theta = torch.tensor([0.2, -0.1], dtype=torch.float64)
    fast, exact = SummedLeaveOneOut(problem, None, dtype).value(theta), LeaveOneOut(problem).value(theta)
    torch.testing.assert_close(fast[1], exact[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("d", [1, 3])
def test_results_do_not_depend_on_the_number_of_threads(d):
    problem = summable("gaussian", d, n=6000)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            loss, slope = objective(problem).value(torch.zeros(d, dtype=torch.float64))
            found.append((loss, slope.tolist()))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("degree", [0, 1])
def test_grid_gives_the_loss_of_each_scale(kernel, degree):
    objective = LeaveOneOut(task(kernel, degree, counts=True))
    # The narrowest one has one neighbour in reach, through which many lines go.
    scales = torch.tensor([0.4, 0.5, 1.0, 3.0] if degree else [0.05, 0.5, 1.0, 3.0], dtype=torch.float64)
    alone = [objective.value(torch.full((3,), math.log(s), dtype=torch.float64))[0] for s in scales.tolist()]
    np.testing.assert_allclose(objective.grid(scales), alone, rtol=1e-9)


def test_float32_is_near_float64_and_far_points_do_not_underflow():
    problem = task("gaussian", n=200)
    for theta in (THETA, THETA - 4.0):
        exact, slope = LeaveOneOut(problem).value(theta)
        single, near = LeaveOneOut(problem, dtype=torch.float32).value(theta)
        assert single == pytest.approx(exact, rel=2e-3)
        torch.testing.assert_close(near, slope, rtol=2e-2, atol=2e-3 * float(slope.abs().max()))


def test_search_finds_the_minimum_whatever_the_scale_of_the_loss():
    problem = task("gaussian", n=60)
    found = []
    for unit in (1.0, 1e-6):
        scaled = LooTask("gaussian", problem.keys, problem.values * unit, problem.weights, problem.kept, squared_error)
        objective = LeaveOneOut(scaled)
        settings = Settings(100, 1e-9, 2, np.random.RandomState(0))
        found.append(search([objective], 3, settings).log_scale)
        _, slope = objective.value(torch.from_numpy(found[-1]))
        inside = np.abs(found[-1]) < 6
        loss = objective.value(torch.from_numpy(found[-1]))[0]
        assert np.abs(slope.numpy()[inside]).max() < 1e-3 * loss
    np.testing.assert_allclose(found[0], found[1], atol=5e-2)


def without_copies(model, X, y, weights, kernel):
    """Predict each row by hand, in float64, from the rows of other features."""
    u = (X[:, None] - X) / model.bandwidth_
    distance = np.abs(u).sum(-1) if kernel == "laplace" else 0.5 * np.square(u).sum(-1)
    found = []
    for i in range(len(X)):
        rows = (X[i] != X).any(1)
        logs = np.log(weights[rows]) - distance[i, rows]
        p = np.exp(logs - logs.max())
        design = np.column_stack([np.ones(rows.sum()), *([X[rows] - X[i]] if model.degree else [])])
        root = np.sqrt(p)[:, None]
        found.append(np.linalg.lstsq(root * design, root * y[rows], rcond=None)[0][0])
    return np.array(found)


def copied(d, seed=0):
    """Half of the rows once, the others several times, in any order; the first is another measurement of the last."""
    random = np.random.default_rng(seed)
    X = random.uniform(-1, 1, (60, d))
    X[0] = X[-1]
    y = np.sin(3 * X[:, :1]) + 0.3 * random.normal(size=(60, 1))
    rows = random.permutation(np.concatenate([np.arange(60), np.repeat(np.arange(0, 60, 2), 2)]))
    return X, y, rows


COPIED = [("gaussian", 1, 0), ("laplace", 1, 0), ("gaussian", 3, 0), ("laplace", 3, 0), ("gaussian", 3, 1)]


@pytest.mark.parametrize(("kernel", "d", "degree"), COPIED)
@pytest.mark.parametrize("weights_are", ["counts", "importance"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_row_is_left_out_together_with_its_copies(kernel, d, degree, weights_are, weighted):
    X, y, rows = copied(d)
    weights = np.random.default_rng(1).integers(1, 4, len(rows)).astype(float) if weighted else np.ones(len(rows))
    model = AttentionRegressor(kernel, degree=degree, weights_are=weights_are, tolerance=0)
    model.fit(X[rows], y[rows], weights if weighted else None)
    known = without_copies(model, X[rows], y[rows], weights, kernel)
    np.testing.assert_allclose(model.leave_one_out(), known, atol=1e-8)
    loss = float(np.average(np.square(known - y[rows])[:, 0], weights=weights))
    assert model.loo_loss_ == pytest.approx(loss, rel=1e-6)
    assert model.path_["bandwidth_loss"].min() * model._unit[0] ** 2 == pytest.approx(loss, rel=0.02)


def test_a_point_is_classified_without_its_copies():
    X, y, rows = copied(2)
    labels = (y[:, 0] > 0).astype(int)
    model = AttentionClassifier(outside="prior").fit(X[rows], labels[rows])
    known = without_copies(model, X[rows], np.eye(2)[labels[rows]], np.ones(len(rows)), "gaussian")
    observed = known[np.arange(len(rows)), labels[rows]]
    assert model.path_["bandwidth_loss"].min() == pytest.approx(-np.log(observed).mean(), rel=1e-6)


def test_copies_neither_narrow_the_bandwidth_nor_better_the_score():
    random = np.random.default_rng(0)
    X = random.uniform(0, 3, (300, 1))
    y = np.sin(2 * X[:, 0]) + random.normal(scale=0.5, size=300)
    plain, twice = AttentionRegressor().fit(X, y), AttentionRegressor().fit(np.r_[X, X], np.r_[y, y])
    np.testing.assert_allclose(twice.bandwidth_, plain.bandwidth_, rtol=1e-3)
    assert twice.loo_score_ == pytest.approx(plain.loo_score_, abs=1e-6)
    bags = BaggingRegressor(AttentionRegressor(), n_estimators=8, random_state=0).fit(X, y)
    several = np.array([bag.bandwidth_[0] for bag in bags.estimators_])
    assert (several > plain.bandwidth_ / 3).all()
    # Repeated measurements are no copies: a category that says all that there is to say is found.
    group = random.integers(0, 2, 200)
    repeated = AttentionRegressor().fit(group[:, None], group + random.normal(scale=0.1, size=200))
    assert repeated.loo_score_ > 0.9


def test_the_loss_of_fractional_counts_is_that_of_the_predictions():
    rng = np.random.default_rng(0)
    X = rng.integers(0, 4, size=(80, 1)).astype(float)
    y = X[:, 0] + rng.integers(0, 3, 80)
    weights = rng.uniform(0.3, 3, 80)
    model = AttentionRegressor().fit(X, y, sample_weight=weights)
    assert model.loo_loss_ == pytest.approx(np.average((model.leave_one_out() - y) ** 2, weights=weights), rel=1e-9)
