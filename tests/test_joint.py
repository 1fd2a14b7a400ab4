"""Norms of what heads bring together, and their shares of the output, lazy: equal to vectors that are written out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attlas
from attlas import stats
from attlas.errors import DtypeError, ShapeError
from attlas.matrix import AttentionMatrix
from attlas.matrix.kinds.joint import JointNorms, factors_of
from attlas.matrix.kinds.output_shares import output_shares
from attlas.recording.atlas import Atlas, Entry

BATCH, HEADS, GROUPS, M, N, E, WIDTH = 2, 6, 3, 13, 17, 4, 10
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tokens with grouped heads, one key whose values are 0, and two heads that cancel."""
    q, k = numbers(BATCH, HEADS, M, 8, seed=0, dtype=dtype), numbers(BATCH, GROUPS, N, 8, seed=1, dtype=dtype)
    v = numbers(BATCH, GROUPS, N, E, seed=2, dtype=dtype)
    v[:, :, 3] = 0.0
    outward = numbers(HEADS, E, WIDTH, seed=3, dtype=dtype)
    outward[1] = -0.9 * outward[0]  # of one group: they write nearly opposite vectors
    stream, bias = 3 * numbers(BATCH, M, WIDTH, seed=4, dtype=dtype), numbers(WIDTH, seed=5, dtype=dtype)
    return {"q": q, "k": k, "v": v, "outward": outward, "stream": stream, "bias": bias}


