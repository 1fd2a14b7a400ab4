"""Every model type that transformers can build from a small configuration: eager beside attlas.

Run with ``make sweep``, or ``python benchmarks/sweep.py --only llama,t5``. Each type runs in a process of its own
with a limit of time and memory, so that a crash ends one row of the table and not the run. One random model of a type,
its texts padded on the left, runs twice with the same weights: on ``attlas`` and on ``eager``. The texts are longer
than every window, chunk and number of chosen keys, so that these hide keys. Compared are every floating point output at
places of text, and the weights of every call of the attention function, rows that see no key aside. What differs is run
again without padding, and on torch's own ``sdpa``, and must have a reason in `REASONS`; the run fails where one has
none.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import multiprocessing
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto, modeling_auto

import attlas
from attlas.huggingface import attention_forward, modules_without_interface
from harness import RESULTS, save

TOLERANCE = 1e-4
LINEAR = "## Layers of linear attention"
SECONDS = 60
MEMORY = 12 * 2**30
PARAMETERS = 160_000_000
VOCABULARY = 99
LEAST_EQUAL = 300
BATCH, TOKENS, MISSING, SHORT = 2, 40, 9, 12

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
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "block_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
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
    "max_source_positions": 32,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
# Of the choice of keys some configurations have no value by default.
CHOSEN = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
# What some configurations must be given when they are made: layers that choose keys, of which they have none by
# default, or sizes that differ between layers.
INDEXED = {"layer_types": ["indexed_attention"] * 2, "num_hidden_layers": 2}
CHOOSING = {"layer_types": ["minimax_m3_sparse", "full_attention"], "num_hidden_layers": 2}
GIVEN: dict[str, dict[str, Any]] = {
    "dots3_note_text": INDEXED,
    "dots3_note": {"text_config": INDEXED},
    "minimax_m3_vl_text": CHOOSING,
    "minimax_m3_vl": {"text_config": CHOOSING},
}
NO_ATTENTION = "no attention at all"
INPUTS = ("input_ids", "pixel_values", "input_features", "input_values")
_NO_SINK = "eager returns weights without the sink, which its output counts; attlas counts it in both (outputs equal)"
_INVERTED = (
    "eager is not finite: these layers take its additive mask, 0 where a key is allowed, for a boolean one and hide "
    "what is allowed; attlas is handed the same mask (right on sdpa only)"
)
_CHOSEN_BY_PADDING = (
    "the indexer scores the keys of padding, too, whose rows see no key: eager gives these uniform weights over all, "
    "sdpa and attlas none, and other blocks are chosen; equal to sdpa, and to eager without padding"
)
_RECURRENT = "rounding: softmax is float32 on eager, and 128 calls in a row enlarge its 1e-7; equal to sdpa bit for bit"
REASONS: dict[str, str] = {
    "hrm_text": _RECURRENT,
    "minimax_m3_vl": _CHOSEN_BY_PADDING,
    "minimax_m3_vl_text": _CHOSEN_BY_PADDING,
    "granite_swa": _NO_SINK,
    "granitemoe_swa": _NO_SINK,
    "nemotron3_5_asr": _INVERTED,
    "nemotron_asr_streaming": _INVERTED,
    "nemotron_asr_streaming_encoder": _INVERTED,
}


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
            if value is not None or name == "head_dim":
                put(config, name, SMALL[name])
        elif name.endswith("_token_id") and isinstance(value, int):
            known = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
            put(config, name, known.get(name, 3 + sum(map(ord, name)) % 5))
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            inner = [part for part in value.values() if isinstance(part, dict)]
            for part in inner or [value]:
                part["mrope_section"] = [2, 1, 1]
        elif name == "forced_eos_token_id":
            put(config, name, None)
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


def build(kind: str) -> nn.Module:
    """Return a small random model of a type."""
    failures = []
    for owner in dict.fromkeys(classes_for(kind)):
        try:
            config = configuration_auto.CONFIG_MAPPING[kind](**GIVEN.get(kind, {}))
            shrink(config)
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
        return model
    raise LookupError("; ".join(failures) or "no class of transformers for it")


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


def inputs_for(model: nn.Module, padded: bool, more: tuple[str, ...] = ()) -> tuple[dict[str, Any], Tensor | None]:
    """Return what a model is called with, and where its outputs are text; `more` names inputs besides the first."""
    takes = inspect.signature(model.forward).parameters
    draw = torch.Generator().manual_seed(5)
    config = model.config
    wanted = {next((name for name in ("input_ids", model.main_input_name, *INPUTS) if name in takes), ""), *more}
    tokens = SHORT if "short" in more else TOKENS
    text = torch.ones(BATCH, tokens, dtype=torch.int64)
    if padded:
        text[1, : min(MISSING, tokens // 3)] = 0
    given: dict[str, Any] = {}
    if "input_ids" in wanted:
        given["input_ids"] = torch.randint(10, 60, (BATCH, tokens), generator=draw) * text
        if "attention_mask" in takes:
            given["attention_mask"] = text
    if "pixel_values" in wanted:
        size = seek(config, "image_size", 16)
        height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
        given["pixel_values"] = torch.randn(BATCH, seek(config, "num_channels", 3), height, width, generator=draw)
    if "input_features" in wanted:
        length = 2 * seek(config, "max_source_positions", 32)
        given["input_features"] = torch.randn(BATCH, seek(config, "num_mel_bins", 16), length, generator=draw)
        if "features last" in more:
            given["input_features"] = given["input_features"].mT
    if "input_values" in wanted:
        given["input_values"] = torch.randn(BATCH, 1600, generator=draw)
    if "bbox" in takes:
        corners = torch.randint(0, 16, (BATCH, tokens, 2), generator=draw)
        given["bbox"] = torch.cat([corners, corners + 4], -1)
    if "decoder_input_ids" in takes:
        given["decoder_input_ids"] = torch.randint(10, 60, (BATCH, 7), generator=draw)
    if "use_cache" in takes and "no cache" in more:
        given["use_cache"] = False
    return given, text.bool() if "input_ids" in given else None


# Inputs that are tried in turn until the family runs on eager.
TRIES: tuple[tuple[str, ...], ...] = (
    (),
    ("no cache",),
    ("short",),
    ("pixel_values",),
    ("input_features",),
    ("input_features", "features last"),
    ("input_values",),
)


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


def watch(model: nn.Module, given: dict[str, Tensor], implementation: str) -> tuple[list[Tensor], list[Any]]:
    """Run a model on an implementation; return its outputs, and the weights of each call in order."""
    weights: list[Any] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            found = function(module, *args, **kwargs)
            weights.append(found[1])
            return found

        return run

    AttentionInterface.register("attlas", watched(attention_forward))
    eager = {}
    for name in {type(module).__module__ for module in model.modules()}:
        scope = vars(sys.modules[name])
        for key in [key for key in scope if "eager" in key and key.endswith("forward")]:
            eager[name, key] = scope[key]
            scope[key] = watched(scope[key])
    try:
        model.set_attn_implementation(implementation)
        torch.manual_seed(11)
        with torch.no_grad():
            outputs = model(**given)
    finally:
        for (name, key), function in eager.items():
            setattr(sys.modules[name], key, function)
    return list(tensors(outputs)), weights


def tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point():
            yield outputs
    elif isinstance(outputs, dict):
        for name, part in outputs.items():
            if "past_key_values" not in name and "cache" not in name:
                yield from tensors(part)
    elif isinstance(outputs, tuple | list):
        for part in outputs:
            yield from tensors(part)


def distance(found: list[Tensor], wanted: list[Tensor], text: Tensor | None) -> float:
    """Return the largest difference of outputs at places of text, relative to the largest number there or 1."""
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        if text is not None and b.shape[:2] == text.shape:
            a, b = a[text], b[text]
        if not b.numel():
            continue
        if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            return float("inf")
        a, b = (torch.where(torch.isfinite(t), t, 0.0).double() for t in (a, b))
        worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1.0)))
    return worst


def weight_distance(found: list[Any], wanted: list[Any], text: Tensor | None) -> tuple[float, int]:
    """Return the largest difference of a weight in rows that see a key, and how many calls were compared.

    With `text`, queries on padding are left out as well.
    """
    worst, compared = 0.0, 0
    if len(found) != len(wanted):
        return float("inf"), 0
    for A, weights in zip(found, wanted, strict=True):
        if not isinstance(weights, Tensor):
            continue
        seen = (A.lse > -torch.inf).reshape(weights.shape[:-1])
        if text is not None and seen.ndim == 3 and seen.shape[::2] == text.shape:
            seen = seen & text[:, None]
        difference = (A.to_dense().reshape(weights.shape) - weights).abs()[seen]
        worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
        compared += 1
    return worst, compared


def fewest_keys(weights: list[Any]) -> str:
    """Return how many keys the last query of a text sees at least, in any call, of how many there are."""
    found = [
        (int((w[0] > 0).sum(-1)[:, -1].min()), w.shape[-1]) for w in weights if isinstance(w, Tensor) and w.ndim == 4
    ]
    return "{} of {}".format(*min(found)) if found else ""


def compare(kind: str) -> dict[str, Any]:
    """Return one row of the table."""
    try:
        model = build(kind)
    except LookupError as error:
        return {"state": "not built", "reason": str(error)[:300]}
    row: dict[str, Any] = {"class": type(model).__name__}
    failure = ""
    for more in TRIES:
        try:
            given, text = inputs_for(model, True, more)
            wanted, their_weights = watch(model, given, "eager")
        except Exception as error:  # noqa: BLE001  # as above
            failure = failure or f"{type(error).__name__}: {first_line(error)}"
            continue
        break
    else:
        return row | {"state": "not run on eager", "reason": failure}
    row["inputs"] = list(given)
    row["not captured"] = len(modules_without_interface(model))
    found, weights = watch(model, given, "attlas")
    if not weights:
        return row | by_hand(model, given, text)
    row["calls"] = len(weights)
    row["keys"] = fewest_keys(their_weights)
    row["outputs"] = distance(found, wanted, text)
    row["weights"], row["compared"] = weight_distance(weights, their_weights, None)
    if max(row["outputs"], row["weights"]) <= TOLERANCE:
        return row | {"state": "equal"}
    if text is not None:
        row["weights of text"] = weight_distance(weights, their_weights, text)[0]
        if max(row["outputs"], row["weights of text"]) <= TOLERANCE:
            reason = (
                "rows of padding that see no key in a window see some in a later layer, from what eager made of them"
            )
            return row | {"state": "equal", "reason": reason}
    return row | {"state": "different"} | explained(kind, model, more, row["weights"])


def by_hand(model: nn.Module, given: dict[str, Any], text: Tensor | None) -> dict[str, Any]:
    """Return the rest of the row of a type without the interface: its attention, written by hand, recorded lazily."""
    wanted, weights = run_by_hand(model, given)
    with attlas.lazily(model) as block:
        found, lazy = run_by_hand(model, given, lazily=True)
    uses = {f"{use.kind}: {use.operation}" for use in block.dense_uses}
    row: dict[str, Any] = {"outputs": distance(found, wanted, text), "dense": "; ".join(sorted(uses))}
    try:
        with warnings.catch_warnings(), torch.no_grad(), attlas.record(model, handwritten=True) as atlas:
            torch.manual_seed(11)
            model(**given)
        row["calls"] = len(atlas.entries)
    except attlas.RecordingError:
        row["calls"] = 0
    worst, row["compared"] = 0.0, 0
    for A, dense in zip(lazy, weights, strict=True):
        if not isinstance(A, attlas.AttentionMatrix):
            continue
        seen = (A.lse > -torch.inf) & torch.isfinite(dense).all(-1)
        if text is not None and seen.ndim == 3 and seen.shape[::2] == text.shape:
            seen = seen & text[:, None]
        difference = (A.to_dense() - dense).abs()[seen]
        worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
        row["compared"] += 1
    row["weights"] = worst
    reason = why_none(model)
    if row["calls"] == 0 and reason == NO_ATTENTION and row["outputs"] <= TOLERANCE:
        return row | {"state": "no attention", "reason": reason}
    if row["calls"] == 0 and not uses and row["outputs"] <= TOLERANCE:
        return row | {"state": "explained", "reason": f"no softmax of a product of queries and keys; {reason}"}
    if max(row["outputs"], worst) > TOLERANCE:
        return row | {"state": "different", "reason": REASONS.get(model.config.model_type, "")}
    if row["calls"] == 0:
        return row | {"state": "explained", "reason": f"computed densely, as before: {row['dense']}"}
    return row | {"state": "equal", "reason": f"in part computed densely, as before: {row['dense']}" if uses else ""}


def run_by_hand(model: nn.Module, given: dict[str, Any], *, lazily: bool = False) -> tuple[list[Tensor], list[Any]]:
    """Run a model as it is set, on eager outside of a block; return its outputs, and the weights that it returns."""
    for more in ({"output_attentions": True}, {}):
        try:
            if not lazily:
                model.set_attn_implementation("eager")
            torch.manual_seed(11)
            with torch.no_grad():
                outputs = model(**given, **more)
            break
        except (TypeError, ValueError):
            if not more:
                raise
    weights: list[Any] = []
    return list(tensors(without_weights(outputs, weights))), weights


def without_weights(outputs: Any, weights: list[Any]) -> Any:
    """Return outputs without attention weights, which are appended to a list."""
    if isinstance(outputs, dict):
        rest = {}
        for name, part in outputs.items():
            if "attentions" in name:
                weights.extend(matrices(part))
            else:
                rest[name] = without_weights(part, weights)
        return rest
    if isinstance(outputs, tuple | list):
        return tuple(without_weights(part, weights) for part in outputs)
    return outputs


def matrices(part: Any) -> Iterator[Any]:
    """Yield the tensors and matrices of nested tuples."""
    if isinstance(part, Tensor | attlas.AttentionMatrix):
        yield part
    elif isinstance(part, tuple | list):
        for inner in part:
            yield from matrices(inner)


def below(measured: Any) -> bool:
    return isinstance(measured, float) and measured <= TOLERANCE


def explained(kind: str, model: nn.Module, more: tuple[str, ...], weights_of_all: float) -> dict[str, Any]:
    """Return what else can be measured of a difference, and the reason of it, "" where there is none."""
    found: dict[str, Any] = {}
    given, text = inputs_for(model, True, more)
    ours, _ = watch(model, given, "attlas")
    try:
        found["to sdpa"] = distance(ours, watch(model, given, "sdpa")[0], text)
    except Exception as error:  # noqa: BLE001  # a family may refuse it
        found["to sdpa"] = f"{type(error).__name__}: {first_line(error)}"
    plain, text = inputs_for(model, False, more)
    wanted, their_weights = watch(model, plain, "eager")
    outputs, weights = watch(model, plain, "attlas")
    found["without padding"] = max(distance(outputs, wanted, text), weight_distance(weights, their_weights, None)[0])
    model.double()
    exact = {name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in plain.items()}
    try:
        wanted, their_weights = watch(model, exact, "eager")
        outputs, weights = watch(model, exact, "attlas")
        found["in float64"] = distance(outputs, wanted, text)
        if their_weights:
            found["in float64"] = max(found["in float64"], weight_distance(weights, their_weights, None)[0])
    except Exception as error:  # noqa: BLE001  # as above
        found["in float64"] = f"{type(error).__name__}: {first_line(error)}"
    reason = REASONS.get(kind, "")
    if reason:
        return found | {"reason": reason}
    if below(found["without padding"]) and (below(found["to sdpa"]) or below(weights_of_all)):
        reason = "an output is taken from a row of padding, which sees no key: eager gives it uniform weights over all"
        reason += " keys, sdpa and attlas none; every weight of a row that sees a key is equal, and all without padding"
    elif isinstance(found["in float64"], float) and found["in float64"] < 1e-9:
        reason = "rounding: equal in float64"
    return found | {"reason": reason}


def why_none(model: nn.Module) -> str:
    """Say what a model has in place of the interface."""
    names = sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})
    return f"attention of its own: {', '.join(names[:3])}" if names else NO_ATTENTION


def work(kind: str, answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        answer.send(compare(kind))
    except BaseException as error:  # noqa: BLE001  # the row must say what happened
        answer.send({"state": "failed on attlas", "reason": f"{type(error).__name__}: {first_line(error)}"})


def one(kind: str) -> dict[str, Any]:
    """Compare one type in a process of its own."""
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=work, args=(kind, there))
    start = time.perf_counter()
    process.start()
    there.close()
    try:
        row = here.recv() if here.poll(SECONDS) else {"state": "not built", "reason": f"more than {SECONDS} s"}
    except EOFError:
        process.join()
        row = {"state": "not built", "reason": f"the process ended with {process.exitcode}"}
    process.kill()
    process.join()
    return {"type": kind, **row, "seconds": round(time.perf_counter() - start, 1)}


VERDICTS = {
    "equal": "equal",
    "explained": "explained",
    "no attention": "no attention",
    "different": "explained",
    "not run on eager": "does not run in eager either, as it is built here",
    "not built": "does not run in eager either, as it is built here",
}

HEAD = """# Every model type of transformers on attlas

