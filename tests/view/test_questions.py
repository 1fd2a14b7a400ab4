"""Questions that are wrong: the right status, one line, and never an exception."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.view.cases import facts

import attlas
from attlas.view import Service
from attlas.view.cache import Cache
from attlas.view.pyramid import levels_of, summed


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    torch.manual_seed(0)
    q = torch.randn(2, 2, 300, 4)
    opened = Service(attlas.attend(q, q, mask=attlas.Causal()), tokens=[str(i) for i in range(300)])
    yield opened
    opened.close()


HEAD = {"entry": "0", "head": "0"}
TILE = {**HEAD, "level": "0", "y": "0", "x": "0"}


@pytest.mark.parametrize(
    ("name", "parameters", "status"),
    [
        ("nothing", {}, 404),
        ("", {}, 404),
        ("__init__", {}, 404),
        ("answer", {}, 404),
        ("info\n", {}, 404),
        ("tokens", {}, 400),
        ("tokens", {"start": "3", "stop": "2"}, 400),
        ("tokens", {"start": "-1", "stop": "2"}, 400),
        ("tokens", {"start": "0", "stop": "301"}, 404),
        ("search", {}, 400),
        ("search", {"text": ""}, 400),
        ("search", {"text": "a" * 1001}, 400),
        ("search", {"text": "1", "limit": "0"}, 404),
        ("search", {"text": "1", "limit": "x"}, 400),
        ("tile", {}, 400),
        ("tile", {**TILE, "entry": "1"}, 404),
        ("tile", {**TILE, "entry": "1e0"}, 400),
        ("tile", {**TILE, "entry": "0x0"}, 400),
        ("tile", {**TILE, "entry": "٠"}, 400),
        ("tile", {**TILE, "entry": "0" * 16}, 400),
        ("tile", {**TILE, "entry": " 0"}, 400),
        ("tile", {**TILE, "head": "2"}, 404),
        ("tile", {**TILE, "head": "MEAN"}, 400),
        ("tile", {**TILE, "head": "-1"}, 400),
        ("tile", {**TILE, "batch": "2"}, 404),
        ("tile", {**TILE, "variant": "sink"}, 400),
        ("tile", {**TILE, "pool": "sum"}, 400),
        ("tile", {**TILE, "level": "2"}, 404),
        ("tile", {**TILE, "y": "2"}, 404),
        ("tile", {**TILE, "x": "999999999999999"}, 404),
        ("tile", {**TILE, "x": "9999999999999999"}, 400),
        ("tile", {**TILE, "x": "nan"}, 400),
        ("thumbnail", {**HEAD, "size": "15"}, 404),
        ("thumbnail", {**HEAD, "size": "257"}, 404),
        ("row", HEAD, 400),
        ("row", {**HEAD, "i": "300"}, 404),
        ("column", {**HEAD, "j": "300"}, 404),
        ("region", {**HEAD, "r0": "0", "r1": "300", "c0": "0", "c1": "300"}, 400),
        ("region", {**HEAD, "r0": "0", "r1": "301", "c0": "0", "c1": "1"}, 404),
        ("region", {**HEAD, "r0": "5", "r1": "4", "c0": "0", "c1": "1"}, 400),
        ("cell", {**HEAD, "i": "0"}, 400),
        ("pair", {**HEAD, "i": "300", "j0": "0", "j1": "1"}, 404),
        ("pair", {**HEAD, "i": "0", "j0": "0", "j1": "301"}, 404),
        ("pair", {**HEAD, "i": "0", "j0": "0", "j1": "1", "with_entry": "1", "with_head": "0"}, 404),
        ("pair", {**HEAD, "i": "0", "j0": "0", "j1": "1", "with_entry": "0"}, 400),
        ("top", {**HEAD, "k": "101"}, 404),
        ("top", {**HEAD, "k": "5", "r0": "1"}, 400),
        ("track", HEAD, 400),
        ("track", {**HEAD, "name": "entropie"}, 400),
        ("focus", {**HEAD, "level": "9"}, 404),
    ],
)
def test_wrong_questions(service: Service, name: str, parameters: dict[str, str], status: int) -> None:
    answer = service.answer(name, parameters)
    assert (answer.kind, answer.status, answer.final) == ("json", status, False)
    (text,) = json.loads(answer.body).values()
    assert text
    assert "\n" not in text
    assert len(text) < 200


@given(st.data())
def test_no_question_raises(service: Service, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(service.names) | st.text(max_size=8))
    numbers = st.integers(-3, 400).map(str) | st.sampled_from(["", "mean", "max", "nosink", "entropy", "1e3", "\x00"])
    words = "entry head batch variant pool level y x i j k r0 r1 c0 c1 size name start stop text limit"
    parameters = data.draw(st.dictionaries(st.sampled_from(words.split(" ")), numbers | st.text(max_size=5)))
    answer = service.answer(name, {**(HEAD if data.draw(st.booleans()) else {}), **parameters})
    assert answer.status in (200, 400, 404)
    if answer.kind == "json":
        json.loads(answer.body)


def test_an_error_of_the_computation_is_an_answer(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the disk is gone\nmore of it")

    monkeypatch.setattr("attlas.view.exact.Head.cells", broken)
    answer = service.answer("row", {**HEAD, "i": "3"})
    assert (answer.status, json.loads(answer.body)) == (500, {"error": "the disk is gone"})


def test_the_key_tells_contents_apart() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 40, 4)
    k = q.clone()
    k[0, 1, 20, 2] += 1e-3
    bias = attlas.TensorBias(torch.randn(40, 40))
    shown: list[tuple[Any, dict[str, Any]]] = [
        (attlas.attend(q, q), {}),
        (attlas.attend(q, k), {}),
        (attlas.attend(q, q, scale=0.3), {}),
        (attlas.attend(q, q, sink=torch.zeros(2)), {}),
        (attlas.attend(q, q, mask=attlas.Causal()), {}),
        (attlas.attend(q, q, mask=attlas.Padding(torch.tensor([30]))), {}),
        (attlas.attend(q, q, mask=attlas.Padding(torch.tensor([31]))), {}),
        (attlas.attend(q, q, score=attlas.ScaledDot() + bias), {}),
        (attlas.attend(q, q)[:, :1], {}),
        (attlas.attend(q, q), {"tokens": ["a"] * 40}),
        (attlas.attend(q, q), {"title": "other"}),
    ]
    keys = []
    for A, more in shown:
        opened = Service(A, **more)
        keys.append(facts(opened, "info")["key"])
        opened.close()
    assert len(set(keys)) == len(keys)
    again = Service(attlas.attend(q.clone(), q.clone()))
    assert facts(again, "info")["key"] == keys[0]
    again.close()


# ------------------------------------------------------------------------------------------------- levels and caches


@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_the_last_level_fits_into_one_tile(m: int, n: int) -> None:
    levels = levels_of(m, n)
    assert -(-max(m, n) // (1 << (levels - 1))) <= 256
    assert levels == 1 or -(-max(m, n) // (1 << (levels - 2))) > 256


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 2, 4, 8]))
def test_larger_blocks_follow_exactly(high: int, wide: int, factor: int) -> None:
    values = np.random.default_rng(high * wide).integers(0, 1000, (high, wide)).astype("<u2")
    found = summed(values, factor, np.add, "i8")
    rows, columns = range(0, high, factor), range(0, wide, factor)
    assert found.tolist() == [[values[y : y + factor, x : x + factor].sum() for x in columns] for y in rows]


def test_a_cache_keeps_what_was_used_last() -> None:
    cache: Cache[int] = Cache(100)
    for key in range(5):
        cache.put(key, key, 20)
    assert cache.get(0) == 0
    cache.put(5, 5, 20)
    assert cache.get(1) is None
    assert [cache.get(key) for key in (0, 2, 3, 4, 5)] == [0, 2, 3, 4, 5]
    cache.put(2, 22, 60)
    assert cache.get(2) == 22
    assert cache.nbytes <= 100
    cache.put("large", 1, 101)
    assert cache.get("large") is None
    cache.put(2, 23, 101)
    assert cache.get(2) is None, "the old value of a key does not stay"


def test_a_cache_of_many_threads_counts_right() -> None:
    cache: Cache[int] = Cache(1000)

    def use(seed: int) -> None:
        for key in np.random.default_rng(seed).integers(0, 50, 2000).tolist():
            if cache.get(key) is None:
                cache.put(key, key, key)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.nbytes == sum(key for key in range(50) if cache.get(key) is not None) <= 1000


def test_pictures_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attlas.view.pictures._MOST_TILE_BYTES", 3 * 2 * 256 * 256)
    q = torch.randn(1, 1, 1500, 4)
    opened = Service(attlas.attend(q, q))
    for y in range(6):
        for x in range(6):
            assert opened.answer("tile", {**TILE, "y": str(y), "x": str(x)}).status == 200
    assert facts(opened, "status")["bytes"] <= 3 * 2 * 256 * 256
    opened.close()
