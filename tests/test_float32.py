"""Products in full precision, whatever the process has chosen for speed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.cuda_kernels import pretended
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attlas
from attlas import Plan, stats
from attlas.foundation import precision
from attlas.foundation.precision import FULL, FULL_FLOAT32, SETTING_OF, setting

needs_newer = pytest.mark.skipif(torch.__version__ < (2, 9), reason="torch 2.8 has one setting for all devices")


# What torch.backends sets, which refuses that once a test of torch's own has been imported.
NEWER = (("mkldnn", "matmul", "bf16"), ("cuda", "matmul", "tf32"))


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Put the settings of the process back."""
    yield
    torch.set_float32_matmul_precision("highest")
    for name in set(SETTING_OF.values()) if precision.SET_FP32_PRECISION else ():
        precision.SET_FP32_PRECISION(*name, "none")
    assert not FULL_FLOAT32.users


class Products(TorchDispatchMode):
    """Notes the setting under which torch multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in ("mm", "attention")):
            self.seen += [setting(*name) for name in set(SETTING_OF.values())]
        return func(*args, **(kwargs or {}))


def lowered() -> dict[str, Callable[[], None]]:
    """Return ways to let torch round the factors of a product."""
    ways: dict[str, Callable[[], None]] = {
        name: lambda name=name: torch.set_float32_matmul_precision(name)  # type: ignore[misc]
        for name in ("high", "medium")
    }
    if precision.SET_FP32_PRECISION:
        ways["newer"] = lambda: [precision.SET_FP32_PRECISION(*name, kind) for *name, kind in NEWER]  # type: ignore[assignment, return-value]
        ways["generic"] = lambda: precision.SET_FP32_PRECISION("generic", "all", "tf32")
    return ways


def work() -> list[Tensor]:
    """Return results of products, statistics, reads and gradients."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 90, 64, generator=random).requires_grad_() for _ in range(3))
    found: list[Tensor] = []
    for plan in (Plan(), Plan("sdpa"), Plan("tiled", rows=32, columns=32)):
        A = attlas.attend(q, k, mask=attlas.Causal(), plan=plan)
        out = A @ v
        found += [out, *torch.autograd.grad(out.square().sum(), (q, k, v)), A.mT @ v]
        found += [A.detach() @ v.detach(), *A.collect(stats.Entropy()), A[0, 0, 3:9].to_dense(), A.lse]
        found += torch.autograd.grad(A.collect(stats.Entropy())[0].sum(), (q, k))
    scored = attlas.attend(q, k, score=attlas.Bilinear(64, 64))
    return [t.detach() for t in (*found, scored @ v)]


@pytest.mark.parametrize("way", lowered())
def test_products_are_in_full_precision(way: str) -> None:
    """The same bits as with the default, and the settings are the user's again behind it."""
    torch.manual_seed(0)
    wanted = work()
    torch.manual_seed(0)
    lowered()[way]()
    before = [setting(*name) for name in SETTING_OF.values()]
    assert not set(before) <= FULL
    older = torch.get_float32_matmul_precision() if way in ("high", "medium") else None
    with Products() as products:
        found = work()
    assert products.seen
    assert set(products.seen) <= FULL
    assert [setting(*name) for name in SETTING_OF.values()] == before
    if older is not None:
        assert torch.get_float32_matmul_precision() == older
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@needs_newer
def test_what_is_inherited_stays_so() -> None:
    precision.SET_FP32_PRECISION("generic", "all", "tf32")
    q = torch.randn(1, 9, 4)
    attlas.attend(q, q) @ q
    assert setting("cuda", "matmul") == "tf32"
    precision.SET_FP32_PRECISION("generic", "all", "none")
    assert setting("cuda", "matmul") == setting("mkldnn", "matmul") == "none"


def test_settings_come_back_after_an_error() -> None:
    class Wrong(attlas.Score):
        def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
            if setting(*SETTING_OF["cpu"]) in FULL:
                raise ArithmeticError
            return q @ k.mT

    torch.set_float32_matmul_precision("high")
    q = torch.randn(1, 9, 4)
    with pytest.raises(ArithmeticError):
        attlas.attend(q, q, score=Wrong()) @ q
    assert torch.get_float32_matmul_precision() == "high"


def test_a_thread_does_not_switch_back_under_another() -> None:
    """The first one to leave leaves the settings alone while the other one still multiplies."""
    inside, leave, seen = threading.Event(), threading.Event(), []

    class Slow(attlas.Score):
        def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                leave.wait(10)
                seen.append(setting(*SETTING_OF["cpu"]))
            return q @ k.mT

    torch.set_float32_matmul_precision("high")
    q = torch.randn(1, 9, 4)
    A = attlas.attend(q, q, score=Slow(), plan=Plan("tiled"))
    other = threading.Thread(target=lambda: A @ q)
    other.start()
    assert inside.wait(10)
    assert setting(*SETTING_OF["cpu"]) in FULL
    attlas.attend(q, q) @ q  # enters second, and leaves first
    leave.set()
    other.join()
    assert seen
    assert set(seen) <= FULL
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_on_a_gpu_itself(dtype: torch.dtype) -> None:
    x, y = (torch.randn(2, 3, rows, 64).to(dtype) for rows in (50, 70))
    if not precision.sums_in_float32(x.cuda(), y.cuda()):
        pytest.skip("this GPU has a compute capability below 8.0")
    found = precision.products_in_float32(x.cuda(), y.cuda(), torch.empty(2, 3, 50, 70, device="cuda"))
    torch.testing.assert_close(found.cpu().double(), x.double() @ y.double().mT, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_are_multiplied_as_they_are_on_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own operator, which sums in float32; here it is computed in float64."""
    random = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, h, 50, 16, generator=random).to(dtype) for h in (4, 2, 2, 4))
    plan = Plan("tiled", rows=16, columns=16)

    def work(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
        q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
        A = attlas.attend(q, k, plan=plan)
        out = A @ v
        return [
            *torch.autograd.grad(out, (q, k, v), grad),
            A.detach() @ v.detach(),
            *A.detach().collect(stats.MaxLogit(), stats.MaxWeight()),
        ]

    wanted = work(*(t.double() for t in (q, k, v, grad)))
    calls = []

    def product(x: Tensor, y: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        assert x.dtype is y.dtype is dtype
        assert out.dtype is out_dtype is torch.float32
        calls.append(x.shape)
        return out.copy_(x.double() @ y.double())

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("bmm.dtype_out", product)
    try:
        with pretended(()) as (device, _):
            given = [device.put(t) for t in (q, k, v, grad)]
            assert not precision.sums_in_float32(given[0], given[1])  # torch knows of no GPU here
            monkeypatch.setattr(precision, "_has_wide_sums", lambda device: True)
            assert not precision.sums_in_float32(given[0], given[1].float())
            found = work(*given)
            assert len(calls) == 3 * 16  # in the backward, a product and a pass
            torch.backends.cuda.matmul.allow_fp16_accumulation = True
            assert not precision.sums_in_float32(given[0], given[1])
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
        library._destroy()
    assert not precision.sums_in_float32(q, k)  # a CPU would round the product
    for a, b in zip(found, wanted, strict=True):
        close = {"atol": 1e-6, "rtol": 1e-6} if a.dtype is torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
        torch.testing.assert_close(a.double(), b.double(), **close)
