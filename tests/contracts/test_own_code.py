"""Code of the user: whichever way it holds a tensor, the tensor gets its gradient, and a change of it is noticed."""

from __future__ import annotations

import copy
import functools
import gc
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attlas
from attlas import GradientError, ModifiedError, Plan, stats

HEADS, M, N = 2, 6, 7
GLOBAL: dict[str, Tensor] = {}
TABLE = torch.zeros(HEADS, M, N)


def added(t: Tensor, score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
    """Return the score of pairs with the numbers of a table, as FlexAttention's functions add them."""
    return score + t[h, i, j]


def closure(t: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: score + t[h, i, j]


def a_global(t: Tensor) -> Callable[..., Tensor]:
    globals()["TABLE"] = t
    return lambda score, b, h, i, j: score + TABLE[h, i, j]


def in_a_global(t: Tensor) -> Callable[..., Tensor]:
    GLOBAL["t"] = t
    return lambda score, b, h, i, j: score + GLOBAL["t"][h, i, j]


class Holder:
    def __init__(self, t: Tensor) -> None:
        self.t = t

    def method(self, score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return score + self.t[h, i, j]

    __call__ = method

    @property
    def computed(self) -> Tensor:
        return self.t * 1.0


def attribute(t: Tensor) -> Callable[..., Tensor]:
    self = Holder(t)
    return lambda score, b, h, i, j: score + self.t[h, i, j]


def computed(t: Tensor) -> Callable[..., Tensor]:
    self = Holder(t)
    return lambda score, b, h, i, j: score + self.computed[h, i, j]


def default(t: Tensor) -> Callable[..., Tensor]:
    def f(score: Tensor, b: Any, h: Any, i: Any, j: Any, t: Tensor = t) -> Tensor:
        return score + t[h, i, j]

    return f


def keyword_default(t: Tensor) -> Callable[..., Tensor]:
    def f(score: Tensor, b: Any, h: Any, i: Any, j: Any, *, t: Tensor = t) -> Tensor:
        return score + t[h, i, j]

    return f


def by_keyword(score: Tensor, b: Any, h: Any, i: Any, j: Any, t: Tensor) -> Tensor:
    return score + t[h, i, j]


def in_a_list(t: Tensor) -> Callable[..., Tensor]:
    several = [torch.zeros(HEADS, M, N), t]
    return lambda score, b, h, i, j: score + several[1][h, i, j]


def in_a_dict(t: Tensor) -> Callable[..., Tensor]:
    settings = {"bias": {"t": (t,)}}
    return lambda score, b, h, i, j: score + settings["bias"]["t"][0][h, i, j]


def in_a_parameter_list(t: Tensor) -> Callable[..., Tensor]:
    several = nn.ParameterList([torch.zeros(1), t]) if t.is_leaf else [None, t]
    return lambda score, b, h, i, j: score + several[1][h, i, j]


def in_a_dataclass(t: Tensor) -> Callable[..., Tensor]:
    @dataclass
    class Settings:
        tensors: list[Tensor] = field(default_factory=list)

    settings = Settings([t])
    return lambda score, b, h, i, j: score + settings.tensors[0][h, i, j]


def called_function(t: Tensor) -> Callable[..., Tensor]:
    def table() -> Tensor:
        return t

    def outer(score: Tensor, h: Any, i: Any, j: Any) -> Tensor:
        return score + table()[h, i, j]

    return lambda score, b, h, i, j: outer(score, h, i, j)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def autograd_function(t: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: score + Once.apply(t)[h, i, j]


class Module(nn.Module):
    def __init__(self, t: Tensor) -> None:
        super().__init__()
        self.t = t

    def forward(self, score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return score + self.t[h, i, j]


def layer(t: Tensor) -> Callable[..., Tensor]:
    """Return a function that calls an operation which reads the tensor inside of torch."""
    at = nn.functional.embedding
    return lambda score, b, h, i, j: score + at((h * M + i) * N + j, t.reshape(-1, 1)).squeeze(-1)


def one_pair_only(t: Tensor) -> Callable[..., Tensor]:
    """Return a function that is asked by torch.vmap: a reduction over a tile would be another one."""
    return lambda score, b, h, i, j: score + torch.stack([t[h, i, j], t[h, i, j]]).mean()


def of_one_head(t: Tensor) -> Callable[..., Tensor]:
    """Return a function that picks a tensor by the number of the head: it takes tiles of one head only."""
    several = list(t.unbind(0))
    return lambda score, b, h, i, j: score + several[int(h)][i, j]


TWICE: Callable[..., Tensor] = lambda score, b, h, i, j: 2 * score  # noqa: E731

#: Ways to hold a tensor, as Graphormer's edge bias and others do.
WAYS: dict[str, Callable[[Tensor], Callable[..., Any]]] = {
    "closure": closure,
    "global": a_global,
    "entry of a global": in_a_global,
    "self in a closure": attribute,
    "property of self": computed,
    "bound method": lambda t: Holder(t).method,
    "object that is called": Holder,
    "module": Module,
    "method of a module": lambda t: Module(t).forward,
    "default argument": default,
    "keyword default": keyword_default,
    "partial": lambda t: functools.partial(added, t),
    "partial by keyword": lambda t: functools.partial(by_keyword, t=t),
    "list": in_a_list,
    "nested dict": in_a_dict,
    "ParameterList": in_a_parameter_list,
    "dataclass": in_a_dataclass,
    "namespace": lambda t: attribute_of(types.SimpleNamespace(t=t)),
    "function that it calls": called_function,
    "decorated": lambda t: functools.wraps(TWICE)(closure(t)),
    "inside of an operation": layer,
    "autograd function": autograd_function,
    "one pair at a time": one_pair_only,
}


def attribute_of(names: types.SimpleNamespace) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: score + names.t[h, i, j]


READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "product": lambda A, v: A @ v,
    "transposed product": lambda A, v: A.mT @ v[:, :, :M],
    "cells": lambda A, v: A[..., 1:3, :],
    "log-weights": lambda A, v: A.logits[..., 0, :],
    "lse": lambda A, v: A.lse,
    "statistic": lambda A, v: stats.entropy(A),
    "several": lambda A, v: sum(A.collect(stats.EffectiveKeys(), stats.ColumnMass())[0].sum(-1)),
    "sum": lambda A, v: (A * v[0, 0, 0, 0]).square().sum(-1),
}
PLANS = {"auto": Plan(), "tiles": Plan("tiled", rows=4, columns=3)}


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, HEADS, t, 4, generator=random, dtype=torch.float64) for t in (M, N, N))
    return q, k, v


def tensor() -> nn.Parameter:
    random = torch.Generator().manual_seed(2)
    return nn.Parameter(torch.randn(HEADS, M, N, generator=random, dtype=torch.float64))


def loss(A: Any, v: Tensor) -> Tensor:
    """Return a number that depends on every read."""
    return torch.stack([read(A, v).square().sum() for read in READS.values()]).sum()


def known(t: Tensor, plan: Plan | None = None) -> Any:
    """Return the same matrix, whose bias is a part of the score as attlas knows it."""
    q, k, _ = tokens()
    return attlas.attend(q, k, score=attlas.ScaledDot() + attlas.TensorBias(t), plan=plan)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", WAYS)
def test_every_tensor_that_a_score_mod_reads_is_learned(way: str, plan: str) -> None:
    q, k, v = tokens()
    leaf = tensor()
    t = leaf if plan == "auto" else leaf * 1.0
    score = WAYS[way](t)
    own = loss(known(t), v)
    found = loss(attlas.attend(q, k, score=score, plan=PLANS[plan]), v)
    torch.testing.assert_close(found, own)
    a, b = (torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in (found, own))
    torch.testing.assert_close(a, b)
    plans = (PLANS[plan], Plan("reference"))
    outputs = [attlas.attend(q, k, score=score, plan=one) @ v for one in plans]
    a, b = (torch.autograd.grad(x.square().sum(), leaf, retain_graph=True)[0] for x in outputs)
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_of_a_gradient(way: str) -> None:
    q, k, v = tokens()
    t = tensor()
    score = WAYS[way](t)

    def second(A: Any) -> Tensor:
        (first,) = torch.autograd.grad((A @ v).square().sum(), t, create_graph=True)
        return torch.autograd.grad(first.square().sum(), t)[0]

    torch.testing.assert_close(second(attlas.attend(q, k, score=score)), second(known(t)))


def test_a_tensor_for_each_head() -> None:
    """Tiles of one head are all that the function takes, and each head has a tensor of its own."""
    q, k, v = tokens()
    t = tensor()
    plan = Plan("tiled", rows=1, columns=1, cells=1)
    found = attlas.attend(q, k, score=of_one_head(t), plan=plan) @ v
    own = known(t) @ v
    torch.testing.assert_close(found, own)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), t)[0] for x in (found, own)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["score_mod", "mask_mod"])
