"""Layers of linear attention of `attlas.nn`, and modules that tell of such a matrix: heard, gated and changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.messages import refusal
from torch import Tensor, nn

import attlas
from attlas import heads, stats
from attlas.errors import RecordingError, ShapeError
from attlas.interventions import Ablate, Suppress, Temperature
from attlas.nn import GatedDelta, LinearAttention, MultiHeadAttention

N = 13


def positive(x: Tensor) -> Tensor:
    return nn.functional.elu(x) + 1


class Mixer(nn.Module):
    """A block around a layer of `attlas.nn`, with a gate for each head if asked for."""

    def __init__(self, layer: nn.Module, *, gate: bool = False) -> None:
        super().__init__()
        self.layer, self.qkv, self.o_proj = layer, nn.Linear(16, 48), nn.Linear(16, 16)
        self.gate = nn.Linear(16, 2) if gate else None
        self.own = torch.empty(0)  # what the layer has computed

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = self.layer(q, k, v)
        self.own = out.detach()
        out = out if self.gate is None else out * self.gates(x).unsqueeze(-1)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def gates(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)).mT


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = MultiHeadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, is_causal=True)[0]


class Own(nn.Module):
    """A layer of one's own that tells of its matrix: the delta rule with a rank one part."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = nn.functional.normalize(k, dim=-1)
        return attlas.recording.pooled(self, attlas.transport(q, k, -0.1, erase=(-k, k), diagonal=0.5), v)[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        layers = [Mixer(GatedDelta(), gate=True), Mixer(LinearAttention()), Softmax()]
        self.layers = nn.ModuleList([*layers, Mixer(LinearAttention(positive, normalize=True)), Mixer(Own())])

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


LINEAR = (0, 1, 3, 4)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()  # in training mode


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 50, (2, N), generator=torch.Generator().manual_seed(1))


