"""The page as one script: for the browser, which loads it at once, the notebook, and the file that works offline.

The files of `static` are ES modules that keep to a few rules: names are exported one by one in front of their
definition, and imported in braces by a path that begins with a dot. Under these rules a script is the modules one
after another, each in a function of its own, so that no two names meet. No tool is needed, and the text stays readable.
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
import re
from functools import cache
from importlib import resources

from attlas.errors import AttlasError

DATA = "/*data*/"  # where the packed numbers go in the offline page

_IMPORT_STATEMENT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"(\.\.?/[\w./]+\.js)";$', re.M)
_EXPORT_KEYWORD = re.compile(r"^export (?=(?:async function|function\*?|const|let|class) +([\w$]+))", re.M)
# Lines of comments that only say types, and have no statement behind them.
_TYPE_COMMENTS = re.compile(r"^ *(?:/\*\*|\*) @(?:param|returns|template|type)\b(?:(?!\*/).)*(?:\*/ *)?\n", re.M)
_STATEMENTS_LEFT = re.compile(
    r"^(?:import\b|export\b|await\b).*", re.M
)  # what a module within a function must not have
_STYLE_FILES = ("style.css", "panels.css")
_OTHER_LANGUAGES = ("zh",)  # besides English, which is in the code
_OFFLINE_PAGES = {
    "offline": (),
    "corpus/offline": ("corpus.css",),
    "live/page": ("corpus.css", "live.css"),
}  # what starts a page without a server: its further styles
_CONNECT = "connect-src 'self' https:; "
_FETCHING_PAGES = ("live/page",)  # those that may open what an address names


class BundleError(AttlasError, ValueError):
    """A file of the page that does not keep to the rules by which files are joined."""


def script(entry: str) -> str:
    """Return a module and everything that it imports, as the text of one script.

    Parameters
    ----------
    entry : str
        Path of the file in `static`.

    Returns
    -------
    str
        Statements that define one constant for each module, ``$map_tiles`` for `map/tiles.js`, an object of
        what it exports; a module comes after those that it imports.

    Raises
    ------
    BundleError
        If a file is missing, imports or exports in another way, or imports itself through others.

    Examples
    --------
    >>> from attlas.view import bundle
    >>> bundle.script("data/base64.js").splitlines()[0]
    'const $data_base64 = (() => {'
    """
    done: dict[str, str] = {}
    _add_module(entry, done, ())
    return "\n".join(done.values())


def _add_module(name: str, done: dict[str, str], path: tuple[str, ...]) -> None:
    """Add a module to `done`, texts by name, behind those that it needs; `path` are the modules that led to it."""
    if name in path:
        raise _bundle_error("no file may import itself, through others either.", " → ".join((*path, name)))
    if name in done:
        return
    source = _text_of_file(name)
    for _, imported in _IMPORT_STATEMENT.findall(source):
        _add_module(_imported_path(name, imported), done, (*path, name))
    done[name] = _module_as_function(name, source)


def _module_as_function(name: str, source: str) -> str:
    """Return a module as a function that is called once and returns what it exports."""
    exported = _EXPORT_KEYWORD.findall(source)

    def destructured(found: re.Match[str]) -> str:
        """Return the line of JavaScript that takes the place of an import."""
        return f"const {{ {_destructured_names(found[1])} }} = {_constant_of_module(_imported_path(name, found[2]))};"

    body = _IMPORT_STATEMENT.sub(destructured, source)
    body = _TYPE_COMMENTS.sub("", _EXPORT_KEYWORD.sub("", body))
    wrong = _STATEMENTS_LEFT.search(body)
    if wrong:
        raise _bundle_error(
            'files export in front of a definition, and import as `import { a, b as c } from "./file.js";`.',
            f"{wrong[0][:60]!r} in {name}",
        )
    return (
        f"const {_constant_of_module(name)} = (() => {{\n{body.rstrip()}\nreturn {{ {', '.join(exported)} }};\n}})();\n"
    )


def _imported_path(name: str, imported: str) -> str:
    """Return the path in `static` of what a module imports."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), imported))


def _destructured_names(imported: str) -> str:
    """Return the names of an import as those of a destructuring: ``a, b as c`` is ``a, b: c``."""
    names = [re.sub(r"\s+as\s+", ": ", name.strip()) for name in imported.split(",")]
    return ", ".join(name for name in names if name)


def _constant_of_module(name: str) -> str:
    """Return the name of the constant that holds what a module exports: ``$corpus_offline``."""
    return "$" + re.sub(r"\W", "_", name.removesuffix(".js"))


