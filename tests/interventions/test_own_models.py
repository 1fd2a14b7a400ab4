"""Interventions on models of plain modules that compute with attlas, against a twin with dense weights."""

from typing import Any

import pytest
import torch
from tests.own_models import Attention, LanguageModel, Twice, some_ids, twin
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import attlas
from attlas import heads
from attlas.errors import OutOfRangeError, RecordingError
from attlas.interventions import Ablate, DetachWeights, ReplaceWeights, ScaleLogits, Suppress, Temperature
from attlas.matrix import observers
from attlas.recording import hooks

IDS = some_ids()
LATE, KEYS = torch.arange(12) >= 4, torch.arange(12) < 3


def normalized(weights: Tensor) -> Tensor:
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1.0, total)


def suppressed(weights: Tensor) -> Tensor:
    return weights.masked_fill(LATE[:, None] & KEYS, 0.0)


def in_heads(edit: Any, *chosen: int) -> Any:
    def of_heads(weights: Tensor) -> Tensor:
        return torch.stack([edit(w) if head in chosen else w for head, w in enumerate(weights.unbind(1))], dim=1)

    return of_heads


# An intervention on layer 1, and what it does to dense weights.
CASES: dict[str, tuple[Any, Any]] = {
    "before": (Suppress(1, queries=slice(4, None), keys=(0, 3)), lambda w: normalized(suppressed(w))),
    "after": (Suppress(1, queries=slice(4, None), keys=(0, 3), when="after"), suppressed),
    "heads": (Suppress(heads={1: [2]}, keys=0), in_heads(lambda w: normalized(w * (torch.arange(12) != 0)), 2)),
    "logits": (ScaleLogits(2.0, layers=["blocks.1.attn"]), lambda w: normalized(w**2)),
    "temperature": (Temperature(0.5, layers="self.1", heads=[0, 3]), in_heads(lambda w: normalized(w**2), 0, 3)),
    "ablate": (Ablate(heads={-1: [1]}), in_heads(torch.zeros_like, 1)),
    "detach": (DetachWeights(layers=1), lambda w: w.detach()),
}


@pytest.mark.parametrize("how", ["attention", "operator", "einsum", "pooled"])
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_dense_weights(name: str, how: str) -> None:
    intervention, edit = CASES[name]
    model = LanguageModel(how=how).double()
    other = twin(model, lambda path, w: edit(w) if path == "blocks.1.attn" else w)
    with attlas.intervene(model, intervention), attlas.record(model) as atlas:
        out = model(IDS)
    wanted = other(IDS)
    torch.testing.assert_close(out, wanted)
    out.square().sum().backward()
    wanted.square().sum().backward()
    for (parameter, p), t in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, t.grad, msg=parameter)
    assert len(atlas) == 2
    assert not observers.active
    torch.testing.assert_close(model(IDS), twin(model)(IDS))


def test_recordings_inside_have_the_changed_weights() -> None:
    model, shown = LanguageModel().double(), {}
    intervention, edit = CASES["before"]

    def note(path: str, weights: Tensor) -> Tensor:
        shown[path] = (edit(weights) if path == "blocks.1.attn" else weights).detach()
        return shown[path]

    with attlas.intervene(model, intervention), attlas.record(model) as atlas:
        model(IDS)
    twin(model, note)(IDS)
    for entry in atlas.entries:
        torch.testing.assert_close(entry.matrix.to_dense(), shown[entry.name])


def test_recorded_weights_are_patched_in() -> None:
    model, ids = LanguageModel().eval(), IDS.roll(1, dims=1)
    with attlas.record(model) as atlas:
        model(ids)
    patched = twin(model, lambda path, w: atlas[0].to_dense() if path == "blocks.0.attn" else w)
    with attlas.intervene(model, ReplaceWeights(atlas, layers=0)):
        torch.testing.assert_close(model(IDS), patched(IDS), atol=1e-5, rtol=1e-4)


def test_longer_recording_and_one_sequence_serve_a_shorter_batch() -> None:
    """What the rule of ReplaceWeights accepts gives the weights at the same positions."""
    model = LanguageModel().eval()
    with attlas.record(model) as longer, torch.no_grad():
        model(some_ids(20, 1))
    weights = longer[1].to_dense()[:, :, :12, :12].expand(2, -1, -1, -1)
    wanted = twin(model, lambda path, w: weights if path == "blocks.1.attn" else w)
    with attlas.intervene(model, ReplaceWeights(longer, layers=1)):
        torch.testing.assert_close(model(IDS), wanted(IDS), atol=1e-5, rtol=1e-4)


def test_each_product_of_a_module_is_changed_under_its_number() -> None:
    """A matrix that is multiplied twice is changed both times; of two matrices only the chosen one is."""
    model = LanguageModel(layers=1, kind=Twice).eval()
    attn, seen = model.blocks[0].attn, {}

    def outputs(*chosen: str) -> Tensor:
        handle = attn.out.register_forward_pre_hook(lambda module, args: seen.update(out=args[0]))
        try:
            with attlas.intervene(model, [Ablate(layers=list(chosen))] if chosen else []):
                model(IDS)
        finally:
            handle.remove()
        return seen["out"]

    first, second = outputs("blocks.0.attn#1"), outputs("blocks.0.attn#0")
    torch.testing.assert_close(first + second, outputs())
    assert not outputs("blocks.0.attn").any()
    table = heads.effect(model, IDS)
    assert [(row["layer"], row["head"], row["name"]) for row in table] == [
        (layer, head, name) for layer, name in enumerate(("blocks.0.attn", "blocks.0.attn#1")) for head in range(4)
    ]


