"""What is changed: each intervention on the attention of a model is a small class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attlas.engine.problem import spread_heads
from attlas.errors import DtypeError, OutOfRangeError, RecordingError, ShapeError, kind, public
from attlas.foundation.checks import finite_number
from attlas.foundation.tiles import Tile, cut
from attlas.interventions.compact import per_head
from attlas.interventions.positions import Where, positions_of
from attlas.masks import BlockState, Heads, Mask
from attlas.masks.argument import as_mask
from attlas.masks.placed import OutsideRectangle, Placed, Positions
from attlas.matrix import AttentionMatrix, observers, softmax_matrix
from attlas.matrix.softmax import cut_out
from attlas.recording.atlas import Atlas, Entry
from attlas.recording.discovery import AttentionSite
from attlas.recording.hooks import Pool
from attlas.recording.linear_calls import LinearCall
from attlas.recording.selection import Selection
from attlas.recording.stacking import same_settings
from attlas.scores import ScaledDot, Score
from attlas.scores.base import Derived

if TYPE_CHECKING:
    from attlas.engine.problem import Problem
    from attlas.matrix.weights import Weights

_CELLS = 1 << 22  # cells of a linear attention layer that are held at a time
Layers: TypeAlias = "Iterable[int | str] | int | str | None"


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an attention that an intervention is about.

    Parameters
    ----------
    site : AttentionSite
        Which attention of the model.
    heads : tuple of int
        The chosen heads that are here, as indices of the matrix.
    numbers : tuple of int
        The numbers of these heads in the whole layer.
    chosen : tuple of int
        The places of these heads among all chosen ones.
    count : int
        How many heads of the layer are chosen in all.
    first_query, first_key : int
        Position of query 0 and of key 0 in the text.
    made_without : callable, optional
        Returns queries or keys of this call, made again without a part of the stream; of interventions on parts.
    """

    site: AttentionSite
    heads: tuple[int, ...]
    numbers: tuple[int, ...]
    chosen: tuple[int, ...]
    count: int
    first_query: int
    first_key: int
    made_without: Callable[..., Tensor] | None = None


class Intervention:
    """One change of the attention of a model, for `intervene`; the base class of all.

    Parameters
    ----------
    layers : sequence of int or str, int or str, optional
        Which attentions, as in `attlas.record`. The default is all.
    heads : sequence of int, int, or mapping of layer to such, optional
        Which query heads. A mapping alone also says which layers. The default is all.
    queries : int, slice, range, (start, stop), or list of int, optional
        Which queries, by their positions in the text. The default is all.

    See Also
    --------
    attlas.intervene : applies interventions to a model.

    Examples
    --------
    >>> from attlas.interventions import Intervention, Suppress
    >>> isinstance(Suppress(keys=(0, 4)), Intervention)
    True
    """

    label = ""  # the public function that an error names, where that is not the class
    follows_stream = False  # whether it needs `Call.made_without`

    @public()
    def __init__(self, layers: Layers = None, heads: Any = None, queries: Where | None = None) -> None:
        self.where = self.label or f"{type(self).__name__}()"
        self.selection = Selection(layers, heads, where=self.where)
        self.queries = positions_of("queries", queries)

    @property
    def positions(self) -> dict[str, Positions]:
        """The positions that must lie in the text: queries, keys."""
        return {} if self.queries is None else {"queries": self.queries}

    def matrix(self, A: AttentionMatrix, call: Call) -> AttentionMatrix:
        """Return the weights that the attention computes with; the default changes nothing."""
        return A

    def pool(self, pool: Pool, call: Call) -> Pool:
        """Return how values are pooled, given how they are without this intervention."""
        return pool

    def shown(self, A: AttentionMatrix, call: Call) -> AttentionMatrix:
        """Return the weights that a recording hears of, given those that are computed with."""
        return A

    def linear_output(self, out: Tensor, call: Call, read: Callable[[], LinearCall]) -> Tensor | None:
        """Return what the heads of a linear attention compute, given it without this intervention; None: it cannot.

        `read` returns what the layer was given.
        """
        return None

    def _without_gradient(self, pool: Pool, call: Call) -> Pool:
        """Return a way to pool values that detaches the weights of chosen heads and queries."""

        def pooled(A: AttentionMatrix, values: Tensor) -> Tensor:
            """Return the output, with rows of detached weights where queries are chosen."""
            if not (torch.is_grad_enabled() and A.requires_grad):
                return pool(A, values)
            chosen, stopped = self._rows(call, A.weights), pool(A.detach(), values)
            return stopped if bool(chosen.all()) else torch.where(chosen, stopped, pool(A, values))

        return pooled

    def _rows(self, call: Call, of: Weights | Tensor) -> Tensor:
        """Return which heads and queries this intervention is about, as bool (1, heads, m or 1, 1).

        `of` has the axes (batch, heads, m, ...).
        """
        heads, m = of.shape[1:3]
        chosen = torch.zeros(1, heads, 1, 1, dtype=torch.bool, device=of.device)
        chosen[:, list(call.heads)] = True
        if self.queries is None:
            return chosen
        positions = torch.arange(call.first_query, call.first_query + m, device=of.device)
        return chosen & self.queries.has(positions).view(1, 1, m, 1)


