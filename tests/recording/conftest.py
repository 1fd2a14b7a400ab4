"""Small random models, and what they attend to by ``eager``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import BART, T5, VOCABULARY, lively
from tests.tiny_models import SIZES as TINY
from torch import Tensor, nn

SIZES = TINY | {"num_hidden_layers": 3}


def causal_model(config: Any) -> nn.Module:
    return lively(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))


def two_layers(window: int | None = None) -> nn.Module:
    """Return a Llama, or a Mistral with a sliding window."""
    sizes = SIZES | {"num_hidden_layers": 2}
    if window is None:
        return causal_model(transformers.LlamaConfig(**sizes))
    return causal_model(transformers.MistralConfig(**sizes, sliding_window=window))


def share_heads(model: nn.Module, mesh: Any) -> nn.Module:
    """Divide the heads of a model over the ranks of a mesh."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"o_proj": RowwiseParallel()} | {f"{name}_proj": ColwiseParallel() for name in "qkv"}
    for layer in model.model.layers:
        parallelize_module(layer.self_attn, mesh, plan)
    return model


class Tokenizer:
    """Writes each token as its number."""

    def decode(self, ids: list[int]) -> str:
        return f"<{ids[0]}>"


@pytest.fixture
def llama() -> nn.Module:
    return causal_model(transformers.LlamaConfig(**SIZES))


@pytest.fixture
def mistral() -> nn.Module:
    return causal_model(transformers.MistralConfig(**SIZES, sliding_window=5))


@pytest.fixture
def t5() -> nn.Module:
    config = transformers.T5Config(**T5)
    return lively(transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="sdpa"))


@pytest.fixture
def bart() -> nn.Module:
    config = transformers.BartConfig(**BART | {"decoder_layers": 3})
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
