"""The tour that a recording itself has: the page opens with it, steps by buttons and keys, and links to its steps."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.browser.conftest import CUT, READY, serious_faults, served, state, until
from tests.telling_heads import telling_atlas

from attlas.view import export

pytestmark = pytest.mark.browser

LAYERS = (("mixed", "first-token sink"), ("previous token", "mixed"), ("fixed distance", "induction"))
SAYS = {
    1: r"Repeats\. From “(\S+)” it looks at “(\S+)”, which followed an earlier “\1”, with ([\d.]+)\s% of its weight\.",
    2: r"The token before\. From “(\S+)” it looks at “(\S+)”, the token before, with ([\d.]+)\s% of its weight\.",
    3: r"The first token\. From “(\S+)” it looks at “(\S+)”, the first token of the text, with ([\d.]+)\s% .*",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    atlas = telling_atlas(*LAYERS, top_k=True)
    return Path(export(atlas, tmp_path_factory.mktemp("tour") / "report.html", title="made")).as_uri()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(telling_atlas(*LAYERS)) as url:
        yield url


def at_step(page: Any, number: int, total: int = 3) -> str:
    """Wait for a step, check what the page shows of it against its sentence, and return the sentence."""
    page.locator(".tour .tour-count").filter(has_text=f"{number} / {total}").wait_for()
    until(page, "!document.querySelector('.loading')")
    says = page.locator(".tour-says").inner_text().replace("\n", " ")
    query, key, share = re.fullmatch(SAYS[number], says).groups()
    # The cell is pinned, and the text pane says the same of it.
    fields = state(page)
    assert fields["story"] == str(number - 1)
    i, j = fields["pin"].split(".")
    shown = page.locator(".slot-text").inner_text().replace("\n", " ")
    assert f"{i}, {j}" in shown
    assert query.lstrip("·") in shown
    assert f"{key.lstrip('·')} {j} {share} %" in re.sub(r"[·\s]+", " ", shown)
    assert float(fields["z"]) == pytest.approx(4.392, abs=0.01)  # so near that the tokens can be read
    return says


def test_the_report_opens_with_the_tour(browse: Any, report: str) -> None:
    page = browse(report)
    at_step(page, 1)
    assert page.locator(".says b").inner_text() == "Layer 2, head 1 remembers what came next"
    assert page.get_by_role("button", name="Previous step").is_disabled()
    page.get_by_role("button", name="Next step").click()
    at_step(page, 2)
    assert page.locator(".says b").inner_text() == "Layer 1, head 0 looks at the token before"
    page.keyboard.press("n")
    at_step(page, 3)
    assert page.get_by_role("button", name="Next step").is_disabled()
    page.keyboard.press("n")  # there is no fourth
    page.keyboard.press("p")
    second = at_step(page, 2)
    # The link leads to the step, in a new page and in one that is open.
    page.reload()
    page.wait_for_selector(READY)
    assert at_step(page, 2) == second
    page.evaluate("location.hash = 'story=2'")
    at_step(page, 3)
    page.keyboard.press("Escape")
    page.locator(".tour").wait_for(state="hidden")
    assert "story" not in state(page)
    page.reload()  # who has left the tour is not led back into it
    page.wait_for_selector(READY)
    assert page.locator(".tour").is_hidden()
    assert page.locator(".says b").inner_text() == "Layer 0, head 1 rests on the first token"
    page.get_by_role("button", name="Start the tour").click()
    at_step(page, 1)


def test_the_viewer_opens_at_a_pair_that_shows_what_the_head_does(browse: Any) -> None:
    with served(telling_atlas(*LAYERS, top_k=True)) as url:
        page = browse(url)
        until(page, "location.hash.includes('pin=')")
        query, key = state(page)["pin"].split(".")
        until(page, f"document.querySelector('.subject .place')?.textContent.trim() === '{query}'")
        assert page.locator(".says b").inner_text() == "Layer 2, head 1 remembers what came next"
        assert page.locator(".largest .place").first.inner_text() == key
        until(page, f"document.querySelector('.headmap-says').textContent.includes('query {query} gives to key {key}')")
        browse.close()


def test_the_viewer_offers_the_tour(browse: Any, address: str) -> None:
    page = browse(address)
    button = page.get_by_role("button", name="Start the tour")
    button.wait_for()
    assert page.locator(".tour").is_hidden()
    page.evaluate("location.hash = 'm=triangle&e=0&h=0&s=1.0&v=nosink&w=lines'")
    page.wait_for_timeout(300)
    button.click()  # a comparison, another variant and the lines are left
    at_step(page, 1)
    assert not {"m", "s", "v", "w"} & set(state(page))
    # A link with the step alone waits for the kinds of the heads, and goes there.
    other = browse(f"{address}#story=1")
    at_step(other, 2)


def test_a_recording_without_such_heads_offers_none(browse: Any) -> None:
    with served(telling_atlas(("mixed", "mixed"))) as url:
        page = browse(f"{url}#story=1")
        until(page, "document.querySelector('.headmap')")
        page.wait_for_timeout(500)
        assert page.locator(".tour").is_hidden()
        assert page.get_by_role("button", name="Start the tour").count() == 0
        browse.close()


def test_the_tour_fits_small_pages_and_speaks_chinese(browse: Any, report: str, axe: str) -> None:
    page = browse(report, 390, 844, locale="zh-CN")
    page.locator(".tour .tour-count").filter(has_text="1 / 3").wait_for()
    assert page.evaluate(CUT) == []
    box = page.locator(".tour").bounding_box()
    assert (box["x"], box["width"]) == (0, 390)
    labels = "[...line.querySelectorAll('button')].map((each) => each.title + each.ariaLabel)"
    told = page.locator(".tour").evaluate(f"(line) => line.textContent + {labels}")
    assert set(re.findall(r"[A-Za-z]{3,}", told)) - {"Esc"} == set()
    faults = serious_faults(page, axe, [("story=0", (390, 844), "light"), ("story=2", (1280, 800), "dark")])
    assert faults == {}
