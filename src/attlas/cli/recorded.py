"""What the report shows, from a saved recording: also of statistics alone, and of texts that are too long to print."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attlas.atlas import Atlas, Entry
from attlas.cli import numbers
from attlas.cli.reading import Cost, Reading, telling, window_of
from attlas.cli.report.payload import FLOOR
from attlas.cli.terminal import UsageError
from attlas.errors import ShapeError
from attlas.heads import by_token

__all__ = ["entry_of", "reading_of"]

_FAVOURITES = 3  # tokens named for each head
_KEPT = 900_000  # weights in the page, about
_WHOLE, _LEAST = 4096, 512  # tokens up to which all of a text is shown, and the least that is shown of one
_EXCERPT = 128  # tokens of one excerpt
_BETWEEN = 8  # parts at whose ends there are excerpts too


def entry_of(atlas: Atlas, layer: int | str, where: str) -> Entry:
    """Return the attention of a layer, by its number or its name.

    Raises
    ------
    UsageError
        If there is none.
    """
    try:
        return atlas.entry(layer)
    except ShapeError as error:
        known = atlas.layers()
        fix = f"--layer {known[-1]}" if known else "a recording with an attention"
        raise UsageError(
            where,
            "--layer must be one of the recording.",
            {"there are": error.found},
            found=f"--layer {layer}",
            fix=fix,
        ) from error


def reading_of(atlas: Atlas, command: str) -> Reading:
    """Return what the report shows of a recording.

    Parameters
    ----------
    atlas : Atlas
        Causal self-attention of one text, with the statistics that ``attlas record`` computes.
    command : str
        What to type to get the same, where the recording does not know.

    Raises
    ------
    UsageError
        If the recording is of something else, or lacks a statistic.
    """
    entries = [atlas.entry(layer) for layer in atlas.layers()]
    _check(atlas, entries)
    ids = atlas.ids[0] if atlas.ids is not None else torch.zeros(0, dtype=torch.int64)
    n = len(ids)
    by_layer = [numbers.heads_of(atlas, entry) for entry in entries]
    if not all(by_layer):
        raise _error(
            "the report is about causal self-attention on a whole text, with its statistics.",
            "another attention, or statistics that were left out",
            "attlas record without --statistics; attlas stats and attlas picture show every recording",
        )
    heads = tuple(head for layer in by_layer for head in layer)
    mass = torch.stack([entry.statistics["column_mass"][0].double() for entry in entries])
    largest = [entry.statistics["top_k"] for entry in entries]
    values = torch.stack([found.values[0].float() for found in largest])
    indices = torch.stack([found.indices[0] for found in largest])
    told = telling(heads)
    number = heads.index(told)
    per_layer = len(by_layer[0])
    place = divmod(number, per_layer)
    window, query = window_of(values[place], indices[place], ids)
    tokens = _tokens(atlas, n)
    received = mass / torch.arange(n, 0, -1)  # a key is seen by itself and by every later query
    parts = _excerpts(received, window, n, len(heads) * values.shape[-1])
    rows = torch.cat([torch.arange(part.start, part.stop) for part in parts]) if parts else torch.arange(n)
    repeats, period = _repeats(atlas, entries)
    closeups, exact = _closeups(entries, values, indices, window)
    return Reading(
        model=atlas.model or "a model",
        source=str(atlas.details.get("source") or "a text"),
        unseen=False,
        command=str(atlas.details.get("command") or command),
        tokens=tuple(tokens),
        layers=len(entries),
        per_layer=per_layer,
        heads=heads,
        favourites=_favourites(mass, ids, tokens),
        maps=torch.stack([entry.statistics["picture"][0].float() for entry in entries]),
        received=received[:, :, rows],
        values=values[:, :, rows],
        indices=indices[:, :, rows],
        window=window,
        query=query,
        closeups=closeups,
        period=period,
        repeats=repeats,
        loss=math.nan,
        cost=_cost(atlas, entries, n),
        excerpts=parts,
        exact=exact,
    )


def _check(atlas: Atlas, entries: Sequence[Entry]) -> None:
    """Raise a UsageError unless the layers stand side by side and have what the page shows."""
    fix = "attlas record without --statistics"
    if not entries or atlas.ids is None:
        raise _error("the recording must have attentions, and the ids of its text.", "none", "attlas record")
    if len({entry.heads for entry in entries}) > 1:
        found = "layers with different heads"
        raise _error("every layer of a report must have the same heads.", found, "attlas stats, or attlas picture")
    wanted = ("column_mass", "top_k", "picture")
    lost = [name for name in wanted if any(name not in entry.statistics for entry in entries)]
    if lost:
        raise _error("the recording must have what the report shows.", f"no {', '.join(lost)}", fix)


def _tokens(atlas: Atlas, n: int) -> list[str]:
    known = atlas.tokens or []
    return known if len(known) == n else [str(i) for i in range(n)]


def _favourites(mass: Tensor, ids: Tensor, tokens: list[str]) -> tuple[tuple[tuple[str, float], ...], ...]:
    """Return for each head the tokens that get most weight, and their share."""
    n = len(ids)
    text = {number: i for i, number in reversed(list(enumerate(ids.tolist())))}
    found = []
    for layer in mass:
        totals, kinds = by_token(layer, ids)
        shares, places = (totals / n).topk(min(_FAVOURITES, len(kinds)))
        for share, place in zip(shares.tolist(), places, strict=True):
            names = [tokens[text[number]] for number in kinds[place].tolist()]
            found.append(tuple(zip(names, share, strict=True)))
    return tuple(found)


def _excerpts(received: Tensor, window: range, n: int, each: int) -> tuple[range, ...]:
    """Return the parts of a long text that are shown: its ends, the close up, what heads look at most, some between.

    Parameters
    ----------
    received : Tensor, shape (layers, heads, n)
        Mean weight that each key gets.
    window : range
        Part that is shown cell by cell.
    n : int
        Tokens of the text.
    each : int
        Weights that the page holds for each token.
    """
    most = min(max(_KEPT // each, _LEAST), _WHOLE)
    if n <= most:
        return ()
    middle = (window.start + window.stop) // 2
    wanted = [0, middle, n - 1]
    # The last keys are seen by few queries: a mean over them says little.
    flat = received[..., : n - n // 8].flatten(0, 1).clone()
    flat[:, : min(_EXCERPT, n)] = 0.0
    best = flat.max(-1)
    wanted += best.indices[(best.values / flat.mean(-1).clamp_min(1e-30)).argsort(descending=True)].tolist()
    wanted += [n * part // _BETWEEN for part in range(1, _BETWEEN)]
    chosen: set[int] = set()
    for place in wanted:
        start = min(max(place - _EXCERPT // 2, 0), n - _EXCERPT)
        fresh = set(range(start, start + _EXCERPT)) | chosen
        if len(fresh) <= most:
            chosen = fresh
    places = sorted(chosen)
    starts = [i for i in places if i - 1 not in chosen]
    stops = [i + 1 for i in places if i + 1 not in chosen]
    return tuple(range(start, stop) for start, stop in zip(starts, stops, strict=True))


def _closeups(entries: Sequence[Entry], values: Tensor, indices: Tensor, window: range) -> tuple[Tensor, bool]:
    """Return the weights of a window, and whether all are known or only the largest of each query."""
    span, width = slice(window.start, window.stop), len(window)
    future = torch.ones(width, width, dtype=torch.bool).triu(1)
    if all(entry.matrix is not None for entry in entries):
        parts = [entry.need_matrix("report") for entry in entries]
        weights = torch.stack([A[0, :, span, span].float().cpu() for A in parts])
        allowed = torch.stack([A.logits[0, :, span, span].float().cpu() for A in parts]) > -torch.inf
        return weights.masked_fill(~allowed, torch.nan), True
    inside = (indices[:, :, span] >= window.start) & (indices[:, :, span] < window.stop)
    keys = (indices[:, :, span] - window.start).clamp(0, width - 1)
    weights = torch.zeros(*values.shape[:2], width, width)
    weights.scatter_add_(-1, keys, values[:, :, span] * inside)
    return weights.masked_fill(future, torch.nan), False


def _repeats(atlas: Atlas, entries: Sequence[Entry]) -> tuple[Tensor, int]:
    """Return the small pictures of the repeated random block that a recording has, and its length; else nothing."""
    nothing = torch.zeros(len(entries), len(entries[0].heads), 0, 0), 0
    block: Any = atlas.details.get("block")
    try:
        side, period, maps = int(block["side"]), int(block["period"]), block["maps"]
        found = []
        for entry in entries:
            packed = base64.b64decode(maps[entry.layer], validate=True)
            heads = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(-1, side, side)
            found.append(heads[list(entry.heads)].double())
    except (TypeError, KeyError, IndexError, ValueError, RuntimeError, binascii.Error):
        return nothing  # an older recording, or one from Python
    depth = torch.stack(found)
    weights = FLOOR ** (1 - (depth - 1) / 254)
    return weights.masked_fill(depth == 0, torch.nan).float(), period


def _cost(atlas: Atlas, entries: Sequence[Entry], n: int) -> Cost:
    matrices = sum(len(entry.heads) for entry in entries)
    peak, seconds = (atlas.details.get(name) for name in ("peak", "seconds"))
    kept = all(entry.matrix is not None for entry in entries)
    return Cost(
        matrices,
        n,
        matrices * n * n * 4,
        sum(entry.nbytes for entry in entries),
        peak if isinstance(peak, int) else None,
        float(seconds) if isinstance(seconds, int | float) else math.nan,
        "queries, keys, and statistics of every row and column" if kept else "statistics of every row and column",
    )


def _error(rule: str, found: str, fix: str) -> UsageError:
    return UsageError("report", rule, found=found, fix=fix)
