"""Models of plain modules that compute with attlas: each product is heard once, under its module."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.own_models import SIZE, Attention, Block, LanguageModel, Twice, heads_of, some_ids, twin
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attlas
from attlas import stats
from attlas.errors import OutOfRangeError, RecordingError
from attlas.matrix import observers
from attlas.recording import record

WAYS = ["attention", "matmul", "einsum", "operator", "pooled", "offer", "offer after"]
IDS = some_ids()


def dense_weights(model: LanguageModel, ids: Tensor) -> dict[str, Tensor]:
    """Return the weights of each layer, computed by a twin with dense matrices."""
    found: dict[str, Tensor] = {}

    def edit(path: str, weights: Tensor) -> Tensor:
        found[path] = weights.detach()
        return weights

    twin(model, edit)(ids)
    return found


@pytest.mark.parametrize("how", WAYS)
def test_each_way_is_recorded_once(how: str) -> None:
    model = LanguageModel(how=how).eval()
    before = model(IDS)
    with record(model, statistics=[stats.Entropy()], values=how != "offer") as atlas:
        during = model(IDS)
    assert torch.equal(during, before)
    assert [(e.name, e.layer, e.call) for e in atlas.entries] == [("blocks.0.attn", 0, 0), ("blocks.1.attn", 1, 0)]
    assert not observers.active
    wanted = dense_weights(model, IDS)
    for layer, A in enumerate(atlas):
        torch.testing.assert_close(A.to_dense(), wanted[f"blocks.{layer}.attn"], atol=1e-5, rtol=1e-4)
    assert torch.equal(atlas.ids, IDS)
    assert len(atlas.table()) == 8
    if how == "offer":  # it says nothing of values
        return
    entry = atlas.entry(0)
    v = heads_of(model.blocks[0].attn.qkv(model.blocks[0].norm(model.embedding(IDS))).chunk(3, -1)[2])
    torch.testing.assert_close(entry.values, v.detach())
    assert entry.value_weighted(output=True).shape == (2, 4, 12, 12)


def test_several_attentions_of_a_module_are_numbered(tmp_path: Path) -> None:
    """A matrix that is multiplied with several values is one attention, each other matrix another."""
    model = LanguageModel(kind=Twice).eval()
    before = model(IDS)
    with record(model) as atlas:
        assert torch.equal(model(IDS), before)
    names = ["blocks.0.attn", "blocks.0.attn#1", "blocks.1.attn", "blocks.1.attn#1"]
    assert [(e.name, e.layer) for e in atlas.entries] == list(zip(names, range(4), strict=True))
    torch.testing.assert_close(atlas[0].to_dense(), dense_weights(model, IDS)["blocks.0.attn"], atol=1e-5, rtol=1e-4)
    assert {row["name"] for row in atlas.table()} == set(names)
    atlas.save(tmp_path / "own.atlas")
    again = attlas.load(tmp_path / "own.atlas")
    assert torch.equal(again["blocks.1.attn#1"][0, 0], atlas[3][0, 0])
    chosen = {
        "blocks.0.attn": names[:2], "blocks.0.attn#0": names[:1], "blocks.0.attn#1": names[1:2],
        "blocks.1": names[2:], 1: names[1:2], -1: names[3:], "self.2": names[2:3], "self": names,
    }  # fmt: skip
    for layers, wanted in chosen.items():
        with record(model, layers=layers, heads=[1]) as some:
            model(IDS)
        assert [e.name for e in some.entries] == wanted, layers
        for entry in some.entries:
            assert torch.equal(entry.matrix.to_dense(), atlas[entry.name][:, 1:2].to_dense())
    for wrong in ("blocks.0.attn#2", "blocks.2", 4):
        with pytest.raises(OutOfRangeError, match=r"blocks\.0\.attn#1"), record(model, layers=wrong):
            model(IDS)


class Others(nn.Module):
    """Products and reads that are no attention of a module."""

    def forward(self, x: Tensor) -> Tensor:
        A = attlas.attend(x, x, mask=attlas.Causal())
        return A.mT @ x + x.mT.matmul(A.to_dense()).mT + A.sum(-1, keepdim=True) + A.mean(1).sum()


def test_other_reads_are_no_attention() -> None:
    model = Others()
    with pytest.raises(RecordingError, match=r"attlas\.attention\(q, k, v\)"), record(model) as atlas:
        model(torch.randn(1, 2, 5, 4))
    assert not atlas.entries


def test_products_outside_of_modules_are_no_attention() -> None:
    model, q = LanguageModel().eval(), torch.randn(1, 2, 5, 4)
    with record(model) as atlas:
        attlas.attention(q, q, q)
        Attention()(torch.randn(1, 5, SIZE))  # a module of another model
        model(IDS)
    assert len(atlas.entries) == 2


class Given(nn.Module):
    """Pools with weights that were made elsewhere."""

    def forward(self, A: attlas.AttentionMatrix, v: Tensor) -> Tensor:
        return A @ v


def test_matrix_that_was_made_outside() -> None:
    model, q, v = nn.ModuleDict({"pool": Given()}), torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 2)
    A = attlas.attend(q, q)
    with record(model) as atlas:
        model["pool"](A, v)
    assert [entry.name for entry in atlas.entries] == ["pool"]
    assert torch.equal(atlas[0].to_dense(), A.to_dense())


@pytest.mark.parametrize("lead", [(), (3,), (2, 2, 4)])
def test_matrices_of_any_axes(lead: tuple[int, ...]) -> None:
    """A matrix without heads, or with more axes, is recorded with the axes (batch, heads, m, n)."""
    model, q, v = Given(), torch.randn(*lead, 5, 4), torch.randn(*lead, 5, 2)
    A = attlas.attend(q, q)
    wanted = A @ v
    with record(model, statistics=[stats.Entropy()]) as atlas:
        torch.testing.assert_close(model(A, v), wanted)  # statistics from the same call may change the last bits
        torch.testing.assert_close(model(A, v[..., 0]) if not lead else wanted[..., 0], wanted[..., 0])
    with record(model):
        assert torch.equal(model(A, v), wanted)
    entry = atlas.entries[0]
    assert entry.matrix.shape == A.problem.shape
    torch.testing.assert_close(entry.matrix.to_dense().flatten(), A.to_dense().flatten())
    torch.testing.assert_close(entry.statistics["entropy"].flatten(), stats.entropy(A).flatten())


# ---------------------------------------------------------------------------------------------------------- training


def test_dropout_is_recorded_before_it_drops() -> None:
    """Dropout draws what it draws without a recording, and the recorded weights are those before it."""
    for how in ("attention", "pooled"):
        model = LanguageModel(how=how, dropout=0.4).train()
        torch.manual_seed(1)
        wanted = model(IDS)
        wanted.sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        torch.manual_seed(1)
        with record(model) as atlas:
            out = model(IDS)
        out.sum().backward()
        assert torch.equal(out, wanted)
        assert all(map(torch.equal, gradients, (p.grad for p in model.parameters())))
        dense = dense_weights(model.eval(), IDS)["blocks.0.attn"]
        torch.testing.assert_close(atlas[0].to_dense(), dense, atol=1e-5, rtol=1e-4)
        assert not any(A.requires_grad for A in atlas)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_recorded_once(reentrant: bool) -> None:
    model = LanguageModel(kind=Twice)
    blocks, x = nn.Sequential(*model.blocks), model.embedding(IDS).detach().requires_grad_()
    blocks(x).sum().backward()
    wanted = [p.grad.clone() for p in blocks.parameters()]
    blocks.zero_grad()
    with record(blocks) as atlas:
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=reentrant)
        y.sum().backward()
    assert [(e.name, e.call) for e in atlas.entries] == [
        ("0.attn", 0), ("0.attn#1", 0), ("1.attn", 0), ("1.attn#1", 0),
    ]  # fmt: skip
    assert all(map(torch.equal, wanted, (p.grad for p in blocks.parameters())))


def test_retained_gradient_of_the_weights() -> None:
    class Kept(Given):
        def forward(self, A: attlas.AttentionMatrix, v: Tensor) -> Tensor:
            A.retain_grad()
            return A @ v

    q, v = torch.randn(2, 5, 4, requires_grad=True), torch.randn(2, 5, 3)
    model, A = Kept(), attlas.attend(q, q)
    with record(model):
        model(A, v).sum().backward()
    torch.testing.assert_close(A.grad, v.sum(-1)[:, None].expand(2, 5, 5))


def test_recordings_under_autocast() -> None:
    """Tokens and values are those that the model computes with, and what is drawn from them is not rounded."""
    model = LanguageModel(kind=Twice).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model(IDS)
        with record(model, values=True, statistics=[stats.Entropy()]) as atlas:
            torch.testing.assert_close(model(IDS), before, rtol=0.03, atol=0.03)  # some last bits of 8
        with record(model, values=True):
            assert torch.equal(model(IDS), before)
    for entry in atlas.entries:
        A, values = entry.matrix, entry.values
        assert A.q.dtype is values.dtype is torch.bfloat16
        torch.testing.assert_close(entry.statistics["entropy"], stats.entropy(A))
        weight = model.get_submodule(entry.name.partition("#")[0]).out.weight.detach().unflatten(1, (4, -1))
        norms = torch.einsum("ohe,bhne->bhno", weight, values.float()).norm(dim=-1)
        wanted = A.to_dense() * norms[:, :, None]
        torch.testing.assert_close(entry.value_weighted(output=True).to_dense(), wanted, rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------------- nesting, threads, caches


def test_nested_recordings_each_get_everything() -> None:
    model = LanguageModel(kind=Twice).eval()
    with record(model) as outer, record(model.blocks[1]) as inner, record(model, layers=0) as third:
        model(IDS)
    assert [e.name for e in inner.entries] == ["attn", "attn#1"]
    assert len(outer.entries) == 4
    assert len(third.entries) == 1
    assert torch.equal(inner[1].to_dense(), outer[3].to_dense())


def test_other_threads_are_not_recorded() -> None:
    model, calls = LanguageModel().eval(), []
    with record(model) as atlas:
        model(IDS)
        thread = threading.Thread(target=lambda: calls.append(model(IDS[:, :5])))
        thread.start()
        thread.join()
    assert len(calls) == 1
    assert [entry.shape[2] for entry in atlas.entries] == [12, 12]


class Cached(Attention):
    """Keeps its keys and values, as a generation needs them."""

    kept: tuple[Tensor, Tensor] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kept is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.kept, (k, v), strict=True))
        self.kept = k, v
        return attlas.attention(q, k, v, mask=attlas.Causal())


def test_steps_of_a_generation_are_one_entry() -> None:
    model = LanguageModel(kind=Cached).eval()
    with torch.no_grad(), record(model, values=True) as atlas:
        for part in IDS.split([5, 4, 1, 1, 1], dim=1):
            model(part)
    assert [(e.name, e.call, e.queries) for e in atlas.entries] == [
        ("blocks.0.attn", 0, (0, 12)), ("blocks.1.attn", 0, (0, 12)),
    ]  # fmt: skip
    assert torch.equal(atlas.ids, IDS)
    plain = LanguageModel().eval()
    plain.load_state_dict(model.state_dict())
    wanted = dense_weights(plain, IDS)
    torch.testing.assert_close(atlas[1].to_dense(), wanted["blocks.1.attn"], atol=1e-5, rtol=1e-4)


def test_module_that_is_used_again_is_another_layer() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(Twice())

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    model, x = Reused(), torch.randn(1, 6, SIZE)
    with record(model) as atlas:
        model(x)
    assert [(e.name, e.layer) for e in atlas.entries] == [
        ("block.attn", 0), ("block.attn#1", 1), ("block.attn", 2), ("block.attn#1", 3),
    ]  # fmt: skip
    with record(model.block) as first:
        model.block(x)
    for number, A in enumerate(first):
        assert torch.equal(A.to_dense(), atlas[number].to_dense())


# ------------------------------------------------------------------------------------------------------ not twice


def test_layers_of_attlas_are_heard_once() -> None:
    """Layers of attlas.nn multiply a matrix by themselves; their weights are those that were changed."""
    from attlas.interventions import Suppress
    from attlas.nn import AdditiveAttention, DotProductAttention, MultiHeadAttention

    x = torch.randn(2, 7, SIZE)
    model = MultiHeadAttention(SIZE, 4, batch_first=True).eval()
    with record(model) as atlas:
        _, weights = model(x, x, x, average_attn_weights=False)
    assert len(atlas.entries) == 1
    assert torch.equal(atlas[0].to_dense(), weights.to_dense())
    for layer in (DotProductAttention(dropout=0.5).train(), AdditiveAttention(SIZE, SIZE, 8).eval()):
        with attlas.intervene(layer, Suppress(keys=2)), record(layer) as atlas:
            layer(x, x, x)
        assert [e.name for e in atlas.entries] == [""]
        assert not atlas[0].requires_grad
        assert float(atlas[0][..., 2].abs().sum()) == 0
        assert torch.equal(atlas[0].to_dense()[:, 0], layer.weights.to_dense())


@pytest.mark.parametrize("window", [None, 4])
def test_generation_with_a_cache_of_attlas(window: int | None) -> None:
    from attlas.nn import KVCache, MultiHeadAttention

    model, cache, x = MultiHeadAttention(SIZE, 4, batch_first=True).eval(), KVCache(window), torch.randn(1, 9, SIZE)
    with torch.no_grad(), record(model) as atlas:
        for part in x.split([5, 1, 1, 1, 1], dim=1):
            model(part, part, part, is_causal=True, cache=cache)
    assert [(e.queries, e.first_key, e.call) for e in atlas.entries] == [((0, 9), 0, 0)]
    whole = attlas.Causal() if window is None else attlas.Window(window - 1, 0)
    with torch.no_grad():
        _, wanted = model(x, x, x, attn_mask=whole, average_attn_weights=False)
    torch.testing.assert_close(atlas[0].to_dense(), wanted.to_dense(), atol=1e-5, rtol=1e-4)


def test_models_of_transformers_and_calls_of_torch_are_heard_once() -> None:
    transformers = pytest.importorskip("transformers")
    from tests.tiny_models import SIZES, lively

    model = lively(transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES)))
    with record(model, patch_sdpa=True, statistics=[stats.Entropy()]) as atlas, torch.no_grad():
        model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert [(e.layer, e.call) for e in atlas.entries] == [(0, 0), (1, 0)]

    class Both(nn.Module):
        """Calls torch's function and attlas."""

        def forward(self, x: Tensor) -> Tensor:
            out = nn.functional.scaled_dot_product_attention(x, x, x)
            return out + attlas.attention(x, x, x, mask=attlas.Causal())

    both, x = Both(), torch.randn(1, 2, 5, 4)
    with record(both, patch_sdpa=True) as atlas:
        both(x)
    assert [e.name for e in atlas.entries] == ["", "#1"]
    torch.testing.assert_close(atlas[1].to_dense(), attlas.attend(x, x, mask=attlas.Causal()).to_dense())


