"""Gradients of statistics and reads: one pass back over the tiles gives those of the formulas, written out whole."""

from __future__ import annotations

import gc
from collections import ChainMap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.contracts.test_idioms import Dense
from tests.stats.definitions import allowed_by_mask, diagonals
from torch import Tensor

import attlas
from attlas import Plan, stats
from attlas.engine.autodiff import graph

SPANS: Any = ([(0, 3), (2, 5), (4, 4)], [(0, 4), (3, 5)])
Formula = Callable[[Tensor, Tensor, Tensor, Tensor], Any]  # of weights, logits, what the mask allows, and values


def plogp(weights: Tensor) -> Tensor:
    return weights * torch.where(weights > 0, weights, 1.0).log()


def ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))


def moments(logits: Tensor) -> tuple[Tensor, Tensor]:
    seen = logits > -torch.inf
    keys = seen.sum(-1, keepdim=True)
    x = torch.where(seen, logits, 0.0)
    mean = ratio(x.sum(-1, keepdim=True), keys.to(x))
    return mean.squeeze(-1), ratio(torch.where(seen, x - mean, 0.0).square().sum(-1), keys.squeeze(-1).to(x))


def spans(weights: Tensor) -> Tensor:
    means = [[weights[..., slice(*a), slice(*b)].sum((-2, -1)) / max(a[1] - a[0], 1) for b in SPANS[1]]
             for a in SPANS[0]]  # fmt: skip
    return torch.stack([torch.stack(row, dim=-1) for row in means], dim=-2)


