"""torch's scaled_dot_product_attention, caught: what it returns, whose it is, and that it is put back."""

import sys
import threading
import types
from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import FALCON, lively
from torch import Tensor, nn
from torch.nn import functional

from attlas import stats
from attlas.foundation.patching import replaced_everywhere
from attlas.recording import patch, record

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
# In a tuple: a name of this module would be patched, too.
TORCH = (functional.scaled_dot_product_attention,)


class NanoGPT(nn.Module):
    """As nanoGPT writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(32, 96, bias=False)
        self.c_proj = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(32, dim=2)
        q, k, v = (t.view(B, T, 4, C // 4).transpose(1, 2) for t in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Timm(nn.Module):
    """As timm writes it, with the function imported by name and norms of q and k."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.q_norm, self.k_norm = nn.LayerNorm(8), nn.LayerNorm(8)
        self.proj = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attn = attention
        self.mlp = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


@pytest.mark.parametrize("kind", [NanoGPT, Timm])
def test_modules_that_call_it_themselves(kind: type[nn.Module]) -> None:
    model = nn.Sequential(*(Block(kind()) for _ in range(3)))
    x = torch.randn(2, 9, 32)
    before = model(x)
    with record(model, patch_sdpa=True, statistics=[stats.Entropy()]) as atlas:
        during = model(x)
    assert torch.equal(during, before)
    assert [e.name for e in atlas.entries] == ["0.attn", "1.attn", "2.attn"]
    assert ("Causal" in repr(atlas[0])) == (kind is NanoGPT)
    assert atlas[1].check() < 1e-5
    attention = model[0].attn
    hidden = model[0].norm(x)
    q, k = (attention.c_attn if kind is NanoGPT else attention.qkv)(hidden).chunk(3, dim=-1)[:2]
    q, k = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (q, k))
    logits = q @ k.mT / 8**0.5
    if kind is NanoGPT:
        logits = logits.masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf)
    else:
        logits = attention.q_norm(q) @ attention.k_norm(k).mT / 8**0.5
    torch.testing.assert_close(atlas[0].to_dense(), logits.softmax(-1).detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mask", ["none", "bool", "additive", "padding", "causal"])
def test_torch_multihead_attention(mask: str) -> None:
    model = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x, y = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    allowed = torch.rand(5, 7) < 0.6
    allowed[:, 0] = True
    given: dict[str, Any] = {
        "none": {},
        "bool": {"attn_mask": ~allowed},
        "additive": {"attn_mask": torch.randn(8, 5, 7)},
        "padding": {"key_padding_mask": torch.arange(7).expand(2, -1) >= torch.tensor([[7], [4]])},
        "causal": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(5), "is_causal": True},
    }[mask]
    keys = x if mask == "causal" else y
    with torch.no_grad():
        _, weights = model(x, keys, keys, **given, average_attn_weights=False)
        with record(model, patch_sdpa=True) as atlas:
            model(x, keys, keys, **given, need_weights=False)
    assert atlas.entries[0].name == ""
    torch.testing.assert_close(atlas[0].to_dense(), weights, atol=1e-5, rtol=1e-4)


def test_torch_transformer_encoder_without_its_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x = torch.randn(2, 6, 32)
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), record(model, patch_sdpa=True) as atlas:
        out = model(x)
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        torch.testing.assert_close(out, model(x), atol=1e-5, rtol=1e-4)
        _, weights = model.layers[0].self_attn(x, x, x, average_attn_weights=False)
    assert [e.name for e in atlas.entries] == [f"layers.{i}.self_attn" for i in range(3)]
    torch.testing.assert_close(atlas[0].to_dense(), weights, atol=1e-5, rtol=1e-4)


