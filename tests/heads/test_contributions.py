"""What heads bring together, of recorded models: against the vectors that their own values and projections give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import attlas
import attlas.huggingface
import attlas.models
from attlas import heads
from attlas.errors import DtypeError, RecordingError, ShapeError

IDS = torch.arange(5, 45)[None]


def shipped() -> Any:
    return AutoModelForCausalLM.from_pretrained(attlas.models.path(), attn_implementation="attlas").eval()


def llama() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    grouped: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    grouped["attn_implementation"] = "attlas"
    return LlamaForCausalLM(LlamaConfig(**sizes, **grouped)).eval()


@pytest.mark.parametrize("make", [shipped, llama])
def test_equals_the_vectors_of_a_recorded_model(make: Any) -> None:
    model = make()
    with torch.no_grad(), attlas.record(model, values=True, gates=True) as atlas:
        stream = model(IDS, output_hidden_states=True).hidden_states
    entry: Any = atlas.entry(1)
    layer = model.get_submodule(entry.name)
    projection = layer.o_proj.weight.T if make is llama else layer.c_proj.weight
    A, v = entry.matrix.to_dense().double(), entry.values.double()
    outward = projection.detach().double().unflatten(0, (A.shape[1], -1))
    vectors = torch.einsum("bhij,bhjd,hdD->bijD", A, v.repeat_interleave(A.shape[1] // v.shape[1], 1), outward)
    together = heads.contributions(atlas, 1, model)
    wanted = vectors.norm(dim=-1).unsqueeze(1)
    torch.testing.assert_close(together.to_dense().double(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.max()))
    one_by_one = entry.value_weighted(output=True).to_dense().sum(1, keepdim=True)
    assert bool((together.to_dense() <= one_by_one * (1 + 1e-5)).all())

    shares = heads.contributions(atlas, 1, model, residual=stream[1])
    x, bias = stream[1].double(), 0.0 if make is llama else layer.c_proj.bias.detach().double()
    y = x + vectors.sum(2) + bias
    vectors[:, range(IDS.shape[1]), range(IDS.shape[1])] += x
    near = (y.norm(dim=-1, keepdim=True) - (y.unsqueeze(2) - vectors).norm(dim=-1)).clamp_min(0)
    torch.testing.assert_close(
        shares.to_dense().double()[:, 0], near / near.sum(-1, keepdim=True), rtol=1e-3, atol=1e-5
    )
    every = [heads.contributions(atlas, layer, model, residual=stream[layer]) for layer in atlas.layers()]
    rows = heads.rollout(every, residual=0.0)
    torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows.sum(-1)))


def test_of_some_heads_and_what_is_missing() -> None:
    model = shipped()
    with torch.no_grad(), attlas.record(model, heads=[1, 4], values=True, gates=True) as some:
        stream = model(IDS, output_hidden_states=True).hidden_states
    with torch.no_grad(), attlas.record(model, values=True, gates=True) as atlas:
        model(IDS)
    entry: Any = atlas.entry(2)
    outward = model.get_submodule(entry.name).c_proj.weight.detach().unflatten(0, (6, -1))[[1, 4]]
    dense = entry.matrix.to_dense()[:, [1, 4]]
    wanted = torch.einsum("bhij,bhjd,hdD->bijD", dense, entry.values[:, [1, 4]], outward).norm(dim=-1)
    torch.testing.assert_close(heads.contributions(some, 2, model)[:, 0, :, :], wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ShapeError, match="2 of 6 heads were recorded"):
        heads.contributions(some, 2, model, residual=stream[2])
    with pytest.raises(ShapeError, match="residual must be the stream"):
        heads.contributions(atlas, 2, model, residual=stream[2][:, :5])
    with pytest.raises(DtypeError, match="residual must be a Tensor"):
        heads.contributions(atlas, 2, model, residual="stream")  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="atlas must be a recording"):
        heads.contributions(model, 2, model)
    with pytest.raises(DtypeError, match="model must be the recorded model"):
        heads.contributions(atlas, 2, "model")  # type: ignore[arg-type]
    with pytest.raises(RecordingError, match="output projection behind the heads must be known"):
        heads.contributions(atlas, 2, nn.Linear(2, 2))
    with torch.no_grad(), attlas.record(model, values=True) as bare:
        model(IDS)
    with pytest.raises(RecordingError, match="no gates"):
        heads.contributions(bare, 2, model)
