"""Sums of matrices, stacks, products of two, and the identity: equal to the dense ones, and lazy at any length."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.atlas.test_safety import reseal
from torch import Tensor

import attlas
from attlas import stats
from attlas.errors import (
    BackendError,
    DtypeError,
    ShapeError,
    TooLargeError,
)
from attlas.matrix import AttentionMatrix
from attlas.view.exact import Head
from attlas.view.offline import export
from attlas.view.source import atlas_of

N = 37


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ROWS, KEYS, HEADS = numbers(N, 1, seed=1), numbers(N, seed=2), numbers(3, 1, 1, seed=3)
LEARNED = numbers(3, 1, 1, seed=4).requires_grad_()


def given(requires_grad: bool = False) -> tuple[AttentionMatrix, AttentionMatrix, list[Tensor]]:
    """Return a causal matrix and one in a window, with grouped heads and a sink, and what they are made of."""
    shapes = (2, 3, N, 6), (2, 3, N, 6), (2, 3, N, 6), (2, 1, N, 6)
    q, k, q2, k2 = tokens = [
        numbers(*shape, seed=10 + i).requires_grad_(requires_grad) for i, shape in enumerate(shapes)
    ]
    A = attlas.attend(q, k, mask=attlas.Causal())
    return A, attlas.attend(q2, k2, mask=attlas.Window(9, 4), sink=numbers(3, seed=20)), tokens


#: Each takes two matrices, lazy or dense, and the identity in the same form.
SUMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "difference with a number": lambda A, B, E: A - 0.3 * B,
    "difference with one number a head": lambda A, B, E: A - HEADS * B,
    "learned factors": lambda A, B, E: A - LEARNED * B,
    "symmetric": lambda A, B, E: A + A.mT,
    "antisymmetric": lambda A, B, E: A.mT - A,
    "mean of two": lambda A, B, E: (A + B) / 2,
    "with the identity": lambda A, B, E: 0.5 * A + 0.5 * E,
    "rows": lambda A, B, E: ROWS * A + B,
    "keys": lambda A, B, E: A * KEYS - B,
    "rows of the transposed": lambda A, B, E: (ROWS * A).mT + B,
    "nested": lambda A, B, E: torch.sub(-(A + B), (A - B).mT, alpha=0.25) / torch.tensor(3.0),
}
READS: dict[str, Callable[[Any], Any]] = {
    "product": lambda C: C @ numbers(2, 3, N, 4, seed=30),
    "product with grouped values": lambda C: C @ numbers(2, 1, N, 4, seed=31),
    "transposed product": lambda C: C.mT @ numbers(2, 3, N, 4, seed=32),
    "rows": lambda C: C[:, :, 5:9],
    "a list of rows": lambda C: C[0, 1, [7, 2, 30]],
    "cells": lambda C: C[:, 1, 30, 3:9],
    "heads": lambda C: C[:, [2, 0]].sum(-1),
    "row mass": lambda C: C.sum(-1),
    "column mass": lambda C: C.sum(-2),
    "all": lambda C: C.sum(),
    "mean over heads": lambda C: C.mean(1),
    "largest of rows": lambda C: C.amax(-1),
    "largest of columns": lambda C: C.amax(-2),
    "top": lambda C: C.topk(4).values,
    "of sizes": lambda C: C.abs().sum(-2),
    "squares": lambda C: C.square().sum(-1),
    "variance": lambda C: C.var(-1),
    "diagonal": lambda C: torch.diagonal(C, -2, -2, -1),
}


@pytest.mark.parametrize("name", SUMS)
def test_equal_the_dense_ones(name: str) -> None:
    A, B, tokens = given(requires_grad=True)
    lazy = SUMS[name](A, B, attlas.eye(N, dtype=torch.float64))
    dense = SUMS[name](A.to_dense(), B.to_dense(), torch.eye(N, dtype=torch.float64))
    leaves = [*tokens, LEARNED]
    assert isinstance(lazy, AttentionMatrix)
    torch.testing.assert_close(lazy.to_dense(), dense, rtol=1e-9, atol=1e-12)
    for read_name, read in READS.items():
        found, wanted = read(lazy), read(dense)
        torch.testing.assert_close(
            found, wanted, rtol=1e-9, atol=1e-11, msg=lambda text, name=read_name: f"{name}: {text}"
        )
        slope = numbers(*wanted.shape, seed=40)
        every = (torch.autograd.grad(t, leaves, slope, retain_graph=True, allow_unused=True) for t in (found, wanted))
        for a, b in zip(*every, strict=True):
            assert (a is None or not bool(a.any())) if b is None else a is not None, read_name
            if b is not None:
                torch.testing.assert_close(
                    a, b, rtol=1e-8, atol=1e-10, msg=lambda text, name=read_name: f"{name}: {text}"
                )


STATISTICS: dict[str, tuple[stats.Statistic, Callable[[Tensor], Tensor]]] = {
    "offsets": (
        stats.Offsets(),
        lambda D: torch.stack([D.diagonal(t, -2, -1).sum(-1) for t in range(1 - N, N)], dim=-1),
    ),
    "spans": (
        stats.Spans([(0, 10), (5, 20)], [(0, 7), (30, N)]),
        lambda D: torch.stack(
            [torch.stack([D[..., a, b].sum((-1, -2)) for b in (slice(0, 7), slice(30, N))], -1)
             for a in (slice(0, 10), slice(5, 20))], -2,
        ),
    ),
    "pooled": (stats.Pooled(numbers(2, 3, N, 2, seed=50)), lambda D: D @ numbers(2, 3, N, 2, seed=50)),
    "window of columns": (stats.ColumnMass(slice(-5, None)), lambda D: D[..., -5:, :].sum(-2)),
    "window of largest": (stats.ColumnMax(slice(-5, None)), lambda D: D[..., -5:, :].amax(-2)),
    "argmax": (stats.ArgMax(), lambda D: D.argmax(-1)),
    "argmax of columns": (stats.ColumnArgMax(), lambda D: D.argmax(-2)),
    "largest weight": (stats.MaxWeight(), lambda D: D.amax(-1)),
}  # fmt: skip


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("name", SUMS)
def test_statistics_equal_the_dense_ones(name: str, statistic: str) -> None:
    A, B, tokens = given(requires_grad=True)
    lazy = SUMS[name](A, B, attlas.eye(N, dtype=torch.float64))
    dense = SUMS[name](A.to_dense(), B.to_dense(), torch.eye(N, dtype=torch.float64))
    asked, define = STATISTICS[statistic]
    (found,), wanted = lazy.collect(asked), define(dense)
    if not wanted.is_floating_point():
        cells = dense.gather(-1, found.unsqueeze(-1)).squeeze(-1) if statistic == "argmax" else None
        assert torch.equal(found, wanted) or (cells is not None and torch.equal(cells, dense.amax(-1)))
        return
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    slope = numbers(*wanted.shape, seed=40)
    for a, b in zip(*(torch.autograd.grad(t, tokens, slope, allow_unused=True) for t in (found, wanted)), strict=True):
        assert (a is None) == (b is None) or not bool((a if b is None else b).any())
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


def test_means_over_allowed_cells() -> None:
    A, B, _ = given()
    same = attlas.attend(B.q, B.k, mask=attlas.Causal())
    allowed = torch.ones(N, N, dtype=torch.bool).tril()
    for C, cells in (
        (A - 0.5 * same, allowed),
        (A + B, torch.ones_like(allowed)),
        (A.mT - A, torch.ones_like(allowed)),
    ):
        dense, count = C.to_dense(), cells.sum(-2)
        torch.testing.assert_close(stats.column_mass(C, mean=True), dense.sum(-2) / count)
        blocks = torch.stack([torch.stack([(dense * cells)[..., i, j].sum((-1, -2)) / cells[i, j].sum()
                                           for j in (slice(0, 18), slice(18, N))], -1)
                              for i in (slice(0, 18), slice(18, N))], -2)  # fmt: skip
        torch.testing.assert_close(C.collect(stats.Picture(2, 2))[0], blocks, equal_nan=True)
        sizes = C.collect(stats.Picture(2, 2, "max"))[0]
        quarter = dense[..., 18:, :18].flatten(-2)
        largest = quarter.gather(-1, quarter.abs().argmax(-1, keepdim=True)).squeeze(-1)
        torch.testing.assert_close(sizes[..., 1, 0], largest)


def test_a_mean_is_a_distribution_and_a_difference_is_none() -> None:
    A, B, tokens = given(requires_grad=True)
    mean, dense = (A + B) / 2, (A.to_dense() + B.to_dense()) / 2
    assert mean.weights.are_shares
    wanted = -(dense * torch.where(dense > 0, dense, 1.0).log()).sum(-1)
    torch.testing.assert_close(stats.entropy(mean), wanted)
    torch.testing.assert_close(stats.effective_keys(mean), dense.sum(-1).square() / dense.square().sum(-1))
    torch.testing.assert_close(stats.coverage(mean.detach(), [0.5]), stats.coverage(dense.detach(), [0.5]))
    found = torch.autograd.grad(stats.entropy(mean).sum(), tokens)
    for a, b in zip(found, torch.autograd.grad(wanted.sum(), tokens), strict=True):
        torch.testing.assert_close(a, b)
    for C in (A - B, 2 * A, A + A.mT, A * LEARNED.detach()):
        with pytest.raises(ShapeError, match="weights must be shares of a row"):
            stats.entropy(C)
    with pytest.raises(ShapeError, match=r"TailMass\(\): weights must be shares"):
        stats.tail_mass(A - B, 3)
    for asked in (stats.MaxLogit(), stats.LogitMoments()):
        with pytest.raises(DtypeError, match="property of a softmax"):
            (A + B).collect(asked)
    for read in (lambda: (A - B).lse, lambda: (A - B).logits[0, 0, 0], lambda: (A - B).problem):
        with pytest.raises(DtypeError, match="these weights are none"):
            read()


def test_stacked_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    A = attlas.attend(numbers(3, 4), numbers(5, 4))
    assert isinstance(torch.stack([A, A]), Tensor)  # small ones are tensors
    monkeypatch.setattr("attlas.engine.autodiff.graph.DENSE_LIMIT", 100)
    for lead in ((), (3,), (2, 3)):
        q = [numbers(*lead, 9, 4, seed=i).requires_grad_() for i in range(4)]
        A, B = (attlas.attend(*pair, mask=attlas.Causal()) for pair in (q[:2], q[2:]))
        S, dense = torch.stack([A, B]), torch.stack([A.to_dense(None), B.to_dense(None)])
        assert isinstance(S, AttentionMatrix)
        assert S.shape == dense.shape
        v = numbers(*lead, 9, 2, seed=9)
        reads: list[Callable[[Any], Any]] = [
            lambda S: S @ v, lambda S: S.mT @ v, lambda S: S[1, ..., 3, :], lambda S: S.mean(0), lambda S: S.sum(-2),  # noqa: B023
            lambda S: S.amax(-1), lambda S: S.abs().sum(-1), lambda S: S[..., -1, :], lambda S: S[0].sum(-1),
            lambda S: S.topk(2).values, lambda S: S.sum(),
        ]  # fmt: skip
        for read in reads:
            found, wanted = read(S), read(dense)
            found = found if isinstance(found, Tensor) else found.to_dense(None)
            torch.testing.assert_close(found, wanted)
            slope = numbers(*wanted.shape, seed=8)
            for a, b in zip(*(torch.autograd.grad(t, q, slope, retain_graph=True, allow_unused=True)
                              for t in (found, wanted)), strict=True):  # fmt: skip
                zeros = torch.zeros_like(q[0])
                torch.testing.assert_close(zeros if a is None else a, zeros if b is None else b)
        assert S[1].weights is not S.weights
        torch.testing.assert_close(stats.entropy(S)[1], stats.entropy(B))
        torch.testing.assert_close(S.logits[..., 2, :2], torch.stack([A.logits[..., 2, :2], B.logits[..., 2, :2]]))


def test_large_ones_stay_lazy() -> None:
    n = 30_000
    q, k, q2, k2 = (torch.randn(1, 1, n, 4, generator=torch.Generator().manual_seed(i)) for i in range(4))
    A, B = attlas.attend(q, k, mask=attlas.Causal()), attlas.attend(q2, k2, mask=attlas.Causal())
    heads = attlas.attend(q.expand(1, 2, n, 4), k.expand(1, 2, n, 4), mask=attlas.Causal())
    v, rows = torch.randn(1, 1, n, 2), torch.tensor([0, 17, n - 1])
    tracemalloc.start()
    sums = {
        A - 0.3 * B: lambda A, B: A - 0.3 * B,
        torch.stack([A, B]).mean(0): lambda A, B: (A + B) / 2,
        heads.mean(1, keepdim=True): lambda A, B: A,
    }
    for C, define in sums.items():
        parts = [M[..., rows, :] for M in (A, B)]
        torch.testing.assert_close(C[..., rows, :], define(*parts), atol=1e-6, rtol=1e-4)
        torch.testing.assert_close((C @ v)[..., rows, :], define(*parts) @ v, atol=1e-5, rtol=1e-4)
    symmetric = A + A.mT
    torch.testing.assert_close(symmetric[..., rows, rows], 2 * A[..., rows, rows], atol=1e-6, rtol=1e-4)
    rolled = A @ (0.5 * B + 0.5 * attlas.eye(n))
    wanted = A[..., rows, :] @ (0.5 * (B @ v) + 0.5 * v)
    torch.testing.assert_close((rolled @ v)[..., rows, :], wanted, atol=1e-5, rtol=1e-4)
    tracemalloc.stop()
    with pytest.raises(TooLargeError):
        symmetric.to_dense()


def test_a_factor_counts_as_it_was() -> None:
    A, B, _ = given()
    factor = torch.tensor(0.5, dtype=torch.float64)
    C = A - factor * B
    before = C.sum(-1)
    factor += 1
    torch.testing.assert_close(C.sum(-1), before)


def test_gradients_of_a_statistic_without_a_formula_are_refused_where_they_are_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    A, B, _ = given(requires_grad=True)
    found = stats.column_max(A - B)
    monkeypatch.setattr("attlas.engine.autodiff.graph.DENSE_LIMIT", 100)
    with pytest.raises(TooLargeError, match=r"ColumnMax\(\): without a formula its gradient takes the whole matrix"):
        found.sum().backward()


def test_what_is_no_multiple_of_a_matrix_stays_a_function_of_each_weight() -> None:
    A, B, _ = given()
    W = numbers(N, N)
    assert type(A * W).__name__ == type(1 - A).__name__ == type(A * A).__name__ == type(A + A).__name__ == "Cellwise"
    wide = attlas.attend(numbers(2, 3, N, 4).float(), numbers(2, 3, N, 4).float())
    assert (wide * numbers(N, 1)).dtype is torch.float64  # as of tensors: the factor has more digits
    torch.testing.assert_close((A * B).sum(-1), (A.to_dense() * B.to_dense()).sum(-1))


def test_gradient_of_the_weights_of_a_sum() -> None:
    A, B, _ = given(requires_grad=True)
    C = A - 0.5 * B
    C.retain_grad()
    v = numbers(2, 3, N, 2)
    (C @ v).square().sum().backward()
    dense = (A - 0.5 * B).to_dense().detach().requires_grad_()
    (dense @ v).square().sum().backward()
    torch.testing.assert_close(C.grad, dense.grad)


def test_dropout_drops_the_same_weights_of_each_matrix() -> None:
    A, B, _ = given()
    v = torch.eye(N, dtype=torch.float64)
    torch.manual_seed(0)
    dropped = (A - 0.3 * B).pooled(v, dropout_p=0.5)
    dense = (A - 0.3 * B).to_dense()
    kept = dropped != 0
    torch.testing.assert_close(dropped, torch.where(kept, 2 * dense, 0.0))
    assert 0.3 < float((kept & (dense != 0)).sum() / (dense != 0).sum()) < 0.7
    with pytest.raises(BackendError, match="a matrix of the sum is transposed"):
        (A + A.mT).pooled(v, dropout_p=0.5)


def test_windows_copies_and_devices() -> None:
    A, B, _ = given()
    C = A - 0.3 * B
    part, dense = C.window(slice(5, 20), slice(0, 12)), C.to_dense()
    torch.testing.assert_close(part.to_dense(), dense[:, :, 5:20, :12])
    torch.testing.assert_close(part.sum(-2), dense[:, :, 5:20, :12].sum(-2))
    torch.testing.assert_close(copy.deepcopy(C).to_dense(), dense)
    torch.testing.assert_close(C.float().to_dense(), dense.float())
    assert C.check() < 1e-12
    eye = attlas.eye(N, dtype=torch.float64).window(slice(3, 9), slice(5, 20))
    torch.testing.assert_close(eye.to_dense(), torch.eye(N, dtype=torch.float64)[3:9, 5:20])
    torch.testing.assert_close(eye @ ROWS[5:20], torch.eye(N, dtype=torch.float64)[3:9, 5:20] @ ROWS[5:20])
    assert "0.3 * [score=ScaledDot" in repr(C)
    assert attlas.eye(3).check() == 0.0


def test_a_training_loop_with_a_learned_factor() -> None:
    """Differential attention: the factor is learned, and both matrices with it."""
    torch.manual_seed(0)
    q, k, q2, k2 = (torch.randn(1, 2, 12, 4).requires_grad_() for _ in range(4))
    factor = torch.tensor([0.1, 0.2]).reshape(2, 1, 1).requires_grad_()
    v, target = torch.randn(1, 2, 12, 3), torch.randn(1, 2, 12, 3)
    optimiser = torch.optim.SGD([q, k, q2, k2, factor], lr=0.5)
    losses = []
    for _ in range(12):
        C = attlas.attend(q, k) - factor * attlas.attend(q2, k2)
        loss = ((C @ v) - target).square().mean() + 0.1 * C.abs().sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_sums_are_saved_and_shown(tmp_path: Path) -> None:
    A, B, _ = given()
    shown = {
        "mean": (A + B) / 2,
        "factors": A * HEADS.abs() + ROWS.abs() * B,
        "symmetric": A + A.mT,
        "residual": 0.5 * A + 0.5 * attlas.eye(N, dtype=torch.float64),
        "sigmoid": attlas.attend(A.q, A.k, mask=attlas.Causal(), normalise="sigmoid"),
        "difference": A - 0.3 * B,
    }
    for name, C in shown.items():
        atlas_of(C).save(tmp_path / name)
        (entry,) = attlas.load(tmp_path / name).entries
        assert json.loads((tmp_path / name / "atlas.json").read_text())["version"] == 3
        assert entry.matrix is not None
        torch.testing.assert_close(entry.matrix.to_dense(), C.to_dense())
        torch.testing.assert_close(stats.column_mass(entry.matrix), stats.column_mass(C))
        export(C, tmp_path / "page.html")
        head = Head(C[:1, 1:2])
        np.testing.assert_allclose(head.cells(range(3, 9), range(2, 30)), C[0, 1, 3:9, 2:30].float(), atol=1e-7)
        table = head.blocks(range(N), range(N), 8)
        np.testing.assert_allclose(table.sum.sum(), float(C[0, 1].sum()), rtol=1e-5)
        assert head.band(range(8), 8).column_mass.shape == (N,)
    assert "A" in (A - B).plot(title="A").get_suptitle()
    atlas_of(A).save(tmp_path / "softmax")  # older versions of attlas read it
    assert json.loads((tmp_path / "softmax" / "atlas.json").read_text())["version"] == 2


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    A, B, _ = given()
    atlas_of((A + B) / 2).save(tmp_path / "run.atlas")
    whole = json.loads((tmp_path / "run.atlas" / "atlas.json").read_text())["entries"][0]["matrix"]
    changes: list[tuple[dict[str, Any], str]] = [
        (whole | {"weights": "Sum"}, "a kind named 'Sum'"),
        (whole | {"settings": {"parts": []}}, "settings that are none of a Combination"),
        (whole | {"settings": {"terms": [["half", *whole["settings"]["terms"][0][1:]]]}}, "a factor is a str"),
    ]
    for matrix, found in changes:
        reseal(tmp_path / "run.atlas", lambda content, matrix=matrix: content["entries"][0].update(matrix=matrix))
        with pytest.raises(attlas.RecordingError, match=found):
            attlas.load(tmp_path / "run.atlas")