@cache
def _text_of_file(name: str) -> str:
    """Return the text of a file of the page."""
    try:
        return resources.files("attlas.view").joinpath("static", *name.split("/")).read_text("utf-8")
    except FileNotFoundError:
        raise _bundle_error("every file that is imported must be in attlas/view/static.", name) from None


def _bundle_error(rule: str, found: str) -> BundleError:
    return BundleError(rule, found, "install attlas again.", where="attlas.view.bundle")


def styles(*further: str) -> str:
    """Return the style sheets of the page as one text.

    Parameters
    ----------
    *further : str
        Names of other sheets behind them.

    Returns
    -------
    str

    Examples
    --------
    >>> from attlas.view import bundle
    >>> ".attlas" in bundle.styles()
    True
    """
    return "\n".join(_text_of_file(name) for name in (*_STYLE_FILES, *further))


def _translated_script(start: str) -> str:
    """Return a module and what it imports as one script that takes the translations."""
    texts = ", ".join(f"{language}: {_text_of_file(f'words/{language}.json').strip()}" for language in _OTHER_LANGUAGES)
    return f"{script(f'{start}.js')}\n$words_words.setTranslations({{ {texts} }});\n"


def widget_module() -> str:
    """Return the page as the one ES module that anywidget loads.

    Returns
    -------
    str

    Examples
    --------
    >>> from attlas.view import bundle
    >>> bundle.widget_module().splitlines()[-1]
    'export default { render: $widget.render };'
    """
    return f"{_translated_script('widget')}\nexport default {{ render: $widget.render }};\n"


@cache
def served_script(start: str = "boot") -> str:
    """Return the script of a page that is served: one file instead of a hundred, which a browser would ask for in turn.

    Parameters
    ----------
    start : {"boot", "corpus/boot", "closed/boot"}
        The file that starts it: the page of a recording, that of a corpus, or the one of a viewer that was closed.

    Returns
    -------
    str

    Examples
    --------
    >>> from attlas.view import bundle
    >>> bundle.served_script("corpus/boot").splitlines()[-1]
    '$corpus_boot.startPage();'
    """
    return f"{_translated_script(start)}\n{_constant_of_module(start)}.startPage();\n"


@cache
def offline_page(start: str = "offline") -> str:
    """Return the page that works offline, without its data: `DATA` stands where the packed numbers go.

    Parameters
    ----------
    start : {"offline", "corpus/offline", "live/page"}
        The file that starts it: the page of a recording, that of a corpus, or the one that opens others.

    Returns
    -------
    str
        HTML with one script and one style sheet, which its content security policy names by their hashes;
        everything else, and every request, is forbidden, but that the page that opens others may fetch them.

    Examples
    --------
    >>> from attlas.view import bundle
    >>> page = bundle.offline_page()
    >>> page.count(bundle.DATA), "connect-src" in page, "http:" in page.replace("http://www.w3.org", "")
    (2, False, False)
    """
    code = (
        f'(() => {{\n"use strict";\n{_translated_script(start)}\n{_constant_of_module(start)}.startOffline();\n}})();\n'
    )
    style = styles(*_OFFLINE_PAGES[start])
    if "</script" in code.lower() or "</style" in style.lower() or DATA in code.replace(f'"{DATA}"', ""):
        raise _bundle_error("no file may hold what ends it within a page.", "</script, </style or the mark of the data")
    icon = re.search(r'<link rel="icon"[^>]*>', _text_of_file("index.html"))
    # The mark stands in the code too, in quotes, where a page is saved once more: the first one is that of the data.
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy(code, style, fetches=start in _FETCHING_PAGES)}">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>attlas</title>
{icon[0] if icon else ""}
<style>{style}</style>
</head>
<body>
<div class="attlas attlas-page{" corpus-page" if start == "corpus/offline" else ""}"></div>
<script type="application/json" id="attlas-data">{DATA}</script>
<script>{code}</script>
</body>
</html>
"""


def policy(code: str, style: str, *, fetches: bool = False) -> str:
    """Return the content security policy of a page with one inline script and one inline style sheet.

    Parameters
    ----------
    code, style : str
        Their texts, to the last character.
    fetches : bool
        Whether the page may fetch files: from its own host, and from others over https that allow it.

    Returns
    -------
    str

    Examples
    --------
    >>> from attlas.view import bundle
    >>> bundle.policy("", "")[:70]
    "default-src 'none'; script-src 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5N"
    """
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (code, style)]
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        f"img-src blob: data:; {_CONNECT if fetches else ''}base-uri 'none'; form-action 'none'"
    )
