"""Bookmarks: named, kept in the folder of the recording, stepped through as a tour, and carried by exported pages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.atlases import atlas_of, random_matrix
from tests.browser.conftest import READY, served

import attlas
from attlas.recording.atlas import Bookmark

pytestmark = pytest.mark.browser


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    A = random_matrix(90)
    atlas_of(A, A, tokens=[f" w{i}" for i in range(90)]).save(tmp_path / "run.atlas")
    return tmp_path / "run.atlas"


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    with served(attlas.load(folder), folder=folder) as url:
        yield url


def answered(page: Any, text: str = "") -> Any:
    """Wait until the server has saved what the block sends."""
    return page.expect_response(lambda answer: text in (answer.request.post_data or "") and "bookmarks" in answer.url)


def test_views_are_kept_and_toured(browse: Any, address: str, folder: Path) -> None:
    page = browse(f"{address}#e=1&h=1&pin=60.20", expected="409")
    page.get_by_role("button", name="Bookmarks").click()
    page.get_by_role("button", name="Bookmark this view").click()
    page.wait_for_function("() => document.querySelectorAll('.bookmark-rows input').length === 2")
    page.get_by_role("textbox", name="Name").fill("a pair")
    page.get_by_role("textbox", name="Sentence").fill("This query looks far back.")
    with answered(page, "looks far back"):
        page.keyboard.press("Tab")
    assert page.locator(".bookmarks .export-line").inner_text() == "Kept with the recording."
    found = json.loads((folder / "bookmarks.json").read_text())["bookmarks"]
    assert [(each["name"], each["says"]) for each in found] == [("a pair", "This query looks far back.")]
    assert {"e=1", "h=1", "pin=60.20"} <= set(found[0]["at"].split("&"))
    # A second one comes first, and is removed from another page: this one is told.
    page.keyboard.press("Escape")
    page.evaluate("location.hash = 'e=0&h=1&pin=10.5'")
    page.wait_for_selector(READY)
    page.get_by_role("button", name="Bookmarks").click()
    with answered(page):
        page.get_by_role("button", name="Bookmark this view").click()
    with answered(page):
        page.get_by_role("button", name="Earlier: Head 0·1").click()
    first = page.locator(".bookmark-rows input").first
    assert [mark.name for mark in attlas.load(folder).bookmarks] == ["Head 0·1", "a pair"]
    other = page.context.new_page()
    other.goto(f"{address}#panel=bookmarks")
    with answered(other):
        other.get_by_role("button", name="Remove: a pair").click()
    other.close()
    first.fill("again")
    page.keyboard.press("Tab")
    page.locator(".bookmarks .export-line").filter(has_text="changed on another page").wait_for()
    assert [mark.name for mark in attlas.load(folder).bookmarks] == ["Head 0·1"]


def test_a_tour_is_stepped_through_by_keys_here_and_offline(browse: Any, folder: Path, tmp_path: Path) -> None:
    atlas = attlas.load(folder)
    atlas.bookmarks = [
        Bookmark("one", "e=1&h=0&pin=70.30", "It begins here."),
        Bookmark("two", "e=0&h=1&f=linear", "And <b>ends</b> here."),
    ]
    file = atlas.export(tmp_path / "page.html")
    page = browse(f"{Path(file).as_uri()}#tour=0", 390, 844)
    line = page.locator(".tour")
    assert line.locator(".tour-count").inner_text() == "1 / 2"
    assert "one It begins here." in line.inner_text().replace("\n", " ")
    page.wait_for_function("() => location.hash.includes('pin=70.30')")
    page.keyboard.press("n")
    line.locator(".tour-count").filter(has_text="2 / 2").wait_for()
    assert "And <b>ends</b> here." in line.inner_text()
    page.wait_for_function("() => location.hash.includes('f=linear') && !location.hash.includes('pin')")
    assert line.bounding_box()["width"] <= 390
    page.keyboard.press("n")
    page.keyboard.press("p")
    line.locator(".tour-count").filter(has_text="1 / 2").wait_for()
    page.keyboard.press("Escape")
    line.wait_for(state="hidden")
    # In a page that is open, a link to a tour shows its head, and a place alone leaves the head.
    page.evaluate("location.hash = 'tour=0'")
    line.locator(".tour-count").filter(has_text="1 / 2").wait_for()
    page.locator(".says b").filter(has_text="Layer 1, head 0").wait_for()
    page.evaluate("location.hash = 'r=30&c=20'")
    line.wait_for(state="hidden")
    page.wait_for_function("() => location.hash.includes('r=30&c=20')")
    assert "Layer 1, head 0" in page.locator(".says b").inner_text()
    # A page without a server shows its bookmarks, and cannot change them.
    page.get_by_role("button", name="Bookmarks").click()
    assert page.locator(".bookmark-rows input[readonly]").count() == 4
    assert page.get_by_role("button", name="Bookmark this view").count() == 0
