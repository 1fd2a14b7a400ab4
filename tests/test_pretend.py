"""The pretended device notes what a real one would wait for, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.pretend import PretendDevice
from torch import Tensor


def seen(run: Callable[[PretendDevice, Tensor], object], kind: str = "cuda") -> PretendDevice:
    """Run a function with a tensor of a pretended device, and return the device."""
    device = PretendDevice(kind)
    with device:
        t = device.put(torch.arange(6.0).view(2, 3))
        device.forget()
        run(device, t)
    return device


WAITS: dict[str, Callable[[PretendDevice, Tensor], object]] = {
    "bool": lambda d, t: bool((t > 2).any()),
    "item": lambda d, t: t.sum().item(),
    "float": lambda d, t: float(t.sum()),
    "tolist": lambda d, t: t.tolist(),
    "equal": lambda d, t: torch.equal(t, t.clone()),
    "nonzero": lambda d, t: t.nonzero(),
    "where": lambda d, t: torch.where(t > 2),
    "index by bool": lambda d, t: t[t > 2],
    "index by list": lambda d, t: t[[0, 1]],
    "index of the host": lambda d, t: t[torch.tensor([0, 1])],
    "cpu": lambda d, t: t.cpu(),
    "to the host": lambda d, t: t.to("cpu"),
    "to the device": lambda d, t: torch.ones(3).to(t.device),
    "to a tensor": lambda d, t: torch.ones(3).to(t),
    "made of numbers": lambda d, t: torch.tensor([1.0, 2.0], device=t.device),
    "copied into": lambda d, t: t.copy_(torch.ones(2, 3)),
    "repeats": lambda d, t: t.repeat_interleave(torch.ones(2, dtype=torch.int64, device=t.device), dim=0),
}

WAITS_NOT: dict[str, Callable[[PretendDevice, Tensor], object]] = {
    "arithmetic": lambda d, t: (t * 2 + torch.ones((), device="cpu")).sum(),
    "shape": lambda d, t: (t.shape, t.numel(), len(t), t.device),
    "index by numbers": lambda d, t: t[0, 1:],
    "filled": lambda d, t: t.__setitem__(t > 2, 0.0),
    "made": lambda d, t: torch.zeros(3, device=t.device) + torch.arange(3, device=t.device),
    "without blocking": lambda d, t: torch.ones(3).to(t.device, non_blocking=True),
    "index": lambda d, t: t[torch.arange(2, device=t.device)],
    "of the host": lambda d, t: torch.ones(3).tolist(),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_counted(name: str) -> None:
    device = seen(WAITS[name])
    assert sum(device.waits.values()) == 1, device.report()
    assert not device.mixed


@pytest.mark.parametrize("name", WAITS_NOT)
def test_what_does_not_wait_is_not_counted(name: str) -> None:
    device = seen(WAITS_NOT[name])
    assert not device.waits, device.report()
    assert not device.mixed


def test_results_are_on_the_device_and_copies_are_not() -> None:
    def run(device: PretendDevice, t: Tensor) -> None:
        assert (t + 1).device == t[0].device == torch.ones(2, device=t.device).device == device.device
        assert t.cpu().device.type == torch.ones(2).device.type == "cpu"
        assert torch.ones(3).to(t.device).is_cuda

    seen(run)


def test_tensors_of_two_devices_are_noted() -> None:
    device = seen(lambda d, t: t + torch.ones(2, 3))
    assert sum(device.mixed.values()) == 1


def test_float64_is_noted_where_there_is_none() -> None:
    assert sum(seen(lambda d, t: t.double(), "mps").float64.values()) == 1
    assert not seen(lambda d, t: t.double(), "cuda").float64
    assert not seen(lambda d, t: torch.ones(2, dtype=torch.float64), "mps").float64


def test_the_operations_of_a_backward_are_seen() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            assert bool((gradient > 0).all())
            return gradient * 2

    def run(device: PretendDevice, t: Tensor) -> None:
        x = device.put(t.clone().requires_grad_())
        Doubled.apply(x).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert x.grad.device == device.device

    device = seen(run)
    assert [what for what, _ in device.waits] == ["__bool__"]
    assert not device.mixed


def test_results_of_transforms_are_on_the_device() -> None:
    device = PretendDevice()
    with device:
        t, table = device.put(torch.arange(4)), device.put(torch.arange(8.0))
        found = torch.vmap(lambda i: torch.ops.aten.index(table, [i + 1]) * 2)(t)
    assert device.holds(found)
    assert not device.waits, device.report()
    assert not device.mixed, device.report()
