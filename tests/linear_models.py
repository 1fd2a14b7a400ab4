"""Tiny models of transformers with layers of linear attention, and what these layers compute by themselves."""

from __future__ import annotations

import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from attlas.recording.linear_calls import OF_CHANNELS, OF_HEADS

COMMON = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": 0,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
            "n_routed_experts": 4, "n_shared_experts": 1, "shared_expert_intermediate_size": 16}  # fmt: skip
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
           "qk_nope_head_dim": 8, "v_head_dim": 8}  # fmt: skip
_SSD = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2,
        "mamba_chunk_size": 8, "mamba_expand": 2}  # fmt: skip
_S6 = {"state_size": 8, "time_step_rank": 4, "expand": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "mamba_expand": 2,
       "use_mamba_kernels": False}  # fmt: skip
_HALF = ["linear_attention", "full_attention"] * 2
#: By the type of the model: settings that differ from `COMMON`, and the numbers of the layers that are linear.
MODELS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "qwen3_next": ({**_DELTA, **_EXPERTS}, [0, 1, 2]),
    "qwen3_5_text": ({**_DELTA}, [0, 1, 2]),
    "qwen3_5_moe_text": ({**_DELTA, **_EXPERTS}, [0, 1, 2]),
    "qwen4_exp_text": ({**_DELTA, **_EXPERTS, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                        "indexer_budget": 8, "indexer_compress_ratio": 2, "ngram_vocab_size_base": 512,
                        "split_ngram_parts": 2, "hc_lowrank": 4, "hc_count": 2, "output_gate_type": "silu",
                        "make_ngram_vocab_size_divisible_by": 8}, [0, 1, 2]),
    "olmo_hybrid": ({**_DELTA, "linear_num_key_heads": 4}, [0, 1, 2]),
    "kimi_linear": ({**_DELTA, **_EXPERTS, **_LATENT, "linear_num_heads": 4, "linear_head_dim": 8,
                     "layer_types": _HALF}, [0, 2]),
    "bailing_hybrid": ({**_DELTA, **_EXPERTS, **_LATENT, "linear_num_heads": 4, "linear_head_dim": 8,
                        "layer_group_size": 2}, [0, 2]),
    "glm5_next_text": ({**_DELTA, **_EXPERTS, **_LATENT, "qk_rope_head_dim": 0, "index_topk": 8, "index_head_dim": 8,
                        "index_n_heads": 2, "index_kpool": 2, "hc_mult": 2}, [0, 1, 2]),
    "mamba2": ({"state_size": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 8, "expand": 2, "num_hidden_layers": 2},
               [0, 1]),
    "bamba": ({**_SSD, "attn_layer_indices": [1]}, [0, 2, 3]),
    "falcon_h1": ({**_SSD, "num_hidden_layers": 2}, [0, 1]),
    "granitemoehybrid": ({**_SSD, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
                          "layer_types": ["mamba", "attention"] * 2}, [0, 2]),
    "nemotron_h": ({"layers_block_type": ["mamba", "attention", "mamba"], "mamba_num_heads": 8, "mamba_head_dim": 8,
                    "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8}, [0, 2]),
    "zamba2": ({"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 1, "mamba_d_state": 8,
                "num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 2, "chunk_size": 8,
                "mamba_expand": 2, "use_mem_eff_path": False}, [0, 1, 2, 3]),
    "minimax": ({"layer_types": _HALF, "block_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, [0, 2]),
    "mamba": ({**_S6, "num_hidden_layers": 2}, [0, 1]),
    "falcon_mamba": ({**_S6, "num_hidden_layers": 2}, [0, 1]),
    "jamba": ({**_S6, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
               "expert_layer_offset": 1, "num_experts": 4}, [0, 2]),
    "zamba": ({**_S6, "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4,
               "n_mamba_heads": 2, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}, [0, 1, 2, 3]),
    "recurrent_gemma": ({"lru_width": 32, "attention_window_size": 16, "num_key_value_heads": 1}, [0, 1, 3]),
    "rwkv": ({"context_length": 128, "attention_hidden_size": 32, "num_hidden_layers": 2}, [0, 1]),
}  # fmt: skip
#: Types whose layers have one matrix for each channel.
CHANNELS = ("mamba", "falcon_mamba", "jamba", "zamba", "recurrent_gemma", "rwkv")


@functools.cache
def tiny(kind: str, layers: int | None = None) -> nn.Module:
    """Return a small model with random weights, and with another number of layers where one is given."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    owner = CONFIG_MAPPING[kind]
    known = {*inspect.signature(owner.__init__).parameters, *getattr(owner, "__dataclass_fields__", ())}
    settings = {name: value for name, value in COMMON.items() if name in known} | MODELS[kind][0]
    settings |= {} if layers is None else {"num_hidden_layers": layers}
    torch.manual_seed(0)
    config = owner(**{name: value for name, value in settings.items() if name in known})
    head = "AutoModel" if kind == "glm5_next_text" else "AutoModelForCausalLM"
    model: nn.Module = getattr(transformers, head).from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "A_log" not in name:
            nn.init.normal_(parameter, std=0.3)
    return model


@contextmanager
def outputs(model: nn.Module, exact: list[Tensor] | None = None) -> Iterator[list[Tensor]]:
    """Collect what the layers compute before their norm and gate, shape (batch, heads or channels, tokens, size).

    In `exact` the same functions are computed in float64, where a list is given.
    """
    found: list[Tensor] = []
    file = importlib.import_module(type(model).__module__)

    def told(original: Any) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            state = kwargs.get("state", args[0] if "state_update" in original.__name__ else None)
            before = state.clone() if isinstance(state, Tensor) else state
            result = original(*args, **kwargs)
            own = result
            if kwargs.get("z") is not None:  # the output gate is not part of the matrix
                args = (before, *args[1:]) if before is not None and "state" not in kwargs else args
                own = original(*args, **kwargs | {"z": None} | ({"state": before} if "state" in kwargs else {}))
            own = own[0] if isinstance(own, tuple) else own
            found.append(_axes(original.__name__, own).detach().clone())
            if exact is not None:
                given = [_double(t) for t in args]
                own = in_double(file, original)(*given, **{n: _double(t) for n, t in kwargs.items() if n != "z"})
                exact.append(_axes(original.__name__, own[0] if isinstance(own, tuple) else own).detach())
            return result

        return run

    with ExitStack() as stack:
        for name in (*OF_HEADS, *OF_CHANNELS):
            owner, _, method = name.rpartition(".")
            place = getattr(file, owner, None) if owner else file
            if hasattr(place, method) and method != "forward":
                stack.enter_context(mock.patch.object(place, method, told(getattr(place, method))))
        for module in model.modules():
            if type(module).__name__ == "MiniMaxLightningAttention":
                size = module.num_attention_heads, module.head_dim
                hook = module.norm.register_forward_pre_hook(
                    lambda _, args, size=size: found.append(args[0].detach().unflatten(-1, size).transpose(1, 2))
                )
                stack.callback(hook.remove)
        yield found


def _double(t: Any) -> Any:
    return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t


def in_double(file: ModuleType, function: Any) -> Any:
    """Return a function of transformers whose casts to float32 are casts to float64."""
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    text = text[text.index("def ") :].replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    scope = dict(vars(file))
    exec(text, scope)  # its own source
    return scope[function.__name__]


def _axes(name: str, out: Tensor) -> Tensor:
    """Return an output as (batch, heads or channels, tokens, size)."""
    if name == "mamba_selective_scan":  # (batch, channels, tokens)
        return out.unsqueeze(-1)
    if name == "mamba_selective_state_update":  # (batch, channels)
        return out[..., None, None]
    if name in ("_rnn_scan", "rwkv_linear_attention"):  # (batch, tokens, channels)
        return out.mT.unsqueeze(-1)
    return (out if out.ndim == 4 else out.unsqueeze(1)).transpose(1, 2)


def of_layers(kind: str, found: list[Tensor]) -> list[Tensor]:
    """Return the outputs of each linear layer, all tokens of the calls that followed one another."""
    groups, layers = (2 if kind == "zamba" else 1), len(MODELS[kind][1])
    parts = [torch.cat(found[at : at + groups], dim=1) for at in range(0, len(found), groups)]
    return [torch.cat(parts[number::layers], dim=2) for number in range(layers)]
