"""The photographs of the viewer: which there are, where they are shown, and what happens without a browser."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
BYTES = 1_600_000  # of all of them


@pytest.fixture(scope="module")
def screenshots() -> ModuleType:
    pytest.importorskip("PIL", reason="Pillow comes with matplotlib, in the extra `plot`")
    spec = importlib.util.spec_from_file_location("screenshots", ROOT / "docs" / "_build" / "screenshots.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["screenshots"] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


def shown(page: Path) -> set[str]:
    return set(re.findall(r"images/([\w-]+\.png)", page.read_text(encoding="utf-8")))


def test_every_photograph_is_taken_shown_and_small(screenshots: ModuleType) -> None:
    taken = {name for shot in screenshots.SHOTS for name, _, _ in shot.files()}
    assert {path.name for path in IMAGES.iterdir()} == taken | {screenshots.flight.NAME}
    assert set().union(*map(shown, PAGES)) == taken
    assert sum((IMAGES / name).stat().st_size for name in taken) < BYTES
    for name in taken:
        with screenshots.Image.open(IMAGES / name) as picture:
            assert picture.size == (1280, 800)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_show_the_viewer_in_their_own_language(page: Path) -> None:
    chinese = "zh" in page.relative_to(ROOT).as_posix()
    assert all(("-zh-" in name) == chinese for name in shown(page))


def test_without_a_browser_the_pictures_stay_and_this_is_said(
    screenshots: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(screenshots, "IMAGES", tmp_path)
    monkeypatch.setitem(sys.modules, "playwright.sync_api", None)
    screenshots.main()
    assert "kept as they are (Playwright is not installed" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


class NoChromium:
    """A Playwright that finds no browser."""

    class Error(Exception):
        """What it raises."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def chromium(self) -> Any:
        return self

    def launch(self, **options: Any) -> Any:
        raise self.Error("Executable doesn't exist at /nowhere\nmore")


def test_without_chromium_too(
    screenshots: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake: Any = ModuleType("playwright.sync_api")
    fake.Error, fake.sync_playwright = NoChromium.Error, NoChromium
    monkeypatch.setattr(screenshots, "IMAGES", tmp_path)
    monkeypatch.setitem(sys.modules, "playwright.sync_api", fake)
    screenshots.main()
    assert "kept as they are (Chromium does not start: Executable doesn't exist at /nowhere;" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_picture_is_written_where_one_sees_a_difference(screenshots: ModuleType, tmp_path: Path) -> None:
    image = screenshots.Image
    picture = image.new("RGB", (400, 300), (250, 250, 250))
    picture.paste((200, 60, 20), (40, 40, 140, 60))
    file = tmp_path / "shot.png"
    screenshots.store(picture, file)
    first = file.read_bytes()
    assert not screenshots.differs(image.open(file).convert("RGB"), picture)  # few colours lose nothing
    slightly = picture.point(lambda value: max(0, value - 5))  # as another version renders it
    slightly.paste((0, 0, 0), (300, 200, 310, 210))
    screenshots.store(slightly, file)
    assert file.read_bytes() == first
    other = picture.copy()
    other.paste((0, 0, 0), (200, 100, 260, 120))  # a new button
    screenshots.store(other, file)
    assert file.read_bytes() != first
    assert not screenshots.differs(image.open(file).convert("RGB"), other)
