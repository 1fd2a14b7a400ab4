"""A recorded forward pass: what is kept, of which layers and heads, and that everything is put back."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recording.conftest import Tokenizer
from torch import Tensor, nn

import attlas
from attlas import stats
from attlas.recording import offer, record
from attlas.recording.atlas import Bookmark
from attlas.recording.hooks import is_recording

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Plain(nn.Module):
    """An attention of one's own, which may say where it stands in a text."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        A = attlas.attend(q, k, mask=attlas.Causal())
        if self.options:
            offer(self, A, **self.options)
        return x + (A @ v).transpose(1, 2).flatten(2)


class Other(Plain):
    """Another class of the same."""


def plain(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(Plain() for _ in range(count)))


def dense(model: nn.Module, x: Tensor) -> list[Tensor]:
    with record(model) as atlas, torch.no_grad():
        model(x)
    return [A.to_dense() for A in atlas]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 7, 16)


def test_logits_are_those_without_a_recording(llama: nn.Module, ids: Tensor, eager: Callable[..., Any]) -> None:
    with torch.no_grad():
        before = llama(ids).logits
    with record(llama, statistics=[stats.Entropy()]) as atlas, torch.no_grad():
        during = llama(ids).logits
        assert llama.config._attn_implementation == "attlas"
    torch.testing.assert_close(during, before, atol=1e-5, rtol=1e-4)
    assert llama.config._attn_implementation == "sdpa"
    theirs = eager(llama, ids)
    for A, weights in zip(atlas, theirs.attentions, strict=True):
        torch.testing.assert_close(A.to_dense(), weights, atol=1e-5, rtol=1e-4)
    assert atlas.model == "LlamaForCausalLM"
    assert atlas.details["num_hidden_layers"] == 3
    assert torch.equal(atlas.ids, ids)


def test_a_module_that_offers_needs_no_transformers(x: Tensor) -> None:
    model = plain()
    with record(model, statistics=[stats.Entropy(), stats.Entropy()]) as atlas:
        model(x)
        model(x)
    assert [(e.name, e.path, e.call) for e in atlas.entries] == [
        (str(layer), f"self.{layer}", call) for layer in range(3) for call in range(2)
    ]
    assert atlas[1].shape == (2, 4, 7, 7)
    torch.testing.assert_close(atlas.entry(1).statistics["entropy_2"], stats.entropy(atlas[1]))
    assert atlas[1].softmax_weights.known_lse is not None


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([0, -1], [0, 2]),
        (1, [1]),
        ("self.1", [1]),
        (["2", "self.0"], [0, 2]),
        ("self", [0, 1, 2]),
        (range(2), [0, 1]),
    ],
)
def test_layers(x: Tensor, layers: Any, expected: list[int]) -> None:
    model = plain()
    model(x)
    with record(model, layers=layers) as atlas:
        model(x)
    assert atlas.layers() == expected
    assert [e.name for e in atlas.entries] == list(map(str, expected))


def test_layers_by_what_holds_them(llama: nn.Module, ids: Tensor) -> None:
    with record(llama, layers=["model.layers.1", "model.layers.2.self_attn"]) as atlas, torch.no_grad():
        llama(ids)
    assert atlas.layers() == [1, 2]


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ([2], {0: (2,), 1: (2,), 2: (2,)}),
        ([-1, 0], {0: (0, 3), 1: (0, 3), 2: (0, 3)}),
        ({1: [0, 1], -1: [3]}, {1: (0, 1), 2: (3,)}),
        ({"0": 2}, {0: (2,)}),
    ],
)
def test_heads(x: Tensor, heads: Any, expected: dict[int, tuple[int, ...]]) -> None:
    model = plain()
    whole = dense(model, x)
    with record(model, heads=heads, statistics=[stats.ColumnMass()]) as atlas:
        model(x)
    assert {e.layer: e.heads for e in atlas.entries} == expected
    for entry in atlas.entries:
        expected_weights = whole[entry.layer][:, list(entry.heads)]
        torch.testing.assert_close(entry.matrix.to_dense(), expected_weights)
        torch.testing.assert_close(entry.statistics["column_mass"], expected_weights.sum(-2))
        assert entry.matrix.problem.q.untyped_storage().nbytes() == entry.matrix.problem.q.nbytes


def test_heads_of_some_layers_and_all_of_others(x: Tensor) -> None:
    model = plain()
    with record(model, layers=[0, 1], heads={1: [3]}) as atlas:
        model(x)
    assert [e.heads for e in atlas.entries] == [(0, 1, 2, 3), (3,)]


def test_grouped_heads_keep_their_keys(llama: nn.Module, ids: Tensor, eager: Callable[..., Any]) -> None:
    with record(llama, heads=[1, 2], keep="cpu") as atlas, torch.no_grad():
        llama(ids)
    weights = eager(llama, ids).attentions
    for A, theirs in zip(atlas, weights, strict=True):
        torch.testing.assert_close(A.to_dense(), theirs[:, 1:3], atol=1e-5, rtol=1e-4)


def test_nothing_of_the_graph_is_kept(x: Tensor) -> None:
    model = plain()
    hidden = model[0](x)
    saved = weakref.ref(hidden.untyped_storage())
    with record(model, statistics=[stats.Entropy()]) as atlas:
        out = model(hidden)
    assert not any(A.problem.q.requires_grad or A.problem.k.requires_grad for A in atlas)
    out.sum().backward()
    assert model[0].qkv.weight.grad is not None
    del out, hidden
    gc.collect()
    assert saved() is None


