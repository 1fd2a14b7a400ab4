"""Names each head by a pattern, from exact measures on a text and on a repeated block of random tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attlas import stats
from attlas.heads.patterns import NEAR, Diagonal
from attlas.heads.scores import HeadScores
from attlas.matrix import AttentionMatrix
from attlas.recording.atlas import Atlas, Entry
from attlas.recording.atlas.padding import included_rows, token_queries

#: Measures on a random block that occurs twice, fields of `Head`.
BLOCK_MEASURES = ("induction", "duplicate")


@dataclass(frozen=True)
class Pattern:
    """A pattern of attention: its name, the measure that decides, and the threshold.

    Parameters
    ----------
    name : str
        The name people use.
    short : str
        The same where there is little room.
    measure : str
        Field of `Head` that decides.
    threshold : float
        The head is of this pattern if the measure is at least this.
    does : str
        What such a head does, in one sentence.
    definition : str
        What the measure is, so that anyone can compute it again.

    Examples
    --------
    >>> from attlas.heads import PATTERNS
    >>> PATTERNS[0].name, PATTERNS[0].threshold
    ('induction', 0.5)
    """

    name: str
    short: str
    measure: str
    threshold: float
    does: str
    definition: str

    def chance(self, tokens: int) -> float:
        """Return the value that the measure has by chance, without this pattern, on a text of so many tokens.

        That is its value for uniform weights; for ``"broad"``, for a head that attends to a single key. The measures on
        a random block do not depend on the text: 0.
        """
        if tokens < 3 or self.measure in ("", *BLOCK_MEASURES):
            return 0.0
        first_query = {"near": NEAR, "fixed": 2}.get(self.measure, 1)  # the first that sees another key as well
        if first_query >= tokens:  # too short to tell
            return 1.0
        target_keys = NEAR if self.measure == "near" else 1
        queries = tokens if self.measure == "favourite" else tokens - first_query
        return sum(target_keys / (i + 1) for i in range(first_query, tokens)) / queries


# The most telling first: a head is named after the first pattern whose threshold it reaches. Each has name, short,
# measure, threshold, does and definition.
PATTERNS = (
    Pattern(
        "induction",
        "induction",
        "induction",
        0.5,
        "Finds the last time this token occurred and looks at what came next.",
        "mean weight on the token after the earlier copy, in the second half of a random block that occurs twice",
    ),
    Pattern(
        "duplicate token",
        "duplicate",
        "duplicate",
        0.5,
        "Looks at an earlier copy of the same token.",
        "mean weight on the earlier copy of the token itself, in the second half of a random block that occurs twice",
    ),
    Pattern(
        "previous token",
        "previous",
        "previous",
        0.5,
        "Looks at the token just before.",
        "mean weight on the key one position before the query, over the queries that have another one",
    ),
    Pattern(
        "fixed distance",
        "fixed",
        "fixed",
        0.5,
        "Looks a fixed number of tokens back, more than one.",
        "mean weight on the key at one distance, the distance from 2 on that gets most, over the queries that have it",
    ),
    Pattern(
        "current token",
        "current",
        "current",
        0.5,
        "Stays with the token itself.",
        "mean weight on the query's own position, over the queries that have another key",
    ),
    Pattern(
        "first-token sink",
        "sink",
        "first",
        0.5,
        "Parks most of its weight on the first token: mostly at rest.",
        "mean weight on the first key, over all later queries",
    ),
    Pattern(
        "local",
        "local",
        "near",
        0.5,
        f"Reads its neighbourhood, the last {NEAR} tokens.",
        f"mean weight on the query's own position and the {NEAR - 1} before it, over queries with keys further away",
    ),
    Pattern(
        "one token",
        "one token",
        "favourite",
        0.5,
        "Keeps returning to one token of the text, wherever it stands.",
        "mean weight on all copies of the one token that gets most, the first key aside",
    ),
    Pattern(
        "broad",
        "broad",
        "breadth",
        0.2,
        "Spreads its weight over much of what came before.",
        "mean of the effective keys as a share of the keys that the query may see",
    ),
)
MIXED = Pattern(
    "mixed",
    "mixed",
    "",
    0.0,
    "Picks by content: none of the simple patterns.",
    "no other pattern's threshold is reached",
)


@dataclass(frozen=True)
class Head:
    """What was measured of one head; weights are shares of 1, means are over queries.

    Parameters
    ----------
    layer, head : int
        Which head.
    entropy : float
        Entropy of a row, nats.
    effective_keys : float
        ``1 / Σ w²`` of a row: over how many keys the weight is spread.
    breadth : float
        `effective_keys` as a share of the keys that the query may see.
    first, previous, current, near : float
        Weight on the first key, the key before, the own position, and the last 16 keys.
    fixed, fixed_distance : float
        Weight on the keys at one distance, and that distance: the one from 2 on that gets most.
    distance : float
        How many positions back the weight lies.
    favourite : float
        Weight on all copies of the token that gets most, the first key aside.
    induction, duplicate : float
        On a random block that occurs twice: weight on the token after the earlier copy, and on the copy.
    induction_text, duplicate_text : float
        On the text, over queries whose token occurred before: weight on the keys that follow an earlier copy
        of it, and on the copies.
    chance : float
        The value of `induction_text` and of `duplicate_text` for uniform weights.
    tokens : int
        Length of the text, the mean over a batch; patterns that chance comes near at this length are left out.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> block = heads.repeated_block(100, period=8, blocks=1)
    >>> codes = torch.eye(16)[None, None]  # each query is made like the key before it
    >>> A = attlas.attend(codes.roll(1, 2), codes, attlas.ScaledDot(30.0), attlas.Causal())
    >>> [head.patterns[0].name for head in heads.measure(A, block[0], A, period=8)]
    ['previous token']
    """

    layer: int
    head: int
    entropy: float
    effective_keys: float
    breadth: float
    first: float
    previous: float
    current: float
    near: float
    fixed: float
    fixed_distance: float
    distance: float
    favourite: float
    induction: float
    duplicate: float
    induction_text: float
    duplicate_text: float
    chance: float
    tokens: int = 0

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """Every pattern whose threshold this head reaches, the most telling first; `MIXED` where there is none."""
        return classify(self)

    @property
    def prominence(self) -> tuple[bool, float]:
        """Sort key for the most telling head: induction heads first, then by the measure of the first pattern."""
        pattern = self.patterns[0]
        return pattern.measure == "induction", self.of(pattern)

    @property
    def nearest(self) -> Pattern | None:
        """For a mixed head, the nearest pattern, if the head reaches at least half of its threshold."""
        nearest = max(detectable(self.tokens), key=lambda pattern: self.of(pattern) / pattern.threshold)
        near = self.patterns == (MIXED,) and self.of(nearest) >= nearest.threshold / 2
        return nearest if near else None

    def of(self, pattern: Pattern) -> float:
        """Return this head's value of the measure that decides about a pattern; 0 for `MIXED`."""
        return float(getattr(self, pattern.measure)) if pattern.measure else 0.0


