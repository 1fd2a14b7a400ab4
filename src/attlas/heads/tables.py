"""Who reads what: the weight that each named stretch of a text gives to each other, for one layer or for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from attlas import stats
from attlas.errors import public
from attlas.heads.targets import check_layers, query_offset
from attlas.matrix import AttentionMatrix
from attlas.stats.spans import Span, place_span

Record: TypeAlias = dict[str, int | float | str]


@dataclass(frozen=True, eq=False)
class SpanTable:
    """Mean weight that the queries of each span give to each span of keys; made by `span_table`.

    Attributes
    ----------
    names : tuple of str
        The spans, in order.
    queries : tuple of int
        How many queries lie in each span.
    weight : Tensor, shape (layers, ..., heads, spans, spans)
        Weight from a span (last axis but one) to a span (last axis); NaN in the rows of a span without queries.
    rest : Tensor, shape (layers, ..., heads, spans)
        Weight of each span's queries on keys outside every span, and on a learned sink.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))
    >>> heads.span_table(A, {"system": (0, 1), "user": (1, 4)}).weight
    tensor([[[[0.2500, 0.7500],
              [0.2500, 0.7500]]]])
    """

    names: tuple[str, ...]
    queries: tuple[int, ...]
    weight: Tensor
    rest: Tensor

    def __len__(self) -> int:
        return len(self.weight)

    def records(self) -> list[Record]:
        """Return one record for each layer, head and pair of spans; batches are averaged."""
        layers, heads = self.weight.shape[0], self.weight.shape[-3] if self.weight.ndim > 3 else 1
        weight = self.weight.reshape(layers, -1, heads, len(self.names), len(self.names)).mean(dim=1).tolist()
        return [
            {"layer": layer, "head": head, "from": a, "to": b, "queries": count, "weight": weight[layer][head][i][j]}
            for layer in range(layers)
            for head in range(heads)
            for i, (a, count) in enumerate(zip(self.names, self.queries, strict=True))
            if count
            for j, b in enumerate(self.names)
        ]


@public("span_table()")
def span_table(
    matrices: AttentionMatrix | Iterable[AttentionMatrix], spans: Mapping[str, Span], shift: int | None = None
) -> SpanTable:
    """Return how much weight each named stretch of a text gives to each other: system, user, document, answer.

    Parameters
    ----------
    matrices : AttentionMatrix, or iterable of them, each of shape (..., heads, m, n)
        Self-attention of one layer, or of several with equal leading axes. An `Atlas` is such an iterable.
    spans : mapping of str to slice, range or (start, stop)
        Named stretches, as positions among the keys. They may overlap and leave tokens out.
    shift : int, optional
        Position of query 0 among the keys; by default the last query is at the last key.

    Returns
    -------
    SpanTable

    Raises
    ------
    ShapeError
        If a span lies outside the keys, if there is no matrix, if matrices differ in size, or if there are
        more queries than keys and no `shift`.

    See Also
    --------
    attlas.stats.Spans : the sums behind it, for spans of queries and keys apart.

    Notes
    -----
    ``T_ab = 1/|a| Σ_{i ∈ a} Σ_{j ∈ b} A_ij``. With a cache, only the queries that the matrix has are counted.
    A query of filling sees no key and gives nothing: keep filling out of the spans. The question of what
    an answer rests on, system prompt, document or itself, is asked by such sums in [1]_.
    Cost: one pass over each matrix; memory of the table.

    References
    ----------
    .. [1] Chuang et al., "Lookback Lens: detecting and mitigating contextual hallucinations in large language
       models using only attention maps", 2024.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8), mask=attlas.Causal())
    >>> table = heads.span_table([A, A], {"document": (0, 3), "answer": (3, 4)})
    >>> table.records()[-2]
    {'layer': 1, 'head': 0, 'from': 'answer', 'to': 'document', 'queries': 1, 'weight': 0.75}
    """
    layers = [matrices] if isinstance(matrices, AttentionMatrix) else list(matrices)
    rule, fix = "the layers of one table must have equal sizes.", "one table for each kind of layer."
    check_layers(layers, lambda A: A.shape == layers[0].shape, rule, fix)
    first = layers[0]
    m, n = first.shape[-2:]
    offset = query_offset(shift, first.weights)
    columns = [place_span(name, span, n, "keys") for name, span in spans.items()]
    rows = [_moved_and_clipped(span, -offset, m) for span in columns]
    table = torch.stack([_span_weights_of_layer(A, rows, columns).to(first.device) for A in layers])
    counts = torch.tensor([len(span) for span in rows], dtype=table.dtype, device=table.device)
    table = table / torch.where(counts > 0, counts, torch.nan).unsqueeze(-1)
    names = tuple(spans)
    return SpanTable(names, tuple(map(len, rows)), table[..., : len(names)], (1.0 - table[..., -1]).clamp(min=0.0))


def _span_weights_of_layer(A: AttentionMatrix, rows: list[range], columns: list[range]) -> Tensor:
    """Return the weight from each span to each span, then to the union of all spans."""
    union: list[range] = []
    for span in sorted(columns, key=lambda s: s.start):
        if union and span.start <= union[-1].stop:
            union[-1] = range(union[-1].start, max(union[-1].stop, span.stop))
        else:
            union.append(span)
    sums: Tensor = A.collect(stats.Spans(rows, [*columns, *union]))[0]
    return torch.cat([sums[..., : len(columns)], sums[..., len(columns) :].sum(dim=-1, keepdim=True)], dim=-1)


def _moved_and_clipped(span: range, by: int, size: int) -> range:
    """Return the queries at the positions of a span: those of the span moved by `by`, within ``range(size)``."""
    start, stop = (min(max(end + by, 0), size) for end in (span.start, span.stop))
    return range(start, stop)
