"""The matrix of linear attention layers equals the recurrence of their state, whatever is read of it."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.error_law import faults
from tests.transport.layers import KINDS, arguments, cast, dense
from torch import Tensor

import attlas
from attlas import stats
from attlas.errors import AttlasError, BackendError, DeviceError, DtypeError, ModifiedError, ShapeError
from attlas.matrix import sweep
from attlas.matrix.transport import tiles, tokens, walk

CLOSE = {torch.float64: 1e-12, torch.float32: 2e-6}


def close(found: Tensor, expected: Tensor, largest: Tensor | None = None) -> None:
    """Compare with the largest number of the whole."""
    size = float((expected if largest is None else largest).abs().max().clamp(min=1e-300)) if expected.numel() else 1.0
    assert found.shape == expected.shape
    assert not expected.numel() or float((found.double() - expected).abs().max()) <= CLOSE[found.dtype] * size


def check_all(A: attlas.AttentionMatrix, full: Tensor) -> None:
    """Compare every read of a matrix with the dense one."""
    n = full.shape[-1]
    v, x = (torch.randn(*full.shape[:2], n, 5, dtype=torch.float64) for _ in range(2))
    close(A @ v.to(A.dtype), full @ v)
    close(A.mT @ x.to(A.dtype), full.mT @ x)
    close(A.sum(-1), full.sum(-1))
    close(A.sum(-2), full.sum(-2))
    close(A.to_dense(), full)
    third = n // 3
    for key in (
        (slice(n - 9, n), slice(0, 21)), (slice(n // 2, n // 2 + 40), slice(third, n // 2 + 10)),
        (slice(3, 20), slice(40, 90)), (slice(n - 1, n), slice(n - 1, n)), (0, slice(None)), (n - 1, slice(None)),
        (slice(None), 17), (slice(None), [60, 5]), (slice(n - 30, n), slice(0, 3)), (n - 2, 1),
        (slice(None), slice(None, None, 50)),
    ):  # fmt: skip
        close(A[(..., *key)], full[(..., *key)], full)
    rows, columns = torch.tensor([n - 3, 3, 3, third]), torch.tensor([7, n - 1, 100 % n, 0, 100 % n])
    close(A.weights.cells(rows, columns), full[:, :, rows][..., columns], full)
    for high, wide in (((100, 260), (30, 150)), ((10, 60), (30, 150)), ((0, 20), (30, 150)), ((0, n), (n - 5, n))):
        part, own = A.window(high, wide), full[:, :, slice(*high), slice(*wide)]
        close(part @ v[:, :, : own.shape[3]].to(A.dtype), own @ v[:, :, : own.shape[3]], full @ v)
        close(part.mT @ x[:, :, : own.shape[2]].to(A.dtype), own.mT @ x[:, :, : own.shape[2]], full.mT @ x)
        close(part.to_dense(), own, full)
        close(part.window((3, 19), (1, 4)).to_dense(), own[:, :, 3:19, 1:4], full)
        close(part.sum(-2), own.sum(-2), full.sum(-2))
    for heads in (slice(1, 3), [3, 0, 0], 2):
        close(A[:, heads] @ v[:, heads].to(A.dtype), full[:, heads] @ v[:, heads])
        close(A[:, heads][..., third : third + 20, :], full[:, heads][..., third : third + 20, :], full)
    assert A.check() <= CLOSE[A.dtype] * float(full.abs().max())


@pytest.mark.parametrize(
    ("kind", "strong"),
    [
        *((kind, 0.3) for kind in KINDS),
        *((kind, 20.0) for kind in ("ssd", "gla", "gated delta, grouped", "kda", "pair")),
    ],
)
def test_every_read_equals_the_recurrence(kind: str, strong: float) -> None:
    given = arguments(kind, 270, strong=strong)
    full = dense(**given)
    check_all(attlas.transport(**given), full)
    check_all(attlas.transport(**{name: cast(value, torch.float32) for name, value in given.items()}), full)


@pytest.mark.parametrize("kind", ["gla", "gated delta, grouped", "pair"])
def test_every_read_without_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTLAS_NATIVE", "none")
    given = arguments(kind, 270)
    check_all(attlas.transport(**given), dense(**given))


@pytest.mark.parametrize("kind", ["gla", "kda", "gated delta, grouped", "pair", "one decay"])
def test_far_tiles_of_long_texts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way from rows to columns takes transitions of many chunks, where no kernel carries rows token by token."""
    monkeypatch.setenv("ATTLAS_NATIVE", "none")
    monkeypatch.setattr(tokens, "TURNING_CHUNK", 8)
    given = arguments(kind, 1500, strong=0.01)
    full, A = dense(**given), attlas.transport(**given)
    for high, wide in (((1400, 1500), (0, 90)), ((900, 1100), (30, 60)), ((1300, 1320), (200, 300))):
        close(A[..., slice(*high), slice(*wide)], full[:, :, slice(*high), slice(*wide)])
    close(A[..., 1499, :10], full[:, :, 1499, :10])
    places = torch.tensor([1400, 2, 600, 1450] * 8), torch.tensor([0, 800, 5, 1300])
    close(A.weights.cells(*places), full[:, :, places[0]][..., places[1]], full)
    assert (A.weights._transitions is not None) == (kind not in ("gla",))
    given = {name: t.requires_grad_() if isinstance(t, Tensor) else t for name, t in given.items()}
    B = attlas.transport(**given)
    close(B[..., 1400:, :9].detach(), full[:, :, 1400:, :9])
    assert B.weights._transitions is None  # those with a graph are not kept


