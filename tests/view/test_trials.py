"""A text that is read again without heads, with tokens hidden, or with other words: the numbers are those of torch."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.view.declared import check_fields
from tests.view.test_reading import finished, told

import attlas
from attlas import heads
from attlas.heads.differences import aligned
from attlas.interventions import Ablate, Suppress
from attlas.view import Service
from attlas.view.reading import ReadingService

pytest.importorskip("transformers", reason="needs attlas[hf]")

TEXT = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return"
OTHER = "def add(a, total):\n    return a + b\n\ndef add(a, b):\n    return"


@pytest.fixture(scope="module")
def service(loaded: tuple[Any, Any]) -> Iterator[ReadingService]:
    shown = Service(attlas.attend(torch.zeros(5, 8), torch.zeros(5, 8)))
    found = ReadingService(shown, lambda: loaded, name="tiny")
    found.post("read", {"text": TEXT})
    assert finished(found)["error"] == ""
    yield found
    found.close()


def ids_of(loaded: tuple[Any, Any], text: str) -> torch.Tensor:
    return torch.tensor([[loaded[1].bos_token_id, *loaded[1](text)["input_ids"]]])


def asked(service: ReadingService, name: str, **parameters: Any) -> dict[str, Any]:
    answer = service.answer(name, {key: str(value) for key, value in parameters.items()})
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def check_readings(loaded: tuple[Any, Any], answer: dict[str, Any], what: Any, first: str, second: str) -> None:
    """Compare probabilities, continuations and heads with those of `attlas.intervene` and of dense weights."""
    model, tokenizer = loaded
    recorded = []
    for side, text, items in (("before", first, []), ("after", second, what)):
        ids = ids_of(loaded, text)
        with attlas.intervene(model, items), attlas.record(model) as atlas, torch.no_grad():
            logits = model(ids).logits[0]
        recorded.append(atlas)
        wanted = logits[:-1].softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert answer[side][0] is None
        torch.testing.assert_close(torch.tensor(answer[side][1:]), wanted, rtol=1e-3, atol=1e-6)
        number = {"before": 0, "after": 1}[side]
        with attlas.intervene(model, items), torch.no_grad():
            settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
            written = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :]
        assert answer["next"][number]["text"] == tokenizer.decode(written)
        token, probability = answer["next"][number]["likeliest"][0]
        assert token == tokenizer.decode([int(logits[-1].argmax())])
        assert probability == pytest.approx(float(logits[-1].softmax(-1).max()), rel=1e-3)
    pairs = aligned(*(ids_of(loaded, text)[0].tolist() for text in (first, second)))
    assert answer["pairs"] == [list(pair) for pair in pairs]
    rows = torch.tensor(pairs)
    for told_head in answer["heads"]:
        P, Q = (atlas[told_head["entry"]].to_dense()[0, told_head["head"]] for atlas in recorded)
        P, Q = P[rows[:, 0]], Q[rows[:, 1]]
        same = (P[:, rows[:, 0]] - Q[:, rows[:, 1]]).abs().sum()
        alone = P.sum() - P[:, rows[:, 0]].sum() + Q.sum() - Q[:, rows[:, 1]].sum()
        assert told_head["moved"] == pytest.approx(float((same + alone) / (P.sum() + Q.sum())), abs=1e-4)
    assert answer["heads"] == sorted(answer["heads"], key=lambda head: -head["moved"])


def test_heads_are_left_out(service: ReadingService, loaded: tuple[Any, Any]) -> None:
    answer = asked(service, "without", heads="2.4,0.0,2.5")
    check_fields("Trial", answer)
    check_fields("MovedHead", answer["heads"][0])
    check_fields("Following", answer["next"][0])
    check_readings(loaded, answer, [Ablate(heads={2: [4, 5], 0: [0]})], TEXT, TEXT)
    assert answer["every"] == 1
    assert answer["tokens"] == [service.source.texts[0].shown] * 2
    assert not any(head["entry"] == 0 for head in answer["heads"])  # the weights of the first layer stay
    # Without what copies, the second definition is less likely.
    repeated = range(TEXT.count("\n") + 12, len(answer["after"]))
    assert sum(answer["before"][i] - answer["after"][i] for i in repeated) > 1


def test_tokens_are_hidden_from_all_heads_or_from_some(service: ReadingService, loaded: tuple[Any, Any]) -> None:
    answer = asked(service, "without", start=2, stop=4)
    check_readings(loaded, answer, [Suppress(queries=slice(4, None), keys=(2, 4))], TEXT, TEXT)
    cells = [cell for head in answer["heads"] for cell in head["cells"]]
    assert any(key[0] in (2, 3) and after == 0 for _, key, _, after in cells)
    answer = asked(service, "without", start=2, stop=4, heads="3.2")
    check_readings(loaded, answer, [Suppress(heads={3: [2]}, queries=slice(4, None), keys=(2, 4))], TEXT, TEXT)
    assert {(head["entry"], head["head"]) for head in answer["heads"]} == {(3, 2)}  # none comes after the last layer


def test_two_texts_are_aligned(service: ReadingService, loaded: tuple[Any, Any]) -> None:
    assert service.post("second", {"text": OTHER}).status == 200
    answer = asked(service, "other")
    check_readings(loaded, answer, [], TEXT, OTHER)
    assert list(map(len, answer["tokens"])) == [len(answer["before"]), len(answer["after"])]
    assert len(answer["before"]) != len(answer["after"])
    assert service.answer("other", {}).final is False  # the second text may be another one next time
    assert asked(service, "other") == answer


def test_what_cannot_be_answered_says_why(service: ReadingService) -> None:
    count = len(service.source.texts[0])
    for name, parameters, status, words in (
        ("without", {}, 400, "choose a head"),
        ("without", {"heads": "9.0"}, 404, "entry must be"),
        ("without", {"heads": "0"}, 400, "head must be"),
        ("without", {"heads": "0.7"}, 404, "head must be"),
        ("without", {"start": "3", "stop": "3"}, 400, "at least one"),
        ("without", {"start": "3", "stop": str(count)}, 400, "no token comes after"),
        ("without", {"heads": "0.0", "v": "old"}, 409, "no longer kept"),
    ):
        answer = service.answer(name, parameters)
        assert answer.status == status, answer.body
        assert words in json.loads(answer.body)["error"]
    for content in ({"text": " "}, {"text": 3}, [], {"text": "a" * 300_000}):
        assert service.post("second", content).status == 400
    service.post("second", {"text": "x = 1\n" * 2048})
    answer = service.answer("other", {})
    assert answer.status == 400
    assert "reads at most 2,048" in json.loads(answer.body)["error"]
    assert told(service)["trial"] is None


def test_a_recording_without_known_tokens_or_a_model_that_fails_says_so(loaded: tuple[Any, Any]) -> None:
    def broken() -> Any:
        raise OSError("no such folder\nmore")

    shown = Service(attlas.attend(torch.zeros(5, 8), torch.zeros(5, 8)))
    unknown = ReadingService(shown, lambda: loaded, name="tiny")
    answer = unknown.answer("without", {"heads": "0.0"})
    assert (answer.status, "let the model read" in json.loads(answer.body)["error"]) == (409, True)
    unknown.close()
    assert unknown.answer("without", {"heads": "0.0"}).status == 503
    with attlas.record(loaded[0], tokens=loaded[1]) as atlas, torch.no_grad():
        loaded[0](ids_of(loaded, TEXT))
    service = ReadingService(Service(atlas), broken, name="tiny")
    answer = service.answer("without", {"heads": "0.0"})
    assert (answer.status, json.loads(answer.body)["error"]) == (409, "the model failed: no such folder")
    # A recording from a folder is read by the model anew: what it says of the text is what the model says.
    service._loader = lambda: loaded
    check_readings(loaded, asked(service, "without", heads="0.0"), [Ablate(heads={0: [0]})], TEXT, TEXT)
    service.close()


def test_a_question_ends_when_nobody_waits(service: ReadingService) -> None:
    looks: list[float | None] = []

    def wanted() -> bool:
        looks.append(told(service)["trial"])
        return len(looks) < 40

    answer = service.answer("without", {"heads": "1.1"}, wanted)
    assert answer.status == 499
    assert told(service)["trial"] is None
    shares = [share for share in looks if share is not None]
    assert shares == sorted(shares)
    assert shares[-1] > 0


def test_one_question_is_computed_at_a_time(service: ReadingService) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wanted() -> bool:
        begun.set()
        go_on.wait(20)
        return True

    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(service.answer("without", {"heads": "1.2"}, wanted)))
    first.start()
    assert begun.wait(20)
    assert service.post("read", {"text": "a = 1"}).status == 409
    assert service.answer("without", {"heads": "1.3"}, lambda: False).status == 499  # it waits, and gives up
    go_on.set()
    first.join()
    assert answers[0].status == 200


def test_of_long_texts_a_sample_of_queries_is_compared(
    service: ReadingService, loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, model = ids_of(loaded, TEXT), loaded[0]
    monkeypatch.setattr("attlas.view.trials._CELLS", 12 * ids.shape[1] ** 2)
    answer = asked(service, "without", heads="0.0")
    assert answer["every"] == 4
    recorded = []
    for items in ([], [Ablate(heads={0: [0]})]):
        with attlas.intervene(model, items), attlas.record(model) as atlas, torch.no_grad():
            model(ids)
        recorded.append(atlas)
    wanted = heads.changes(*recorded, every=4).records()
    assert answer["heads"][0]["moved"] == pytest.approx(wanted[0]["moved"], abs=1e-5)
