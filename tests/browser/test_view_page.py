"""What the viewer's page does as a whole: it fits, it keeps still, and everything on it speaks of the same thing."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.atlases import atlas_of, random_matrix
from tests.browser.conftest import CUT, READY, latin_words, number, saved, served, state, until

import attlas
from attlas.recording.atlas import Atlas

pytestmark = pytest.mark.browser

KEPT = ".top button, .foot button, .foot select, .foot input, .stage"
PLACES = f"""() => [...document.querySelectorAll("{KEPT}")].map((part) => {{
  const {{ left, top, width, height }} = part.getBoundingClientRect();
  return [part.textContent || part.className, left, top, width, height];
}})"""


@pytest.fixture
def show(browse: Any) -> Iterator[Callable[..., Any]]:
    """Serve something, once, and open a page on it."""
    addresses: dict[int, str] = {}
    with ExitStack() as stack:

        def opened(shown: Any, hash_: str = "", **options: Any) -> Any:
            if id(shown) not in addresses:
                addresses[id(shown)] = stack.enter_context(served(shown))
            return browse(f"{addresses[id(shown)]}#{hash_}", **options)

        yield opened
        browse.close()  # before the servers


@pytest.fixture(scope="module")
def small() -> Atlas:
    return two_layers(150)


def two_layers(n: int) -> Atlas:
    matrices = [random_matrix(n, seed=seed, spread=2.0) for seed in (0, 1)]
    return atlas_of(*matrices, tokens=[f" w{i}" for i in range(n)])


@pytest.fixture(scope="module")
def large() -> attlas.AttentionMatrix:
    return random_matrix(3000, heads=1, spread=2.5)


# ------------------------------------------------------------------------------------------------------- layout


SIZES = ((390, 844), (720, 700), (768, 1024), (833, 700), (880, 700), (928, 700), (1024, 768), (1100, 700),
         (1280, 800), (1920, 1080))  # fmt: skip


def test_every_view_fits_every_window(show: Callable[..., Any], small: Atlas) -> None:
    page = show(small, "pin=100.50")
    for view in ("", "a=grid&sort=-entropy", "w=lines&z=4&r=90&c=80", "a=both&w=map&panel=heads&hm=agree"):
        page.evaluate(f"location.hash = 'pin=100.50&{view}'")
        for width, height in SIZES:
            page.set_viewport_size({"width": width, "height": height})
            for _ in range(20):  # what stands on the map takes its place with the next frame
                page.wait_for_timeout(80)
                cut = page.evaluate(CUT)
                if not cut:
                    break
            assert cut == [], (view, width)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (view, width)
            if not view:
                box = page.locator(".slot-text").bounding_box()
                assert width < 720 or box["x"] + box["width"] <= width + 0.5
                assert page.locator(".stage").bounding_box()["width"] > 250
    chinese = show(small, "pin=100.50&lang=zh", color_scheme="dark")
    until(chinese, "document.querySelector('.attlas').dataset.theme === 'dark'")
    for width, height in ((390, 844), (768, 1024), (1280, 800), (1920, 1080)):
        chinese.set_viewport_size({"width": width, "height": height})
        chinese.wait_for_timeout(160)
        assert chinese.evaluate(CUT) == [], width
        assert chinese.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [833, 1280])
def test_controls_stay_where_they_are(show: Callable[..., Any], large: Any, width: int) -> None:
    page = show(large, "z=0&r=1500&c=1400", width=width)
    before = page.evaluate(PLACES)
    for change in (
        "z=-1&r=1500&c=1400",
        "z=4&r=1500&c=1400",
        "z=0&r=1500&c=1400&v=nosink",
        "z=-2&r=1500&c=1400&p=mean",
    ):
        page.evaluate(f"location.hash = {change!r}")
        page.wait_for_timeout(120)
        page.wait_for_selector(READY)
        assert page.evaluate(PLACES) == before, change
    page.evaluate("document.querySelector('.status-progress').hidden = false")
    page.evaluate(
        "document.querySelector('.status-progress').textContent = 'computing the overview: 12 %, 4 min left '.repeat(9)"
    )
    assert page.evaluate(PLACES) == before


# ---------------------------------------------------------------------------------------------- what is pointed at


def heard(page: Any) -> dict[str, Any]:
    """What the tooltip, the badges (by the state), the colour bar and its swatch say."""
    return page.evaluate(
        """() => ({
          tip: document.querySelector(".tip-weight").textContent,
          places: [...document.querySelectorAll(".tip .place")].map((place) => place.textContent),
          bar: document.querySelector(".bar-read").textContent,
          swatch: document.querySelector(".patch").style.background,
          badges: (window.written ?? []).slice(-2),
        })"""
    )


def test_a_block_and_its_largest_cell_are_what_everything_speaks_of(show: Callable[..., Any], large: Any) -> None:
    page = show(large, "z=-3&r=1500&c=1500&pal=viridis")
    page.evaluate(
        """() => {
          const real = CanvasRenderingContext2D.prototype.fillText;
          window.written = [];
          CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
            if (this.canvas.classList.contains("overlay")) window.written.push(text);
            return real.call(this, text, ...rest);
          };
        }"""
    )
    box = page.locator(".stage").bounding_box()
    dense = large[0, 0].to_dense().numpy()
    for dx, dy in ((-60, 40), (-111, 77), (-20, 90)):
        page.evaluate("window.written = []")
        page.mouse.move(box["x"] + box["width"] / 2 + dx, box["y"] + box["height"] / 2 + dy)
        until(page, "window.written.length >= 2")  # the crosshair and what goes with it are at this place
        first = heard(page)
        # Before the largest cell is known, badges and tooltip name the same block.
        if "–" in first["places"][0]:
            assert sorted(first["badges"]) == sorted(first["places"])
            assert number(first["tip"]) == pytest.approx(number(first["bar"]), rel=1e-2)
        until(page, "!document.querySelector('.tip .place').textContent.includes('–')")
        page.wait_for_timeout(80)
        then = heard(page)
        i, j = (int(place.replace(",", "")) for place in then["places"])
        rows, columns = slice(i - i % 8, i - i % 8 + 8), slice(j - j % 8, j - j % 8 + 8)
        assert dense[i, j] == dense[rows, columns].max()
        assert number(then["tip"]) == pytest.approx(float(dense[i, j]), rel=6e-3)  # three digits
        assert number(then["bar"]) == pytest.approx(float(dense[i, j]), rel=6e-3)
        assert sorted(page.evaluate("window.written.slice(-2)")) == sorted(then["places"])
        assert first["swatch"] == then["swatch"]  # the colour that is seen


def test_a_click_pins_the_same_cell_however_soon_it_comes(show: Callable[..., Any], large: Any) -> None:
    page = show(large, "z=-3&r=1500&c=1500")
    box = page.locator(".stage").bounding_box()
    at = box["x"] + box["width"] / 2 - 80, box["y"] + box["height"] / 2 + 60
    page.mouse.click(*at)  # before anything is known of the block
    until(page, "location.hash.includes('pin=')")
    early = state(page)["pin"]
    page.keyboard.press("Escape")  # lets go, wherever the pointer is
    until(page, "!location.hash.includes('pin=')")
    page.mouse.move(at[0] + 150, at[1] + 100)
    page.mouse.move(*at)
    until(page, "!document.querySelector('.tip .place').textContent.includes('–')")
    page.mouse.click(*at)
    until(page, "location.hash.includes('pin=')")
    assert state(page)["pin"] == early
    i, j = map(int, early.split("."))
    tile = large[0, 0, i - i % 8 : i - i % 8 + 8, j - j % 8 : j - j % 8 + 8]
    assert float(large[0, 0, i, j]) == pytest.approx(float(tile.max()), rel=1e-5)


def test_the_tooltip_is_never_cut_off(show: Callable[..., Any], small: Atlas) -> None:
    page = show(small, "z=5&r=100.5&c=60.5", width=1280)
    stage = page.locator(".stage").bounding_box()
    for x in range(int(stage["x"]) + 180, int(stage["x"] + stage["width"]) - 4, 23):
        page.mouse.move(x, stage["y"] + 0.7 * stage["height"])
        page.wait_for_timeout(30)
        tip = page.locator(".tip")
        if tip.is_visible():
            box = tip.bounding_box()
            assert box["x"] >= stage["x"] - 0.5
            assert box["x"] + box["width"] <= stage["x"] + stage["width"] + 0.5, x


@pytest.mark.parametrize("n", [300, 1500, 2049])
def test_a_key_is_drawn_where_it_is(show: Callable[..., Any], n: int) -> None:
    """All weight on one key, at sizes that no block divides: its line stands within a block of its place."""
    key = n * 5 // 8
    q, k = torch.zeros(n, 4), torch.zeros(n, 4)
    q[:, 0], k[key, 0] = 1.0, 60.0
    page = show(attlas.attend(q, k), "pal=grey&f=linear&lo=0&hi=1&t=light&a=none", width=900, height=760)
    # Polled: the picture comes in steps, and a busy machine shows the first of them for a while.
    page.wait_for_function(
        """async ([n, key]) => {
          const { computePanes, placePane } = await import(new URL("./map/geometry.js", document.baseURI).href);
          const hash = new URLSearchParams(location.hash.slice(1));
          const [row, column, zoom] = ["r", "c", "z"].map((name) => Number(hash.get(name)));
          const stage = document.querySelector(".stage");
          const [box] = computePanes(stage.clientWidth, stage.clientHeight, 2 ** zoom, { hasBand: false });
          const pane = placePane(box, { row, column, scale: 2 ** zoom, dpr: 1, m: n, n });
          const canvas = document.querySelector(".stage .base");
          const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
          copy.drawImage(canvas, 0, 0);
          const y = Math.floor(pane.Y(n / 2));
          const [x0, x1] = [Math.ceil(pane.X(0)) + 1, Math.floor(pane.X(n)) - 1];
          const { data } = copy.getImageData(x0, y, x1 - x0, 1);
          const dark = [...Array(x1 - x0).keys()].filter((x) => data[4 * x] < 128);
          const keys = dark.map((x) => pane.column(x0 + x + 0.5));
          const block = 2 ** Math.ceil(Math.log2(Math.max(1, 1 / 2 ** zoom)));
          return keys.length > 0 && keys.every((place) => Math.abs(place - key - 0.5) <= block);
        }""",
        arg=[n, key],
    )


# ------------------------------------------------------------------------------------------------------- search


def matched(page: Any, text: str) -> None:
    box = page.get_by_label("Search: token text")
    box.fill(text)
    box.press("Enter")


def test_a_match_is_pinned_and_its_weights_are_shown(show: Callable[..., Any], small: Atlas) -> None:
    page = show(small, "z=3&r=75&c=75")
    matched(page, "w7")  # 7, and 70 to 79
    best = [int(small[0][0, 0, query].argmax()) for query in range(150)]
    until(page, f"location.hash.includes('pin=70.{best[70]}')")  # the first one behind the left edge of the map
    until(page, f"document.querySelector('.largest .place')?.textContent === '{best[70]}'")
    page.keyboard.press("Enter")
    until(page, f"location.hash.includes('pin=71.{best[71]}')")
    page.keyboard.press("Shift+Enter")
    until(page, f"location.hash.includes('pin=70.{best[70]}')")
    # In a pinned row a match is a key, as long as the query sees it.
    page.evaluate("location.hash = 'z=3&r=75&c=30&pin=75.30'")
    page.wait_for_selector(READY)
    matched(page, "w")
    matched(page, "w7")
    until(page, "document.querySelector('.search-result').textContent === '1 of 11'")
    assert state(page)["pin"] == "75.30"  # key 7 is seen from query 75
    assert page.locator(".t.at-key").get_attribute("data-position") == "7"
    for _ in range(6):
        page.keyboard.press("Enter")
    assert state(page)["pin"] == "75.30"
    page.keyboard.press("Enter")  # key 76 is not
    until(page, f"location.hash.includes('pin=76.{best[76]}')")


def test_a_token_is_pinned_with_its_largest_weight(show: Callable[..., Any], small: Atlas) -> None:
    page = show(small, "e=1&h=1")
    page.locator(".t").nth(90).click()
    until(page, f"location.hash.includes('pin=90.{int(small[1][0, 1, 90].argmax())}')")
    page.locator(".t").nth(91).click()
    until(page, f"location.hash.includes('pin=91.{int(small[1][0, 1, 91].argmax())}')")
    page.get_by_role("button", name="key ← queries").click()
    page.locator(".t").nth(60).click()
    until(page, f"location.hash.includes('pin={int(small[1][0, 1, :, 60].argmax())}.60')")


def test_a_match_fills_the_map_with_its_cells(show: Callable[..., Any], large: Any) -> None:
    page = show(atlas_of(large, tokens=[f" w{i}" for i in range(3000)]), "z=-2&r=1500&c=1500")
    matched(page, "w1700")
    until(page, f"location.hash.includes('pin=1700.{int(large[0, 0, 1700].argmax())}')")
    until(page, "new URLSearchParams(location.hash.slice(1)).get('z') >= 3")
    box = page.locator(".bar-title").inner_text()
    assert box == "weight", "every cell is drawn, not the largest of a block"


def test_pointing_at_the_map_colours_the_text(show: Callable[..., Any], small: Atlas) -> None:
    page = show(small, "z=3&r=75&c=60")
    before = page.locator(".flow").evaluate("(part) => part.scrollTop")
    box = page.locator(".overlay").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.6)
    until(page, "document.querySelector('.subject')?.textContent.length > 0")
    query, key = (int(part.inner_text()) for part in page.locator(".tip .place").all()[:2])
    until(page, f"document.querySelector('.subject').textContent.includes('{query}')")
    best = small[0][0, 0, query].topk(8)
    until(page, f"document.querySelector('.largest .place')?.textContent === '{int(best.indices[0])}'")
    assert key <= query
    assert page.locator(".flow").evaluate("(part) => part.scrollTop") == before


def test_on_a_phone_ticks_stand_apart_and_the_search_can_be_read_beside_its_result(
    show: Callable[..., Any], small: Atlas
) -> None:
    page = show(small, "m=ratio&e2=1&h2=0&s=1.0", width=390, height=844)
    boxes = page.locator(".bar-axis span").evaluate_all(
        "(parts) => parts.map((part) => part.getBoundingClientRect()).map(({ left, right }) => [left, right])"
    )
    fit = page.locator(".bar-buttons").bounding_box()["x"]
    assert len(boxes) == 3
    assert all(a[1] < b[0] for a, b in pairwise([*boxes, [fit]]))
    before = page.locator(".stage").bounding_box()
    matched(page, "w7")
    page.wait_for_selector(".search-result:has-text('of 11')")
    assert page.locator(".search-input").bounding_box()["width"] > 150
    assert page.evaluate(CUT) == []
    assert page.locator(".stage").bounding_box() == before


def test_on_a_wide_page_the_tools_stand_in_one_row_and_not_on_the_map(show: Callable[..., Any], small: Atlas) -> None:
    page = show(small, "", width=1600, height=900)
    tops = page.locator(".map-tools > *:not([hidden])").evaluate_all("(parts) => parts.map((part) => part.offsetTop)")
    assert len(tops) > 2
    assert len({*tops}) == 1
    stage, tools = page.locator(".stage").bounding_box(), page.locator(".map-tools").bounding_box()
    assert tools["y"] + tools["height"] <= stage["y"] + 0.5


# ----------------------------------------------------------------------------------------------------- offline


def test_a_page_with_rounded_numbers_says_so_and_shows_what_is_right(show: Callable[..., Any], tmp_path: Any) -> None:
    n = 1100  # too many cells for exact weights of all
    A = random_matrix(n, seed=3, spread=2.0)
    page = show(A, "z=4&r=600.5&c=500.5&pin=600.500")
    _, body = saved(page, "html")
    file = tmp_path / "page.html"
    file.write_bytes(body)
    offline = page.context.new_page()
    offline.goto(f"{file.as_uri()}#z=4&r=600.5&c=500.5")
    offline.wait_for_selector(READY)
    assert "1 of 2 heads; every cell; blocks as maxima" in offline.locator(".offline-note").inner_text()
    offline.keyboard.press("?")
    words = offline.locator("dialog[open]").inner_text()
    assert "Most numbers are rounded" in words
    assert "Every number is exact" not in words
    offline.keyboard.press("Escape")
    stage = offline.locator(".stage")
    box = stage.bounding_box()
    for dx, dy in ((0, 40), (-40, 56), (-100, 16)):
        offline.mouse.move(box["x"] + box["width"] / 2 + dx, box["y"] + box["height"] / 2 + dy)
        offline.locator(".tip-more").wait_for()
        told = offline.locator(".tip-weight").inner_text()
        i, j = (int(place.replace(",", "")) for place in offline.locator(".tip .place").all_inner_texts())
        weight = float(A[0, 0, i, j])
        assert told.startswith("≈ ")
        assert len(re.sub(r"^0\.0*|\D", "", told.split("×")[0].split()[1])) <= 3
        assert number(told) == pytest.approx(weight, rel=6e-3)
        assert "largest" not in offline.locator(".tip-more").inner_text()  # a rank among rounded weights
    offline.close()


def test_a_table_has_both_heads(show: Callable[..., Any], small: Atlas) -> None:
    page = show(small, "z=4&r=100.5&c=50.5&s=1.1&m=side")
    _, body = saved(page, "csv")
    rows = [line.split(",") for line in body.decode().splitlines()]
    assert rows[0] == ["query", "key", "query_token", "key_token", "weight_0_0", "weight_1_1"]
    for query, key, _, _, first, second in rows[1::97]:
        assert np.float32(first) == pytest.approx(float(small[0][0, 0, int(query), int(key)]), rel=1e-5)
        assert np.float32(second) == pytest.approx(float(small[1][0, 1, int(query), int(key)]), rel=1e-5)


# -------------------------------------------------------------------------------------------- what a head does


def test_the_page_opens_at_the_most_telling_head_and_says_what_it_does(show: Callable[..., Any]) -> None:
    pytest.importorskip("transformers", reason="a model is recorded; transformers is in the extra `hf`")
    from attlas import models
    from attlas.cli.loading import load, tokenize

    loaded = load(models.path())
    ids = tokenize(loaded, "def attention(x):\n    return x + attention(x)\n" * 9, None)
    with attlas.record(loaded.model, tokens=loaded.tokenizer) as atlas, torch.no_grad():
        loaded.model(torch.as_tensor(ids).reshape(1, -1))
    page = show(atlas)
    page.wait_for_function("() => [...document.querySelectorAll('.thumb-kind')].every((kind) => kind.textContent)")
    rows = page.evaluate("fetch('./api/heads').then((answer) => answer.json())")
    assert rows["progress"] == 1
    page.close()
    telling = rows["telling"]
    strengths = {
        (row["entry"], row["head"]): row["values"].get(rows["kinds"][row["kinds"][0]]["measure"] or "", 0.0)
        for row in rows["rows"]
        if row["kinds"]  # rollouts have none
    }
    assert strengths[telling["entry"], telling["head"]] == max(strengths.values())
    page = show(atlas)  # now that the heads are known
    assert page.locator(".pick-layer").input_value() == str(telling["entry"])
    assert page.locator(".pick-head").input_value() == str(telling["head"])
    (row,) = (row for row in rows["rows"] if (row["entry"], row["head"]) == (telling["entry"], telling["head"]))
    says = page.locator(".says").inner_text()
    kind = rows["kinds"][row["kinds"][0]]
    assert says.startswith(f"Layer {telling['entry']}, head {telling['head']} {kind['headline']}\n")
    assert f"{100 * row['values'][kind['measure']]:.1f} % of its attention" in says
    assert page.locator(".thumb:not(.rollout) .thumb-kind").all_inner_texts() == [
        rows["kinds"][row["kinds"][0]]["short"] for row in rows["rows"] if row["kinds"]
    ]
    linked = show(atlas, "e=0&h=1&z=2&r=20&c=20")  # a link says where to begin
    assert linked.locator(".pick-head").input_value() == "1"
    assert not {"agreement", "agreement_2"} & {column["name"] for column in rows["columns"]}
    assert all(column["description"] for column in rows["columns"])


# -------------------------------------------------------------------------------------------------------- text


def test_the_text_breaks_where_it_breaks_and_nowhere_else(show: Callable[..., Any]) -> None:
    lines = ["def f( x )", " \n    ", "    return x * 2 ", "\n  # one_long_name and_another", " \n", "\n"]
    tokens = [part for line in lines * 60 for part in re.findall(r"\s*[a-z]{1,4}|\s*\S|\s+", line)]
    n = len(tokens)
    A = attlas.attend(torch.zeros(1, 1, n, 4), torch.zeros(1, 1, n, 4), mask=attlas.Causal())
    page = show(atlas_of(A, tokens=tokens), width=1600, height=1800)
    page.wait_for_selector('.t[data-position="400"]', state="attached")
    found = page.evaluate(
        """() => {
          const left = document.querySelector(".piece").getBoundingClientRect().left;
          return {
            tops: [...document.querySelectorAll(".t")].map((t) => {
              const boxes = [...t.getClientRects()].filter((box) => box.width > 0);
              return [Number(t.dataset.position), boxes[0]?.top, boxes.at(-1)?.top];
            }),
            places: [...document.querySelectorAll(".piece-place")].map((p) => p.getBoundingClientRect().right - left),
            starts: [...document.querySelectorAll(".piece-place + .t")].map((t) => Number(t.dataset.position)),
            text: document.querySelector(".flow").textContent,
          };
        }"""
    )
    tops = {position: (first, last) for position, first, last in found["tops"] if first is not None}
    assert len([start for start in found["starts"] if start]) >= 3
    for start in filter(None, found["starts"]):
        if start in tops and start - 1 in tops and "\n" not in tokens[start - 1] and "\n" not in tokens[start]:
            assert tops[start][0] == pytest.approx(tops[start - 1][1], abs=1)  # on the same line
    assert all(right < 0 for right in found["places"])  # numbers stand in the margin
    assert "return x" in found["text"]
    assert "2 ·↵" in found["text"] or "2·↵" in found["text"]


def test_without_a_text_there_is_no_empty_pane(show: Callable[..., Any], large: Any) -> None:
    page = show(large)
    assert not page.locator(".slot-text").is_visible()
    page.get_by_role("button", name="Text", exact=True).click()
    assert not page.locator(".flow").is_visible()
    page.evaluate("location.hash = 'z=3&r=1500&c=1400&pin=1500.1400&a=both'")
    until(page, "document.querySelectorAll('.largest button').length === 8")
    assert "1,500 1,500" not in page.locator(".subject").inner_text()


# ------------------------------------------------------------------------------------------------ small things


def test_a_comparison_shows_that_it_is_on(show: Callable[..., Any]) -> None:
    page = show(random_matrix(1024, spread=2.0), "z=-1&r=512&c=400&s=0.1&m=ratio")
    assert "on" in page.get_by_role("button", name="Compare").get_attribute("class").split()
    assert "divided by Layer 0, head 1" in page.locator(".says").inner_text()
    box = page.locator(".stage").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2 - 60, box["y"] + box["height"] / 2 + 90)
    page.get_by_text("first ÷ second =").wait_for()  # of blocks too
    first, second = (number(line) for line in page.locator(".tip-weight").all_inner_texts())
    said = number(page.get_by_text("first ÷ second =").inner_text().split("= ")[1])
    assert said == pytest.approx(first / second, rel=0.02)


def test_pictures_are_as_dense_as_asked_for(show: Callable[..., Any]) -> None:
    page = show(random_matrix(1024, spread=2.0), "z=-1&r=512&c=400")
    shape = page.locator(".stage").bounding_box()
    page.get_by_role("button", name="Export").click()
    for times in (1, 4):
        page.locator(".export-density").get_by_text(f"{times}×").click()
        with page.expect_download(timeout=60_000) as download:
            page.locator("[data-export=png]").click()
        data = Path(download.value.path()).read_bytes()
        width = int.from_bytes(data[16:20], "big")
        assert width == pytest.approx(times * (shape["width"] + 32), abs=times)


@pytest.mark.parametrize(("spread", "pool"), [(1.5, "mean"), (6.0, "max")])
def test_the_overview_is_pooled_so_that_it_shows_something(show: Callable[..., Any], spread: float, pool: str) -> None:
    """The largest weights of blocks of a broad head are dark everywhere; a sharp head has few cells to show."""
    page = show(atlas_of(random_matrix(1500, heads=1, seed=2, spread=spread)))
    # The thumbnail is the same picture, smaller.
    read = """async (pool) => {
      const url = `./api/thumbnail?entry=0&head=0&batch=0&variant=plain&size=112&pool=${pool}`;
      return String(new Uint16Array(await (await fetch(url)).arrayBuffer()));
    }"""
    suited, mean, most = (page.evaluate(read, each) for each in ("suited", "mean", "max"))
    assert mean != most
    assert suited == {"mean": mean, "max": most}[pool]
    assert page.locator(".bar-title").text_content() == f"{'largest' if pool == 'max' else 'mean'} of 4 × 4"
    assert state(page).get("p", "max") == pool
    page.evaluate("location.hash = 'p=max&z=3&r=300&c=200'")
    until(page, "document.querySelector('.bar-title').textContent === 'weight'")


# ------------------------------------------------------------------------------------------------ all heads at once


def shown_heads(page: Any) -> list[str]:
    return page.evaluate("[...document.querySelectorAll('.thumb .thumb-mark')].map((mark) => mark.textContent)")


def on_the_map_of_heads(page: Any) -> list[tuple[str, float]]:
    """Name and percentage of every head of the map of layers and heads, without those of rollouts."""
    labels = page.evaluate("[...document.querySelectorAll('.headmap-grid button')].map((one) => one.ariaLabel)")
    heads = (text for text in labels if not text.startswith("Rollout"))
    return [(text.split(":")[0], float(text.split(": ")[1].strip("< %")) / 100) for text in heads]


def test_a_pinned_pair_is_weighed_by_every_head(show: Callable[..., Any], small: Atlas) -> None:
    page = show(small, "pin=100.50")
    until(page, "document.querySelector('.headmap-says').textContent.includes('%')")
    weights = [float(entry.matrix[0, head, 100, 50]) for entry in small.entries for head in range(2)]
    found = on_the_map_of_heads(page)
    assert [name for name, _ in found] == [f"Layer {layer}, head {head}" for layer in (0, 1) for head in (0, 1)]
    assert [weight for _, weight in found] == pytest.approx(weights, rel=0.05, abs=1e-5)
    best = max(range(4), key=lambda at: weights[at])
    says = page.locator(".headmap-says").text_content()
    assert says.startswith(f"Weight that query 100 gives to key 50: {best // 2}·{best % 2} ")
    # Another head is a click away, by the keyboard too; the pair stays.
    page.locator(".headmap-grid button[aria-pressed=true]").focus()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    until(page, "location.hash.includes('e=2&h=1')")  # the rollout of all layers comes last
    assert state(page)["pin"] == "100.50"


def test_a_pinned_query_tells_which_heads_agree(show: Callable[..., Any], small: Atlas) -> None:
    page = show(small, "e=1&h=0&pin=100.50&hm=agree")
    until(page, "document.querySelector('.headmap-says').textContent.includes('%')")
    rows = [entry.matrix[0, head, 100] for entry in small.entries for head in range(2)]
    expected = [float(torch.minimum(row, rows[2]).sum()) for row in rows]
    found = [share for _, share in on_the_map_of_heads(page)]
    assert found == pytest.approx(expected, abs=0.003)
    assert found[2] == pytest.approx(1)
    assert "1·0" not in page.locator(".headmap-says").text_content().split(":")[1]  # it agrees with itself, of course


def test_heads_are_found_by_a_condition(show: Callable[..., Any], small: Atlas) -> None:
    page = show(small, "")
    shares = {
        f"{entry.layer}·{head}": float(entry.matrix[0, head, 100, 20:60].sum())
        for entry in small.entries
        for head in (0, 1)
    }
    ranked = sorted(shares, key=lambda mark: -shares[mark])
    least = round((shares[ranked[1]] + shares[ranked[2]]) / 2, 4)
    box = page.get_by_label("Find heads")
    box.fill("nobody knows")
    box.press("Enter")
    assert box.get_attribute("aria-invalid") == "true"
    box.fill(f"100 -> 20-59 > {100 * least:.2f} %")
    box.press("Enter")
    until(page, "document.querySelectorAll('.thumb').length === 2")
    assert shown_heads(page) == ranked[:2]
    assert box.input_value() == "100 → 20-59"
    kept = state(page)
    assert (kept["pin"], kept["k"]) == ("100.20", "20.60")
    page.keyboard.press("Escape")
    page.locator(".stage").click(position={"x": 300, "y": 400})  # another pair: the span is over
    until(page, "!location.hash.includes('k=20.60')")


def test_all_heads_over_the_whole_window(show: Callable[..., Any], small: Atlas) -> None:
    page = show(small, "")
    before = page.locator(".thumb").first.bounding_box()["width"]
    page.get_by_role("button", name="enlarge").click()
    until(page, "location.hash.includes('a=grid')")
    assert page.locator(".slot-heads").bounding_box()["width"] == 1280
    assert page.locator(".thumb").first.bounding_box()["width"] > 1.5 * before or before > 110
    assert not page.locator(".stage").is_visible()
    assert page.evaluate(CUT) == []
    page.locator(".thumb").nth(3).click()  # the map of this head comes back
    page.wait_for_selector(READY)
    assert {"e": "1", "h": "1"}.items() <= state(page).items()
    page.get_by_role("button", name="enlarge").click()
    page.keyboard.press("Escape")
    page.wait_for_selector(READY)


# ----------------------------------------------------------------------------------------- lines from token to token


def test_lines_show_the_weights_of_a_window(show: Callable[..., Any], small: Atlas) -> None:
    page = show(small, "e=1&h=1&z=3&r=90.5&c=80.5")
    page.get_by_role("button", name="Lines").click()
    page.wait_for_selector(".lines line", state="attached")
    lines = page.evaluate(
        """[...document.querySelectorAll(".lines line")].map(
          (line) => [line.dataset.query, line.dataset.key, line.getAttribute("stroke-width")].map(Number))"""
    )
    weights = small.entries[1].matrix[0, 1].to_dense()[58:122, 58:122]  # 64 tokens around query 90
    assert {(i, j) for i, j, _ in lines} == {tuple(cell) for cell in (weights >= 0.01).nonzero().tolist()}
    for i, j, width in lines[::9]:
        assert width == pytest.approx(0.5 + 3 * float(weights[int(i), int(j)]), rel=1e-4)
    query = page.locator(".lines-column").first.locator("button").nth(40)
    query.hover()
    seen = "[...document.querySelectorAll('.lines line:not(.out)')].every((line) => line.dataset.query === '40')"
    until(page, seen)
    share = 100 * float(weights[40].sum())
    assert page.locator(".lines-says").text_content().startswith(f"{share:.1f} % of the attention of query 98")
    until(page, "document.querySelector('.subject')?.textContent.includes('98')")  # the list shows the same row
    query.click()
    until(page, "location.hash.includes('pin=98.98')")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    until(page, "location.hash.includes('pin=99.99')")
    page.get_by_role("button", name="later").click()
    until(page, "document.querySelector('.lines-column button').title === '86'")  # as far as there are tokens
    page.keyboard.press("Escape")
    until(page, "document.querySelector('.lines').hidden")


def test_the_python_that_is_copied_draws_what_is_seen(
    browse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="needs attlas[plot]")
    two_layers(90).save(tmp_path / "own.atlas")
    with served(attlas.load(tmp_path / "own.atlas"), folder=tmp_path / "own.atlas") as url:
        page = browse(f"{url}#e=1&h=1&z=5&r=60.5&c=40.5")
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("button", name="Export").click()
        page.locator("[data-export=python]").click()
        page.wait_for_selector(".export-line:has-text('Python copied.')")
        text = page.evaluate("navigator.clipboard.readText()")
        browse.close()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(text, names)
    assert (tmp_path / "head.pdf").stat().st_size > 1000
    assert names["figure"].axes[0].get_yticklabels()[0].get_text().strip("␣ ").startswith("w")
    assert "A[0, 1].plot(rows=(" in text


# The size of a picture; how many colours its paper, its words and its map have; how many of its rows the map covers.
PARTS_OF_CARD = """async (bytes) => {
  const picture = await createImageBitmap(new Blob([new Uint8Array(bytes)]));
  const pen = new OffscreenCanvas(picture.width, picture.height).getContext("2d", { willReadFrequently: true });
  pen.drawImage(picture, 0, 0);
  const count = (x, w) => new Set(new Uint32Array(pen.getImageData(x, 40, w, 540).data.buffer)).size;
  const { data, width } = pen.getImageData(566, 0, picture.width - 566, picture.height);
  const rows = new Set();
  for (let at = 0; at < data.length; at += 4) {
    if ([0, 1, 2].some((k) => data[at + k] !== data[k])) rows.add(Math.floor(at / 4 / width));
  }
  return [picture.width, picture.height, count(0, 50), count(56, 470), count(600, 560), rows.size];
}"""


def test_a_card_has_the_size_of_previews_and_a_large_map_whatever_the_window(
    show: Callable[..., Any], small: Atlas
) -> None:
    page = show(small, "t=light", width=1920, height=800)
    name, body = saved(page, "card")
    assert name.endswith(".card.png")
    width, height, paper, words, colours, rows = page.evaluate(PARTS_OF_CARD, [*body])
    assert (width, height, paper) == (1200, 630, 1)
    assert words > 20
    assert colours > 200
    assert rows > 520


# ---------------------------------------------------------------------------------------------------- two recordings


def test_two_recordings_are_compared_head_by_head(browse: Any) -> None:
    tokens = [f" w{i}" for i in range(60)]
    first, second = ([random_matrix(60, seed=seed + layer, spread=2.0) for layer in (0, 1)] for seed in (10, 20))
    atlases = [atlas_of(*matrices, tokens=tokens) for matrices in (first, second)]
    with served(atlases[0], title="before", compare=atlases[1], compare_title="after") as url:
        page = browse(url)
        assert {"s": "3.0", "m": "ratio"}.items() <= state(page).items()
        assert page.locator(".says b").inner_text() == "Layer 0, head 0 divided by ② Layer 0, head 0"
        page.keyboard.press("}")  # the same head of the other recording goes along
        until(page, "location.hash.includes('s=4.0')")
        page.evaluate("location.hash += '&z=5&r=30.5&c=20.5'")
        page.get_by_role("button", name="Compare").click()
        page.get_by_role("button", name="difference").click()
        page.keyboard.press("Escape")
        assert page.locator(".bar-title").text_content() == "first − second"
        stage = page.locator(".stage").bounding_box()
        where = page.evaluate(
            """() => {
              const stage = document.querySelector(".stage");
              return [stage.clientWidth / 2 + 45, stage.clientHeight / 2 + 70];
            }"""
        )
        page.mouse.move(stage["x"] + where[0], stage["y"] + where[1])
        until(page, "document.querySelector('.tip-more')?.textContent.includes('−')")
        places = [int(text) for text in page.locator(".tip .place").all_inner_texts()]
        one, other = (float(matrices[1][0, 0, places[0], places[1]]) for matrices in (first, second))
        told = page.locator(".tip-more").first.inner_text()
        assert number(told.split("first − second = ")[1].replace("−", "")) == pytest.approx(abs(one - other), rel=6e-3)
        assert ("= −" in told) == (one < other)
        browse.close()


# --------------------------------------------------------------------------------------------------------- Chinese

NAMES = {"PDF", "Python", "HTML", "softmax", "score", "logit", "log"}
PALETTES = {"depth", "viridis", "magma", "cividis", "grey"}


def test_the_page_speaks_chinese_to_a_chinese_browser(show: Callable[..., Any], small: Atlas) -> None:
    page = show(small, "pin=100.50&s=1.0&m=ratio", locale="zh-CN")
    page.wait_for_selector(".headmap-says:has-text('%')")
    until(page, "document.querySelectorAll('.thumb.drawn:not(.rollout)').length === 4")
    assert latin_words(page, "aria-label") - NAMES - PALETTES == set()
    assert page.locator(".says b").inner_text() == "第 0 层，头 0 除以 第 1 层，头 0"
    assert page.evaluate("document.documentElement.lang") == "zh"
    page.get_by_role("button", name="帮助").click()
    page.get_by_role("button", name="English").click()
    page.wait_for_selector(".says b:has-text('Layer 0, head 0')")
    assert state(page)["lang"] == "en"
    assert {"pin": "100.50", "m": "ratio"}.items() <= state(page).items()


# Keeps what the page has shown, from before its first script on: texts, titles and names for screen readers.
KEEP_SHOWN = """() => {
  window.shown = [];
  const keep = () => {
    for (const part of document.querySelectorAll(".attlas button, .attlas h2, .attlas h3, .attlas [aria-label]")) {
      window.shown.push(part.textContent, part.title, part.ariaLabel ?? "");
    }
  };
  new MutationObserver(keep).observe(document, { childList: true, subtree: true, attributes: true });
}"""


@pytest.mark.parametrize("locale", ["zh-CN", "en-US"])
def test_every_text_is_in_the_language_of_the_browser_from_the_first_on(
    browse: Callable[..., Any], small: Atlas, locale: str
) -> None:
    with served(small) as url:
        page = browse(url, locale=locale, script=KEEP_SHOWN)
        until(page, "document.querySelectorAll('.thumb.drawn:not(.rollout)').length === 4")
        shown = set(page.evaluate("window.shown"))
        browse.close()
    assert ("Heads" in shown, "头" in shown) == (locale == "en-US", locale == "zh-CN")


# ------------------------------------------------------------------------------------------------- weighted by values


@pytest.fixture(scope="module")
def valued() -> Atlas:
    generator = torch.Generator().manual_seed(5)
    plain = two_layers(150)
    norms = [torch.rand(1, 3, 150, generator=generator) for _ in plain.entries]
    pairs = zip(plain.entries, norms, strict=True)
    entries = [replace(entry, value_norms=9 * n[:, :1], output_norms=n[:, 1:]) for entry, n in pairs]
    return Atlas(entries, tokens=plain.tokens)


def test_weights_times_norms_are_shown_everywhere(
    show: Callable[..., Any], valued: Atlas, small: Atlas, tmp_path: Path
) -> None:
    page = show(valued, "e=1&h=1&pin=100.50&v=value&f=linear")
    dense = valued.entry(1).value_weighted().to_dense()[0]
    weight, norm = float(valued[1][0, 1, 100, 50]), float(valued.entry(1).value_norms[0, 0, 50])
    until(page, "document.querySelectorAll('.slot-text dd').length > 6")
    names, told = (page.locator(f".slot-text {part}").all_inner_texts() for part in ("dt", "dd"))
    facts = dict(zip(names, told, strict=True))
    assert number(facts["‖A v‖"]) == pytest.approx(weight * norm, rel=1e-3)
    assert number(facts["weight"]) == pytest.approx(weight, rel=1e-3)
    assert number(facts["norm"]) == pytest.approx(norm, rel=1e-3)
    assert number(facts["key’s mass"]) == pytest.approx(float(dense[1, :, 50].sum()), rel=1e-2)
    shares = page.locator(".largest .share").all_inner_texts()
    assert [number(text) for text in shares[:3]] == pytest.approx(dense[1, 100].topk(3).values.tolist(), rel=1e-2)
    until(page, "document.querySelector('.headmap-says').textContent.includes(':')")
    labels = [button.get_attribute("aria-label") for button in page.locator(".headmap-grid button").all()[:4]]
    pairs = [valued.entry(at).value_weighted().to_dense()[0, head, 100, 50] for at in (0, 1) for head in (0, 1)]
    assert [number(label.split(": ")[1]) for label in labels] == pytest.approx([float(p) for p in pairs], rel=1e-2)
    # The map, its scale and the box at the pointer say the same number.
    page.evaluate("location.hash = 'e=1&h=1&v=value&z=4&r=100.5&c=50.5&f=linear'")
    page.wait_for_selector(READY)
    box = page.locator(".overlay").bounding_box()
    found = page.evaluate("document.querySelector('.bar-title').textContent")
    assert found == "‖A v‖"
    page.mouse.move(box["x"] + box["width"] / 2 + 30, box["y"] + box["height"] / 2 + 20)
    page.wait_for_selector(".tip-more")
    until(page, "document.querySelector('.tip-more').textContent.includes('norm')")
    said = re.match(r"weight (\S+(?: × 10\S+)?) × norm (\S+)", page.locator(".tip-more").first.inner_text())
    assert said is not None
    assert number(page.locator(".tip-weight").inner_text()) == pytest.approx(
        number(said[1]) * number(said[2]), rel=2e-2
    )
    assert number(page.locator(".bar-read").inner_text()) == pytest.approx(number(said[1]) * number(said[2]), rel=2e-2)
    # The choice is a control; the page that is saved holds the same numbers.
    page.locator(".bar-controls select[aria-label=Numbers]").select_option("output")
    page.wait_for_selector(READY)
    assert state(page)["v"] == "output"
    assert page.locator(".bar-title").inner_text() == "‖A v W‖"
    page.evaluate("location.hash = 'e=1&h=1&v=output&pin=100.50'")
    page.wait_for_selector(READY)
    name, content = saved(page, "html")
    (tmp_path / name).write_bytes(content)
    offline = page.context.new_page()
    offline.goto((tmp_path / name).as_uri())
    offline.wait_for_selector(READY)
    until(offline, "document.querySelectorAll('.largest .share').length > 2")
    wanted = valued.entry(1).value_weighted(output=True).to_dense()[0, 1, 100].topk(3).values.tolist()
    shares = offline.locator(".largest .share").all_inner_texts()
    assert [number(text) for text in shares[:3]] == pytest.approx(wanted, rel=1e-2)
    # A recording without values does not offer it, and a link to it is repaired.
    plain = show(small, "v=value")
    assert plain.locator(".bar-controls select[aria-label=Numbers]").count() == 0
    assert "v" not in state(plain)
