"""When FlexAttention is chosen, and that it is trusted only after its first results were compared.

The device is pretended, see `tests.pretend`, and what torch would compile there is computed dense, from the same
functions.
"""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from tests.pretend import PretendDevice
from torch import Tensor, nn

import attlas
from attlas import BackendError, Plan
from attlas.engine import costs, trust
from attlas.engine.backends.flex import backend, blocks, programs

M, N, HEADS = 140, 150, 4
C = attlas.Causal()
IDS = (torch.arange(N) // 40).expand(2, -1).contiguous()
Attend = Callable[..., attlas.AttentionMatrix]


def dense(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, scale: float, grouped: bool
) -> tuple[Tensor, Tensor]:
    """Compute what FlexAttention does, from the functions of one pair, asked for all pairs at once."""
    heads, m, n, device = q.shape[1], q.shape[2], k.shape[2], q.device
    assert grouped == (k.shape[1] != heads)
    assert min(q.shape[-1], v.shape[-1]) >= 16
    assert q.dtype is k.dtype is v.dtype
    k, v = (t.repeat_interleave(heads // t.shape[1], 1).float() for t in (k, v))
    shape = ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,))
    places = [
        torch.arange(s, device=device).view(form) for s, form in zip((q.shape[0], heads, m, n), shape, strict=True)
    ]
    logits = q.float() @ k.mT * scale
    if score_mod is not None:
        logits = score_mod(logits, *places)
    if block_mask is not None:
        assert all(t.device == device for t in vars(block_mask).values() if isinstance(t, Tensor))
        logits = torch.where(block_mask.mask_mod(*places), logits, -math.inf)
    none = (logits == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(none, 0.0), -1).masked_fill(none, 0.0)
    lse = torch.logsumexp(logits.masked_fill(none, 0.0), -1).masked_fill(none.squeeze(-1), -math.inf)
    return (weights @ v).to(q.dtype), lse


class Gpu:
    """A pretended GPU on which FlexAttention computes as it is told."""

    def __init__(self, attention: Any) -> None:
        self.attention, self.calls, self.device = attention, 0, PretendDevice("cuda")

    def compiled(self, number: int, dynamic: bool | None) -> Any:
        def run(*given: Any) -> Any:
            self.calls += 1
            return self.attention(*given)

        return run

    def tokens(self, *, grad: bool = False, dtype: torch.dtype = torch.float32, m: int = M) -> list[Tensor]:
        found = cpu_tokens(grad=grad, dtype=dtype, m=m)
        return [self.device.put(t) for t in found]


def cpu_tokens(*, grad: bool = False, dtype: torch.dtype = torch.float32, m: int = M) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, HEADS, m, 8), (2, 2, N, 8), (2, 2, N, 5))
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_(grad) for size in sizes]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = Gpu(dense)
    monkeypatch.setattr(programs, "compiled", found.compiled)
    monkeypatch.setattr(programs, "programs", {})
    monkeypatch.setattr(trust, "_faults_of_process", {})
    monkeypatch.setattr(blocks, "_blocks_of_masks", WeakKeyDictionary())  # another device of the same name
    monkeypatch.setattr(backend, "can_compile", lambda: True)
    monkeypatch.setattr(costs, "FLEX_CELLS", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield found


def checkers(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ((i + b) // 3 + j // 2 + h) % 2 == 0


def far(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s - (i - j).abs() * 0.01 * (h + 1)


def gates() -> Tensor:
    return nn.functional.logsigmoid(torch.linspace(-2, 3, HEADS * N).view(HEADS, N))


DOT = attlas.ScaledDot()
CHOSEN: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: {"mask": C},
    "window": lambda: {"mask": attlas.Window(30, 2)},
    "documents": lambda: {"mask": attlas.Documents(IDS) & C},
    "padding": lambda: {"mask": attlas.Padding([150, 90]) & C},
    "prefix": lambda: {"mask": attlas.Prefix([20, 30]) | C},
    "heads": lambda: {"mask": attlas.Heads({1: attlas.Window(9, 0)}, C)},
    "selected": lambda: {"mask": attlas.masks.Selected(torch.arange(M * 3).view(M, 3) % N)},
    "bool": lambda: {"mask": torch.ones(M, N).tril(20).bool()},
    "additive": lambda: {"mask": torch.linspace(-1, 1, M * N).view(M, N)},
    "runs": lambda: {"mask": attlas.masks.runs_of(attlas.Dilated(60, 0, 3), 1, 1, M, N)},
    "function": lambda: {"mask": checkers},
    "score_mod": lambda: {"score": far},
    "capped": lambda: {"score": attlas.SoftCap(DOT, 2.0)},
    "alibi": lambda: {"score": DOT + attlas.Alibi(HEADS), "mask": C},
    "relative": lambda: {"score": DOT + attlas.RelativeBias(HEADS, 30)},
    "forget": lambda: {"score": DOT + attlas.Forget(gates()), "mask": C},
    "temperature": lambda: {"score": torch.linspace(0.5, 2, HEADS) * DOT},
    "sink": lambda: {"sink": torch.linspace(-1, 3, HEADS)},
    "sink and window": lambda: {"sink": torch.linspace(-1, 3, HEADS), "mask": attlas.Window(5, 0)},
}
TILES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "laplace": (lambda: {"score": attlas.Laplace()}, "no function of a dot product"),
    "additive score": (lambda: {"score": attlas.Additive(8, 8, 3)}, "no function of a dot product"),
    "own mask": (lambda: {"mask": Own()}, "no function of one pair"),
}


class Own(attlas.Mask):
    def allows(self, at: attlas.Tile) -> Tensor:
        return (at.i + at.j) % 3 > 0


def put(gpu: Gpu, given: dict[str, Any]) -> dict[str, Any]:
    """Move a score's parameters and a sink to the device, as a user does; tables and masks stay where they are."""
    for value in given.values():
        if isinstance(value, nn.Module):
            gpu.device.put(value)
    return given | ({"sink": gpu.device.put(given["sink"])} if "sink" in given else {})


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_and_right(name: str, gpu: Gpu) -> None:
    q, k, v = cpu_tokens()
    expected = attlas.attend(q, k, **CHOSEN[name](), plan=Plan("tiled"))
    with gpu.device, torch.no_grad():
        q, k, v = gpu.tokens()
        A = attlas.attend(q, k, **put(gpu, CHOSEN[name]()))
        choice = attlas.explain(A)
        assert choice.backend == "flex"
        assert choice.because == "it should be the fastest here, by a cost that nobody has measured"
        gpu.device.forget()
        out = A @ v
        assert gpu.calls == 2  # once for the comparison
        assert A.softmax_weights.lse_is_rounded  # it is known
        again = attlas.attend(q, k, **put(gpu, CHOSEN[name]()))
        gpu.device.forget()
        other = again @ v
        assert gpu.calls == 3
        waits = {place for _, place in gpu.device.waits}
        assert not {place for place in waits if not place.startswith(("masks/", "foundation/pairwise"))}, waits
        assert not gpu.device.mixed, gpu.device.report()
        lse = A.lse
    torch.testing.assert_close(other, out)
    torch.testing.assert_close(out, expected @ cpu_tokens()[2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TILES)
def test_others_go_to_tiles(name: str, gpu: Gpu) -> None:
    given, reason = TILES[name]
    expected = attlas.attend(*cpu_tokens()[:2], **given(), plan=Plan("tiled")) @ cpu_tokens()[2]
    with gpu.device, torch.no_grad():
        q, k, v = gpu.tokens()
        given = put(gpu, given())
        A = attlas.attend(q, k, **given)
        choice = attlas.explain(A)
        assert choice.backend == "tiled"
        assert reason in choice.others["flex"]
        out = A @ v
        with pytest.raises(BackendError, match="flex does not run: .*" + reason):
            attlas.attend(q, k, **given, plan=Plan("flex")) @ v
    if name != "additive score":  # whose parameters are random
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert not gpu.calls


def test_what_goes_to_other_kernels(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu.device, torch.no_grad():
        q, k, _v = gpu.tokens()
        few = attlas.attend(q[:, :, :15], k, mask=C)
        assert attlas.explain(few).backend == "tiled"
        double = attlas.attend(q.double(), k.double(), mask=C)
        assert attlas.explain(double).others["flex"] == "torch compiles it for float32 and 16 bits only"
        assert attlas.explain(attlas.attend(q[:, :, :0], k)).others["flex"] == "there is nothing to compute"
        A = attlas.attend(q, k, mask=C)
        monkeypatch.setattr(backend, "can_compile", lambda: False)
        assert "Triton" in attlas.explain(A).others["flex"]
        monkeypatch.setattr(backend, "can_compile", lambda: True)
        monkeypatch.setattr(costs, "FLEX_CELLS", 1 << 24)
        assert attlas.explain(A).backend == "tiled"  # too small to wait for a compiler
    assert not gpu.calls


@pytest.mark.parametrize("name", ["window", "capped", "relative", "temperature", "sink", "score_mod"])
def test_gradients_go_through_it(name: str, gpu: Gpu) -> None:
    given = CHOSEN[name]()
    learned = [
        p.requires_grad_() for p in (given.get("sink"), getattr(given.get("score"), "factor", None)) if p is not None
    ]
    learned += list(given["score"].parameters()) if isinstance(given.get("score"), nn.Module) else []

    def gradients(tokens: list[Tensor], **settings: Any) -> list[Tensor]:
        q, k, v = tokens
        out = attlas.attend(q, k, **settings) @ v
        return [out, *torch.autograd.grad(out.square().sum(), [*tokens, *learned])]

    expected = gradients(cpu_tokens(grad=True), **given, plan=Plan("reference"))
    with gpu.device:
        for t in learned:
            gpu.device.put(t)
        found = gradients(gpu.tokens(grad=True), **given)
        assert gpu.calls
        A = attlas.attend(*gpu.tokens(grad=True)[:2], **given, plan=Plan("flex"))
        out = A @ gpu.tokens()[2]
        out.sum().backward(retain_graph=True)
        once = A.q.grad.clone()
        out.sum().backward()
        torch.testing.assert_close(A.q.grad, 2 * once)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype: torch.dtype, gpu: Gpu) -> None:
    expected = attlas.attend(*cpu_tokens(dtype=dtype)[:2], mask=C, plan=Plan("reference")) @ cpu_tokens(dtype=dtype)[2]
    with gpu.device, torch.no_grad():
        q, k, v = gpu.tokens(dtype=dtype)
        out = attlas.attend(q, k, mask=C) @ v
    assert out.dtype is dtype
    assert gpu.calls == 2
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def masked_nothing(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, *others: Any) -> Any:
    return dense(q, k, v, score_mod, None, *others)


def rounded(*given: Any) -> Any:
    out, lse = dense(*given)
    return out, lse + 0.1


def without_gradient(q: Tensor, k: Tensor, *others: Any) -> Any:
    return dense(q, k.detach(), *others)


def broken(*given: Any) -> Any:
    raise NotImplementedError("the compiler says no\nand more")


WRONG = {
    "wrong output": (masked_nothing, r"its output differs by \S+ of its largest number"),
    "wrong log-sum-exp": (rounded, "its log-sum-exp differs"),
    "wrong gradient": (without_gradient, "a gradient differs"),
    "no program": (broken, "NotImplementedError: the compiler says no"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_program_that_fails_is_used_no_more(name: str, gpu: Gpu) -> None:
    gpu.attention, message = WRONG[name]
    q, k, v = cpu_tokens(grad=True)
    expected = attlas.attend(q, k, mask=attlas.Window(20, 0), plan=Plan("tiled")) @ v
    with gpu.device:
        q, k, v = gpu.tokens(grad=True)
        A = attlas.attend(q, k, mask=attlas.Window(20, 0))
        with pytest.warns(UserWarning, match=f"(?s)failed on cuda:0: {message}.*Please open an issue") as caught:
            out = A @ v
        assert len(caught) == 1
        calls = gpu.calls
        attlas.attend(q, k, mask=attlas.Window(9, 0)) @ v  # without a warning
        assert gpu.calls == calls
        with pytest.raises(BackendError, match=f"(?s)found: .*{message}"):
            attlas.attend(q, k, mask=attlas.Window(20, 0), plan=Plan("flex")) @ v
        assert gpu.calls == calls
        out.square().sum().backward()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert q.grad is not None


def test_a_plan_that_names_it_raises_at_once(gpu: Gpu) -> None:
    gpu.attention = masked_nothing
    with gpu.device, torch.no_grad():
        q, k, v = gpu.tokens()
        with pytest.raises(BackendError, match="the plan asks for a backend that fails here"):
            attlas.attend(q, k, mask=C, plan=Plan("flex")) @ v
        choice = attlas.explain(attlas.attend(q, k, mask=C))
        assert choice.backend in ("tiled", "flex")  # explain does not know the size of the values


def test_a_fault_is_told(gpu: Gpu) -> None:
    gpu.attention = broken
    with gpu.device, torch.no_grad():
        q, k, _ = gpu.tokens()
        A = attlas.attend(q, k, mask=C)
        with pytest.warns(UserWarning, match="the compiler says no"):
            A @ k
        choice = attlas.explain(attlas.attend(q, k, mask=C))
        assert choice.backend == "tiled"
        assert "the compiler says no" in choice.others["flex"]


def test_compared_for_the_first_two_sizes(gpu: Gpu) -> None:
    with gpu.device, torch.no_grad():
        for m, calls in ((130, 2), (130, 3), (140, 5), (140, 6), (135, 7)):
            q, k, v = gpu.tokens(m=m)
            attlas.attend(q, k, mask=C) @ v
            assert gpu.calls == calls


def test_numbers_that_are_not_finite_are_not_compared(gpu: Gpu) -> None:
    q, k, v = cpu_tokens()
    v[0, 0, 7, 1] = math.nan
    expected = attlas.attend(q, k, mask=C, plan=Plan("tiled")) @ v
    with gpu.device, torch.no_grad():
        q, k, _ = gpu.tokens()
        out = attlas.attend(q, k, mask=C) @ gpu.device.put(v)
        assert not gpu.calls
        assert not trust.results(gpu.device.device)
    torch.testing.assert_close(out, expected, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_a_function_that_reads_a_tensor_of_the_cpu_goes_to_tiles(gpu: Gpu) -> None:
    table = torch.arange(N)
    with gpu.device, torch.no_grad():
        q, k, _ = gpu.tokens()
        for given in ({"mask": lambda b, h, i, j: table[j] > 3}, {"score": lambda s, b, h, i, j: s + table[j]}):
            choice = attlas.explain(attlas.attend(q, k, **given))  # type: ignore[arg-type]
            assert choice.others["flex"] == "a function of the user reads a tensor that is on another device"


@pytest.mark.parametrize("name", ["window", "sink and window"])
def test_a_part_of_the_keys(name: str, gpu: Gpu) -> None:
    expected = attlas.attend(*cpu_tokens()[:2], **CHOSEN[name]())
    rows, columns = range(20, 120), range(30, 140)
    with gpu.device, torch.no_grad():
        q, k, v = gpu.tokens()
        part = attlas.attend(q, k, **put(gpu, CHOSEN[name]())).window(rows, columns)
        calls = gpu.calls
        out = part @ v[:, :, 30:140]
        assert gpu.calls > calls
    wanted = expected.window(rows, columns) @ cpu_tokens()[2][:, :, 30:140]
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


def test_on_a_cpu_it_is_refused_and_not_imported() -> None:
    q, k, v = cpu_tokens()
    A = attlas.attend(q, k, mask=C)
    assert attlas.explain(A).others["flex"] == "it runs on cuda and xpu only"
    with pytest.raises(BackendError, match="flex does not run: it runs on cuda and xpu only"):
        attlas.attend(q, k, mask=C, plan=Plan("flex")) @ v
    code = """
        import sys, torch, attlas
        q = torch.ones(20, 4)
        A = attlas.attend(q, q, mask=attlas.Window(3, 3))
        A @ q, attlas.explain(A)
        assert not {"torch.nn.attention.flex_attention", "attlas.engine.backends.flex"} & sys.modules.keys()
        assert "attlas.engine.backends.triton" not in sys.modules
        import attlas.engine.backends.triton
        assert "triton" not in sys.modules  # it is imported when a kernel first runs
    """
    subprocess.check_call([sys.executable, "-W", "error", "-c", textwrap.dedent(code)])


def test_other_processes_need_no_comparison(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found of a kind is in the file, but for kinds with code of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trust, "setting_of", lambda device: "a card")

    def calls(mask: Any, attention: Any = dense) -> int:
        for table in (trust._faults_of_process, programs.programs):
            table.clear()  # another process
        trust._table_in_file.cache_clear()
        gpu.attention, before = attention, gpu.calls
        attlas.attend(q, k, mask=mask) @ v
        return gpu.calls - before

    with gpu.device, torch.no_grad():
        q, k, v = gpu.tokens()
        assert [calls(attlas.Window(9, 0)), calls(attlas.Window(30, 0)), calls(C)] == [2, 1, 2]
        assert [calls(checkers), calls(checkers)] == [2, 2]
        with pytest.warns(UserWarning, match="says no"):
            assert calls(attlas.Padding([9, 20]), broken) == 1
        assert calls(attlas.Padding([9, 20])) == 0
    trust._table_in_file.cache_clear()
