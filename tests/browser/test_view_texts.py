"""Every sequence of a batch and both sides of cross-attention with their own tokens, wherever the page writes them."""

import csv
import io
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.browser.conftest import READY, saved, served, until
from tests.tiny_models import BART, lively

import attlas
from attlas.recording.atlas import Bookmark

pytestmark = pytest.mark.browser
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("starlette", reason="starlette is in the extra `view`")
transformers = pytest.importorskip("transformers", reason="transformers is in the extra `hf`")

SOURCE = torch.tensor([[10, 11, 12, 13, 14, 2, 0, 0], [20, 21, 22, 23, 24, 25, 26, 2]])
TARGET = torch.tensor([[2, 30, 31, 32, 33, 0], [2, 40, 41, 42, 43, 44]])
SELF, ENCODER, CROSS = 0, 2, 4  # entries of the first layer


class Tokenizer:
    def decode(self, ids: list[int]) -> str:
        return {0: "<pad>", 2: "</s>"}.get(ids[0], f" w{ids[0]}")


def words(ids: torch.Tensor) -> list[str]:
    return [Tokenizer().decode([number]) for number in ids.tolist()]


def shown(texts: list[str]) -> list[str]:
    return [text.replace(" ", "·") for text in texts]


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> attlas.Atlas:
    """Two padded sequences of different lengths, read and written by an encoder and a decoder."""
    model = lively(transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)))
    masks = {"attention_mask": (SOURCE != 0).long(), "decoder_attention_mask": (TARGET != 0).long()}
    with attlas.record(model, tokens=Tokenizer()) as recorded, torch.no_grad():
        model(SOURCE, decoder_input_ids=TARGET, **masks)
    recorded.bookmarks = [Bookmark(f"text {batch}", f"e={CROSS}&b={batch}") for batch in (0, 1)]
    folder = tmp_path_factory.mktemp("texts") / "run.atlas"
    recorded.save(folder)
    return attlas.load(folder)


@pytest.fixture
def show(atlas: attlas.Atlas, browse: Any) -> Iterator[Callable[..., Any]]:
    with served(atlas) as url:
        yield lambda fields, **options: browse(f"{url}#{fields}", **options)
        browse.close()


def drawn(page: Any) -> set[str]:
    """Return what the map writes at its axes when it is drawn anew."""
    page.evaluate(
        """() => {
          window.written = new Set();
          const write = CanvasRenderingContext2D.prototype.fillText;
          CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
            window.written.add(text);
            return write.call(this, text, ...place);
          };
        }"""
    )
    page.get_by_label("Palette").select_option("grey")
    until(page, "written.size > 0")
    page.evaluate("new Promise((done) => setTimeout(done, 300))")
    return set(page.evaluate("[...written]"))


def flows(page: Any) -> list[list[str]]:
    page.wait_for_selector(".flow .t")
    until(page, "[...document.querySelectorAll('.flow')].every((flow) => flow.querySelector('.t'))")
    return page.evaluate(
        """[...document.querySelectorAll(".flow")].map(
          (flow) => [...flow.querySelectorAll(".t")].map((token) => token.textContent))"""
    )


def vector(page: Any) -> list[str]:
    """Return the texts at the axes of the vector picture, rows before columns, without caption and colour bar."""
    texts = list(ET.fromstring(saved(page, "svg")[1]).iter("{http://www.w3.org/2000/svg}text"))
    rows = [each.text for each in texts if each.get("text-anchor") == "end"]
    return rows + [each.text for each in texts if "rotate" in each.get("transform", "")]


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize(
    ("entry", "queries", "keys"), [(SELF, TARGET, TARGET), (ENCODER, SOURCE, SOURCE), (CROSS, TARGET, SOURCE)]
)
def test_rows_and_columns_have_their_own_tokens(
    show: Callable[..., Any], entry: int, queries: torch.Tensor, keys: torch.Tensor, batch: int
) -> None:
    rows, columns = words(queries[batch]), words(keys[batch])
    page = show(f"e={entry}&b={batch}&h=1")
    assert [[*map(str.strip, text)] for text in flows(page)] == [
        [word.strip() for word in text] for text in ([rows, columns] if entry == CROSS else [columns])
    ]
    names = {text for text in drawn(page) if text.startswith(("·w", "<", "</"))}
    assert names == set(shown(rows) + shown(columns))
    assert vector(page) == shown(rows) + shown(columns)
    table = list(csv.DictReader(io.StringIO(saved(page, "csv")[1].decode())))
    cells = [(rows[int(cell["query"])], columns[int(cell["key"])]) for cell in table]
    assert [tuple(eval(cell[name]) for name in ("query_token", "key_token")) for cell in table] == cells
    stage = page.locator(".stage").bounding_box()
    page.mouse.move(stage["x"] + 0.6 * stage["width"], stage["y"] + 0.6 * stage["height"])
    page.wait_for_selector(".tip .place")
    i, j = (int(text) for text in page.locator(".tip .place").all_inner_texts())
    assert page.locator(".tip .text").all_inner_texts() == [shown(rows)[i], shown(columns)[j]]
    page.get_by_role("button", name="Lines").click()
    page.wait_for_selector(".lines line", state="attached")
    for column, texts in zip(page.locator(".lines-column").all(), (rows, columns), strict=True):
        assert column.locator("button").all_inner_texts() == shown(texts)


