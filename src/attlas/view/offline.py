"""The page as one HTML file that works offline, written without a browser."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attlas.errors import RecordingError, ShapeError, public
from attlas.foundation.files import save_text
from attlas.heads.telling import telling_query
from attlas.matrix import AttentionMatrix
from attlas.recording.atlas import Atlas
from attlas.view import bundle
from attlas.view.packing import Packer
from attlas.view.service import Service
from attlas.view.source import Place


@public("export")
def export(
    shown: Atlas | AttentionMatrix,
    path: str | os.PathLike[str],
    *,
    heads: Sequence[tuple[int, int]] | None = None,
    tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
    title: str = "",
    query: int | None = None,
    progress: Callable[[float], object] | None = None,
) -> Path:
    """Write a recording or a matrix as one HTML file: the page of the viewer, which then needs no server.

    Parameters
    ----------
    shown : Atlas or AttentionMatrix
        What is shown.
    path : str or Path
        The file; one that is there is replaced.
    heads : sequence of (int, int), optional
        Layer and head of those that are shown in detail, the one that the page opens at first. By default the page
        opens with its tour, at the head of the first step; where it has no tour, at the most telling head.
    tokens : sequence of str, or of such, optional
        Text of each token of sequence 0, or a list for each sequence; an atlas knows them. A pair, of queries and
        keys, for a matrix of two texts.
    title : str
        What the page is called.
    query : int, optional
        The token whose row is coloured when the page opens. The cells about it and its strongest key are in the file.
        The default is one from which the head shows what it does, and the last one where the head sees a picture,
        on which its weights are drawn. With a query, the page does not open with its tour.
    progress : callable, optional
        Is told the share that is done.

    Returns
    -------
    Path

    Raises
    ------
    ShapeError
        If there is no such head.
    RecordingError
        If a part of the page cannot be computed.

    See Also
    --------
    attlas.view.serve : every cell of every head.

    Notes
    -----
    Of the heads in detail the file holds pictures down to single cells, as far as 3 MB before compression reach, and
    all weights of small matrices; of the others an overview, and the largest weights of each query, the most telling
    heads first. About `query` with its strongest key, each step of the tour and each bookmark, 64 × 64 cells are
    exact. The tour goes through up to three heads, each at a place of the text where it shows what it does.
    Of a recording with parts it also holds why `query` and its strongest key, and the cells that steps and bookmarks
    pin, are where they are, and whole maps, in up to about 1 MiB.
    Cost: one pass over each head whose overview was not recorded, and one for each whole map.

    Examples
    --------
    >>> import attlas
    >>> attlas.view.export(attlas.load("run.atlas"), "page.html", heads=[(2, 4)])  # doctest: +SKIP
    """
    with contextlib.closing(Service(shown, tokens=tokens, title=title)) as service:
        order = service.order()
        step = _first_step(service) if heads is None and query is None else None
        if heads is not None:
            chosen = [_place_of_head(service, layer, head) for layer, head in heads]
        else:
            chosen = order[:1] if step is None else [(step["entry"], step["head"])]
        if query is None and step is None and chosen:
            query = _telling_query(service, chosen[0])
        pin = _query_and_strongest_key(service, chosen[0], query) if chosen and query is not None else None
        pin = pin if step is None else (step["i"], step["j"])
        pool = _pool(service, chosen)
        data = Packer(service, chosen, order, pool=pool, pin=pin, report=progress or (lambda share: None)).pack()
        title = service.source.title
    if not data["packed"]:
        rule = "a page needs weights, or a recorded picture of them."
        raise RecordingError(rule, "neither", 'attlas record without --statistics, or keep="disk"')
    first = {name: data["packed"][0][name] for name in ("entry", "head")}
    start: dict[str, Any] = {} if query is None else {"pointed": {"i": query, "j": query}}
    if step is not None:
        start = {"story": 0}  # the page goes to the place of the step
    data["state"] = {**first, "batch": 0, "variant": "plain", "pool": pool, **start}
    return write_page(data, path, title)


@public("export")
def write_page(
    data: Mapping[str, Any],
    path: str | os.PathLike[str],
    title: str,
    start: str = "offline",
    facts: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write a page with its data to a file, whole or not at all.

    Parameters
    ----------
    data : mapping
        What the script of the page reads.
    path : str or Path
        The file.
    title : str
        What the page is called.
    start : str
        The file that starts the page, as of `bundle.offline_page`.
    facts : mapping
        What those say of the page who show a link to it as a card, by the names of Open Graph: ``og:image``. It has
        its title by itself.

    Returns
    -------
    Path
    """
    before, _, after = bundle.offline_page(start).partition(bundle.DATA)
    named = {"og:title": f"{title} · attlas", **facts}
    metas = "".join(f'\n<meta property="{name}" content="{_escaped(value)}">' for name, value in named.items())
    before = before.replace("<title>attlas</title>", f"<title>{_escaped(title)} · attlas</title>{metas}", 1)
    # Without "<" nothing in the data ends the element of the page that holds them.
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return save_text(f"{before}{text}{after}", path)


def _escaped(text: str) -> str:
    """Return a text as HTML; the name of a folder may hold bytes that are no text."""
    return escape(text.encode("utf-8", "replace").decode())


def _pool(service: Service, chosen: list[tuple[int, int]]) -> str:
    """Return the pooling that suits the head that a page begins with; maxima where some heads have only a picture."""
    if not chosen or any(shown.entry.matrix is None for shown in service.source.entries):
        return "max"
    entry, head = chosen[0]
    answer = service.answer("pooling", {"entry": str(entry), "head": str(head)})
    return str(json.loads(answer.body)["pool"]) if answer.status == 200 else "max"


def _first_step(service: Service) -> dict[str, Any] | None:
    """Return the first step of the tour; None where the page has no tour."""
    steps = json.loads(service.answer("story", {}).body).get("steps")
    return steps[0] if steps else None


def _telling_query(service: Service, place: tuple[int, int]) -> int | None:
    """Return the query that the page begins with: the last one where a head sees a picture, else a telling one."""
    shown = service.source.entries[place[0]]
    if shown.grids and shown.entry.matrix is not None:
        return shown.entry.shape[2] - 1
    return telling_query(shown.atlas, shown.entry.layer, shown.entry.heads[place[1]])


def _query_and_strongest_key(service: Service, place: tuple[int, int], query: int) -> tuple[int, int] | None:
    """Return a query and its strongest key behind the first; None where the head has no such query or no weights."""
    head = service.source.head(Place(place[0], 0, place[1], "plain"))
    if head is None or not 0 <= query < head.m or head.n < 2:
        return None
    return query, 1 + int(abs(head.cells(range(query, query + 1), range(1, head.n))).argmax())


def _place_of_head(service: Service, layer: int, head: int) -> tuple[int, int]:
    """Return entry and head of a head by its layer and its number."""
    for number, shown in enumerate(service.source.entries):
        if shown.entry.layer == layer and head in shown.entry.heads:
            return number, shown.entry.heads.index(head)
    known = {(shown.entry.layer, each) for shown in service.source.entries for each in shown.entry.heads}
    low, high = min(known, default=(0, 0)), max(known, default=(0, 0))
    fix = f"heads from {low[0]}.{low[1]} to {high[0]}.{high[1]}"
    raise ShapeError("every head must be one of the recording.", f"layer {layer}, head {head}", fix)
