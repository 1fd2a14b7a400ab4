"""Errors of the public functions: their class, where they are raised and what was found; a few as whole texts."""

from __future__ import annotations

import inspect
import math
import pickle
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.messages import said

import attlas
from attlas import (
    AttlasError,
    BackendError,
    DeviceError,
    DtypeError,
    OutOfRangeError,
    Plan,
    ShapeError,
    TooLargeError,
    attend,
    attention,
    stats,
)
from attlas.errors import MissingExtraError, import_extra, kind, public

zeros = torch.zeros
q, k, v = zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 3)
A = attlas.attend(q, k)
long = zeros(1, 16, 1, 8).expand(1, 16, 100_000, 8)
big = attlas.attend(long, long)


class Square(attlas.Score):
    """A score of a user's own that forgets the sizes of its tile."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, at: attlas.Tile) -> torch.Tensor:
        return zeros(3, 3)


CASES: list[tuple[type[AttlasError], Callable[[], Any], str]] = [
    (ShapeError, lambda: attend(q, k, score=Square()) @ v, "Square(): shape (3, 3) for a tile of (2, 4, 5, 7)"),
    (DtypeError, lambda: attend([[1.0]], k), "attend(): a list"),
    (DtypeError, lambda: attend(q, k.numpy()), "attend(): an ndarray"),
    (DtypeError, lambda: attend(q.long(), k.long()), "attend(): q is int64"),
    (DtypeError, lambda: attend(q.to(torch.complex64), k), "attend(): q is complex64"),
    (DtypeError, lambda: attend(q, k.half()), "attend(): float32 and float16"),
    (DeviceError, lambda: attend(q, k.to("meta")), "attend(): cpu and meta"),
    (ShapeError, lambda: attend(zeros(5), zeros(7)), "attend(): shape (5,) in q"),
    (ShapeError, lambda: attend(zeros(5, 3), zeros(())), "attend(): shape () in k"),
    (ShapeError, lambda: attend(q, zeros(2, 2, 7, 9)), "attend(): d = 8 in q, d = 9 in k"),
    (ShapeError, lambda: attend(zeros(2, 4, 5, 8), zeros(2, 3, 7, 8)), "attend(): 4 query heads, 3 key heads"),
    (ShapeError, lambda: attend(zeros(2, 2, 5, 8), zeros(2, 4, 7, 8)), "attend(): 2 query heads, 4 key heads"),
    (ShapeError, lambda: attend(zeros(2, 4, 5, 8), zeros(2, 0, 7, 8)), "attend(): 4 query heads, 0 key heads"),
    (ShapeError, lambda: attend(zeros(2, 4, 5, 8), zeros(3, 4, 7, 8)), "attend(): batch axes (2,) and (3,)"),
    (ShapeError, lambda: attend(zeros(2, 5, 8), zeros(3, 7, 8)), "attend(): batch axes (2,) and (3,)"),
    (DtypeError, lambda: attend(q, k, score=attlas.ScaledDot), "attend(): the class ScaledDot"),
    (DtypeError, lambda: attend(q, k, score="cosine"), "attend(): a str"),
    (ShapeError, lambda: attend(q, k, score=attlas.Cosine(), scale=0.5), "attend(): both score and scale"),
    (ShapeError, lambda: attend(q, k, scale=math.nan), "ScaledDot(): scale = nan"),
    (ShapeError, lambda: attend(q, k, scale="a"), "ScaledDot(): scale = 'a'"),
    (DtypeError, lambda: attend(q, k, mask="causal"), "attend(): a str"),
    (DtypeError, lambda: attend(q, k, mask=attlas.Causal), "attend(): the class Causal"),
    (DtypeError, lambda: attend(q, k, mask=torch.ones(5, 7).long()), "from_tensor(): int64"),
    (ShapeError, lambda: attend(q, k, mask=torch.ones(5, 8).bool()), "attend(): n = 8 in mask, 7 in matrix"),
    (ShapeError, lambda: attend(q, k, mask=torch.ones(2, 7).bool()), "attend(): m = 2 in mask, 5 in matrix"),
    (ShapeError, lambda: attend(q, k, mask=torch.ones(4, 5, 7).bool()), "attend(): batch = 4 in mask, 2 in matrix"),
    (ShapeError, lambda: attend(q, k, mask=torch.ones(2, 3, 5, 7).bool()), "attend(): heads = 3 in mask, 4 in matrix"),
    (ShapeError, lambda: attend(q, k, mask=torch.ones(7).bool()), "from_tensor(): 1 axes"),
    (ShapeError, lambda: attend(q, k, mask=attlas.Padding([1, 2, 3])), "attend(): 3 entries, 2 sequences"),
    (ShapeError, lambda: attend(q, k, mask=attlas.Padding([7, 8])), "attend(): a length of 8, n = 7"),
    (
        ShapeError,
        lambda: attend(q, k, mask=attlas.Documents([0, 0, 1])),
        "attend(): 3 ids for n = 7 keys and m = 5 queries",
    ),
    (DtypeError, lambda: attend(q, k, mask=lambda b, h, i, j: i * 1.0).lse, "from_function(<lambda>): numbers"),
    (
        ShapeError,
        lambda: attend(q, k, mask=lambda b, h, i, j: i > j and j > 2).lse,
        "from_function(<lambda>): RuntimeError: Boolean value of Tensor with more than one value is ambiguous",
    ),
    (DtypeError, lambda: attend(q, k, mask=lambda i, j: i > j).lse, "from_function(<lambda>): <lambda>(i, j)"),
    (ShapeError, lambda: attend(q, k, sink=zeros(3)), "attend(): shape (3,), 4 heads"),
    (ShapeError, lambda: attend(q, k, sink=zeros(4, 1)), "attend(): shape (4, 1), 4 heads"),
    (DtypeError, lambda: attend(q, k, sink=zeros(4).long()), "attend(): integers"),
    (DtypeError, lambda: attend(q, k, sink=[0.0, 0.0, 0.0, 0.0]), "attend(): a list"),
    (DeviceError, lambda: attend(q, k, sink=zeros(4, device="meta")), "attend(): meta and cpu"),
    (DtypeError, lambda: attend(q, k, plan="tiled"), "attend(): a str"),
    (ShapeError, lambda: Plan("flash"), "Plan(): backend = 'flash'"),
    (ShapeError, lambda: Plan(rows=0), "Plan(): rows = 0"),
    (ShapeError, lambda: Plan(gathered_bytes=0), "Plan(): gathered_bytes = 0"),
    (ShapeError, lambda: Plan(columns=2.5), "Plan(): columns = 2.5"),
    (ShapeError, lambda: Plan(cells=True), "Plan(): cells = True"),
    (
        BackendError,
        lambda: attention(q, k, v, dropout_p=0.1, plan=Plan("sdpa")),
        "A @ v: sdpa does not run: dropout has to be the same when it is recomputed",
    ),
    (
        BackendError,
        lambda: attend(q, k, score=attlas.Additive(8, 8, 4), plan=Plan("sdpa")) @ v,
        "A @ v: sdpa does not run: the score is not a dot product, or not accurate as one here",
    ),
    (
        BackendError,
        lambda: attlas.explain(attend(q, k, score=attlas.Laplace(), plan=Plan("sdpa"))),
        "A @ v: sdpa does not run: the score is not a dot product, or not accurate as one here",
    ),
    (
        BackendError,
        lambda: attend(q[:, :, :0], k, plan=Plan("sdpa")) @ v,
        "A @ v: sdpa does not run: there is nothing to compute",
    ),
    (ShapeError, lambda: attention(q, k, v, dropout_p=2.0), "attention(): dropout_p = 2.0"),
    (ShapeError, lambda: attention(q, k, v, dropout_p=math.nan), "attention(): dropout_p = nan"),
    (ShapeError, lambda: attention(q, k, v, dropout_p="0.1"), "attention(): dropout_p = '0.1'"),
    (ShapeError, lambda: A @ zeros(2, 2, 6, 3), "A @ v: 6 rows in v, n = 7"),
    (ShapeError, lambda: A @ zeros(3, 2, 7, 3), "A @ v: leading axes (3, 2) in v, (2, 4) in the matrix"),
    (ShapeError, lambda: A @ zeros(2, 3, 7, 3), "A @ v: leading axes (2, 3) in v, (2, 4) in the matrix"),
    (ShapeError, lambda: A @ zeros(1, 2, 2, 7, 3), "A @ v: leading axes (1, 2, 2) in v, (2, 4) in the matrix"),
    (DtypeError, lambda: A @ v.double(), "A @ v: float32 and float64"),
    (DtypeError, lambda: A @ v.long(), "A @ v: v is int64"),
    (DtypeError, lambda: A @ [1.0], "A @ v: a list"),
    (DeviceError, lambda: A @ v.to("meta"), "A @ v: cpu and meta"),
    (ShapeError, lambda: A @ zeros(()), "A @ v: shape () in v"),
    (ShapeError, lambda: A @ zeros(6), "A @ v: 6 rows in v, n = 7"),
    (ShapeError, lambda: A[0, 1] @ zeros(2, 7, 3), "A @ v: leading axes (2,) in v, () in the matrix"),
    (ShapeError, lambda: A.mT @ zeros(7, 3), "A.mT @ x: 7 rows in x, m = 5"),
    (DtypeError, lambda: A.mT @ zeros(5, 3).half(), "A.mT @ x: float32 and float16"),
    (ShapeError, lambda: A.mT @ zeros(2, 3, 5, 3), "A.mT @ x: leading axes (2, 3) in x, (2, 4) in the matrix"),
    (DtypeError, lambda: A.mT @ [1], "A.mT @ x: a list"),
    (OutOfRangeError, lambda: A[2], "A[...]: index 2 on axis 0 of size 2"),
    (OutOfRangeError, lambda: A[-3], "A[...]: index -3 on axis 0 of size 2"),
    (OutOfRangeError, lambda: A[0, 4], "A[...]: index 4 on axis 1 of size 4"),
    (OutOfRangeError, lambda: A[0, 0, 5], "A[...]: index 5 on axis 2 of size 5"),
    (OutOfRangeError, lambda: A[0, 0, 0, -8], "A[...]: index -8 on axis 3 of size 7"),
    (OutOfRangeError, lambda: A[0, 0, [1, 9]], "A[...]: index 9 on axis 2 of size 5"),
    (OutOfRangeError, lambda: A[0][4], "A[...]: index 4 on axis 0 of size 4"),
    (ShapeError, lambda: A[0, 0, 0, 0, 0], "A[...]: 5 indices, 4 axes"),
    (ShapeError, lambda: A[..., 0, ...], "A[...]: 2 of them"),
    (DtypeError, lambda: A[1.0], "A[...]: a float"),
    (DtypeError, lambda: A[torch.tensor(1.0)], "A[...]: a Tensor"),
    (DtypeError, lambda: A["a"], "A[...]: a str"),
    (ShapeError, lambda: A[..., [0, 1, 2], [1, 2]], "A[...]: 3 rows, 2 columns"),
    (DtypeError, lambda: A[[[0, 1]]], "A[...]: a list"),
    (OutOfRangeError, lambda: attend(zeros(0, 8), zeros(3, 8))[0], "A[...]: index 0 on axis 0 of size 0"),
    (OutOfRangeError, lambda: A.logits[0, 0, 9], "A[...]: index 9 on axis 2 of size 5"),
    (TooLargeError, big.to_dense, "A.to_dense(): 640,000,000,000 bytes, the limit is 1,073,741,824"),
    (TooLargeError, lambda: A.to_dense(limit=100), "A.to_dense(): 1,120 bytes, the limit is 100"),
    (TooLargeError, lambda: A.logits.to_dense(limit=100), "A.logits.to_dense(): 1,120 bytes, the limit is 100"),
    (ShapeError, lambda: A.amax(7), "A.amax(): dim = 7"),
    (ShapeError, lambda: A.argmax("rows"), "A.argmax(): dim = 'rows'"),
    (ShapeError, lambda: A.sum((1, 4)), "A.sum(): dim = 4"),
    (ShapeError, lambda: A[0, 0].mean(2), "A.mean(): dim = 2"),
    (ShapeError, lambda: A.sum(True), "A.sum(): dim = True"),
    (ShapeError, lambda: A.squeeze(4), "A.squeeze(): dim = 4"),
    (TooLargeError, lambda: big.amax(1), "A.amax(): 40,000,000,000 bytes, the limit is 1,073,741,824"),
    (
        TooLargeError,
        lambda: torch.cat([big, big]),
        "torch.cat(): 1,280,000,000,000 bytes, the limit is 1,073,741,824",
    ),
    (ShapeError, lambda: A.logits.mean(-2), "A.logits.mean(): dim = -2"),
    (ShapeError, lambda: A.logits.var(0), "A.logits.var(): dim = 0"),
    (ShapeError, lambda: A.topk(8), "TopK(): k = 8, n = 7"),
    (ShapeError, lambda: A.topk(0), "TopK(): k = 0"),
    (ShapeError, lambda: A.topk(1.5), "TopK(): k = 1.5"),
    (DtypeError, lambda: A.collect(stats.Entropy), "collect(): the class Entropy"),
    (DtypeError, lambda: A.collect("entropy"), "collect(): a str"),
    (ShapeError, lambda: A.check(rows=0), "A.check(): rows = 0"),
    (ShapeError, lambda: attlas.Gaussian(math.nan), "Gaussian(): bandwidth = nan"),
    (ShapeError, lambda: attlas.Gaussian([1.0, 0.0]), "Gaussian(): bandwidth = 0.0"),
    (DtypeError, lambda: attlas.Gaussian("a"), "Gaussian(): a str"),
    (ShapeError, lambda: attend(q, k, score=attlas.Gaussian([1.0, 2.0])), "attend(): d = 8 in q and k, 2 bandwidths"),
    (ShapeError, lambda: attlas.Window(-3, 0), "Window(): left = -3"),
    (DtypeError, lambda: attlas.Window(1.5, 0), "Window(): left = 1.5 (float)"),
    (DtypeError, lambda: attlas.Causal(0.5), "Causal(): offset = 0.5 (float)"),
    (
        ShapeError,
        lambda: attend(q, k, score=attlas.ScaledDot() + attlas.Alibi(3)),
        "attend(): 4 heads in q, 3 in Alibi()",
    ),
    (ShapeError, lambda: attend(q, k, score=attlas.RelativeBias(3, 8)), "attend(): 4 heads in q, 3 in RelativeBias()"),
    (ShapeError, lambda: attend(q, k, score=attlas.Additive(4, 4, 8)), "attend(): 8 in q, 8 in k"),
    (ShapeError, lambda: attend(q, k, score=attlas.Bilinear(4, 4)), "attend(): 8 in q, 8 in k"),
    (
        ShapeError,
        lambda: attend(q, k, score=attlas.TensorBias(zeros(5, 8))),
        "attend(): (5, 8) in t, (batch, heads, m, n) = (2, 4, 5, 7)",
    ),
    (ShapeError, lambda: attlas.SoftCap(attlas.ScaledDot(), 0), "SoftCap(): cap = 0"),
    (DtypeError, lambda: attlas.SoftCap("dot", 5.0), "SoftCap(): a str"),
    (DtypeError, lambda: attlas.ScaledDot() + 1, "score + other: an int on one side"),
    (DtypeError, lambda: attlas.ScaledDot() * "a", "score * factor: factor = 'a'"),
    (DtypeError, lambda: attlas.Causal() & torch.ones(5, 5).bool(), "mask & other: a Tensor on one side"),
    (ShapeError, lambda: ~attlas.from_tensor(torch.randn(5, 7)), "~ of masks: an additive mask beside ~"),
    (ShapeError, lambda: stats.picture(A, 0, 4), "Picture(): height = 0"),
    (ShapeError, lambda: stats.picture(A, 2, 2, pool="median"), "Picture(): pool = 'median'"),
    (ShapeError, lambda: stats.picture(A, 100, 100), "Picture(): height = 100, width = 100"),
    (ShapeError, lambda: stats.spans(A, [(0, 9)], [(0, 1)]), "Spans(): rows[0] = (0, 9)"),
    (ShapeError, lambda: stats.column_mass(A, rows=slice(3, 99)), "ColumnMass(): rows = slice(3, 99, None)"),
    (ShapeError, lambda: stats.spans(A, [3], [(0, 1)]), "Spans(): rows[0] = 3"),
]

# What a person reads of two of them, from the first line to the last.
TEXTS = [
    """\
