"""Rollouts behind the layers, and several heads in one map: what a person sees and can do."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.browser.conftest import READY, saved, serious_faults, served, state, until

import attlas
from attlas.recording.atlas import Atlas, Entry

pytestmark = pytest.mark.browser
N = 96
HUES = {"light": ("#0a4ea3", "#e8590c"), "dark": ("#4f9dff", "#ffa23d")}


def layer(number: int, back: tuple[int, int], kind: str = "self", *, strict: bool = True) -> Entry:
    """Return a layer whose two heads look so many tokens back, with nearly all of their weight."""
    places = torch.arange(N)
    keys = torch.eye(N).expand(1, 2, N, N)
    queries = torch.stack([9.0 * torch.eye(N)[(places - step).clamp(min=0)] for step in back])[None]
    A = attlas.attend(queries, keys, score=attlas.ScaledDot(1.0), mask=attlas.Causal() if strict else None)
    return Entry(f"layers.{number}", number, kind, 0, (0, 1), (0, N), 0, (1, 2, N, N), A)


def atlas_of_layers(*more: Entry) -> Atlas:
    return Atlas([layer(0, (1, 5)), layer(1, (20, 40)), *more], tokens=[f" t{i}" for i in range(N)])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(atlas_of_layers()) as address:
        yield address


def colour_at(page: Any, i: int, j: int) -> list[int]:
    """Return the colour of a cell of the map, which shows single cells about it."""
    box = page.locator(".stage").bounding_box()
    return page.evaluate(
        """([x, y]) => {
          const canvas = document.querySelector(".base");
          const ratio = canvas.width / canvas.getBoundingClientRect().width;
          return [...canvas.getContext("2d").getImageData(Math.round(ratio * x), Math.round(ratio * y), 1, 1).data];
        }""",
        [box["width"] / 2 + 12, box["height"] / 2 + 12],
    )


def near(found: list[int], colour: str, most: int = 12) -> bool:
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return all(abs(a - b) <= most for a, b in zip(found, wanted, strict=False))


def centred(i: int, j: int) -> str:
    """Return the place of a link at which a cell of 64 pixels lies in the middle of the map, its number aside."""
    return f"r={i + 0.5}&c={j + 0.5}&z=6&f=linear&lo=0&hi=1"


def test_rollouts_stand_behind_the_layers(url: str, browse: Any) -> None:
    page = browse(url)
    page.locator(".layer-name", has_text="Rollout").scroll_into_view_if_needed()
    assert page.locator("[data-head^='2:']").count() == 2
    assert page.locator("[data-head='2:mean']").count() == 0
    assert page.locator(".heads-count").text_content() == "4"  # rollouts are no heads
    page.locator("[data-head='2:1']").click()
    assert state(page) | {"e": "2", "h": "1"} == state(page)
    assert page.locator(".says b, .slot-says b").first.text_content() == "Rollout up to layer 1"
    assert "bring to each" in page.locator(".says-sentence").text_content()
    # Of the query 60: a quarter from itself, and shares from 1, 5, 20 and 40 tokens back, and 21, 25, ... of both.
    page.evaluate("location.hash = 'e=2&h=1&pin=60.60'")
    until(page, "document.querySelector('.cell-facts dd')?.textContent.includes('60')")
    page.wait_for_selector(".loading", state="detached")
    facts = page.locator(".cell-facts").text_content()
    assert "0.25" in facts
    assert page.locator(".headmap-grid button").count() == 6
    page.locator(".headmap-grid button").nth(5).click()
    assert state(page)["e"] == "2"


def test_the_pair_of_all_heads_has_the_rollouts(url: str, browse: Any) -> None:
    page = browse(f"{url}#e=2&h=1&pin=60.40&hm=pair")
    until(page, "/%/.test(document.querySelectorAll('.headmap-grid button')[5].title)")
    labels = page.locator(".headmap-grid button").evaluate_all("(all) => all.map((each) => each.title)")
    assert labels[2].startswith("Layer 1, head 0: 99."), labels
    assert labels[5].startswith("Rollout up to layer 1: 12."), labels


def test_what_cannot_be_rolled_out_is_named_where_one_looks(browse: Any) -> None:
    with served(atlas_of_layers(layer(0, (1, 2), "cross", strict=False))) as address:
        page = browse(address)
        note = page.locator(".heads-note")
        assert note.text_content() == "There is no rollout. Layers 0 attend to another text (cross-attention)."
        page = browse(f"{address}#lang=zh")
        assert "交叉注意力" in page.locator(".heads-note").text_content()
        browse.close()


def test_a_rollout_has_its_python(url: str, browse: Any) -> None:
    page = browse(f"{url}#e=2&h=1", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Export").click()
    page.locator("[data-export=python]").click()
    text = page.evaluate("navigator.clipboard.readText()")
    assert "heads.rollout([atlas[layer] for layer in [0, 1]]" in text
    compile(text, "copied", "exec")


def test_a_page_of_a_rollout_works_offline(url: str, browse: Any, tmp_path: Path) -> None:
    page = browse(f"{url}#e=2&h=1")
    name, content = saved(page, "html")
    (tmp_path / name).write_bytes(content)
    page = browse((tmp_path / name).as_uri() + "#pin=60.40")
    assert "Rollout up to layer 1" in page.locator(".slot-says, .says").first.text_content()
    until(page, "document.querySelector('.cell-facts')?.textContent.includes('0.12')")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_cell_has_the_colour_of_the_head_that_gives_it_most(url: str, browse: Any, theme: str) -> None:
    link = f"e=0&h=0&s=0.1&m=colours&{centred(60, 59)}"
    page = browse(f"{url}#{link}", color_scheme=theme)
    first, second = HUES[theme]
    assert near(colour_at(page, 60, 59), first), colour_at(page, 60, 59)
    page = browse(f"{url}#e=0&h=0&s=0.1&m=colours&{centred(60, 55)}", color_scheme=theme)
    assert near(colour_at(page, 60, 55), second), colour_at(page, 60, 55)
    page = browse(f"{url}#e=0&h=0&s=0.0&m=colours&o=0.1&{centred(60, 30)}", color_scheme=theme)
    assert not near(colour_at(page, 60, 30), first, 40)


def test_a_click_with_ctrl_gives_heads_a_colour_and_takes_it_away(url: str, browse: Any) -> None:
    page = browse(f"{url}#e=0&h=0")
    for place, count in (("0:1", 2), ("1:0", 3), ("2:1", 4)):
        page.locator(f"[data-head='{place}']").click(modifiers=["Control"])
        assert page.locator(".thumb[data-hue]").count() == count
    assert state(page) | {"m": "colours", "s": "0.1", "o": "1.0,2.1"} == state(page)
    page.locator("[data-head='1:1']").click(modifiers=["Control"])  # there is no fifth colour
    assert page.locator(".thumb[data-hue]").count() == 4
    said = "[...document.querySelectorAll('[aria-live]')].some((each) => /All 4 colours/.test(each.textContent))"
    until(page, said)
    assert "with a colour in the map" in page.locator("[data-head='1:0']").get_attribute("aria-label")
    page.locator("[data-head='1:0']").click(modifiers=["Control"])
    assert state(page)["o"] == "2.1"
    page.locator("[data-head='0:0']").click(modifiers=["Control"])  # the first one: the next takes its place
    assert state(page) | {"h": "1", "s": "2.1", "m": "colours"} == state(page)
    assert page.locator(".whose").inner_text() == "of Layer 0, head 1"


def test_a_link_holds_the_heads_and_whether_there_are_brackets(url: str, browse: Any) -> None:
    page = browse(f"{url}#e=0&h=0&s=0.1&m=colours&o=1.0&ol=off")
    fields = state(page)
    assert fields | {"o": "1.0", "ol": "off"} == fields
    page.reload()
    page.wait_for_selector(READY)
    assert page.locator(".thumb[data-hue]").count() == 3
    assert state(page) == fields


def test_heads_are_added_and_taken_away_in_the_box(url: str, browse: Any) -> None:
    page = browse(f"{url}#e=0&h=0")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_role("button", name="colours").click()
    names = page.locator(".hue-list li span")
    assert names.all_text_contents() == ["Layer 0, head 0", "Layer 0, head 1"]
    page.get_by_label("Add a head").select_option("1:1")
    assert names.all_text_contents()[-1] == "Layer 1, head 1"
    assert page.get_by_label("Add a head").locator("option[value='1:1']").count() == 0
    page.get_by_role("button", name="Take Layer 0, head 1 away").click()
    assert names.all_text_contents() == ["Layer 0, head 0", "Layer 1, head 1"]


def test_the_tooltip_lists_the_weight_of_each_head(url: str, browse: Any) -> None:
    page = browse(f"{url}#e=0&h=0&s=0.1&m=colours&o=2.1&{centred(60, 59)}")
    page.locator(".overlay").focus()
    page.keyboard.press("Enter")  # the crosshair in the middle
    until(page, "document.querySelectorAll('.tip-hue').length === 3")
    until(page, "!document.querySelector('.tip').textContent.includes('≈')")
    lines = page.locator(".tip-hue").all_text_contents()
    assert [line.split()[-1] for line in lines] == ["0·0", "0·1", "R·1"]
    assert lines[0].startswith("0.99")
    assert float(lines[1].split()[0]) < 0.001
    assert lines[2].startswith("0.12")  # half of the mean of two heads, and half of that stays


def test_an_offline_page_has_all_heads_that_have_a_colour(url: str, browse: Any, tmp_path: Path) -> None:
    page = browse(f"{url}#e=0&h=0&s=0.1&m=colours&o=1.0,2.1")
    name, content = saved(page, "html")
    file = tmp_path / name
    file.write_bytes(content)
    page = browse(file.as_uri())
    assert page.locator(".thumb[data-hue]").count() == 4
    assert page.evaluate("document.querySelector('.bar-canvas').height") == 4
    held = json.loads(re.search(rb'"packed":(\[.*?\]),"heads"', content).group(1))
    assert [(each["entry"], each["head"]) for each in held] == [(0, 0), (0, 1), (1, 0), (2, 1)]


def fills(svg: bytes) -> dict[tuple[int, int], str]:
    """Return the colour of each cell of a vector picture, from its first row and column on."""
    paths = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")
    return {
        (int(y), int(x) + at): path.get("fill")
        for path in paths
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)", path.get("d"))
        for at in range(int(width))
    }


def channels(colour: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", colour)]


def test_pictures_that_are_saved_have_the_colours_of_all_heads(url: str, browse: Any) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    page = browse(
        f"{url}#e=0&h=0&s=0.1&m=colours&o=1.0&{centred(60, 57)}&z=5&mm=off&ol=off", expected="willReadFrequently"
    )
    seen = tuple(colour_at(page, 60, 57)[:3])
    _, body = saved(page, "svg")
    cells = fills(body)
    words = [text.text for text in ET.fromstring(body).iter("{http://www.w3.org/2000/svg}text")]
    assert {"Layer 0, head 0", "Layer 0, head 1", "Layer 1, head 0"} <= set(words)
    # One head looks a token back and the other one five.
    hues = {name: [at for at, colour in cells.items() if near(channels(colour), name)] for name in HUES["light"]}
    first, second = hues.values()
    steps = {row - column for row, column in first}, {row - column for row, column in second}
    assert [len(each) for each in steps] == [1, 1]
    assert steps[1].pop() - steps[0].pop() == 4
    assert seen in {tuple(channels(colour)) for colour in cells.values()}
    # Pixels too: both colours are in the map, and the bar has a row for each head.
    _, body = saved(page, "png")
    pixels = np.asarray(pillow.open(io.BytesIO(body)).convert("RGB")).astype(int)
    for hue in HUES["light"]:
        wanted = [int(hue[at : at + 2], 16) for at in (1, 3, 5)]
        assert (np.abs(pixels - wanted).max(-1) <= 12).sum() > 2000, hue
    # What divides two heads is saved with its own colours; two triangles are saved as they are seen.
    page.evaluate(f"location.hash = 'e=0&h=0&s=0.1&m=ratio&{centred(60, 57)}&z=5&mm=off'")
    page.wait_for_selector(READY)
    seen = tuple(colour_at(page, 60, 57)[:3])
    _, body = saved(page, "svg")
    assert seen in {tuple(channels(colour)) for colour in fills(body).values()}
    page.evaluate(f"location.hash = 'e=0&h=0&s=0.1&m=triangle&{centred(60, 57)}&z=5&mm=off'")
    page.wait_for_selector(READY)
    _, body = saved(page, "svg")
    assert ET.fromstring(body)[0].get("href").startswith("data:image/png;base64,")


def test_weights_that_may_be_negative_have_no_colour(browse: Any) -> None:
    q, k = torch.randn(1, 2, N, 4), torch.randn(1, 2, N, 4)
    A = attlas.transport(q, k, scale=1.0)
    with served(A) as address:
        page = browse(f"{address}#panel=compare")
        button = page.get_by_role("button", name="colours")
        assert button.get_attribute("aria-disabled") == "true" or button.is_disabled()
        page.keyboard.press("Escape")
        page.locator("[data-head='0:1']").click(modifiers=["Control"])
        assert "m" not in state(page)
        browse.close()


def test_lines_have_the_colour_of_their_head(browse: Any, url: str) -> None:
    page = browse(f"{url}#e=0&h=0&s=1.0&o=0.1&m=colours&w=lines&r=60.5&c=60.5&z=3")
    page.wait_for_selector(".lines line[data-hue='2']", state="attached")
    lines = page.evaluate(
        """[...document.querySelectorAll(".lines line")].map((line) => [
          ...["query", "key", "hue"].map((name) => Number(line.dataset[name])), getComputedStyle(line).stroke])"""
    )
    first = page.evaluate("Number(document.querySelector('.lines-column button').title)")
    for hue, back in enumerate((1, 20, 5)):  # queries of the window that look at a key of the window
        pairs = {(i, j) for i, j, of, _ in lines if of == hue}
        assert {(i, i - back) for i in range(max(back, 5), 64)} <= pairs
        assert len({stroke for _, _, of, stroke in lines if of == hue}) == 1
    assert len({stroke for *_, stroke in lines}) == 3
    legend = page.locator(".lines-legend li").all_inner_texts()
    assert legend == ["Layer 0, head 0", "Layer 1, head 0", "Layer 0, head 1"]
    page.locator(".lines-column").first.locator("button").nth(40).hover()
    until(page, "document.querySelector('.lines-says').textContent.includes('(1·0)')")
    said = page.locator(".lines-says").text_content()
    shares = r"9\d\S* % \(0·0\), 9\d\S* % \(1·0\), 9\d\S* % \(0·1\)"
    assert re.fullmatch(rf"{shares} of the attention of query {first + 40} goes to these keys\.", said)
    page.get_by_role("button", name="Compare").click()
    page.locator(".hue-list button").nth(2).click()
    until(page, "document.querySelectorAll('.lines line[data-hue=\"2\"]').length === 0")
    page.locator(".hue-list button").nth(1).click()
    until(page, "document.querySelectorAll('.lines line[data-hue]').length === 0")
    assert page.locator(".lines-legend").is_hidden()


def test_no_serious_fault(url: str, browse: Any, axe: str) -> None:
    page = browse(url, wait=READY)
    coloured = "#e=0&h=0&s=0.1&m=colours&o=1.0"
    links = ["#e=2&h=1", f"{coloured},2.1&panel=compare", f"{coloured}&pin=60.59"]
    views = [
        (link, size, scheme) for link in links for size in ((1280, 800), (390, 800)) for scheme in ("light", "dark")
    ]
    assert serious_faults(page, axe, views) == {}
