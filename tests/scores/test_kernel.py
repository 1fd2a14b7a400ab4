"""Kernels against their formula in numpy, their gradients, their edges and their messages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.messages import refusal
from torch import nn

import attlas
from attlas.errors import DtypeError, ShapeError
from attlas.scores import Boxcar, Epanechnikov, Gaussian, Laplace, Triangular

KINDS = [Gaussian, Laplace, Boxcar, Epanechnikov, Triangular]
LEARNED = [Gaussian, Laplace, Epanechnikov, Triangular]


def formula(kind, q, k, h):
    """The definition, in numpy and float64."""
    gap = (q.detach().double().numpy()[..., :, None, :] - k.detach().double().numpy()[..., None, :, :]) / np.asarray(h)
    square = (gap**2).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_weight = {
            Gaussian: lambda: -square / 2,
            Laplace: lambda: -np.abs(gap).sum(-1),
            Boxcar: lambda: np.where(square < 1, 0.0, -np.inf),
            Epanechnikov: lambda: np.where(square < 1, np.log(1 - square), -np.inf),
            Triangular: lambda: np.where(square < 1, np.log(1 - np.sqrt(square)), -np.inf),
        }[kind]()
    return torch.from_numpy(log_weight)


def tokens(d, m=9, n=13, heads=2, key_heads=1, dtype=torch.float64, spread=1.0):
    g = torch.Generator().manual_seed(d)
    q = torch.randn(2, heads, m, d, generator=g, dtype=dtype) * spread
    k = torch.randn(2, key_heads, n, d, generator=g, dtype=dtype) * spread
    return q, k


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [1, 3, 8, 33])
@pytest.mark.parametrize("vector", [False, True])
def test_formula(kind, d, vector, logits):
    q, k = tokens(d)
    h = 1.3 * math.sqrt(d)
    bandwidth = np.linspace(0.7 * h, 1.4 * h, d).tolist() if vector else h
    expected = formula(kind, q, k.expand_as(k).repeat_interleave(2, 1), bandwidth)
    assert kind is Laplace or kind is Gaussian or torch.isinf(expected).any()
    torch.testing.assert_close(logits(kind(bandwidth), q, k), expected, rtol=1e-11, atol=1e-11)
    q32, k32 = q.float(), k.float()
    expected = formula(kind, q32, k32.repeat_interleave(2, 1), bandwidth)
    # Weights, since the logarithm of a weight next to 0 has no digits to lose.
    torch.testing.assert_close(logits(kind(bandwidth), q32, k32).double().exp(), expected.exp(), rtol=3e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [Boxcar, Epanechnikov, Triangular])
@pytest.mark.parametrize("factor", [-1.0, 0.0, 0.5])
def test_a_key_outside_stays_outside_whatever_the_factor(kind, factor):
    q, k = tokens(2)
    v = torch.randn(2, 1, 13, 3, dtype=torch.float64)
    plain = formula(kind, q, k.repeat_interleave(2, 1), 1.8)
    outside = plain.isinf()
    expected = torch.where(outside, plain, plain.masked_fill(outside, 0.0) * factor)
    empty = outside.all(-1, keepdim=True)
    weights = expected.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    learned = nn.Parameter(torch.tensor(factor, dtype=torch.float64))
    for score in (factor * kind(1.8), learned * kind(1.8)):
        A = attlas.attend(q, k, score=score)
        torch.testing.assert_close(A.logits.to_dense(), expected)
        torch.testing.assert_close(A @ v, weights @ v)
    # The gradient of the factor is that of the pairs inside: 0 times -inf is NaN.
    exact = learned.detach().requires_grad_()
    inside = plain.masked_fill(outside, 0.0) * exact
    weights = torch.where(outside, -math.inf, inside).masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    slope = torch.randn_like(v.expand(2, 2, 13, 3)[:, :, :9])
    (found,) = torch.autograd.grad(A @ v, learned, slope)
    (wanted,) = torch.autograd.grad(weights @ v, exact, slope)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_outside_and_at_zero_are_zero(kind, logits):
    q = torch.tensor([[[[0.0, 0.0], [5.0, 5.0]]]], requires_grad=True)
    k = torch.tensor([[[[0.0, 0.0], [1.0, 0.0], [50.0, 0.0]]]], requires_grad=True)
    out = logits(kind(1.0), q, k)
    assert not out.isnan().any()
    if kind not in (Gaussian, Laplace):
        assert out[0, 0].isinf().tolist() == [[False, True, True], [True, True, True]]
        grads = torch.autograd.grad(out.masked_fill(out == -math.inf, 0.0).sum(), (q, k))
        for grad in grads:
            assert torch.equal(grad, torch.zeros_like(grad))
    grad_q, _ = torch.autograd.grad(logits(kind(1.0), q, k)[0, 0, 0, 0], (q, k))
    assert torch.equal(grad_q, torch.zeros_like(grad_q))


@pytest.mark.parametrize("kind", KINDS)
def test_no_coordinates(kind, logits):
    assert torch.equal(logits(kind(), torch.ones(1, 1, 2, 0), torch.ones(1, 1, 3, 0)), torch.zeros(1, 1, 2, 3))


def test_gaussian_is_a_dot_product_where_that_is_exact(logits):
    q, k = tokens(64, m=50, n=60, heads=4, key_heads=2, dtype=torch.float32)
    q, k = q + 100.0, k + 100.0  # far from the origin: only the distance to the keys' mean counts
    score = Gaussian(2.0)
    projected = score.project(q, k)
    dot = score.as_dot(*projected)
    assert dot is not None
    assert dot.q.shape[-1] % 8 == 0
    assert dot.scale == 1.0
    assert dot.row is None
    k_all = dot.k.repeat_interleave(2, 1)
    expected = formula(Gaussian, q, k.repeat_interleave(2, 1), 2.0)
    torch.testing.assert_close((dot.q @ k_all.mT).double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(score, q, k).double(), expected, rtol=0, atol=1e-5)
    v = torch.randn(2, 4, 60, 8)
    out = nn.functional.scaled_dot_product_attention(dot.q, k_all, v, scale=dot.scale)
    torch.testing.assert_close(out, (expected.softmax(-1) @ v.double()).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("d", "form"), [(16, "tensor"), (16, "parameter"), (16, "graph")])
def test_gaussian_in_float64(d, form, logits):
    q, k = tokens(d, dtype=torch.float32, spread=20.0)
    h = torch.full((d,), 1.5, requires_grad=form != "tensor")
    bandwidth = nn.Parameter(h.detach()) if form == "parameter" else h * 1.0 if form == "graph" else h
    q.requires_grad_(), k.requires_grad_()
    score = Gaussian(bandwidth)
    projected = score.project(q, k)
    assert [len(part) for part in projected] == [2, 2]
    assert score.as_dot(*projected) is None
    out = logits(score, q, k)
    expected = formula(Gaussian, q, k.repeat_interleave(2, 1), 1.5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    leaf = {"tensor": [], "parameter": [bandwidth], "graph": [h]}[form]
    got = torch.autograd.grad(out.sum(), (q, k, *leaf))
    q64, k64 = q.double(), k.double().repeat_interleave(2, 1)
    h64 = torch.full((d,), 1.5, dtype=torch.float64, requires_grad=True)
    plain = ((q64.unsqueeze(-2) - k64.unsqueeze(-3)) / h64).square().sum(-1) * -0.5
    for a, b in zip(got, torch.autograd.grad(plain.sum(), (q, k, h64)), strict=False):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("bandwidth", [1e-3, 1.0])
@pytest.mark.parametrize("d", [1, 4, 32])
def test_gaussian_is_exact_near_zero_and_far_from_it(d, bandwidth, logits):
    q = torch.rand(1, 1, 40, d) * 1000
    k = q + torch.randn(1, 1, 40, d) * bandwidth
    k[..., :5, :] = q[..., :5, :]
    score = Gaussian(bandwidth)
    assert score.as_dot(*score.project(q, k)) is None  # spread / bandwidth is too large for a dot product
    got, expected = logits(score, q, k), formula(Gaussian, q, k, bandwidth)
    in_float64 = isinstance(score.project(q, k)[0], tuple)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-7 if in_float64 else 0.0)
    assert (got <= 0).all()
    if not in_float64:
        assert torch.equal(got.diagonal(dim1=-2, dim2=-1)[..., :5], torch.zeros(1, 1, 5))


def test_a_hidden_key_that_is_not_finite_spoils_only_itself(logits):
    for d in (2, 16):
        q, k = tokens(d, heads=1, dtype=torch.float32)
        clean = formula(Gaussian, q, k, 1.0)
        for value in (math.nan, math.inf, 1e30):
            k[:, :, 4] = value
            got = logits(Gaussian(), q, k)
            keep = [j for j in range(13) if j != 4]
            torch.testing.assert_close(got[..., keep].double(), clean[..., keep], rtol=1e-5, atol=1e-5)
    q[...] = math.nan
    for kind in KINDS:
        assert logits(kind(), q, k).isnan().all()


@pytest.mark.parametrize("kind", LEARNED)
def test_learned_bandwidth_stays_positive(kind):
    score = kind([0.5, 2.0], learn=True)
    torch.testing.assert_close(score.bandwidth, torch.tensor([0.5, 2.0]))
    assert [name for name, _ in score.named_parameters()] == ["log_bandwidth"]
    with torch.no_grad():
        score.log_bandwidth -= 10
    assert (score.bandwidth > 0).all()


def test_repr():
    assert repr(Gaussian(0.5)) == "Gaussian(bandwidth=0.5)"
    assert repr(Laplace([1.0, 2.0])) == "Laplace(bandwidth=<2 numbers>)"
    assert repr(Triangular(2, learn=True)) == "Triangular(bandwidth=2, learn=True)"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_message_bad_bandwidth(kind, value):
    expected = f"{kind.__name__}(): bandwidth = {value!r}"
    for bandwidth in (value, [1.0, value], torch.tensor([value, 1.0])):
        assert refusal(ShapeError, lambda b=bandwidth: kind(b)) == expected


def test_message_integer_bandwidth():
    assert refusal(DtypeError, lambda: Gaussian(torch.tensor([1, 2]))) == "Gaussian(): a int64 tensor"
    assert refusal(DtypeError, lambda: Laplace("wide")) == "Laplace(): a str"
    for wrong in (True, None, ["a"], {}):
        refusal(DtypeError, lambda b=wrong: Laplace(b))


def test_message_shape_of_bandwidth():
    assert refusal(ShapeError, lambda: Boxcar(torch.ones(2, 3))) == "Boxcar(): 2 axes, 6 numbers"
    assert (
        refusal(ShapeError, lambda: Gaussian([1.0, 2.0]).check(torch.ones(5, 3), torch.ones(7, 3), 1))
        == "attend(): d = 3 in q and k, 2 bandwidths"
    )
    assert (
        refusal(ShapeError, lambda: Gaussian().check(torch.ones(5, 3), torch.ones(7, 4), 1))
        == "attend(): d = 3 in q, d = 4 in k"
    )


def test_message_learn_twice():
    assert (
        refusal(ShapeError, lambda: Gaussian(torch.ones((), requires_grad=True), learn=True))
        == "Gaussian(): requires_grad = True"
    )
