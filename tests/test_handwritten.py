"""Attention that is written out by hand: every form equals what torch computes, forward and gradients, in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attlas
from attlas.errors import ModifiedError
from attlas.foundation.compat import TorchDispatchMode
from attlas.matrix.handwritten.logits import Logits
from attlas.matrix.handwritten.steps import Step, StepScore

B, H, M, N, D = 2, 3, 9, 11, 4
LOWEST = torch.finfo(torch.float64).min
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def randoms(*shape: int, seed: int = 3, grad: bool = False) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=draw).requires_grad_(grad)


CAUSAL = torch.ones(M, N, dtype=torch.bool).tril(N - M)
PADDING = torch.tensor([[0] * 4 + [1] * 7, [1] * 11]).bool()[:, None, None]
LEARNED = {
    "bias": randoms(1, H, M, N, seed=5, grad=True),
    "heads": randoms(1, H, 1, 1, seed=6, grad=True),
    "table": randoms(H, M, N, seed=7, grad=True),
    "other": randoms(B, H, N, D, seed=8, grad=True),
}


def additive(allowed: Tensor, value: float) -> Tensor:
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, value)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), dim=-1) @ v


def bert(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) / D**0.5 + additive(PADDING, LOWEST)
    return torch.matmul(nn.Dropout(0.5).eval()(nn.Softmax(dim=-1)(scores)), v)


def gpt_neo(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.where(CAUSAL, torch.matmul(q, k.mT), torch.tensor(LOWEST, dtype=q.dtype))
    return (weights + additive(PADDING, -1e9)).softmax(-1, dtype=torch.float64).type_as(v) @ v


def rows_without_a_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    causal = torch.ones(M, N, dtype=torch.bool).tril()  # with padding on the left, the first rows see nothing
    scores = (q @ k.mT).masked_fill(~causal, LOWEST)
    return (scores + additive(PADDING, LOWEST)).clamp(min=LOWEST).softmax(-1) @ v


def small_masks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~PADDING, -30.0)  # no weight of 0
    return scores.softmax(-1) @ v


def ten_thousand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT + additive(CAUSAL, -1e5)) * 0.3).softmax(-1) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    view = scores.view(B * H, M, N)
    scores /= 2.0
    scores.masked_fill_(~CAUSAL, -math.inf)
    copy = scores.clone()
    view += additive(CAUSAL, -1e9)
    copy *= 2
    return F.softmax(scores, dim=-1) @ v + view.softmax(-1).view(B, H, M, N) @ v + copy.softmax(-1) @ v


def flat_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
    weights = torch.bmm(q, k.transpose(1, 2)).view(B, H, M, N) + additive(CAUSAL[None, None], -1e12)
    weights = F.softmax(weights.view(B * H, M, N), dim=-1)
    shown = weights.view(B, H, M, N)
    return torch.bmm(shown.view(B * H, M, N), v).view(B, H, M, D)


def bloom(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
    alibi = randoms(B * H, 1, N, seed=9)
    scores = alibi.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=0.7, alpha=0.5).view(B, H, M, N)
    weights = F.softmax(scores + additive(CAUSAL, LOWEST), dim=-1, dtype=torch.float64).to(q.dtype)
    return torch.bmm(weights.view(B * H, M, N), v).view(B, H, M, D)


def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.mT * 0.5 / 2.0) * 2.0
    return (scores + additive(CAUSAL, LOWEST)).softmax(-1) @ v


def learned_bias_and_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (1.5 * (q @ k.mT + LEARNED["bias"]).tanh()).softmax(-1) @ v


def clamped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.clamp(q @ k.mT, min=-1.0, max=1.5).softmax(-1) @ v


def clamp_after_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~CAUSAL, -math.inf)
    return torch.max(scores, torch.tensor(LOWEST)).softmax(-1) @ v


def learned_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.5 - 2 * LEARNED["bias"]).masked_fill(~CAUSAL, LOWEST).softmax(-1) @ v


def relative_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    relative = torch.einsum("bhid,hijd->bhij", q, LEARNED["table"].unsqueeze(-1).expand(H, M, N, D))
    return (torch.einsum("bhid,bhjd->bhij", q, k) + relative).softmax(dim=3) @ v


def einsums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bihd,jbhd->bhij", q.transpose(1, 2), k.permute(2, 0, 1, 3))
    return torch.einsum("bhij,bhjd->bihd", scores.softmax(-1), v).transpose(1, 2)


def swapped_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhjd,bhid->bhij", k, q).softmax(-1) @ v


def minus_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return (scores - scores.detach().amax(-1, keepdim=True)).softmax(-1) @ v


def temperatures(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * LEARNED["heads"].exp() / randoms(B, 1, M, 1).abs().add(1.0)).softmax(-1) @ v


def factors_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * randoms(B, 1, 1, N)).softmax(-1) @ v


def factor_after_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT + LEARNED["bias"]) * LEARNED["heads"]).softmax(-1) @ v


def two_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 - q @ LEARNED["other"].mT / 2).softmax(-1) @ v


def shared_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k[:, :1].mT).softmax(-1) @ v[:, :1]


def windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.repeat(2, 1, 1, 1) for t in (q, k, v))  # two windows of each image
    mask = additive(torch.stack([CAUSAL, ~CAUSAL]), -100.0)
    scores = (q @ k.mT).view(B, 2, H, M, N) + mask.unsqueeze(1).unsqueeze(0)
    return (scores.view(-1, H, M, N).softmax(-1) @ v)[:B]


def split_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (
        (q[:, :, :8] @ k[:, :, :8].mT).view(B, H, 8, 4, 2) + randoms(B, H, 8, 4, 1) + randoms(B, H, 8, 1, 2, seed=4)
    )
    return scores.view(B, H, 8, 8).softmax(-1) @ v[:, :, :8]


def negative_and_shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (5.0 - q @ k.mT + randoms(B, 1, M, 1)).softmax(-1) @ v


def masked_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = torch.zeros(B, 1, M, 1, dtype=torch.float64)
    rows[:, :, :3] = -1e300  # swallows the logits of the row, whose weights are then uniform
    return (q @ k.mT + rows).softmax(-1) @ v


def long_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT - 900.0 * torch.arange(N).flip(0)).softmax(-1) @ v


def filled_with_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.where(CAUSAL, q @ k.mT, 0.0)
    return torch.where(PADDING, LEARNED["bias"], scores).softmax(-1) @ v


def mask_undone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).masked_fill(~CAUSAL, LOWEST) * 0.0).softmax(-1) @ v


def mask_below_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT + additive(CAUSAL, -1e9)).tanh() * 3).softmax(-1) @ v


def head_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1) * torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64).view(1, H, 1, 1)
    return (weights.masked_fill(~PADDING, 0.0) / 2.0) @ v


def values_on_the_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.bmm(q[:, 0], k[:, 0].transpose(1, 2)).softmax(2)
    return torch.bmm(v[:, 0].transpose(1, 2), weights.permute(0, 2, 1)).transpose(1, 2)


LAZY = [
    plain, bert, gpt_neo, rows_without_a_key, small_masks, ten_thousand, in_place, flat_heads, bloom, soft_cap,
    learned_bias_and_cap, clamped, clamp_after_mask, learned_bias, einsums, swapped_einsum, temperatures,
    factors_of_keys, factor_after_bias, two_products, shared_keys, windows, split_keys, negative_and_shifted,
    masked_queries, long_alibi, filled_with_zero, mask_undone, mask_below_cap, head_mask, values_on_the_left,
]  # fmt: skip


class Entmax(torch.autograd.Function):
    """A softmax with a backward of its own."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        out = x.softmax(-1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return (grad - (grad * out).sum(-1, keepdim=True)) * out


