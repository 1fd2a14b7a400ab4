"""The viewer's map in a real browser: every pixel is an exact weight, and hand, keys and links move it."""

import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest
import torch
from tests.atlases import atlas_of, random_matrix
from tests.browser.conftest import READY, number, served, state

import attlas

pytestmark = pytest.mark.browser

TOKENS, LAYERS, HEADS = 640, 2, 3
WORDS = ("def", " f", "(", "x", "):", "\n    ", "return", " 日本", "🦊", "\t", "</b>", " ", "é")
STEPS, LOWEST = 65532, -64  # codes 2 to 65534 stand for log2 weights -64 to 0
LOW, HIGH = -14, 0
VIEW = f"lo={LOW}&hi={HIGH}&pal=viridis&ol=off"  # no borders of stretches over the cells

# The colours of places of the matrix, read from the canvas; where a place is, the page's own geometry says.
PIXELS = """async ({places, zoom, row, column, m, n, hasBand}) => {
  const { computePanes, placePane } = await import(new URL("./map/geometry.js", document.baseURI).href);
  const stage = document.querySelector(".stage");
  const dpr = window.devicePixelRatio;
  const [box] = computePanes(stage.clientWidth, stage.clientHeight, 2 ** zoom, { hasBand });
  const pane = placePane(box, { row, column, scale: 2 ** zoom, dpr, m, n });
  const canvas = document.querySelector(".stage .base");
  const context = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const origin = stage.getBoundingClientRect();
  return places.map(([i, j]) => {
    const [x, y] = [pane.X(j), pane.Y(i)];
    const seen = x > pane.left + 1 && y > pane.top + 1 && x < pane.right - 1 && y < pane.bottom - 1;
    if (!seen) return null;
    const colour = [...context.getImageData(Math.floor(x * dpr), Math.floor(y * dpr), 1, 1).data].slice(0, 3);
    return { colour, x: origin.left + x, y: origin.top + y };
  });
}"""

_FITS = "({scrollWidth, scrollHeight}) => scrollWidth <= innerWidth && scrollHeight <= innerHeight"
FITS = f"({_FITS})(document.documentElement)"
_SIZES = "({width, height, clientWidth, clientHeight}) => [width, height, clientWidth, clientHeight]"
SIZES = f"({_SIZES})(document.querySelector('.stage .base'))"
# How many colours each half of the map has.
PATTERNS = """() => {
  const canvas = document.querySelector(".stage .base");
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  return [0, Math.ceil(canvas.width / 2)].map((left) => {
    const { data } = copy.getImageData(left, 0, Math.floor(canvas.width / 2), canvas.height);
    return new Set(new Uint32Array(data.buffer)).size;
  });
}"""
# A slow network that counts what is on its way, and what is given up.
SLOW_FETCH = """() => {
  Object.assign(window, { flying: 0, most: 0, aborted: 0 });
  const real = window.fetch;
  const slow = (signal) => new Promise((go, stop) => {
    const timer = setTimeout(go, 120);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      window.aborted += 1;
      stop(new DOMException("", "AbortError"));
    });
  });
  window.fetch = async (address, options) => {
    window.flying += 1;
    window.most = Math.max(window.most, window.flying);
    try {
      await slow(options?.signal);
      return await real(address, options);
    } finally {
      window.flying -= 1;
    }
  };
}"""


def matrices() -> list[attlas.AttentionMatrix]:
    return [random_matrix(TOKENS, HEADS, seed=layer, spread=2.5, scale=0.1) for layer in range(LAYERS)]


