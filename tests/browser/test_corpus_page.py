"""The page of a corpus in a real browser, against the folder that it shows."""

import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from tests.browser.conftest import CUT, latin_words, serious_faults, served, state, until

import attlas

pytestmark = pytest.mark.browser
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("starlette", reason="starlette is in the extra `view`")
pytest.importorskip("pyarrow", reason="pyarrow is in the extra `corpus`")
transformers = pytest.importorskip("transformers", reason="transformers is in the extra `hf`")

READY = ".attlas-ready .scatter-plot circle, .attlas-ready .head-plots svg"


@pytest.fixture(scope="module")
def model() -> Any:
    from attlas import models
    from attlas.cli.loading import load

    return load(models.path())


@pytest.fixture(scope="module")
def folders(model: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two corpora of one model: definitions of Python, and the same word over and over."""
    made = tmp_path_factory.mktemp("corpora")
    code = [f"def f{i}(x, y):\n    return x + {i} * y  # <b>{'ab ' * i}</b>\n" * 6 for i in range(6)]
    plain = [f"import os, sys\nfor name in names{i}:\n    print(name, {i})\n" * 6 for i in range(5)]
    for name, texts in (("code.corpus", code), ("plain.corpus", plain)):
        attlas.corpus(model.model, texts, made / name, tokenizer=model.tokenizer, length=96, limit=8, samples=4)
    return [made / "code.corpus", made / "plain.corpus"]


@pytest.fixture(scope="module")
def corpora(folders: list[Path]) -> list[Any]:
    return [attlas.load(folder) for folder in folders]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A corpus of a random model with 1,024 heads."""
    torch.manual_seed(0)
    size = {"n_embd": 64, "n_layer": 32, "n_head": 32, "vocab_size": 50, "n_positions": 32}
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))
    texts = torch.randint(0, 50, (1, 8)).tolist()
    return attlas.corpus(made, texts, tmp_path_factory.mktemp("many") / "many.corpus", samples=1)


@pytest.fixture
def show(browse: Any, model: Any) -> Iterator[Callable[..., Any]]:
    """Serve corpora and open a page on them."""
    from attlas.view import CorpusService

    with ExitStack() as stack:

        def opened(corpora: list[Any], hash_: str = "", *size: int, loaders: Any = None, **options: Any) -> Any:
            chosen = [lambda: model.model] * len(corpora) if loaders is None else loaders
            url = stack.enter_context(served(CorpusService(corpora, loaders=chosen)))
            return browse(f"{url}#{hash_}", *size, wait=READY, **options)

        yield opened
        browse.close()  # before the servers


def listed(page: Any) -> set[str]:
    return set(page.locator(".head-link").all_inner_texts())


def points(page: Any) -> list[tuple[float, float]]:
    """The middles of the points, on the page."""
    found = page.evaluate(
        """() => [...document.querySelectorAll(".scatter-plot circle[stroke-width='1']")].map((circle) => {
          const { left, top, width, height } = circle.getBoundingClientRect();
          return [left + width / 2, top + height / 2];
        })"""
    )
    return [tuple(place) for place in found]


def choose(page: Any, label: str, name: str) -> None:
    page.get_by_label(label, exact=True).select_option(name)


# ------------------------------------------------------------------------------------------------------ all heads


def test_the_title_says_that_a_corpus_is_not_finished(show: Callable[..., Any], model: Any, tmp_path: Path) -> None:
    for rank in (0, 1):
        attlas.corpus(model.model, [[1, 2, 3, 1, 2], [4, 5, 6, 4]], tmp_path / "run", samples=1, rank=rank, world=2)
        said = ", not finished" in show([attlas.load(tmp_path / "run")]).locator("h1").inner_text()
        assert said == (rank == 0)


