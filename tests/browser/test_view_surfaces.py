"""What a page offers first: panes that have something to show, and a comparison that has a meaning."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.atlases import atlas_of, random_matrix
from tests.browser.conftest import READY, saved, served, state, until

import attlas

pytestmark = pytest.mark.browser

WORDS = [f" w{i}" for i in range(60)]


def test_one_head_has_no_pane_of_heads(browse: Any) -> None:
    with served(random_matrix(60, heads=1)) as url:
        page = browse(url)
        assert page.locator(".slot-heads").bounding_box()["width"] < 2
        assert page.locator("h1").inner_text() == "60 × 60"  # its size is its name
        assert state(page)["a"] == "none"
        browse.close()
    with served(atlas_of(random_matrix(60, heads=1), tokens=WORDS)) as url:
        page = browse(url, 390, 844)
        assert state(page)["a"] == "text"
        browse.close()


@pytest.mark.parametrize(("second", "mode"), [(WORDS, "ratio"), ([*WORDS[:30], *(" x",) * 30], "side")])
def test_two_texts_stand_side_by_side_and_two_checkpoints_are_divided(
    browse: Any, second: list[str], mode: str
) -> None:
    first, other = (atlas_of(random_matrix(60, seed=seed), tokens=words) for seed, words in ((0, WORDS), (1, second)))
    with served(first, title="before", compare=other, compare_title="after") as url:
        page = browse(f"{url}#pin=50.40")
        assert state(page)["m"] == mode
        # The text and its numbers are those of the first head, and a click leads to those of the other one.
        names = ("② Layer 0, head 0", "Layer 0, head 0")
        for atlas, words, name in ((first, WORDS, names[0]), (other, second, names[1]), (first, WORDS, names[0])):
            weight = f"{float(atlas[0][0, 0, 50, 40]):.4g}"
            until(page, f"document.querySelector('.cell-facts')?.textContent.includes({weight[:5]!r})")
            shown = [text.strip() for text in page.locator(".flow .t").all_inner_texts()]
            assert shown == [word.strip() for word in words]
            page.locator(".whose").get_by_role("button", name=f"show {name}", exact=True).click()
        browse.close()


def test_lines_offer_nothing_that_moves_the_map(browse: Any) -> None:
    with served(atlas_of(random_matrix(60), tokens=WORDS)) as url:
        page = browse(url)
        before = page.locator(".map-tools").bounding_box()
        page.get_by_role("button", name="Lines").click()
        page.wait_for_selector(".lines line", state="attached")
        for name in ("Go to the diagonal", "Show the whole matrix", "Zoom in", "Zoom out"):
            assert page.get_by_role("button", name=name).count() == 0, name
        assert not page.get_by_label("Palette").is_visible()
        assert page.locator(".map-tools").bounding_box() == before
        for end in ("first", "last"):
            token = getattr(page.locator(".lines-column").first.locator("button"), end)
            token.scroll_into_view_if_needed()
            box, frame = token.bounding_box(), page.locator(".lines-scroll").bounding_box()
            assert box["y"] >= frame["y"]
            assert box["y"] + box["height"] <= frame["y"] + frame["height"]
        page.get_by_role("button", name="Lines").click()
        assert page.get_by_role("button", name="Zoom in").is_visible()
        browse.close()


def test_what_leaves_the_page_names_the_project_and_no_folder(
    browse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    monkeypatch.setattr("attlas.view.service.project_address", lambda: "https://example.org/attlas")
    atlas = atlas_of(random_matrix(60, spread=2.0), tokens=WORDS)
    folder = tmp_path / "secret" / "run.atlas"
    folder.parent.mkdir()
    atlas.save(folder)
    options = {"expected": "willReadFrequently", "permissions": ["clipboard-read", "clipboard-write"]}
    with served(attlas.load(folder), folder=folder) as url:
        page = browse(f"{url}#h=1&pin=40.20&r=40&c=20&z=4.1", **options)
        page.get_by_role("button", name="Export").click()
        page.locator("[data-export=python]").click()
        until(page, "/copied/.test(document.querySelector('.export-line').textContent)")
        text = page.evaluate("navigator.clipboard.readText()")
        assert 'attlas.load("run.atlas")' in text
        assert "secret" not in text
        page.keyboard.press("Escape")
        page.evaluate(
            """() => {
              const real = CanvasRenderingContext2D.prototype.fillText;
              window.written = [];
              CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
                if (this.canvas.width === 1200) window.written.push(text.trim());
                return real.call(this, text, ...rest);
              };
            }"""
        )
        name, content = saved(page, "card")
        words = page.evaluate("window.written")
        headline = page.locator(".says b").inner_text()
        assert headline in " ".join(words)
        assert page.locator(".says-sentence").inner_text() in " ".join(words)
        assert words[-1] == "example.org/attlas"
        (tmp_path / name).write_bytes(content)
        pixels = np.asarray(image.open(tmp_path / name).convert("RGB"))[:, 600:]
        assert (pixels == (200, 66, 26)).all(-1).sum() > 100  # the ring about the pinned cell
        _, offline = saved(page, "html")
        (tmp_path / "page.html").write_bytes(offline)
        browse.close()
    page = browse((tmp_path / "page.html").as_uri(), wait=READY)
    link = page.get_by_role("link", name="Made with attlas: example.org/attlas")
    assert link.get_attribute("href") == "https://example.org/attlas"
    page.get_by_role("button", name="Export").click()
    assert page.locator("[data-export=html]").inner_text().endswith("This file again; it opens at what is shown now.")
    assert "attlas view" not in page.locator(".export-kinds").inner_text()