def test_offer_after_the_product_has_no_positions_to_add() -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            A = attlas.attend(x, x)
            out = A @ x
            attlas.recording.offer(self, A, first_query=3)
            return out

    model = Late()
    with pytest.raises(RecordingError, match="before A @ v"), record(model):
        model(torch.randn(1, 1, 5, 4))


# ---------------------------------------------------------------------------------------------------------- numbering


def test_layers_that_are_numbered_late_are_not_chosen_wrongly() -> None:
    """Where the last layer is known only when the model has run, counting from the end is an error, and names work."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Attention(), Twice()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model, x = Two(), torch.randn(1, 6, SIZE)
    with record(model) as atlas:
        model(x)
    assert [e.layer for e in atlas.entries] == [0, 1, 2]
    with pytest.raises(RecordingError, match=r"layers=\['first'\]"), record(model, layers=-1):
        model(x)
    with record(model, layers=["second#1"]) as atlas:
        model(x)
    assert [(e.name, e.layer) for e in atlas.entries] == [("second#1", 2)]


def test_modules_of_one_class_of_which_some_do_not_attend() -> None:
    class Sometimes(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.dropout else x

    model = nn.Sequential(Sometimes(), Sometimes(dropout=0.1)).eval()
    with record(model, layers=[1]) as atlas:
        model(torch.randn(1, 6, SIZE))
    assert [(e.name, e.layer) for e in atlas.entries] == [("1", 1)]
    told = r"these attended: 1\n.*layers=\[0\]: none of them did"
    with pytest.raises(RecordingError, match=told), record(model, layers=[0]):
        model(torch.randn(1, 6, SIZE))


def test_own_module_beside_a_model_of_transformers_is_chosen_by_its_path() -> None:
    transformers = pytest.importorskip("transformers")
    from tests.tiny_models import SIZES

    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES)).eval()
    model.model.layers[1].mlp = Attention()
    with record(model, layers="model.layers.1.mlp") as atlas, torch.no_grad():
        model(IDS)
    assert [(e.name, e.layer) for e in atlas.entries] == [("model.layers.1.mlp", 2)]


# ------------------------------------------------------------------------------------------------------------ compiler


@pytest.mark.parametrize("how", ["attention", "pooled"])
def test_compiled_models(how: str) -> None:
    """Nothing of a recording is in the graph; compiled models are recorded, under the same names."""
    model, graphs = LanguageModel(how=how).eval(), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        wanted = model(IDS)
        torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(IDS), wanted)
        assert len(graphs) == 1
        compiled = torch.compile(model, backend=backend)
        compiled(IDS)
        with record(model) as atlas:
            torch.testing.assert_close(compiled(IDS), wanted)
    assert [e.name for e in atlas.entries] == ["blocks.0.attn", "blocks.1.attn"]
    torch.testing.assert_close(atlas[1].to_dense(), dense_weights(model, IDS)["blocks.1.attn"], atol=1e-5, rtol=1e-4)


def test_transforms_are_refused_by_a_recording_and_followed_by_an_intervention() -> None:
    model = LanguageModel().eval()

    def outputs() -> Tensor:
        return torch.func.vmap(lambda ids: model(ids[None]))(IDS)

    with pytest.raises(RecordingError, match="a transform of torch"), record(model):
        outputs()
    with attlas.intervene(model, attlas.interventions.Suppress(keys=(0, 3))):
        torch.testing.assert_close(outputs()[:, 0], model(IDS))


def test_nothing_is_called_where_nothing_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(observers, "product", fail)
    assert not observers.active
    LanguageModel()(IDS)