class _PairIntervention(Intervention):
    """An intervention on pairs of query and key."""

    @public()
    def __init__(self, layers: Layers, heads: Any, queries: Where | None, keys: Where | None, pairs: Any) -> None:
        super().__init__(layers, heads, queries)
        self.keys = positions_of("keys", keys)
        self.pairs: Mask | None = None if pairs is None else as_mask(pairs)
        if self.pairs is not None and self.pairs.log_weights():
            rule = "pairs must be a mask that says yes or no."
            raise ShapeError(rule, "an additive mask", "pairs=t > 0, or a mask of attlas.", pairs=self.pairs.name())

    @property
    def positions(self) -> dict[str, Positions]:
        return super().positions | ({} if self.keys is None else {"keys": self.keys})

    def other_pairs(self, A: AttentionMatrix, call: Call) -> Mask:
        """Return a mask that allows every pair but the chosen ones.

        Chosen are the pairs at chosen heads, queries and keys, and in `pairs` where that is given.
        """
        batch, heads, m, n = A.weights.shape
        # `others` are the pairs that are not at chosen queries and keys, `there` the chosen pairs in this matrix.
        others: Mask = OutsideRectangle(self.queries, self.keys, call.first_query, call.first_key)
        if self.pairs is not None:
            size = max(call.first_query + m, call.first_key + n)
            self.pairs.check((batch,), heads, size, size)
            rows, columns = (range(-first, size - first) for first in (call.first_query, call.first_key))
            there = Placed(self.pairs, rows, columns)
            is_everywhere = self.queries is None and self.keys is None
            others = ~there if is_everywhere else ~(there & ~others)
        # Heads that are not chosen keep all pairs.
        return others if len(call.heads) == heads else Heads({int(A.weights.head_ids[h]): others for h in call.heads})

    def hide_pairs(self, A: AttentionMatrix, call: Call) -> AttentionMatrix:
        """Return the matrix with the chosen pairs masked out."""
        others, mask = self.other_pairs(A, call), A.mask
        return changed(A, mask=others if mask is None else mask & others)


