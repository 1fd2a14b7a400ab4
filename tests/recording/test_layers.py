"""Layers carry the numbers of the model, whether all of them attend or some; what was not recorded is said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import SIZES, T5
from torch import Tensor, nn

import attlas
from attlas import interventions as iv
from attlas import stats
from attlas.recording import offer, record
from attlas.view.about import about

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
HYBRID = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"} | LINEAR | {"num_experts": 0}
KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]


@pytest.fixture(scope="module")
def hybrid() -> nn.Module:
    """Qwen3-Next: layers 1 and 4 of five attend by softmax."""
    torch.manual_seed(3)
    config = transformers.Qwen3NextConfig(**HYBRID, num_hidden_layers=5, layer_types=KINDS)
    return transformers.Qwen3NextForCausalLM(config).eval()


@torch.no_grad()
def run(model: nn.Module, tokens: int = 9) -> None:
    model(torch.arange(3, 3 + tokens)[None], use_cache=False)


def recorded(model: nn.Module, **options: Any) -> attlas.Atlas:
    with record(model, **options) as atlas:
        run(model)
    return atlas


def test_a_layer_has_the_number_of_the_model(hybrid: nn.Module) -> None:
    atlas = recorded(hybrid, linear=False)
    assert atlas.layers() == [1, 4]
    assert [entry.name for entry in atlas.entries] == ["model.layers.1.self_attn", "model.layers.4.self_attn"]
    assert atlas[4] is atlas.entry("model.layers.4.self_attn").matrix
    assert atlas[-1] is atlas[4]
    assert atlas.missing_layers() == [0, 2, 3]


CHOICES = [
    (4, [4]),
    (-1, [4]),
    (-4, [1]),
    ([1, -1], [1, 4]),
    ("self.1", [1]),
    ("model.layers.4", [4]),
    ("self", [1, 4]),
]


@pytest.mark.parametrize(("layers", "wanted"), CHOICES)
def test_layers_are_chosen_by_the_number_of_the_model(hybrid: nn.Module, layers: Any, wanted: list[int]) -> None:
    assert recorded(hybrid, layers=layers, linear=False).layers() == wanted
    assert recorded(hybrid, heads={layer: [0] for layer in wanted}).layers() == wanted
    layers = wanted if layers == "self" else layers  # which means the linear layers, too: they have no temperature
    with attlas.intervene(hybrid, [iv.Temperature(1e9, layers=layers)]), record(hybrid, linear=False) as atlas:
        run(hybrid)
    last = {layer: atlas[layer][0, :, -1, :] for layer in atlas.layers()}
    assert [layer for layer, row in last.items() if torch.allclose(row, torch.tensor(1 / 9))] == wanted


@pytest.mark.parametrize("layers", [0, -2, "self.3", 5])
def test_a_layer_without_weights_is_refused_before_the_model_runs(hybrid: nn.Module, layers: Any) -> None:
    with pytest.raises(attlas.OutOfRangeError) as error:
        record(hybrid, layers=layers, linear=False)
    assert error.value.arguments["attentions"] == "self.1, self.4 of 5 layers"
    assert ("Qwen3NextGatedDeltaNet" in error.value.found) is (layers != 5)


def test_what_is_not_there_is_said(hybrid: nn.Module, tmp_path: Path) -> None:
    """In print, in the table, and where the viewer says where a recording comes from; after loading, too."""
    atlas = recorded(hybrid, statistics=[stats.Entropy()], linear=False)
    atlas.save(tmp_path / "a.atlas")
    for one in (atlas, attlas.load(tmp_path / "a.atlas")):
        title, layers, missing = repr(one).splitlines()[:3]
        assert "2 of 5 layers × 4 heads" in title
        assert "layers 1, 4" in layers
        assert missing == "  not recorded: layers 0, 2 to 3 (Qwen3NextGatedDeltaNet)"
        assert {(row["layer"], row["layers"]) for row in one.table()} == {(1, 5), (4, 5)}
        (_, sentences), *_ = about(one)
        assert ["Of the model's {0} layers, {1} are here.", "5", "2"] in sentences
        assert ["Without attention weights: {0} ({1}).", "0, 2–3", "Qwen3NextGatedDeltaNet"] in sentences


def test_layers_that_were_not_chosen_are_counted() -> None:
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    whole, part = recorded(model), recorded(model, layers=1)
    assert (whole.missing_layers(), part.missing_layers()) == ([], [0])
    assert not whole.unrecorded
    assert not part.unrecorded
    assert "2 layers × 4 heads" in repr(whole)
    assert "1 of 2 layers × 4 heads" in repr(part)
    assert "layers" not in whole.table()[0]


def test_recordings_without_these_facts_say_what_they_know(hybrid: nn.Module) -> None:
    """Recordings from before have the configuration only, and the numbers that they were given."""
    atlas = recorded(hybrid, linear=False)
    old = {name: value for name, value in atlas.details.items() if name not in ("layer_counts", "unrecorded")}
    before = attlas.Atlas(atlas.entries, details=old)
    assert before.missing_layers() == [0, 2, 3]
    assert not before.unrecorded
    assert attlas.Atlas(atlas.entries).missing_layers() == []
    strange = attlas.Atlas(atlas.entries, details={"layer_counts": 7, "unrecorded": {"self": [1], "cross": {"A": "b"}}})
    assert strange.missing_layers() == []
    assert not strange.unrecorded


def test_an_encoder_and_its_decoder_are_numbered_apart() -> None:
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5 | {"num_decoder_layers": 3})).eval()
    with record(model) as atlas, torch.no_grad():
        model(input_ids=torch.arange(3, 9)[None], decoder_input_ids=torch.arange(3, 7)[None])
    assert [atlas.layers(kind) for kind in ("self", "cross", "encoder")] == [[0, 1, 2], [0, 1, 2], [0, 1]]
    assert not any(map(atlas.missing_layers, atlas.kinds))


# ------------------------------------------------------------------------------------------------- models of one's own


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x[:, None]
        offer(self, attlas.attend(q, q))
        return x


class Mixes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class Block(nn.Module):
    """A layer of one's own: two of whatever it is made of, beside a norm."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(self.norm(x))
        return x


