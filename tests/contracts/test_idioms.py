"""What people write on attention tensors gives the same numbers and gradients on a lazy matrix, or an AttlasError.

Each idiom is one expression. It is evaluated on the lazy matrix and on the dense tensor of the same leaves.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.stats.definitions import diagonals
from torch import Tensor, nn

import attlas
from attlas import AttlasError, GradientError, stats
from attlas.matrix.protocol import LazyTensor


def sections() -> dict[str, list[str]]:
    """Read the table. `A` and `B` are (2, 3, 6, 6), causal, with a sink; `h` is ``A[0, 1]``, `v` values, `M` a mask."""
    found: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("idioms.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            idioms = found.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            idioms.append(line)
    return found


IDIOMS = sections()


class Leaves:
    """The tensors of one problem, its lazy matrix, and the same matrix dense."""

    def __init__(self, seed: int = 0, grad: bool = True) -> None:
        random = torch.Generator().manual_seed(seed)
        self.q = torch.randn(2, 3, 6, 4, generator=random, requires_grad=grad)
        self.k = torch.randn(2, 3, 6, 4, generator=random, requires_grad=grad)
        self.sink = torch.randn(3, generator=random, requires_grad=grad)
        self.bias = torch.randn(3, 6, 6, generator=random, requires_grad=grad)

    def all(self) -> list[Tensor]:
        return [self.q, self.k, self.sink, self.bias]

    def lazy(self) -> attlas.AttentionMatrix:
        score = attlas.ScaledDot() + attlas.TensorBias(self.bias)
        return attlas.attend(self.q, self.k, score=score, mask=attlas.Causal(), sink=self.sink)

    def dense(self) -> Dense:
        logits = self.q @ self.k.mT / 2 + self.bias
        logits = logits.masked_fill(~torch.ones(6, 6).tril().bool(), -math.inf)
        sink = self.sink.view(1, 3, 1, 1).expand(2, 3, 6, 1)
        whole = torch.cat([logits, sink], -1)
        return Dense.of(torch.softmax(whole, -1)[..., :6], logits, torch.logsumexp(whole, -1))


class Dense(Tensor):
    """A plain tensor that also answers what only a lazy matrix is asked."""

    logits: Any
    lse: Tensor

    @staticmethod
    def of(weights: Tensor, logits: Tensor, lse: Tensor) -> Dense:
        found = weights.as_subclass(Dense)
        found.logits, found.lse = Logits(logits), lse
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            return plain(found)

    def to_dense(self, limit: Any = None) -> Tensor:  # type: ignore[override]
        return plain(self)

    def collect(self, *statistics: Any) -> tuple[Any, ...]:
        return tuple(OF_DENSE[type(s).__name__](self, s) for s in statistics)


class Logits:
    def __init__(self, t: Tensor) -> None:
        self.t = t

    def __getitem__(self, key: Any) -> Tensor:
        return self.t[key]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.t.detach().numpy()

    def to_dense(self) -> Tensor:
        return self.t

    def __getattr__(self, name: str) -> Any:
        return getattr(self.t, name)

    def __mul__(self, other: Any) -> Tensor:
        return self.t * other

    def amax(self, dim: Any = -1, **options: Any) -> Tensor:
        return self.t.amax(dim, **options)

    def mean(self) -> Tensor:
        hidden = self.t == -math.inf
        return self.t.masked_fill(hidden, 0).sum(-1) / (~hidden).sum(-1)

    def var(self) -> Tensor:
        hidden = self.t == -math.inf
        gap = (self.t - self.mean().unsqueeze(-1)).masked_fill(hidden, 0)
        return gap.square().sum(-1) / (~hidden).sum(-1)


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.as_subclass(Tensor)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields") and type(value) in (list, tuple):
        return type(value)(plain(part) for part in value)
    return value


SEEN = torch.ones(6, 6).tril()


def pool(d: Tensor, s: Any) -> Tensor:
    blocks = [[d[..., a:b, e:f] for e, f in ((0, 2), (2, 4), (4, 6))] for a, b in ((0, 3), (3, 6))]
    seen = [[SEEN[a:b, e:f] for e, f in ((0, 2), (2, 4), (4, 6))] for a, b in ((0, 3), (3, 6))]
    cells = [
        [
            torch.full(x.shape[:-2], math.nan)
            if not n.any()
            else (x.sum((-1, -2)) / n.sum() if s.pool == "mean" else x.amax((-1, -2)))
            for x, n in zip(row, counts, strict=True)
        ]
        for row, counts in zip(blocks, seen, strict=True)
    ]
    return torch.stack([torch.stack(row, -1) for row in cells], -2)


def covered(d: Tensor, levels: Any) -> Tensor:
    ordered = d.sort(-1, descending=True).values.cumsum(-1)
    return torch.stack([(ordered < level * d.sum(-1, keepdim=True) - 1e-6).sum(-1) + 1 for level in levels], -1)


def mass(d: Tensor, s: Any) -> Tensor:
    rows = slice(None) if s.rows is None else s.rows
    found = d[..., rows, :].sum(-2)
    return found / SEEN[rows].sum(0).clamp(min=1) if s.mean else found


OF_DENSE: dict[str, Any] = {
    "Entropy": lambda d, s: -torch.xlogy(plain(d), torch.where(plain(d) == 0, 1.0, plain(d))).sum(-1),
    "EffectiveKeys": lambda d, s: d.sum(-1).square() / d.square().sum(-1),
    "RowMass": lambda d, s: d.sum(-1),
    "MaxWeight": lambda d, s: d.amax(-1),
    "TopK": lambda d, s: d.topk(s.k),
    "TailMass": lambda d, s: d.sum(-1) - d.topk(2).values.sum(-1),
    "ColumnMass": mass,
    "ColumnMax": lambda d, s: d.amax(-2),
    "Offsets": lambda d, s: diagonals(d) / (diagonals(SEEN).clamp(min=1) if s.mean else 1),
    "Picture": pool,
    "Spans": lambda d, s: torch.stack([d[..., :3, :2].sum((-1, -2)), d[..., :3, 2:].sum((-1, -2))], -1).unsqueeze(-2),
    "KeyMaps": lambda d, s: d[..., list(s.keys)],
    "Coverage": lambda d, s: covered(d, s.levels),
    "Pooled": lambda d, s: d @ s.v,
    "ArgMax": lambda d, s: d.argmax(-1),
    "ColumnArgMax": lambda d, s: d.argmax(-2),
    "LogitMoments": lambda d, s: (d.logits.mean(), d.logits.var()),
    "MaxLogit": lambda d, s: d.logits.amax(),
}


def numbers(result: Any) -> list[Any]:
    """Return the tensors and plain values in a result, lazy ones written out."""
    if isinstance(result, LazyTensor):
        return [result.to_dense()]
    if isinstance(result, np.ndarray | np.generic):
        return [torch.as_tensor(np.array(result))]
    if isinstance(result, list | tuple) and not isinstance(result, torch.Size):
        return [value for part in result for value in numbers(part)]
    return [result]


FAILS = (AttlasError, AttributeError, TypeError, ValueError, RuntimeError, IndexError, NotImplementedError)


def evaluate(idiom: str, A: Any, B: Any, v: Tensor) -> Any:
    torch.manual_seed(0)
    known = {"A": A, "B": B, "h": A[0, 1], "v": v, "M": torch.ones(6, 6).tril(1).bool(), "D": A, "stats": stats}
    return eval(idiom, {**known, "torch": torch, "np": np, "F": F, "nn": nn})


def outcome(
    idiom: str, *, lazy: bool, grad: bool, array: bool = False
) -> tuple[list[Any] | Exception, list[Tensor | None]]:
    first, second = Leaves(0, grad), Leaves(1, grad)
    v = torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(2), requires_grad=grad)
    A, B = (leaves.lazy() if lazy else leaves.dense() for leaves in (first, second))
    if array and not lazy:
        A, B = np.asarray(A), np.asarray(B)
    try:
        found = numbers(evaluate(idiom, A, B, v))
    except FAILS as error:
        return error, []
    wanted = [t for t in found if isinstance(t, Tensor) and t.requires_grad]
    if not wanted:
        return found, []
    loss = sum((t.double() * torch.linspace(1, 2, t.numel()).view(t.shape)).nan_to_num(0, 0, 0).sum() for t in wanted)
    leaves = [*first.all(), *second.all(), v]
    try:
        return found, list(torch.autograd.grad(loss, leaves, allow_unused=True))
    except FAILS:  # an operation without a derivative
        return found, [None] * len(leaves)


def check(idiom: str, *, grad: bool, array: bool = False, known: Any = None) -> Any:
    """Compare the lazy matrix with the dense tensor, and return what that gave, for another time."""
    with np.errstate(all="ignore"):
        found, slopes = outcome(idiom, lazy=True, grad=grad, array=array)
        known = known or outcome(idiom, lazy=False, grad=grad, array=array)
    compare(idiom, found, slopes, *known, grad=grad)
    return known


def compare(idiom: str, found: Any, slopes: list[Any], wanted: Any, dense_slopes: list[Any], *, grad: bool) -> None:
    if isinstance(found, Exception):
        assert isinstance(found, AttlasError) or isinstance(wanted, Exception), f"{type(found).__name__}: {found}"
        return
    if isinstance(wanted, Exception):
        return  # the lazy matrix may do more
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        if isinstance(b, Tensor):
            assert isinstance(a, Tensor)
            assert a.shape == b.shape
            tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(b.dtype, 3e-5)
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, check_dtype=True)
            assert a.requires_grad == b.requires_grad or not grad
        elif isinstance(b, float):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
        else:
            assert a == b
    assert len(slopes) == len(dense_slopes)
    for a, b in zip(slopes, dense_slopes, strict=True):
        lost = b is not None and float(b.abs().max()) > 1e-5  # less is rounding of 0
        assert not lost or (a is not None and bool(a.any())), "a gradient is lost"
        if a is not None and b is not None:
            tolerance = 5e-2 if "half" in idiom or "float16" in idiom else 5e-4
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "idiom", [*IDIOMS["methods"], *IDIOMS["operators"], *IDIOMS["functions"], *IDIOMS["statistics"]]
)
def test_torch(idiom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {grad: check(idiom, grad=grad) for grad in (True, False)}
    # As if the matrix were too large to be written out.
    monkeypatch.setattr("attlas.engine.autodiff.graph.DENSE_LIMIT", 40)
    for grad in known:
        check(idiom, grad=grad, known=known[grad])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("idiom", IDIOMS["numpy"])
def test_numpy(idiom: str) -> None:
    check(idiom, grad=False, array=True)
    found, _ = outcome(idiom, lazy=True, grad=True)  # an array would lose the gradient
    assert isinstance(found, GradientError | RuntimeError) or all(
        t.requires_grad for t in found if isinstance(t, Tensor) and t.is_floating_point()
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("idiom", IDIOMS["indices"])
def test_indices(idiom: str) -> None:
    check(idiom, grad=True)
