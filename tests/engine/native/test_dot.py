"""The output of the kernels against its definition in float64: dtypes, memory layouts, values, masks, threads."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.native.conftest import NATIVE, TOLERANCE, check, definition, each_set, laid_out, needs_kernels, tokens
from torch import Tensor

import attlas
from attlas import BackendError, Plan, stats
from attlas.engine.backends import reference
from attlas.engine.backends.native import library

SIZES = [
    (1, 1, 1, 1),
    (63, 1, 1, 5),
    (1, 63, 7, 1),
    (130, 63, 33, 32),
    (63, 130, 64, 31),
    (12, 31, 512, 3),
    (13, 70, 3, 512),
]
WIDE = [(1000, 1000, 64, 64), (1000, 130, 80, 17), (130, 1000, 128, 64)]


@each_set
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_output_of_every_dtype(name: str, dtype: torch.dtype, use: Callable[[str], None]) -> None:
    use(name)
    for m, n, d, e in SIZES:
        q, k, v = tokens(m, n, d, e, dtype, (4, 2, 1))
        check(attlas.attend(q, k, plan=NATIVE), v)
        check(attlas.attend(q, k, mask=attlas.Causal(), sink=torch.randn(4).to(dtype), plan=NATIVE), v)
        if dtype is not torch.float64:
            check(attlas.attend(q, k, score=attlas.SoftCap(attlas.ScaledDot(), 2.0), plan=NATIVE), v)


@pytest.mark.parametrize("name", ["avx512", "amx"])
@pytest.mark.parametrize("size", WIDE, ids=str)
def test_output_of_large_matrices(name: str, size: tuple[int, ...], use: Callable[[str], None]) -> None:
    use(name)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = tokens(*size, dtype, (1, 1, 1))
        check(attlas.attend(q, k, plan=NATIVE), v)
        check(attlas.attend(q, k, mask=attlas.Causal(), plan=NATIVE), v)


KEYS: dict[str, Any] = {"all": None, "causal": attlas.Causal(), "window": attlas.Window(400, 9, 3), "cells": "cells"}


@functools.cache
def long_keys(longest: float, mask: str) -> list[tuple[dict[str, Any], Tensor, tuple[Tensor, Tensor], Tensor]]:
    """Return what is asked, the values, the definition and the entropy, which all instruction sets share."""
    q, k, v = tokens(307, 1300, 32, 24, torch.float32, (2, 1, 1))
    k[..., 700:900, :] *= longest
    q[..., 50:60, :] = 0
    cells = torch.rand(307, 1300) < 0.9 if mask == "cells" else KEYS[mask]
    found = []
    for sink in (None, torch.tensor([3.0, -1.0])):
        asked = {"q": q, "k": k, "mask": cells, "sink": sink}
        exact = reference.dense(reference.in_float64(attlas.attend(**asked).problem))
        out = exact.weights @ v.double().repeat_interleave(2, dim=1)
        found.append((asked, v, (out, exact.lse), torch.special.entr(exact.weights).sum(-1)))
    return found


@each_set
@pytest.mark.parametrize("longest", [1, 5, 50])
@pytest.mark.parametrize("mask", KEYS)
def test_keys_of_any_length(name: str, longest: float, mask: str, use: Callable[[str], None]) -> None:
    """With AVX2 no logit is compared where the lengths of queries and keys bound it, as after the first keys here."""
    use(name)
    for asked, v, known, wanted in long_keys(longest, mask):
        A, same = (attlas.attend(**asked, plan=NATIVE) for _ in range(2))
        check(A, v, 1e-4, known)
        for found in (A, same):  # the log-sum-exp of one is known
            (entropy,) = found.collect(stats.Entropy())
            torch.testing.assert_close(entropy.double(), wanted, rtol=1e-4, atol=1e-4)


@each_set
@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-30, 30.0, 1e4])
def test_any_scale(name: str, scale: float, use: Callable[[str], None]) -> None:
    use(name)
    q, k, v = tokens(20, 63, 16, 8, torch.float64)
    check(attlas.attend(q, k, score=attlas.ScaledDot(scale), plan=NATIVE), v, 1e-8 if scale == 1e4 else None)
    q, k, v = (t.float() for t in (q, k, v))
    if abs(scale) < 100:  # beyond, float32 itself is too coarse for a comparison
        check(attlas.attend(q, k, score=attlas.ScaledDot(scale), plan=NATIVE), v, 1e-4)


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "equal": lambda t: torch.full_like(t, 0.3),
    "subnormal": lambda t: t * 1e-40,
    "tiny": lambda t: t * 1e-20,
    "large": lambda t: t * 1e8,
    "huge": lambda t: t * 1e30,
    "infinite": lambda t: t.clone().index_fill_(-1, torch.tensor([0]), math.inf),
    "-infinite": lambda t: t.clone().index_fill_(-1, torch.tensor([0]), -math.inf),
    "NaN": lambda t: t.clone().index_fill_(-2, torch.tensor([1]), math.nan),
    "NaN at the end": lambda t: t.flatten().index_fill(0, torch.tensor([t.numel() - 1]), math.nan).view_as(t),
}


@each_set
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_any_value(name: str, value: str, which: int, use: Callable[[str], None]) -> None:
    """What is not finite, or too large for the kernels, gives what the tiles give."""
    use(name)
    given = [torch.randn(1, 2, size, 4) for size in (18, 530, 530)]
    given[which] = VALUES[value](given[which])
    q, k, v = given
    mask = attlas.Causal()
    found, tiles = (attlas.attend(q, k, mask=mask, plan=Plan(backend)) for backend in ("native", "tiled"))
    torch.testing.assert_close(found @ v, tiles @ v, rtol=1e-4, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(found.lse, tiles.lse, rtol=1e-5, atol=1e-5, equal_nan=True)
    mass = [A.collect(stats.ColumnMass())[0] for A in (found, tiles)]
    torch.testing.assert_close(*mass, rtol=1e-4, atol=1e-4, equal_nan=True)


@each_set
@pytest.mark.parametrize("size", [1e4, 3e4, 1e6])
def test_logits_so_large_that_neighbours_lie_nats_apart(name: str, size: float, use: Callable[[str], None]) -> None:
    """The largest logit so far, rounded, may lie below a logit by more than float32 has exponents for."""
    use(name)
    q, k, v = torch.randn(300, 32) * size, torch.randn(350, 32) * size, torch.randn(350, 3)
    out = attlas.attend(q, k, plan=NATIVE) @ v
    torch.testing.assert_close(out.double(), attlas.attend(q.double(), k.double()) @ v.double(), rtol=1e-5, atol=1e-5)


@needs_kernels
@given(data=st.data())
def test_any_layout(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = data.draw
    monkeypatch.delenv("ATTLAS_NATIVE", raising=False)
    monkeypatch.setenv("ATTLAS_NATIVE", draw(st.sampled_from(library.runnable())))
    m, n, d, e = (draw(st.integers(1, top)) for top in (40, 80, 40, 40))
    batch, group, key_heads = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    value_heads = draw(st.sampled_from([1, key_heads, group * key_heads]))
    q, k = laid_out(draw, batch, group * key_heads, m, d), laid_out(draw, batch, key_heads, n, d)
    v = laid_out(draw, batch, value_heads, n, e)
    kind = draw(st.sampled_from(["none", "causal", "window", "cells", "cells of heads", "empty"]))
    mask: Any = {"none": None, "causal": attlas.Causal(), "window": attlas.Window(3, 2, 0)}.get(kind)
    if kind.startswith("cells"):
        mask = torch.rand(*((batch, group * key_heads) if "heads" in kind else ()), m, n) < 0.5
        mask[..., n // 2 :] = False  # empty tiles
    if kind == "empty":
        mask = torch.zeros(m, n, dtype=torch.bool)
    sink = torch.randn(group * key_heads) if draw(st.booleans()) else None
    score = draw(st.sampled_from([None, attlas.ScaledDot(-0.5), attlas.SoftCap(attlas.ScaledDot(), 3.0)]))
    A = attlas.attend(q, k, score=score, mask=mask, sink=sink, plan=NATIVE)
    check(A, v)
    weights = reference.dense(reference.in_float64(A.problem)).weights
    mass, largest, columns = A.collect(stats.RowMass(), stats.MaxWeight(), stats.ColumnMass())
    for found, wanted in ((mass, weights.sum(-1)), (largest, weights.amax(-1)), (columns, weights.sum(-2))):
        torch.testing.assert_close(found.double(), wanted, rtol=5e-5, atol=5e-5)


@needs_kernels
def test_any_number_of_threads_gives_the_same(threads: None, use: Callable[[str], None]) -> None:
    for name in library.runnable():
        use(name)
        q, k, v = tokens(300, 700, 64, 33, torch.float32)
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            A = attlas.attend(q, k, mask=attlas.Causal(), plan=NATIVE)
            asked = (
                stats.Entropy(), stats.ColumnMass(), stats.ColumnMax(), stats.Offsets(), stats.Picture(5, 6),
                stats.Coverage(),
            )  # fmt: skip
            results.append([torch.nan_to_num(t) for t in (A @ v, A.lse, *A.collect(*asked), *A.topk(4))])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_kernels
def test_other_python_threads_run_meanwhile() -> None:
    """With the GIL held the other thread could not look while a call is under way."""
    q, k, v = tokens(2500, 2500, 64, 64, torch.float32, (2, 2, 2))
    under_way, seen, inside = [False], [False], threading.Event()

    def look() -> None:
        inside.wait()
        seen[0] = under_way[0]

    original = library.Kernels.call

    def watched(*args: Any, **fields: Any) -> int:
        under_way[0] = True
        inside.set()
        status = original(*args, **fields)
        under_way[0] = False
        return status

    interval = sys.getswitchinterval()
    looker = threading.Thread(target=look)
    looker.start()
    try:
        sys.setswitchinterval(1000)  # nobody is made to give the lock away
        library.Kernels.call = watched
        attlas.attend(q, k, plan=NATIVE) @ v
    finally:
        library.Kernels.call = original
        sys.setswitchinterval(interval)
        inside.set()
        looker.join()
    assert seen[0]


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="/proc says on Linux how much memory a process has held")
def test_memory_is_linear() -> None:
    code = """