def test_no_more_than_the_queries_and_keys_is_kept(x: Tensor) -> None:
    with record(model := plain(1)) as atlas:
        model(x)
    problem = atlas[0].problem
    assert problem.q.untyped_storage().nbytes() == problem.q.nbytes  # and not that of q, k and v together


def test_only_statistics(x: Tensor) -> None:
    model = plain()
    alive = []

    def watch(module: nn.Module, args: Any, out: Tensor) -> None:
        alive.append(weakref.ref(out.untyped_storage()))

    for layer in model:
        layer.qkv.register_forward_hook(watch)
    with record(model, keep="statistics", statistics=stats.Entropy()) as atlas, torch.no_grad():
        model(x)
        gc.collect()
        assert all(ref() is None for ref in alive)
    assert all(e.matrix is None and list(e.statistics) == ["entropy"] for e in atlas.entries)
    with pytest.raises(attlas.RecordingError):
        atlas[0]


def test_disk(x: Tensor, tmp_path: Path) -> None:
    model = plain()
    whole = dense(model, x)
    folder = tmp_path / "run.atlas"
    with record(model, keep="disk", folder=str(folder), statistics=[stats.TopK(2)], tokens=list("abcdefg")) as atlas:
        model(x)
        assert not folder.exists()
        atlas.bookmarks.append(Bookmark("layer 2", "l=2"))
    assert folder.is_dir()
    for A, weights in zip(atlas, whole, strict=True):
        torch.testing.assert_close(A.to_dense(), weights)
    from attlas.recording.atlas import load

    again = load(folder)
    assert again.bookmarks == atlas.bookmarks
    assert again.tokens == list("abcdefg")
    torch.testing.assert_close(again[2].to_dense(), whole[2])
    torch.testing.assert_close(again.entry(2).statistics["top_k"].values, whole[2].topk(2).values)


def recorded_on_disk(model: nn.Module, x: Tensor) -> attlas.atlas.Atlas:
    with record(model, keep="disk") as atlas:
        model(x)
    return atlas


def test_disk_without_a_folder(x: Tensor) -> None:
    model = plain()
    whole = dense(model, x)
    with pytest.warns(UserWarning, match="deleted with the atlas; folder= keeps it") as said:
        atlas = recorded_on_disk(model, x)
    folder = Path(str(said[0].message).split(" writes to ")[1].split(",")[0])
    assert folder.is_dir()
    torch.testing.assert_close(atlas[1].to_dense(), whole[1])
    del atlas
    gc.collect()
    assert not folder.exists()


def test_an_error_puts_everything_back(llama: nn.Module, ids: Tensor, tmp_path: Path) -> None:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in llama.modules()]
    with pytest.raises(ZeroDivisionError), record(llama, keep="disk", folder=tmp_path / "a"):
        llama(ids)
        _ = 1 / 0
    assert llama.config._attn_implementation == "sdpa"
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in llama.modules()] == hooks
    assert not list(tmp_path.iterdir())
    assert not is_recording()


def test_an_error_inside_the_model_does_not_shift_what_follows(x: Tensor) -> None:
    model = plain()
    fails = model[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with record(model) as atlas:
        with pytest.raises(ZeroDivisionError):
            model(x)
        fails.remove()
        model(x)
    assert [(e.layer, e.call) for e in atlas.entries] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_nested_recordings_both_get_it(x: Tensor) -> None:
    model = plain()
    with record(model) as outer, record(model[1:], keep="statistics", statistics=[stats.Entropy()]) as inner:
        model(x)
    assert len(outer) == 3
    assert len(inner) == 2
    assert inner.entries[0].name == "1"  # as the part names it
    torch.testing.assert_close(inner.entry(0).statistics["entropy"], stats.entropy(outer[1]))


def test_another_model_is_not_recorded(x: Tensor) -> None:
    model, other = plain(1), plain(2)
    with record(model) as atlas:
        other(x)
        model(x)
    assert len(atlas.entries) == 1


def test_a_part_of_a_model_called_by_itself(llama: nn.Module, ids: Tensor) -> None:
    with record(llama.model, layers=[0, 2]) as atlas, torch.no_grad():
        llama(ids)
    assert [e.name for e in atlas.entries] == ["layers.0.self_attn", "layers.2.self_attn"]
    with record(llama) as atlas, torch.no_grad():
        llama.model(ids)
    assert len(atlas) == 3
    assert atlas.ids is None  # the model itself was not called


def test_classes_that_are_met_late_take_their_place(x: Tensor) -> None:
    model = nn.Sequential(Other(), Plain(), Other())
    with record(model) as atlas:
        model[1](x)
        model(x)
    assert [(e.name, e.layer, e.call) for e in atlas.entries] == [("0", 0, 0), ("1", 1, 0), ("1", 1, 1), ("2", 2, 0)]


def test_places_may_be_given(x: Tensor) -> None:
    model = Plain(first_query=5, first_key=3)
    with record(model) as atlas:
        model(x)
    assert (atlas.entries[0].queries, atlas.entries[0].first_key) == ((5, 12), 3)


def test_tokens_by_a_tokenizer(llama: nn.Module, ids: Tensor) -> None:
    with record(llama, tokens=Tokenizer()) as atlas, torch.no_grad():
        llama(input_ids=ids)
    assert atlas.tokens == [f"<{number}>" for number in ids[0].tolist()]
    with record(model := plain(1), tokens=Tokenizer()) as atlas:
        model(torch.randn(1, 2, 16))
    assert atlas.tokens is None
