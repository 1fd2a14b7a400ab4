"""What the viewer answers beside pictures: an opened 2 × 100,000², why a weight is, and one pair in 1,024 heads.

Run with ``make bench`` or ``python benchmarks/viewer_answers.py [--without-page] [--quick]``; half a minute. Goals: a
page of two heads of 100,000 tokens is usable 2 s after it begins to load, and says within 0.3 s that it opens; why a
weight is where it is, at 2,048 tokens of the shipped model, in 100 ms; the weight of a pair in 1,024 heads of 300
tokens in 2 s, heads asked layer by layer as the page does. The page is timed by the clock and needs an idle machine
(`load` is kept beside it). Answers are timed by the processor time of this process, the median of many questions.
``benchmarks/viewer.py`` times the pictures, and with ``--what-if`` texts that are read again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

import attlas
from attlas.view import Service
from harness import save
from viewer import processed, record, serving

GOALS = {"usable_ms": 2000.0, "told_ms": 300.0, "why_seconds": 0.1, "pair_seconds": 2.0}
TOKENS, LONG, WIDE = 2048, 100_000, 300
# When the page first says something, when it can be used, and when the map is drawn from all cells.
WATCH = """
(() => {
  const seen = (window.seen = { told: null, usable: null, whole: null });
  const look = () => {
    if (seen.told === null && document.body?.innerText.trim()) seen.told = performance.now();
    if (seen.usable === null && document.querySelector(".attlas-ready .overlay")) seen.usable = performance.now();
    if (document.querySelector(".attlas-ready .overlay[aria-busy=false]")) seen.whole = performance.now();
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})();
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--without-page", action="store_true", help="the answers alone, which a loaded machine may time"
    )
    parser.add_argument("--quick", action="store_true", help="fewer questions of a shorter text; nothing is saved")
    args = parser.parse_args()
    results: dict[str, Any] = {"why": why(256, 4) if args.quick else why(TOKENS, 24)}
    results["pair"] = pair(4 if args.quick else 32)
    if not args.without_page:
        results["opened"] = opened(4_000 if args.quick else LONG)
    found = {
        "usable_ms": results.get("opened", {}).get("usable_ms"),
        "told_ms": results.get("opened", {}).get("told_ms"),
        "why_seconds": results["why"]["seconds"],
        "pair_seconds": results["pair"]["seconds"],
    }
    results["goals"] = {
        name: {"goal": goal, "found": found[name], "met": None if found[name] is None else found[name] <= goal}
        for name, goal in GOALS.items()
    }
    print(json.dumps(results, indent=2))
    if not args.quick:
        save("viewer_answers", results)


def asked(service: Service, name: str, **parameters: object) -> Any:
    """Return an answer as plain data."""
    answer = service.answer(name, {key: str(value) for key, value in parameters.items()})
    if answer.status != 200:
        raise RuntimeError(f"{name} {parameters}: {answer.body[:200]!r}")
    return json.loads(answer.body)


@torch.no_grad()
def why(tokens: int, questions: int) -> dict[str, Any]:
    """Ask why weights of all layers are where they are; the first question makes what later ones share."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from attlas import models

    tokenizer = AutoTokenizer.from_pretrained(models.path())
    model = AutoModelForCausalLM.from_pretrained(models.path())
    text = "".join(f"def f{i}(a, b):\n    return a + {i} * b\n" for i in range(400))
    ids = [tokenizer.bos_token_id, *tokenizer(text, verbose=False)["input_ids"]][:tokens]
    with attlas.record(model, tokens=tokenizer, parts=True) as atlas:
        model(torch.tensor([ids]))
    service, dice = Service(atlas), random.Random(0)
    seconds = []
    for number in range(questions):
        i = dice.randrange(tokens // 2, tokens)
        place = {"entry": number % len(atlas.entries), "head": number % 6, "i": i, "j": dice.randrange(i)}
        seconds.append(processed(partial(asked, service, "why", **place)))
    return {
        "tokens": len(ids),
        "first_seconds": seconds[0],
        "seconds": statistics.median(seconds),
        "worst": max(seconds),
    }


def pair(layers: int) -> dict[str, Any]:
    """Ask for the weight of one pair in all heads, as the map of heads does when a cell is pinned."""
    torch.manual_seed(0)
    entries = [
        attlas.recording.atlas.Entry(f"layers.{at}", at, "self", 0, tuple(range(32)), (0, WIDE), 0, A.shape, A)
        for at, A in enumerate(
            attlas.attend(*torch.randn(2, 1, 32, WIDE, 64), mask=attlas.Causal()) for _ in range(layers)
        )
    ]
    service = Service(attlas.Atlas(entries, tokens=[f" w{i}" for i in range(WIDE)]))

    def all_heads(i: int) -> None:
        for entry in range(layers):
            weights = asked(service, "pair", entry=entry, head="mean", i=i, j0=7, j1=8, with_entry=2, with_head=4)[
                "weights"
            ]
            if len(weights) != 32:
                raise RuntimeError(f"{len(weights)} weights of 32 heads")

    seconds = [processed(partial(all_heads, i)) for i in range(100, 108)]
    return {
        "heads": 32 * layers,
        "tokens": WIDE,
        "first_seconds": seconds[0],
        "seconds": statistics.median(seconds[1:]),
    }


def opened(tokens: int) -> dict[str, Any]:
    """Open a long recording of two heads in a browser that runs already."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return {"left_out": "Playwright is not installed; make browser"}
    own = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with tempfile.TemporaryDirectory(prefix="attlas-viewer-") as folder, sync_playwright() as playwright:
        record(Path(folder) / "run.atlas", tokens, 2)
        browser = playwright.chromium.launch(executable_path=own, args=["--no-sandbox"])
        with serving(Path(folder) / "run.atlas") as server:
            tab = browser.new_page(viewport={"width": 1280, "height": 800})
            tab.add_init_script(WATCH)
            tab.goto(server.url, wait_until="commit")
            tab.wait_for_selector(".attlas-ready .overlay[aria-busy=false]", timeout=120_000)
            tab.wait_for_timeout(100)
            seen = tab.evaluate("window.seen")
        browser.close()
    return {
        "tokens": tokens,
        "heads": 2,
        "told_ms": round(seen["told"], 1),
        "usable_ms": round(seen["usable"], 1),
        "whole_ms": round(seen["whole"], 1),
        "load": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
