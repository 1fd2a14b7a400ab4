"""The small random models of the sweep: a configuration of each type made small, and the class that takes it."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sweep_cases import CASES, Case


def open_torchvision() -> None:
    """Define two operators where torchvision was built for another torch, so that timm can import it."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
        importlib.import_module("torchvision")


open_torchvision()  # before transformers looks for it
if importlib.util.find_spec("timm") is not None:
    # timm's own formula of attention, which a block of `attlas.lazily` sees, and not torch's fused one.
    importlib.import_module("timm.layers").set_fused_attn(False)

import transformers  # noqa: E402
from transformers import PreTrainedConfig, PreTrainedModel  # noqa: E402
from transformers.models.auto import configuration_auto, modeling_auto  # noqa: E402

PARAMETERS = 90_000_000
VOCABULARY = 99

# What a configuration of any family may call its sizes, and a small value that fits the others.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "model_dim"), 32),
    **dict.fromkeys(
        ("projection_dim", "text_hidden_size", "hidden_dim", "word_embed_proj_dim", "width", "proj_dim"), 32
    ),
    **dict.fromkeys(("backbone_hidden_size", "decoder_hidden_size", "encoder_hidden_size", "lm_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "mlp_dim", "ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "dense_intermediate_size", "hidden_dim_ffn"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "depth", "layers", "num_hidden_layers_t"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "attention_heads", "num_key_value_heads", "n_kv_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "kv_channels", "head_size"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "block_size"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "num_group", "topk_group", "n_shared_experts"), 1),
    # What hides keys is far shorter than the texts: windows, chunks, chosen keys and blocks of keys.
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "keep_window_size"), 6),
    **dict.fromkeys(("local_attention", "local_attention_window_len"), 8),
    **dict.fromkeys(("attention_chunk_size", "local_radius"), 5),
    **dict.fromkeys(("index_topk", "indexer_budget"), 4),
    **dict.fromkeys(("index_block_size", "index_topk_blocks", "index_n_heads", "index_kpool"), 2),
    **dict.fromkeys(("indexer_n_heads", "indexer_compress_ratio", "max_window_layers"), 2),
    **dict.fromkeys(("index_local_blocks", "indexer_kv_heads"), 1),
    **dict.fromkeys(("index_head_dim", "indexer_head_dim"), 8),
    **dict.fromkeys(("image_size",), 16),
    **dict.fromkeys(("patch_size",), 4),
    **dict.fromkeys(("num_mel_bins", "feature_size"), 16),
    "max_source_positions": 64,
    **dict.fromkeys(("num_expert_group", "mamba_n_groups"), 1),
    **dict.fromkeys(("num_experts_per_token", "num_shared_experts"), 2),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "rotary_dim", "linear_head_dim", "mamba_chunk_size"), 8),
    **dict.fromkeys(("linear_num_heads",), 4),
    "mamba_d_state": 16,
    "out_hidden_size": 32,
    "expert_ffn_hidden_size": 16,
    "zero_expert_num": 2,
    "upsample_groups": 32,
    "encoder_hash_byte_group_vocab": 64,
    "hidden_size_global": 32,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "resampler_n_heads": 4,
    "attention_hidden_size": 32,
    "feature_projection_input_dim": 16,
    "mit_hidden_size": 32,
    "mit_num_attention_heads": 4,
    "prompt_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "output_channels": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "input_vocab_size": VOCABULARY,
    "output_vocab_size": VOCABULARY,
    "text_vocab_size": VOCABULARY,
    "audio_vocab_size": VOCABULARY,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
