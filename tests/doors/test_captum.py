"""captum's LayerActivation gives weights of layers, which stay lazy."""

import pytest
import torch

import attlas

transformers = pytest.importorskip("transformers", reason="transformers is in the extra `hf`")

TOKENS = torch.arange(20)[None]


def test_activations_of_layers_are_those_of_eager() -> None:
    attr = pytest.importorskip("captum.attr", reason="captum is not installed: make test-doors")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    layers = [block.attn for block in model.transformer.h]

    def activations(implementation: str) -> list[tuple[torch.Tensor, ...]]:
        model.set_attn_implementation(implementation)
        found = attr.LayerActivation(lambda ids: model(ids).logits[:, -1], layers).attribute(TOKENS)
        one = attr.LayerActivation(lambda ids: model(ids).logits[:, -1], layers[1]).attribute(TOKENS)
        assert len(one) == 2
        return found

    wanted = activations("eager")
    with attlas.huggingface.weights_as_tensors():
        found = activations("attlas")
    for (ours, lazy), (theirs, weights) in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert isinstance(lazy, torch.Tensor)
        torch.testing.assert_close(lazy[0, 1, -1], weights[0, 1, -1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lazy.matrix.to_dense(), weights, rtol=1e-5, atol=1e-6)
