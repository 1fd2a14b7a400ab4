"""nnsight: what a trace reads of attention is a lazy matrix."""

import pytest
import torch

import attlas

transformers = pytest.importorskip("transformers", reason="transformers is in the extra `hf`")
nnsight = pytest.importorskip("nnsight", reason="nnsight is not installed: make test-doors")


def test_traces_read_what_eager_has() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    model, tokens = transformers.GPT2LMHeadModel(config).eval(), torch.arange(20)[None]
    model.set_attn_implementation("eager")
    wanted = model(tokens, output_attentions=True).attentions[1]
    model.set_attn_implementation("attlas")
    traced = nnsight.NNsight(model)
    with traced.trace(tokens):
        A = traced.transformer.h[1].attn.output[1].save()
    with traced.trace(tokens):
        row = traced.transformer.h[1].attn.output[1][0, 1, -1].save()
        mass = traced.transformer.h[1].attn.output[1].sum(-2).save()
    assert isinstance(A, attlas.AttentionMatrix)
    torch.testing.assert_close(A.to_dense(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(row, wanted[0, 1, -1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mass, wanted.sum(-2), rtol=1e-5, atol=1e-5)
