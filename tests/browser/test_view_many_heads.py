"""A model of 1,024 heads: all of them in one window, a row for each layer."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.atlases import atlas_of, random_matrix
from tests.browser.conftest import served, until

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def many() -> Iterator[str]:
    with served(atlas_of(*(random_matrix(24, heads=32, seed=seed) for seed in range(32)))) as url:
        yield url


@pytest.mark.parametrize(("width", "height", "language"), [(1280, 800, "en"), (1920, 1080, "zh")])
def test_layers_and_heads_fit_the_window(browse: Any, many: str, width: int, height: int, language: str) -> None:
    page = browse(f"{many}#a=grid&lang={language}", width, height, wait=".attlas-ready")
    until(page, "document.querySelectorAll('.compact .thumb:not(.rollout)').length === 1024")
    until(page, "document.querySelector('.compact').style.getPropertyValue('--side') !== ''")
    boxes = page.evaluate(
        """() => [...document.querySelectorAll(".compact .thumb:not(.rollout)")].map((thumb) => {
          const { left, top, right, bottom } = thumb.getBoundingClientRect();
          return [thumb.dataset.head, left, top, right, bottom];
        })"""
    )
    rows: dict[str, set[float]] = {}
    for head, left, top, right, bottom in boxes:
        rows.setdefault(head.split(":")[0], set()).add(top)
        assert left >= 0
        assert right <= width
        assert bottom <= height
        assert right - left > 11
    assert [len(tops) for tops in rows.values()] == [1] * 32
    assert page.locator(".column-numbers span").count() == 32
    headmap = page.locator(".headmap-grid").bounding_box()  # it grows with the window
    assert headmap["width"] > 0.25 * width
    assert headmap["height"] > 0.4 * height
    # It is one stop of the keyboard, arrows go to the head above and beside, Enter shows it.
    assert page.locator(".compact .thumb[tabindex='0']").count() == 1
    page.locator(".compact .thumb[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.head") == "1:1"
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.attlas').dataset.aside === 'both'")
    assert page.locator(".thumb-words").first.is_visible()