attend(): q and k must have the same dtype.
  q (..., m, d): (2, 4, 5, 8) float32 cpu
  k (..., n, d): (2, 2, 7, 8) float16 cpu
  found: float32 and float16
  fix: k.to(torch.float32)""",
    """\
A.amax(): it needs whole matrices, and they would be larger than the limit.
  A: shape (1, 16, 100000, 100000) float32
  found: 40,000,000,000 bytes, the limit is 1,073,741,824
  fix: stats.picture(A, 512, 512).amax(1), or a window of queries, A[..., :64, :].amax(1).""",
]
# Advice that is made for what was given.
FIXES = {
    "attend(): a list": "torch.as_tensor(q)",
    "attend(): d = 8 in q, d = 9 in k": "project both to one size, or use score=Additive(8, 9, hidden_size).",
    "attend(): the class ScaledDot": "score=ScaledDot(), an object and not its class.",
    "attend(): (5, 8) in t, (batch, heads, m, n) = (2, 4, 5, 7)":
        "t.unsqueeze(1) if its first axis is the batch and it has no heads.",
    "Picture(): height = 100, width = 100": "Picture(5, 7)",
}  # fmt: skip


@cache
def error_of(call: Callable[[], Any]) -> AttlasError:
    """Return the error that a call raises."""
    with pytest.raises(AttlasError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(("expected", "call", "words"), CASES, ids=[words for *_, words in CASES])
def test_fields(expected: type[AttlasError], call: Callable[[], Any], words: str) -> None:
    error = error_of(call)
    assert type(error) is expected
    assert said(error) == words
    assert len(error.arguments) <= 3
    text = str(error)
    assert text.startswith(f"{error.where}: {error.rule}\n")
    assert not re.search(r" an? an? | a e|\n\n|\n   ", text)
    assert pickle.loads(pickle.dumps(error)).__dict__ == error.__dict__


@pytest.mark.parametrize("text", TEXTS, ids=[text.partition("\n")[0] for text in TEXTS])
def test_text(text: str) -> None:
    assert text in {str(error_of(call)) for _, call, _ in CASES}


@pytest.mark.parametrize("words", FIXES)
def test_fixes(words: str) -> None:
    assert FIXES[words] in {error_of(call).fix for *_, call, found in CASES if found == words}


def test_classes_of_errors_are_those_of_python_too() -> None:
    assert issubclass(ShapeError, ValueError)
    assert issubclass(OutOfRangeError, IndexError)
    assert issubclass(OutOfRangeError, ShapeError)
    assert issubclass(DtypeError, TypeError)
    assert issubclass(DeviceError, ValueError)
    assert issubclass(BackendError, RuntimeError)
    assert issubclass(TooLargeError, MemoryError)
    assert issubclass(attlas.RecordingError, AttlasError)
    for name in attlas.__all__:
        item = getattr(attlas, name)
        if isinstance(item, type) and issubclass(item, Exception):
            assert issubclass(item, AttlasError)


def test_the_text_is_made_of_the_fields() -> None:
    error = ShapeError("x must be y.", "3", "y", t=zeros(2, 3), x=3, w="word", where="f()")
    assert str(error) == "f(): x must be y.\n  t: (2, 3) float32 cpu\n  x: 3\n  w: word\n  found: 3\n  fix: y"
    assert error.arguments == {"t": "(2, 3) float32 cpu", "x": "3", "w": "word"}  # no tensor is kept alive
    assert str(ShapeError("r.", "3", "y", where="f()")) == "f(): r.\n  found: 3\n  fix: y"
    assert str(ShapeError("plain words")) == "plain words"


def test_an_error_is_said_of_another_function() -> None:
    error = ShapeError("x must be y.", "3", "y", t=zeros(2, 3), where="f()")
    other = error.replaced(where="command", fix="--y")
    assert type(other) is ShapeError
    assert str(other) == "command: x must be y.\n  t: (2, 3) float32 cpu\n  found: 3\n  fix: --y"
    assert str(error.replaced(where="")).startswith("x must be y.\n")


class Halved:
    """Public functions whose check does not know who asked for it."""

    @public("halved()")
    def by_name(self, m: int) -> int:
        return half_of(m)

    @public()
    def by_class(self, m: int) -> int:
        return half_of(m)

    @public("outer()")
    def through(self, m: int) -> int:
        return self.by_name(m)


def half_of(m: int) -> int:
    if m % 2:
        raise ShapeError("m must be even.", f"m = {m}", f"halved({m + 1})") from KeyError(m)
    return m // 2


@pytest.mark.parametrize(
    ("name", "where"), [("by_name", "halved()"), ("by_class", "Halved()"), ("through", "halved()")]
)
def test_the_public_function_names_itself(name: str, where: str) -> None:
    """The innermost one is named; the error keeps its type, its cause, its trace, and gets no other context."""
    call = getattr(Halved(), name)
    assert call(4) == 2
    with pytest.raises(ShapeError) as caught:
        call(3)
    assert str(caught.value) == f"{where}: m must be even.\n  found: m = 3\n  fix: halved(4)"
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__context__ is None
    assert caught.traceback[-1].name == "half_of"


def test_a_block_names_the_function_too() -> None:
    with pytest.raises(MissingExtraError) as caught, public("f()"):
        import_extra("no_such_module", "it must be installed.", "pip install it")
    assert (
        str(caught.value)
        == "f(): it must be installed.\n  found: no module named no_such_module\n  fix: pip install it"
    )
    with pytest.raises(ShapeError, match=r"^g\(\): r."), public("f()"):
        raise ShapeError("r.", "3", "y", where="g()")
    with pytest.raises(KeyError), public("f()"):
        raise KeyError


def test_a_decorated_function_is_the_same_to_who_looks_at_it() -> None:
    assert Halved.by_name.__name__ == "by_name"
    assert str(inspect.signature(half_of)) == str(inspect.signature(public("f()")(half_of)))


def test_an_error_goes_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(ShapeError("r.", "3", "y", x=3)))
    assert str(error) == "r.\n  x: 3\n  found: 3\n  fix: y"
    with pytest.raises(ShapeError) as caught, public("f()"):
        raise error
    assert caught.value is error
    assert error.args == ("f(): r.\n  x: 3\n  found: 3\n  fix: y",)


@pytest.mark.parametrize(
    ("value", "words"),
    [(1, "an int"), (1.5, "a float"), ([], "a list"), (np.zeros(1), "an ndarray"), (int, "the class int")],
)
def test_kind(value: object, words: str) -> None:
    assert kind(value) == words


PER_HEAD: dict[str, Callable[[], dict[str, Any]]] = {
    "slopes": lambda: {"score": attlas.ScaledDot() + attlas.Alibi(4)},
    "biases": lambda: {"score": attlas.ScaledDot() + attlas.RelativeBias(4, 3)},
    "factor": lambda: {"score": torch.ones(4) * attlas.ScaledDot()},
    "scale": lambda: {"scale": torch.ones(4)},
    "sink": lambda: {"sink": torch.ones(4)},
    "mask": lambda: {"mask": attlas.Heads({3: attlas.Causal()})},
}


@pytest.mark.parametrize("name", PER_HEAD)
def test_three_axes_have_no_heads_and_the_fix_gives_them_some(name: str) -> None:
    tokens, given = torch.randn(4, 6, 8), PER_HEAD[name]()
    with pytest.raises(ShapeError) as caught:
        attend(tokens, tokens, **given)
    assert caught.value.fix.startswith("q[None], k[None]")
    assert "1 head" in caught.value.found
    assert "1 heads" not in caught.value.found
    assert attend(tokens[None], tokens[None], **given).shape == (1, 4, 6, 6)
    for other in (torch.randn(3, 6, 8), torch.randn(6, 8), torch.randn(4, 1, 6, 8)):  # that is not what is wrong
        with pytest.raises(ShapeError) as caught:
            attend(other, other, **given)
        assert "q[None]" not in caught.value.fix or name == "mask"


class Pair(attlas.Score):
    """A score whose dot product is what most people return first."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, at: attlas.Tile) -> torch.Tensor:
        return 2 * q @ k.mT

    def as_dot(self, q: torch.Tensor, k: torch.Tensor) -> Any:
        return q, k


