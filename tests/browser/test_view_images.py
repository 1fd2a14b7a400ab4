"""The picture of a recording in a real browser, with the weights of a query on it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import image_models
from tests.browser.conftest import latin_words, served, state, until
from tests.image_models import made

import attlas
from attlas.view import export

pytestmark = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
FIGURE = "document.querySelector('.image figcaption')?.textContent"


@pytest.fixture(scope="module")
def atlas() -> attlas.Atlas:
    model, given = made(image_models.llava)
    picture = torch.zeros(60, 60, 3)
    picture[:, 30:, 0] = 1.0
    with attlas.record(model, images=[picture, 1 - picture]) as atlas, torch.no_grad():
        model(**given)
    return atlas


def colours(page: Any, patches: list[tuple[int, int]]) -> list[list[int]]:
    """Return the colours in the middle of some patches, read at once."""
    script = """(patches) => { const canvas = document.querySelector(".image canvas");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return patches.map(([row, column]) => {
          const x = Math.round((column + 0.5) * canvas.width / 4), y = Math.round((row + 0.5) * canvas.height / 4);
          return [...data.slice(4 * (y * canvas.width + x), 4 * (y * canvas.width + x) + 3)];
        }); }"""
    return page.evaluate(script, patches)


def test_a_report_draws_the_weights_on_the_picture(browse: Any, atlas: attlas.Atlas, tmp_path: Path) -> None:
    export(atlas, tmp_path / "page.html", heads=[(1, 2)])
    page = browse((tmp_path / "page.html").as_uri())
    until(page, f"{FIGURE}?.includes('lies on the picture')")
    found = atlas.image_map(1, 2, query=-1)
    share = float(page.locator(".image figcaption").inner_text().split(" ")[0].replace("\u00a0", ""))
    assert share == pytest.approx(100 * found.share, abs=0.2)
    row, column = found.largest
    strongest, weakest = colours(page, [(row, column), divmod(int(found.weights.argmin()), 4)])
    assert strongest[2] > strongest[0]  # blue is most opaque there
    assert sum(weakest) > sum(strongest)
    box = page.locator(".image canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * (column + 0.5) / 4, box["y"] + box["height"] * (row + 0.5) / 4)
    until(page, f"{FIGURE}?.startsWith('row {row}, column {column}: ')")
    page.mouse.down()
    page.mouse.up()
    assert state(page)["pin"] == f"23.{3 + 4 * row + column}"


def test_a_vision_encoder_without_a_text(browse: Any) -> None:
    model, given = made(image_models.vit)
    with attlas.record(model) as atlas, torch.no_grad():
        model(**given)
    with served(atlas) as url:
        page = browse(f"{url}#pin=0.3", locale="zh-CN")
        until(page, f"{FIGURE}?.includes('落在图像上')")
        assert page.locator(".image canvas").count() == 1
        assert not {word for word in latin_words(page) if word.lower() in ("picture", "weight", "row", "column")}
        browse.close()  # before the server: the page still asks for tiles
