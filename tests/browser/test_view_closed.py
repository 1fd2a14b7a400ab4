"""A viewer that is closed: its page says how to come back, and mixes no heads meanwhile."""

from pathlib import Path
from typing import Any

import pytest
from tests.atlases import atlas_of, random_matrix
from tests.browser.conftest import READY, serious_faults, until

import attlas

pytestmark = pytest.mark.browser


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    A, B = (random_matrix(60, seed=seed) for seed in (0, 1))
    atlas_of(A, B, tokens=[f" w{i}" for i in range(60)]).save(tmp_path / "my run.atlas")
    return tmp_path / "my run.atlas"


def test_a_closed_viewer_says_how_to_come_back(browser: Any, axe: str, folder: Path) -> None:
    pytest.importorskip("starlette", reason="needs attlas[view]")
    from attlas.view import Server, Service

    page = browser.new_context(viewport={"width": 390, "height": 844}).new_page()
    first = Server(Service(attlas.load(folder), folder=folder), port=0)
    with first:
        page.goto(f"{first.url}#e=1&h=1&pin=40.20")
        page.wait_for_selector(READY)
        head = page.locator(".says b").inner_text()
        assert "Layer 1, head 1" in head
        port = int(first.url.split(":")[2].split("/")[0])
    # The page that is open: one line over the map, and head, map and numbers stay those that were drawn.
    page.locator(".pick-head").select_option("0")
    page.locator(".gone").wait_for(timeout=15_000)
    line = page.locator(".gone code").inner_text()
    assert line.startswith(f"attlas view '{folder}' --at 'e=1&h=1")
    assert "pin=40.20" in line
    until(page, "document.querySelector('.pick-head').value === '1'")
    until(page, "location.hash.startsWith('#e=1&h=1')")  # the address is written a moment later
    assert page.locator(".says b").inner_text() == head
    assert page.locator(".subject .place").text_content().strip() == "40"
    box = page.locator(".gone").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    # The page that is opened again at another viewer's port.
    with Server(Service(attlas.load(folder)), port=port):
        page.reload()
        page.get_by_role("heading", name="This viewer is closed.").wait_for()
        assert page.locator("code").inner_text().startswith(f"attlas view '{folder}' --at 'e=1&h=1")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert serious_faults(page, axe, [("pin=1.1", (390, 844), "dark"), ("pin=1.1", (1280, 800), "light")]) == {}
        other = browser.new_context(locale="zh-CN").new_page()
        other.goto(f"http://127.0.0.1:{port}/never/#h=1")
        other.get_by_role("heading", name="此查看器已关闭。").wait_for()
        assert other.locator("code").inner_text() == "attlas view run.atlas --at 'h=1'"
        other.context.close()
    page.context.close()