class Suppress(_PairIntervention):
    """Chosen queries do not attend to chosen keys.

    Parameters
    ----------
    layers : sequence of int or str, int or str, optional
        Which attentions, as in `attlas.record`: numbers of layers, paths, ``"cross"``, ``"cross.3"``. The
        default is all.
    heads : sequence of int, int, or mapping of layer to such, optional
        Which query heads. A mapping alone also says which layers. The default is all.
    queries, keys : int, slice, range, (start, stop), or list of int, optional
        Which queries and which keys, by their positions in the text, from 0. The default is all.
    pairs : Mask, Tensor of bool or callable, optional
        Which pairs of the text, in place of or in addition to `queries` and `keys`: True where a pair is
        suppressed. Its queries and keys are positions in the text.
    when : {"before", "after"}, default "before"
        Before softmax, the weights of the other keys grow to a sum of 1. After it, they stay as they are, and the
        rows sum to less than 1. In a layer of linear attention they stay as they are in any case; only "after" is
        there for one that divides by the sum of a row.

    Raises
    ------
    ShapeError
        If `when` or a span cannot be used, or nothing is said to be suppressed.
    OutOfRangeError
        If a position is negative.
    DtypeError
        If layers, heads or pairs are of a wrong type.

    See Also
    --------
    Ablate : leaves out a head's whole output.

    Notes
    -----
    ``P_ij = exp(s_ij) / Σ_{j' not suppressed} exp(s_ij')`` before softmax, 0 for a suppressed pair; after it
    ``P_ij`` is that of the model for all other pairs. A query whose keys are all suppressed has weights and output 0.
    Cost: a mask; tiles that it hides are skipped. After softmax, one pass more, for the log-sum-exp.

    In a layer of linear attention ``A_ij v_j`` of each suppressed pair is subtracted from the output, and a recording
    has the weights as they are. Cost: one product more, O(n d²); with `pairs` the cells, O(n² d) time and linear
    memory.

    Examples
    --------
    >>> from attlas.interventions import Suppress
    >>> sink = Suppress(keys=0)  # no token attends to the first one
    >>> sentence = Suppress(layers=[4, 5], queries=slice(30, None), keys=(12, 30))
    """

    @public()
    def __init__(
        self,
        layers: Layers = None,
        heads: Any = None,
        queries: Where | None = None,
        keys: Where | None = None,
        pairs: Any = None,
        when: Literal["before", "after"] = "before",
    ) -> None:
        super().__init__(layers, heads, queries, keys, pairs)
        if when not in ("before", "after"):
            rule = 'when must be "before" (the other weights grow) or "after" softmax.'
            raise ShapeError(rule, f"when = {when!r}", 'when="after"')
        if queries is keys is pairs is None:
            fix = "Suppress(keys=(3, 9)); Ablate(layers, heads) leaves out the whole output of heads."
            raise ShapeError("keys, queries or pairs must say what is suppressed.", "none of them", fix)
        self.when = when

    def matrix(self, A: AttentionMatrix, call: Call) -> AttentionMatrix:
        # Before softmax: the pairs are masked, so that the other weights of a row grow.
        return self.hide_pairs(A, call) if self.when == "before" else A

    def pool(self, pool: Pool, call: Call) -> Pool:
        # After softmax: the pairs weigh nothing, and the other weights stay as they are.
        if self.when == "before":
            return pool

        def pooled(A: AttentionMatrix, values: Tensor) -> Tensor:
            # Hidden pairs change the sum of a row: the factor gives the other weights the size that they had.
            if self.keys is not None and self.queries is None and self.pairs is None:
                return pool(A, self._zero_chosen_keys(values, A, call))
            B = self.hide_pairs(A, call)
            # exp(B.lse - A.lse), the share of each row that is left.
            return pool(B, values) * _share(B.lse, A.lse).unsqueeze(-1).to(values.dtype)

        return pooled

    def _zero_chosen_keys(self, values: Tensor, A: AttentionMatrix, call: Call) -> Tensor:
        """Return the values, 0 where keys and heads are chosen: their weights then give nothing."""
        heads, hidden = A.weights.shape[1], OutsideRectangle(None, self.keys, 0, call.first_key)
        seen = hidden.visible_keys(values.shape[2]).to(values.device).view(1, 1, -1, 1)
        if len(call.heads) == heads:
            return values.where(seen, 0.0)
        others = torch.ones(heads, dtype=torch.bool, device=values.device).index_fill(
            0, _index(call.heads, values), False
        )
        return per_head(values, heads).where(seen | others.view(1, -1, 1, 1), 0.0)

    def linear_output(self, out: Tensor, call: Call, read: Callable[[], LinearCall]) -> Tensor:
        given = read()
        with observers.unheard():
            A = given.matrix(scale=given.scale, **given.tokens)
            if self.when == "before" and (A.weights.are_shares or "factor" in given.tokens):
                rule = "rows that sum to 1 without a softmax keep the weights of the other keys."
                raise RecordingError(rule, 'when="before"', 'when="after"', module=call.site.path, where=self.where)
            if self.pairs is None:
                taken = A @ self._chosen_values(given.values)
            else:
                taken = _product_of_pairs(A, ~self.other_pairs(A, call), given.values)
        return torch.where(self._rows(call, out), out - taken.to(out.dtype), out)

    def _chosen_values(self, values: Tensor) -> Tensor:
        """Return the values of the suppressed keys, 0 for the others."""
        if self.keys is None:
            return values
        chosen = self.keys.has(torch.arange(values.shape[2], device=values.device))
        return values.where(chosen.view(1, 1, -1, 1), 0.0)

    def shown(self, A: AttentionMatrix, call: Call) -> AttentionMatrix:
        # After softmax: the matrix that is shown keeps the old log-sum-exp, so that its rows sum to less than 1.
        if self.when == "before":
            return A
        with torch.no_grad():
            problem = replace(self.hide_pairs(A, call).problem, sink=None, partial=True, versions=())
            return softmax_matrix(problem, A.plan, lse=A.softmax_weights.lse())


