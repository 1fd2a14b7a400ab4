"""Interventions on models that call torch's own attention function."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import attlas
from attlas.interventions import Ablate, DetachWeights, ScaleLogits, Suppress


def dense(
    edit: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: Any, gqa: bool
) -> Tensor:
    if gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], dim=-3) for t in (k, v))
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    return edit(logits).softmax(-1) @ v


class Calls(nn.Module):
    """Calls torch's function with tensors as they are."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return functional.scaled_dot_product_attention(*args, **kwargs)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


SHAPES = [
    ((6, 4), (9, 4), False),
    ((3, 6, 4), (3, 9, 4), False),
    ((2, 3, 6, 4), (2, 3, 9, 4), False),
    ((2, 4, 6, 4), (2, 2, 9, 4), True),
    ((4, 6, 4), (2, 9, 4), True),
    ((2, 2, 3, 6, 4), (2, 2, 3, 9, 4), False),
]


@pytest.mark.parametrize(("q_shape", "k_shape", "gqa"), SHAPES)
@pytest.mark.parametrize("given", ["none", "causal", "bool", "bias"])
def test_every_form_of_a_call(q_shape: tuple[int, ...], k_shape: tuple[int, ...], gqa: bool, given: str) -> None:
    model = Calls()
    q, k, v = tokens(*q_shape), tokens(*k_shape, seed=1), tokens(*k_shape[:-1], 5, seed=2)
    mask = {"bool": tokens(6, 9, seed=3).detach() > -1, "bias": tokens(6, 9, seed=3)}.get(given)
    leaves = [q, k, v] + ([mask] if given == "bias" else [])

    def edit(logits: Tensor) -> Tensor:
        keys = torch.arange(9)
        return (logits * 1.5).masked_fill((keys == 2) | (keys == 3), -math.inf)

    slope = torch.arange(5.0, dtype=torch.float64)
    wanted = dense(edit, q, k, v, mask, given == "causal", None, gqa)
    gradients = torch.autograd.grad((wanted * slope).sum(), leaves)
    with attlas.intervene(model, [ScaleLogits(1.5), Suppress(keys=(2, 4))], patch_sdpa=True):
        found = model(q, k, v, attn_mask=mask, is_causal=given == "causal", enable_gqa=gqa)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    for a, b in zip(torch.autograd.grad((found * slope).sum(), leaves), gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    assert functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_an_encoder_of_torch() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double().eval(), tokens(2, 10, 32)
    plain = model(x)
    with (
        attlas.intervene(model, Ablate(heads={1: [0, 2]}), patch_sdpa=True),
        attlas.record(model, patch_sdpa=True) as atlas,
    ):
        found = model(x)
    assert len(atlas) == 3
    head = model.layers[1].self_attn
    with torch.no_grad():  # a head that is left out has nothing to give to the projection
        head.out_proj.weight[:, :8] = 0
        head.out_proj.weight[:, 16:24] = 0
    torch.testing.assert_close(found, model(x))
    assert (found - plain).abs().max() > 1e-3


def test_what_an_intervention_is_not_about_stays_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
    )
    x, hook = torch.randn(2, 10, 32), []
    model.eval().layers[0].register_forward_hook(lambda m, i, o: hook.append(o))
    torch.backends.mha.set_fastpath_enabled(False)
    model(x)
    torch.backends.mha.set_fastpath_enabled(True)
    with attlas.intervene(model, Suppress(layers=1, keys=3), patch_sdpa=True):
        model(x)
    assert torch.equal(hook[0], hook[1])


def test_dropout_and_training() -> None:
    model = Calls()
    q, k, v = tokens(2, 3, 50, 4), tokens(2, 3, 60, 4, seed=1), tokens(2, 3, 60, 5, seed=2)
    with attlas.intervene(model, Suppress(keys=(0, 10)), patch_sdpa=True):
        runs = torch.stack([model(q, k, v, dropout_p=0.5) for _ in range(200)])
        plain = model(q, k, v)
    assert runs.var(0).min() > 0
    assert (runs.mean(0) - plain).abs().max() < 6 * (runs.var(0) / 200).sqrt().max()
    with attlas.intervene(model, DetachWeights(), patch_sdpa=True):
        gradients = torch.autograd.grad(model(q, k, v).sum(), [q, k, v], allow_unused=True)
    assert gradients[0] is None
    assert gradients[2] is not None