def test_torch_transformer_has_three_kinds() -> None:
    model = nn.Transformer(32, 4, 2, 2, 48, batch_first=True).eval()
    with torch.no_grad(), record(model, patch_sdpa=True) as atlas:
        model(torch.randn(1, 6, 32), torch.randn(1, 5, 32))
    assert {kind: atlas.layers(kind) for kind in atlas.kinds} == {"self": [0, 1], "encoder": [0, 1], "cross": [0, 1]}
    assert atlas["cross.1"].shape == (1, 4, 5, 6)


@pytest.mark.parametrize("alibi", [False, True])
def test_falcon(alibi: bool, ids: Tensor) -> None:
    config = transformers.FalconConfig(**FALCON, alibi=alibi, new_decoder_architecture=False, multi_query=True)
    model = lively(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))
    with torch.no_grad():
        before = model(ids).logits
        with record(model, patch_sdpa=True) as atlas:
            during = model(ids).logits
    assert torch.equal(during, before)
    if alibi:  # eager adds the bias twice, so it is no witness
        assert all(A.check() < 1e-5 and not A[0, 0].to_dense().triu(1).any() for A in atlas)
        return
    own = lively(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    with torch.no_grad():
        weights = own(ids, output_attentions=True).attentions
    for A, dense in zip(atlas, weights, strict=True):
        torch.testing.assert_close(A.to_dense(), dense, atol=1e-5, rtol=1e-4)


def test_a_generation_of_falcon_is_one_entry(ids: Tensor) -> None:
    config = transformers.FalconConfig(**FALCON)
    model = lively(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))
    with record(model, patch_sdpa=True) as atlas:
        text = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)[:, :-1]
    assert [e.queries for e in atlas.entries] == [(0, 14), (0, 14)]
    with torch.no_grad(), record(model, patch_sdpa=True) as whole:
        model(text)
    torch.testing.assert_close(atlas[1].to_dense(), whole[1].to_dense(), atol=1e-5, rtol=1e-4)


