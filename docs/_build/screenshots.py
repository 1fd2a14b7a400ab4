"""Photograph the viewer, the report and the page of a corpus as they are now; ``make docs`` does it after the figures.

The pages are opened in Chromium, on the recording and the corpus of the demo, in both themes and languages. A picture is
written only where it looks different from the one that is there, so that another machine's fonts or versions leave it alone
as far as they can. Without Chromium, without Playwright (``make browser`` installs both) or without a Chinese font, the
pictures that are there stay, and a line says so.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent))
import flight

IMAGES = Path(__file__).resolve().parent.parent / "images"
TRAINING = IMAGES.parent.parent / "training"
SIZE = {"width": 1280, "height": 800}
COLOURS = 256  # of a picture that is stored: no pixel is farther than 10 of 255 from what it was
DIFFERENT = 48  # of 255: a pixel that has changed
CHANGED = 0.004  # share of the pixels from which on a picture has changed
PAIR = "e=2&h=4&pin=147.133"  # where the head shows what it does: the dash of [-p, and n, which followed [-
LANGUAGES = {"": "en-US", "-zh": "zh-CN"}
# Whether everything that the pictures show has arrived: the row, the cell, the pair in all heads, the visible thumbnails.
DONE = """() => {
  const edge = document.querySelector(".slot-heads").getBoundingClientRect().bottom - 1;
  const isVisible = (part) => part.checkVisibility({ visibilityProperty: true }) && part.getBoundingClientRect().top < edge;
  return document.querySelector(".attlas-ready .overlay[aria-busy=false]")
    && document.querySelector(".headmap-says").textContent !== "…"
    && !document.querySelector(".loading")
    && [...document.querySelectorAll(".thumb:not(.drawn)")].every((thumb) => !isVisible(thumb));
}"""
# The same of the windows "Why?" and "What if": what they show has arrived.
WHY = f"() => ({DONE})() && document.querySelectorAll('.reasons-bars dt').length"
TRIAL = f"() => ({DONE})() && document.querySelector('.trial-results:not([hidden]):not(.loading)')"
# Whether the page of a corpus shows its points, or that of a head its plots and the texts in view.
CORPUS = """() => document.querySelector(".attlas-ready .scatter-plot circle, .attlas-ready .head-plots svg")
  && !document.querySelector(".loading")
  && ![...document.querySelectorAll(".sample-wait")].map((wait) => wait.getBoundingClientRect())
    .some(({ top, bottom }) => top < innerHeight && bottom > 0)"""
# Whether the browser has a font for Chinese: without one, every character is the same box.
HAS_CHINESE = """() => {
  const draw = (text) => {
    const canvas = document.createElement("canvas");
    const context = canvas.getContext("2d");
    context.font = "40px sans-serif";
    context.fillText(text, 0, 40);
    return canvas.toDataURL();
  };
  return draw("注") !== draw("意");
}"""


@dataclass(frozen=True)
class Shot:
    """A picture: its name without theme and language, which page it shows, and where.

    `page` is a name of `pages`; `done` tells whether all has arrived, and `scroll` what then stands at the top.
    """

    name: str
    page: str
    at: str
    themes: tuple[str, ...] = ("light", "dark")
    done: str = DONE
    scroll: str = ""

    def files(self) -> Iterator[tuple[str, str, str]]:
        """Yield the name of each file, its theme and its language."""
        for suffix, language in LANGUAGES.items():
            for theme in self.themes:
                yield f"{self.name}{suffix}-{theme}.png", theme, language


# Zooms at which a cell is a whole number of pixels: 21, 29 and 4.
SHOTS = (
    Shot("viewer", "live", f"{PAIR}&r=140.5&c=131.5&z=4.3923174&p=max&hm=pair"),
    Shot("report", "report", f"{PAIR}&r=146.5&c=139.5&z=4.857981&a=text"),
    Shot("compare", "live", "e=2&h=4&s=3.3&m=triangle&r=160.5&c=150.5&z=2&p=max", ("light",)),
    Shot("hybrid", "hybrid", "e=1&h=1&pin=18.6&f=linear", ("light",)),
    Shot("why", "model", f"{PAIR}&r=140.5&c=131.5&z=4.3923174&p=max&panel=why", ("light",), WHY),
    Shot("what-if", "model", f"{PAIR}&r=140.5&c=131.5&z=4.3923174&p=max&off=2.4&panel=trial", ("light",), TRIAL),
    Shot("corpus", "corpus", "x=effective_keys&y=qk_distance&xl=1&yl=1&c=kind&s=induction", done=CORPUS),
    Shot("corpus-head", "corpus", "h=2.4&m=induction_text", ("light",), CORPUS, scroll=".head-numbers"),
    Shot("corpus-texts", "corpus", "h=2.4&m=induction_text", ("light",), CORPUS, scroll=".head-texts"),
)


def main() -> None:
    """Take every picture, or say why the ones that are there stay."""
    start = time.perf_counter()
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        return keep("Playwright is not installed; make browser installs it")
    own = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright, contextlib.ExitStack() as stack:
        try:
            browser = playwright.chromium.launch(executable_path=own, args=["--no-sandbox", "--disable-gpu"])
        except Error as error:
            return keep(f"Chromium does not start: {str(error).splitlines()[0]}; make browser installs it")
        stack.callback(browser.close)
        page = browser.new_page()
        languages = set(LANGUAGES.values()) if page.evaluate(HAS_CHINESE) else {"en-US"}
        if "zh-CN" not in languages:
            keep("no Chinese font is installed", "Chinese screenshots")
        addresses = stack.enter_context(pages())
        for shot in SHOTS:
            for name, theme, language in shot.files():
                if language in languages:
                    picture = photograph(browser, f"{addresses[shot.page]}#{shot.at}", shot, theme, language)
                    store(picture, IMAGES / name)
        flight.film(browser, f"{addresses['live']}#{PAIR}&p=max&a=none", IMAGES / flight.NAME, differs)
    print(f"screenshots  {time.perf_counter() - start:.1f} s", flush=True)


def keep(why: str, what: str = "screenshots") -> None:
    """Say that pictures stay as they are."""
    print(f"{what}: kept as they are ({why})", flush=True)


@contextlib.contextmanager
def pages() -> Iterator[dict[str, str]]:
    """Record the text and the corpus of the demo, and yield the addresses of the pages that show them.

    "live" is the viewer, "report" the page as a file, "model" the viewer with the model and what logits are made of,
    "corpus" the page of the corpus, "hybrid" the viewer on a small hybrid.
    """
    import attlas
    from attlas.cli import main as attlas_command
    from attlas.cli.files import title_of
    from attlas.view import Server, Service

    def run(*words: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            if attlas_command([*words]):
                raise RuntimeError(said.getvalue())

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("record", "--tokens", "2048", "--parts", "-o", str(folder / "run.atlas"))  # as the demo does
        run("report", str(folder / "run.atlas"), "-o", str(folder / "report.html"))
        atlas = attlas.load(folder / "run.atlas")
        service = Service(atlas, title=title_of(atlas, folder / "run.atlas"), folder=folder / "run.atlas")
        with contextlib.closing(service), Server(service, port=0) as server, hybrid() as mixed:
            run("record", "--tokens", "512", "--parts", "-o", str(folder / "parts.atlas"))
            with model_page(folder / "parts.atlas") as model, corpus_page(folder / "stdlib.corpus") as corpus:
                addresses = {"live": server.url, "report": (folder / "report.html").as_uri()}
                yield addresses | {"model": model, "corpus": corpus, "hybrid": mixed}


@contextlib.contextmanager
def model_page(folder: Path) -> Iterator[str]:
    """Yield the address of the viewer on a recording of the shipped model, which reads texts there."""
    import attlas
    from attlas import models
    from attlas.cli.files import title_of
    from attlas.cli.loading import load
    from attlas.view import Server, Service
    from attlas.view.reading import ReadingService

    def loader() -> tuple[Any, Any]:
        loaded = load(models.path())
        return loaded.model, loaded.tokenizer

    atlas = attlas.load(folder)
    shown = Service(atlas, title=title_of(atlas, folder))
    with contextlib.closing(ReadingService(shown, loader, name="python-gpt2")) as service:
        with Server(service, port=0) as server:
            yield server.url


@contextlib.contextmanager
def corpus_page(folder: Path) -> Iterator[str]:
    """Yield the address of the page of the demo's corpus, which is made where `folder` does not have it."""
    import attlas
    from attlas import models
    from attlas.cli.corpus import write_demo
    from attlas.cli.files import is_corpus
    from attlas.cli.loading import load
    from attlas.cli.terminal import Terminal
    from attlas.view import CorpusService, Server

    loaded = load(models.path())
    if not is_corpus(folder):
        write_demo(loaded, folder, Terminal(io.StringIO(), io.StringIO()))
    service = CorpusService([attlas.load(folder)], titles=[folder.name], loaders=[lambda: loaded.model])
    with contextlib.closing(service), Server(service, port=0) as server:
        yield server.url


