"""Types that no rule of the sweep makes small: a configuration and inputs of each, written out.

Each case says what a configuration gets and, where names of `forward` say too little, what the model is called with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

BATCH = 2


@dataclass
class Case:
    """How a type is built and called.

    `given` is passed to the configuration. `sizes` are set on it afterwards, by names with dots. `whole` says that the
    sizes are small as given, so that no rule changes them. `owner` names the class, and `reference` the implementation
    of transformers to compare with. `inputs` takes the maker of the sweep and returns what the model is called with.
    """

    given: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    owner: str = ""
    reference: str = "eager"
    inputs: Callable[[Any], dict[str, Any]] | None = None


def _pictures(size: int, **more: Any) -> Callable[[Any], dict[str, Any]]:
    """Return inputs of square pictures, and what else a model takes."""
    return lambda m: {"pixel_values": m.normal(BATCH, 3, size, size), **more}


def _vit(kind: str, **more: Any) -> dict[str, Any]:
    """Return a small backbone of 64 patches and four layers, each of which is a feature."""
    return {
        "model_type": kind,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 4,
        "out_indices": [1, 2, 3, 4],
        **more,
    }


_DEPTH = {"fusion_hidden_size": 16, "neck_hidden_sizes": [8, 16, 16, 32], "reassemble_factors": [4, 2, 1, 0.5]}
_RESNET = {
    "model_type": "rt_detr_resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 32, 64],
    "depths": [1, 1, 1, 1],
    "out_indices": [2, 3, 4],
}
_HGNET = {
    "model_type": "hgnet_v2",
    "embedding_size": 8,
    "stem_channels": [3, 8, 8],
    "hidden_sizes": [16, 16, 32, 64],
    "depths": [1, 1, 1, 1],
    "stage_in_channels": [8, 16, 16, 32],
    "stage_mid_channels": [8, 8, 8, 16],
    "stage_out_channels": [16, 16, 32, 64],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [2, 2, 2, 2],
}
_DETR = {
    "encoder_hidden_dim": 32,
    "d_model": 32,
    "encoder_in_channels": [16, 32, 64],
    "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_in_channels": [32, 32, 32],
    "decoder_ffn_dim": 48,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "num_queries": 40,
    "num_denoising": 0,
    "encoder_layers": 1,
}
_SWIN = {
    "model_type": "swin",
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [1, 1, 1, 1],
    "num_heads": [2, 2, 2, 2],
    "window_size": 4,
    "out_indices": [1, 2, 3, 4],
}
_HIERA = {
    "model_type": "sam2_hiera_det_model",
    "hidden_size": 16,
    "num_attention_heads": 1,
    "image_size": [128, 128],
    "blocks_per_stage": [1, 1, 2, 1],
    "embed_dim_per_stage": [16, 32, 64, 128],
    "num_attention_heads_per_stage": [1, 2, 4, 8],
    "window_size_per_stage": [8, 4, 4, 2],
    "global_attention_blocks": [3],
}
_SAM2_VISION = {
    "model_type": "sam2_vision_model",
    "backbone_config": _HIERA,
    "backbone_channel_list": [128, 64, 32, 16],
    "fpn_hidden_size": 32,
    "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
}
_PROMPTS = {"hidden_size": 32, "image_size": 128, "patch_size": 16, "mask_input_channels": 8}
_MASKS = {"hidden_size": 32, "mlp_dim": 48, "num_attention_heads": 4, "iou_head_hidden_dim": 16}


def _points(size: int) -> Callable[[Any], dict[str, Any]]:
    return _pictures(
        size,
        input_points=torch.tensor([[[[9.0, 9.0], [20.0, 12.0]]]] * BATCH),
        input_labels=torch.ones(BATCH, 1, 2, dtype=torch.int64),
    )


_EDGE = {
    "model_type": "edgetam_vision_model",
    "backbone_config": {
        "model_type": "timm_wrapper",
        "architecture": "repvit_m1",
        "num_classes": 4,
        "model_args": {
            "in_chans": 3,
            "features_only": True,
            "out_indices": [0, 1, 2, 3],
            "embed_dim": [16, 32, 64, 128],
            "depth": [1, 1, 1, 1],
        },
    },
    "backbone_channel_list": [128, 64, 32, 16],
    "fpn_hidden_size": 32,
    "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
}
_MEMORY = {
    "image_size": 128,
    "memory_attention_hidden_size": 32,
    "memory_attention_mlp_hidden_size": 48,
    "memory_attention_rope_feat_sizes": [8, 8],
    "memory_attention_dropout": 0.0,
    "memory_attention_rope_dropout": 0.0,
    "memory_encoder_hidden_size": 32,
    "memory_encoder_output_channels": 8,
    "mask_downsampler_embed_dim": 32,
    "memory_fuser_intermediate_dim": 48,
    "memory_fuser_embed_dim": 32,
}
_SAM3_VISION = {
    "model_type": "sam3_vision_model",
    "backbone_config": {
        "model_type": "sam3_vit_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 128,
        "pretrain_image_size": 128,
        "patch_size": 16,
        "window_size": 4,
        "global_attn_indexes": [1],
    },
    "fpn_hidden_size": 32,
    "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
}
_SAM3 = {
    "vision_config": _SAM3_VISION,
    "geometry_encoder_config": {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "detr_encoder_config": {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "detr_decoder_config": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "num_queries": 20,
    },
    "mask_decoder_config": {"hidden_size": 32, "num_attention_heads": 4},
    "text_config": {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "projection_dim": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 96,
        "eos_token_id": 2,
    },
}


def _video(m: Any) -> dict[str, Any]:
    """Return one frame of a video with a point; the session keeps what a call computed, so each call gets a new one."""
    frames = m.normal(2, 3, 128, 128)
    module = sys.modules[type(m.model).__module__]
    kind = next(value for name, value in vars(module).items() if name.endswith("VideoInferenceSession"))

    def session() -> Any:
        dtype = next(m.model.parameters()).dtype
        made = kind(video=frames, video_height=128, video_width=128, dtype=dtype)
        number = made.obj_id_to_idx(1)
        points = {
            "point_coords": torch.tensor([[[[9.0, 9.0]]]], dtype=dtype),
            "point_labels": torch.ones(1, 1, 1, dtype=torch.int32),
        }
        made.add_point_inputs(number, 0, points)
        made.obj_with_new_inputs = [1]
        return made

    return {"inference_session": session, "frame_idx": 0}


def _described_video(m: Any) -> dict[str, Any]:
    """Return one frame of a video and the words for what is looked for in it."""
    frames, words = m.normal(2, 3, 128, 128), m.words(72)[:1]
    module = sys.modules[type(m.model).__module__]

    def session() -> Any:
        dtype = next(m.model.parameters()).dtype
        made = module.Sam3VideoInferenceSession(video=frames, video_height=128, video_width=128, dtype=dtype)
        number = made.add_prompt("a thing")
        made.prompt_input_ids[number], made.prompt_attention_masks[number] = words, torch.ones_like(words)
        return made

    return {"inference_session": session, "frame_idx": 0}


_SOUND_CODEC = {
    "depths": [1] * 7,
    "num_filters": 4,
    "hidden_size": 32,
}

_TEXT_FINDER = {
    "neck_out_channels": 16,
    "intraclass_block_config": {
        "reduce_channel": [1, 1, 0],
        "return_channel": [1, 1, 0],
        **{
            f"{way}_{ratio}ratio": [
                [n if rows else 1, n if columns else 1],
                [1, 1],
                [n // 2 if rows else 0, n // 2 if columns else 0],
            ]
            for way, rows, columns in (
                ("vertical_long_to_small_conv", True, False),
                ("horizontal_small_to_long_conv", False, True),
                ("symmetric_conv_long", True, True),
            )
            for ratio, n in (("long", 7), ("mid", 5), ("short", 3))
        },
    },
    "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2],
}
_LCNET = {
    "model_type": "pp_lcnet_v4",
    "stem_channels": [3, 8, 16],
    "block_configs": [
        [[3, 16, 16, 1, False]],
        [[3, 16, 16, 2, False]],
        [[3, 16, 32, 2, False]],
        [[3, 32, 64, 2, False]],
    ],
    "out_indices": [1, 2, 3, 4],
}
_PERCEPTION = {
    "depth": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "attn_pool_num_heads": 4,
    "use_post_transformer_norm": False,
}
_PE_VISION = {
    "model_type": "timm_wrapper",
    "architecture": "vit_pe_core_tiny_patch16_384",
    "num_classes": 32,
    "model_args": {**_PERCEPTION, "img_size": [32, 32], "global_pool": "map"},
}
_VOCODER = {"upsample_initial_channel": 64, "mel_dim": 16}
_DIT = {
    "emb_dim": 16,
    "num_embeds": 64,
    "mel_dim": 16,
    "enc_emb_dim": 16,
    "enc_dim": 16,
    "dropout": 0.0,
    "enc_channels": (16, 16, 16, 16, 48),
    "enc_attention_channels": 8,
    "enc_se_channels": 8,
    "block_size": 6,
    "look_ahead_layers": (1,),
    "look_backward_layers": (0,),
}


def _pe_sound(path: str) -> dict[str, Any]:
    """Return sizes of a small sound codec in a configuration."""
    sizes = {"downsampling_ratios": [4, 4], "hop_length": 16, "codebook_dim": 16, "codebook_size": 64}
    return {f"{path}.dac_config.{name}": value for name, value in sizes.items()}


def _marked(words: torch.Tensor, token: int, count: int) -> torch.Tensor:
    """Return texts whose first tokens stand for an image."""
    words[:, :count] = token
    return words


def _nearby(queries: int, keys: int) -> torch.Tensor:
    """Return a mask that is added to logits and leaves each of the last queries the five keys around its own."""
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return torch.zeros(BATCH, 1, queries, keys).masked_fill(distance.abs() > 2, torch.finfo(torch.float32).min)


def _uncached(model: Any, words: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return words for each call, before which the model forgets what it computed of them."""

    def forgotten() -> torch.Tensor:
        for cache in (model.language_cache_class, model.language_cache_prompt):
            cache.cache.clear()
            cache.current_load = 0
        return words

    return forgotten


