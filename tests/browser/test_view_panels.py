"""The panels of the viewer in a real browser, against the exact weights: heads, text, search, exports, widget."""

import base64
import csv
import io
import json
import re
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import torch
from tests.atlases import atlas_of, random_matrix
from tests.browser.conftest import number, saved, serious_faults, served, state, until

import attlas
from attlas import stats
from attlas.recording.atlas import Atlas
from attlas.view import Service
from attlas.view.tokens import Text

pytestmark = pytest.mark.browser
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("starlette", reason="starlette is in the extra `view`")

LAYERS, HEADS, N = 2, 3, 300
WORDS = ("def", " f", "(", "x", "\n   ", " return", " x", "</script>", "<b>", "", "🦊", "日本", "&amp;", "\t", "=1+1")
TOKENS = ["start", *(WORDS[i % len(WORDS)] for i in range(N - 2)), "needle"]
SHOWN = Text(TOKENS).shown  # an empty token is a part of the next character


def matrix(layer: int) -> attlas.AttentionMatrix:
    generator = torch.Generator().manual_seed(layer)
    q, k = (torch.randn(1, HEADS, N, 16, generator=generator) * 1.5 for _ in range(2))
    k[:, :, 0] += 2 * q.mean(2)  # a first key that many rest on
    return attlas.attend(q, k, mask=attlas.Causal())


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    return atlas_of(*map(matrix, range(LAYERS)), model="tiny <model>", tokens=TOKENS, spans={"question": (0, 40)})


@pytest.fixture(scope="module")
def address(atlas: Atlas) -> Iterator[str]:
    with served(atlas, title="panels & <b>text</b>") as url:
        yield url


@pytest.fixture
def open_page(browse: Any, address: str) -> Callable[..., Any]:
    """Open the viewer."""

    def opened(hash_: str = "", url: str = "") -> Any:
        return browse(f"{url or address}{hash_}", wait=".attlas-ready", reduced_motion="no-preference")

    return opened


def link_says(page: Any, field: str, value: str) -> None:
    """Wait until the hash has a field: it is not written while the map glides."""
    until(page, f"new URLSearchParams(location.hash.slice(1)).get({json.dumps(field)}) === {json.dumps(value)}")


def goes_to(page: Any, row: float, column: float, near: float) -> None:
    """Wait until the map is there: it glides, and it stops at the edges of the matrix."""
    page.wait_for_function(
        """([row, column, near]) => {
          const found = new URLSearchParams(location.hash.slice(1));
          return Math.abs(found.get("r") - row) < near && Math.abs(found.get("c") - column) < near;
        }""",
        arg=[row, column, near],
    )


def told(page: Any) -> list[float]:
    """Weights of the list beside the text, as their titles give them."""
    titles = [button.get_attribute("title") for button in page.locator(".largest button").all()]
    return [number(re.search(r"Weight (.*) ·", title)[1]) for title in titles]


# ---------------------------------------------------------------------------------------------------------- heads


def marks(page: Any) -> list[str]:
    return page.locator(".thumb:not(.rollout) .thumb-mark").all_inner_texts()


def entropies(atlas: Atlas) -> dict[str, float]:
    mean = {at: stats.entropy(atlas[at])[0].mean(-1) for at in range(LAYERS)}
    return {f"{at}·{head}": float(mean[at][head]) for at in range(LAYERS) for head in range(HEADS)}


def test_heads_sort_and_filter_by_a_statistic(open_page: Any, atlas: Atlas) -> None:
    page = open_page()
    until(page, "document.querySelectorAll('.thumb.drawn:not(.rollout)').length === 6")
    page.wait_for_selector("[aria-label=Statistic] option[value=entropy]", state="attached")
    assert marks(page) == ["0·0", "0·1", "0·2", "1·0", "1·1", "1·2"]
    page.select_option("[aria-label=Statistic]", "entropy")
    page.select_option("[aria-label=Order]", "-")
    expected = entropies(atlas)
    until(page, "document.querySelector('.thumb-value').textContent !== ''")
    assert marks(page) == sorted(expected, key=lambda mark: -expected[mark])
    shown = [float(text) for text in page.locator(".thumb-value").all_inner_texts()]
    assert shown == pytest.approx(sorted(expected.values(), reverse=True), abs=0.006)
    # Both handles by the keyboard: the smallest drops out, then the largest.
    low = page.get_by_role("slider", name="Heads whose statistic is within: from")
    low.focus()
    low.press("ArrowRight")
    assert page.locator(".heads-count").inner_text() == "5 of 6"
    high = page.get_by_role("slider", name="Heads whose statistic is within: to")
    high.focus()
    high.press("ArrowLeft")
    kept = sorted(expected, key=lambda mark: -expected[mark])[1:-1]
    assert marks(page) == kept
    found = state(page)
    again = open_page(f"#{urlsplit(page.url).fragment}")
    until(again, f"document.querySelectorAll('.thumb').length === {len(kept)}")
    assert marks(again) == kept
    assert state(again) == found
    page.get_by_role("button", name="show all").click()
    assert len(marks(page)) == 6


