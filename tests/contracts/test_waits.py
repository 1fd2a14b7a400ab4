"""The host does not wait for a device: not at all for a product, at most twice for a read, whatever the tiles.

What waits, and where, is counted on a pretended device; see `tests.pretend`. It has no float64, and none is made there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from tests.pretend import PretendDevice
from torch import Tensor

import attlas
from attlas import stats
from attlas.engine import online
from attlas.foundation import devices
from attlas.foundation.checks import all_finite, surely_finite
from attlas.matrix.value_weighted import norms_of, value_weighted

Attend: TypeAlias = Callable[..., Any]
Case: TypeAlias = Callable[[Attend, Tensor, Tensor, Tensor], Tensor]

M = 160  # queries and keys
WHOLE, CELLS = 1 << 15, 3 << 11  # cells of a tile: five times as many tiles
CAUSAL = attlas.Causal()
NEAR = attlas.Window(40, 0)


def known(attend: Attend, q: Tensor, k: Tensor) -> Any:
    """Return a matrix of which the log-sum-exp is known."""
    A = attend(q, k, mask=NEAR)
    assert A.lse.shape == q.shape[:3]
    return A


def part(A: attlas.AttentionMatrix) -> attlas.AttentionMatrix:
    """Return a window of queries and keys."""
    return A.window(range(50, 150), range(25, 125))


PRODUCTS: dict[str, Case] = {
    "all keys": lambda attend, q, k, v: attend(q, k) @ v,
    "causal": lambda attend, q, k, v: attend(q, k, mask=CAUSAL) @ v,
    "window": lambda attend, q, k, v: attend(q, k, mask=NEAR) @ v,
    "sink": lambda attend, q, k, v: attend(q, k, mask=NEAR, sink=q[0, :, 0, 0].detach()) @ v,
    "distances": lambda attend, q, k, v: attend(q, k, score=attlas.Laplace(1.0)) @ v,
    "capped": lambda attend, q, k, v: attend(q, k, score=attlas.SoftCap(attlas.ScaledDot(), 5.0)) @ v,
    "lse known": lambda attend, q, k, v: known(attend, q, k) @ v,
    "transposed": lambda attend, q, k, v: attend(q, k, mask=CAUSAL).mT @ v,
}
READS: dict[str, Case] = {
    "lse": lambda attend, q, k, v: attend(q, k, mask=CAUSAL).lse,
    "dense": lambda attend, q, k, v: attend(q, k, mask=CAUSAL).to_dense(),
    "dense, lse known": lambda attend, q, k, v: known(attend, q, k).to_dense(),
    "rows": lambda attend, q, k, v: attend(q, k, mask=CAUSAL)[0, :, 10:100],
    "heads": lambda attend, q, k, v: attend(q, k, mask=CAUSAL)[:, [0, 1]].to_dense(),
    "logits": lambda attend, q, k, v: attend(q, k, mask=CAUSAL).logits[..., 10:100, :],
    "window": lambda attend, q, k, v: part(attend(q, k, mask=CAUSAL)).to_dense(),
    "window times values": lambda attend, q, k, v: part(attend(q, k, mask=CAUSAL)) @ v[:, :, 25:125],
    "statistics of a window": lambda attend, q, k, v: part(attend(q, k, mask=CAUSAL)).collect(stats.RowMass())[0],
    "transposed product, lse known": lambda attend, q, k, v: known(attend, q, k).mT @ v,
    "entropy, lse known": lambda attend, q, k, v: known(attend, q, k).collect(stats.Entropy())[0],
    "sum over queries": lambda attend, q, k, v: attend(q, k, mask=CAUSAL).sum(-2),
    "sum over heads": lambda attend, q, k, v: attend(q, k, mask=CAUSAL).sum(1),
    "maximum over heads": lambda attend, q, k, v: attend(q, k, mask=CAUSAL).amax(1),
    "function of cells": lambda attend, q, k, v: attend(q, k, mask=CAUSAL).exp().sum(-1),
    "cells times a column": lambda attend, q, k, v: (attend(q, k, mask=CAUSAL) * v[..., :1]).sum(-2),
    "variance": lambda attend, q, k, v: attend(q, k, mask=CAUSAL).var(-1),
    "value weighted": lambda attend, q, k, v: value_weighted(attend(q, k), norms_of(v)).to_dense(),
    "divergence": lambda attend, q, k, v: attlas.divergence(attend(q, k), attend(v, k)),
    "squared": lambda attend, q, k, v: attlas.divergence(attend(q, k), attend(v, k), kind="squared"),
    "of means": lambda attend, q, k, v: attlas.divergence(attend(q, k), attend(v, k), heads="mean"),
}
BACKWARDS = {
    "entropy": lambda attend, q, k, v: attend(q, k, mask=CAUSAL).collect(stats.Entropy())[0],
    "cells of rows": lambda attend, q, k, v: attend(q, k, mask=CAUSAL)[..., 10:100, 5:20],
    **{name: PRODUCTS[name] for name in ("window", "sink", "capped", "transposed")},
    **{f"read: {name}": READS[name] for name in ("lse", "dense", "sum over queries", "sum over heads", "squared")},
}
STATISTICS: dict[str, Callable[[Tensor], stats.Statistic]] = {
    "ArgMax": lambda v: stats.ArgMax(),
    "ColumnArgMax": lambda v: stats.ColumnArgMax(),
    "ColumnMass": lambda v: stats.ColumnMass(),
    "ColumnMax": lambda v: stats.ColumnMax(),
    "Coverage": lambda v: stats.Coverage((0.5, 0.9)),
    "EffectiveKeys": lambda v: stats.EffectiveKeys(),
    "Entropy": lambda v: stats.Entropy(),
    "KeyMaps": lambda v: stats.KeyMaps([0, 5, -1]),
    "LogitMoments": lambda v: stats.LogitMoments(),
    "MaxLogit": lambda v: stats.MaxLogit(),
    "MaxWeight": lambda v: stats.MaxWeight(),
    "Offsets": lambda v: stats.Offsets(),
    "Picture": lambda v: stats.Picture(8, 8),
    "Pooled": stats.Pooled,
    "RowMass": lambda v: stats.RowMass(),
    "Spans": lambda v: stats.Spans([(0, 64), (64, M)], [(0, 100), (100, M)]),
    "TailMass": lambda v: stats.TailMass(4),
    "TopK": lambda v: stats.TopK(4),
}


def counted(case: Case, cells: int, *, grad: bool = False) -> PretendDevice:
    """Run a case on a pretended device, in tiles of so many cells, and return what was counted.

    Copies to "mps" wait always, those to "cuda" not always, and all else is alike.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(1, 2, M, 8, generator=generator, requires_grad=grad) for _ in range(3)]
    device = PretendDevice("mps")

    def attend(q: Tensor, k: Tensor, **given: object) -> attlas.AttentionMatrix:
        return attlas.attend(q, k, plan=attlas.Plan("tiled", cells=cells), **given)  # type: ignore[arg-type]

    with device, torch.set_grad_enabled(grad):
        tokens = [device.put(t) for t in tokens]
        device.forget()
        out = case(attend, *tokens)
        if grad:
            out.square().sum().backward()
    return device