def test_effect_of_each_head_is_that_of_dense_weights() -> None:
    model = LanguageModel().eval()
    table = heads.effect(model, IDS)
    assert len(table) == 8

    def loss(of: nn.Module) -> float:
        return float(functional.cross_entropy(of(IDS)[:, :-1].mT, IDS[:, 1:]))

    for row in table[::3]:
        zero = in_heads(torch.zeros_like, row["head"])
        with torch.no_grad():
            other = loss(twin(model, lambda path, w, row=row, zero=zero: zero(w) if path == row["name"] else w))
        assert row["value"] == pytest.approx(other, abs=1e-5)


def test_dropout_stays_and_is_drawn_apart_for_parts() -> None:
    """What is not changed is dropped as without interventions; heads that are computed apart drop apart."""
    model = LanguageModel(layers=1, dropout=0.5).train()
    torch.manual_seed(3)
    wanted = model(IDS)
    torch.manual_seed(3)
    with attlas.intervene(model, []):
        assert torch.equal(model(IDS), wanted)

    class Uniform(nn.Module):
        def forward(self, q: Tensor, v: Tensor) -> Tensor:
            return attlas.attention(q, q, v, dropout_p=0.5)

    n = 128
    uniform, v = Uniform(), torch.eye(n).expand(1, 2, n, n)
    with attlas.intervene(uniform, Suppress(heads=[1], keys=0)):  # head 1 is computed apart from head 0
        kept = uniform(torch.zeros(1, 2, n, 4), v) != 0
    assert float(kept.float().mean()) == pytest.approx(0.5, abs=0.02)
    both = kept[0, :, :, 1:].unbind(0)
    assert float((both[0] & both[1]).float().mean()) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules_are_changed_in_the_backward_too(reentrant: bool) -> None:
    model = LanguageModel().double()
    blocks, x = nn.Sequential(*model.blocks), model.embedding(IDS).detach().requires_grad_()

    def gradients(checkpointed: bool) -> list[Tensor]:
        blocks.zero_grad()
        with attlas.intervene(blocks, [Suppress(keys=(0, 3)), Ablate(heads={1: [2]})]):
            y = x
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=reentrant) if checkpointed else block(y)
            y.square().sum().backward()
        return [p.grad.clone() for p in blocks.parameters()]

    for found, wanted in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, wanted)


def test_checkpointed_function_is_not_changed_silently() -> None:
    """Outside of a module's forward nothing tells which attention the backward computes again."""

    class Checkpointed(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return checkpoint(super().attend, q, k, v, use_reentrant=False)

    model = LanguageModel(kind=Checkpointed)
    with pytest.raises(RecordingError, match="checkpointing of a function"), attlas.intervene(model, Suppress(keys=0)):
        model(IDS).sum().backward()
    assert not observers.active
    with attlas.record(model) as atlas:  # a recording loses nothing
        model(IDS).sum().backward()
    assert len(atlas.entries) == 2
    named = LanguageModel(kind=Checkpointed, how="pooled")
    with attlas.intervene(named, Suppress(keys=0)):
        named(IDS).sum().backward()


def test_nothing_chosen_is_the_baseline() -> None:
    model = LanguageModel().eval()
    wanted = model(IDS)
    for nothing in ([], ()):
        with attlas.intervene(model, nothing) as same:
            assert same is model
            assert torch.equal(model(IDS), wanted)
    with attlas.intervene(model, []), attlas.record(model) as atlas:
        model(IDS)
    assert len(atlas) == 2
    assert hooks._active_changers == 0


def test_wrong_heads_and_layers_are_refused() -> None:
    model = LanguageModel().eval()
    for wrong in (Suppress(heads=[4], keys=0), Suppress(layers=5, keys=0), Suppress(layers="blocks.1.attn#1", keys=0)):
        with pytest.raises(OutOfRangeError), attlas.intervene(model, wrong):
            model(IDS)


class Gated(Attention):
    """A matrix that is changed before it meets the values is no attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        A = attlas.attend(q, k, mask=attlas.Causal())
        return A @ v if self.how == "attention" else (torch.sigmoid(q[..., :1]) * A) @ v


@pytest.mark.parametrize("layers", [0, [0, 1], "blocks.0.attn", {0: [1]}], ids=repr)
def test_a_chosen_layer_that_did_not_attend_is_said(layers: Any) -> None:
    """Nothing of it was changed, so that a loss without it would be the loss with it."""
    model = LanguageModel(kind=Gated).eval()
    model.blocks[0].attn.how = "gated"
    item = Ablate(heads=layers) if isinstance(layers, dict) else Ablate(layers=layers)
    told = r"Ablate\(\): a chosen layer must attend[^$]*these attended: blocks\.1\.attn"
    with pytest.raises(RecordingError, match=told), attlas.intervene(model, item):
        model(IDS)
    with attlas.intervene(model, Ablate(layers=1)):
        model(IDS)