def test_thumbnails_show_the_exact_weights(open_page: Any, atlas: Atlas) -> None:
    page = open_page("#p=max&pal=viridis")
    until(page, "document.querySelectorAll('.thumb.drawn:not(.rollout)').length === 6")
    found = page.evaluate(
        """async () => {
          const [canvas] = document.querySelectorAll(".thumb canvas");
          const { width } = canvas;
          return [width, [...canvas.getContext("2d").getImageData(0, 0, width, width).data]];
        }"""
    )
    width, pixels = found[0], np.array(found[1]).reshape(found[0], found[0], 4)
    A = atlas[0][0, 0].to_dense().numpy()
    edges = np.arange(width) * N // width
    blocks = np.maximum.reduceat(np.maximum.reduceat(A, edges, 0), edges, 1)
    shown = pixels[..., 3] > 0
    assert (shown == (blocks > 0)).mean() > 0.995  # blocks on the diagonal hold one allowed cell or none
    light = pixels[..., :3] @ np.array([0.2126, 0.7152, 0.0722])
    both = shown & (blocks > 2**-12)
    assert np.corrcoef(light[both], np.log2(blocks[both]))[0, 1] > 0.98


def test_a_second_head_opens_by_mouse_and_keyboard(open_page: Any) -> None:
    page = open_page()
    page.locator(".thumb").nth(4).click()
    link_says(page, "e", "1")
    assert page.locator(".thumb").nth(4).get_attribute("aria-pressed") == "true"
    page.locator(".thumb").nth(2).click(modifiers=["Shift"])
    found = state(page)
    assert (found["s"], found["m"]) == ("0.2", "side")
    assert "second head" in page.locator(".thumb").nth(2).get_attribute("aria-label")
    page.locator(".thumb").nth(2).click(modifiers=["Shift"])
    assert "s" not in state(page)
    page.locator(".thumb").nth(4).focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Shift+Enter")
    link_says(page, "s", "1.0")
    page.keyboard.press("ArrowUp")  # the mean of the layer
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert "e" not in state(page)  # layer 0 again
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("button", name="log-ratio").click()
    link_says(page, "m", "ratio")
    before = state(page)
    page.get_by_role("button", name="Swap the two heads").click()
    after = state(page)
    assert (after["e"], after.get("h", "0")) == tuple(before["s"].split("."))
    assert after["s"] == f"{before.get('e', '0')}.{before.get('h', '0')}"
    page.get_by_role("combobox", name="Second head").select_option("")
    assert "s" not in state(page)


# ----------------------------------------------------------------------------------------------------------- text


def test_a_token_pins_its_row_and_the_list_is_exact(open_page: Any, atlas: Atlas) -> None:
    page = open_page("#e=1&h=2&r=200&c=200&z=4")
    page.locator('.t[data-position="100"]').click()
    until(page, "document.querySelectorAll('.cell-facts dt').length > 0")  # they come after the list
    A = atlas[1][0, 2]
    best = A[100].topk(8)
    key = int(best.indices[0])
    link_says(page, "pin", f"100.{key}")
    assert told(page) == pytest.approx(best.values.tolist(), rel=1e-4)
    assert [int(text) for text in page.locator(".largest .place").all_inner_texts()] == best.indices.tolist()
    facts = dict(
        zip(
            page.locator(".cell-facts dt").all_inner_texts(),
            page.locator(".cell-facts dd").all_inner_texts(),
            strict=True,
        )
    )
    assert number(facts["weight"]) == pytest.approx(float(A[100, key]), rel=1e-3)
    assert number(facts["row entropy"]) == pytest.approx(float(stats.entropy(A)[100]), rel=6e-3)
    assert int(facts["rank"]) == 1
    # A click of the list moves the map to its cell; the map stops at the edges of the matrix.
    page.locator(".largest button").nth(3).click()
    goes_to(page, 100, int(best.indices[3]), 24)
    position = int(best.indices[3])
    page.wait_for_selector(f'.t.at-key[data-position="{position}"]')
    # The other way: who looks at the key.
    page.get_by_role("button", name="key ← queries").click()
    column = A[:, key].topk(8)
    until(page, f"document.querySelector('.largest .place').textContent === '{int(column.indices[0])}'")
    assert told(page) == pytest.approx(column.values.tolist(), rel=1e-4)
    page.get_by_role("button", name="more").click()
    until(page, "document.querySelectorAll('.largest button').length === 48")
    assert told(page) == pytest.approx(A[:, key].topk(48).values.tolist(), rel=1e-4)
    page.get_by_role("button", name="unpin").click()
    assert page.locator(".text-hint").is_visible()


