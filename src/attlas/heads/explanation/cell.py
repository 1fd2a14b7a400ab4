"""One logit as a sum over pairs of parts: which part of the query met which part of the key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attlas.errors import OutOfRangeError, RecordingError, listed, public
from attlas.foundation.checks import is_integer
from attlas.heads.explanation.located import Located
from attlas.heads.explanation.logits import Terms, allowed_keys
from attlas.heads.explanation.parts import Part, Side
from attlas.heads.explanation.table import PairTable, with_bias

_CAP = "the cap of the score counts as a factor, of which each cell has its own"


@dataclass(frozen=True)
class Prediction:
    """A cell without one part of all keys, or of the query, if every norm keeps its scale.

    Parameters
    ----------
    logit, weight : float
        Logit and weight without the part.
    change : float
        How much the logit changes.

    See Also
    --------
    attlas.interventions.RemovePart : the same in the running model, where norms are computed again.

    Examples
    --------
    >>> from attlas.heads import Prediction
    >>> Prediction(9.5, 0.09, -8.3).change
    -8.3
    """

    logit: float
    weight: float
    change: float


class Bands:
    """A logit by the pairs of coordinates that a rotary embedding turns, the fastest first.

    Parameters
    ----------
    logits : Tensor, shape (pairs,)
        What each pair adds; they sum to the logit but for `rest`.
    rest : float
        What the coordinates that are not turned add, and a bias of the score.
    turning : (Tensor, Tensor, int, Tensor)
        What a turn of the query against the key is multiplied with, its cosine and its sine, each (pairs,); the row of
        the query; cosine and sine of every row, (n, pairs, 2).

    See Also
    --------
    attlas.heads.explain : ``why.bands()`` makes one.

    Examples
    --------
    >>> import torch
    >>> from attlas.heads import Bands
    >>> still = torch.tensor([[1.0, 0.0]])
    >>> Bands(
    ...     torch.tensor([2.0]),
    ...     0.5,
    ...     (torch.tensor([2.0]), torch.tensor([0.0]), 3, still[None].expand(4, 1, 2)),
    ... ).at(1)
    2.5
    """

    def __init__(self, logits: Tensor, rest: float, turning: tuple[Tensor, Tensor, int, Tensor]) -> None:
        self.logits, self.rest, self._turning = logits, rest, turning

    @public("bands().at()")
    def at(self, distance: int) -> float:
        """Return the logit that the same contents of query and key would have at another distance.

        Parameters
        ----------
        distance : int
            How far back the key is, at most as far as the query is from the first kept row.

        Returns
        -------
        float
            With the bias that the score has at the cell itself.

        Raises
        ------
        OutOfRangeError
            If no key is so far back.
        """
        along, across, i, turns = self._turning
        if not is_integer(distance) or not 0 <= distance <= i:
            found = f"distance {distance}, the query is row {i}"
            raise OutOfRangeError("the distance must lie in the text.", found, f"distance={i}")
        a, b = torch.view_as_complex(turns[i].contiguous()), torch.view_as_complex(turns[i - distance].contiguous())
        turn = a * b.conj()  # of the query against the key
        return float((along * turn.real + across * turn.imag).sum()) + self.rest


class CellExplanation(PairTable):
    """Why a logit has the value that it has: the parts of its query and of its key, pair by pair.

    Made by `explain`. It explains a logit, not what the model returns: a weight is a softmax of logits, and what the
    weight does downstream is not in it.

    Parameters
    ----------
    located : Located
        The head and what is recorded of it.
    i, j : int
        Query and key.
    terms : Terms
        What the logit is made of.
    table : Tensor, optional, shape (query parts, key parts)
        The terms, where they are known: those of a cell relative to its row.

    Attributes
    ----------
    cell : tuple of int
        Query and key, as indices of the matrix.
    logit, weight : float
        Of the cell, as recorded.
    total : float
        Sum of the table.
    remainder : float
        ``logit - total``, which rounds to 0.
    query_parts, key_parts : tuple of Part
        Parts of the rows, and of the columns of the table.
    parts : tuple of Part
        Both, each once.
    table : Tensor, shape (query parts, key parts)
        ``factor * q_i^c · k_j^c'``. What the score adds by itself (ALiBi, the position bias of T5) stands in a row and
        a column of its own.
    factor : float
        Scale of the dot product; with a soft cap, times what the cap leaves of it at this cell.
    notes : tuple of str
        What must be said of it: a cap that counts as a factor, norms behind the sums of the stream.

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
    >>> why = heads.explain(atlas, 2, 4, cell=(3, 1))
    >>> abs(why.remainder) < 1e-4
    True
    """

    def __init__(self, located: Located, i: int, j: int, terms: Terms, table: Tensor | None = None) -> None:
        self._located, self._terms = located, terms
        self.cell = (i, j)
        self.logit, self.weight, self.factor = terms.logit, terms.weight, terms.factor
        self._set_parts(located.query.parts, located.key.parts, bias=terms.bias is not None)
        with torch.no_grad():
            self.table = self._table() if table is None else table
        self.is_relative = table is not None
        self.total = float(self.table.double().sum())
        self.remainder = self.logit - self.total

    def _table(self) -> Tensor:
        """Return the terms of all pairs."""
        i, j = self.cell
        q = self._located.query.at(self._located.places("query", [i]))[:, 0]
        k = self._located.key.at(self._located.places("key", [j]))[:, 0]
        return with_bias(self.factor * q @ k.mT, self._terms.bias)

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be said of the sum."""
        return ((_CAP,) if self._terms.cap else ()) + self._located.notes

    @torch.no_grad()
    @public("relative()")
    def relative(self) -> CellExplanation:
        """Return the same, minus the mean over the keys that the query may see.

        What is the same for all keys of a row moves no weight: here it is exactly 0, as the bias of W_k.

        Returns
        -------
        CellExplanation
            Its logit is the logit minus the mean of its row.

        Raises
        ------
        OutOfRangeError
            If only some rows were kept.

        Notes
        -----
        Cost: one pass over what the layers wrote, n · d products for each part. With a cap, each key has the factor of
        its own cell, so that the sum stays exact; what is the same for all keys is then not 0.
        """
        located, (i, j) = self._located, self.cell
        keys = allowed_keys(located.A, i)
        places = located.places("key", keys.tolist())
        at = int((keys == j).nonzero())
        terms, products = self._terms, self._products(keys)
        factors = terms.factors(products)
        rows = []
        for _, x in located.key.each(places):
            if terms.cap:
                x = x * factors.to(x)[:, None]
            else:
                x = terms.factor * (x - x[:, :1])  # a part that is equal in all rows is exactly 0
            rows.append(x[:, at] - x.mean(1))
        q = located.query.at(located.places("query", [i]))[:, 0]
        table = q @ torch.cat(rows).mT
        logits = located.A.logits[i, keys].double()
        relative, bias = float(logits[at] - logits.mean()), terms.bias
        if bias is not None:
            added = logits - factors * products
            bias = float(added[at] - added.mean())
        return CellExplanation(located, i, j, terms._replace(logit=relative, bias=bias), with_bias(table, bias))

    def _products(self, keys: Tensor) -> Tensor:
        """Return the dot products of the query with some keys, in float64."""
        problem = self._located.A.softmax_weights.problem
        return problem.k[0, 0, keys].double() @ problem.q[0, 0, self.cell[0]].double()

    @torch.no_grad()
    @public("bands()")
    def bands(self) -> Bands:
        """Return the logit by the frequencies of the rotary embedding.

        Returns
        -------
        Bands
            Their sum is the logit; ``bands().at(distance)`` is that of the same contents at another distance.

        Raises
        ------
        RecordingError
            If the layer has no rotary embedding, or only some rows were kept.
        """
        located, (i, j) = self._located, self.cell
        rotation, stream = located.reader.rotation, located.stream
        if rotation is None or stream.rows is not None:
            rule = "bands are those of a rotary embedding, of which all rows were kept."
            found = "no rotary embedding" if rotation is None else "some rows"
            raise RecordingError(rule, found, "why.pairs()", layer=located.entry.path)
        problem = located.A.softmax_weights.problem
        q, k = problem.q[0, 0, i].double(), problem.k[0, 0, j].double()
        first, second = (located.places(side, [at]) for side, at in (("query", i), ("key", j)))
        turns = rotation.turns[located.sequence].double()
        still_q, still_k = (_unturned(rotation, x, turns[at]) for x, at in ((q, first), (k, second)))
        (a, b), (c, d) = rotation.pairs(q), rotation.pairs(k)
        size = 2 * turns.shape[-2]
        rest = self.factor * float(q[size:] @ k[size:]) + (self._terms.bias or 0.0)
        along = self.factor * (still_q.conj() * still_k).real
        across = self.factor * (still_q.conj() * still_k).imag
        return Bands(self.factor * (a * c + b * d), rest, (along, across, int(first), turns))

    @torch.no_grad()
    @public("sources()")
    def sources(self, source: str, side: Side = "key") -> Tensor:
        """Return from which tokens a head took its part of the key (or of the query).

        Parameters
        ----------
        source : str
            Name of a head's part, ``"head 0·0"``.
        side : {"query", "key"}, default "key"
            Whose part is meant.

        Returns
        -------
        Tensor, shape (n,)
            What each token gave to the logit through this head: they sum to the part.

        Raises
        ------
        RecordingError
            If the part is no head's, or the weights and values of that head were not recorded, or its part is not
            what they give.

        Notes
        -----
        Exact while the weights of that head stay as they are. Cost: one row of its weights, n · d_v products.
        """
        located = self._located
        own = located.side(side)
        index = _index_of(own.parts, source)
        part = own.parts[index]
        low = located.earlier(part)
        i, j = self.cell
        place = int(located.places(side, [i if side == "query" else j]))
        other = located.side("key" if side == "query" else "query")
        total = other.at(located.places(other.side, [j if side == "query" else i]))[:, 0].sum(0)
        towards = self.factor * own.of_values(index, place) @ total
        row = low.weights_of(place)
        given = row.to(towards) * (low.values.to(towards) @ towards)
        expected = (
            float(self.table.sum(0 if side == "key" else 1)[index]) if not self.is_relative else float(given.sum())
        )
        if abs(float(given.sum()) - expected) > 1e-3 * max(float(self.table.abs().max()), 1e-6):
            rule = "what a head adds must be its weights times its values."
            raise RecordingError(
                rule, f"{float(given.sum()):.4g}, the part is {expected:.4g}: a gate", "why.by_key", part=source
            )
        return given

    @torch.no_grad()
    @public("without()")
    def without(self, source: str, side: Side = "key") -> Prediction:
        """Return the cell without a part, if every norm keeps the scale that it has.

        Parameters
        ----------
        source : str
            Name of a part, ``"head 0·0"``.
        side : {"query", "key"}, default "key"
            Whether it is taken out of all keys of the row, or out of the query.

        Returns
        -------
        Prediction

        Raises
        ------
        OutOfRangeError
            If there is no such part; if it is taken out of all keys and only some rows were kept.

        Notes
        -----
        The model itself computes its norms again: a smaller stream gets a larger scale, which gives back a share of the
        logit. `attlas.interventions.RemovePart` does it in the model. A cap is applied to what is left of each logit:
        it is not the factor that it counts as in the sums. Cost: the part at every key of the row.
        """
        located, (i, j) = self._located, self.cell
        own = located.side(side)
        index = _index_of(own.parts, source)
        keys = allowed_keys(located.A, i)
        at = int((keys == j).nonzero())
        problem = located.A.softmax_weights.problem
        if side == "key":
            part = own.one(index, located.places("key", keys.tolist()))
            lost = part @ problem.q[0, 0, i].to(part)
        else:
            part = own.one(index, located.places("query", [i]))[0]
            lost = problem.k[0, 0, keys].to(part) @ part
        changes = self._terms.change(self._products(keys), lost)
        weights = located.A[i, keys].double()
        shifted = (weights.clamp_min(1e-300).log() + changes).where(weights > 0, -torch.inf)
        sink = (1 - weights.sum()).clamp_min(0.0)  # what a sink takes
        total = torch.logaddexp(shifted.logsumexp(0), sink.log())
        change = float(changes[at])
        return Prediction(self.logit + change, float((shifted[at] - total).exp()), change)

    def __repr__(self) -> str:
        head = f"head {self._located.entry.layer}·{self._located.head}"
        above = ", relative to its row" if self.is_relative else ""
        first = (
            f"CellExplanation: {head}, cell {self.cell}{above}: weight {self.weight:.3f}, logit "
            f"{self.logit:.3f} = {self.table.numel()} pairs of parts, remainder {self.remainder:.1e}"
        )
        return self._lines(first)


def _unturned(rotation: object, x: Tensor, turns: Tensor) -> Tensor:
    """Return the turned coordinates of a vector (d,) as complex numbers, turned back by turns (1, pairs, 2)."""
    a, b = rotation.pairs(x)  # type: ignore[attr-defined]  # a Rotation
    turn = torch.view_as_complex(turns[0].contiguous())
    return torch.complex(a.contiguous(), b.contiguous()) / turn


def _index_of(parts: tuple[Part, ...], name: str) -> int:
    """Return the index of a part by its name.

    Raises
    ------
    OutOfRangeError
        If there is none of this name.
    """
    for index, part in enumerate(parts):
        if name in (part.name, str(part)):
            return index
    rule = "there must be a part of this name."
    raise OutOfRangeError(rule, f"{name!r}; there are {listed([part.name for part in parts])}", f"{parts[0].name!r}")
