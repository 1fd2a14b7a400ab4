"""Programs that others wrote for tensors of attention weights take the lazy matrix: bertviz and kvpress.

Where a program is installed it is run; the calls that it makes on the weights are tested without it, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from tests.huggingface.conftest import both
from tests.tiny_models import SIZES, lively
from torch import Tensor, nn
from torch.nn import functional
from transformers import modeling_utils

import attlas
import attlas.huggingface

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

TOKENS = 12


@pytest.fixture
def llama() -> nn.Module:
    return lively(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 3})))


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 61, (1, TOKENS), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def attentions(llama: nn.Module, ids: Tensor) -> tuple[Any, Any]:
    """Weights of all layers, lazy and of eager."""
    ours, theirs = (output.attentions for output in both(llama, ids))
    assert isinstance(ours[0], attlas.AttentionMatrix)
    assert isinstance(theirs[0], Tensor)
    return ours, theirs


# ------------------------------------------------------------------------------------------------------------- bertviz


def format_attention(attention: Any, layers: list[int], heads: list[int] | None) -> Tensor:
    """What bertviz 1.4 does with attention before it draws (bertviz/util.py)."""
    squeezed = []
    for layer in [attention[index] for index in layers]:
        assert len(layer.shape) == 4
        layer = layer.squeeze(0)
        squeezed.append(layer[heads] if heads else layer)
    return torch.stack(squeezed)


@pytest.mark.parametrize("heads", [None, [0, 2], [1]], ids=str)
def test_the_calls_of_bertviz(attentions: tuple[Any, Any], heads: list[int] | None) -> None:
    lazy, dense = attentions
    found, wanted = format_attention(lazy, [0, 2], heads), format_attention(dense, [0, 2], heads)
    torch.testing.assert_close(found, wanted)
    assert len(lazy) == 3
    assert lazy[0][0].size(0) == 4
    torch.testing.assert_close(torch.tensor(found[:, :, 0:5, 5:12].tolist()), wanted[:, :, 0:5, 5:12])


def numbers(html: Any) -> list[Any]:
    """Return the weights that a page of bertviz holds."""
    text = html.data
    start = text.index('{"attention": ')
    parameters, _ = json.JSONDecoder().raw_decode(text[start:])
    return [part["attn"] for part in parameters["attention"]]


@pytest.mark.parametrize("view", ["head_view", "model_view"])
@pytest.mark.parametrize("second", [None, 5], ids=["one text", "two texts"])
def test_bertviz_draws_it(attentions: tuple[Any, Any], view: str, second: int | None) -> None:
    draw = getattr(pytest.importorskip("bertviz"), view)
    words = [f"w{i}" for i in range(TOKENS)]
    pages = [draw(weights, words, sentence_b_start=second, html_action="return") for weights in attentions]
    found, wanted = map(numbers, pages)
    assert len(found) == len(wanted) == (1 if second is None else 5)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))


# ------------------------------------------------------------------------------------------------------------- kvpress


def observed_attention(attentions: Any, heads: int) -> Tensor:
    """Score of kvpress' ObservedAttentionPress (H2O): mean weight that a key receives."""
    scores = attentions.sum(2)
    batch, _, n = scores.shape
    scores = scores / torch.arange(n, 0, -1).to(attentions.device, attentions.dtype)
    return scores.view(batch, heads, -1, n).mean(2)


def snap_kv(attentions: Any, heads: int, window: int = 4) -> Tensor:
    """Score of kvpress' SnapKVPress: weights of the last queries, smoothed."""
    weights = attentions[..., -window:, :-window]
    scores = functional.avg_pool1d(weights.mean(dim=-2), kernel_size=5, padding=2, stride=1)
    scores = scores.view(scores.shape[0], heads, -1, scores.shape[-1]).mean(2)
    return functional.pad(scores, (0, window), value=scores.max().item() + 1)


def tova(attentions: Any, heads: int) -> Tensor:
    """Score of kvpress' TOVAPress: weights of the last query, the mean over heads."""
    scores = attentions[..., -1:, :-1].mean(1).repeat(1, heads, 1)
    return functional.pad(scores, (0, 1), value=scores.max().item() + 1)


@pytest.mark.parametrize("score", [observed_attention, snap_kv, tova])
def test_the_scores_of_kvpress(attentions: tuple[Any, Any], score: Any) -> None:
    for lazy, dense in zip(*attentions, strict=True):
        torch.testing.assert_close(score(lazy, 2), score(dense, 2))


def test_the_score_of_a_long_text_stays_lazy() -> None:
    tokens = torch.zeros(1, 4, 1, 8).expand(1, 4, 9_000, 8)  # 1.3 GB, if it were stored
    A = attlas.attend(tokens, tokens, mask=attlas.Causal())
    with pytest.raises(attlas.TooLargeError):
        A.to_dense()
    assert observed_attention(A[:, :1], 1).shape == (1, 1, 9_000)
    assert snap_kv(A, 2).shape == tova(A, 2).shape == (1, 2, 9_000)


@pytest.fixture
def kvpress() -> Iterator[Any]:
    """The package, whose import wraps every attention function of transformers; undone after the test."""
    own = modeling_utils.ALL_ATTENTION_FUNCTIONS._local_mapping  # hides what is registered for all
    before = dict(own)
    yield pytest.importorskip("kvpress")
    own.clear()
    own.update(before)


@pytest.mark.parametrize("name", ["ObservedAttentionPress", "SnapKVPress", "TOVAPress"])
def test_kvpress_scores_it(kvpress: Any, llama: nn.Module, attentions: tuple[Any, Any], name: str) -> None:
    # Its hooks want what transformers 5.23 no longer passes on, with eager too; its scores are asked directly.
    press = getattr(kvpress, name)(0.5, **{"window_size": 4} if name == "SnapKVPress" else {})
    attention = llama.model.layers[0].self_attn
    keys, hidden = torch.randn(1, 2, TOKENS, 8), torch.randn(1, TOKENS, 32)
    for lazy, dense in zip(*attentions, strict=True):
        found, wanted = (press.score(attention, hidden, keys, keys, weights, {}) for weights in (lazy, dense))
        torch.testing.assert_close(found, wanted)


def test_wrappers_that_pass_dropout_by_place(llama: nn.Module, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    function = transformers.AttentionInterface._global_mapping["attlas"]

    def wrapped(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: Any, **kwargs: Any) -> Any:
        return function(module, query, key, value, mask, dropout, **kwargs)

    llama.set_attn_implementation("attlas")
    with torch.no_grad():
        wanted = llama(ids).logits
        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "attlas", wrapped)
        assert torch.equal(llama(ids).logits, wanted)