def classify(head: Head) -> tuple[Pattern, ...]:
    """Return the patterns of a head, the most telling first.

    Parameters
    ----------
    head : Head
        What was measured.

    Returns
    -------
    tuple of Pattern
        Every pattern whose threshold is reached; `MIXED` alone where there is none.

    Examples
    --------
    >>> from attlas.heads import Head, classify
    >>> head = Head(0, 0, **dict.fromkeys(list(Head.__dataclass_fields__)[2:], 0.0) | {"first": 0.9})
    >>> [pattern.name for pattern in classify(head)]
    ['first-token sink']
    """
    reached = [pattern for pattern in detectable(head.tokens) if head.of(pattern) >= pattern.threshold]
    if {"previous", "current", "fixed"} & {pattern.measure for pattern in reached}:
        reached = [pattern for pattern in reached if pattern.measure != "near"]  # these heads are local by definition
    return tuple(reached) or (MIXED,)


def detectable(tokens: int) -> tuple[Pattern, ...]:
    """Return the patterns that can be detected on a text of this length: chance reaches at most half the threshold.

    Parameters
    ----------
    tokens : int
        Length of the text; 0 where it is not known, and then all.

    Returns
    -------
    tuple of Pattern

    Examples
    --------
    >>> from attlas.heads import PATTERNS
    >>> from attlas.heads.classification import detectable
    >>> [pattern.name for pattern in PATTERNS if pattern not in detectable(30)]
    ['local', 'broad']
    """
    return tuple(pattern for pattern in PATTERNS if pattern.chance(tokens) <= pattern.threshold / 2)


