"""Kernels of a distance: every instruction set gives what the reference does, whatever sizes, strides and values."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.native.conftest import (
    MASKS,
    PAIRWISE,
    PAIRWISE_SETS,
    STRIDES,
    all_results,
    check_against_the_reference,
    check_run,
    close,
    each_pairwise_set,
    request_of,
    run,
)
from torch import Tensor

import attlas
from attlas import Plan
from attlas.engine.backends.native import distance, library
from attlas.engine.backends.tiled import Tiled
from attlas.engine.gradient import CellGradient

pytestmark = [
    pytest.mark.usefixtures("small_row_blocks"),
    pytest.mark.skipif(not library.available(), reason="the kernels are not compiled here"),
]

KERNELS: dict[str, Callable[[Any], attlas.Score]] = {
    "Gaussian": attlas.Gaussian,
    "Laplace": attlas.Laplace,
    "Boxcar": attlas.Boxcar,
    "Epanechnikov": attlas.Epanechnikov,
    "Triangular": attlas.Triangular,
}
each_kernel = pytest.mark.parametrize("kernel", list(KERNELS))


def tokens(m: int, n: int, d: int, e: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Two sequences, four heads, two key heads, one value head."""
    return (
        torch.randn(2, 4, m, d, dtype=dtype),
        torch.randn(2, 2, n, d, dtype=dtype),
        torch.randn(2, 1, n, e, dtype=dtype),
    )


@each_pairwise_set
@each_kernel
@pytest.mark.parametrize("mask", list(MASKS))
def test_equals_the_reference(name: str, kernel: str, mask: str, use: Any) -> None:
    use(name)
    place = list(MASKS).index(mask) + list(KERNELS).index(kernel)
    m, n, d, e = [(1, 1, 1, 1), (63, 40, 2, 3), (13, 530, 3, 9), (24, 512, 4, 1), (40, 63, 7, 20), (50, 63, 16, 8)][
        place % 6
    ]
    h = 1.7 if place % 2 else torch.linspace(1.2, 2.5, d)
    sink = torch.randn(4, dtype=torch.float64) if place % 3 else None
    q, k, v = tokens(m, n, d, e)
    check_against_the_reference(v, q=q, k=k, score=KERNELS[kernel](h), mask=MASKS[mask](m, n), sink=sink)


@each_pairwise_set
@pytest.mark.parametrize("kernel", ["Gaussian", "Laplace"])
@pytest.mark.parametrize("mask", ["none", "Causal", "cells"])
def test_gradients_equal_the_references(name: str, kernel: str, mask: str, use: Any) -> None:
    use(name)
    m, n, d, e = {"none": (13, 530, 3, 2), "Causal": (20, 33, 1, 9), "cells": (30, 17, 5, 1)}[mask]
    for h, learn in ((0.8, False), (0.8, True), ([1.0 + 0.3 * c for c in range(d)], True)):
        score = KERNELS[kernel](h, learn=learn).double()
        sink = torch.randn(4, dtype=torch.float64)
        q, k, v = (t.requires_grad_() for t in tokens(m, n, d, e))
        A = attlas.attend(q, k, score=score, mask=MASKS[mask](m, n), sink=sink)
        out = attlas.attend(q, k, score=score, mask=MASKS[mask](m, n), sink=sink, plan=Plan("reference")) @ v
        slope, parameters = torch.randn_like(out), list(score.parameters())
        wanted = torch.autograd.grad(out, (q, k, v, *parameters), slope)
        delta = (slope * out.detach()).sum(-1)
        found = PAIRWISE.backward(request_of(A), A.lse, CellGradient(slope, v, delta=delta))
        d_v = found.pooled.sum(dim=1, keepdim=True)
        for a, b in zip((*found.q, *found.k, d_v, *found.parameters), wanted, strict=True):
            close(a, b)