def test_every_head_stands_where_its_numbers_are(show: Callable[..., Any], corpora: list[Any]) -> None:
    page = show(corpora[:1])
    chosen = [page.get_by_label(name, exact=True).input_value() for name in ("Across", "Up", "Size", "Colour")]
    assert chosen == ["effective_keys", "qk_distance", "induction", "kind"]  # the induction heads stand out
    choose(page, "Across", "entropy")
    choose(page, "Up", "first")
    for button in page.get_by_role("button", name="Logarithmic").all():
        if button.get_attribute("aria-pressed") == "true":
            button.click()
    table = corpora[0].table()
    place = points(page)
    assert len(place) == len(table) == 24
    for column, axis in (("entropy", 0), ("first", 1)):
        values = sorted(table[column])
        places = sorted(point[axis] for point in place)
        places = places if axis == 0 else places[::-1]  # upwards
        share = [(value - values[0]) / (values[-1] - values[0]) for value in values]
        where = [(each - places[0]) / (places[-1] - places[0]) for each in places]
        assert where == pytest.approx(share, abs=2e-3)
    assert (state(page)["x"], state(page)["y"]) == ("entropy", "first")
    words = page.locator(".scatter-plot svg").inner_html()
    assert "Entropy (nats) →" in words
    assert "First token →" in words
    assert "How spread a token's attention is" in page.locator(".scatter-says").inner_text()
    # The table sorts by any column.
    page.locator("th[data-key=first] button").click()
    first = table.sort_values("first", ascending=False, kind="stable").head(3)
    assert page.locator(".head-link").all_inner_texts()[:3] == [f"{row.layer}·{row.head}" for row in first.itertuples()]
    assert page.locator("th[data-key=first]").get_attribute("aria-sort") == "descending"


def test_a_brush_selects_and_the_link_brings_it_back(show: Callable[..., Any], corpora: list[Any]) -> None:
    page = show(corpora[:1], "x=entropy&y=previous&xl=0&yl=0")
    box = page.locator(".scatter-plot").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 120)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 40, box["y"] + box["height"] - 60, steps=4)
    page.mouse.up()
    x0, x1, y0, y1 = (float(part) for part in state(page)["b"].split("_")[1:])
    table = corpora[0].table()
    inside = table[table.entropy.between(x0, x1) & table.previous.between(y0, y1)]
    assert 0 < len(inside) < 24
    expected = {f"{row.layer}·{row.head}" for row in inside.itertuples()}
    assert listed(page) == expected
    assert f"{len(inside)} of 24 heads" in page.locator(".selection-head").inner_text()
    page.reload()
    page.wait_for_selector(READY)
    assert listed(page) == expected
    page.locator(".scatter-plot").focus()
    page.keyboard.press("Escape")
    until(page, "document.querySelectorAll('.head-link').length === 24")
    page.get_by_label("Find heads").fill("2.")
    assert listed(page) == {f"2·{head}" for head in range(6)}


def test_the_focus_stays_in_the_intervals_of_the_texts(show: Callable[..., Any], corpora: list[Any]) -> None:
    page = show(corpora[:1], "h=2.4")
    group = page.get_by_role("group", name="Interval of the largest weight")
    second = group.get_by_role("button").nth(1)
    said = second.inner_text()
    second.focus()
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.segmented [aria-pressed=true]:not(:first-child)') !== null")
    assert page.evaluate("document.activeElement.innerText") == said
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.innerText").startswith("highest")


def test_keys_lead_to_a_head_and_back(show: Callable[..., Any], corpora: list[Any]) -> None:
    page = show(corpora[:1])
    page.locator(".scatter-plot").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    assert 2 <= page.locator(".head-link").count() < 24
    name = page.locator(".tip b").inner_text()
    page.keyboard.press("Enter")
    page.wait_for_selector(".head-plots svg")
    assert page.locator(".pick-head option:checked").inner_text() == name
    page.keyboard.press("]")  # of the selection
    until(page, f"document.querySelector('.pick-head').selectedOptions[0].text !== {name!r}")
    page.keyboard.press("Escape")
    page.wait_for_selector(".scatter-plot circle")
    page.go_back()
    page.wait_for_selector(".head-plots svg")


# --------------------------------------------------------------------------------------------------------- a head


def test_a_head_shows_its_numbers_and_its_distances(show: Callable[..., Any], corpora: list[Any]) -> None:
    page = show(corpora[:1], "h=2.4&m=entropy")
    found = corpora[0].head(2, 4)
    numbers = page.locator(".number").all_inner_texts()
    entropy = next(text for text in numbers if text.startswith("Entropy (nats)"))
    assert f"{found.numbers['entropy']:.3g}" in entropy
    label = page.locator(".head-plots svg").first.get_attribute("aria-label")
    assert f"median {found.distributions['entropy']['quantiles'][5]:.3g}" in label
    total = sum(each["weight"] for each in found.distances)
    near = sum(each["weight"] for each in found.distances if 4 <= each["lower"] < 8)
    bars = page.locator(".figure:has-text('Distance to the key') svg title").all_text_contents()
    assert any(bar.startswith("4.00 to 8.00") and f"{100 * near / total:.2g}" in bar for bar in bars)
    token, weight = found.tokens["query"][0]
    kept = sum(each["kept_weight"] for each in found.distances)
    spoken = page.locator(".figure:has-text('Tokens that look') svg").first.get_attribute("aria-label")
    assert f"{100 * weight / kept:.1f} %" in spoken.split(", ")[0], token
    page.get_by_role("button", name="First token").click()
    until(page, "document.querySelector('.head-plots h3').textContent === 'First token, text by text'")
    assert state(page)["m"] == "first"


