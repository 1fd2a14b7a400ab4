"""Small random models, and what they attend to by ``eager``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def lively(model: nn.Module) -> nn.Module:
    """Give a model weights so large that attention is far from uniform."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
    return model.eval()


def causal_model(config: Any) -> nn.Module:
    return lively(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))


@pytest.fixture
def llama() -> nn.Module:
    return causal_model(transformers.LlamaConfig(**SIZES))


@pytest.fixture
def mistral() -> nn.Module:
    return causal_model(transformers.MistralConfig(**SIZES, sliding_window=5))


@pytest.fixture
def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return lively(transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="sdpa"))


@pytest.fixture
def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    return lively(transformers.BartForConditionalGeneration._from_config(config, attn_implementation="sdpa"))


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def eager() -> Callable[..., Any]:
    """Return a function that runs a model on ``eager`` and returns its output with all weights."""

    def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = model.config._attn_implementation
        model.set_attn_implementation("eager")
        try:
            with torch.no_grad():
                return model(*args, **kwargs, output_attentions=True)
        finally:
            model.set_attn_implementation(before)

    return run
