"""The gradients of the kernels against those of the definition in float64: dtypes, masks, layouts, values, threads."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.native.conftest import NATIVE, each_set, laid_out, needs_kernels, tokens
from torch import Tensor

import attlas
from attlas import Plan, stats
from attlas.engine.autodiff import graph
from attlas.engine.backends import reference
from attlas.engine.backends.native import library
from attlas.engine.backends.sdpa import Sdpa
from attlas.engine.backends.tiled import Tiled

# The share of the largest gradient by which one may be off; with 16 bits the output is rounded too.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SIZES = [
    (1, 1, 1, 1),
    (63, 1, 1, 5),
    (1, 63, 7, 1),
    (130, 63, 33, 32),
    (63, 130, 64, 31),
    (12, 31, 256, 3),
    (13, 70, 3, 256),
]
MASKS: dict[str, Callable[[int, int], Any]] = {
    "none": lambda m, n: None,
    "causal": lambda m, n: attlas.Causal(),
    "window": lambda m, n: attlas.Window(9, 4, 0),
    "padding": lambda m, n: attlas.Padding(torch.tensor([n, n // 3])),
    "documents": lambda m, n: attlas.Documents(torch.arange(n) // 9, torch.arange(m) // 11),
    "cells": lambda m, n: torch.rand(m, n) < 0.5,
    "cells of heads": lambda m, n: torch.rand(2, 4, m, n) < 0.5,
    "function": lambda m, n: attlas.from_function(lambda b, h, i, j: (i + j + h) % 3 != 0),
    "nothing": lambda m, n: torch.zeros(m, n, dtype=torch.bool),
}


@pytest.fixture
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a backward fail that is not done by the kernels."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the kernels were to do this")

    for backend in (Sdpa, Tiled):
        monkeypatch.setattr(backend, "backward", refuse)


def exact(A: attlas.AttentionMatrix, v: Tensor, slope: Tensor) -> list[Tensor]:
    """Return the gradients of q, k, v and the sink in float64, by autograd through the definition."""
    problem = reference.in_float64(A.problem)
    leaves = [t.detach().requires_grad_() for t in (problem.q, problem.k, v.double())]
    sink = None if problem.sink is None else problem.sink.detach().requires_grad_()
    weights = reference.dense(
        attlas.attend(leaves[0], leaves[1], problem.score, problem.mask, sink=sink).problem
    ).weights
    out = weights @ leaves[2].repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
    leaves += [] if sink is None else [sink]
    return list(torch.autograd.grad(out, leaves, slope.double().expand_as(out), allow_unused=True))


def check(
    A: attlas.AttentionMatrix,
    v: Tensor,
    leaves: list[Tensor],
    slope: Tensor,
    tolerance: float | None = None,
    known: list[Tensor] | None = None,
) -> None:
    tolerance = tolerance or TOLERANCE[v.dtype]
    found = torch.autograd.grad(A @ v, leaves, slope)
    for one, other, leaf in zip(found, known or exact(A, v, slope), leaves, strict=True):
        assert one.dtype == leaf.dtype
        scale = max(float(other.abs().max()), 0.2)  # a gradient of 0 is the difference of two numbers of about 1
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * scale)


@each_set
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_of_every_dtype(
    name: str, dtype: torch.dtype, use: Callable[[str], None], only_kernels: None
) -> None:
    use(name)
    for m, n, d, e in SIZES:
        q, k, v = leaves = [t.requires_grad_() for t in tokens(m, n, d, e, dtype)]
        slope = torch.randn(2, 4, m, e, dtype=dtype)
        check(attlas.attend(q, k, plan=NATIVE), v, leaves, slope)
        sink = torch.randn(4).to(dtype).requires_grad_()
        check(attlas.attend(q, k, mask=attlas.Causal(), sink=sink, plan=NATIVE), v, [*leaves, sink], slope)
        if dtype is not torch.float64:
            check(attlas.attend(q, k, score=attlas.SoftCap(attlas.ScaledDot(), 2.0), plan=NATIVE), v, leaves, slope)


@each_set
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_under_every_mask(name: str, mask: str, use: Callable[[str], None], only_kernels: None) -> None:
    use(name)
    for m, n in ((40, 63), (150, 150), (5, 300)):
        q, k, v = leaves = [t.requires_grad_() for t in tokens(m, n, 9, 20, torch.float32)]
        A = attlas.attend(q, k, mask=MASKS[mask](m, n), plan=NATIVE)
        check(A, v, leaves, torch.randn(2, 4, m, 20))


@each_set
@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-30, 8.0])
def test_any_scale(name: str, scale: float, use: Callable[[str], None], only_kernels: None) -> None:
    use(name)
    q, k, v = leaves = [t.requires_grad_() for t in tokens(20, 63, 16, 8, torch.float32)]
    check(attlas.attend(q, k, score=attlas.ScaledDot(scale), plan=NATIVE), v, leaves, torch.randn(2, 4, 20, 8), 1e-4)


@pytest.mark.parametrize("name", ["avx512", "amx"])
def test_gradients_of_large_matrices(name: str, use: Callable[[str], None], only_kernels: None) -> None:
    """More than one task, block and panel of a mask."""
    use(name)
    for q, k, v, mask, slope, wanted in large():
        check(attlas.attend(q, k, mask=mask, plan=NATIVE), v, [q, k, v], slope, known=wanted)


@functools.cache
def large() -> list[tuple[Any, ...]]:
    """Return tokens, a mask, a slope and the gradients of the definition, which the instruction sets share."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for mask in (None, attlas.Causal(), torch.rand(600, 1300) < 0.3):
            q, k, v = [t.requires_grad_() for t in tokens(600, 1300, 64, 48, dtype, (2, 1, 1))]
            slope = torch.randn(2, 2, 600, 48, dtype=dtype)
            found.append((q, k, v, mask, slope, exact(attlas.attend(q, k, mask=mask), v, slope)))
    return found


