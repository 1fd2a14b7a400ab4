"""What one attention does on one text: sums over its rows, from one pass over the matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attlas import stats
from attlas.corpus.numbers import COUNTS, SUMS
from attlas.corpus.repeats import Copies, Repeated, repeated_weights
from attlas.errors import RecordingError
from attlas.heads import NEAR
from attlas.matrix import AttentionMatrix
from attlas.stats.counts import interval_of

__all__ = ["BINS", "KEPT", "LEAST", "SINGLE", "TextNumbers", "bin_edges", "measure_layer"]

KEPT = 8  # keys of each row that are kept
LEAST = 0.005  # the least weight that is kept
SINGLE = 64  # distances that have a bin of their own; behind them bins double
BINS = SINGLE + 32


def bin_edges() -> NDArray[np.int64]:
    """Return the edges of the bins of distance: 0, 1, ..., 64, 128, 256, ..., shape (BINS + 1,)."""
    return np.concatenate([np.arange(SINGLE), SINGLE << np.arange(BINS - SINGLE + 1)])


@dataclass
class TextNumbers:
    """What the heads of one layer do on one text of n tokens.

    Parameters
    ----------
    sums : array, shape (heads, len(SUMS))
        Sums over rows.
    counts : array of int64, shape (len(COUNTS),)
        Counts of rows, alike for all heads.
    distances, kept_distances : array, shape (heads, BINS)
        Weight of all cells by |q - k|, and that of the kept ones.
    cells : array of int64, shape (SINGLE,)
        Rows that may see a key at each distance below `SINGLE`.
    tokens : array of int64, shape (u,)
        The different tokens of the text.
    query_kept, key_kept, key_mass : array, shape (heads, u)
        Kept weight by token of the query and of the key, and all weight by token of the key without the first key.
    keys : array of int32, shape (heads, n, KEPT)
        Largest keys of each row, -1 for none.
    weights : array of float32, shape (heads, n, KEPT)
        Their weights.
    """

    sums: NDArray[np.float64]
    counts: NDArray[np.int64]
    distances: NDArray[np.float64]
    kept_distances: NDArray[np.float64]
    cells: NDArray[np.int64]
    tokens: NDArray[np.int64]
    query_kept: NDArray[np.float64]
    key_kept: NDArray[np.float64]
    key_mass: NDArray[np.float64]
    keys: NDArray[np.int32] = field(repr=False)
    weights: NDArray[np.float32] = field(repr=False)


@dataclass
class _Rows:
    """What the mask says of the rows of a text, alike for all heads: the run of keys of each, shape (n,)."""

    first: Tensor
    stop: Tensor
    mass: Tensor  # (heads or 1, n): what each row sums to

    @property
    def keys(self) -> Tensor:
        return self.stop - self.first

    def sees(self, key: Tensor) -> Tensor:
        return (self.first <= key) & (key < self.stop)


@torch.no_grad()
def measure_layer(A: AttentionMatrix, ids: Tensor, copies: Sequence[Copies] | None = None) -> list[TextNumbers]:
    """Return the numbers of each text of a batch without padding.

    Parameters
    ----------
    A : AttentionMatrix, shape (batch, heads, n, n)
        Self-attention of a layer.
    ids : Tensor of int64, shape (batch, n)
        Tokens, on the CPU.
    copies : sequence of Copies, optional
        Those of each text, which all layers share.

    Raises
    ------
    RecordingError
        If a row may see more than one run of keys, or not all heads see the same.

    Notes
    -----
    Cost: one pass of statistics, and the cells that stand behind copies of a token. Memory: some 30 numbers a row and
    head.
    """
    problem = A.problem
    batch, _, m, n = problem.shape
    runs = interval_of(problem)
    if m != n or runs is None or runs[0].shape[1] != 1:
        raise RecordingError(
            "corpus()",
            "each row must attend to one run of keys of its own text, the same in all heads.",
            {"matrix": f"{m} queries × {n} keys"},
            found="another mask",
            fix="a causal, sliding, chunked or full self-attention, read without padding.",
        )
    first, stop = (end[:, 0].expand(batch, -1).cpu() for end in runs)
    wanted: list[stats.Statistic] = [
        stats.Entropy(),
        stats.EffectiveKeys(),
        stats.TopK(min(KEPT, n)),
        stats.ColumnMass(),
        stats.Offsets(),
    ]
    wanted += [] if problem.sink is None else [stats.RowMass()]
    entropy, effective, top, columns, offsets, *mass = A.collect(*wanted)
    repeats = repeated_weights(A, ids, first, stop, copies)
    found = []
    for b in range(batch):
        rows = _Rows(first[b], stop[b], mass[0][b].double().cpu() if mass else torch.ones(1, n, dtype=torch.float64))
        parts = [t[b].double().cpu() for t in (entropy, effective, columns, offsets)]
        keys, weights = top.indices[b].int().cpu(), top.values[b].float().cpu()
        _check_finite(parts, weights)
        found.append(_of_text(rows, parts, (keys, weights), repeats[b], ids[b].numpy()))
    return found


def _check_finite(parts: list[Tensor], weights: Tensor) -> None:
    if not math.isfinite(sum(float(part.sum()) for part in (*parts, weights))):
        raise RecordingError("corpus()", "weights must be finite.", found="NaN", fix="look at the model and its dtype.")


def _kept(keys: Tensor, weights: Tensor) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the kept keys of each row and their weights, both with exactly `KEPT` along the last axis."""
    less = weights < LEAST
    pad = (0, KEPT - keys.shape[-1])
    keys = torch.nn.functional.pad(keys.masked_fill(less, -1), pad, value=-1)
    weights = torch.nn.functional.pad(weights.masked_fill(less, 0.0), pad)
    return keys.numpy(), weights.numpy()


