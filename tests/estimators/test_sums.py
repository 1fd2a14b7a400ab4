"""Kernel sums against their definition in float64, on every way and on data that breaks what is careless."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import attlas
from attlas.estimators.sums import Sums, choose, kernel_sums, plan_sums
from attlas.estimators.sums.boxes import box_sums
from attlas.estimators.sums.task import Task, checked_task
from attlas.masks.runs import RunPerRow

KERNELS = ("boxcar", "epanechnikov", "gaussian", "laplace", "triangular")
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


class Defined(NamedTuple):
    """The definition, on the scale of each row's largest log-weight."""

    mean: Tensor
    log: Tensor
    offset: Tensor
    outer: Tensor
    cross: Tensor


def defined(
    kernel: str, x: Tensor, keys: Tensor, values: Tensor, h: float | Tensor, weights: Tensor | None, loo: bool
) -> Defined:
    x, keys, values = x.double(), keys.double(), values.double()
    u = (x[:, None] - keys[None]) / torch.as_tensor(h, dtype=torch.float64)
    if kernel == "gaussian":
        log = -0.5 * u.square().sum(-1)
    elif kernel == "laplace":
        log = -u.abs().sum(-1)
    else:
        r = u.square().sum(-1).sqrt()
        shape: dict[str, Callable[[], Tensor]] = {
            "boxcar": (r < 1).double,
            "epanechnikov": lambda: (1 - r) * (1 + r),
            "triangular": lambda: 1 - r,
        }
        log = shape[kernel]().clamp(min=0).log()
    if loo:
        log = log.masked_fill(torch.eye(len(x), dtype=torch.bool), -torch.inf)
    if weights is not None:
        log = log + weights.double().log()
    top = log.amax(-1) if len(keys) else torch.full((len(x),), -torch.inf).double()
    top = top.masked_fill(top == -torch.inf, 0.0)
    w = (log - top[:, None]).exp()
    z = keys[None] - x[:, None]
    total = w.sum(-1)
    sums = w @ values, (w[..., None] * z).sum(1), torch.einsum("ij,ija,ijb->iab", w, z, z)
    cross = torch.einsum("ij,ija,je->iae", w, z, values)
    mean, offset, outer, cross = (t / total.view(-1, *(1,) * (t.ndim - 1)) for t in (sums[0], sums[1], sums[2], cross))
    return Defined(mean, total.log() + top, offset, outer, cross)


