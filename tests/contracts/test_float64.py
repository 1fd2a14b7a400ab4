"""Where a device has no float64, none is made, and weights are exact nevertheless.

Apple's GPUs are pretended: see `tests.pretend`. The log-sum-exp is a pair of float32 there.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contracts.test_waits import CELLS, STATISTICS, counted
from tests.messages import refusal
from tests.pretend import PretendDevice
from torch import Tensor

import attlas
from attlas import scaling, stats
from attlas.engine import online
from attlas.errors import DeviceError
from attlas.foundation.checks import has_float64, sum_dtype

CPU, MPS = torch.device("cpu"), torch.device("mps")
CAUSAL = attlas.Causal()
LARGEST = 1000.0  # logits
ERROR = 2e-6  # of a weight


def tokens(m: int = 96, n: int = 160, *, largest: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values; with `largest`, no logit is larger, and one is as large."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, size, 16, generator=generator) for size in (m, n, n))
    if largest is not None:
        q = q * (largest / (q @ k.mT / 4.0).abs().amax())
    return q, k, v


def weights_of(q: Tensor, k: Tensor, mask: Tensor | None = None, sink: Tensor | None = None) -> Tensor:
    """Return the weights of a scaled dot product, and those of a sink in the last column, in float64."""
    logits = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    logits = logits if mask is None else logits.masked_fill(~mask, -math.inf)
    sinks = torch.full((), -math.inf, dtype=torch.float64) if sink is None else sink.double().view(1, -1, 1, 1)
    return torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], dim=-1).softmax(dim=-1)


def logits_of(q: Tensor, k: Tensor) -> Tensor:
    """Return the logits of a scaled dot product as float32 gives them, in float64."""
    return (q @ k.mT).double() / math.sqrt(q.shape[-1])


@pytest.mark.parametrize("name", STATISTICS)
def test_a_gradient_of_a_statistic_makes_none(name: str) -> None:
    """Products, reads, their gradients and the statistics themselves are looked at where their waits are counted."""

    def run(attend: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = attend(q, k, mask=CAUSAL).collect(STATISTICS[name](v))[0]
        found = found if isinstance(found, Tensor) else found[0]
        return found if found.is_floating_point() and found.requires_grad else q.sum() * 0.0

    device = counted(run, CELLS, grad=True)
    assert not device.float64, device.report()


@pytest.mark.parametrize("kind", ["plain", "causal", "sink", "window", "tiles", "lse known"])
def test_weights_of_large_logits(kind: str) -> None:
    """They are those of float64 within 2e-6, where the logits of float32 are taken as they are."""
    q, k, _ = tokens(largest=LARGEST)
    # Numbers with few digits, so that float32 rounds no product: what is left is the error of the log-sum-exp.
    q, k = q.mul(4).round().div(4), k.mul(4).round().div(4)
    mask = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]).bool() if kind == "causal" else None
    sink = torch.tensor([LARGEST, 0.0]) if kind == "sink" else None
    expected = weights_of(q, k, mask, sink)[..., :-1]
    with PretendDevice("mps") as device:
        given: dict[str, Any] = {"mask": CAUSAL} if kind == "causal" else {}
        given |= {} if sink is None else {"sink": device.put(sink)}
        plan = attlas.Plan("tiled", cells=1 << 11) if kind == "tiles" else attlas.Plan()
        A = attlas.attend(device.put(q), device.put(k), plan=plan, **given)
        if kind == "lse known":
            assert A.lse.dtype is torch.float32
        if kind == "window":
            A, expected = A.window(range(5, 50), range(20, 90)), expected[:, :, 5:50, 20:90]
        found = A.to_dense()
        collected = A.collect(stats.RowMass(), stats.MaxWeight())
    assert not device.float64, device.report()
    assert float((found.double() - expected).abs().max()) < ERROR
    mass, largest = (t.double() for t in collected)
    assert float((mass - expected.sum(-1)).abs().max()) < ERROR
    assert float((largest - expected.amax(-1)).abs().max()) < ERROR


@pytest.mark.parametrize("largest", [1.0, LARGEST])
def test_products_and_gradients_of_large_logits(largest: float) -> None:
    """They are as exact as on the CPU, whose log-sum-exp is float64."""
    q, k, v = tokens(largest=largest)

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        A = attlas.attend(q, k, mask=CAUSAL, plan=attlas.Plan("tiled", cells=1 << 12))
        entropy, mass = A.collect(stats.Entropy(), stats.ColumnMass())
        outs = A @ v, A.mT @ v[:, :, :96], A[..., 3:9, :], A.lse, entropy, mass
        found = list(outs)
        for out in outs:
            found += torch.autograd.grad(out.sin().sum(), [q, k], retain_graph=True)
        return [t.detach() for t in found]

    exact = run(*(t.double() for t in (q, k, v)))
    on_cpu = run(q, k, v)
    with PretendDevice("mps") as device:
        found = run(*(device.put(t.clone()) for t in (q, k, v)))
    assert not device.float64, device.report()
    for own, cpu, reference in zip(found, on_cpu, exact, strict=True):
        size = float(reference.abs().max())
        error, of_cpu = (float((t.double() - reference).abs().max()) / size for t in (own, cpu))
        assert error <= 2 * of_cpu + ERROR


def test_rows_without_keys() -> None:
    q, k, v = tokens(8, 8)
    with PretendDevice("mps") as device:
        A = attlas.attend(device.put(q), device.put(k), mask=attlas.Window(3, 0) & attlas.Padding([0]))
        lse, dense, out, entropy = A.lse, A.to_dense(), A @ device.put(v), A.collect(stats.Entropy())[0]
        assert A.window(range(2, 5), range(3, 7)).to_dense().eq(0).all()
    assert lse.eq(-math.inf).all()
    assert dense.eq(0).all()
    assert out.eq(0).all()
    assert entropy.eq(0).all()


def test_a_part_of_a_matrix_keeps_its_rows() -> None:
    """A window of a window, some heads, and products of both have the weights of the whole."""
    q, k, v = tokens(largest=LARGEST)
    with PretendDevice("mps") as device:
        A = attlas.attend(device.put(q), device.put(k))
        dense = A.to_dense()
        part = A[:, 1:].window(range(10, 60), range(20, 90)).window(range(5, 30), range(10, 40))
        values = device.put(v)[:, 1:, 30:60]
        found, pooled, check = part.to_dense(), part @ values, part.check()
    assert not device.float64, device.report()
    torch.testing.assert_close(found, dense[:, 1:, 15:40, 30:60], rtol=1e-5, atol=ERROR)
    torch.testing.assert_close(pooled, dense[:, 1:, 15:40, 30:60] @ v[:, 1:, 30:60], rtol=1e-5, atol=1e-5)
    assert check < 1e-3  # large logits of float32 against those of float64


def test_a_matrix_is_checked_on_the_cpu() -> None:
    q, k, _ = tokens()
    with PretendDevice("mps") as device:
        assert attlas.attend(device.put(q), device.put(k), mask=CAUSAL).check() < 1e-6
    assert not device.float64, device.report()


def test_a_matrix_that_moves() -> None:
    """A part, which cannot compute its log-sum-exp again, takes it along, and keeps its weights."""
    q, k, _ = tokens(largest=LARGEST)
    with PretendDevice("mps") as device:
        A = attlas.attend(device.put(q), device.put(k)).window(range(50), range(70))
        B = A.to("cpu")
        lse = B.softmax_weights.lse()
        assert lse.dtype is torch.float64
        assert lse.device == CPU
        C = B.to("mps")
        pair = C.softmax_weights.lse()
        assert pair.shape == (1, 2, 50, 2)
        own, moved, back = (M.to_dense() for M in (A, B, C))
    assert not device.float64, device.report()
    torch.testing.assert_close(moved, own, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(back, own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shift", [0.0, 100.0, -1000.0, 12345.678])
@pytest.mark.parametrize("keys", [1, 40, 100_000])
def test_a_pair_is_as_exact_as_the_sum_it_is_made_of(shift: float, keys: int) -> None:
    generator = torch.Generator().manual_seed(keys)
    logits = torch.randn(2, 3, 4, keys, generator=generator) * 3 + shift
    state = online.absorb(online.empty((2, 3, 4), 0, like=logits), logits.clone(), None)
    with PretendDevice("mps") as device:
        state = online.Running(*map(device.put, state))
        pair = online.finish(state)[1]
        assert pair.shape == (2, 3, 4, 2)
        high, low = online.split_lse(pair, torch.float32)
        assert low is not None
        assert not device.waits
    exact = logits.double().logsumexp(-1)
    assert float((high.double() + low.double() - exact).abs().max()) < 2e-6
    assert torch.equal(high, logits.amax(-1))
    again = online.moved_lse(pair.clone(), CPU)
    assert again.dtype is torch.float64
    split = online.moved_lse(again, MPS) if torch.backends.mps.is_available() else None
    assert split is None or split.shape == pair.shape
    torch.testing.assert_close(online.rounded(pair).double(), exact, rtol=1e-6, atol=2e-6)


def test_forms_of_a_log_sum_exp() -> None:
    """Each function of them gives of a pair what it gives of float64."""
    lse = torch.tensor([[[-math.inf, 0.0, 3.7, 812.345678]]], dtype=torch.float64)
    sink, shift = torch.tensor([1.25]).view(1, -1, 1), torch.tensor([[[0.0, 1.0, 3.0, 812.0]]])
    high = lse.float()
    pair = torch.stack([high, (lse - high).nan_to_num(0.0).float()], dim=-1)
    rows = torch.tensor([1, 3])
    for own, other in (
        (online.rounded(pair), lse.float()),
        (online.above(pair, shift), online.above(lse, shift)),
        (online.sees_keys(pair), online.sees_keys(lse)),
        (online.share_of(pair, pair), online.share_of(lse, lse)),
        (online.share_of(sink, pair), online.share_of(sink.double(), lse)),
        (online.share_of(pair - 1, online.moved_lse(pair, CPU)), online.share_of(lse - 2, lse)),
        (online.moved_lse(pair, CPU), lse),
        (pair[:, :, rows], torch.stack([lse.float(), (lse - high).float()], dim=-1)[:, :, rows]),
    ):
        torch.testing.assert_close(own.double(), other.double(), rtol=1e-6, atol=1e-6)
    assert online.exceeds(pair, 800.0)
    assert not online.exceeds(pair, 900.0)
    assert online.exact(pair) is pair
    assert online.is_exact(pair)
    assert online.exact(high) is None
    assert not online.is_exact(high)
    assert has_float64(CPU)
    assert not has_float64(MPS)
    assert sum_dtype(MPS) is torch.float32


@pytest.mark.parametrize("target", ["variance", "entropy"])
def test_scaling_measures_on_the_cpu(target: str) -> None:
    q, k, _ = tokens()

    def run(A: attlas.AttentionMatrix) -> list[Tensor]:
        found = scaling.temperature(A, **{target: 1.0})
        return [*scaling.jacobian(A), found.factor, found.reached]

    expected = run(attlas.attend(q, k, mask=CAUSAL))
    heads = scaling.heads(attlas.attend(q, k, mask=CAUSAL))
    with PretendDevice("mps") as device:
        A = attlas.attend(device.put(q.clone()), device.put(k.clone()), mask=CAUSAL)
        found = run(A)
        assert all(t.device == A.device for t in found)
        assert scaling.heads(A) == heads
        with pytest.raises(DeviceError):
            A.collect(scaling.Jacobian())
    assert not device.float64, device.report()
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own.cpu(), other, rtol=1e-4, atol=1e-5)


def test_sums_of_kernels_are_refused() -> None:
    estimators = pytest.importorskip("attlas.estimators", reason="scikit-learn is not installed")
    X = torch.randn(20, 2)
    with PretendDevice("mps") as device:
        x = device.put(X.clone())
        said = refusal(DeviceError, lambda: estimators.kernel_sums("gaussian", x, x, x, 1.0))
        assert said == "kernel_sums(): mps:0, which has no float64"
        given = X.numpy(), X[:, 0].numpy()
        said = refusal(DeviceError, lambda: estimators.AttentionRegressor(device="mps").fit(*given))
        assert said == "AttentionRegressor(): mps:0, which has no float64"
        fitted = estimators.AttentionRegressor(bandwidth=1.0).fit(*given).set_params(device="mps")
        assert "no float64" in refusal(DeviceError, lambda: fitted.predict(given[0]))
    assert not device.float64, device.report()


@pytest.mark.parametrize("score", [None, attlas.ScaledDot() + attlas.Alibi(2)], ids=["dot", "biased"])
def test_the_numbers_of_a_corpus(score: attlas.Score | None) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    measuring = importlib.import_module("attlas.corpus.measuring")
    q, k, _ = tokens(90, 90)
    ids = torch.randint(9, (1, 90), generator=torch.Generator().manual_seed(0))
    (expected,) = measuring.measure_layer(attlas.attend(q, k, score=score, mask=CAUSAL), ids)
    with PretendDevice("mps") as device:
        A = attlas.attend(device.put(q.clone()), device.put(k.clone()), score=score, mask=CAUSAL)
        (found,) = measuring.measure_layer(A, ids)
    assert not device.float64, device.report()
    assert not device.mixed, device.report()
    np.testing.assert_allclose(found.sums, expected.sums, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.key_mass, expected.key_mass, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep", ["device", "cpu"])
def test_a_recording(keep: str, tmp_path: Path) -> None:
    """What is recorded makes none, is stored as that of any device, and its table is the same."""

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attlas.attention(q, k, v, mask=CAUSAL)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(), Layer()

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.second(self.first(q, k, v), k, v)

    model, given = Model(), tokens(40, 40, largest=200.0)
    options: dict[str, Any] = {"statistics": [stats.Entropy(), stats.EffectiveKeys(), stats.MaxWeight()]}
    if keep == "cpu":
        options["keep"] = keep
    with attlas.record(model, **options) as expected:
        model(*given)
    with PretendDevice("mps") as device:
        there = [device.put(t.clone()) for t in given]
        with attlas.record(model, **options) as atlas:
            model(*there)
        dense = atlas[0].to_dense()
        table = atlas.table()
        atlas.save(tmp_path / "recording")
    assert not device.float64, device.report()
    torch.testing.assert_close(dense.cpu(), expected[0].to_dense(), rtol=1e-4, atol=1e-5)
    for own, other in zip(table, expected.table(), strict=True):
        numbers = {name for name, value in other.items() if isinstance(value, float)}
        assert {name: own[name] for name in numbers} == pytest.approx(
            {name: other[name] for name in numbers}, rel=1e-4, abs=1e-4, nan_ok=True
        )
        assert {**own, **dict.fromkeys(numbers, 0)} == {**other, **dict.fromkeys(numbers, 0)}
    again = attlas.load(tmp_path / "recording")
    assert again[0].softmax_weights.lse().dtype is torch.float64
    torch.testing.assert_close(again[0].to_dense(), dense.cpu(), rtol=1e-5, atol=1e-6)
