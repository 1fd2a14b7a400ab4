"""The part of a text in which a head shows best what it does."""

from __future__ import annotations

import torch
from torch import Tensor

from attlas.atlas import Entry

_WINDOW = 32  # tokens shown cell by cell


def closeup_window(entry: Entry, head: int, ids: Tensor) -> tuple[range, int]:
    """Return the part of the text where a head finds most of what followed an earlier copy, and the best query.

    Parameters
    ----------
    entry : Entry
        The recorded layer, with its largest weights: the statistic ``"top_k"``.
    head : int
        Number of the head.
    ids : Tensor of int, shape (n,)
        Tokens of the text.
    """
    top, index = entry.statistics["top_k"], entry.heads.index(head)
    values, indices = top.values[0, index].float(), top.indices[0, index]
    n, width = len(ids), min(_WINDOW, len(ids))
    positions = torch.arange(n)[:, None]
    before = torch.cat([ids.new_full((1,), -1), ids[:-1]])
    follows_copy = (before[indices] == ids[:, None]) & (positions - indices < width // 2) & (indices > 0)
    mass = (values * follows_copy).sum(-1)
    # Copies stand before: the first third of the window is theirs.
    sums = mass.unfold(0, width, 1)[:, width // 3 :].sum(-1)
    start = int(sums.argmax()) if float(sums.max()) > 0 else (n - width) // 2
    shown = slice(start + width // 3, start + width)
    score = mass[shown] if float(mass[shown].max()) > 0 else values[shown, 0]
    return range(start, start + width), start + width // 3 + int(score.argmax())
