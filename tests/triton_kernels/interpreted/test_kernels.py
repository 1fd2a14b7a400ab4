"""Every kernel in Triton's interpreter against float64: masks, scores, statistics, odd sizes, ties, NaN. No GPU.

``make test-triton`` runs it: the interpreter must be chosen before triton is imported, and holds for the whole process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("it needs the interpreter of Triton: make test-triton", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed: make test-triton")

from tests.triton_kernels.interpreted import interpret

import attlas
from attlas import BackendError, Plan, stats
from attlas.engine import dispatch, operations, outputs, trust
from attlas.engine.backends.triton import backend, launch, reading, sizes, trusted
from attlas.engine.plan import BACKENDS

assert interpret
KERNELS = Path(launch.__file__).parent / "kernels"
TRITON, TILED = Plan("triton"), Plan("tiled")
C = attlas.Causal()
SHAPE = sizes.Shape(32, 16, 4, 1)
FAULT_OF = trust.fault_of


class Setting:
    """What the kernels run with: the sizes of tiles, and how many programs share a row."""

    splits = 1

    def shape_of(self, kernel: str, *_: Any, **__: Any) -> sizes.Shape:
        return SHAPE._replace(rows=16) if kernel == "diagonals" else SHAPE

    def splits_of(self, programs: int, n: int, like: Tensor) -> int:
        return self.splits


CALL = launch._launch_kernel


def call(name: str, grid: tuple[int, int], shape: sizes.Shape, arguments: dict[str, Any]) -> None:
    """Call a kernel with exactly its arguments: the interpreter ignores others, and a GPU does not."""
    assert {*arguments, "ROWS", "COLS"} == set(launch.kernel(name).arg_names)
    CALL(name, grid, shape, arguments)


@pytest.fixture(autouse=True)
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    """Let the kernels run on the CPU, in small tiles."""
    found = Setting()
    monkeypatch.setitem(BACKENDS, "triton", None)  # type: ignore[arg-type]  # a dict, which only tests change
    monkeypatch.setattr(backend, "not_available", lambda: None)
    monkeypatch.setattr(launch, "shape_of", found.shape_of)
    monkeypatch.setattr(launch, "splits_of", found.splits_of)
    monkeypatch.setattr(launch, "CLASSES", 8)
    monkeypatch.setattr(launch, "_launch_kernel", call)
    monkeypatch.setattr(trust, "fault_of", lambda *_: None)
    for cache in (dispatch.backends_of, dispatch.allowed_backends):
        cache.cache_clear()
    yield found
    monkeypatch.undo()
    for cache in (dispatch.backends_of, dispatch.allowed_backends):
        cache.cache_clear()


def tokens(m: int, n: int, d: int = 8, dtype: torch.dtype = torch.float32, heads: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(m + n)
    lead = ((1, heads, m), (1, 1, n), (1, 1, n))
    q, k, v = (torch.randn(*size, e, generator=generator).to(dtype) for size, e in zip(lead, (d, d, 5), strict=True))
    return q, k, v


def asked(m: int, n: int) -> list[stats.Statistic]:
    """Return statistics that need every name."""
    rows, columns = [(0, m // 2), (m // 2, m)], [(0, n // 3), (n // 3, n)]
    return [
        *(stats.Entropy(), stats.EffectiveKeys(), stats.MaxLogit(), stats.MaxWeight(), stats.LogitMoments()),
        *(stats.ColumnMass(), stats.ColumnMax(), stats.Offsets(), stats.RowMass(), stats.TopK(min(3, n))),
        *(stats.Picture(min(3, m), min(2, n)), stats.Picture(min(3, m), min(2, n), pool="max")),
        *([stats.Spans(rows, columns), stats.KeyMaps([n - 1, 0])] if m > 1 and n > 2 else []),
    ]


def agree(found: Any, right: Any, rtol: float = 2e-5, atol: float = 5e-6) -> None:
    pairs = zip(_pytree.tree_leaves(found), _pytree.tree_leaves(right), strict=True)
    for own, other in pairs:
        if isinstance(own, Tensor) and own.is_floating_point():
            torch.testing.assert_close(own.double(), other.double(), rtol=rtol, atol=atol, equal_nan=True)


def check(m: int, n: int, dtype: torch.dtype = torch.float32, d: int = 8, q_factor: float = 1.0, **given: Any) -> None:
    """Compare all statistics, without and with a known log-sum-exp, and the output, with those of tiles in float64."""
    q, k, v = tokens(m, n, d, dtype)
    q = q * q_factor
    A = attlas.attend(q, k, **given, plan=TRITON)
    assert attlas.explain(A).backend == "triton"
    right = attlas.attend(q.double(), k.double(), **given, plan=TILED)
    statistics = asked(m, n)
    found, wanted = A.collect(*statistics), right.collect(*statistics)
    loose = {"rtol": 2e-5 * max(q_factor, 1), "atol": 5e-6 * max(q_factor, 1)}
    for statistic, own, other in zip(statistics, found, wanted, strict=True):
        if isinstance(statistic, stats.TopK):
            agree(own.values, other.values, **loose)
            picked = right.to_dense().gather(-1, own.indices.clamp(min=0))
            agree(own.values, torch.where(own.indices >= 0, picked, 0.0), **loose)
        else:
            agree(own, other, **loose)
    agree(A.lse, right.lse, **loose)
    problem = A.softmax_weights.problem
    both = operations.multiply_and_collect(problem, v, TRITON, [stats.Entropy(), stats.ColumnMass()])
    assert both is not None
    assert both[2][0] is not outputs.MISSING
    rounding = {torch.float32: loose["atol"], torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    agree(both[0], right @ v.double(), rtol=rounding, atol=rounding)
    agree([both[2][0], both[2][1]], [wanted[0], wanted[5]], **loose)


MASKS: dict[str, Callable[[int, int], Any]] = {
    "none": lambda m, n: None,
    "causal": lambda m, n: C,
    "first with first": lambda m, n: attlas.Causal(0),
    "empty rows": lambda m, n: attlas.Causal(-9),
    "window": lambda m, n: attlas.Window(20, 3),
    "left padding": lambda m, n: attlas.Padding(n // 2, side="left") & C,
    "documents": lambda m, n: attlas.Documents(torch.arange(n) // 17) & C,
    "heads": lambda m, n: attlas.Heads({1: attlas.Window(5, 0)}, C),
    "nothing": lambda m, n: attlas.Padding(0),
    "two runs": lambda m, n: C & (attlas.Window(5, 0) | attlas.Padding(3)),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str) -> None:
    check(37, 53, mask=MASKS[mask](37, 53))


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 40), (40, 1), (53, 37), (32, 32)])
def test_sizes(m: int, n: int) -> None:
    check(m, n, mask=C)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype: torch.dtype) -> None:
    check(33, 40, dtype, d=24, mask=C)


class WithRow(attlas.Score):
    """A dot product with a constant of each query."""

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return q @ k.mT + q.sum(-1, keepdim=True)

    def as_dot(self, q: Tensor, k: Tensor) -> attlas.scores.Dot:
        return attlas.scores.Dot(q, k, 1.0, row=q.sum(-1))


DOT = attlas.ScaledDot()
SCORES: dict[str, Callable[[], attlas.Score]] = {
    "negative factor": lambda: attlas.ScaledDot(-0.5),
    "cap": lambda: attlas.SoftCap(DOT, 1.5),
    "distances": lambda: DOT + attlas.Alibi(2),
    "cap and distances": lambda: attlas.SoftCap(DOT, 1.5) + attlas.Alibi(2),
    "keys and queries": lambda: DOT + attlas.Forget(torch.linspace(-1, 0, 2 * 53).view(2, 53)),
    "row": WithRow,
}


@pytest.mark.parametrize("score", SCORES)
def test_scores(score: str) -> None:
    check(37, 53, score=SCORES[score](), mask=C)


def test_sink() -> None:
    check(20, 34, mask=attlas.Causal(-3), sink=torch.tensor([-1.0, 2.0]))


def test_large_logits() -> None:
    check(20, 34, mask=C, q_factor=40.0)


@pytest.mark.parametrize("with_sink", [False, True])
def test_one_query_with_a_long_cache(with_sink: bool, setting: Setting) -> None:
    """Several programs share the keys of a row; some see none of theirs."""
    setting.splits = 3
    given = {"sink": torch.tensor([-1.0, 2.0])} if with_sink else {}
    check(2, 90, mask=attlas.Window(60, 0), **given)


def test_more_heads_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some heads at a time where sums of strips take much memory; and three heads."""
    q, k, _ = tokens(40, 50, heads=3)
    plan = Plan("triton", cells=4 * 50)
    found = attlas.attend(q, k, mask=C, plan=plan).collect(stats.ColumnMass(), stats.Offsets(), stats.Entropy())
    right = attlas.attend(q.double(), k.double(), mask=C, plan=TILED)
    agree(found, right.collect(stats.ColumnMass(), stats.Offsets(), stats.Entropy()))


