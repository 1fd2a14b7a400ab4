"""The statistics that ``attlas record`` stores, by name, and the patterns of heads that follow from them."""

from __future__ import annotations

from torch import Tensor

from attlas import stats
from attlas.cli.options import STATISTICS
from attlas.cli.terminal import UsageError
from attlas.heads.classification import STATISTIC_NAMES, text_statistics
from attlas.recording.atlas import Atlas
from attlas.recording.atlas.entry import statistic_names
from attlas.stats.pooled import count_blocks

_HEAD_PATTERNS = "kinds"
_PICTURE_BLOCKS = 128  # blocks along a picture,
_SMALL_PICTURE_BLOCKS = 80  # and where there are many heads
_MANY_HEADS = 48
_KEPT_PER_QUERY = range(3, 9)  # weights kept for each query, fewer where there are many heads or tokens
_MOST_KEPT_WEIGHTS = 900_000  # weights kept in all, about: 4 bytes each in the report
_DEFAULT_NAMES = STATISTICS[: STATISTICS.index(_HEAD_PATTERNS) + 1]


def _statistic_of_name(name: str, n: int, heads: int) -> stats.Statistic:
    """Return the statistic of a name, for n tokens and a number of heads."""
    if name == "top_k":
        return stats.TopK(min(n, max(min(_MOST_KEPT_WEIGHTS // (heads * n), _KEPT_PER_QUERY[-1]), _KEPT_PER_QUERY[0])))
    if name == "picture":
        side = count_blocks(n, _PICTURE_BLOCKS if heads <= _MANY_HEADS else _SMALL_PICTURE_BLOCKS)
        return stats.Picture(side, side, pool="max")
    statistic: stats.Statistic = getattr(stats, name.title().replace("_", ""))()  # "max_logit" is of MaxLogit
    return statistic


def selected(names: str | None, ids: Tensor, heads: int) -> list[stats.Statistic]:
    """Return the statistics with some names, and those that the patterns of heads need.

    Parameters
    ----------
    names : str, optional
        Names with commas between them.
    ids : Tensor of int, shape (n,)
        The text.
    heads : int
        How many heads are recorded, in all layers.

    Raises
    ------
    UsageError
        If there is no statistic of a name.
    """
    wanted = list(_DEFAULT_NAMES) if names is None else [name.strip() for name in names.split(",") if name.strip()]
    wrong = [name for name in wanted if name not in STATISTICS]
    if wrong or not wanted:
        rule = f"--statistics must be some of {', '.join(STATISTICS)}."
        raise UsageError(rule, f"--statistics {names}", "--statistics entropy,max_logit")
    if _HEAD_PATTERNS in wanted:
        wanted += [name for name in STATISTIC_NAMES if name in STATISTICS]
    found_all = [
        _statistic_of_name(name, len(ids), heads) for name in STATISTICS if name in wanted and name != _HEAD_PATTERNS
    ]
    # The first two of the text, entropy and effective keys, are among the named ones already.
    return [*found_all, *text_statistics(ids)[2:]] if _HEAD_PATTERNS in wanted else found_all


def missing(atlas: Atlas, ids: Tensor | None) -> list[stats.Statistic]:
    """Return the usual statistics that an atlas does not have and that its q and k can still give."""
    first = next((entry for entry in atlas.entries if entry.kind == atlas.kinds[0]), None)
    if first is None or first.matrix is None:
        return []
    n, count = first.shape[3], sum(len(entry.heads) for entry in atlas.entries)
    square = first.shape[2] == n and ids is not None and ids.shape[-1] == n
    plain = [name for name in _DEFAULT_NAMES if name != _HEAD_PATTERNS and (square or name != "picture")]
    wanted = [_statistic_of_name(name, n, count) for name in plain]
    wanted += text_statistics(ids)[2:] if square and ids is not None else []
    names = statistic_names(wanted)
    return wanted if any(name not in entry.statistics for entry in atlas.entries for name in names) else []
