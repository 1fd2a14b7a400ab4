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

import attlas
from attlas import models
from attlas.view import Server, Service
from attlas.view.reading import ReadingService

transformers = pytest.importorskip("transformers", reason="needs attlas[hf]")


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    folder = models.path()
    return (
        transformers.AutoModelForCausalLM.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )


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
    with attlas.record(model) as atlas, torch.no_grad():
        model(torch.tensor([ids]))
    assert service.source.texts[0].shown == [tokenizer.decode([number]) for number in ids]
    row = service.answer("row", {"entry": "2", "head": "4", "i": str(len(ids) - 1), "v": info["key"]})
    torch.testing.assert_close(torch.frombuffer(bytearray(row.body), dtype=torch.float32), atlas[2][0, 4, -1])
    # A page of the text before is told so, and is not given numbers of another one.
    assert service.answer("row", {"entry": "0", "head": "0", "i": "0", "v": before["key"]}).status == 409


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
