"""A trained Llama, run on attlas through transformers, tells the story that others got from its weights."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.external


@pytest.fixture
def story(external_data: Path) -> str:
    """Greedy decoding of the prompt 'Zoo', as its notes print it."""
    notes = (external_data / "stories260K-llama" / "llama2c64_STORY.txt").read_text(encoding="utf-8")
    found = re.search(r"\[(Zoo was [^\]]+)\]", notes)
    assert found is not None
    return found[1]


@pytest.fixture
def model(external_data: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("attlas.huggingface")
    folder = external_data / "stories260K-llama"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers says of its own parts is not our matter
        return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="attlas").eval()


@pytest.fixture
def pieces(external_data: Path) -> list[str]:
    return json.loads((external_data / "stories260K-llama" / "tok512_tokens.json").read_text(encoding="utf-8"))


def encode(text: str, pieces: list[str]) -> list[int]:
    """Merge characters greedily, the piece that comes first in the vocabulary first, as the model's tokenizer does."""
    ids = [1, *(pieces.index(c) for c in " " + text)]
    while True:
        merged = [
            (pieces.index(pieces[a] + pieces[b]), place)
            for place, (a, b) in enumerate(itertools.pairwise(ids))
            if pieces[a] + pieces[b] in pieces
        ]
        if not merged:
            return ids
        best, place = min(merged)
        ids[place : place + 2] = [best]


def decode(ids: list[int], pieces: list[str]) -> str:
    return "".join(pieces[i] for i in ids[1:]).removeprefix(" ")


def greedy(model: Any, ids: list[int], count: int, *, cache: bool) -> list[int]:
    with torch.no_grad():
        result = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), max_new_tokens=count,
            do_sample=False, use_cache=cache, pad_token_id=0,
        )  # fmt: skip
    return result[0].tolist()


@pytest.mark.parametrize("cache", [True, False], ids=["with a cache", "without a cache"])
def test_greedy_decoding_tells_the_story(model: Any, pieces: list[str], story: str, cache: bool) -> None:
    assert model.config._attn_implementation == "attlas"
    prompt = encode("Zoo", pieces)
    assert len(prompt) == 4  # as the notes say, the start of the text counted
    text = decode(greedy(model, prompt, 59, cache=cache), pieces)
    assert text.startswith(story), text


def test_logits_equal_those_of_torch(model: Any, pieces: list[str], story: str) -> None:
    ids = torch.tensor([encode(story.split(".")[0], pieces)])
    with torch.no_grad():
        found = model(ids).logits
        model.set_attn_implementation("eager")
        wanted = model(ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


def test_two_hundred_words_are_those_of_sdpa(model: Any, pieces: list[str]) -> None:
    prompt = encode("Once upon a time", pieces)
    found = greedy(model, prompt, 200, cache=True)
    model.set_attn_implementation("sdpa")
    assert len(found) == len(prompt) + 200
    assert found == greedy(model, prompt, 200, cache=True)
