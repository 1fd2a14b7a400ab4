"""Parts of typed texts: recorded where the first recording has them, bounded, and refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from tests import induction
from tests.view.declared import check_fields
from tests.view.test_reading import finished, told

import attlas
from attlas import heads
from attlas.recording.atlas import Atlas
from attlas.view import Service
from attlas.view.reading import ReadingService
from attlas.view.typed_parts import MOST_BYTES

pytest.importorskip("transformers", reason="needs attlas[hf]")

LONG = "import os\nimport sys\n" * 5


@pytest.fixture(scope="module")
def first() -> Atlas:
    return induction.recorded()


@pytest.fixture
def service(first: Atlas, loaded: tuple[Any, Any]) -> Iterator[ReadingService]:
    with closing(ReadingService(Service(first), lambda: loaded, name="tiny")) as found:
        yield found


def read(service: ReadingService, text: str | None, more: int = 0) -> dict[str, Any]:
    """Read a text, and return what the page is told of it."""
    assert service.post("read", {"text": text, "more": more}).status == 200
    status = finished(service)
    assert status["error"] == ""
    return told(service, "info")


def asked(service: ReadingService, key: str, name: str = "why", **cell: int) -> tuple[int, Any]:
    parameters = {"entry": "2", "head": "4", "v": key} | {each: str(place) for each, place in cell.items()}
    answer = service.answer(name, parameters)
    return answer.status, json.loads(answer.body)


def test_a_typed_text_is_explained_as_its_recording_is(service: ReadingService, loaded: tuple[Any, Any]) -> None:
    info = read(service, induction.TEXT)
    parts = info["reading"]["parts"]
    check_fields("ReadingFacts", info["reading"])
    check_fields("TypedPartsFacts", parts)
    assert all(entry["parts"] for entry in info["entries"] if entry["kind"] != "rollout")
    assert info["units"].keys() == {"value", "output"}  # norms of values too
    model, tokenizer = loaded
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(induction.TEXT)["input_ids"]]])
    with torch.no_grad(), attlas.record(model, parts=True) as atlas:
        model(ids)
    cell = {"i": induction.QUERY + 1, "j": induction.KEY + 1}  # behind the token of the beginning
    why = heads.explain(atlas, 2, 4, cell=(cell["i"], cell["j"]))
    status, answer = asked(service, info["key"], **cell)
    assert status == 200
    assert answer["logit"] == pytest.approx(why.logit)
    assert answer["writer"]["name"] == "head 0·0"
    assert asked(service, info["key"], "why_map")[0] == 200
    kept = sum(stream.nbytes for stream in atlas.parts)
    assert parts["bytes"] == pytest.approx(kept, rel=0.01)
    assert parts["per_token"] == pytest.approx(kept / ids.shape[1], rel=0.01)
    assert (parts["most"], parts["reason"]) == (MOST_BYTES, None)
    # The text grows: the longer one is explained, and the shorter one keeps no parts.
    longer = read(service, None, more=1)
    assert asked(service, longer["key"], **cell)[1]["logit"] == pytest.approx(why.logit, rel=1e-4)
    status, refused = asked(service, info["key"], **cell)
    assert (status, refused["reason"]) == (409, ["its parts made room for those of later texts; read it again"])


def test_the_parts_of_the_oldest_texts_make_room(service: ReadingService, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read(service, LONG)
    size = before["reading"]["parts"]["bytes"]
    monkeypatch.setattr("attlas.view.typed_parts.MOST_BYTES", int(1.5 * size))
    after = read(service, LONG.replace("sys", "re"))
    assert asked(service, before["key"], i=9, j=3) == (
        409,
        {
            "error": "its parts made room for those of later texts; read it again",
            "reason": ["its parts made room for those of later texts; read it again"],
        },
    )
    assert asked(service, after["key"], i=9, j=3)[0] == 200
    # The first recording keeps what it has, and a text that does not fit alone is read without.
    assert asked(service, told(service, "info", text="0")["key"], i=9, j=3)[0] == 200
    monkeypatch.setattr("attlas.view.typed_parts.MOST_BYTES", 1000)
    small = read(service, "x = 1\n")
    status, refused = asked(service, small["key"], i=2, j=1)
    assert (status, refused["reason"][0]) == (409, "the parts of this text would take {0}; at most {1} are kept")
    assert refused["reason"][2] == "1,000 bytes"
    assert small["reading"]["parts"]["reason"] == refused["reason"]
    assert asked(service, after["key"], i=9, j=3)[0] == 200  # nothing was dropped for it
    row = service.answer("row", {"entry": "2", "head": "4", "i": "3", "v": small["key"]})
    assert row.status == 200


def test_a_layout_that_is_not_known_is_named_and_the_text_is_read(first: Atlas, loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    passes = []
    hooks = [
        model.transformer.h[1].register_forward_hook(lambda module, args, output: torch.tanh(output)),
        model.transformer.h[0].register_forward_hook(lambda module, args, output: passes.append(args[0].shape[1])),
    ]
    try:
        with closing(ReadingService(Service(first), lambda: (model, tokenizer), name="tiny")) as service:
            info = read(service, LONG)
            reason = info["reading"]["parts"]["reason"]
            assert reason[0] == "the parts of this model are not known: {0}"
            assert "transformer.h.1" in reason[1]
            count = info["reading"]["tokens"]
            assert passes.count(count) == 2  # with parts, which were refused, and without
            assert not any(entry["parts"] for entry in info["entries"])
            assert asked(service, info["key"], i=9, j=3)[1]["reason"] == reason
            passes.clear()
            again = read(service, LONG + "x")
            assert passes.count(again["reading"]["tokens"]) == 1  # it is not tried again
            assert again["reading"]["parts"]["reason"] == reason
    finally:
        for hook in hooks:
            hook.remove()


def test_without_parts_in_the_first_recording_texts_have_none(loaded: tuple[Any, Any]) -> None:
    shown = Service(attlas.attend(torch.zeros(5, 8), torch.zeros(5, 8)))
    with closing(ReadingService(shown, lambda: loaded, name="tiny")) as service:
        info = read(service, LONG)
        assert info["reading"]["parts"] is None
        status, refused = asked(service, info["key"], i=9, j=3)
        assert status == 409
        assert "attlas record --parts keeps them" in refused["error"]
