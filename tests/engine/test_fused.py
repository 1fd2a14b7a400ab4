"""torch's fused kernels: which one is taken, and that its dense one never is."""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest
import torch
from tests.cuda_kernels import ALL, CUDNN, EFFICIENT, FLASH, NAMES, pretended
from tests.pretend import PretendDevice
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import attlas
from attlas import Plan
from attlas.engine import fused
from attlas.matrix.compiled import definition

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
HEADS = ((4, 4, 4), (4, 2, 2), (4, 1, 1), (4, 2, 4))  # of queries, keys and values
SIZES = ((8, 8), (16, 8), (5, 9))  # d and e
MASKS = {
    "none": lambda m: None,
    "causal": lambda m: attlas.Causal(),
    "window": lambda m: attlas.Window(m // 4, 0),
    "some": lambda m: torch.rand(1, 4, m, m, generator=torch.Generator().manual_seed(0)) > 0.3,
}


class NoDense(TorchDispatchMode):
    """Fails where torch takes its dense kernel, or makes a floating-point tensor of more than `most` numbers."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "attention_math" not in str(func), func
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            assert (
                not isinstance(t, Tensor)
                or not t.is_floating_point()
                or t.untyped_storage().size() <= (self.most * t.element_size())
            ), (func, t.shape)
        return out


def tokens(
    m: int, heads: tuple[int, int, int], sizes: tuple[int, int], dtype: torch.dtype, batch: int = 1
) -> list[Tensor]:
    """Return queries, keys and values."""
    random = torch.Generator().manual_seed(0)
    shapes = [(batch, h, m, size) for h, size in zip(heads, (sizes[0], *sizes), strict=True)]
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 2e-2, "rtol": 2e-2} if dtype.itemsize == 2 else {"atol": 1e-5, "rtol": 1e-5}


def wanted(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp by the definition in float64."""
    A = attlas.attend(q.double(), k.double(), mask=mask, plan=Plan("reference"))
    return A @ v.double(), A.lse


def names(choices: tuple[SDPBackend, ...]) -> str:
    return " and ".join(NAMES[choice] for choice in choices) or "none"


# ------------------------------------------------------------------------------------------------------------ on a GPU


REFUSED = {
    torch.float16: ((), (FLASH,), (EFFICIENT,), (CUDNN,), (FLASH, CUDNN), (FLASH, EFFICIENT), ALL),
    torch.bfloat16: ((), ALL),
    torch.float32: ((), (EFFICIENT,)),
    torch.float64: ((),),
}


@pytest.mark.parametrize(
    ("dtype", "refused"), [pytest.param(d, r, id=f"{d}, {names(r)}") for d, every in REFUSED.items() for r in every]
)
def test_no_dense_matrix_on_a_gpu(dtype: torch.dtype, refused: tuple[SDPBackend, ...]) -> None:
    """Whichever kernels are refused: what no other takes is computed in tiles."""
    m, cells = 48, 1 << 15
    whole = itertools.product(HEADS, SIZES, ("none", "causal"))
    for heads, sizes, name in (*whole, ((4, 2, 2), (8, 8), "window"), ((4, 2, 2), (8, 8), "some")):
        mask = MASKS[name]
        q, k, v = tokens(m, heads, sizes, dtype)
        out, lse = wanted(q, k, v, mask(m))
        with pretended(set(ALL) - set(refused)) as (device, kernels):
            A = attlas.attend(*map(device.put, (q, k)), mask=mask(m), plan=Plan(cells=cells))
            backend = attlas.explain(A).backend
            with NoDense(2 * m * m):  # of 4 m² numbers
                found = A @ device.put(v)
                found_lse = A.lse
        assert (backend == "sdpa") == bool(kernels.taken)
        assert not set(kernels.taken) & {NAMES[choice] for choice in refused}
        if name in ("none", "causal"):
            runs = {FLASH, EFFICIENT, CUDNN} if dtype.itemsize == 2 else {EFFICIENT} if dtype.itemsize == 4 else set()
            assert len(kernels.taken) == bool(runs - set(refused))
        torch.testing.assert_close(found.double(), out, **tolerance(dtype))
        torch.testing.assert_close(found_lse.double(), lse, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("only", ALL, ids=NAMES.get)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_and_log_sum_exp_of_each_kernel(
    only: SDPBackend, heads: tuple[int, int, int], sizes: tuple[int, int]
) -> None:
    """The operators that return the log-sum-exp are called as they are; gradients go through padding and repeats."""
    for mask in (None, attlas.Causal()):
        given = tokens(40, heads, sizes, torch.float16, batch=2)
        exact = [t.double().requires_grad_() for t in given]
        out, lse = wanted(*exact, mask)
        slopes = torch.autograd.grad(out.square().sum(), exact)
        with pretended({only}) as (device, kernels):
            q, k, v = (device.put(t).requires_grad_() for t in given)
            A = attlas.attend(q, k, mask=mask)
            found = A @ v
            assert found.shape == out.shape
            assert found.dtype is torch.float16
            assert kernels.taken == [NAMES[only]]
            known = A.softmax_weights.known_lse
            found_slopes = torch.autograd.grad(found.square().sum(), (q, k, v))
        assert known is not None
        torch.testing.assert_close(known, lse.detach(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found.double(), out.detach(), atol=5e-3, rtol=5e-3)
        for a, b in zip(found_slopes, slopes, strict=True):
            torch.testing.assert_close(a.double(), b, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_of_tiles_where_no_kernel_runs(dtype: torch.dtype) -> None:
    given = tokens(40, (4, 2, 2), (8, 8), dtype)
    exact = [t.double().requires_grad_() for t in given]
    slopes = torch.autograd.grad(wanted(*exact)[0].square().sum(), exact)
    with pretended(()) as (device, kernels):
        q, k, v = (device.put(t).requires_grad_() for t in given)
        found = torch.autograd.grad((attlas.attend(q, k) @ v).square().sum(), (q, k, v))
    assert not kernels.taken
    for a, b in zip(found, slopes, strict=True):
        torch.testing.assert_close(a.double(), b, **tolerance(dtype))


def test_gradients_of_tiles_where_only_the_values_are_refused() -> None:
    """cuDNN takes keys of 8 numbers, and no values of 200."""
    given = tokens(40, (2, 2, 2), (8, 200), torch.float16)
    exact = [t.double().requires_grad_() for t in given]
    slopes = torch.autograd.grad(wanted(*exact)[0].square().sum(), exact)
    with pretended({CUDNN}) as (device, kernels):
        q, k, v = (device.put(t).requires_grad_() for t in given)
        A = attlas.attend(q, k)
        assert attlas.explain(A).backend == "sdpa"
        found = torch.autograd.grad((A @ v).square().sum(), (q, k, v))
        with torch.no_grad():
            assert (A @ v).shape == v.shape
    assert not kernels.taken
    for a, b in zip(found, slopes, strict=True):
        torch.testing.assert_close(a.double(), b, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("graph", [False, True])
def test_a_product_waits_for_nothing(graph: bool) -> None:
    given = tokens(40, (4, 2, 2), (8, 5), torch.bfloat16)
    with pretended() as (device, kernels):
        q, k, v = (device.put(t.clone()).requires_grad_(graph) for t in given)
        A = attlas.attend(q, k, mask=attlas.Causal())
        device.forget()
        A @ v
        assert kernels.taken == ["flash"]
        assert not device.waits, device.report()
        assert not device.mixed, device.report()


@pytest.mark.parametrize("graph", [False, True])
def test_the_constant_of_a_row_counts(graph: bool) -> None:
    """A Gaussian is a dot product with a constant for each query, which the kernel does not see."""
    given = tokens(40, (4, 2, 2), (8, 5), torch.float32)
    with pretended() as (device, kernels):
        q, k, v = (device.put(t.clone()).requires_grad_(graph) for t in given)
        A = attlas.attend(q, k, score=attlas.Gaussian(2.0), mask=attlas.Causal())
        out = A @ v
        lse = A.softmax_weights.known_lse
    assert kernels.taken == ["efficient"]
    assert out.requires_grad == graph
    q, k, v = (t.double() for t in given)
    A = attlas.attend(q, k, score=attlas.Gaussian(2.0), mask=attlas.Causal(), plan=Plan("reference"))
    assert lse is not None
    torch.testing.assert_close(lse, A.lse, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float16, 32.0), (torch.float32, 8.0)], ids=str)
def test_a_large_log_sum_exp_is_computed_again(dtype: torch.dtype, largest: float) -> None:
    """float32 has 24 bits: the larger the log-sum-exp, the less is left for the weights."""
    q, k, v = tokens(40, (1, 1, 1), (8, 8), dtype)
    for factor, kept in ((0.9, True), (1.2, False)):
        q[0, 0, 3] = k[0, 0, 7] = (factor * largest * 8**0.5 / 8) ** 0.5  # their logit is factor · largest
        exact = attlas.attend(q.double(), k.double(), plan=Plan("reference"))
        assert bool(exact.lse.amax() < largest) == kept
        with pretended() as (device, _):
            A = attlas.attend(*(device.put(t.clone()) for t in (q, k)))
            A @ device.put(v.clone())
            known = A.softmax_weights.known_lse
            weights = A.to_dense()
        assert (known is not None) == kept
        torch.testing.assert_close(weights.double(), exact.to_dense(), atol=3e-7, rtol=4e-6)


def test_torch_says_which_of_several_kernels_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tokens(40, (4, 2, 2), (8, 8), torch.float16)
    for choice in (CUDNN, FLASH):
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given, c=choice, **more: c.value)
        with pretended() as (device, kernels):
            q, k, v = map(device.put, (q, k, v))
            attlas.attend(q, k) @ v
        assert kernels.taken == [NAMES[choice]]


@pytest.mark.parametrize("heads", HEADS)
def test_tokens_are_filled_up_once(heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The question whether a kernel takes them makes no copy of them."""
    pad, copies = torch.nn.functional.pad, []

    def counted(t: Tensor, *given: Any, **more: Any) -> Tensor:
        copies.append(t)
        return pad(t, *given, **more)

    monkeypatch.setattr(fused, "functional", types.SimpleNamespace(pad=counted))
    q, k, v = tokens(40, heads, (5, 5), torch.float16)
    with pretended() as (device, kernels):
        A, values = attlas.attend(device.put(q), device.put(k)), device.put(v)
        A @ values
    assert kernels.taken
    assert len(copies) == 3


def test_torch_has_the_questions_that_are_asked() -> None:
    """On a CPU all three answer no; without numbers, gradients pass through each operator in the right shapes."""
    q, k, v = tokens(33, (4, 2, 2), (5, 9), torch.float16)
    given = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, True)
    assert [kernel.takes(given) for kernel in fused.KERNELS] == [False] * 3
    for kernel in fused.KERNELS:
        q, k, v = (t.to("meta").requires_grad_() for t in tokens(33, (4, 2, 2), (5, 9), torch.float16))
        forms = list(fused._layouts_of_tokens(q, k, v))
        assert [t.shape for t in forms[0]] == [(1, 4, 33, 16), (1, 2, 33, 16), (1, 2, 33, 16)]
        out, lse = fused.run(fused.Call(kernel, *forms[-1]), 9, True, 0.5)
        assert out.shape == (1, 4, 33, 9)
        assert lse is not None
        assert lse.shape == (1, 4, 33)
        assert not lse.requires_grad
        for t, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
            assert grad.shape == t.shape


@pytest.mark.gpu
@pytest.mark.parametrize("only", [*ALL, None], ids=lambda choice: NAMES.get(choice, "none"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu_itself(dtype: torch.dtype, only: SDPBackend | None) -> None:
    """With one kernel switched on, and with none: torch's own switches, kernels and operators."""
    m = 256
    for heads, sizes, mask in itertools.product(HEADS, SIZES, (None, attlas.Causal())):
        given = tokens(m, heads, sizes, dtype)
        exact = [t.double().requires_grad_() for t in given]
        out, lse = wanted(*exact, mask)
        slopes = torch.autograd.grad(out.square().sum(), exact)
        q, k, v = (t.cuda().requires_grad_() for t in given)
        A = attlas.attend(q, k, mask=mask, plan=Plan(cells=1 << 15))
        with sdpa_kernel([SDPBackend.MATH] if only is None else [only]), NoDense(m * m):
            found = A @ v
        found_slopes = torch.autograd.grad(found.square().sum(), (q, k, v))
        torch.testing.assert_close(found.cpu().double(), out.detach(), **tolerance(dtype))
        torch.testing.assert_close(A.lse.detach().cpu().double(), lse.detach(), atol=4e-6, rtol=4e-6)
        for a, b in zip(found_slopes, slopes, strict=True):
            torch.testing.assert_close(a.cpu().double(), b, atol=5 * tolerance(dtype)["atol"], rtol=5e-2)


# -------------------------------------------------------------------------------------------------------- other devices


@pytest.mark.parametrize(("side", "stored"), [(4096, True), (4097, False)])
def test_a_small_matrix_may_be_stored_where_torch_has_no_fused_kernels(side: int, stored: bool) -> None:
    """4,096² numbers of float32 are 64 MiB."""
    device = PretendDevice("mps")
    with device:
        q = device.put(torch.zeros(8)).expand(1, 1, side, 8)
        assert (fused.find_call(q, q, q, True) is not None) == stored
        reason = attlas.explain(attlas.attend(q, q)).others.get("sdpa")
    assert (reason is None) == stored
    assert stored or "no fused kernel takes these tokens" in str(reason)


def test_a_device_of_its_own_chooses_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(8).expand(1, 1, 5000, 8)
    for choice, fits in ((SDPBackend.OVERRIDEABLE, True), (SDPBackend.MATH, False), (None, False)):

        def answer(*given: Any, c: SDPBackend | None = choice, **more: Any) -> int:
            if c is None:
                raise NotImplementedError("no kernel of this device")
            return c.value

        monkeypatch.setattr(torch, "_fused_sdp_choice", answer)
        assert (fused.find_call(q, q, q, True) is not None) == fits


def test_output_of_a_device_without_log_sum_exp() -> None:
    q, k, v = tokens(40, (4, 2, 2), (8, 5), torch.float32)
    out, _ = wanted(q, k, v, attlas.Causal())
    device = PretendDevice("mps")
    with device:
        A = attlas.attend(*map(device.put, (q, k)), mask=attlas.Causal())
        found = A @ device.put(v)
        assert A.softmax_weights.known_lse is None
    torch.testing.assert_close(found.double(), out, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------------ on a CPU


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_dense_matrix_on_a_cpu(dtype: torch.dtype) -> None:
    """torch's function would take its dense kernel for values of another size; its operator is called as it is."""
    m = 96
    for heads, sizes, mask in itertools.product(HEADS, SIZES, MASKS.values()):
        given = tokens(m, heads, sizes, dtype)
        out, _ = wanted(*given, mask(m))
        leaves = [t.requires_grad_() for t in given]
        A = attlas.attend(*leaves[:2], mask=mask(m), plan=Plan("sdpa", cells=1 << 11))
        with NoDense(m * m):  # of 4 m² numbers
            found = A @ leaves[2]
            torch.autograd.grad(found.float().sum(), leaves)
        torch.testing.assert_close(found.double(), out, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_programs_take_fused_kernels(dtype: torch.dtype) -> None:
    """A program that torch records holds its function, which gets tokens of one size and a mask of two axes or four."""
    for heads, sizes, (name, mask) in itertools.product(HEADS, SIZES, MASKS.items()):
        q, k, v = tokens(24, heads, sizes, dtype)
        for score in (attlas.ScaledDot(), attlas.ScaledDot() + attlas.Alibi(4)):
            weights = attlas.attend(q, k, score=score, mask=mask(24)).softmax_weights
            with NoDense(1 << 30):
                found = definition.product(weights.problem, v, None, weights.lse)
            A = attlas.attend(q.double(), k.double(), score=score, mask=mask(24), plan=Plan("reference"))
            torch.testing.assert_close(found.double(), A @ v.double(), msg=name, **tolerance(dtype))


def test_a_mask_of_three_axes_in_a_program() -> None:
    class Some(attlas.Mask):
        def allows(self, at: attlas.Tile) -> Tensor:
            return (at.j + at.h) % 3 != 1  # (heads, rows or 1, columns)

    q, k, v = tokens(24, (4, 2, 2), (8, 8), torch.float32)
    A = attlas.attend(q, k, mask=Some())
    with NoDense(1 << 30):
        found = definition.product(A.softmax_weights.problem, v, None, A.softmax_weights.lse)
    torch.testing.assert_close(found, A @ v)
