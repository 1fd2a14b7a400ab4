"""Why a weight is where it is, in a real browser: an induction head of the shipped model, and who wrote its key."""

import json
import re
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import pytest
import torch
from tests import induction
from tests.atlases import atlas_of
from tests.browser.conftest import saved, serious_faults, served, state, until

import attlas
import attlas.models
from attlas.recording.atlas import Atlas, Bookmark
from attlas.view import export

pytestmark = pytest.mark.browser
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
transformers = pytest.importorskip("transformers", reason="needs attlas[hf]")

CELL = f"e=2&h=4&pin={induction.QUERY}.{induction.KEY}"
OPENED = "document.querySelectorAll('.reasons-bars dt').length > 0"


@pytest.fixture(scope="module")
def recorded() -> Atlas:
    return induction.recorded()


@pytest.fixture(scope="module")
def address(recorded: Atlas) -> Iterator[str]:
    with served(recorded, title="template.py") as url:
        yield url


@pytest.fixture
def show(browse: Any, address: str) -> Callable[..., Any]:
    return lambda hash_, width=1280, **options: browse(f"{address}#{hash_}", width, 844, **options)


def test_a_pinned_cell_says_who_wrote_its_key(show: Callable[..., Any]) -> None:
    page = show(CELL)
    page.get_by_role("button", name="Why?").click()
    until(page, OPENED)
    lead = page.locator(".reasons-lead").inner_text()
    assert "looks at “ers” with weight 0.932" in lead
    assert "head 0·0" in lead
    assert "+7.8 of the +12.1" in lead
    assert "It took that from “·p”, the token before" in lead
    names = page.locator(".reasons > .dialog-body > .reasons-bars dt").all_inner_texts()
    numbers = [
        float(text.replace("−", "-")) for text in page.locator(".dialog-body > .reasons-bars b").all_inner_texts()
    ]
    assert names[0].startswith("head 0·0")
    assert abs(sum(numbers) - 12.1) < 0.3  # each is rounded to a tenth
    roles = page.locator(".reasons-token.query, .reasons-token.key, .reasons-token.source").all_inner_texts()
    assert roles == ["·p", "ers", "·p"]
    assert page.locator(".reasons-arrows path").count() == 4  # two arrows
    assert "This explains a logit" in page.locator(".reasons-note").inner_text()
    page.get_by_text("The evidence").click()
    assert page.locator(".reasons-pairs li").count() >= 8
    page.get_by_role("button", name="Open head 0·0").click()
    until(page, "!document.querySelector('.reasons[open]')")
    where = f"{induction.KEY}.{induction.KEY - 1}"  # where head 0·0 read it
    until(page, f"location.hash.includes('pin={where}')")
    assert (state(page)["pin"], state(page).get("e", "0"), state(page).get("h", "0")) == (where, "0", "0")


def test_by_the_keyboard(show: Callable[..., Any]) -> None:
    page = show(CELL)
    page.keyboard.press("w")
    until(page, OPENED)
    page.keyboard.press("Escape")
    until(page, "!document.querySelector('.reasons[open]')")
    assert state(page)["pin"] == f"{induction.QUERY}.{induction.KEY}"


