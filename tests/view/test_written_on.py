"""Texts that a model writes on with the cache: the same weights and tokens as reading each of them whole."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from tests import linear_models
from tests.tiny_models import SIZES, VOCABULARY, lively
from tests.view.test_reading import finished, told
from torch import nn

import attlas
from attlas.recording.atlas import Atlas
from attlas.view import Service
from attlas.view.cached_text import keeps_cache
from attlas.view.reading import ReadingService

transformers = pytest.importorskip("transformers", reason="needs attlas[hf]")

TEXT = "the quick brown fox jumps over the lazy dog"  # letters are tokens
WINDOW = 6


class Letters:
    """A tokenizer of which each letter is a token."""

    bos_token_id = 1

    def __call__(self, text: str, verbose: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(letter) % (VOCABULARY - 3) for letter in text]}

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + int(number) % 26) for number in (ids if isinstance(ids, list) else [ids]))


def causal(kind: str, **settings: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **settings)
    return lively(transformers.AutoModelForCausalLM.from_config(config)).eval()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: causal("gpt2", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4),
    "llama": lambda: causal("llama", **SIZES | {"max_position_embeddings": 256}),
    "mistral": lambda: causal("mistral", **SIZES | {"max_position_embeddings": 256}, sliding_window=WINDOW),
    "gemma2": lambda: causal("gemma2", **SIZES | {"max_position_embeddings": 256}, sliding_window=WINDOW),
    "qwen3_next": lambda: linear_models.tiny("qwen3_next"),
}


@contextmanager
def opened(model: nn.Module, first: Atlas | None = None) -> Iterator[ReadingService]:
    shown = Service(attlas.attend(torch.zeros(5, 8), torch.zeros(5, 8)) if first is None else first)
    with closing(ReadingService(shown, lambda: (model, Letters()), name="tiny")) as service:
        service.post("read", {"load": True})
        yield service


@contextmanager
def passes(model: nn.Module) -> Iterator[list[int]]:
    """Note how many tokens each pass of a model reads."""
    found: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, given: found.append(given[0].shape[1]))
    try:
        yield found
    finally:
        hook.remove()


def wrote(service: ReadingService, text: str | None, more: int, error: str = "") -> list[int]:
    """Let the model write, and return the tokens of the text."""
    assert service.post("read", {"text": text, "more": more, "of": told(service)["last"]}).status == 200
    assert error in finished(service)["error"]
    assert error or told(service)["error"] == ""
    return list(map(int, service.source.atlas.ids[0]))


@torch.no_grad()
def written_whole(model: nn.Module, ids: list[int], more: int) -> list[int]:
    """Write tokens by reading the text whole for each."""
    for _ in range(more):
        ids = [*ids, int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())]
    return ids


def check_shown(service: ReadingService, model: nn.Module, ids: list[int]) -> None:
    """Compare all that is shown with the recording of the text, read whole."""
    with attlas.record(model, values="norms") as whole, torch.no_grad():
        model(torch.tensor([ids]))
    shown = service.source.atlas
    assert len(shown.entries) == len(whole.entries)
    for entry, other in zip(shown.entries, whole.entries, strict=True):
        assert (entry.name, entry.call, entry.queries, entry.shape) == (other.name, 0, other.queries, other.shape)
        torch.testing.assert_close(entry.matrix.to_dense(), other.matrix.to_dense(), rtol=1e-4, atol=1e-5)
        for name, t in entry.values_and_norms.items():
            torch.testing.assert_close(t, other.values_and_norms[name], rtol=1e-4, atol=1e-5)
    assert len(service.source.texts[0].shown) == len(ids) == told(service)["tokens"]
    row = service.answer("row", {"entry": "0", "head": "0", "i": str(len(ids) - 1)})
    last = torch.frombuffer(bytearray(row.body), dtype=torch.float32)
    torch.testing.assert_close(last, whole.entries[0].matrix[0, 0, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_tokens_are_those_of_the_text_read_whole(name: str) -> None:
    model = MODELS[name]()
    start = [1, *Letters()(TEXT)["input_ids"]]
    with opened(model) as service:
        ids = wrote(service, TEXT, 7)
        assert ids == written_whole(model, start, 7)
        check_shown(service, model, ids)
        with passes(model) as found:
            ids = wrote(service, None, 12)
        assert found == [1] * 12  # it goes on from the cache
        assert ids == written_whole(model, start, 19)
        check_shown(service, model, ids)


def test_a_version_that_a_page_shows_stays_while_the_text_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attlas.view.reading._GROWTH_SECONDS", 0.0)  # each token is shown
    model = MODELS["llama"]()
    with opened(model) as service:
        wrote(service, TEXT, 1)
        key = told(service, "info")["key"]
        cells = [{"entry": "1", "head": "2", "i": str(i), "v": key} for i in (0, 20, 43)]
        before = [service.answer("row", cell).body for cell in cells]
        assert before[0]
        service.post("read", {"text": None, "more": 40, "of": 1})
        while told(service)["doing"]:  # while the model writes
            assert [service.answer("row", cell).body for cell in cells] == before
        assert told(service)["tokens"] == 85
        assert [service.answer("row", cell).body for cell in cells] == before


def test_tokens_that_no_page_will_show_get_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    made, measured = [], []

    class Counted(Service):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(1)
            super().__init__(*args, **kwargs)

        def measure(self) -> None:
            measured.append(1)
            super().measure()

    with opened(MODELS["llama"]()) as service:
        wrote(service, TEXT, 1)
        monkeypatch.setattr("attlas.view.reading.Service", Counted)
        monkeypatch.setattr("attlas.view.reading._GROWTH_SECONDS", 600.0)
        wrote(service, None, 20)
        assert (len(made), len(measured)) == (2, 1)  # the first token, and all others together
        table = told(service, "heads")
        assert table["progress"] == 1


@contextmanager
def half_written() -> Iterator[tuple[ReadingService, threading.Event]]:
    """Let a model write six tokens, each a version of its own, and wait behind the first until the event is set."""
    model, go = MODELS["llama"](), threading.Event()
    go.set()
    with opened(model) as service:
        wrote(service, TEXT, 1)
        hook = model.register_forward_pre_hook(lambda *_: go.wait(60) and None)
        service.post("read", {"text": None, "more": 6, "of": 1})
        while told(service)["tokens"] == 45:
            pass
        go.clear()
        yield service, go
        hook.remove()


def test_statistics_of_a_longer_text_wait_for_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attlas.view.reading._MOST_MEASURED", 0)
    monkeypatch.setattr("attlas.view.reading._MOST_MEASURED_MEANWHILE", 0)
    monkeypatch.setattr("attlas.view.reading._GROWTH_SECONDS", 0.0)
    with half_written() as (service, go):
        key = told(service, "info")["key"]
        for _ in range(5):
            assert told(service, "heads", v=key)["progress"] == 0
            time.sleep(0.05)
        go.set()
        assert finished(service)["error"] == ""
        end = time.monotonic() + 60
        for each in (told(service)["key"], key):  # a page that still shows the one before asks on
            while told(service, "heads", v=each)["progress"] < 1:
                assert time.monotonic() < end
                time.sleep(0.05)


def test_statistics_of_a_short_text_come_with_what_a_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attlas.view.reading._GROWTH_SECONDS", 0.0)
    with half_written() as (service, go):
        table = told(service, "heads", v=told(service, "info")["key"])
        assert table["progress"] == 1
        assert all(row["values"]["entropy"] is not None for row in table["rows"])
        go.set()
        assert finished(service)["error"] == ""


def test_stop_keeps_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model, start = MODELS["llama"](), [1, *Letters()(TEXT)["input_ids"]]
    monkeypatch.setattr("attlas.view.reading._GROWTH_SECONDS", 600.0)
    with opened(model) as service:
        wrote(service, TEXT, 1)
        count = 0

        def stop(_: Any, given: Any) -> None:
            nonlocal count
            count += 1
            if count == 9:
                service.post("read", {"stop": True})

        hook = model.register_forward_pre_hook(stop)
        ids = wrote(service, None, 100)
        hook.remove()
        assert len(ids) == len(start) + 1 + 9
        check_shown(service, model, ids)
        assert wrote(service, None, 1) == written_whole(model, start, 11)


def failing_at(model: nn.Module, number: int, *, whole: bool) -> Any:
    """Let the pass with a number fail, of one token or of a text."""
    count = 0

    def fail(_: Any, given: Any) -> None:
        nonlocal count
        if (given[0].shape[1] > 1) == whole:
            count += 1
            if count >= number:
                raise ValueError("out of order")

    return model.register_forward_pre_hook(fail)


def test_an_error_in_the_middle_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, start = MODELS["llama"](), [1, *Letters()(TEXT)["input_ids"]]
    monkeypatch.setattr("attlas.view.reading._GROWTH_SECONDS", 600.0)
    with opened(model) as service:
        wrote(service, TEXT, 1)
        hook = failing_at(model, 6, whole=False)
        ids = wrote(service, None, 8)  # five with the cache; then the text is read whole, and so are the rest
        assert ids == written_whole(model, start, 9)
        check_shown(service, model, ids)
        hook.remove()
        hook = failing_at(model, 2, whole=True)
        ids = wrote(service, None, 3, error="the model failed: out of order")
        hook.remove()
        assert ids == written_whole(model, start, 10)
        check_shown(service, model, ids)


def test_an_error_within_a_layer_leaves_nothing_half_recorded() -> None:
    model = MODELS["llama"]()
    with opened(model) as service:
        wrote(service, TEXT, 2)
        count = 0

        def fail(_: Any, given: Any, output: Any) -> None:
            nonlocal count
            count += 1
            if count == 3:
                raise ValueError("out of order")

        hook = model.model.layers[1].self_attn.register_forward_hook(fail)  # the first layer is recorded by then
        ids = wrote(service, None, 6)
        hook.remove()
        assert ids == written_whole(model, [1, *Letters()(TEXT)["input_ids"]], 8)
        check_shown(service, model, ids)


def test_a_cache_that_gives_other_weights_is_not_used() -> None:
    model = MODELS["llama"]()

    def shift(_: Any, given: Any, output: Any) -> Any:
        return (output[0] * 1.01, *output[1:]) if output[0].shape[1] == 1 else None  # a step only

    model.model.layers[0].self_attn.register_forward_hook(shift)
    with opened(model) as service, passes(model) as found:
        ids = wrote(service, TEXT, 4)
        check_shown(service, model, ids)
        assert ids == written_whole(model, ids[:44], 4)
        assert found.count(1) == 1  # one was tried


@pytest.mark.filterwarnings("ignore:record")  # heads are named without layers of linear attention
@pytest.mark.parametrize("name", ["falcon_h1", "mamba2", "minimax", "nemotron_h"])
def test_a_state_that_rounds_otherwise_is_not_used(name: str) -> None:
    """Whichever way a text is read, what is shown is what reading it whole gives."""
    model = linear_models.tiny(name)
    with opened(model) as service:
        ids = wrote(service, TEXT, 6)
        assert ids == written_whole(model, ids[:44], 6)
        check_shown(service, model, ids)


def test_models_without_a_cache_of_keys_are_read_whole() -> None:
    changing = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = causal("llama", **SIZES | {"max_position_embeddings": 256}, rope_scaling=changing)
    assert not keeps_cache(model)
    assert not keeps_cache(linear_models.tiny("mamba2"))
    with opened(model) as service, passes(model) as found:
        ids = wrote(service, TEXT, 3)
        check_shown(service, model, ids)
    assert 1 not in found


def test_the_cache_is_of_the_last_text_and_goes_when_its_memory_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, start = MODELS["llama"](), [1, *Letters()(TEXT)["input_ids"]]
    with opened(model) as service:
        ids = wrote(service, TEXT, 2)
        wrote(service, "another text", 1)
        with passes(model) as found:  # the first text goes on in its place: read once, then from the cache
            service.post("read", {"text": None, "more": 3, "of": 1})
            assert finished(service)["error"] == ""
            assert found == [len(ids) + 1, 1, 1]
        assert told(service, text="1")["tokens"] == len(ids) + 3
        found.clear()
        answer = service.answer("without", {"heads": "0.1", "text": "1"})
        assert answer.status == 200, json.loads(answer.body)
        with passes(model) as found:
            service.post("read", {"text": None, "more": 2, "of": 1})
            assert finished(service)["error"] == ""
        assert found == [len(ids) + 4, 1]
        monkeypatch.setattr("attlas.view.reading._MOST_CACHE_BYTES", 1000)
        with passes(model) as found:
            for _ in range(2):
                service.post("read", {"text": None, "more": 1, "of": 1})
                assert finished(service)["error"] == ""
        assert found == [1, len(ids) + 7]
        assert list(map(int, service._texts[1].ids)) == written_whole(model, start, 9)


def test_what_grows_the_first_recording_is_a_text_of_its_own() -> None:
    """Also where a text with the same tokens has a cache."""
    model = MODELS["llama"]()
    start = [1, *Letters()(TEXT)["input_ids"]]
    with attlas.record(model) as first, torch.no_grad():
        model(torch.tensor([start]))
    with opened(model, first) as service:
        wrote(service, TEXT, 0)
        service.post("read", {"text": None, "more": 3, "of": 0})
        assert finished(service)["error"] == ""
        assert [told(service, text=str(number))["tokens"] for number in range(3)] == [44, 44, 47]
        assert service._texts[2].ids == written_whole(model, start, 3)


def test_parts_go_on_with_the_cache() -> None:
    model = MODELS["llama"]()
    start = torch.tensor([[1, *Letters()(TEXT)["input_ids"]]])
    with attlas.record(model, parts=True) as first, torch.no_grad():
        model(start)
    with opened(model, first) as service:
        wrote(service, TEXT, 2)
        with passes(model) as found:
            ids = wrote(service, None, 5)
        assert found == [1] * 5
        with attlas.record(model, parts=True) as whole, torch.no_grad():
            model(torch.tensor([ids]))
        info = told(service, "info")
        kept = sum(stream.nbytes for stream in whole.parts)
        assert info["reading"]["parts"]["bytes"] == pytest.approx(kept, rel=0.05)
        cell = {"entry": "1", "head": "2", "i": str(len(ids) - 1), "j": "3"}
        answer = service.answer("why", cell | {"v": info["key"]})
        assert answer.status == 200
        wanted = attlas.heads.explain(whole, 1, 2, cell=(len(ids) - 1, 3))
        assert json.loads(answer.body)["logit"] == pytest.approx(wanted.logit, rel=1e-3)


def test_parts_that_no_longer_fit_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]()
    with attlas.record(model, parts=True) as first, torch.no_grad():
        model(torch.tensor([[1, *Letters()(TEXT)["input_ids"]]]))
    with opened(model, first) as service:
        wrote(service, TEXT, 2)
        facts = told(service)["parts"]
        assert facts["bytes"]
        monkeypatch.setattr("attlas.view.typed_parts.MOST_BYTES", facts["per_token"] * (told(service)["tokens"] + 3))
        ids = wrote(service, None, 6)
        facts = told(service)["parts"]
        assert facts["bytes"] == 0
        assert facts["reason"][0] == "the parts of this text would take {0}; at most {1} are kept"
        check_shown(service, model, ids)
