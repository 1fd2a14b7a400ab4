"""Runs the examples, and the code of pages that need a library which is not always there."""

import re
from pathlib import Path
from typing import Any

from tests.examples.test_examples import load

ROOT = Path(__file__).resolve().parents[2]


def example(name: str, *arguments: str) -> dict[str, float]:
    """Run the main function of an example and return what it measured."""
    found: dict[str, float] = load(name).main([*arguments])
    return found


def run_page(library: str) -> None:
    """Run the code of the page about a library."""
    page = ROOT / "docs" / "guides" / f"with-{library}.md"
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