def inks(page: Any) -> dict[int, tuple[float, str]]:
    """Share of full colour and classes of each token that is there."""
    found = page.evaluate(
        """() => [...document.querySelectorAll(".t")].map(
          (t) => [Number(t.dataset.position), t.style.background, t.className],
        )"""
    )
    share = {position: re.search(r"([\d.]+)%", background) for position, background, _ in found}
    return {
        position: (float(share[position][1]) / 100 if share[position] else 0.0, name) for position, _, name in found
    }


def test_tokens_are_coloured_in_proportion_to_their_weight(open_page: Any, atlas: Atlas) -> None:
    page = open_page("#e=0&h=1&pin=120.60&f=log")
    until(page, "document.querySelectorAll('.largest button').length === 8")
    row = atlas[0][0, 1, 120].double().numpy()
    shown = inks(page)
    for position in range(121):
        assert shown[position][0] == pytest.approx(row[position] / row.max(), abs=0.0051)  # paper at 0
    assert "own" in shown[120][1]
    assert all(shown[position] == (0.0, "t masked") for position in range(121, 128))
    page.get_by_role("button", name="log", exact=True).first.click()
    assert state(page)["ink"] == "log"
    low = -np.ceil(np.log2(N)) - 4
    shown = inks(page)
    for position in range(121):
        expected = max(0.0, (np.log2(row[position]) - low) / (np.log2(row.max()) - low))
        assert shown[position][0] == pytest.approx(expected, abs=0.0051)


def test_pointing_at_a_token_shows_its_row_at_once(open_page: Any, atlas: Atlas) -> None:
    page = open_page("#e=1&h=2")
    page.locator('.t[data-position="100"]').hover()
    best = atlas[1][0, 2, 100].topk(8)
    until(page, f"document.querySelector('.largest .place')?.textContent === '{int(best.indices[0])}'")
    assert told(page) == pytest.approx(best.values.tolist(), rel=1e-4)
    row = atlas[1][0, 2, 100]
    assert inks(page)[50][0] == pytest.approx(float(row[50] / row.max()), abs=0.0051)
    assert "pin" not in state(page)
    page.locator(".largest button").nth(2).hover()  # on the way to the list the row stays
    assert told(page) == pytest.approx(best.values.tolist(), rel=1e-4)


def test_subject_list_and_colours_change_together(browse: Any, address: str, atlas: Atlas) -> None:
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    options = {"routes": {"**/row?*": hold}, "expected": "status of 409"}
    page = browse(f"{address}#e=1&h=2", wait=".attlas-ready", **options)
    page.evaluate(
        """() => {
          window.seen = new Set();
          const part = document.querySelector(".slot-text");
          const all = (name, of) => [...part.querySelectorAll(name)].map(of).join();
          const texts = (name) => all(name, (each) => each.textContent.trim());
          const owns = () => all(".t.own", (each) => each.dataset.position);
          const look = () => window.seen.add([texts(".subject .place"), owns(), texts(".largest .place")].join("|"));
          new MutationObserver(look).observe(part, { subtree: true, childList: true, attributes: true });
        }"""
    )
    places = {i: ",".join(map(str, atlas[1][0, 2, i].topk(8).indices.tolist())) for i in (75, 80)}
    for query in places:
        with page.expect_request("**/row?*"):
            page.locator(f'.t[data-position="{query}"]').hover()
        page.wait_for_timeout(100)  # a slow answer: the pointer is at one token, the list of another
        held.pop().continue_()
        until(page, f"document.querySelector('.subject .place')?.textContent.trim() === '{query}'")
        until(page, "document.querySelector('.loading') === null")
    whole = {f"{query}|{query}|{shown}" for query, shown in places.items()}
    assert set(page.evaluate("[...window.seen]")) <= {"||", "75||", *whole}
    # Where the row cannot be had, none is shown.
    with page.expect_request("**/row?*"):
        page.locator('.t[data-position="90"]').hover()
    page.wait_for_timeout(100)
    held.pop().fulfill(status=409, json={"error": "no such row"})
    page.get_by_text("no such row.").wait_for()
    assert page.locator(".subject .place").inner_text().strip() == "90"
    assert page.locator(".largest li, .t.own").count() == 0
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    until(page, "!document.querySelector('.text-hint').hidden")


