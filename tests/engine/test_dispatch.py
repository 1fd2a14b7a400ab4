"""Which backend runs, why the others do not, and that a plan is kept or refused."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from tests.pretend import PretendDevice
from torch import Tensor

import attlas
from attlas import BackendError, Plan, stats
from attlas.engine.backend import Backend, Request
from attlas.engine.backends.native import library
from attlas.engine.costs import Operation, costs_of
from attlas.engine.dispatch import backends_of
from attlas.engine.plan import BACKENDS
from attlas.matrix import softmax_matrix

q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 11, 16), torch.randn(2, 2, 11, 3)
FAR = 1e4 * torch.ones(16)

NAMES = set(BACKENDS)
SDPA: dict[str, Callable[[], attlas.AttentionMatrix]] = {
    "plain": lambda: attlas.attend(q, k),
    "causal": lambda: attlas.attend(q, k, mask=attlas.Causal()),
    "mask": lambda: attlas.attend(q, k, mask=attlas.Window(3, 3)),
    "additive": lambda: attlas.attend(q, k, mask=torch.randn(9, 11)),
    "sink": lambda: attlas.attend(q, k, sink=torch.zeros(4)),
    "cosine": lambda: attlas.attend(q, k, score=attlas.Cosine()),
    "bilinear": lambda: attlas.attend(q, k, score=attlas.Bilinear(16, 16)),
    "alibi": lambda: attlas.attend(q, k, score=attlas.ScaledDot() + attlas.Alibi(4)),
    "multiple": lambda: attlas.attend(q, k, score=-2 * attlas.ScaledDot()),
    "gaussian": lambda: attlas.attend(q, k, score=attlas.Gaussian(3.0)),
}
TILED: dict[str, Callable[[], attlas.AttentionMatrix]] = {
    "additive score": lambda: attlas.attend(q, k, score=attlas.Additive(16, 16, 8)),
    "laplace": lambda: attlas.attend(q, k, score=attlas.Laplace()),
    "gaussian of few coordinates": lambda: attlas.attend(q[..., :3], k[..., :3], score=attlas.Gaussian()),
    "gaussian of a small bandwidth": lambda: attlas.attend(q, k, score=attlas.Gaussian(1e-3)),
    "no queries": lambda: attlas.attend(q[:, :, :0], k),
    "no keys": lambda: attlas.attend(q, k[:, :, :0]),
    "positional": lambda: attlas.attend(q, k, score=attlas.Alibi(4)),
}


@pytest.mark.parametrize("name", list(SDPA))
def test_sdpa_is_chosen(name: str) -> None:
    choice = attlas.explain(SDPA[name]())
    reads_a_tensor = name in ("causal", "mask", "additive", "alibi")  # which torch's kernel needs: 9 queries, 11 keys
    wanted = "native" if reads_a_tensor and fast() else "sdpa"
    assert choice.backend == wanted
    assert set(choice.others) == NAMES - {wanted}


@pytest.mark.parametrize("name", list(TILED))
def test_tiled_is_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTLAS_NATIVE", "none")
    choice = attlas.explain(TILED[name]())
    assert choice.backend == "tiled"
    assert set(choice.others) == NAMES - {"tiled"}
    A = TILED[name]()
    with pytest.raises(BackendError, match="sdpa does not run: " + choice.others["sdpa"].split("'")[0]):
        softmax_matrix(A.problem, Plan("sdpa"), A.axes) @ torch.randn(A.shape[-1], 2)


LONG = torch.randn(2, 4, 40, 16)
needs_kernels = pytest.mark.skipif(
    not library.runnable() or not library.available(), reason="the kernels are not compiled here, or turned off"
)


def fast() -> bool:
    """Tell whether the kernels are the fastest here: they need vectors of 256 bits or more."""
    return library.available() and library.current().instruction_set in ("avx2", "avx512", "amx")


def test_the_kernels_are_chosen_where_they_are_fastest() -> None:
    large = torch.zeros(1, 1, 1, 64).expand(2, 8, 1024, 64)  # nothing is computed here
    choice = attlas.explain(attlas.attend(large, large))
    assert choice.backend == ("native" if fast() else "sdpa")
    assert set(choice.others) == NAMES - {choice.backend}
    assert attlas.explain(attlas.attend(LONG, k)).backend == "sdpa"  # too small


def test_a_score_that_torch_does_not_know_goes_to_the_kernels_or_to_tiles() -> None:
    choice = attlas.explain(attlas.attend(q, k, score=attlas.SoftCap(attlas.ScaledDot(), 5.0)))
    assert choice.backend == ("native" if library.available() else "tiled")
    assert set(choice.others) == NAMES - {choice.backend}


@torch.no_grad()
def test_a_bias_of_many_cells_goes_to_the_kernels() -> None:
    long = torch.randn(1, 4, 64, 8)
    for bias in (attlas.Alibi(4), attlas.RelativeBias(4, 5), attlas.TensorBias(torch.zeros(64, 64))):
        choice = attlas.explain(attlas.attend(long, long, score=attlas.ScaledDot() + bias, mask=attlas.Causal()))
        assert choice.backend == ("native" if fast() else "sdpa")
        few = attlas.attend(long[:, :, :5], long[:, :, :5], score=attlas.ScaledDot() + attlas.Alibi(4))
        assert attlas.explain(few).backend == choice.backend


@pytest.mark.parametrize("setting", ["none", "baseline"])
def test_narrow_vectors_leave_outputs_to_torch(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if setting != "none" and setting not in library.runnable():
        pytest.skip(f"this processor cannot run {setting}, or the kernels are not compiled here")
    monkeypatch.setenv("ATTLAS_NATIVE", setting)
    large = torch.zeros(1, 1, 1, 64).expand(2, 8, 1024, 64)
    choice = attlas.explain(attlas.attend(large, large))
    assert choice.backend == "sdpa"
    why = {"none": "ATTLAS_NATIVE=none turns the kernels off"}
    assert choice.others["native"] == why.get(setting, "it takes about 1.2 × the time of torch's fused kernel")


def test_vectors_of_avx2_are_chosen_by_what_was_measured() -> None:
    def costs(heads: int, m: int, n: int, dtype: torch.dtype) -> tuple[float, float]:
        q, k = (torch.zeros(1, 1, 1, 64, dtype=dtype).expand(1, heads, size, 64) for size in (m, n))
        problem = attlas.attend(q, k).problem
        row = ("dot products",)
        (output,), (backward,) = (costs_of(row, problem, name, "avx2") for name in ("output", "backward"))
        return output, backward

    assert costs(2, 2048, 2048, torch.float32) == (0.9, 0.9)
    assert costs(2, 128, 128, torch.float32) == (1.2, 0.9)
    assert costs(2, 64, 64, torch.float32) == (1.2, 1.2)
    assert costs(2, 64, 64, torch.bfloat16) == (1.2, 0.9)  # torch has no fast gradients of 16-bit tokens
    assert costs(64, 64, 1024, torch.float32)[0] == 1.2  # few queries leave little work for each key that is packed
    assert costs(64, 64, 1024, torch.float16)[0] == 0.9
    assert costs(8, 4096, 4, torch.float32) == (1.2, 1.2)  # each row has work of its own
    assert costs(8, 1, 1024, torch.float32)[0] == 1.2
    assert costs(8, 1, 16_384, torch.float32)[0] == 0.9


@needs_kernels
@pytest.mark.parametrize("name", ["gaussian of a small bandwidth", "no queries", "no keys", "positional"])
def test_the_kernels_refuse_what_they_do_not_compute(name: str) -> None:
    A = TILED[name]()
    assert attlas.explain(A).others["native"]
    with pytest.raises(BackendError, match=r"found: native does not run: \w"):
        softmax_matrix(A.problem, Plan("native"), A.axes) @ torch.randn(A.shape[-1], 2)


@needs_kernels
def test_reads_go_to_the_kernels_where_packing_the_keys_pays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from attlas.engine.backends.native import dot, library
    from attlas.engine.costs import OUTPUTS

    in_place = int(library.current().instruction_set in OUTPUTS)  # these read the keys of few queries so

    calls = []
    monkeypatch.setattr(
        dot, "compute", lambda *args, _compute=dot.compute, **kwargs: calls.append(1) or _compute(*args, **kwargs)
    )
    few, more = attlas.attend(q[..., :3, :], k), attlas.attend(q, k)
    long = attlas.attend(torch.randn(1, 8), torch.randn(20_000, 8))
    wide = attlas.attend(torch.randn(31, 64), torch.randn(33_000, 64))
    for A, plan, wanted in (
        (few, Plan(), in_place),
        (more, Plan(), 1),
        (long, Plan(), in_place),
        (wide, Plan(), 0),
        (few, Plan("native"), 1),
        (more, Plan("tiled"), 0),
    ):
        calls.clear()
        softmax_matrix(A.problem, plan, A.axes).sum(-2)
        assert len(calls) == wanted


@pytest.mark.parametrize("backend", ["sdpa", "tiled", "reference"])
def test_a_named_backend_is_kept(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    owners = [type(one) for own in BACKENDS for one in backends_of(own, "cpu")]
    for owner, name in product(owners, ("forward", "recorded")):
        original = getattr(owner, name)

        def watched(self: Any, *args: object, _original: Any = original) -> object:
            result = _original(self, *args)
            calls.extend([] if result is None else [self.name])
            return result

        # Not of the object: undone, it would keep the method, and hide one that a later test puts into the class.
        monkeypatch.setattr(owner, name, watched)
    plan = Plan(backend)
    assert attlas.explain(attlas.attend(q, k, plan=plan)).backend == backend
    attlas.attend(q, k, plan=plan) @ v
    assert calls == [backend]


@needs_kernels
def test_the_kernels_are_kept_where_they_are_named() -> None:
    choice = attlas.explain(attlas.attend(q, k, plan=Plan("native")))
    assert choice.backend == "native"
    assert choice.because == "the plan asks for it"
    assert set(choice.others) == NAMES - {"native"}


def test_the_choice_is_printed_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTLAS_NATIVE", "none")
    text = str(attlas.explain(attlas.attend(q, k, score=attlas.Laplace())))
    first, *others, work, limit = text.splitlines()
    assert first.startswith("backend: tiled, since ")
    assert [line.split(":")[0] for line in others] == [f"  not {name}" for name in sorted(NAMES - {"tiled"})]
    assert work.startswith("work, with values of 16 numbers: ")
    assert limit == "  limit: known for dot products only, not for this score"


def test_a_plan_does_not_change_with_the_default() -> None:
    assert Plan() == Plan("auto", None, None, None)
    assert Plan(rows=3).budget("cpu") == 16 << 20
    assert Plan(cells=7).budget("cuda") == 7
    assert len({Plan(), Plan("auto"), Plan("tiled")}) == 2


OTHERS = {
    "additive": attlas.Additive(3, 3, 8),
    "laplace": attlas.Laplace(),
    "gaussian of few coordinates": attlas.Gaussian(),
}


@needs_kernels
@pytest.mark.parametrize("name", list(OTHERS))
def test_other_families_of_kernels_are_chosen_at_every_size(name: str) -> None:
    for tokens in (torch.randn(2, 3), torch.randn(200, 3)):
        assert attlas.explain(attlas.attend(tokens, tokens, score=OTHERS[name])).backend == "native"


@needs_kernels
def test_a_statistic_that_changes_another_sees_the_tiles() -> None:
    class Doubled(attlas.stats.Entropy):
        def finish(self, carry: torch.Tensor) -> torch.Tensor:
            return 2 * carry

    A = attlas.attend(LONG, LONG, plan=Plan("native"))
    torch.testing.assert_close(A.collect(Doubled())[0], 2 * attlas.stats.entropy(A))


def test_backends_are_imported_when_they_are_first_asked() -> None:
    code = """
        import sys, torch, attlas
        name = "attlas.engine.backends.native"
        A = attlas.attend(torch.ones(3, 4), torch.ones(5, 4))
        assert name not in sys.modules
        B = attlas.attend(torch.ones(3, 4, device="meta"), torch.ones(5, 4, device="meta"))
        assert (B @ torch.ones(5, 2, device="meta")).shape == (3, 2)
        assert name not in sys.modules
        A @ torch.ones(5, 2)
        assert name in sys.modules
    """
    subprocess.check_call([sys.executable, "-W", "error", "-c", textwrap.dedent(code)])


class _OnGPU(Backend):
    """A backend of GPUs that gives 7 as each output."""

    name, row, computes = "gpu", "reference", frozenset({"output"})

    def unsupported(self, request: Request, operation: Operation) -> str | None:
        return None

    def forward(self, request: Request, v: Tensor) -> tuple[Tensor, Tensor] | None:
        out = torch.full_like(request.problem.q, 7.0)
        return out, out[..., 0].double()


def test_a_backend_of_another_device_is_not_imported(add_backend: Callable[..., None]) -> None:
    add_backend("gpu", devices=frozenset({"cuda"}))  # no module: to import it would raise an error
    A, plan = attlas.attend(q, k), Plan("gpu")
    assert attlas.explain(A).others["gpu"] == "it runs on cuda only"
    A @ v
    stats.entropy(A)
    A[0, 0, 0]
    with pytest.raises(BackendError, match="gpu does not run: it runs on cuda only"):
        attlas.attend(q, k, plan=plan) @ v
    torch.testing.assert_close(stats.entropy(attlas.attend(q, k, plan=plan)), stats.entropy(A))  # reads go to tiles
    with PretendDevice() as device, pytest.raises(ModuleNotFoundError, match="gpu"):
        attlas.attend(device.put(q), device.put(k), plan=plan) @ device.put(v)
    add_backend("gpu", _OnGPU(), devices=frozenset({"cuda"}))
    with PretendDevice() as device:
        B = attlas.attend(device.put(q), device.put(k), plan=plan)
        choice = attlas.explain(B)
        assert (B @ device.put(v)).flatten().tolist() == [7.0] * q.numel()
    assert choice.backend == "gpu"
    assert choice.others["native"] == "it runs on cpu only"


def test_kernels_are_launched_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, current = [], [1]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        entered.append(device)
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    for count in (1, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with PretendDevice() as device:
            A = attlas.attend(device.put(q), device.put(k))
            A @ device.put(v)
            stats.entropy(A)
            A[0, 0, 0]
        assert bool(entered) == (count > 1)
    assert set(entered) == {torch.device("cuda", 0)}
    entered.clear()
    stats.entropy(attlas.attend(q, k))
    assert not entered