# Of the choice of keys some configurations have no value by default.
CHOSEN = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
# What some configurations must be given when they are made: layers that choose keys, of which they have none by
# default, or sizes that differ between layers.
INDEXED = {"layer_types": ["indexed_attention"] * 2, "num_hidden_layers": 2}
CHOOSING = {"layer_types": ["minimax_m3_sparse", "full_attention"], "num_hidden_layers": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SERIES = {"prediction_length": 8, "context_length": 64, "num_time_features": 1}
PLACED = {"<image>": 70, "IMGIMGAZ": 71, "IMGIMGBZ": 72, "<|extra_200|>": 73}
GIVEN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), SERIES),
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 70, "IMGIMGAZ": 71, "IMGIMGBZ": 72}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dots3_note": {"text_config": INDEXED},
    "dots3_note_text": INDEXED,
    "emu3": {"vocabulary_map": {"<image>": 70, "<|visual token 000000|>": 71, "<|extra_200|>": 73}},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 3},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "minimax_m3_vl": {"text_config": CHOOSING},
    "minimax_m3_vl_text": CHOOSING,
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}
EXPERTS = (
    "num_experts_per_tok",
    "num_experts",
    "n_routed_experts",
    "n_shared_experts",
    "top_k_experts",
    "num_token_id",
    "moe_intermediate_size",
)
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth", "layers"),
    *("num_decoder_layers", "num_encoder_layers"),
)
WINDOWS = (
    *("sliding_window", "sliding_window_size", "attention_window_size", "keep_window_size", "local_attention"),
    *("local_attention_window_len", "attention_chunk_size", "local_radius", "index_topk", "indexer_budget"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
)
WIDTHS = (
    "hidden_size",
    "dim",
    "channels",
    "width",
    "intermediate",
    "ffn",
    "feature_size",
    "d_model",
    "proj",
    "d_ff",
    "d_kv",
)
NO_WIDTHS = ("num_channels", "in_channels", "image", "patch", "num_", "dimension", "layers", "audio_channels", "depth")
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
# What a configuration of a type gets once it is small, by names with dots.
SET: dict[str, dict[str, Any]] = {
    **{kind: {"feature_size": 10} for kind in ("autoformer", "informer", "time_series_transformer")},
    "blt": {"global_config.encoder_cross_output_size": 64},
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": ROPE}},
    "clvp": {
        "decoder_config.feature_size": 16,
        **{f"{part}_config.hidden_size": 128 for part in ("text", "speech")},
    },
    "ernie4_5_vl_moe": {"text_config.rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
    "ernie4_5_vl_moe_text": {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
    "eomt": {"num_blocks": 1},
    "eomt_dinov3": {"num_blocks": 1},
    "videomt": {"num_blocks": 1},
    "dots3_note_audio_encoder": {"head_dim": 8, "num_key_value_heads": 4},
    "granite_speech5_encoder": {"num_key_value_heads": 4},
    "granite_speech5_ctc": {"encoder_config.num_key_value_heads": 4},
    "vits": {
        "flow_size": 32,
        "spectrogram_bins": 16,
        "upsample_initial_channel": 32,
        "duration_predictor_filter_channels": 16,
    },
    "emu3_vqgan": {"base_channels": 32, "num_res_blocks": 1, "codebook_size": 64},
    "glm4v_moe": {"text_config.head_dim": 16},
    "glm4v_moe_text": {"head_dim": 16},
    "llama4_vision_model": {"intermediate_size": 128},
    "longcat_flash": {"qk_head_dim": 16},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
    "deepseek_ocr2_vision": {"sam_config.downsample_channels": [32, 32]},
    "dia_decoder": {"cross_hidden_size": 32},
    "dbrx": {"attn_config.clip_qkv": 8.0, "attn_config.rope_theta": 10000.0},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "emu3": {"pad_token_id": 0},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 1,
        "intermediate_size": [48] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6, "input_size": 64},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8},
    "mistral4": {"qk_head_dim": 16, "num_key_value_heads": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "moshi_depth": {"max_position_embeddings": 96},
    "reformer": {
        "axial_pos_shape": [8, 9],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "lsh"],
        "num_hidden_layers": 2,
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "pix2struct_text_model": {"initializer_range": 0.02, "initializer_factor": 1.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0, "dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "unlimited_ocr": {"text_config.num_key_value_heads": 4},
    "step3p5": {"sliding_window": 6},
    "step3p7": {"text_config.sliding_window": 6},
    "t5gemma": {"decoder.cross_attention_hidden_size": 32},
    "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 8, "attention_head_dim": 16, "attention_hidden_size": 64},
}
# Configurations of parts that no class of transformers takes alone, and the type that has them.
PARTS_OF = {
    "blip_text_model": "blip",
    "edgetam_mask_decoder": "edgetam",
    "edgetam_prompt_encoder": "edgetam",
    "edgetam_video_mask_decoder": "edgetam_video",
    "edgetam_video_prompt_encoder": "edgetam_video",
    "gemma4_unified_audio": "gemma4_unified",
    "gemma4_unified_vision": "gemma4_unified",
    "idefics_perciever": "idefics",
    "idefics_vision": "idefics",
    "pp_chart2table_vision": "pp_chart2table",
    "sam2_mask_decoder": "sam2",
    "sam2_prompt_encoder": "sam2",
    "sam2_video_mask_decoder": "sam2_video",
    "sam2_video_prompt_encoder": "sam2_video",
    "sam3_tracker_mask_decoder": "sam3_tracker",
    "sam3_tracker_prompt_encoder": "sam3_tracker",
    "sam3_tracker_video_mask_decoder": "sam3_tracker_video",
    "sam3_tracker_video_prompt_encoder": "sam3_tracker_video",
    "sam3_geometry_encoder": "sam3",
    "sam3_lite_text_geometry_encoder": "sam3_lite_text",
    "sam_hq_mask_decoder": "sam_hq",
    "sam_hq_prompt_encoder": "sam_hq",
    "sam_mask_decoder": "sam",
    "sam_prompt_encoder": "sam",
    "sapiens2_head": "sapiens2",
    "t5_gemma_module": "t5gemma",
    "vibevoice_diffusion": "vibevoice",
}
# Names that stand for a processor alone.
NAMES_ONLY = {
    "layoutxlm": "a name for a tokenizer and a processor; its model is LayoutLMv2",
    "nougat": "a name for a processor; its model is a vision-encoder-decoder",
}
# Types without a `forward`: the method that computes, or the part of the model that does.
METHODS = {
    **dict.fromkeys(("chameleon_vqgan", "emu3_vqgan", "glm_image_vqmodel"), "encode"),
}
PARTS = {"bark": "semantic", "qwen2_5_omni": "thinker", "qwen3_omni_moe": "thinker"}


def shrink(config: PreTrainedConfig) -> None:
    """Make a configuration and those inside it small, in place."""
    layers = seek_own(config, "num_hidden_layers")
    # One name a layer: attention first, then each other kind.
    kinds_of = {
        name: sorted(set(value), key=lambda kind: ("attention" not in kind or "linear" in kind, value.index(kind)))
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == layers and all(isinstance(kind, str) for kind in value)
    }
    if getattr(config, "use_sliding_window", None) is False and "layer_types" in kinds_of:
        config.use_sliding_window = True
        config.sliding_window = SMALL["sliding_window"]
        kinds_of["layer_types"] = ["sliding_attention", "full_attention"]
    count = max([SMALL["num_hidden_layers"], *map(len, kinds_of.values())])
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shrink(value)
        elif name in kinds_of:
            put(config, name, (kinds_of[name] * count)[:count])
        elif name == "num_hidden_layers" and kinds_of:
            put(config, name, count)
        elif name in CHOSEN and value is None:
            put(config, name, SMALL[name])
        elif name in SMALL and (value is None or isinstance(value, int)) and not isinstance(value, bool):
            if value is not None or name in ("head_dim", *EXPERTS):
                put(config, name, SMALL[name])
        elif name.endswith(("_token_id", "_token_index")) and (
            isinstance(value, int) or name.startswith("image_token")
        ):
            put(config, name, TOKEN_IDS.get(name, 61 + sum(map(ord, name)) % 37))
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            inner = [part for part in value.values() if isinstance(part, dict)]
            for part in inner or [value]:
                part["mrope_section"] = [2, 1, 1]
        elif name == "forced_eos_token_id":
            put(config, name, None)
    heads = vars(config).get("num_heads")
    if isinstance(heads, list | tuple) and "depths" in vars(config) and isinstance(seek_own(config, "embed_dim"), int):
        for name, value in (("embed_dim", 8 * heads[0]), ("depths", [1] * len(heads)), ("image_size", 64)):
            put(config, name, value)
        put(config, "hidden_size", 8 * heads[0] * 2 ** (len(heads) - 1))
        put(config, "window_size", 4)
    if seek_own(config, "kv_lora_rank"):  # keys are made from one latent vector: a head of their own for each query
        put(config, "num_key_value_heads", SMALL["num_attention_heads"])


def seek_own(config: PreTrainedConfig, name: str) -> Any:
    """Return a value of a configuration; None where it has none, or one for each layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def put(config: PreTrainedConfig, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, TypeError, ValueError):
        return  # a name that only reads another one


def classes_for(kind: str) -> Iterator[type[nn.Module]]:
    """Yield the classes that can be built from a type of configuration, those that predict words first."""
    for table in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "MASKED_LM", ""):
        names = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES" if table else "MODEL_MAPPING_NAMES", {})
        found = names.get(kind, ())
        for name in (found,) if isinstance(found, str) else found:
            if hasattr(transformers, name):
                yield getattr(transformers, name)
    yield from classes_of_its_module(configuration_auto.CONFIG_MAPPING[kind])


def classes_of_its_module(config_class: type) -> Iterator[type[nn.Module]]:
    """Yield the models beside a configuration that no table names: parts of larger ones."""
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(name)
    except ImportError:  # no such file, or a package that it wants is missing
        return
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and value.__module__ == name
        if value.config_class is config_class and "PreTrained" not in value.__name__
    ]
    yield from sorted(own, key=lambda owner: ("For" not in owner.__name__, owner.__name__))


def models_of(kind: str, failures: list[str]) -> Iterator[nn.Module]:
    """Yield random models of a type, smallest first; what each class that cannot be built raises is appended."""
    case = CASES.get(kind, Case())
    for make_small in (shrink,) if case.whole or case.sizes else (shrink, divide, thin):
        for owner in list(dict.fromkeys(classes_for(kind)))[: {shrink: None, divide: 4, thin: 2}[make_small]]:
            if case.owner not in ("", owner.__name__):
                continue
            try:
                config = configuration_auto.CONFIG_MAPPING[kind](**{**GIVEN.get(kind, {}), **copy.deepcopy(case.given)})
                if not case.whole:
                    make_small(config)
                for path, value in {**SET.get(kind, {}), **case.sizes}.items() if make_small is shrink else ():
                    *inner, last = path.split(".")
                    setattr(functools.reduce(getattr, inner, config), last, value)
                with torch.device("meta"):
                    size = sum(p.numel() for p in owner._from_config(config).parameters())
                if size > PARAMETERS:
                    raise ValueError(f"{size:,} parameters")
                torch.manual_seed(3)
                model = owner._from_config(config, attn_implementation="eager").eval()
            except Exception as error:  # noqa: BLE001  # whatever a family raises says that it cannot be built
                failures.append(f"{owner.__name__}: {type(error).__name__}: {first_line(error)}")
                continue
            liven(model)
            if kind in METHODS:
                model.forward = getattr(model, METHODS[kind])
            yield getattr(model, PARTS[kind]) if kind in PARTS else model


def divide(config: PreTrainedConfig) -> None:
    """Divide the widths of a configuration and those inside it by 8, after `thin`: all ratios stay what they are."""
    thin(config)
    _divide(config)


def _divide(config: PreTrainedConfig) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _divide(value)
        elif any(part in name for part in WIDTHS) and not any(part in name for part in NO_WIDTHS):
            if isinstance(value, int) and not isinstance(value, bool) and value >= 32 and value % 8 == 0:
                put(config, name, value // 8)
            elif isinstance(value, list | tuple) and value and all(type(n) is int and n % 8 == 0 for n in value):
                put(config, name, type(value)(n // 8 for n in value))
        elif name == "depths" and isinstance(value, list | tuple):
            put(config, name, type(value)(1 for _ in value))


def thin(config: PreTrainedConfig) -> None:
    """Give a configuration and those inside it few layers and words, in place, and keep all other sizes."""
    layers = seek_own(config, "num_hidden_layers")
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            thin(value)
        elif name in LAYERS and isinstance(value, int):
            put(config, name, min(value, 2))
        elif name == "vocab_size" and isinstance(value, int):
            put(config, name, min(value, 1000))
        elif isinstance(value, list) and len(value) == layers and all(isinstance(kind, str) for kind in value):
            put(config, name, value[-2:])
        elif name.endswith(("_token_id", "_token_index")) and (
            isinstance(value, int) or name.startswith("image_token")
        ):
            put(config, name, TOKEN_IDS.get(name, 61 + sum(map(ord, name)) % 37))
        elif name in WINDOWS and isinstance(value, int) and not isinstance(value, bool):
            put(config, name, min(value, SMALL[name]))
        elif name == "image_size" and isinstance(value, int) and value > 384:
            put(config, name, value // 4)
        elif name == "forced_eos_token_id":
            put(config, name, None)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]


def liven(model: nn.Module) -> None:
    """Give weights a size at which attention decides the logits; fresh models look everywhere alike."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and parameter.is_floating_point() and parameter.numel():
                parameter.normal_(std=min(0.25, 1.4 / parameter[0].numel() ** 0.5))
            elif "sink" in name:
                parameter.normal_()


def seek(config: PreTrainedConfig, name: str, default: Any) -> Any:
    """Return a value of a configuration or of the first one inside it that has the name."""
    if seek_own(config, name) is not None:
        return getattr(config, name)
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            found = seek(value, name, None)
            if found is not None:
                return found
    return default
