"""The types of the page: what they say of the answers is so, and nothing in the code goes around them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.view.declared import check_fields, interfaces

import attlas
from attlas.view import Service, bundle
from attlas.view.trials import TRIALS

STATIC = Path(bundle.__file__).parent / "static"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 40, 4)
    opened = Service(attlas.attend(q, q, mask=attlas.Causal()), tokens=[str(i) for i in range(40)])
    opened.measure()
    yield opened
    opened.close()


def ask(service: Service, name: str, **params: object) -> Any:
    answer = service.answer(name, {field: str(value) for field, value in params.items()})
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def test_what_there_is_to_see_is_declared(service: Service) -> None:
    info = ask(service, "info")
    check_fields("Info", info, "format", "tile", "pools", "codes")
    check_fields("Entry", info["entries"][0])
    bookmark = {"name": "a", "at": "e=0", "says": "b"}
    kept = service.post("bookmarks", {"bookmarks": [bookmark], "before": []})
    check_fields("Bookmark", json.loads(kept.body)["bookmarks"][0])


def test_what_is_said_of_heads_is_declared(service: Service) -> None:
    heads = ask(service, "heads")
    check_fields("HeadTable", heads)
    check_fields("HeadRow", heads["rows"][0])
    check_fields("Column", heads["columns"][0])
    for kind in heads["kinds"].values():
        check_fields("Kind", kind)


def test_numbers_of_a_cell_are_declared(service: Service) -> None:
    check_fields("CellDetails", ask(service, "cell", entry=0, head=0, i=7, j=3))


def test_an_offline_page_is_declared(service: Service) -> None:
    packed = ask(service, "offline", entry=0, head=0, batch=0, variant="plain", pool="max")["data"]
    check_fields("PackedData", {**packed, "state": {}})
    check_fields("HeldHead", packed["packed"][0])
    check_fields("PackedPart", next(iter(packed["parts"].values())))


def test_every_question_is_declared(service: Service) -> None:
    assert set(interfaces()["Questions"][1]) == {*service.names, "reading", *TRIALS}


def test_an_object_with_another_field_is_noticed(service: Service) -> None:
    entry = ask(service, "info")["entries"][0]
    with pytest.raises(AssertionError, match="does not declare"):
        check_fields("Entry", {**entry, "colour": 1})
    with pytest.raises(AssertionError, match="declares more"):
        check_fields("Entry", {name: entry[name] for name in list(entry)[1:]})


def test_no_module_goes_around_its_types() -> None:
    around = re.compile(r"@ts-(?:ignore|nocheck|expect-error)|\{(?:any|\*|Function|Object)\b[^}]*\}|<any>")
    found = {path.name: around.findall(path.read_text("utf-8")) for path in STATIC.rglob("*.js")}
    assert {name: texts for name, texts in found.items() if texts} == {}
    assert around.search("/** @type {any} */")