def brought(t: dict[str, Tensor], weights: Tensor) -> Tensor:
    """Return the vectors that keys bring to queries, written out, (batch, m, n, width)."""
    values = t["v"].double().repeat_interleave(HEADS // GROUPS, 1)
    return torch.einsum("bhij,bhjd,hdD->bijD", weights.double(), values, t["outward"].double())


def joint(t: dict[str, Tensor], mask: Any) -> tuple[AttentionMatrix, AttentionMatrix, Tensor, Tensor]:
    """Return the norms and the shares, lazy, and both written out."""
    A = attlas.attend(t["q"], t["k"], mask=mask)
    norms = JointNorms(A.weights, factors_of(t["v"], t["outward"]))
    shares = output_shares(norms, t["v"], t["outward"], t["stream"], t["bias"])
    vectors, stream = brought(t, A.to_dense()), t["stream"].double()
    lengths = vectors.norm(dim=-1).unsqueeze(1)
    y = stream + vectors.sum(2) + t["bias"].double()
    rows = torch.arange(M)
    vectors[:, rows, rows + N - M] += stream
    near = (y.norm(dim=-1, keepdim=True) - (y.unsqueeze(2) - vectors).norm(dim=-1)).clamp_min(0)
    return AttentionMatrix(norms), AttentionMatrix(shares), lengths, (near / near.sum(-1, keepdim=True)).unsqueeze(1)


def window(A: Any) -> Any:
    """Return some rows and columns, of a lazy matrix as one."""
    return A.window(slice(2, 9), slice(1, 7)) if isinstance(A, AttentionMatrix) else A[..., 2:9, 1:7]


MASKS: dict[str, Any] = {
    "none": None,
    "causal": attlas.Causal(),
    "padding": attlas.Causal() & attlas.Padding(torch.tensor([N, N - 3])),
    "another for a head": attlas.masks.Heads({2: attlas.Window(3, 0)}, default=attlas.Causal()),
}
READS: dict[str, Callable[[Any], Any]] = {
    "row": lambda A: A[:, 0, 3],
    "cells": lambda A: A[1, 0, 3:7, [2, 5]],
    "product": lambda A: A @ numbers(BATCH, 1, N, 3, seed=6, dtype=A.dtype),
    "transposed product": lambda A: A.mT @ numbers(BATCH, 1, M, 3, seed=7, dtype=A.dtype),
    "row mass": lambda A: A.sum(-1),
    "column mass": lambda A: A.sum(-2),
    "largest": lambda A: A.amax(-1),
    "top": lambda A: A.topk(3).values,
    "window": lambda A: window(A).sum(-1),
    "two of one head": lambda A: A[:, [0, 0]].sum(-1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_equal_the_written_out_vectors(mask: str, dtype: torch.dtype) -> None:
    norms, shares, lengths, parts = joint(inputs(dtype), MASKS[mask])
    exact = TOLERANCES[dtype]
    for A, wanted in ((norms, lengths), (shares, parts)):
        torch.testing.assert_close(A.to_dense().double(), wanted, rtol=exact, atol=exact * float(wanted.max()))
        assert A.check() < exact * max(float(wanted.max()), 1.0)
        for name, read in READS.items():
            found, expected = read(A), read(wanted.to(dtype))
            torch.testing.assert_close(found, expected, rtol=10 * exact, atol=10 * exact, msg=name)
    torch.testing.assert_close(shares.sum(-1), torch.ones(BATCH, 1, M, dtype=dtype))


def test_heads_that_cancel_have_a_precise_norm() -> None:
    t = inputs(torch.float32)
    # Each of three groups has two heads that differ by a ten-thousandth of what they write.
    t["outward"][1::2] = -(1 - 1e-4) * t["outward"][::2]
    t["q"] = t["q"][:, ::2].repeat_interleave(2, 1)
    norms, _, lengths, _ = joint(t, attlas.Causal())
    size = float(
        brought({**t, "outward": t["outward"].abs()}, attlas.attend(t["q"], t["k"], mask=attlas.Causal()).to_dense())
        .norm(dim=-1)
        .max()
    )
    assert float(lengths.max()) < 2e-4 * size
    assert float((norms.to_dense().double() - lengths).abs().max()) < 3e-7 * size


def test_gradients_reach_tokens_values_and_the_map_behind_the_heads() -> None:
    t = inputs(torch.float64)
    del t["stream"], t["bias"]
    t["v"][:, :, 3] = 1.0  # a norm of 0 has no gradient
    leaves = {name: x.requires_grad_() for name, x in t.items()}
    A = attlas.attend(leaves["q"], leaves["k"], mask=attlas.Causal())
    norms = AttentionMatrix(JointNorms(A.weights, factors_of(leaves["v"], leaves["outward"])))
    lengths = brought(leaves, A.to_dense()).norm(dim=-1).unsqueeze(1)
    slope = numbers(BATCH, 1, M, N, seed=8)
    v = numbers(BATCH, 1, N, 3, seed=9)
    for found, wanted in (
        ((norms[:, :, :, :] * slope).sum(), (lengths * slope).sum()),
        ((norms @ v).square().sum(), (lengths @ v).square().sum()),
        (norms.collect(stats.ColumnMass())[0].square().sum(), lengths.sum(-2).square().sum()),
    ):
        pairs = (torch.autograd.grad(loss, [*leaves.values()], retain_graph=True) for loss in (found, wanted))
        for name, a, b in zip(leaves, *pairs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7, msg=name)


def test_what_norms_lack_is_refused_by_name() -> None:
    norms, shares, _, parts = joint(inputs(torch.float64), attlas.Causal())
    with pytest.raises(ShapeError, match=r"Entropy\(\): weights must be shares"):
        stats.entropy(norms)
    torch.testing.assert_close(stats.entropy(shares), -torch.special.xlogy(parts, parts).sum(-1))
    for A in (norms, shares):
        with pytest.raises(DtypeError, match="these weights are none"):
            A.lse  # noqa: B018
        assert "6 heads together" in repr(A)
    with pytest.raises(ShapeError, match=r"A\.window"):
        norms.window(slice(0, M + 5))


def test_saved_and_loaded(tmp_path: Path) -> None:
    norms, shares, lengths, parts = joint(inputs(torch.float64), attlas.Causal())
    entries = [
        Entry(f"layers.{n}", n, "self", 0, (0,), (N - M, N), 0, (BATCH, 1, M, N), A)
        for n, A in enumerate((norms, shares))
    ]
    Atlas(entries).save(tmp_path / "run.atlas")
    loaded = attlas.load(tmp_path / "run.atlas")
    torch.testing.assert_close(loaded[0].to_dense(), lengths)
    torch.testing.assert_close(loaded[1].to_dense(), parts)


def test_it_is_in_linear_memory() -> None:
    n, heads, size = 4096, 8, 16
    q, v = torch.randn(1, heads, n, size), torch.randn(1, heads, n, size)
    outward = torch.randn(heads, size, 64)
    A = attlas.attend(q, q, mask=attlas.Causal())
    norms = JointNorms(A.weights, factors_of(v, outward))
    assert norms.factors.nbytes == n * heads * heads * 4
    row = torch.einsum("hj,hjd,hdD->jD", A[0, :, n - 1], v[0], outward).norm(dim=-1)
    torch.testing.assert_close(AttentionMatrix(norms)[0, 0, n - 1], row, rtol=1e-5, atol=1e-6)