class ScaleLogits(_PairIntervention):
    """Logits of chosen pairs are multiplied by a factor.

    Parameters
    ----------
    factor : float
        What the logits are multiplied by; 0 makes all chosen keys equal, a negative one turns their order around.
    layers, heads, queries, keys, pairs
        As in `Suppress`.

    Raises
    ------
    ShapeError, OutOfRangeError, DtypeError
        If the factor is no finite number, or as in `Suppress`.

    See Also
    --------
    Temperature : whole rows, the sink of the layer too.

    Notes
    -----
    Logits are those of `AttentionMatrix.logits`: after the scale of the dot product, a bias and a soft cap. Keys that
    a mask hides stay hidden. Cost: nothing for whole rows or whole columns of dot products, whose queries or keys
    are multiplied; other pairs are computed in tiles.

    Examples
    --------
    >>> from attlas.interventions import ScaleLogits
    >>> louder = ScaleLogits(1.5, layers=3, heads=[2], keys=(0, 8))
    """

    @public()
    def __init__(
        self,
        factor: float,
        layers: Layers = None,
        heads: Any = None,
        queries: Where | None = None,
        keys: Where | None = None,
        pairs: Any = None,
    ) -> None:
        super().__init__(layers, heads, queries, keys, pairs)
        self.factor = finite_number("factor", factor, "factor=0.5")

    def matrix(self, A: AttentionMatrix, call: Call) -> AttentionMatrix:
        # Three ways, the fastest that fits: scale the score, scale q or k, or scale the chosen pairs one by one.
        problem, factor = A.problem, self.factor
        _, heads, _, n = problem.shape
        if not self.positions and self.pairs is None and len(call.heads) == heads:
            return changed(A, score=problem.score * factor)
        # Tokens of 16 bits would round what they are multiplied by.
        is_plain = type(problem.score) is ScaledDot and problem.q.dtype.itemsize >= 4 and self.pairs is None
        if is_plain and self.keys is None:
            factors = torch.where(self._rows(call, A.weights), factor, 1.0).to(problem.q)
            return changed(A, q=problem.q * factors)
        if is_plain and self.keys is not None and self.queries is None and len(call.heads) == heads:
            positions = torch.arange(call.first_key, call.first_key + n, device=A.device)
            factors = torch.where(self.keys.has(positions), factor, 1.0).to(problem.k)
            return changed(A, k=problem.k * factors.unsqueeze(-1))
        return changed(A, score=ScaledPairs(problem.score, factor, self.other_pairs(A, call)))