def repeated_block(vocabulary: int, period: int = 128, blocks: int = 4, seed: int = 0) -> Tensor:
    """Return random tokens that occur twice: on them, only the copy tells what comes next.

    Parameters
    ----------
    vocabulary : int
        Number of tokens to draw from.
    period : int
        Length of the block. Its tokens are all different, where the vocabulary is large enough.
    blocks : int
        How many different blocks.
    seed : int
        Seed of the draw.

    Returns
    -------
    Tensor of int64, shape (blocks, 2 * period)

    Examples
    --------
    >>> from attlas.heads import repeated_block
    >>> block = repeated_block(1000, period=50)
    >>> block.shape, bool((block[:, :50] == block[:, 50:]).all())
    (torch.Size([4, 100]), True)
    """
    generator = torch.Generator().manual_seed(seed)
    if vocabulary < period:
        once = torch.randint(vocabulary, (blocks, period), generator=generator)
    else:  # no token twice within a block: then each has one earlier copy
        once = torch.stack([torch.randperm(vocabulary, generator=generator)[:period] for _ in range(blocks)])
    return torch.cat([once, once], dim=1)


def measure(A: AttentionMatrix, ids: Tensor, R: AttentionMatrix, period: int, layer: int = 0) -> tuple[Head, ...]:
    """Measure every head of a layer on a text and on a random block that occurs twice.

    Parameters
    ----------
    A : AttentionMatrix, shape (batch, heads, n, n)
        Causal attention of the layer on the text.
    ids : Tensor of int, shape (n,) or (batch, n)
        Tokens of the text, at least three.
    R : AttentionMatrix, shape (blocks, heads, 2 * period, 2 * period)
        Attention of the layer on `repeated_block`.
    period : int
        Length of the block.
    layer : int
        Number of the layer.

    Returns
    -------
    tuple of Head

    Notes
    -----
    Exact, from one pass over each matrix. Memory: a few numbers per token and head.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> ids, block = torch.arange(10), heads.repeated_block(50, period=8)
    >>> A, R = (
    ...     attlas.attend(torch.zeros(b, 2, n, 4), torch.zeros(b, 2, n, 4), mask=attlas.Causal())
    ...     for b, n in ((1, 10), (4, 16))
    ... )
    >>> [
    ...     head.patterns[0].name for head in heads.measure(A, ids, R, period=8)
    ... ]  # ten tokens are too few for "broad"
    ['mixed', 'mixed']
    """
    rows = token_queries(A.weights)
    query_mask = None if rows is None else rows.unsqueeze(1)
    results, on_block = A.collect(*text_statistics(ids)), measure_block(R, period)
    return heads_from_statistics(results, ids, on_block, layer, query_mask=query_mask)


