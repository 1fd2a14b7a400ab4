"""Where in a text it shows what a head does."""

from __future__ import annotations

import torch

from attlas.recording.atlas import Atlas

__all__ = ["telling_cell", "telling_query"]

_WINDOW = 32  # tokens that are looked at together


def telling_query(atlas: Atlas, layer: int, head: int) -> int | None:
    """Return the query from which a head finds most of what followed an earlier copy of its token.

    Parameters
    ----------
    atlas : Atlas
        The recording.
    layer, head : int
        Which head.

    Returns
    -------
    int or None
        The position of the query; None where the text or the largest weights are not known.
    """
    entry = next((entry for entry in atlas.entries if entry.layer == layer and head in entry.heads), None)
    if entry is None or "top_k" not in entry.statistics or atlas.ids is None or atlas.ids.shape[-1] != entry.shape[2]:
        return None
    ids, top, index = atlas.ids[0].cpu(), entry.statistics["top_k"], entry.heads.index(head)
    values, keys = top.values[0, index].float().cpu(), top.indices[0, index].cpu()
    # Of all windows of tokens the one with most such weight is taken, and the query from its last two thirds.
    n, width = len(ids), min(_WINDOW, len(ids))
    before = torch.cat([ids.new_full((1,), -1), ids[:-1]])
    distances = torch.arange(n)[:, None] - keys
    follows_copy = (before[keys] == ids[:, None]) & (distances < width // 2) & (keys > 0)
    mass = (values * follows_copy).sum(-1)
    # Copies stand before: the first third of the window is theirs.
    sums = mass.unfold(0, width, 1)[:, width // 3 :].sum(-1)
    start = int(sums.argmax()) if float(sums.max()) > 0 else (n - width) // 2
    shown = slice(start + width // 3, start + width)
    score = mass[shown] if float(mass[shown].max()) > 0 else values[shown, 0]
    return shown.start + int(score.argmax())


def telling_cell(atlas: Atlas, layer: int, head: int) -> tuple[int, int] | None:
    """Return the telling query of a head, and the key behind the first that gets most of its weight.

    Parameters
    ----------
    atlas : Atlas
        The recording.
    layer, head : int
        Which head.

    Returns
    -------
    (int, int) or None
        None where the text or the largest weights are not known.
    """
    query = telling_query(atlas, layer, head)
    if query is None:
        return None
    entry = next(entry for entry in atlas.entries if entry.layer == layer and head in entry.heads)
    keys = entry.statistics["top_k"].indices[0, entry.heads.index(head), query].tolist()
    return query, next((int(key) for key in keys if key > 0), 0)
