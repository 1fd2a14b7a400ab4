"""Tiny models of transformers that are given pictures, each with the arguments of a call."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t
from tests.tiny_models import lively
from torch import nn

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
PATCHES = VISION | {"image_size": 8, "patch_size": 2}
TEXT = VISION | {"vocab_size": 61, "num_key_value_heads": 2, "max_position_embeddings": 128}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IMAGE = 60  # the token of an image
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
QWEN = {"image_token_id": IMAGE, "video_token_id": 59, "vision_start_token_id": 57, "vision_end_token_id": 58}
TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 2, "temporal_patch_size": 2, "in_channels": 3}
TOWER |= {"spatial_merge_size": 2}


def text_with(*runs: tuple[int, int], length: int, batch: int = 1) -> torch.Tensor:
    """Return random token ids with runs of image tokens, each by its first position and its length."""
    torch.manual_seed(5)
    ids = torch.randint(3, 50, (batch, length))
    for start, count in runs:
        ids[:, start : start + count] = IMAGE
    return ids


def pixels(*shape: int) -> torch.Tensor:
    torch.manual_seed(6)
    return torch.randn(shape)


def vit() -> tuple[nn.Module, dict[str, Any]]:
    return t.ViTModel(t.ViTConfig(**PATCHES)), {"pixel_values": pixels(2, 3, 8, 8)}


def dinov2_with_registers() -> tuple[nn.Module, dict[str, Any]]:
    config = t.Dinov2WithRegistersConfig(**PATCHES, num_register_tokens=3)
    return t.Dinov2WithRegistersModel(config), {"pixel_values": pixels(2, 3, 8, 8)}


def clip() -> tuple[nn.Module, dict[str, Any]]:
    special = {"vocab_size": 61, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    config = t.CLIPConfig(text_config=VISION | special, vision_config=PATCHES, projection_dim=16)
    return t.CLIPModel(config), {"input_ids": text_with(length=6, batch=2), "pixel_values": pixels(2, 3, 8, 8)}


def llava() -> tuple[nn.Module, dict[str, Any]]:
    vision, text = t.CLIPVisionConfig(**PATCHES), t.LlamaConfig(**TEXT)
    config = t.LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    ids = text_with((3, 16), length=24, batch=2)
    return t.LlavaForConditionalGeneration(config), {"input_ids": ids, "pixel_values": pixels(2, 3, 8, 8)}


def llava_next(height: int = 10, width: int = 20) -> tuple[nn.Module, dict[str, Any]]:
    """A picture of 10 × 20 pixels is put into two tiles side by side."""
    vision, text = t.CLIPVisionConfig(**PATCHES), t.LlamaConfig(**TEXT)
    choices = [[8, 16], [16, 8], [16, 16]]
    config = t.LlavaNextConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, image_grid_pinpoints=choices
    )
    rows = {(10, 20): 4, (10, 22): 4, (5, 20): 2}[height, width]
    ids = text_with((3, 16 + rows * 9), length=12 + 16 + rows * 9)
    sizes = torch.tensor([[height, width]])
    given = {"input_ids": ids, "pixel_values": pixels(1, 3, 3, 8, 8), "image_sizes": sizes}
    return t.LlavaNextForConditionalGeneration(config), given


def internvl() -> tuple[nn.Module, dict[str, Any]]:
    """A picture of 2 × 3 tiles and a thumbnail, then one of a single tile."""
    vision, text = VISION | {"image_size": [8, 8], "patch_size": [2, 2]}, t.Qwen2Config(**TEXT)
    config = t.InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=4)
    ids = text_with((3, 28), (34, 4), length=44)
    return t.InternVLForConditionalGeneration(config), {"input_ids": ids, "pixel_values": pixels(8, 3, 8, 8)}


def _qwen() -> dict[str, Any]:
    """Two pictures of 4 × 6 and 4 × 4 patches, of which 2 × 2 are one token."""
    ids = text_with((3, 6), (12, 4), length=24)
    ids[0, [2, 11]], ids[0, [9, 16]] = 57, 58
    kinds, grid = (ids == IMAGE).int(), torch.tensor([[1, 4, 6], [1, 4, 4]])
    return {"input_ids": ids, "pixel_values": pixels(40, 24), "image_grid_thw": grid, "mm_token_type_ids": kinds}


def qwen2_vl() -> tuple[nn.Module, dict[str, Any]]:
    vision = TOWER | {"embed_dim": 32, "mlp_ratio": 2}
    return t.Qwen2VLForConditionalGeneration(
        t.Qwen2VLConfig(vision_config=vision, text_config=TEXT | MROPE, **QWEN)
    ), _qwen()


def qwen2_5_vl() -> tuple[nn.Module, dict[str, Any]]:
    vision = TOWER | {"out_hidden_size": 32, "intermediate_size": 48, "window_size": 8, "fullatt_block_indexes": [1]}
    config = t.Qwen2_5_VLConfig(vision_config=vision, text_config=TEXT | MROPE, **QWEN)
    return t.Qwen2_5_VLForConditionalGeneration(config), _qwen()


def qwen3_vl() -> tuple[nn.Module, dict[str, Any]]:
    vision = TOWER | {"out_hidden_size": 32, "intermediate_size": 48, "num_position_embeddings": 16}
    vision |= {"deepstack_visual_indexes": [0]}
    config = t.Qwen3VLConfig(vision_config=vision, text_config=TEXT | MROPE | {"head_dim": 8}, **QWEN)
    return t.Qwen3VLForConditionalGeneration(config), _qwen()


def made(make: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model with weights that attend to some keys more than to others, and the arguments of a call."""
    model, given = make()
    return lively(model), given
