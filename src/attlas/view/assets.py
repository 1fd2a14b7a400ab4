"""The files of the page: read once from the package into a table, which is all that a request can choose from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

__all__ = ["Asset", "assets"]

INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True)
class Asset:
    """One file of the page.

    Parameters
    ----------
    type : str
        Its media type.
    body : bytes
        What is in it.
    etag : str
        A name of its content, in quotation marks.
    """

    type: str
    body: bytes
    etag: str


def assets() -> dict[str, Asset]:
    """Return every file of the page by its path within it; `index.html` by the empty path too."""
    found = dict(_walk(resources.files("attlas.view").joinpath("static"), ""))
    if INDEX in found:
        found[""] = found[INDEX]
    return found


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Asset]]:
    """Return the files below a folder whose type the page uses."""
    found = []
    for item in folder.iterdir():
        path = f"{prefix}{item.name}"
        if item.is_dir():
            found += _walk(item, f"{path}/")
            continue
        kind = _TYPES.get("." + item.name.rpartition(".")[2])
        if kind is not None:
            body = item.read_bytes()
            found.append((path, Asset(kind, body, f'"{hashlib.sha256(body).hexdigest()[:32]}"')))
    return found
