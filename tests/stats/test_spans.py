"""Span tables against sums over the dense matrix."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import refusal

import attlas
from attlas import stats
from attlas.errors import ShapeError
from attlas.stats.spans import Bands


def table(weights, rows, columns):
    sums = [[weights[..., r.start : r.stop, c.start : c.stop].sum((-1, -2)) for c in columns] for r in rows]
    return np.moveaxis(np.array(sums).reshape(len(rows), len(columns), *weights.shape[:-2]), (0, 1), (-2, -1))


def test_spans(case):
    m, n = case.m, case.n
    rows = [range(m), range(m // 3, m // 2), range(m // 2, m), range(0), range(m // 4, max(m // 4, m - 1))]
    columns = [range(n // 2), range(n // 2, n), range(n), range(n // 5, n // 5)]
    expected = table(case.weights, rows, columns)
    case.close(stats.spans(case.A, rows, columns), expected, scale=max(m, 1))
    queries = np.array([max(len(r), 1) for r in rows])[:, None]
    case.close(stats.spans(case.A, rows, columns, mean=True), expected / queries)


def span(size):
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ends: range(min(ends), max(ends)))


@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    plan=st.sampled_from([None, attlas.Plan(rows=5, columns=7), attlas.Plan(rows=1, columns=13)]),
    causal=st.booleans(),
    data=st.data(),
)
def test_spans_anywhere(m, n, plan, causal, data):
    rows = data.draw(st.lists(span(m), max_size=5))
    columns = data.draw(st.lists(span(n), max_size=5))
    generator = torch.Generator().manual_seed(m + 41 * n)
    q, k = (torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in (m, n))
    A = attlas.attend(q, k, mask=attlas.Causal() if causal else None, plan=plan)
    found = stats.spans(A, rows, columns).numpy()
    np.testing.assert_allclose(found, table(A.to_dense().numpy(), rows, columns), atol=1e-12)


def test_the_forms_of_a_span():
    A = attlas.attend(torch.randn(10, 4), torch.randn(20, 4))
    same = [
        stats.spans(A, [slice(2, 10)], [slice(15, 20)]),
        stats.spans(A, [slice(2, None)], [slice(-5, None)]),
        stats.spans(A, [(2, 10)], [(-5, 20)]),
        stats.spans(A, iter([range(2, 10)]), (range(15, 20) for _ in range(1))),
    ]
    for other in same[1:]:
        torch.testing.assert_close(other, same[0])


@given(edges=st.sets(st.integers(0, 60), min_size=2), ends=st.tuples(st.integers(0, 60), st.integers(0, 60)))
def test_runs_cover_each_place_once(edges, ends):
    bands = Bands(sorted(edges))
    places = bands.inside(range(min(ends), max(ends)))
    if not len(places):
        return
    seen = []
    for first, count, run in bands.runs(places):
        assert len(run) % count == 0
        for index in range(count):
            size = len(run) // count
            piece = range(run.start + index * size, run.start + (index + 1) * size)
            assert bands.edges[first + index] <= piece.start < piece.stop <= bands.edges[first + index + 1]
            seen.append((first + index, piece))
    assert [place for _, piece in seen for place in piece] == list(places)
    assert [band for band, _ in seen] == list(range(seen[0][0], seen[0][0] + len(seen)))
    assert bands.sizes(places).tolist() == [len(piece) for _, piece in seen]


def test_few_runs_for_even_bands():
    assert len(Bands(range(0, 1001, 10)).runs(range(5, 995))) == 3


@pytest.mark.parametrize(
    "wrong", [slice(0, 4, 2), range(0, 4, 2), range(4, 0, -1), (0,), (0, 1.5), 3, [0, 4], (0, True)]
)
def test_what_is_no_span(wrong):
    assert refusal(ShapeError, lambda: stats.Spans([slice(0, 1), wrong], [])) == f"Spans(): rows[1] = {wrong}"


@pytest.mark.parametrize("wrong", [slice(0, 9), (-9, 3), range(-1, 3), slice(5, 3)])
def test_a_span_outside_of_the_matrix(wrong):
    A = attlas.attend(torch.zeros(8, 4), torch.zeros(5, 4))
    assert refusal(ShapeError, lambda: stats.spans(A, [wrong], [(0, 5)])) == f"Spans(): rows[0] = {wrong}"
