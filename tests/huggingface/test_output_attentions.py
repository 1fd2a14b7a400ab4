"""What transformers must be, and what its configurations may ask for."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from tests.messages import refusal
from torch import Tensor

import attlas
import attlas.huggingface
import attlas.models
from attlas.errors import MissingExtraError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SIZES = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def ids() -> Tensor:
    return torch.arange(3, 12)[None]


def test_a_model_is_loaded_that_returns_attentions(ids: Tensor) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        attlas.models.path(), output_attentions=True, attn_implementation="attlas"
    )
    with torch.no_grad():
        attentions = model(ids).attentions
    assert all(isinstance(A, attlas.AttentionMatrix) for A in attentions)


def test_a_configuration_asks_for_attentions(ids: Tensor, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="attlas")
    assert model(ids).attentions is None
    model.config.output_attentions = True
    assert len(model(ids).attentions) == 2
    model.save_pretrained(tmp_path)  # its config.json says output_attentions
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="attlas")
    assert isinstance(again(ids).attentions[0], attlas.AttentionMatrix)


def test_other_functions_are_refused_as_before(ids: Tensor) -> None:
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="not supported when using the `attn_implementation` set to sdpa"):
        model.config.output_attentions = True
    with pytest.raises(StrictDataclassClassValidationError, match="not supported when using"):
        transformers.AutoModelForCausalLM.from_pretrained(
            attlas.models.path(), output_attentions=True, attn_implementation="sdpa"
        )


def test_an_old_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not the name above: transformers puts another module in its place while it is imported.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.47.1")
    said = refusal(MissingExtraError, lambda: importlib.reload(attlas.huggingface))
    assert said == "attlas.huggingface: transformers 4.47.1"
