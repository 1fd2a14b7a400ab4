"""Write each finding as a notebook beside its page, with what its code prints and draws; ``make docs`` does it.

Texts become Markdown cells, and ```python blocks cells that have run. A figure that a block saves is its output too.
The files are the same bytes each time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ["SOURCE_DATE_EPOCH"] = "0"  # no date in the pictures

import matplotlib
import torch
from pictures import DOCS, STYLE

INSTALL = "It runs in a clone of the repository, after `pip install '.[hf,plot]'`."


def parts(page: str) -> list[tuple[bool, str]]:
    """Return the texts and the ```python blocks of a page in order, each with whether it is code."""
    pieces = re.split(r"^```python\n(.*?)^```\n", page, flags=re.M | re.S)
    return [(place % 2 == 1, piece.strip("\n")) for place, piece in enumerate(pieces) if piece.strip()]


def lines(text: str) -> list[str]:
    """Return a text as the lines of a cell."""
    return text.splitlines(keepends=True)


def outputs(code: str, printed: str) -> list[dict[str, Any]]:
    """Return what a block printed, and the figure that it saved."""
    found: list[dict[str, Any]] = []
    if printed:
        found.append({"name": "stdout", "output_type": "stream", "text": lines(printed)})
    for name in re.findall(r'savefig\("([\w-]+\.svg)"\)', code):
        picture = {"image/svg+xml": lines(Path(name).read_text(encoding="utf-8"))}
        found.append({"data": picture, "metadata": {}, "output_type": "display_data"})
    return found


def notebook(page: Path) -> dict[str, Any]:
    """Return a page as a notebook, after running it in its folder."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells: list[dict[str, Any]] = []
    with contextlib.chdir(page.parent), matplotlib.rc_context(STYLE):
        for is_code, text in parts(page.read_text(encoding="utf-8")):
            head = {"cell_type": "code" if is_code else "markdown", "id": f"cell-{len(cells)}", "metadata": {}}
            if not is_code:  # the picture is the output of a cell
                words = re.sub(r"^!\[[^\n]*\n\n?", "", text, flags=re.M)
                cells.append({**head, "source": lines(words if cells else f"{words}\n\n{INSTALL}")})
                continue
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(text, str(page), "exec"), namespace)
            count = sum(cell["cell_type"] == "code" for cell in cells) + 1
            shown = outputs(text, printed.getvalue())
            cells.append({**head, "execution_count": count, "outputs": shown, "source": lines(text)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def main() -> None:
    """Write the notebook of each finding, or of the pages that are named."""
    torch.set_num_threads(1)
    asked = [Path(name).resolve() for name in sys.argv[1:]]
    for page in asked or sorted((DOCS / "findings").glob("*.md")):
        if ".svg\")" not in page.read_text(encoding="utf-8"):
            continue  # the gallery
        text = json.dumps(notebook(page), ensure_ascii=False, indent=1) + "\n"
        unfinished = page.with_suffix(".ipynb.tmp")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(page.with_suffix(".ipynb"))
        print(page.with_suffix(".ipynb").relative_to(DOCS), flush=True)


if __name__ == "__main__":
    main()