def test_ties() -> None:
    q, k = torch.zeros(1, 1, 5, 8), torch.ones(1, 1, 40, 8)
    found = attlas.attend(q, k, plan=TRITON).topk(6)
    agree(found.values, torch.full((5, 6), 1 / 40).expand_as(found.values))
    assert (found.indices.sort(-1).values.diff() > 0).all()


def test_fewer_keys_than_asked_for() -> None:
    q, k, _ = tokens(6, 20)
    found = attlas.attend(q, k, mask=attlas.Causal(0), plan=TRITON).topk(4)
    assert (found.indices[..., 1, :2].sort().values == torch.tensor([0, 1])).all()
    assert (found.values[..., 1, 2:] == 0).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_go_to_tiles(bad: float) -> None:
    q, k, _ = tokens(10, 20)
    k[..., 13, 2] = bad
    statistics = [stats.Entropy(), stats.ColumnMass(), stats.MaxWeight()]
    plain = attlas.attend(q, k, mask=C, plan=TILED).collect(*statistics)
    agree(attlas.attend(q, k, mask=C, plan=TRITON).collect(*statistics), plain)


@pytest.mark.parametrize("given", [{"mask": C}, {"score": DOT + attlas.Alibi(2), "mask": attlas.Window(9, 0)}])
def test_cells(given: dict[str, Any]) -> None:
    q, k, _ = tokens(37, 53)
    A, right = attlas.attend(q, k, **given, plan=TRITON), attlas.attend(q.double(), k.double(), **given, plan=TILED)
    some = torch.tensor([3, 30, 7])
    agree(A[..., 5:30, 2:49], right[..., 5:30, 2:49])
    agree(A[..., some, :], right[..., some, :])
    agree(A.logits[..., 4:9, [0, 50]], right.logits[..., 4:9, [0, 50]])
    agree(A[..., 36, :], right[..., 36, :])
    A.lse  # noqa: B018 - it is then known
    agree(A[..., 5:30, 2:49], right[..., 5:30, 2:49])
    agree(A.log()[..., 2:5, :], right.log()[..., 2:5, :])


