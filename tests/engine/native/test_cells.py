"""Statistics of weights that are no softmax, by the kernel that adds up tiles: equal to those of the dense matrix."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.engine.native.conftest import each_set, needs_kernels
from tests.transport.layers import arguments, cast, dense
from torch import Tensor

import attlas
from attlas import stats
from attlas.engine import given
from attlas.engine.backends.native import cells
from attlas.matrix.transport import tokens
from attlas.matrix.transport.weights import TransportWeights

pytestmark = needs_kernels

CLOSE = {torch.float64: 1e-12, torch.float32: 2e-6}
EDGES = [[i * 130 // count for i in range(count + 1)] for count in (7, 10, 3)]


def statistics() -> list[stats.Statistic]:
    return [
        stats.TopK(5), stats.MaxWeight(), stats.RowMass(), stats.ColumnMass(), stats.ColumnMax(), stats.Offsets(),
        stats.Offsets(mean=True), stats.Picture(7, 10), stats.Picture(7, 10, "max"), stats.Picture(3, 3, "max"),
        stats.TopK(40), stats.Spans([(0, 50), (50, 130)], [(0, 20), (20, 130)]),
    ]  # fmt: skip


def blocks(full: Tensor, rows: list[int], columns: list[int]) -> list[list[Tensor]]:
    """Return the blocks of a picture."""
    return [[full[..., a:b, c:d].flatten(-2) for c, d in pairwise(columns)] for a, b in pairwise(rows)]


def by_size(full: Tensor, rows: list[int], columns: list[int]) -> Tensor:
    def largest(block: Tensor) -> Tensor:
        return block.gather(-1, block.abs().argmax(-1, keepdim=True)).squeeze(-1)

    return torch.stack([torch.stack([largest(b) for b in row], -1) for row in blocks(full, rows, columns)], -2)


def check(results: tuple[Any, ...], full: Tensor, allowed: Tensor, dtype: torch.dtype) -> None:
    """Compare all statistics with those of the dense matrix, whose hidden weights are 0."""
    n, size = full.shape[-1], float(full.abs().max())
    top, most, rows, columns, column_max, offsets, mean, picture, largest, coarse, many, spans = results
    diagonals = [torch.diagonal(full, t, -2, -1) for t in range(1 - n, n)]
    sums = torch.stack([d.sum(-1) for d in diagonals], -1)
    seen = torch.stack([torch.diagonal(allowed.double(), t, -2, -1).sum(-1) for t in range(1 - n, n)], -1)
    pooled = [
        [torch.stack([b.sum(-1) for b in row], -1) for row in blocks(x, EDGES[0], EDGES[1])]
        for x in (full, allowed.double())
    ]
    mass, count = (torch.stack(x, -2) for x in pooled)
    empty = count == 0
    pairs = [
        (most, full.amax(-1)), (rows, full.sum(-1)), (columns, full.sum(-2)), (column_max, full.amax(-2)),
        (offsets, sums), (mean, sums / seen.clamp(min=1)), (picture, mass / count),
        (largest, by_size(full, EDGES[0], EDGES[1]).masked_fill(empty, torch.nan)),
        (coarse.nan_to_num(), by_size(full, EDGES[2], EDGES[2])),
        (spans, torch.stack([torch.stack([full[..., a:b, c:d].sum((-2, -1)) for c, d in ((0, 20), (20, 130))], -1)
                             for a, b in ((0, 50), (50, 130))], -2)),
    ]  # fmt: skip
    for found in (top, many):
        pairs += [
            (found.values, full.topk(found.values.shape[-1]).values),
            (full.gather(-1, found.indices), found.values),
        ]
        ordered = found.indices.sort(-1).values
        assert bool((ordered[..., 1:] > ordered[..., :-1]).all())
    for found, expected in pairs:
        torch.testing.assert_close(
            found.double(), expected.double(), atol=20 * CLOSE[dtype] * size, rtol=0, equal_nan=True
        )


@each_set
@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize("kind", ["linear", "ssd", "gla", "gated delta, grouped", "kda, resets", "pair"])
def test_linear_attention(
    kind: str, dtype: torch.dtype, name: str, use: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(name)
    monkeypatch.setattr(tokens, "CHUNK", 2)  # blocks of 32 columns
    monkeypatch.setattr(tokens, "TURNING_CHUNK", 2)
    monkeypatch.setattr(TransportWeights, "tile_plan", attlas.Plan(rows=48, columns=32, cells=1 << 14))
    layer = arguments(kind, 130)
    full = dense(**layer)
    A = attlas.transport(**{key: cast(value, dtype) for key, value in layer.items()})
    check(A.collect(*statistics()), full, torch.ones(130, 130).tril().expand_as(full), dtype)
    W = A.window((20, 130), (0, 100))
    top, largest = W.collect(stats.TopK(4), stats.ColumnMax())
    part = full[..., 20:130, :100]
    for found, expected in ((top.values, part.topk(4).values), (largest, part.amax(-2))):
        torch.testing.assert_close(found.double(), expected, atol=CLOSE[dtype] * float(full.abs().max()), rtol=0)


@pytest.mark.parametrize("kind", ["gla", "gated delta"])
def test_the_same_by_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTLAS_NATIVE", "none")
    layer = arguments(kind, 130)
    full = dense(**layer)
    results = attlas.transport(**layer).collect(*statistics())
    check(results, full, torch.ones(130, 130).tril().expand_as(full), torch.float64)


@pytest.mark.parametrize("mask", [None, attlas.Causal(), attlas.Window(20, 0)], ids=["all", "causal", "window"])
def test_differences_of_softmax_matrices(mask: attlas.Mask | None) -> None:
    q, k, p, r = torch.randn(4, 1, 2, 130, 6, dtype=torch.float64).unbind(0)
    A, B = attlas.attend(q, k, mask=mask), attlas.attend(p, r, mask=mask)
    full = A.to_dense() - 0.7 * B.to_dense()
    allowed = torch.ones(130, 130) if mask is None else attlas.attend(q, k, mask=mask).to_dense() > 0
    check((A - 0.7 * B).collect(*statistics()), full, allowed.expand_as(full), torch.float64)


def test_what_no_kernel_adds_up_sees_the_tiles_of_the_same_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles: list[range] = []
    add = cells.CellSums.add
    monkeypatch.setattr(cells.CellSums, "add", lambda self, at, t: tiles.append(at.columns) or add(self, at, t))
    layer = arguments("gated delta", 130)
    full = dense(**layer)
    A = attlas.transport(**layer)
    which, most, mass = A.collect(stats.ColumnArgMax(), stats.ColumnMax(), stats.ColumnMass())
    assert len(tiles) == 1
    assert torch.equal(which, full.argmax(-2))
    torch.testing.assert_close(most, full.amax(-2), atol=1e-12, rtol=0)
    torch.testing.assert_close(mass, full.sum(-2), atol=1e-12, rtol=0)
    tiles.clear()
    A.collect(stats.ColumnMass(), stats.RowMass())  # products
    monkeypatch.setenv("ATTLAS_NATIVE", "none")
    torch.testing.assert_close(A.collect(stats.ColumnMax())[0], most)
    assert not tiles


def test_weights_that_are_not_finite_are_left_to_torch() -> None:
    layer = arguments("gla", 40)
    layer["q"][0, 1, 30, 2] = torch.inf
    (found,) = attlas.transport(**layer).collect(stats.ColumnMax())
    full = dense(**layer)
    torch.testing.assert_close(found[:, [0, 2, 3]], full.amax(-2)[:, [0, 2, 3]], atol=1e-12, rtol=0)
    assert not bool(found[:, 1].isfinite().all())


def test_results_do_not_depend_on_the_threads(threads: None) -> None:
    outline = attlas.transport(*torch.randn(2, 300, 8)).weights.outline
    left, right = torch.randn(2, 1, 1, 300, 8).unbind(0)
    wanted = {"column_mass": True, "offsets": True, "picture_sum": (EDGES[0], EDGES[1])}
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        sums = given.cell_sums(outline, wanted)
        assert sums is not None
        assert sums.add(outline.tile(range(1), range(1), range(300), range(300)), (left, right))
        found.append(sums.results())
    assert all(torch.equal(found[0][name], found[1][name]) for name in (*wanted, "mass"))