class ScaledPairs(Derived):
    """A score of which the logits of some pairs are multiplied.

    Parameters
    ----------
    inner : Score
        The score.
    factor : float
        What chosen logits are multiplied by.
    others : Mask
        The pairs that stay as they are.
    """

    position_free = False

    def __init__(self, inner: Score, factor: float, others: Mask) -> None:
        super().__init__(inner)
        self.position_free = False
        self.factor, self.others = factor, others

    def forward(self, q: Any, k: Any, at: Tile) -> Tensor:
        # `others` is a mask of the pairs that are not scaled.
        logits = self.inner(q, k, at)
        as_they_are = self.others.allows(at) | (logits == -math.inf)
        return torch.where(as_they_are, logits, logits * self.factor)


class Temperature(Intervention):
    """Softmax of chosen heads and queries at another temperature.

    Parameters
    ----------
    temperature : float
        What all logits of a row are divided by, the sink of the layer too: above 1 the weights become more even,
        below 1 they become sharper.
    layers, heads, queries
        As in `Suppress`.

    Raises
    ------
    ShapeError, OutOfRangeError, DtypeError
        If the temperature is not above 0, or as in `Suppress`; in the forward pass, if a layer has sinks and only some
        queries are chosen.

    See Also
    --------
    ScaleLogits : some keys of a row only.

    Examples
    --------
    >>> from attlas.interventions import Temperature
    >>> sharper = Temperature(0.5, heads={0: [1, 3]})
    """

    @public()
    def __init__(
        self, temperature: float, layers: Layers = None, heads: Any = None, queries: Where | None = None
    ) -> None:
        super().__init__(layers, heads, queries)
        fix = "Temperature(0.5); ScaleLogits takes any factor."
        temperature = finite_number("temperature", temperature, fix, above=0.0)
        # softmax(logits / temperature): the logits times a factor.
        self._scale = ScaleLogits(1.0 / temperature, layers, heads, queries)

    def matrix(self, A: AttentionMatrix, call: Call) -> AttentionMatrix:
        # The logits are divided by the temperature, and so is a sink, which is a logit too.
        scaled, sink = self._scale.matrix(A, call), A.sink
        if sink is None:
            return scaled
        if self.queries is not None:
            rule = "a layer with sinks takes one temperature for all queries."
            raise ShapeError(rule, "queries and a sink", "no queries=", layer=call.site.path, where=self.where)
        chosen = self._rows(call, A.weights).flatten()
        return changed(scaled, sink=torch.where(chosen, sink * self._scale.factor, sink))


