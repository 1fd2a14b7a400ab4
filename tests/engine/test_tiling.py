"""Panels and strips: every allowed cell once, nothing of what is skipped is allowed, and no tile above the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stats.definitions import allowed_by_mask

import attlas
from attlas import BlockState, Plan
from attlas.engine.problem import Problem
from attlas.engine.tiling import row_blocks, sizes

MASKS = {
    "none": lambda m, n: None,
    "causal": lambda m, n: attlas.Causal(),
    "window": lambda m, n: attlas.Window(9, 3),
    "far window": lambda m, n: attlas.Window(0, None) & attlas.Window(None, 400),
    "prefix": lambda m, n: attlas.Prefix(n // 3) | attlas.Causal(),
    "documents": lambda m, n: attlas.Documents(torch.arange(n) // 70, torch.arange(m) // 50),
    "nothing": lambda m, n: ~attlas.Prefix(10**6),
    "two blocks": lambda m, n: attlas.from_function(lambda b, h, i, j: (j < 20) | (j > n - 20)),
}


def problem_of(mask: Any, m: int, n: int, batch: int = 1, heads: int = 4, key_heads: int = 2) -> Problem:
    q, k = torch.zeros(batch, heads, m, 2), torch.zeros(batch, key_heads, n, 2)
    return attlas.attend(q, k, mask=mask).problem


PLANS = st.builds(
    Plan,
    backend=st.just("tiled"),
    rows=st.one_of(st.none(), st.integers(1, 400)),
    columns=st.one_of(st.none(), st.integers(1, 700)),
    cells=st.one_of(st.none(), st.integers(1, 500_000)),
)


@pytest.mark.parametrize("name", list(MASKS))
@pytest.mark.parametrize("whole_rows", [False, True])
def test_panels_cover_what_is_allowed_once(name: str, whole_rows: bool) -> None:
    @settings(max_examples=15)
    @given(PLANS, st.sampled_from([(1, 1), (30, 40), (150, 700), (700, 150)]), st.booleans())
    def check(plan: Plan, shape: tuple[int, int], wide: bool) -> None:
        m, n = shape
        plan = Plan(
            "tiled", plan.rows and max(plan.rows, m // 20), plan.columns and max(plan.columns, n // 20), plan.cells
        )
        problem = problem_of(MASKS[name](m, n), m, n)
        seen = torch.zeros(problem.shape, dtype=torch.int32)
        rows_seen = torch.zeros(problem.shape[:3], dtype=torch.int32)
        claimed = torch.zeros(problem.shape, dtype=torch.int8)
        for panel in row_blocks(problem, plan, whole_rows=whole_rows, wide=wide):
            b, h, rows = panel.at.place
            rows_seen[b, h, rows] += 1
            if whole_rows:
                assert len(panel.column_blocks) <= 1
            last = 0
            for strip in panel.column_blocks:
                assert strip.columns.start >= last, "strips go from left to right"
                last = strip.columns.stop
                assert strip.columns.start == strip.segments[0][0].start
                assert strip.columns.stop == strip.segments[-1][0].stop
                seen[b, h, rows, strip.columns.start : strip.columns.stop] += 1
                for columns, coverage in strip.segments:
                    claimed[b, h, rows, columns.start : columns.stop] = coverage.value + 1
        assert bool((rows_seen == 1).all()), "every row once"
        assert int(seen.max()) <= 1, "no cell twice"
        allowed = allowed_by_mask(problem)
        assert not bool((allowed & (seen == 0)).any()), "an allowed cell is left out"
        assert not bool((allowed & (claimed == BlockState.EMPTY.value + 1)).any())
        assert not bool((~allowed & (claimed == BlockState.FULL.value + 1)).any())

    check()


@given(PLANS, st.integers(0, 3000), st.integers(0, 100_000), st.sampled_from([(1, 1, 1), (3, 8, 2), (16, 32, 8)]))
def test_sizes_keep_what_the_plan_says_and_its_budget(plan: Plan, m: int, n: int, lead: tuple[int, int, int]) -> None:
    batch, heads, key_heads = lead
    q, k = torch.zeros(1).expand(batch, heads, m, 1), torch.zeros(1).expand(batch, key_heads, n, 1)
    problem = attlas.attend(q, k).problem
    for wide in (False, True):
        size = sizes(problem, plan, whole_rows=False, wide=wide)
        assert min(size.batches, size.heads, size.rows, size.columns) >= 1
        if plan.rows is not None:
            assert size.rows == min(plan.rows, max(m, 1))
        if plan.columns is not None:
            assert size.columns == min(plan.columns, max(n, 1))
        # Heads of a tile fill whole groups, or divide one.
        group = problem.group
        assert size.heads % group == 0 or group % size.heads == 0
        if plan.rows is None and plan.columns is None:
            cells = size.batches * size.heads * size.rows * size.columns
            assert cells <= max(plan.budget("cpu"), 16 * 64)
    assert sizes(problem, plan, whole_rows=True, wide=True).columns == max(n, 1)


def test_a_causal_mask_skips_half() -> None:
    problem = problem_of(attlas.Causal(), 4096, 4096, heads=1, key_heads=1)
    cells = sum(
        len(panel.at.rows) * len(strip.columns)
        for panel in row_blocks(problem, Plan("tiled", rows=256, columns=1024), wide=False)
        for strip in panel.column_blocks
    )
    assert cells < 0.6 * 4096**2


def test_a_window_costs_its_width() -> None:
    problem = problem_of(attlas.Window(100, 0), 8192, 8192, heads=1, key_heads=1)
    cells = sum(
        len(panel.at.rows) * len(strip.columns)
        for panel in row_blocks(problem, Plan("tiled", rows=128), wide=False)
        for strip in panel.column_blocks
    )
    assert cells < 8192 * 1000
