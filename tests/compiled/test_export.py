"""What torch.export writes: torch's own operations, so that a program runs without attlas, or operators if asked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.compiled.programs import HEADS, MASKS, Program, numbers, scores, tokens
from torch import Tensor

import attlas
from attlas import stats

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
C, W = attlas.Causal(), attlas.Window(5, 0)

Case = Callable[..., Any]
# With the operator that each is where operators are kept; None where torch's own function computes it.
CASES: dict[str, tuple[Case, str | None]] = {
    "plain": (attlas.attention, None),
    "causal": (lambda q, k, v: attlas.attention(q, k, v, mask=C), None),
    "window": (lambda q, k, v: attlas.attention(q, k, v, mask=W), "pool"),
    "sink": (lambda q, k, v: attlas.attention(q, k, v, mask=C, sink=q.new_ones(HEADS)), "pool"),
    "torch.matmul(A, v)": (lambda q, k, v: torch.matmul(attlas.attend(q, k, mask=W), v), "pool"),
    "A @ v": (lambda q, k, v: attlas.attend(q, k, mask=W) @ v, "pool"),
    "v.mT @ A": (lambda q, k, v: v.mT @ attlas.attend(q, k, mask=W), "pool_transposed"),
    "A.mT.matmul(x)": (lambda q, k, v: attlas.attend(q, k, mask=W).mT.matmul(v), "pool_transposed"),
    "entropy": (lambda q, k, v: attlas.attend(q, k, mask=W).collect(stats.Entropy())[0], "statistics"),
    "column mass": (lambda q, k, v: attlas.attend(q, k, mask=W).sum(-2), "statistics"),
    "largest": (lambda q, k, v: attlas.attend(q, k, mask=W).collect(stats.TopK(3))[0].values, "statistics"),
    "places": (lambda q, k, v: attlas.attend(q, k).collect(stats.TopK(3))[0].indices, "statistics"),
    "cells": (lambda q, k, v: attlas.attend(q, k, mask=W)[:, :, -1], "cells"),
    "log-sum-exp": (lambda q, k, v: attlas.attend(q, k, mask=W).lse, "statistics"),
}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def exported(program: torch.nn.Module, given: list[Tensor], *, strict: bool, keep: bool) -> set[str]:
    """Export a program, compare what it computes, and return the names of its operators."""
    with attlas.export_operators() if keep else nullcontext():
        made = torch.export.export(program, tuple(given), strict=strict)
    others = [numbers(*t.shape, seed=20 + i) for i, t in enumerate(given)]
    for now in (given, others):
        torch.testing.assert_close(made.module()(*now), program(*now), atol=2e-5, rtol=1e-4)
    return {str(node.target).removesuffix(".default") for node in made.graph.nodes if node.op == "call_function"}


def of_attlas(names: set[str]) -> set[str]:
    return {name.removeprefix("attlas.") for name in names if name.startswith("attlas.")}


@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
@pytest.mark.parametrize("keep", [False, True], ids=["torch's own", "operators"])
@pytest.mark.parametrize("name", CASES)
def test_products_statistics_and_cells(name: str, keep: bool, strict: bool) -> None:
    f, operator = CASES[name]
    names = exported(Program(f), [t.detach() for t in tokens()], strict=strict, keep=keep)
    assert of_attlas(names) == ({operator} if keep and operator else set())
    if operator in (None, "pool") and name != "sink" and not keep:
        assert "aten.scaled_dot_product_attention" in names


@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
@pytest.mark.parametrize("name", ["Alibi", "TensorBias", "Cosine", "Bilinear", "SoftCap", "Gaussian", "Additive"])
def test_scores(name: str, strict: bool) -> None:
    program = Program(lambda q, k, v, score: attlas.attention(q, k, v, score, mask=W), scores()[name])
    given = [t.detach() for t in tokens()]
    assert not of_attlas(exported(program, given, strict=strict, keep=False))
    assert of_attlas(exported(program, given, strict=strict, keep=True)) == {"pool"}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    program = Program(lambda q, k, v: attlas.attention(q, k, v, mask=MASKS[name]))
    given = [t.detach() for t in tokens()]
    # Strict export warns of what masks made of others keep of a matrix.
    for strict in (False, True) if name in ("Heads", "Runs") else (False,):
        assert not of_attlas(exported(program, given, strict=strict, keep=False))
    assert of_attlas(exported(program, given, strict=False, keep=True)) <= {"pool"}


@pytest.mark.parametrize("name", [name for name in CASES if name != "places"])
@pytest.mark.parametrize("keep", [False, True], ids=["torch's own", "operators"])
def test_gradients_of_a_program(name: str, keep: bool) -> None:
    """A program that is loaded again gives the gradients of the plain one."""
    f = CASES[name][0]
    with attlas.export_operators() if keep else nullcontext():
        made = torch.export.export(Program(f), tuple(tokens()), strict=False)
    grads = []
    for run in (made.module(), f):
        own = tokens()
        out = run(*own)
        weights = numbers(*out.shape, seed=30)
        grads.append(torch.autograd.grad((out * weights).sum(), own, allow_unused=True))
    for found, wanted in zip(*grads, strict=True):
        if wanted is None:
            assert found is None or not bool(found.any())
        else:
            assert bool(wanted.any())
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_operators_are_kept_inside_of_the_block_alone() -> None:
    program, given = Program(CASES["window"][0]), [t.detach() for t in tokens()]
    with pytest.raises(ValueError, match="of the test"), attlas.export_operators(), attlas.export_operators():
        raise ValueError("of the test")
    assert not of_attlas(exported(program, given, strict=False, keep=False))
