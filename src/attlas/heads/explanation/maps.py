"""A whole map of a head, or a part of it, as tables over pairs of parts: products with the lazy matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attlas.errors import RecordingError, ShapeError
from attlas.foundation.compat import cached_property
from attlas.heads.explanation.located import Located
from attlas.heads.explanation.logits import adds_to_products
from attlas.heads.explanation.parts import HeadParts, Part
from attlas.heads.explanation.table import PairTable, named, with_bias
from attlas.matrix import AttentionMatrix, softmax_matrix
from attlas.scores import ScaledDot
from attlas.scores.base import Dot
from attlas.stats import Entropy

Group: TypeAlias = "str | Callable[[Part], str] | None"
Groups: TypeAlias = "Group | tuple[Group, Group]"

_WIDTH = 32  # parts that are multiplied with the matrix at once
_JOINED = 16  # parts of the other side that are multiplied with these products at once, at least
_CAPPED = "the score has a cap: these are its logits before the cap"


class MapExplanation(PairTable):
    """Why the logits of a whole map have the values that they have: what each pair of parts adds in the mean.

    Made by `explain`. Each number is a mean over the rows of sums over their keys, weighted by the attention weights:
    what a pair of parts adds to the logits of the cells that the head looks at.

    Parameters
    ----------
    located : Located
        The head and what is recorded of it.
    dot : Dot
        Its score.
    rows : Tensor of int, shape (rows,)
        Queries, as indices of the matrix.
    columns : range
        Keys.
    groups : str, callable or pair of such, optional
        How parts are joined.

    Attributes
    ----------
    logit : float
        Mean logit of the recorded q and k, weighted by the weights.
    total : float
        Sum of the table.
    remainder : float
        ``logit - total``, which rounds to 0.
    query_parts, key_parts : tuple of Part
        Parts, or groups of parts, of the rows and of the columns of the table.
    table : Tensor, shape (query parts, key parts)
        ``scale / m · Σ_i q_i^c · (A k^c')_i``.
    notes : tuple of str
        What must be said of it.

    See Also
    --------
    explain : makes one, with an example.

    Examples
    --------
    >>> import torch, attlas, attlas.models
    >>> from attlas import heads
    >>> model = attlas.nn.GPT2.from_pretrained(attlas.models.path()).eval()
    >>> with torch.no_grad(), attlas.record(model, parts=True) as atlas:
    ...     out = model(torch.tensor([[5, 6, 7, 5, 6, 7]]))
    >>> why = heads.explain(atlas, 2, 4, groups="layer")
    >>> [part.name for part in why.key_parts]
    ['token', 'position', 'layer 0', 'layer 1', 'biases', 'bias of k']
    >>> abs(why.remainder) < 1e-4
    True
    """

    def __init__(self, located: Located, dot: Dot, rows: Tensor, columns: range, groups: Groups) -> None:
        self._located, self._dot, self._rows, self._columns = located, dot, rows, columns
        own, other = groups if isinstance(groups, tuple) else (groups, groups)
        self._query_groups, query = _grouped(located.query.parts, own)
        self._key_groups, key = _grouped(located.key.parts, other)
        self._adds = adds_to_products(located.A, dot) and not dot.cap
        if self._adds and len(columns) < located.A.shape[-1]:
            rule = "what the score adds by itself is known of all keys."
            raise RecordingError(rule, "some columns, and a score with a bias", "leave out columns.")
        self._set_parts(query, key, bias=self._adds)
        self.table = with_bias(self._table(), self._bias if self._adds else None)
        self.total = float(self.table.double().sum())
        self.remainder = self.logit - self.total

    # -------------------------------------------------------------------------------------------------------- facts

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be said of the sums."""
        return ((_CAPPED,) if self._dot.cap else ()) + self._located.notes

    @cached_property
    @torch.no_grad()
    def logit(self) -> float:
        """Mean of the recorded logits, weighted by the weights."""
        problem = self._problem
        pooled = self._pooled(problem.k[0, 0, self._columns.start : self._columns.stop])
        return self._scale * float((pooled.double() * problem.q[0, 0, self._rows].double()).sum()) + self._bias

    @cached_property
    def _bias(self) -> float:
        """What the score adds by itself: the mean logit is that of ``log w + lse``, less the products."""
        if not self._adds:
            return 0.0
        A, problem = self._located.A, self._problem
        (entropy,) = A.collect(Entropy())
        mass = (A @ problem.q.new_ones(A.shape[-1], 1))[:, 0]
        logits = A.lse.double() * mass.double() - entropy.double()
        products = self._dot.scale * ((A @ problem.k[0, 0]).double() * problem.q[0, 0].double()).sum(-1)
        return float((logits - products)[self._rows].mean())

    @cached_property
    @torch.no_grad()
    def above_uniform(self) -> Tensor:
        """The table minus that of equal weights on all keys that each query may see, shape (query parts, key parts).

        How much higher a term is where the head looks than elsewhere: what is the same for all keys of a row rounds to
        0. What the score adds by itself is not in it. Cost: the products of the table, and as many with equal weights.
        """
        return self._table(above_uniform=True)

    @cached_property
    def variance(self) -> dict[str, float]:
        """How much of the variance of a row's logits under its weights each part of the keys makes up, by its name.

        The mean over the rows of ``Cov(l, l^c')``: they sum to the variance, but for what the score adds by itself.
        What is the same for all keys of a row has no share. Cost: one backward pass of the entropy.
        """
        if self._dot.cap or len(self._columns) < self._located.A.shape[-1]:
            rule = "shares of the variance are those of all keys, and of a score without a cap."
            raise RecordingError(rule, "a cap" if self._dot.cap else "some columns", "why.above_uniform")
        problem = self._problem
        leaf = problem.k.detach().clone().requires_grad_()
        with torch.enable_grad():
            matrix = softmax_matrix(replace(problem, k=leaf, detached=False, versions=()), self._located.A.plan)
            matrix.collect(Entropy())[0].flatten()[self._rows].mean().backward()
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        shares = torch.zeros(len(self._key_groups_names), dtype=torch.float64)
        with torch.no_grad():
            for first, x in self._located.key.each(self._places("key", self._columns)):
                for place, part in enumerate(x):
                    shares[self._key_groups[first + place]] -= float((grad[0, 0].to(part) * part).double().sum())
        return named(self.key_parts[: len(shares)], shares)

    # ------------------------------------------------------------------------------------------------------ products

    @property
    def _key_groups_names(self) -> tuple[Part, ...]:
        """The parts or groups of the keys, without what the score adds."""
        return self.key_parts[:-1] if self._adds else self.key_parts

    @property
    def _problem(self) -> Any:
        """The recorded queries and keys of the head, each (1, 1, n, d)."""
        return self._located.A.softmax_weights.problem

    @property
    def _scale(self) -> float:
        """Factor of a sum over cells, for a mean over rows."""
        return self._dot.scale / len(self._rows)

    def _places(self, side: str, indices: range | Tensor) -> Tensor | slice:
        """Return where queries or keys stand among the kept rows."""
        located, listed = self._located, torch.as_tensor(indices)
        first = located.entry.queries[0] if side == "query" else located.entry.first_key
        if located.stream.rows is None and isinstance(indices, range):
            return slice(indices.start + first - located.stream.first, indices.stop + first - located.stream.first)
        return located.places(side, listed.tolist())

    def _weights(self, *, uniform: bool = False) -> AttentionMatrix:
        """Return the weights of the rows' hull and of the columns; with `uniform` equal ones where the mask allows."""
        A = self._located.A
        if uniform:
            problem = self._problem
            q, k = problem.q[..., :1] * 0, problem.k[..., :1] * 0
            even = replace(problem, q=q, k=k, score=ScaledDot(), sink=None, versions=())
            A = softmax_matrix(even, A.plan)[0, 0]
        hull = self._hull
        whole = len(hull) == A.shape[-2] and len(self._columns) == A.shape[-1]
        return A if whole else A.window((hull.start, hull.stop), (self._columns.start, self._columns.stop))

    @property
    def _hull(self) -> range:
        """The rows from the first to the last."""
        return range(int(self._rows.min()), int(self._rows.max()) + 1)

    def _pooled(self, values: Tensor, *, uniform: bool = False) -> Tensor:
        """Return the values (columns, e) that the chosen rows pool, (rows, e)."""
        own = self._weights(uniform=uniform)
        pooled = own @ values.to(own.dtype)
        return pooled if len(self._rows) == len(self._hull) else pooled[self._rows - self._hull.start]

    def _received(self, queries: Tensor, *, uniform: bool = False) -> Tensor:
        """Return what queries (rows, e) send to each key, (columns, e)."""
        if len(self._rows) < len(self._hull):
            spread = queries.new_zeros(len(self._hull), queries.shape[1])
            queries = spread.index_add_(0, self._rows - self._hull.start, queries)
        own = self._weights(uniform=uniform)
        return own.mT @ queries.to(own.dtype)

    @torch.no_grad()
    def _table(self, *, above_uniform: bool = False) -> Tensor:
        """Return the table of the products, by the side that has fewer groups."""
        count, other = max(self._query_groups) + 1, max(self._key_groups) + 1
        one, many = ("query", "key") if count <= other else ("key", "query")
        held = self._groups_of(one)
        kinds = (False, True) if above_uniform else (False,)
        table: Tensor | float = 0.0
        for uniform in kinds:
            made = self._contracted(one, held, many, uniform=uniform)
            table = made if not uniform else table - made
        table = torch.as_tensor(table)
        return (table if one == "query" else table.mT).contiguous() * self._scale

    def _groups_of(self, side: str) -> Tensor:
        """Return the sums of the parts of one side, group by group, (groups, rows, d)."""
        parts, groups = self._side(side)
        places = self._places(
            side, self._rows if side == "query" and len(self._rows) < len(self._hull) else self._range(side)
        )
        out: Tensor | None = None
        for first, x in parts.each(places):
            if out is None:
                out = x.new_zeros(max(groups) + 1, *x.shape[1:])
            out.index_add_(0, torch.tensor(groups[first : first + len(x)], device=x.device), x)
        return torch.as_tensor(out)

    def _side(self, side: str) -> tuple[HeadParts, list[int]]:
        """Return the parts of one side, and the group of each."""
        located = self._located
        return (located.query, self._query_groups) if side == "query" else (located.key, self._key_groups)

    def _range(self, side: str) -> range:
        """Return the rows, or the columns, as a range."""
        return self._hull if side == "query" else self._columns

    def _contracted(self, one: str, held: Tensor, many: str, *, uniform: bool) -> Tensor:
        """Return the sums over all cells of weight times product, (groups of one side, groups of the other).

        The groups of the first side are multiplied with the matrix; the parts of the other come a few at a time.
        """
        parts, groups = self._side(many)
        multiply = self._received if one == "query" else self._pooled
        rows = self._rows if many == "query" and len(self._rows) < len(self._hull) else self._range(many)
        products = held.new_empty(len(held), len(rows), held.shape[-1])
        for first in range(0, len(held), _WIDTH):
            chunk = held[first : first + _WIDTH]
            out = multiply(chunk.permute(1, 0, 2).flatten(1), uniform=uniform)
            products[first : first + _WIDTH] = out.unflatten(-1, (len(chunk), -1)).permute(1, 0, 2)
        whole = products.flatten(1)
        table = whole.new_zeros(len(held), max(groups) + 1)
        for first, x in _joined_writes(parts.each(self._places(many, rows))):
            index = torch.tensor(groups[first : first + len(x)], device=x.device)
            table.index_add_(1, index, whole @ x.flatten(1).mT)
        return table

    def __repr__(self) -> str:
        located = self._located
        return self._lines(
            f"MapExplanation: head {located.entry.layer}·{located.head}, {len(self._rows)} queries: mean logit "
            f"{self.logit:.3f} = {self.table.numel()} pairs of parts, remainder {self.remainder:.1e}"
        )


def _joined_writes(writes: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """Yield the parts of several writes at once, with the index of the first: few wide products take less time."""
    start, held, count = 0, list[Tensor](), 0
    for _, x in writes:
        held.append(x)
        count += len(x)
        if count >= _JOINED:
            yield start, torch.cat(held)
            start, held, count = start + count, [], 0
    if held:
        yield start, torch.cat(held)


def _grouped(parts: tuple[Part, ...], group: Group) -> tuple[list[int], tuple[Part, ...]]:
    """Return the group of each part, and the groups as parts.

    Raises
    ------
    ShapeError
        If `group` is no known way to group.
    """
    if group in (None, "head"):
        return [*range(len(parts))], parts
    ways: dict[str, Callable[[Part], str]] = {"layer": _layer_of, "kind": lambda part: part.kind}
    if not callable(group) and group not in ways:
        rule = 'groups must be "head", "layer", "kind", or a function from a part to a text; or two of these.'
        raise ShapeError(rule, f"groups = {group!r}"[:80], 'groups="layer"')
    name_of = group if callable(group) else ways[str(group)]
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(str(name_of(part)), len(numbers)) for part in parts]
    members = {name: [p for p, n in zip(parts, found, strict=True) if n == number] for name, number in numbers.items()}
    return found, tuple(_joined_part(name, own) for name, own in members.items())


def _layer_of(part: Part) -> str:
    """Return the group of a part by its layer."""
    return part.name if part.layer is None or part.kind == "bias" else f"layer {part.layer}"


def _joined_part(name: str, members: list[Part]) -> Part:
    """Return a group of parts as a part."""
    if len(members) == 1:
        return members[0] if members[0].name == name else replace(members[0], name=name)
    layers, kinds = {part.layer for part in members}, {part.kind for part in members}
    return Part(name, kinds.pop() if len(kinds) == 1 else "group", layers.pop() if len(layers) == 1 else None)
