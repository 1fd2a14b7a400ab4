"""Pictures and diagonals against the dense matrix."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import refusal
from tests.stats.definitions import allowed_by_mask, blocks, diagonals

import attlas
from attlas import stats
from attlas.errors import ShapeError
from attlas.stats.pooled import block_edges, count_blocks


def test_picture(fresh):
    for height, width in ((1, 1), (7, 5), (63, 61)):
        case = fresh()
        height, width = min(height, case.m), min(width, case.n)
        if 0 in (height, width):
            with pytest.raises(ShapeError):
                stats.picture(case.A, 1, 1)
            return
        for pool in ("mean", "max"):
            expected = blocks(case.weights, case.seen, height, width, pool)
            case.close(stats.picture(fresh().A, height, width, pool), expected)


@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    plan=st.sampled_from([None, attlas.Plan(rows=5, columns=7), attlas.Plan(rows=1, columns=13)]),
    mask=st.sampled_from([None, attlas.Causal(), attlas.Window(4, 2)]),
    pool=st.sampled_from(["mean", "max"]),
    data=st.data(),
)
def test_picture_of_any_window(m, n, plan, mask, pool, data):
    top, left = data.draw(st.integers(0, m - 1)), data.draw(st.integers(0, n - 1))
    bottom, right = data.draw(st.integers(top + 1, m)), data.draw(st.integers(left + 1, n))
    height, width = data.draw(st.integers(1, bottom - top)), data.draw(st.integers(1, right - left))
    generator = torch.Generator().manual_seed(m + 41 * n)
    q, k = (torch.randn(1, 1, size, 3, generator=generator, dtype=torch.float64) for size in (m, n))
    A = attlas.attend(q, k, mask=mask, plan=plan)
    found = stats.picture(A, height, width, pool, rows=slice(top, bottom), columns=range(left, right))
    window = np.s_[..., top:bottom, left:right]
    allowed = allowed_by_mask(A.problem).numpy()
    expected = blocks(A.to_dense().numpy()[window], allowed[window], height, width, pool)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("length", [1, 2, 7, 300, 384, 1000, 1500, 2000, 3000, 5000, 100_003])
@pytest.mark.parametrize("most", [1, 64, 128, 256, 1024])
def test_blocks_lie_where_they_are_drawn(length, most):
    count = count_blocks(length, most)
    assert count <= most
    edges = torch.tensor(block_edges(range(length), count), dtype=torch.float64)
    assert edges[0] == 0
    assert edges[-1] == length
    drawn = torch.arange(count + 1, dtype=torch.float64) * length / count
    assert float((edges - drawn).abs().max()) < 1
    sizes, size = edges.diff(), -(-length // most)
    assert set(sizes.tolist()) <= {size, size - 1}
    assert int((sizes < size).sum()) < size  # nearly all blocks are maxima of as many cells


def test_offsets(case):
    expected = diagonals(case.weights)
    case.close(stats.offsets(case.A), expected, scale=max(case.m, 1) ** 0.5)
    cells = diagonals(case.seen)
    case.close(stats.offsets(case.A, mean=True), expected / np.maximum(cells, 1))


@given(
    m=st.integers(1, 30),
    n=st.integers(1, 90),
    rows=st.integers(1, 30),
    columns=st.integers(1, 90),
    causal=st.booleans(),
)
def test_offsets_for_any_shape_of_tile(m, n, rows, columns, causal):
    q, k = torch.randn(m, 3, dtype=torch.float64), torch.randn(n, 3, dtype=torch.float64)
    plan = attlas.Plan(rows=rows, columns=columns)
    A = attlas.attend(q, k, mask=attlas.Causal() if causal else None, plan=plan)
    np.testing.assert_allclose(stats.offsets(A).numpy(), diagonals(A.to_dense().numpy()), atol=1e-12)


def test_offsets_find_the_previous_token():
    q = torch.eye(20) * 30
    A = attlas.attend(q, q.roll(-1, 0), scale=1.0, mask=attlas.Causal())
    found = stats.offsets(A, mean=True)
    assert found.argmax() == 20 - 2
    assert float(found[20 - 2]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: stats.Picture(0, 4), "Picture(): height = 0"),
        (lambda: stats.Picture(4, 2.5), "Picture(): width = 2.5"),
        (lambda: stats.Picture(4, 4, "median"), "Picture(): pool = 'median'"),
        (lambda: stats.Picture(4, 4, rows=slice(0, 8, 2)), "Picture(): rows = slice(0, 8, 2)"),
        (
            lambda: stats.picture(attlas.attend(torch.zeros(5, 4), torch.zeros(300, 4)), 256, 256),
            "Picture(): height = 256, width = 256",
        ),
        (
            lambda: stats.picture(attlas.attend(torch.zeros(5, 4), torch.zeros(300, 4)), 1, 1, columns=(0, 301)),
            "Picture(): columns = (0, 301)",
        ),
    ],
)
def test_messages(make, text):
    assert refusal(ShapeError, make) == text
