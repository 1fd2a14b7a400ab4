"""Tensors that change after attend(), or that are no ordinary ones, give an error and never a wrong number."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import attlas
from attlas import AttlasError, ModifiedError, stats
from attlas.engine.backends.native import library
from attlas.matrix import softmax_matrix
from attlas.recording.snapshot import snapshot

READS: dict[str, Callable[[Any], Any]] = {
    "row": lambda A: A[0, :],
    "part": lambda A: A[2:4, 1:3],
    "lse": lambda A: A.lse,
    "dense": lambda A: A.to_dense(),
    "logits": lambda A: A.logits[0, :],
    "sum": lambda A: A.sum(-2),
    "entropy": stats.entropy,
    "product": lambda A: A @ torch.ones(7, 2),
    "transposed product": lambda A: A.mT @ torch.ones(5, 2),
    "einsum": lambda A: torch.einsum("ij,jd->id", A, torch.ones(7, 2)),
    "comparison": lambda A: (A > 0.1).sum(),
    "check": lambda A: A.check(),
    "on another device": lambda A: A.to(torch.float64),
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
}


class Parts:
    """One problem whose tensors can all be changed in place."""

    def __init__(self) -> None:
        self.q, self.k = torch.randn(5, 4), torch.randn(7, 4)
        self.sink = torch.zeros(1)
        self.bias = torch.randn(5, 7)
        self.score = attlas.Gaussian(nn.Parameter(torch.tensor(2.0)))
        self.lengths = torch.tensor([6])
        self.allowed = torch.ones(5, 7).bool()
        mask = attlas.from_tensor(self.allowed) & attlas.from_tensor(self.bias)
        self.A = attlas.attend(self.q, self.k, score=self.score, sink=self.sink, mask=mask)


CHANGES: dict[str, Callable[[Parts], Any]] = {
    "q": lambda p: p.q.mul_(2),
    "a view of q": lambda p: p.q[0].zero_(),
    "k": lambda p: p.k.add_(1),
    "sink": lambda p: p.sink.fill_(3),
    "additive mask": lambda p: p.bias.zero_(),
    "mask": lambda p: p.allowed[:, 2:].fill_(False),
    "parameter": lambda p: torch.optim.SGD([p.score.bandwidth], 1.0).step(),
}


@pytest.mark.parametrize("read_before", [False, True], ids=["fresh", "read before"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("read", READS)
def test_a_changed_matrix_is_not_read(read: str, change: str, read_before: bool) -> None:
    parts = Parts()
    if read_before:
        with torch.no_grad():
            READS["lse"](parts.A), READS["product"](parts.A)
    if change == "parameter":
        parts.score.bandwidth.grad = torch.tensor(0.5)
    with torch.no_grad():
        CHANGES[change](parts)
    with pytest.raises(ModifiedError, match="changed in place"):
        READS[read](parts.A)


def counts(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


# Everything that attend() takes tensors in: a tensor, how it is given, and how it is changed.
GIVEN: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], dict[str, Any]]]] = {
    "scale": (lambda: torch.tensor(0.5), lambda t: {"scale": t}),
    "scale of each head": (lambda: torch.ones(2), lambda t: {"scale": t}),
    "factor": (lambda: torch.ones(2), lambda t: {"score": t * attlas.ScaledDot()}),
    "bandwidth": (lambda: torch.ones(4), lambda t: {"score": attlas.Gaussian(t)}),
    "bandwidth of a distance": (lambda: torch.ones(()), lambda t: {"score": attlas.Laplace(t)}),
    "slopes": (lambda: torch.ones(2), lambda t: {"score": attlas.ScaledDot() + attlas.Alibi(t)}),
    "bias": (lambda: torch.ones(2, 5, 7), lambda t: {"score": attlas.ScaledDot() + attlas.TensorBias(t)}),
    "a score within a score": (
        lambda: torch.ones(2),
        lambda t: {"score": attlas.SoftCap(0.5 * (t * attlas.ScaledDot()), 2.0)},
    ),
    "sink": (lambda: torch.ones(2), lambda t: {"sink": t}),
    "one sink": (lambda: torch.ones(()), lambda t: {"sink": t}),
    "mask": (lambda: torch.ones(5, 7).bool(), lambda t: {"mask": t}),
    "additive mask": (lambda: torch.ones(3, 2, 5, 7), lambda t: {"mask": t}),
    "lengths": (lambda: counts(7, 6, 5), lambda t: {"mask": attlas.Padding(t)}),
    "lengths of 32 bits": (lambda: counts(7, 6, 5).int(), lambda t: {"mask": attlas.Padding(t, side="left")}),
    "prefix": (lambda: counts(6, 5, 4), lambda t: {"mask": attlas.Prefix(t) | attlas.Causal()}),
    "ids": (lambda: counts(0, 0, 0, 1, 1, 2, 2), lambda t: {"mask": attlas.Documents(t)}),
    "ids of queries": (lambda: counts(1, 1, 0, 1, 0), lambda t: {"mask": attlas.Documents([0, 0, 1, 1, 1, 0, 0], t)}),
    "a mask within a mask": (
        lambda: counts(7, 6, 5),
        lambda t: {"mask": ~attlas.masks.Heads({1: attlas.Causal() & attlas.Padding(t)})},
    ),
    "score_mod": (lambda: torch.ones(7), lambda t: {"score": lambda s, b, h, i, j: s + t[j]}),
    "mask_mod": (lambda: torch.ones(7).bool(), lambda t: {"mask": lambda b, h, i, j: t[j] | (i == 0)}),
}


@pytest.mark.parametrize("name", GIVEN)
def test_whatever_is_given_must_not_change(name: str) -> None:
    make, arguments = GIVEN[name]
    t = make()
    q, k = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 7, 4)
    given = arguments(t)
    A = attlas.attend(q, k, **given)
    before = A.to_dense().clone()
    torch.testing.assert_close(A.to_dense(), before)
    t[...] = False if t.dtype == torch.bool else 2
    for read in (lambda: A @ torch.ones(7, 2), lambda: A.lse, lambda: stats.entropy(A), lambda: A.mT[..., 0, :]):
        with pytest.raises(ModifiedError, match="was changed in place"):
            read()
    # The next matrix is made of the new numbers.
    other = attlas.attend(q, k, **given).to_dense()
    torch.testing.assert_close(other, attlas.attend(q, k, **arguments(t.clone())).to_dense())
    assert not torch.equal(other, before)


@pytest.mark.parametrize("name", GIVEN)
def test_a_recording_keeps_its_numbers_or_says_that_they_changed(name: str) -> None:
    make, arguments = GIVEN[name]
    t = make()
    q, k = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 7, 4)
    A = attlas.attend(q, k, **arguments(t))
    before = A.to_dense().clone()
    kept = softmax_matrix(replace(snapshot(A.problem), k=k, versions=()), A.plan)
    t[...] = False if t.dtype == torch.bool else 2
    copied = "length" in name or "ids" in name or "prefix" in name or "sink" in name or name.startswith("scale")
    if copied or name == "a mask within a mask":
        torch.testing.assert_close(kept.to_dense(), before)
    else:
        with pytest.raises(ModifiedError):
            kept.to_dense()


@pytest.mark.parametrize("which", ["q", "k"])
def test_tokens_that_had_to_be_copied_must_not_change(which: str) -> None:
    """One set of tokens for a batch is spread by a copy."""
    given = {"q": torch.randn(3, 2, 2, 5, 4), "k": torch.randn(3, 2, 2, 7, 4)} | {which: torch.randn(1, 2, 2, 6, 4)}
    A = attlas.attend(**given)
    given[which].zero_()
    with pytest.raises(ModifiedError, match=f"{which} was changed"):
        _ = A.lse


def test_a_part_of_a_changed_matrix_is_not_read() -> None:
    parts = Parts()
    first = attlas.attend(parts.q[None, None], parts.k[None, None])[0]
    parts.k.zero_()
    for part in (first, first[0], first.detach(), first.mT, first.logits):
        with pytest.raises(ModifiedError, match="k was changed"):
            _ = part.sum() if isinstance(part, attlas.AttentionMatrix) else part[..., 0, :]


def test_numbers_that_were_replaced_count_as_changed() -> None:
    q = torch.randn(1, 2, 5, 4)
    A = attlas.attend(q, q)
    q.data = torch.randn(1, 2, 5, 4)
    with pytest.raises(ModifiedError):
        A.sum(-1)


def test_a_mask_that_changed_between_two_matrices_is_read_anew() -> None:
    t = torch.ones(130, 130).bool()
    mask, q = attlas.from_tensor(t), torch.randn(130, 4)
    assert bool((attlas.attend(q, q, mask=mask).to_dense() > 0).all())
    t[:, 64:] = False
    found = attlas.attend(q, q, mask=mask)
    assert bool((found.to_dense()[:, 64:] == 0).all())
    assert bool(((found @ torch.eye(130))[:, 64:] == 0).all())
    bias = torch.zeros(130, 130)
    additive = attlas.from_tensor(bias)
    stats.entropy(attlas.attend(q, q, mask=additive))
    bias[:, 0] = 5.0
    torch.testing.assert_close(attlas.attend(q, q, mask=additive).to_dense(), torch.softmax(q @ q.mT / 2 + bias, -1))


def test_the_backward_sees_what_changed_after_the_forward() -> None:
    bias, q = torch.randn(5, 7), torch.randn(5, 4, requires_grad=True)
    out = attlas.attention(q, torch.randn(7, 4), torch.randn(7, 2), score=attlas.ScaledDot() + attlas.TensorBias(bias))
    bias.zero_()
    with pytest.raises(ModifiedError, match="score was changed"):
        out.sum().backward()


@pytest.mark.parametrize("mask", [None, attlas.Causal(), attlas.Window(3, 1)], ids=str)
@pytest.mark.parametrize("plan", ["auto", "tiled", "reference"])
@pytest.mark.parametrize("m", [6, 520])
def test_an_output_may_be_changed_in_place(m: int, plan: str, mask: Any) -> None:
    q, k, v = (torch.randn(1, 2, m, 8, requires_grad=True) for _ in range(3))

    def changed(out: Tensor) -> Tensor:
        out.mul_(2)
        out += 1
        out[:, 0] = 0
        return out.square().sum()

    found = changed(attlas.attention(q, k, v, mask=mask, plan=attlas.Plan(plan)))
    weights = attlas.attend(q, k, mask=mask).to_dense()
    wanted = changed(weights @ v)
    for a, b in zip(*(torch.autograd.grad(t, (q, k, v)) for t in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("plan", ["auto", "tiled", "native"])
@pytest.mark.parametrize("score", [None, attlas.Gaussian(1.0), attlas.ScaledDot() + attlas.TensorBias(torch.zeros(1))])
def test_nothing_is_written_into_what_was_given(score: Any, plan: str) -> None:
    """One query of one text: then what is made of the sink has the sink's own shape."""
    q, k, sink = torch.randn(1, 2, 1, 4), torch.randn(1, 1, 9, 4), torch.zeros(2)
    if plan == "native" and not (library.available() and (score is None or isinstance(score, attlas.Gaussian))):
        pytest.skip("no kernel for it")
    A = attlas.attend(q, k, score=score, mask=attlas.Window(100, 3), sink=sink, plan=attlas.Plan(plan))
    for read in (lambda: A.lse, lambda: A.sum(-2), lambda: A @ torch.randn(9, 3), lambda: stats.entropy(A), A.to_dense):
        read()
    assert not sink.any()


