"""The gradient of the weight of a bilinear score, against an error budget."""

from __future__ import annotations

import pytest
import torch

import attlas
from attlas.engine.backends.native import library


@pytest.mark.parametrize("plan", ["tiled", "native", "reference"])
@pytest.mark.parametrize("n", [1, 2, 50, 323])
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_the_gradient_of_the_weight_has_rounding_errors_only(plan: str, n: int, scale: float) -> None:
    """One key has the weight 1 whatever W is, so the gradient is 0: what is found instead must be rounding.

    The gradient ``Σ_ij q_i P_ij (D_ij - Σ_l P_il D_il) k_jᵀ`` with ``D = dO Vᵀ`` sums m n products. Each term has a
    relative error of some unit round-offs, and a weight that of its logit, whose absolute error grows with the
    products that it sums. The budget adds the sizes of all terms, so it holds where they cancel.
    """
    if plan == "native" and not library.available():
        pytest.skip("the kernels are not compiled, or turned off")
    random = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(2, 3, size, 8, generator=random) * scale for size in (323, n, n))
    grad = torch.randn(2, 3, 323, 8, generator=random)
    score = attlas.Bilinear(8, 8)
    score.weight.data = 0.4 * torch.randn(8, 8, generator=random)
    (attlas.attend(q, k, score=score, plan=attlas.Plan(plan)) @ v).backward(grad)
    assert score.weight.grad is not None
    q, k, v, grad = (t.double() for t in (q, k, v, grad))
    weight = score.weight.detach().double().requires_grad_()
    p = torch.softmax(q @ weight @ k.mT, -1)
    (p @ v).backward(grad)
    assert weight.grad is not None
    if n == 1:
        assert not weight.grad.any()
    p, moved = p.detach(), grad.abs() @ v.abs().mT
    relative = 1 + q.abs() @ weight.detach().abs() @ k.abs().mT
    relative = relative + (p * relative).sum(-1, keepdim=True)
    centre = (p * moved).sum(-1, keepdim=True)
    terms = p * relative * (moved + centre) + p * (p * relative * moved).sum(-1, keepdim=True)
    budget = torch.finfo(torch.float32).eps * (q.abs().mT @ terms @ k.abs()).sum((0, 1))
    assert bool(((score.weight.grad - weight.grad).abs() <= budget).all())
    assert float((budget / terms.sum()).max()) < 1e-3  # it is small beside the sum of all terms
