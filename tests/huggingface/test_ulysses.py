"""Masks under DeepSpeed's Ulysses: made again of positions and window, or refused."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import attlas
from attlas.errors import BackendError, RecordingError
from attlas.huggingface import attention_forward
from attlas.recording.parallel import heads_here

Q, K, V = (torch.randn(2, heads, 12, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
ONE, PACKED = torch.arange(12)[None], torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch: Any) -> None:
    name = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))


def layer(**config: Any) -> nn.Module:
    module = nn.Identity()
    module.is_causal, module.layer_idx, module.config = True, 1, SimpleNamespace(**config)
    return module


TEXTS = attlas.Documents(torch.tensor([0] * 5 + [1] * 3 + [2] * 4))


@pytest.mark.parametrize(
    ("config", "given", "mask"),
    [
        ({}, {"position_ids": ONE}, attlas.Causal()),
        ({}, {"position_ids": PACKED}, attlas.Causal() & TEXTS),
        ({}, {"position_ids": PACKED, "sliding_window": 3}, attlas.Window(2, 0) & TEXTS),
        ({"sliding_window": 4}, {"position_ids": ONE}, attlas.Window(3, 0)),
        ({"sliding_window": 4, "layer_types": ["x", "full_attention"]}, {"position_ids": ONE}, attlas.Causal()),
    ],
)
def test_the_mask_is_made_again(config: dict[str, Any], given: dict[str, Any], mask: attlas.Mask) -> None:
    output, A = attention_forward(layer(**config), Q, K, V, None, **given)
    true = attlas.attend(Q, K, mask=mask)
    torch.testing.assert_close(A.to_dense(), true.to_dense())
    torch.testing.assert_close(output, (true @ V).transpose(1, 2))


@pytest.mark.parametrize(
    ("config", "given", "found"),
    [
        ({}, {}, "no position_ids of 12 tokens"),
        ({}, {"position_ids": ONE[:, :6]}, "no position_ids of 12 tokens"),  # those of one rank
        ({"attention_chunk_size": 4}, {"position_ids": ONE}, "chunks"),
        ({"layer_types": ["x", "chunked_attention"]}, {"position_ids": ONE}, "a layer of chunked_attention"),
        ({"layer_types": ["x", "sliding_attention"]}, {"position_ids": ONE}, "a layer of sliding_attention"),
    ],
)
def test_what_cannot_be_told_is_refused(config: dict[str, Any], given: dict[str, Any], found: str) -> None:
    with pytest.raises(BackendError, match="the positions of all tokens") as caught:
        attention_forward(layer(**config), Q, K, V, None, **given)
    assert caught.value.found == found


def test_an_encoder_is_refused() -> None:
    module = layer()
    module.is_causal = False
    with pytest.raises(BackendError, match="must be causal"):
        attention_forward(module, Q, K, V, None, position_ids=ONE)


def test_tokens_that_ulysses_did_not_exchange(monkeypatch: Any) -> None:
    """With all heads a process has its own part of the text only: attlas was registered after DeepSpeed."""
    monkeypatch.setattr("attlas.huggingface.masks.world", lambda: 2)
    attention_forward(layer(num_attention_heads=8), Q, K, V, None, position_ids=ONE)
    with pytest.raises(BackendError) as caught:
        attention_forward(layer(num_attention_heads=4), Q, K, V, None, position_ids=ONE)
    assert caught.value.found == "all 4 heads, which it divides"


def test_heads_are_not_numbered_by_guess() -> None:
    A = attlas.attend(Q, K)
    assert heads_here(layer(num_attention_heads=4), A) == (0, 4)
    with pytest.raises(RecordingError) as caught:
        heads_here(layer(num_attention_heads=8), A)
    assert caught.value.found == "4 of 8 heads, as under DeepSpeed's Ulysses"