def test_any_script_and_whitespace_is_readable_and_the_text_stays_where_it_is(open_page: Any) -> None:
    page = open_page()
    flow = page.locator(".flow")
    page.wait_for_selector('.t[data-position="20"]')
    shown = flow.inner_text()
    for word in ("🦊", "日本", "</script>", "<b>", "&amp;", " return", "↵", "⇥"):
        assert word in shown
    assert page.locator(".flow b:not(.joined)").count() == 0
    page.locator('.t[data-position="13"]').hover()  # the crosshair of the map follows
    assert "at-key" in page.locator('.t[data-position="13"]').get_attribute("class")
    token = page.locator('.t[data-position="40"]')
    before = token.bounding_box()
    token.click()
    until(page, "document.querySelectorAll('.cell-facts dd').length > 4")
    page.wait_for_timeout(300)
    assert token.bounding_box() == before
    assert "own" in token.get_attribute("class")


def test_a_hundred_thousand_tokens_scroll_like_a_hundred(browse: Any) -> None:
    n = 100_000
    A = attlas.attend(torch.randn(1, 1, 8, 4), torch.randn(1, 1, n, 4), mask=attlas.Causal())
    words = [f" w{i}" if i % 9 else "\n" for i in range(n)]
    with served(A, tokens=words) as url:
        page = browse(url, wait=".t")
        page.locator(".t").nth(3).click()
        page.get_by_label("Search: token text").fill("w99991")
        until(page, "document.querySelector('.search-result').textContent === '1 of 1'")
        page.wait_for_selector('.t.found[data-position="99991"]')
        box, frame = page.locator('.t[data-position="99991"]').bounding_box(), page.locator(".flow").bounding_box()
        assert frame["y"] <= box["y"] <= frame["y"] + frame["height"]
        assert page.locator(".t").count() < 4000
        # Processor time of the page's thread, which other programs on this machine do not change.
        devtools = page.context.new_cdp_session(page)
        devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

        def busy() -> float:
            found = devtools.send("Performance.getMetrics")["metrics"]
            return next(metric["value"] for metric in found if metric["name"] == "TaskDuration")

        before = busy()
        page.evaluate(
            """async () => {
              const flow = document.querySelector(".flow");
              for (let step = 0; step < 40; step++) {
                flow.scrollTop = (flow.scrollHeight * step) / 40;
                await new Promise(requestAnimationFrame);
              }
            }"""
        )
        assert (busy() - before) / 40 < 0.1  # seconds for each jump to another part of the text
        assert page.locator(".t").count() < 4000
        browse.close()


# --------------------------------------------------------------------------------------------------------- search


def test_search_by_text_range_and_cell(open_page: Any, atlas: Atlas) -> None:
    page = open_page("#r=200&c=0&z=4")
    page.keyboard.press("/")
    box = page.get_by_label("Search: token text")
    assert box.evaluate("(input) => input === document.activeElement")
    page.keyboard.type("日本")
    total = sum("日本" in token for token in TOKENS)
    until(page, f"document.querySelector('.search-result').textContent === '1 of {total}'")
    first = TOKENS.index("日本")
    goes_to(page, first, int(atlas[0][0, 0, first].argmax()), 24)
    page.keyboard.press("Enter")
    until(page, f"document.querySelector('.search-result').textContent === '2 of {total}'")
    page.get_by_role("button", name="Previous match").click()
    page.get_by_role("button", name="Previous match").click()
    until(page, f"document.querySelector('.search-result').textContent === '{total} of {total}'")
    page.wait_for_selector(".t.found")
    box.fill("120,45")
    box.press("Enter")
    goes_to(page, 120, 45, 2)
    link_says(page, "pin", "120.45")
    box.fill("100-150")
    box.press("Enter")
    goes_to(page, 125.5, 125.5, 2)
    for typed, said in [
        ("300,4", "Queries stand at 0 to 299, not at 300."),
        ("4,999", "Keys stand at 0 to 299, not at 999."),
        ("500-600", "The matrix covers positions 0 to 299."),
        ("60-50", "A range runs upwards: 50-60."),
        ("zebra", "no match"),
    ]:
        box.fill(typed)
        box.press("Enter")
        until(page, f"document.querySelector('.search-result').textContent === {json.dumps(said)}")
    box.press("Escape")
    assert box.input_value() == ""


