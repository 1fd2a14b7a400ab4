"""Layers that hold a copy of a configuration are switched with their model: X-CLIP's over the frames of a video."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import attlas
import attlas.huggingface

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
FRAMES = {f"mit_{name}": size for name, size in SIZES.items()} | {"num_frames": 3, "image_size": 8, "patch_size": 4}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(3)
    config = transformers.XCLIPConfig(
        text_config=SIZES | {"vocab_size": 60, "max_position_embeddings": 16, "projection_dim": 32},
        vision_config=SIZES | FRAMES | {"projection_dim": 32},
        projection_dim=32,
        prompt_num_attention_heads=4,
        prompt_layers=1,
    )
    return transformers.XCLIPModel(config).eval()


def implementations(model: nn.Module) -> set[str]:
    layers = [module for module in model.modules() if type(module).__name__ == "XCLIPAttention"]
    assert any(layer.config is not model.config.vision_config for layer in layers)
    return {layer.config._attn_implementation for layer in layers}


@torch.no_grad()
def test_every_layer_follows_the_switch(model: nn.Module) -> None:
    given: dict[str, Any] = {"input_ids": torch.randint(3, 60, (2, 7)), "pixel_values": torch.randn(1, 3, 3, 8, 8)}
    wanted = model(**given).logits_per_video
    for name in ("attlas", "eager", "attlas", {"vision_config": "sdpa", "text_config": "sdpa", "": "sdpa"}):
        model.set_attn_implementation(name)
        assert implementations(model) == {name if isinstance(name, str) else "sdpa"}
        torch.testing.assert_close(model(**given).logits_per_video, wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("before", ["attlas", "eager"])
def test_a_recording_hears_and_restores_every_layer(model: nn.Module, before: str) -> None:
    model.set_attn_implementation(before)
    with attlas.record(model) as atlas:
        model(input_ids=torch.randint(3, 60, (2, 7)), pixel_values=torch.randn(1, 3, 3, 8, 8))
    assert "mit.encoder.layers.0.self_attn" in {entry.name for entry in atlas.entries}
    assert implementations(model) <= {before, "sdpa"}


def test_other_switches_leave_copies_as_they_are(model: nn.Module) -> None:
    model.set_attn_implementation("eager")
    assert implementations(model) == {"eager", "sdpa"}