def test_bounded_kernels_have_no_backward() -> None:
    q, k, v = tokens(4, 5, 2, 3)
    A = attlas.attend(q, k, score=attlas.Epanechnikov(1.0))
    left, delta = torch.randn(2, 4, 4, 3).double(), torch.zeros(2, 4, 4).double()
    assert PAIRWISE.backward(request_of(A), A.lse, CellGradient(left, v, delta=delta)) is None


@each_pairwise_set
@each_kernel
def test_float32_keeps_its_budget(name: str, kernel: str, use: Any) -> None:
    """At most twice the error of the plain formula in float32, and rounding."""
    use(name)
    for d, e, h in ((1, 1, 0.5), (2, 5, 1.0), (5, 1, 2.0), (8, 12, 4.0)):
        q, k, v = (t.float() for t in tokens(40, 1100, d, e))
        given_ = {"score": KERNELS[kernel](h), "mask": attlas.Causal(1000)}
        exact = attlas.attend(q.double(), k.double(), **given_, plan=Plan("reference"))
        plain = attlas.attend(q, k, **given_, plan=Plan("reference"))
        found, lse = run(attlas.attend(q, k, **given_), v)
        eps = torch.finfo(torch.float32).eps
        for a, b, c in ((found, plain @ v, exact @ v.double()), (lse, plain.lse, exact.lse)):
            seen = exact.lse > -math.inf
            error, allowed = (((t - c)[seen].abs().max()).item() for t in (a, b))
            assert error <= 2 * allowed + 2 * eps * c[seen].abs().max().item(), (d, e, error, allowed)


@each_pairwise_set
def test_far_queries_keep_their_neighbours(name: str, use: Any) -> None:
    """The weights of a query that is a thousand bandwidths from its nearest key are as exact as any other's."""
    use(name)
    k = torch.randn(1, 1, 1500, 2)
    k[..., 700:, :] += 3.0  # the nearest come late
    far = torch.tensor([[5.0, 5.0], [30.0, 40.0], [-1000.0, 3.0], [0.0, 0.0]])
    q, v = far.repeat(9, 1)[None, None], torch.randn(1, 1, 1500, 3)
    for make in (attlas.Gaussian, attlas.Laplace):
        A = attlas.attend(q, k, score=make(1.0))
        B = attlas.attend(q.double(), k.double(), score=make(1.0), plan=Plan("reference"))
        plain = attlas.attend(q, k, score=make(1.0), plan=Plan("reference"))
        found, lse = run(A, v)
        torch.testing.assert_close(lse.double(), B.lse, rtol=1e-6, atol=1e-6)
        error, allowed = ((t - B @ v.double()).abs().max().item() for t in (found, plain @ v))
        assert error <= 2 * allowed + 1e-6


@each_pairwise_set
def test_numbers_at_the_ends(name: str, use: Any) -> None:
    use(name)
    q, k, v = (t.float() for t in tokens(30, 600, 2, 2))
    for scale in (1e-42, 1e-30, 1e15, 1e37):
        for h in (1e-3, 1.0, 1e3):
            A = attlas.attend(q * scale, k * scale, score=attlas.Gaussian(h))
            found = PAIRWISE.forward(request_of(A), v)
            wanted, lse = Tiled().forward(request_of(A), v)
            torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found[1], lse, rtol=1e-5, atol=1e-5)
    # Values too large for a sum are left to the other backend; the smallest are no reason to fail.
    A = attlas.attend(q, k, score=attlas.Gaussian(2.0))
    assert PAIRWISE.forward(request_of(A), torch.full_like(v, 3e38)) is None
    assert float(run(A, v * 1e-42)[0].abs().max()) < 1e-37