def own_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Entmax.apply(q @ k.mT) @ v


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.mT) @ v


def sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([q @ k.mT, randoms(B, H, M, 1)], dim=-1).softmax(-1)[..., :-1] @ v


def masked_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).masked_fill(~CAUSAL, 0.0) @ v


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


DENSE = [
    (relative_einsum, {}),  # the einsum of a table is a bias that torch computes
    (own_function, {"Entmax of logits": 1, "softmax of numbers": 1}),
    (sigmoid, {"sigmoid of logits": 1}),
    (sinks, {"cat of logits": 1, "softmax of numbers": 1}),
    (masked_weights, {"masked_fill of weights": 1}),
    (over_queries, {"softmax of logits": 1}),
]


class Model(nn.Module):
    """A module around a function."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v)


def results(model: nn.Module, *, lazily: bool) -> tuple[list[Tensor], dict[str, int]]:
    """Return output and gradients of a model, and what was computed densely."""
    tokens = [randoms(B, H, size, D, seed=seed, grad=True) for size, seed in ((M, 0), (N, 1), (N, 2))]
    leaves = [*tokens, *LEARNED.values()]

    def run() -> list[Tensor]:
        out = model(*tokens)
        found = torch.autograd.grad((out * randoms(*out.shape)).sum(), leaves, allow_unused=True)
        return [out.detach(), *(torch.zeros(1) if g is None else g for g in found)]

    if not lazily:
        return run(), {}
    with attlas.lazily(model) as block:
        found = run()
    return found, {use.operation: use.times for use in attlas.explain(block)}


@pytest.mark.parametrize(
    ("attend", "dense"), [*((f, {}) for f in LAZY), *DENSE], ids=lambda x: getattr(x, "__name__", "")
)
def test_every_form_equals_torch(attend: Attend, dense: dict[str, int]) -> None:
    model = Model(attend)
    wanted, _ = results(model, lazily=False)
    found, uses = results(model, lazily=True)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert uses == dense


def test_gradients_and_counts_name_the_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(sinks)

        def forward(self, *tokens: Tensor) -> Tensor:
            return self.inner(*tokens)

    model, q = Outer(), randoms(B, H, M, D)
    with attlas.lazily(model) as block:
        model(q, randoms(B, H, N, D), randoms(B, H, N, D))
    text = "inner (Model): cat of logits, once"
    assert text in repr(block.dense_uses)
    assert block.dense_uses[0].module == "inner"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    """The weights are those of float32 sums: no further from float64 than those of torch."""

    def rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).float() / 2 + additive(CAUSAL, -1e9).to(dtype)
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v

    q, k, v = (randoms(B, H, size, D, seed=seed).to(dtype) for size, seed in ((M, 0), (N, 1), (N, 2)))
    model = Model(rounded)
    exact = rounded(q.double(), k.double(), v.double()).double()
    with attlas.lazily(model) as block:
        found = model(q, k, v)
    assert found.dtype is dtype
    assert not block.dense_uses
    assert (found.double() - exact).abs().max() <= (model(q, k, v).double() - exact).abs().max() + torch.finfo(
        dtype
    ).eps


def test_autocast_computes_as_before() -> None:
    layer = nn.Linear(D, D)
    q, k, v = (randoms(B, H, size, D, seed=seed).float().requires_grad_() for size, seed in ((M, 0), (N, 1), (N, 2)))
    dtypes: list[torch.dtype] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = layer(q) @ layer(k).mT + additive(CAUSAL, -1e9).float()
        weights = scores.softmax(-1)
        out = weights @ layer(v)
        dtypes.extend([scores.dtype, weights.dtype, out.dtype])
        return out

    model = Model(attend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = model(q, k, v)
        with attlas.lazily(model) as block:
            found = model(q, k, v)
            found.float().sum().backward()
    assert dtypes[:3] == dtypes[3:]
    assert not block.dense_uses
    assert q.grad is not None
    assert layer.weight.grad is not None
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


def test_largest_of_a_row_without_a_gradient() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT + randoms(B, 1, M, 1)).masked_fill(~CAUSAL, LOWEST)
        values, keys = scores.max(dim=-1, keepdim=True)
        assert torch.equal(values, scores.amax(dim=-1, keepdim=True))
        return (scores - values).softmax(-1) @ v + keys

    model, tokens = Model(attend), [randoms(B, H, size, D) for size in (M, N, N)]
    with attlas.lazily(model) as block:
        found = model(*tokens)
    torch.testing.assert_close(found, model(*tokens))
    assert not block.dense_uses


def test_tensors_that_change_meanwhile_are_an_error() -> None:
    mask = additive(CAUSAL, -1e9)

    def late_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT + mask
        mask.add_(1.0)
        return scores.softmax(-1) @ v

    def late_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        q.mul_(2.0)
        return scores.softmax(-1) @ v

    for attend in (late_mask, late_query):
        model = Model(attend)
        with attlas.lazily(model), pytest.raises(ModifiedError):
            model(*(randoms(B, H, size, D) for size in (M, N, N)))


def test_no_graph_where_the_product_had_none() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            scores = q @ k.mT
        assert not scores.requires_grad
        return scores.softmax(-1) @ v

    wanted, _ = results(Model(attend), lazily=False)
    found, _ = results(Model(attend), lazily=True)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_dropout_drops_the_same_weights_for_all_values() -> None:
    layer = nn.Dropout(0.5)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = layer((q @ k.mT).softmax(-1))
        both = torch.cat([weights @ v, weights @ torch.ones_like(v)], -1)
        return torch.cat([both, weights + 0.0], -1)

    model, tokens = Model(attend), [randoms(B, H, size, D) for size in (M, N, N)]
    with attlas.lazily(model) as block:
        out, sums, weights = model(*tokens).split([D, D, N], -1)
    kept = weights != 0
    assert 0.3 < kept.double().mean() < 0.7
    torch.testing.assert_close(out, weights @ tokens[2])
    torch.testing.assert_close(sums, weights.sum(-1, keepdim=True).expand(sums.shape))
    torch.testing.assert_close(weights, torch.where(kept, 2 * (tokens[0] @ tokens[1].mT).softmax(-1), 0.0))
    assert [use.operation for use in block.dense_uses] == ["add of weights"]


def test_logits_look_like_tensors() -> None:
    seen: list[object] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.mT)
        assert isinstance(scores, Logits)
        seen.extend([scores.shape, scores.size(-1), scores.dim(), scores.dtype, scores.device, scores.numel()])
        seen.extend([scores.new_zeros(2).dtype, torch.zeros_like(scores).shape, scores.is_cuda, len(scores)])
        seen.extend([randoms(M, N).expand_as(scores).shape, randoms(2).float().type_as(scores).dtype])
        assert "steps=[]" in repr(scores)
        scores[:, :, 0] = 0.0  # from here on all numbers
        return scores.softmax(-1) @ v

    tokens = [randoms(B, H, size, D) for size in (M, N, N)]
    model = Model(attend)
    with attlas.lazily(model) as block:
        found = model(*tokens)
    scores = tokens[0] @ tokens[1].mT
    scores[:, :, 0] = 0.0
    torch.testing.assert_close(found, scores.softmax(-1) @ tokens[2])
    float64, shape = torch.float64, (B, H, M, N)
    wanted = [shape, N, 4, float64, torch.device("cpu"), B * H * M * N, float64, shape, False, B, shape, float64]
    assert seen == wanted
    assert "setitem of logits" in [use.operation for use in block.dense_uses]


def test_models_return_matrices_and_tensors() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> dict[str, object]:
        scores = q @ k.mT
        weights = scores.softmax(-1)
        return {
            "logits": scores,
            "all": (weights, [weights @ v]),
            "flat": weights.view(B * H, M, N),
            "half": weights * 0.5,
        }

    model, tokens = Model(attend), [randoms(B, H, size, D) for size in (M, N, N)]
    with attlas.lazily(model) as block:
        found = model(*tokens)
    wanted = model(*tokens)
    assert isinstance(found["all"][0], attlas.AttentionMatrix)
    torch.testing.assert_close(found["all"][0].to_dense(), wanted["all"][0])
    for name in ("logits", "flat", "half"):
        assert type(found[name]) is Tensor
        torch.testing.assert_close(found[name], wanted[name])
    assert [use.operation for use in block.dense_uses] == ["return of weights"]
    assert type(model(*tokens)["all"][0]) is Tensor  # everything is put back


def test_one_query_is_computed_as_before() -> None:
    model = Model(plain)
    tokens = [randoms(B, H, size, D) for size in (1, N, N)]
    wanted = model(*tokens)
    with attlas.lazily(model):
        assert torch.equal(model(*tokens), wanted)


def test_the_names_of_stored_steps_stay() -> None:
    score = StepScore.of([Step("divide_by_number", numbers=(4.0,)), Step("clamp", numbers=(None, 0.5))])
    assert score.to_dict() == {"steps": '[["part", ["4.0"]], ["clamp", [null, "0.5"]]]'}
    q, k = randoms(1, 1, 5, D), randoms(1, 1, 7, D)
    logits = attlas.attend(q, k, StepScore.from_dict(score.to_dict())).logits[:, :, :, :]
    torch.testing.assert_close(logits, (q @ k.mT / 4.0).clamp(max=0.5))


def test_memory_is_linear() -> None:
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                if isinstance(t, Tensor):
                    largest = max(largest, t.untyped_storage().nbytes())
            return out

    q, k, v = (torch.randn(1, 1, 3000, 8) for _ in range(3))
    model = Model(plain)
    with torch.no_grad(), attlas.lazily(model), Sizes():
        model(q, k, v)
    assert largest < 3000 * 3000 * 4 / 3