def test_the_chosen_sequence_changes_text_list_and_search(show: Callable[..., Any]) -> None:
    page = show(f"e={SELF}&b=0&h=1&pin=3.2")
    page.wait_for_selector(".largest .token")
    search, result = page.get_by_label("Search: token text"), page.locator(".search-result")
    search.fill("w31")
    until(page, "document.querySelector('.search-result').textContent === '1 of 1'")
    page.get_by_label("Text of the batch").select_option("1")
    until(page, "document.querySelector('.flow').textContent.includes('w41')")
    until(page, "![...document.querySelectorAll('.pinned .token')].some((each) => /w3/.test(each.textContent))")
    assert result.inner_text() == ""  # the match was one of the other text
    search.press("Enter")
    until(page, "document.querySelector('.search-result').textContent === 'no match'")
    search.fill("w42")
    until(page, "document.querySelector('.search-result').textContent === '1 of 1'")
    assert page.locator(".t.found").inner_text().strip() == "w42"


def test_both_texts_of_cross_attention_are_pointed_at_pinned_and_searched(show: Callable[..., Any], atlas: Any) -> None:
    page = show(f"e={CROSS}&b=1&h=1")
    weights = atlas.entries[CROSS].matrix[1, 1]
    queries, keys = page.locator(".flow").all()
    queries.locator(".t").nth(3).hover()
    until(page, "document.querySelector('.subject')?.textContent.startsWith('Query ·w42 3')")
    page.wait_for_selector(".largest li")
    expected = [shown(words(SOURCE[1]))[key] for key in weights[3].argsort(descending=True).tolist()]
    assert page.locator(".largest .token").all_inner_texts() == expected
    assert keys.locator(".t").nth(int(weights[3].argmax())).evaluate("(token) => token.style.background") != ""
    assert all(not token.evaluate("(token) => token.style.background") for token in queries.locator(".t").all())
    queries.locator(".t").nth(3).click()
    keys.locator(".t").nth(5).click()
    until(page, "location.hash.includes('pin=3.5')")
    assert page.locator(".t.own").inner_text().strip() == "w42"
    page.get_by_role("button", name="key ← queries").click()
    until(page, "document.querySelector('.subject')?.textContent.startsWith('Key ·w25 5')")
    until(page, "document.querySelector('.largest .token')?.textContent.startsWith('·w4')")
    assert page.locator(".t.own").inner_text().strip() == "w25"
    page.get_by_role("button", name="unpin").click()
    for word, place in (("w43", "pin=4."), ("w22", ".2")):
        page.get_by_label("Search: token text").fill(word)
        until(page, f"document.querySelector('.t.found')?.textContent.trim() === '{word}'")
        until(page, f"(location.hash.match(/pin=\\d+\\.\\d+/)?.[0] ?? '').includes('{place}')")
        assert page.locator(".t.found").count() == 1


def test_an_unknown_text_is_positions_alone(atlas: attlas.Atlas, browse: Any) -> None:
    known = attlas.Atlas(atlas.entries, tokens=words(TARGET[0]))  # of sequence 0 of the decoder alone
    with served(known) as url:
        page = browse(f"{url}#e={CROSS}&b=0&h=1&pin=1.2")
        assert [[text.strip() for text in flow] for flow in flows(page)] == [
            [each.strip() for each in words(TARGET[0])]
        ]
        page.wait_for_selector(".largest li")
        assert page.locator(".largest .token").count() == 0
        assert vector(page)[6:] == [str(place) for place in range(8)]
        page.close()
        for fields in (f"e={CROSS}&b=1", f"e={SELF}&b=1", f"e={ENCODER}&b=0"):
            page = browse(f"{url}#{fields}&h=1&pin=1.1&a=both")
            page.wait_for_selector(".largest li")
            assert page.locator(".flow, .token").count() == 0
            assert not {text for text in drawn(page) if "w" in text or "<" in text}
            assert all(text.isdecimal() for text in vector(page))
            page.close()
        browse.close()


def test_a_tour_and_an_offline_page_have_the_texts_of_their_sequence(
    show: Callable[..., Any], browse: Any, tmp_path: Path
) -> None:
    page = show("tour=0", expected="willReadFrequently")
    assert [text[1].strip() for text in flows(page)] == ["w30", "w11"]
    page.keyboard.press("n")
    until(page, "document.querySelector('.flow').textContent.includes('w41')")
    until(page, "[...document.querySelectorAll('.flow')].every((flow) => flow.querySelectorAll('.t').length > 1)")
    assert [text[1].strip() for text in flows(page)] == ["w40", "w21"]
    (tmp_path / "page.html").write_bytes(saved(page, "html")[1])
    live = vector(page)
    offline = browse((tmp_path / "page.html").as_uri())
    offline.wait_for_selector(READY)
    assert [text[1].strip() for text in flows(offline)] == ["w40", "w21"]
    assert vector(offline) == live == shown(words(TARGET[1])) + shown(words(SOURCE[1]))
    offline.get_by_label("Search: token text").fill("w22")
    until(offline, "document.querySelector('.t.found')?.textContent.trim() === 'w22'")