def text_statistics(ids: Tensor) -> tuple[stats.Statistic, ...]:
    """Return the statistics of a matrix on a text from which `heads_from_statistics` takes its measures.

    Parameters
    ----------
    ids : Tensor of int, shape (n,) or (batch, n)
        Tokens of the text.

    Returns
    -------
    tuple of Statistic
        Entropy and effective keys of each row, and the scores of each head.

    Examples
    --------
    >>> import torch
    >>> from attlas.heads.classification import text_statistics
    >>> len(text_statistics(torch.arange(10)))
    3
    """
    return stats.Entropy(), stats.EffectiveKeys(), HeadScores(ids.cpu())


def heads_from_statistics(
    results: Sequence[Tensor],
    ids: Tensor,
    on_block: Mapping[str, Tensor] | None = None,
    layer: int = 0,
    heads: Sequence[int] | None = None,
    query_mask: Tensor | None = None,
) -> tuple[Head, ...]:
    """Return the measures of the heads of a layer from statistics that were collected before.

    Parameters
    ----------
    results : sequence of Tensor, each with the leading axes batch and heads
        What `text_statistics` gave, in their order.
    ids : Tensor of int, shape (n,) or (batch, n)
        Tokens of the text, at least three.
    on_block : mapping of str to Tensor, shape (heads,), optional
        Measures of `measure_block`; without them, 0.
    layer : int
        Number of the layer.
    heads : sequence of int, optional
        Numbers of the heads, where not all were measured.
    query_mask : Tensor of bool, optional, broadcastable to (batch, heads, n)
        Rows that are no padding.

    Returns
    -------
    tuple of Head
        Of a batch, the means over its texts.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.heads.classification import heads_from_statistics, text_statistics
    >>> ids, codes = torch.arange(20), torch.zeros(1, 2, 20, 4)
    >>> A = attlas.attend(codes, codes, mask=attlas.Causal())
    >>> [round(head.previous, 3) for head in heads_from_statistics(A.collect(*text_statistics(ids)), ids)]
    [0.137, 0.137]
    """
    entropy, effective, scores = (result.detach().cpu().double() for result in results)
    shape = entropy.shape
    rows = torch.ones(shape, dtype=torch.bool) if query_mask is None else query_mask.cpu().expand(shape)
    row_counts = rows.sum((0, 2)).clamp(min=1)
    is_token = rows.any(1)
    measures = dict(on_block or {name: torch.zeros(shape[1]) for name in BLOCK_MEASURES})
    measures["entropy"] = torch.where(rows, entropy, 0.0).sum((0, 2)) / row_counts
    measures["effective_keys"] = torch.where(rows, effective, 0.0).sum((0, 2)) / row_counts
    measures |= dict(zip(HeadScores.NAMES, scores.mean(0).unbind(-1), strict=True))
    del measures["behind"]  # above 0 only in a layer that is not causal
    measures["chance"] = torch.full((shape[1],), _chance_of_copies(ids.cpu().expand(len(is_token), -1), is_token))
    length = round(float(is_token.sum(-1).double().mean()))
    return tuple(
        Head(layer=layer, head=number, tokens=length, **{name: float(values[i]) for name, values in measures.items()})
        for i, number in enumerate(range(shape[1]) if heads is None else heads)
    )


def measure_block(R: AttentionMatrix, period: int) -> dict[str, Tensor]:
    """Return the measures of the heads of a layer on a random block that occurs twice.

    Parameters
    ----------
    R : AttentionMatrix, shape (blocks, heads, 2 * period, 2 * period)
        Causal attention of the layer on `repeated_block`.
    period : int
        Length of the block.

    Returns
    -------
    dict of Tensor, shape (heads,)
        ``"induction"`` and ``"duplicate"``.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.heads.classification import measure_block
    >>> same = torch.zeros(1, 1, 4, 2)
    >>> measure_block(attlas.attend(same, same, mask=attlas.Causal()), period=2)["duplicate"]
    tensor([0.2917], dtype=torch.float64)
    """
    second = torch.arange(2 * period) >= period
    scores = R.collect(Diagonal(period - 1, query_mask=second), Diagonal(period, query_mask=second))
    return dict(zip(BLOCK_MEASURES, (t.detach().cpu().double().mean(0) for t in scores), strict=True))


