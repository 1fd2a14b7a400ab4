"""What several ranks compute is what one process computes: products, log-sum-exp, gradients, statistics."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from tests.contracts.conftest import MASKS, SCORES, Sizes, build
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import attlas
from attlas import stats
from attlas.distributed import DistributedMatrix, head_tail_order
from attlas.engine.backends.native import library
from attlas.engine.problem import tensors_of
from attlas.errors import GradientError

pytestmark = pytest.mark.filterwarnings("ignore")

WHOLE, BATCH, HEADS, TOKENS = Replicate(), Shard(0), Shard(1), Shard(2)
# Placements of the queries, and of the keys and values.
LINE = [([TOKENS], [TOKENS]), ([WHOLE], [TOKENS]), ([TOKENS], [WHOLE]), ([BATCH], [BATCH]), ([HEADS], [HEADS])]
GRID = [
    ([HEADS, TOKENS], [HEADS, TOKENS]), ([HEADS, WHOLE], [HEADS, TOKENS]), ([TOKENS, WHOLE], [WHOLE, TOKENS]),
    ([WHOLE, WHOLE], [TOKENS, TOKENS]), ([TOKENS, TOKENS], [TOKENS, TOKENS]), ([BATCH, TOKENS], [BATCH, WHOLE]),
]  # fmt: skip
OnRanks = Callable[..., list[Any]]
EVERY = "ATTLAS_EVERY_PLACEMENT" in os.environ  # the whole product of cases, ranks and placements: minutes


def shard(t: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    return distribute_tensor(t.detach(), mesh, placements, src_data_rank=None).requires_grad_(t.requires_grad)


def gap(found: Any, wanted: Tensor) -> float:
    """Return how far a result is from that of one process; of a DTensor each rank looks at its own part."""
    assert found.shape == wanted.shape
    wanted = wanted.to(found.device)
    if isinstance(found, DTensor):
        wanted = shard(wanted, found.device_mesh, found.placements).to_local()
        found = found.to_local()
        assert found.shape == wanted.shape
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    distance = (found.double() - wanted.double()).abs() / wanted.double().abs().clamp(min=1.0)
    return float(torch.where(same, 0.0, distance).max()) if found.numel() else 0.0


def finite(lse: Tensor) -> Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)


class Whole:
    """A case, and what one process computes of it: output, log-sum-exp, and the gradients of some slopes of both."""

    def __init__(self, case: Any) -> None:
        self.case, self.leaves, A = case, case.leaves(), case.matrix()
        out, lse = A @ case.v, A.lse
        self.slopes = tuple(case.sizes.random(*t.shape, seed=seed).to(t.device) for t, seed in ((out, 9), (lse, 8)))
        total = (out * self.slopes[0]).sum() + (finite(lse) * self.slopes[1]).sum()
        self.gradients = torch.autograd.grad(total, list(self.leaves.values()), allow_unused=True)
        self.out, self.lse = out.detach(), lse.detach()


def differences(
    mesh: DeviceMesh, known: Whole, q_to: list[Placement], k_to: list[Placement], plan: attlas.Plan | None = None
) -> dict[str, float]:
    """Return how far output, log-sum-exp and all gradients are from those of one process."""
    case, leaves, out, lse = known.case, known.leaves, known.out, known.lse
    (weights, more), wanted = known.slopes, known.gradients

    mine = leaves | {"q": shard(case.q, mesh, q_to), "k": shard(case.k, mesh, k_to), "v": shard(case.v, mesh, k_to)}
    B = attlas.attend(mine["q"], mine["k"], score=case.score, mask=case.mask, sink=case.sink, plan=plan)
    assert isinstance(B, DistributedMatrix)
    found, found_lse = B @ mine["v"], B.lse
    gradients = [
        shard(t, mesh, like.placements) for t, like in ((weights, found), (more * (lse > -torch.inf), found_lse))
    ]
    slopes = torch.autograd.grad([found, found_lse], list(mine.values()), gradients, allow_unused=True)
    errors = {"output": gap(found, out), "lse": gap(found_lse, lse)}
    for name, slope, true in zip(mine, slopes, wanted, strict=True):
        if name in "qkv":
            assert slope.placements == mine[name].placements
        true = torch.zeros(mine[name].shape, dtype=torch.float64, device=mesh.device_type) if true is None else true
        errors[name] = float(true.abs().max()) if slope is None else gap(slope, true)
    return errors


def check(
    on_ranks: OnRanks, whole: dict[str, Whole], shape: tuple[int, ...], pairs: list[Any], first: int | None = None
) -> None:
    """Check each case on all pairs of placements, or on one each, of which the first case takes the one named."""

    def job(rank: int, world: int) -> list[str]:
        mesh, wrong = init_device_mesh("cpu", shape), []
        for place, (name, known) in enumerate(whole.items()):
            some = pairs if first is None or EVERY else [pairs[(place + first) % len(pairs)]]
            for q_to, k_to in some:
                for what, error in differences(mesh, known, q_to, k_to).items():
                    if not error < 1e-12:
                        wrong.append(f"{name}, {q_to}, {k_to}: {what} is off by {error:.1e}")
        return wrong

    assert not [text for texts in on_ranks(math.prod(shape), job, 3600 if EVERY else 120) for text in texts]


# Placements take turns: over these meshes each mask, and each score, meets all five of a line of ranks.
MESHES = [(1,), (2,), (3,), (4,), (7,), (2, 2)]


@functools.cache
def masks() -> dict[str, Whole]:
    cases = {name: build("ScaledDot", name, Sizes(19, 23), sink=i % 2 == 0) for i, name in enumerate(MASKS)}
    return {name: Whole(case) for name, case in cases.items()}


@functools.cache
def scores() -> dict[str, Whole]:
    of_function = attlas.ScoreMod(lambda s, b, h, i, j: torch.tanh(s) + (i - j) * (h + 1 + 2 * b) / 50)
    cases = {name: build(name, "Causal", Sizes(19, 23)) for name in SCORES}
    cases["ScoreMod"] = replace(build("ScaledDot", "Window", Sizes(19, 23)), score=of_function)
    return {name: Whole(case) for name, case in cases.items()}


@pytest.mark.parametrize("known", [masks, scores])
@pytest.mark.parametrize("first", range(len(MESHES)), ids=map(str, MESHES))
def test_every_mask_and_every_score(on_ranks: OnRanks, first: int, known: Callable[[], dict[str, Whole]]) -> None:
    check(on_ranks, known(), MESHES[first], GRID if len(MESHES[first]) == 2 else LINE, first)


@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_uneven_and_empty_shards(on_ranks: OnRanks, ranks: int) -> None:
    if ranks > 3 and torch.__version__ < (2, 9):
        pytest.skip("torch 2.8 gathers no tensor of which a rank has nothing")
    sizes = [Sizes(47, 47), Sizes(5, 9), Sizes(1, 13), Sizes(3, 2, heads=3, key_heads=1, value_heads=1), Sizes(0, 4)]
    whole = {str(s): Whole(build("ScaledDot", "Causal", s, sink=True)) for s in sizes}
    check(on_ranks, whole, (ranks,), LINE, None if ranks == 7 else ranks)


# ---------------------------------------------------------------------------------------------------------- statistics

STATISTICS = [
    stats.Entropy(), stats.EffectiveKeys(), stats.MaxWeight(), stats.MaxLogit(), stats.LogitMoments(), stats.RowMass(),
    stats.TopK(9), stats.ArgMax(), stats.TailMass(3), stats.Coverage(), stats.ColumnMass(), stats.ColumnMass(mean=True),
    stats.ColumnMass(rows=slice(5, 20)), stats.ColumnMax(), stats.ColumnMax(rows=slice(3, 9)), stats.ColumnArgMax(),
    stats.Offsets(), stats.Offsets(mean=True), stats.Picture(6, 5), stats.Picture(7, 9, "max"),
    stats.Picture(3, 4, rows=slice(5, 33), columns=slice(11, 30)),
    stats.Spans([slice(0, 9), slice(9, 30)], [slice(3, 20)]), stats.Spans([slice(0, 9)], [slice(3, 20)], mean=True),
]  # fmt: skip
PER_ROW, PER_COLUMN = STATISTICS[:10], [STATISTICS[10], STATISTICS[13]]


def tensors(result: Any) -> list[Any]:
    if isinstance(result, stats.Largest):  # keys of weight 0 may be named in any order
        return [result.values]
    return list(result) if isinstance(result, tuple) else [result]


@torch.no_grad()
def statistics_of(
    mesh: DeviceMesh,
    case: Any,
    known: list[Any],
    q_to: list[Placement],
    k_to: list[Placement],
    limit: float,
    plan: attlas.Plan | None = None,
) -> list[str]:
    q, k = shard(case.q, mesh, q_to), shard(case.k, mesh, k_to)
    B = attlas.attend(q, k, mask=case.mask, sink=case.sink, plan=plan)
    wrong = []
    for statistic, found, wanted in zip(STATISTICS, B.collect(*STATISTICS), known, strict=True):
        name = type(statistic).__name__
        for one, true in zip(tensors(found), tensors(wanted), strict=True):
            error = gap(one, true)
            if not error < limit:
                wrong.append(f"{q_to}, {k_to}: {name} is off by {error:.1e}")
            by_row = statistic in PER_ROW and Shard(2) in q_to
            by_column = statistic in PER_COLUMN and Shard(2) in k_to and Shard(2) not in q_to
            if len(q_to) == 1 and Shard(2) in q_to + k_to and (one.placements == (Shard(2),)) != (by_row or by_column):
                wrong.append(f"{q_to}, {k_to}: {name} is {one.placements}")
    return wrong


FEW_MASKS = ["none", "Causal", "Window", "Documents & Causal", "function"]


@pytest.mark.parametrize("mask", FEW_MASKS)
@pytest.mark.parametrize("first", range(len(MESHES)), ids=map(str, MESHES))
def test_every_statistic(on_ranks: OnRanks, mask: str, first: int) -> None:
    shape, case = MESHES[first], build("ScaledDot", mask, Sizes(37, 41), sink=True)
    known = case.matrix().detach().collect(*STATISTICS)
    pairs, turn = GRID if len(shape) == 2 else LINE, first + FEW_MASKS.index(mask)
    if not EVERY:  # two that lie apart: over the meshes of a line each mask meets all
        pairs = [pairs[turn % len(pairs)], pairs[(turn + 2) % len(pairs)]]

    def job(rank: int, world: int) -> list[str]:
        mesh = init_device_mesh("cpu", shape)
        return [text for pair in pairs for text in statistics_of(mesh, case, known, *pair, 1e-12)]

    assert not [text for texts in on_ranks(math.prod(shape), job) for text in texts]


FLOATS = [s for s in STATISTICS if not isinstance(s, stats.ArgMax | stats.ColumnArgMax | stats.Coverage)]


@torch.no_grad()
@pytest.mark.parametrize(("n", "scale"), [(50, 1.0), (50, 4.0), (200, 4.0)])  # logits up to 5, and up to 20
def test_float32(on_ranks: OnRanks, n: int, scale: float) -> None:
    q, k, v = (torch.randn(2, 4, n, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    q, mask = scale * q, attlas.Causal()
    names = [f"{type(s).__name__} {i}" for s in FLOATS for i in range(1 + isinstance(s, stats.LogitMoments))]

    def found(A: Any, v: Any) -> list[Any]:
        collected = [t for result in A.collect(*FLOATS) for t in tensors(result)]
        return [*collected, A.lse, A @ v]

    one, true = (
        found(attlas.attend(q, k, mask=mask), v),
        found(attlas.attend(q.double(), k.double(), mask=mask), v.double()),
    )

    def job(rank: int, world: int) -> list[str]:
        mesh, wrong = init_device_mesh("cpu", (3,)), []
        for q_to, k_to in LINE:
            A, B = (attlas.attend(shard(q, mesh, q_to), shard(k, mesh, k_to), mask=mask) for _ in range(2))
            values = shard(v, mesh, k_to)
            many, _ = found(A, values), B @ values
            for name, a, b in zip(names, found(B, values), many):  # noqa: B905 - the product is one more
                wrong += [f"{name}, {q_to}, {k_to}: other bits after a product"] if gap(a, b.full_tensor()) else []
            for name, a, b, exact in zip([*names, "lse", "output"], many, one, true, strict=True):
                if k_to in ([BATCH], [HEADS]) and gap(a, b):
                    wrong.append(f"{name}, {q_to}: other bits")
                # One process is itself so far from float64: torch's products round each logit of 20 by 1e-6.
                limit, slack = {"output": 2.5e-6 if scale > 1 else 1e-6, "LogitMoments 1": 1.2e-6}.get(name, 1e-6), 5e-7
                if scale > 1 and not library.available():  # so do all statistics, and the log-sum-exp is float32
                    limit, slack = 4e-6, 1e-6
                if not (gap(a, b) < limit and gap(a, exact) < 1.2 * gap(b, exact) + slack):
                    wrong.append(
                        f"{name}, {q_to}, {k_to}: {gap(a, b):.1e}, {gap(a, exact):.1e} and {gap(b, exact):.1e}"
                    )
        return wrong

    assert not [text for texts in on_ranks(3, job) for text in texts]


@torch.no_grad()
def test_float32_rows_have_the_bits_of_one_process(on_ranks: OnRanks) -> None:
    """What float32 outputs differ by is what one process differs by that computes the same rows alone."""
    q, k, v = (torch.randn(2, 4, 50, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    q = 4 * q
    whole = attlas.attend(q, k) @ v

    def job(rank: int, world: int) -> float:
        mesh = init_device_mesh("cpu", (3,))
        A = attlas.attend(shard(q, mesh, [TOKENS]), shard(k, mesh, [TOKENS]))
        alone = attlas.attend(q.chunk(3, dim=2)[rank], k) @ v
        assert torch.equal((A @ shard(v, mesh, [TOKENS])).to_local(), alone)
        return gap(alone, whole.chunk(3, dim=2)[rank])

    on_ranks(3, job)


CELLS: list[Any] = [
    (..., 17, slice(None)), (..., slice(None), 20), (0, 3, 17, slice(None)), (1, 2, 5, 7),
    (..., slice(4, 9), slice(10, 20)),
    (slice(None), [3, 0], slice(2, 18, 5), -1), (1, ..., torch.tensor([18, 0, 18]), slice(None)), (..., slice(3, 3), 0),
]  # fmt: skip


def test_cells(on_ranks: OnRanks) -> None:
    case = build("ScaledDot", "Window", Sizes(19, 23), sink=True)
    A = case.matrix()
    wanted = [A[key] for key in CELLS]
    slopes = [torch.autograd.grad(t.square().sum(), [case.q, case.k, case.sink], allow_unused=True) for t in wanted]

    def job(shape: tuple[int, ...], pairs: list[Any]) -> list[str]:
        mesh, wrong = init_device_mesh("cpu", shape), []
        for q_to, k_to in pairs:
            q, k = shard(case.q, mesh, q_to), shard(case.k, mesh, k_to)
            B = attlas.attend(q, k, mask=case.mask, sink=case.sink)
            for key, true, slope in zip(CELLS, wanted, slopes, strict=True):
                splits = "keys" in B.layout.roles
                with torch.set_grad_enabled(not splits):
                    found = B[key]
                assert found.placements == (Replicate(),) * mesh.ndim
                errors = [gap(found, true)]
                if not splits:
                    mine = torch.autograd.grad(found, [q, k, case.sink], 2 * found.detach())
                    errors += [
                        gap(a, torch.zeros_like(a) if b is None else b) for a, b in zip(mine, slope, strict=True)
                    ]
                if not max(errors) < 1e-12:
                    wrong.append(f"{q_to}, {k_to}, {key}: {errors}")
            if splits:
                with pytest.raises(GradientError, match="what is read of keys that are sharded"):
                    B[0, 0, 0]
        return wrong

    assert not [text for texts in on_ranks(3, lambda rank, world: job((3,), LINE)) for text in texts]
    assert not [text for texts in on_ranks(4, lambda rank, world: job((2, 2), GRID)) for text in texts]
    assert not [text for texts in on_ranks(7, lambda rank, world: job((7,), LINE[:2])) for text in texts]


def test_transposed_product(on_ranks: OnRanks) -> None:
    case = build("ScaledDot", "Causal", Sizes(19, 23), sink=True)
    x = case.sizes.random(2, 4, 19, 3, seed=5).requires_grad_()

    def job(rank: int, world: int) -> list[float]:
        mesh, errors = init_device_mesh("cpu", (3,)), []
        out = case.matrix().mT @ x
        wanted = torch.autograd.grad(out.square().sum(), [case.q, case.k, case.sink, x])
        for q_to, k_to in LINE:
            q, k, mine = shard(case.q, mesh, q_to), shard(case.k, mesh, k_to), shard(x, mesh, q_to)
            found = attlas.attend(q, k, mask=case.mask, sink=case.sink).mT @ mine
            slopes = torch.autograd.grad(found, [q, k, case.sink, mine], 2 * found.detach())
            errors += [gap(found, out), *(gap(a, b) for a, b in zip(slopes, wanted, strict=True))]
        return errors

    assert max(max(errors) for errors in on_ranks(3, job)) < 1e-12


def test_gradients_of_statistics(on_ranks: OnRanks) -> None:
    case = build("ScaledDot", "Causal", Sizes(19, 23), sink=True)
    asked = [stats.Entropy(), stats.ColumnMass(), stats.Offsets(), stats.ColumnMass(mean=True)]

    def job(rank: int, world: int) -> list[float]:
        mesh, errors = init_device_mesh("cpu", (3,)), []
        A = case.matrix()
        wanted = torch.autograd.grad(sum(t.square().sum() for t in A.collect(*asked)), [case.q, case.k, case.sink])
        for q_to, k_to in (LINE[0], LINE[2], LINE[3], LINE[4]):
            q, k = shard(case.q, mesh, q_to), shard(case.k, mesh, k_to)
            found = attlas.attend(q, k, mask=case.mask, sink=case.sink).collect(*asked)
            slopes = torch.autograd.grad(found, [q, k, case.sink], [2 * t.detach() for t in found])
            errors += [gap(a, b) for a, b in zip(slopes, wanted, strict=True)]
        q, k = shard(case.q, mesh, [WHOLE]), shard(case.k, mesh, [TOKENS])
        with pytest.raises(GradientError, match="keys that are sharded carries no gradient"):
            attlas.attend(q, k).collect(*asked)
        with pytest.raises(GradientError, match="ColumnMax of cells that are divided"):
            attlas.attend(shard(case.q, mesh, [TOKENS]), k).collect(stats.ColumnMax())
        return errors

    assert max(max(errors) for errors in on_ranks(3, job)) < 1e-12


@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 2)], ids=str)
def test_other_numbers_of_axes(on_ranks: OnRanks, lead: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(*lead, 14, 6, generator=torch.Generator().manual_seed(i)).double() for i in range(3))

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i + 2 * h + 3 * b >= j) & ((j + b + h) % 5 != 0)

    def job(rank: int, world: int) -> None:
        mesh, A = init_device_mesh("cpu", (2,)), attlas.attend(q, k, mask=mask)
        for axis in range(len(lead) + 1):
            B = attlas.attend(*(shard(t, mesh, [Shard(axis)]) for t in (q, k)), mask=mask)
            assert gap(B @ shard(v, mesh, [Shard(axis)]), A @ v) < 1e-12
            assert gap(stats.entropy(B), stats.entropy(A)) < 1e-12
            assert gap(stats.column_mass(B), stats.column_mass(A)) < 1e-12
            one = v.reshape(-1, 14, 6)[0]  # the same values for all
            assert gap(B @ shard(one, mesh, [WHOLE]), A @ one) < 1e-12

    on_ranks(2, job)


@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
def test_fewer_key_heads_than_ranks(on_ranks: OnRanks, key_heads: int) -> None:
    known = Whole(build("ScaledDot", "Causal", Sizes(11, 11, heads=6, key_heads=key_heads, value_heads=key_heads)))

    def job(rank: int, world: int) -> list[float]:
        mesh = init_device_mesh("cpu", (world,))
        pairs = [([HEADS], [HEADS]), ([HEADS], [WHOLE]), ([HEADS], [TOKENS])]
        return [error for pair in pairs for error in differences(mesh, known, *pair).values()]

    for ranks in (2, 4):
        assert max(max(errors) for errors in on_ranks(ranks, job)) < 1e-12


@pytest.mark.parametrize("ranks", [2, 3])
def test_head_and_tail_shards(on_ranks: OnRanks, ranks: int) -> None:
    case = build("ScaledDot", "Window", Sizes(48, 48), sink=True)
    order = head_tail_order(48, ranks)

    def job(rank: int, world: int) -> list[float]:
        mesh, A = init_device_mesh("cpu", (world,)), case.matrix()
        leaves = [case.q, case.k, case.v, case.sink]
        wanted = torch.autograd.grad((A @ case.v).square().sum(), leaves)
        mine = [shard(t[:, :, order], mesh, [TOKENS]) for t in leaves[:3]]
        B = attlas.distributed.attend(*mine[:2], mask=case.mask, sink=case.sink, order=order)
        assert len(B.parts) == 2 - (rank == world - 1)  # the last rank's pieces are neighbours
        found = B @ mine[2]
        slopes = torch.autograd.grad(found, [*mine, case.sink], 2 * found.detach())
        errors = [gap(found.full_tensor()[:, :, order.argsort()], A @ case.v), gap(slopes[3], wanted[3])]
        errors += [gap(a.full_tensor()[:, :, order.argsort()], b) for a, b in zip(slopes[:3], wanted[:3], strict=True)]
        with torch.no_grad():
            asked = [s for s in STATISTICS if s not in PER_ROW]
            for one, true in zip(B.collect(*asked), A.collect(*asked), strict=True):
                errors += [gap(one, true)]
            per_row = zip(B.collect(*PER_ROW), A.collect(*PER_ROW), strict=True)
            for one, true in ((a, b) for x, y in per_row for a, b in zip(tensors(x), tensors(y), strict=True)):
                errors += [gap(one.full_tensor()[:, :, order.argsort()], true)]
            x = case.sizes.random(2, 4, 48, 3, seed=5)
            errors += [gap(B.mT @ shard(x[:, :, order], mesh, [TOKENS]), A.mT @ x)]
        return errors

    assert max(max(errors) for errors in on_ranks(ranks, job)) < 1e-12


def test_a_scale_of_each_head(on_ranks: OnRanks) -> None:
    case = build("ScaledDot", "Causal", Sizes(11, 13))
    scale = torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def job(rank: int, world: int) -> list[float]:
        mesh, errors = init_device_mesh("cpu", (3,)), []
        out = attlas.attend(case.q, case.k, mask=case.mask, scale=scale) @ case.v
        wanted = torch.autograd.grad(out.square().sum(), [scale])
        for q_to, k_to in LINE:
            q, k, v = shard(case.q, mesh, q_to), shard(case.k, mesh, k_to), shard(case.v, mesh, k_to)
            found = attlas.attention(q, k, v, mask=case.mask, scale=scale)
            (slope,) = torch.autograd.grad(found, [scale], 2 * found.detach())
            errors += [gap(found, out), gap(slope, wanted[0])]
        return errors

    assert max(max(errors) for errors in on_ranks(3, job)) < 1e-12


class Same(stats.Entropy):
    """The same numbers under another name."""


class Twice(stats.Entropy):
    """Another number, with everything else inherited."""

    def of(self, part: stats.Part) -> Tensor:
        return 2 * super().of(part)


class Finished(stats.EffectiveKeys):
    def finish(self, carry: Any) -> Tensor:
        return super().finish(carry) + 1


class Half(stats.MaxWeight):
    def of(self, part: stats.Part) -> Tensor:
        return super().of(part) / 2


class Squares(stats.ColumnMass):
    def finish(self, carry: Any) -> Tensor:
        return super().finish(carry).square()


class Pairs(stats.TopK):
    def __init__(self) -> None:
        super().__init__(2)


OWN = [Same(), Twice(), Finished(), Half(), Squares(), Pairs()]


def test_a_statistic_that_is_derived_runs_its_own_code(on_ranks: OnRanks) -> None:
    case = build("ScaledDot", "Causal", Sizes(37, 41), sink=True)
    A = case.matrix()
    known = A.detach().collect(*OWN)
    sums = [s for s in OWN if isinstance(s, Same | Twice)]
    wanted = torch.autograd.grad(sum(t.sum() for t in A.collect(*sums)), [case.q, case.k])

    def job(rank: int, world: int) -> list[float]:
        mesh, errors = init_device_mesh("cpu", (2,)), []
        for q_to, k_to in LINE:
            q, k = shard(case.q, mesh, q_to), shard(case.k, mesh, k_to)
            B = attlas.attend(q, k, mask=case.mask, sink=case.sink)
            with torch.no_grad():
                pairs = list(zip(B.collect(*OWN), known, strict=True))
            errors += [gap(a, b) for x, y in pairs for a, b in zip(tensors(x), tensors(y), strict=True)]
            if q_to == [WHOLE]:  # gradients of statistics whose keys are sharded are refused
                continue
            slopes = torch.autograd.grad(sum(t.full_tensor().sum() for t in B.collect(*sums)), [q, k])
            errors += [gap(a, b) for a, b in zip(slopes, wanted, strict=True)]
        return errors

    assert max(max(errors) for errors in on_ranks(2, job)) < 1e-12


class WholeRows(stats.Entropy):
    """A statistic that needs whole rows, and carries a gradient."""

    whole_rows = True


def test_a_sink_and_a_scale_that_are_dtensors(on_ranks: OnRanks) -> None:
    case = build("ScaledDot", "Causal", Sizes(11, 13), sink=True)
    scale = torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    out = attlas.attend(case.q, case.k, mask=case.mask, sink=case.sink, scale=scale) @ case.v
    wanted = torch.autograd.grad(out.square().sum(), [case.sink, scale])

    def job(rank: int, world: int) -> list[float]:
        mesh, errors = init_device_mesh("cpu", (2,)), []
        for (q_to, k_to), place in product(LINE[:3], (WHOLE, Shard(0))):
            q, k, v = shard(case.q, mesh, q_to), shard(case.k, mesh, k_to), shard(case.v, mesh, k_to)
            numbers = [shard(t, mesh, [place]) for t in (case.sink, scale)]
            found = attlas.attend(q, k, mask=case.mask, sink=numbers[0], scale=numbers[1]) @ v
            slopes = torch.autograd.grad(found, numbers, 2 * found.detach())
            errors += [gap(found, out), *(gap(a, b) for a, b in zip(slopes, wanted, strict=True))]
        return errors

    assert max(max(errors) for errors in on_ranks(2, job)) < 1e-12


def test_gradients_of_whole_rows(on_ranks: OnRanks) -> None:
    """Where all ranks compute the same rows, a parameter's gradient is that of one of them."""
    case = build("TensorBias", "Causal", Sizes(11, 13))
    bias = next(t for t in tensors_of(case.score) if t.requires_grad)
    wanted = torch.autograd.grad(case.matrix().collect(WholeRows())[0].square().sum(), [bias, case.k])

    def job(rank: int, world: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2,))
        k = shard(case.k, mesh, [TOKENS])
        (found,) = attlas.attend(shard(case.q, mesh, [WHOLE]), k, score=case.score, mask=case.mask).collect(WholeRows())
        slopes = torch.autograd.grad(found, [bias, k], 2 * found.detach())
        return [gap(a, b) for a, b in zip(slopes, wanted, strict=True)]

    assert max(max(errors) for errors in on_ranks(2, job)) < 1e-12