# ----------------------------------------------------------------------------------------------------- colour bar


def test_the_colour_bar_by_mouse_and_keyboard(open_page: Any) -> None:
    page = open_page()
    low = page.get_by_role("slider", name="Colour range: lowest weight")
    begun = float(low.get_attribute("aria-valuenow"))
    low.press("ArrowRight")
    assert float(state(page)["lo"]) == begun + 0.5
    low.press("PageDown")
    assert float(state(page)["lo"]) == begun - 4.5
    high = page.get_by_role("slider", name="Colour range: highest weight")
    at = high.bounding_box()
    page.mouse.move(at["x"] + at["width"] / 2, at["y"] + at["height"] / 2)
    page.mouse.down()
    page.mouse.move(at["x"] - 60, at["y"] + 5, steps=4)
    page.mouse.up()
    dragged = float(state(page)["hi"])
    assert -8 < dragged < -0.5
    assert "weight" in high.get_attribute("aria-valuetext")
    page.get_by_role("button", name="reset").click()
    assert float(low.get_attribute("aria-valuenow")) == begun
    page.get_by_role("button", name="linear").click()
    found = state(page)
    assert (found["f"], found["lo"], found["hi"]) == ("linear", "0", "1")
    page.get_by_role("button", name="mean", exact=True).first.click()
    page.get_by_role("combobox", name="Palette").select_option("magma")
    page.get_by_role("checkbox", name="without first key").check()
    found = state(page)
    assert (found["pal"], found["v"]) == ("magma", "nosink")
    assert page.locator(".colourbar").get_by_text("renormalised").is_visible()


def test_fit_takes_the_largest_weight_in_view(open_page: Any, atlas: Atlas) -> None:
    page = open_page("#r=250&c=30&z=4&f=linear")
    page.get_by_role("button", name="fit", exact=True).click()
    until(page, "document.querySelector('.unseen[aria-live]').textContent.startsWith('The largest weight in view')")
    high = float(state(page)["hi"])
    weights = atlas[0][0, 0].to_dense()
    assert np.isclose(weights.numpy(), high, rtol=1e-5, atol=1e-6).any()
    assert high <= float(weights.max())


# --------------------------------------------------------------------------------------------------------- export


def test_table_and_vector_picture_hold_the_exact_weights_of_every_cell_in_view(open_page: Any, atlas: Atlas) -> None:
    page = open_page("#e=1&h=1&r=150&c=140&z=4")
    name, body = saved(page, "csv")
    assert name == "panels-b-text-b-1-1.csv"
    rows = list(csv.DictReader(io.StringIO(body.decode())))
    A = atlas[1][0, 1].to_dense().numpy()
    assert len(rows) > 500
    for row in rows:
        i, j = int(row["query"]), int(row["key"])
        assert np.float32(row["weight"]) == pytest.approx(A[i, j], rel=1e-5, abs=1e-37)
        assert json.loads(row["query_token"]) == SHOWN[i]
        assert json.loads(row["key_token"]) == SHOWN[j]
        assert row["key_token"][0] == '"'  # which no spreadsheet runs
    places = {(int(row["query"]), int(row["key"])) for row in rows}
    assert len(places) == len(rows)
    assert (150, 140) in places
    name, body = saved(page, "svg")
    assert name == "panels-b-text-b-1-1.svg"
    svg = ET.fromstring(body)  # well formed, whatever the tokens are
    space = "{http://www.w3.org/2000/svg}"
    paths = {path.get("fill"): path.get("d") for path in svg.iter(f"{space}path")}
    cells = {}
    for colour, path in paths.items():
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", path):
            cells |= {(int(y), int(x) + at): colour for at in range(int(width))}
    first = min(i for i, _ in places), min(j for _, j in places)
    allowed = [row for row in rows if int(row["key"]) <= int(row["query"])]
    assert len(cells) == len(allowed) > 500
    # Equal colours are equal weights to within a step of the scale, and darker is more.
    light = {colour: sum(map(int, re.findall(r"\d+", colour))) for colour in paths}
    order = sorted(allowed, key=lambda row: float(row["weight"]))
    shades = [light[cells[int(row["query"]) - first[0], int(row["key"]) - first[1]]] for row in order]
    assert shades == sorted(shades, reverse=True)
    texts = [text.text for text in svg.iter(f"{space}text")]
    assert "Layer 1, head 1" in texts
    assert "attention weight" in texts