def _of_text(
    rows: _Rows, parts: Sequence[Tensor], top: tuple[Tensor, Tensor], repeats: Repeated, ids: NDArray[np.int64]
) -> TextNumbers:
    entropy, effective, columns, offsets = parts
    keys, weights = top
    kept_keys, kept_weights = _kept(keys, weights)
    heads, n = entropy.shape
    i = torch.arange(n)
    diagonals = offsets.numpy()
    by_distance = diagonals[:, n - 1 :].copy()  # |j - i| from 0 to n - 1
    by_distance[:, 1:] += diagonals[:, : n - 1][:, ::-1]
    sums: dict[str, Any] = {
        "entropy": entropy.sum(-1),
        "effective_keys": effective.sum(-1),
        "max_weight": weights[..., 0].double().sum(-1),
        "diagonal": diagonals[:, n - 1],
        "subdiagonal": diagonals[:, n - 2],
        "mass": by_distance.sum(-1),
        "distance": by_distance @ np.arange(n, dtype=np.float64),
        "distance_squared": by_distance @ np.arange(n, dtype=np.float64) ** 2,
        "induction_text": repeats.induction,
        "duplicate_text": repeats.duplicate,
        "induction": repeats.large,
        "max_activation": _max_activation(keys, weights),
    }
    counts: dict[str, int] = {
        "rows": int((rows.keys > 0).sum()),
        "later_rows": n - 1,
        "induction_text": repeats.induction_rows,
        "duplicate_text": repeats.duplicate_rows,
        "repeated": repeats.rows,
        "texts": 1,
    }
    _scores(sums, counts, rows, i, by_distance, diagonals, columns, effective)
    tokens, place = np.unique(ids, return_inverse=True)
    query_kept, key_kept, kept_distances = _by_token(kept_keys, kept_weights, place, len(tokens))
    later = columns.numpy().copy()
    later[:, 0] = 0.0
    return TextNumbers(
        sums=np.stack([np.asarray(sums[name], dtype=np.float64) for name in SUMS], axis=-1),
        counts=np.array([counts[name] for name in COUNTS], dtype=np.int64),
        distances=_binned(by_distance),
        kept_distances=kept_distances,
        cells=_cells(rows, i),
        tokens=tokens.astype(np.int64),
        query_kept=query_kept,
        key_kept=key_kept,
        key_mass=_sum_by(np.broadcast_to(place, (heads, n)), later, len(tokens)),
        keys=kept_keys,
        weights=kept_weights,
    )


