"""Hooks of the MkDocs build: formulas as MathML, figures for the dark theme, and the Chinese twin of each page.

Formulas are written ``$a$`` and ``$$a$$``, as GitHub reads them. They become MathML when the site is built, so
the pages need neither a script nor a font from elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import re
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, fromstring

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from mkdocs.exceptions import PluginError
from mkdocs.structure.nav import Navigation

NAMESPACE = ' xmlns="http://www.w3.org/1998/Math/MathML"'
CHINESE = "zh/"
# The colours of `pictures.py` and their counterparts on a dark page. Cells of heat maps keep theirs: what a page calls
# dark is dark in both themes.
DARK = {
    'style="fill: #ffffff"/>': 'style="fill: none"/>',  # the paper
    'style="fill: #e7e4dc"/>': 'style="fill: #36424c"/>',  # masked cells: the maps are transparent there
    "#12212e": "#e4eaee",
    "#52646f": "#a7b4bd",
    "#174268": "#7fb3e3",
    "#c8421a": "#ff8f66",
    "#4f9fb2": "#63c0d4",
    "#8a8f3c": "#bfc463",
    "#7a4f86": "#c193cf",
}
# The start pages lead to the viewer on a recording, without a server.
LIVE = {
    "index.md": ("live.html", "Open the viewer on a small trained model"),
    "zh/index.md": ("../live.html#lang=zh", "打开查看器：一个训练好的小模型"),
}
WIDE = "\u3000-\u303f\u4e00-\u9fff\uff00-\uffef"  # Chinese characters and their punctuation


def formula(latex: str, display: str) -> Element:
    """Return a formula as a MathML element, with its source for those who copy it."""
    element = fromstring(convert(latex.strip(), display=display).replace(NAMESPACE, ""))
    if display == "block":
        spread(element)
    tidy(element)
    element.set("xmlns", "http://www.w3.org/1998/Math/MathML")
    element.set("aria-label", " ".join(latex.split()))
    return element


def spread(row: Element) -> None:
    """Write the limits of sums below and above them wherever there is room: not in a fraction."""
    for part in row:
        if part.tag in ("msub", "msubsup") and part[0].text == "∑":
            part.tag = "munder" if part.tag == "msub" else "munderover"
        if part.tag != "mfrac":
            spread(part)


def tidy(row: Element) -> None:
    """Say what is a name, what is a sign and what is an operation, so that each gets its own space."""
    before = None
    line = row.tag in ("math", "mrow", "mstyle", "mtd")  # elsewhere each child has a place of its own
    for place, part in reversed(list(enumerate(row))):
        following = row[place + 1] if place + 1 < len(row) else None
        word = part[0] if part.tag in ("msub", "msup") and len(part) else part
        if word.tag == "mo" and ((word.text or "").isalpha() or word.text == "∞"):
            word.tag = "mi"
        is_word = word.tag == "mi" and len(word.text or "") > 1 and (word.text or "").isalpha()
        if line and is_word and following is not None and following.tag not in ("mo", "mspace") and not fenced(following):
            row.insert(place + 1, Element("mspace", {"width": "0.167em"}))
    for part in row:
        if part.tag == "mo" and part.text == "−" and (before is None or before.tag == "mo" and before.text in "=,("):
            part.set("form", "prefix")
        before = part
        tidy(part)


def fenced(part: Element) -> bool:
    """Return whether a part is a pair of brackets with what is between them."""
    return part.tag == "mrow" and len(part) > 0 and part[0].tag == "mo" and part[0].text in ("(", "[")


class Inline(InlineProcessor):
    """A formula in a line: ``$a$``."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element, int, int]:  # noqa: N802  # Markdown's name
        return formula(m[1], "inline"), m.start(0), m.end(0)


class Display(BlockProcessor):
    """A formula in a block of its own: ``$$a$$``."""

    def test(self, parent: Element, block: str) -> bool:
        text = block.strip()
        return text.startswith("$$") and text.endswith("$$") and len(text) > 4

    def run(self, parent: Element, blocks: list[str]) -> None:
        box = Element("div", {"class": "formula"})
        box.append(formula(blocks.pop(0).strip()[2:-2], "block"))
        parent.append(box)


class Formulas(Extension):
    """Both of them, before Markdown takes underscores for emphasis."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  # Markdown's name
        md.inlinePatterns.register(Inline(r"(?<![\\$0-9A-Za-z])\$(?!\s)([^$\n]+?)(?<!\s)\$(?![0-9A-Za-z$])"), "formula", 186)
        md.parser.blockprocessors.register(Display(md.parser), "formula", 90)


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(Formulas())
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Join lines of Chinese: a browser may show a line break between two characters as a space. List what is public."""
    markdown = re.sub(rf"(?<=[{WIDE}])\n(?=[{WIDE}])", "", markdown)
    return re.sub(r"^::: (attlas\.\w+)\.\*$", lambda line: others(line[1], markdown), markdown, flags=re.M)