class ReplaceWeights(Intervention):
    """Chosen heads attend with weights that were recorded, of another text or of another model.

    Parameters
    ----------
    recording : Atlas, Entry or AttentionMatrix
        The recorded weights. Each attention takes those that an atlas has of it; an entry or a matrix of shape
        (batch, heads, m, n) is taken by all chosen attentions, head h by head h.
    layers, heads
        As in `Suppress`.

    Raises
    ------
    ShapeError
        In the forward pass, if the recording lacks queries or keys of the attention or attends to others, has another
        number of sequences (one serves all), or its score is not that of the attention.
    OutOfRangeError, RecordingError
        In the forward pass, if the recording lacks the attention, or a head, or has statistics only.
    DtypeError
        If `recording` is none, or layers or heads are of a wrong type.

    See Also
    --------
    attlas.record : makes a recording.

    Notes
    -----
    The queries and keys of the recording take the place of the model's, so the weights are exact, and cost no memory.
    Values are those of the model. Positions are those of the text: the recording of a causal attention may be longer
    than the text, and serves the steps of a generation too. One recorded sequence serves a whole batch.

    No gradient flows to the replaced weights.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.interventions import ReplaceWeights
    >>> A = attlas.attend(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))
    >>> patch = ReplaceWeights(A, layers=0, heads=[1])
    """

    def __init__(self, recording: Atlas | Entry | AttentionMatrix, layers: Layers = None, heads: Any = None) -> None:
        super().__init__(layers, heads)
        if not isinstance(recording, Atlas | Entry | AttentionMatrix):
            rule = "recording must be an Atlas, one of its entries, or an AttentionMatrix."
            fix = "with attlas.record(model) as atlas: ..., then ReplaceWeights(atlas, ...)"
            raise DtypeError(rule, kind(recording), fix, where=self.where)
        self.recording = recording

    def matrix(self, A: AttentionMatrix, call: Call) -> AttentionMatrix:
        # Put queries, keys, sink and mask of the recording in the place of those of the chosen heads.
        problem = A.problem
        batch, count, m, n = problem.shape
        heads, source = self._source(call)
        self._check_heads(call, heads)
        own = torch.tensor([heads.index(number) for number in call.numbers], device="cpu")
        other = self._part(source, call, A).select(slice(None), own)
        places = _index(call.heads, problem.q)
        q = problem.q.index_copy(1, places, other.q.to(problem.q).expand(batch, -1, -1, -1))
        k = per_head(other.k, len(own)).to(problem.k).expand(batch, -1, -1, -1)
        k = per_head(problem.k, count).index_copy(1, places, k)
        sink = problem.sink
        if sink is not None and other.sink is not None:
            sink = sink.index_copy(0, places, other.sink.to(sink))
        # What an additive mask adds is a part of the score, which is the same: here it only hides.
        masks = other.mask, problem.mask
        theirs, mask = (None if part is None else Placed(part, range(m), range(n)) for part in masks)
        hiding = Heads({int(problem.head_ids[h]): theirs for h in call.heads}, mask)
        return changed(A, q=q, k=k, mask=hiding, sink=sink)

    def pool(self, pool: Pool, call: Call) -> Pool:
        # A bias that is learned is a part of the model's score.
        stopped = self._without_gradient(pool, call)

        def pooled(A: AttentionMatrix, values: Tensor) -> Tensor:
            _, _, *others = A.problem.leaves  # queries and keys come first
            return (stopped if any(t.requires_grad for t in others) else pool)(A, values)

        return pooled

    def _check_heads(self, call: Call, heads: tuple[int, ...]) -> None:
        """Raise an OutOfRangeError unless the recording has each chosen head."""
        absent = [number for number in call.numbers if number not in heads]
        if absent:
            rule = "the recording must have each head whose weights are replaced."
            found = f"head {absent[0]}, recorded are {heads}"
            raise OutOfRangeError(rule, found, f"heads={list(heads)}", attention=call.site.path, where=self.where)

    def _source(self, call: Call) -> tuple[tuple[int, ...], Entry | AttentionMatrix]:
        """Return the recorded heads and the recording itself, for the attention that is called."""
        recording = self.recording
        if isinstance(recording, AttentionMatrix):
            return tuple(range(recording.problem.shape[1])), recording
        if isinstance(recording, Entry):
            return recording.heads, recording
        site = call.site
        found = [entry for entry in recording.entries if (entry.name, entry.layer) == (site.path, site.layer)]
        if len(found) != 1:
            rule = "the recording must have one text of each attention whose weights are replaced."
            fix = "record one pass, or give the entry: ReplaceWeights(atlas.entry(...), layers=...)"
            given = {"attention": f"{site.path} ({site.key})"}
            raise RecordingError(rule, f"{len(found)} entries", fix, arguments=given, where=self.where)
        return found[0].heads, found[0]

    @public()
    def _part(self, source: Entry | AttentionMatrix, call: Call, A: AttentionMatrix) -> Problem:
        """Return the recorded problem cut to the positions of the call's queries and keys.

        Raise where it does not fit.
        """

        def check(fits: bool, rule: str, found: str, fix: str) -> None:
            if not fits:
                raise ShapeError(rule, found, fix, attention=call.site.path)

        is_entry = isinstance(source, Entry)
        theirs = (source.need_matrix() if isinstance(source, Entry) else source).problem
        first_query, first_key = (source.queries[0], source.first_key) if isinstance(source, Entry) else (0, 0)
        problem = A.problem
        (batch, _, m, n), (own_batch, heads, rows, columns) = problem.shape, theirs.shape
        row, column = call.first_query - first_query, call.first_key - first_key
        if not is_entry and (rows, columns) == (m, n):
            row = column = 0
        inside = 0 <= row <= rows - m and 0 <= column <= columns - n
        shapes = f"{theirs.shape} from position {first_query}, {problem.shape} from {call.first_query}"
        check(
            own_batch in (1, batch),
            "the recording must have one sequence, which serves all, or as many as the text.",
            f"{own_batch} recorded, {batch} in the text",
            f"A[:{batch}] of the recorded matrix A, or record {batch} sequences.",
        )
        check(
            inside,
            "the recording must have all queries and keys of the attention, by their positions; it may be longer.",
            shapes,
            "record a text that is as long, or longer.",
        )
        check(
            theirs.q.shape[-1] == problem.q.shape[-1],
            "the recorded queries must be of the size of the model's.",
            f"d = {theirs.q.shape[-1]} and {problem.q.shape[-1]}",
            "record the same attention of a model of the same size.",
        )
        span, keys = range(row, row + m), range(column, column + n)
        outside = [part for part in (range(column), range(column + n, columns)) if len(part)]
        tiles = [theirs.tile(range(own_batch), range(heads), span, part) for part in outside]
        hidden = theirs.mask is not None and all(theirs.mask.coverage(at) is BlockState.EMPTY for at in tiles)
        rule = "the recording must not attend to keys that the attention lacks: a longer one must be causal."
        check(hidden or not outside, rule, shapes, "record a text of the same length.")
        rule, fix = "the rows of the recording must sum to 1.", "record without suppressing weights after softmax."
        check(not theirs.partial, rule, "weights of a window", fix)
        part = cut_out(theirs, span, keys)
        check(
            same_settings(part.score, problem.score) and (part.sink is None) == (problem.sink is None),
            "the recording must have the score of the attention.",
            f"{type(part.score).__name__} and {type(problem.score).__name__}, or their settings differ",
            "record the same attention of a model of the same kind.",
        )
        return part