def _residues(m: Any) -> dict[str, Any]:
    """Return a protein of 72 residues with two atoms each, its second copy shorter."""
    module = sys.modules[type(m.model).__module__]
    tokens, places = m.tokens, torch.arange(m.tokens)
    text = m.text.flip(-1).bool()
    of_atom = places.repeat_interleave(2).expand(BATCH, -1)

    def atoms() -> Any:
        draw = torch.Generator().manual_seed(7)
        return module.EsmFold2AtomInputs(
            ref_pos=torch.randn(BATCH, 2 * tokens, 3, generator=draw),
            ref_charge=torch.zeros(BATCH, 2 * tokens),
            atom_attention_mask=text.repeat_interleave(2, -1),
            ref_element=torch.randint(1, 9, (BATCH, 2 * tokens), generator=draw),
            ref_atom_name_chars=torch.randint(1, 60, (BATCH, 2 * tokens, 4), generator=draw),
            ref_space_uid=of_atom,
            atom_to_token=of_atom,
        )

    zeros = torch.zeros(BATCH, tokens, dtype=torch.int64)
    return {
        "token_index": places.expand(BATCH, -1),
        "residue_index": places.expand(BATCH, -1),
        "asym_id": zeros,
        "sym_id": zeros,
        "entity_id": zeros,
        "mol_type": zeros,
        "res_type": m.whole(20, BATCH, tokens),
        "token_bonds": torch.zeros(BATCH, tokens, tokens, 1),
        "attention_mask": text,
        "atom_inputs": atoms,
        "input_ids": m.words(tokens),
    }