def test_a_token_shows_what_it_looks_at_and_what_looks_at_it(show: Callable[..., Any], corpora: list[Any]) -> None:
    sample = corpora[0].samples(0, 5)[0]
    page = show(corpora[:1], "h=0.5")
    card = page.locator(".sample").first
    card.scroll_into_view_if_needed()
    card.locator(".t").first.wait_for()
    query = 40
    card.locator(".flow").evaluate("(box) => { box.scrollTop = 0; }")
    card.locator(f".t[data-position='{query}']").hover()
    keys = {int(key) for key in sample.keys[query] if key >= 0}
    queries = {int(row) for row in range(len(sample.tokens)) if query in sample.keys[row]}
    shaded = {
        kind: {int(part.get_attribute("data-position")) for part in card.locator(f".t.{kind}").all()}
        for kind in ("is-key", "is-query")
    }
    assert shaded["is-key"] == keys
    assert shaded["is-query"] == queries
    assert card.locator(".sample-lines path").count() > 0
    text = card.locator(".looks").inner_text()
    assert f"{100 * float(sample.weights[query, 0]):.1f} %" in text
    card.locator(".flow").focus()
    before = card.locator(".t.own").get_attribute("data-position")
    page.keyboard.press("ArrowRight")
    assert card.locator(".t.own").get_attribute("data-position") != before
    assert page.locator(".key-word").evaluate("(part) => getComputedStyle(part).color") != page.locator(
        ".query-word"
    ).evaluate("(part) => getComputedStyle(part).color")


def test_the_texts_of_a_head_come_before_its_numbers(show: Callable[..., Any], corpora: list[Any]) -> None:
    page = show(corpora[:1], "h=2.4")
    page.wait_for_selector(".sample .flow")
    tops = [page.locator(part).first.bounding_box()["y"] for part in (".sample", ".head-numbers", ".head-plots")]
    assert tops == sorted(tops)
    assert tops[0] < 400
    # The numbers stand under what they are about: none is missing, none stands twice.
    headings = page.locator(".head-numbers h3").all_inner_texts()
    assert headings == ["Where it looks", "What it looks for", "How sharply"]
    names = [group.locator(".number-name").all_inner_texts() for group in page.locator(".number-group").all()]
    assert [("Distance (tokens)" in each, "Induction" in each, "Entropy (nats)" in each) for each in names] == [
        (True, False, False), (False, True, False), (False, False, True),
    ]  # fmt: skip
    shown = page.evaluate("fetch('./api/info').then((answer) => answer.json())")["corpora"][0]["measures"]
    assert len({name for each in names for name in each}) == sum(map(len, names)) == len(shown)


def test_a_click_opens_the_full_map_of_a_text(show: Callable[..., Any], corpora: list[Any], model: Any) -> None:
    page = show(corpora[:1], "h=2.4")
    sample = next(each for each in corpora[0].samples(2, 4) if each.interval == 5)
    page.locator(".sample-map").first.click()
    page.wait_for_selector(".attlas-ready .overlay[aria-busy=false]")
    assert "/text/" in page.url
    place = state(page)  # it opens at the cell, close enough for the tokens
    assert (float(place["r"]), float(place["z"])) == (int(place["pin"].split(".")[0]) + 0.5, 4.0)
    query, key = map(int, state(page)["pin"].split("."))
    with torch.no_grad(), attlas.record(model.model) as atlas:
        model.model(torch.tensor([sample.ids]))
    exact = float(atlas.entries[2].matrix[0, 4, query, key])
    assert exact == pytest.approx(sample.max_activation, rel=1e-4)
    until(page, "document.querySelector('.cell-facts')?.textContent.includes('weight')")
    assert f"{exact:.4f}" in page.locator(".cell-facts").inner_text()
    # The head is called as on the page of the corpus, by the measures over all texts.
    table = corpora[0].table().set_index(["layer", "head"])
    assert table.loc[(2, 4), "kind"] == "induction"
    assert page.locator(".says b").inner_text() == "Layer 2, head 4 remembers what came next"
    assert (
        f"{100 * table.loc[(2, 4), 'induction']:.1f} % of its attention" in page.locator(".says-sentence").inner_text()
    )
    until(page, "document.querySelector('.says-text').textContent.startsWith('On this text: ')")
    page.locator(".pick-layer").select_option("0")
    page.locator(".pick-head").select_option("0")
    assert table.loc[(0, 0), "kind"] == "previous token"
    share = f"{100 * table.loc[(0, 0), 'previous']:.1f} %"
    words = f"Over the texts of code.corpus: {share} of its attention goes to the token before."
    assert page.locator(".says-sentence").inner_text() == words
    page.get_by_role("link", name="‹ corpus").click()
    page.wait_for_selector(".head-plots svg")
    assert "h=2.4" in page.url