class DetachWeights(Intervention):
    """No gradient flows through the weights of chosen heads and queries; values keep theirs.

    Parameters
    ----------
    layers, heads, queries
        As in `Suppress`.

    Raises
    ------
    ShapeError, OutOfRangeError, DtypeError
        As in `Suppress`.

    Notes
    -----
    No number of the forward pass changes. Cost: nothing where all heads and queries are chosen or no gradient is
    recorded, else one more product.

    Examples
    --------
    >>> from attlas.interventions import DetachWeights
    >>> frozen = DetachWeights(layers=[0, 1])
    """

    def pool(self, pool: Pool, call: Call) -> Pool:
        return self._without_gradient(pool, call)


class Ablate(Intervention):
    """The output of chosen heads is left out, or replaced by a mean.

    Parameters
    ----------
    layers, heads, queries
        As in `Suppress`.
    value : float or Tensor, default 0.0
        What takes the place of the output: a number, or a mean that was computed before, shape (e,) or
        (chosen heads, e).

    Raises
    ------
    ShapeError, OutOfRangeError, DtypeError
        As in `Suppress`; in the forward pass, if `value` does not fit the heads.

    See Also
    --------
    Suppress : leaves out some keys only.
    attlas.heads.effect : what leaving out each head does to the loss.

    Notes
    -----
    The output of a head is its pooled values, before the output projection of the layer. No gradient flows to it. In
    a layer of linear attention it is ``A v``, before the norm and the gate of the layer.
    A recording has the weights as they are.

    Examples
    --------
    >>> from attlas.interventions import Ablate
    >>> without = Ablate(heads={4: [1, 5]})
    """

    @public()
    def __init__(
        self,
        layers: Layers = None,
        heads: Any = None,
        queries: Where | None = None,
        value: float | Tensor = 0.0,
    ) -> None:
        super().__init__(layers, heads, queries)
        if not isinstance(value, Tensor):
            value = torch.tensor(finite_number("value", value, "value=0.5"))
        if value.ndim > 2 or not value.is_floating_point():
            rule = "value must be a number, or a tensor of shape (e,) or (chosen heads, e)."
            raise ShapeError(rule, f"shape {tuple(value.shape)}", "value=0.0", value=value)
        self.value = value

    def pool(self, pool: Pool, call: Call) -> Pool:
        # Pool as before, then overwrite the rows of chosen heads and queries.
        return lambda A, values: self._replaced(pool(A, values), self._rows(call, A.weights), call)

    def linear_output(self, out: Tensor, call: Call, read: Callable[[], LinearCall]) -> Tensor:
        return self._replaced(out, self._rows(call, out), call)

    def _replaced(self, out: Tensor, chosen: Tensor, call: Call) -> Tensor:
        """Return the output with `value` in the rows that `chosen` marks.

        The output has the shape (batch, heads, m, e), `chosen` (1, heads, m, 1).
        """
        value = self.value.to(out)
        one_per_head = value.ndim == 2 and len(value) > 1
        wrong_count = one_per_head and len(value) != call.count
        if wrong_count or (value.ndim and value.shape[-1] != out.shape[-1]):
            rule = "value must have one row for each chosen head, and the size of the values."
            found = f"{tuple(value.shape)} for {call.count} heads of size {out.shape[-1]}"
            raise ShapeError(rule, found, "value=0.0", attention=call.site.path, where=self.where)
        filled = out.new_zeros(1, out.shape[1], 1, out.shape[-1])
        filled[0, list(call.heads), 0] = value[list(call.chosen)] if one_per_head else value
        return torch.where(chosen, filled, out)


