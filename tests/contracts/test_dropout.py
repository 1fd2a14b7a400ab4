"""Dropout of weights: the same whenever it is computed again, and right on average."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attlas
from attlas import Plan
from attlas.engine.dropout import Dropout


def kept(problem: Any, p: float, seed: int) -> torch.Tensor:
    return Dropout(p, seed).keep(problem.tile(*map(range, problem.shape)))


def drawn_seed() -> int:
    """Return the seed that the next call draws from torch's generator."""
    state = torch.get_rng_state()
    seed = Dropout.draw(0.5).seed
    torch.set_rng_state(state)
    return seed


@pytest.mark.parametrize(
    "plan", [Plan(), Plan("tiled", rows=3, columns=4), Plan("tiled", cells=1), Plan("reference")], ids=str
)
@pytest.mark.parametrize("name", ["ScaledDot", "Additive", "RelativeBias", "Gaussian(wide, leaf)"])
def test_gradient_equals_autograd_with_the_same_drops(name: str, plan: Plan, make: Any, sizes: Any, same: Any) -> None:
    case = make(name, "Causal", sizes(11, 14), sink=True)
    leaves = case.leaves()
    seed = drawn_seed()
    out = attlas.attention(
        case.q, case.k, case.v, score=case.score, mask=case.mask, sink=case.sink, dropout_p=0.3, plan=plan
    )
    weights = case.plain()[1] * kept(case.matrix().problem, 0.3, seed)
    wanted = weights @ case.v.repeat_interleave(2, dim=1)
    same(out, wanted, "output")
    slope = case.sizes.random(*out.shape, seed=2)
    for key, a, b in zip(
        leaves,
        torch.autograd.grad(out, list(leaves.values()), slope),
        torch.autograd.grad(wanted, list(leaves.values()), slope),
        strict=True,
    ):
        same(a, b, f"gradient of {key}")


@pytest.mark.parametrize("plan", [Plan(), Plan("tiled", rows=3, columns=4), Plan("reference")], ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_the_gradient_of_the_weights_is_that_before_dropout(plan: Plan, late: bool, make: Any, sizes: Any) -> None:
    """A weight that was dropped has gradient 0; two products drop other weights, and their gradients add up."""
    case = make("ScaledDot", "Causal", sizes(11, 14), sink=True)
    weights = case.plain()[1].detach().requires_grad_()
    A, wide = case.matrix(plan), case.v.detach().repeat_interleave(2, dim=1)
    if not late:
        A.retain_grad()
    loss = wanted = torch.zeros(())
    for p in (0.3, 0.6):
        factors = kept(A.problem, p, drawn_seed())
        loss = loss + A.pooled(case.v, p).square().sum()
        wanted = wanted + ((weights * factors) @ wide).square().sum()
    if late:
        A.retain_grad()
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(A.grad, weights.grad)
    assert bool((A.grad == 0).any())


def test_drops_do_not_depend_on_the_tile() -> None:
    problem = attlas.attend(torch.randn(2, 3, 40, 4), torch.randn(2, 3, 50, 4)).problem
    whole = kept(problem, 0.4, 7)
    for rows, columns in ((range(3, 9), range(10, 50)), (range(39, 40), range(1)), (range(40), range(7, 8))):
        part = Dropout(0.4, 7).keep(problem.tile(range(1, 2), range(1, 3), rows, columns))
        assert torch.equal(part, whole[1:2, 1:3, rows.start : rows.stop, columns.start : columns.stop])


def test_a_head_drops_what_it_drops_in_the_whole_matrix() -> None:
    problem = attlas.attend(torch.randn(2, 3, 40, 4), torch.randn(2, 3, 50, 4))
    whole = kept(problem.problem, 0.4, 7)
    assert torch.equal(kept(problem[1, 2].problem, 0.4, 7)[0, 0], whole[1, 2])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_share_of_drops(p: float) -> None:
    problem = attlas.attend(torch.randn(2, 2, 300, 4), torch.randn(2, 2, 300, 4)).problem
    keep = kept(problem, p, 3)
    dropped = (keep == 0).double()
    deviation = (p * (1 - p) / dropped.numel()) ** 0.5
    assert abs(float(dropped.mean()) - p) <= 4 * deviation
    assert bool(((keep == 0) | (keep == 1 / (1 - p))).all() if p != 0.9 else (keep[keep > 0] - 10).abs().max() < 1e-5)
    # Rows, columns and heads are independent: no two of them drop the same.
    flat = dropped.flatten(0, 1)
    if p == 0.5:
        for t in (flat[0], flat[0].T, flat.flatten(1)):
            t = t - t.mean(dim=1, keepdim=True)
            correlation = torch.corrcoef(t)
            correlation.fill_diagonal_(0)
            assert float(correlation.abs().max()) < 6 / t.shape[1] ** 0.5
        assert not torch.equal(flat[0], flat[0].T)


def test_seeds_are_independent() -> None:
    problem = attlas.attend(torch.randn(1, 1, 200, 4), torch.randn(1, 1, 200, 4)).problem
    drops = torch.stack([(kept(problem, 0.5, seed) == 0).flatten().double() for seed in range(20)])
    correlation = torch.corrcoef(drops).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 6 / 200


def test_mean_over_seeds_is_the_product_without_dropout() -> None:
    q, k, v = (torch.randn(1, 2, 12, 4, dtype=torch.float64) for _ in range(3))
    runs = torch.stack([attlas.attention(q, k, v, dropout_p=0.3) for _ in range(500)])
    error = (runs.mean(0) - attlas.attention(q, k, v)).abs() / (runs.std(0) / len(runs) ** 0.5)
    assert float(error.max()) < 5


def test_manual_seed_repeats_the_drops() -> None:
    q, k, v = (torch.randn(1, 2, 12, 4) for _ in range(3))
    torch.manual_seed(5)
    first, second = (attlas.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(attlas.attention(q, k, v, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    torch.testing.assert_close(attlas.attention(q, k, v, dropout_p=0.5, plan=Plan("tiled", rows=5, columns=3)), first)


def test_no_dropout_draws_no_seed() -> None:
    q = torch.randn(3, 4)
    before = torch.get_rng_state()
    attlas.attention(q, q, q)
    attlas.attention(q, q, q, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_everything_dropped_is_zero() -> None:
    q, k, v = (torch.randn(1, 2, 12, 4, requires_grad=True) for _ in range(3))
    out = attlas.attention(q, k, v, dropout_p=1.0)
    assert bool((out == 0).all())
    assert all(bool((g == 0).all()) for g in torch.autograd.grad(out.sum(), (q, k, v)))