def check(sums: Sums, truth: Defined, values: Tensor, error: float, h: float = 1.0) -> None:
    empty = truth.log == -torch.inf
    assert torch.equal(sums.denominator == 0, empty)
    assert bool(sums.mean()[empty].isnan().all())
    assert bool((sums.log_scale[empty] == -torch.inf).all())
    full = ~empty
    assert bool(sums.denominator[full].isfinite().all())
    log = sums.log_denominator()
    # The scale itself has 53 bits.
    assert bool(((log - truth.log).abs()[full] <= error + 1e-14 * truth.log.abs()[full]).all())
    largest = values.double().abs().max() if values.numel() else 1.0
    assert bool(((sums.mean().double() - truth.mean).abs()[full] <= 2 * error * largest).all())
    if sums.first is not None:
        one = sums.denominator.double()[full]
        size = truth.outer.diagonal(dim1=-2, dim2=-1).sum(-1)[full].sqrt() + h
        offset = sums.first.offset.double()[full] / one[:, None]
        assert bool(((offset - truth.offset[full]).abs() / size[:, None] <= 8 * error).all())
        outer = sums.first.outer.double()[full] / one[:, None, None]
        assert bool(((outer - truth.outer[full]).abs() / size[:, None, None].square() <= 64 * error).all())
        cross = sums.first.cross.double()[full] / one[:, None, None]
        assert bool(((cross - truth.cross[full]).abs() / size[:, None, None] / largest <= 8 * error).all())


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take lines and boxes at sizes at which they do not pay."""
    monkeypatch.setattr(choose, "_FEW_PAIRS", 0)
    monkeypatch.setattr(choose, "_SECONDS_PER_TOKEN", 0.0)
    monkeypatch.setattr(choose, "_SECONDS_PER_GROUP", 0.0)
    monkeypatch.setattr(choose, "_WORTHWHILE_SHARE", 2.0)


@pytest.mark.usefixtures("always")
@each_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("moments", [0, 1])
def test_every_way_is_the_definition(kernel: str, dtype: torch.dtype, d: int, moments: int) -> None:
    keys, values = torch.randn(160, d, dtype=dtype), torch.randn(160, 2, dtype=dtype)
    weights = (torch.rand(160, dtype=dtype) - 0.2).clamp(min=0)
    queries = torch.cat([torch.randn(80, d, dtype=dtype) * 2, torch.randn(4, d, dtype=dtype) * 100])
    # Each two of them meet.
    for w, loo, h in ((None, False, 0.04), (None, True, 0.6), (weights, False, 0.6), (weights, True, 0.04)):
        x = keys if loo else queries
        truth = defined(kernel, x, keys, values, h, w, loo)
        exact = "direct" if kernel in ("gaussian", "laplace") else "boxes"
        for tolerance, way in ((1e-7, "line" if d == 1 else "boxes"), (0.0, exact)):
            error = max(tolerance, 1e-13) if dtype is torch.float64 else 2e-5
            more = {"weights": w, "tolerance": tolerance, "leave_one_out": loo, "moments": moments}
            assert plan_sums(kernel, x, keys, values, h, **more).method == way
            sums = kernel_sums(kernel, x, keys, values, h, **more)
            assert sums.numerator.dtype == sums.denominator.dtype == dtype
            # Differences near one bandwidth have lost digits; a weight has an error of that many units.
            check(sums, truth, values, 4 * error + 1e-11, h)


@pytest.mark.usefixtures("always")
@each_kernel
@pytest.mark.parametrize("d", [1, 3])
def test_a_bandwidth_for_each_coordinate(kernel: str, d: int) -> None:
    h = torch.tensor([0.7, 30.0, 1e-3])[:d].double()
    keys, x = (torch.randn(400, d).double() * h * 3 for _ in range(2))
    values = torch.randn(400, 1).double()
    sums = kernel_sums(kernel, x, keys, values, h)
    check(sums, defined(kernel, x, keys, values, h, None, False), values, 1e-7)


@pytest.mark.usefixtures("always")
@each_kernel
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("d", [1, 2])
def test_scale_changes_nothing(kernel: str, scale: float, d: int) -> None:
    for dtype, error in ((torch.float32, 2e-5), (torch.float64, 1e-7)):
        keys, values = torch.randn(500, d, dtype=dtype) * scale, torch.randn(500, 1, dtype=dtype) * scale
        x = torch.randn(200, d, dtype=dtype) * scale * 2
        weights = torch.rand(500, dtype=dtype) * scale
        h = 0.3 * scale
        sums = kernel_sums(kernel, x, keys, values, h, weights=weights, leave_one_out=False)
        check(sums, defined(kernel, x, keys, values, h, weights, False), values, error)


def nasty(name: str, n: int) -> Tensor:
    grid = torch.arange(n).double()
    return {
        "equal": torch.full((n,), 3.7).double(),
        "two places": (grid % 2) * 1e6,
        "grid": grid % 17,
        "clusters": torch.randn(n).double() * 1e-3 + (grid % 5) * 50,
        "one far": torch.cat([torch.randn(n - 1).double(), torch.tensor([1e9], dtype=torch.float64)]),
        "geometric": torch.logspace(-30, 30, n, dtype=torch.float64),
        "stamps": 1.7e9 + torch.rand(n).double() * 1e5,
        "one": torch.zeros(n).double(),
    }[name]


@pytest.mark.usefixtures("always")
@each_kernel
@pytest.mark.parametrize("name", ["equal", "two places", "grid", "clusters", "one far", "geometric", "stamps", "one"])
def test_nasty_data(kernel: str, name: str) -> None:
    n = 1 if name == "one" else 400
    keys = nasty(name, n).unsqueeze(-1)
    values = torch.randn(n, 1).double()
    around = torch.cat([keys, keys + 0.5, keys - 40.0, keys.mean().view(1, 1) + torch.randn(100, 1) * 1000])
    # The definition itself has only the digits of a squared distance; log-weights beyond 1e8 are no oracle.
    near = (around[:, None] - keys[None]).abs().amin(1).squeeze(-1) < 1e4
    for h in (1.0, 7.0):
        for x, loo in ((around[near], False), (keys, True)):
            sums = kernel_sums(kernel, x, keys, values, h, leave_one_out=loo)
            truth = defined(kernel, x, keys, values, h, None, loo)
            trusted = ~(truth.log < -1e7)
            check(sums.rows(trusted), Defined(*(t[trusted] for t in truth)), values, 3e-7)


def test_far_queries_follow_the_nearest_key() -> None:
    keys, values = torch.randn(1000, 1).double().sort(0).values, torch.randn(1000, 1).double()
    for kernel in ("gaussian", "laplace"):
        for far in (1e4, 1e8, 1e150, 1e200):
            x = torch.tensor([[-far], [far]], dtype=torch.float64).repeat(1500, 1)
            sums = kernel_sums(kernel, x, keys, values, 1e-3 if kernel == "gaussian" else 1e-4)
            assert bool(sums.denominator.isfinite().all())
            if kernel == "gaussian":
                torch.testing.assert_close(sums.mean()[:2], values[[0, -1]])
            assert bool((sums.mean().abs() <= values.abs().max()).all())


@pytest.mark.usefixtures("always")
def test_gaussian_far_away_keeps_the_differences_between_keys() -> None:
    # exp(-½ (a - s)²) / exp(-½ a²) = exp(a s - ½ s²) for a key s beyond the first, whatever a is.
    step, far = 2.0**-20, 2.0**20
    keys = torch.tensor([[0.0], [step], [2 * step]], dtype=torch.float64)
    values = torch.eye(3).double()
    x = torch.full((10, 1), far).double()
    got = kernel_sums("gaussian", x, keys, values, 1.0).mean()[0]
    s = keys[:, 0]
    torch.testing.assert_close(got, torch.softmax(far * s - 0.5 * s * s, 0))


@pytest.mark.usefixtures("always")
@each_kernel
def test_a_key_at_one_bandwidth_is_outside_of_a_bounded_kernel(kernel: str) -> None:
    if kernel in ("gaussian", "laplace"):
        return
    for h in (1.0, 3.0, 49.0):
        keys = torch.tensor([[0.0], [h], [2 * h]]).double()
        for tolerance in (0.0, 1e-7):
            sums = kernel_sums(kernel, keys, keys, torch.eye(3).double(), h, tolerance=tolerance)
            torch.testing.assert_close(sums.mean(), torch.eye(3).double())


@each_kernel
def test_merge_is_the_sum_over_both_and_associative(kernel: str) -> None:
    keys, values, x = torch.randn(300, 1).double() * 5, torch.randn(300, 2).double(), torch.randn(50, 1).double() * 8
    more = {"weights": torch.rand(300).double(), "moments": 1}
    whole = kernel_sums(kernel, x, keys, values, 0.9, **more)
    parts = [
        kernel_sums(kernel, x, keys[s], values[s], 0.9, weights=more["weights"][s], moments=1)
        for s in (slice(0, 100), slice(100, 101), slice(101, 300))
    ]
    one = parts[0].merge(parts[1]).merge(parts[2])
    other = parts[0].merge(parts[1].merge(parts[2]))
    for merged in (one, other, parts[2].merge(parts[0]).merge(parts[1])):
        torch.testing.assert_close(merged.mean(), whole.mean(), equal_nan=True, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(merged.log_denominator(), whole.log_denominator(), rtol=1e-12, atol=1e-12)
        full = whole.denominator > 0
        a, b = (s.first.outer[full] / s.denominator[full, None, None] for s in (merged, whole))
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_merge_refuses_sums_of_other_queries() -> None:
    x = torch.zeros(2, 1)
    one, other = kernel_sums("boxcar", x, x, x, 1.0), kernel_sums("boxcar", x[:1], x, x, 1.0)
    with pytest.raises(ValueError, match=r"Sums\.merge\(\): both sums must belong to the same queries"):
        one.merge(other)


@each_kernel
@pytest.mark.parametrize("d", [1, 2])
def test_nothing_to_sum(kernel: str, d: int) -> None:
    for m, n, e in ((0, 5, 1), (5, 0, 1), (0, 0, 2), (3, 4, 0)):
        sums = kernel_sums(kernel, torch.zeros(m, d), torch.zeros(n, d), torch.zeros(n, e), 1.0)
        assert sums.numerator.shape == (m, e)
        assert sums.denominator.shape == sums.log_scale.shape == (m,)
        assert bool((sums.denominator > 0).all()) == (n > 0 or m == 0)
    zero = kernel_sums(kernel, torch.zeros(3, d), torch.zeros(4, d), torch.ones(4, 1), 1.0, weights=torch.zeros(4))
    assert bool(zero.mean().isnan().all())


@pytest.mark.usefixtures("always")
@each_kernel
def test_leave_one_out_of_rows_that_their_own_key_dominates(kernel: str) -> None:
    # All else is 1e-12 of the row: a difference would have four digits left.
    keys = torch.arange(0, 40, 2).double().unsqueeze(-1) * 3.7
    values, weights = torch.randn(20, 1).double(), torch.rand(20).double() + 0.1
    for h in (1.0, 7.5):
        sums = kernel_sums(kernel, keys, keys, values, h, weights=weights, leave_one_out=True)
        check(sums, defined(kernel, keys, keys, values, h, weights, True), values, 1e-7)


def test_progress_ends_with_all_queries() -> None:
    told: list[tuple[int, int]] = []
    x = torch.randn(3000, 1)
    for kernel in KERNELS:
        told.clear()
        kernel_sums(kernel, x, x, x, 0.1, progress=lambda done, of: told.append((done, of)))
        assert told[-1] == (3000, 3000)
        assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_plan_says_why() -> None:
    x = torch.randn(3000, 1)
    plan = plan_sums("gaussian", x, x, x, 0.1)
    assert plan.method == "line"
    assert repr(plan).startswith("method: line, since keys on a line: exact sums")
    assert "tolerance=0 asks for every pair" in repr(plan_sums("gaussian", x, x, x, 0.1, tolerance=0.0))
    small = plan_sums("gaussian", x[:5], x, x, 0.1)
    assert "not line: 15,000 pairs are too few for it to pay" in repr(small)


def test_boxes_leave_pairs_out_and_direct_is_taken_where_they_cannot() -> None:
    keys = torch.randn(50_000, 2).double()
    narrow = plan_sums("gaussian", keys, keys, keys[:, :1], 0.02)
    wide = plan_sums("gaussian", keys, keys, keys[:, :1], 5.0)
    assert (narrow.method, wide.method) == ("boxes", "direct")
    assert "100% of the pairs lie in boxes" in wide.others["boxes"]


@each_kernel
def test_boxes_with_every_size_of_leaf(kernel: str) -> None:
    keys, x = torch.randn(37, 2).double(), torch.randn(1, 2).double()
    values = torch.randn(37, 1).double()
    task = checked_task(Task(kernel, x, keys, values, torch.ones((), dtype=torch.float64), tolerance=1e-7))
    check(box_sums(task), defined(kernel, x, keys, values, 1.0, None, False), values, 1e-7)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kernel": "cosine"}, "kernel must be one of boxcar, epanechnikov, gaussian, laplace, triangular."),
        ({"tolerance": 1.5}, r"tolerance must lie in \[0, 1\)"),
        ({"tolerance": float("nan")}, r"tolerance must lie in \[0, 1\)"),
        ({"moments": 2}, "moments must be 0 or 1"),
        ({"bandwidth": 0.0}, "bandwidth must be one number above 0, or d."),
        ({"bandwidth": torch.ones(3)}, "bandwidth must be one number above 0, or d."),
        ({"weights": torch.tensor([1.0, -1.0])}, "weights must be 0 or more."),
        ({"weights": torch.ones(3)}, "queries, keys, values and weights must fit."),
        ({"x": torch.zeros(2)}, "queries, keys, values and weights must fit."),
        ({"x": torch.zeros(2, 2)}, "queries, keys, values and weights must fit."),
        ({"values": torch.zeros(3, 1)}, "queries, keys, values and weights must fit."),
        ({"x": torch.zeros(3, 1), "leave_one_out": True}, "queries, keys, values and weights must fit."),
    ],
)
def test_refusals(change: dict[str, object], text: str) -> None:
    given = {"kernel": "gaussian", "bandwidth": 1.0, **{name: torch.zeros(2, 1) for name in ("x", "keys", "values")}}
    given |= change
    first = [given.pop(name) for name in ("kernel", "x", "keys", "values", "bandwidth")]
    with pytest.raises(ValueError, match=rf"kernel_sums\(\): {text}"):
        kernel_sums(*first, **given)


def test_dtypes_must_agree() -> None:
    x = torch.zeros(2, 1)
    with pytest.raises(TypeError, match=r"kernel_sums\(\): all tensors must be float32, or all float64."):
        kernel_sums("gaussian", x, x.double(), x, 1.0)


def test_kernels_are_told_the_runs_of_keys() -> None:
    """Without them a fused kernel would evaluate the mask for every pair."""
    first, stop = torch.tensor([0, 1, 2]), torch.tensor([1, 3, 3])
    A = attlas.attend(torch.zeros(3, 2), torch.zeros(4, 2), mask=RunPerRow(first, stop))
    assert [t.flatten().tolist() for t in A.problem.allowed_runs] == [[0, 1, 2], [1, 3, 3]]