def others(package: str, page: str) -> str:
    """Return a line of the reference for each public name of a package that its page does not name."""
    import attlas

    names = [name for name in importlib.import_module(package).__all__ if not re.search(rf"^::: .*\b{name}$", page, re.M)]
    paths = []
    for name in sorted(names, key=lambda name: (name.islower(), name)):
        path = f"attlas.{name}" if name in attlas.__all__ else f"{package}.{name}"
        paths.append(f"{path}.{name}" if path in sys.modules else path)  # a function may be called as its module is
    return "\n\n".join(f"::: {path}" for path in paths)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Show each figure in the colours of the theme, and write the references of docstrings as readers know them.

    ``.. [1] Someone`` and ``[1]_`` are for numpydoc.
    """
    html = re.sub(r'<img ([^>]*)src="([^"]+)\.svg"([^>]*)>', _both_themes, html)
    if page.file.src_uri in LIVE:
        link, words = LIVE[page.file.src_uri]
        button = f'<p><a class="md-button md-button--primary" href="{link}">{words}</a></p>'
        html = html.replace("<p><img", f"{button}\n<p><img", 1)  # over the picture, so that it is seen at once
    if not page.file.src_uri.startswith("reference/"):
        return html
    html = re.sub(r"(?<!<p>)\s*\.\. \[(\d+)\]", r"<br>[\1]", html).replace("<p>.. [", "<p>[")
    return re.sub(r"(\[\d+\])_(?!\w)", r"\1", html)


def _both_themes(image: re.Match[str]) -> str:
    before, name, after = image.groups()
    light = f'<img {before}src="{name}.svg#only-light"{after}>'
    return light + f'<img {before}src="{name}-dark.svg#only-dark"{after}>'


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Name the window of the search, in the language of the page: the theme gives it a role and no name."""
    return named_search(output, "搜索" if page.file.src_uri.startswith(CHINESE) else "Search")


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """Do the same on the page that says that there is none."""
    return named_search(output, "Search") if template_name == "404.html" else output


def named_search(html: str, name: str) -> str:
    """Return a page whose window of the search has a name."""
    return html.replace('data-md-component="search" role="dialog"', f'data-md-component="search" role="dialog" aria-label="{name}"')


def live_page(file: Path, address: str | None) -> None:
    """Write the page that opens others, with the shipped model and 512 tokens of a text on it; it needs no server.

    Where the site has an `address`, a link to the page is shown as a card, whose picture is written beside it.
    """
    from attlas.cli import main
    from attlas.view import export_live

    card = file.with_name("card.png")
    with tempfile.TemporaryDirectory() as folder:
        atlas, page = f"{folder}/timeit.atlas", f"{folder}/timeit.html"
        for command in (
            ["record", "--tokens", "512", "-o", atlas],
            ["report", atlas, "--heads", "2.4,0.0,3.2", "-o", page],
            *([["picture", atlas, "--card", "--layer", "2", "--head", "4", "-o", str(card)]] if address else []),
        ):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
                if main(command):
                    raise PluginError(said.getvalue())
        own = {"address": f"{address}{file.name}", "image": card.name} if address else {}
        export_live(file, holds=page, **own)


def on_post_build(config: Any) -> None:
    """Write the page that the start page leads to, and the dark variant of each figure beside it."""
    live_page(Path(config.site_dir) / "live.html", config.site_url)
    for figure in Path(config.docs_dir).rglob("*.svg"):
        built = Path(config.site_dir) / figure.relative_to(config.docs_dir)
        built.with_name(f"{figure.stem}-dark.svg").write_text(dark(figure.read_text(encoding="utf-8")), encoding="utf-8")


def dark(svg: str) -> str:
    """Return a figure in the colours of the dark theme."""
    return re.sub("|".join(DARK), lambda m: DARK[m[0]], svg)


def on_page_context(context: dict[str, Any], page: Any, config: Any, nav: Any) -> dict[str, Any]:
    """Give the theme the language of the page, and the switch the same page in the other language."""
    here = page.file.src_uri
    chinese = here.startswith(CHINESE)
    config.theme["language"] = "zh" if chinese else "en"
    for palette, name in zip(config.theme["palette"], ("深色", "浅色") if chinese else ("Dark", "Light"), strict=True):
        palette["toggle"]["name"] = name
    sources = {other.file.src_uri: other.file.url for other in nav.pages}
    english, twin = here.removeprefix(CHINESE), CHINESE + here.removeprefix(CHINESE)
    urls = {"en": sources.get(english, "index.html"), "zh": sources.get(twin, "zh/index.html")}
    config.extra["homepage"] = "zh/index.html" if chinese else "index.html"
    for language in config.extra["alternate"]:
        language["link"] = urls[language["lang"]]
    context["nav"] = navigation(nav, chinese)
    return context


def navigation(nav: Navigation, chinese: bool) -> Navigation:
    """Return the tabs of one language: the Chinese pages have their own, and the reference, which is English."""
    (twins,) = (item for item in nav.items if item.title == "中文")
    if not chinese:
        return Navigation([item for item in nav.items if item is not twins], nav.pages)
    (reference,) = (copy.copy(item) for item in nav.items if item.title == "Reference")
    reference.title = "参考手册（英文）"
    return Navigation([*twins.children, reference], nav.pages)
