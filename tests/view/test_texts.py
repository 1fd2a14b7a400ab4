"""Every sequence of a batch has its own tokens, and cross-attention has those of two texts."""

from contextlib import closing
from typing import Any

import pytest
import torch
from tests.view.cases import facts

import attlas
from attlas.errors import ShapeError
from attlas.recording.atlas import Atlas, Entry
from attlas.view import Service
from attlas.view.packing import Packer

SOURCE = [["the", " cat", " sat", "<pad>", "<pad>"], [" my", " dog", " ran", " far", " away"]]
TARGET = [["die", " Katze", " sass", "<pad>"], ["mein", " Hund", " lief", " weit"]]


def entry(kind: str, m: int, n: int, batch: int = 2) -> Entry:
    A = attlas.attend(
        *(torch.randn(batch, 2, size, 4) for size in (m, n)), mask=attlas.Causal() if m == 4 == n else None
    )
    return Entry(kind, 0, kind, 0, (0, 1), (0, m), 0, tuple(A.shape), A)


def translator(**texts: Any) -> Atlas:
    return Atlas([entry("self", 4, 4), entry("encoder", 5, 5), entry("cross", 4, 5)], spans={"noun": (1, 2)}, **texts)


def labels(service: Service, number: int, sequence: int) -> list[Any]:
    """Return the texts of the queries and of the keys of a sequence, as the page asks for them."""
    info = facts(service, "info")
    found = []
    for text in info["entries"][number]["texts"][sequence]:
        stop = 0 if text is None else info["texts"][text]
        found.append(None if text is None else facts(service, "tokens", of=text, start=0, stop=stop)["tokens"])
    return found


def test_each_sequence_has_its_own_tokens() -> None:
    with closing(Service(Atlas([entry("self", 5, 5)], tokens=SOURCE))) as service:
        for sequence in (0, 1):
            assert labels(service, 0, sequence) == [SOURCE[sequence]] * 2
        assert facts(service, "search", of=1, text="dog ran")["matches"] == [[1, 3]]
        assert facts(service, "search", of=0, text="dog ran")["total"] == 0
        assert service.answer("tokens", {"of": "2", "start": "0", "stop": "1"}).status == 404


def test_cross_attention_has_the_tokens_of_both_texts() -> None:
    with closing(Service(translator(tokens=TARGET, encoder_texts=SOURCE))) as service:
        for sequence in (0, 1):
            assert labels(service, 0, sequence) == [TARGET[sequence]] * 2
            assert labels(service, 1, sequence) == [SOURCE[sequence]] * 2
            assert labels(service, 2, sequence) == [TARGET[sequence], SOURCE[sequence]]
        # Named stretches are of the text of the decoder.
        assert [each["spans"] for each in facts(service, "info")["entries"]] == [["query", "key"], [], ["query"]]


def test_a_matrix_of_two_texts_takes_the_tokens_of_both() -> None:
    q, k = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 5, 8)
    with closing(Service(attlas.attend(q, k), tokens=(TARGET, SOURCE))) as service:
        assert labels(service, 0, 1) == [TARGET[1], SOURCE[1]]
    with closing(Service(attlas.attend(q[0, 0], k[0, 0]), tokens=(TARGET[0], SOURCE[0]))) as service:
        assert labels(service, 0, 0) == [TARGET[0], SOURCE[0]]
    for wrong in (SOURCE, SOURCE[0], (TARGET[0], SOURCE[0]), (SOURCE, TARGET), [], "abcde"):
        with pytest.raises(ShapeError, match=r"need the tokens of both.*\n.*4 queries × 5 keys"):
            Service(attlas.attend(q, k), tokens=wrong)
    with closing(Service(attlas.attend(q, k, mask=attlas.Causal()), tokens=SOURCE)) as service:
        assert labels(service, 0, 1) == [SOURCE[1]] * 2  # the queries are the last of the keys


def test_what_is_not_known_has_no_text() -> None:
    with closing(Service(translator(tokens=TARGET[0]))) as service:
        assert [labels(service, 0, sequence) for sequence in (0, 1)] == [[TARGET[0]] * 2, [None] * 2]
        assert labels(service, 1, 0) == [None] * 2
        assert labels(service, 2, 0) == [TARGET[0], None]
    # A text of another length is not that of the keys, and one text is not that of both sequences.
    for wrong in ([text[:4] for text in SOURCE], SOURCE[:1]):
        with closing(Service(translator(tokens=TARGET, encoder_texts=wrong))) as service:
            assert labels(service, 2, 0) == [TARGET[0], None]
    with closing(Service(translator())) as service:
        assert facts(service, "info")["texts"] == []
        assert facts(service, "tokens", start=0, stop=2)["tokens"] == []


def test_tokens_that_are_given() -> None:
    A = attlas.attend(torch.randn(2, 1, 5, 4), torch.randn(2, 1, 5, 4))
    with closing(Service(A, tokens=SOURCE)) as service:
        assert [labels(service, 0, sequence)[0] for sequence in (0, 1)] == SOURCE
    with closing(Service(A, tokens=SOURCE[0])) as service:
        assert [labels(service, 0, sequence)[0] for sequence in (0, 1)] == [SOURCE[0], None]


def test_bytes_are_those_of_their_sequence() -> None:
    details = {"token_bytes": [{}, {"1": "e6", "2": "97a5"}]}
    atlas = Atlas([entry("self", 5, 5)], tokens=[SOURCE[0], [" my", "", "日", " far", " away"]], details=details)
    with closing(Service(atlas)) as service:
        assert labels(service, 0, 0)[0] == SOURCE[0]
        assert labels(service, 0, 1)[0] == [" my", "⟨E6⟩", "⟨97 A5⟩", " far", " away"]


@pytest.mark.parametrize("batch", [0, 1])
def test_a_page_that_works_offline_holds_the_texts_of_its_sequence(batch: int) -> None:
    with closing(Service(translator(tokens=TARGET, encoder_texts=SOURCE))) as service:
        data = Packer(service, [(2, 0)], [(2, 0)], batch=batch).pack()
        query, key = data["info"]["entries"][2]["texts"][batch]
        assert [data["texts"][number]["tokens"] for number in (query, key)] == [TARGET[batch], SOURCE[batch]]
        assert len(data["texts"]) == 2