@pytest.mark.parametrize("name", ["avx512", "amx"])
def test_gradients_are_as_exact_as_those_of_torch(name: str, use: Callable[[str], None], only_kernels: None) -> None:
    use(name)
    q, k, v = leaves = [t.requires_grad_() for t in tokens(700, 900, 64, 64, torch.float32, (2, 2, 2))]
    slope = torch.randn(2, 2, 700, 64)
    A = attlas.attend(q, k, plan=NATIVE)
    mine = torch.autograd.grad(A @ v, leaves, slope)
    torchs = torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, k, v), leaves, slope)
    for one, other, wanted in zip(mine, torchs, exact(A, v, slope), strict=True):
        assert (one - wanted).square().mean() <= 2 * (other - wanted).square().mean()


@needs_kernels
@given(data=st.data())
def test_any_layout(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = data.draw
    monkeypatch.setenv("ATTLAS_NATIVE", draw(st.sampled_from(library.runnable())))
    m, n, d, e = (draw(st.integers(1, top)) for top in (140, 140, 40, 40))
    batch, group, key_heads = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads = group * key_heads
    value_heads = draw(st.sampled_from([1, key_heads, heads]))
    shapes = (batch, heads, m, d), (batch, key_heads, n, d), (batch, value_heads, n, e)
    q, k, v = leaves = [laid_out(draw, *shape).requires_grad_() for shape in shapes]
    mask = None if draw(st.booleans()) else torch.rand(m, n) < draw(st.sampled_from([0.0, 0.02, 0.5]))
    sink = torch.randn(heads).requires_grad_() if draw(st.booleans()) else None
    score = draw(st.sampled_from([None, attlas.ScaledDot(-0.5), attlas.SoftCap(attlas.ScaledDot(), 3.0)]))
    A = attlas.attend(q, k, score=score, mask=mask, sink=sink, plan=NATIVE)
    check(A, v, leaves + ([] if sink is None else [sink]), laid_out(draw, batch, heads, m, e), 1e-4)


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "subnormal": lambda t: t * 1e-40,
    "large": lambda t: t * 1e6,
    "huge": lambda t: t * 1e25,
    "infinite": lambda t: t.clone().index_fill_(-1, torch.tensor([0]), math.inf),
    "NaN": lambda t: t.clone().index_fill_(-2, torch.tensor([1]), math.nan),
}