@pytest.mark.parametrize("width", [390, 1280])
def test_accessible_and_nothing_is_cut(show: Callable[..., Any], axe: str, width: int) -> None:
    page = show(f"{CELL}&panel=why", width)
    until(page, OPENED)
    page.get_by_text("The evidence").click()
    places = ("e=2&h=4&pin=none&panel=why", f"{CELL}&panel=why")
    views = [(place, (width, 844), scheme) for place in places for scheme in ("light", "dark")]
    faults = serious_faults(page, axe, views)
    assert not any(faults.values()), faults
    until(page, OPENED)
    line = page.evaluate(
        "(() => { const e = document.querySelector('.reasons-text'); return e.scrollWidth - e.clientWidth; })()"
    )
    assert line <= 0  # all three tokens are in view


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_tools_of_the_map_fit_beside_its_panes(
    browse: Any, recorded: Atlas, monkeypatch: pytest.MonkeyPatch, language: str
) -> None:
    monkeypatch.setattr(recorded, "spans", {"question": (0, 10)})  # a text with parts that have names has one tool more
    with served(recorded, title="template.py") as url:
        page = browse(f"{url}#e=2&h=4&lang={language}", 1280, 844)
        until(
            page, "[...document.querySelectorAll('.map-tools button')].filter((each) => each.offsetParent).length === 9"
        )
        for width in (720, 768, 820, 834, 1024, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            page.wait_for_timeout(60)
            tools, head, last = (
                page.locator(each).bounding_box()
                for each in (".map-tools", ".middle-head", ".map-tools button:visible >> nth=-1")
            )
            assert tools["x"] >= head["x"], width
            assert last["x"] + last["width"] <= head["x"] + head["width"], width
        browse.close()


def test_in_chinese(show: Callable[..., Any]) -> None:
    page = show(f"{CELL}&panel=why&lang=zh")
    until(page, OPENED)
    page.locator(".reasons summary").click()
    words = set(re.findall(r"[A-Za-z]{3,}", page.locator(".reasons").inner_text()))
    assert words <= {"logit", "MLP", "softmax", "ers", "name", "place", "person"}


def test_a_recording_without_parts_says_how_to_get_them(browse: Any) -> None:
    q = torch.randn(1, 2, 20, 8)
    with served(atlas_of(attlas.attend(q, q, mask=attlas.Causal()), model="tiny"), title="tiny") as url:
        page = browse(f"{url}#e=0&h=1&pin=9.3&panel=why", 1280, 844)
        until(page, "document.querySelector('.reasons .reasons-note') !== null")
        assert "record(model, parts=True), keeps them" in page.locator(".reasons-note").inner_text()
        browse.close()


def test_without_a_pinned_cell_the_whole_map_is_a_table(show: Callable[..., Any]) -> None:
    page = show("e=2&h=4&pin=none&panel=why")
    until(page, "document.querySelector('.reasons-table') !== null")
    lead = page.locator(".reasons-lead").inner_text()
    assert "head 0·2" in lead
    assert "in the query meets head 0·0" in lead
    rows, columns = (page.locator(f".reasons-table {each}").all_inner_texts() for each in ("tbody th", "thead th"))
    cell = page.locator(".reasons-table tbody tr").nth(0).locator("td").nth(0)
    assert (rows[0].startswith("head 0·2"), columns[0].startswith("head 0·0")) == (True, True)
    assert float(cell.inner_text()) > 1
    page.keyboard.press("Escape")
    until(page, "!document.querySelector('.reasons-table')?.offsetParent")


def test_a_pinned_cell_leads_to_the_whole_map_and_back(show: Callable[..., Any]) -> None:
    page = show(f"{CELL}&panel=why", 390)
    until(page, OPENED)
    page.get_by_role("button", name="The whole map").click()
    until(page, "document.querySelector('.reasons-table') !== null")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("button", name="The pinned cell").click()
    until(page, OPENED)


@pytest.fixture(scope="module")
def report(recorded: Atlas, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Export a page of the recording with a tour, as `attlas report` writes it."""
    toured = copy(recorded)
    toured.bookmarks = [Bookmark("the step", "e=3&h=2&pin=171.145", "Another induction head.")]
    path = export(toured, tmp_path_factory.mktemp("report") / "report.html", heads=[(2, 4)], query=induction.QUERY)
    return path.as_uri()


def held_cells(page: Any) -> list[str]:
    """Return the cells that an offline page says it explains."""
    texts: list[str] = page.locator(".reasons-held button").all_inner_texts()
    return texts


def test_an_offline_page_explains_what_it_holds_and_says_which(browse: Any, report: str) -> None:
    page = browse(f"{report}#{CELL}", 1280, 844)
    page.get_by_role("button", name="Why?").click()
    until(page, OPENED)
    lead = page.locator(".reasons-lead").inner_text()
    assert "looks at “ers” with weight 0.932" in lead
    assert "+7.8 of the +12.1" in lead
    assert "This page explains the cells below" in page.locator(".reasons-note").nth(-1).inner_text()
    assert held_cells(page)[0] == f"2·4: {induction.QUERY}, {induction.KEY}"
    assert f"0·0: {induction.KEY}, {induction.KEY - 1}" in held_cells(page)
    assert "3·2: 171, 145" in held_cells(page)
    # Where head 0·0 read it, and from there to the step of the tour.
    page.get_by_role("button", name="Open head 0·0").click()
    until(page, f"location.hash.includes('pin={induction.KEY}.{induction.KEY - 1}')")
    page.keyboard.press("w")
    until(page, OPENED)
    assert "at “ers” looks at “·p”" in page.locator(".reasons-lead").inner_text()
    page.get_by_role("button", name="3·2: 171, 145").click()
    until(page, "document.querySelector('.reasons-lead')?.textContent.includes('3, head 2')")
    until(page, "location.hash.includes('pin=171.145')")
    page.get_by_role("button", name="The whole map").click()
    until(page, "document.querySelector('.reasons-table') !== null")
    page.get_by_role("button", name="The pinned cell").click()
    until(page, OPENED)


def test_an_offline_page_says_what_it_does_not_explain(browse: Any, report: str) -> None:
    page = browse(f"{report}#e=2&h=4&pin=150.140&panel=why", 1280, 844)
    until(page, "document.querySelector('.reasons-held button') !== null")
    assert page.locator(".reasons-lead").inner_text() == "This page does not explain this cell."
    assert "attlas view, with the recording" in page.locator(".reasons-note").inner_text()
    page.get_by_role("button", name=f"2·4: {induction.QUERY}, {induction.KEY}").click()
    until(page, OPENED)
    page.keyboard.press("Escape")
    page.evaluate("location.hash = 'e=1&h=1&pin=none&panel=why'")
    until(page, "document.querySelector('.reasons-table') !== null")  # every small map is there


def test_the_export_of_the_viewer_explains_the_pinned_cell(browse: Any, show: Callable[..., Any]) -> None:
    page = show(CELL)
    _, content = saved(page, "html")
    assert b'"why:2:4:' in content
    data = json.loads(re.search(rb'id="attlas-data"[^>]*>(.*?)</script>', content, re.DOTALL)[1])  # type: ignore[index]
    assert [(each["head"], each["why"]) for each in data["packed"]] == [
        (4, {"cells": [[induction.QUERY, induction.KEY]], "map": True})
    ]


@pytest.mark.parametrize("width", [390, 1280])
def test_an_offline_page_is_accessible(browse: Any, report: str, axe: str, width: int) -> None:
    page = browse(f"{report}#{CELL}&panel=why", width, 844)
    until(page, OPENED)
    places = (f"{CELL}&panel=why", "e=2&h=4&pin=150.140&panel=why")
    views = [(place, (width, 844), scheme) for place in places for scheme in ("light", "dark")]
    faults = serious_faults(page, axe, views)
    assert not any(faults.values()), faults
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_offline_page_in_chinese(browse: Any, report: str) -> None:
    page = browse(f"{report}#e=2&h=4&pin=150.140&panel=why&lang=zh", 1280, 844)
    until(page, "document.querySelector('.reasons-held button') !== null")
    words = set(re.findall(r"[A-Za-z]{3,}", page.locator(".reasons").inner_text()))
    assert words <= {"attlas", "view"}


@pytest.fixture(scope="module")
def reading(recorded: Atlas) -> Iterator[str]:
    from attlas.view import Service
    from attlas.view.reading import ReadingService

    def load() -> tuple[Any, Any]:
        folder = attlas.models.path()
        return (
            transformers.AutoModelForCausalLM.from_pretrained(folder),
            transformers.AutoTokenizer.from_pretrained(folder),
        )

    with served(ReadingService(Service(recorded, title="template.py"), load, name="python-gpt2")) as url:
        yield url


def test_a_typed_text_is_explained(browse: Any, reading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = browse(f"{reading}#e=2&h=4", 1280, 844, expected="409")
    page.set_default_timeout(60_000)
    assert "Texts are read with their parts, for Why?: about 6.2 MB for 1,000 tokens" in page.locator(
        ".reading"
    ).inner_text().replace("\n", " ")
    page.get_by_role("textbox", name="Your text").fill(induction.TEXT)
    page.get_by_role("button", name="Read", exact=True).click()
    until(page, "document.querySelector('.reading-says')?.textContent.includes('Its parts take')")
    page.evaluate(f"location.hash += '&pin={induction.QUERY + 1}.{induction.KEY + 1}'")  # behind the first token
    page.get_by_role("button", name="Why?").click()
    until(page, OPENED)
    assert "looks at “ers” with weight" in page.locator(".reasons-lead").inner_text()
    assert "head 0·0" in page.locator(".reasons-lead").inner_text()
    page.keyboard.press("Escape")
    # A text whose parts do not fit is read all the same, and says so.
    monkeypatch.setattr("attlas.view.typed_parts.MOST_BYTES", 1000)
    page.get_by_role("textbox", name="Your text").fill("import os\nimport sys\n")
    page.get_by_role("button", name="Read", exact=True).click()
    until(page, "document.querySelector('.reading-says')?.textContent.includes('No Why? on this text')")
    assert "at most 1,000 bytes are kept" in page.locator(".reading-says").first.inner_text()
    page.evaluate("location.hash += '&pin=5.2&panel=why'")
    until(page, "document.querySelector('.reasons-note')?.textContent.includes('at most 1,000 bytes are kept.')")
