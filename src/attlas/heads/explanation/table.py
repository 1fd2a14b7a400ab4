"""What explanations of cells and of maps have in common: a table over pairs of parts, and what is read from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attlas.errors import public
from attlas.foundation.checks import whole_number
from attlas.heads.explanation.located import Located
from attlas.heads.explanation.parts import Part


@dataclass(frozen=True)
class PairOfParts:
    """What one part of the query and one part of the key add to a logit together.

    Parameters
    ----------
    query, key : Part
        The two parts.
    logit : float
        What they add, in nats.

    Examples
    --------
    >>> from attlas.heads import PairOfParts, Part
    >>> print(PairOfParts(Part("MLP 0", "MLP", 0), Part("head 0·0", "head", 0, 0), 8.25))
    MLP 0 -> head 0·0 +8.25
    """

    query: Part
    key: Part
    logit: float

    def __str__(self) -> str:
        return f"{self.query} -> {self.key} {self.logit:+.2f}"


class PairTable:
    """A table over pairs of parts of one head.

    Attributes
    ----------
    query_parts, key_parts : tuple of Part
        Parts of the rows, and of the columns of the table.
    table : Tensor, shape (query parts, key parts)
        What each pair adds, in nats.
    """

    query_parts: tuple[Part, ...]
    key_parts: tuple[Part, ...]
    table: Tensor
    _located: Located

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts of queries and keys, each once."""
        return tuple(dict.fromkeys((*self.query_parts, *self.key_parts)))

    @property
    def by_query(self) -> dict[str, float]:
        """What each part of the queries adds, with all of the keys; by its name."""
        return named(self.query_parts, self.table.sum(1))

    @property
    def by_key(self) -> dict[str, float]:
        """What each part of the keys adds, with all of the queries; by its name."""
        return named(self.key_parts, self.table.sum(0))

    @public("pairs()")
    def pairs(self, count: int = 10) -> tuple[PairOfParts, ...]:
        """Return the pairs of parts that add most or take most.

        Parameters
        ----------
        count : int, default 10
            How many.

        Returns
        -------
        tuple of PairOfParts
            By their size, the largest first.
        """
        whole_number("count", count, "count=10")
        flat, query, key = self.table.flatten(), self.query_parts, self.key_parts
        order = flat.abs().topk(min(count, flat.numel())).indices.tolist()
        return tuple([PairOfParts(query[o // len(key)], key[o % len(key)], float(flat[o])) for o in order])

    def _set_parts(self, query: tuple[Part, ...], key: tuple[Part, ...], *, bias: bool) -> None:
        """Set the parts of rows and columns; with `bias`, also that of what the score adds by itself."""
        more = (Part("position bias", "score", self._located.entry.layer),) if bias else ()
        self.query_parts, self.key_parts = query + more, key + more

    def _lines(self, first: str) -> str:
        """Return a first line, and the largest pairs below it."""
        return "\n".join([first, *(f"  {pair}" for pair in self.pairs(5))])


def with_bias(table: Tensor, bias: float | None) -> Tensor:
    """Return a table with what the score adds by itself, in a row and a column of its own; None adds neither."""
    if bias is None:
        return table
    wide = torch.nn.functional.pad(table, (0, 1, 0, 1))
    wide[-1, -1] = bias
    return wide


def named(parts: tuple[Part, ...], sums: Tensor) -> dict[str, float]:
    """Return sums by the names of the parts."""
    return {part.name: float(x) for part, x in zip(parts, sums, strict=True)}
