"""Draw the pictures of the pages by running the code of the pages; ``make docs`` does it first.

A page's ```python blocks run in order, in one namespace, in the folder of the page, so that
``figure.savefig("name.svg")`` writes the picture that the page shows. The files are the same bytes each time.
The Chinese pages show the pictures of the English ones: their code is the same, which a test holds them to.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import time
from pathlib import Path

os.environ["SOURCE_DATE_EPOCH"] = "0"  # no date in the files

import matplotlib
import torch

DOCS = Path(__file__).resolve().parent.parent
STYLE = {
    "axes.edgecolor": "#52646f",
    "axes.grid": False,
    "axes.labelcolor": "#12212e",
    "axes.labelsize": 8,
    "axes.prop_cycle": matplotlib.cycler(color=["#174268", "#c8421a", "#4f9fb2", "#8a8f3c", "#7a4f86"]),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": "#12212e",
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 8,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "savefig.dpi": 110,
    "svg.fonttype": "none",  # text stays text, in a font of the reader's; Verdana is as wide as DejaVu
    "svg.hashsalt": "attlas",
    "text.color": "#12212e",  # site.py has a colour of the dark theme for each of these
    "xtick.color": "#52646f",
    "xtick.labelsize": 7.5,
    "ytick.color": "#52646f",
    "ytick.labelsize": 7.5,
}


def blocks(page: str) -> list[str]:
    """Return the ```python blocks of a page, each under empty lines that keep its line numbers."""
    found = re.finditer(r"^(<!-- not run: .+ -->\n+)?```python\n(.*?)^```", page, flags=re.M | re.S)
    return ["\n" * page[: m.start(2)].count("\n") + m[2] for m in found if m[1] is None]


def draw(page: Path) -> None:
    """Run one page in its folder."""
    text = page.read_text(encoding="utf-8")
    namespace = {"__name__": "__main__"}
    with contextlib.chdir(page.parent), matplotlib.rc_context(STYLE), contextlib.redirect_stdout(io.StringIO()):
        for block in blocks(text):
            exec(compile(block, str(page), "exec"), namespace)


def main() -> None:
    torch.set_num_threads(1)  # sums in one order: the same bytes each time
    asked = [Path(name).resolve() for name in sys.argv[1:]]
    for page in asked or sorted(DOCS.rglob("*.md")):
        if page.is_relative_to(DOCS / "zh") or ".svg" not in page.read_text(encoding="utf-8"):
            continue
        start = time.perf_counter()
        draw(page)
        print(f"{page.relative_to(DOCS)}  {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
