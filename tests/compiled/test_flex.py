"""Gradients of FlexAttention, which torch traces, against the definition in float64; and some programs of Inductor.

On a CPU: torch's kernels for GPUs were not run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.flex_cases import DOT, HEADS, MASKS, SCORES, C, M, N, agrees, distance, eager, leaf, random, tokens
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as module

import attlas
from attlas.engine.backend import Request
from attlas.engine.backends.flex import backend, graph, programs
from attlas.engine.plan import Plan


@pytest.fixture(autouse=True)
def backward_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch go back through FlexAttention on a CPU, which it can without its compiler, and forget its programs."""
    monkeypatch.setattr(module, "_validate_device", lambda *tokens: None)
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["Prefix | Causal", "Heads", "additive & Causal", "function & Window", "nothing"])
def test_gradients_with_a_mask(name: str) -> None:
    q, k, v = tokens()
    agrees(attlas.attend(q, k, mask=MASKS[name]()).problem, v)


@pytest.mark.parametrize("name", SCORES)
def test_gradients_with_a_score(name: str) -> None:
    q, k, v = tokens()
    agrees(attlas.attend(q, k, score=SCORES[name](), mask=attlas.Window(100, 5)).problem, v)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("size", [3, 16, 20])
def test_shared_keys_and_sizes(key_heads: int, size: int) -> None:
    q, k, v = tokens(key_heads, size, e=21)
    agrees(attlas.attend(q, k, mask=C).problem, v)


@pytest.mark.parametrize("score", ["ScaledDot", "row", "ScoreMod"])
def test_sink(score: str) -> None:
    q, k, v = tokens()
    sink = leaf(torch.tensor([0.0, 1.0, -2.0, 5.0], dtype=torch.float64))
    agrees(attlas.attend(q, k, score=SCORES[score](), mask=attlas.Padding([0, 100]), sink=sink).problem, v)


COMPILED = ["Heads", "Selected"]


@pytest.mark.parametrize("mask", COMPILED)
def test_inductor_takes_the_functions(mask: str) -> None:
    """On a CPU, without the log-sum-exp, which torch compiles there for no GPU."""
    program = torch.compile(module.flex_attention, fullgraph=True, dynamic=False)

    def compiled(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        return program(q, *others), torch.zeros(q.shape[:3])

    q, k, v = (t.detach().float() for t in tokens())
    score = attlas.SoftCap(DOT, 2.0) + attlas.Alibi(HEADS) + attlas.TensorBias(random(M, N).float())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        A = attlas.attend(q, k, score=attlas.ScoreMod(distance, score), mask=MASKS[mask]())
        out, _ = backend.computed(Request(A.problem, A.problem.tokens, Plan()), v, compiled)
        torch.testing.assert_close(out, A @ v, atol=2e-5, rtol=1e-4)


def test_one_program_takes_all_sizes_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **settings: compile_with(f, backend=counter, **settings))
    attention = programs.compiled(0, True)

    def run(request: Request, v: Tensor) -> tuple[Tensor, Tensor]:
        return backend.computed(request, v, attention)

    for m, n, left in ((200, 300, 20), (200, 300, 30), (256, 384, 7), (130, 500, 90), (700, 700, 11)):
        q, k, v = (leaf(random(2, heads, size, 16).float()) for heads, size in ((4, m), (2, n), (2, n)))
        mask = attlas.Window(left, left // 3) & attlas.Padding([n, n // 2])
        A = attlas.attend(q, k, score=DOT + attlas.Alibi(HEADS), mask=mask, plan=Plan("tiled"))
        out, lse = graph.recorded(Request(A.problem, A.problem.project(), Plan()), v, run)
        torch.testing.assert_close(lse, A.lse, atol=1e-5, rtol=1e-5)
        wanted = A @ v
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
        slope = random(*out.shape, seed=4).float()
        expected = torch.autograd.grad(wanted, (q, k, v), slope)
        for _ in range(2):
            found = torch.autograd.grad(out, (q, k, v), slope, retain_graph=True)
            for own, other in zip(found, expected, strict=True):
                torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)
    assert counter.frame_count <= 3


def test_second_derivatives() -> None:
    def run(request: Request, v: Tensor) -> tuple[Tensor, Tensor]:
        return backend.computed(request, v, eager)

    q, k, v = (leaf(random(1, 2, 6, 4, seed=seed)) for seed in range(3))

    def product(*given: Tensor) -> Tensor:
        A = attlas.attend(*given[:2], mask=C)
        return graph.recorded(Request(A.problem, A.problem.project(), Plan()), given[2], run)[0]

    assert torch.autograd.gradgradcheck(product, (q, k, v))
