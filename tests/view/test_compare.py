"""Two recordings beside each other: their entries, their texts, and what is refused."""

from contextlib import closing
from typing import Any

import pytest
import torch
from tests.atlases import atlas_of, random_matrix
from tests.view.cases import facts, numbers

from attlas.errors import ShapeError
from attlas.recording.atlas import Atlas
from attlas.view import Service

N = 40


def recording(seed: int, tokens: list[str], **details: Any) -> Atlas:
    return atlas_of(random_matrix(len(tokens), seed=seed), tokens=tokens, details=details)


WORDS = [f" w{i}" for i in range(N)]


def test_two_checkpoints_on_one_text_share_its_positions() -> None:
    first, second = recording(0, WORDS), recording(1, WORDS)
    with closing(Service(first, title="before", compare=second, compare_title="after")) as service:
        info = facts(service, "info")
        assert (info["title"], info["texts"]) == ("before ↔ after", [N])
        one, other = info["entries"]
        assert (one["recording"], other["recording"]) == ("", "after")
        assert one["texts"] == other["texts"] == [[0, 0]]
        row = numbers(service, "row", entry=1, head=1, i=30)
        torch.testing.assert_close(torch.tensor(row), second.entries[0].matrix[0, 1, 30])
        rows = [atlas.entries[0].matrix[0, head, 30] for atlas in (first, second) for head in (0, 1)]
        found = facts(service, "pair", entry=1, head="mean", i=30, j0=2, j1=9, with_entry=0, with_head=0)
        assert found["weights"] == pytest.approx([float(row[2:9].sum()) for row in rows[2:]], rel=1e-5)
        shared = [float(torch.minimum(row, rows[0]).sum()) for row in rows[2:]]
        assert found["agreement"] == pytest.approx(shared, rel=1e-5)


def test_another_text_has_its_own_tokens_at_the_same_positions() -> None:
    second = recording(1, [f" v{i}" for i in range(N)], token_bytes={"3": "e6", "4": "97a5"})
    second.tokens = [*second.tokens[:3], "", "日", *second.tokens[5:]]
    with closing(Service(recording(0, WORDS), compare=second)) as service:
        info = facts(service, "info")
        assert (info["texts"], info["text_length"]) == ([N, N], N)
        assert [entry["first_key"] for entry in info["entries"]] == [0, 0]
        assert [entry["texts"] for entry in info["entries"]] == [[[0, 0]], [[1, 1]]]
        assert facts(service, "tokens", of=0, start=0, stop=2)["tokens"] == [" w0", " w1"]
        given = facts(service, "tokens", of=1, start=1, stop=6)
        assert given["tokens"] == [" v1", " v2", "⟨E6⟩", "⟨97 A5⟩", " v5"]
        assert given["joined"] == [[3, 5, "日"]]


def test_recordings_of_other_sizes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"40 × 40 and of 30 × 30.*|as many tokens"):
        Service(recording(0, WORDS), compare=recording(1, WORDS[:30]))
