"""Pictures on light and on dark pages: every text stands out from what is behind it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import attlas
import attlas.models
from attlas import heads, pictures
from attlas.cli.command import main
from attlas.errors import ShapeError

pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
from matplotlib.colors import to_rgb
from matplotlib.text import Text

LEAST_CONTRAST = 4.5  # WCAG 2, level AA
PAPER = {"light": "#ffffff", "dark": "#111b24"}


def part(name: str, logit: float) -> dict[str, Any]:
    return {"name": name, "role": "", "logit": logit}


WRITER = part("head 0·0", 8.3)
CELL = {
    "weight": 0.98, "logit": 17.9, "above": 15.3, "relative": True, "keys": [WRITER, part("MLP 0", -1.2)],
    "writer": WRITER | {"sources": [{"at": 0, "logit": 8.5}], "without": {"weight": 0.09}},
}  # fmt: skip
STEPS = torch.linspace(-2.0, 2.0, 41).tolist()  # every shade of the scale
MAP = {
    "queries": [part("token", 1.0)], "keys": [part(f"head {at}", x) for at, x in enumerate(STEPS)], "others": [0, 0],
    "table": [STEPS], "total": 1.0,
}  # fmt: skip


def contrast(a: Any, b: Any) -> float:
    """Return the contrast of two colours by WCAG 2."""

    def luminance(color: Any) -> float:
        rgb = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(color)]
        return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2] + 0.05

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return high / low


@pytest.mark.parametrize("theme", PAPER)
def test_texts_of_a_cell_stand_out(theme: str) -> None:
    figure = pictures.why(CELL, ["temp", "late", "=", "temp"], query=3, key=1, title="why?", theme=theme)
    assert to_rgb(figure.get_facecolor()) == to_rgb(PAPER[theme])
    figure.canvas.draw()
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert {"temp", "why?", "head 0·0", "+8.3"} <= {text.get_text() for text in texts}
    for text in texts:
        box = text.get_bbox_patch()
        ground = box.get_facecolor() if box is not None and box.get_facecolor()[3] else figure.get_facecolor()
        assert contrast(text.get_color(), ground) >= LEAST_CONTRAST, text.get_text()


@pytest.mark.parametrize("theme", PAPER)
def test_texts_of_a_map_stand_out_from_their_cells(theme: str) -> None:
    figure = pictures.why_map(MAP, title="all pairs", theme=theme)
    figure.canvas.draw()
    (ax,) = figure.axes
    mesh: Any = ax.collections[0]
    shades = mesh.to_rgba(mesh.get_array()).reshape(-1, 4)
    for text in ax.texts:
        assert contrast(text.get_color(), shades[int(text.get_position()[0])]) >= LEAST_CONTRAST, text.get_text()
    for text in (*ax.get_xticklabels(), *ax.get_yticklabels(), ax.xaxis.label, ax.yaxis.label):
        assert contrast(text.get_color(), PAPER[theme]) >= LEAST_CONTRAST
    middle = shades[len(STEPS) // 2]  # 0 is nearly the paper; both ends are far from it
    assert contrast(middle, PAPER[theme]) < 1.3 < 3 < min(contrast(shade, PAPER[theme]) for shade in shades[[0, -1]])


@pytest.mark.parametrize("theme", PAPER)
@pytest.mark.parametrize("signed", [False, True])
def test_maps_follow_the_page(theme: str, signed: bool) -> None:
    weights = torch.rand(2, 3, 8, 8).tril() ** 8 * (torch.rand(2, 3, 8, 8).sub(0.5).sign() if signed else 1)
    weights[..., 0, 0] = 1.0
    weights[torch.ones_like(weights).triu(1) > 0] = torch.nan
    one = pictures.plot(weights[0, 0], labels=[f"w{i}" for i in range(8)], title="one", theme=theme)
    several = pictures.plot(weights, title="all", theme=theme)
    for figure in (one, several):
        assert to_rgb(figure.get_facecolor()) == to_rgb(PAPER[theme])
        figure.canvas.draw()
        for text in figure.findobj(Text):
            if text.get_text() and text.get_visible():
                assert contrast(text.get_color(), PAPER[theme]) >= LEAST_CONTRAST, text.get_text()
        image = figure.axes[0].images[0]
        assert contrast(image.to_rgba(0.0 if signed else pictures.FLOOR)[:3], PAPER[theme]) < 1.3  # small: the page
        assert contrast(image.to_rgba(1.0)[:3], PAPER[theme]) > 7
        assert contrast(figure.axes[0].get_facecolor()[:3], PAPER[theme]) < 1.4  # where nothing may attend
        assert contrast(figure.axes[0].spines["left"].get_edgecolor()[:3], PAPER[theme]) > LEAST_CONTRAST


@pytest.mark.parametrize("title", ["Head 0·0: which part of the query meets which of the key", "a long title " * 20])
def test_all_words_of_a_small_map_lie_in_the_picture(title: str) -> None:
    told = {"queries": [part("token", 1.0)], "keys": [part("token", 1.0)], "others": [0, 0], "table": [[1.0]]}
    figure = pictures.why_map(told | {"total": 1.0}, title=title)
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    for text in figure.findobj(Text):
        if text.get_text() and text.get_visible():
            box = text.get_window_extent()
            assert 0 <= box.x0 < box.x1 <= width, text.get_text()
            assert 0 <= box.y0 < box.y1 <= height, text.get_text()


def test_tokens_of_every_language_are_drawn_with_fonts_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no font has is a square: matplotlib warns of anything else, and warnings are errors here."""
    tokens = ["你好", "🎉", "\U000e0001", "世界"]
    figure = pictures.why(CELL, tokens, query=3, key=1, title=f"{tokens[3]} looks at {tokens[1]}: why?")
    figure.draw_without_rendering()
    asked: list[str] = []
    module = importlib.import_module("attlas.pictures.why")  # attlas.pictures.why is the function
    monkeypatch.setattr(module, "fonts_for_text", lambda text, *usual: asked.append(text) or ["monospace"])
    pictures.why(CELL, tokens, query=3, key=1)
    assert set("你好世界") <= set(asked[0])


