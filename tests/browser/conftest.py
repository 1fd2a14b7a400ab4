"""The browser that the tests of the viewer drive."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

AXE = "4.10.3"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium without a window."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    own = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_api.sync_playwright() as playwright:
        try:
            running = playwright.chromium.launch(executable_path=own, args=arguments)
        except sync_api.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield running
        running.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The text of axe-core, fetched once into a folder outside of this repository."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "attlas-tests" / f"axe-core-{AXE}"
    file = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not file.is_file():
        if shutil.which("npm") is None:
            pytest.skip("npm, which fetches axe-core, is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            "npm",
            "install",
            "--prefix",
            str(folder),
            "--no-audit",
            "--no-fund",
            "--ignore-scripts",
            f"axe-core@{AXE}",
        ]
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


def serious_faults(page: Any, axe: str) -> list[str]:
    """Return the serious faults that axe finds in a page, with the elements that have them."""
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{each['id']}: {[(node['target'], node['failureSummary']) for node in each['nodes'][:3]]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]
