"""What the models of the sweep are called with: texts, images, patches, sounds, series, by the names of `forward`."""

from __future__ import annotations

import inspect
import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sweep_cases import CASES
from sweep_models import first_line, seek

BATCH, TOKENS, MISSING, SHORT = 2, 72, 15, 12
LONGEST = 6.0
HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim")
IMAGES = ("pixel_values", "image", "pixel_values_images", "images")
VIDEOS = ("pixel_values_videos",)
FEATURES = ("input_features", "audio_mel", "mel_spectrogram", "spectrogram")
SOUNDS = ("input_values",)
GRIDS = ("grid_thw", "image_grid_thw")
# Ways to lay out an image, and a sound; the first that a family runs with is taken.
PICTURES = ("image", "128", "224", "384", "packed", "packed and pieces", "pieces", "frames", "pair", "deep")
AUDIO = ("channels first", "features last", "with channel", "long", "long and last", "square")
_NAMES = frozenset((*IMAGES, *VIDEOS, *FEATURES, *SOUNDS, *GRIDS))


class Maker:
    """The inputs of a model, drawn with one seed; each method returns one of them, by its name in `forward`."""

    def __init__(self, model: nn.Module, padded: bool, way: tuple[str, ...]) -> None:
        self.model, self.config, self.way = model, model.config, way
        self.takes = inspect.signature(model.forward).parameters
        self.draw = torch.Generator().manual_seed(5)
        self.tokens = SHORT if "short" in way else TOKENS
        self.text = torch.ones(BATCH, self.tokens, dtype=torch.int64)
        if padded:
            self.text[1, : min(MISSING, self.tokens // 3)] = 0

    def size(self, *names: str, default: int = 32) -> int:
        """Return the first of some sizes that the configuration has."""
        for name in names:
            value = seek(self.config, name, None)
            if isinstance(value, list | tuple):
                value = value[0]
            if isinstance(value, int) and value:
                return value
        return default

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw)

    def whole(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.draw)

    def words(self, tokens: int) -> Tensor:
        return torch.randint(10, 60, (BATCH, tokens), generator=self.draw)

    def grid(self) -> Tensor:
        return torch.tensor([[1, 8, 8], [1, 8 if "input_ids" in self.takes else 4, 8]])

    def picture(self) -> Tensor:
        channels = self.size("num_channels", "in_channels", "in_chans", default=3)
        size = seek(self.config, "image_size", 64)
        sized = next((int(word) for word in self.way if word.isdigit()), None)
        height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
        if sized is not None:
            height = width = sized
        patch = self.size("patch_size", default=14)
        temporal = self.size("temporal_patch_size", default=1)
        rows = int(self.grid().prod(-1).sum())
        if "packed" in self.way:
            return self.normal(rows, channels * temporal * patch * patch)
        if "packed and pieces" in self.way:
            return self.normal(rows, channels, patch, patch)
        if "pieces" in self.way:
            return self.normal(BATCH, 64, channels * temporal * patch * patch)
        if "frames" in self.way:
            frames = self.size("num_frames", "frames_per_clip", default=4)
            return self.normal(BATCH, frames, channels, height, width)
        if "deep" in self.way:
            return self.normal(BATCH, channels, self.size("num_frames", default=4), height, width)
        if "pair" in self.way:
            return self.normal(BATCH, 2, channels, height, width)
        return self.normal(BATCH, channels, height, width)

    def sound(self) -> Tensor:
        length = 2 * self.size("max_source_positions", default=64)
        if "long" in self.way or "long and last" in self.way:
            length = self.size("max_length", "max_position_embeddings", default=1024)
        bins = self.size("num_mel_bins", "feature_size", "input_feat_size", "n_mels", "input_dim", default=80)
        if "with channel" in self.way:
            return self.normal(BATCH, 1, length, bins)
        if "square" in self.way:
            return self.normal(BATCH, 1, self.size("spec_size", default=256), self.size("spec_size", default=256))
        drawn = self.normal(BATCH, bins, length)
        return drawn.mT if "features last" in self.way or "long and last" in self.way else drawn

    def wave(self) -> Tensor:
        length = 3840
        return self.normal(BATCH, 1, length) if "with channel" in self.way else self.normal(BATCH, length)

    def placed(self, words: Tensor, count: int) -> Tensor:
        """Put as many tokens of an image as wanted into each text."""
        words[:, 2 : 2 + count] = self.size("image_token_id", "image_token_index", "video_token_index", default=70)
        return words

    def one(self, name: str) -> Any:
        """Return an input by its name; raise a LookupError where the name says too little."""
        packed = any(grid in self.takes for grid in GRIDS)
        if name in IMAGES or (name == "hidden_states" and packed):
            return self.picture()
        if name in VIDEOS:
            return self.picture()
        if name in FEATURES:
            return self.sound()
        if name in SOUNDS:
            return self.wave()
        if name in GRIDS:
            return self.grid()
        if name in BY_NAME:
            return BY_NAME[name](self)
        raise LookupError(f"no input is known for {name}")


def _states(maker: Maker) -> Tensor:
    return maker.normal(BATCH, maker.tokens, maker.size(*HIDDEN))


def _frames(maker: Maker) -> Tensor:
    length = maker.sound().shape[-2 if "last" in " ".join(maker.way) else -1]
    return torch.ones(BATCH, length, dtype=torch.int64)


BY_NAME: dict[str, Callable[[Maker], Any]] = {
    **dict.fromkeys(("hidden_states", "inputs_embeds", "context", "latents", "noise_embeds"), _states),
    **dict.fromkeys(("context_hidden_states", "patch_embeds", "embeddings", "last_hidden_state"), _states),
    "query_embeds": lambda m: m.normal(BATCH, 24, m.size(*HIDDEN)),
    **dict.fromkeys(("input_features_mask", "audio_mel_mask", "mask"), _frames),
    **dict.fromkeys(("attention_mask", "encoder_attention_mask"), lambda m: m.text),
    "qformer_input_ids": lambda m: m.words(m.tokens),
    "decoder_input_ids": lambda m: m.words(7),
    "input_ids": lambda m: m.words(m.tokens) * m.text,
    "token_type_ids": lambda m: torch.zeros_like(m.text),
    "image_sizes": lambda m: torch.tensor([list(m.picture().shape[-2:])] * BATCH),
    "past_values": lambda m: m.normal(
        BATCH, m.size("context_length", default=64), m.size("num_input_channels", default=1)
    ),
    "states": lambda m: m.normal(BATCH, m.tokens, m.size("state_dim")),
    "actions": lambda m: m.normal(BATCH, m.tokens, m.size("act_dim")),
    "rewards": lambda m: m.normal(BATCH, m.tokens, 1),
    "returns_to_go": lambda m: m.normal(BATCH, m.tokens, 1),
    "timesteps": lambda m: torch.arange(m.tokens).expand(BATCH, -1),
    "encoder_hidden_states": _states,
}


def boxes(maker: Maker) -> Tensor:
    corners = maker.whole(16, BATCH, maker.tokens, 2)
    return torch.cat([corners, corners + 4], -1)


def inputs_for(model: nn.Module, padded: bool, way: tuple[str, ...] = ()) -> tuple[dict[str, Any], Tensor | None]:
    """Return what a model is called with, and where its outputs are text; `way` says what, and how it is laid out."""
    maker = Maker(model, padded, way)
    kind = model.config.model_type
    if "own" in way:
        given = OWN[kind](maker)
    else:
        takes = maker.takes
        needed = [
            name
            for name, p in takes.items()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        main = model.main_input_name
        mains = [main] if isinstance(main, str) else list(main)
        first = [name for name in ("input_ids", *mains, *IMAGES, *FEATURES, *SOUNDS) if name in takes][:1]
        wanted = [*first, *needed, *(word for word in way if word in takes)]
        given = {}
        if "input_ids" in wanted:
            given["input_ids"] = maker.one("input_ids")
            put_places(maker, given["input_ids"])
            if "attention_mask" in takes:
                given["attention_mask"] = maker.text
        for name in dict.fromkeys(wanted):
            if name not in given:
                given[name] = maker.one(name)
        if "bbox" in takes:
            given["bbox"] = boxes(maker)
        if "decoder_input_ids" in takes:
            given["decoder_input_ids"] = maker.one("decoder_input_ids")
        if "mm_token_type_ids" in takes and any("=" in word for word in way):
            marks = maker.size("image_token_id", "image_token_index", default=-1)
            given["mm_token_type_ids"] = (given["input_ids"] == marks).long()
        if "no cache" in way and "use_cache" in takes:
            given["use_cache"] = False
    return given, maker.text.bool() if "input_ids" in given else None


def _series(m: Maker) -> dict[str, Any]:
    past, ahead = m.config.context_length + max(m.config.lags_sequence), m.config.prediction_length
    return {
        "past_values": m.normal(BATCH, past),
        "past_time_features": m.normal(BATCH, past, 1),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": m.normal(BATCH, ahead),
        "future_time_features": m.normal(BATCH, ahead, 1),
    }


def _codes(m: Maker) -> dict[str, Any]:
    """A text, and a decoder whose codes of one time are a batch of their own."""
    books = m.size("num_codebooks", default=4)
    if "decoder_input_ids" not in m.takes:
        return {"input_ids": m.whole(60, BATCH * books, m.tokens), "attention_mask": m.text}
    return {
        "input_ids": m.words(m.tokens),
        "attention_mask": m.text,
        "decoder_input_ids": m.whole(60, BATCH * books, m.tokens),
    }


def _timesfm(m: Maker) -> dict[str, Any]:
    length = 64 * m.config.patch_length
    given: dict[str, Any] = {"past_values": m.normal(BATCH, length), "past_values_padding": torch.zeros(BATCH, length)}
    if "freq" in m.takes:
        given["freq"] = torch.zeros(BATCH, 1, dtype=torch.int64)
    return given


def _flattened(m: Maker) -> dict[str, Any]:
    patch = m.size("patch_size", default=16)
    places = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"), -1).reshape(1, 64, 2) + 1.0
    rows = torch.cat([places.expand(BATCH, -1, -1), m.normal(BATCH, 64, 3 * patch * patch)], -1)
    given = {"flattened_patches": rows, "attention_mask": torch.ones(BATCH, 64)}
    return given | ({"decoder_input_ids": m.words(m.tokens)} if "decoder_input_ids" in m.takes else {})


def _shaped(m: Maker) -> dict[str, Any]:
    patch = m.size("patch_size", default=16)
    given = {
        "pixel_values": m.normal(BATCH, 64, 3 * patch * patch),
        "pixel_attention_mask": torch.ones(BATCH, 64, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[8, 8]] * BATCH),
    }
    return given | ({"input_ids": m.words(m.tokens)} if "input_ids" in m.takes else {})


def _sized(m: Maker) -> dict[str, Any]:
    patch = m.size("patch_size", default=14)
    sizes = torch.tensor([[8, 8]] * BATCH, dtype=torch.int32)
    return {"pixel_values": m.normal(1, 3, patch, BATCH * 64 * patch), "target_sizes": sizes}


def _places(m: Maker) -> dict[str, Any]:
    grid = torch.stack(torch.meshgrid(torch.arange(9), torch.arange(9), indexing="xy"), -1).reshape(1, 81, 2)
    patch = m.size("patch_size", default=16)
    return {"pixel_values": m.normal(BATCH, 81, 3 * patch * patch), "pixel_position_ids": grid.expand(BATCH, -1, -1)}


def _lengths(m: Maker) -> dict[str, Any]:
    bins = m.size("num_mel_bins", default=128)
    lengths = torch.tensor([200, 168])
    given: dict[str, Any] = {"input_features": m.normal(bins, 368), "feature_lens": lengths}
    if "aftercnn_lens" in m.takes:
        given["aftercnn_lens"] = (lengths - 1) // 2 + 1
    return given


def _blt_encoder(m: Maker) -> dict[str, Any]:
    patches = (torch.arange(m.tokens) // 4).expand(BATCH, -1)
    return {"inputs_embeds": _states(m), "num_patches": m.tokens // 4, "patch_ids": patches}


def _blt_decoder(m: Maker) -> dict[str, Any]:
    return {"inputs_embeds": _states(m), "patch_embeds": m.normal(BATCH, 18, m.config.hidden_size_global)}


def _lxmert(m: Maker) -> dict[str, Any]:
    seen = {"visual_feats": m.normal(BATCH, 36, m.config.visual_feat_dim), "visual_pos": m.normal(BATCH, 36, 4)}
    return {"input_ids": m.words(m.tokens) * m.text, "attention_mask": m.text, **seen}


def _aspect(m: Maker) -> dict[str, Any]:
    size, tiles = m.config.image_size, m.config.max_num_tiles
    return {
        "pixel_values": m.normal(BATCH, 1, tiles, 3, size, size),
        "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(BATCH, 1, tiles, dtype=torch.int64),
    }


def _masks(m: Maker, bins: int, length: int) -> dict[str, Any]:
    return {
        "input_features": m.normal(BATCH, length, bins),
        "input_features_mask": torch.ones(BATCH, length, dtype=torch.int64),
    }


def _codec(m: Maker) -> dict[str, Any]:
    return {
        "input_values": m.normal(BATCH, 1, 12800),
        "input_features": m.normal(BATCH, 40, m.size("feature_projection_input_dim")),
    }


def _queries(m: Maker) -> dict[str, Any]:
    """The inputs of the parts of SAM 3 that take features."""
    width = m.size(*HIDDEN)
    seen, words = (BATCH, 64, width), (BATCH, m.tokens, width)
    if "decoder_queries" in m.takes:
        sizes = (16, 8, 8)
        return {
            "decoder_queries": m.normal(BATCH, 20, width),
            "backbone_features": [m.normal(BATCH, width, size, size) for size in sizes],
            "encoder_hidden_states": m.normal(*seen),
            "prompt_features": m.normal(*words),
            "prompt_mask": m.text.bool(),
        }
    given = {"text_features": m.normal(*words), "text_mask": m.text.bool()}
    if "vision_pos_encoding" in m.takes:
        shapes = torch.tensor([[8, 8]])
        places = {"vision_pos_encoding": m.normal(*seen), "spatial_shapes": shapes}
        return {"vision_features": m.normal(*seen), **places, **given}
    pictures = [m.normal(BATCH, width, 8, 8)]
    return {"vision_features": pictures, "vision_pos_embeds": [m.normal(BATCH, width, 8, 8)], **given}


# Inputs of the types for which names say too little.
OWN: dict[str, Callable[[Maker], dict[str, Any]]] = {
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _series),
    **dict.fromkeys(("musicgen", "musicgen_decoder", "musicgen_melody", "musicgen_melody_decoder"), _codes),
    **dict.fromkeys(("timesfm", "timesfm2_5"), _timesfm),
    **dict.fromkeys(("pix2struct", "pix2struct_vision_model"), _flattened),
    **dict.fromkeys(("siglip2", "siglip2_vision_model"), _shaped),
    **dict.fromkeys(("minicpm_ocr_vision", "minicpmv4_6_vision", "minicpmv4_7_vision"), _sized),
    **dict.fromkeys(("qwen2_5_omni_audio_encoder", "qwen3_omni_moe_audio_encoder"), _lengths),
    **dict.fromkeys(("sam3_mask_decoder", "sam3_lite_text_mask_decoder"), _queries),
    **dict.fromkeys(("sam3_detr_encoder", "sam3_lite_text_detr_encoder"), _queries),
    **dict.fromkeys(("sam3_detr_decoder", "sam3_lite_text_detr_decoder"), _queries),
    "neucodec": _codec,
    "audio-spectrogram-transformer": lambda m: {
        "input_values": m.normal(BATCH, m.config.max_length, m.config.num_mel_bins)
    },
    "clvp": lambda m: {
        "input_ids": m.words(m.tokens),
        "input_features": m.normal(BATCH, m.config.decoder_config.feature_size, 80),
    },
    **dict.fromkeys(
        ("granite_speech_encoder", "granite_speech_plus_encoder"),
        lambda m: {"hidden_states": m.normal(BATCH, 80, m.config.input_dim)},
    ),
    "idefics": lambda m: {
        "input_ids": m.words(m.tokens),
        "attention_mask": m.text,
        "pixel_values": m.normal(BATCH, 1, 3, m.config.vision_config.image_size, m.config.vision_config.image_size),
        "image_attention_mask": torch.ones(BATCH, m.tokens, 1, dtype=torch.int64),
    },
    "inkling_vision": lambda m: {
        "pixel_values": m.normal(
            8, m.size("temporal_patch_size", default=2), m.size("patch_size"), m.size("patch_size"), 3
        )
    },
    "instructblip": lambda m: {
        "pixel_values": m.normal(BATCH, 3, m.size("image_size"), m.size("image_size")),
        "qformer_input_ids": m.words(20),
        "input_ids": m.placed(m.words(m.tokens + 200), m.size("num_query_tokens")),
    },
    "kosmos-2": lambda m: {
        "pixel_values": m.picture(),
        "input_ids": m.words(m.tokens),
        "image_embeds_position_mask": (torch.arange(m.tokens) < m.config.latent_query_num).long().expand(BATCH, -1),
    },
    "kosmos_2_5_vision_model": lambda m: {"hidden_states": _states(m), "attention_mask": torch.ones(BATCH, m.tokens)},
    "molmo2_adapter": lambda m: {
        "image_features": m.normal(2, 64, 2 * m.size("hidden_size")),
        "pooled_patches_idx": m.whole(128, 32, 4),
    },
    "moshi_depth": lambda m: {
        "input_ids": m.whole(60, BATCH * 4, m.config.num_codebooks),
        "last_hidden_state": m.normal(BATCH * 4, 1, m.config.input_size),
    },
    "fun_asr_nano_encoder": lambda m: _masks(m, m.size("input_size", "hidden_size"), 80),
    "gemma3n_audio": lambda m: {
        "audio_mel": m.normal(BATCH, 320, m.config.input_feat_size),
        "audio_mel_mask": torch.zeros(BATCH, 320, dtype=torch.bool),
    },
    "qwen3_asr_encoder": lambda m: {
        "input_features": m.normal(BATCH, m.config.num_mel_bins, 400),
        "input_features_mask": torch.ones(BATCH, 400, dtype=torch.int64),
    },
    "unlimited_ocr_vision_encoder": lambda m: {"patch_embeds": m.normal(BATCH, m.size("hidden_size"), 8, 8)},
    "wav2vec2-bert": lambda m: {
        "input_features": m.normal(BATCH, m.tokens, m.config.feature_projection_input_dim),
        "attention_mask": m.text,
    },
    **dict.fromkeys(
        (
            "nemotron3_5_transcribe_audio",
            "nemotron3_5_transcribe_asr_audio",
            "nemotron3_diarization",
            "nemotron3_diarization_audio",
        ),
        lambda m: {
            "input_features": m.normal(BATCH, 640, m.size("num_mel_bins", "input_dim", "feature_size", default=80)),
        },
    ),
    "rag": lambda m: {
        "input_ids": m.words(m.tokens),
        "context_input_ids": m.words(m.tokens),
        "context_attention_mask": m.text,
        "doc_scores": m.normal(BATCH, 1),
        "decoder_input_ids": m.words(20),
        "n_docs": 1,
    },
    **dict.fromkeys(
        ("vision-text-dual-encoder", "siglip", "xclip", "clap"),
        lambda m: {
            "input_ids": m.words(min(m.tokens, m.size("max_position_embeddings"))),
            **({"input_features": m.normal(BATCH, 1, 1024, 64)} if "input_features" in m.takes else {}),
            **({"pixel_values": m.picture()} if "pixel_values" in m.takes and m.config.model_type != "xclip" else {}),
            **(
                {
                    "pixel_values": m.normal(
                        BATCH,
                        m.size("num_frames"),
                        3,
                        m.size("image_size", default=64),
                        m.size("image_size", default=64),
                    )
                }
                if m.config.model_type == "xclip"
                else {}
            ),
        },
    ),
    "clap_audio_model": lambda m: {"input_features": m.normal(BATCH, 1, 1024, 64)},
    "xclip_vision_model": lambda m: {
        "pixel_values": m.normal(BATCH * m.config.num_frames, 3, m.config.image_size, m.config.image_size)
    },
    "gemma4_vision": _places,
    "vits": lambda m: {
        "input_ids": m.whole(38, BATCH, m.tokens) * m.text,
        "attention_mask": m.text,
        "speaking_rate": 1e9,  # one step of sound for each token, however long the random weights find it
    },
    "florence_vision": lambda m: {"hidden_states": m.normal(BATCH, 3, 64, 64)},
    "emu3_vqgan": lambda m: {
        "pixel_values": m.normal(BATCH, 4, 3, 32, 32),
        "image_sizes": torch.tensor([[32, 32]] * BATCH),
    },
    **dict.fromkeys(
        ("voxtral_realtime_text", "voxtral_realtime"),
        lambda m: {
            "input_ids": m.words(m.tokens),
            "attention_mask": m.text,
            **(
                {"t_cond": m.normal(BATCH, 1, 32)}
                if "text" in m.config.model_type
                else {"input_features": m.normal(BATCH, m.size("num_mel_bins"), 8 * m.tokens)}
            ),
        },
    ),
    "blt_local_encoder": _blt_encoder,
    "blt_local_decoder": _blt_decoder,
    "lxmert": _lxmert,
    "mllama_vision_model": _aspect,
    "blip_2_qformer": lambda m: {
        "query_embeds": m.normal(BATCH, 24, m.size(*HIDDEN)),
        "encoder_hidden_states": m.normal(BATCH, 40, m.config.encoder_hidden_size),
    },
    "glm_image_vqmodel": lambda m: {"hidden_states": m.normal(BATCH, m.size("latent_channels"), 8, 8)},
    "kyutai_speech_to_text": lambda m: {
        "input_ids": m.whole(60, BATCH, m.tokens, m.size("num_codebooks", default=32) + 1),
        "attention_mask": m.text,
    },
    "csm": lambda m: {"input_ids": m.whole(60, BATCH, m.tokens, m.config.num_codebooks), "attention_mask": m.text},
    "dia": lambda m: {
        "input_ids": m.words(m.tokens),
        "attention_mask": m.text,
        "decoder_input_ids": m.whole(60, BATCH, m.tokens, 9),
    },
    "dia_decoder": lambda m: {
        "input_ids": m.whole(60, BATCH, m.tokens, 9),
        "encoder_hidden_states": _states(m),
    },
    "deepseek_ocr2_encoder": lambda m: {"inputs_embeds": _states(m), "num_patches": 40},
    "jev": lambda m: {
        "input_ids": m.words(m.tokens)[:1],
        "marks": torch.tensor([[20, 40, 60]]),
        "num_options": torch.tensor([[2, 2, 2]]),
        "question_type_ids": torch.tensor([[0, 1, 2]]),
    },
    "layoutlmv3": lambda m: {
        "input_ids": m.words(m.tokens) * m.text,
        "attention_mask": m.text,
        "bbox": boxes(m),
        "pixel_values": m.normal(BATCH, 3, m.config.input_size, m.config.input_size),
    },
    "patchtst": lambda m: {"past_values": m.normal(BATCH, m.config.context_length, m.config.num_input_channels)},
    "patchtsmixer": lambda m: {"past_values": m.normal(BATCH, m.config.context_length, m.config.num_input_channels)},
    "video_llama_3_vision": lambda m: {
        "pixel_values": m.normal(96, 3 * m.config.patch_size**2),
        "grid_thw": m.grid(),
        "merge_sizes": torch.ones(2, dtype=torch.int64),
    },
    "inkling_audio": lambda m: {
        "audio_input_ids": m.whole(16, BATCH * 72, m.size("n_mel_bins", "num_mel_bins", default=80))
    },
}
OWN |= {kind: case.inputs for kind, case in CASES.items() if case.inputs is not None}


def fresh(given: dict[str, Any]) -> dict[str, Any]:
    """Return inputs of one call: what a call changes is made anew."""
    return {
        name: value() if callable(value) else list(value) if isinstance(value, list) else value
        for name, value in given.items()
    }


def ways(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Yield what to call a model with, until it runs."""
    if model.config.model_type in OWN:
        yield ("own",)
        return
    takes = inspect.signature(model.forward).parameters
    pictures = [name for name in (*IMAGES, *VIDEOS) if name in takes]
    packed = any(name in takes for name in GRIDS)
    sounds = [name for name in (*FEATURES, *SOUNDS) if name in takes]
    grids = [name for name in GRIDS if name in takes]
    if "input_ids" in takes and pictures and any(name.startswith("image_token") for name in vars(model.config)):
        # A text with the tokens of an image; what cannot take it is called with a text alone.
        yield (pictures[0], *grids[:1], "packed" if grids else "image")
    if "input_ids" in takes or not (pictures or sounds or packed):
        yield ()
        yield ("no cache",)
        if not any(p.default is p.empty and name in (*pictures, *sounds) for name, p in takes.items()):
            yield ("short",)
    shapes = PICTURES if pictures or packed else ("",)
    heard = AUDIO if sounds else ("",)
    if packed:
        shapes = ("packed", "packed and pieces", "pieces", "image")
    more = [name for name in ("input_features_mask", "pixel_attention_mask", "is_longer") if name in takes]
    for picture, sound in itertools.product(shapes, heard):
        yield (*pictures[:1], *sounds[:1], picture, sound)
        if more:
            yield (*pictures[:1], *sounds[:1], picture, sound, *more)


PLACES = re.compile(r"(image|video|audio|multimodal|placeholder)[^:]*match.*tokens: (\d+),? .*features:? (\d+)", re.I)


def put_places(maker: Maker, words: Tensor) -> None:
    """Put the tokens that stand for an image or a sound at the ends of texts, as many as the `way` says."""
    for part in maker.way:
        kind, mark, count = part.partition("=")
        if mark:
            names = (f"{kind}_token_id", f"{kind}_token_index", f"{kind}_placeholder_token_id")
            token = maker.size(*names, default=-1)
            each = int(count) // BATCH
            words[:, words.shape[1] - 2 - each : words.shape[1] - 2] = token


def first_that_runs(
    model: nn.Module, run: Callable[[dict[str, Any]], Any], failures: list[str]
) -> tuple[tuple[str, ...], Any]:
    """Return the first way to call a model that runs, and what `run` returned; raise a LookupError where none does.

    An error that says how many places of text an image takes is answered with that many.
    """
    start = time.process_time()
    for way in ways(model):
        for _ in range(3):
            try:
                given, _text = inputs_for(model, True, way)
                return way, run(given)
            except Exception as error:  # noqa: BLE001  # whatever a family raises says that it does not run so
                failures.append(f"{type(error).__name__}: {first_line(error)}")
                said = PLACES.search(str(error))
                if said is None or any(part.startswith(f"{said[1].lower()}=") for part in way):
                    break
                way = (*way, f"{said[1].lower()}={said[3]}")
        if time.process_time() - start > LONGEST:
            break
    raise LookupError("; ".join(dict.fromkeys(failures)))