@pytest.fixture(scope="module")
def dense() -> np.ndarray:
    """Every weight: layer, head, query, key."""
    return np.stack([A.to_dense()[0].numpy() for A in matrices()])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A page on two layers of three heads on one text, peaked enough that colours differ."""
    tokens = [WORDS[i % len(WORDS)] for i in range(TOKENS)]
    spans = {"first": (0, 300), "second": (300, 640)}
    with served(atlas_of(*matrices(), model="small", tokens=tokens, spans=spans)) as found:
        yield found


@pytest.fixture
def opened(browse: Any, url: str) -> Callable[..., Any]:
    """Open pages of the server."""

    def show(fragment: str = "", address: str = url, **options: Any) -> Any:
        return browse(f"{address}#{fragment}", **options)

    return show


def settle(tab: Any) -> None:
    tab.wait_for_timeout(60)
    tab.wait_for_selector(READY)


def pixels(tab: Any, places: list[tuple[float, float]], m: int = TOKENS, n: int = TOKENS) -> list[Any]:
    view = state(tab)
    view = {"zoom": float(view["z"]), "row": float(view["r"]), "column": float(view["c"])}
    return tab.evaluate(
        PIXELS, {"places": [list(place) for place in places], "m": m, "n": n, **view, "hasBand": "ol" not in state(tab)}
    )


def viridis(place: float) -> tuple[int, ...]:
    colormaps = pytest.importorskip("matplotlib", reason="needs matplotlib's tables to compare with").colormaps
    return tuple(round(255 * part) for part in colormaps["viridis"](round(255 * min(1.0, max(0.0, place))))[:3])


def code_of(weight: float) -> int:
    return 1 if weight < 2.0**LOWEST else 2 + round((math.log2(weight) - LOWEST) * STEPS / -LOWEST)


def colours_of(weight: float, low: float = LOW, high: float = HIGH, *, log: bool = True) -> set[tuple[int, ...]]:
    """What the map may show for a weight: the colour of its code, or of a neighbour where rounding decides."""
    found = set()
    for code in range(max(1, code_of(weight) - 1), code_of(weight) + 2):
        log2 = LOWEST - LOWEST * (code - 2) / STEPS
        value = log2 if log else 2.0**log2
        found.add(viridis((value - low) / (high - low)))
    return found


def cells_in(weights: np.ndarray, rows: range, columns: range, count: int, seed: int) -> list[tuple[int, int]]:
    """Random allowed cells."""
    generator = random.Random(seed)
    allowed = [(i, j) for i in rows for j in columns if j <= i and j < weights.shape[-1]]
    return generator.sample(allowed, count)


def shows(tab: Any, cells: list[tuple[int, int]], weights: np.ndarray, *scale: float, log: bool = True) -> None:
    """Check the colour of each cell against its weight; a cell above the diagonal mirrors the one below."""
    found = pixels(tab, [(i + 0.5, j + 0.5) for i, j in cells])
    for (i, j), one in zip(cells, found, strict=True):
        assert tuple(one["colour"]) in colours_of(float(weights[max(i, j), min(i, j)]), *scale, log=log), (i, j)


def test_opens_on_the_whole_matrix(opened: Callable[..., Any]) -> None:
    tab = opened()
    assert tab.title().startswith("Layer 0, head 0")
    canvas = tab.get_by_role("application")
    assert re.match(r"Attention map, queries 0 to 639, keys 0 to 639", canvas.get_attribute("aria-label"))
    assert tab.locator(".slot-status").inner_text() == "a pixel shows the largest weight of 2 × 2 cells"
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    (corner, masked) = pixels(tab, [(630.0, 5.0), (9.0, 600.0)])
    assert tuple(corner["colour"]) != tuple(masked["colour"])


@pytest.mark.parametrize("density", [1, 2])
def test_every_pixel_is_an_exact_weight(opened: Callable[..., Any], dense: np.ndarray, density: int) -> None:
    tab = opened(device_scale_factor=density)
    cells = cells_in(dense, range(305, 335), range(275, 325), 50, seed=1)
    for colour, low, high in (("log", LOW, HIGH), ("linear", 0, 0.06)):
        tab.evaluate(f"location.hash = 'e=1&h=2&z=3&r=320.5&c=300.5&f={colour}&lo={low}&hi={high}&pal=viridis'")
        settle(tab)
        shows(tab, cells, dense[1, 2], low, high, log=colour == "log")
        assert len({tuple(one["colour"]) for one in pixels(tab, cells)}) > 10
    width, _, inside, _ = tab.evaluate(SIZES)
    assert width == density * inside


@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize("level", [1, 2])
def test_every_pixel_is_an_exact_block(opened: Callable[..., Any], dense: np.ndarray, pool: str, level: int) -> None:
    tab = opened(f"{VIEW}&e=0&h=1&p={pool}&z={-level}&r=320&c=320")
    side = 2**level
    blocks = TOKENS // side
    allowed = np.tri(TOKENS, dtype=bool).reshape(blocks, side, blocks, side)
    weights = dense[0, 1].astype(np.float64).reshape(blocks, side, blocks, side)
    pooled = weights.max((1, 3)) if pool == "max" else weights.sum((1, 3)) / np.maximum(1, allowed.sum((1, 3)))
    generator = random.Random(level)
    chosen = [(y, x) for y in range(20, blocks - 20) for x in range(y + 1)]
    chosen = generator.sample(chosen, 50)
    shown = pixels(tab, [((y + 0.5) * side, (x + 0.5) * side) for y, x in chosen])
    seen = 0
    for (y, x), one in zip(chosen, shown, strict=True):
        if one is not None:
            seen += 1
            assert tuple(one["colour"]) in colours_of(float(pooled[y, x])), (y, x)
    assert seen > 40


def test_without_the_first_key_rows_are_renormalised(opened: Callable[..., Any], dense: np.ndarray) -> None:
    tab = opened(f"{VIEW}&v=nosink&z=3&r=40.5&c=30.5")
    weights = dense[0, 0].astype(np.float64)
    weights[1:] /= weights[1:, 1:].sum(1, keepdims=True)
    shows(tab, cells_in(dense, range(20, 60), range(1, 50), 30, seed=3), weights)
    assert "first key excluded, rows renormalised" in tab.locator(".slot-status").inner_text()


def test_triangle_shows_the_second_head_mirrored(opened: Callable[..., Any], dense: np.ndarray) -> None:
    tab = opened(f"{VIEW}&e=0&h=0&s=1.2&m=triangle&z=3&r=320.5&c=320.5")
    cells = cells_in(dense, range(300, 345), range(295, 345), 25, seed=4)
    shows(tab, cells, dense[0, 0])
    shows(tab, [(j, i) for i, j in cells if i != j], dense[1, 2])


def test_ratio_is_symmetric(opened: Callable[..., Any], dense: np.ndarray) -> None:
    """One hue where the first head has more, another where the second has; mirrored when they are swapped."""
    cells = cells_in(dense, range(300, 345), range(295, 340), 40, seed=5)
    places = [(i + 0.5, j + 0.5) for i, j in cells]
    first = pixels(opened("e=0&h=0&s=0.1&m=ratio&x=4&z=3&r=320.5&c=320.5"), places)
    second = pixels(opened("e=0&h=1&s=0.0&m=ratio&x=4&z=3&r=320.5&c=320.5"), places)
    more = 0
    for (i, j), one, other in zip(cells, first, second, strict=True):
        log2 = math.log2(dense[0, 0, i, j] / dense[0, 1, i, j])
        if abs(log2) > 0.5:
            more += 1
            for shown, sign in ((one, 1), (other, -1)):
                red, _, blue = shown["colour"]
                assert (red > blue) == (sign * log2 > 0)
    assert more > 20


def test_masked_is_hatched_and_an_empty_row_is_grey(opened: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, 120, 8, generator=generator)
    sees = torch.ones(120, 120, dtype=torch.bool)
    sees[40:60] = False
    matrix = attlas.attend(q, k, mask=attlas.Window(20, 0) & attlas.from_tensor(sees))
    with served(matrix) as address:
        tab = opened("z=2&r=60&c=60", address=address)
        tab.wait_for_timeout(400)  # the entropies say which rows are empty
        empty = pixels(tab, [(50.5, j + 0.5) for j in range(20, 100, 7)], m=120, n=120)
        masked = pixels(tab, [(20 + 0.25 * s, 90.0) for s in range(12)], m=120, n=120)
        tab.close()  # before its server
    assert len({tuple(one["colour"]) for one in empty}) == 1
    red, green, blue = empty[0]["colour"]
    assert max(red, green, blue) - min(red, green, blue) < 12
    assert len({tuple(one["colour"]) for one in masked}) > 1
    assert tuple(empty[0]["colour"]) not in {tuple(one["colour"]) for one in masked}


def test_the_tooltip_tells_the_exact_weight_and_a_click_pins_it(opened: Callable[..., Any], dense: np.ndarray) -> None:
    tab = opened(f"{VIEW}&mm=off&e=1&h=1&z=4&r=320.5&c=300.5")
    (one,) = pixels(tab, [(318.5, 296.5)])
    tab.mouse.move(one["x"], one["y"])
    told = tab.locator(".tip")
    told.get_by_text("of its row").wait_for()
    assert np.float32(number(told.locator(".tip-weight").inner_text())) == dense[1, 1, 318, 296]
    rank = 1 + int((dense[1, 1, 318] > dense[1, 1, 318, 296]).sum())
    assert re.search(rf"\b{rank}(st|nd|rd|th) largest" if rank > 1 else "largest of its row", told.inner_text())
    assert "318" in told.inner_text()
    assert "296" in told.inner_text()
    (masked,) = pixels(tab, [(310.5, 318.5)])
    tab.mouse.move(masked["x"], masked["y"])
    told.get_by_text("masked").wait_for()
    # A click pins, and another one lets go.
    tab.mouse.click(one["x"], one["y"])
    assert state(tab)["pin"] == "318.296"
    tab.mouse.click(one["x"], one["y"])
    assert "pin" not in state(tab)


def test_drag_wheel_and_double_click(opened: Callable[..., Any]) -> None:
    tab = opened("z=2&r=320&c=300")
    tab.mouse.move(600, 400)
    tab.mouse.down()
    tab.mouse.move(560, 440, steps=4)
    tab.mouse.up()
    view = state(tab)
    assert float(view["r"]) == pytest.approx(310, abs=0.01)
    assert float(view["c"]) == pytest.approx(310, abs=0.01)
    assert "pin" not in view
    before = under(tab, 600, 400)
    tab.mouse.move(600, 400)
    tab.mouse.wheel(0, -300)
    settle(tab)
    view = state(tab)
    assert float(view["z"]) > 2.4
    assert under(tab, 600, 400) == before
    zoom = float(view["z"])
    tab.mouse.dblclick(600, 400)
    view = state(tab)
    assert float(view["z"]) == pytest.approx(zoom + 1, abs=0.01)
    assert "pin" not in view
    assert under(tab, 600, 400) == before


def under(tab: Any, x: int, y: int) -> list[str]:
    """Query and key under a place, as the tooltip has them."""
    tab.mouse.move(x - 40, y)
    tab.mouse.move(x, y)
    tab.locator(".tip").wait_for()
    return tab.locator(".tip .place").all_inner_texts()


def test_keys_alone_do_everything(opened: Callable[..., Any]) -> None:
    tab = opened()
    canvas = tab.get_by_role("application")
    for _ in range(60):
        if canvas.evaluate("element => element === document.activeElement"):
            break
        tab.keyboard.press("Tab")
    else:
        pytest.fail("Tab does not reach the map")
    tab.keyboard.press("]")
    assert state(tab)["h"] == "1"
    tab.keyboard.press("}")
    view = state(tab)
    assert (view["e"], view["h"]) == ("1", "1")
    tab.keyboard.press("[")
    assert "h" not in state(tab)
    for _ in range(6):
        tab.keyboard.press("+")
    settle(tab)
    assert float(state(tab)["z"]) > 4
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowLeft")
    view = state(tab)
    i, j = math.floor(float(view["r"])), math.floor(float(view["c"]))
    tab.locator(".tip").get_by_text(re.compile("of its row|masked")).wait_for()
    heard = tab.locator("[aria-live=polite][aria-atomic=true]")
    heard.get_by_text(f"query {i}").wait_for()
    tab.keyboard.press("Enter")
    assert state(tab)["pin"] == f"{i}.{j}"
    for key in ("Escape", "Escape"):  # the crosshair, then the pin
        tab.keyboard.press(key)
    assert "pin" not in state(tab)
    tab.keyboard.press("Shift+ArrowRight")
    assert float(state(tab)["c"]) > j + 1
    tab.keyboard.press("d")
    view = state(tab)
    assert view["r"] == view["c"]
    tab.keyboard.press("0")
    settle(tab)
    assert float(state(tab)["z"]) < 1


def test_a_link_restores_everything(opened: Callable[..., Any]) -> None:
    link = "e=1&h=2&p=mean&r=400.5&c=220.5&z=3.25&lo=-12&hi=-1&pal=magma&t=dark&pin=405.210"
    tab = opened(link)
    view = state(tab)
    assert {**view, **{name: values[0] for name, values in parse_qs(link).items()}} == view
    assert tab.evaluate("document.querySelector('.attlas').dataset.theme") == "dark"
    tab.reload()
    tab.wait_for_selector(READY)
    assert state(tab) == view
    tab.evaluate("location.hash = 'e=0&h=1&z=2&r=100&c=100'")
    settle(tab)
    changed = state(tab)
    assert (changed["h"], changed["z"], changed.get("e")) == ("1", "2", None)
    assert "pin" not in changed


def test_recolouring_asks_for_nothing(opened: Callable[..., Any]) -> None:
    tab = opened("z=3&r=320.5&c=300.5")
    tab.wait_for_timeout(600)  # the ring of tiles around the view has come
    (before,) = pixels(tab, [(320.5, 300.5)])
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    for change in ("lo=-6&hi=-2", "f=linear&lo=0&hi=0.1", "pal=cividis", "t=dark"):
        tab.evaluate(f"location.hash = 'z=3&r=320.5&c=300.5&{change}'")
        settle(tab)
    tab.evaluate("location.hash = 'z=3&r=320.5&c=300.5&pal=grey&t=dark'")
    settle(tab)
    (after,) = pixels(tab, [(320.5, 300.5)])
    assert after["colour"] != before["colour"]
    assert [one for one in asked if "/api/tile" in one] == []


def test_a_server_that_fails_for_a_while(opened: Callable[..., Any]) -> None:
    """Requests are tried again, with a calm line meanwhile; the map is complete in the end."""
    tab = opened("z=3&r=320.5&c=300.5", expected="503")
    failing = {"left": 6}

    def sometimes(route: Any) -> None:
        if failing["left"]:
            failing["left"] -= 1
            route.fulfill(status=503, json={"error": "busy"})
        else:
            route.continue_()

    tab.route("**/api/tile*", sometimes)
    tab.keyboard.press("}")
    tab.locator(".status-trouble").get_by_text("trying again").wait_for()
    tab.wait_for_selector(READY)
    tab.locator(".status-trouble").wait_for(state="hidden")


def test_what_is_not_computed_yet_is_asked_for_again(opened: Callable[..., Any], dense: np.ndarray) -> None:
    """A half-done tile shows what is there, is said to be half done, and is complete without a reload."""
    halves = {"left": 2}

    def half(route: Any) -> None:
        if not halves["left"]:
            route.continue_()
            return
        halves["left"] -= 1
        answer = route.fetch()
        codes = np.frombuffer(answer.body(), "<u2").copy()
        codes[codes.size // 2 :] = 65535
        headers = {**answer.headers, "attlas-progress": "0.5", "cache-control": "no-store"}
        route.fulfill(status=200, headers=headers, body=codes.tobytes())

    routes = {"**/api/tile?*level=0&y=1&x=1*": half}
    tab = opened(f"{VIEW}&z=3&r=380.5&c=370.5", wait="", routes=routes)
    tab.locator(".overlay[aria-busy=true]").wait_for()
    settle(tab)
    assert halves["left"] == 0
    shows(tab, cells_in(dense, range(400, 410), range(350, 400), 10, seed=8), dense[0, 0])


def test_other_levels_stand_in_while_tiles_are_on_their_way(opened: Callable[..., Any]) -> None:
    tab = opened("z=2&r=320&c=300")
    tab.wait_for_timeout(500)  # the ring around the view and the whole have come
    tab.route("**/api/tile*", lambda route: None)  # from now on nothing comes
    for zoom in ("1", "-1", "4"):
        tab.evaluate(f"location.hash = 'z={zoom}&r=320&c=300'")
        tab.wait_for_timeout(250)
        left, right = tab.evaluate(PATTERNS)
        assert left + right > 60, zoom


def test_at_most_six_requests_at_once_and_old_ones_given_up(opened: Callable[..., Any]) -> None:
    tab = opened("z=1&r=320.5&c=300.5")
    tab.evaluate(SLOW_FETCH)
    for head in ("h=1", "h=2", "e=1&h=0", "e=1&h=1", "e=1&h=2"):
        tab.evaluate(f"location.hash = 'z=1&r=320.5&c=300.5&{head}'")
        tab.wait_for_timeout(40)
    tab.wait_for_selector(READY)
    assert 0 < tab.evaluate("window.most") <= 6
    assert tab.evaluate("window.aborted") > 0


@pytest.mark.parametrize(
    ("width", "height", "scheme"), [(390, 844, "dark"), (1280, 800, "light"), (1920, 1080, "dark")]
)
def test_fits_every_window(opened: Callable[..., Any], width: int, height: int, scheme: str) -> None:
    tab = opened(width=width, height=height, color_scheme=scheme)
    assert tab.evaluate(FITS)
    box = tab.locator(".stage").bounding_box()
    assert box["width"] > 0.4 * width
    assert box["height"] > 0.4 * height
    tab.set_viewport_size({"width": width - 40, "height": height - 60})
    settle(tab)
    canvas = tab.evaluate(SIZES)
    assert canvas[:2] == canvas[2:]
    assert tab.evaluate("getComputedStyle(document.querySelector('.attlas')).colorScheme") == scheme


def test_side_by_side_is_two_linked_maps(opened: Callable[..., Any]) -> None:
    tab = opened("e=0&h=0&s=1.1&m=side", width=1920, height=1080)
    left, right = tab.evaluate(PATTERNS)
    assert left > 60
    assert right > 60


def test_two_fingers_zoom_and_one_drags(opened: Callable[..., Any]) -> None:
    tab = opened("z=2&r=320&c=300", width=390, height=844, has_touch=True, is_mobile=True)
    box = tab.locator(".stage").bounding_box()
    x, y = box["x"] + 220, box["y"] + 240
    touch = tab.context.new_cdp_session(tab)

    def send(kind: str, *places: tuple[float, float]) -> None:
        points = [{"x": px, "y": py, "id": k} for k, (px, py) in enumerate(places)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    send("touchStart", (x, y))
    for step in range(1, 6):
        send("touchMove", (x - 8 * step, y + 8 * step))
    send("touchEnd")
    view = state(tab)
    assert float(view["r"]) == pytest.approx(310, abs=2)
    assert float(view["c"]) == pytest.approx(310, abs=2)
    send("touchStart", (x - 40, y), (x + 40, y))
    for apart in (50, 60, 70, 80):
        send("touchMove", (x - apart, y), (x + apart, y))
    send("touchEnd")
    view = state(tab)
    assert float(view["z"]) == pytest.approx(3, abs=0.3)
    assert "pin" not in view