def test_a_child_of_fork_does_not_wait_for_threads() -> None:
    """It would wait for ever: the threads of torch's pool do not live on in it."""
    code = """
import os, signal, torch, attlas
torch.set_num_threads(2)
q = torch.randn(1, 4, 700, 32)
known = attlas.attend(q, q) @ q
child = os.fork()
if child == 0:
    signal.alarm(60)
    A = attlas.attend(q, q)
    os._exit(int(not torch.allclose(A @ q, known, atol=1e-5)) + 2 * int(not attlas.stats.entropy(A).isfinite().all()))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


# ------------------------------------------------------------------------------------------------ other tensors


class Wrapper(Tensor):
    """A subclass without memory of its own, as distributed and quantized tensors are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, t: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype)

    def __init__(self, t: Tensor) -> None:
        self.inner = t

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


class Subclass(Tensor):
    """A subclass that keeps its numbers."""


def fake() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(2, 3, 5, 4)


REFUSED: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.randn(5, 4).to_sparse(),
    "CSR": lambda: torch.randn(5, 4).to_sparse_csr(),
    "mkldnn": lambda: torch.randn(5, 4).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(5, 4), torch.randn(3, 4)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(5, 4), torch.randn(3, 4)], layout=torch.jagged),
    "masked": lambda: torch.masked.masked_tensor(torch.randn(5, 4), torch.ones(5, 4).bool()),
    "wrapper": lambda: Wrapper(torch.randn(5, 4)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_other_tensors_are_refused_at_the_entry(kind: str) -> None:
    plain, other = torch.randn(5, 4), REFUSED[kind]()
    calls: list[Callable[[], Any]] = [
        lambda: attlas.attend(other, plain),
        lambda: attlas.attend(plain, other),
        lambda: attlas.attend(plain, plain) @ other,
        lambda: attlas.attend(plain, plain).mT @ other,
    ]
    if kind != "jagged" and kind != "nested":
        calls += [lambda: attlas.TensorBias(other), lambda: attlas.from_tensor(other)]
    for call in calls:
        with pytest.raises(AttlasError):
            call()


@pytest.mark.parametrize("make", [lambda: torch.empty(2, 3, 5, 4, device="meta"), fake], ids=["meta", "fake"])
def test_tensors_without_numbers_give_shapes(make: Callable[[], Tensor]) -> None:
    q = make()
    with q.fake_mode if hasattr(q, "fake_mode") else torch.device("meta"):  # type: ignore[attr-defined]
        A = attlas.attend(q, q, mask=attlas.Causal())
        assert (A @ q).shape == (A.mT @ q).shape == (2, 3, 5, 4)
        assert A.lse.shape == A[..., 0, :].shape == (2, 3, 5)
        for call in (lambda: stats.entropy(A), A.check, lambda: A.topk(2)):
            with pytest.raises(AttlasError):
                call()


def test_subclasses_that_keep_their_numbers_are_tensors() -> None:
    q = torch.randn(5, 4)
    for t in (nn.Parameter(q), q.as_subclass(Subclass)):
        torch.testing.assert_close(attlas.attend(t, t).to_dense().as_subclass(Tensor), attlas.attend(q, q).to_dense())


# ---------------------------------------------------------------------------------------- derivatives of other kinds

SCORES: dict[str, Callable[[], attlas.Score]] = {
    "ScaledDot": attlas.ScaledDot,
    "SoftCap": lambda: attlas.SoftCap(attlas.ScaledDot(), 2.0),
    "Gaussian": lambda: attlas.Gaussian(1.5, learn=True).double(),
    "Laplace": lambda: attlas.Laplace([1.0, 2.0, 3.0], learn=True).double(),
    "Additive": lambda: attlas.Additive(3, 3, 4).double(),
    "RelativeBias": lambda: attlas.ScaledDot() + attlas.RelativeBias(2, 3).double(),
}
USES: dict[str, Callable[..., Tensor]] = {
    "product": lambda A, v: A @ v,
    "transposed product": lambda A, v: A.mT @ v[:, :, :4],
    "lse": lambda A, v: A.lse,
    "read": lambda A, v: A[..., 1:3, :],
    "statistic": lambda A, v: stats.entropy(A),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("score", SCORES)
def test_gradients_of_gradients(score: str, use: str) -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, t, 3, generator=random).double().requires_grad_() for t in (4, 5, 5))
    own = SCORES[score]()
    leaves = (q, k, *([v] if "product" in use else []), *own.parameters())

    def f(*_: Tensor) -> Tensor:
        return USES[use](attlas.attend(q, k, score=own, mask=attlas.Causal()), v)

    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)


