"""A pixel of the canvas is a pixel of the screen, whatever the scale of the window."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.atlases import random_matrix
from tests.browser.conftest import READY, served, started

pytestmark = pytest.mark.browser

# The picture on the canvas, and where its first pixel is on the screen, in device pixels.
CANVAS = """() => {
  const base = document.querySelector(".base");
  const { left, top } = base.getBoundingClientRect();
  return [base.toDataURL().split(",")[1], Math.round(left * devicePixelRatio), Math.round(top * devicePixelRatio)];
}"""


@pytest.fixture(scope="module")
def noise() -> Iterator[str]:
    """A map whose neighbours differ, so that a mixture of two pixels shows."""
    with served(random_matrix(1200, heads=1, spread=2.5)) as url:
        yield url


def colours(file: bytes) -> NDArray[np.int16]:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    return np.asarray(image.open(io.BytesIO(file)).convert("RGB")).astype(np.int16)


def share_of_mixtures(page: Any) -> float:
    """Return how many pixels of the screen are not those of the canvas."""
    page.wait_for_timeout(300)
    page.evaluate("document.querySelector('.minimap-open')?.remove()")  # it stands on the map
    picture, left, top = page.evaluate(CANVAS)
    drawn = colours(base64.b64decode(picture))
    screen = colours(page.screenshot())[top : top + len(drawn), left : left + drawn.shape[1]]
    drawn = drawn[: len(screen), : screen.shape[1]]
    assert min(drawn.shape[:2]) > 200
    differs = np.abs(screen - drawn).max(-1) > 8
    return float(differs[4:-4, 4:-4].mean())  # the frame of the stage lies over its edge


@pytest.mark.parametrize("scale", [1.1, 1.25])
def test_pixels_are_not_resampled(noise: str, scale: float) -> None:
    """Each scale needs a browser of its own: a scale that is emulated rounds in another way than a screen."""
    with started([f"--force-device-scale-factor={scale}", "--window-size=1367,901"]) as browser:
        page = browser.new_context(no_viewport=True, reduced_motion="reduce").new_page()
        page.goto(f"{noise}#z=0&r=600&c=500&mm=off")
        page.wait_for_selector(READY)
        assert page.evaluate("devicePixelRatio") == pytest.approx(scale)
        assert share_of_mixtures(page) < 1e-4


def test_an_emulated_scale_resamples_nothing_either(browse: Any, noise: str) -> None:
    page = browse(f"{noise}#z=0&r=600&c=500&mm=off", 1366, 768, device_scale_factor=1.25)
    assert share_of_mixtures(page) < 1e-4
    page.set_viewport_size({"width": 1033, "height": 717})
    assert share_of_mixtures(page) < 1e-4
    larger = browse(f"{noise}#z=0&r=600&c=500&mm=off", 1033, 717, device_scale_factor=1.5)
    assert share_of_mixtures(larger) < 1e-4
