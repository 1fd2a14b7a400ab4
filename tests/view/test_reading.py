"""A text of the user's own: read by the model, written on, refused where it is too long, and nothing is lost."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib import error, request
from urllib.parse import urlsplit

import pytest
import torch
from tests.view.declared import check_fields

import attlas
from attlas import heads
from attlas.heads.classification import text_statistics
from attlas.recording.atlas import Atlas
from attlas.view import Server, Service
from attlas.view.reading import ReadingService

pytest.importorskip("transformers", reason="needs attlas[hf]")


@pytest.fixture
def service(loaded: tuple[Any, Any]) -> Iterator[ReadingService]:
    shown = Service(attlas.attend(torch.zeros(5, 8), torch.zeros(5, 8)))
    found = ReadingService(shown, lambda: loaded, name="tiny")
    yield found
    found.close()


def told(service: ReadingService, name: str = "reading", **parameters: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(service.answer(name, parameters).body)
    return found


def finished(service: ReadingService) -> dict[str, Any]:
    end = time.monotonic() + 60
    while (status := told(service))["doing"] and time.monotonic() < end:
        time.sleep(0.02)
    return status


def test_a_text_is_read_and_shown_exactly(service: ReadingService, loaded: tuple[Any, Any]) -> None:
    before = told(service, "info")
    assert service.post("read", {"text": "import os\nimport sys\n"}).status == 200
    status = finished(service)
    model, tokenizer = loaded
    ids = [tokenizer.bos_token_id, *tokenizer("import os\nimport sys\n")["input_ids"]]  # as attlas record begins
    assert (status["error"], status["tokens"]) == ("", len(ids))
    info = told(service, "info")
    assert info["key"] != before["key"]
    assert info["reading"]["text"] == "import os\nimport sys\n"
    check_fields("ReadingFacts", info["reading"])
    check_fields("ReadingStatus", status, "model", "characters")
    with attlas.record(model) as atlas, torch.no_grad():
        model(torch.tensor([ids]))
    assert service.source.texts[0].shown == [tokenizer.decode([number]) for number in ids]
    row = service.answer("row", {"entry": "2", "head": "4", "i": str(len(ids) - 1), "v": info["key"]})
    torch.testing.assert_close(torch.frombuffer(bytearray(row.body), dtype=torch.float32), atlas[2][0, 4, -1])
    # A page of the text before is given the numbers of that, and by no key those of another one.
    row = service.answer("row", {"entry": "0", "head": "0", "i": "0", "v": before["key"]})
    torch.testing.assert_close(torch.frombuffer(bytearray(row.body), dtype=torch.float32), torch.full((5,), 0.2))
    assert told(service, "info", text="0")["key"] == before["key"]
    assert [each["number"] for each in info["reading"]["texts"]] == [0, 1]
    assert service.answer("row", {"entry": "0", "head": "0", "i": "0", "v": "unknown"}).status == 409


def test_texts_are_kept_up_to_a_number_and_grow_in_their_place(
    service: ReadingService, loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attlas.view.reading._MOST_TEXTS", 2)
    for text in ("a = 1\n", "b = 2\n", "c = 3\n"):
        service.post("read", {"text": text})
        assert finished(service)["error"] == ""
    assert [each["name"] for each in told(service, "info")["reading"]["texts"]][1:] == ["b = 2", "c = 3"]
    assert told(service, "info", text="1")["reading"]["number"] == 0  # it is gone
    before = told(service, "info", text="2")
    service.post("read", {"text": None, "more": 2, "of": 2})
    assert finished(service)["error"] == ""
    after = told(service, "info", text="2")
    assert after["reading"]["tokens"] == before["reading"]["tokens"] + 2
    assert after["reading"]["text"].startswith("b = 2\n")
    # Whoever still asks about the shorter text is answered; numbers that are not there are refused.
    assert service.answer("row", {"entry": "0", "head": "0", "i": "0", "v": before["key"]}).status == 200
    assert service.post("read", {"text": None, "more": 1, "of": 1}).status == 409


def test_a_page_that_stands_is_answered_while_its_text_grows(service: ReadingService) -> None:
    """Versions that no page has shown are not kept in place of one that a page still shows."""
    service.post("read", {"text": "import os\n"})
    finished(service)
    key = told(service, "info")["key"]
    for _ in range(6):
        service.post("read", {"text": None, "more": 1})
        finished(service)
    cell = {"entry": "0", "head": "0", "i": "1", "j": "0", "v": key}
    assert service.answer("cell", cell).status == 200
    for _ in range(4):  # pages that show each version
        service.post("read", {"text": None, "more": 1})
        finished(service)
        told(service, "info")
    assert service.answer("cell", cell).status == 409


def test_a_model_is_loaded_before_it_is_needed_and_closing_does_not_wait(loaded: tuple[Any, Any]) -> None:
    begin, go = threading.Event(), threading.Event()

    def slow() -> tuple[Any, Any]:
        begin.set()
        go.wait(60)
        return loaded

    service = ReadingService(Service(attlas.attend(torch.zeros(5, 8), torch.zeros(5, 8))), slow, name="tiny")
    assert service.post("read", {"load": True}).status == 200
    assert begin.wait(10)
    assert told(service)["doing"] == "loading"
    service.post("read", {"text": "x = 1\n"})  # waits for the model, and loads it no second time
    go.set()
    assert (finished(service)["error"], told(service)["last"]) == ("", 1)
    service.close()
    begin.clear()
    go.clear()
    second = ReadingService(Service(attlas.attend(torch.zeros(5, 8), torch.zeros(5, 8))), slow, name="tiny")
    second.post("read", {"text": "x = 1\n"})
    assert begin.wait(10)
    since = time.monotonic()
    second.close()
    assert time.monotonic() - since < 30  # loading goes on: nobody can stop it, and nobody waits for it
    go.set()


def test_tokens_are_those_of_greedy_generation(service: ReadingService, loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    service.post("read", {"text": "def main():\n", "more": 3})
    assert finished(service)["error"] == ""
    service.post("read", {"text": None, "more": 2})
    status = finished(service)
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer("def main():\n")["input_ids"]]])
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False)[0].tolist()
    assert (status["tokens"], status["text"]) == (len(wanted), tokenizer.decode(wanted, skip_special_tokens=True))
    assert service.source.atlas.ids[0].tolist() == wanted


def test_what_cannot_be_read_says_why_and_nothing_is_lost(service: ReadingService, loaded: tuple[Any, Any]) -> None:
    key, limit = told(service)["key"], loaded[0].config.max_position_embeddings
    for content, words in (
        ({"text": "  "}, "type a text"),
        ({"text": "a" * 300_000}, "characters"),
        ({"text": 7}, "type a text"),
        ({"text": None, "more": 10_000}, "more"),
        ({"text": None}, "more"),
        ([], "more"),
    ):
        found = service.post("read", content)
        assert found.status == 400
        assert words in json.loads(found.body)["error"]
    service.post("read", {"text": "x = 1\n" * limit})
    assert f"reads at most {limit:,}" in finished(service)["error"]
    service.post("read", {"text": None, "more": 1})
    assert "type a text" in finished(service)["error"]
    assert told(service)["key"] == key


def test_a_model_that_fails_is_shown_and_stop_stops(loaded: tuple[Any, Any]) -> None:
    shown = Service(attlas.attend(torch.zeros(5, 8), torch.zeros(5, 8)))

    def broken() -> Any:
        raise OSError("no such folder\nmore")

    service = ReadingService(shown, broken, name="tiny")
    key = told(service)["key"]
    service.post("read", {"text": "a"})
    status = finished(service)
    assert (status["error"], status["key"]) == ("the model failed: no such folder", key)
    service._loader = lambda: loaded
    service.post("read", {"text": "import os\n", "more": 256})
    assert service.post("read", {"text": "b"}).status == 409  # one at a time
    assert service.post("read", {"stop": True}).status == 200
    assert finished(service)["tokens"] < 256
    service.close()
    threads = threading.active_count()
    assert service.post("read", {"text": "ab"}).status == 503
    assert threading.active_count() == threads


REPEATED = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return"
INDUCTION = {(2, 4), (3, 2)}  # the heads of the model that are, as its card says


def recorded(loaded: tuple[Any, Any], text: str, *, block: bool = True) -> Atlas:
    """Record a text as ``attlas record`` does, with the measures of the block of random tokens or without."""
    model, tokenizer = loaded
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]])
    with attlas.record(model, statistics=text_statistics(ids), tokens=tokenizer) as atlas, torch.no_grad():
        model(ids)
    atlas.details["source"] = "folder/first.py"
    if block:
        atlas.details["block"] = heads.block_scores(model, model.config.vocab_size)
    return atlas


def read(service: ReadingService, text: str) -> dict[str, Any]:
    """Read a text, and return the table of the heads as it is when the page first asks for it."""
    assert service.post("read", {"text": text}).status == 200
    assert finished(service)["error"] == ""
    return told(service, "heads")


def by_head(table: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the rows of the heads of the four layers; behind them stand those of the rollouts."""
    return {(row["entry"], row["head"]): row for row in table["rows"] if row["entry"] < 4}