def test_without_its_model_a_text_is_not_opened_and_the_page_says_why(
    show: Callable[..., Any], corpora: list[Any]
) -> None:
    from attlas.view.corpus import NOT_THERE, OTHER_MODEL, NoModelError

    for locale, reason in (("en-US", "The model is not there: /models/x."), ("zh-CN", "模型不在这里：/models/x。")):
        page = show(corpora[:1], "h=2.4", loaders=[NoModelError(NOT_THERE, "/models/x")], locale=locale)
        button = page.locator(".sample-map").first
        assert button.is_disabled()
        assert button.get_attribute("title").startswith(reason)

    def load() -> Any:
        raise NoModelError(OTHER_MODEL, "/models/y")

    page = show(corpora[:1], "h=2.4", loaders=[load], locale="zh-CN", expected="Failed to load")
    page.locator(".sample-map").first.click()
    reason = page.locator(".sample .bad:not([hidden])")
    assert "/models/y 里的模型不是生成这份语料的那一个" in reason.inner_text()


# ------------------------------------------------------------------------------------------------- two, many, files


def test_two_corpora_stand_side_by_side(show: Callable[..., Any], corpora: list[Any]) -> None:
    page = show(corpora, "x=entropy&y=first&xl=0&yl=0")
    assert page.locator(".scatter-plot").count() == 2
    a, b = page.locator(".scatter-plot").all()
    assert a.bounding_box()["y"] == b.bounding_box()["y"]
    box = a.bounding_box()
    page.mouse.move(box["x"] + 80, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 220, box["y"] + 400, steps=3)
    page.mouse.up()
    faint = [
        part.evaluate("(plot) => plot.querySelectorAll('circle[opacity^=\"0.1\"]').length")
        for part in (a, b)
    ]  # fmt: skip
    assert faint[0] == faint[1] > 0  # the same heads, wherever they stand
    page.locator(".head-link").first.click()
    page.wait_for_selector(".head-plots svg")
    columns = page.locator(".head-column")
    assert columns.count() == 2
    until(page, "document.querySelectorAll('.head-column .head-plots').length === 2")
    assert len(set(page.locator(".pick-head option:checked").all_inner_texts())) == 1


def test_a_thousand_heads_are_usable(show: Callable[..., Any], many: Any) -> None:
    page = show([many], "x=entropy&y=first&xl=0&yl=0")
    assert len(points(page)) == 1024
    assert page.locator(".head-link").count() == 100
    box = page.locator(".scatter-plot").bounding_box()
    took = page.evaluate(
        """async ({ x, y, width, height }) => {
          const plot = document.querySelector(".scatter-plot");
          const send = (type, dx, dy) => plot.dispatchEvent(
            new PointerEvent(type, { clientX: x + dx * width, clientY: y + dy * height, button: 0, bubbles: true }));
          plot.setPointerCapture = () => {};
          send("pointerdown", 0.2, 0.2);
          const start = performance.now();
          for (let step = 0; step < 20; step++) send("pointermove", 0.3 + step / 50, 0.3 + step / 50);
          send("pointerup", 0.7, 0.7);
          return (performance.now() - start) / 20;
        }""",
        box,
    )
    assert took < 150  # milliseconds for a step of a brush on a busy machine
    assert 0 < int(page.locator(".selection h2").inner_text().split()[0]) < 1024


