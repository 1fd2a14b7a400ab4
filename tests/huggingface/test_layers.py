"""Which attention layers are captured can be told before a forward pass."""

import pytest
import torch
import transformers
from torch import nn

from attlas.huggingface import modules_without_interface

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
OWN = {
    "falcon": (lambda: transformers.FalconModel(transformers.FalconConfig(**SIZES)), ["h.0.self_attention"]),
    "bloom": (
        lambda: transformers.BloomModel(transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=20)),
        ["h.0.self_attention"],
    ),
    "gptj": (
        lambda: transformers.GPTJModel(
            transformers.GPTJConfig(n_embd=16, n_layer=1, n_head=2, rotary_dim=4, vocab_size=20)
        ),
        ["h.0.attn"],
    ),
    "deberta": (
        lambda: transformers.DebertaV2Model(transformers.DebertaV2Config(intermediate_size=16, **SIZES)),
        ["encoder.layer.0.attention.self"],
    ),
    "torch": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2), 1), ["layers.0.self_attn"]),
}
INTERFACE = {
    "bert, one attention inside another": lambda: transformers.BertModel(
        transformers.BertConfig(intermediate_size=16, **SIZES)
    ),
    "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(intermediate_size=16, **SIZES)),
    "t5": lambda: transformers.T5Model(
        transformers.T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ),
    "no attention": lambda: nn.Linear(2, 2),
}


@pytest.mark.filterwarnings("ignore:.*nested_tensor")
@pytest.mark.parametrize("name", OWN)
def test_layers_of_their_own_are_named(name: str) -> None:
    make, wanted = OWN[name]
    model = make()
    found = modules_without_interface(model)
    assert [path for path in found if "dense" not in path] == wanted
    assert all(isinstance(model.get_submodule(path), nn.Module) for path in found)


@pytest.mark.parametrize("name", INTERFACE)
def test_models_on_the_interface_have_none(name: str) -> None:
    assert modules_without_interface(INTERFACE[name]()) == []


def test_the_root_itself_may_be_such_a_layer() -> None:
    assert modules_without_interface(nn.MultiheadAttention(8, 2)) == [""]
    assert modules_without_interface(torch.nn.Sequential(nn.MultiheadAttention(8, 2))) == ["0"]
