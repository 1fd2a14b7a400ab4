"""The operators by themselves: torch's own rules for operators, and gradients that are not zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compiled.programs import HEADS, MASKS, numbers, scores, tokens
from torch import Tensor

import attlas
from attlas import stats
from attlas.engine.plan import Plan
from attlas.matrix.compiled import operators
from attlas.matrix.compiled.text import problem_text

# What a backward of an operator computes is no part of these: torch.library.opcheck compares it by autograd's rules.
CASES = {
    "dot": ("ScaledDot", None),
    "window and sink": ("ScaledDot", "Window"),
    "bias": ("RelativeBias", "Causal"),
    "additive": ("Additive", "Padding"),
    "kernel": ("learned width", "Documents"),
    "cap": ("SoftCap", "Heads"),
}


def given(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, str, list[Tensor]]:
    """Return a problem, its text and its tensors."""
    score, mask = CASES[name]
    q, k, _ = tokens(dtype=dtype)
    sink = numbers(HEADS, seed=5).requires_grad_() if name == "window and sink" else None
    problem = attlas.attend(q, k, scores()[score], None if mask is None else MASKS[mask], sink=sink).problem
    tensors: list[Tensor] = []
    text = problem_text(problem, Plan(), tensors, **options)
    return problem, text, [t.detach().requires_grad_(t.requires_grad) for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_products_keep_the_rules_of_torch(name: str, dtype: torch.dtype) -> None:
    problem, text, tensors = given(name, dtype)
    v = tokens(dtype=dtype)[2]
    q, k = problem.q, problem.k
    torch.library.opcheck(operators.pool, (q, k, v, tensors, text, True), atol=1e-2, rtol=1e-2)
    torch.library.opcheck(
        operators.pool, (q.detach(), k.detach(), v.detach(), [t.detach() for t in tensors], text, False)
    )
    torch.library.opcheck(operators.pool_transposed, (q, k, v, tensors, text), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", CASES)
def test_statistics_and_cells_keep_the_rules_of_torch(name: str) -> None:
    asked = [stats.Entropy(), stats.TopK(2), stats.ColumnMass(), stats.ArgMax(), stats.RowMass()]
    problem, text, tensors = given(name, asked=asked)
    q, k = problem.q, problem.k
    torch.library.opcheck(operators.statistics, (q, k, tensors, text, True))
    _, text, tensors = given(name)
    rows, columns = torch.tensor([3, 3, 0]), torch.arange(2, 9)
    for logits in (False, True):
        torch.library.opcheck(operators.cells, (q, k, rows, columns, tensors, text, logits, True))


@pytest.mark.parametrize("name", CASES)
def test_gradients_keep_the_rules_of_torch(name: str) -> None:
    """The operators of gradients, as autograd calls them: their forms without numbers are right, nothing is changed."""
    asked = [stats.Entropy(), stats.TopK(2), stats.ColumnMass()]
    problem, text, tensors = given(name)
    q, k, v = problem.q.detach(), problem.k.detach(), tokens()[2].detach()
    tensors = [t.detach() for t in tensors]
    grad = numbers(*v.shape, seed=7)
    out, lse = operators.pool(q, k, v, tensors, text, True)
    torch.library.opcheck(operators.pool_backward, (grad, out, lse, q, k, v, tensors, text))
    _, lse = operators.pool_transposed(q, k, v, tensors, text)
    torch.library.opcheck(operators.pool_transposed_backward, (grad, lse, q, k, v, tensors, text))
    rows, columns = torch.tensor([3, 3, 0]), torch.arange(2, 9)
    for logits in (False, True):
        found, lse = operators.cells(q, k, rows, columns, tensors, text, logits, True)
        slope = numbers(*found.shape, seed=8)
        given_back = (slope, found, lse, q, k, rows, columns, tensors, text, logits)
        torch.library.opcheck(operators.cells_backward, given_back)
    _, text, tensors = given(name, asked=asked)
    tensors = [t.detach() for t in tensors]
    *results, lse = operators.statistics(q, k, tensors, text, True)
    slopes = [numbers(*t.shape, seed=9) for t in results if t.is_floating_point()]
    torch.library.opcheck(operators.statistics_backward, (slopes, results, lse, q, k, tensors, text))


def test_gradients_come_from_below_the_operator() -> None:
    """Autograd is off inside an operator: a gradient that is asked for there must not be zeros."""
    for name in ("bias", "additive", "kernel", "window and sink"):
        problem, text, tensors = given(name)
        leaves = [problem.q, problem.k, *(t for t in tensors if t.requires_grad)]
        v = tokens()[2]
        out, lse = operators.pool(problem.q, problem.k, v, tensors, text, True)
        assert not lse.requires_grad
        for t in torch.autograd.grad(out.square().sum(), [*leaves, v]):
            assert bool(t.any())


def test_no_second_derivative_in_silence() -> None:
    """Gradients of operators have none of their own: torch says so."""
    problem, text, tensors = given("bias")
    v = tokens()[2]
    out, _ = operators.pool(problem.q, problem.k, v, tensors, text, True)
    (slope,) = torch.autograd.grad(out.square().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(slope.sum(), problem.q)


def test_tied_parameters_get_the_sum_of_their_gradients() -> None:
    bias = attlas.RelativeBias(HEADS, 16)
    torch.nn.init.normal_(bias.weight, generator=torch.Generator().manual_seed(3))
    twice = attlas.ScaledDot() + bias + 0.5 * bias
    q, k, v = tokens()
    wanted = torch.autograd.grad(attlas.attention(q, k, v, twice).square().sum(), bias.weight)
    f = torch.compile(lambda q, k, v: attlas.attention(q, k, v, twice), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(f(q, k, v).square().sum(), bias.weight), wanted)
