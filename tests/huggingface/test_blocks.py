"""Blocks of one model that end in another order than they began: two recordings in cells of a notebook."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import VOCABULARY, lively

import attlas
from attlas.matrix.handwritten.scope import current
from attlas.recording import record

MODELS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=32)
    ),
    # It writes its attention out by hand, and is given lazy masks.
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=VOCABULARY)
    ),
}
BLOCKS = {
    "gpt2": [attlas.lazily, record, lambda model: attlas.intervene(model, [])],
    "bloom": [attlas.lazily, lambda model: record(model, handwritten=True)],
}
PAIRS = [(name, a, b) for name, blocks in BLOCKS.items() for a in range(len(blocks)) for b in range(len(blocks))]


def opened(name: str, block: int, model: Any) -> AbstractContextManager[Any]:
    return BLOCKS[name][block](model)  # type: ignore[no-any-return, operator]


@pytest.mark.parametrize(("name", "a", "b"), PAIRS)
def test_the_block_that_began_first_may_end_first(name: str, a: int, b: int) -> None:
    model, ids = lively(MODELS[name]().eval()), torch.arange(1, 10)[None]
    before = model.config._attn_implementation
    with torch.no_grad():
        wanted = model(ids).logits
        first, second = opened(name, a, model), opened(name, b, model)
        first.__enter__()
        atlas = second.__enter__()
        torch.testing.assert_close(model(ids).logits, wanted, atol=2e-5, rtol=1e-4)
        first.__exit__(None, None, None)
        torch.testing.assert_close(model(ids).logits, wanted, atol=2e-5, rtol=1e-4)
        second.__exit__(None, None, None)
    if isinstance(atlas, attlas.Atlas):
        assert len(atlas) == 2
        assert atlas[0].shape[-2:] == (9, 9)
    assert model.config._attn_implementation == before
    assert current() is None
    torch.testing.assert_close(model(ids).logits, wanted)