def test_a_part_of_the_keys() -> None:
    """Its weights are those of whole rows: they sum to less than 1."""
    q, k, _ = tokens(37, 53)
    A, right = attlas.attend(q, k, mask=C, plan=TRITON), attlas.attend(q.double(), k.double(), mask=C, plan=TILED)
    statistics = [stats.Entropy(), stats.RowMass(), stats.ColumnMass(), stats.TopK(3)]
    own, other = (M.window(range(5, 30), range(10, 40)).collect(*statistics) for M in (A, right))
    agree(own[:3], other[:3])
    agree(own[3].values, other[3].values)


def test_gradients_of_an_output_are_those_of_tiles() -> None:
    q, k, v = (t.requires_grad_() for t in tokens(12, 20))
    found = torch.autograd.grad((attlas.attend(q, k, mask=C, plan=TRITON) @ v).square().sum(), (q, k, v))
    right = torch.autograd.grad((attlas.attend(q, k, mask=C, plan=TILED) @ v).square().sum(), (q, k, v))
    agree(found, right)


def test_what_the_kernels_do_not_read() -> None:
    q, k, _ = tokens(20, 50)
    reasons = {
        "up to 4 runs of keys": {"mask": attlas.Dilated(9, 0, 2)},
        "not a dot product": {"score": attlas.Laplace() + attlas.Alibi(2)},
        "no tensor of pairs": {"score": DOT + attlas.TensorBias(torch.zeros(20, 50))},
    }
    for reason, given in reasons.items():
        A = attlas.attend(q, k, **given)  # type: ignore[arg-type]
        assert reason in attlas.explain(A).others["triton"]
        agree(A.collect(stats.Entropy()), attlas.attend(q, k, **given, plan=TILED).collect(stats.Entropy()))  # type: ignore[arg-type]
    A = attlas.attend(q, k, plan=TRITON)
    right = attlas.attend(q, k, plan=TILED)
    agree(A.collect(stats.TopK(40), stats.Entropy()), right.collect(stats.TopK(40), stats.Entropy()), atol=1e-5)
    agree(A.collect(stats.Coverage((0.5,))), right.collect(stats.Coverage((0.5,))))