import torch, attlas
from attlas import stats
def peak():
    return int(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1]) >> 10
def look(m):
    q, k, v = (torch.randn(m, 16, requires_grad=True) for _ in range(3))
    out = attlas.attend(q, k, mask=attlas.Causal(), plan=attlas.Plan('native')) @ v
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    A = attlas.attend(q.detach(), k.detach(), mask=attlas.Causal(), plan=attlas.Plan('native'))
    A @ v.detach()
    A.collect(stats.Entropy(), stats.TopK(8), stats.EffectiveKeys(), stats.MaxLogit(), stats.LogitMoments(),
              stats.Coverage(), stats.ColumnMass(), stats.ColumnMax(), stats.Offsets(), stats.Picture(64, 64))
look(200)
before = peak()
look(12_000)
print(peak() - before)
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(found.stdout) < 110  # MiB; a matrix of these sizes takes 549


@needs_kernels
def test_autocast_and_vmap() -> None:
    q, k, v = tokens(40, 63, 16, 8, torch.float32)
    want = definition(attlas.attend(q, k), v)[0]
    A = attlas.attend(q, k, plan=NATIVE)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # nothing is rounded but the output
        torch.testing.assert_close(A @ v, want.bfloat16(), rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(A.to_dense().sum(-1), torch.ones(2, 4, 40), rtol=2e-5, atol=2e-5)
    found = torch.func.vmap(attlas.attention)(q, *(t.repeat_interleave(4 // t.shape[1], 1) for t in (k, v)))
    torch.testing.assert_close(found.double(), want, rtol=2e-5, atol=2e-5)


def test_a_plan_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTLAS_NATIVE", "none")
    A = attlas.attend(torch.randn(3, 4), torch.randn(5, 4), plan=NATIVE)
    with pytest.raises(BackendError) as caught:
        A @ torch.randn(5, 2)
    assert "found: native does not run: ATTLAS_NATIVE=none turns the kernels off" in str(caught.value)


@each_set
def test_bfloat16_loses_no_more_than_its_output_rounds_off(name: str, use: Callable[[str], None]) -> None:
    """Weights are rounded only where the output is: beside other statistics it comes in float32, and is more exact."""
    use(name)
    q, k, v = tokens(600, 600, 64, 64, torch.bfloat16)
    A = attlas.attend(q, k, plan=NATIVE)
    exact, lse = definition(A, v)
    rounding = (exact.bfloat16() - exact).square().mean().sqrt()
    assert ((A @ v) - exact).square().mean().sqrt() <= 1.45 * rounding
    torch.testing.assert_close(A.lse.double(), lse, rtol=1e-6, atol=1e-6)
    beside = attlas.attend(q, k, plan=NATIVE).collect(stats.Pooled(v), stats.Entropy())[0]
    assert (beside - exact).square().mean().sqrt() <= 0.02 * rounding
