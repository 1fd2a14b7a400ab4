"""What the page is told of pictures: each grid once, with the keys that `image_map` places on it."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import image_models
from tests.image_models import made
from tests.view.declared import check_fields

import attlas
from attlas.foundation.png import decoded
from attlas.view import Service, export

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def recorded(make: Callable[[], Any], **options: Any) -> attlas.Atlas:
    model, given = made(make)
    with attlas.record(model, **options) as atlas, torch.no_grad():
        model(**given)
    return atlas


def info_of(atlas: attlas.Atlas) -> Any:
    service = Service(atlas)
    info = json.loads(service.answer("info", {}).body)
    service.close()
    return info


def placed(info: dict[str, Any], atlas: attlas.Atlas, key: str, row: int) -> list[list[float]]:
    """Return the weights of a row on each tile of each grid of an entry, as the page places them."""
    number = next(n for n, entry in enumerate(atlas.entries) if (entry.path, entry.call) == (key, 0))
    weights = []
    for grid in (info["grids"][each] for each in info["entries"][number]["grids"]):
        dense = atlas.entry((key, 0)).matrix[grid["sequence"], 2, row].tolist()
        weights += [[dense[at] if at >= 0 else 0.0 for at in tile["keys"]] for tile in grid["tiles"]]
    return weights


def test_grids_of_a_text_with_tiles_and_of_its_encoder() -> None:
    picture = torch.rand(500, 1000, 3)
    atlas = recorded(image_models.llava_next, images=[picture])
    info = info_of(atlas)
    found = atlas.image_map("self.1", 2, query=40)
    tiles, thumbnail = placed(info, atlas, "self.1", 40)
    assert tiles == pytest.approx(found.parts[0].weights.flatten().tolist(), abs=1e-6)
    assert thumbnail == pytest.approx(found.parts[1].weights.flatten().tolist(), abs=1e-6)
    check_fields("ImageGrid", info["grids"][0])
    check_fields("ImageTile", info["grids"][0]["tiles"][0])
    assert len(placed(info, atlas, "encoder.0", 0)) == 3
    (address,) = info["pictures"]
    small = decoded(base64.b64decode(address.removeprefix("data:image/png;base64,")))
    assert max(small.shape) <= 384


def test_grids_of_windows() -> None:
    atlas = recorded(image_models.qwen2_5_vl)
    info = info_of(atlas)
    (window,) = placed(info, atlas, "encoder.0", 7)  # the first window of the first picture
    expected = torch.zeros(4, 6)
    expected[:, :4] = atlas.image_map("encoder.0", 2, query=(1, 3)).weights[:, :4]
    assert window == pytest.approx(expected.flatten().tolist(), abs=1e-6)
    assert info["pictures"] == [None, None]


def test_recordings_without_pictures_have_no_grid() -> None:
    info = info_of(recorded(image_models.clip))
    assert [len(entry["grids"]) for entry in info["entries"]] == [0, 0, 2, 2]
    A = attlas.attend(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8))
    service = Service(A)
    info = json.loads(service.answer("info", {}).body)
    service.close()
    assert (info["pictures"], info["grids"], info["entries"][0]["grids"]) == ([], [], [])


def test_a_report_begins_with_the_last_token(tmp_path: Path) -> None:
    atlas = recorded(image_models.llava, images=[torch.rand(40, 40, 3)])
    page = export(atlas, tmp_path / "page.html", heads=[(1, 2)]).read_text("utf-8")
    assert '"pointed":{"i":23,"j":23}' in page
    assert page.count("data:image/png;base64,") >= 1
