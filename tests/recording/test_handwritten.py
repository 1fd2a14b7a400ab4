"""record(handwritten=True): attention that is written out by hand is in the atlas, and what is not is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import attlas
from attlas import interventions, stats
from attlas.errors import DtypeError, ShapeError
from attlas.recording import record


class Attention(nn.Module):
    """Attention as tutorials write it."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.num_heads, self.how = 2, how
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("causal", torch.ones(16, 16, dtype=torch.bool).tril())

    def forward(self, x: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if keys is not None:
            k, v = torch.cat([keys[0], k], 2), torch.cat([keys[1], v], 2)
        self.keys = k, v
        if self.how == "flat":  # heads and batch in one axis, and never apart
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) / 2
        m, n = scores.shape[-2:]
        scores = scores.masked_fill(~self.causal[n - m : n, :n], -torch.inf)
        if self.how == "clamped":
            scores = scores.clamp(max=0.3)
        weights = scores.softmax(-1)
        out = weights.sigmoid() @ v if self.how == "dense" else weights @ v
        return out.reshape(len(x), 2, m, 4).transpose(1, 2).flatten(2), weights


class Model(nn.Module):
    """Two layers."""

    def __init__(self, *how: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(map(Attention, how or ("plain", "plain")))

    def forward(self, x: Tensor, keys: Any = (None, None)) -> tuple[Tensor, list[Tensor]]:
        shown = []
        for layer, own in zip(self.layers, keys, strict=True):
            out, weights = layer(x, own)
            x = x + out
            shown.append(weights)
        return x, shown


X = torch.randn(3, 9, 8, generator=torch.Generator().manual_seed(2))


def test_layers_are_recorded_with_heads_and_statistics() -> None:
    model = Model("plain", "flat")
    wanted, weights = model(X)
    with record(model, handwritten=True, statistics=[stats.Entropy()], values=True) as atlas:
        out, shown = model(X)
    torch.testing.assert_close(out, wanted)
    assert [entry.name for entry in atlas.entries] == ["layers.0", "layers.1"]
    for entry, dense in zip(atlas.entries, weights, strict=True):
        dense = dense.detach().reshape(3, 2, 9, 9)
        torch.testing.assert_close(entry.matrix.to_dense(), dense)
        torch.testing.assert_close(entry.statistics["entropy"], torch.special.entr(dense).sum(-1), atol=1e-5, rtol=1e-5)
        assert entry.values.shape == (3, 2, 9, 4)
    assert isinstance(shown[0], attlas.AttentionMatrix)
    assert attlas.explain(atlas) == atlas.dense_uses
    # Weights of heads and batch in one axis are returned as the model has them.
    assert [use.operation for use in atlas.dense_uses] == ["return of weights"]


def test_what_is_dense_is_named_recorded_and_saved(tmp_path: Path) -> None:
    model = Model("dense", "clamped")
    wanted, weights = model(X)
    with record(model, handwritten=True) as atlas:
        out, _ = model(X)
    torch.testing.assert_close(out, wanted)
    assert [tuple(use) for use in atlas.dense_uses] == [("layers.0", "Attention", "sigmoid of weights", 1)]
    atlas.save(tmp_path / "a.atlas")
    loaded = attlas.load(tmp_path / "a.atlas")
    assert loaded.dense_uses == atlas.dense_uses
    assert "layers.0 (Attention): sigmoid of weights, once" in repr(attlas.explain(loaded))
    for entry, dense in zip(loaded.entries, weights, strict=True):  # a clamp is stored, too
        torch.testing.assert_close(entry.matrix.to_dense(), dense.detach())


def test_steps_of_a_generation_are_one_entry() -> None:
    model = Model()
    with torch.no_grad(), record(model, handwritten=True) as atlas:
        model(X[:, :6])
        for step in range(6, 9):
            model(X[:, step : step + 1], [layer.keys for layer in model.layers])
    _, weights = model(X)
    assert len(atlas) == 2
    torch.testing.assert_close(atlas[0].to_dense(), weights[0].detach())


def test_interventions_change_it() -> None:
    model = Model()
    wanted = model(X)[0]
    with attlas.lazily(model), attlas.intervene(model, [interventions.Suppress(keys=[0, 3])]):
        changed = model(X)[0]
    assert (changed - wanted).abs().max() > 1e-3


def test_torch_function_with_weights_is_heard_without_it() -> None:
    """WavLM and pooling heads call torch's function with weights themselves."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2)

        def forward(self, x: Tensor) -> Any:
            weight, bias, out = self.inner.in_proj_weight, self.inner.in_proj_bias, self.inner.out_proj
            x = x.transpose(0, 1)
            return functional.multi_head_attention_forward(
                x, x, x, 8, 2, weight, bias, None, None, False, 0.0, out.weight, out.bias,
                need_weights=True, average_attn_weights=False,
            )  # fmt: skip

    model = Calls().eval()
    wanted = model(X)
    for given in ({"patch_sdpa": True}, {"handwritten": True}):
        with record(model, **given) as atlas:
            found = model(X)
        for a, b in zip(found, wanted, strict=True):
            a = a.to_dense() if isinstance(a, attlas.AttentionMatrix) else a
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(atlas[0].to_dense(), wanted[1].detach())
    with attlas.intervene(model, [interventions.Suppress(keys=[0, 3])], patch_sdpa=True):
        out, weights = model(X)
    assert weights.shape == wanted[1].shape
    assert (out - wanted[0]).abs().max() > 1e-4


def test_wrong_arguments() -> None:
    with pytest.raises(DtypeError, match="nn"):
        attlas.lazily("model")
    with pytest.raises(ShapeError, match="handwritten must be True or False"):
        record(Model(), handwritten="yes")
