"""One pass: what a part holds, that parts come in order, and that none is computed twice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.stats.definitions import allowed_by_mask
from torch import Tensor

import attlas
from attlas import Plan, stats
from attlas.engine.online import finite_shift
from attlas.engine.statistic import Part, Statistic, lowest


class Look(Statistic):
    """Put the whole matrix together from parts, and check each of them."""

    def __init__(self, order: str = "weights logits", whole_rows: bool = False) -> None:
        self.order = order
        self.whole_rows = whole_rows

    def start(self, problem: Any) -> Any:
        shape = problem.shape
        return {
            "weights": torch.zeros(shape, dtype=problem.dtype),
            "logits": torch.full(shape, -math.inf, dtype=problem.dtype),
            "lse": torch.full(shape[:3], -math.inf, dtype=problem.dtype),
            "keys": torch.zeros(shape[:3], dtype=problem.dtype),
            "visits": torch.zeros(shape, dtype=torch.int32),
            "parts": 0,
        }

    def step(self, carry: Any, part: Part, at: attlas.Tile) -> Any:
        columns = slice(at.columns.start, at.columns.stop)
        b, h, rows = at.place
        if self.whole_rows:
            assert part.first
            assert part.last
        if part.allowed is not None:
            assert part.allowed.dtype == torch.bool
            assert part.allowed.shape == at.shape
        for name in self.order.split():
            found: Tensor = getattr(part, name)
            assert found.shape == at.shape
            carry[name][b, h, rows, columns] = found
        largest = (part.largest + part.shift - finite_shift(part.lse)).exp()
        torch.testing.assert_close(part.weights.amax(-1), largest)
        carry["lse"][at.place] = part.lse
        carry["keys"][at.place] += part.keys
        carry["visits"][b, h, rows, columns] += 1
        carry["parts"] += 1
        return carry

    def finish(self, carry: Any) -> Any:
        carry["parts"] = torch.full(carry["lse"].shape[:2], float(carry["parts"]))
        return tuple(carry.values())


MASKS = {
    "none": None,
    "causal": attlas.Causal(),
    "empty rows": attlas.Causal(-5),
    "window": attlas.Window(4, 4),
    "function": attlas.from_function(lambda b, h, i, j: (i + j + h) % 3 > 0),
}
PLANS = [Plan(), Plan("tiled", rows=4, columns=6), Plan("tiled", cells=30), Plan("tiled", rows=30, columns=30)]


@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("score", [attlas.ScaledDot(), attlas.Epanechnikov(3.0)], ids=["dot", "bounded"])
def test_parts_make_up_the_matrix(mask: str, plan: Plan, sink: bool, known: bool, score: attlas.Score) -> None:
    q, k = torch.randn(2, 3, 13, 4, dtype=torch.float64), torch.randn(2, 3, 17, 4, dtype=torch.float64)
    extra = torch.randn(3, dtype=torch.float64) if sink else None
    A = attlas.attend(q, k, score=score, mask=MASKS[mask], sink=extra, plan=plan)
    if known:
        assert A.lse.shape == (2, 3, 13)
    exact = attlas.engine.backends.reference.dense(A.problem)
    for order in ("weights logits", "logits weights"):
        weights, logits, lse, keys, visits, _ = A.collect(Look(order))[0]
        torch.testing.assert_close(weights, exact.weights)
        torch.testing.assert_close(logits, exact.logits)
        torch.testing.assert_close(keys, allowed_by_mask(A.problem).sum(-1).double())
        assert int(visits.max()) == 1
        visited = visits.any(-1)
        torch.testing.assert_close(lse[visited], exact.lse[visited])
        torch.testing.assert_close(A.lse, exact.lse)


def test_whole_rows_come_in_one_part() -> None:
    A = attlas.attend(torch.randn(1, 2, 13, 4), torch.randn(1, 2, 17, 4), plan=Plan("tiled", rows=4, columns=6))
    weights, *_ = A.collect(Look(whole_rows=True))[0]
    torch.testing.assert_close(weights, A.to_dense())
    with pytest.raises(AssertionError):
        look = Look()
        look.step = lambda carry, part, at: (_ for _ in ()).throw(AssertionError) if not part.last else carry
        A.collect(look)


def test_one_statistic_of_whole_rows_serves_the_others_too() -> None:
    A = attlas.attend(torch.randn(1, 2, 13, 4), torch.randn(1, 2, 17, 4), plan=Plan("tiled", rows=4, columns=6))
    first, second = A.collect(Look(), Look(whole_rows=True))
    torch.testing.assert_close(first[0], second[0])


def test_no_statistic_at_all() -> None:
    A = attlas.attend(torch.randn(5, 4), torch.randn(7, 4))
    assert A.collect() == ()


def test_several_cost_one_pass() -> None:
    class Counting(attlas.Score):
        calls = 0

        def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
            Counting.calls += 1
            return q @ k.mT

    q, k = torch.randn(1, 2, 64, 4), torch.randn(1, 2, 64, 4)
    A, B = (attlas.attend(q, k, score=Counting(), plan=Plan("tiled", rows=16)) for _ in range(2))
    Counting.calls = 0  # attend() asks it for a few cells
    A.collect(Look())
    once, Counting.calls = Counting.calls, 0
    B.collect(Look(), Look(), Look())
    assert Counting.calls == once == 4


def test_the_number_that_stands_for_nothing_is_finite() -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor(lowest(dtype), dtype=dtype)
        assert bool((x - 1e30).isfinite())
        assert bool((2 * x).isfinite())
        assert float(torch.exp(x)) == 0.0
        assert float(0 * x) == 0.0


@pytest.mark.parametrize("first", [stats.ColumnMass(), stats.Entropy()], ids=["column mass", "entropy"])
def test_the_mass_of_rows_whose_weights_a_step_before_has_used(first: stats.Statistic) -> None:
    """Where the log-sum-exp is known and large, weights have a factor, which must not count twice."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 64, 16, generator=generator) for _ in range(2))
    A = attlas.attend(q * 300, k, plan=attlas.Plan("tiled", cells=1 << 10))
    assert float(A.lse.abs().max()) > 500
    mass = A.collect(first, stats.RowMass())[1]
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0.0, atol=2e-6)
