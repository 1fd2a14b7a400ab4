"""Models on attlas equal the same models on ``eager``: logits, weights, generated text, gradients."""

import importlib
import sys
from collections.abc import Callable

import pytest
import torch
from tests.huggingface.conftest import both
from tests.messages import refusal
from torch import Tensor, nn

import attlas
from attlas.errors import MissingExtraError

Padded = Callable[[str | None], tuple[Tensor, Tensor]]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_gradients_equal_eager(model: nn.Module, padded: Padded) -> None:
    ids, mask = padded("right")
    gradients = []
    for implementation in ("attlas", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(ids, attention_mask=mask).logits
        logits[mask.bool()].square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        scale = gradient.abs().max().item() + 1e-6
        torch.testing.assert_close(gradients[0][name] / scale, gradient / scale, atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_with_four_axes_is_taken_as_it_is(gpt2: nn.Module, additive: bool, padded: Padded) -> None:
    ids, _ = padded(None)
    allowed = torch.ones(17, 17, dtype=torch.bool).tril() & ~torch.eye(17, dtype=torch.bool).roll(-3, 1)
    mask = allowed.expand(3, 1, 17, 17)
    numbers = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        ours = gpt2(ids, attention_mask=numbers if additive else mask, output_attentions=True)
        gpt2.set_attn_implementation("eager")
        theirs = gpt2(ids, attention_mask=numbers)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    assert (ours.attentions[0].to_dense()[:, :, ~allowed] == 0).all()


def test_packed_texts_do_not_see_each_other(gpt2: nn.Module, padded: Padded) -> None:
    ids, _ = padded(None)
    places = torch.cat([torch.arange(7), torch.arange(10)]).expand(3, -1)
    ours, theirs = both(gpt2, ids, position_ids=places, use_cache=False)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    assert (ours.attentions[0][:, :, 7:, :7] == 0).all()


def test_a_causal_model_without_padding_runs_on_a_fused_kernel(gpt2: nn.Module, padded: Padded) -> None:
    ids, _ = padded(None)
    with torch.no_grad():
        A = gpt2(ids, output_attentions=True).attentions[0]
    assert attlas.explain(A).backend in ("native", "sdpa")


def test_missing_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "attlas.huggingface")
    said = refusal(MissingExtraError, lambda: importlib.import_module("attlas.huggingface"))
    assert said == "attlas.huggingface: no module named transformers"
