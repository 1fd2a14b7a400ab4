"""The minimap, brackets along the axes, the outline, and what stands beside the map: labels, tools, panes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.atlases import atlas_of, random_matrix
from tests.browser.conftest import CUT, READY, serious_faults, served, state, until
from tests.view.test_outline import CHINESE, PYTHON, tokens_of

import attlas
from attlas.recording.atlas import Atlas

pytestmark = pytest.mark.browser

N = 1200
NEAR = f"#z=1&r={N // 2}&c={N // 2}"
RING = (200, 71, 30)  # about the colour of the rectangle, in light colours


# Read a part of a canvas from a copy, so that the page's own canvas stays fast.
READ = """(canvas, x, y, width, height) => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  return copy.getImageData(x, y, width, height).data;
}"""


def run(page: Any, code: str, argument: Any = None) -> Any:
    """Return what a function of a page returns, which may `read(canvas, x, y, width, height)`."""
    return page.evaluate(code.replace("read(", f"({READ})("), argument)


def code_tokens(n: int) -> list[str]:
    """A module of functions and a class, as often as it takes."""
    return [*(tokens_of(PYTHON) * (1 + n // len(tokens_of(PYTHON))))[:n]]


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    first, second = (random_matrix(N, heads=6, seed=seed, spread=2.0) for seed in (0, 1))
    return atlas_of(*[first, second] * 3, tokens=code_tokens(N))


@pytest.fixture(scope="module")
def address(atlas: Atlas) -> Iterator[str]:
    with served(atlas) as url:
        yield url


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    with served(atlas_of(random_matrix(300), tokens=[f" w{i}" for i in range(300)])) as url:
        yield url


def box(page: Any, selector: str) -> dict[str, float]:
    return page.locator(selector).first.bounding_box()


def view(page: Any) -> tuple[float, float]:
    """Return the row and the column in the middle of the map."""
    fields = state(page)
    return float(fields["r"]), float(fields["c"])


def ring_pixels(page: Any, selector: str = ".minimap canvas") -> list[float]:
    """Return the shares of a canvas between which its pixels of the accent colour lie: left, top, right, bottom."""
    return run(
        page,
        """([selector, [r, g, b]]) => {
          const canvas = document.querySelector(selector);
          const { width, height } = canvas;
          const data = read(canvas, 0, 0, width, height);
          const found = [width, height, 0, 0];
          for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
            const at = 4 * (y * width + x);
            if (Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b) > 60) continue;
            [found[0], found[1]] = [Math.min(found[0], x), Math.min(found[1], y)];
            [found[2], found[3]] = [Math.max(found[2], x + 1), Math.max(found[3], y + 1)];
          }
          return [found[0] / width, found[1] / height, found[2] / width, found[3] / height];
        }""",
        [selector, list(RING)],
    )


def colours(page: Any, selector: str) -> int:
    """Return how many colours a canvas has."""
    return run(
        page,
        """(selector) => {
          const canvas = document.querySelector(selector);
          const data = read(canvas, 0, 0, canvas.width, canvas.height);
          return new Set(new Uint32Array(data.buffer)).size;
        }""",
        selector,
    )


# -------------------------------------------------------------------------------------------------------- the minimap


def test_the_minimap_is_there_while_a_part_is_in_view(browse: Any, address: str) -> None:
    page = browse(address)
    assert page.locator(".minimap").is_hidden()
    page.keyboard.press("+")
    page.locator(".minimap").wait_for()
    page.wait_for_selector(READY)
    left, top, right, bottom = ring_pixels(page)
    assert 0 <= left < right <= 1
    assert 0 <= top < bottom <= 1
    assert colours(page, ".minimap canvas") > 100  # the matrix is drawn in it
    page.keyboard.press("0")
    page.locator(".minimap").wait_for(state="hidden")


def test_its_rectangle_is_what_is_in_view(browse: Any, address: str) -> None:
    page = browse(address + NEAR)
    shown = re.search(
        r"queries (\d+) to (\d+), keys (\d+) to (\d+)", page.locator(".overlay").get_attribute("aria-label")
    )
    first, last, first_key, last_key = (int(number) / N for number in shown.groups())
    assert ring_pixels(page) == pytest.approx([first_key, first, last_key, last], abs=0.03)


def test_a_click_and_a_drag_move_the_view(browse: Any, address: str) -> None:
    page = browse(address + NEAR)
    frame = box(page, ".minimap canvas")
    page.mouse.click(frame["x"] + 0.25 * frame["width"], frame["y"] + 0.8 * frame["height"])
    row, column = view(page)
    assert row == pytest.approx(0.8 * N, abs=0.03 * N)
    assert column == pytest.approx(0.25 * N, abs=0.03 * N)
    left, top, right, bottom = ring_pixels(page)
    x, y = frame["x"] + (left + right) / 2 * frame["width"], frame["y"] + (top + bottom) / 2 * frame["height"]
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 0.2 * frame["width"], y - 0.3 * frame["height"], steps=4)
    page.mouse.up()
    after = view(page)
    assert after[0] - row == pytest.approx(-0.3 * N, abs=0.02 * N)
    assert after[1] - column == pytest.approx(0.2 * N, abs=0.02 * N)
    assert "pin" not in state(page)


def test_touch_moves_the_view(browse: Any, address: str) -> None:
    page = browse(address + NEAR, 390, 844, has_touch=True, is_mobile=True)
    frame = box(page, ".minimap canvas")
    assert 58 <= frame["width"] <= 110
    assert frame["x"] + frame["width"] <= 390
    page.touchscreen.tap(frame["x"] + 0.2 * frame["width"], frame["y"] + 0.5 * frame["height"])
    assert view(page)[1] == pytest.approx(0.2 * N, abs=0.05 * N)


def test_arrow_keys_move_the_view(browse: Any, address: str) -> None:
    page = browse(address + NEAR)
    canvas = page.locator(".minimap canvas")
    canvas.focus()
    before = view(page)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Shift+ArrowLeft")
    row, column = view(page)
    assert row - before[0] == pytest.approx(N / 24, abs=1)
    assert column - before[1] == pytest.approx(-N / 6, abs=1)
    assert canvas.get_attribute("aria-label").startswith("Minimap: queries ")
    page.keyboard.press("Home")
    assert view(page) == (0, 0)
    page.keyboard.press("0")  # as everywhere: all is in view, and the focus goes to the map
    page.locator(".minimap").wait_for(state="hidden")
    assert page.evaluate("document.activeElement.className") == "overlay"


def test_a_key_and_buttons_hide_it_and_the_link_knows(browse: Any, address: str) -> None:
    page = browse(address + NEAR)
    page.keyboard.press("m")
    page.locator(".minimap").wait_for(state="hidden")
    until(page, "/mm=off/.test(location.hash)")
    page.get_by_role("button", name="Show the minimap").click()
    until(page, "!/mm=/.test(location.hash)")
    page.locator(".minimap").hover()
    page.get_by_role("button", name="Hide the minimap").click()
    page.locator(".minimap").wait_for(state="hidden")
    other = browse(f"{address}{NEAR}&mm=off")
    assert other.locator(".minimap").is_hidden()
    assert other.locator(".minimap-open").is_visible()


@pytest.mark.parametrize("corner", [(-70, 90), (-70, -70), (70, -70), (70, 70)])
def test_the_pinned_cell_stays_free(browse: Any, address: str, corner: tuple[int, int]) -> None:
    page = browse(address + NEAR)
    stage = box(page, ".stage")
    free = page.evaluate("parseInt(document.querySelector('.minimap').style.left)")
    x = stage["x"] + (corner[0] + stage["width"] if corner[0] < 0 else corner[0] + 110)
    y = stage["y"] + (corner[1] + stage["height"] if corner[1] < 0 else corner[1] + 70)
    page.keyboard.press("m")  # out of the way of the click
    page.locator(".minimap").wait_for(state="hidden")
    page.mouse.click(x, y)
    until(page, "/pin=/.test(location.hash)")
    page.keyboard.press("m")
    page.locator(".minimap").wait_for()
    frame = box(page, ".minimap")
    inside = (
        frame["x"] - 4 <= x <= frame["x"] + frame["width"] + 4
        and frame["y"] - 4 <= y <= frame["y"] + frame["height"] + 4
    )
    assert not inside
    assert free > stage["width"] / 2  # it stood at the right before


def test_it_asks_for_no_other_pictures(browse: Any, address: str) -> None:
    def tiles(hash_: str) -> set[str]:
        page = browse(address + hash_)
        page.wait_for_timeout(400)
        asked = "performance.getEntriesByType('resource').map((one) => one.name)"
        found = {name for name in page.evaluate(asked) if "/api/tile?" in name}
        browse.close()
        return {name.split("?")[1] for name in found}

    assert tiles(NEAR) == tiles(f"{NEAR}&mm=off") != set()


def test_of_weights_of_both_signs_of_wide_matrices_and_beside_each_other(browse: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1, 2, size, 16, generator=generator) for size in (300, 900))
    wide = attlas.attend(2 * a, 2 * b)
    with served(wide) as url:
        page = browse(f"{url}#z=2&r=100&c=700")
        frame = box(page, ".minimap canvas")
        assert frame["width"] == pytest.approx(3 * frame["height"], rel=0.05)
        left, top, right, bottom = ring_pixels(page)
        assert (left + right) / 2 == pytest.approx(700 / 900, abs=0.06)
        assert (top + bottom) / 2 == pytest.approx(100 / 300, abs=0.12)
        page = browse(f"{url}#z=2&r=100&c=700&m=side&s=0.1")
        assert box(page, ".minimap")["x"] > box(page, ".stage")["x"] + 0.5 * box(page, ".stage")["width"]
        assert colours(page, ".minimap canvas") > 50
        browse.close()
    q, k = torch.randn(2, 1, 2, 400, 8, generator=generator)
    signed = attlas.attend(q, k) - attlas.attend(k, q)
    with served(signed) as url:
        page = browse(f"{url}#z=2&r=100&c=300")
        assert colours(page, ".minimap canvas") > 50
        browse.close()


# -------------------------------------------------------------------------------------------- brackets and the outline


BAND = """() => {
  const canvas = document.querySelector(".base");
  const stage = canvas.getBoundingClientRect();
  const dpr = canvas.width / stage.width;
  const [x, y, height] = [98, 110, stage.height - 130].map((side) => Math.round(dpr * side));
  const data = read(canvas, x, y, 1, height);
  return new Set(new Uint32Array(data.buffer)).size;
}"""  # how many colours there are along the band of brackets beside the map, in its middle


def test_functions_are_bracketed_along_the_axes(browse: Any, address: str) -> None:
    page = browse(address + NEAR)
    until(page, "document.querySelector('[aria-label=Outline]').checkVisibility()")
    page.wait_for_selector(READY)
    page.wait_for_timeout(150)
    assert run(page, BAND) > 3
    page.keyboard.press("o")
    dialog = page.get_by_role("dialog", name="Outline of the text")
    rows = dialog.locator(".outline-list button")
    assert rows.nth(0).inner_text().split("\n")[:2] == ["first", "function"]
    assert rows.nth(1).inner_text().split("\n")[:2] == ["Shape", "class"]
    dialog.get_by_label("brackets on the axes").uncheck()
    page.keyboard.press("Escape")
    assert state(page)["ol"] == "off"
    page.wait_for_selector(READY)
    page.keyboard.press("o")
    assert not dialog.get_by_label("brackets on the axes").is_checked()
    page.keyboard.press("Escape")
    other = browse(f"{address}{NEAR}&ol=off")
    assert map_edge(page) == map_edge(other) == map_edge(browse(address + NEAR)) - 14


def map_edge(page: Any) -> int:
    """Return the first pixel of the map from the left, in its lower half: there its frame begins."""
    page.wait_for_selector(READY)
    page.wait_for_timeout(150)
    return run(
        page,
        """() => {
          const canvas = document.querySelector(".base");
          const data = read(canvas, 0, canvas.height - 40, 200, 30);
          const reds = (x) => Array.from({ length: 30 }, (_, y) => data[4 * (y * 200 + x)]);
          const dark = (x) => reds(x).every((red) => red === 0x8b);
          return Array.from({ length: 200 }, (_, x) => x).find(dark) ?? -1;
        }""",
    )


def test_borders_leave_small_cells_to_be_seen(browse: Any, address: str) -> None:
    page = browse(f"{address}#z=0&r=600&c=600&mm=off")
    page.wait_for_timeout(200)
    start = page.evaluate(
        "async () => (await (await fetch('./api/outline?entry=0')).json()).query.find(([at]) => at > 450)[0]"
    )
    column = """(column) => {
      const canvas = document.querySelector(".base");
      return [...new Uint32Array(read(canvas, column, 300, 1, canvas.height - 320).buffer)];
    }"""
    fields = state(page)
    width = page.evaluate("document.querySelector('.base').width")
    x = round(106 + (width - 106 - 14) / 2 + start - float(fields["c"]))
    with_lines = run(page, column, x)
    page.keyboard.press("o")
    page.get_by_label("brackets on the axes").uncheck()
    page.keyboard.press("Escape")
    page.wait_for_selector(READY)
    page.wait_for_timeout(200)
    without = run(page, column, x - 7)  # the map is half a band farther to the left
    changed = sum(a != b for a, b in zip(with_lines, without, strict=True)) / len(without)
    assert 0 < changed <= 1 / 7, changed


def test_the_list_leads_to_a_function(browse: Any, address: str) -> None:
    page = browse(address)
    page.locator("[aria-label=Outline]").click()
    page.get_by_role("searchbox", name="Find by name").fill("area")
    rows = page.locator(".outline-list button")
    assert {row.split("\n")[0] for row in rows.all_inner_texts()} == {"area"}
    start, stop = (int(number.replace(",", "")) for number in rows.nth(1).inner_text().split("\n")[2].split("–"))
    rows.nth(0).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    row, column = view(page)
    assert row == pytest.approx((start + stop + 1) / 2, abs=1)
    assert column == pytest.approx((start + stop + 1) / 2, abs=1)
    assert float(state(page)["z"]) > 2


def test_a_bracket_says_its_name_and_leads_there(browse: Any, address: str) -> None:
    page = browse(address + NEAR)
    page.wait_for_timeout(200)
    stage = box(page, ".stage")
    x = stage["x"] + 42 + 50 + 7  # in the band
    tip = page.locator(".tip")
    for down in range(120, int(stage["height"]) - 20, 12):
        page.mouse.move(x, stage["y"] + down)
        page.wait_for_timeout(30)
        if tip.is_visible() and "tokens" in tip.inner_text():
            break
    said = re.search(r"(\w+)\n(?:function|class), tokens ([\d,]+) to ([\d,]+); a click goes there", tip.inner_text())
    start, stop = (int(number.replace(",", "")) for number in said.groups()[1:])
    page.mouse.click(x, stage["y"] + down)
    assert view(page) == pytest.approx(((start + stop + 1) / 2,) * 2, abs=1)


def test_names_become_finer_with_the_zoom(browse: Any, address: str) -> None:
    page = browse(f"{address}{NEAR}")
    depth = """async ([zoom]) => {
      const { createTree, chooseStretches } = await import("./data/outlines.js");
      const { query } = await (await fetch("./api/outline?entry=0&batch=0")).json();
      const shown = chooseStretches(createTree(query), 2 ** zoom, 30);
      const apart = shown.every((each, at) => !at || each.start >= shown[at - 1].stop);
      return { depths: [...new Set(shown.map((each) => each.depth))].sort(), apart };
    }"""
    far, near, nearest = (page.evaluate(depth, [zoom]) for zoom in (-4, 1.5, 4))
    assert far["depths"] == [0]
    assert near["depths"] == [0, 1]
    assert nearest["depths"] == [0, 1, 2]
    assert all(each["apart"] for each in (far, near, nearest))


def test_a_text_without_structure_has_no_brackets(browse: Any, plain: str) -> None:
    page = browse(f"{plain}#z=2&r=150&c=150")
    page.wait_for_timeout(300)
    assert page.locator("[aria-label=Outline]").is_hidden()
    page.keyboard.press("o")
    assert page.get_by_role("dialog").count() == 0
    assert map_edge(page) == map_edge(browse(f"{plain}#z=2&r=150&c=150&ol=off"))


def test_chinese_prose_in_a_chinese_page(browse: Any) -> None:
    tokens = list(CHINESE * 6)
    with served(atlas_of(random_matrix(len(tokens)), tokens=tokens)) as url:
        page = browse(f"{url}#lang=zh&panel=outline", locale="zh-CN")
        page.locator(".outline-list button").first.wait_for()
        assert page.locator(".outline-list button").first.inner_text().startswith("清晨，老人打开了门。")
        assert re.findall("[A-Za-z]+", page.locator("dialog.outline").inner_text()) == []
        browse.close()  # before the server


def test_documents_of_a_mask(browse: Any) -> None:
    q = torch.randn(1, 1, 120, 8)
    with served(attlas.attend(q, q, mask=attlas.Documents([0] * 50 + [1] * 70) & attlas.Causal())) as url:
        page = browse(f"{url}#panel=outline")
        page.locator(".outline-list button").first.wait_for()
        assert [row.split("\n") for row in page.locator(".outline-list button").all_inner_texts()] == [
            ["document 1", "document", "0–49"], ["document 2", "document", "50–119"],
        ]  # fmt: skip
        browse.close()


def test_an_offline_page_has_the_minimap_and_the_outline(browse: Any, atlas: Atlas, tmp_path: Path) -> None:
    atlas.export(tmp_path / "page.html")
    page = browse(f"{(tmp_path / 'page.html').as_uri()}#z=1&r=600&c=600")
    page.locator(".minimap").wait_for()
    assert colours(page, ".minimap canvas") > 50
    page.keyboard.press("o")
    assert page.locator(".outline-list button").first.inner_text().split("\n")[0] == "first"


# ------------------------------------------------------------------------------------------------------ beside the map


def test_labels_of_curves_explain_themselves(browse: Any, address: str) -> None:
    page = browse(address)
    until(page, "document.querySelector('[aria-label=Outline]').checkVisibility()")
    stage = box(page, ".stage")
    tip = page.locator(".tip")
    found = set()
    for right in range(60, 280, 30):
        for down in range(4, 90, 8):
            page.mouse.move(stage["x"] + right, stage["y"] + down)
            page.wait_for_timeout(20)
            if tip.is_visible() and "scale" in tip.inner_text():
                found.add(tip.inner_text().split("\n")[0])
    assert found == {"column mass", "entropy"}


def test_a_block_shows_three_digits(browse: Any, address: str) -> None:
    page = browse(f"{address}#p=max")
    stage = box(page, ".stage")
    page.mouse.move(stage["x"] + 0.45 * stage["width"], stage["y"] + 0.7 * stage["height"])
    until(page, r"/largest of \d+ ×/.test(document.querySelector('.tip').textContent)")
    page.wait_for_timeout(900)
    weight = page.locator(".tip-weight").inner_text().split(" largest")[0]
    assert len(re.sub(r"^0\.0*|\D", "", weight.split("×")[0])) <= 3, weight


def test_the_tools_of_the_map_are_one_stop(browse: Any, address: str) -> None:
    page = browse(address + NEAR)
    until(page, "document.querySelector('[aria-label=Outline]').checkVisibility()")
    tools = page.get_by_role("toolbar", name="Tools of the map")
    buttons = tools.locator("button:visible")
    assert buttons.count() >= 6
    assert tools.locator("button[tabindex='0']").count() == 1
    tools.locator("button[tabindex='0']").focus()
    names = []
    for _ in range(buttons.count()):
        names.append(page.evaluate("document.activeElement.textContent"))
        page.keyboard.press("ArrowRight")
    assert len(set(names)) == buttons.count()
    assert page.evaluate("document.activeElement.textContent") == names[0]
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.textContent") == names[-1]
    page.keyboard.press("Tab")
    assert not tools.evaluate("(tools) => tools.contains(document.activeElement)")


@pytest.mark.parametrize("size", [(1280, 800), (1280, 700), (1024, 640)])
def test_the_map_of_heads_stays_where_it_is(browse: Any, address: str, size: tuple[int, int]) -> None:
    page = browse(address, *size)
    page.locator(".pick-layer").select_option("5")
    page.locator(".pick-head").select_option("5")
    page.wait_for_timeout(200)
    pane, heads, chosen = (box(page, part) for part in (".slot-heads", ".headmap", ".thumb[aria-pressed=true]"))
    assert heads["y"] >= pane["y"]
    assert chosen["y"] >= heads["y"] + heads["height"]
    assert page.locator(".slot-heads").evaluate("(pane) => pane.scrollHeight - pane.clientHeight") == 0  # one scrolls
    grid = box(page, ".heads-scroll")
    assert chosen["y"] + chosen["height"] <= grid["y"] + grid["height"] + 1


def test_the_map_has_half_of_a_narrow_window(browse: Any, address: str) -> None:
    for width in (720, 768, 900, 1024):
        page = browse(address + NEAR, width, 800)
        assert box(page, ".slot-map")["width"] >= width / 2, width
        assert page.evaluate(CUT) == []
        if width == 768:
            assert page.locator(".title").is_visible()
        browse.close()


def test_a_phone_has_no_empty_line_over_the_tools(browse: Any, address: str) -> None:
    page = browse(address + NEAR, 390, 844)
    head, tools = box(page, ".middle-head"), box(page, ".map-tools")
    assert head["height"] <= 104
    assert tools["y"] + tools["height"] <= head["y"] + head["height"]
    assert tools["height"] <= 30  # all in one line
    assert page.evaluate(CUT) == []


def test_nothing_serious_for_axe(browse: Any, axe: str, address: str) -> None:
    page = browse(address + NEAR)
    views = [
        (NEAR, (1280, 800), "light"),
        (f"{NEAR}&panel=outline", (1280, 800), "dark"),
        (f"{NEAR}&mm=off", (390, 844), "dark"),
        (f"{NEAR}&panel=outline", (390, 844), "light"),
    ]
    assert serious_faults(page, axe, views) == {}