def test_a_change_in_place_is_noticed(kind: str, way: str) -> None:
    q, k, v = tokens()
    t = tensor().detach()
    held = WAYS[way](t)
    if kind == "score_mod":
        A = attlas.attend(q, k, score=held)
    else:
        zero = torch.zeros((), dtype=torch.float64)
        A = attlas.attend(q, k, mask=lambda b, h, i, j: held(zero, b, h, i, j) > 0)
    before = A @ v
    torch.testing.assert_close(A @ v, before)
    t[:, 0] = 5.0
    for read in (
        lambda: A @ v,
        lambda: A.lse,
        lambda: A[..., 0, :],
        lambda: stats.entropy(A),
        lambda: A.mT @ v[:, :, :M],
    ):
        with pytest.raises(ModifiedError, match=kind.removesuffix("_mod")):
            read()


class Scored(attlas.Score):
    """A score of one's own that keeps a tensor where no list of attributes would look."""

    def __init__(self, t: Tensor) -> None:
        super().__init__()
        self.settings = {"tables": [Holder(t)]}

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return q @ k.mT / 2.0 + self.settings["tables"][0].t[at.h, at.i, at.j]


class Masked(attlas.Mask):
    """A mask of one's own that does the same."""

    def __init__(self, t: Tensor) -> None:
        self.settings = {"tables": [Holder(t)]}

    def allows(self, at: attlas.Tile) -> Tensor:
        return self.settings["tables"][0].t[at.h, at.i, at.j] > 0


