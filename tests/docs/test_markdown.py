"""The Markdown pages of the repository: their code runs, and their links lead somewhere."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "src").rglob("*.md"),
    ]
)


def code_blocks(text: str) -> list[tuple[int, str]]:
    """Return line number and text of each ```python block that is meant to run."""
    found = []
    for match in re.finditer(r"^(<!-- not run: .+ -->\n+)?```python\n(.*?)^```", text, flags=re.M | re.S):
        if match[1] is None:
            found.append((text[: match.start(2)].count("\n"), match[2]))
    return found


# The Chinese pages have the code of the English ones, comments aside; tests/docs holds them to it.
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if "zh" not in page.relative_to(ROOT).as_posix()],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_markdown_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of a page one after another, in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, block in code_blocks(page.read_text(encoding="utf-8")):
        # Empty lines in front give tracebacks the line numbers of the page.
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile("\n" * line + block, str(page), "exec"), namespace)


def headings(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """List the links of a page that lead nowhere in this repository."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text):
        link = "".join(target)
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        file = (page.parent / path) if path else page
        if not file.exists():
            found.append(link)
            continue
        if anchor and file.suffix == ".md" and anchor not in headings(file.read_text(encoding="utf-8")):
            found.append(link)
    return found


def test_markdown_links_lead_somewhere() -> None:
    broken = {page.relative_to(ROOT).as_posix(): broken_links(page) for page in PAGES}
    assert not {page: links for page, links in broken.items() if links}


def test_markdown_rules_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`\n[a](#one-two) [b](#three) [c](none.md) [d](https://example.org) ![e](none.png)\n")
    assert broken_links(page) == ["#three", "none.md", "none.png"]
    text = "```python\nx = 1\n```\n<!-- not run: it downloads a model -->\n```python\ny = 1\n```\n```text\nz\n```\n"
    assert code_blocks(text) == [(1, "x = 1\n")]


def test_markdown_names_only_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    named = {page: set(re.findall(r"`make ([a-z]+)", page.read_text(encoding="utf-8"))) for page in PAGES}
    assert not {page: names - targets for page, names in named.items() if names - targets}
