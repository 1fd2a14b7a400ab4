"""Sums, maxima and counts of blocks, by the kernels and by tiles, against the dense matrix."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attlas
from attlas.masks.runs import RunPerRow
from attlas.matrix.value_weighted import value_weighted
from attlas.view.blocks import Blocks, edges_of
from attlas.view.exact import Head
from attlas.view.largest import largest
from attlas.view.passes import PassJob
from attlas.view.store import Store

MASKS = {
    "none": None,
    "causal": attlas.Causal(),
    "window": attlas.Window(9, 3),
    "but first": RunPerRow(torch.ones(200, dtype=torch.int64), torch.full((200,), 300)) & attlas.Causal(),
    "function": attlas.from_function(lambda b, h, i, j: (i * 7 + j * 3) % 5 < 2),
}


@pytest.mark.parametrize("backend", ["tiled", "auto"])
@pytest.mark.parametrize("name", list(MASKS))
@pytest.mark.parametrize(("m", "n", "size"), [(200, 170, 16), (130, 260, 32), (5, 300, 1), (64, 64, 64)])
def test_blocks_are_those_of_the_dense_matrix(backend: Any, name: str, m: int, n: int, size: int) -> None:
    torch.manual_seed(2)
    plan = attlas.Plan(backend, rows=48, columns=50) if backend == "tiled" else None
    A = attlas.attend(torch.randn(2, 2, m, 8), torch.randn(2, 2, n, 8), mask=MASKS[name], plan=plan)
    allowed = torch.isfinite(A.logits.to_dense())
    found = A.collect(Blocks(edges_of(m, size), edges_of(n, size)))[0]
    weights = A.to_dense()
    rows, columns = (np.arange(0, length, size) for length in (m, n))
    total = np.add.reduceat(np.add.reduceat(weights.double().numpy(), rows, -2), columns, -1)
    largest_of = np.maximum.reduceat(np.maximum.reduceat(weights.numpy(), rows, -2), columns, -1)
    cells = np.add.reduceat(np.add.reduceat(allowed.long().numpy(), rows, -2), columns, -1)
    np.testing.assert_allclose(found.sum, total, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(found.max, largest_of, rtol=2e-5, atol=1e-30)
    assert (found.cells.numpy() == cells).all()
    assert (found.keys == allowed.sum(-1)).all()


@given(st.integers(1, 120), st.integers(1, 120), st.data())
def test_a_window_has_the_weights_of_the_whole(m: int, n: int, data: st.DataObject) -> None:
    torch.manual_seed(m * n)
    mask = data.draw(st.sampled_from(list(MASKS)))
    A = attlas.attend(torch.randn(1, 1, m, 4), torch.randn(1, 1, n, 4), mask=MASKS[mask])
    r0, c0 = data.draw(st.integers(0, m)), data.draw(st.integers(0, n))
    r1, c1 = data.draw(st.integers(r0, m)), data.draw(st.integers(c0, n))
    head, dense = Head(A), A.to_dense()[0, 0]
    np.testing.assert_allclose(head.cells(range(r0, r1), range(c0, c1)), dense[r0:r1, c0:c1], rtol=1e-5, atol=1e-30)
    allowed = torch.isfinite(A.logits.to_dense())[0, 0, r0:r1, c0:c1]
    assert (head.allowed(range(r0, r1), range(c0, c1)) == allowed.numpy()).all()
    table = head.blocks(range(r0, r1), range(c0, c1), data.draw(st.sampled_from([1, 2, 16, 32])))
    assert table.cells.sum() == int(allowed.sum())
    assert table.sum.sum() == pytest.approx(float(dense[r0:r1, c0:c1].double().sum()), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("backend", ["tiled", "auto"])
def test_sampled_rows_are_exact(backend: Any) -> None:
    torch.manual_seed(3)
    q, k = torch.randn(1, 3, 400, 8), torch.randn(1, 3, 500, 8)
    rows, columns = torch.tensor([0, 17, 18, 399]), [0, 100, 101, 500]
    bias = attlas.ScaledDot() + attlas.TensorBias(torch.randn(3, 400, 500))
    for score in (attlas.ScaledDot(), bias):
        A = attlas.attend(q, k, score=score, mask=attlas.Causal(), plan=attlas.Plan(backend))
        allowed = (torch.arange(500) <= rows[:, None] + 100).numpy()
        weighted = value_weighted(A, 9 * torch.rand(1, 3, 500))
        for matrix, some in itertools.product((A, weighted), (slice(1, 2), slice(0, 3))):
            dense = matrix.to_dense()[0].double()
            table = Head(matrix[:, some]).sampled(rows, columns, "max")
            weights = dense[some].mean(0)[rows].numpy()
            np.testing.assert_allclose(table.sum, np.add.reduceat(weights, columns[:-1], 1), rtol=1e-5)
            np.testing.assert_allclose(table.max, np.maximum.reduceat(weights, columns[:-1], 1), rtol=1e-5)
            assert (table.cells == np.add.reduceat(allowed.astype(int), columns[:-1], 1)).all()


@pytest.mark.parametrize("heads", [1, 2])
def test_a_pass_over_value_weighted_weights(heads: int) -> None:
    A = attlas.attend(torch.randn(1, heads, 70, 8), torch.randn(1, heads, 80, 8), mask=attlas.Causal())
    weighted = value_weighted(A, 9 * torch.rand(1, heads, 80))
    dense, band = weighted.to_dense()[0].mean(0).numpy(), Head(weighted).band(range(70), 16)
    np.testing.assert_allclose(band.max_weight, dense.max(1), rtol=1e-5)
    np.testing.assert_allclose(band.column_mass, dense.sum(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(band.column_max, dense.max(0), rtol=1e-5, atol=1e-7)
    assert np.isnan([band.entropy, band.effective_keys]).all()  # they are no shares


@pytest.mark.parametrize(
    ("rows", "columns"), [((0, 1500), (0, 1300)), ((32, 1500), (64, 1280)), ((7, 1499), (3, 1200))]
)
@pytest.mark.parametrize("with_pass", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_largest_of_many_cells(rows: Any, columns: Any, with_pass: bool, heads: int) -> None:
    """More cells than are simply looked at: those of the largest blocks are enough."""
    torch.manual_seed(5)
    A = attlas.attend(3 * torch.randn(1, heads, 1500, 8), torch.randn(1, heads, 1300, 8), mask=attlas.Causal(0))
    head, store = Head(A), Store()
    known = None
    if with_pass:
        job = PassJob(head, store, "a", {})
        while job.step():
            pass
        known = job.result
        assert known.complete
    found = largest(head, range(*rows), range(*columns), 50, known, None)
    part = A.to_dense()[0].mean(0)[slice(*rows), slice(*columns)]
    values, places = part.flatten().topk(50)
    np.testing.assert_allclose([w for *_, w in found], values, rtol=1e-5)
    expected = {(rows[0] + p // part.shape[1], columns[0] + p % part.shape[1]) for p in places.tolist()}
    assert {(i, j) for i, j, _ in found} == expected
    store.close()