B, H, M, N, D = 2, 4, 5, 7, 8
BOOL = torch.rand(M, N, generator=torch.Generator().manual_seed(3)) < 0.6
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((B, H, M, D), (B, H, N, D), {}),
    "causal from the top left": ((B, H, M, D), (B, H, N, D), {"is_causal": True}),
    "causal, more queries": ((B, H, N, D), (B, H, M, D), {"is_causal": True}),
    "scale": ((B, H, M, D), (B, H, N, D), {"scale": 0.7}),
    "bool": ((B, H, M, D), (B, H, N, D), {"attn_mask": BOOL}),
    "bool of heads": ((B, H, M, D), (B, H, N, D), {"attn_mask": torch.stack([BOOL] * 3 + [~BOOL])}),
    "additive": ((B, H, M, D), (B, H, N, D), {"attn_mask": torch.randn(B, 1, M, N)}),
    "one row": ((B, H, M, D), (B, H, N, D), {"attn_mask": BOOL[:1]}),
    "grouped heads": ((B, H, M, D), (B, 2, N, D), {"enable_gqa": True}),
    "grouped heads, three axes": ((H, M, D), (2, N, D), {"enable_gqa": True, "attn_mask": BOOL}),
    "three axes": ((B, M, D), (B, N, D), {"attn_mask": torch.stack([BOOL, ~BOOL])}),
    "two axes": ((M, D), (N, D), {"attn_mask": BOOL, "scale": 1.0}),
    "five axes": ((3, B, H, M, D), (3, B, H, N, D), {"attn_mask": torch.randn(B, 1, M, N)}),
    "one batch of keys": ((B, H, M, D), (1, H, N, D), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_means_what_torch_means(name: str) -> None:
    q_shape, k_shape, options = CALLS[name]
    q, k = torch.randn(q_shape), torch.randn(k_shape)
    v = torch.eye(k_shape[-2]).expand(*k_shape[:-2], -1, -1)  # the output is then the weights
    weights = TORCH[0](q, k, v, **options).nan_to_num(0.0)
    A = patch.matrix_of(q, k, **options)
    assert A.ndim == 4
    torch.testing.assert_close(A.to_dense().reshape(weights.shape), weights, atol=1e-6, rtol=1e-5)


class Calls(nn.Module):
    """Calls torch's function, or another one that is known by its name only."""

    def __init__(self, owner: Any = functional, name: str = "scaled_dot_product_attention", **options: Any) -> None:
        super().__init__()
        self.owner, self.name, self.options = owner, name, options

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return getattr(self.owner, self.name)(q, k, k, **self.options)


def test_dropout_is_torch_s_and_the_weights_are_without() -> None:
    q = torch.randn(1, 2, 6, 4)
    model = Calls(dropout_p=0.5)
    torch.manual_seed(1)
    before = model(q, q)
    torch.manual_seed(1)
    with record(model, patch_sdpa=True) as atlas:
        assert torch.equal(model(q, q), before)
    torch.testing.assert_close(atlas[0].sum(-1), torch.ones(1, 2, 6))


def test_modules_that_imported_the_name_before(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("imported_before")
    module.sdpa = TORCH[0]
    monkeypatch.setitem(sys.modules, "imported_before", module)
    q = torch.randn(1, 2, 6, 4)
    model = Calls(module, "sdpa")
    with record(model, patch_sdpa=True) as outer:
        with record(model, patch_sdpa=True) as inner:
            model(q, q)
        assert module.sdpa is not TORCH[0]  # the outer one goes on
        model(q, q)
    assert module.sdpa is TORCH[0]
    assert (len(outer.entries), len(inner.entries)) == (2, 1)


def test_it_is_put_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), record(Calls(), patch_sdpa=True):
        assert functional.scaled_dot_product_attention is not TORCH[0]
        _ = 1 / 0
    assert functional.scaled_dot_product_attention is TORCH[0]
    assert torch.backends.mha.get_fastpath_enabled()
    assert not patch._module_finders


def test_another_thread_is_not_recorded() -> None:
    model = nn.Sequential(Block(NanoGPT()))
    x = torch.randn(1, 4, 32)
    results = []
    with record(model, patch_sdpa=True) as atlas:
        thread = threading.Thread(target=lambda: results.append(model(x)))
        thread.start()
        thread.join()
        out = model(x[:, :3])
    assert len(results) == 1
    assert out.shape == (1, 3, 32)
    assert [e.shape[2] for e in atlas.entries] == [3]


@pytest.mark.parametrize(("m", "n"), [(3, 6), (6, 3), (1, 4)])
def test_causal_calls_keep_keys_that_no_query_sees(m: int, n: int) -> None:
    q, k = torch.randn(1, 2, m, 8), torch.randn(1, 2, n, 8)
    model = Calls(is_causal=True)
    with record(model, patch_sdpa=True, statistics=[stats.ColumnMass()]) as atlas:
        model(q, k)
    logits = (q @ k.mT / 8**0.5).masked_fill(~torch.ones(m, n, dtype=torch.bool).tril(), -torch.inf)
    weights = logits.softmax(-1)
    assert atlas[0].shape == (1, 2, m, n)
    torch.testing.assert_close(atlas[0].to_dense(), weights)
    torch.testing.assert_close(atlas.entry(0).statistics["column_mass"], weights.sum(-2))


def test_a_module_that_refuses_leaves_no_function_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen(types.ModuleType):
        """A module whose names cannot be set, as some packages have for their constants."""

        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(f"{name} is a constant")

    own = functional.scaled_dot_product_attention
    first, frozen = types.ModuleType("first"), Frozen("frozen")
    vars(first)["attend"] = vars(frozen)["attend"] = own
    monkeypatch.setitem(sys.modules, "first", first)
    monkeypatch.setitem(sys.modules, "frozen", frozen)
    with pytest.raises(AttributeError, match="is a constant"), replaced_everywhere({own: print}):
        pass
    assert first.attend is own
    assert functional.scaled_dot_product_attention is own
