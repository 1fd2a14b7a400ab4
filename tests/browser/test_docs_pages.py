"""The pages of the documentation in Chromium: axe finds no serious fault on those with every kind of part."""

from pathlib import Path
from typing import Any

import pytest
from tests.sites import built_site

pytestmark = [pytest.mark.browser, pytest.mark.slow]

# Code, tables and tabs; formulas wider than a phone; links in lists; the reference; both languages.
PAGES = (
    "index.html",
    "zh/index.html",
    "guides/viewer.html",
    "zh/guides/command-line.html",
    "zh/from-formula-to-code/gpt2.html",
    "findings/induction.html",
    "reference/scaling.html",
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