def by_token(mass: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Add up the mass of keys that are the same token, the first key aside.

    Parameters
    ----------
    mass : Tensor, shape (heads, n)
        Column mass.
    ids : Tensor of int, shape (n,)
        Token of each key.

    Returns
    -------
    totals : Tensor, shape (heads, different tokens)
    tokens : Tensor of int, shape (different tokens,)

    Examples
    --------
    >>> import torch
    >>> from attlas.heads import by_token
    >>> by_token(torch.tensor([[0.9, 0.1, 0.2, 0.3]]), torch.tensor([7, 5, 7, 5]))
    (tensor([[0.4000, 0.2000]]), tensor([5, 7]))
    """
    tokens, index = ids[1:].unique(return_inverse=True)
    totals = mass.new_zeros(len(mass), len(tokens))
    return totals.index_add_(1, index, mass[:, 1:].contiguous()), tokens


def _chance_of_copies(ids: Tensor, is_token: Tensor) -> float:
    """Return the mean share of earlier copies among the keys of a query, over queries whose token occurred before."""
    shares = []
    for text, included in zip(ids, is_token, strict=True):
        counts: Counter[int] = Counter()
        for i, token in enumerate(text[included].tolist()):
            if counts[token]:
                shares.append(counts[token] / (i + 1))
            counts[token] += 1
    return sum(shares) / max(len(shares), 1)


#: Names of the recorded statistics from which heads are measured, in the order of `text_statistics`.
STATISTIC_NAMES = ("entropy", "effective_keys", "head_scores")


def measure_entry(atlas: Atlas, entry: Entry) -> tuple[Head, ...]:
    """Return the measures of the heads of a layer; none where they were not recorded, or it is not causal.

    Parameters
    ----------
    atlas : Atlas
        The recording.
    entry : Entry
        The layer's pass over the whole text.
    """
    ids = text_ids(atlas, entry)
    if ids is None:
        return ()
    recorded = [entry.statistics.get(name) for name in STATISTIC_NAMES]
    results = [result for result in recorded if isinstance(result, Tensor)]
    if len(results) < len(STATISTIC_NAMES) or results[-1].shape[-1] != len(HeadScores.NAMES):
        return ()
    if float(results[-1][..., HeadScores.NAMES.index("behind")].sum()) > 0:  # mass on keys behind the query
        return ()
    on_block = _measures_on_block(atlas, entry)
    return heads_from_statistics(results, ids, on_block, entry.layer, entry.heads, query_mask=included_rows(entry))


def text_ids(atlas: Atlas, entry: Entry) -> Tensor | None:
    """Return the token ids of both queries and keys of an entry; None where these are not the whole text."""
    (_, _, m, n), ids = entry.shape, atlas.ids
    whole = ids is not None and m == n == ids.shape[-1] and n >= 3
    return ids if whole and entry.kind != "cross" and atlas.has_text(entry) else None


def _measures_on_block(atlas: Atlas, entry: Entry) -> dict[str, Tensor] | None:
    """Return the recorded measures of the heads of an entry on a random block; None where they are not all there."""
    block = atlas.details.get("block")
    if not isinstance(block, dict) or entry.kind != "self":
        return None
    measures = {name: _numbers_of_heads(block.get(name), entry.layer, entry.heads) for name in BLOCK_MEASURES}
    return {name: t for name, t in measures.items() if t is not None} if None not in measures.values() else None


def _numbers_of_heads(table: object, layer: int, heads: Sequence[int]) -> Tensor | None:
    """Return the numbers of some heads of a layer from a table [layer][head]; None where it has no such numbers."""
    if not isinstance(table, list) or layer >= len(table) or max(heads, default=0) >= len(table[layer]):
        return None
    return torch.tensor([float(table[layer][head]) for head in heads], dtype=torch.float64)
