"""When the Triton kernels are chosen, and what they are asked for. The device is pretended; see `tests.pretend`.

The kernels run in `tests/triton_kernels`. Here the definition stands in their place, so that triton is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.pretend import PretendDevice
from torch import Tensor
from torch.utils import _pytree

import attlas
from attlas import BackendError, Plan, stats
from attlas.engine import costs, trust
from attlas.engine.backends.flex import backend as flex
from attlas.engine.backends.triton import backend, runs, trusted
from attlas.engine.backends.triton.operands import Operands

M, N = 40, 50
C = attlas.Causal()
STATISTICS = (stats.Entropy(), stats.ColumnMass(), stats.MaxLogit())


class Gpu:
    """A pretended GPU, on which the definition is computed in the place of kernels."""

    def __init__(self) -> None:
        self.device, self.asked = PretendDevice("cuda"), list[set[str]]()

    def found_by(self, of: Operands, wanted: Mapping[str, Any], v: Tensor | None, lse: Any, *_: Any, **__: Any) -> Any:
        self.asked.append(set(wanted))
        found = trusted.numbers_of({**wanted, "lse": True}, *trusted.definition(of), v)
        return {name: t if name == "lse" else t.float() for name, t in found.items()}

    def tokens(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [self.device.put(t) for t in tokens(dtype)]


def tokens(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, size, 8, generator=generator).to(dtype) for heads, size in ((4, M), (2, N), (2, N))]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    monkeypatch.setattr(backend, "not_available", lambda: None)
    monkeypatch.setattr(backend, "found_by", found.found_by)
    monkeypatch.setattr(trust, "fault_of", lambda *_: None)
    monkeypatch.setattr(flex, "can_compile", lambda: False)
    monkeypatch.setattr(costs, "TRITON_CELLS", 0)
    return found


CAPPED = attlas.SoftCap(attlas.ScaledDot(), 2.0)


@pytest.mark.parametrize(
    "given", [{"mask": C}, {"mask": attlas.Window(9, 2)}, {"score": CAPPED}, {"score": attlas.Laplace(2.0), "mask": C}]
)
def test_statistics_are_read_by_them(given: dict[str, Any], gpu: Gpu) -> None:
    right = attlas.attend(*tokens()[:2], **given, plan=Plan("tiled")).collect(*STATISTICS)
    with gpu.device, torch.no_grad():
        q, k, _ = gpu.tokens()
        A = attlas.attend(q, k, **given)
        gpu.device.forget()
        found = A.collect(*STATISTICS)
        assert sum(gpu.device.waits.values()) <= 2, gpu.device.report()
        assert not gpu.device.mixed, gpu.device.report()
    assert gpu.asked == [{"entropy", "column_mass", "max_logit", "lse"}]
    for own, other in zip(_pytree.tree_leaves(found), _pytree.tree_leaves(right), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_the_choice_and_its_reasons(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu.device, torch.no_grad():
        q, k, v = gpu.tokens(torch.bfloat16)
        A = attlas.attend(q, k, mask=C)
        choice = attlas.explain(A)
        assert choice.backend == "triton"
        assert choice.because == "it should be the fastest here, by a cost that nobody has measured"
        monkeypatch.setattr(flex, "can_compile", lambda: True)
        monkeypatch.setattr(costs, "FLEX_CELLS", 0)
        choice = attlas.explain(A)
        assert choice.backend == "flex"  # which gives gradients too
        assert choice.costs["triton"] == costs.TRITON_OUTPUT
        assert choice.costs["flex"] < costs.TRITON_OUTPUT < choice.costs["tiled"]
        few = attlas.attend(q[:, :, -1:], k, mask=C)  # a step of generation
        assert attlas.explain(few).backend == "triton"
        monkeypatch.setattr(costs, "TRITON_CELLS", 1 << 30)
        assert attlas.explain(few).backend == "tiled"
        A.collect(*STATISTICS)
        assert not gpu.asked
        monkeypatch.undo()
        reason = attlas.explain(A).others["triton"]
        assert reason in ("not available: triton is not installed", "not available: torch sees no GPU")
        with pytest.raises(BackendError, match="triton does not run: not available"):
            attlas.attend(q, k, mask=C, plan=Plan("triton")) @ v


def test_what_is_refused_is_said(gpu: Gpu) -> None:
    with gpu.device, torch.no_grad():
        q, k, _ = gpu.tokens()
        given: dict[str, dict[str, Any]] = {
            "up to 4 runs of keys": {"mask": attlas.Dilated(9, 0, 2)},
            "not a dot product": {"score": attlas.Laplace() + attlas.Alibi(4)},
        }
        for reason, settings in given.items():
            assert reason in attlas.explain(attlas.attend(q, k, **settings)).others["triton"]
        assert "16 bits" in attlas.explain(attlas.attend(q.double(), k.double())).others["triton"]
        assert "nothing" in attlas.explain(attlas.attend(q[:, :, :0], k)).others["triton"]
        wide = attlas.attend(q.repeat(1, 1, 1, 40), k.repeat(1, 1, 1, 40))
        assert "up to 256" in attlas.explain(wide).others["triton"]


def test_several_runs_of_keys_share_no_key() -> None:
    """Those of sums and intersections of masks, and of stored runs, allow what the mask allows."""
    head = attlas.Padding(3)
    masks: dict[str, attlas.Mask] = {
        "first keys and a window": C & (attlas.Window(9, 0) | head),
        "three": (attlas.Window(4, 0) | head) | attlas.Window(2, 1),
        "heads": C & (attlas.Heads({1: attlas.Window(5, 0)}, attlas.Window(3, 0)) | head),
        "stored": attlas.masks.runs_of(C & (attlas.Window(9, 0) | head), 1, 4, M, N),
    }
    q, k, _ = tokens()
    for name, mask in masks.items():
        problem = attlas.attend(q, k, mask=mask).problem
        found = runs.runs_of(problem)
        assert found is not None, name
        assert len(found) > 1, name
        at = torch.arange(N)
        inside = [(at >= first.unsqueeze(-1)) & (at < stop.unsqueeze(-1)) for first, stop in found]
        counted = torch.stack(torch.broadcast_tensors(*inside)).sum(0)
        allowed = problem.mask.allows(problem.tile(*map(range, problem.shape)))
        assert torch.equal(counted.expand(1, 4, M, N), allowed.expand(1, 4, M, N).long()), name
    assert runs.runs_of(attlas.attend(q, k, mask=attlas.Dilated(9, 0, 2)).problem) is None


def test_availability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_is_installed", lambda: False)
    assert backend.not_available() == "not available: triton is not installed"
    monkeypatch.setattr(backend, "_is_installed", lambda: True)
    expected = None if torch.cuda.is_available() else "not available: torch sees no GPU"
    assert backend.not_available() == expected