def _product_of_pairs(A: AttentionMatrix, pairs: Mask, values: Tensor) -> Tensor:
    """Return ``A @ v`` of some pairs alone, from the cells, some rows at a time."""
    weights = A.weights
    batch, heads, m, n = weights.shape
    v = spread_heads(values, heads).to(weights.dtype)

    def some(rows: range, v: Tensor) -> Tensor:
        chosen = pairs.allows(weights.tile(range(batch), range(heads), rows, range(n)))
        return torch.where(chosen, weights.cells(rows, range(n)), 0.0) @ v

    keep_none = torch.is_grad_enabled() and (A.requires_grad or v.requires_grad)
    parts = cut(m, max(1, _CELLS // max(batch * heads * n, 1)))
    found = [checkpoint(some, rows, v, use_reentrant=False) if keep_none else some(rows, v) for rows in parts]
    return torch.cat(found, dim=2) if found else v[:, :, :0]


def changed(A: AttentionMatrix, **fields: Any) -> AttentionMatrix:
    """Return the matrix with some fields of its problem replaced.

    Rows that sum to less than 1 (`partial`) keep their log-sum-exp.
    """
    problem = replace(A.problem, **fields, versions=())
    return softmax_matrix(problem, A.plan, lse=A.softmax_weights.lse() if problem.partial else None)


def _index(numbers: tuple[int, ...], like: Tensor) -> Tensor:
    """Return numbers as an index tensor on the device of `like`."""
    return torch.tensor(numbers, dtype=torch.int64, device=like.device)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Return which fraction of each row's weight is left.

    ``exp(part - whole)`` of two log-sum-exps, 0 where it is empty.
    """
    empty = part == -math.inf
    return torch.where(empty, 0.0, torch.exp(torch.where(empty, 0.0, part) - torch.where(empty, 0.0, whole)))