def test_nothing_is_added_atomically() -> None:
    for file in KERNELS.glob("*.py"):
        assert "tl.atomic" not in file.read_text(encoding="utf-8")


@pytest.fixture
def comparing(monkeypatch: pytest.MonkeyPatch, setting: Setting) -> None:
    """Let kernels be compared when they are first used, on smaller problems."""
    for name, value in {"_TESTED_M": 20, "_TESTED_N": 36, "_TESTED_HEADS": 2}.items():
        monkeypatch.setattr(trusted, name, value)
    monkeypatch.setattr(trust, "_faults_of_process", {})
    monkeypatch.setattr(trust, "fault_of", FAULT_OF)


def test_kernels_are_compared_once(comparing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"mask": C, "sink": torch.tensor([-1.0, 2.0]), "score": attlas.SoftCap(DOT, 2.0) + attlas.Alibi(2)}
    A = attlas.attend(*tokens(9, 20)[:2], **given, plan=TRITON)  # type: ignore[arg-type]
    A.collect(*asked(9, 20))
    A[..., 3, :] + A.logits[..., 3, :]
    kinds = trust.results(torch.device("cpu"))["triton"]
    assert set(kinds.values()) == {None}
    assert any("largest 3" in kind and "picture_sum" in kind and "capped" in kind for kind in kinds)
    monkeypatch.setattr(trusted, "compare", lambda *_, **__: "it was compared again")
    attlas.attend(*tokens(11, 20)[:2], **given, plan=TRITON).collect(*asked(9, 20))  # type: ignore[arg-type]


def wrong(*given: Any, **further: Any) -> Any:
    found = reading.found_by(*given, **further)
    return found | {"entropy": found["entropy"] + 0.1}


def broken(*given: Any, **further: Any) -> Any:
    raise RuntimeError("out of shared memory\nand more")


FAULTS = {
    "entropy differs by 0.0": wrong,
    "RuntimeError: out of shared memory": broken,
}


@pytest.mark.parametrize("message", FAULTS)
def test_kernels_that_differ_are_not_used(message: str, comparing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted, "found_by", FAULTS[message])
    monkeypatch.setattr("attlas.engine.costs.TRITON_CELLS", 0)
    q, k, _ = tokens(9, 20)
    right = attlas.attend(q, k, mask=C, plan=TILED).collect(stats.Entropy())
    monkeypatch.setenv("ATTLAS_NATIVE", "none")
    A = attlas.attend(q, k, mask=C)
    told = f"(?s)triton .entropy.*failed on cpu: {message}.*Please open an issue"
    with pytest.warns(UserWarning, match=told) as caught:
        agree(A.collect(stats.Entropy()), right)
    assert len(caught) == 1
    agree(attlas.attend(q, k, mask=C).collect(stats.Entropy()), right)  # without a warning
    assert message in attlas.explain(A).others["triton"]
    monkeypatch.setattr(trusted, "known_fault", lambda request: None)  # as if it were not known yet
    with pytest.raises(BackendError, match=f"(?s)the plan asks for a backend that fails here.*{message}"):
        attlas.attend(q, k, mask=C, plan=TRITON).collect(stats.Entropy())
