"""A map that grows while a model writes: token by token, and the page stays where the user has put it."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.browser.conftest import CUT, served, state, until
from tests.browser.test_view_reading import says, size_of_the_map

import attlas
from attlas import models

pytestmark = pytest.mark.browser

TEXT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return"
STEP = 0.15  # seconds that a forward pass takes at least, so that the page sees texts of several lengths


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    pytest.importorskip("starlette", reason="needs attlas[view]")
    transformers = pytest.importorskip("transformers", reason="needs attlas[hf]")
    from attlas.view import Service
    from attlas.view.reading import ReadingService

    def load() -> tuple[Any, Any]:
        folder = models.path()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model.register_forward_pre_hook(lambda *_: time.sleep(STEP))
        model.generation_config.eos_token_id = None
        return model, transformers.AutoTokenizer.from_pretrained(folder)

    shown = Service(attlas.attend(torch.randn(1, 1, 30, 8), torch.randn(1, 1, 30, 8), mask=attlas.Causal()))
    with served(ReadingService(shown, load, name="python-gpt2")) as address:
        yield address


def read(browse: Any, url: str) -> Any:
    page = browse(url)
    page.set_default_timeout(150_000)  # the model is loaded and measured first
    page.evaluate("() => void (window.before = document.querySelector('.attlas'))")  # which may say that it was read
    page.get_by_role("textbox", name="Your text").fill(TEXT)
    page.keyboard.press("Control+Enter")
    until(page, "document.querySelector('.attlas') !== window.before")
    says(page, "tokens read")
    return page


def place(page: Any) -> dict[str, str]:
    """Return the fields of the hash without the range of the colours, which is wider for a longer text."""
    return {name: value for name, value in state(page).items() if name not in ("lo", "hi")}


def tokens_shown(page: Any) -> int:
    """Return how many tokens the page that stands shows."""
    return int(page.evaluate("document.querySelectorAll('.attlas')[0].querySelectorAll('.flow .t').length"))


def grown(page: Any, least: int) -> None:
    until(page, f"document.querySelectorAll('.attlas')[0].querySelectorAll('.flow .t').length >= {least}")


def test_the_map_grows_until_it_is_stopped_and_stays_where_it_is(browse: Any, url: str) -> None:
    page = read(browse, url)
    before = tokens_shown(page)
    page.locator(".pick-layer").select_option("2")
    page.locator(".pick-head").select_option("4")
    until(page, "location.hash.includes('e=2&h=4')")  # the address is written a moment later
    page.evaluate("location.hash = location.hash + '&pin=14.3&r=9.5&c=5.5&z=4'")
    until(page, "document.querySelector('.slot-text').textContent.includes('14, 3')")
    page.get_by_role("button", name="Write on").click()
    grown(page, before + 2)
    # What is done while it grows stays as well: another head, and another place of the map.
    page.keyboard.press("]")
    until(page, "location.hash.includes('e=2&h=5')")
    page.evaluate("location.hash = location.hash.replace(/&([rcz])=[^&]*/g, '') + '&r=8.5&c=6.5&z=4.5'")
    grown(page, tokens_shown(page) + 2)
    until(page, "document.querySelectorAll('.attlas').length === 1")
    fields = place(page)
    assert fields | {"e": "2", "h": "5", "pin": "14.3", "r": "8.5", "c": "6.5", "z": "4.5"} == fields
    # It ends when it is told to, long before all 256 tokens.
    page.get_by_role("button", name="Stop").click()
    says(page, "tokens read")
    shown = tokens_shown(page)
    assert before + 4 <= shown < before + 200
    assert size_of_the_map(page) == [shown, shown]
    page.wait_for_timeout(1000)
    assert tokens_shown(page) == shown
    assert place(page) == fields


def test_a_map_that_shows_all_shows_all_of_what_has_grown(browse: Any, url: str) -> None:
    page = read(browse, url)
    before = tokens_shown(page)
    zoom = float(state(page)["z"])
    page.get_by_role("button", name="+ 10 tokens").click()
    says(page, f"{before + 10} tokens read")
    fields = state(page)
    assert float(fields["z"]) < zoom
    page.keyboard.press("0")  # all of it in view, as it is
    assert state(page) == fields


def test_a_page_that_has_stood_for_long_grows_at_once(browse: Any, url: str) -> None:
    """How long a page stands depends on how long it took to be built, and not on how long it was looked at."""
    page = read(browse, url)
    before = tokens_shown(page)
    page.wait_for_timeout(6000)
    page.get_by_role("button", name="Write on").click()
    begun = time.monotonic()
    grown(page, before + 4)
    assert time.monotonic() - begun < 10
    page.get_by_role("button", name="Stop").click()
    says(page, "tokens read")


def test_nothing_is_taken_out_of_the_hand(browse: Any, url: str) -> None:
    page = read(browse, url)
    before = tokens_shown(page)
    page.get_by_role("button", name="Write on").click()
    grown(page, before + 1)
    # While a window is open, and while the map is dragged, the page stands; then it has all that was written.
    for begin, end in (
        (lambda: page.get_by_role("button", name="Help").click(), lambda: page.keyboard.press("Escape")),
        (drag(page), page.mouse.up),
    ):
        until(page, "document.querySelectorAll('.attlas').length === 1")
        begin()
        page.evaluate("document.querySelector('.attlas').dataset.mark = 'same'")
        shown = tokens_shown(page)
        page.wait_for_timeout(2000)
        assert (tokens_shown(page), page.evaluate("document.querySelector('.attlas').dataset.mark")) == (shown, "same")
        end()
        grown(page, shown + 2)
    # A field that is typed into keeps what is typed.
    until(page, "document.querySelectorAll('.attlas').length === 1")
    page.keyboard.press("/")
    page.keyboard.type("return", delay=300)
    assert page.locator(".search-input").input_value() == "return"
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Stop").click()
    says(page, "tokens read")


def drag(page: Any) -> Any:
    def begin() -> None:
        box = page.locator(".stage").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2 + 20, box["y"] + box["height"] / 2 + 20, steps=4)

    return begin


def test_the_box_fits_a_small_page_in_both_languages(browse: Any, url: str) -> None:
    for locale, name in (("en-US", "Write on"), ("zh-CN", "写下去")):
        page = browse(f"{url}#panel=text", 390, 844, locale=locale)
        assert page.get_by_role("button", name=name).is_visible()
        assert page.evaluate(CUT) == []
