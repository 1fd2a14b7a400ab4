"""timm, torchvision and open_clip: tiny random models, recorded by what they call."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attlas

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def recorded(model: nn.Module, *inputs: Tensor, **how: bool) -> Any:
    """Record a model and check that it computes the same."""
    model.eval()
    with torch.no_grad():
        wanted = model(*inputs)
        with attlas.record(model, **how) as atlas:
            found = model(*inputs)
    first = [t[0] if isinstance(t, tuple) else t for t in (found, wanted)]
    torch.testing.assert_close(*first, rtol=1e-5, atol=1e-5)
    return atlas


def test_timm_on_sdpa_equals_timm_without() -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed: make test-doors")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2)
    atlas = recorded(model, IMAGES, patch_sdpa=True)
    assert [atlas[i].shape for i in range(2)] == [(2, 2, 17, 17)] * 2
    # timm's own weights: without the fused function it computes them, and drops them by a layer that sees them.
    seen: list[Tensor] = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        model(IMAGES)
    for layer, weights in enumerate(seen):
        torch.testing.assert_close(atlas[layer].to_dense(), weights, rtol=1e-5, atol=1e-6)
    by_hand = recorded(model, IMAGES, handwritten=True)
    torch.testing.assert_close(by_hand[1].to_dense(), atlas[1].to_dense(), rtol=1e-5, atol=1e-6)


def test_torchvision() -> None:
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed: make test-doors")
    torch.manual_seed(0)
    model = models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5
    )
    atlas = recorded(model, IMAGES, patch_sdpa=True)
    inputs: list[Tensor] = []
    layer = model.encoder.layers[1].self_attention
    layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        model(IMAGES)
        _, weights = layer(inputs[0], inputs[0], inputs[0], need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(atlas[1].to_dense(), weights, rtol=1e-5, atol=1e-6)
    swin = models.SwinTransformer([2, 2], 16, [1, 1], [2, 4], [4, 4], num_classes=5)
    atlas = recorded(swin, IMAGES, handwritten=True)
    assert atlas[0].shape == (32, 2, 16, 16)  # 16 windows of each image
    assert not atlas.dense_uses


def test_open_clip_has_an_encoder_for_images_and_one_for_texts() -> None:
    model = pytest.importorskip("open_clip.model", reason="open_clip is not installed: make test-doors")
    torch.manual_seed(0)
    clip = model.CLIP(
        embed_dim=32,
        vision_cfg={"image_size": 32, "patch_size": 8, "layers": 2, "width": 64, "head_width": 32},
        text_cfg={"context_length": 16, "vocab_size": 50, "width": 32, "heads": 2, "layers": 2},
    )
    atlas = recorded(clip, IMAGES, torch.randint(1, 49, (2, 16)), patch_sdpa=True)
    assert atlas["encoder.1"].shape == (2, 2, 17, 17)
    assert atlas["self.1"].shape == (2, 2, 16, 16)
    assert atlas["self.1"].to_dense().triu(1).abs().max() == 0  # the text is causal
