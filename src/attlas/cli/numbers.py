"""Numbers that ``attlas record`` can keep, by name, and what each head is called from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attlas import stats
from attlas.atlas import Atlas, Entry
from attlas.atlas.entry import statistic_names
from attlas.cli.terminal import UsageError
from attlas.errors import explain
from attlas.heads import Head
from attlas.heads.kinds import from_statistics, text_statistics

__all__ = ["KINDS_OF_HEADS", "NAMES", "chosen", "heads_of", "missing", "side_of", "weights_of"]

KINDS_OF_HEADS = "kinds"
_SIDE = 128  # blocks along a picture,
_SMALL = 80  # and where there are many heads
_MANY = 48
_TOP = range(3, 9)  # weights kept for each query, fewer where there are many heads or tokens
_KEPT = 900_000  # weights kept in all, about: 4 bytes each in the report


def _picture(side: int) -> stats.Picture:
    return stats.Picture(side, side, pool="max")


# Name, and the statistic of n tokens and a number of heads.
_MAKE: dict[str, Callable[[int, int], stats.Statistic]] = {
    "entropy": lambda n, heads: stats.Entropy(),
    "effective_keys": lambda n, heads: stats.EffectiveKeys(),
    "max_weight": lambda n, heads: stats.MaxWeight(),
    "max_logit": lambda n, heads: stats.MaxLogit(),
    "logit_moments": lambda n, heads: stats.LogitMoments(),
    "column_mass": lambda n, heads: stats.ColumnMass(),
    "column_max": lambda n, heads: stats.ColumnMax(),
    "coverage": lambda n, heads: stats.Coverage(),
    "offsets": lambda n, heads: stats.Offsets(),
    "top_k": lambda n, heads: stats.TopK(weights_of(n, heads)),
    "picture": lambda n, heads: _picture(min(n, side_of(heads))),
}
NAMES = (*_MAKE, KINDS_OF_HEADS)
_USUAL = tuple(name for name in NAMES if name not in ("column_max", "coverage"))
# What the kinds of head are made from, in the order of `text_statistics`.
_FOR_KINDS = ("entropy", "effective_keys", "max_weight", "column_mass", "offsets", "agreement", "agreement_2")


def side_of(heads: int) -> int:
    """Return how many blocks the picture of each of some heads has along a side, at most."""
    return _SIDE if heads <= _MANY else _SMALL


def weights_of(n: int, heads: int) -> int:
    """Return how many weights are kept for each of n queries of each of some heads."""
    return min(n, max(min(_KEPT // (heads * n), _TOP[-1]), _TOP[0]))


def chosen(names: str | None, ids: Tensor, heads: int, where: str) -> list[stats.Statistic]:
    """Return the statistics that were asked for by name, those that the kinds of head need included.

    Parameters
    ----------
    names : str, optional
        Names with commas between them.
    ids : Tensor of int, shape (n,)
        The text.
    heads : int
        How many heads are recorded, in all layers.
    where : str
        The command, for the error text.

    Raises
    ------
    UsageError
        If there is no statistic of a name.
    """
    wanted = list(_USUAL) if names is None else [name.strip() for name in names.split(",") if name.strip()]
    wrong = [name for name in wanted if name not in NAMES]
    if wrong or not wanted:
        known = ", ".join(NAMES)
        found = f"--statistics {names}"
        raise UsageError(
            explain(where, f"--statistics must be some of {known}.", found=found, fix="--statistics entropy,max_logit")
        )
    if KINDS_OF_HEADS in wanted:
        wanted += [name for name in _FOR_KINDS if name in _MAKE]
    found_all = [make(len(ids), heads) for name, make in _MAKE.items() if name in wanted]
    return [*found_all, *text_statistics(ids)[5:]] if KINDS_OF_HEADS in wanted else found_all


def missing(atlas: Atlas, ids: Tensor | None) -> list[stats.Statistic]:
    """Return the usual statistics that an atlas does not have and that its q and k can still give."""
    first = next((entry for entry in atlas.entries if entry.kind == atlas.kinds[0]), None)
    if first is None or first.matrix is None:
        return []
    n, count = first.shape[3], sum(len(entry.heads) for entry in atlas.entries)
    square = first.shape[2] == n and ids is not None and len(ids) == n
    plain = [name for name in _USUAL if name in _MAKE and (square or name != "picture")]
    wanted = [_MAKE[name](n, count) for name in plain]
    wanted += text_statistics(ids)[5:] if square and ids is not None else []
    names = statistic_names(wanted)
    return wanted if any(name not in entry.statistics for entry in atlas.entries for name in names) else []


def heads_of(atlas: Atlas, entry: Entry) -> tuple[Head, ...]:
    """Return the measures of the heads of a layer; none where they were not recorded, or it is not causal.

    Parameters
    ----------
    atlas : Atlas
        The recording.
    entry : Entry
        The layer's pass over the whole text.
    """
    _, _, m, n = entry.shape
    known = [entry.statistics.get(name) for name in _FOR_KINDS]
    if atlas.ids is None or m != n or n < 3 or atlas.ids.shape[-1] != n or entry.kind == "cross":
        return ()
    if any(not isinstance(result, Tensor) for result in known):
        return ()
    results = [result[0] for result in known if isinstance(result, Tensor)]
    if float(results[4][:, n:].sum()) > 0:  # mass on keys behind the query
        return ()
    return from_statistics(results, atlas.ids[0], _block(atlas, entry), entry.layer, entry.heads)


def _block(atlas: Atlas, entry: Entry) -> dict[str, Tensor] | None:
    """Return what was measured on a random block that occurs twice."""
    found = atlas.details.get("block")
    if not isinstance(found, dict) or entry.kind != "self":
        return None
    numbers = {name: _layer(found.get(name), entry.layer, entry.heads) for name in ("induction", "duplicate")}
    return {name: t for name, t in numbers.items() if t is not None} if None not in numbers.values() else None


def _layer(table: object, layer: int, heads: Sequence[int]) -> Tensor | None:
    if not isinstance(table, list) or layer >= len(table) or max(heads, default=0) >= len(table[layer]):
        return None
    return torch.tensor([float(table[layer][head]) for head in heads], dtype=torch.float64)