def test_one_file_works_offline(browse: Any, corpora: list[Any], tmp_path: Path) -> None:
    from attlas.view import export_corpus

    file = export_corpus(corpora, tmp_path / "page.html")
    page = browse(f"{file.as_uri()}#h=2.4~2.4", wait=READY)
    page.locator(".sample").first.scroll_into_view_if_needed()
    page.wait_for_selector(".sample .t")
    assert page.locator(".head-column").count() == 2
    assert "file holds all numbers and" in page.locator(".corpus-foot").inner_text()
    assert page.locator(".sample-map").first.is_disabled()
    text = file.read_text("utf-8")
    assert "http:" not in text.replace("http://www.w3.org", "")
    assert "<b>ab" not in text  # texts are data
    chinese = browse(file.as_uri(), wait=READY, locale="zh-CN")
    assert "每个头的所有数" in chinese.locator(".offline-words").inner_text()


def test_figures_are_saved(show: Callable[..., Any], corpora: list[Any]) -> None:
    page = show(corpora[:1])
    for hash_, name in (("", "scatter"), ("h=2.4&m=entropy", "entropy, text by text"), ("h=2.4", "text")):
        page.evaluate(f"location.hash = '{hash_}'")
        page.wait_for_selector(f"[title='Save as PNG: {name}']", state="attached")
        if name == "text":
            page.locator(".sample").first.scroll_into_view_if_needed()
            page.locator(".sample .t").first.wait_for()
        for kind in ("svg", "png"):
            with page.expect_download() as download:
                page.locator(f"[data-save={kind}][title='Save as {kind.upper()}: {name}']").first.click()
            body = Path(download.value.path()).read_bytes()
            assert download.value.suggested_filename.endswith(f".{kind}")
            if kind == "png":
                assert body.startswith(b"\x89PNG")
                assert len(body) > 5000
            else:
                root = ET.fromstring(body)
                texts = [part.text for part in root.iter("{http://www.w3.org/2000/svg}text")]
                assert len(texts) > 5
                assert not root.findall(".//*[@class]")  # nothing that only the page's styles explain


def test_nothing_is_cut_off(show: Callable[..., Any], corpora: list[Any]) -> None:
    page = show(corpora)
    for hash_ in ("", "h=2.4~2.4"):
        page.evaluate(f"location.hash = '{hash_}'")
        page.wait_for_selector(".sample" if hash_ else READY)
        for width in (390, 768, 1024, 1280, 1920):
            page.set_viewport_size({"width": width, "height": 800})
            page.wait_for_timeout(80)
            assert page.evaluate(CUT) == [], (hash_, width)
        assert unquote(urlsplit(page.url).fragment).startswith(hash_)


def test_axe_finds_no_serious_fault(show: Callable[..., Any], corpora: list[Any], axe: str) -> None:
    page = show(corpora[:1], bypass_csp=True)
    views = [
        ("", (1280, 800), "light"),
        ("b=0_1_20_1_60", (390, 844), "dark"),
        ("h=2.4", (1280, 800), "dark"),
        ("h=2.4", (390, 844), "light"),
        ("panel=help", (1024, 768), "light"),
    ]
    assert serious_faults(page, axe, views) == {}


# ------------------------------------------------------------------------------------------------------- Chinese

# The model, the corpora, and what else has no Chinese name; `list` is what the texts came from.
NAMES = {"HeadVis", "gpt", "python", "code", "corpus", "plain", "list"}


def test_the_page_speaks_chinese_to_a_chinese_browser(show: Callable[..., Any], corpora: list[Any]) -> None:
    page = show(corpora, locale="zh-CN")
    assert latin_words(page) - NAMES == set()
    assert page.evaluate("document.documentElement.lang") == "zh"
    assert "24 个头" in page.locator(".selection-head").inner_text()
    page.locator(".head-link").first.click()
    page.locator(".sample").first.scroll_into_view_if_needed()
    page.wait_for_selector(".sample .token")
    assert latin_words(page) - NAMES == set()
    ranks = page.locator(".number-rank")
    assert ranks.evaluate_all("(parts) => parts.filter((part) => part.scrollWidth > part.clientWidth).length") == 0
    assert page.locator(".pick-head option:checked").first.inner_text().startswith("第 ")
    head = state(page)["h"]
    page.get_by_role("button", name="帮助").click()
    page.get_by_role("button", name="English").click()
    page.wait_for_selector(".pick-head option:has-text('Layer')", state="attached")
    assert (state(page)["lang"], state(page)["h"]) == ("en", head)