def test_a_gradient_of_a_gradient_that_would_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 1, 9, 4, requires_grad=True)
    out = attlas.attention(q, q, q)
    monkeypatch.setattr("attlas.engine.autodiff.graph.DENSE_LIMIT", 100)
    (first,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    assert not first.requires_grad
    with pytest.raises(attlas.TooLargeError, match="create_graph"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("score", SCORES)
def test_forward_mode(score: str, use: str) -> None:
    """The derivative in one direction, by dual numbers and by torch.func.jvp, is the one of finite differences."""
    q, k, v, direction = (torch.randn(1, 2, t, 3).double() for t in (4, 5, 5, 4))
    own = SCORES[score]().requires_grad_(False)

    def f(q: Tensor) -> Tensor:
        return USES[use](attlas.attend(q, k, score=own, mask=attlas.Causal()), v)

    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(f(forward_ad.make_dual(q, direction))).tangent
    wanted = (f(q + 1e-6 * direction) - f(q - 1e-6 * direction)) / 2e-6
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.func.jvp(f, (q,), (direction,))[1], wanted, rtol=1e-5, atol=1e-6)


def test_vmap_of_a_statistic_is_refused() -> None:
    q, k = torch.randn(3, 5, 4), torch.randn(7, 4)
    found = torch.vmap(lambda q: attlas.attend(q, k)[1, :])(q)
    torch.testing.assert_close(found, attlas.attend(q, k)[:, 1, :])
    with pytest.raises(attlas.BackendError, match="transform"):
        torch.vmap(lambda q: stats.entropy(attlas.attend(q, k)))(q)


# ------------------------------------------------------------------------------------------------ retained gradients


def test_the_gradient_of_the_weights_is_kept() -> None:
    q, k = (torch.randn(2, 4, t, 3, requires_grad=True) for t in (5, 7))
    v = torch.randn(2, 2, 7, 6, requires_grad=True)
    x = torch.randn(2, 4, 5, 2)
    dense = attlas.attend(q, k).to_dense()
    dense.retain_grad()
    A = attlas.attend(q, k)
    before = A @ v  # as a model does, which hands out its weights after it has used them
    A.retain_grad()
    assert A.grad is None
    (before.square().sum() + (A.mT @ x).square().sum() + A.to_dense().square().sum()).backward()
    wide = v.repeat_interleave(2, 1)
    ((dense @ wide).square().sum() + (dense.mT @ x).square().sum() + dense.square().sum()).backward()
    assert A.grad is not None
    torch.testing.assert_close(A.grad, dense.grad)


def test_a_gradient_of_the_weights_that_would_be_incomplete_is_refused() -> None:
    q = torch.randn(5, 4, requires_grad=True)
    for use in (
        stats.entropy,
        lambda A: A.lse,
        lambda A: A[0, 0, :, :],
        lambda A: A.logits[0, 0, :, :],
        lambda A: A[0] @ q,
    ):
        A = attlas.attend(q[None, None], q[None, None])
        use(A)
        with pytest.raises(attlas.GradientError):
            A.retain_grad()
    A = attlas.attend(q, q)
    A.retain_grad()
    with pytest.raises(attlas.GradientError):
        stats.entropy(A)
    assert attlas.attend(q, q).grad is None
    long = torch.empty(1, device="cpu").expand(200_000, 4)
    assert attlas.attend(long, long).grad is None  # whatever the matrix would take
