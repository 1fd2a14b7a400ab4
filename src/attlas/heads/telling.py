"""Where in a text it shows what a head does."""

from __future__ import annotations

import torch
from torch import Tensor

from attlas.heads.patterns import NEAR
from attlas.recording.atlas import Atlas

__all__ = ["shows_kind", "telling_cell", "telling_query"]

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


def shows_kind(kind: str, ids: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Return for each query whether its strongest key is one that a head of a kind looks at.

    Parameters
    ----------
    kind : str
        Name of the kind. What has no keys of its own, as "mixed", shows at any earlier key but the first.
    ids : Tensor of int, shape (n,)
        The tokens of the text.
    keys : Tensor of int, shape (n,)
        The key with the largest weight of each query; -1 where it is not known.
    weights : Tensor, shape (n,)
        These weights.

    Returns
    -------
    Tensor of bool, shape (n,)

    Examples
    --------
    >>> import torch
    >>> from attlas.heads.telling import shows_kind
    >>> ids, keys = torch.tensor([7, 5, 7, 6]), torch.tensor([0, 0, 1, 2])
    >>> shows_kind("induction", ids, keys, torch.ones(4))
    tensor([False, False,  True, False])
    """
    queries, behind = torch.arange(len(keys)), keys > 0
    back, looked_at = queries - keys, ids[keys.clamp(min=0)]
    match kind:
        case "induction":
            return behind & (back > 0) & (ids[(keys - 1).clamp(min=0)] == ids)
        case "duplicate token":
            return (keys >= 0) & (back > 0) & (looked_at == ids)
        case "previous token":
            return (keys >= 0) & (back == 1)
        case "first-token sink":
            return (keys == 0) & (queries > 1)
        case "current token":
            return (back == 0) & (queries > 0)
        case "local":
            return (keys >= 0) & (back > 0) & (back < NEAR)
        case "fixed distance":
            return behind & (back == _most_weighted(back, behind & (back > 1), weights))
        case "one token":
            return behind & (back > 0) & (looked_at == _most_weighted(looked_at, behind, weights))
    return behind & (back > 0)


def _most_weighted(values: Tensor, counted: Tensor, weights: Tensor) -> int:
    """Return the value that gets most of the largest weights, of the queries that are counted; -1 of none."""
    if not bool(counted.any()):
        return -1
    found, places = values[counted].unique(return_inverse=True)
    sums = torch.zeros(len(found), dtype=weights.dtype).index_add_(0, places, weights[counted])
    return int(found[sums.argmax()])