transformers {version}, {types} model types. Each is built small and random, and run on eager and on attlas with texts
padded on the left; `benchmarks/sweep.py` says how. *outputs*: largest difference at places of text, relative to the
largest number; *weights*: largest difference of a weight in rows that see a key, over *compared* of all *calls*;
*keys*: the fewest keys that the last query of the unpadded text sees in a call, of all; a window, a chunk or a choice
hides the others. Types that write their attention out by hand run in a block of `attlas.lazily`, and *calls* are the
attentions that ``record(model, handwritten=True)`` finds.

"""


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a page of Markdown."""
    counts = Counter(row["state"] for row in rows)
    verdicts = Counter(VERDICTS.get(row["state"], row["state"]) for row in rows)
    lines = ["| verdict | types |", "| --- | --- |", *(f"| {name} | {n} |" for name, n in verdicts.most_common()), ""]
    lines += ["| state | types |", "| --- | --- |", *(f"| {state} | {n} |" for state, n in counts.most_common()), ""]
    lines += ["| type | class | state | calls | compared | keys | outputs | weights | reason |", "| --- " * 9 + "|"]
    for row in sorted(rows, key=lambda row: (-counts[row["state"]], row["state"], row["type"])):
        numbers = [f"{row[name]:.0e}" if isinstance(row.get(name), float) else "" for name in ("outputs", "weights")]
        reason = row.get("reason", "").replace("|", "/").replace("\n", " ")
        cells = [row["type"], row.get("class", ""), row["state"]]
        cells += [row.get(name, "") for name in ("calls", "compared", "keys")]
        lines.append("| " + " | ".join(map(str, [*cells, *numbers, reason])) + " |")
    return HEAD.format(version=transformers.__version__, types=len(rows)) + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="types, divided by commas")
    parser.add_argument("--update", action="store_true", help="with --only: put these rows into the last results")
    parser.add_argument("--out", type=Path, default=RESULTS / "sweep.md")
    options = parser.parse_args()
    kinds = options.only.split(",") if options.only else sorted(configuration_auto.CONFIG_MAPPING_NAMES)
    rows = []
    for kind in kinds:
        rows.append(one(kind))
        print(json.dumps(rows[-1]), flush=True)
    print(Counter(row["state"] for row in rows))
    if options.only and options.update:
        last = json.loads((RESULTS / "sweep.json").read_text(encoding="utf-8"))["results"]
        done = {row["type"] for row in rows}
        last = [{k: float(v) if v == "inf" else v for k, v in row.items()} for row in last if row["type"] not in done]
        rows = sorted([*last, *rows], key=lambda row: row["type"])
    if not options.only or options.update:
        # JSON has no infinity.
        save("sweep", [{k: "inf" if v == float("inf") else v for k, v in row.items()} for row in rows])
        # The section about layers of linear attention is that of linear_layers.py.
        before = options.out.read_text(encoding="utf-8") if options.out.exists() else ""
        _, mark, section = before.partition(LINEAR)
        options.out.write_text(table(rows) + (f"\n{mark}{section}" if mark else ""), encoding="utf-8")
    equal = sum(row["state"] == "equal" for row in rows)
    if not options.only and equal < LEAST_EQUAL:
        sys.exit(f"{equal} types are equal, {LEAST_EQUAL} were")
    unexplained = [
        row["type"]
        for row in rows
        if row["state"] == "failed on attlas" or (row["state"] == "different" and not row["reason"])
    ]
    if unexplained:
        sys.exit(f"differences without a reason: {', '.join(unexplained)}")


if __name__ == "__main__":
    main()
