"""The core of the contracts on a GPU itself: products, statistics, reads and gradients, against the CPU in float64.

Products are also run where torch raises an error if the host waits for the GPU. With NVIDIA's tool,
``compute-sanitizer python -m pytest -m gpu tests/contracts/test_gpu.py`` finds memory that a kernel must not touch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contracts.test_devices import OF_WIDE_TOKENS, STATISTICS, with_values
from tests.contracts.test_reads import READS, tensors
from torch import Tensor

import attlas
from attlas import BackendError, Plan
from attlas.cli import main
from attlas.engine import trust
from attlas.engine.dispatch import backends_of
from attlas.engine.plan import BACKENDS

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def unknown_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device of which nothing is remembered, and nothing kept: all kernels are compared with tiles again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trust, "_faults_of_process", {})
    yield
    trust._table_in_file.cache_clear()


@contextmanager
def no_waits() -> Iterator[None]:
    """Let torch raise an error where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def distances(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.tanh(s) - (i - j).abs() * 0.01 * (h + 1)


def score_of(case: Any, name: str) -> attlas.Score:
    """Return the score of a case; functions of the tables read tensors of the CPU, which a GPU cannot."""
    return attlas.ScoreMod(distances) if name == "ScoreMod" else case.score


def there(value: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a copy of tokens, a score or a mask on the GPU; masks with tables keep them on the CPU."""
    if isinstance(value, Tensor):
        value = value.detach().to(DEVICE)
        return value.to(dtype) if value.is_floating_point() else value
    return copy.deepcopy(value).to(DEVICE, dtype) if isinstance(value, torch.nn.Module) else value


def close(found: Any, wanted: Any, dtype: torch.dtype = torch.float32, factor: float = 1.0) -> None:
    """Compare results of the GPU with those of the CPU, as parts of their largest number.

    Of several results whole numbers are left out: which of two keys of equal weight is first is not defined.
    """
    several = len(tensors(found)) > 1
    for own, true in zip(tensors(found), tensors(wanted), strict=True):
        if true.is_floating_point():
            tolerance = factor * {torch.float32: 1e-4}.get(dtype, trust.TOLERANCE[dtype])
            fault = trust.difference("it", own.cpu(), true.detach(), tolerance)
            assert fault is None, fault
        elif not several:
            assert int((own.cpu() - true).abs().max()) <= 1  # counts of keys, whose sum is rounded


def agrees(case: Any, score: attlas.Score, mask: Callable[[], Any], *, waits: bool = False) -> None:
    """Compare a product and its log-sum-exp; once more where the host must not wait."""
    exact = attlas.attend(case.q, case.k, score=score, mask=mask(), plan=Plan("reference")).detach()
    q, k, v, own, given = (there(t) for t in (case.q, case.k, case.v, score, mask()))
    with torch.no_grad():
        A = attlas.attend(q, k, score=own, mask=given)
        close(A @ v, exact @ case.v.detach())
        close(A.lse, exact.lse)
        if not waits:  # the second time nothing of mask, score or kernels is new
            given = attlas.from_tensor(given) if isinstance(given, Tensor) else given
            attlas.attend(q, k, score=own, mask=given) @ v
            torch.cuda.synchronize()
            with no_waits():
                out = attlas.attend(q, k, score=own, mask=given) @ v
            close(out, exact @ case.v.detach())


def test_product_with_each_score(score_name: str, make: Callable[..., Any], sizes: Any) -> None:
    case = make(score_name, "Causal", sizes(67, 83))
    agrees(case, score_of(case, score_name), attlas.Causal, waits=score_name in OF_WIDE_TOKENS)


def test_product_with_each_mask(mask_name: str, make: Callable[..., Any], sizes: Any) -> None:
    case = make("ScaledDot", mask_name, sizes(67, 83))
    # A function of a user, given as it is, is another mask at each call, which is compared with itself.
    waits = callable(case.mask) and not isinstance(case.mask, attlas.Mask | Tensor)
    agrees(case, case.score, lambda: case.mask_case.make(case.sizes), waits=waits)


@pytest.mark.parametrize("mask", ["none", "Causal", "Documents", "Padding", "bool tensor"])
@pytest.mark.parametrize("name", list(STATISTICS))
def test_each_statistic(name: str, mask: str, make: Callable[..., Any], sizes: Any) -> None:
    case = make("ScaledDot", mask, sizes(29, 23))
    exact = attlas.attend(case.q, case.k, mask=case.mask, plan=Plan("reference")).detach()
    (wanted,) = exact.collect(with_values(STATISTICS[name](), case.v.detach()))
    A = attlas.attend(there(case.q), there(case.k), mask=there(case.mask))
    (found,) = A.collect(with_values(STATISTICS[name](), there(case.v)))
    close(found, wanted)


@pytest.mark.parametrize("name", list(READS))
def test_each_read(name: str, make: Callable[..., Any], sizes: Any) -> None:
    case = make("ScaledDot", "Causal", sizes(29, 23))
    wanted = READS[name](attlas.attend(case.q, case.k, mask=attlas.Window(9, 4), plan=Plan("reference")).detach())
    found = READS[name](attlas.attend(there(case.q), there(case.k), mask=attlas.Window(9, 4)))
    close(found, wanted)


def gradients(q: Tensor, k: Tensor, v: Tensor, run: Callable[..., Any]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    results = [t for t in tensors(run(*leaves)) if t.is_floating_point()]
    loss = sum((t.nan_to_num(0.0, 0.0, 0.0).square().sum() for t in results), torch.zeros((), device=q.device))
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if t is None else t for leaf, t in zip(leaves, found, strict=True)]


def test_gradients_with_each_score(score_name: str, make: Callable[..., Any], sizes: Any) -> None:
    case = make(score_name, "Causal", sizes(67, 83))
    score = score_of(case, score_name)
    own = there(score)
    mask = attlas.Causal()
    wanted = gradients(
        case.q, case.k, case.v, lambda q, k, v: attlas.attend(q, k, score=score, mask=mask, plan=Plan("reference")) @ v
    )
    found = gradients(
        *map(there, (case.q, case.k, case.v)), lambda q, k, v: attlas.attend(q, k, score=own, mask=mask) @ v
    )
    close(found, wanted, factor=4)


@pytest.mark.parametrize("name", [name for name, make in STATISTICS.items() if make().differentiable])
def test_gradients_of_each_statistic(name: str, make: Callable[..., Any], sizes: Any) -> None:
    case = make("ScaledDot", "none", sizes(29, 23))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attlas.attend(q, k, mask=attlas.Window(6, 2)).collect(with_values(STATISTICS[name](), v))[0]

    wanted = gradients(case.q, case.k, case.v, run)
    close(gradients(*map(there, (case.q, case.k, case.v)), run), wanted, factor=4)


LARGER: dict[str, Callable[[], dict[str, Any]]] = {
    "all keys": dict,
    "causal": lambda: {"mask": attlas.Causal()},
    "window": lambda: {"mask": attlas.Window(100, 0)},
    "documents": lambda: {"mask": attlas.Documents(torch.arange(400) // 90) & attlas.Causal()},
    "soft cap and ALiBi": lambda: {"score": attlas.SoftCap(attlas.ScaledDot(), 4.0) + attlas.Alibi(4)},
    "sink": lambda: {"sink": torch.linspace(-1.0, 2.0, 4)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LARGER)
def test_larger_matrices_by_each_backend(name: str, dtype: torch.dtype) -> None:
    """Backends for GPUs take their kernels: 400 tokens, shared keys, with gradients, and statistics."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, heads, 400, 64, generator=generator).to(dtype).double() for heads in (4, 2, 2)]
    exact = attlas.attend(*given[:2], **LARGER[name](), plan=Plan("reference"))
    settings = {kind: there(value) for kind, value in LARGER[name]().items()}
    own = [there(t, dtype) for t in given]
    ran = []
    for backend in BACKENDS:
        if not backends_of(backend, DEVICE.type) or backend == "reference":
            continue

        def run(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
            return attlas.attend(q, k, **settings, plan=plan) @ v

        plan = Plan(backend)
        try:
            close(run(*own, plan), exact @ given[2], dtype)
        except BackendError as error:
            if "cannot run this problem" not in str(error):
                raise
            continue
        ran.append(backend)
        wanted = gradients(*given, lambda q, k, v: attlas.attend(q, k, **LARGER[name](), plan=Plan("reference")) @ v)
        close(gradients(*own, lambda q, k, v, plan=plan: run(q, k, v, plan)), wanted, dtype, factor=4)
        with torch.no_grad():
            torch.cuda.synchronize()
            with no_waits():
                run(*own, plan)
    assert "tiled" in ran
    with torch.no_grad():
        chosen = [attlas.stats.Entropy(), attlas.stats.MaxLogit(), attlas.stats.ColumnMass(), attlas.stats.TopK(1)]
        found = attlas.attend(own[0], own[1], **settings).collect(*chosen)
        for some, true in zip(found, exact.detach().collect(*chosen), strict=True):
            close(tensors(some)[:1], tensors(true)[:1], dtype)


PAIRS: dict[str, Callable[[], attlas.Score]] = {
    "Additive": lambda: attlas.Additive(8, 8, 40),
    "far hidden units": lambda: 30.0 * attlas.Additive(8, 8, 6),
    "Gaussian": lambda: attlas.Gaussian([1.0, 1.5, 2.0]),
    "Laplace": lambda: attlas.Laplace(2.0),
    "Boxcar": lambda: attlas.Boxcar(3.0),
    "Epanechnikov": lambda: attlas.Epanechnikov(3.0),
    "Triangular": lambda: attlas.Triangular(3.0),
}


@pytest.mark.parametrize("name", PAIRS)
def test_scores_of_pairs_by_the_kernels(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    size, score = 3 if name == "Gaussian" else 8, PAIRS[name]()
    q, k, v = (torch.randn(2, heads, n, size, generator=generator) for heads, n in ((4, 300), (2, 350), (2, 350)))
    if name == "far hidden units":
        q[:, :, :9] *= 60.0
    wide, own = copy.deepcopy(score).double(), there(score)

    def run(q: Tensor, k: Tensor, v: Tensor, score: attlas.Score, plan: Plan) -> Tensor:
        return attlas.attend(q, k, score=score, mask=attlas.Window(200, 60), plan=plan) @ v

    wanted = gradients(*(t.double() for t in (q, k, v)), lambda *t: run(*t, wide, Plan("reference")))
    found = gradients(*map(there, (q, k, v)), lambda *t: run(*t, own, Plan("triton")))
    close(found, wanted, factor=4)
    chosen = [attlas.stats.Entropy(), attlas.stats.ColumnMass(), attlas.stats.MaxLogit(), attlas.stats.Offsets()]
    exact = attlas.attend(q.double(), k.double(), score=wide, plan=Plan("reference")).detach()
    A = attlas.attend(there(q), there(k), score=own, plan=Plan("triton")).detach()
    assert attlas.explain(A).backend == "triton"
    close(A.collect(*chosen), exact.collect(*chosen))
    close(A @ there(v), exact @ v.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LARGER)
def test_gradients_of_statistics_by_the_kernels(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, heads, 400, 64, generator=generator).to(dtype).double() for heads in (4, 2, 2)]
    settings = {kind: there(value) for kind, value in LARGER[name]().items()}

    def run(q: Tensor, k: Tensor, v: Tensor, plan: Plan, **own: Any) -> Any:
        chosen = [
            attlas.stats.Entropy(),
            attlas.stats.ColumnMass(),
            attlas.stats.LogitMoments(),
            attlas.stats.Pooled(v),
        ]
        return attlas.attend(q, k, **own, plan=plan).collect(*chosen)

    wanted = gradients(*given, lambda *t: run(*t, Plan("reference"), **LARGER[name]()))
    found = gradients(*(there(t, dtype) for t in given), lambda *t: run(*t, Plan("triton"), **settings))
    close(found, wanted, dtype, factor=4)


def test_one_query_of_a_long_cache() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 64, generator=generator) for heads, n in ((4, 1), (2, 5000), (2, 5000)))
    exact = attlas.attend(q.double(), k.double(), mask=attlas.Causal(), plan=Plan("reference"))
    with torch.no_grad():
        A = attlas.attend(there(q), there(k), mask=attlas.Causal())
        close(A @ there(v), exact @ v.double())
        close(A.collect(attlas.stats.Entropy()), exact.collect(attlas.stats.Entropy()))


def test_the_doctor_finds_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--device", "cuda", "--tokens", "512", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"], report
    assert all(count == 0 for name, count in report["waits"].items() if name.startswith("A @ v"))
    assert (tmp_path / "attlas" / "kernels.json").exists() == bool(report["families"])