@pytest.mark.parametrize("n", [7, 400])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_from_left_to_right(kind: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles that statistics see."""
    monkeypatch.setattr(tokens, "CHUNK", 8)
    monkeypatch.setattr(tokens, "TURNING_CHUNK", 4)
    given = arguments(kind, n)
    W, full = attlas.transport(**given).weights, dense(**given)
    for heads in (range(2), range(3, 4)):
        some = W.tokens.select(slice(None), slice(heads.start, heads.stop))
        blocks = tiles.blocks_of(some)
        for start in range(0, W.shape[2], 170):
            rows = range(start, min(start + 170, W.shape[2]))
            spans = [range(first, min(first + 111, W.shape[3])) for first in range(0, W.shape[3], 111)]
            for columns, found in zip(spans, tiles.row_tiles(some, blocks, rows, spans), strict=True):
                found = W._cells_with_diagonal(found, some, rows, columns)
                own = full[:, heads.start : heads.stop, rows.start : rows.stop, columns.start : columns.stop]
                close(found, own, full)


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 64, 65, 129])
@pytest.mark.parametrize("kind", ["linear", "gla", "gated delta", "kda"])
def test_any_number_of_tokens(kind: str, n: int) -> None:
    given = arguments(kind, n)
    A, full, v = attlas.transport(**given), dense(**given), torch.randn(1, 4, n, 3, dtype=torch.float64)
    close(A @ v, full @ v)
    close(A.mT @ v, full.mT @ v)
    close(A.to_dense(), full)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "CHUNK", 4)
    monkeypatch.setattr(tokens, "TURNING_CHUNK", 4)
    if "resets" in kind:
        pytest.skip("minus infinity has no finite differences: the next test")
    given = arguments(kind, 11, d=3)
    if isinstance(given.get("decay"), Tensor):
        given["decay"] = given["decay"] - 0.1  # steps of gradcheck stay below 0
    names = [name for name, value in given.items() if isinstance(value, Tensor)]
    pair = given["erase"] if isinstance(given.get("erase"), tuple) else ()
    leaves = [t.detach().clone().requires_grad_() for t in (*(given[name] for name in names), *pair)]
    v = torch.randn(1, 4, 11, 2, dtype=torch.float64, requires_grad=True)

    def build(*tensors: Tensor) -> attlas.AttentionMatrix:
        some = given | dict(zip(names, tensors, strict=False))
        return attlas.transport(**(some | ({"erase": tensors[len(names) :]} if pair else {})))

    rows = torch.tensor([10, 3, 3])
    for function in (
        lambda *t: build(*t[:-1]) @ t[-1],
        lambda *t: build(*t[:-1]).mT @ t[-1],
        lambda *t: build(*t[:-1]).window((4, 9), (2, 8)) @ t[-1][:, :, 2:8],
    ):
        assert torch.autograd.gradcheck(function, (*leaves, v), fast_mode=True)
    for function in (
        lambda *t: build(*t).to_dense(),
        lambda *t: build(*t)[..., rows, 1:8],
        lambda *t: build(*t).sum(-2),
    ):
        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    if kind in ("gated delta", "kda", "gla"):
        second = lambda *t: build(*t[:-1]) @ t[-1]  # noqa: E731 - one of several
        assert torch.autograd.gradgradcheck(second, (*leaves, v), fast_mode=True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "resets" not in kind])
def test_gradients_of_many_chunks(kind: str, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward computes the factors again, some chunks at a time; one of second order does not."""
    monkeypatch.setattr(tokens, "CHUNK", 4)
    monkeypatch.setattr(tokens, "TURNING_CHUNK", 4)
    monkeypatch.setattr(tokens, "_SLICE_NUMBERS", 4 * 4 * 8 * 3)
    given = arguments(kind, 50)
    pair = tuple(t.requires_grad_() for t in given["erase"]) if isinstance(given.get("erase"), tuple) else ()
    v = torch.randn(1, 4, 50, 3, dtype=torch.float64, requires_grad=True)
    # Tensors that are parts of each other would share their gradients.
    given |= {name: t.detach().clone().requires_grad_() for name, t in given.items() if isinstance(t, Tensor)}
    leaves = [*(t for t in given.values() if isinstance(t, Tensor)), *pair, v]
    A, full = attlas.transport(**given), dense(**given)
    assert len(list(A.weights.tokens.slices())) > 3
    out, wanted = (A.mT @ v, full.mT @ v) if transposed else (A @ v, full @ v)
    slope = torch.randn(wanted.shape, dtype=torch.float64)
    expected = torch.autograd.grad(wanted, leaves, slope, allow_unused=True)
    for create_graph in (False, True):
        found = torch.autograd.grad(out, leaves, slope, retain_graph=True, create_graph=create_graph, allow_unused=True)
        for a, b in zip(found, expected, strict=True):
            close(a.detach(), b)


def test_gradients_pass_resets() -> None:
    """Where the state is forgotten, gradients are those of separate texts."""
    given = arguments("gated delta", 90)
    leaves = [given[name].requires_grad_() for name in ("q", "k", "decay", "write")]
    v = torch.randn(1, 4, 90, 3, dtype=torch.float64)

    def out(q: Tensor, k: Tensor, decay: Tensor, beta: Tensor, v: Tensor) -> Tensor:
        return attlas.transport(q, k, decay, beta, beta) @ v

    reset = torch.zeros(90, dtype=torch.bool).index_fill(0, torch.tensor([40]), True)
    cut = leaves[2].masked_fill(reset, -math.inf)
    joined = torch.autograd.grad(out(leaves[0], leaves[1], cut, leaves[3], v).square().sum(), leaves)
    parts = [out(*(t[:, :, some] for t in (*leaves, v))) for some in (slice(0, 40), slice(40, 90))]
    apart = torch.autograd.grad(torch.cat(parts, 2).square().sum(), leaves)
    for found, expected in zip(joined, apart, strict=True):
        assert torch.isfinite(found).all()
        expected = expected.masked_fill(reset, 0.0) if found is joined[2] else expected  # nothing reaches these decays
        torch.testing.assert_close(found, expected)


def test_grad_of_the_weights() -> None:
    given = arguments("kda", 20)
    given["q"].requires_grad_()
    A, v = attlas.transport(**given), torch.randn(1, 4, 20, 3, dtype=torch.float64)
    A.retain_grad()
    ((A @ v).sum() + (A.mT @ v).square().sum() + A[..., 3:5, 1].sum()).backward()
    D = A.detach().to_dense().requires_grad_()
    ((D @ v).sum() + (D.mT @ v).square().sum() + D[..., 3:5, 1].sum()).backward()
    torch.testing.assert_close(A.grad, D.grad)


@pytest.mark.parametrize("lead", [(), (2,), (4,), (2, 4), (2, 3, 4)])
def test_leading_axes(lead: tuple[int, ...]) -> None:
    n, d = 40, 6
    q, k, v = (torch.randn(*lead, n, d, dtype=torch.float64) / 2 for _ in range(3))
    beta, decay = torch.rand(*lead, n, dtype=torch.float64), -torch.rand(*lead, n, dtype=torch.float64)
    A = attlas.transport(q, k, decay, beta, beta)
    assert A.shape == (*lead, n, n)
    flat = [t.reshape(-1, 1, *t.shape[len(lead) :]) for t in (q, k, decay, beta)]
    full = dense(flat[0], flat[1], 1, decay=flat[2], write=flat[3], erase=flat[3]).reshape(*lead, n, n)
    close(A.to_dense(), full)
    close(A @ v, full @ v)
    for t in (decay[..., :1], decay.mean().reshape(())):  # one for all tokens
        B = attlas.transport(q, k, t)
        close(B.to_dense(), attlas.transport(q, k, t.expand(*lead, n)).to_dense())
    if len(lead) >= 2:
        one = decay[:1].mean(tuple(range(1, len(lead))), keepdim=True).mean(0, keepdim=True)
        close(attlas.transport(q, k, one).to_dense(), attlas.transport(q, k, one.expand(*lead, n)).to_dense())


def test_sixteen_bits() -> None:
    given = {name: cast(value, torch.bfloat16) for name, value in arguments("gated delta", 80).items()}
    A, v = attlas.transport(**given), torch.randn(1, 4, 80, 5, dtype=torch.bfloat16)
    full = dense(**{name: cast(value, torch.float64) for name, value in given.items()})
    assert A.dtype is torch.float32
    assert (A @ v).dtype is torch.bfloat16
    close(A.to_dense(), full)
    close(A.full_precision() @ v.float(), full @ v.double())
    close(A @ A, full @ full)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (attlas.transport(**given) @ v.float()).dtype is torch.bfloat16


def test_other_forms() -> None:
    given = arguments("ssd", 50)
    A, full = attlas.transport(**given), dense(**given)
    v, x = torch.randn(1, 4, 50, 3, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    for other in (pickle.loads(pickle.dumps(A)), copy.deepcopy(A), A.double(), A.detach(), A.to("cpu")):
        close(other @ v, full @ v)
    close(A.float().to_dense(), full)
    assert A.half().dtype is torch.float16
    close(A @ x, full @ x)
    close(A.mT @ x, full.mT @ x)
    close(v.mT @ A, v.mT @ full)
    close(torch.einsum("bhij,bhjd->bhid", A, v), full @ v)
    close(A.diagonal(0, -2, -1), full.diagonal(0, -2, -1))
    assert str(A) == repr(A)
    text = "AttentionMatrix(shape=(1, 4, 50, 50), torch.float64, transport, decay of each token, write, diagonal)"
    assert repr(A) == text
    assert "erase=(p, r)" in repr(attlas.transport(**arguments("pair", 50)))
    first, stop = A.window((10, 30), (15, 20)).weights.allowed_runs
    assert first.tolist() == [[[0] * 20]]
    assert stop.flatten().tolist() == [0] * 5 + [1, 2, 3, 4] + [5] * 11
    assert A.window((10, 30), (15, 20)).weights.rows_with_keys().flatten().tolist() == [False] * 5 + [True] * 15
    at = A[0, 1:3].weights.tile(range(1), range(1, 2), range(50), range(50))
    assert at.h.item() == 2


@pytest.mark.parametrize("shape", [(0, 4, 9, 3), (2, 4, 0, 3), (2, 4, 9, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    q, k, v = torch.randn(3, *shape).unbind()
    A = attlas.transport(q, k, -torch.rand(shape[:3]), torch.rand(shape[:3]), torch.rand(shape[:3]))
    assert (A @ v).shape == v.shape
    assert (A.mT @ v).shape == v.shape
    assert A.to_dense().shape == (*shape[:3], shape[2])
    assert not A.to_dense().any()
    assert A.sum(-1).shape == shape[:3]


@pytest.mark.parametrize("way", ["compile", "export", "vmap", "grad", "meta"])
def test_programs(way: str) -> None:
    given = arguments("gated delta", 70)
    q, k, decay, beta = (given[name].float() for name in ("q", "k", "decay", "write"))
    v = torch.randn(1, 4, 70, 3)

    def f(q: Tensor, k: Tensor, decay: Tensor, beta: Tensor, v: Tensor) -> Tensor:
        return attlas.transport(q, k, decay, beta, beta) @ v

    tensors, expected = (q, k, decay, beta, v), f(q, k, decay, beta, v)
    if way == "compile":
        close(torch.compile(f, backend="eager", fullgraph=True)(*tensors), expected.double())
        cells = torch.compile(lambda *t: attlas.transport(*t, t[-1]).to_dense(), backend="eager")(*tensors[:-1])
        close(cells, attlas.transport(*tensors[:-1], beta).to_dense().double())
    elif way == "export":

        class Layer(torch.nn.Module):
            def forward(self, *t: Tensor) -> Tensor:
                return f(*t)

        close(torch.export.export(Layer(), tensors).module()(*tensors), expected.double())
    elif way == "vmap":
        close(torch.func.vmap(f)(*(t.unsqueeze(1) for t in tensors)).squeeze(1), expected.double())
    elif way == "grad":
        found = torch.func.grad(lambda q: f(q, *tensors[1:]).square().sum())(q)
        q = q.requires_grad_()
        close(found, torch.autograd.grad(f(q, *tensors[1:]).square().sum(), q)[0].double())
    else:
        some = [t.to("meta") for t in tensors]
        assert f(*some).shape == expected.shape
        with pytest.raises(BackendError, match="tensors with numbers"):
            attlas.transport(*some[:-1]).collect(stats.RowMass())


ONES = torch.ones(2, 3, 70, 8)
REFUSED: dict[str, tuple[dict[str, Any], type[AttlasError], str]] = {
    "factors for logs": ({"decay": torch.ones(2, 3, 70) / 2}, ShapeError, r"logarithms of[\s\S]*decay=factors.log"),
    "a positive number": ({"decay": 0.5}, ShapeError, "at most 0"),
    "no batch": ({"decay": torch.zeros(3, 70)}, ShapeError, "decay must be"),
    "other heads": ({"decay": torch.zeros(4)}, ShapeError, "the heads of each tensor must divide"),
    "other tokens": ({"write": torch.ones(2, 3, 71)}, ShapeError, "write must be"),
    "a write of channels": ({"write": ONES}, ShapeError, "write must be"),
    "an erase of channels": ({"erase": ONES}, ShapeError, "erase must be"),
    "half a pair": ({"erase": (ONES,)}, ShapeError, "a pair"),
    "a pair of strengths": ({"erase": (ONES, ONES[..., 0])}, ShapeError, "a pair"),
    "a pair of other size": ({"erase": (ONES, ONES[..., :4])}, ShapeError, "r must be"),
    "a text": ({"decay": "strong"}, DtypeError, "decay must be"),
    "a truth": ({"erase": True}, DtypeError, "erase must be"),
    "integers": ({"write": torch.ones(2, 3, 70, dtype=torch.int64)}, DtypeError, "write must be"),
    "sparse": ({"write": torch.ones(2, 3, 70).to_sparse()}, DtypeError, "write must be"),
    "another device": ({"decay": torch.zeros(3, device="meta")}, DeviceError, "decay must be on the device"),
    "a scale": ({"scale": "1"}, ShapeError, "scale must be"),
    "fewer queries": ({"q": ONES[:, :, :5]}, ShapeError, "one query and one key"),
    "smaller keys": ({"k": ONES[..., :4]}, ShapeError, "one query and one key"),
    "other dtypes": ({"k": ONES.double()}, DtypeError, "same dtype"),
    "key heads": ({"k": torch.ones(2, 2, 70, 8)}, ShapeError, "heads"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    given, error, text = REFUSED[case]
    with pytest.raises(error, match=text) as caught:
        attlas.transport(**({"q": ONES, "k": ONES} | given))
    assert str(caught.value).startswith("transport(): ")
    assert not faults(caught.value.rule, caught.value.found, caught.value.fix)


def test_what_a_softmax_has_is_refused() -> None:
    A = attlas.transport(ONES, ONES)
    for read in (
        lambda: A.lse,
        lambda: A.logits[..., 3, :],
        lambda: A.plan,
        lambda: A.problem,
        lambda: attlas.explain(A),
    ):
        with pytest.raises(DtypeError, match="these weights are none"):
            read()
    with pytest.raises(ShapeError, match="shares"):
        stats.entropy(A)
    with pytest.raises(BackendError, match="not dropped"):
        A.pooled(ONES, 0.5)


@pytest.mark.parametrize("name", ["q", "k", "decay", "write"])
def test_tensors_must_not_change(name: str) -> None:
    given = arguments("ssd", 20)
    A, v = attlas.transport(**given), torch.ones(1, 4, 20, 3, dtype=torch.float64)
    given[name].mul_(0.5)
    reads = (
        lambda: A @ v, lambda: A.mT @ v, lambda: A[..., 3, :], lambda: A.sum(-2), lambda: A.topk(3),
        lambda: A.detach()[0] @ v[0], lambda: A.window((3, 9)).to_dense(), lambda: copy.deepcopy(A),
    )  # fmt: skip
    for read in reads:
        with pytest.raises(ModifiedError, match=f"{name} was changed in place"):
            read()


N = 90
#: Each takes the matrix, lazy or dense.
READS: dict[str, Callable[[Any], Any]] = {
    "top": lambda A: A.topk(4).values,
    "largest of rows": lambda A: A.amax(-1),
    "largest of columns": lambda A: A.amax(-2),
    "mean over heads": lambda A: A.mean(1),
    "of sizes": lambda A: A.abs().sum(-2),
    "squares": lambda A: A.square().sum(-1),
    "variance": lambda A: A.var(-1),
    "with the identity": lambda A: (0.5 * A + torch.eye(N, dtype=torch.float64)).abs().sum(-1),
    "a product of two": lambda A: (A @ A) @ torch.ones(N, 2, dtype=torch.float64),
    "a window": lambda A: A[:, 1:3].topk(3).values,
}
STATISTICS: dict[str, tuple[stats.Statistic, Callable[[Tensor], Tensor]]] = {
    "offsets": (
        stats.Offsets(), lambda D: torch.stack([D.diagonal(t, -2, -1).sum(-1) for t in range(1 - N, N)], dim=-1),
    ),
    "window of columns": (stats.ColumnMass(slice(-5, None)), lambda D: D[..., -5:, :].sum(-2)),
    "largest weight": (stats.MaxWeight(), lambda D: D.amax(-1)),
    "pooled": (
        stats.Pooled(torch.ones(1, 4, N, 2, dtype=torch.float64)), lambda D: D.sum(-1, True).expand(-1, -1, -1, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("small", [False, True], ids=["whole rows", "small tiles"])
@pytest.mark.parametrize("kind", ["ssd", "gla", "gated delta", "kda, resets", "pair"])
def test_statistics_and_their_gradients(kind: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small:
        monkeypatch.setattr(sweep, "_DEFAULT_PLAN", attlas.Plan(rows=17, columns=13))
        monkeypatch.setattr(tokens, "CHUNK", 4)
        monkeypatch.setattr(tokens, "TURNING_CHUNK", 2)
    given = arguments(kind, N)
    leaves = [given[name].requires_grad_() for name in ("q", "k")]
    A = attlas.transport(**given)
    full = dense(**given)
    for name in (*READS, *STATISTICS):
        found, wanted = read_again(A, name), READS[name](full) if name in READS else STATISTICS[name][1](full)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
        close(read_again(A.detach(), name), wanted.detach())
        slope = torch.randn(wanted.shape, dtype=torch.float64)
        grads = (torch.autograd.grad(t, leaves, slope, retain_graph=True) for t in (found, wanted))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
    assert A.weights._blocks is None


def test_a_picture() -> None:
    """Blocks have the mean of the cells that a query may see, and blocks without any have none."""
    given = arguments("gated delta", N)
    seen = torch.ones(N, N, dtype=torch.float64).tril()
    sums = [t.unflatten(-1, (9, -1)).unflatten(-3, (9, -1)).sum((-1, -3)) for t in (dense(**given), seen)]
    found = stats.picture(attlas.transport(**given), 9, 9, pool="mean")
    torch.testing.assert_close(found, sums[0] / sums[1], equal_nan=True)


def read_again(A: attlas.AttentionMatrix, name: str) -> Tensor:
    """Return a read or a statistic of the lazy matrix."""
    return READS[name](A) if name in READS else A.collect(STATISTICS[name][0])[0]


def test_a_product_takes_linear_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the product, of the gradient, of a row or a column has more numbers than a few of the tokens."""
    n = 30_000
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            for t in found if isinstance(found, tuple | list) else (found,):
                if isinstance(t, Tensor):
                    largest = max(largest, t.untyped_storage().nbytes() // t.element_size())
            return found

    given = {name: cast(value, torch.float32) for name, value in arguments("gated delta", n, heads=1).items()}
    given["q"].requires_grad_()
    v = torch.randn(1, 1, n, 8)
    with Sizes():
        A = attlas.transport(**given)
        (A @ v).sum().backward()
        A = A.detach()
        total = (A.mT @ v).sum() + A[..., n - 1, :].sum() + A[..., 7].sum() + A[..., n - 64 :, :64].sum()
    assert bool(total.isfinite())
    assert largest <= 70 * n  # a product of 30,000 tokens has as many cells as 30,000 n


def test_walk_and_recurrence_agree_on_a_long_text() -> None:
    given = {name: cast(value, torch.float32) for name, value in arguments("kda", 20_000, heads=1, strong=1e-3).items()}
    A = attlas.transport(**given)
    row = A[..., 19_999, :]
    assert A.check(rows=2) < 2e-6
    close(row[..., :50], A[..., 19_950:, :50][:, :, -1].double(), row)
    assert walk.STRIDE * A.weights.tokens.chunk < 20_000
