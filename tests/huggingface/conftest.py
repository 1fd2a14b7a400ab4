"""Small random models of real architectures, and how they are run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import SIZES, SPECIAL, VOCABULARY
from torch import Tensor, nn

import attlas.huggingface  # noqa: F401 - registers "attlas"

CONFIGS: dict[str, Callable[[], object]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        **SPECIAL,
        scale_attn_by_inverse_layer_idx=True,
    ),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral, window": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
    "gemma2, capped": lambda: transformers.Gemma2Config(**SIZES, sliding_window=6, attn_logit_softcapping=0.05),
    "gpt_oss, sinks": lambda: transformers.GptOssConfig(
        **SIZES | {"intermediate_size": 16}, sliding_window=6, num_local_experts=2, num_experts_per_tok=1
    ),
}


def make(name: str) -> nn.Module:
    """Return a random model whose logits depend on attention by more than rounding."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="attlas").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "sinks" in parameter_name:
                parameter.normal_(std=0.25)
    return model


@torch.no_grad()
def both(model: nn.Module, *args: Any, **given: Any) -> tuple[Any, Any]:
    """Run a model on attlas and on eager, with all weights."""
    outputs = []
    for implementation in ("attlas", "eager"):
        model.set_attn_implementation(implementation)
        outputs.append(model(*args, **given, output_attentions=True))
    return outputs[0], outputs[1]


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return make(request.param)


@pytest.fixture
def gpt2() -> nn.Module:
    return make("gpt2")


@pytest.fixture
def llama() -> nn.Module:
    return make("llama")


@pytest.fixture
def padded() -> Callable[[str | None], tuple[Tensor, Tensor]]:
    """Return a function from a side to token ids and their attention mask: three texts, two of them shorter."""
    return _padded


def _padded(side: str | None) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row, missing in ((1, 4), (2, 9)):
        if side == "left":
            mask[row, :missing] = 0
        elif side == "right":
            mask[row, -missing:] = 0
    return ids.masked_fill(mask == 0, 0), mask
