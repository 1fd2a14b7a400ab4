"""The largest weights against a full sort of the dense matrix."""

import numpy as np
import pytest
import torch
from tests.stats.definitions import needed

import attlas
from attlas import stats
from attlas.errors import ShapeError


def test_topk(fresh):
    for k in (1, 3, 8, 40):
        case = fresh()
        k = min(k, case.n)
        if k == 0:
            with pytest.raises(ShapeError):
                stats.topk(case.A, 1)
            return
        values, indices = stats.topk(case.A, k)
        order = np.sort(case.weights, axis=-1)[..., ::-1][..., :k]
        case.close(values, order)
        assert indices.dtype == torch.int64
        assert indices.shape == values.shape
        assert bool((values.diff(dim=-1) <= 0).all())
        places = np.sort(indices.numpy(), axis=-1)
        assert ((places >= 0) & (places < case.n)).all()
        assert (np.diff(places, axis=-1) > 0).all(), "a key is named twice"
        there = np.take_along_axis(case.weights, indices.numpy(), -1)
        np.testing.assert_allclose(there, order, rtol=case.tolerance, atol=case.tolerance)
        case.close(stats.tail_mass(case.A, k), case.weights.sum(-1) - order.sum(-1))


@pytest.mark.parametrize("n", [1, 2, 17, 64, 65, 1000, 5003])
@pytest.mark.parametrize("k", [1, 2, 16, 300])
def test_topk_by_groups_equals_topk(n, k):
    k = min(k, n)
    A = attlas.attend(torch.randn(5, 8), torch.randn(n, 8))
    values, indices = stats.topk(A, k)
    expected = A.to_dense().topk(k)
    torch.testing.assert_close(values, expected.values)
    assert torch.equal(indices, expected.indices) or n == 1


def test_topk_of_equal_weights_names_different_keys():
    A = attlas.attend(torch.zeros(3, 4), torch.zeros(999, 4))
    values, indices = stats.topk(A, 77)
    torch.testing.assert_close(values, torch.full((3, 77), 1 / 999))
    assert all(len(set(row)) == 77 for row in indices.tolist())


@pytest.mark.parametrize("plan", [None, attlas.Plan(rows=2, columns=3), attlas.Plan(rows=1, columns=1)])
def test_topk_of_rows_with_fewer_keys(plan):
    A = attlas.attend(torch.zeros(6, 4), torch.zeros(6, 4), mask=attlas.Causal() & attlas.Window(2, 0), plan=plan)
    values, indices = stats.topk(A, 6)
    for i, row in enumerate(indices.tolist()):
        keys = min(i + 1, 3)
        assert sorted(row) == list(range(6))
        assert sorted(row[:keys]) == list(range(i + 1 - keys, i + 1))
        torch.testing.assert_close(values[i], torch.tensor([1 / keys] * keys + [0.0] * (6 - keys)))


def test_argmax(case):
    if case.n == 0:
        with pytest.raises(ShapeError):
            case.A.collect(stats.ArgMax())
        return
    found = case.A.collect(stats.ArgMax())[0]
    assert found.shape == case.weights.shape[:3]
    there = np.take_along_axis(case.weights, found.numpy()[..., None], -1)[..., 0]
    np.testing.assert_allclose(there, case.weights.max(-1), rtol=case.tolerance, atol=case.tolerance)
    empty = case.weights.max(-1) == 0
    assert (found.numpy()[empty] == 0).all()


def test_coverage(case):
    levels = (0.001, 0.5, 0.9, 0.95, 0.99)
    found = stats.coverage(case.A, levels)
    assert found.dtype == torch.int64
    assert tuple(found.shape) == (*case.weights.shape[:3], len(levels))
    if case.n == 0:
        assert not found.any()
        return
    slack = 10 * case.tolerance
    for index, level in enumerate(levels):
        count = found[..., index].numpy()
        assert (count >= needed(case.weights, level - slack)).all()
        assert (count <= needed(case.weights, level + slack)).all()


def test_coverage_that_is_met_exactly_counts_as_met():
    for n in (1, 10, 20, 100, 1000, 5000):
        A = attlas.attend(torch.zeros(2, 4), torch.zeros(n, 4))
        levels = [0.5, 0.9, 0.95, 0.99, 1.0]
        assert stats.coverage(A, levels)[0].tolist() == [max(round(np.ceil(n * t - 1e-9)), 1) for t in levels]


@pytest.mark.parametrize("threads", [1, 3])
def test_coverage_in_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        A = attlas.attend(torch.randn(50, 8), torch.randn(333, 8))
        expected = needed(A.to_dense().double().numpy(), 0.9)
        assert np.abs(stats.coverage(A, [0.9])[:, 0].numpy() - expected).max() <= 1
    finally:
        torch.set_num_threads(before)


def test_coverage_keeps_the_shared_weights():
    A = attlas.attend(torch.randn(50, 8), torch.randn(128, 8))
    alone = A.to_dense().sum(-2)
    torch.testing.assert_close(A.collect(stats.Coverage(), stats.ColumnMass())[1], alone)
    torch.testing.assert_close(A.collect(stats.ColumnMass(), stats.Coverage())[0], alone)
