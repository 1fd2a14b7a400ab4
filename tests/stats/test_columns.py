"""Statistics of columns against their formulas on the dense matrix."""

import numpy as np
import pytest
import torch

import attlas
from attlas import stats
from attlas.errors import ShapeError


def test_numbers_of_columns(fresh):
    m = fresh().m
    for rows, own in (
        (None, slice(0, m)),
        (range(m // 3, m), slice(m // 3, m)),
        (slice(-min(m, 9), None) if m else None, slice(max(m - 9, 0), m)),
    ):
        case = fresh()
        weights, queries = case.weights[:, :, own], case.seen[:, :, own].sum(-2)
        case.close(stats.column_mass(case.A, rows=rows), weights.sum(-2))
        case.close(stats.column_mass(case.A, rows=rows, mean=True), weights.sum(-2) / np.maximum(queries, 1))
        case.close(stats.column_max(fresh().A, rows=rows), weights.max(-2, initial=0.0))


def test_rows_in_every_form(make):
    case = make(63, 130, mask=attlas.Causal())
    for rows, own in ((slice(0, 31), slice(0, 31)), (slice(40, None), slice(40, 63)), ((21, 21), slice(0, 0))):
        case.close(stats.column_mass(case.A, rows=rows), case.weights[:, :, own].sum(-2))
        case.close(stats.column_max(case.A, rows=rows), case.weights[:, :, own].max(-2, initial=0.0))


def test_column_argmax(case):
    if case.m == 0:
        with pytest.raises(ShapeError):
            case.A.collect(stats.ColumnArgMax())
        return
    found = case.A.collect(stats.ColumnArgMax())[0]
    assert found.dtype == torch.int64
    assert tuple(found.shape) == case.weights.shape[:2] + case.weights.shape[3:]
    there = np.take_along_axis(case.weights, found.numpy()[:, :, None], -2)[:, :, 0]
    np.testing.assert_allclose(there, case.weights.max(-2), rtol=case.tolerance, atol=case.tolerance)


def test_the_first_of_equal_queries_is_found():
    for rows in (1, 3, 64, 100):
        A = attlas.attend(torch.zeros(200, 4), torch.zeros(5, 4), plan=attlas.Plan(rows=rows))
        assert A.collect(stats.ColumnArgMax())[0].tolist() == [0] * 5


def test_heads_are_combined(make):
    case = make(63, 130, mask=attlas.Causal())
    mass = case.weights.sum(-2)
    case.close(stats.column_mass(case.A, heads="sum"), mass.sum(1))
    case.close(stats.column_mass(case.A[:, 1:3], heads="mean"), mass[:, 1:3].mean(1))
    case.close(stats.column_max(case.A[0], heads="mean"), case.weights[0].max(-2).mean(0))
