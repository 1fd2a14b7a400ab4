"""Every statistic from the kernels against its definition in float64, on every instruction set."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.stats.definitions import Case, blocks, diagonals, entropy, make_case, moments, needed
from torch import Tensor

import attlas
from attlas import Plan, stats
from attlas.engine.backends import reference
from attlas.engine.backends.native import dot, library, request

NATIVE, TILED = Plan("native"), Plan("tiled")
ROWS, COLUMNS = (slice(10, 20), slice(15, 33)), (slice(5, 11), slice(40, 80))
PICTURES: dict[str, Callable[[int, int], stats.Picture]] = {
    "mean": lambda m, n: stats.Picture(min(m, 7), min(n, 9)),
    "max": lambda m, n: stats.Picture(min(m, 5), min(n, 6), pool="max"),
    "one block": lambda m, n: stats.Picture(1, 1),
    "one block, max": lambda m, n: stats.Picture(1, 1, pool="max"),
    "cells": lambda m, n: stats.Picture(min(m, 60), min(n, 60), rows=(0, min(m, 60)), columns=(0, min(n, 60))),
    "window": lambda m, n: stats.Picture(1, 1, rows=(m // 3, m // 2 + 1), columns=(n // 3, n // 2 + 1)),
    "window, max": lambda m, n: stats.Picture(1, 1, "max", rows=(m // 2, m), columns=(n // 2, n)),
}


def make(m: int, n: int, *, heads: tuple[int, int] = (2, 1), dtype: torch.dtype = torch.float32, **more: Any) -> Case:
    """Return a matrix in the form that the kernels take, and its definition."""
    tolerance = 1e-10 if dtype is torch.float64 else 3e-5
    given = {"batch": 1, "plan": NATIVE, "heads": heads[0], "key_heads": heads[1]} | more
    return make_case(m, n, dtype=dtype, tolerance=tolerance, **given)


def holes(m: int, n: int, *lead: int, seed: int = 0) -> Tensor:
    """Return a mask with empty rows and columns, and an empty tile."""
    found = torch.rand(*lead, m, n, generator=torch.Generator().manual_seed(seed)) < 0.4
    found[..., 1 % m, :] = False
    found[..., :, 2 % n] = False
    found[..., : m // 2, n // 3 :] = False
    return found


SMALL: dict[str, Callable[[], Case]] = {
    "one": lambda: make(1, 1, d=1),
    "one query": lambda: make(1, 63),
    "one key": lambda: make(63, 1, d=1),
    "more keys": lambda: make(63, 130, d=5, heads=(4, 2), batch=2),
    "more queries": lambda: make(130, 63, d=33, mask=attlas.Causal()),
    "window": lambda: make(63, 63, mask=attlas.Window(9, 2)),
    "float64": lambda: make(37, 70, dtype=torch.float64, mask=attlas.Causal(), heads=(2, 2)),
    "bfloat16": lambda: make(40, 63, dtype=torch.bfloat16),
    "float16": lambda: make(40, 63, dtype=torch.float16, mask=attlas.Causal()),
    "softcap": lambda: make(40, 63, score=attlas.SoftCap(attlas.ScaledDot(), 1.5), mask=attlas.Causal()),
    "negative scale": lambda: make(40, 63, score=attlas.ScaledDot(-0.7)),
    "zero scale": lambda: make(40, 63, score=attlas.ScaledDot(0.0), mask=attlas.Causal()),
    "gaussian": lambda: make(40, 63, d=9, score=attlas.Gaussian(2.0)),
    "sink": lambda: make(40, 63, sink=torch.tensor([0.5, -math.inf]), mask=attlas.Causal()),
    "sink above all": lambda: make(40, 63, sink=torch.tensor([30.0, 3.0], dtype=torch.bfloat16).float()),
    "bytes": lambda: make(40, 63, mask=holes(40, 63)),
    "bytes of each head": lambda: make(40, 63, batch=2, mask=holes(40, 63, 2, 2)),
    "bytes of each sequence": lambda: make(40, 63, batch=2, mask=holes(40, 63, 2, 1)),
    "padding": lambda: make(40, 63, batch=2, mask=attlas.Padding([0, 50])),
    "nothing": lambda: make(20, 30, mask=attlas.Padding([0])),
    "few queries": lambda: make(3, 130, d=64, heads=(4, 2), batch=2, mask=attlas.Causal()),
    "few queries, sink": lambda: make(5, 141, sink=torch.tensor([0.5, -math.inf]), mask=attlas.Window(70, 0)),
    "few queries, sink above all": lambda: make(2, 140, sink=torch.tensor([30.0, 3.0], dtype=torch.bfloat16).float()),
    "few queries, softcap": lambda: make(7, 300, score=attlas.SoftCap(attlas.ScaledDot(), 1.5), mask=attlas.Causal()),
    "few queries, bytes": lambda: make(4, 300, mask=holes(4, 300)),
    "few queries, padding": lambda: make(1, 263, batch=2, mask=attlas.Padding([0, 150])),
    "few queries, float64": lambda: make(15, 200, dtype=torch.float64, mask=attlas.Causal(-20), heads=(2, 2)),
    "few queries, bfloat16": lambda: make(1, 200, dtype=torch.bfloat16, d=33),
    "few queries, negative scale": lambda: make(2, 163, score=attlas.ScaledDot(-0.7)),
    "few queries, zero scale": lambda: make(2, 163, score=attlas.ScaledDot(0.0)),
}  # fmt: skip

LARGE: dict[str, Callable[[], Case]] = {
    "thousand": lambda: make(1000, 1000, d=64, heads=(2, 1)),
    "thousand, causal": lambda: make(1000, 1001, d=16, heads=(1, 1), mask=attlas.Causal()),
    "more keys": lambda: make(130, 2500, d=40, heads=(1, 1), mask=attlas.Window(1200, 60)),
    "few queries": lambda: make(3, 5000, d=64, heads=(2, 1), mask=attlas.Causal(-1500)),
    "few queries, steep": lambda: make(2, 2500, d=64, heads=(2, 1), score=attlas.ScaledDot(3.0)),
    "few queries, window": lambda: make(9, 3100, heads=(2, 1), mask=attlas.Window(1200, 60)),
    "more queries": lambda: make(1100, 333, heads=(1, 1), mask=attlas.Causal()),
    "bytes": lambda: make(300, 1100, heads=(1, 1), mask=holes(300, 1100)),
    "steep": lambda: make(300, 1100, heads=(1, 1), score=attlas.ScaledDot(3.0), mask=attlas.Causal()),
    "float64": lambda: make(300, 1100, heads=(1, 1), dtype=torch.float64),
}


@functools.cache
def known(case: str, large: bool = False) -> Case:
    """Return a case with its definition, which all instruction sets share."""
    return (LARGE if large else SMALL)[case]()


EACH = [(name, case) for name in library.SETS for case in SMALL]
WIDE = [(name, case) for name in ("avx512", "amx") for case in LARGE]


def pooled(case: Case, picture: stats.Picture) -> np.ndarray:
    window = (..., slice(*(picture.rows or (None,))), slice(*(picture.columns or (None,))))
    return blocks(case.weights[window], case.allowed[window], picture.height, picture.width, picture.pool)


def check_everything(case: Case) -> None:
    """Ask for all statistics at once, and compare each with its definition."""
    weights, logits, allowed = case.weights, case.logits, case.allowed
    m, n = weights.shape[2:]
    k, few = min(n, 8), min(n, 3)
    pictures = [picture(m, n) for picture in PICTURES.values()]
    rows, columns = [(0, m // 2 + 1), (m // 3, m), (m // 3, m // 3)], [(n // 4, n // 2 + 1), (0, n)]
    asked = (
        stats.Entropy(), stats.EffectiveKeys(), stats.RowMass(), stats.MaxWeight(), stats.MaxLogit(),
        stats.LogitMoments(), stats.TopK(k), stats.TopK(few), stats.ArgMax(), stats.TailMass(few),
        stats.Coverage((0.5, 0.9, 1.0)), stats.ColumnMass(), stats.ColumnMass(mean=True), stats.ColumnMax(),
        stats.Offsets(), stats.Offsets(mean=True), stats.Spans(rows, columns), *pictures,
    )  # fmt: skip
    found = case.A.collect(*asked)
    named = dict(zip([*range(17), *PICTURES], found, strict=True))
    case.close(named[0], entropy(weights), 10)
    mass, squares = weights.sum(-1), np.square(weights).sum(-1)
    case.close(named[1], np.where(squares > 0, mass**2 / np.where(squares > 0, squares, 1), 0), n)
    case.close(named[2], mass)
    case.close(named[3], weights.max(-1))
    case.close(named[4], logits.max(-1), 10)
    for found_moment, moment, scale in zip(named[5], moments(case), (10, 30), strict=True):
        case.close(found_moment, moment, scale)
    for place, size in ((6, k), (7, few)):
        top = -np.sort(-weights, axis=-1)[..., :size]
        case.close(named[place].values, top)
        check_keys(case, named[place].indices.numpy(), named[place].values.double().numpy())
    check_keys(case, named[8].numpy()[..., None], weights.max(-1)[..., None])
    case.close(named[9], np.maximum(mass - -np.sort(-weights, axis=-1)[..., :few].sum(-1), 0))
    check_coverage(case, named[10].numpy(), (0.5, 0.9, 1.0))
    case.close(named[11], weights.sum(-2), 10)
    case.close(named[12], weights.sum(-2) / np.maximum(allowed.sum(-2), 1))
    case.close(named[13], weights.max(-2))
    case.close(named[14], diagonals(weights), 10)
    case.close(named[15], diagonals(weights) / np.maximum(diagonals(allowed), 1))
    spans = [[weights[..., slice(*r), slice(*c)].sum((-1, -2)) for c in columns] for r in rows]
    case.close(named[16], np.moveaxis(np.array(spans), (0, 1), (-2, -1)), m)
    for name, picture in zip(PICTURES, pictures, strict=True):
        case.close(named[name], pooled(case, picture))
    case.close(case.A.lse, reference.dense(reference.in_float64(case.A.problem)).lse.numpy(), 10)


def check_keys(case: Case, keys: np.ndarray, values: np.ndarray) -> None:
    """Hold keys to the weights that stand beside them: each once, and seen by its query."""
    there = values > 0  # a row without so many keys is filled up with keys of weight 0
    of_keys = np.take_along_axis(case.weights, keys, -1)
    np.testing.assert_allclose(np.where(there, of_keys, 0), values, rtol=case.tolerance, atol=case.tolerance)
    assert np.take_along_axis(case.allowed, keys, -1)[there].all()
    for row, known in zip(keys.reshape(-1, keys.shape[-1]), there.reshape(-1, keys.shape[-1]), strict=True):
        assert len(set(row[known])) == known.sum()


def check_coverage(case: Case, counts: np.ndarray, levels: tuple[float, ...]) -> None:
    """Compare with the count of the largest weights that hold the share, rounding aside."""
    slack = 1e-9 if case.A.dtype is torch.float64 else 3e-5
    for x, level in enumerate(levels):
        assert np.all(counts[..., x] >= needed(case.weights, level - slack))
        assert np.all(counts[..., x] <= np.minimum(needed(case.weights, level + slack), case.n))


@pytest.mark.parametrize(("name", "case"), EACH, ids=["-".join(row) for row in EACH])
def test_all_statistics(name: str, case: str, use: Callable[[str], None]) -> None:
    use(name)
    check_everything(known(case).again())


@pytest.mark.parametrize(("name", "case"), WIDE, ids=["-".join(row) for row in WIDE])
def test_all_statistics_of_large_matrices(name: str, case: str, use: Callable[[str], None]) -> None:
    use(name)
    check_everything(known(case, large=True).again())


@pytest.mark.parametrize("name", library.SETS)
@pytest.mark.parametrize("m", [3, 20])
def test_coverage_where_small_numbers_are_flushed_to_zero(name: str, m: int, use: Callable[[str], None]) -> None:
    use(name)
    case = make(m, 1500, d=64, score=attlas.ScaledDot(3.0))
    (expected,) = case.A.collect(stats.Coverage((0.5, 0.9, 1.0)))
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush small numbers")
    try:
        (found,) = case.again().A.collect(stats.Coverage((0.5, 0.9, 1.0)))
    finally:
        torch.set_flush_denormal(False)
    check_coverage(case, found.numpy(), (0.5, 0.9))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", library.SETS)
@pytest.mark.parametrize("picture", PICTURES)
def test_one_picture_alone(name: str, picture: str, use: Callable[[str], None]) -> None:
    # Alone, nothing but its own window gives the kernels edges.
    use(name)
    for mask in (None, attlas.Causal()):
        case = make(70, 1100 if name == "amx" else 90, mask=mask)
        (found,) = case.A.collect(asked := PICTURES[picture](70, case.weights.shape[-1]))
        case.close(found, pooled(case, asked))


@pytest.mark.parametrize("name", library.SETS)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 16])
def test_pictures_of_narrow_blocks(name: str, width: int, use: Callable[[str], None]) -> None:
    # Many blocks are pooled at a time, the last of them alone; and most rows of the picture lie in more than one strip.
    use(name)
    for mask in (None, attlas.Causal()):
        case = make(200, 195, mask=mask)
        for asked in (stats.Picture(37, 195 // width, "mean"), stats.Picture(5, 195 // width, "max")):
            (found,) = case.A.collect(asked)
            case.close(found, pooled(case, asked))


@pytest.mark.parametrize("name", library.SETS)
def test_spans_alone(name: str, use: Callable[[str], None]) -> None:
    use(name)
    case = make(70, 90, mask=attlas.Causal())
    (found,) = case.A.collect(stats.Spans(ROWS, COLUMNS))
    spans = [case.weights[0, :, r, c].sum((-1, -2)) for r in ROWS for c in COLUMNS]
    case.close(found, np.stack(spans, axis=-1).reshape(1, 2, 2, 2))


@pytest.mark.parametrize("name", library.SETS)
def test_many_largest_and_ties(name: str, use: Callable[[str], None]) -> None:
    use(name)
    for k in (1, 5, 64, 65, 128):
        case = make(20, 300)
        (found,) = case.A.collect(stats.TopK(k))
        case.close(found.values, -np.sort(-case.weights, axis=-1)[..., :k])
        check_keys(case, found.indices.numpy(), found.values.double().numpy())
    q, k = torch.ones(5, 4), torch.ones(700, 4)
    k[350] = 0.0
    found = attlas.attend(q, k, plan=NATIVE).topk(128)
    assert torch.equal(found.indices, torch.arange(128).expand(5, 128))  # of equal ones the first
    apart = attlas.attend(q, k, mask=(torch.arange(700) % 90 == 0).expand(5, 700), plan=NATIVE).topk(8)
    assert torch.equal(apart.indices, torch.arange(0, 700, 90).expand(5, 8))  # fewer than k among the keys of one span
    few = attlas.attend(q, k, mask=attlas.Causal(0), plan=NATIVE).topk(4)
    tiles = attlas.attend(q, k, mask=attlas.Causal(0), plan=Plan("tiled")).topk(4)
    torch.testing.assert_close(few.values, tiles.values)


HIDDEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "first keys and a window": lambda i, j: (j < 4) | ((i - j).abs() < 70),
    "both ends": lambda i, j: ((j < 3) | (j > 1396)) & (i >= 0),
    "some keys": lambda i, j: ((j < 130) | (j > 650)) & (i >= 0),
    "every 90th key": lambda i, j: (i + j) % 90 == 0,
    "late keys": lambda i, j: j > 1000 + i // 2,
}


@pytest.mark.parametrize("name", library.SETS)
@pytest.mark.parametrize("mask", HIDDEN)
def test_keys_hidden_between_visible_ones(name: str, mask: str, use: Callable[[str], None]) -> None:
    """Each statistic alone, as it chooses the loop: hidden stretches are longer than what a loop takes at once."""
    use(name)
    allowed = HIDDEN[mask](torch.arange(600).unsqueeze(-1), torch.arange(1400))
    q, k = torch.randn(600, 24, dtype=torch.float64), torch.randn(1400, 24, dtype=torch.float64)
    A, exact = (attlas.attend(*t, mask=allowed, plan=p) for t, p in (((q.float(), k.float()), NATIVE), ((q, k), TILED)))
    for statistic in (
        stats.Entropy(), stats.EffectiveKeys(), stats.MaxLogit(), stats.LogitMoments(), stats.TopK(8), stats.TopK(30),
        stats.ColumnMass(), stats.ColumnMax(), stats.Offsets(), stats.Picture(20, 30), stats.Picture(7, 9, "max"),
        stats.Coverage(),
    ):  # fmt: skip
        found, wanted = statistic(A), statistic(exact)
        if isinstance(statistic, stats.TopK):
            found, wanted = found.values, wanted.values
        slack = 1.0 if isinstance(statistic, stats.Coverage) else 1e-4  # rounding may move a count by one
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=slack, check_dtype=False, equal_nan=True)


@pytest.mark.parametrize("name", library.SETS)
@pytest.mark.parametrize("mask_bytes", [1, 4000])
def test_row_blocks_of_a_mask_change_nothing(
    name: str, mask_bytes: int, use: Callable[[str], None], monkeypatch: Any
) -> None:
    use(name)
    case = make(37, 63, batch=2, mask=holes(37, 63, 2, 2))
    monkeypatch.setattr(request, "_MASK_BYTES", mask_bytes)
    v = torch.randn(2, 1, 63, 3)
    torch.testing.assert_close((case.A @ v).double(), torch.tensor(case.weights) @ v.double(), rtol=1e-4, atol=1e-5)
    check_everything(case)


class Stripe(attlas.Mask):
    """Queries attend to every second of the keys 600 to 900; all other keys are hidden in whole segments."""

    def allows(self, at: attlas.Tile) -> Tensor:
        return (at.j >= 600) & (at.j < 900) & ((at.i + at.j) % 2 == 0)

    def coverage(self, at: attlas.Tile) -> attlas.BlockState:
        beside = at.columns.stop <= 600 or at.columns.start >= 900
        return attlas.BlockState.EMPTY if beside else attlas.BlockState.PARTIAL


@pytest.mark.parametrize("score", [None, attlas.Boxcar(3.0)])
def test_hidden_keys_at_both_ends_of_a_row(score: attlas.Score | None) -> None:
    q, k, v = torch.randn(20, 3), torch.randn(2048, 3), torch.randn(2048, 2)
    A, B = (attlas.attend(q, k, score=score, mask=Stripe(), plan=Plan(name)) for name in ("native", "reference"))
    torch.testing.assert_close(A @ v, B @ v, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(A.sum(-2), B.to_dense().sum(-2), rtol=1e-4, atol=1e-5)


def test_levels_of_their_own_are_found_tile_by_tile(use: Callable[[str], None]) -> None:
    use("baseline")
    case = make(40, 63)
    first, other = case.A.collect(stats.Coverage((0.5, 0.9)), stats.Coverage((0.25,)))
    check_coverage(case, first.numpy(), (0.5, 0.9))
    check_coverage(case, other.numpy(), (0.25,))


def test_a_log_sum_exp_that_is_known_is_used(use: Callable[[str], None]) -> None:
    use("baseline")
    case = make(40, 63, score=attlas.Gaussian(2.0), d=9, mask=attlas.Causal())
    lse = case.A.lse.clone()
    check_everything(case)
    assert torch.equal(case.A.lse, lse)


def test_parts_of_a_matrix(use: Callable[[str], None]) -> None:
    use("baseline")
    case = make(40, 63, batch=2, heads=(4, 2), sink=torch.randn(4), mask=attlas.Padding([30, 63]))
    for key in (0, (slice(None), 3), (1, 2), (slice(None), slice(1, 4))):
        part = case.A[key]
        torch.testing.assert_close(part.sum(-2).double(), torch.tensor(case.weights)[key].sum(-2), rtol=1e-4, atol=1e-4)
        assert torch.equal(part.lse, case.A.lse[key])


def test_no_sequence() -> None:
    batch, heads = 0, 2
    A = attlas.attend(torch.randn(batch, heads, 200, 8), torch.randn(batch, heads, 200, 8))
    assert (A @ torch.randn(batch, heads, 200, 3)).shape == (batch, heads, 200, 3)
    assert A.lse.shape == (batch, heads, 200)
    assert A.collect(stats.Entropy(), stats.ColumnMass())[1].shape == (batch, heads, 200)


@pytest.mark.parametrize("name", library.SETS)
def test_spans_stripes_and_equal_logits(name: str, use: Callable[[str], None]) -> None:
    """More keys than a span holds; stretches hidden by cells; of equal logits the first keys are the largest."""
    use(name)
    m, n = 70, 4500
    allowed = torch.rand(m, n) < 0.5
    allowed[:, 300:2300] = False
    allowed[10:60, 2500:] = False
    check_everything(make(m, n, d=4, mask=attlas.masks.from_tensor(allowed)))
    q, half = torch.randn(1, 2, m, 4), torch.randn(1, 2, n, 4)
    k = torch.cat([half, half], dim=-2)  # each key twice
    for queries, first in ((torch.zeros_like(q), [0, 1, 2]), (q, None)):
        weights = torch.softmax(queries.double() @ k.double().mT / 2, dim=-1)
        known = attlas.attend(queries, k, plan=NATIVE)
        assert known.lse.shape == (1, 2, m)
        top, mass = known.collect(stats.TopK(3), stats.ColumnMass())
        together = attlas.attend(queries, k, plan=NATIVE).collect(stats.TopK(3))[0]
        torch.testing.assert_close(mass.double(), weights.sum(-2), rtol=1e-4, atol=1e-5)
        for found in (top, together):
            torch.testing.assert_close(found.values.double(), weights.topk(3).values, rtol=1e-4, atol=1e-6)
            if first is not None:
                assert (found.indices == torch.tensor(first)).all()


@pytest.mark.skipif(not library.runnable(), reason="the kernels are not compiled")
@pytest.mark.parametrize(
    "statistic",
    [
        stats.Entropy(), stats.EffectiveKeys(), stats.RowMass(), stats.MaxWeight(), stats.MaxLogit(),
        stats.LogitMoments(), stats.TopK(3), stats.ArgMax(), stats.TailMass(3), stats.Coverage(), stats.ColumnMass(),
        stats.ColumnMax(), stats.Offsets(), stats.Spans(ROWS, COLUMNS), stats.Picture(7, 9),
        stats.Pooled(torch.ones(90, 2)),
    ],
    ids=lambda statistic: type(statistic).__name__,
)  # fmt: skip
def test_the_kernels_compute_each_statistic(statistic: stats.Statistic, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: stats.Statistic, carry: Any, part: stats.Part, at: attlas.Tile) -> Any:
        raise AssertionError("the statistic was computed from tiles")

    monkeypatch.setattr(type(statistic), "step", step)
    attlas.attend(torch.randn(70, 8), torch.randn(90, 8), plan=NATIVE).collect(statistic)


class _OneNumber(stats.Statistic):
    """Says for its subclasses which number they are made of, and leaves the definition to them."""

    name: str

    def outputs(self, problem):
        return {self.name: True}


class OwnMass(_OneNumber):
    name = "mass"

    def start(self, problem):
        raise AssertionError("the kernels find this number")

    step = start

    def finish(self, carry):
        return carry


class Doubled(stats.RowMass):
    def finish(self, carry):
        return 2.0 * carry


class Renamed(stats.Entropy):
    """Changes nothing."""


@pytest.mark.skipif(not library.runnable(), reason="the kernels are not compiled")
def test_wants_of_a_base_class_is_asked() -> None:
    A = attlas.attend(torch.randn(1, 2, 64, 16), torch.randn(1, 2, 80, 16), plan=NATIVE)
    mass, doubled, entropy = A.collect(OwnMass(), Doubled(), Renamed())
    torch.testing.assert_close(mass, torch.ones(1, 2, 64))
    torch.testing.assert_close(doubled, torch.full((1, 2, 64), 2.0))
    torch.testing.assert_close(entropy, stats.entropy(A))


@pytest.mark.parametrize("score", [None, attlas.SoftCap(attlas.ScaledDot(), 1.5)], ids=["dot", "softcap"])
@pytest.mark.parametrize("name", library.SETS)
def test_an_output_with_statistics_is_that_of_two_passes(
    name: str, score: attlas.Score | None, use: Callable[[str], None]
) -> None:
    use(name)
    m, n = 300, 4500  # more than two spans of 2,048 keys
    q, k, v = torch.randn(1, 2, m, 8), torch.randn(1, 1, n, 8), torch.randn(1, 1, n, 5)
    asked = [
        stats.Entropy(),
        stats.TopK(8),
        stats.LogitMoments(),
        stats.ColumnMass(),
        stats.ColumnMax(),
        stats.Offsets(),
    ]
    asked += [stats.Picture(9, 11), stats.Picture(5, 6, pool="max")]
    for mask in (None, attlas.Causal(), attlas.Window(3000, 40), holes(m, n)):
        A = attlas.attend(q, k, score=score, mask=mask, plan=NATIVE)
        out, *together = A.collect(stats.Pooled(v), *asked)
        apart = attlas.attend(q, k, score=score, mask=mask, plan=NATIVE)
        torch.testing.assert_close(out, apart @ v, rtol=1e-5, atol=1e-6)
        assert apart.lse.shape == A.shape[:-1]  # known from here on: the statistics are a pass of their own
        for found, expected in zip(together, apart.collect(*asked), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.skipif(not library.available(), reason="the kernels are not compiled here")
def test_statistics_of_rows_use_the_log_sum_exp_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torch's kernel is rounded to float32, and is computed again with them."""
    q, k, v = (torch.randn(1, 2, 70, 16) for _ in range(3))
    known, compute = [], dot.compute

    def watched(*given: Any, lse: Tensor | None = None, **further: Any) -> Any:
        known.append(lse is not None)
        return compute(*given, lse=lse, **further)

    monkeypatch.setattr(dot, "compute", watched)
    asked = stats.Entropy(), stats.TopK(3), stats.MaxLogit()
    wanted = attlas.attend(q.double(), k.double(), plan=Plan("reference")).collect(*asked)
    for rounds in (False, True):
        A = attlas.attend(q, k, plan=NATIVE)
        _ = A @ v
        weights = A.softmax_weights
        if rounds:
            A = A.with_weights(weights.replaced(A.problem, weights.lse().float()))
        known.clear()
        for found, exact in zip(A.collect(*asked), wanted, strict=True):
            some, all_digits = (t[0] if isinstance(t, tuple) else t for t in (found, exact))
            torch.testing.assert_close(some, all_digits.float(), atol=1e-5, rtol=1e-5)
        assert known == [not rounds]
