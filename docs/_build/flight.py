"""Film a flight of the viewer for the README: an animation from the whole matrix to two words, as a small GIF.

The frames are screenshots: the flight is stepped with the slider of its bar, so that every frame is complete on any machine.
``screenshots.py`` calls this with a running viewer.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NAME = "flight.gif"
SIZE = (800, 500)  # pixels: the map and the line of words below it
WINDOW = {"width": 800, "height": 800}  # of the browser; what is above the map and below the words is cut off
BYTES = 1_500_000
START, END = 1.9, 11.6  # seconds of the flight between which the map moves
HOLD = 2000, 3500  # milliseconds of the first and the last frame
# Frames a second and colours, the first that fits into `BYTES`.
QUALITIES = ((8, 64), (8, 32), (6, 32), (5, 32), (4, 32), (4, 16))
SETTLED = ".attlas-ready .overlay[aria-busy=false]"
# Whether the page knows what the head does, which the flight says.
MEASURED = """() => {
  const said = document.querySelector(".says-sentence").textContent;
  return said && !said.startsWith("Measuring");
}"""
# Leave the words of the bar alone in it, and give it the height that makes map and bar as high as the picture.
PREPARE = """(height) => {
  for (const part of document.querySelectorAll(".flight .icon, .flight input")) part.style.display = "none";
  const [map, bar] = [".slot-map", ".flight"].map((name) => document.querySelector(name).getBoundingClientRect());
  return { y: map.top, height: map.height + bar.height };
}"""


def film(browser: Any, address: str, file: Path, differs: Callable[[Image.Image, Image.Image], bool]) -> None:
    """Write the animation of a flight, unless the file shows the same already.

    `address` opens the viewer where the flight ends, and `differs` tells whether one sees that two pictures differ.
    """
    rate = QUALITIES[0][0]
    times = [START + at / rate for at in range(round((END - START) * rate) + 1)]
    frames = take_frames(browser, address, times)
    if file.exists() and not any(differs(*pair) for pair in zip(marks_of(file), pick(frames), strict=True)):
        return
    data = next((data for data in map(lambda each: encode(frames, *each), QUALITIES) if len(data) <= BYTES), None)
    if data is None:
        raise RuntimeError(f"{file.name} is larger than {BYTES:,} bytes in each of its qualities")
    file.write_bytes(data)
    print(f"  {file.name}  {len(data) / 1000:.0f} kB", flush=True)


def take_frames(browser: Any, address: str, times: Sequence[float]) -> list[Image.Image]:
    """Return the map and the words at some times of the flight."""
    context = browser.new_context(viewport=WINDOW, color_scheme="light", locale="en-US", reduced_motion="reduce")
    with contextlib.closing(context):
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.goto(address)
        page.wait_for_selector(SETTLED)
        page.wait_for_function(MEASURED)
        page.keyboard.press("f")
        slider = page.locator(".flight input")
        page.wait_for_function("() => Number(document.querySelector('.flight input').value) > 0")
        slider.fill("0")
        box = page.evaluate(PREPARE)
        page.set_viewport_size({**WINDOW, "height": WINDOW["height"] + SIZE[1] - round(box["height"])})
        page.wait_for_timeout(500)
        clip = {"x": 0, "y": box["y"], "width": SIZE[0], "height": SIZE[1]}
        frames = []
        for time in times:
            slider.evaluate(
                "(slider, time) => { slider.value = time; slider.dispatchEvent(new Event('input')); }", time
            )
            page.wait_for_timeout(80)
            page.wait_for_selector(SETTLED)
            frames.append(Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB"))
        return frames


def encode(frames: Sequence[Image.Image], rate: int, colours: int) -> bytes:
    """Return frames as a GIF of so many frames a second and colours; all of them have one palette."""
    every = QUALITIES[0][0] / rate
    chosen = [frames[round(at * every)] for at in range(int((len(frames) - 1) / every) + 1)]
    chosen[-1] = frames[-1]
    palette = palette_of(chosen, colours)
    images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in chosen]
    # The map moves in START to END as the flight does; its stops are held.
    durations = [HOLD[0], *[round(1000 / rate)] * (len(images) - 2), HOLD[1]]
    out = io.BytesIO()
    images[0].save(
        out, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=False, disposal=1
    )
    return out.getvalue()


def palette_of(frames: Sequence[Image.Image], colours: int) -> Image.Image:
    """Return an image whose palette suits all frames."""
    some = pick(frames, 6)
    sheet = Image.new("RGB", (SIZE[0], SIZE[1] * len(some)))
    for at, frame in enumerate(some):
        sheet.paste(frame, (0, SIZE[1] * at))
    return sheet.quantize(colours, method=Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)


def pick(frames: Sequence[Image.Image], count: int = 3) -> list[Image.Image]:
    """Return some frames: the first, the last, and those between, evenly apart."""
    return [frames[round(at)] for at in np.linspace(0, len(frames) - 1, count)]


def marks_of(file: Path) -> list[Image.Image]:
    """Return the first, the middle and the last frame of an animation."""
    with Image.open(file) as film:
        frames = []
        for at in (0, round((film.n_frames - 1) / 2), film.n_frames - 1):
            film.seek(at)
            frames.append(film.convert("RGB"))
        return frames
