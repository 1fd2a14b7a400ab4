"""The browser that the tests of the viewer drive, and what they read of its pages."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

AXE = "4.10.3"
READY = ".attlas-ready .overlay[aria-busy=false]"
# Controls that the page shows and that a part of them lies outside of the window.
CUT = """() => {
  const parts = "button, select, input, h1, .flow, .thumb, .bar-plot, .scatter-plot, .plot svg";
  return [...document.querySelectorAll(parts)].filter((part) => {
    if (!part.checkVisibility({ visibilityProperty: true }) || part.closest("dialog:not([open])")) return false;
    const box = part.getBoundingClientRect();
    if (!box.width || part.closest(".table-frame, .search:not(.has-result) .icon")) return false;
    return box.left < -0.5 || box.right > innerWidth + 0.5;
  }).map((part) => part.outerHTML.slice(0, 90));
}"""
# What the page says in Latin letters: words of three letters and more, outside of texts, tokens and names of files.
LATIN = """(attributes) => {
  const found = new Set();
  const look = (text) => (text ?? "").match(/[A-Za-z]{3,}/g)?.forEach((word) => found.add(word));
  const texts = ".flow, .token, .tip dd, .title, .brand, .condition, kbd, .why-about dd, .lines-column";
  for (const part of document.querySelectorAll(".attlas *")) {
    if (part.closest(`${texts}, .sample-words b, [font-family*=mono]`)) continue;
    for (const child of part.childNodes) if (child.nodeType === Node.TEXT_NODE) look(child.data);
    for (const name of attributes) look(part.getAttribute(name));
  }
  return [...found];
}"""
NAMES = {"attlas", "PNG", "SVG", "CSV", "Ctrl", "Shift", "Enter", "Esc", "English", "float"}


_open_playwrights: list[Any] = []


@contextmanager
def _playwright_of_thread(sync_api: Any) -> Iterator[Any]:
    """Give the playwright that runs already, since a thread has one at a time, or a new one."""
    if _open_playwrights:
        yield _open_playwrights[-1]
        return
    with sync_api.sync_playwright() as playwright:
        _open_playwrights.append(playwright)
        try:
            yield playwright
        finally:
            _open_playwrights.remove(playwright)


@contextmanager
def started(options: Sequence[str] = ()) -> Iterator[Any]:
    """Start a Chromium without a window."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    own = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with _playwright_of_thread(sync_api) as playwright:
        try:
            running = playwright.chromium.launch(executable_path=own, args=[*arguments, *options])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield running
        running.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium without a window."""
    with started() as running:
        yield running


CLOSED = "503 (Service Unavailable)"  # the answer of a server that its test has stopped while the page still asks


@pytest.fixture
def browse(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open pages; at the end none may have complained, or asked another machine for anything."""
    complaints: list[str] = []
    contexts: list[Any] = []
    told = complaints.append

    def opened(
        url: str,
        width: int = 1280,
        height: int = 800,
        wait: str = READY,
        expected: str = "\n",
        routes: dict[str, Callable[[Any], None]] | None = None,
        script: str = "",
        **options: Any,
    ) -> Any:
        options = {"reduced_motion": "reduce", "accept_downloads": True} | options
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        ours = (url.split("#")[0], "blob:", "data:")
        heard = {"error", "warning"}

        def told_by_console(said: Any) -> None:
            if said.type in heard and expected not in said.text and CLOSED not in said.text:
                told(f"{said.text} {said.location['url']}")

        page.on("console", told_by_console)
        page.on("pageerror", lambda error: told(str(error)))
        page.on("request", lambda asked: asked.url.startswith(ours) or told(asked.url))
        for pattern, answer in (routes or {}).items():
            page.route(pattern, answer)
        if script:
            page.add_init_script(f"({script})()")
        page.goto(url)
        if wait:
            page.wait_for_selector(wait)
        return page

    def close() -> None:
        while contexts:
            contexts.pop().close()

    opened.close = close
    yield opened
    close()
    assert complaints == []


@contextmanager
def served(shown: Any, **options: Any) -> Iterator[str]:
    """Serve a matrix, an atlas or a service, and give the address."""
    pytest.importorskip("starlette", reason="needs attlas[view]")
    pytest.importorskip("uvicorn", reason="needs attlas[view]")
    from attlas.view import Server, Service

    service = shown if hasattr(shown, "answer") else Service(shown, **options)
    with closing(service), Server(service, port=0) as server:
        yield server.url


def state(page: Any) -> dict[str, str]:
    """Return the fields of the hash, once it has been written: by a timer of the page, before this one."""
    page.evaluate("new Promise((done) => setTimeout(done, 250))")
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).fragment).items()}


def number(text: str) -> float:
    """Return the number at the start of a text, as people write it: 0.0312, 1,024, −3.1, ≈ 3.12 × 10⁻⁷."""
    mantissa, power = re.match(r"(?:≈ )?([−\d.,]+)(?: × 10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+))?", text).groups()
    power = (power or "0").translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    return float(f"{mantissa.replace(',', '').replace('−', '-')}e{power}")


def saved(page: Any, kind: str) -> tuple[str, bytes]:
    """Export what a page shows, and return the name and the content of the file."""
    page.get_by_role("button", name="Export").click()
    with page.expect_download(timeout=60_000) as download:
        page.locator(f"[data-export={kind}]").click()
    page.wait_for_function("() => /saved/.test(document.querySelector('.export-line').textContent)")
    page.keyboard.press("Escape")
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


@pytest.fixture(scope="session")
def axe() -> str:
    """The text of axe-core, fetched once into a folder outside of this repository."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "attlas-tests" / f"axe-core-{AXE}"
    file = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not file.is_file():
        if shutil.which("npm") is None:
            pytest.skip("npm, which fetches axe-core, is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts"]
        command = ["npm", "install", *options, f"axe-core@{AXE}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip("npm does not answer")
        if done.returncode:
            pytest.skip(f"axe-core cannot be fetched: {done.stderr.strip().splitlines()[-1:]}")
    return file.read_text("utf-8")


def until(page: Any, condition: str) -> None:
    """Wait until an expression of JavaScript holds in a page."""
    page.wait_for_function(f"() => ({condition})")


def latin_words(page: Any, *attributes: str) -> set[str]:
    """Return what a page says in Latin letters, in its texts and in some attributes; names that stay aside."""
    return set(page.evaluate(LATIN, ["title", "placeholder", *attributes])) - NAMES


View = tuple[str, tuple[int, int], str]


def serious_faults(page: Any, axe: str, views: list[View]) -> dict[View, list[str]]:
    """Return the serious faults that axe finds in a page, by the hash, the size and the colours that it is given."""
    page.evaluate(axe)
    faults: dict[View, list[str]] = {}
    for hash_, (width, height), scheme in views:
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        page.evaluate("(hash) => { location.hash = hash; }", hash_)
        page.wait_for_timeout(700)
        page.wait_for_selector(".loading", state="detached")  # numbers on their way are pale
        found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        faults[hash_, (width, height), scheme] = [
            f"{each['id']}: {[(node['target'], node['failureSummary']) for node in each['nodes'][:3]]}"
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
        ]
    return {view: told for view, told in faults.items() if told}
