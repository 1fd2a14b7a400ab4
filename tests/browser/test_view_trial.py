"""What if: the text is read again without heads, with tokens hidden, or with other words, and the page shows it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.browser.conftest import READY, latin_words, serious_faults, served, until

import attlas
from attlas import models

pytestmark = pytest.mark.browser

TEXT = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return"
SHOWN = "document.querySelector('.trial-results:not([hidden]):not(.loading)')"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    pytest.importorskip("starlette", reason="needs attlas[view]")
    transformers = pytest.importorskip("transformers", reason="needs attlas[hf]")
    from attlas.view import Service
    from attlas.view.reading import ReadingService

    model = transformers.AutoModelForCausalLM.from_pretrained(models.path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.path())
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(TEXT)["input_ids"]]])
    with attlas.record(model, tokens=tokenizer) as atlas, torch.no_grad():
        model(ids)
    with served(ReadingService(Service(atlas), lambda: (model, tokenizer), name="python-gpt2")) as address:
        yield address


def asked(page: Any, question: str) -> Any:
    return page.evaluate(f"fetch('./api/{question}').then((answer) => answer.json())")


def test_a_head_is_switched_off_and_the_text_says_what_it_did(browse: Any, url: str) -> None:
    page = browse(f"{url}#e=2&h=4")
    page.get_by_role("button", name="What if …").click()
    until(page, SHOWN)
    wanted = asked(page, "without?heads=2.4")
    says = page.locator(".trial-says").inner_text()
    pairs = list(zip(wanted["before"], wanted["after"], strict=True))[1:]
    assert says.startswith("Without the output of 2·4. ")
    assert f"{sum(after < before for before, after in pairs)} of {len(pairs)} tokens are less likely" in says
    # The first of the list is the token that lost most; its colour in the text is the reddest.
    drops = [after / before for before, after in pairs]
    position = drops.index(min(drops)) + 1
    first = page.locator(".trial-lists .largest").first.locator("button").first
    assert first.locator(".place").inner_text() == str(position)
    shares = page.evaluate(
        """() => [...document.querySelectorAll('.trial .flow .t')].map((token) =>
          [Number(token.dataset.position), token.style.background.includes('--below')
            ? Number(/([\\d.]+)%/.exec(token.style.background)[1]) : 0])"""
    )
    assert max(shares, key=lambda share: share[1])[0] == position
    assert len(shares) == len(wanted["before"])
    # Heads that attend elsewhere come with their number; the first opens at the pair that changed most.
    moved = page.locator(".trial-lists section").last.locator(".largest > li > button")
    assert moved.count() == min(len(wanted["heads"]), 12)
    told = [float(re.sub(r"[^\d.]", "", text)) / 100 for text in moved.locator(".share").all_inner_texts()]
    assert told == pytest.approx([head["moved"] for head in wanted["heads"][:12]], abs=6e-4)
    texts = page.locator(".trial-written").all_inner_texts()
    assert [text.replace("·", " ").replace("↵", "\n") for text in texts] == [each["text"] for each in wanted["next"]]
    place = wanted["heads"][0]
    moved.first.click()
    until(page, "!document.querySelector('dialog[open]')")
    (query, _), (key, _) = place["cells"][0][:2]
    until(page, f"location.hash.includes('pin={query}.{key}')")
    assert page.locator(".pick-layer").input_value() == str(place["entry"])
    assert page.locator(".pick-head").input_value() == str(place["head"])


def test_tokens_are_hidden_and_the_link_opens_the_same(browse: Any, url: str) -> None:
    page = browse(f"{url}#e=2&h=4&pin=15.2&off=2.4,3.2&panel=trial")
    until(page, SHOWN)
    assert page.locator(".trial-chips button").all_inner_texts() == ["2·4 ×", "3·2 ×"]
    page.get_by_label("hide token 2 from these heads alone").check()
    until(page, "document.querySelector('.trial-says').textContent.includes('do not see token 2.')")
    for mark in ("2·4", "3·2"):
        page.locator(".trial-chips button", has_text=mark).click()
    until(page, "document.querySelector('.trial-says').textContent.includes('No later token sees token 2.')")
    until(page, "location.hash.includes(encodeURIComponent(';2-2'))")
    wanted = asked(page, "without?start=2&stop=3")
    assert len(wanted["heads"]) > 12
    # A span that is pinned is hidden as a whole.
    page.locator(".trial-chips button").click()
    page.evaluate("location.hash = 'e=2&h=4&pin=15.2&k=2.6&panel=trial'")
    page.get_by_label("hide tokens 2 to 5 from all later tokens").check()
    until(page, "document.querySelector('.trial-says').textContent.includes('No later token sees tokens 2 to 5.')")
    spanned = asked(page, "without?start=2&stop=6")
    until(page, SHOWN)
    loss = -sum(math.log(p) for p in spanned["after"] if p) / sum(p is not None for p in spanned["after"])
    assert f"{loss:.3g} now" in page.locator(".trial-says").inner_text()
    # Nothing is left out any more: the page says what can be.
    page.locator(".trial-chips button").click()
    until(page, "document.querySelector('.trial-says').textContent.startsWith('Leave out a head')")
    page.get_by_label("Leave out another head").select_option("0.0")
    until(page, "document.querySelector('.trial-says').textContent.startsWith('Without the output of 0·0')")


def test_two_texts_stand_side_by_side(browse: Any, url: str) -> None:
    page = browse(f"{url}#panel=trial")
    page.get_by_role("button", name="with other words").click()
    box = page.get_by_role("textbox", name="The other text")
    until(page, f"document.querySelector('.trial textarea').value.endsWith({TEXT!r})")  # the text of the recording
    page.locator(".trial").get_by_role("button", name="Compare").click()
    until(page, "document.querySelector('.trial-says').textContent === 'Change a word first.'")
    box.fill(TEXT.replace("add(a, b):\n    return a", "add(a, b):\n    print(a)\n    return a", 1))
    page.keyboard.press("Control+Enter")
    until(page, SHOWN)
    wanted = asked(page, "other")
    flows = page.locator(".trial .flow")
    assert ["print" in text for text in flows.all_inner_texts()] == [False, True]
    boxes = [flows.nth(side).bounding_box() for side in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    # What one text alone has is marked, and nothing else.
    second = {b for _, b in wanted["pairs"]}
    alone = [position for position in range(len(wanted["after"])) if position not in second]
    marked = flows.nth(1).evaluate(
        "(flow) => [...flow.querySelectorAll('.found')].map((t) => Number(t.dataset.position))"
    )
    assert marked == alone != []
    assert flows.nth(0).locator(".found").count() == 0
    # Short texts take little room, and the heads that changed most stand below, over the whole width, largest first.
    assert max(box["height"] for box in boxes) < 200
    moved = page.locator(".trial-lists section").last.locator(".largest > li")
    shares = [float(re.sub(r"[^\d.]", "", text)) for text in moved.locator(".share").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    assert shares == pytest.approx([100 * head["moved"] for head in wanted["heads"][:12]], abs=0.06)
    places = [each.bounding_box() for each in moved.all()]
    assert len({box["x"] for box in places}) >= 3
    assert places[0]["y"] == places[2]["y"]
    for item, head in zip(moved.all()[:4], wanted["heads"][:4], strict=True):
        changes = [abs(before - after) for _, _, before, after in head["cells"]]
        assert changes == sorted(changes, reverse=True)
        assert item.locator(".trial-cells li").count() == len(head["cells"]) > 0


def test_a_long_reading_shows_its_progress_and_is_stopped(browse: Any, url: str) -> None:
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)  # and no answer

    status = {"doing": "", "done": 0, "total": 0, "error": "", "key": "", "text": "", "tokens": 0, "trial": 0.4}
    routes = {
        "**/api/without?*": hold,
        "**/api/reading?*": lambda route: route.fulfill(content_type="application/json", body=json.dumps(status)),
    }
    page = browse(f"{url}#e=1&h=1", routes=routes)
    page.get_by_role("button", name="What if …").click()
    until(page, "document.querySelector('.trial progress').value === 0.4")
    page.locator(".trial").get_by_role("button", name="Stop").click()
    until(page, "document.querySelector('.trial-says').textContent === 'Stopped.'")
    assert page.locator(".trial progress").is_hidden()
    assert len(held) == 1


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_the_dialog_fits_and_has_no_serious_fault(browse: Any, url: str, axe: str, width: int, scheme: str) -> None:
    page = browse(f"{url}#e=2&h=4&off=2.4&panel=trial", width=width, color_scheme=scheme)
    until(page, SHOWN)
    cut = page.evaluate(
        """() => [...document.querySelectorAll('.trial :is(button, select, .flow, code)')].filter((part) => {
          const box = part.getBoundingClientRect();
          return box.width && (box.left < -0.5 || box.right > innerWidth + 0.5);
        }).length"""
    )
    assert cut == 0
    view = ("e=2&h=4&off=2.4&panel=trial", (width, 800), scheme)
    assert serious_faults(page, axe, [view]) == {}


def test_the_dialog_speaks_chinese(browse: Any, url: str) -> None:
    page = browse(f"{url}#lang=zh&e=2&h=4&off=2.4&panel=trial", wait=READY)
    until(page, SHOWN)
    page.evaluate(
        "document.querySelectorAll('.attlas > :not(.trial), .trial-written').forEach((part) => part.remove())"
    )
    assert latin_words(page, "aria-label") - {"Ctrl", "nat"} == set()
