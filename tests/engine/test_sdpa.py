"""torch's kernels put together: causal masks of any alignment cut into rectangles and one square."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attlas
from attlas import Plan


@given(st.integers(1, 30), st.integers(1, 30), st.integers(-35, 35), st.booleans())
def test_causal_of_any_alignment(m: int, n: int, offset: int, with_sink: bool) -> None:
    q, k, v = (torch.randn(1, 2, t, 4, dtype=torch.float64, requires_grad=True) for t in (m, n, n))
    sink = torch.randn(2, dtype=torch.float64) if with_sink else None
    results = []
    for plan in (Plan("sdpa"), Plan("tiled"), Plan("reference")):
        A = attlas.attend(q, k, mask=attlas.Causal(offset), sink=sink, plan=plan)
        out = A @ v
        results.append([out, A.lse, *torch.autograd.grad(out.square().sum(), (q, k, v), allow_unused=True)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


@pytest.mark.parametrize(("d", "e"), [(1, 1), (4, 9), (9, 4), (16, 16), (3, 64)])
@pytest.mark.parametrize(
    ("heads", "key_heads", "value_heads"), [(4, 4, 4), (4, 2, 2), (6, 1, 1), (6, 2, 3), (6, 3, 1), (4, 1, 4)]
)
def test_sizes_and_groups(d: int, e: int, heads: int, key_heads: int, value_heads: int) -> None:
    q = torch.randn(2, heads, 7, d, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, key_heads, 9, d, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, value_heads, 9, e, dtype=torch.float64, requires_grad=True)
    for mask in (None, attlas.Causal(), torch.rand(2, heads, 7, 9) > 0.3):
        results = []
        for plan in (Plan("sdpa"), Plan("reference")):
            A = attlas.attend(q, k, mask=mask, plan=plan)
            out = A @ v
            results.append([out, A.lse, *torch.autograd.grad(out.square().sum(), (q, k, v))])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


def test_the_log_sum_exp_comes_with_the_output() -> None:
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    A = attlas.attend(q, k, score=attlas.Gaussian(2.0))
    assert A.softmax_weights.known_lse is None
    A @ v
    assert A.softmax_weights.known_lse is not None
    torch.testing.assert_close(A.lse, attlas.attend(q, k, score=attlas.Gaussian(2.0)).lse)


def test_a_log_sum_exp_of_zero_is_no_error() -> None:
    """0 is what the kernel writes where it gives up, and what one key with logit 0 truly has."""
    q, k, v = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 1, 3)
    A = attlas.attend(q, k)
    assert bool((A @ v == 1).all())
    assert bool((A.lse == 0).all())


def test_rows_without_keys_in_a_panel() -> None:
    q, k, v = (torch.randn(1, 1, 6, 4, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True] * 6, [False] * 6] * 3)
    A = attlas.attend(q, k, mask=mask, plan=Plan("sdpa", rows=2))
    out = A @ v
    assert bool((out[0, 0, 1::2] == 0).all())
    assert bool((A.lse[0, 0, 1::2] == -math.inf).all())
    for g in torch.autograd.grad(out.sum(), (q, k, v)):
        assert bool(g.isfinite().all())


class Largest(TorchDispatchMode):
    """The most bytes of one tensor that an operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


BIASES: dict[str, Callable[[int, int], attlas.Score]] = {
    "Alibi": lambda heads, n: attlas.Alibi(heads),
    "RelativeBias": lambda heads, n: attlas.RelativeBias(heads, 8).requires_grad_(False),
    "Forget": lambda heads, n: attlas.Forget(-torch.rand(heads, n)),
}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("mask", [None, attlas.Causal()], ids=["all", "causal"])
@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "m", "n"),
    [(1, 24, 24, 17, 50_000), (3, 8, 2, 17, 50_000), (1, 1, 1, 270, 300_000)],
    ids=["heads", "groups", "keys"],
)
def test_a_bias_takes_no_large_tensor(
    name: str, mask: attlas.Mask | None, batch: int, heads: int, key_heads: int, m: int, n: int
) -> None:
    """Dense, the bias takes 80 to 320 MB."""
    q, k = torch.randn(batch, heads, m, 2), torch.randn(batch, key_heads, n, 2)
    v, score = torch.randn(batch, key_heads, n, 2), attlas.ScaledDot() + BIASES[name](heads, n)
    A = attlas.attend(q, k, score=score, mask=mask, plan=Plan("sdpa"))
    with torch.no_grad(), Largest() as largest:
        out = A @ v
    assert largest.bytes <= 64 << 20
    one = attlas.attend(q[-1:, :, -1:], k[-1:], score=score, mask=mask, plan=Plan("reference")) @ v[-1:]
    torch.testing.assert_close(out[-1:, :, -1:], one, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cells", [2, 20, 80, 320, 5000])
@pytest.mark.parametrize(("heads", "key_heads", "value_heads"), [(4, 4, 4), (6, 2, 2), (6, 1, 1), (6, 3, 1), (4, 1, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_pieces_of_some_heads(cells: int, heads: int, key_heads: int, value_heads: int, masked: bool) -> None:
    q = torch.randn(3, heads, 8, 4, dtype=torch.float64, requires_grad=True)
    k = torch.randn(3, key_heads, 10, 4, dtype=torch.float64, requires_grad=True)
    v = torch.randn(3, value_heads, 10, 3, dtype=torch.float64, requires_grad=True)
    mask = (torch.rand(3, heads, 8, 10) > 0.4) & (torch.arange(10) != 5) if masked else None
    for bias in (attlas.Alibi(heads), attlas.TensorBias(torch.randn(8, 10)), None):
        if bias is None and not masked:
            continue
        score = attlas.ScaledDot() if bias is None else attlas.ScaledDot() + bias
        results = []
        for plan in (Plan("sdpa", cells=cells), Plan("reference")):
            A = attlas.attend(q, k, score=score, mask=mask, plan=plan)
            out = A @ v
            results.append([out, A.lse, *torch.autograd.grad(out.square().sum(), (q, k, v))])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
