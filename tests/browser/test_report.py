"""The page that needs no server in a real browser: no errors, nothing from the network, and what one can do with it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.browser.conftest import READY, number, state, until

import attlas
from attlas import heads, stats
from attlas.heads.classification import STATISTIC_NAMES, text_statistics
from attlas.recording.atlas import Atlas, Entry
from attlas.view import export

pytestmark = pytest.mark.browser

LAYERS, HEADS, N = 2, 2, 1100  # too many cells for exact weights of all
WORDS = ("def", " f", "(", "x", ")", ":", "\n   ", " return", " x", "</script>", "<b>", "🦊", "日", "&amp;")


def matrix(layer: int) -> attlas.AttentionMatrix:
    generator = torch.Generator().manual_seed(layer)
    q, k = (2.5 * torch.randn(1, HEADS, N, 16, generator=generator) for _ in range(2))
    if layer == 1:  # head 0 looks at the token before, and nowhere else
        k[:, 0] = torch.nn.functional.one_hot(torch.arange(N) % 16, 16).float()
        q[:, 0] = 60.0 * torch.nn.functional.one_hot((torch.arange(N) - 1) % 16, 16).float()
        return attlas.attend(q, k, mask=attlas.Causal() & attlas.Window(12, 0))
    return attlas.attend(q, k, mask=attlas.Causal())


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    ids = torch.arange(N)[None] % len(WORDS)
    entries = []
    for layer in range(LAYERS):
        A = matrix(layer)
        wanted = [*text_statistics(ids), stats.ColumnMass(), stats.TopK(8)]
        found = dict(zip([*STATISTIC_NAMES, "column_mass", "top_k"], A.collect(*wanted), strict=True))
        entries.append(
            Entry(f"layers.{layer}", layer, "self", 0, tuple(range(HEADS)), (0, N), 0, (1, HEADS, N, N), A, found)
        )
    tokens = [WORDS[i % len(WORDS)] for i in range(N)]
    return Atlas(entries, model="tiny <model>", ids=ids, tokens=tokens, details={"source": "a & b.py"})


@pytest.fixture(scope="module")
def report(atlas: Atlas, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(atlas, tmp_path_factory.mktemp("report") / "report.html", query=75)


@pytest.fixture(params=[(1280, "light"), (1024, "dark"), (390, "light")], ids=str)
def tab(request: pytest.FixtureRequest, browse: Any, report: Path) -> Any:
    width, scheme = request.param
    return browse(report.as_uri(), width, 844, color_scheme=scheme)


def told(tab: Any) -> list[tuple[int, float]]:
    """Return the keys of the list, and their shares."""
    items = [re.search(r"(\d+)\s+([\d.]+) %$", text) for text in tab.locator(".largest li").all_inner_texts()]
    return [(int(found[1]), float(found[2]) / 100) for found in items if found]


def open_text(tab: Any) -> None:
    if tab.viewport_size["width"] < 720:
        tab.get_by_role("button", name="Text", exact=True).click()
        tab.wait_for_function(
            "() => document.querySelector('.slot-text').getBoundingClientRect().right <= innerWidth + 1"
        )


def rgb(tab: Any, position: int) -> str:
    return tab.locator(f'.t[data-position="{position}"]').evaluate("(token) => getComputedStyle(token).backgroundColor")


def test_it_opens_at_the_most_telling_head_and_says_why(tab: Any, atlas: Atlas) -> None:
    assert tab.locator(".says b").inner_text() == "Layer 1, head 0 looks at the token before"
    share = float(heads.scores(atlas[1], atlas.ids)["previous_token"][0, 0])
    line = tab.locator(".says-sentence").inner_text()
    assert line.endswith(" of its attention goes to the token before.")
    assert float(line.split(" %")[0]) / 100 == pytest.approx(share, abs=6e-4)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for name in ("Evidence", "Show the whole matrix  0", "Export"):
        box = tab.get_by_role("button", name=name, exact=True).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= tab.viewport_size["width"]
    tab.get_by_role("button", name="Evidence").click()
    words = tab.locator("dialog[open]").inner_text()
    assert "Layer 1, head 0: previous token" in words
    assert "at least 50 %" in words
    assert "tiny <model>, reading 1,100 tokens of a & b.py." in words
    tab.keyboard.press("Escape")
    assert tab.locator("dialog[open]").count() == 0
    # Another head is a click away.
    if tab.viewport_size["width"] < 720:
        tab.get_by_role("button", name="Heads", exact=True).click()
    assert tab.locator(".thumb:not(.rollout)").count() == LAYERS * HEADS
    tab.locator(".thumb").nth(0).click()
    tab.wait_for_function("() => document.querySelector('.says b').textContent.startsWith('Layer 0, head 0')")


def test_a_token_tells_where_the_head_looks(tab: Any, atlas: Atlas) -> None:
    open_text(tab)
    tab.wait_for_function("() => document.querySelectorAll('.largest li').length")  # something before anyone points
    assert tab.locator(".subject .place").inner_text().strip() == "75"
    assert told(tab)[0][0] == 74
    tab.locator('.t[data-position="80"]').hover()
    tab.wait_for_function("() => document.querySelector('.subject .place').textContent.trim() === '80'")
    row = atlas[1][0, 0, 80]
    assert told(tab)[0][0] == 79
    for key, share in told(tab):
        assert share == pytest.approx(float(row[key]), abs=6e-4)
    assert rgb(tab, 79) != rgb(tab, 60) == "rgba(0, 0, 0, 0)"


def test_heads_that_are_overviews_have_rows_too(tab: Any, atlas: Atlas) -> None:
    tab.evaluate("location.hash = 'e=0&h=1&pin=600.500'")
    open_text(tab)
    tab.wait_for_function("() => document.querySelector('.subject .place').textContent.trim() === '600'")
    tab.wait_for_function("() => document.querySelector('.largest').innerText.match(/ %$/gm)?.length === 8")
    best = atlas[0][0, 1, 600].topk(8)
    assert [key for key, _ in told(tab)] == best.indices.tolist()
    assert [share for _, share in told(tab)] == pytest.approx(best.values.tolist(), rel=0.06, abs=1e-4)
    rest = tab.locator(".largest-rest").inner_text()
    assert rest.endswith(" on 593 other keys.")
    assert float(rest.split(" %")[0]) / 100 == pytest.approx(1 - float(best.values.sum()), abs=2e-3)
    assert float(atlas[0][0, 1, 600, 500]) < float(best.values[-1])  # it is not in the file: a bound is
    facts = tab.locator(".cell-facts").inner_text()
    bound = float(re.search(r"≤ ([\d.]+)", facts)[1])
    assert bound == pytest.approx(float(best.values[-1]), rel=6e-3)


def test_the_map_speaks_of_the_blocks_that_it_has(browse: Any, report: Path, atlas: Atlas) -> None:
    tab = browse(f"{report.as_uri()}#e=0&h=1&z=4&r=600.5&c=300.5", 1280, 844)  # far in: 16 pixels a cell
    assert tab.locator(".status-scale").inner_text() == "a pixel shows the mean of 8 × 8 cells"
    box = tab.locator(".stage").bounding_box()
    dense = atlas[0][0, 1].to_dense()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.locator(".tip-weight").wait_for()
    tab.wait_for_timeout(400)
    words = tab.locator(".tip-weight").inner_text()
    assert "mean of 8 × 8 cells" in words
    i, j = (int(re.sub(r"\D.*", "", place.replace(",", ""))) for place in tab.locator(".tip .place").all_inner_texts())
    mean = float(dense[i // 8 * 8 : i // 8 * 8 + 8, j // 8 * 8 : j // 8 * 8 + 8].mean())
    assert number(words) == pytest.approx(mean, rel=6e-3)


ROW_OF_PIXELS = """(y) => {
  const canvas = document.querySelector(".base");
  const { data } = canvas.getContext("2d").getImageData(200, y, canvas.width - 240, 1);
  const colours = Array.from({ length: data.length / 4 }, (_, x) => data.slice(4 * x, 4 * x + 3).join());
  const runs = [];
  for (const [x, colour] of colours.entries()) colour === colours[x - 1] ? (runs[runs.length - 1] += 1) : runs.push(1);
  return runs;
}"""

REDS = """(places) => {
  const canvas = document.querySelector(".base");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return places.map(([x, y]) => data[4 * (Math.round(y) * canvas.width + Math.round(x))]);
}"""


def test_blocks_have_a_grid_of_blocks_and_are_not_drawn_as_large_as_cells(browse: Any, report: Path) -> None:
    tab = browse(f"{report.as_uri()}#e=0&h=1&z=6&r=600.5&c=300.5", 1280, 844)  # blocks of 8 × 8 cells
    assert state(tab)["z"] == "2"
    closer = tab.get_by_role("button", name="Zoom in  +")
    assert closer.is_disabled()
    assert closer.get_attribute("title") == "This file has blocks of 8 × 8 cells here, and no smaller ones"
    runs = tab.evaluate(ROW_OF_PIXELS, 500)
    lines = [run for run in runs if run < 8]
    assert set(lines) == {1}
    assert {run for run in runs[1:-1] if run >= 8} == {8 * 4 - 1}  # a block, less the line at its border
    # Another head has blocks of 2 × 2 cells: it may be closer, and this one may not when one goes back.
    tab.evaluate("location.hash = 'e=1&h=0&z=6&r=600.5&c=590.5'")
    tab.wait_for_selector(READY)
    assert state(tab)["z"] == "4"
    tab.get_by_role("button", name="Previous head").click()
    tab.wait_for_selector(READY)
    assert state(tab)["z"] == "2"


def test_the_cells_about_the_query_are_real_in_every_head(browse: Any, report: Path, atlas: Atlas) -> None:
    tab = browse(f"{report.as_uri()}#e=0&h=1&z=5&r=70.5&c=60.5", 1280, 844)  # 32 pixels a cell, without numbers
    assert state(tab)["z"] == "5"
    assert tab.locator(".status-scale").inner_text() == "every cell is drawn"
    stage = tab.locator(".stage").bounding_box()
    x, y = stage["width"] / 2, stage["height"] / 2
    seen = {}
    for dx, dy in ((0, 0), (-64, 32), (128, 64), (-160, -64), (32, -96), (-32, 160)):
        tab.mouse.move(stage["x"] + x + dx, stage["y"] + y + dy)
        until(tab, "/^\\d/.test(document.querySelector('.tip:not([hidden]) .tip-weight')?.textContent)")
        i, j = (int(place.replace(",", "")) for place in tab.locator(".tip .place").all_inner_texts())
        text = tab.locator(".tip-weight").inner_text()
        assert not text.startswith("≈")
        assert number(text) == pytest.approx(float(atlas[0][0, 1, i, j]), rel=1e-5)
        seen[number(text)] = x + dx, y + dy
        tab.mouse.move(5, 5)
    assert len(seen) == 6
    shades = tab.evaluate(REDS, [seen[weight] for weight in sorted(seen)])
    assert shades == sorted(shades, reverse=True)  # what is drawn is what is said: the larger, the darker
    # Farther out the cells are a part of the map, and a frame says where they are.
    tab.evaluate("location.hash = 'e=0&h=1&z=1.5&r=75.5&c=74.5'")
    tab.wait_for_selector(READY)
    words = tab.locator(".status-scale").inner_text()
    assert words == "a pixel shows the mean of 8 × 8 cells, in the frame every cell"
