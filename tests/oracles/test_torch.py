"""torch's own attention beside ours: scaled_dot_product_attention, flex_attention, MultiheadAttention."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import attlas
from attlas import Plan

PLANS = {"auto": Plan(), "tiled": Plan("tiled"), "tiled 7x11": Plan("tiled", rows=7, columns=11)}


def tensors(m: int, n: int, heads: int = 4, key_heads: int = 4, d: int = 16, e: int = 16) -> list[Tensor]:
    shapes = ((2, heads, m, d), (2, key_heads, n, d), (2, key_heads, n, e))
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def agree(found: Tensor, wanted: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(found, wanted)
    slope = torch.randn_like(wanted)
    for a, b in zip(
        torch.autograd.grad(found, leaves, slope),
        torch.autograd.grad(wanted, leaves, slope, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.fixture(params=list(PLANS))
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]


@pytest.mark.parametrize(("m", "n", "e"), [(1, 1, 16), (40, 40, 16), (13, 40, 5), (40, 13, 24), (1, 300, 16)])
def test_sdpa(plan: Plan, m: int, n: int, e: int) -> None:
    q, k, v = tensors(m, n, e=e)
    agree(attlas.attention(q, k, v, plan=plan), F.scaled_dot_product_attention(q, k, v), [q, k, v])
    agree(
        attlas.attention(q, k, v, scale=0.3, plan=plan), F.scaled_dot_product_attention(q, k, v, scale=0.3), [q, k, v]
    )


@pytest.mark.parametrize(("m", "n"), [(40, 40), (13, 40), (40, 13)])
def test_sdpa_is_causal_aligns_the_first_with_the_first(plan: Plan, m: int, n: int) -> None:
    q, k, v = tensors(m, n)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    agree(attlas.attention(q, k, v, mask=attlas.Causal(0), plan=plan), wanted, [q, k, v])
    if m == n:
        agree(attlas.attention(q, k, v, mask=attlas.Causal(), plan=plan), wanted, [q, k, v])


@pytest.mark.parametrize(
    "shape", [(13, 40), (2, 1, 13, 40), (1, 4, 13, 40), (2, 4, 13, 40), (2, 1, 1, 40), (1, 1, 13, 1)]
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_sdpa_with_a_mask(plan: Plan, shape: tuple[int, ...], kind: str) -> None:
    q, k, v = tensors(13, 40)
    mask = torch.rand(shape) > 0.3 if kind == "bool" else torch.randn(shape, dtype=torch.float64)
    mask[..., 0] = True if kind == "bool" else 0.5  # torch gives NaN or 0 to rows without keys, by kernel
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    agree(attlas.attention(q, k, v, mask=mask, plan=plan), wanted, [q, k, v])


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_sdpa_with_grouped_heads(plan: Plan, key_heads: int) -> None:
    q, k, v = tensors(13, 40, key_heads=key_heads)
    wanted = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    agree(attlas.attention(q, k, v, plan=plan), wanted, [q, k, v])


def test_sdpa_in_float32_is_the_same_kernel() -> None:
    q, k, v = (torch.randn(2, 4, 60, 32) for _ in range(3))
    plan = attlas.Plan("sdpa")
    assert torch.equal(attlas.attention(q, k, v, plan=plan), F.scaled_dot_product_attention(q, k, v))
    causal = attlas.attention(q, k, v, mask=attlas.Causal(), plan=plan)
    assert torch.equal(causal, F.scaled_dot_product_attention(q, k, v, is_causal=True))


MASK_MODS = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 7),
    "prefix": lambda b, h, i, j: (j < 5) | (i >= j),
    "documents": lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j],
    "heads": lambda b, h, i, j: (j - i).abs() <= 4 * (h + 1) + b,
    "dilated": lambda b, h, i, j: (i >= j) & ((i - j) % 3 == 0),
}
DOCUMENTS = torch.arange(40) // 9


def flex(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    attention = pytest.importorskip("torch.nn.attention.flex_attention")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow without torch.compile
        if mask_mod := options.pop("mask_mod", None):
            options["block_mask"] = attention.create_block_mask(mask_mod, 2, q.shape[1], q.shape[2], k.shape[2], "cpu")
        found: tuple[Tensor, Tensor] = attention.flex_attention(q, k, v, return_lse=True, **options)
        return found


SCORE_MODS = {
    "alibi": (lambda s, b, h, i, j: s - 2.0 ** (-2.0 * (h + 1)) * (i - j).abs(), attlas.ScaledDot() + attlas.Alibi(4)),
    "softcap": (lambda s, b, h, i, j: 2 * torch.tanh(s / 2), attlas.SoftCap(attlas.ScaledDot(), 2.0)),
    "multiple": (lambda s, b, h, i, j: -3 * s, -3.0 * attlas.ScaledDot()),
}
FORMULAS = {
    "causal": attlas.Causal(),
    "window": attlas.Window(6, 0),
    "prefix": attlas.Prefix(5) | attlas.Causal(),
    "documents": attlas.Documents(DOCUMENTS),
    "dilated": attlas.Dilated(None, 0, 3),
}
# What flex_attention is told, and what attlas is: the same function, or a mask or score of attlas that means it.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"mask_mod {name}": ({"mask_mod": mod}, {"mask": mod}) for name, mod in MASK_MODS.items()},
    **{f"mask {name}": ({"mask_mod": MASK_MODS[name]}, {"mask": mask}) for name, mask in FORMULAS.items()},
    **{f"score {name}": ({"score_mod": mod}, {"score": score}) for name, (mod, score) in SCORE_MODS.items()},
    "grouped heads": ({"enable_gqa": True, "mask_mod": MASK_MODS["causal"]}, {"mask": attlas.Causal()}),
}


@pytest.mark.parametrize("name", CALLS)
def test_flex_attention(plan: Plan, name: str) -> None:
    theirs, ours = CALLS[name]
    q, k, v = (t.detach() for t in (tensors(40, 40, key_heads=2, e=24) if "grouped" in name else tensors(40, 40)))
    wanted, lse = flex(q, k, v, **theirs)
    A = attlas.attend(q, k, **ours, plan=plan)
    torch.testing.assert_close(A @ v, wanted)
    torch.testing.assert_close(A.lse, lse)


@pytest.mark.parametrize("causal", [True, False])
def test_weights_of_multi_head_attention(causal: bool) -> None:
    """F.multi_head_attention_forward gives weights too: the same output, and the same weights of every head."""
    size, heads, m, n = 24, 3, 11, 17
    layer = torch.nn.MultiheadAttention(size, heads, batch_first=True, dtype=torch.float64, bias=False)
    x, y = torch.randn(2, m, size, dtype=torch.float64), torch.randn(2, n, size, dtype=torch.float64)
    hidden = torch.ones(m, n, dtype=torch.bool).triu(n - m + 1) if causal else None
    wanted, weights = layer(x, y, y, attn_mask=hidden, average_attn_weights=False)

    split = [
        F.linear(t, w).unflatten(-1, (heads, -1)).transpose(1, 2)
        for t, w in zip((x, y, y), layer.in_proj_weight.chunk(3), strict=True)
    ]
    A = attlas.attend(split[0], split[1], mask=attlas.Causal() if causal else None)
    torch.testing.assert_close(A.to_dense(), weights.detach())
    torch.testing.assert_close(layer.out_proj((A @ split[2]).transpose(1, 2).flatten(-2)), wanted)