def test_a_theme_that_is_not_there_is_refused() -> None:
    A = attlas.attend(torch.randn(9, 4), torch.randn(9, 4))
    with pytest.raises(ShapeError, match=r'plot\(\): theme must be "light" or "dark"'):
        A.plot(theme="sepia")
    with pytest.raises(ShapeError, match=r'pictures\.why_map\(\): theme must be "light" or "dark"'):
        pictures.why_map(MAP, theme="sepia")
    with pytest.raises(ShapeError, match=r'pictures\.why\(\): theme must be "light" or "dark"'):
        pictures.why(CELL, ["temp", "late"], query=1, key=0, theme="sepia")


def test_the_command_draws_both_themes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = attlas.nn.GPT2.from_pretrained(attlas.models.path()).eval()
    with torch.no_grad(), attlas.record(model, parts=True) as atlas:
        model(heads.repeated_block(4096, period=20, blocks=1))
    atlas.save(tmp_path / "run.atlas")
    for place in ([], ["--at", "30,11"]):
        for theme, paper in PAPER.items():
            out = tmp_path / "why.svg"
            assert (
                main(["why", str(tmp_path / "run.atlas"), "--head", "2.4", *place, "--theme", theme, "-o", str(out)])
                == 0
            )
            page = re.search(r"fill: (#\w+)", out.read_text("utf-8"))  # what is drawn first
            assert page is not None
            assert page[1] == paper
    for place in ([], ["--layer", "2", "--head", "4"], ["--layer", "2", "--head", "4", "--rows", "4:20"]):
        for theme, paper in PAPER.items():
            out = tmp_path / "head.svg"
            assert main(["picture", str(tmp_path / "run.atlas"), *place, "--theme", theme, "-o", str(out)]) == 0
            page = re.search(r"fill: (#\w+)", out.read_text("utf-8"))
            assert page is not None
            assert page[1] == paper
    capsys.readouterr()
    assert main(["picture", str(tmp_path / "run.atlas"), "--card", "--theme", "dark", "-o", str(out)]) == 2
    assert "--theme goes with a picture of the weights of a recording" in capsys.readouterr().err
