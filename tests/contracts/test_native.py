"""Every contract again with the kernels: each score that they compute, each mask, output, gradients and reads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attlas import Plan, explain, stats
from attlas.engine.backend import Request
from attlas.engine.backends.native import library
from attlas.engine.backends.native.backend import FusedKernels

NATIVE = Plan("native")
DOTS = (
    "ScaledDot", "ScaledDot(1)", "Cosine", "Gaussian(wide)", "Gaussian(wide, learn)", "Gaussian(wide, leaf)",
    "Bilinear(up)", "Bilinear(down)", "Multiple",
)  # fmt: skip
SIZES = ((1, 1), (19, 23), (23, 19), (33, 130), (128, 5))


@pytest.fixture(params=library.SETS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("ATTLAS_NATIVE", raising=False)
    if request.param not in library.runnable():
        pytest.skip(f"this processor cannot run {request.param}, or the kernels are not compiled here")
    monkeypatch.setenv("ATTLAS_NATIVE", request.param)
    return request.param


def computes(case: Any) -> bool:
    """Tell whether the kernels compute this problem, as `explain` says it."""
    problem = case.matrix().problem
    return FusedKernels().unsupported(Request(problem, problem.tokens, NATIVE), "output") is None


def test_output_and_gradients(instruction_set: str, mask_name: str, make: Any, sizes: Any, same: Any) -> None:
    for place, (m, n) in enumerate(SIZES):
        for score, sink in (("ScaledDot", place % 2 == 0), ("ScaledDot(1)", place % 2 == 1)):
            case = make(score, mask_name, sizes(m, n), sink=sink)
            if not computes(case):
                assert mask_name.startswith("additive")  # its numbers are a score of their own
                continue
            A = case.matrix(NATIVE)
            assert explain(A).backend == "native"
            _, _, lse, wanted = case.plain()
            out = A @ case.v
            same(out, wanted, "output")
            same(A.lse, lse, "lse")
            leaves = case.leaves()
            slope = case.sizes.random(*out.shape, seed=41)
            found = torch.autograd.grad(out, list(leaves.values()), slope, allow_unused=True)
            exact = torch.autograd.grad(wanted, list(leaves.values()), slope, allow_unused=True)
            for name, one, other in zip(leaves, found, exact, strict=True):
                if one is None or other is None:
                    assert one is None or not one.any()
                    assert other is None or not other.any()
                    continue
                same(one, other, f"gradient of {name}")


@pytest.mark.parametrize("score", DOTS)
def test_every_dot_product(instruction_set: str, score: str, make: Any, sizes: Any, same: Any) -> None:
    for mask in ("none", "Causal(-4)", "bool tensor(heads)", "Window"):
        case = make(score, mask, sizes(23, 37))
        assert computes(case)
        A = case.matrix(NATIVE)
        logits, weights, lse, wanted = (t.detach() for t in case.plain())
        out = A @ case.v
        same(out, wanted, "output")
        same(A.lse, lse, "lse")
        same(A[:, :, 2:9], weights[:, :, 2:9], "weights")
        leaves = case.leaves()
        slope = case.sizes.random(*out.shape, seed=41)
        found = torch.autograd.grad(out, list(leaves.values()), slope)
        exact = torch.autograd.grad(case.plain()[3], list(leaves.values()), slope)
        for name, one, other in zip(leaves, found, exact, strict=True):
            same(one, other, f"gradient of {name}")
        largest, mass, top = case.matrix(NATIVE).collect(stats.MaxLogit(), stats.ColumnMass(), stats.TopK(5))
        same(largest, logits.amax(-1), "largest logit")
        same(mass, weights.sum(-2), "mass of columns")
        same(top.values, weights.topk(5).values, "largest weights")


def test_soft_cap_in_float32(instruction_set: str, mask_name: str, make: Any, sizes: Any, same: Any) -> None:
    if mask_name.startswith("additive"):
        pytest.skip("its numbers are a score of their own")
    case = make("SoftCap", mask_name, sizes(23, 37), sink=True)
    _, weights, lse, out = (t.detach() for t in case.plain())
    from attlas import attend

    q, k, v, sink = (t.detach().float() for t in (case.q, case.k, case.v, case.sink))
    A = attend(q, k, score=case.score, mask=case.mask, sink=sink, plan=NATIVE)
    same((A @ v).double(), out, "output", 2e-5)
    same(A.lse.double(), lse, "lse", 2e-5)
    entropy, mass = A.collect(stats.Entropy(), stats.RowMass())
    same(mass.double(), weights.sum(-1), "mass", 2e-5)
    bent = torch.where(weights > 0, weights * weights.clamp(min=math.ulp(0.0)).log(), 0.0)
    same(entropy.double(), -bent.sum(-1), "entropy", 1e-4)


def test_groups_of_heads(instruction_set: str, tables: Any, sizes_of: Any, make: Any, same: Any) -> None:
    for group in tables["group"]:
        case = make("ScaledDot", "Causal", sizes_of("29x29", group), sink=True)
        _, weights, _, out = (t.detach() for t in case.plain())
        A = case.matrix(NATIVE)
        same(A @ case.v, out, f"output, {group}")
        same(A.sum(-2), weights.sum(-2), f"mass of columns, {group}")
