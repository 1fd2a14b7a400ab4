"""Which heads of cross-attention follow the input, and when the input comes to each token: word times of speech."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attlas.errors import OutOfRangeError, ShapeError, listed, public
from attlas.foundation.autocast import without_autocast
from attlas.foundation.checks import check_sequence, finite_number, is_integer, whole_number
from attlas.heads.retrieval import rows_in_blocks
from attlas.heads.targets import ATLAS_OR_MATRICES, check_layers, check_matrices
from attlas.matrix import AttentionMatrix
from attlas.recording.atlas import Atlas
from attlas.stats.spans import Span, place_span

LayerHead = tuple[int, int]

_NEAR_KEYS = 7  # keys that count as one place where heads are compared, and the width of whisper's median filter


class Alignment(NamedTuple):
    """Which keys belong to each query, by a path that never goes back; made by `alignment`.

    Parameters
    ----------
    heads : tuple of (layer, head)
        The heads that the path was found with.
    scores : dict
        Score of each head that was compared, ``(layer, head)``, the best first; empty where the heads were given.
    starts : Tensor of int, shape (batch, rows)
        First key of each query on the path.
    ends : Tensor of int, shape (batch, rows)
        First key of the next query; of the last, the number of keys.

    Examples
    --------
    >>> import torch
    >>> from attlas.heads import Alignment
    >>> found = Alignment(((3, 1),), {}, torch.tensor([[0, 10, 25]]), torch.tensor([[10, 25, 60]]))
    >>> found.times()
    tensor([[0.0000, 0.2000, 0.5000]], dtype=torch.float64)
    """

    heads: tuple[LayerHead, ...]
    scores: dict[LayerHead, float]
    starts: Tensor
    ends: Tensor

    @public("Alignment.times()")
    def times(self, seconds: float = 0.02) -> Tensor:
        """Return when each token begins.

        Parameters
        ----------
        seconds : float, default 0.02
            Time of one key: 20 ms in Whisper.

        Returns
        -------
        Tensor of float64, shape (batch, rows)
            Seconds from key 0 on.

        Raises
        ------
        ShapeError
            If `seconds` is no number above 0.

        Examples
        --------
        >>> import torch
        >>> from attlas.heads import Alignment
        >>> Alignment((), {}, torch.tensor([[0, 4]]), torch.tensor([[4, 9]])).times(0.5)
        tensor([[0., 2.]], dtype=torch.float64)
        """
        return self.starts.double() * finite_number("seconds", seconds, "seconds=0.02", above=0.0)

    @public("Alignment.words()")
    def words(self, sizes: Sequence[int], seconds: float = 0.02, sequence: int = 0) -> Tensor:
        """Return when each word begins and ends.

        Parameters
        ----------
        sizes : sequence of int
            How many tokens each word has, from the first query on; queries beyond the last word are left out.
        seconds : float, default 0.02
            Time of one key: 20 ms in Whisper.
        sequence : int, default 0
            Which sequence of the batch.

        Returns
        -------
        Tensor of float64, shape (words, 2)
            Begin and end in seconds. A word ends where the next token begins.

        Raises
        ------
        ShapeError
            If a word has no token, if there are more tokens than queries, or if `seconds` is no number above 0.
        OutOfRangeError
            If there is no such sequence.

        Examples
        --------
        >>> import torch
        >>> from attlas.heads import Alignment
        >>> found = Alignment((), {}, torch.tensor([[0, 10, 25]]), torch.tensor([[10, 25, 60]]))
        >>> found.words([2, 1])
        tensor([[0.0000, 0.5000],
                [0.5000, 1.2000]], dtype=torch.float64)
        """
        batch, rows = self.starts.shape
        step = finite_number("seconds", seconds, "seconds=0.02", above=0.0)
        check_sequence(sequence, batch)
        counts = list(sizes)
        if not counts or not all(is_integer(size) and size > 0 for size in counts) or sum(counts) > rows:
            rule = "each word must have a token, and all words together no more than there are queries."
            raise ShapeError(rule, f"{rows} queries, sizes = {counts!r}"[:120], f"sizes={[1] * min(rows, 3)}")
        ends = torch.tensor(counts).cumsum(0)
        first, last = ends - torch.tensor(counts), ends - 1
        spans = (self.starts[sequence].cpu()[first], self.ends[sequence].cpu()[last])
        return torch.stack(spans, dim=-1).double() * step


@without_autocast
@torch.no_grad()
@public("alignment()")
def alignment(
    source: Atlas | Iterable[AttentionMatrix],
    rows: Span | None = None,
    keys: int | Sequence[int] | Tensor | None = None,
    heads: Iterable[LayerHead] | None = None,
    count: int = 6,
    median: int = _NEAR_KEYS,
    call: int = -1,
) -> Alignment:
    """Find the heads whose cross-attention moves along the input, and the keys of each query by a monotone path.

    Parameters
    ----------
    source : Atlas, or iterable of AttentionMatrix, each of shape (batch, heads, m, n)
        A recording with cross-attention, of a generation for instance; or the cross-attention of each layer.
    rows : slice, range or (start, stop), optional
        The queries to align, without those of a prompt; the default is all.
    keys : int, or one for each sequence, optional
        How many keys belong to the input; those behind are padding. Whisper has one for two frames of its features.
    heads : iterable of (layer, head), optional
        The alignment heads, where they are known: ``generation_config.alignment_heads`` of a Whisper. The default
        compares all heads and takes the best.
    count : int, default 6
        How many heads are taken if `heads` is not given.
    median : int, default 7
        Width of the median filter along the keys, an odd number; 1 filters nothing.
    call : int, default -1
        Which pass of an atlas; by default the last. Of a long recording, Whisper reads each segment as a pass.

    Returns
    -------
    Alignment

    Raises
    ------
    ShapeError
        If there is no cross-attention, if layers have other batches, queries or keys than the first, or if `rows`,
        `keys`, `heads`, `count` or `median` do not fit.
    DtypeError
        If something in `source` is no AttentionMatrix.
    OutOfRangeError
        If a layer, head or pass is not there.

    See Also
    --------
    attlas.record : ``record(model, layers="cross")`` records cross-attention while a model generates.

    Notes
    -----
    The path is that of Whisper's word times [1]_ and equals it where `heads` are the same: the weights of each head are
    standardized over the queries, filtered by a median along the keys, and averaged; then the path through all queries
    and keys with the largest sum is found by dynamic time warping. Keys that all queries weight alike count 0. With
    one query, all keys are its own.

    The score of a head is ``max (1/m) Σ_i (Σ_j∈near(p_i) A_ij - mean_i' A_i'j)`` over all paths
    ``p_1 ≤ p_2 ≤ ... ≤ p_m``, with the 7 keys about ``p_i`` as near. It is close to 1 where each query looks at one
    place and the places move on, and 0 where all queries look at the same: a head with a sink scores no higher than
    one with uniform weights. Where a translation changes the order of words, no path follows it, and the score says
    how much of it does.

    Of a beam search, give the text that was found to the model once more, and record this pass: rows of the steps
    belong to beams that have ended.

    Cost: to score, two passes over each matrix, and memory of a few rows of each head; the path takes ``len(rows) * n``
    numbers, 3 MB for the longest text of a Whisper, and one such matrix at a time is computed.

    References
    ----------
    .. [1] Radford et al., whisper, 2022: ``whisper/timing.py``, as in ``_extract_token_timestamps`` of transformers.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> codes = torch.eye(40).repeat_interleave(3, dim=0)  # each of 40 tokens is said for 3 keys
    >>> follows = attlas.attend(torch.eye(40)[None, None], codes[None, None], attlas.ScaledDot(9.0))
    >>> found = heads.alignment([follows], count=1, median=3)
    >>> found.heads, found.starts[0, :4].tolist()
    (((0, 0),), [0, 3, 6, 9])
    """
    layers = _layers_of_source(source, call)
    first = next(iter(layers.values()))[0]
    batch, m, n = first.shape[0], *first.shape[-2:]
    queries = place_span("rows", rows, m, "queries")
    if not len(queries):
        raise ShapeError("rows must hold one of the queries at least.", f"rows = {rows!r}", f"rows=(0, {m})")
    lengths = _input_lengths(keys, batch, n)
    whole_number("count", count, "count=6")
    if whole_number("median", median, f"median={_NEAR_KEYS}") % 2 == 0:
        raise ShapeError("median must be an odd number.", f"median = {median}", f"median={median + 1}")
    scores = {} if heads is not None else _ranked_heads(layers, queries, lengths)
    chosen = [*scores][:count] if heads is None else _checked_heads(heads, layers)
    starts = torch.empty(batch, len(queries), dtype=torch.int64)
    for b, length in enumerate(lengths):
        total = torch.zeros(len(queries), length, dtype=torch.float64)
        for layer, head in chosen:
            A, numbers = layers[layer]
            weights = A[b, numbers.index(head), queries.start : queries.stop, :length].to_dense()
            total += _median_filtered(_standardized_over_rows(weights), median).cpu()
        starts[b] = torch.from_numpy(first_keys(total.neg_().div_(len(chosen)).numpy()))
    ends = torch.cat([starts[:, 1:], torch.tensor(lengths).unsqueeze(-1)], dim=-1)
    return Alignment(tuple(chosen), scores, starts, ends)


def _layers_of_source(
    source: Atlas | Iterable[AttentionMatrix], call: int
) -> dict[int, tuple[AttentionMatrix, tuple[int, ...]]]:
    """Return the cross-attention of each layer with the numbers of its heads."""
    if isinstance(source, Atlas):
        entries = [source.entry((f"cross.{layer}", call)) for layer in source.layers("cross")]
        if not entries:
            rule, fix = "there must be cross-attention.", 'attlas.record(model, layers="cross")'
            raise ShapeError(rule, f"kinds {listed(source.kinds) or 'none'}", fix, source=repr(source)[:80])
        found = {entry.layer: (entry.need_matrix(), entry.heads) for entry in entries}
    else:
        given = list(source)
        fix = "atlas, or outputs.cross_attentions of a model with attn_implementation='attlas'."
        check_matrices("source", given, ATLAS_OR_MATRICES, fix)
        found = {layer: (A, tuple(range(A.shape[1])) if A.ndim == 4 else ()) for layer, A in enumerate(given)}
    matrices = [A for A, _ in found.values()]

    def fits(A: AttentionMatrix) -> bool:
        """Return whether a matrix has the axes of a layer, and the batch, queries and keys of the first."""
        first = matrices[0].shape
        return A.ndim == len(first) == 4 and (A.shape[0], *A.shape[-2:]) == (first[0], *first[-2:])

    rule = "every layer must have shape (batch, heads, m, n), with the batch, queries and keys of the first."
    check_layers(matrices, fits, rule, "the layers of one pass, all heads together: A, not A[0].")
    return found


def _input_lengths(keys: int | Sequence[int] | Tensor | None, batch: int, n: int) -> list[int]:
    """Return how many keys of each sequence belong to the input."""
    given = n if keys is None else keys
    lengths = given.tolist() if isinstance(given, Tensor) else given
    lengths = [lengths] * batch if is_integer(lengths) else lengths
    if (
        isinstance(lengths, list | tuple)
        and len(lengths) == batch
        and all(is_integer(some) and 0 < some <= n for some in lengths)
    ):
        return [*lengths]
    rule = "keys must be how many keys belong to the input, one number for all sequences or one for each."
    raise ShapeError(rule, f"keys = {given!r}, a batch of {batch}, n = {n}", f"keys={[n] * min(batch, 4)}")


def _checked_heads(
    heads: Iterable[LayerHead], layers: dict[int, tuple[AttentionMatrix, tuple[int, ...]]]
) -> list[LayerHead]:
    """Return pairs of a layer and a head, or raise an error where one is not there."""
    given = [*heads]
    pairs = [tuple(pair) for pair in given if isinstance(pair, list | tuple)]
    if not given or len(pairs) < len(given) or not all(len(pair) == 2 and all(map(is_integer, pair)) for pair in pairs):
        rule, fix = "heads must be pairs of the numbers of a layer and a head.", "heads=[(3, 1), (4, 2)]"
        raise ShapeError(rule, f"heads = {given!r}"[:120], fix)
    for layer, head in pairs:
        if layer not in layers or head not in layers[layer][1]:
            rule = "every one of heads must be recorded."
            there = f"layers {listed(layers)}; heads {listed(layers[layer][1] if layer in layers else ())}"
            example = next((number, numbers[0]) for number, (_, numbers) in layers.items() if numbers)
            raise OutOfRangeError(rule, f"head {head} of layer {layer}; {there}", f"heads=[{example}]")
    return [(layer, head) for layer, head in pairs]


def _ranked_heads(
    layers: dict[int, tuple[AttentionMatrix, tuple[int, ...]]], queries: range, lengths: list[int]
) -> dict[LayerHead, float]:
    """Return the score of each head, the best first."""
    scores: dict[LayerHead, float] = {}
    for layer, (A, numbers) in layers.items():
        found = _alignment_scores(A, queries, lengths).tolist()
        scores |= {(layer, head): score for head, score in zip(numbers, found, strict=True)}
    return dict(sorted(scores.items(), key=lambda item: (-item[1], item[0])))


def _alignment_scores(A: AttentionMatrix, queries: range, lengths: list[int]) -> Tensor:
    """Return how well the heads of a layer move along the keys, shape (heads,): the mean of the sequences."""
    n = A.shape[-1]
    mean = A[..., queries.start : queries.stop, :].sum(dim=-2).double().unsqueeze(-2) / len(queries)
    outside = torch.arange(n, device=A.device) >= torch.tensor(lengths, device=A.device).view(-1, 1, 1)
    best = torch.zeros(*A.shape[:2], n, dtype=torch.float64, device=A.device)
    for _, weights in rows_in_blocks(A, torch.arange(queries.start, queries.stop)):
        above = (weights.double() - mean).masked_fill(outside.unsqueeze(1), 0.0)
        near = F.avg_pool1d(above.flatten(0, 1), _NEAR_KEYS, stride=1, padding=_NEAR_KEYS // 2) * _NEAR_KEYS
        for gain in near.view_as(above).unbind(-2):
            best = torch.where(outside, 0.0, best.cummax(dim=-1).values + gain)
    return best.masked_fill_(outside, 0.0).amax(dim=-1).mean(dim=0) / len(queries)


def _standardized_over_rows(weights: Tensor) -> Tensor:
    """Return weights (rows, keys) less their mean over the rows, over their deviation; 0 where all rows agree."""
    mean, deviation = weights.mean(dim=0), weights.std(dim=0, correction=0)
    return torch.where(deviation > 0, (weights - mean) / deviation, 0.0)


def _median_filtered(x: Tensor, width: int) -> Tensor:
    """Return the median of `width` neighbours along the last axis, mirrored at its ends; as is where it is shorter."""
    half = width // 2
    if half == 0 or x.shape[-1] <= half:
        return x
    padded = F.pad(x.unsqueeze(0), (half, half), mode="reflect").squeeze(0)
    return padded.unfold(-1, width, 1).sort(dim=-1).values[..., half]


def first_keys(cost: np.ndarray) -> np.ndarray:
    """Return the first key of each query on the cheapest path through a matrix, by dynamic time warping.

    Parameters
    ----------
    cost : array of float64, shape (m, n)
        What the path pays at each cell. It begins at the first cell, ends at the last, and goes on by a query, a key,
        or both; of equal paths, by a key.

    Returns
    -------
    array of int, shape (m,)
        Ascending.

    Notes
    -----
    Sums are rounded to float32, as Whisper rounds them. ``m + n`` steps, each over the cells of one antidiagonal.
    """
    m, n = cost.shape
    by_query, by_both = np.zeros((m, n), dtype=bool), np.zeros((m, n), dtype=bool)
    infinite = np.full(m + 1, np.inf, dtype=np.float32)
    before, last = infinite.copy(), infinite.copy()  # of the cells (i, d - 2 - i) and (i, d - 1 - i), by i
    before[0] = 0.0
    for d in range(2, m + n + 1):
        i = np.arange(max(1, d - n), min(m, d - 1) + 1)
        both, query, key = before[i - 1], last[i - 1], last[i]
        is_both = (both < query) & (both < key)
        is_query = (query < both) & (query < key)
        paid = np.where(is_both, both, np.where(is_query, query, key))
        by_both[i - 1, d - i - 1], by_query[i - 1, d - i - 1] = is_both, is_query
        sums = infinite.copy()
        sums[i] = cost[i - 1, d - i - 1] + paid.astype(np.float64)
        before, last = last, sums
    first = np.zeros(m, dtype=np.int64)
    i, j = m - 1, n - 1
    while i >= 0 and j >= 0:
        first[i] = j
        i, j = i - bool(by_both[i, j] or by_query[i, j]), j - (not by_query[i, j])
    return first