@pytest.mark.parametrize("block", [True, False])
def test_what_a_head_is_does_not_change_with_the_text(loaded: tuple[Any, Any], block: bool) -> None:
    atlas = recorded(loaded, "import os, sys\n\n\ndef first(x, y):\n    return os.path.join(x, y)\n" * 12, block=block)
    shown = Service(atlas)
    shown.measure()
    service = ReadingService(shown, lambda: loaded, name="tiny")
    try:
        before = by_head(told(service, "heads"))
        tables = [read(service, text) for text in (REPEATED, "x = 1", "import numpy as np\n" * 30)]
        for table in tables:
            assert table["progress"] == 1  # the numbers come with the text
            rows = by_head(table)
            for place, row in rows.items():
                assert row["kinds"] == by_head(tables[0])[place]["kinds"]
                assert row["share"] == by_head(tables[0])[place]["share"]
            assert {place for place, row in rows.items() if row["kinds"][0] == "induction"} == INDUCTION
            assert rows[table["telling"]["entry"], table["telling"]["head"]]["kinds"][0] == "induction"
        if block:  # known to be of the same model
            assert tables[0]["on"] == {"what": "text", "name": "first.py"}
            for place, row in before.items():
                assert by_head(tables[0])[place]["kinds"] == row["kinds"]
                assert by_head(tables[0])[place]["share"] == row["share"]
                assert row["measures"] is None  # the sentence is about the text that is shown
        else:
            assert tables[0]["on"] == {"what": "random", "name": ""}
        # What the induction head does on the text is the measure of the text.
        row = by_head(tables[0])[2, 4]
        said = row["on_text"]
        assert (said["kind"], said["share"]) == ("induction", row["values"]["induction_text"])
        assert said["share"] > 0.4 > 4 * said["chance"]
        assert by_head(tables[1])[2, 4]["on_text"] is None  # no token comes twice
    finally:
        service.close()


