"""Interventions on models of transformers, against dense attention whose weights are edited by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attlas
from attlas.interventions import Ablate, DetachWeights, ReplaceWeights, ScaleLogits, Suppress, Temperature

INF = math.inf
MEAN = torch.arange(8.0)
IDS = torch.randint(2, 50, (2, 17), generator=torch.Generator().manual_seed(1))
Case = tuple[Any, str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]

# The intervention, which numbers it edits, and how: from the numbers and places (head, query, key) to the numbers.
CASES: dict[str, Case] = {
    "suppress a span": (
        lambda **w: Suppress(keys=(3, 6), **w),
        "logits",
        lambda t, h, i, j: t.masked_fill((j >= 3) & (j < 6) & (h >= 0) & (i >= 0), -INF),
    ),
    "suppress indices of some queries and heads": (
        lambda **w: Suppress(heads=[1, -1], queries=[7, 9, 12], keys=[0, 4], **w),
        "logits",
        lambda t, h, i, j: t.masked_fill(
            ((h == 1) | (h == 3)) & ((i == 7) | (i == 9) | (i == 12)) & ((j == 0) | (j == 4)), -INF
        ),
    ),
    "suppress pairs": (
        lambda **w: Suppress(pairs=lambda b, h, i, j: (i - j) % 3 == 1, queries=slice(4, None), **w),
        "logits",
        lambda t, h, i, j: t.masked_fill(((i - j) % 3 == 1) & (i >= 4) & (h >= 0), -INF),
    ),
    "suppress all keys of a query": (
        lambda **w: Suppress(queries=5, **w),
        "logits",
        lambda t, h, i, j: t.masked_fill((i == 5) & (h >= 0) & (j >= 0), -INF),
    ),
    "suppress after softmax": (
        lambda **w: Suppress(heads=[0, 2], keys=(2, 9), when="after", **w),
        "weights",
        lambda t, h, i, j: t.masked_fill(((h == 0) | (h == 2)) & (j >= 2) & (j < 9) & (i >= 0), 0.0),
    ),
    "scale all logits": (lambda **w: ScaleLogits(0.5, **w), "logits", lambda t, h, i, j: t * 0.5),
    "scale the logits of heads and queries": (
        lambda **w: ScaleLogits(-1.5, heads=2, queries=(3, 11), **w),
        "logits",
        lambda t, h, i, j: torch.where((h == 2) & (i >= 3) & (i < 11) & (t > -INF), t * -1.5, t),
    ),
    "scale the logits of keys": (
        lambda **w: ScaleLogits(2.0, keys=[1, 4, 5], **w),
        "logits",
        lambda t, h, i, j: torch.where((j == 1) | (j == 4) | (j == 5), t * 2.0, t),
    ),
    "scale the logits of pairs to 0": (
        lambda **w: ScaleLogits(0.0, heads=[0, 3], queries=(5, 9), keys=(0, 4), **w),
        "logits",
        lambda t, h, i, j: torch.where(
            ((h == 0) | (h == 3)) & (i >= 5) & (i < 9) & (j < 4) & (t > -INF), torch.zeros_like(t), t
        ),
    ),
    "temperature": (
        lambda **w: Temperature(0.4, heads=[1], queries=slice(6, None), **w),
        "logits",
        lambda t, h, i, j: torch.where((h == 1) & (i >= 6), t / 0.4, t),
    ),
    "ablate": (
        lambda **w: Ablate(heads=[0, 3], **w),
        "output",
        lambda t, h, i, j: t.masked_fill((h == 0) | (h == 3), 0.0),
    ),
    "ablate one head to a mean": (
        lambda **w: Ablate(heads=[2], value=MEAN[None], **w),
        "output",
        lambda t, h, i, j: torch.where(h == 2, MEAN.to(t), t),
    ),
    "ablate some queries to a mean": (
        lambda **w: Ablate(heads=[1, 2], queries=(2, 8), value=torch.stack([MEAN, -MEAN]), **w),
        "output",
        lambda t, h, i, j: torch.where(
            ((h == 1) | (h == 2)) & (i >= 2) & (i < 8), MEAN.to(t) * torch.where(h == 1, 1.0, -1.0).to(t), t
        ),
    ),
}  # fmt: skip

LAYERS = {"llama": "model.layers.{}.self_attn", "gpt2": "transformer.h.{}.attn"}


def by_hand(edit: Callable[..., Tensor], chosen: Callable[[str], bool]) -> Callable[[str, Tensor, int], Tensor]:
    """Return an edit of dense numbers of some attentions, at the positions of the text."""

    def change(path: str, t: Tensor, first: int) -> Tensor:
        if not chosen(path):
            return t
        h, i, j = (torch.arange(size) for size in t.shape[1:])
        return edit(t, h.view(-1, 1, 1), i.view(-1, 1) + first, j)

    return change


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", LAYERS)
def test_equals_edited_dense_weights(name: str, case: str, tiny: Any, edited: Any) -> None:
    model, (make, what, edit) = tiny(name), CASES[case]
    path = LAYERS[name].format(1)
    with edited(model, **{what: by_hand(edit, lambda p: p == path)}):
        wanted = model(IDS, labels=IDS)
    wanted.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    plain = model(IDS).logits
    with attlas.intervene(model, make(layers=1)):
        found = model(IDS, labels=IDS)
    found.loss.backward()
    assert (wanted.logits - plain).abs().max() > 1e-6, "the edit changes something"
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-9, atol=1e-9)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[n], rtol=1e-7, atol=1e-9, msg=n)
    assert torch.equal(model(IDS).logits, plain), "after the block the model is as it was"


@pytest.mark.parametrize(
    "case",
    [
        "suppress a span",
        "suppress pairs",
        "suppress after softmax",
        "ablate",
        "temperature",
        "scale the logits of keys",
        "scale the logits of pairs to 0",
    ],
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_sees_positions_of_the_text(cache: str, case: str, tiny: Any, edited: Any) -> None:
    model, (make, what, edit) = tiny("llama"), CASES[case]
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with edited(model, **{what: by_hand(edit, lambda p: True)}):
        wanted = model.generate(IDS[:, :10], **options)
    more = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    with attlas.intervene(model, make()):
        found = model.generate(IDS[:, :10], **options, **more)
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["cross", "encoder", "self"])
@pytest.mark.parametrize("case", ["suppress a span", "suppress after softmax", "scale the logits of keys", "ablate",
                                  "scale the logits of heads and queries"])  # fmt: skip
def test_encoder_and_decoder(kind: str, case: str, tiny: Any, edited: Any) -> None:
    model, (make, what, edit) = tiny("t5"), CASES[case]
    paths = {"cross": "decoder.block.1.layer.1", "encoder": "encoder.block.1", "self": "decoder.block.1.layer.0"}
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :12].flip(0)}
    with edited(model, **{what: by_hand(edit, lambda p: p.startswith(paths[kind]))}), torch.no_grad():
        wanted = model(**inputs).logits
    with attlas.intervene(model, make(layers=f"{kind}.1")), torch.no_grad():
        found = model(**inputs).logits
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert (found - model(**inputs).logits).abs().max() > 1e-6


def test_generation_with_cross_attention(tiny: Any, edited: Any) -> None:
    model, (make, what, edit) = tiny("t5"), CASES["suppress a span"]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    with edited(model, **{what: by_hand(edit, lambda p: "EncDec" in p)}, cross=lambda p: "EncDec" in p):
        wanted = model.generate(IDS, **options)
    with attlas.intervene(model, make(layers="cross")):
        found = model.generate(IDS, **options)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-9, atol=1e-9)


def test_replaced_weights_are_those_of_the_recording(tiny: Any, edited: Any) -> None:
    model, other = tiny("llama"), IDS.flip(1)
    with attlas.record(model) as atlas, torch.no_grad():
        model(other)
    recorded = atlas[1].to_dense()

    def replaced(t: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where((h == 0) | (h == 3), recorded[:, :, int(i[0]) : int(i[-1]) + 1, : t.shape[-1]], t)

    edit = by_hand(replaced, lambda path: path == "model.layers.1.self_attn")
    with edited(model, weights=edit), torch.no_grad():
        wanted = model(IDS).logits
    for recording in (atlas, atlas.entry(1), atlas[1]):
        with attlas.intervene(model, ReplaceWeights(recording, layers=1, heads=[0, 3])), torch.no_grad():
            torch.testing.assert_close(model(IDS).logits, wanted, rtol=1e-9, atol=1e-9)
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with edited(model, weights=edit):
        steps = model.generate(IDS[:, :10], **options)
    with attlas.intervene(model, ReplaceWeights(atlas, layers=1, heads=[0, 3])), attlas.record(model) as again:
        found = model.generate(IDS[:, :10], **options)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(steps.logits), rtol=1e-9, atol=1e-9)
    matrix = again[1].to_dense()
    torch.testing.assert_close(matrix[:, [0, 3]], recorded[:, [0, 3], :13, :13], rtol=1e-9, atol=1e-12)


def test_own_weights_change_nothing_but_the_gradient(tiny: Any) -> None:
    model = tiny("t5")
    inputs = {"input_ids": IDS, "labels": IDS[:, :12].contiguous()}
    with attlas.record(model) as atlas, torch.no_grad():
        plain = model(**inputs).logits
    with attlas.intervene(model, ReplaceWeights(atlas)):
        found = model(**inputs)
    torch.testing.assert_close(found.logits, plain, rtol=1e-9, atol=1e-9)
    found.loss.backward()
    attention = model.encoder.block[0].layer[0].SelfAttention
    for stopped in (attention.q, attention.k, attention.relative_attention_bias):
        assert stopped.weight.grad is None or stopped.weight.grad.abs().max() == 0
    assert attention.v.weight.grad.abs().max() > 0


def test_gradient_stops_at_the_pattern(tiny: Any, edited: Any) -> None:
    model = tiny("llama")

    def stopped(t: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(((h == 1) | (h == 2)) & (i >= 4), t.detach(), t)

    def gradients(block: Any) -> dict[str, Tensor]:
        model.zero_grad()
        with block:
            model(IDS, labels=IDS).loss.backward()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}

    wanted = gradients(edited(model, weights=by_hand(stopped, lambda p: True)))
    found = gradients(attlas.intervene(model, DetachWeights(heads=[1, 2], queries=slice(4, None))))
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-7, atol=1e-9, msg=name)
    none = gradients(attlas.intervene(model, DetachWeights()))
    assert none["model.layers.1.self_attn.q_proj.weight"].abs().max() == 0
    assert none["model.layers.1.self_attn.v_proj.weight"].abs().max() > 0


def test_padded_batch_and_recording_in_any_order(tiny: Any, edited: Any) -> None:
    model, (make, what, edit) = tiny("llama"), CASES["suppress a span"]
    padding = torch.ones_like(IDS)
    padding[1, :5] = 0
    inputs = {"input_ids": IDS, "attention_mask": padding}
    with edited(model, **{what: by_hand(edit, lambda p: True)}), torch.no_grad():
        wanted = model(**inputs).logits
    real = padding.bool()
    for first, second in ((0, 1), (1, 0)):
        blocks = [lambda: attlas.intervene(model, make()), lambda: attlas.record(model)]
        with blocks[first]() as a, blocks[second]() as b, torch.no_grad():
            found = model(**inputs).logits
        atlas = a if isinstance(a, attlas.Atlas) else b
        torch.testing.assert_close(found[real], wanted[real], rtol=1e-9, atol=1e-9)
        weights = atlas[1].to_dense()
        assert weights[..., 3:6].abs().max() == 0
        torch.testing.assert_close(weights[0, :, 0].sum(-1), torch.ones(4, dtype=torch.float64))


def test_weights_after_softmax_are_recorded_saved_and_loaded(tiny: Any, tmp_path: Any) -> None:
    model = tiny("gpt2")
    with attlas.record(model, layers=0) as plain, torch.no_grad():
        model(IDS)
    cut = Suppress(layers=0, keys=(2, 9), when="after")
    with attlas.intervene(model, cut), attlas.record(model, layers=0) as atlas, torch.no_grad():
        model(IDS)
    wanted = plain[0].to_dense().clone()
    wanted[..., 2:9] = 0
    atlas.save(tmp_path / "cut.atlas")
    v = torch.randn(2, 4, 17, 5, dtype=torch.float64)
    for found in (atlas[0], attlas.load(tmp_path / "cut.atlas")[0]):
        torch.testing.assert_close(found.to_dense(), wanted, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found @ v, wanted @ v, rtol=1e-9, atol=1e-12)


def test_nested_blocks_apply_the_outer_one_first(tiny: Any, edited: Any) -> None:
    model = tiny("llama")
    edit = by_hand(lambda t, h, i, j: (t * 2.0).masked_fill(j == 3, -INF), lambda p: True)
    late = by_hand(lambda t, h, i, j: t.masked_fill((j >= 5) & (j < 7), 0.0), lambda p: True)
    with edited(model, logits=edit, weights=late), torch.no_grad():
        wanted = model(IDS).logits
    outer = [ScaleLogits(2.0), Suppress(keys=(5, 7), when="after")]
    with attlas.intervene(model, outer), attlas.intervene(model, Suppress(keys=3)), torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, wanted, rtol=1e-9, atol=1e-9)


def test_an_exception_leaves_the_model_as_it_was(tiny: Any) -> None:
    model = tiny("gpt2")
    before, hooks = model.config._attn_implementation, count_hooks(model)
    plain = model(IDS).logits
    with pytest.raises(ZeroDivisionError), attlas.intervene(model, Ablate(heads=0)):
        model(IDS)
        raise ZeroDivisionError
    assert (model.config._attn_implementation, count_hooks(model)) == (before, hooks)
    assert torch.equal(model(IDS).logits, plain)


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_gradient_checkpointing_computes_the_same_again(tiny: Any) -> None:
    model = tiny("llama").train()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.zero_grad()
        with attlas.intervene(model, [Suppress(keys=(3, 6)), Ablate(heads={1: [2]})]):
            model(IDS, labels=IDS, use_cache=False).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