@each_kernel
@pytest.mark.parametrize("name", PAIRWISE_SETS[1:])
def test_a_lattice_is_cut_as_in_the_tiled_backend(name: str, kernel: str, use: Any) -> None:
    """Keys at exactly one bandwidth, where the last digit decides: both backends take the same side."""
    use(name)
    side = torch.arange(-6.0, 7.0) * 0.1
    grid = torch.cartesian_prod(side, side)[None, None]
    v = torch.ones(1, 1, 169, 1)
    for h in (0.1, 0.3, 0.5, 0.7):
        A = attlas.attend(grid, grid, score=KERNELS[kernel](h))
        _, lse = Tiled().forward(request_of(A), v)
        close(run(A, v)[1], lse, 2e-6)


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 16), st.integers(1, 20)),
    st.sampled_from(list(KERNELS)),
    st.sampled_from(list(MASKS)),
    st.sampled_from(list(STRIDES)),
    st.sampled_from([name for name in library.runnable() if name != "amx"] or PAIRWISE_SETS),
    st.booleans(),
)
def test_any_shape_and_stride(
    sizes: tuple[int, ...], kernel: str, mask: str, stride: str, name: str, single: bool
) -> None:
    m, n, d, e = sizes
    dtype = torch.float32 if single else torch.float64

    q, k, v = (STRIDES[stride](t) for t in tokens(m, n, d, e, dtype))
    given_ = {"score": KERNELS[kernel](2.0 * math.sqrt(d)), "mask": MASKS[mask](m, n)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTLAS_NATIVE", name)
        A = attlas.attend(q, k, **given_)
        found, lse = run(A, v)
        numbers = PAIRWISE.read(request_of(A), all_results(min(3, n)), None, lse)
    exact = attlas.attend(q.double(), k.double(), **given_, plan=Plan("reference"))
    # In float32 a key at the edge of a bounded kernel has few right digits, and may be all that a query sees.
    check_run((found, lse), numbers, v, exact, 2e-3 if single else 1e-9)


def test_reasons() -> None:
    def reason(score: attlas.Score, d: int = 3, n: int = 4) -> str | None:
        q, k = torch.randn(1, 1, 5, d), torch.randn(1, 1, n, d)
        return distance.DistanceKernels.unsupported(attlas.attend(q, k, score=score).problem)

    assert reason(attlas.Gaussian(1.0)) is None
    assert reason(attlas.ScaledDot()) == "the score is no kernel of a distance"
    assert reason(2 * attlas.Gaussian(1.0)) == "the score is no kernel of a distance"
    assert reason(attlas.Laplace(1.0), d=17) == "the tokens have more than 16 coordinates"
    assert reason(attlas.Gaussian(4.0), d=8) is None
    assert reason(attlas.Gaussian(4.0), d=9) == "this Gaussian is computed as a dot product"
    assert reason(attlas.Gaussian(1e-6), d=9) is None
    assert reason(attlas.Laplace(1.0), n=0) == "there is nothing to compute"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTLAS_NATIVE", "none")
        assert reason(attlas.Laplace(1.0)) == "ATTLAS_NATIVE=none turns the kernels off"


def test_half_precision_is_summed_in_float32() -> None:
    q, k, v = tokens(20, 30, 3, 2)
    for dtype in (torch.float16, torch.bfloat16):
        low = [t.to(dtype) for t in (q, k, v)]
        A = attlas.attend(low[0], low[1], score=attlas.Laplace(1.0))
        B = attlas.attend(low[0].double(), low[1].double(), score=attlas.Laplace(1.0), plan=Plan("reference"))
        found, lse = run(A, low[2])
        assert found.dtype is dtype
        assert lse.dtype is torch.float64
        torch.testing.assert_close(lse.double(), B.lse, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found, (B @ low[2].double()).to(dtype))


@each_pairwise_set
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kernel", ["Gaussian", "Laplace"])
def test_tiles_in_which_a_nearer_key_turns_up(name: str, dtype: torch.dtype, kernel: str, use: Any) -> None:
    """Keys come nearer tile by tile, by up to thousands of powers of 2; some rows have the nearest at the beginning."""
    use(name)
    steps = torch.tensor([3000.0, 1200.0, 900.0, 300.0, 60.0, 8.0, 0.5, 2.0], dtype=torch.float64).sqrt()
    steps = steps.repeat_interleave(512) + torch.rand(4096, dtype=torch.float64) * 1e-3
    k = torch.stack([steps, torch.zeros_like(steps)], -1)[None, None].to(dtype)
    q = torch.tensor([[0.0, 0.0], [54.7, 0.5], [17.0, -1.0], [1.0, 0.0]], dtype=dtype).repeat(7, 1)[None, None]
    for e in (1, 3):
        v = torch.randn(1, 1, 4096, e, dtype=dtype)
        given_ = {"score": KERNELS[kernel](1.0)}
        exact = attlas.attend(q.double(), k.double(), **given_, plan=Plan("reference"))
        found, lse = run(attlas.attend(q, k, **given_), v)
        # A logit of 1500 has few digits behind the point.
        slack = 1e-11 if dtype is torch.float64 else 2e-3
        close(found.double(), exact @ v.double(), slack)
        torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-14 if dtype is torch.float64 else 1e-6, atol=slack)


