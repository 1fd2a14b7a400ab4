"""The report in a real browser: no errors, nothing from the network, and what one can do with it."""

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from email import message_from_string
from pathlib import Path

import pytest
import torch

from attlas.cli.reading import Cost, Reading
from attlas.cli.report import page
from attlas.heads import KINDS, Head

pytestmark = pytest.mark.browser

LAYERS, HEADS, N = 2, 3, 120
WORDS = ("def", " f", "(", "x", ")", ":", "\n   ", " return", " x", "</script>", "<b>", "", "🦊", "日", "&amp;")


def reading() -> Reading:
    allowed = torch.ones(N, N, dtype=torch.bool).tril()
    weights = torch.softmax(torch.randn(LAYERS, HEADS, N, N).masked_fill(~allowed, -torch.inf), -1)
    others = {field.name for field in fields(Head)} - {"layer", "head", "induction"}
    measured = dict.fromkeys(others, 0.1)
    heads = [
        Head(layer=i // HEADS, head=i % HEADS, induction=0.9 if i == 4 else i / 100, **measured)
        for i in range(LAYERS * HEADS)
    ]
    top = weights.topk(8)
    maps = weights.masked_fill(~allowed, torch.nan)
    return Reading(
        model="tiny <model>",
        source="a & b.py",
        unseen=True,
        command="attlas demo --text 'a & b.py'",
        tokens=tuple(WORDS[i % len(WORDS)] for i in range(N)),
        layers=LAYERS,
        per_layer=HEADS,
        heads=tuple(heads),
        favourites=((("def", 0.3), ("<b>", 0.1)),) * len(heads),
        maps=maps,
        received=weights.mean(-2),
        values=top.values,
        indices=top.indices,
        window=range(30, 62),
        query=50,
        closeups=maps[:, :, 30:62, 30:62],
        period=40,
        repeats=maps[:, :, :80, :80],
        loss=2.0,
        cost=Cost(6, N, 6 * N * N * 4, 6 * N * 17 * 4, 10_000, 0.1),
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(page(reading()), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    from playwright.sync_api import sync_playwright

    own = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=own, args=arguments)
        yield running
        running.close()


@pytest.fixture(params=[(1360, "light"), (1360, "dark"), (390, "light"), (390, "dark")], ids=str)
def tab(request: pytest.FixtureRequest, browser: object, report: Path) -> Iterator[object]:
    width, scheme = request.param
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on(
        "request", lambda asked: complaints.append(asked.url) if not asked.url.startswith(("file:", "data:")) else None
    )
    tab.goto(report.as_uri())
    yield tab
    tab.close()
    assert complaints == []


def test_shows_everything_and_fits_the_window(tab: object) -> None:
    assert tab.locator(".plot canvas").count() == LAYERS * HEADS
    assert tab.locator(".t").count() == N
    assert tab.locator("tbody tr").count() == LAYERS * HEADS
    assert "Layer 1, head 1 remembers what came next" in tab.locator("h1").inner_text().replace(
        "\N{NO-BREAK SPACE}", " "
    )
    assert tab.title() == "Layer 1, head 1 remembers what came next · attlas"
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert "</script>" in tab.locator("#text").inner_text()
    painted = tab.evaluate("[...document.querySelector('#hero').getContext('2d').getImageData(0, 0, 80, 80).data]")
    assert len(set(painted)) > 50


def test_a_token_tells_where_the_head_looks(tab: object) -> None:
    assert "token 50" in tab.locator("#readout").inner_text()  # something to see before anyone points
    tab.locator(".t").nth(75).click()
    shown = tab.locator(".readout-list li")
    A = reading_of_page(tab, layer=1, head=1, query=75)
    A = [(weight, key) for weight, key in A if weight >= 33 / 65535]
    assert shown.count() == len(A)
    for item, (weight, key) in zip(shown.all(), A, strict=True):
        assert re.search(r"[\d.]+ %", item.inner_text())
        assert abs(float(re.search(r"([\d.]+) %", item.inner_text())[1]) / 100 - weight) < 0.006
        assert str(75 - key) in item.get_attribute("title") or key == 75
    assert tab.locator(".t.query").count() == 1
    tab.locator("#text").press("ArrowRight")
    assert "token 76" in tab.locator("#readout").inner_text()
    tab.mouse.move(0, 0)  # else the token under the mouse is shown next
    tab.locator("#text").press("Escape")
    assert tab.locator(".t.query").count() == 0


@pytest.mark.parametrize("focus", ["#text", "body"])
def test_pointing_shows_a_row_while_another_is_kept(browser: object, report: Path, focus: str) -> None:
    tab = browser.new_page(viewport={"width": 1360, "height": 900})
    tab.goto(report.as_uri())
    readout, tokens = tab.locator("#readout"), tab.locator(".t")
    assert "token 50" in readout.inner_text()  # kept since the page was opened
    tokens.nth(60).hover()
    assert "token 60" in readout.inner_text()
    tokens.nth(61).hover()
    assert "token 61" in readout.inner_text()
    tab.mouse.move(0, 0)
    assert "token 50" in readout.inner_text()
    tab.locator(focus).press("Escape")
    assert "token" not in readout.locator(".readout-query").inner_text().split(":")[0]
    assert tab.locator(".t.query").count() == 0
    tokens.nth(62).hover()
    assert "token 62" in readout.inner_text()
    tokens.nth(62).click()
    tokens.nth(63).hover()
    tab.mouse.move(0, 0)
    assert "token 62" in readout.inner_text()
    tab.close()


def contrast(tab: object, selector: str) -> float:
    """Return the contrast of a text with the paper of the page, as WCAG counts it."""
    ask = "([s, p]) => getComputedStyle(document.querySelector(s))[p]"
    texts = tab.evaluate(ask, [selector, "color"]), tab.evaluate(ask, ["body", "backgroundColor"])
    light = []
    for text in texts:
        rgb = [int(part) / 255 for part in re.findall(r"\d+", text)[:3]]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        light.append(0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2])
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_faint_words_can_be_read(tab: object) -> None:
    for selector in (".across", ".down", "footer", ".rest", ".caption"):
        assert contrast(tab, selector) >= 4.5, selector


def test_lists_hold_terms_and_descriptions_only(tab: object) -> None:
    wrong = (
        "[...document.querySelectorAll('dl > *, dl > div > *')].filter((e) => !/^(DIV|DT|DD)$/.test(e.tagName)).length"
    )
    assert tab.locator("#evidence dt").count() > 3
    assert tab.evaluate(wrong) == 0


def test_each_kind_has_a_sentence_of_its_own() -> None:
    whole = reading()
    for kind in KINDS[1:]:
        named = replace(whole.heads[0], induction=0.0, **{kind.measure: 0.99})
        rest = [replace(head, induction=0.0) for head in whole.heads[1:]]
        text = page(replace(whole, heads=(named, *rest)))
        standfirst = re.search(r'<p class="standfirst">(.*?)</p>', text)[1]
        assert "<b>99 %</b>" in standfirst
        assert "Its " not in standfirst


def test_the_page_leads_to_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    links = message_from_string("Project-URL: Home, https://example.org/attlas")
    monkeypatch.setattr(sys.modules["attlas.cli.report.page"], "metadata", lambda name: links)
    assert '<a href="https://example.org/attlas">attlas</a>' in page(reading())


def reading_of_page(tab: object, layer: int, head: int, query: int) -> list[tuple[float, int]]:
    torch.manual_seed(0)
    given = reading()
    values, keys = given.values[layer, head, query], given.indices[layer, head, query]
    return list(zip(values.tolist(), keys.tolist(), strict=True))


def test_heads_are_chosen_in_grid_list_and_table(tab: object) -> None:
    tab.locator(".plot").nth(2).click()
    assert tab.locator("#head-name").inner_text() == "Layer 0, head 2"
    assert tab.locator(".plot").nth(2).get_attribute("aria-pressed") == "true"
    tab.locator(".chips button").first.click()
    assert tab.locator("#head-name").inner_text() == "Layer 1, head 1"
    tab.locator("tbody tr").nth(5).click()
    assert tab.locator("#head-name").inner_text() == "Layer 1, head 2"


def test_three_views_of_a_head(tab: object) -> None:
    for view, side in (("text", N), ("close", 32), ("repeat", 80)):
        tab.locator(f"[data-view={view}]").click()
        assert tab.evaluate("document.querySelector('#map').width") == side
    tab.locator("[data-view=close]").click()
    assert tab.locator("#plate-left span").count() == 32
    box = tab.locator("#map").bounding_box()
    tab.locator("#map").hover(position={"x": 5, "y": box["height"] - 5})
    assert "31 back" in tab.locator("#caption").inner_text()
    tab.locator("#map").hover(position={"x": box["width"] - 5, "y": 5})
    assert "future" in tab.locator("#caption").inner_text()


def test_the_table_sorts_both_ways(tab: object) -> None:
    header = tab.locator("th button", has_text="induction")
    for order in ("descending", "ascending"):
        header.click()
        shown = [float(row.locator("td").nth(7).inner_text()) for row in tab.locator("tbody tr").all()]
        assert shown == sorted(shown, reverse=order == "descending")
        assert header.locator("..").get_attribute("aria-sort") == order


@pytest.fixture(scope="module")
def excerpts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a recording of statistics alone, of a text of which two parts are shown."""
    torch.manual_seed(0)
    whole = reading()
    parts = (range(20), range(30, 70))
    rows = torch.cat([torch.arange(part.start, part.stop) for part in parts])
    told = replace(
        whole,
        excerpts=parts,
        exact=False,
        received=whole.received[:, :, rows],
        values=whole.values[:, :, rows],
        indices=whole.indices[:, :, rows],
        repeats=whole.repeats[..., :0, :0],
        period=0,
    )
    file = tmp_path_factory.mktemp("report") / "excerpts.html"
    file.write_text(page(told), encoding="utf-8")
    return file


@pytest.mark.parametrize("width", [1360, 390])
def test_excerpts_of_a_long_text(width: int, browser: object, excerpts: Path) -> None:
    tab = browser.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto(excerpts.as_uri())
    assert tab.locator(".t").count() == 60
    assert tab.locator(".gap").all_inner_texts() == ["10 tokens are not shown", "50 tokens are not shown"]
    assert "60 of 120 tokens" in tab.locator("#excerpts").inner_text()
    assert tab.locator("[data-view=repeat]").is_hidden()
    assert "8 largest weights of each query" in tab.locator("#caption").inner_text()
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tab.locator(".t").nth(59).click()
    assert "token 69" in tab.locator("#readout").inner_text()
    shown = tab.locator(".readout-list li")
    expected = [key for weight, key in reading_of_page(tab, layer=1, head=1, query=69) if weight >= 33 / 65535]
    for item, key in zip(shown.all(), expected, strict=True):
        assert key == 69 or str(69 - key) in item.get_attribute("title")
    tab.locator("#text").press("ArrowRight")
    assert "token 69" in tab.locator("#readout").inner_text()  # nothing is shown behind it
    tab.locator(".t").nth(20).click()
    tab.locator("#text").press("ArrowLeft")
    assert "token 19" in tab.locator("#readout").inner_text()
    tab.locator("[data-view=text]").click()
    box = tab.locator("#map").bounding_box()
    tab.locator("#map").click(position={"x": 5, "y": box["height"] - 5})  # behind what is shown: the nearest token
    assert "token 69" in tab.locator("#readout").inner_text()
    tab.close()
    assert complaints == []