def blocks(x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    i, j = ([a * size // 3 for a in range(4)] for size in x.shape[-2:])
    table = [[reduce(x[..., i[a] : i[a + 1], j[b] : j[b + 1]].flatten(-2)) for b in range(3)] for a in range(3)]
    return torch.stack([torch.stack(row, dim=-1) for row in table], dim=-2)


class Cubes(stats.Statistic):
    """A statistic of a user's own, without a formula for its gradient and without a merge."""

    def start(self, problem: Any) -> Tensor:
        return torch.zeros(problem.shape[:2], dtype=problem.dtype)

    def step(self, carry: Tensor, part: Any, at: attlas.Tile) -> Tensor:
        carry[at.place[:2]] += part.weights.pow(3).sum((-2, -1))
        return carry

    def finish(self, carry: Tensor) -> Tensor:
        return carry.square()


CLOSED: dict[str, tuple[Callable[[Tensor], stats.Statistic], Formula]] = {
    "RowMass": (lambda v: stats.RowMass(), lambda w, s, seen, v: w.sum(-1)),
    "Entropy": (lambda v: stats.Entropy(), lambda w, s, seen, v: -plogp(w).sum(-1)),
    "EffectiveKeys": (lambda v: stats.EffectiveKeys(),
                      lambda w, s, seen, v: ratio(w.sum(-1).square(), w.square().sum(-1))),
    "LogitMoments": (lambda v: stats.LogitMoments(), lambda w, s, seen, v: moments(s)),
    "ColumnMass": (lambda v: stats.ColumnMass(), lambda w, s, seen, v: w.sum(-2)),
    "ColumnMass(mean)": (lambda v: stats.ColumnMass(mean=True),
                         lambda w, s, seen, v: ratio(w.sum(-2), seen.sum(-2).to(w))),
    "Pooled": (stats.Pooled, lambda w, s, seen, v: w @ v.repeat_interleave(w.shape[1] // v.shape[1], 1)),
}  # fmt: skip
OF_TILES: dict[str, tuple[Callable[[Tensor], stats.Statistic], Formula]] = {
    "ColumnMass(rows)": (lambda v: stats.ColumnMass(rows=(1, 4)), lambda w, s, seen, v: w[..., 1:4, :].sum(-2)),
    "KeyMaps": (lambda v: stats.KeyMaps([2, 0, 2], queries=(1, 4)), lambda w, s, seen, v: w[..., 1:4, [2, 0, 2]]),
    "MaxLogit": (lambda v: stats.MaxLogit(), lambda w, s, seen, v: s.amax(-1)),
    "MaxWeight": (lambda v: stats.MaxWeight(), lambda w, s, seen, v: w.amax(-1)),
    "Offsets": (lambda v: stats.Offsets(), lambda w, s, seen, v: diagonals(w)),
    "Offsets(mean)": (lambda v: stats.Offsets(mean=True),
                      lambda w, s, seen, v: ratio(diagonals(w), diagonals(seen.to(w)))),
    "Spans": (lambda v: stats.Spans(*SPANS, mean=True), lambda w, s, seen, v: spans(w)),
    "Picture": (lambda v: stats.Picture(3, 3),
                lambda w, s, seen, v: ratio(blocks(w, lambda x: x.sum(-1)), blocks(seen.to(w), lambda x: x.sum(-1)))),
}  # fmt: skip
# Without a formula for the gradient.
REPLAYED: dict[str, tuple[Callable[[Tensor], stats.Statistic], Formula]] = {
    "ColumnMass(rows, mean)": (lambda v: stats.ColumnMass((1, 4), mean=True),
                               lambda w, s, seen, v: ratio(w[..., 1:4, :].sum(-2), seen[..., 1:4, :].sum(-2).to(w))),
    "own": (lambda v: Cubes(), lambda w, s, seen, v: w.pow(3).sum((-2, -1)).square()),
}  # fmt: skip
# Which of several equal cells gets the gradient is open.
OF_ONE_CELL: dict[str, tuple[Callable[[Tensor], stats.Statistic], Formula]] = {
    "TopK": (lambda v: stats.TopK(3), lambda w, s, seen, v: w.topk(3).values),
    "TailMass": (lambda v: stats.TailMass(3), lambda w, s, seen, v: w.sum(-1) - w.topk(3).values.sum(-1)),
    "ColumnMax": (lambda v: stats.ColumnMax(), lambda w, s, seen, v: w.amax(-2)),
    "Picture(max)": (lambda v: stats.Picture(3, 3, "max"), lambda w, s, seen, v: blocks(w, lambda x: x.amax(-1))),
}


def flat(results: Any) -> list[Tensor]:
    """Return the numbers of results that can have a gradient."""
    if isinstance(results, Tensor):
        return [results.nan_to_num(0.0, 0.0, 0.0)] if results.is_floating_point() else []
    return [t for result in results for t in flat(result)]


def gradients(results: list[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    slopes = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in results]
    recorded = [(t, slope) for t, slope in zip(results, slopes, strict=True) if t.requires_grad]
    loss = sum((t * slope).sum() for t, slope in recorded)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, retain_graph=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(leaves.items(), found, strict=True)}


def check(case: Any, plan: Plan, same: Any, name: str, tables: list[dict[str, Any]]) -> None:
    """Compare the statistics of some tables in one backward."""
    logits, weights, lse, _ = case.plain()
    leaves = case.leaves()
    A = case.matrix(plan)
    seen = allowed_by_mask(A.problem)
    alike = weights[weights > 0].unique().numel() < int((weights > 0).sum())
    table = dict(ChainMap(*(some for some in tables if not alike or some is not OF_ONE_CELL)))
    found = flat([*A.collect(*(make(case.v) for make, _ in table.values())), A.lse])
    wanted = flat([*(formula(weights, logits, seen, case.v) for _, formula in table.values()), lse])
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        same(a, b, f"{name}, result {number} of {list(table)}")
    exact = gradients(wanted, leaves)
    for leaf, g in gradients(found, leaves).items():
        same(g, exact[leaf], f"{name}, gradient of {leaf}")
        assert bool(g.isfinite().all())


PLANS = [Plan(), Plan("tiled", rows=4, columns=4), Plan("tiled")]
SIZES = [(5, 7), (7, 5), (6, 6)]
# Each score, each mask and each plan meets both; a closed form also stands beside those of tiles.
TURNS = [[CLOSED, REPLAYED], [OF_TILES, OF_ONE_CELL, {"Entropy": CLOSED["Entropy"]}]]


def test_every_score_under_every_mask(score_name: str, make: Any, sizes: Any, tables: Any, same: Any) -> None:
    first = tables["score"].index(score_name)
    for index, mask in enumerate(tables["mask"], start=first):
        size = sizes(*SIZES[index // 2 % 3], batch=1 + index % 2, heads=2, key_heads=1, value_heads=1)
        case = make(score_name, mask, size, sink=index % 4 < 2)
        check(case, PLANS[index % 3], same, f"{score_name} under {mask}", TURNS[index // 3 % 2])


def test_every_mask_in_the_kernels(mask_name: str, make: Any, sizes: Any, tables: Any, same: Any) -> None:
    index = tables["mask"].index(mask_name)
    for score, shape in (("ScaledDot", (14, 11)), ("SoftCap", (11, 14)), ("Gaussian(wide)", (11, 11))):
        check(make(score, mask_name, sizes(*shape), sink=index % 2 == 0), Plan(), same, score, [CLOSED])


READS: dict[str, Callable[[Any], Tensor]] = {
    "cell": lambda A: A[0, 1, 2, 3],
    "rows": lambda A: A[:, :, 2:7, :],
    "columns": lambda A: A[..., [3, 3, 1]],
    "tile": lambda A: A[0, 2][[4, 1], 2:9],
    "pairs": lambda A: A[..., [1, 2, 1], [3, 4, 3]],
    "transposed": lambda A: A.mT[0, 1, 3:5, 2:4],
    "logits": lambda A: A.logits[:, 1, 2:4, ::3],
    "sum": lambda A: A.sum(-2),
    "mean": lambda A: A.mean((-1, -2)),
    "amax": lambda A: A.amax(-2),
    "product": lambda A: A.mT @ torch.linspace(0, 1, 22, dtype=torch.float64).view(11, 2),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("score", ["ScaledDot", "Additive"])
def test_reads(name: str, score: str, make: Any, sizes: Any, same: Any) -> None:
    case = make(score, "Causal(-4)", sizes(11, 14), sink=True)
    logits, weights, lse, _ = case.plain()
    plain = Dense.of(weights, logits, lse)
    for plan in (Plan(), Plan("tiled", rows=3, columns=4)):
        found, wanted = flat(READS[name](case.matrix(plan))), flat(READS[name](plain))
        same(found[0], wanted[0], name)
        exact = gradients(wanted, case.leaves())
        for leaf, g in gradients(found, case.leaves()).items():
            same(g, exact[leaf], f"gradient of {leaf}")


def test_gradcheck(make: Any, sizes: Any) -> None:
    case = make("Additive", "Causal(-4)", sizes(6, 7, batch=1, heads=2, key_heads=1, value_heads=1), sink=True)
    leaves = tuple(case.leaves().values())

    def read(*_: Tensor) -> Any:
        A = case.matrix(Plan("tiled", rows=2))
        own = stats.Entropy(), stats.ColumnMass(), Cubes(), stats.Pooled(case.v), stats.EffectiveKeys()
        return *A.collect(*own), A[0, 1, 2:5, 3:]

    assert torch.autograd.gradcheck(read, leaves, fast_mode=True)


def test_a_gradient_of_a_gradient_and_where_it_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = (torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def penalty() -> Tensor:
        A = attlas.attend(q, k)
        (g,) = torch.autograd.grad(stats.entropy(A).sum() + A[0, 2] + A.lse.sum(), q, create_graph=True)
        return g.square().sum()

    def plain() -> Tensor:
        w = torch.softmax(q @ k.mT / 2, -1)
        loss = -plogp(w).sum() + w[0, 2] + (q @ k.mT / 2).logsumexp(-1).sum()
        return torch.autograd.grad(loss, q, create_graph=True)[0].square().sum()

    for a, b in zip(*(torch.autograd.grad(f(), (q, k)) for f in (penalty, plain)), strict=True):
        torch.testing.assert_close(a, b)
    monkeypatch.setattr("attlas.engine.autodiff.graph.DENSE_LIMIT", 100)
    stats.entropy(attlas.attend(q, k)).sum().backward()
    with pytest.raises(attlas.TooLargeError, match="create_graph"):
        penalty()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision(dtype: torch.dtype) -> None:
    q, k = (torch.randn(2, 4, 40, 16).to(dtype).double().requires_grad_() for _ in range(2))
    low = [t.detach().to(dtype).requires_grad_() for t in (q, k)]
    for leaves in ((q, k), low):
        entropy, mass = attlas.attend(*leaves, mask=attlas.Causal()).collect(stats.Entropy(), stats.ColumnMass())
        (entropy.sum() + (mass * torch.linspace(0, 1, 40)).sum()).backward()
    for a, b in zip(low, (q, k), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.dtype is dtype
        error = float((a.grad.double() - b.grad).abs().max() / b.grad.abs().max())
        assert error < 2 * torch.finfo(dtype).eps + 1e-6


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it where it breaks a program in two
def test_transforms_checkpoints_and_programs() -> None:
    q, k = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(2))

    def loss(q: Tensor) -> Tensor:
        entropy, mass = attlas.attend(q, k).collect(stats.Entropy(), stats.ColumnMass())
        return entropy.sum() + mass.square().sum()

    leaf = q.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(q), wanted)
    again = torch.utils.checkpoint.checkpoint(loss, leaf, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again, leaf)[0], wanted)
    compiled = torch.compile(loss, backend="aot_eager")(leaf)
    torch.testing.assert_close(torch.autograd.grad(compiled, leaf)[0], wanted)


def test_positions_have_no_gradient() -> None:
    q = torch.randn(5, 4, requires_grad=True)
    A = attlas.attend(q, torch.randn(7, 4))
    values, keys = A.collect(stats.TopK(2))[0]
    assert values.requires_grad
    assert not keys.requires_grad
    assert not A.argmax(-1).requires_grad
    values.sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("part", ["grad mode", "leaves"])
def test_nothing_is_recorded_where_nothing_asks(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attlas.engine.autodiff.autograd.collect", None)
    q, k = (torch.randn(5, 4, requires_grad=part == "grad mode") for _ in range(2))
    with torch.set_grad_enabled(part == "leaves"):
        A = attlas.attend(q, k)
        results = [*A.collect(stats.Entropy(), stats.ColumnMax()), A.lse, A[2, 3], A.logits[1, :], A.amax(-1)]
    assert not any(t.requires_grad for t in results)


def test_values_alone_have_a_gradient() -> None:
    q, k, v = torch.randn(5, 4), torch.randn(7, 4), torch.randn(7, 3, requires_grad=True)
    for A in (attlas.attend(q, k), attlas.attend(q, k).window(slice(1, 4), slice(0, 7))):
        (out,) = A.collect(stats.Pooled(v))
        torch.testing.assert_close(torch.autograd.grad(out.sum(), v)[0], A.sum(0).unsqueeze(-1).expand(7, 3))
    part = attlas.attend(q, k).window(None, slice(2, 6))
    (out,) = part.collect(stats.Pooled(v[:4]))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), v)[0][:4], part.sum(0).unsqueeze(-1).expand(4, 3))


def test_a_graph_is_freed_with_its_results() -> None:
    q = torch.randn(5, 4, requires_grad=True)
    alive = len([t for t in gc.get_objects() if type(t) is attlas.AttentionMatrix])
    for _ in range(3):
        stats.entropy(attlas.attend(q, torch.randn(7, 4))).sum().backward()
    gc.collect()
    assert len([t for t in gc.get_objects() if type(t) is attlas.AttentionMatrix]) <= alive


def test_parts_that_are_fed_again_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A statistic without a formula keeps √parts of what it carries, not one for each part."""
    most, held = 0, []
    start, kept = graph.Replay.__init__, graph._carry_and_leaves

    def started(self: graph.Replay, *given: Any) -> None:
        held.append(self)
        start(self, *given)

    def counted(carry: Any) -> Any:
        nonlocal most
        most = max([most, *(len(vars(one).get("_copies", [])) + len(vars(one).get("_carries", [])) for one in held)])
        return kept(carry)

    monkeypatch.setattr(graph.Replay, "__init__", started)
    monkeypatch.setattr(graph, "_carry_and_leaves", counted)
    q = torch.randn(64, 4, requires_grad=True)
    (found,) = attlas.attend(q, torch.randn(7, 4), plan=Plan(rows=1)).collect(Cubes())
    found.sum().backward()
    assert 0 < most <= 16