@functools.cache
def far_apart(mask: str) -> list[tuple[dict[str, Any], Tensor, Tensor, Tensor]]:
    """Return what is asked, the values, the output and the log-sum-exp, which all instruction sets share."""
    far, problems = torch.zeros(1300, 1, dtype=torch.float64), []
    far[300:500], far[900] = 9.0, 40.0
    for d in range(1, 9):
        for offset, e in ((0.0, 1), (-1e6, 2), (3e9, 9)):
            q, k, v = tokens(41, 1300, d, e)
            q[..., 5, :], q[..., 30, :] = 25.0, -300.0
            q, k = ((t * 1024).round() / 1024 + offset for t in (q, k + far))  # no digit is lost at an offset
            h = 0.8 if d % 2 else torch.linspace(0.6, 1.4, d)
            given_ = {"score": attlas.Gaussian(h), "mask": MASKS[mask](41, 1300)}
            exact = attlas.attend(q - offset, k - offset, **given_, plan=Plan("reference"))
            problems.append(({"q": q, "k": k} | given_, v, exact @ v, exact.lse))
    return problems


@each_pairwise_set
@pytest.mark.parametrize("mask", ["none", "Causal", "cells of all heads"])
def test_float64_gaussians_where_rows_and_keys_lie_far_apart(name: str, mask: str, use: Any) -> None:
    """Tiles of products, of differences and of a mask in the sums of one row, whatever the origin is."""
    use(name)
    for asked, v, out, wanted in far_apart(mask):
        found, lse = run(attlas.attend(**asked), v)
        close(found, out, 3e-12)
        torch.testing.assert_close(lse, wanted, rtol=1e-14, atol=3e-12)


@each_pairwise_set
def test_a_weight_in_float64_has_all_its_digits(name: str, use: Any) -> None:
    """Two keys, of which the first is the query: the output tells the weight of the other."""
    use(name)
    x = torch.linspace(0.0, 37.0, 1185).mul(1024).round().double() / 1024  # its square is exact
    k = torch.stack([torch.zeros_like(x), x], -1)[:, None, :, None]
    v = torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(len(x), 1, 2, 1)
    found, _ = run(attlas.attend(torch.zeros(len(x), 1, 1, 1, dtype=torch.float64), k, score=attlas.Gaussian(1.0)), v)
    for at, share in zip(x.tolist(), found.flatten().tolist(), strict=True):
        wanted = math.exp(-at * at / 2)
        # The logit is rounded twice, and one unit of that is |logit| units of the weight.
        assert abs(share - wanted / (1 + wanted)) <= share * 2.0**-52 * (3 + at * at), at


def test_the_sums_of_a_row_do_not_depend_on_its_neighbours_or_threads(threads: None) -> None:
    q, k, v = tokens(60, 1100, 5, 1)
    A = attlas.attend(q, k, score=attlas.Gaussian(0.5))
    wanted = run(A, v)
    torch.set_num_threads(3)
    assert all(map(torch.equal, run(A, v), wanted))