def check(case: Case, most: int, **given: bool) -> None:
    """Check that a case waits at most so often, and no more often in smaller tiles, and makes no float64."""
    few, many = (counted(case, cells, **given) for cells in (WHOLE, CELLS))
    for found in (few, many):
        assert sum(found.waits.values()) <= most, found.report()
        assert not found.mixed, found.report()
        assert not found.float64, found.report()
    assert many.calls > few.calls  # there were more tiles
    # A place waits once more where tiles hold no whole rows: a known log-sum-exp is then used, and has to be precise.
    assert all(count <= max(few.waits[at], 1) for at, count in many.waits.items())


@pytest.mark.parametrize("case", PRODUCTS)
def test_a_product_does_not_wait(case: str) -> None:
    check(PRODUCTS[case], 0)


@pytest.mark.parametrize("kind", ["bool", "numbers", "bias"])
def test_a_mask_tensor_on_the_cpu_is_copied_once(kind: str) -> None:
    """And one of numbers once as a mask, once as what is added to the scores."""

    def product(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cells = torch.ones(M, M).tril()
        if kind == "bias":
            return attend(q, k, score=attlas.ScaledDot() + attlas.TensorBias(cells)) @ v
        return attend(q, k, mask=attlas.from_tensor(cells.bool() if kind == "bool" else cells.log() + cells)) @ v

    check(product, 2 if kind == "numbers" else 1)


@pytest.mark.parametrize("kind", ["bool", "numbers", "bias"])
@pytest.mark.parametrize("how", ["inference mode", "float64", "large", "too large"])
def test_which_mask_tensors_on_the_cpu_are_copied_once(kind: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of inference mode too, of numbers that the device has not, and large ones where it has room for them."""
    cells = torch.ones(M, M, dtype=torch.float64 if how == "float64" else torch.float32).tril()
    if "large" in how:
        monkeypatch.setattr(devices, "LARGEST_COPY", 0)
        monkeypatch.setattr(devices, "free_bytes", lambda _: cells.nbytes * (4 if how == "large" else 3))
    if how == "inference mode":
        with torch.inference_mode():
            cells = cells.clone()
    given: dict[str, Any] = {"mask": attlas.from_tensor(cells.bool() if kind == "bool" else cells.log() + cells)}
    if kind == "bias":
        given = {"score": attlas.ScaledDot() + attlas.TensorBias(cells)}

    def product(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, **given) @ v

    device = counted(product, CELLS)
    copies = 2 if kind == "numbers" else 1
    if how == "too large" and kind != "bool":
        assert sum(device.waits.values()) > 10 * copies
    else:
        assert sum(device.waits.values()) == copies, device.report()
    assert not device.mixed, device.report()


def test_a_mask_tensor_of_inference_mode_may_change_between_two_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 8, generator=generator) for _ in range(3))
    with torch.inference_mode():
        bias, lengths = torch.zeros(40, 40), torch.tensor([40])
        score, mask = attlas.ScaledDot() + attlas.TensorBias(bias), attlas.Padding(lengths)
        for number in range(2):
            bias[:, number], mask.lengths[:] = 9.0, 30 - number
            wanted = attlas.attend(q, k, score=score, mask=mask) @ v
            with PretendDevice("mps") as device:
                tokens = [device.put(t.clone()) for t in (q, k, v)]
                A = attlas.attend(*tokens[:2], score=score, mask=mask, plan=attlas.Plan("tiled", rows=8, columns=8))
                device.forget()
                found = A @ tokens[2]
            torch.testing.assert_close(found, wanted)
            assert sum(device.waits.values()) == 2, device.report()


@pytest.mark.parametrize("case", ["product", "window", "entropy"])
@pytest.mark.parametrize("grad", [False, True])
def test_the_formula_of_a_gaussian_is_asked_for_once_a_matrix(case: str, grad: bool) -> None:
    """The answer decides which kernels run. A product with a graph, its backward and further reads ask no more."""
    device = PretendDevice("mps")
    with device, torch.set_grad_enabled(grad):
        q, k, v = (device.put(torch.randn(1, 2, M, 16).requires_grad_(grad)) for _ in range(3))
        A = attlas.attend(q, k, score=attlas.Gaussian(4.0), plan=attlas.Plan("tiled", cells=CELLS))
        A = part(A) if case == "window" else A
        device.forget()
        values = v[:, :, 25:125] if case == "window" else v
        for _ in range(2):
            out = A.collect(stats.Entropy())[0] if case == "entropy" else A @ values
            if grad and out.requires_grad:
                out.sum().backward()
    asked = [what for what, _ in device.waits.elements() if what == "item"]
    # A part of a matrix asks for itself, and for the log-sum-exp of its rows the whole does.
    assert len(asked) <= (2 if case == "window" else 1), device.report()


@pytest.mark.parametrize("case", READS)
def test_a_read_waits_twice_at_most(case: str) -> None:
    check(READS[case], 2)


@pytest.mark.parametrize("case", BACKWARDS)
def test_a_backward_waits_twice_at_most(case: str) -> None:
    check(BACKWARDS[case], 2, grad=True)


@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_waits_twice_at_most(name: str) -> None:
    check(lambda attend, q, k, v: attend(q, k, mask=CAUSAL).collect(STATISTICS[name](v))[0], 2)


def test_every_statistic_is_in_the_table() -> None:
    classes = {name for name in stats.__all__ if issubclass(type(getattr(stats, name)), type)}
    found = {name for name in classes if issubclass(getattr(stats, name), stats.Statistic)}
    assert found - {"Statistic"} == set(STATISTICS)


@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize("case", ["dense, lse known", "window", "entropy, lse known", "transposed product, lse known"])
def test_large_logits_of_a_device(case: str, scale: float) -> None:
    """What is asked once a matrix elsewhere, and once a tile on the CPU, gives the same numbers."""
    plan = attlas.Plan("tiled", cells=CELLS)
    expected = []
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, M, 8, generator=generator) for _ in range(3))
    q = q * scale
    run = READS[case]
    for dtype in (torch.float32, torch.float64):
        expected.append(run(lambda q, k, **o: attlas.attend(q, k, plan=plan, **o), *(t.to(dtype) for t in (q, k, v))))
    with PretendDevice("cuda") as device:
        on_device = [device.put(t.clone()) for t in (q, k, v)]
        found = run(lambda q, k, **o: attlas.attend(q, k, plan=plan, **o), *on_device)
    error, of_cpu = (float((t.double() - expected[1]).abs().max()) for t in (found, expected[0]))
    assert error <= 2 * of_cpu + 1e-6


@pytest.mark.parametrize("keys", [6, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_special_values_are_counted_by_one_product(keys: int, dtype: torch.dtype) -> None:
    """Infinity, minus infinity and NaN reach the rows that see their keys, each as often as it may be there."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.tensor([math.inf, -math.inf, math.nan, 1.0], dtype=dtype)
    values = torch.stack([kinds[i].expand(keys) for i in (0, 1, 2, 3)], dim=-1).contiguous()
    values = torch.cat([values, kinds[torch.randint(4, (keys, 5), generator=generator)]], dim=-1)
    seen = torch.rand(7, keys, generator=generator) < torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0]).unsqueeze(-1)
    seen[-1, 1:] = False
    found = online.special_part(seen, online.special_codes(values))
    terms = torch.where(seen.unsqueeze(-1), torch.where(values.isfinite(), 0.0, values.float()), 0.0)
    assert torch.equal(found.nan_to_num(2.0, 3.0, 4.0).double(), terms.sum(-2).nan_to_num(2.0, 3.0, 4.0).double())


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_special_values_of_a_device(kind: str) -> None:
    """They are found there without a question."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 8, generator=generator) for _ in range(3))
    v[0, 0, 40, 1], v[0, 1, 50, 2], v[0, 1, 60, 2] = math.nan, math.inf, -math.inf
    expected = attlas.attend(q, k, mask=NEAR) @ v, attlas.attend(q, k, mask=NEAR).mT @ v
    with PretendDevice(kind) as device:
        A = attlas.attend(device.put(q), device.put(k), mask=NEAR)
        device.forget()
        values = device.put(v)
        found = A @ values, A.mT @ values
        assert not device.waits, device.report()
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert not own.isfinite().all()


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_whether_all_numbers_are_finite(bad: float) -> None:
    """It is one question, however many tensors there are; and none where False will do."""
    some, other = torch.ones(3), torch.full((2,), 3e38)
    other[0] += bad
    with PretendDevice("cuda") as device:
        tensors = device.put(some), device.put(other)
        assert all_finite(*tensors) is (bad == 0.0)
        assert sum(device.waits.values()) == 1
        assert not surely_finite(*tensors)
        assert sum(device.waits.values()) == 1
    assert all_finite(some, other) is (bad == 0.0)
    assert surely_finite(some, other) is (bad == 0.0)