@each_set
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["q", "k", "v", "slope"])
def test_any_value(name: str, value: str, which: int, use: Callable[[str], None]) -> None:
    """What is not finite, or too large for the kernels, gives what the tiles give."""
    use(name)
    given = [torch.randn(1, 2, size, 4) for size in (18, 70, 70, 18)]
    given[which] = VALUES[value](given[which])
    *leaves, slope = given
    q, k, v = (t.requires_grad_() for t in leaves)
    outs = [attlas.attend(q, k, mask=attlas.Causal(), plan=Plan(backend)) @ v for backend in ("native", "tiled")]
    # How large a gradient may be: differences of rounded numbers are exact up to that. Subnormal numbers count as 0.
    most = [max(1.0, float(torch.nan_to_num(t.detach(), 0, 0, 0).abs().max())) for t in given]
    size = iter((most[1] * most[2] * most[3], most[0] * most[2] * most[3], most[3]))
    for one, other in zip(*(torch.autograd.grad(out, leaves, slope) for out in outs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * next(size), equal_nan=True)


@needs_kernels
def test_any_number_of_threads_gives_the_same(threads: None, use: Callable[[str], None], only_kernels: None) -> None:
    for name in library.runnable():
        use(name)
        # With two threads one takes all keys of a head in turn, with three they share them.
        leaves = [t.requires_grad_() for t in tokens(300, 1300, 64, 33, torch.float32, (8, 4, 4))]
        slope, results = torch.randn(2, 8, 300, 33), []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            A = attlas.attend(leaves[0], leaves[1], mask=attlas.Causal(), plan=NATIVE)
            results.append(torch.autograd.grad(A @ leaves[2], leaves, slope))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def learned_places(m: int, n: int, heads: int, batch: int = 2) -> dict[str, tuple[attlas.Score, list[Tensor]]]:
    """Return scores of places with a tensor that gets a gradient: distances, gates, pairs that are shared or not."""
    relative = attlas.RelativeBias(heads, 40)
    gates = (-torch.rand(batch, heads, n)).requires_grad_()
    shapes = {"pairs": (m, n), "pairs of heads": (heads, m, n), "pairs of batches": (batch, 1, m, n)}
    shapes |= {"pairs of all": (batch, heads, m, n), "queries": (heads, m, 1), "keys": (batch, 1, 1, n)}
    tensors = {name: torch.randn(shape).requires_grad_() for name, shape in shapes.items()}
    scores: dict[str, tuple[attlas.Score, list[Tensor]]] = {
        "distances": (relative, [relative.weight]),
        "gates": (attlas.Forget(gates), [gates]),
    }
    return scores | {name: (attlas.TensorBias(t), [t]) for name, t in tensors.items()}


@needs_kernels
def test_gradients_of_places_from_any_number_of_threads(
    threads: None, use: Callable[[str], None], only_kernels: None
) -> None:
    torch.manual_seed(0)
    leaves = [t.requires_grad_() for t in tokens(300, 1300, 64, 33, torch.float32, (8, 4, 4))]
    slope = torch.randn(2, 8, 300, 33)
    for name in library.runnable()[-1:]:
        use(name)
        for score, of_score in learned_places(300, 1300, 8).values():
            results = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                A = attlas.attend(*leaves[:2], score=attlas.ScaledDot() + score, mask=attlas.Causal(), plan=NATIVE)
                results.append(torch.autograd.grad(A @ leaves[2], [*leaves, *of_score], slope))
            for other in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@each_set
def test_gradients_of_places_of_several_calls(
    name: str, use: Callable[[str], None], small_row_blocks: None, only_kernels: None
) -> None:
    """A mask of cells is written out for some rows at a time, each of which is a call."""
    use(name)
    torch.manual_seed(0)
    q, k, v = leaves = [t.requires_grad_() for t in tokens(50, 70, 5, 3, torch.float64)]
    slope, mask = torch.randn(2, 4, 50, 3, dtype=torch.float64), torch.rand(2, 4, 50, 70) < 0.5
    for score, of_score in learned_places(50, 70, 4).values():
        A = attlas.attend(q, k, score=attlas.ScaledDot() + score.double(), mask=mask, plan=NATIVE)
        found = torch.autograd.grad(A @ v, [*leaves, *of_score], slope)
        weights = graph.dense(A.problem).weights
        wanted = torch.autograd.grad(weights @ v.repeat_interleave(2, dim=1), [*leaves, *of_score], slope)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class _HalfHidden(attlas.Score):
    """A score of places whose `bias` has no graph to one of its tensors."""

    positional = True

    def __init__(self, t: Tensor, u: Tensor) -> None:
        super().__init__()
        self.t, self.u = t, u

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return (self.t[at.j] + self.u[at.i]).to(at.dtype)

    def bias(self, at: attlas.Tile) -> attlas.scores.Bias:
        t, u = self.t[at.columns.start : at.columns.stop], self.u[at.rows.start : at.rows.stop]
        return attlas.scores.Bias(key=t.view(1, 1, -1), query=u.detach().view(1, 1, -1))


@needs_kernels
def test_a_graph_that_a_bias_hides_is_that_of_tiles() -> None:
    q, k, v = (torch.randn(1, 2, size, 4) for size in (80, 90, 90))
    t, u, sink = torch.randn(90).requires_grad_(), torch.randn(80).requires_grad_(), torch.zeros(2)
    found, wanted = (
        torch.autograd.grad(
            (attlas.attend(q, k, score=attlas.ScaledDot() + _HalfHidden(t, u), sink=sink, plan=plan) @ v)
            .square()
            .sum(),
            (t, u),
        )
        for plan in (NATIVE, Plan("tiled"))
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("shape", [(0, 5, 3, 2), (5, 0, 3, 2), (5, 5, 0, 2), (5, 5, 3, 0)], ids=str)
def test_nothing_to_compute(shape: tuple[int, int, int, int]) -> None:
    m, n, d, e = shape
    leaves = [torch.randn(1, 2, *size, requires_grad=True) for size in ((m, d), (n, d), (n, e))]
    out = attlas.attend(leaves[0], leaves[1], score=attlas.SoftCap(attlas.ScaledDot(1.0), 2.0)) @ leaves[2]
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == leaf.shape
        assert bool(torch.isfinite(grad).all())


@needs_kernels
def test_a_learned_projection_is_differentiated_through_a_cap(only_kernels: None) -> None:
    """The kernels speak of the projected tokens; autograd goes on from there."""
    inner = attlas.Bilinear(6, 9)
    q, k, v = torch.randn(30, 6), torch.randn(50, 9), torch.randn(50, 4)
    wanted = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), *inner.parameters()]
    score, slope = attlas.SoftCap(inner, 2.0), torch.randn(30, 4)
    pair = [attlas.attend(q, k, score=score, plan=Plan(backend)) @ v for backend in ("native", "reference")]
    for one, other in zip(*(torch.autograd.grad(out, wanted, slope) for out in pair), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@each_set
@pytest.mark.parametrize("mask", ["none", "causal", "cells of heads", "nothing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_statistics_and_the_output_together(
    name: str, mask: str, dtype: torch.dtype, use: Callable[[str], None], only_kernels: None
) -> None:
    """Terms of rows and of columns beside the output, with a sink, grouped heads and a cap, against the definition."""
    use(name)
    m, n = 140, 150
    q, k, v = (torch.randn(2, heads, size, 24).to(dtype) for heads, size in ((4, m), (2, n), (2, n)))
    sink, allowed = torch.randn(4), MASKS[mask](m, n)
    asked = [stats.Entropy(), stats.RowMass(), stats.ColumnMass()]
    asked += [stats.LogitMoments()] if mask in ("none", "causal", "window", "padding") else []
    found = []
    for own, with_sink in ((dtype, True), (torch.float64, True), (dtype, False), (torch.float64, False)):
        leaves = [t.to(own).requires_grad_() for t in (q, k, v)]
        extra = sink.to(own if own is torch.float64 else torch.float32).requires_grad_() if with_sink else None
        cap = None if dtype is torch.float64 else attlas.SoftCap(attlas.ScaledDot(), 2.0)
        A = attlas.attend(
            *leaves[:2], score=cap, mask=allowed, sink=extra, plan=NATIVE if own is dtype else Plan("tiled")
        )
        every = [*asked, *([] if with_sink else [stats.EffectiveKeys()]), stats.Pooled(leaves[2])]
        results = A.collect(*every) if own is dtype else graph.collect(A.problem, every)
        flat = [t.double() for r in results for t in (r if isinstance(r, tuple) else (r,))]
        generator = torch.Generator().manual_seed(1)
        loss = sum((t * torch.randn(t.shape, generator=generator, dtype=torch.float64)).sum() for t in flat)
        found.append(torch.autograd.grad(loss, [*leaves, *([] if extra is None else [extra])]))
    for kernel, exact in (found[:2], found[2:]):
        for a, b in zip(kernel, exact, strict=True):
            assert bool(a.isfinite().all())
            assert float((a.double() - b).abs().max()) <= TOLERANCE[dtype] * float(b.abs().max()) + 1e-30