def test_a_whole_map_is_saved_as_pdf_and_as_svg(open_page: Any) -> None:
    page = open_page("#e=1&h=1")  # 300 × 300 cells in view: more than are drawn one by one
    name, text = saved(page, "svg")
    root = ET.fromstring(text)
    (image,) = root
    assert name.endswith(".svg")
    assert image.get("href").startswith("data:image/png;base64,")
    page.get_by_role("button", name="Export").click()
    page.get_by_role("button", name="PDF", exact=True).click()
    page.keyboard.press("Escape")
    name, body = saved(page, "png")
    assert name == "panels-b-text-b-1-1.pdf"
    assert body.startswith(b"%PDF-1.4")
    (start,) = re.findall(rb"startxref\n(\d+)\n%%EOF\n$", body)
    assert body[int(start) :].startswith(b"xref\n0 6\n")
    for object_, place in enumerate(re.findall(rb"(\d{10}) 00000 n ", body), 1):
        assert body[int(place) :].startswith(b"%d 0 obj" % object_)
    width, height = (int(re.search(rb"/%s (\d+)" % side, body)[1]) for side in (b"Width", b"Height"))
    stream = body[body.index(b"/FlateDecode") :].split(b"stream\n", 1)[1].split(b"\nendstream\nendobj")[0]
    pixels = zlib.decompress(stream)
    assert len(pixels) == 3 * width * height
    assert float(root.get("width")) == width / 2
    assert len(set(pixels[3 * width * (height // 2) : 3 * width * (height // 2 + 1)])) > 20  # a row of the map


def test_a_copied_link_opens_the_map_and_nothing_over_it(open_page: Any, browse: Any) -> None:
    page = open_page("#e=1&h=2&pin=20.3&pal=magma&t=dark&lang=zh&a=heads")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".slot-export button").click()
    page.locator("[data-export=link]").click()
    until(page, "document.querySelector('.export-line').textContent === '链接已复制。'")
    link = page.evaluate("navigator.clipboard.readText()")
    address, _, place = link.partition("#")
    found = {name: values[0] for name, values in parse_qs(place).items()}
    assert address == page.url.partition("#")[0]
    assert {"e": "1", "h": "2", "pin": "20.3", "pal": "magma"}.items() <= found.items()
    assert not {"panel", "t", "lang", "a"} & found.keys()  # what belongs to the one who copied it
    other = browse(link)
    assert other.locator("dialog[open]").count() == 0
    assert other.get_by_role("button", name="Text", exact=True).get_attribute("aria-expanded") == "true"
    assert state(other)["pin"] == "20.3"


def test_the_offline_page_shows_the_same_without_a_server(open_page: Any, atlas: Atlas, tmp_path: Path) -> None:
    page = open_page("#e=1&h=2&pin=200.30&pal=magma&s=0.1&m=side")
    name, body = saved(page, "html")
    file = tmp_path / name
    file.write_bytes(body)
    assert len(body) < 8_000_000
    offline = open_page(url=file.as_uri())
    until(offline, "document.querySelectorAll('.largest button').length === 8")
    A = atlas[1][0, 2]
    assert told(offline) == pytest.approx(A[200].topk(8).values.tolist(), rel=1e-4)
    assert offline.locator(".offline-note").inner_text() == (
        "Offline copy of 2 of 6 heads; every cell; weights exact in float32; blocks as maxima, with the first key."
    )
    assert offline.get_by_role("combobox", name="Palette").input_value() == "magma"
    offline.locator('.t[data-position="100"]').click()
    best = A[100].topk(8)
    until(offline, f"document.querySelector('.largest .place').textContent === '{int(best.indices[0])}'")
    assert told(offline) == pytest.approx(best.values.tolist(), rel=1e-4)
    offline.get_by_label("Search: token text").fill("🦊")
    total = sum("🦊" in token for token in TOKENS)
    until(offline, f"document.querySelector('.search-result').textContent.endsWith('of {total}')")
    away = offline.locator(".thumb").nth(4)  # a head that is not in the file
    assert "not in this file" in away.get_attribute("title")
    assert away.get_attribute("aria-disabled") == "true"
    away.click(force=True)
    offline.keyboard.press("[")  # goes through what is there
    link_says(offline, "h", "1")
    assert offline.locator('option:text-is("head 0")').first.is_disabled()
    assert offline.get_by_role("button", name="mean", exact=True).last.is_disabled()
    assert offline.get_by_role("checkbox", name="without first key").is_disabled()
    offline.keyboard.press("?")
    assert "computed from queries and keys when the page was written" in offline.locator("dialog[open]").inner_text()
    offline.keyboard.press("Escape")
    # A page that was saved from the saved page opens too.
    offline.locator(".thumb").nth(5).click()
    _, again = saved(offline, "html")
    second = tmp_path / "again.html"
    second.write_bytes(again)
    copy = open_page(url=second.as_uri())
    until(copy, "document.querySelectorAll('.largest button').length === 8")
    assert told(copy) == pytest.approx(best.values.tolist(), rel=1e-4)


# --------------------------------------------------------------------------------------------- help, keys, access


def test_help_keeps_the_focus_and_closes(open_page: Any) -> None:
    page = open_page()
    page.keyboard.press("?")
    dialog = page.locator("dialog[open]")
    assert "Keys and numbers" in dialog.inner_text()
    assert "exact" in dialog.inner_text()
    for _ in range(5):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
    place = state(page)
    page.keyboard.press("ArrowLeft")
    assert state(page) == place  # the map under it does not move
    page.keyboard.press("Escape")
    assert dialog.count() == 0
    assert "panel" not in state(page)


def test_the_keyboard_alone_reaches_everything(open_page: Any, atlas: Atlas) -> None:
    page = open_page()
    page.wait_for_selector(".thumb.drawn")
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(
            page.evaluate(
                """(() => {
                  const on = document.activeElement;
                  return on.getAttribute("aria-label") || on.title || on.textContent;
                })()"""
            )
        )
    words = " | ".join(filter(None, seen))
    # The tools are one stop; arrows go along the row, whatever is hidden.
    inside = "[...document.querySelectorAll('.tools button')].filter((b) => !b.closest('.compare-box'))"
    stops = page.evaluate(f"{inside}.filter((b) => b.tabIndex === 0).length")
    assert stops == 1
    for part in (".heads-grid", ".headmap-grid"):  # so are all heads, and the map of all heads
        assert page.locator(f"{part} button").count() > 6
        assert page.locator(f"{part} button:not([tabindex='-1'])").count() == 1, part
    page.get_by_role("button", name="Compare", exact=True).focus()
    for name in ("Export", "Heads", "Text"):
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.textContent") == name
        words += f" | {name}"
    page.keyboard.press("End")
    words += f" | {page.evaluate('document.activeElement.ariaLabel || document.activeElement.title')}"
    for part in (
        *("Compare", "Export", "Help", "Search: token text", "Statistic", "Order", "Layer 0, head 0", "Text"),
        *("Colour range: lowest weight", "log", "Palette", "query → keys"),
    ):
        assert part in words
    page.locator(".flow").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    link_says(page, "pin", f"3.{int(atlas[0][0, 0, 3].argmax())}")
    page.locator(".largest button").first.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("]")
    link_says(page, "h", "1")


def test_axe_finds_no_serious_fault(browse: Any, address: str, axe: str) -> None:
    page = browse(address, bypass_csp=True)
    views = [
        ("pin=200.100&sort=-entropy", (1280, 800), "light"),
        ("pin=200.100&v=nosink", (1280, 800), "dark"),
        ("panel=help", (1280, 800), "light"),
        ("panel=export", (1280, 800), "dark"),
        ("panel=compare&s=0.1&m=ratio", (1280, 800), "light"),
        ("panel=heads", (390, 844), "light"),
        ("pin=200.100&panel=text", (390, 844), "dark"),
        ("pin=200.100&a=grid", (1280, 800), "dark"),
        ("panel=bookmarks", (390, 844), "light"),
        ("pin=200.180&w=lines&z=5&r=200&c=200", (768, 1024), "light"),
    ]
    assert serious_faults(page, axe, views) == {}
    # All of it lies in a landmark, and the page has a heading at every width.
    page.evaluate("(hash) => { location.hash = hash; }", "pin=200.100&a=both&w=map")
    for width in (390, 768, 1024, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        found = page.evaluate("axe.run(document, { runOnly: ['region', 'page-has-heading-one', 'landmark-one-main'] })")
        assert [(fault["id"], fault["nodes"][0]["html"]) for fault in found["violations"]] == [], width


def test_hundreds_of_heads_fetch_what_is_in_view(browse: Any) -> None:
    asked: list[str] = []

    def count(route: Any) -> None:
        asked.append(route.request.url)
        route.continue_()

    with served(atlas_of(*[random_matrix(24, heads=32)] * 20)) as url:
        page = browse(url, wait=".thumb.drawn", routes={"**/thumbnail*": count})
        page.wait_for_timeout(1500)
        assert page.locator(".thumb:not(.rollout)").count() == 640
        assert 0 < len(asked) < 200
        page.locator(".heads-scroll").evaluate("(box) => box.scrollTo(0, box.scrollHeight)")
        until(page, "[...document.querySelectorAll('.thumb')].at(-1).classList.contains('drawn')")
        assert len(asked) < 400
        browse.close()


# --------------------------------------------------------------------------------------------------------- widget


def test_the_widget_shows_the_same_page_by_messages(browse: Any, atlas: Atlas, comms: list[Any]) -> None:
    from attlas.view.widget import Viewer

    state = {"entry": 1, "head": 2, "pin": {"i": 200, "j": 30}}
    viewer = Viewer(Service(atlas), height=700, state=state, still="<b>a picture</b>")
    page = browse("about:blank", 1100, wait="")
    page.expose_function("toKernel", viewer.comm.page_says)
    still = f"<div class='{viewer.still_class}'>{viewer._still}</div>"
    page.set_content(f"<!doctype html><title>cell</title><div class='cell'></div>{still}")
    page.add_style_tag(content=viewer._css)
    page.evaluate(
        """async ([code, traits]) => {
          const listeners = new Set();
          window.model = {
            get: (name) => traits[name],
            on: (name, run) => name === "msg:custom" && listeners.add(run),
            off: (name, run) => listeners.delete(run),
            send: (content) => window.toKernel(content),
          };
          window.deliver = (content, text) => {
            const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
            for (const run of listeners) run(content, [new DataView(bytes.buffer)]);
          };
          const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
          const { default: widget } = await import(url);
          window.leave = await widget.render({ model: window.model, el: document.querySelector(".cell") });
        }""",
        [viewer._esm, {name: getattr(viewer, name) for name in ("initial", "height", "still_class")}],
    )
    # Where no kernel answers, as in an exported notebook, the picture stands for the page.
    assert page.get_by_text("a picture").is_visible()
    assert page.get_by_text("Opening the atlas").is_visible()
    assert page.locator(".attlas").bounding_box()["height"] == 48

    told_already = 0

    def pump(condition: str) -> None:
        nonlocal told_already
        for _ in range(400):
            for content, buffers in viewer.comm.answers()[told_already:]:
                told_already += 1
                page.evaluate(
                    "([content, text]) => window.deliver(content, text)",
                    [content, base64.b64encode(buffers[0]).decode()],
                )
            if page.evaluate(f"() => ({condition})"):
                return
            page.wait_for_timeout(25)
        raise AssertionError(condition)

    pump("document.querySelectorAll('.largest button').length === 8")
    assert told(page) == pytest.approx(atlas[1][0, 2, 200].topk(8).values.tolist(), rel=1e-4)
    pump("document.querySelectorAll('.thumb.drawn:not(.rollout)').length === 6")
    assert page.locator(".attlas").bounding_box()["height"] == 700
    assert not page.get_by_text("a picture").is_visible()
    page.locator('.t[data-position="100"]').click()
    best = atlas[1][0, 2, 100].topk(8)
    pump(f"document.querySelector('.largest .place').textContent === '{int(best.indices[0])}'")
    assert told(page) == pytest.approx(best.values.tolist(), rel=1e-4)
    assert page.evaluate("location.hash") == ""  # the address of the notebook is the notebook's
    page.evaluate("window.leave()")
    assert page.locator(".attlas").count() == 0
    assert page.get_by_text("a picture").is_visible()
    viewer.close()