def test_a_dot_product_of_another_type_is_named() -> None:
    for score in (Pair(), 0.5 * Pair(), Pair() + attlas.TensorBias(zeros(1)), attlas.SoftCap(Pair(), 2.0)):
        with pytest.raises(
            DtypeError, match=r"Pair.as_dot\(\): it must return an attlas.scores.Dot, or None."
        ) as caught:
            attend(q, q, score=score) @ zeros(5, 3)
        assert caught.value.found == "a tuple"
    with pytest.raises(attlas.errors.ContractError, match="as_dot") as broken:
        attlas.testing.check_score(Pair())
    assert broken.value.fix == "return attlas.scores.Dot(q, k, scale=1.0)"


def test_a_difference_of_long_matrices_that_do_not_fit_names_what_helps() -> None:
    other = attlas.attend(long, long, mask=attlas.Causal())[:, :1]
    for call in (lambda: big - 0.5 * other, lambda: 2 * big + other, lambda: torch.sub(big, other)):
        with pytest.raises(TooLargeError, match=r"A1 @ v [+-] factor \* \(A2 @ v\)"):
            call()
    with pytest.raises(TooLargeError, match="take parts"):
        big * other


def test_a_statistic_in_a_program() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return stats.entropy(attend(q, q))

    tokens = torch.randn(5, 4)
    for strict in (True, False):
        exported = torch.export.export(Model(), (tokens,), strict=strict).module()
        torch.testing.assert_close(exported(tokens), stats.entropy(attend(tokens, tokens)))
    meta = torch.empty(5, 4, device="meta")
    with pytest.raises(BackendError, match="device with memory"):
        stats.entropy(attend(meta, meta))