@contextlib.contextmanager
def hybrid() -> Iterator[str]:
    """Yield the address of the viewer on one text of the small hybrid, whose weights `training/hybrid.py` has written."""
    from attlas.view import Server, Service

    sys.path.insert(0, str(TRAINING))
    from hybrid import recorded

    with contextlib.closing(Service(recorded(), title="hybrid 3:1")) as service, Server(service, port=0) as server:
        yield server.url


def photograph(browser: Any, address: str, shot: Shot, theme: str, language: str) -> Image.Image:
    """Open a page, wait until it is complete, and return what the window shows."""
    context = browser.new_context(viewport=SIZE, color_scheme=theme, locale=language, reduced_motion="reduce")
    with contextlib.closing(context):
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.goto(address)
        for _ in range(2):  # what arrives may ask for more
            page.wait_for_function(shot.done)
            if shot.scroll:
                page.locator(shot.scroll).first.evaluate("(part) => part.scrollIntoView({ block: 'start' })")
            page.wait_for_timeout(500)
        return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def store(picture: Image.Image, file: Path) -> None:
    """Write a picture with as few colours as nobody sees, unless the file shows the same already."""
    if file.exists() and not differs(picture, Image.open(file).convert("RGB")):
        return
    palette = {"method": Image.Quantize.MAXCOVERAGE, "kmeans": 4, "dither": Image.Dither.NONE}
    picture.quantize(COLOURS, **palette).save(file, optimize=True)
    print(f"  {file.name}  {file.stat().st_size / 1000:.0f} kB", flush=True)


def differs(first: Image.Image, second: Image.Image) -> bool:
    """Tell whether one sees that two pictures are not the same."""
    if first.size != second.size:
        return True
    apart = np.abs(np.asarray(first, dtype=np.int16) - np.asarray(second, dtype=np.int16)).max(axis=-1)
    return float((apart > DIFFERENT).mean()) > CHANGED


if __name__ == "__main__":
    sys.exit(main())
