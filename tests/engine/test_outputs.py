"""The table of the numbers that backends read, and the statistics that are made from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attlas
from attlas import Plan, stats
from attlas.engine import outputs
from attlas.engine.backend import Backend, Request
from attlas.engine.backends.native import library
from attlas.engine.costs import Operation
from attlas.engine.problem import Problem, tree_flatten
from attlas.view.blocks import Blocks

STATISTICS: dict[str, stats.Statistic] = {
    "mass": stats.RowMass(),
    "entropy": stats.Entropy(),
    "effective keys": stats.EffectiveKeys(),
    "largest weight": stats.MaxWeight(),
    "largest logit": stats.MaxLogit(),
    "moments": stats.LogitMoments(),
    "three largest": stats.TopK(3),
    "five largest": stats.TopK(5),
    "position": stats.ArgMax(),
    "tail": stats.TailMass(2),
    "coverage": stats.Coverage((0.5, 0.9)),
    "column mass": stats.ColumnMass(),
    "column maximum": stats.ColumnMax(),
    "offsets": stats.Offsets(),
    "picture": stats.Picture(3, 4),
    "picture of maxima": stats.Picture(2, 5, pool="max"),
    "picture of a window": stats.Picture(2, 2, rows=(1, 8), columns=(2, 12)),
    "spans": stats.Spans([(0, 5), (3, 9)], [(0, 4), (2, 13)]),
    "blocks": Blocks([0, 4, 9], [0, 6, 13]),
    "pooled": stats.Pooled(torch.ones(2, 1, 13, 3)),
}


def problem_of(device: str = "cpu") -> Problem:
    """Return a problem of 2 batches, 4 heads, 9 queries and 13 keys."""
    q, k = torch.zeros(2, 4, 9, 8, device=device), torch.zeros(2, 2, 13, 8, device=device)
    return Problem(q, k, attlas.ScaledDot(), None, None)


def forms(result: Any) -> list[tuple[torch.Size, torch.dtype]]:
    """Return the shapes and dtypes of a result."""
    return [(t.shape, t.dtype) for t in tree_flatten(result)]


def test_the_table_lists_each_name() -> None:
    rows = re.findall(r"^``(\w+)``", outputs.__doc__ or "", flags=re.M)
    assert rows == list(outputs.OUTPUTS)
    assert set(rows) >= outputs.NEEDS_LSE
    assert set(rows) >= set(library.current().row_statistics)


@pytest.mark.parametrize("name", STATISTICS)
def test_outputs_tell_the_form_of_a_result(name: str) -> None:
    statistic, problem = STATISTICS[name], problem_of()
    wanted = statistic.outputs(problem)
    assert wanted is not None
    made = statistic.from_outputs(outputs.zeros(problem, wanted), problem)
    found = attlas.attend(problem.q, problem.k, plan=Plan("tiled")).collect(statistic)[0]
    assert forms(made) == forms(found)


def test_several_statistics_share_one_read() -> None:
    problem = problem_of()
    asked: list[Mapping[str, Any]] = []

    def read(wanted: Mapping[str, Any], v: Tensor | None, lse: Tensor | None) -> dict[str, Tensor]:
        asked.append(wanted)
        found = outputs.zeros(problem, wanted if v is None else {**wanted, "out": v})
        if "picture_sum" in found:  # a number that tells which cells a block has
            rows, columns = (torch.arange(edges[-1]) for edges in wanted["picture_sum"])
            cells = (rows.unsqueeze(-1) * 100.0 + columns).expand(2, 4, -1, -1)
            bands = zip(wanted["picture_sum"], (-2, -1), strict=True)
            for edges, axis in bands:
                parts = cells.split([stop - start for start, stop in pairwise(edges)], dim=axis)
                cells = torch.stack([part.sum(axis) for part in parts], dim=axis)
            found["picture_sum"] = cells
        return found

    found = outputs.collect(problem, read, list(STATISTICS.values()), None)
    assert found is not None
    assert outputs.MISSING not in found[0]
    assert len(asked) == 1
    assert asked[0]["largest"] == 5
    assert asked[0]["picture_sum"] == asked[0]["picture_max"]
    results = dict(zip(STATISTICS, found[0], strict=True))
    cells = torch.arange(9).unsqueeze(-1) * 100.0 + torch.arange(13)
    assert torch.equal(results["picture"][0, 0, :, 1], cells[:, 3:6].unflatten(0, (3, 3)).mean((1, 2)))
    assert results["picture of a window"][1, 3, 0, 0] == cells[1:4, 2:7].mean()
    assert results["spans"][0, 0, 1, 1] == cells[3:9, 2:13].sum()
    assert results["blocks"].sum[0, 0, 1, 0] == cells[4:, :6].sum()


def test_a_second_set_of_values_or_levels_is_left_to_the_tiles() -> None:
    problem = problem_of()
    asked = [stats.Pooled(torch.ones(2, 1, 13, 3)), stats.Pooled(torch.ones(2, 1, 13, 2)),
             stats.Coverage((0.5,)), stats.Coverage((0.9,)), stats.RowMass()]  # fmt: skip
    found = outputs.collect(problem, lambda wanted, v, lse: outputs.zeros(problem, {**wanted, "out": v}), asked, None)
    assert found is not None
    assert [result is outputs.MISSING for result in found[0]] == [False, True, False, True, False]
    assert outputs.collect(problem, lambda *_: {}, [stats.ColumnArgMax()], None) is None


@pytest.mark.parametrize("name", ["picture", "picture of a window", "spans", "blocks"])
def test_blocks_are_merged_without_a_number_of_a_tensor(name: str) -> None:
    asked = [STATISTICS[name], STATISTICS["picture"]]
    with FakeTensorMode():
        problem = problem_of()
        found = outputs.collect(problem, lambda wanted, v, lse: outputs.zeros(problem, wanted), asked, None)
    assert found is not None
    assert all(t.shape[1] == 4 for t in tree_flatten(found[0][1]))


def test_statistics_that_need_other_names_are_left_to_the_tiles() -> None:
    problem, asked = problem_of(), [stats.Coverage((0.5,)), stats.RowMass(), Blocks([0, 9], [0, 13]), stats.Entropy()]
    wanted: list[Mapping[str, Any]] = []

    def read(names: Mapping[str, Any], v: Tensor | None, lse: Tensor | None) -> dict[str, Tensor]:
        wanted.append(names)
        return outputs.zeros(problem, names)

    found = outputs.collect(problem, read, asked, None, {"lse", "mass", "entropy", "picture_sum"})
    assert found is not None
    assert [result is outputs.MISSING for result in found[0]] == [True, False, True, False]
    assert set(wanted[0]) == {"lse", "mass", "entropy"}
    assert outputs.collect(problem, read, asked[:1], None, {"lse", "mass"}) is None


class _Entropies(Backend):
    """A backend that reads 7 as each entropy, and the log-sum-exp."""

    name, row, computes, reads = "entropies", "sdpa", frozenset({"statistics"}), frozenset({"lse", "entropy"})

    def unsupported(self, request: Request, operation: Operation) -> str | None:
        return None

    def read(
        self, request: Request, wanted: Mapping[str, Any], v: Tensor | None, lse: Tensor | None
    ) -> dict[str, Tensor] | None:
        assert wanted.keys() <= self.reads
        logits = request.product.q.double() @ request.product.k.mT.double() * request.product.scale
        return {"entropy": torch.full(logits.shape[:3], 7.0), "lse": logits.logsumexp(-1)}


def test_a_backend_may_read_some_names(add_backend: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTLAS_NATIVE", "none")
    add_backend("entropies", _Entropies())
    q, k = torch.randn(300, 8), torch.randn(300, 8)
    entropy, column, top = attlas.attend(q, k).collect(stats.Entropy(), stats.ColumnMass(), stats.TopK(2))
    assert bool((entropy == 7).all())
    dense = torch.softmax(q @ k.mT / 8**0.5, dim=-1)
    torch.testing.assert_close(top.values, dense.topk(2).values)
    torch.testing.assert_close(column, dense.sum(0))
