"""Where a recording comes from, and what it took: lines for a person who opens the page."""

from __future__ import annotations

import math
from importlib.metadata import PackageNotFoundError, metadata, version

from attlas.atlas import Atlas

__all__ = ["about"]


def about(atlas: Atlas) -> list[tuple[str, str]]:
    """Return what is known of a recording, as titles and texts.

    Parameters
    ----------
    atlas : Atlas
        The recording; `attlas record` and `attlas demo` note source, time and command in its details.
    """
    details, tokens = atlas.details, len(atlas.tokens or ())
    source, seconds = details.get("source"), details.get("seconds")
    unseen = ", which it never saw in training" if details.get("unseen") is True else ""
    lines = []
    if atlas.model and tokens:
        lines.append(("Recorded", f"{atlas.model}, reading {tokens:,} tokens of {source or 'a text'}{unseen}."))
    cells = sum(math.prod(entry.shape) for entry in atlas.entries)
    if cells:
        matrices, size = (
            sum(len(entry.heads) for entry in atlas.entries),
            sum(entry.nbytes for entry in atlas.entries),
        )
        took = f" To run and read it took {seconds:.1f} s." if isinstance(seconds, int | float) else ""
        what = (
            "queries, keys and statistics" if any(entry.matrix is not None for entry in atlas.entries) else "statistics"
        )
        full = f"Stored in float32, the matrices of its {matrices:,} heads would take {_bytes(4 * cells)}"
        lines.append(("Memory", f"{full}; the recording keeps {_bytes(size)} of {what}.{took}"))
    if isinstance(details.get("command"), str):
        lines.append(("Again", str(details["command"])))
    return [*lines, ("Made with", _versions())]


def _bytes(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1023.5:
            return f"{size:,.0f} {unit}" if size >= 9.95 or unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def _versions() -> str:
    """Return versions, and the address of the project where the installed package knows it."""
    found = []
    for name in ("attlas", "torch"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # run from a checkout that is not installed
            continue
    try:
        links = [link.split(",", 1)[-1].strip() for link in metadata("attlas").get_all("Project-URL") or []]
    except PackageNotFoundError:
        links = []
    return ", ".join([*found, *[link for link in links if link.startswith("https://")][:1]])