def _scores(
    sums: dict[str, Any],
    counts: dict[str, int],
    rows: _Rows,
    i: Tensor,
    by_distance: NDArray[np.float64],
    diagonals: NDArray[np.float64],
    columns: Tensor,
    effective: Tensor,
) -> None:
    """Add the scores of attlas.heads: rows without a choice are left out, and their weight is what they sum to."""
    n, several = len(i), rows.keys > 1
    near_keys = torch.minimum(rows.stop, i + NEAR) - torch.maximum(rows.first, i - NEAR + 1)
    targets = {
        "current": (rows.sees(i), torch.from_numpy(diagonals[:, n - 1]), several),
        "previous": (rows.sees(i - 1), torch.from_numpy(diagonals[:, n - 2]), several),
        "near": (near_keys > 0, torch.from_numpy(by_distance[:, :NEAR].sum(-1)), rows.keys > near_keys),
        "first": (rows.sees(torch.zeros_like(i)), columns[:, 0], several),
    }
    for name, (sees, total, choice) in targets.items():
        # A row that sees targets alone puts all its weight there.
        bound = sees & ~choice & (rows.keys > 0)
        sums[name] = (total - (rows.mass * bound).sum(-1)).clamp(min=0.0)
        counts[name] = int((sees & choice).sum())
    shares = (effective / rows.keys.clamp(min=1)).clamp(max=1.0)
    sums["breadth"] = (shares * several).sum(-1)
    counts["breadth"] = int(several.sum())


def _cells(rows: _Rows, i: Tensor) -> NDArray[np.int64]:
    """Return how many rows may see a key at each of the small distances."""
    d = torch.arange(SINGLE)[:, None]
    counts: NDArray[np.int64] = (rows.sees(i - d) | rows.sees(i + d)).sum(-1).numpy()
    return counts


def _max_activation(keys: Tensor, weights: Tensor) -> Tensor:
    """Return the largest weight of each head without query 0 and key 0, shape (heads,)."""
    other = weights[:, 1:, :2].masked_fill(keys[:, 1:, :2] == 0, 0.0)
    return other.flatten(1).amax(1).double()


def _binned(by_distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of a row of distances, shape (heads, n), in the bins of `bin_edges`."""
    edges = bin_edges()
    starts = edges[:-1][edges[:-1] < by_distance.shape[1]]
    out = np.zeros((len(by_distance), BINS))
    out[:, : len(starts)] = np.add.reduceat(by_distance, starts, axis=1)
    return out


def _sum_by(place: NDArray[Any], weights: NDArray[Any], size: int) -> NDArray[np.float64]:
    """Return the weights of each head summed by place, shape (heads, size)."""
    heads = len(weights)
    flat = (place.reshape(heads, -1) + np.arange(heads)[:, None] * size).ravel()
    return np.bincount(flat, weights.ravel(), heads * size).astype(np.float64).reshape(heads, size)


def _by_token(
    keys: NDArray[np.int32], weights: NDArray[np.float32], place: NDArray[np.int64], size: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the kept weight by token of the query and of the key, and by distance."""
    heads, n, _ = keys.shape
    of_rows = weights.sum(-1, dtype=np.float64)
    query = _sum_by(np.broadcast_to(place, (heads, n)), of_rows, size)
    key = _sum_by(place[keys], weights, size)  # the weight of "none" is 0
    distances = np.abs(np.arange(n, dtype=np.int32)[None, :, None] - keys)
    return query, key, _binned(_sum_by(distances, weights, n + 1))
