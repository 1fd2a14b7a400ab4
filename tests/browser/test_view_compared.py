"""Two heads beside each other: both are named, with what they do, and each row of the map of heads has an owner."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.atlases import atlas_of, random_matrix
from tests.browser.conftest import served, until

import attlas

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("language", ["en", "zh"])
def test_each_row_of_heads_says_whose_it_is(browse: Any, language: str) -> None:
    tokens = [f" w{i}" for i in range(60)]
    first, second = ([random_matrix(60, seed=seed + layer, spread=2.0) for layer in (0, 1)] for seed in (10, 20))
    before, after = (atlas_of(*matrices, tokens=tokens) for matrices in (first, second))
    with served(before, title="before", compare=after, compare_title="after") as url:
        page = browse(f"{url}#lang={language}")
        owners = page.locator(".headmap-owner")
        assert owners.all_inner_texts() == ["before", "② after"]
        rows = """() => [...document.querySelectorAll(".headmap-owner, .headmap-grid button")]
          .map((each) => [each.textContent, Math.round(each.getBoundingClientRect().top)])"""
        (_, top), *cells = page.evaluate(rows)
        middle = next(at for text, at in cells if text == "② after")
        tops = sorted({at for text, at in cells if not text})
        # Of each recording two layers, and their rollout.
        assert len(tops) == 6
        assert [top, *tops[:3], middle, *tops[3:]] == sorted([top, middle, *tops])
        browse.close()


def test_one_recording_has_no_owners(browse: Any) -> None:
    with served(atlas_of(random_matrix(40), random_matrix(40, seed=1))) as url:
        assert browse(url).locator(".headmap-owner").count() == 0
        browse.close()


@pytest.fixture(scope="module")
def repeated() -> Iterator[str]:
    """Heads whose kinds are recorded: those of a text that repeats itself."""
    pytest.importorskip("transformers", reason="a model is recorded; transformers is in the extra `hf`")
    from attlas import models
    from attlas.cli.loading import load, tokenize

    loaded = load(models.path())
    ids = tokenize(loaded, "def attention(x):\n    return x + attention(x)\n" * 9, None)
    with attlas.record(loaded.model, tokens=loaded.tokenizer) as atlas, torch.no_grad():
        loaded.model(torch.as_tensor(ids).reshape(1, -1))
    with served(atlas) as url:
        yield url


@pytest.mark.parametrize(
    ("mode", "headline"),
    [
        ("side", "Layer 2, head 4 beside Layer 0, head 0"),
        ("triangle", "Layer 2, head 4 below the diagonal, above it Layer 0, head 0"),
        ("ratio", "Layer 2, head 4 divided by Layer 0, head 0"),
        ("difference", "Layer 2, head 4 less Layer 0, head 0"),
    ],
)
def test_both_heads_are_named_with_what_they_do(browse: Any, repeated: str, mode: str, headline: str) -> None:
    page = browse(f"{repeated}#e=2&h=4&s=0.0&m={mode}")
    until(page, "document.querySelector('.says-sentence').textContent.includes(';')")
    assert page.locator(".says b").inner_text() == headline
    kinds = page.evaluate("fetch('./api/heads').then((answer) => answer.json())")
    shown = {(row["entry"], row["head"]): kinds["kinds"][row["kinds"][0]] for row in kinds["rows"] if row["kinds"]}
    does = {place: kind["headline"] for place, kind in shown.items()}
    for width in (390, 768, 1024, 1280, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(60)
        assert page.locator(".says b").evaluate(
            "(b) => b.scrollWidth <= b.clientWidth && b.scrollHeight <= b.clientHeight"
        )
    assert page.locator(".says-sentence").inner_text() == f"2·4 {does[2, 4]}; 0·0 {does[0, 0]}"


def test_a_thumbnail_shows_the_cells_in_its_corners(browse: Any) -> None:
    n = 600
    q, k = torch.zeros(n, 2), torch.zeros(n, 2)
    q[0, 0] = q[-1, 1] = 300.0
    k[-1, 0] = k[0, 1] = 1.0  # the first query looks at the last key, and the last query at the first key
    A = attlas.attend(q.expand(1, 2, n, 2), k.expand(1, 2, n, 2), scale=1.0)
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    with served(A) as url:
        page = browse(url)
        picture = page.locator(".thumb.drawn .thumb-picture").nth(1)
        picture.wait_for()
        shot = np.asarray(image.open(io.BytesIO(picture.screenshot())).convert("L")).astype(int)
        browse.close()
    middle = int(np.median(shot))
    assert shot[:2, -2:].min() < middle - 60
    assert shot[-2:, :2].min() < middle - 60
    assert abs(int(shot[-2:, -2:].min()) - middle) < 30
