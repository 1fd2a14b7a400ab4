"""The box for a text of one's own: the model reads it, the map follows and grows token by token."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.browser.conftest import READY, served, until

import attlas
from attlas import models

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    pytest.importorskip("starlette", reason="needs attlas[view]")
    transformers = pytest.importorskip("transformers", reason="needs attlas[hf]")
    from attlas.view import Service
    from attlas.view.reading import ReadingService

    def load() -> tuple[Any, Any]:
        folder = models.path()
        return (
            transformers.AutoModelForCausalLM.from_pretrained(folder),
            transformers.AutoTokenizer.from_pretrained(folder),
        )

    shown = Service(attlas.attend(torch.randn(1, 1, 30, 8), torch.randn(1, 1, 30, 8), mask=attlas.Causal()))
    with served(ReadingService(shown, load, name="python-gpt2")) as address:
        yield address


def says(page: Any, text: str) -> None:
    found = "document.querySelector('.reading-says')?.textContent"
    page.wait_for_function(
        f"() => ({found} ?? '').includes({text!r}) && document.querySelectorAll('.attlas').length === 1"
    )


def size_of_the_map(page: Any, text: str = "") -> list[int]:
    asked = f"./api/info?text={text}" if text else "./api/info"
    found: list[int] = page.evaluate(
        "(asked) => fetch(asked).then((a) => a.json()).then(({ entries: [e] }) => [e.m, e.n])", asked
    )
    return found


def test_a_text_is_typed_read_and_continued(browse: Any, url: str) -> None:
    page = browse(url, expected="Failed to load")
    page.set_default_timeout(30_000)
    box = page.get_by_role("textbox", name="Your text")
    # What cannot be done says why, and the map stays.
    page.get_by_role("button", name="Read", exact=True).click()
    says(page, "Type a text first")
    page.get_by_role("button", name="+ 1 token").click()
    says(page, "type a text first")
    assert size_of_the_map(page) == [30, 30]
    box.fill("import os\nimport sys\n")
    page.keyboard.press("Control+Enter")
    says(page, "7 tokens read")
    assert size_of_the_map(page) == [7, 7]
    assert "import" in page.locator(".flow").first.inner_text()
    # The head that is looked at stays when the text grows; so does the focus.
    page.locator(".pick-layer").select_option("2")
    page.locator(".pick-head").select_option("4")
    page.get_by_role("button", name="+ 1 token").click()
    says(page, "8 tokens read")
    assert size_of_the_map(page) == [8, 8]
    assert (page.locator(".pick-layer").input_value(), page.locator(".pick-head").input_value()) == ("2", "4")
    page.wait_for_function("() => document.activeElement.dataset.keep === 'next'")
    page.get_by_role("button", name="+ 10 tokens").click()
    says(page, "18 tokens read")
    assert size_of_the_map(page) == [18, 18]
    # A text that is too long is refused, and what was typed is still there.
    box.evaluate("(box, text) => { box.value = text; box.dispatchEvent(new Event('input')); }", "x = 1; " * 3000)
    page.get_by_role("button", name="Read", exact=True).click()
    says(page, "reads at most 2,048")
    assert len(box.input_value()) > 15_000
    assert size_of_the_map(page) == [18, 18]
    # The page as it is opened again shows the same text.
    page.reload()
    page.wait_for_selector(READY)
    assert box.input_value().startswith("import os\nimport sys\n")


# What the page says of the heads at each frame, while it is built again and again.
WATCH = """() => {
  window.seen = new Set();
  const look = () => {
    const root = document.querySelector(".attlas");
    const cells = [...root.querySelectorAll(".headmap-grid button")];
    const thumbs = [...root.querySelectorAll(".thumb")].slice(0, 3);
    const statistic = root.querySelector("select[aria-label=Statistic]");
    window.seen.add(JSON.stringify({
      headline: root.querySelector(".says b").textContent,
      text: root.querySelector(".says-text").textContent.slice(0, 14),
      statistics: statistic.options.length > 5 && !statistic.disabled,
      known: cells.filter((cell) => cell.style.background).length,
      kinds: [...root.querySelectorAll(".thumb-kind")].filter((kind) => kind.textContent).length,
      drawn: thumbs.filter((thumb) => thumb.classList.contains("drawn")).length,
    }));
    requestAnimationFrame(look);
  };
  look();
}"""


# Whether the lines over the map show all of their words, within their box and beside the tools.
UNCUT = """() => {
  const parts = [".says", ".says b", ".says-sentence", ".says-text"].map((part) => document.querySelector(part));
  const fits = (part) => part.scrollHeight <= part.clientHeight + 1 && part.scrollWidth <= part.clientWidth;
  const find = (part) => document.querySelector(part).getBoundingClientRect();
  const [head, tools, line] = [".middle-head", ".map-tools", ".says-text"].map(find);
  const isBeside = line.right <= tools.left || line.top >= tools.bottom || line.bottom <= tools.top;
  const isWhole = parts[0].scrollHeight <= parts[0].clientHeight + 1 && parts.slice(1).every(fits);
  const isWithin = line.bottom <= head.bottom + 0.5 && tools.right <= head.right && tools.left >= head.left;
  return isWhole && isBeside && isWithin;
}"""


def test_what_is_said_of_the_heads_stays_while_tokens_are_written(browse: Any, url: str) -> None:
    page = browse(url)
    page.set_default_timeout(30_000)
    page.get_by_role("textbox", name="Your text").fill("def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return")
    page.keyboard.press("Control+Enter")
    says(page, "24 tokens read")
    page.locator(".pick-layer").select_option("2")
    page.locator(".pick-head").select_option("4")
    lines = page.locator(".says").inner_text().splitlines()
    assert lines[0] == "Layer 2, head 4 remembers what came next"
    assert lines[1].startswith("Show it random tokens, then the same tokens again: 65.7 % of its attention")
    assert re.fullmatch(r"On this text: 5\d.\d\s% on what followed earlier copies, [\d.]+\s% by chance\.", lines[2])
    # Nothing of it is cut off, and it does not lie under the tools.
    for width in (390, 720, 768, 834, 1024, 1110, 1280, 1440, 1920):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(60)
        assert page.evaluate(UNCUT), width
    page.set_viewport_size({"width": 1280, "height": 800})
    # A head whose kind was measured on random tokens says so, and what it does here.
    page.locator(".pick-layer").select_option("0")
    page.locator(".pick-head").select_option("0")
    lines = page.locator(".says").inner_text().splitlines()
    assert lines[0] == "Layer 0, head 0 looks at the token before"
    assert re.fullmatch(r"On random tokens: 8\d.\d % of its attention goes to the token before\.", lines[1])
    assert re.fullmatch(r"On this text: 9\d.\d\s% goes to the token before\.", lines[2])
    page.get_by_role("button", name="Evidence").click()
    evidence = page.locator("dialog[open]").inner_text()
    assert evidence.index("On random tokens that occur twice") < evidence.index("On this text")
    page.keyboard.press("Escape")
    until(page, "document.querySelectorAll('.thumb.drawn').length >= 3")
    page.evaluate(WATCH)
    page.get_by_role("button", name="+ 10 tokens").click()
    says(page, "34 tokens read")
    seen = [json.loads(each) for each in page.evaluate("[...window.seen]")]
    assert seen
    for each in seen:
        assert each == {
            "headline": "Layer 0, head 0 looks at the token before",
            "text": "On this text: ",
            "statistics": True,
            "known": 28,  # 24 heads, and the rollouts up to each of four layers
            "kinds": 28,
            "drawn": 3,
        }


def test_texts_are_kept_and_back_leads_to_the_text_before(browse: Any, url: str) -> None:
    page = browse(url)
    page.set_default_timeout(60_000)  # the model is loaded and measured first
    first = page.locator(".pick-text option").first.inner_text() if page.locator(".pick-text option").count() else None
    for text in ("import json\n", "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return"):
        page.get_by_role("textbox", name="Your text").fill(text)
        page.keyboard.press("Control+Enter")
        says(page, "tokens read")
        until(page, f"document.querySelector('.flow').textContent.includes({text.split()[1]!r})")
    texts = page.get_by_label("Text that was read")
    assert texts.locator("option").all_inner_texts()[-2:] == ["import json", "def add(a, b): return a + b def sub(a,…"]
    assert first is None or texts.locator("option").first.inner_text() == first
    assert page.title().endswith("def add(a, b): return a + b def sub(a,… · attlas")
    # The heads of the older text are still answered for, in the same tab and in another one.
    page.go_back()
    until(page, "document.querySelector('.flow')?.textContent.includes('json')")
    assert texts.evaluate("(list) => list.selectedOptions[0].textContent") == "import json"
    assert size_of_the_map(page, page.evaluate("new URLSearchParams(location.hash.slice(1)).get('txt')")) == [5, 5]
    page.go_forward()
    until(page, "document.querySelector('.flow')?.textContent.includes('sub')")
    texts.select_option(label="import json")
    until(page, "document.querySelector('.flow')?.textContent.includes('json')")
    page.get_by_role("button", name="+ 1 token").click()  # the older text grows, in its place
    says(page, "6 tokens read")
    assert texts.evaluate("(list) => list.selectedOptions[0].textContent").startswith("import json")
    texts.select_option("0")
    until(page, "document.querySelectorAll('.attlas').length === 1 && !document.querySelector('.flow .t')")
    assert size_of_the_map(page, "0") == [30, 30]


def test_the_model_is_loaded_when_the_box_is_entered(browse: Any) -> None:
    from attlas.view import Service
    from attlas.view.reading import ReadingService

    began: list[str] = []

    def load() -> tuple[Any, Any]:
        began.append("loading")
        raise OSError("not needed")

    with served(
        ReadingService(Service(attlas.attend(torch.zeros(5, 8), torch.zeros(5, 8))), load, name="m")
    ) as address:
        page = browse(address)
        assert began == []
        with page.expect_response("**/api/read"):
            page.get_by_role("textbox", name="Your text").focus()
        page.wait_for_timeout(200)
        assert began == ["loading"]
        browse.close()