def test_the_random_tokens_are_read_once(loaded: tuple[Any, Any], service: ReadingService) -> None:
    shapes: list[tuple[int, ...]] = []
    hook = loaded[0].register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    try:
        read(service, "import os\n")
        read(service, "import sys\n")
    finally:
        hook.remove()
    assert shapes == [(4, 256), (1, 4), (1, 4)]


def test_a_measuring_that_is_stopped_begins_again(loaded: tuple[Any, Any], service: ReadingService) -> None:
    hook = loaded[0].register_forward_pre_hook(lambda _, given: service.post("read", {"stop": True}) and None)
    service.post("read", {"text": REPEATED})
    status = finished(service)
    hook.remove()
    assert (status["error"], status["tokens"]) == ("", 0)
    assert by_head(read(service, REPEATED))[2, 4]["kinds"][0] == "induction"


def test_a_model_that_reads_no_random_tokens_reads_texts(loaded: tuple[Any, Any], service: ReadingService) -> None:
    def refuse(_: Any, given: Any) -> None:
        if len(given[0]) > 1:
            raise ValueError("one text at a time")

    hook = loaded[0].register_forward_pre_hook(refuse)
    try:
        table = read(service, REPEATED)
    finally:
        hook.remove()
    assert table["on"] is None
    assert "induction" not in {column["name"] for column in table["columns"]}
    assert all(row["kinds"] for row in by_head(table).values())


def test_posts_of_the_own_page_alone_are_taken(service: ReadingService) -> None:
    with Server(service, port=0) as server:
        own = "http://{0.hostname}:{0.port}".format(urlsplit(server.url))

        def post(origin: str | None, body: bytes, kind: str = "application/json", **more: str) -> int:
            headers = {"Content-Type": kind, **({"Origin": origin} if origin else {}), **more}
            try:
                with request.urlopen(request.Request(f"{server.url}api/read", body, headers)) as found:
                    return int(found.status)
            except error.HTTPError as refused:
                with refused:
                    return refused.code

        good = b'{"stop": true}'
        assert post(own, good) == 200
        assert post(None, good) == 403
        assert post("http://evil.example", good) == 403
        assert post(own, good, **{"Sec-Fetch-Site": "cross-site"}) == 403
        navigation = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert post(own, good, **navigation) == 403
        assert post(own, good, "text/plain") == 415
        assert post(own, b"{") == 400
        assert post(own, b'"' + b"x" * (1 << 21) + b'"') == 413
