"""Laws that hold for every attention matrix, whatever its score, mask and plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attlas
from attlas import Plan, stats
from attlas.engine.backends.native import library
from attlas.engine.backends.reference import dense

SMALL = {"batch": 2, "heads": 4, "key_heads": 2, "value_heads": 2}


def test_rows_sum_to_one_or_nothing(score_name: str, make: Any, sizes: Any) -> None:
    for mask in ("none", "Causal(-4)", "additive", "nothing"):
        case = make(score_name, mask, sizes(11, 13, **SMALL))
        A = case.matrix()
        total = A[:, :, :, :].sum(-1)
        seen = case.logits().detach().isfinite().any(-1)
        torch.testing.assert_close(total, seen.to(total.dtype))
        assert torch.equal(A.lse == -math.inf, ~seen)


def test_rows_sum_to_less_with_a_sink(score_name: str, make: Any, sizes: Any) -> None:
    case = make(score_name, "Causal(-4)", sizes(11, 13, **SMALL), sink=True)
    total = case.matrix()[:, :, :, :].sum(-1)
    seen = case.logits().detach().isfinite().any(-1)
    assert bool(((total > 0) == seen).all())
    assert bool((total < 1).all())
    share = torch.exp(case.sink.view(1, -1, 1) - case.matrix().lse).detach()
    torch.testing.assert_close(total + share, torch.ones_like(total))


def test_permuting_keys_permutes_columns(score_name: str, make: Any, sizes: Any) -> None:
    """A score of tokens does not see where keys stand; a score of places does, and is left out."""
    case = make(score_name, "none", sizes(11, 13, **SMALL))
    parts = [part for part in case.score.modules() if isinstance(part, attlas.Score)]
    if any(part.positional or isinstance(part, attlas.ScoreMod) for part in parts):
        pytest.skip("a score of positions")
    order = torch.randperm(13)
    A, B = case.matrix(), attlas.attend(case.q, case.k[:, :, order], score=case.score, plan=Plan("tiled", columns=3))
    torch.testing.assert_close(B[:, :, :, :], A[:, :, :, :][..., order])
    torch.testing.assert_close(B @ case.v[:, :, order], A @ case.v)
    torch.testing.assert_close(B.lse, A.lse)


def test_permuting_queries_permutes_rows(make: Any, sizes: Any) -> None:
    case = make("Additive", "none", sizes(11, 13, **SMALL))
    order = torch.randperm(11)
    B = attlas.attend(case.q[:, :, order], case.k, score=case.score)
    torch.testing.assert_close(B @ case.v, (case.matrix() @ case.v)[:, :, order])


def test_weights_are_not_moved_by_a_constant(make: Any, sizes: Any) -> None:
    case = make("ScaledDot", "Causal", sizes(11, 13, **SMALL))
    for shift in (-1e3, 1e3):
        moved = attlas.ScaledDot() + attlas.TensorBias(torch.full((11, 13), shift, dtype=torch.float64))
        A = attlas.attend(case.q, case.k, score=moved, mask=attlas.Causal())
        torch.testing.assert_close(A[:, :, :, :], case.matrix()[:, :, :, :], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(A.lse, case.matrix().lse + shift)


@pytest.mark.parametrize("plan", [Plan(), Plan("tiled", rows=3, columns=5), Plan("tiled", cells=16), Plan(cells=1)])
def test_the_plan_changes_nothing(mask_name: str, plan: Plan, make: Any, sizes: Any, same: Any) -> None:
    case = make("ScaledDot", mask_name, sizes(17, 21, **SMALL), sink=True)
    A, B = case.matrix(plan), case.matrix(Plan("reference"))
    same(A.lse, B.lse, "lse")
    same(A[:, :, 2:9, :], B[:, :, 2:9, :], "weights")
    same(A @ case.v, B @ case.v, "output")
    same(A.mT @ case.q.detach(), B.mT @ case.q.detach(), "transposed product")


ROW_LIST, COLUMN_LIST = [16, 0, 3, 3], [13, 5, 5, 1]
PARTS: dict[str, tuple[Any, Any]] = {
    "block": (slice(2, 9), slice(4, 15)),
    "row": (3, slice(None)),
    "column": (slice(None), 7),
    "cell": (5, 6),
    "no rows": (slice(0, 0), slice(None)),
    "no columns": (slice(None), slice(5, 5)),
    "list of rows": (ROW_LIST, slice(1, 8)),
    "list of columns": (slice(1, 8), COLUMN_LIST),
    "pairs": (ROW_LIST, COLUMN_LIST),
    "last row, backwards": (-1, slice(None, None, -1)),
    "steps": (slice(None, None, -2), slice(2, None, 3)),
}


def test_tiles_are_slices_of_the_whole(score_name: str, make: Any, sizes: Any, same: Any) -> None:
    case = make(score_name, "function", sizes(17, 21, **SMALL), sink=True)
    weights, logits = case.plain()[1].detach().numpy(), case.logits().detach().numpy()
    plan = Plan("tiled", rows=6, columns=9)
    known = case.matrix(plan)
    assert known.lse.shape == (2, 4, 17)
    for name, (row, column) in PARTS.items():
        key = (slice(None), slice(None), row, column)
        wanted, wanted_logits = (torch.from_numpy(t[key].copy()) for t in (weights, logits))
        same(case.matrix(plan)[key], wanted, f"A, {name}")
        same(known[key], wanted, f"A with a known lse, {name}")
        same(known.logits[key], wanted_logits, f"A.logits, {name}")


def test_transposed_product(score_name: str, make: Any, sizes: Any, same: Any, tables: Any) -> None:
    place = tables["score"].index(score_name)
    mask = tables["mask"][(7 * place + 3) % len(tables["mask"])]
    case = make(score_name, mask, sizes(11, 14, **SMALL), sink=place % 2 == 0)
    _, weights, _, _ = case.plain()
    x = case.sizes.random(2, 4, 11, 3, seed=40).requires_grad_()
    leaves = {name: t for name, t in case.leaves().items() if name != "v"} | {"x": x}
    wanted = weights.mT @ x
    slope = case.sizes.random(*wanted.shape, seed=41)
    wanted_gradients = torch.autograd.grad(wanted, list(leaves.values()), slope, allow_unused=True)
    for plan in (Plan(), Plan("tiled", rows=3, columns=4)):
        found = case.matrix(plan).mT @ x
        same(found, wanted, f"A.mT @ x, {plan}")
        gradients = torch.autograd.grad(found, list(leaves.values()), slope, allow_unused=True)
        for name, t, a, b in zip(leaves, leaves.values(), gradients, wanted_gradients, strict=True):
            zero = torch.zeros_like(t)
            same(zero if a is None else a, zero if b is None else b, f"gradient of {name}, {plan}")


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_transposed_product_of_grouped_heads(heads: int, make: Any, sizes: Any, same: Any) -> None:
    case = make("ScaledDot", "Causal", sizes(11, 14, **SMALL))
    x = case.sizes.random(2, heads, 11, 3, seed=40)
    weights = case.plain()[1]
    same(case.matrix().mT @ x, weights.mT @ x.repeat_interleave(4 // heads, dim=1), "A.mT @ x")
    same(case.matrix().mT @ torch.ones(11, dtype=torch.float64), weights.sum(-2), "A.mT @ vector")


EMPTY = {
    "mask": (attlas.ScaledDot(), ~attlas.Prefix(100)),
    "causal": (attlas.ScaledDot(), attlas.Causal(-6)),
    "kernel": (attlas.Epanechnikov(0.3), None),
    "bias": (attlas.ScaledDot(), torch.full((9, 7), -math.inf, dtype=torch.float64)),
    "function": (attlas.Gaussian(1.0), lambda b, h, i, j: (i > 4) & (j < 3)),
}


@pytest.mark.parametrize("name", list(EMPTY))
@pytest.mark.parametrize("plan", [Plan(), Plan("tiled"), Plan("tiled", rows=2, columns=3), Plan("reference")], ids=str)
def test_a_row_that_sees_no_key(name: str, plan: Plan) -> None:
    """Weights 0, output 0, gradient 0 and lse -inf; never NaN."""
    score, mask = EMPTY[name]
    q, k, v = (torch.randn(2, 3, t, 3, dtype=torch.float64, requires_grad=True) for t in (9, 7, 7))
    A = attlas.attend(q, k, score=score, mask=mask, plan=plan)
    empty = (A.logits[:, :, :, :] == -math.inf).all(-1)
    assert bool(empty.any())
    out = A @ v
    gradients = torch.autograd.grad(out.square().sum() + out.sum(), (q, k, v))
    lse, weights = A.lse, A[:, :, :, :]
    assert torch.equal(lse == -math.inf, empty)
    assert not lse.isnan().any()
    for found in (weights, out.detach(), gradients[0]):
        assert bool((found[empty] == 0).all())
    for found in (weights, out, *gradients):
        assert bool(found.isfinite().all())
    x = torch.randn(2, 3, 9, 2, dtype=torch.float64, requires_grad=True)
    down = A.mT @ x
    assert bool(down.isfinite().all())
    for g in torch.autograd.grad(down.square().sum(), (q, k, x)):
        assert bool(g.isfinite().all())


@pytest.mark.parametrize("plan", [Plan(), Plan("tiled", rows=2, columns=3), Plan("reference")], ids=str)
def test_an_empty_row_with_a_sink_gives_all_to_the_sink(plan: Plan) -> None:
    q, k, v = (torch.randn(2, 3, t, 3, dtype=torch.float64, requires_grad=True) for t in (9, 7, 7))
    sink = torch.randn(3, dtype=torch.float64, requires_grad=True)
    A = attlas.attend(q, k, mask=attlas.Causal(-6), sink=sink, plan=plan)
    out = A @ v
    torch.testing.assert_close(A.lse[:, :, :6], sink.detach().view(1, -1, 1).expand(2, 3, 6))
    assert bool((out[:, :, :6] == 0).all())
    for g in torch.autograd.grad(out.sum(), (q, k, v, sink)):
        assert bool(g.isfinite().all())


def test_causal_aligns_the_last_query_with_the_last_key() -> None:
    """The weights of the last queries are those rows of the whole matrix: a cache of keys changes nothing."""
    q, k = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)
    whole = attlas.attend(q, k, mask=attlas.Causal())
    for m in (1, 7, 39):
        last = attlas.attend(q[:, :, -m:], k, mask=attlas.Causal())
        torch.testing.assert_close(last[:, :, :, :], whole[:, :, -m:, :])
        torch.testing.assert_close(last @ k, (whole @ k)[:, :, -m:])
    first = attlas.attend(q[:, :, :7], k, mask=attlas.Causal(0))
    torch.testing.assert_close(first[:, :, :, :], whole[:, :, :7, :])
    long = attlas.attend(q, k[:, :, :30], mask=attlas.Causal())
    assert bool((long[:, :, :10, :] == 0).all())
    assert bool((long[:, :, 10, 0] == 1).all())


NOT_FINITE = {"nan": math.nan, "+inf": math.inf, "-inf": -math.inf}
SOME_MASKS = {
    "no mask": None,
    "causal": attlas.Causal(),
    "function": attlas.from_function(lambda b, h, i, j: i >= j - 3),
    "tensor": attlas.from_tensor(torch.ones(9, 9).tril(2).bool()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("value", list(NOT_FINITE))
@pytest.mark.parametrize("where", ["q", "k", "k, all logits negative", "v"])
@pytest.mark.parametrize("mask", list(SOME_MASKS))
def test_numbers_that_are_not_finite_behave_as_in_the_reference(
    value: str, where: str, mask: str, dtype: torch.dtype
) -> None:
    """Where weights are NaN the log-sum-exp is no finite number: +inf by the formula, NaN from a running sum.

    A named backend is no exception: a plan refuses problems, never numbers.
    """
    q, k, v = (torch.rand(1, 2, 9, 4, dtype=dtype) + 0.1 for _ in range(3))
    if "negative" in where:
        q = -q
    {"q": q, "k": k, "v": v}[where[0]][0, 1, 5, 2] = NOT_FINITE[value]
    wanted = dense(attlas.attend(q, k, mask=SOME_MASKS[mask]).problem)
    wanted_out = wanted.weights @ v
    if where == "v":  # 0 times NaN is NaN: what a mask hides has no part in the sum
        wanted_out = (wanted.weights.unsqueeze(-1) * v.unsqueeze(-3)).where(
            wanted.logits.unsqueeze(-1) > -math.inf, 0.0
        )
        wanted_out = wanted_out.sum(-2)
    broken = wanted.weights.isnan().any(-1)
    native = [Plan("native")] if library.available() else []
    for plan in (Plan(), Plan("sdpa"), *native, Plan("tiled"), Plan("tiled", rows=2, columns=3)):
        A = attlas.attend(q, k, mask=SOME_MASKS[mask], plan=plan)
        out = A @ v
        fresh = attlas.attend(q, k, mask=SOME_MASKS[mask], plan=plan)
        found = {
            "output": (out, wanted_out),
            "weights": (fresh[:, :, :, :], wanted.weights),
            "weights after the product": (A[:, :, :, :], wanted.weights),
            "lse": (fresh.lse[~broken], wanted.lse[~broken]),
            "lse after the product": (A.lse[~broken], wanted.lse[~broken]),
        }
        for name, (one, other) in found.items():
            torch.testing.assert_close(one, other, equal_nan=True, msg=lambda m, n=name, p=plan: f"{n}, {p}: {m}")
        assert not fresh.lse[broken].isfinite().any()
        assert not A.lse[broken].isfinite().any()


VALUES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "output": lambda A, v: A @ v,
    "statistic": lambda A, v: A.collect(stats.Pooled(v))[0],
    "transposed": lambda A, v: A.mT @ v,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [9, 130])
@pytest.mark.parametrize("score", ["ScaledDot", "Gaussian", "TensorBias"])
def test_a_value_reaches_the_rows_that_may_see_it(score: str, size: int, dtype: torch.dtype) -> None:
    """Whatever the plan: NaN and infinity of a hidden key reach no row, those of a seen one every row that sees it."""
    random = torch.Generator().manual_seed(size)
    q, v = (torch.randn(1, 2, size, 4, generator=random).to(dtype) for _ in range(2))
    scores = {"ScaledDot": None, "Gaussian": attlas.Gaussian(1.0)}
    own = scores.get(score, attlas.ScaledDot() + attlas.TensorBias(torch.zeros(size, size)))
    v[..., 4, 0], v[..., 6, 1], v[..., 2, 1], v[..., 3, 2], v[..., -1, :] = *NOT_FINITE.values(), -math.inf, math.nan
    even = attlas.from_function(lambda b, h, i, j: (i + j) % 2 == 0)
    for mask in (attlas.Causal(), attlas.Window(2, 0), even, torch.rand(size, size, generator=random) > 0.5):
        A = attlas.attend(q, q, score=own, mask=mask)
        seen = A.mask.allows(A.problem.tile(*map(range, A.problem.shape))).expand(1, 2, size, size)
        weights, plain = A.to_dense().double(), v.double().nan_to_num(0.0, 0.0, 0.0)
        for name, read in VALUES.items():
            own_weights, sees = (t.mT if name == "transposed" else t for t in (weights, seen))
            special = torch.where(sees.unsqueeze(-1), v.double().unsqueeze(-3), 0.0)
            wanted = own_weights @ plain + special.where(~special.isfinite(), 0.0).sum(-2)
            for plan in (Plan(), Plan("tiled", rows=1 + size // 3, columns=1 + size // 4), Plan("tiled")):
                found = read(attlas.attend(q, q, score=own, mask=mask, plan=plan), v)
                close = {"rtol": 2e-2, "atol": 4e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
                torch.testing.assert_close(found.double(), wanted, equal_nan=True, **close)


def test_a_value_that_is_hidden_has_no_part_in_gradients() -> None:
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    slope = torch.randn(1, 2, 9, 4, dtype=torch.float64)
    bad = v.detach().clone()
    bad[:, :, 6:] = math.nan
    for mask in (attlas.Padding(6), attlas.Padding(6) & attlas.Causal(), torch.arange(9).expand(9, 9) < 6):
        for plan in (Plan(), Plan("tiled", rows=2, columns=4), Plan("tiled")):
            A = attlas.attend(q, k, mask=mask, plan=plan)
            a, b = (torch.autograd.grad(A @ values, (q, k), slope, retain_graph=True) for values in (bad, v))
            torch.testing.assert_close(a, b)


def test_large_logits_do_not_overflow() -> None:
    q, k, v = (torch.randn(1, 1, t, 4) for t in (6, 8, 8))
    for plan in (Plan(), Plan("tiled", rows=2, columns=3)):
        A = attlas.attend(q * 1e4, k * 1e4, plan=plan)
        exact = attlas.attend((q * 1e4).double(), (k * 1e4).double(), plan=Plan("reference"))
        torch.testing.assert_close(A @ v, (exact @ v.double()).float())
        torch.testing.assert_close(A.lse.double(), exact.lse, rtol=1e-5, atol=0)


def test_what_a_mask_hides_may_hold_anything() -> None:
    q, k, v = (torch.randn(1, 2, t, 4, requires_grad=True) for t in (6, 12, 12))
    with torch.no_grad():
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, :, 8:], bad_v[:, :, 8:] = math.nan, math.nan
    for plan in (Plan(), Plan("tiled"), Plan("tiled", rows=2, columns=4)):
        A = attlas.attend(q, bad_k, mask=attlas.Padding(8), plan=plan)
        B = attlas.attend(q, k[:, :, :8])
        torch.testing.assert_close(A[:, :, :, :8], B[:, :, :, :])
        torch.testing.assert_close(A.lse, B.lse)
