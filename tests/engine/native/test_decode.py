"""Few queries: keys and values read once, as they lie, against the definition in float64, and where this is chosen."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.native.conftest import NATIVE, TOLERANCE, check, definition, each_set, needs_kernels, tokens
from torch import Tensor

import attlas
from attlas import Plan
from attlas.engine.backends.native import decode, library
from attlas.engine.backends.native.backend import FusedKernels
from attlas.engine.backends.sdpa import Sdpa

SIZES = [(1, 1, 1, 1), (1, 1023, 64, 64), (3, 1025, 128, 80), (2, 2500, 33, 7), (15, 300, 80, 130), (4, 129, 16, 3)]
HEADS = [(1, 1, 1), (6, 2, 2), (8, 1, 1)]
needs_wide = pytest.mark.skipif(
    not library.runnable() or library.runnable()[-1] not in ("avx512", "amx"),
    reason="few queries are chosen for wide vectors only",
)


@functools.cache
def problems(dtype: torch.dtype) -> list[tuple[dict[str, Any], Tensor, tuple[Tensor, Tensor]]]:
    """Return what is asked, the values and the definition, which all instruction sets share."""
    found = []
    for size in SIZES:
        for heads in HEADS:
            q, k, v = tokens(*size, dtype, heads)
            for more in ({}, {"mask": attlas.Causal(), "sink": torch.randn(heads[0]).to(dtype)}):
                asked: dict[str, Any] = {"q": q, "k": k} | more
                found.append((asked, v, definition(attlas.attend(**asked), v)))
    return found


@each_set
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_dtype_size_and_grouping(name: str, dtype: torch.dtype, use: Callable[[str], None]) -> None:
    use(name)
    for asked, v, known in problems(dtype):
        check(attlas.attend(**asked, plan=NATIVE), v, known=known)


@each_set
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [128, 13], ids=["whole vectors", "and a rest"])
def test_every_number_of_16_bits_is_read_exactly(
    name: str, dtype: torch.dtype, size: int, use: Callable[[str], None]
) -> None:
    """With one key, the output is its value."""
    use(name)
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    values = every[every.isfinite()]
    values = values[: len(values) // size * size].view(-1, 1, 1, size)
    token = torch.zeros(len(values), 1, 1, 1, dtype=dtype)
    out = attlas.attend(token, token, plan=NATIVE) @ values
    assert torch.equal(out.view(torch.int16), (values + 0).view(torch.int16))


MASKS: dict[str, Callable[[int, int], Any]] = {
    "window": lambda m, n: attlas.Window(200, 0),
    "from the first": lambda m, n: attlas.Causal(offset=1),
    "cells": lambda m, n: torch.rand(m, n) < 0.5,
    "cells of heads": lambda m, n: torch.rand(2, 4, m, n) < 0.1,
    "nothing for some": lambda m, n: (torch.rand(m, n) < 0.5) & (torch.arange(m) != 1).unsqueeze(-1),
    "nothing": lambda m, n: torch.zeros(m, n, dtype=torch.bool),
    "the far end": lambda m, n: (torch.arange(n) >= n - 2).expand(m, n),
}


@each_set
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(name: str, mask: str, use: Callable[[str], None]) -> None:
    use(name)
    for m, n in ((3, 2100), (4, 40)):
        q, k, v = tokens(m, n, 16, 9, torch.float32)
        for score in (None, attlas.ScaledDot(-0.5), attlas.SoftCap(attlas.ScaledDot(), 2.0)):
            check(attlas.attend(q, k, score=score, mask=MASKS[mask](m, n), sink=torch.randn(4), plan=NATIVE), v)
            check(attlas.attend(q, k, score=score, mask=MASKS[mask](m, n), plan=NATIVE), v)


@needs_kernels
def test_any_number_of_threads_gives_the_same(threads: None) -> None:
    for heads in HEADS:
        q, k, v = tokens(2, 9000, 64, 64, torch.float32, heads)
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            A = attlas.attend(q, k, plan=NATIVE)
            results.append((A @ v, A.lse))
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@needs_wide
def test_the_short_way_is_taken_where_the_kernels_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for owner, name in ((decode, "fast_path"), (Sdpa, "fast_path"), (FusedKernels, "forward")):
        original = getattr(owner, name)

        def watched(*args: Any, _name: str = owner.__name__, _original: Any = original) -> Any:
            found = _original(*args)
            calls.append((_name.rsplit(".", 1)[-1], found is not None))
            return found

        monkeypatch.setattr(owner, name, watched)
    sizes = {1: "native", 4: "native", 5: "sdpa", 40: "native", 600: "native"}
    for m, backend in sizes.items():
        q, k, v = tokens(m, 1100, 64, 64, torch.float32, (4, 4, 4))
        A = attlas.attend(q, k)
        assert attlas.explain(A).backend == backend
        calls.clear()
        check(A, v)
        done = [name for name, found in calls if found]
        assert done == ["Sdpa" if backend == "sdpa" else "decode" if m <= 4 else "FusedKernels"]
    assert attlas.explain(attlas.attend(q[:, :, :1], k[:, :, :200])).backend == "sdpa"  # too small
    assert attlas.explain(attlas.attend(q[:, :, :1], k[:, :2, :200])).backend == "native"  # heads share their keys
    for layout in ("cache", "heads"):  # as caches and projections leave them
        q, k, v = tokens(1, 1100, 64, 64, torch.float32, (4, 4, 4))
        if layout == "cache":
            k, v = (torch.cat([t, torch.full_like(t, math.nan)], dim=2)[:, :, :1100] for t in (k, v))
        else:
            k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
        calls.clear()
        check(attlas.attend(q, k), v)
        assert calls == [("decode", True)]


@needs_wide
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_what_is_not_finite_goes_to_the_tiles(bad: float, which: int) -> None:
    given = tokens(2, 2100, 8, 8, torch.float32, (4, 4, 4))
    given[which][0, 1, 1, 2] = bad
    q, k, v = given
    for grouped in (k, k[:, :2]):
        A, tiles = attlas.attend(q, grouped), attlas.attend(q, grouped, plan=Plan("tiled"))
        values = v if grouped is k else v[:, :2]
        with torch.no_grad():
            found = A @ values
        torch.testing.assert_close(found, tiles @ values, rtol=1e-4, atol=1e-5, equal_nan=True)


@needs_wide
def test_gradients_of_one_query() -> None:
    leaves = [t.requires_grad_() for t in tokens(1, 300, 16, 16, torch.float32)]
    q, k, v = leaves
    found, exact = (attlas.attend(q, k, plan=Plan(plan)) @ v for plan in ("auto", "reference"))
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
    slope = torch.randn_like(found)
    pairs = (torch.autograd.grad(out, leaves, slope) for out in (found, exact))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e5], ids=["usual logits", "logits above 1e8"])
@pytest.mark.parametrize("m", [2, 40, 600])
def test_an_output_is_the_same_with_and_without_a_graph(m: int, scale: float) -> None:
    q, k, v = tokens(m, 1100, 64, 64, torch.float32, (4, 4, 4))
    q, k = q * scale, k * scale
    plain = attlas.attend(q, k) @ v
    with torch.no_grad():
        quiet = attlas.attend(q, k) @ v
    recorded = attlas.attend(q, k) @ v.clone().requires_grad_()
    assert not plain.requires_grad
    assert recorded.requires_grad
    assert torch.equal(plain, recorded)
    assert torch.equal(quiet, recorded)