class Bias(Scored):
    """The part of it that looks at places alone, beside a score of tokens."""

    positional = True

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return self.settings["tables"][0].t[at.h, at.i, at.j]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("make", [Scored, lambda t: attlas.ScaledDot() + Bias(t)], ids=["score", "bias"])
def test_a_score_of_ones_own(make: Callable[[Tensor], attlas.Score], plan: str) -> None:
    q, k, v = tokens()
    t = tensor()
    A = attlas.attend(q, k, score=make(t), plan=PLANS[plan])
    found, own = loss(A, v), loss(known(t), v)
    torch.testing.assert_close(found, own)
    torch.testing.assert_close(*(torch.autograd.grad(x, t)[0] for x in (found, own)))
    with torch.no_grad():
        t.zero_()
    with pytest.raises(ModifiedError, match="score"):
        A @ v


def test_a_mask_of_ones_own() -> None:
    q, k, v = tokens()
    t = tensor().detach()
    A = attlas.attend(q, k, mask=Masked(t))
    A @ v
    t.zero_()
    with pytest.raises(ModifiedError, match="mask"):
        A @ v


def test_a_tensor_that_is_read_in_some_tiles_only_is_refused() -> None:
    q, k, v = tokens()
    near, far = tensor(), tensor()

    class Uneven(attlas.Score):
        def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
            table = far if at.row_index is None and at.rows.start >= 3 else near
            return q @ k.mT + table[at.h, at.i, at.j]

    out = attlas.attend(q, k, score=Uneven(), plan=Plan("tiled", rows=3)) @ v
    with pytest.raises(GradientError, match="every tile"):
        out.sum().backward()


@pytest.mark.parametrize("plan", [Plan(), Plan("tiled"), Plan("reference")], ids=["auto", "tiled", "reference"])
def test_a_detached_matrix_has_no_gradient(plan: Plan) -> None:
    q, k, v = tokens()
    t = tensor()
    for score in (Holder(t).method, Scored(t), t[0, 0, 0] * attlas.ScaledDot(), attlas.ScaledDot() + Bias(t)):
        A = attlas.attend(q, k, score=score, plan=plan)
        B = A.detach()
        assert A.requires_grad
        assert not B.requires_grad
        for of in READS.values():
            assert not of(B, v).requires_grad
        torch.testing.assert_close(B @ v, (A @ v).detach())
        w = v.clone().requires_grad_()
        torch.testing.assert_close(*(torch.autograd.grad((X @ w).square().sum(), w)[0] for X in (A, B)))


def test_what_a_function_returns_is_not_written_to() -> None:
    q, k, v = tokens()
    t = tensor().detach()
    before = t.clone()
    tables = {t.shape: t, (1, HEADS, M, N): t[None]}

    class Kept(attlas.Score):
        def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
            return tables.get(at.shape, t[at.h, at.i, at.j])

    for mask in (None, attlas.Causal(0)):
        A = attlas.attend(q, k, score=Kept(), mask=mask)
        for of in READS.values():
            of(A, v)
    assert torch.equal(t, before)


def test_a_function_is_shared_by_copies() -> None:
    """What it is bound to may be a whole model, whose tensors cannot all be copied."""
    q, k, v = tokens()
    t = tensor() * 1.0
    A = attlas.attend(q, k, score=Holder(t).method, mask=lambda b, h, i, j: t[h, i, j] < 9)
    torch.testing.assert_close(copy.deepcopy(A.detach()) @ v, (A @ v).detach())
    assert A.check() < 1e-6


def test_nothing_is_kept() -> None:
    q, k, v = tokens()
    references = {}
    for way, make in WAYS.items():
        t = tensor() * 1.0
        references[way] = weakref.ref(t)
        A = attlas.attend(q, k, score=make(t), mask=lambda b, h, i, j, t=t: t[h, i, j] < 9)
        ((A @ v).sum() + stats.entropy(A).sum()).backward()
    globals()["TABLE"] = GLOBAL["t"] = torch.zeros(1)
    del t, A
    gc.collect()
    assert not [way for way, reference in references.items() if reference() is not None]
