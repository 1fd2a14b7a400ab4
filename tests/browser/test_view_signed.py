"""A model with layers of linear attention in a real browser: colours and numbers of both signs, and no shares."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.atlases import atlas_of
from tests.browser.conftest import number, saved, served, until

import attlas
from attlas.recording.atlas import Atlas

pytestmark = pytest.mark.browser
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

N, HEADS = 160, 2
TOKENS = [f"w{i} " for i in range(N)]


def layer(number: int, n: int = N) -> attlas.AttentionMatrix:
    generator = torch.Generator().manual_seed(number)
    q, k = (torch.nn.functional.normalize(torch.randn(1, HEADS, n, 8, generator=generator), dim=-1) for _ in range(2))
    if number == 1:
        return attlas.attend(4 * q, 4 * k, mask=attlas.Causal())
    write = torch.rand(1, HEADS, N, generator=generator)
    return 10.0 * attlas.transport(q, k, -0.05 * torch.rand(1, HEADS, N, generator=generator), write)


@pytest.fixture(scope="module")
def hybrid() -> Atlas:
    return atlas_of(layer(0), layer(1), model="tiny hybrid", tokens=TOKENS)


@pytest.fixture
def show(browse: Any, hybrid: Atlas, request: pytest.FixtureRequest) -> Callable[..., Any]:
    address = request.getfixturevalue("address")
    return lambda hash_, width=1280, **options: browse(f"{address}#{hash_}", width, 844, **options)


@pytest.fixture(scope="module")
def address(hybrid: Atlas) -> Any:
    with served(hybrid, title="hybrid") as url:
        yield url


def places(page: Any) -> list[int]:
    """Keys of the list beside the text."""
    return [int(place) for place in page.locator(".largest .place").all_inner_texts()]


def test_lists_and_facts_have_signs(show: Callable[..., Any], hybrid: Atlas) -> None:
    page = show("e=0&h=1&pin=100.90")
    row = hybrid[0][0, 1, 100]
    until(page, "document.querySelectorAll('.cell-facts dt').length > 0")
    best = row.abs().topk(8).indices.tolist()
    assert places(page) == best
    texts = page.locator(".largest .share").all_inner_texts()
    assert [text[0] for text in texts] == ["+" if float(row[key]) > 0 else "−" for key in best]
    assert [number(text.lstrip("+")) for text in texts] == pytest.approx([float(row[key]) for key in best], rel=6e-3)
    bars = page.locator(".largest-bar")
    names = [bars.nth(place).get_attribute("class").split()[-1] for place in range(8)]
    assert names == ["above" if float(row[key]) > 0 else "below" for key in best]
    facts = dict(zip(*(page.locator(f".cell-facts {part}").all_inner_texts() for part in ("dt", "dd")), strict=True))
    assert number(facts["row sum"]) == pytest.approx(float(row.sum()), rel=6e-3)
    assert number(facts["weight"]) == pytest.approx(float(row[90]), rel=1e-3)
    assert {"row entropy", "logit"}.isdisjoint(facts)
    rest = page.locator(".largest-rest").inner_text().split("; ")[1]
    assert number(rest) == pytest.approx(float(row.sum()), rel=6e-3)
    # Nothing on the page tells these weights in percent, or speaks of a share of attention.
    until(page, "document.querySelector('.headmap-says').textContent.includes(':')")
    for part in (".slot-text", ".says", ".colourbar"):
        assert "%" not in page.locator(part).first.inner_text()
    assert "attention" not in page.locator(".says").first.inner_text()
    assert page.locator(".says-sentence").inner_text() == "Weights may be negative: blue is above 0, red below."
    assert page.get_by_role("checkbox", name="without first key").is_disabled()
    # The colours of tokens tell the sign.
    colours = page.evaluate("[...document.querySelectorAll('.t')].map((t) => [t.dataset.position, t.style.background])")
    for place, background in colours:
        key = int(place)
        if key <= 100 and abs(float(row[key])) > 0.02 * float(row.abs().max()):
            assert ("--above" if float(row[key]) > 0 else "--below") in background
    # The layer with a softmax beside it is told in percent, as ever.
    page.keyboard.press("Escape")
    page.evaluate("location.hash = 'e=1&h=0&pin=100.90'")
    until(page, "/ %$/m.test(document.querySelector('.largest').innerText)")
    until(page, "document.querySelector('.cell-facts').innerText.includes('row entropy')")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_the_scale_has_both_signs(show: Callable[..., Any], hybrid: Atlas, width: int, scheme: str) -> None:
    page = show("e=0&h=0", width, color_scheme=scheme)
    ticks = page.locator(".bar-axis span").all_inner_texts()
    assert "0" in ticks
    below, above = ([text[1:] for text in ticks if text[0] == sign] for sign in "−+")
    assert below[::-1] == above != []
    bar = page.evaluate(
        """() => {
          const { data } = document.querySelector(".bar-canvas").getContext("2d").getImageData(0, 0, 256, 1);
          return [20, 128, 235].map((x) => [...data.slice(4 * x, 4 * x + 3)]);
        }"""
    )
    (red, _, blue), middle, (other_red, _, other_blue) = bar
    assert red > blue + 40
    assert other_blue > other_red + 20
    assert max(middle) - min(middle) < 30  # the paper
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    # Thumbnails have both hues where the weights have both signs, and one where they are shares.
    if width < 720:
        page.get_by_role("button", name="Heads", exact=True).click()
    until(page, "document.querySelectorAll('.thumb.drawn').length === 4")
    counts = page.evaluate(
        """() => [...document.querySelectorAll(".thumb canvas")].map((canvas) => {
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          let reds = 0;
          for (let k = 0; k < data.length; k += 4) reds += Number(data[k + 3] > 0 && data[k] > data[k + 2] + 30);
          return reds;
        })"""
    )
    assert min(counts[:2]) > 50
    assert max(counts[2:]) == 0
    page.keyboard.press("Escape")


def test_the_map_the_pointer_and_the_keys_tell_signs(show: Callable[..., Any], hybrid: Atlas) -> None:
    dense = hybrid[0].to_dense()[0, 0]
    page = show("e=0&h=0&z=5.5&r=100.5&c=95.5")
    overlay = page.locator(".overlay")
    overlay.focus()
    page.keyboard.press("Enter")  # the crosshair in the middle
    heard = page.locator(".unseen[aria-live]")
    for key, column in (("", 95), ("ArrowLeft", 94), ("ArrowLeft", 93)):
        if key:
            page.keyboard.press(key)
        until(page, f"document.querySelector('.unseen[aria-live]').textContent.includes('key {column}')")
        until(page, "document.querySelector('.unseen[aria-live]').textContent.includes('weight')")
        told = number(heard.inner_text().split("weight ")[1])
        assert told == pytest.approx(float(dense[100, column]), rel=6e-3)
        page.locator(".tip").get_by_text("of its row").wait_for()
        assert "%" not in page.locator(".tip").inner_text()
        assert "entropy" not in page.locator(".tip").inner_text()
        assert (page.locator(".tip-weight").inner_text()[0] == "−") == (told < 0)
        # The patch beside the number has the hue of its sign.
        patch = page.locator(".bar-read .patch").evaluate("(part) => getComputedStyle(part).backgroundColor")
        red, _, blue = map(int, re.findall(r"\d+", patch)[:3])
        assert (red > blue) == (told < 0)


def test_a_difference_of_heads_of_both_kinds(show: Callable[..., Any], hybrid: Atlas) -> None:
    page = show("e=0&h=0&s=1.1&m=ratio&pin=100.90")
    until(page, "location.hash.includes('m=difference')")  # weights that may be negative are not divided
    page.get_by_role("button", name="Compare").click()
    assert page.get_by_role("button", name="log-ratio").is_disabled()
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("button", name="Lines").click()
    page.wait_for_selector(".lines line.below", state="attached")
    lines = page.evaluate(
        "[...document.querySelectorAll('.lines line')].map((l) => [+l.dataset.query, +l.dataset.key, l.classList[0]])"
    )
    least = 0.05 * float(hybrid[0].abs().max())
    shown = {(int(i), int(j)): name for i, j, name in lines}
    first = int(page.locator(".lines-column button").first.get_attribute("title"))
    window = hybrid[0].to_dense()[0, 0][first : first + 64, first : first + 64]
    assert shown == {
        (i, j): "below" if float(window[i, j]) < 0 else "above" for i, j in (window.abs() >= least).nonzero().tolist()
    }


def test_a_single_difference_and_its_offline_page(browse: Any, tmp_path: Path) -> None:
    n = 1100  # too many cells for exact weights of all in a file
    A = layer(1, n)[0, 0] - 0.5 * layer(1, n)[0, 1]
    dense = A.to_dense().squeeze()
    best = {i: dense[i].abs().topk(8).indices.tolist() for i in (100, 120)}
    with served(A, tokens=[f"w{i} " for i in range(n)]) as url:
        page = browse(f"{url}#pin=100.90")
        until(page, "document.querySelectorAll('.largest button').length === 8")
        assert places(page) == best[100]
        # Zoomed out, a pixel shows the weight of largest size, with its sign.
        told = page.locator(".status-scale").inner_text()
        assert re.fullmatch(r"a pixel shows the weight of largest size of (\d) × \1 cells", told)
        side = int(told.split(" × ")[0][-1])
        assert page.locator(".bar-title").inner_text() == f"largest size of {side} × {side}"
        box = page.locator(".overlay").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + box["height"] * 0.65)
        page.locator(".tip .place").first.wait_for()
        until(page, "!document.querySelector('.tip .place').textContent.includes('–')")
        i, j = (int(text.replace(",", "")) for text in page.locator(".tip .place").all_inner_texts())
        (r, c), size = (place // side * side for place in (i, j)), side
        block = dense[r : r + size, c : c + size].flatten()
        assert number(page.locator(".tip-weight").inner_text()) == pytest.approx(
            float(block[block.abs().argmax()]), rel=6e-3
        )
        _, body = saved(page, "html")
        browse.close()
    (tmp_path / "page.html").write_bytes(body)
    offline = browse((tmp_path / "page.html").as_uri())
    until(offline, "document.querySelectorAll('.largest button').length === 8")
    assert places(offline) == best[100]
    offline.locator('.t[data-position="120"]').click()
    until(offline, "document.querySelector('.subject .place').textContent.trim() === '120'")
    assert "≈" in offline.locator(".largest button").first.get_attribute("title")  # rounded
    assert sorted(places(offline)) == sorted(best[120])
    texts = offline.locator(".largest .share").all_inner_texts()
    row = dense[120]
    assert [number(text.lstrip("+")) for text in texts] == pytest.approx(
        [float(row[key]) for key in places(offline)], rel=6e-3
    )