def test_every_layer_is_heard_in_training_with_padding_values_and_gates(model, ids, tmp_path: Path) -> None:
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    numbers = [stats.ColumnMass(), stats.Entropy()]
    with attlas.record(model, values=True, gates=True, statistics=numbers) as atlas:
        model(ids, attention_mask=mask)
    assert (atlas.layers(), atlas.missing_layers()) == ([0, 1, 2, 3, 4], [])
    assert torch.equal(atlas.ids, ids)
    for layer in LINEAR:
        entry = atlas.entry(layer)
        own = model.layers[layer].own
        assert entry.name == f"layers.{layer}.layer"
        assert float((entry.matrix @ entry.values - own).abs().max() / own.abs().max()) <= 1e-6
        assert int((~entry.query_mask).sum()) == 3
        assert entry.statistics.keys() == {"column_mass"}
    torch.testing.assert_close(atlas[3].sum(-1), torch.ones(2, 2, N))
    x = model.embed(ids)
    torch.testing.assert_close(atlas.entry(0).gates, model.layers[0].gates(x), rtol=1e-4, atol=1e-5)
    gated = model.layers[0].own * model.layers[0].gates(x).unsqueeze(-1)
    torch.testing.assert_close(atlas.entry(0).gated @ atlas.entry(0).values, gated, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(atlas.entry(2).gates, torch.ones(2, 2, N), rtol=1e-4, atol=1e-5)  # found late, too
    dense = torch.eye(N).expand(2, N, N)
    for layer in range(5):
        dense = (0.5 * atlas[layer].to_dense().mean(1) + 0.5 * torch.eye(N)) @ dense
    torch.testing.assert_close(heads.rollout(atlas)[1:], dense[1:, -1:], rtol=1e-4, atol=1e-5)  # of no padding
    atlas.save(tmp_path / "run.atlas")
    again = attlas.load(tmp_path / "run.atlas")
    for layer in range(5):
        torch.testing.assert_close(again[layer].to_dense(), atlas[layer].to_dense(), rtol=0, atol=0)


def test_layers_are_chosen_and_left_out(model, ids) -> None:
    with attlas.record(model, layers=[1, 2], heads=[1], queries=slice(-4, None)) as some:
        model(ids)
        model(ids[:, :9])
    assert [(entry.layer, entry.call, entry.heads) for entry in some.entries] == [
        (1, 0, (1,)), (1, 1, (1,)), (2, 0, (1,)), (2, 1, (1,))
    ]  # fmt: skip
    assert some[1].shape == (2, 1, 4, 9)
    with attlas.record(model, linear=False) as alone:
        model(ids)
    assert alone.layers() == [2]
    assert any("GatedDelta" in line for line in alone.unrecorded)
    with attlas.record(model, keep="statistics", statistics=[stats.ColumnMass()]) as numbers:
        model(ids)
    assert numbers.entry(3).matrix is None
    with attlas.record(model.layers[0]) as block, torch.no_grad():  # without ids, of one block
        model.layers[0](model.embed(ids))
    assert block.layers() == [0]


def test_other_kinds_are_entries_too() -> None:
    class Sigmoid(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attlas.recording.pooled(self, attlas.attend(x, x, normalise="sigmoid"), x)[0]

    class Windowed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attlas.recording.pooled(self, attlas.transport(x, x).window(rows=(3, 7)), x)[0]

    model, x = Sigmoid(), torch.randn(2, 3, 7, 4)
    with attlas.record(model, values=True, statistics=[stats.RowMass(), stats.Entropy()]) as atlas:
        out = model(x)
    torch.testing.assert_close(atlas[0] @ atlas.entry(0).values, out)
    assert atlas.entry(0).statistics.keys() == {"row_mass"}
    model = Windowed()
    with pytest.raises(ShapeError, match="with all of its tokens"), attlas.record(model):
        model(x)


CHANGES = {
    "keys": (Suppress(layers=[0], keys=(2, 5)), 0, lambda A: A[..., 2:5].zero_()),
    "a rectangle of one head": (
        Suppress(layers=[1], queries=slice(6, None), keys=(2, 5), heads=[1]), 1, lambda A: A[:, 1:, 6:, 2:5].zero_()
    ),
    "queries": (Suppress(layers=[4], queries=[3, 7]), 4, lambda A: A.index_fill_(2, torch.tensor([3, 7]), 0.0)),
    "pairs": (
        Suppress(layers=[4], pairs=attlas.Window(2, 0)), 4,
        lambda A: A.masked_fill_(torch.ones(N, N).tril().triu(-2).bool(), 0.0),
    ),
    "shares": (Suppress(layers=[3], keys=3, when="after"), 3, lambda A: A[..., 3].zero_()),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_pairs_are_suppressed(name: str, model, ids) -> None:
    item, layer, change = CHANGES[name]
    with attlas.intervene(model, item), attlas.record(model, values=True) as atlas:
        model(ids)
    entry = atlas.entry(layer)
    dense = entry.matrix.to_dense().clone()
    assert not torch.allclose(dense @ entry.values, model.layers[layer].own)  # the weights are those of the layer
    change(dense)
    torch.testing.assert_close(dense @ entry.values, model.layers[layer].own, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("pairs", [None, attlas.Window(2, 0)])
def test_gradients_through_suppressed_pairs(pairs) -> None:
    q, k, v = (torch.randn(1, 2, 7, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    layer = LinearAttention(scale=1.0)
    item = Suppress(keys=(2, 4)) if pairs is None else Suppress(pairs=pairs)
    with attlas.intervene(layer, item):
        found = torch.autograd.grad(layer(q, k, v).square().sum(), (q, k, v))
    gone = torch.zeros(7, 7, dtype=torch.bool)
    gone[:, 2:4] = True
    gone = gone if pairs is None else torch.ones(7, 7).tril().triu(-2).bool()
    wanted = torch.autograd.grad((((q @ k.mT).tril().masked_fill(gone, 0.0)) @ v).square().sum(), (q, k, v))
    for own, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


def test_what_else_is_changed_or_refused(model, ids) -> None:
    with attlas.intervene(model, Ablate(heads={1: [0]})):
        model(ids)
    assert float(model.layers[1].own[:, 0].abs().max()) == 0.0
    text = refusal(RecordingError, lambda: _changed(model, ids, Temperature(2.0, layers=[0])))
    assert text == "Temperature(): Temperature"
    text = refusal(RecordingError, lambda: _changed(model, ids, Suppress(layers=[3], keys=3)))
    assert text == 'Suppress(): when="before"'


def _changed(model: nn.Module, ids: Tensor, item) -> None:
    with attlas.intervene(model, item):
        model(ids)
