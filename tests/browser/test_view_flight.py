"""A flight over the map: from the whole matrix to two words or along bookmarks, played, stood still, and recorded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.atlases import atlas_of, random_matrix
from tests.browser.conftest import CUT, served, state, until

import attlas
from attlas.recording.atlas import Bookmark
from attlas.view import export

pytestmark = pytest.mark.browser
N = 700
MOVING = {"reduced_motion": "no-preference"}
SECONDS = "Number(document.querySelector('.flight input').value)"


@pytest.fixture(scope="module")
def atlas() -> attlas.Atlas:
    A = random_matrix(N)
    return atlas_of(A, A, tokens=[f" w{i}" for i in range(N)])


@pytest.fixture(scope="module")
def address(atlas: attlas.Atlas) -> Iterator[str]:
    with served(atlas) as url:
        yield url


def at(page: Any, seconds: float) -> dict[str, str]:
    """Take the flight to a time, and return the fields of the page."""
    page.locator(".flight input").fill(str(seconds))
    return state(page)


def said(page: Any) -> str:
    return page.locator(".flight-says").inner_text()


def test_a_key_flies_from_the_whole_matrix_to_the_pinned_words(browse: Any, address: str, atlas: attlas.Atlas) -> None:
    page = browse(f"{address}#e=1&h=0&pin=400.123", **MOVING)
    page.keyboard.press("f")
    until(page, f"{SECONDS} > 0.3")  # it runs by itself
    assert page.get_by_role("button", name="Pause the flight").is_visible()
    whole = at(page, 1)
    assert "pin" not in whole
    assert said(page).startswith("Layer 1, head 0")
    assert page.get_by_role("button", name="Play the flight").is_visible()  # whoever takes the slider stops it
    first, second = (at(page, seconds) for seconds in (5, 8))
    assert float(whole["z"]) < float(first["z"]) < float(second["z"])
    end = at(page, 15)
    assert [float(end[field]) for field in ("r", "c", "z")] == pytest.approx([400.5, 123.5, 4.7004], abs=1e-3)
    weight = float(atlas[1][0, 0, 400, 123])
    assert said(page).startswith("“w400” attends to “w123” with ")
    assert float(said(page).split(" with ")[1].split(" %")[0]) / 100 == pytest.approx(weight, rel=0.05)  # two digits
    assert page.locator(".flight input").get_attribute("aria-valuetext") == "15.0 of 15 seconds"
    page.keyboard.press("Escape")
    assert page.locator(".flight").is_hidden()
    assert state(page)["pin"] == "400.123"


def test_it_goes_on_until_a_hand_takes_the_map(browse: Any, address: str) -> None:
    page = browse(f"{address}#e=1&h=0&pin=400.123", **MOVING)
    page.get_by_role("button", name="Fly", exact=True).click()
    until(page, f"{SECONDS} > 4")
    before = page.locator(".overlay").bounding_box()
    page.mouse.move(before["x"] + 300, before["y"] + 200)
    page.mouse.down()
    page.mouse.up()
    until(page, "document.querySelector('.flight button').textContent === '▶'")
    seconds = page.evaluate(SECONDS)
    page.wait_for_timeout(400)
    assert page.evaluate(SECONDS) == seconds
    page.get_by_role("button", name="Play the flight").click()
    until(page, f"{SECONDS} > {seconds + 0.3}")
    page.keyboard.press("f")
    assert page.locator(".flight").is_hidden()


def test_nothing_moves_for_those_who_want_it_so(browse: Any, address: str) -> None:
    page = browse(f"{address}#e=1&h=0&pin=400.123", reduced_motion="reduce")
    page.keyboard.press("f")
    seen = set()
    while page.evaluate(SECONDS) < 12:
        seen.add(tuple(state(page).get(field) for field in ("r", "c", "z")))
    assert len(seen - {(None, None, None)}) <= 3  # where it stood before, the whole matrix, the two words
    until(page, "location.hash.includes('r=400.5')")  # the address is written a moment later


@pytest.mark.parametrize("where", ["server", "file"])
def test_bookmarks_are_its_stops(where: str, browse: Any, atlas: attlas.Atlas, tmp_path: Path) -> None:
    atlas.bookmarks = [
        Bookmark("far back", "e=1&h=1&pin=600.20&r=600.5&c=20.5&z=4", "This query looks far back."),
        Bookmark("all of it", "e=0&h=0", "A whole head."),
        Bookmark("a pair", "e=0&h=0&pin=300.299", ""),
    ]
    try:
        if where == "file":
            page = browse(export(atlas, tmp_path / "page.html").as_uri(), **MOVING)
            fly(page)
        else:
            with served(atlas) as url:
                fly(browse(url, **MOVING))
                browse.close()
    finally:
        atlas.bookmarks = []


def fly(page: Any) -> None:
    page.keyboard.press("f")
    until(page, f"{SECONDS} > 0")
    length = float(page.locator(".flight input").get_attribute("max"))
    assert length == 20
    told, heads = [], []
    for step in range(41):
        fields = at(page, step * length / 40)
        words, head = said(page), (fields.get("e", "0"), fields.get("h", "0"))
        told += [words] if words not in told else []
        heads += [head] if heads[-1:] != [head] else []
    assert [words.split("\n")[0].strip() for words in told[1:]] == [
        "far back This query looks far back.",
        "all of it A whole head.",
        "a pair",
    ]
    assert heads == [("1", "1"), ("0", "0")]
    assert float(state(page)["r"]) == 300.5


def test_a_film_is_recorded_and_plays(browse: Any, address: str) -> None:
    page = browse(f"{address}#e=1&h=0&pin=400.123", 760, 520)  # a small film: two cores encode and decode it
    page.get_by_role("button", name="Export").click()
    with page.expect_download(timeout=90_000) as download:
        page.locator("[data-export=film]").click()
        page.wait_for_selector(".attlas-filmed")
        # Nothing moves on the screen for those who want it so, and no hand gets into the film.
        assert page.locator(".stage").evaluate("(stage) => getComputedStyle(stage).opacity") == "0"
        assert page.locator(".slot-map").evaluate("(map) => map.inert")
        assert page.locator(".slot-text").is_hidden()
    assert download.value.suggested_filename.endswith("1-0.webm")
    page.wait_for_selector(".flight", state="hidden")
    assert page.locator(".slot-text").is_visible()
    assert not page.locator(".slot-map").evaluate("(map) => map.inert")
    film = Path(download.value.path()).read_bytes()
    assert film[:4] == b"\x1a\x45\xdf\xa3"
    assert 50_000 < len(film) < 30e6
    facts = frames(browse, film)
    assert facts["width"] == 760
    assert facts["height"] % 2 == 0
    assert 11 < facts["seconds"] < 20
    end, first, middle = facts["frames"]
    assert first != middle != end
    assert min(facts["tones"]) > 20  # no frame is empty


def frames(browse: Any, film: bytes) -> dict[str, Any]:
    """Play a film, and return its size, its length, and three of its frames as sums and counts of their colours."""
    page = browse("about:blank", wait="")
    return page.evaluate(
        """async (bytes) => {
          const video = Object.assign(document.createElement("video"), { muted: true });
          video.src = URL.createObjectURL(new Blob([new Uint8Array(bytes)], { type: "video/webm" }));
          await new Promise((done, failed) => Object.assign(video, { onloadeddata: done, onerror: failed }));
          video.currentTime = 1e6; // where no duration is written, the end is found so
          await new Promise((done) => { video.onseeked = done; });
          const seconds = video.currentTime;
          const canvas = new OffscreenCanvas(320, 160);
          const context = canvas.getContext("2d", { willReadFrequently: true });
          const [frames, tones] = [[], []];
          for (const time of [seconds, 0.5, 0.5 * seconds]) { // the end is there already
            if (time !== seconds) {
              video.currentTime = time;
              await new Promise((done) => { video.onseeked = done; });
            }
            context.drawImage(video, 0, 0, 320, 160);
            const words = new Uint32Array(context.getImageData(0, 0, 320, 160).data.buffer);
            frames.push(words.reduce((sum, word) => (sum * 31 + word) % 1e9, 0));
            tones.push(new Set(words).size);
          }
          return { width: video.videoWidth, height: video.videoHeight, seconds, frames, tones };
        }""",
        list(film),
    )


def test_a_film_can_be_given_up(browse: Any, address: str) -> None:
    page = browse(f"{address}#e=1&h=0&pin=400.123")
    page.get_by_role("button", name="Export").click()
    page.locator("[data-export=film]").click()
    page.wait_for_selector(".attlas-filmed")
    page.get_by_role("button", name="End the flight").click()
    page.wait_for_selector(".slot-text", state="visible")
    assert page.locator(".flight").is_hidden()
    assert page.locator(".attlas-filmed").count() == 0


def test_nothing_is_played_before_it_is_known_where_the_flight_goes(browse: Any, address: str) -> None:
    waiting: list[Any] = []

    def wait(route: Any) -> None:
        waiting.append(route)

    page = browse(f"{address}#e=1&h=0")
    until(page, "document.querySelectorAll('.thumb.drawn').length > 0")
    page.route("**/api/row*", wait)
    page.keyboard.press("f")
    page.wait_for_selector(".flight:not([hidden])")
    play, slider = page.locator(".flight button").first, page.locator(".flight input")
    assert play.is_disabled()
    assert slider.is_disabled()
    assert slider.input_value() == "0"
    page.wait_for_timeout(100)
    assert waiting
    for route in waiting:
        route.continue_()
    until(page, "!document.querySelector('.flight input').disabled")
    assert play.is_enabled()


@pytest.mark.parametrize("width", [390, 1024, 1280])
@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
def test_the_bar_fits_and_is_translated(width: int, language: str, browse: Any, address: str) -> None:
    page = browse(f"{address}#e=1&h=0&pin=400.123", width, 844, locale=language, **MOVING)
    page.keyboard.press("f")
    until(page, f"{SECONDS} > 0")
    at(page, 15)
    assert page.evaluate(CUT) == []
    map_, bar, foot = (page.locator(name).bounding_box() for name in (".slot-map", ".flight", ".foot"))
    assert map_["y"] + map_["height"] <= bar["y"] + 1
    assert bar["y"] + bar["height"] <= foot["y"] + 1
    if language == "zh-CN":
        assert said(page).startswith("“w400” 关注 “w123” 占其注意力的 ")
        names = page.locator(".flight [aria-label]").evaluate_all("(all) => all.map((each) => each.ariaLabel)")
        assert names == ["播放飞行", "飞行的秒数", "结束飞行"]
