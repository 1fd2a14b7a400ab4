"""The pages of the documentation in Chromium: axe finds no serious fault on those with every kind of part."""

from pathlib import Path
from typing import Any

import pytest
from tests.sites import built_site

pytestmark = [pytest.mark.browser, pytest.mark.slow]

# Code, tables and tabs; formulas and tables wider than a phone; links in lists; the reference; both languages.
PAGES = (
    "index.html",
    "zh/index.html",
    "guides/viewer.html",
    "zh/guides/command-line.html",
    "zh/from-formula-to-code/gpt2.html",
    "guides/how-to-choose.html",
    "zh/guides/regression.html",
    "figures.html",
    "findings/index.html",
    "findings/induction.html",
    "reference/scaling.html",
    "live.html",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_site(tmp_path_factory)


def serious(page: Any, url: str, axe: str) -> list[str]:
    """Return the serious faults that axe finds in a page."""
    page.goto(url)
    page.evaluate(axe)
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return [
        f"{each['id']}: {[(node['target'], node['failureSummary']) for node in each['nodes'][:3]]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_pages_have_no_serious_fault(site: Path, browser: Any, axe: str, scheme: str, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    faults = {name: serious(page, (site / name).as_uri(), axe) for name in PAGES}
    context.close()
    assert {name: told for name, told in faults.items() if told} == {}


def test_the_page_that_is_not_there_names_its_search(site: Path, browser: Any, axe: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    # It names its files from the root of a host, so that a file alone has no styles: what is named counts here.
    page.goto((site / "404.html").as_uri())
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, { runOnly: ['aria-dialog-name'] })")
    context.close()
    assert found["violations"] == []


@pytest.mark.parametrize("name", ["index.html", "zh/index.html"])
def test_the_viewer_is_a_click_away_on_the_first_screen(site: Path, browser: Any, name: str) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto((site / name).as_uri())
    button = page.locator("a.md-button--primary")
    box = button.bounding_box()
    assert box["y"] + box["height"] <= 800
    button.click()
    page.wait_for_selector(".attlas-ready .overlay[aria-busy=false]")
    assert page.locator(".says b").inner_text() != ""
    assert page.evaluate("document.documentElement.lang") == ("zh" if name.startswith("zh") else "en")
    context.close()


@pytest.mark.parametrize("language", ["", "zh/"])
def test_findings_lead_from_the_gallery_to_pages_with_a_figure(site: Path, browser: Any, language: str) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto((site / language / "findings" / "index.html").as_uri())
    links = page.locator("article h2 a:not(.headerlink)").evaluate_all("(all) => all.map((link) => link.href)")
    assert len(links) >= 8
    for link in links:
        page.goto(link)
        figures = page.locator("article img")
        assert figures.count() >= 2, link  # for the light and for the dark theme
        assert figures.first.evaluate("(image) => image.complete && image.naturalWidth > 300"), link
        assert page.locator("article pre code").count() >= 1, link
    context.close()


def test_a_formula_that_scrolls_can_be_reached_by_keyboard(site: Path, browser: Any) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 800})
    page = context.new_page()
    page.goto((site / "from-formula-to-code" / "gpt2.html").as_uri())
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    stops = (
        "[...document.querySelectorAll('.formula')].map((each) => [each.scrollWidth > each.clientWidth, each.tabIndex])"
    )
    found = page.evaluate(stops)
    assert [True, 0] in found
    assert {tuple(pair) for pair in found} <= {(True, 0), (False, -1)}
    context.close()
