"""What one attention does on one text: sums over its rows, from one pass over the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from attlas import stats
from attlas.corpus.numbers import COUNTS, SUMS
from attlas.corpus.repeats import TokenPositions, VisibleCopies, repeated_weights, sum_of
from attlas.errors import RecordingError
from attlas.heads import NEAR
from attlas.matrix import AttentionMatrix
from attlas.stats.counts import interval_of

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


class TextIndex:
    """What all layers share of a text: where its tokens stand, and what a mask says of its rows.

    Parameters
    ----------
    ids : array of int64, shape (n,)
        Tokens.
    """

    def __init__(self, ids: NDArray[np.int64]) -> None:
        self.positions = TokenPositions(ids)
        self._rows: dict[tuple[bytes, bytes], _RowRuns] = {}

    def rows(self, first: Tensor, stop: Tensor) -> _RowRuns:
        """Return the positions that a mask allows in each row, kept because layers share masks."""
        key = first.numpy().tobytes(), stop.numpy().tobytes()
        if key not in self._rows:
            self._rows[key] = _RowRuns(self.positions, first, stop)
        return self._rows[key]


class _RowRuns:
    """What a mask says of the rows of a text, alike for all heads: each attends to one run of keys.

    Parameters
    ----------
    positions : TokenPositions
        Where the tokens stand.
    first, stop : Tensor of int64, shape (n,)
        The run of each row.

    Attributes
    ----------
    copies : VisibleCopies
        The earlier copies of its token that a row may see.
    keys : Tensor of int64, shape (n,)
        How many keys a row sees, 1 for none.
    several : Tensor of bool, shape (n,)
        Rows that see more than one key.
    bound : dict of str to Tensor of bool, shape (n,)
        For each score the rows that see nothing else: all their weight is there.
    counts : array of int64, shape (len(COUNTS),)
        Rows that the sums are over.
    cells : array of int64, shape (SINGLE,)
        Rows that may see a key at each of the small distances.
    """

    def __init__(self, positions: TokenPositions, first: Tensor, stop: Tensor) -> None:
        def sees(key: Tensor) -> Tensor:
            """Return which rows may attend to a key; `key` has the position of the key for each row, shape (..., n)."""
            return (first <= key) & (key < stop)

        self.copies = VisibleCopies(positions, first, stop)
        n, keys = len(first), stop - first
        i, d = torch.arange(n), torch.arange(SINGLE)[:, None]
        self.keys, self.several = keys.clamp(min=1), keys > 1
        near = torch.minimum(stop, i + NEAR) - torch.maximum(first, i - NEAR + 1)  # how many near keys a row sees
        # For each score the rows that see one of its keys, and those that see another key, too: they have a choice.
        targets = {
            "current": (sees(i), self.several),
            "previous": (sees(i - 1), self.several),
            "near": (near > 0, keys > near),
            "first": (sees(torch.zeros_like(i)), self.several),
        }
        self.bound = {name: seen & ~choice & (keys > 0) for name, (seen, choice) in targets.items()}
        counts = {name: int((seen & choice).sum()) for name, (seen, choice) in targets.items()} | {
            "rows": int((keys > 0).sum()),
            "later_rows": n - 1,
            "breadth": int(self.several.sum()),
            "induction_text": self.copies.rows[0],
            "duplicate_text": self.copies.rows[1],
            "repeated": positions.rows,
            "texts": 1,
        }
        self.counts = np.array([counts[name] for name in COUNTS], dtype=np.int64)
        self.cells: NDArray[np.int64] = (sees(i - d) | sees(i + d)).sum(-1).numpy()


def measure_layer(A: AttentionMatrix, ids: Tensor, texts: Sequence[TextIndex] | None = None) -> list[TextNumbers]:
    """Return the numbers of each text of a batch without padding.

    Parameters
    ----------
    A : AttentionMatrix, shape (batch, heads, n, n)
        Self-attention of a layer.
    ids : Tensor of int64, shape (batch, n)
        Tokens, on the CPU.
    texts : sequence of TextIndex, optional
        Those of each text, which all layers share.

    Raises
    ------
    RecordingError
        If a row may see more than one run of keys, or not all heads see the same.

    See Also
    --------
    pool_and_measure : gives the output of the layer from the same pass.

    Notes
    -----
    Cost: one pass of statistics, and the cells that stand behind copies of a token. Memory: some 30 numbers per row and
    head.
    """
    return _measure_texts(A, ids, texts, [])[1]


def pool_and_measure(
    A: AttentionMatrix, values: Tensor, ids: Tensor, texts: Sequence[TextIndex]
) -> tuple[Tensor, list[TextNumbers]]:
    """Return ``A @ values`` and what `measure_layer` does, both from one call of the kernels."""
    (out,), numbers = _measure_texts(A, ids, texts, [stats.Pooled(values)])
    return out.to(values.dtype), numbers


@torch.no_grad()
def _measure_texts(
    A: AttentionMatrix, ids: Tensor, texts: Sequence[TextIndex] | None, others: list[stats.Statistic]
) -> tuple[tuple[Any, ...], list[TextNumbers]]:
    """Return other statistics, and the numbers of each text."""
    batch, _, m, n = A.weights.shape
    runs = interval_of(A.problem)
    if m != n or runs is None or runs[0].shape[1] != 1:
        rule = "each row must attend to one run of keys of its own text, the same in all heads."
        fix = "a causal, sliding, chunked or full self-attention, read without padding."
        raise RecordingError(rule, "another mask", fix, matrix=f"{m} queries × {n} keys", where="corpus()")
    first, stop = (end[:, 0].expand(batch, -1).cpu() for end in runs)
    texts = [TextIndex(row.numpy()) for row in ids] if texts is None else texts
    rows = [text.rows(*ends) for text, *ends in zip(texts, first, stop, strict=True)]
    wanted = [stats.Entropy(), stats.EffectiveKeys(), stats.TopK(min(KEPT, n)), stats.ColumnMass(), stats.Offsets()]
    mass: list[stats.Statistic] = [] if A.sink is None else [stats.RowMass()]
    entropy, effective, top, columns, offsets, *further = A.collect(*wanted, *mass, *others)
    repeats = repeated_weights(A, ids, [each.copies for each in rows])
    found = []
    for b in range(batch):
        own = {
            "entropy": entropy[b],
            "effective_keys": effective[b],
            "mass": further[0][b].cpu() if mass else torch.ones(1, n),
            "columns": columns[b].cpu().double().numpy(),
            "offsets": offsets[b].cpu().double().numpy(),
            "keys": top.indices[b].cpu(),
            "weights": top.values[b].cpu().float(),
            "repeats": repeats[b],
        }
        found.append(_numbers_of_text(texts[b].positions, rows[b], own))
    return tuple(further[len(mass) :]), found


def _numbers_of_text(positions: TokenPositions, rows: _RowRuns, found: dict[str, Any]) -> TextNumbers:
    """Return the numbers of one text; `found` has the statistics of its matrix by the names of `_measure_texts`."""
    entropy, effective, columns, diagonals = (
        found[name] for name in ("entropy", "effective_keys", "columns", "offsets")
    )
    heads, n = entropy.shape
    # `diagonals` has the weight of each j - i, from -(n - 1) to n - 1.
    by_distance = diagonals[:, n - 1 :].copy()  # |j - i| from 0 to n - 1
    by_distance[:, 1:] += diagonals[:, : n - 1][:, ::-1]
    each = np.arange(n, dtype=np.float64)
    shares = (effective.cpu() / rows.keys).clamp_(max=1.0) * rows.several
    sums: dict[str, Any] = {
        "entropy": _sum_over_rows(entropy),
        "effective_keys": _sum_over_rows(effective),
        "max_weight": _sum_over_rows(found["weights"][..., 0]),
        "diagonal": diagonals[:, n - 1],
        "subdiagonal": diagonals[:, n - 2],
        "mass": by_distance.sum(-1),
        "distance": by_distance @ each,
        "distance_squared": by_distance @ each**2,
        "breadth": _sum_over_rows(shares),
        "max_activation": _max_activation(found["keys"], found["weights"]),
        **dict(zip(("induction_text", "duplicate_text", "induction"), found["repeats"], strict=True)),
        # The scores of attlas.heads leave out rows without a choice.
        "current": diagonals[:, n - 1],
        "previous": diagonals[:, n - 2],
        "near": by_distance[:, :NEAR].sum(-1),
        "first": columns[:, 0],
    }
    for name, bound in rows.bound.items():
        sums[name] = np.maximum(sums[name] - _sum_over_rows(found["mass"] * bound), 0.0)
    sums_of_head = np.stack([sums[name] for name in SUMS], axis=-1)
    if not np.isfinite(sums_of_head).all():
        raise RecordingError("weights must be finite.", "NaN", "look at the model and its dtype.", where="corpus()")
    keys, weights, by_query, by_key, kept_distances = _kept_weights(found["keys"], found["weights"])
    columns[:, 0] = 0.0
    by_token = np.concatenate([by_query, by_key, columns])[:, positions.order]
    query_kept, key_kept, key_mass = np.add.reduceat(by_token, positions.starts, axis=1).reshape(3, heads, -1)
    return TextNumbers(
        sums=sums_of_head,
        counts=rows.counts,
        distances=_sums_in_bins(by_distance),
        kept_distances=_sums_in_bins(kept_distances),
        cells=rows.cells,
        tokens=positions.tokens,
        query_kept=query_kept,
        key_kept=key_kept,
        key_mass=key_mass,
        keys=keys,
        weights=weights,
    )


def _sum_over_rows(x: Tensor) -> NDArray[np.float64]:
    """Return the sum of each head over the rows."""
    return sum_of(x).cpu().numpy()


def _max_activation(keys: Tensor, weights: Tensor) -> NDArray[np.float64]:
    """Return the largest weight of each head without query 0 and key 0, shape (heads,)."""
    other = weights[:, 1:, :2] * (keys[:, 1:, :2] != 0)  # of the two largest keys of a row one is not key 0
    return other.flatten(1).amax(1).double().numpy()


def _kept_weights(
    keys: Tensor, weights: Tensor
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the kept keys of each row and their weights, and these weights by query, by key and by distance.

    `keys` and `weights` are the largest, shape (heads, n, k). The first two results have the shape (heads, n, KEPT),
    the sums (heads, n).
    """
    heads, n, k = keys.shape
    kept = weights >= LEAST
    weights = weights * kept
    of_each = weights.double()
    distance = (torch.arange(n)[:, None] - keys).abs_()
    head = torch.arange(0, heads * n, n)[:, None, None]  # where the n bins of each head begin among those of all heads
    # numpy's types say integers, whatever the weights are.
    by_key, by_distance = (
        np.bincount(at.add_(head).numpy().ravel(), of_each.numpy().ravel(), heads * n)
        .astype(np.float64, copy=False)
        .reshape(heads, n)
        for at in (keys.clone(), distance)
    )
    padding = (0, KEPT - k)
    return (
        functional.pad(torch.where(kept, keys, -1).int(), padding, value=-1).numpy(),
        functional.pad(weights, padding).numpy(),
        of_each.sum(-1).numpy(),
        by_key,
        by_distance,
    )


def _sums_in_bins(by_distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of a row of distances, shape (heads, n), in the bins of `bin_edges`."""
    edges = bin_edges()
    starts = edges[:-1][edges[:-1] < by_distance.shape[1]]
    out = np.zeros((len(by_distance), BINS))
    out[:, : len(starts)] = np.add.reduceat(by_distance, starts, axis=1)
    return out