def _dit(m: Any) -> dict[str, Any]:
    c = m.config
    return {
        "hidden_states": m.normal(BATCH, 80, c.mel_dim),
        "condition_vector": m.normal(BATCH, 80, c.mel_dim),
        "speaker_embedding": m.normal(BATCH, 80, c.enc_emb_dim),
        "quantized_code": m.whole(c.num_embeds, BATCH, 40),
        "time_step": torch.full((BATCH,), 0.3),
    }


CASES: dict[str, Case] = {
    "chmv2": Case(
        whole=True,
        given={
            "backbone_config": _vit(
                "dinov3_vit", intermediate_size=48, reshape_hidden_states=True, return_class_token=True
            ),
            "patch_size": 4,
            "fusion_hidden_size": 16,
            "head_hidden_size": 8,
            "number_output_channels": 16,
            "post_process_channels": [8, 16, 16, 32],
        },
        inputs=_pictures(32),
    ),
    "depth_anything": Case(
        whole=True,
        given={
            "backbone_config": _vit("dinov2", reshape_hidden_states=False),
            **_DEPTH,
            "patch_size": 4,
            "reassemble_hidden_size": 32,
            "head_hidden_size": 8,
        },
        inputs=_pictures(32),
    ),
    "prompt_depth_anything": Case(
        whole=True,
        given={
            "backbone_config": _vit("dinov2", reshape_hidden_states=False),
            **_DEPTH,
            "patch_size": 4,
            "reassemble_hidden_size": 32,
            "head_hidden_size": 8,
        },
        inputs=_pictures(32, prompt_depth=torch.rand(BATCH, 1, 8, 8, generator=torch.Generator().manual_seed(2))),
    ),
    "zoedepth": Case(
        whole=True,
        given={
            "backbone_config": _vit("beit", intermediate_size=48, reshape_hidden_states=False),
            **_DEPTH,
            "bottleneck_features": 16,
            "num_relative_features": 8,
            "bin_embedding_dim": 8,
            "num_attractors": [4, 2, 2, 1],
        },
        inputs=_pictures(32),
    ),
    "tipsv2_dpt": Case(
        whole=True,
        given={
            "backbone_config": _vit("tipsv2_vision_model", reshape_hidden_states=False),
            **_DEPTH,
            "num_depth_bins": 16,
        },
        inputs=_pictures(32),
    ),
    "depth_pro": Case(
        whole=True,
        given={
            **{
                f"{part}_model_config": _vit(
                    "dinov2", num_hidden_layers=2, out_indices=None, reshape_hidden_states=True
                )
                for part in ("image", "patch", "fov")
            },
            "patch_size": 32,
            "fusion_hidden_size": 16,
            "intermediate_hook_ids": [1, 0],
            "intermediate_feature_dims": [8, 8],
            "scaled_images_ratios": [0.5, 1.0],
            "scaled_images_overlap_ratios": [0.0, 0.2],
            "scaled_images_feature_dims": [12, 8],
        },
        inputs=_pictures(64),
    ),
    "dots3_note_audio_encoder": Case(
        sizes={
            "head_dim": 8,
            "num_key_value_heads": 4,
            "adapter_input_size": 32,
            "adapter_out_dim": 32,
            "conv_output_size": 960,
        },
        inputs=lambda m: {
            "input_features": m.normal(BATCH, 16, 400),
            "chunk_sample_lengths": torch.tensor([64000, 48000]),
        },
    ),
    "edgetam_vision_model": Case(whole=True, given=_EDGE, inputs=_pictures(128)),
    "edgetam": Case(
        whole=True,
        given={"vision_config": _EDGE, "prompt_encoder_config": _PROMPTS, "mask_decoder_config": _MASKS},
        inputs=_points(128),
    ),
    "edgetam_video": Case(
        whole=True,
        given={
            "vision_config": _EDGE,
            "prompt_encoder_config": _PROMPTS,
            "mask_decoder_config": _MASKS,
            **_MEMORY,
            "memory_attention_rope_k_sizes": [4, 4],
            "perceiver_resampler_num_latents": 16,
            "perceiver_resampler_num_latents_2d": 16,
            "perceiver_resampler_hidden_size": 8,
            "perceiver_resampler_mlp_intermediate_size": 16,
            "perceiver_resampler_attention_head_dim": 8,
        },
        inputs=_video,
    ),
    "efficientnet": Case(
        sizes={"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320, "image_size": 64},
        inputs=_pictures(64),
    ),
    "fastspeech2_conformer_hifigan": Case(
        sizes={"model_in_dim": 16, "upsample_initial_channel": 32},
        inputs=lambda m: {"spectrogram": m.normal(BATCH, 20, 16)},
    ),
    "fastspeech2_conformer_with_hifigan": Case(
        given={
            "model_config": {
                "hidden_size": 32,
                "vocab_size": 99,
                "num_mel_bins": 16,
                "encoder_num_attention_heads": 4,
                "encoder_layers": 2,
                "encoder_linear_units": 48,
                "decoder_layers": 2,
                "decoder_linear_units": 48,
                "decoder_num_attention_heads": 4,
                "speech_decoder_postnet_units": 16,
                "duration_predictor_channels": 16,
                "energy_predictor_channels": 16,
                "pitch_predictor_channels": 16,
            },
            "vocoder_config": {"model_in_dim": 16, "upsample_initial_channel": 32},
        },
        whole=True,
        inputs=lambda m: {"input_ids": m.words(m.tokens)},
    ),
    "speecht5_hifigan": Case(
        sizes={"model_in_dim": 16, "upsample_initial_channel": 32},
        inputs=lambda m: {"spectrogram": m.normal(BATCH, 20, 16)},
    ),
    "flava_multimodal_model": Case(
        inputs=lambda m: {
            "hidden_states": m.normal(BATCH, 72, 32),
            "attention_mask": torch.cat([torch.ones(BATCH, 1, dtype=torch.int64), m.text], 1),
        }
    ),
    "gemma4_assistant": Case(
        given={"text_config": {"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0}},
        sizes={"text_config.num_kv_shared_layers": 2},
    ),
    "gemma4_unified_assistant": Case(sizes={"text_config.num_kv_shared_layers": 2}),
    "granite_speech5_ctc": Case(
        sizes={"encoder_config.context_size": 24},
        inputs=lambda m: {"input_features": m.normal(BATCH, 640, 64)},
    ),
    "granite_speech5_encoder": Case(
        sizes={"context_size": 24}, inputs=lambda m: {"input_features": m.normal(BATCH, 640, 64)}
    ),
    "higgs_audio_v2_tokenizer": Case(
        sizes={
            "semantic_model_config.conv_dim": [16] * 7,
            "acoustic_model_config.codebook_size": 64,
            "codebook_size": 64,
            "sample_rate": 16000,
            "semantic_model_config.num_conv_pos_embeddings": 16,
            "semantic_model_config.num_conv_pos_embedding_groups": 4,
        },
        inputs=lambda m: {"input_values": m.normal(BATCH, 1, 25600)},
    ),
    "inkling2_vision": Case(
        sizes={"projection_hidden_dim": 32},
        inputs=lambda m: {
            "pixel_values": m.normal(24, 8, 8, 3),
            "image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]]),
        },
    ),
    "janus_vqgan": Case(
        sizes={
            "base_channels": 32,
            "num_res_blocks": 1,
            "num_embeddings": 64,
            "latent_channels": 32,
            "num_patches": 8,
            "channel_multiplier": [1, 1],
        },
        inputs=_pictures(16),
    ),
    "lw_detr": Case(
        whole=True,
        given={
            "backbone_config": _vit(
                "lw_detr_vit", num_windows=4, window_block_indices=[0, 1], pretrain_image_size=32, out_indices=[2, 4]
            ),
            "projector_scale_factors": [1.0],
            "d_model": 32,
            "decoder_ffn_dim": 48,
            "decoder_layers": 2,
            "decoder_self_attention_heads": 4,
            "decoder_cross_attention_heads": 4,
            "num_queries": 40,
            "group_detr": 1,
        },
        inputs=_pictures(32),
    ),
    "rf_detr": Case(
        whole=True,
        given={
            "backbone_config": _vit("rf_detr_dinov2", num_windows=2, window_block_indexes=[0, 1], out_indices=[2, 4]),
            "d_model": 32,
            "decoder_ffn_dim": 48,
            "decoder_layers": 2,
            "decoder_self_attention_heads": 4,
            "decoder_cross_attention_heads": 4,
            "num_queries": 40,
            "group_detr": 1,
        },
        inputs=_pictures(32),
    ),
    "mask2former": Case(
        whole=True,
        given={
            "backbone_config": _SWIN,
            "feature_size": 32,
            "mask_feature_size": 32,
            "hidden_dim": 32,
            "encoder_feedforward_dim": 48,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "num_attention_heads": 4,
            "dim_feedforward": 48,
            "num_queries": 20,
        },
        inputs=_pictures(64),
    ),
    "oneformer": Case(
        whole=True,
        given={
            "backbone_config": _SWIN,
            "conv_dim": 32,
            "mask_dim": 32,
            "hidden_dim": 32,
            "encoder_feedforward_dim": 48,
            "num_queries": 20,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "num_attention_heads": 4,
            "dim_feedforward": 48,
            "text_encoder_width": 32,
            "text_encoder_num_layers": 2,
            "text_encoder_vocab_size": 99,
            "query_dec_layers": 2,
        },
        inputs=lambda m: {
            "pixel_values": m.normal(BATCH, 3, 64, 64),
            "task_inputs": m.normal(BATCH, 77),
        },
    ),
    "mm-grounding-dino": Case(
        given={"backbone_config": {**_SWIN, "out_indices": [2, 3, 4]}, "num_queries": 30, "num_feature_levels": 4},
        sizes={"disable_custom_kernels": True, "fusion_droppath": 0.0, "query_dim": 4},
        inputs=lambda m: {
            "pixel_values": m.normal(BATCH, 3, 64, 64),
            "input_ids": m.words(72),
            "attention_mask": m.text,
        },
    ),
    "mimi_decoder": Case(
        sizes={"num_filters": 4, "upsampling_ratios": [4, 2], "codebook_size": 64, "codebook_dim": 16},
        inputs=lambda m: {"latents": m.normal(BATCH, 32, 80)},
    ),
    "pocket_tts_audio_tokenizer_decoder": Case(
        sizes={"num_filters": 4, "upsampling_ratios": [4, 2]},
        inputs=lambda m: {"latents": m.normal(BATCH, 32, 80)},
    ),
    "molmo2_vision": Case(
        sizes={"image_size": [36, 36], "num_position_embeddings": 81, "num_key_value_heads": 4},
        inputs=lambda m: {"pixel_values": m.normal(BATCH, 81, 48)},
    ),
    "muse_glimmer_assistant": Case(
        inputs=lambda m: {
            "noise_embeds": m.normal(BATCH, 96, m.size("hidden_size")),
            "context_hidden_states": m.normal(BATCH, 64, m.size("hidden_size") * len(m.config.target_layer_ids)),
            "attention_mask": {"sliding_attention": _nearby(96, 160)},
        }
    ),
    **dict.fromkeys(
        ("muse_glimmer_vision", "muse_spark_vision"),
        Case(inputs=lambda m: {"pixel_values": m.normal(96, 96), "grid_thw": torch.tensor([[1, 8, 8], [1, 4, 8]])}),
    ),
    "muse_spark_audio": Case(
        sizes={"num_hidden_layers": 4, "hidden_sizes": (8, 16, 16, 32), "depths": (1, 1, 1, 1)},
        inputs=lambda m: {"input_values": m.normal(BATCH, 19200)},
    ),
    "paddleocr_vl_vision": Case(
        inputs=lambda m: {
            "pixel_values": m.normal(1, 96, 3, 4, 4),
            "grid_thw": torch.tensor([[1, 8, 8], [1, 4, 8]]),
        }
    ),
    "perceiver": Case(
        owner="PerceiverForMaskedLM",
        sizes={
            "num_latents": 64,
            "d_latents": 32,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
            "qk_channels": 32,
            "v_channels": 32,
        },
        inputs=lambda m: {"inputs": m.words(96), "attention_mask": torch.cat([m.text[:, :24], m.text], 1)},
    ),
    "phi4_multimodal_audio": Case(
        sizes={
            "num_blocks": 2,
            "nemo_conv_channels": 32,
            "ext_pw_out_channel": 32,
            "feature_layer": -1,
            "depthwise_separable_out_channel": 32,
            "chunk_size": 24,
            "left_chunk": 1,
        },
        inputs=lambda m: {
            "hidden_states": m.normal(BATCH, 600, 80),
            "mask": torch.ones(BATCH, 600, dtype=torch.bool),
        },
    ),
    "pp_doclayout_v4": Case(
        whole=True,
        given={"backbone_config": {**_HGNET, "out_indices": [2, 3, 4]}, **_DETR, "hidden_size": 32},
        inputs=_pictures(256),
    ),
    "pp_doclayout_v2": Case(
        whole=True,
        given={
            "backbone_config": {**_HGNET, "out_indices": [2, 3, 4]},
            **_DETR,
            "num_queries": 70,
            "class_thresholds": [0.0] * 25,
            "class_order": list(range(25)),
            "num_labels": 25,
            "reading_order_config": {
                "hidden_size": 32,
                "num_attention_heads": 4,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "coordinate_size": 6,
                "shape_size": 4,
                "vocab_size": 8,
                "num_classes": 20,
                "relation_bias_embed_dim": 4,
                "global_pointer_head_size": 8,
                "start_token_id": 0,
                "pad_token_id": 1,
                "end_token_id": 2,
                "pred_token_id": 4,
            },
        },
        inputs=_pictures(256),
    ),
    "rt_detr_v2": Case(whole=True, given={"backbone_config": _RESNET, **_DETR}, inputs=_pictures(256)),
    "pp_ocrv5_mobile_rec": Case(
        owner="PPOCRV5MobileRecForTextRecognition", inputs=lambda m: {"pixel_values": m.normal(BATCH, 3, 96, 640)}
    ),
    "pp_ocrv5_server_rec": Case(
        owner="PPOCRV5ServerRecForTextRecognition",
        sizes={"head_out_channels": 99},
        inputs=lambda m: {"pixel_values": m.normal(1, 3, 48, 320)},
    ),
    "pp_ocrv6_tiny_rec": Case(
        owner="PPOCRV6TinyRecForTextRecognition", inputs=lambda m: {"pixel_values": m.normal(BATCH, 3, 48, 320)}
    ),
    "pp_ocrv6_small_det": Case(
        given={"backbone_config": _LCNET},
        sizes={"layer_list_out_channels": [16, 16, 32, 64], "neck_out_channels": 16},
        inputs=_pictures(64),
    ),
    "pp_ocrv5_server_det": Case(
        whole=True,
        given={"backbone_config": {**_HGNET, "out_indices": [1, 2, 3, 4]}, **_TEXT_FINDER},
        inputs=_pictures(64),
    ),
    "pp_ocrv6_medium_det": Case(given={"backbone_config": _LCNET}, sizes=_TEXT_FINDER, inputs=_pictures(64)),
    "gemma3n": Case(
        given={
            "text_config": {
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 1,
                "intermediate_size": [48] * 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "activation_sparsity_pattern": [0.0] * 4,
            },
            "vision_config": {"model_args": {"channel_multiplier": 0.125}},
            "audio_config": {
                "conf_num_hidden_layers": 2,
                "conf_num_attention_heads": 4,
                "sscp_conv_channel_size": [8, 8],
            },
        },
        sizes={
            "text_config.num_hidden_layers": 4,
            "vision_config.hidden_size": 2048,
            "text_config.layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        inputs=lambda m: {
            "input_ids": m.words(m.tokens) * m.text,
            "attention_mask": m.text,
        },
    ),
    "esmfold2": Case(
        sizes={
            "pairwise_hidden_size": 32,
            "single_inputs_size": 99,
            "pair_transition_intermediate_size": 48,
            "folding_trunk_num_hidden_layers": 2,
            "num_loops": 1,
            **{
                f"{part}.{name}": 1
                for part in ("atom_encoder", "structure_head.diffusion_module.atom_encoder")
                for name in ("num_uid_rope_pairs", "num_spatial_rope_pairs_per_axis")
            },
            "chunk_size": None,
            "atom_encoder.output_dim": 32,
            "structure_head.diffusion_module.pair_intermediate_size": 48,
            "structure_head.diffusion_module.atom_encoder.output_dim": 32,
            "structure_head.diffusion_module.fourier_dim": 16,
            "esmc_config.num_key_value_heads": 4,
        },
        inputs=_residues,
    ),
    "fast_vlm": Case(
        given={
            "vision_config": {
                "model_type": "timm_wrapper",
                "architecture": "fastvit_mci0",
                "num_classes": 32,
                "model_args": {
                    "inference_mode": True,
                    "global_pool": "avg",
                    "in_chans": 3,
                    "layers": [1, 1],
                    "embed_dims": [16, 32],
                    "mlp_ratios": [2, 2],
                    "se_downsamples": [False, False],
                    "downsamples": [False, True],
                    "pos_embs": [None, None],
                    "token_mixers": ["repmixer", "attention"],
                    "lkc_use_act": True,
                },
            }
        },
        sizes={"vision_config.hidden_size": 64, "image_seq_length": 64},
        inputs=lambda m: {
            "pixel_values": m.normal(BATCH, 3, 64, 64),
            "input_ids": m.placed(m.words(80), 64),
            "attention_mask": torch.ones(BATCH, 80, dtype=torch.int64),
        },
    ),
    "perception_lm": Case(
        given={
            "vision_config": {
                "model_type": "timm_wrapper",
                "num_classes": 32,
                "architecture": "vit_pe_core_tiny_patch16_384",
                "model_args": {**_PERCEPTION, "global_pool": "", "img_size": [128, 128]},
            }
        },
        sizes={"projector_pooling_ratio": 2, "vision_config.hidden_size": 32},
        inputs=lambda m: {
            "pixel_values": m.normal(BATCH, 1, 3, 128, 128),
            "input_ids": m.placed(m.words(m.tokens), 16),
            "attention_mask": torch.ones_like(m.text),
        },
    ),
    "pe_video_encoder": Case(
        given={"vision_config": _PE_VISION},
        inputs=lambda m: {"pixel_values_videos": m.normal(BATCH, 72, 3, 32, 32)},
    ),
    "pe_video": Case(
        given={"video_config": {"vision_config": _PE_VISION}},
        inputs=lambda m: {
            "pixel_values_videos": m.normal(BATCH, 72, 3, 32, 32),
            "input_ids": m.words(m.tokens),
            "attention_mask": torch.ones_like(m.text),
        },
    ),
    "pe_audio_video_encoder": Case(
        given={"video_config": {"vision_config": _PE_VISION}},
        sizes=_pe_sound("audio_config"),
        inputs=lambda m: {
            "pixel_values_videos": m.normal(BATCH, 72, 3, 32, 32),
            "input_values": m.normal(BATCH, 1, 72 * 16),
        },
    ),
    "pe_audio_video": Case(
        given={"audio_video_config": {"video_config": {"vision_config": _PE_VISION}}},
        sizes=_pe_sound("audio_video_config.audio_config"),
        inputs=lambda m: {
            "pixel_values_videos": m.normal(BATCH, 72, 3, 32, 32),
            "input_values": m.normal(BATCH, 1, 72 * 16),
            "input_ids": m.words(m.tokens),
            "attention_mask": torch.ones_like(m.text),
        },
    ),
    "pi0": Case(
        inputs=lambda m: {
            "state": m.normal(BATCH, m.config.max_state_dim),
            "noise": m.normal(BATCH, m.config.chunk_size, m.config.max_action_dim),
            "timestep": torch.full((BATCH,), 0.4),
            "pixel_values": m.normal(BATCH, 1, 3, 16, 16),
            "pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool),
            "input_ids": _marked(m.words(m.tokens), m.config.vlm_config.image_token_id, 16),
            "attention_mask": torch.ones_like(m.text),
        },
    ),
    "zamba": Case(
        sizes={
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "use_mamba_kernels": False,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "num_key_value_heads": 4,
        }
    ),
    "omdet-turbo": Case(
        sizes={
            "image_size": 256,
            "backbone_config.img_size": 256,
            "encoder_in_channels": (32, 64, 128),
            "timm_kwargs": {
                "img_size": 256,
                "always_partition": True,
                "embed_dim": 16,
                "depths": (1, 1, 1, 1),
                "num_heads": (2, 2, 2, 2),
            },
            "decoder_hidden_dim": 32,
            "decoder_num_layers": 2,
            "decoder_num_heads": 4,
            "num_queries": 40,
            "text_projection_in_dim": 48,
            "text_projection_out_dim": 48,
            "class_embed_dim": 48,
            "text_config.hidden_size": 48,
            "text_config.projection_dim": 48,
            "task_encoder_hidden_dim": 48,
            "encoder_dim_feedforward": 48,
            "decoder_dim_feedforward": 48,
            "vision_features_channels": (32, 32, 32),
            "encoder_hidden_dim": 32,
        },
        inputs=lambda m: {
            "pixel_values": m.normal(BATCH, 3, 256, 256),
            "classes_input_ids": _uncached(m.model, m.words(8).repeat(2, 1)),
            "classes_attention_mask": torch.ones(4, 8, dtype=torch.int64),
            "tasks_input_ids": m.words(8),
            "tasks_attention_mask": torch.ones(BATCH, 8, dtype=torch.int64),
            "classes_structure": torch.tensor([2, 2]),
        },
    ),
    **dict.fromkeys(
        ("sam3", "sam3_lite_text"),
        Case(
            whole=True,
            given=_SAM3,
            inputs=lambda m: {
                "pixel_values": m.normal(BATCH, 3, 128, 128),
                "input_ids": m.words(m.tokens),
                "attention_mask": torch.ones_like(m.text),
            },
        ),
    ),
    "sam3_tracker": Case(
        whole=True,
        given={"vision_config": _SAM3_VISION, "prompt_encoder_config": _PROMPTS, "mask_decoder_config": _MASKS},
        inputs=_points(128),
    ),
    "sam3_tracker_video": Case(
        whole=True,
        given={
            "vision_config": _SAM3_VISION,
            "prompt_encoder_config": _PROMPTS,
            "mask_decoder_config": _MASKS,
            **_MEMORY,
        },
        inputs=_video,
    ),
    "speech-encoder-decoder": Case(inputs=lambda m: {"input_values": m.wave(), "decoder_input_ids": m.words(m.tokens)}),
    "sam3_video": Case(
        whole=True,
        given={
            "detector_config": {"model_type": "sam3", **_SAM3},
            "tracker_config": {
                "model_type": "sam3_tracker_video",
                "vision_config": _SAM3_VISION,
                "prompt_encoder_config": _PROMPTS,
                "mask_decoder_config": _MASKS,
                **_MEMORY,
            },
            "low_res_mask_size": 32,
        },
        inputs=_described_video,
    ),
    "sam2_video": Case(
        whole=True,
        given={
            "vision_config": _SAM2_VISION,
            "prompt_encoder_config": _PROMPTS,
            "mask_decoder_config": _MASKS,
            **_MEMORY,
        },
        inputs=_video,
    ),
    "qwen2_5_omni": Case(
        sizes={
            "thinker_config.vision_start_token_id": 61,
            **{f"token2wav_config.bigvgan_config.{name}": value for name, value in _VOCODER.items()},
            **{f"token2wav_config.dit_config.{name}": value for name, value in _DIT.items()},
        }
    ),
    "qwen2_5_omni_dit": Case(reference="sdpa", sizes=_DIT, inputs=_dit),
    "qwen2_5_omni_token2wav": Case(
        reference="sdpa",
        sizes={
            **{f"bigvgan_config.{name}": value for name, value in _VOCODER.items()},
            **{f"dit_config.{name}": value for name, value in _DIT.items()},
        },
        inputs=lambda m: {
            "code": m.whole(64, 1, 40),
            "conditioning": m.normal(1, 16),
            "reference_mel": m.normal(1, 80, 16),
            "num_steps": 2,
        },
    ),
    "qwen3_omni_moe": Case(
        sizes={
            "thinker_config.vision_start_token_id": 61,
            "talker_config.text_config.shared_expert_intermediate_size": 16,
            "talker_config.thinker_hidden_size": 32,
            "talker_config.spatial_merge_size": 2,
            "code2wav_config.decoder_dim": 64,
        },
    ),
    "sam": Case(
        whole=True,
        given={
            "vision_config": {
                "hidden_size": 32,
                "output_channels": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 64,
                "patch_size": 8,
                "window_size": 3,
                "global_attn_indexes": [1],
                "num_pos_feats": 16,
                "mlp_dim": 48,
            },
            "prompt_encoder_config": {**_PROMPTS, "image_size": 64, "patch_size": 8},
            "mask_decoder_config": _MASKS,
        },
        inputs=_points(64),
    ),
    "sam_hq": Case(
        whole=True,
        given={
            "vision_config": {
                "hidden_size": 32,
                "output_channels": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 64,
                "patch_size": 8,
                "window_size": 3,
                "global_attn_indexes": [1],
                "num_pos_feats": 16,
                "mlp_dim": 48,
            },
            "prompt_encoder_config": {**_PROMPTS, "image_size": 64, "patch_size": 8},
            "mask_decoder_config": {**_MASKS, "vit_dim": 32},
        },
        inputs=_points(64),
    ),
    "sam2_hiera_det_model": Case(whole=True, given=_HIERA, inputs=_pictures(128)),
    "sam2_vision_model": Case(whole=True, given=_SAM2_VISION, inputs=_pictures(128)),
    "sam2": Case(
        whole=True,
        given={"vision_config": _SAM2_VISION, "prompt_encoder_config": _PROMPTS, "mask_decoder_config": _MASKS},
        inputs=_points(128),
    ),
    "t5gemma2_decoder": Case(
        inputs=lambda m: {
            "input_ids": m.words(m.tokens),
            "attention_mask": m.text,
            "encoder_hidden_states": m.normal(BATCH, 72, 32),
        }
    ),
    "table-transformer": Case(
        owner="TableTransformerModel",
        given={"backbone_config": {**_RESNET, "model_type": "resnet", "out_indices": [4]}, "num_queries": 70},
        sizes={"use_timm_backbone": False},
        inputs=lambda m: {"pixel_values": m.normal(BATCH, 3, 256, 256)},
    ),
    "seggpt": Case(
        sizes={
            "image_size": (64, 32),
            "pretrain_image_size": 32,
            "merge_index": 0,
            "intermediate_hidden_state_indices": (0, 1),
            "num_hidden_layers": 2,
            "drop_path_rate": 0.0,
        },
        inputs=lambda m: {
            name: m.normal(BATCH, 3, 32, 32) for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")
        },
    ),
    "tvp": Case(
        given={"backbone_config": {**_RESNET, "model_type": "resnet", "out_indices": [4]}},
        sizes={"max_img_size": 256, "visual_prompt_size": 8, "num_frames": 4, "pad_token_id": 0},
        inputs=lambda m: {
            "input_ids": m.words(20)[:1],
            "attention_mask": torch.ones(1, 20, dtype=torch.int64),
            "pixel_values": m.normal(1, 4, 3, 256, 256),
        },
    ),
    "vitpose": Case(
        given={
            "backbone_config": {
                "out_indices": [2],
                "num_hidden_layers": 2,
                "image_size": (64, 64),
                "patch_size": (8, 8),
                "part_features": 8,
                "num_experts": 1,
                "hidden_size": 32,
                "num_attention_heads": 4,
                "model_type": "vitpose_backbone",
            }
        },
        whole=True,
        inputs=_pictures(64),
    ),
    "xcodec": Case(
        sizes={"semantic_model_config.conv_dim": [16] * 7, "codebook_size": 64, "codebook_dim": 64},
        inputs=lambda m: {"input_values": m.normal(BATCH, 1, 32000)},
    ),
    "xcodec2": Case(
        sizes={"quantization_dim": 64, "num_key_value_heads": 4},
        inputs=lambda m: {
            "input_values": m.normal(BATCH, 1, 25600),
            "input_features": m.normal(BATCH, 80, 16),
        },
    ),
    "xlstm": Case(sizes={"embedding_dim": 32, "num_blocks": 2}),
    "swin2sr": Case(
        sizes={
            "embed_dim": 12,
            "depths": [2, 2],
            "num_heads": (2, 2),
            "num_layers": 2,
            "image_size": 16,
            "patch_size": 1,
            "window_size": 8,
        },
        inputs=_pictures(16),
    ),
    "uvdoc": Case(
        given={"backbone_config": {"model_type": "uvdoc_backbone", "out_indices": [1, 2, 3, 4, 5, 6]}},
        inputs=_pictures(128),
    ),
    "vibevoice_acoustic_tokenizer": Case(
        sizes=_SOUND_CODEC, inputs=lambda m: {"input_values": m.normal(BATCH, 1, 9600)}
    ),
    "vibevoice_acoustic_tokenizer_encoder": Case(
        sizes=_SOUND_CODEC, inputs=lambda m: {"hidden_states": m.normal(BATCH, 1, 9600)}
    ),
    "vibevoice_acoustic_tokenizer_decoder": Case(
        sizes=_SOUND_CODEC, inputs=lambda m: {"hidden_states": m.normal(BATCH, 32, 4)}
    ),
    "vibevoice": Case(
        sizes={
            **{f"audio_config.{name}": value for name, value in _SOUND_CODEC.items()},
            **{f"semantic_model_config.{name}": value for name, value in _SOUND_CODEC.items()},
        }
    ),
    "vibevoice_asr": Case(
        sizes={
            **{f"acoustic_tokenizer_encoder_config.{name}": value for name, value in _SOUND_CODEC.items()},
            **{f"semantic_tokenizer_encoder_config.{name}": value for name, value in _SOUND_CODEC.items()},
        },
    ),
    "videoprism_vision_model": Case(
        sizes={
            "image_size": 32,
            "tubelet_size": (1, 4, 4),
            "num_frames": 4,
            "num_spatial_layers": 2,
            "num_temporal_layers": 2,
        },
        inputs=lambda m: {"pixel_values_videos": m.normal(BATCH, 4, 3, 32, 32)},
    ),
    "videoprism": Case(
        sizes={
            f"vision_config.{name}": value
            for name, value in {
                "image_size": 32,
                "tubelet_size": (1, 4, 4),
                "num_frames": 4,
                "num_spatial_layers": 2,
                "num_temporal_layers": 2,
            }.items()
        },
        inputs=lambda m: {
            "pixel_values_videos": m.normal(BATCH, 4, 3, 32, 32),
            "input_ids": m.words(m.tokens),
            "attention_mask": m.text,
        },
    ),
    "vitmatte": Case(
        whole=True,
        given={
            "backbone_config": _vit(
                "vitdet",
                num_channels=4,
                out_indices=[4],
                image_size=128,
                pretrain_image_size=128,
                patch_size=16,
                window_size=3,
                window_block_indices=[0, 2],
            ),
            "hidden_size": 32,
            "convstream_hidden_sizes": [8, 8, 8],
            "fusion_hidden_sizes": [16, 8, 8, 8],
        },
        inputs=lambda m: {"pixel_values": m.normal(BATCH, 4, 128, 128)},
    ),
    "vjepa2": Case(
        sizes={
            "crop_size": 32,
            "frames_per_clip": 4,
            "pred_hidden_size": 32,
            "pred_num_attention_heads": 4,
            "pred_num_hidden_layers": 2,
            "num_pooler_layers": 1,
        },
        inputs=lambda m: {"pixel_values_videos": m.normal(BATCH, 4, 3, 32, 32)},
    ),
    "qwen2_5_omni_bigvgan": Case(
        sizes={"upsample_initial_channel": 64, "mel_dim": 16},
        inputs=lambda m: {"mel_spectrogram": m.normal(BATCH, 16, 20)},
    ),
    "qwen2_5_omni_thinker": Case(sizes={"vision_start_token_id": 61}),
    "qwen3_omni_moe_thinker": Case(sizes={"vision_start_token_id": 61}),
    "qwen3_omni_moe_talker_text": Case(
        sizes={"shared_expert_intermediate_size": 16},
        inputs=lambda m: {"inputs_embeds": m.normal(BATCH, m.tokens, 32)},
    ),
    "qwen3_omni_moe_talker_code_predictor": Case(
        inputs=lambda m: {"inputs_embeds": m.normal(BATCH, 32, 32), "generation_steps": 0}
    ),
    "instructblipvideo": Case(
        sizes={"num_query_tokens": 8, "video_token_index": 70},
        inputs=lambda m: {
            "pixel_values": m.normal(BATCH, 4, 3, 16, 16),
            "qformer_input_ids": m.words(20),
            "qformer_attention_mask": torch.ones(BATCH, 20, dtype=torch.int64),
            "input_ids": m.placed(m.words(m.tokens), 32),
            "attention_mask": torch.ones_like(m.text),
        },
    ),
    "timm_wrapper": Case(
        given={
            "architecture": "vit_tiny_patch16_224",
            "model_args": {"img_size": 128, "depth": 2, "embed_dim": 32, "num_heads": 4},
        },
        inputs=_pictures(128),
    ),
    "timm_backbone": Case(given={"backbone": "resnet18"}, inputs=_pictures(64)),
    "gemma3n_vision": Case(
        given={"model_args": {"channel_multiplier": 0.125}},
        inputs=_pictures(256),
    ),
}