class Model(nn.Module):
    def __init__(self, *lists: Sequence[nn.Module], **named: nn.Module) -> None:
        super().__init__()
        for number, layers in enumerate(lists):
            self.add_module(f"layers_{number}", nn.ModuleList(layers))
        for name, module in named.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            for layer in module if isinstance(module, nn.ModuleList) else [module]:
                x = layer(x)
        return x


def block(*parts: type[nn.Module]) -> Block:
    return Block(*(part() for part in parts))


class Crosses(nn.Module):
    """A layer with cross-attention and nothing else, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_attn = Attends()

    def forward(self, x: Tensor) -> Tensor:
        return self.cross_attn(x)


def test_layers_of_another_kind_are_not_missing() -> None:
    """Of Llama 3.2 Vision every fifth layer has cross-attention in place of self-attention."""
    model = Model([block(Attends), Crosses(), block(Mixes), Crosses(), block(Attends)])
    with record(model) as atlas:
        model(torch.randn(2, 5, 4))
    assert (atlas.layers("self"), atlas.layers("cross")) == ([0, 4], [1, 3])
    assert (atlas.missing_layers("self"), atlas.missing_layers("cross")) == ([2], [])
    assert {(row["kind"], row["layers"]) for row in atlas.table()} == {("self", 3), ("cross", 2)}
    assert atlas.unrecorded == ["layer 2 (Mixes)"]


MODELS: dict[str, tuple[Any, list[int], list[int]]] = {
    # Numbers of the recorded layers, and of the missing ones.
    "every layer": (lambda: Model([block(Attends), block(Attends, Mixes)]), [0, 1], []),
    "some layers": (lambda: Model([block(Mixes), block(Attends), block(Mixes)]), [1], [0, 2]),
    "the layers themselves": (lambda: Model([Mixes(), Attends(), Mixes(), Attends()]), [1, 3], [0, 2]),
    "two attentions in a layer": (lambda: Model([block(Attends, Attends), block(Attends, Attends)]), [0, 1, 2, 3], []),
    "two lists": (
        lambda: Model(
            [block(Mixes), block(Attends), block(Attends)],
            [block(Attends), block(Mixes), block(Attends)],
        ),
        [1, 2, 3, 5],
        [0, 4],
    ),
    "a list and a head": (lambda: Model([block(Mixes), block(Attends)], head=Attends()), [1, 2], [0]),
    "no list": (lambda: Model(a=Attends(), b=Mixes(), c=Attends()), [0, 1], []),
    "a sequence of unlike modules": (lambda: nn.Sequential(nn.Identity(), Attends(), Mixes(), Attends()), [0, 1], []),
    "a sequence of layers": (lambda: nn.Sequential(block(Mixes), block(Attends)), [1], [0]),
}


@pytest.mark.parametrize("name", MODELS)
def test_numbers_of_models_of_ones_own(name: str) -> None:
    make, wanted, missing = MODELS[name]
    model = make()
    with record(model) as atlas:
        model(torch.randn(2, 5, 4))
    assert atlas.layers() == wanted
    assert atlas.missing_layers() == missing
    assert ("Mixes" in repr(atlas)) is bool(missing)
