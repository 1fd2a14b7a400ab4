"""The pages of docs/: their pictures, their links, their Chinese twins, and that the reference leaves nothing out.

`test_markdown.py` runs the code of every page and follows the links between the files. Here the site is built as
`make docs` builds it, and links and anchors are followed between the built pages.
"""

import ast
import importlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tests.sites import built_site

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ENGLISH = sorted(page for page in DOCS.rglob("*.md") if not page.is_relative_to(DOCS / "zh"))
CHINESE = sorted((DOCS / "zh").rglob("*.md"))
LESSONS = [page for page in ENGLISH if page.parent.name == "from-formula-to-code" and page.stem != "index"]
FINDINGS = [page for page in ENGLISH if page.parent.name == "findings" and page.stem != "index"]
PICTURE_BYTES = 72_000


def relative(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def blocks(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [m[1] for m in re.finditer(r"^```python\n(.*?)^```", text, flags=re.M | re.S)]


def written(page: Path) -> set[str]:
    """Return the pictures that a page's code writes."""
    return {name for block in blocks(page) for name in re.findall(r'savefig\("([\w-]+\.svg)"\)', block)}


def shown(page: Path) -> set[Path]:
    names = re.findall(r"!\[[^\]]+\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    return {(page.parent / name).resolve() for name in names}


def in_chinese(picture: Path) -> Path:
    """Return the picture that a Chinese page shows: that of the page in Chinese, where the viewer is on it."""
    twin = re.sub(r"-(light|dark)\.png", r"-zh-\1.png", picture.name)
    return picture.with_name(twin) if (DOCS / "images" / twin.partition("#")[0]).exists() else picture


@pytest.mark.parametrize("page", ENGLISH, ids=relative)
def test_pages_show_the_pictures_that_their_code_draws(page: Path) -> None:
    screenshots = {path for path in shown(page) if path.parent == DOCS / "images"}
    drawing = FINDINGS if page == DOCS / "findings" / "index.md" else [page]  # the gallery shows what the others draw
    assert shown(page) - screenshots == {page.parent / name for one in drawing for name in written(one)}


def test_pictures_are_small_and_none_is_left_over() -> None:
    there = set(DOCS.rglob("*.svg"))
    assert there == {page.parent / name for page in ENGLISH for name in written(page)}
    large = {path.name: path.stat().st_size for path in there if path.stat().st_size > PICTURE_BYTES}
    assert not large


@pytest.mark.parametrize("page", LESSONS, ids=relative)
def test_lessons_have_all_their_parts(page: Path) -> None:
    titles = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.M)
    assert titles == ["The formula", "The code", "The picture", "Edge cases", "Sources"]
    assert "**What to look for.**" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", FINDINGS, ids=relative)
def test_findings_are_notebooks_with_their_outputs(page: Path) -> None:
    book = json.loads(page.with_suffix(".ipynb").read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert [f"{''.join(cell['source'])}\n" for cell in code] == blocks(page), "make docs writes it again"
    pictures = [shown["data"]["image/svg+xml"] for cell in code for shown in cell["outputs"] if "data" in shown]
    assert ["".join(picture) for picture in pictures] == [
        (page.parent / name).read_text(encoding="utf-8") for name in sorted(written(page))
    ]
    text = page.read_text(encoding="utf-8")
    assert "**What it does not say.**" in text
    assert f"({page.stem}.ipynb)" in text


# ---------------------------------------------------------------------------------------------------------- Chinese


def without_words(block: str) -> str:
    """Return code without comments and with empty strings: what a translation leaves as it is."""
    tree = ast.parse(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


@pytest.mark.parametrize("page", CHINESE, ids=relative)
def test_chinese_pages_have_the_code_and_pictures_of_the_english_ones(page: Path) -> None:
    twin = DOCS / page.relative_to(DOCS / "zh")
    assert [without_words(block) for block in blocks(page)] == [without_words(block) for block in blocks(twin)]
    assert shown(page) == {in_chinese(picture) for picture in shown(twin)}
    count = [len(re.findall(r"^#+ ", re.sub(r"^```.*?^```", "", p.read_text("utf-8"), flags=re.M | re.S), flags=re.M))
             for p in (page, twin)]  # fmt: skip
    assert count[0] == count[1], "a heading is missing"


def test_the_guide_is_there_in_chinese() -> None:
    guide = [page for page in ENGLISH if page.parent.name != "reference" and page.stem != "comparison"]
    assert {relative(page) for page in guide} == {page.relative_to(DOCS / "zh").as_posix() for page in CHINESE}


def test_readme_and_its_twin_lead_to_each_other() -> None:
    assert "(README.zh-CN.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(README.md)" in (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    english, chinese = (blocks(ROOT / name) for name in ("README.md", "README.zh-CN.md"))
    assert [without_words(block) for block in english] == [without_words(block) for block in chinese]


# -------------------------------------------------------------------------------------------------------- reference


def public_names() -> Iterator[tuple[str, str]]:
    """Yield the callable names of the packages that the page on stability calls public."""
    listed = re.search(r"^PUBLIC = (\[.*?\])", (DOCS / "stability.md").read_text(encoding="utf-8"), flags=re.M | re.S)[
        1
    ]
    for package in ast.literal_eval(listed):
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name not in (package, "transformers", "matplotlib", "sklearn"):
                raise
            continue
        for name in module.__all__:
            if callable(getattr(module, name)):
                yield package, name


def test_reference_leaves_no_public_name_out() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: \S*?(\w+)$", text, flags=re.M))
    whole = set(re.findall(r"^::: (attlas\.\w+)\.\*$", text, flags=re.M))  # docs/_build/site.py lists their names
    listed |= {name for package in whole for name in importlib.import_module(package).__all__}
    absent = sorted(f"{package}.{name}" for package, name in public_names() if name not in listed)
    assert not absent


# ------------------------------------------------------------------------------------------------------- built pages


class Page(HTMLParser):
    """Links and anchors of a built page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.math = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {value for value in (given.get("id"), given.get("name")) if value}
        self.math += tag == "math"
        if tag == "a" and given.get("href"):
            self.links.add(given["href"] or "")
        if tag in ("script", "img", "iframe") and given.get("src"):
            self.loaded.add(given["src"] or "")
        if tag == "link" and given.get("href") and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.add(given["href"] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    folder = built_site(tmp_path_factory)
    return {path.resolve(): Page(path) for path in folder.rglob("*.html") if path.name != "404.html"}


def lost(site: dict[Path, Page]) -> list[str]:
    """List links within the site that lead nowhere, and external ones that are no address."""
    found = []
    for path, page in site.items():
        for link in page.links | page.loaded:
            parts = urlsplit(link)
            if parts.scheme:
                if parts.scheme not in ("http", "https", "mailto", "data") or not (parts.netloc or parts.path):
                    found.append(f"{path.name}: {link}")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or (
                parts.fragment
                and target in site
                and target.name != "live.html"
                and unquote(parts.fragment) not in site[target].ids
            ):
                found.append(f"{path.name}: {link}")
    return sorted(found)


@pytest.mark.slow
def test_site_builds_without_warnings_and_its_links_lead_somewhere(site: dict[Path, Page]) -> None:
    assert len(site) >= len(ENGLISH) + len(CHINESE)
    assert not lost(site)


@pytest.mark.slow
def test_start_pages_lead_to_the_viewer_on_a_recording(site: dict[Path, Page]) -> None:
    (live,) = (path for path in site if path.name == "live.html")
    for start, link in (("index.html", "live.html"), ("zh/index.html", "../live.html#lang=zh")):
        assert link in site[live.parent / start].links
    assert '"packed":[{"entry":2,"head":4' in live.read_text("utf-8")


@pytest.mark.slow
def test_site_loads_nothing_from_elsewhere(site: dict[Path, Page]) -> None:
    assert not {link for page in site.values() for link in page.loaded if urlsplit(link).netloc}


@pytest.mark.slow
def test_site_shows_formulas(site: dict[Path, Page]) -> None:
    lessons = [path for path in site if path.parent.name == "from-formula-to-code" and path.stem != "index"]
    assert lessons
    assert all(site[path].math for path in lessons)


@pytest.mark.slow
def test_site_has_each_figure_in_the_colours_of_both_themes(site: dict[Path, Page]) -> None:
    shown = {(path.parent / link).resolve() for path, page in site.items() for link in page.loaded if ".svg#" in link}
    figures = {path for path in shown if not path.name.endswith("-dark.svg#only-dark")}
    assert {path.name.removesuffix(".svg#only-light") for path in figures} == {
        path.stem for path in DOCS.rglob("*.svg")
    }
    for figure in figures:
        light, dark = (figure.with_name(figure.name.partition(".svg")[0] + end) for end in (".svg", "-dark.svg"))
        assert figure.with_name(f"{dark.name}#only-dark") in shown
        assert 'style="fill: #ffffff' in light.read_text("utf-8")
        assert not re.findall(r'<path [^>]*style="fill: (#ffffff|#e7e4dc)|#12212e|#52646f', dark.read_text("utf-8"))


@pytest.mark.slow
def test_each_language_has_its_own_tabs(site: dict[Path, Page]) -> None:
    for path in site:
        if path.name != "start.html":
            continue
        tabs = re.search(r'class="md-tabs__list">(.*?)</ul>', path.read_text(encoding="utf-8"), flags=re.S)[1]
        words = [" ".join(text.split()) for text in re.findall(r"<a [^>]*>(.*?)</a>", tabs, flags=re.S)]
        if path.parent.name == "zh":
            assert words == ["首页", "从公式到代码", "实践指南", "发现", "参考手册（英文）"]
        else:
            assert words == ["Home", "From formula to code", "Guides", "Findings", "Reference"]


def test_lost_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    page.write_text('<p id="b"><a href="#b"><a href="#c"><a href="d.html"><a href="https://"><img src="e.svg">')
    assert len(lost({page.resolve(): Page(page)})) == 4
