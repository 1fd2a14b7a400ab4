"""The bound of the error, sought to be broken: hypothesis chooses places, weights, bandwidths and tolerances."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attlas.estimators.sums.boxes import box_sums
from attlas.estimators.sums.gaussian import gaussian_sums, nodes_for
from attlas.estimators.sums.laplace import laplace_sums
from attlas.estimators.sums.line import sorted_line
from attlas.estimators.sums.polynomial import polynomial_sums
from attlas.estimators.sums.result import Sums, unsort
from attlas.estimators.sums.scan import decayed_cumsum
from attlas.estimators.sums.task import Task, checked_task

WAYS = {
    "gaussian": gaussian_sums,
    "laplace": laplace_sums,
    "boxcar": polynomial_sums,
    "epanechnikov": polynomial_sums,
    "triangular": polynomial_sums,
}
TOLERANCES = (1e-1, 1e-3, 1e-7, 1e-10)


def relative(kernel: str, x: Tensor, keys: Tensor, weights: Tensor, own: bool) -> tuple[Tensor, Tensor]:
    """Return log-weights less those of the nearest key, and the latter; differences keep all digits far away."""
    gap = x[:, None] - keys[None]
    size = gap.square().sum(-1) if kernel != "laplace" else gap.abs().sum(-1)
    if own:
        size = size.masked_fill(torch.eye(len(x), dtype=torch.bool), torch.inf)
    if kernel not in ("gaussian", "laplace"):
        u = size.sqrt()
        k = {"boxcar": (u < 1).double(), "epanechnikov": (1 - u) * (1 + u), "triangular": 1 - u}[kernel]
        return k.clamp(min=0) * weights, torch.zeros(len(x)).double()
    near = size.argmin(-1)
    base = keys[near]
    if kernel == "gaussian":
        log = ((keys[None] - base[:, None]) * (x[:, None] - base[:, None] - (keys[None] - base[:, None]) / 2)).sum(-1)
        top = -0.5 * (x - base).square().sum(-1)
    else:
        log, top = -(size - size.gather(1, near[:, None])), -(x - base).abs().sum(-1)
    log = log.masked_fill(size == torch.inf, -torch.inf)
    return log.exp() * weights, top


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, float]:
    """Keys in clusters of any width and number, queries near, between and far from them, uneven weights."""
    seed = draw(st.integers(0, 2**31))
    random = torch.Generator().manual_seed(seed)
    clusters = draw(
        st.lists(st.tuples(st.floats(-300, 300), st.floats(0, 4), st.integers(1, 80)), min_size=1, max_size=4)
    )
    keys = torch.cat([c + 10 ** (w - 2) * torch.randn(n, generator=random).double() for c, w, n in clusters])
    spread = 10 ** draw(st.floats(-2, 3))
    count = draw(st.sampled_from([1, 30, 600]))
    middle = keys[torch.randint(len(keys), (count,), generator=random)]
    x = middle + spread * torch.randn(count, generator=random).double()
    power = draw(st.sampled_from([0.0, 1.0, 30.0]))
    weights = torch.rand(len(keys), generator=random).double() ** power
    return x, keys, weights.clamp(min=1e-200), draw(st.floats(1.0, 1.999))


@pytest.mark.parametrize("kernel", WAYS)
@pytest.mark.parametrize("tolerance", TOLERANCES)
@settings(max_examples=10)
@given(problem=problems(), own=st.booleans())
def test_the_bound_holds_on_a_line(
    kernel: str, tolerance: float, problem: tuple[Tensor, Tensor, Tensor, float], own: bool
) -> None:
    x, keys, weights, h = problem
    x = keys if own else x
    values = torch.stack([torch.ones_like(keys), keys.sin().sign()], -1)
    bandwidth = torch.tensor(h, dtype=torch.float64)
    task = checked_task(Task(kernel, x[:, None], keys[:, None], values, bandwidth, weights, tolerance, own))
    line = sorted_line(task)
    sums = unsort(WAYS[kernel](line), line.order)
    hold(kernel, sums, x[:, None] / h, keys[:, None] / h, values, weights, own, tolerance)


def hold(
    kernel: str, sums: Sums, x: Tensor, keys: Tensor, values: Tensor, weights: Tensor, own: bool, tolerance: float
) -> None:
    weight, top = relative(kernel, x, keys, weights, own)
    total = weight.sum(-1)
    # Rounding of the places over h, and of the scale.
    slack = 1e-11 + 1e-15 * top.abs().clamp(max=1e12)
    if kernel not in ("gaussian", "laplace"):
        # A difference has rounding errors, and a weight at the rim those of the difference.
        slack = slack + 1e-13 * (weight > 0).sum(-1) * weights.max() / total.clamp(min=1e-300)
        clear = total > 1e-9 * weights.max()
        gaps = (x[:, None] - keys[None]).norm(dim=-1)
        clear &= ((gaps - 1).abs() > 1e-9).all(-1)
    else:
        clear = total > 0
    factor = (sums.log_scale - top).exp()
    error = (sums.denominator * factor - total).abs() / total
    assert bool((error <= tolerance + slack)[clear].all())
    wrong = (sums.numerator * factor[:, None] - weight @ values).abs() / total[:, None]
    assert bool((wrong.amax(-1) <= tolerance + slack)[clear].all())


@pytest.mark.parametrize("kernel", WAYS)
@pytest.mark.parametrize("tolerance", TOLERANCES)
@settings(max_examples=4)
@given(seed=st.integers(0, 2**31), spread=st.floats(0, 2), own=st.booleans(), d=st.integers(1, 4))
def test_the_bound_holds_in_boxes(kernel: str, tolerance: float, seed: int, spread: float, own: bool, d: int) -> None:
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(600, d, generator=random).double() * 10**spread
    keys[300:] = keys[:300] + torch.randn(300, d, generator=random).double() * 0.1
    weights = torch.rand(600, generator=random).double() ** 8
    x = keys if own else keys[:500] + torch.randn(500, d, generator=random).double() * 10 ** (spread - 1)
    values = torch.randn(600, 2, generator=random).double().sign()
    one = torch.ones((), dtype=torch.float64)
    task = checked_task(Task(kernel, x, keys, values, one, weights, tolerance, own))
    hold(kernel, box_sums(task), x, keys, values, weights, own, tolerance)


def test_more_nodes_for_less_error() -> None:
    counts = [nodes_for(error, 0.5, 8.0) for error in (1e-1, 1e-4, 1e-8, 1e-12)]
    assert counts == sorted(counts)
    # The bound itself, by its definition.
    for error, count in zip((1e-4, 1e-8), counts[1:3], strict=True):
        assert 2 * 2.0**count / math.factorial(count) * math.exp(8) <= error
        assert 2 * 2.0 ** (count - 1) / math.factorial(count - 1) * math.exp(8) > error


@settings(max_examples=30)
@given(n=st.integers(1, 300), seed=st.integers(0, 999), resets=st.floats(0, 1))
def test_running_sums_are_the_loop(n: int, seed: int, resets: float) -> None:
    random = torch.Generator().manual_seed(seed)
    n = n * n // 20 + 1
    fade = torch.rand(n, generator=random).double()
    fade[torch.rand(n, generator=random) < resets] = 0.0
    terms = torch.rand(n, 2, generator=random).double()
    total, expected = torch.zeros(2).double(), []
    for i in range(n):
        total = fade[i] * total + terms[i]
        expected.append(total)
    torch.testing.assert_close(decayed_cumsum(fade, terms), torch.stack(expected), rtol=1e-13, atol=0.0)
