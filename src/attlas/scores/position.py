"""Scores of places: they look at where query and key stand, and never at what they hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from attlas.errors import DtypeError, ShapeError, counted, kind, public
from attlas.foundation.checks import (
    as_floats,
    as_plain,
    check_floating,
    heads_of_three_axes,
    is_integer,
    is_one_or,
    whole_number,
)
from attlas.foundation.compat import tracing
from attlas.foundation.devices import DeviceCopies, to_device
from attlas.foundation.tables import of_heads
from attlas.foundation.tiles import Tile
from attlas.scores.base import Score, with_parameters
from attlas.scores.bias import Bias

__all__ = ["Alibi", "RelativeBias", "TensorBias"]


class Alibi(Score):
    """Attention with linear biases, ``s_ij = -slope_h |i' - j|``: the further away, the lower.

    Parameters
    ----------
    slopes : int, sequence of float, or Tensor of shape (heads,), optional
        One slope for each head; an integer is a number of heads and stands for the slopes of the paper. Left
        out, the paper's slopes for the heads of the first matrix that it scores.

    Raises
    ------
    ShapeError
        If a slope is not finite, or their number is not that of the heads.
    DtypeError
        If `slopes` is neither a number of heads nor floating-point numbers.

    See Also
    --------
    RelativeBias : learns the bias of each distance.

    Notes
    -----
    The last query stands at the last key, ``i' = i + n - m``, so a cache of keys changes nothing. For 2^p heads
    the slopes are ``2^(-8 h / heads)``, h = 1, 2, ...; for another number, those of the next lower power of two
    and then every other one of the next higher. Under a causal mask this is the paper's score; without it,
    distances count the same on both sides. Cost: three operations a pair.

    References
    ----------
    .. [1] Press et al., "Train short, test long", 2022.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k = torch.ones(1, 2, 4), torch.ones(1, 3, 4)
    >>> attlas.attend(q, k, score=attlas.Alibi([0.5])).logits[:, :, :]
    tensor([[[-0.5000, -0.0000, -0.5000],
             [-1.0000, -0.5000, -0.0000]]])
    """

    finite = True
    positional = True
    rounds_tokens = True
    scratch = 2
    stored = ("slopes",)

    @public("Alibi()")
    def __init__(self, slopes: int | Sequence[float] | Tensor | None = None) -> None:
        super().__init__()
        self._copies = DeviceCopies()
        self.slopes: Tensor | None
        if is_integer(slopes):
            self.slopes = _paper_slopes(whole_number("slopes", slopes))
        elif slopes is not None:
            self.slopes = _checked_slopes(slopes)
        else:
            self.slopes = None

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        # ``at.i + n - m`` is i', the key that query i is aligned with (the last query with the last key).
        slopes = _paper_slopes(int(at.head_ids.max()) + 1) if self.slopes is None else self.slopes
        distance = (at.i + (at.n - at.m) - at.j).abs().to(at.dtype)
        return distance * -of_heads(slopes, at, at.dtype, self._copies).view(1, -1, 1, 1)

    def bias(self, at: Tile) -> Bias:
        # One number for each distance of the tile, not for each cell.
        slopes = _paper_slopes(int(at.head_ids.max()) + 1) if self.slopes is None else self.slopes
        distance = _distances_in_tile(at).abs().to(at.dtype)
        return Bias(distance=distance * -of_heads(slopes, at, at.dtype, self._copies).view(1, -1, 1))

    def check(self, q: Tensor, k: Tensor, heads: int) -> None:
        if self.slopes is None:  # the first queries that it scores tell the number of heads
            self.slopes = _paper_slopes(heads)
        _check_heads("Alibi()", "slope", self.slopes.shape[0], heads, q, f"use score=Alibi({heads}).")

    def extra_repr(self) -> str:
        return "" if self.slopes is None else f"heads={self.slopes.shape[0]}"


class RelativeBias(Score):
    """A learned bias of each distance and head, ``s_ij = weight[bucket(j - i'), h]``.

    Parameters
    ----------
    heads : int
        Number of heads.
    max_distance : int
        From this distance on, all distances share one number.
    buckets : int, optional
        Numbers learned for each head. Half of them stand for one distance each, the others for ranges that
        grow by a constant factor up to `max_distance`, exactly as in T5. Left out, each distance up to
        `max_distance` has its own number, and further ones share the last.
    bidirectional : bool
        Whether keys after the query have numbers of their own. Where not (a causal model), they share the
        number of distance 0.

    Attributes
    ----------
    weight : nn.Parameter, shape (buckets, heads)
        The table, 0 at the start. It has the layout of T5's ``relative_attention_bias.weight``. Without
        `buckets` its rows run over the offsets j - i', from ``-max_distance`` to ``max_distance`` (or 0).

    Raises
    ------
    ShapeError
        If a size is not a whole number above 0, if `buckets` is below 2 (4 and even where bidirectional), if
        `max_distance` is not above the distances that have a bucket of their own, or if the number of heads
        differs.

    See Also
    --------
    Alibi : nothing to learn, and no largest distance.

    Notes
    -----
    The last query stands at the last key, ``i' = i + n - m``. T5's encoder is
    ``RelativeBias(heads, 128, buckets=32)``, its decoder the same with ``bidirectional=False``. Cost: a tile
    of r rows and c columns looks up ``r + c - 1`` numbers per head and copies them to its pairs.

    References
    ----------
    .. [1] Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text
       transformer", 2020, section 2.1.
    .. [2] Shaw et al., "Self-attention with relative position representations", 2018 (clipped distances).

    Examples
    --------
    >>> import torch, attlas
    >>> score = attlas.RelativeBias(1, max_distance=1)
    >>> score.weight.data.copy_(torch.tensor([[-1.0], [0.0], [1.0]])).shape
    torch.Size([3, 1])
    >>> q = torch.ones(1, 3, 4)
    >>> attlas.attend(q, q, score=score).logits[:, :, :].detach()
    tensor([[[ 0.,  1.,  1.],
             [-1.,  0.,  1.],
             [-1., -1.,  0.]]])
    """

    finite = True
    positional = True
    rounds_tokens = True
    scratch = 2
    stored = ("max_distance", "bidirectional", "buckets", "weight")

    @public("RelativeBias()")
    def __init__(
        self, heads: int, max_distance: int = 128, buckets: int | None = None, bidirectional: bool = True
    ) -> None:
        super().__init__()
        self.heads = whole_number("heads", heads)
        self.max_distance = whole_number("max_distance", max_distance)
        self.buckets = None if buckets is None else whole_number("buckets", buckets)
        self.bidirectional = bidirectional
        if self.buckets is not None:
            _check_buckets(self.buckets, self.max_distance, bidirectional)
        self._copies = DeviceCopies()
        rows = self.buckets or (2 * max_distance + 1 if bidirectional else max_distance + 1)
        self.weight = nn.Parameter(torch.zeros(rows, heads))

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        weight = settings.pop("weight")
        return with_parameters(lambda: cls(weight.shape[1], **settings), {"weight": weight})

    def bucket(self, offset: Tensor) -> Tensor:
        """Return the row of the table for each offset ``j - i'``.

        Parameters
        ----------
        offset : Tensor of integers
            Places of keys less places of queries.

        Returns
        -------
        Tensor of int64, the shape of `offset`
        """
        if self.buckets is None:
            last = self.max_distance if self.bidirectional else 0
            return offset.clamp(-self.max_distance, last) + self.max_distance
        # Buckets for one direction, and the first of them for each offset: keys after the query have the second half.
        count, first = self.buckets, torch.zeros_like(offset)
        distance = (-offset).clamp(min=0)
        if self.bidirectional:
            count //= 2
            first, distance = (offset > 0) * count, offset.abs()
        exact = count // 2  # the first half of the buckets stand for one distance each
        # float32 as in T5, so that a distance at the edge of two buckets falls on the same side.
        ratio = torch.log(distance.clamp(min=exact).float() / exact) / math.log(self.max_distance / exact)
        # The others stand for ranges that grow by a constant factor; the last holds all distances from there on.
        wide = (exact + (ratio * (count - exact)).long()).clamp(max=count - 1)
        return first + torch.where(distance < exact, distance, wide)

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        # Column h of the table, for the tile's heads: shape (heads, buckets).
        table = of_heads(self.weight, at, at.dtype, self._copies, axis=1)
        if at.scattered:
            return table[:, self.bucket(at.j - at.i - (at.n - at.m))].unsqueeze(0)
        if not len(at.rows) or not len(at.columns):
            return table.new_zeros(1, table.shape[0], len(at.rows), len(at.columns))
        # A tile of r rows and c columns has only r + c - 1 offsets: row r holds a window of them, one place on
        # from that of the row below.
        return table[:, self.bucket(_distances_in_tile(at))].unfold(-1, len(at.columns), 1).flip(-2).unsqueeze(0)

    def bias(self, at: Tile) -> Bias:
        # One number for each distance of the tile, not for each cell.
        table = of_heads(self.weight, at, at.dtype, self._copies, axis=1)
        return Bias(distance=table[:, self.bucket(_distances_in_tile(at))].unsqueeze(0))

    def check(self, q: Tensor, k: Tensor, heads: int) -> None:
        fix = f"use score=RelativeBias({heads}, ...)."
        _check_heads("RelativeBias()", "row of biases", self.heads, heads, q, fix)

    def extra_repr(self) -> str:
        buckets = "" if self.buckets is None else f", buckets={self.buckets}"
        side = "" if self.bidirectional else ", bidirectional=False"
        return f"heads={self.heads}, max_distance={self.max_distance}{buckets}{side}"


class TensorBias(Score):
    """A tensor of log-weights, ``s_ij = t[b, h, i, j]``, read tile by tile.

    Parameters
    ----------
    t : Tensor, broadcastable to (batch, heads, m, n)
        Fewer axes are the last ones. It may hold -inf, which forbids a pair.

    Raises
    ------
    ShapeError
        If `t` has more than four axes, or cannot be broadcast to the matrix.
    DtypeError
        If `t` is not a floating-point tensor.

    See Also
    --------
    RelativeBias : a table of distances instead of pairs.

    Notes
    -----
    The tensor is used as it is; one on the CPU beside tokens on a GPU is copied once, but tile by tile where it is
    learned, or takes more than 256 MiB and more than a quarter of the GPU's free memory. It is learned where it
    requires a gradient, but it is a parameter of the score only if it is an ``nn.Parameter``.
    Cost: one read a pair.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k = torch.ones(1, 4), torch.ones(2, 4)
    >>> attlas.attend(q, k, score=attlas.TensorBias(torch.tensor([[1.0, 2.0]]))).logits[:, :]
    tensor([[1., 2.]])
    """

    positional = True
    rounds_tokens = True

    @public("TensorBias()")
    def __init__(self, t: Tensor) -> None:
        super().__init__()
        rule = "t must be a floating-point tensor of log-weights."
        fix = "use mask=attlas.from_tensor(t) for True and False, else t.float()."
        check_floating(rule, "t", t, fix)
        if t.ndim > 4:
            rule = "t has at most the four axes batch, heads, m and n."
            raise ShapeError(rule, f"{t.ndim} axes", "t.flatten(0, -4) makes one batch axis.", t=t)
        self.t = as_plain("t", t)
        self._copies = DeviceCopies()

    def to_dict(self) -> dict[str, Any]:
        return {"t": self.t, "learn": isinstance(self.t, nn.Parameter)}

    @classmethod
    def batch_axis(cls, t: Tensor) -> int | None:
        return 0 if t.ndim == 4 else None

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        return cls(nn.Parameter(settings["t"]) if settings["learn"] else settings["t"])

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        # A tensor of fewer than four axes broadcasts from the right.
        t = self._copies.for_tiles(self.t, at.device)
        return to_device(cells_of(t[(None,) * (4 - t.ndim)], at), at.device, at.dtype)

    def bias(self, at: Tile) -> Bias | None:
        # None where the tile reaches beyond the tensor.
        m, n = (1, 1, *self.t.shape)[-2:]
        inside = all(
            size == 1 or (span.start >= 0 and span.stop <= size) for size, span in ((m, at.rows), (n, at.columns))
        )
        return Bias(cell=cells_of(self.t[(None,) * (4 - self.t.ndim)], at)) if inside else None

    def translate(self, rows: range, columns: range, m: int, n: int) -> TensorBias | None:
        # The window of the tensor; None where the window reaches beyond the matrix.
        sizes = (1, 1, *self.t.shape)[-2:]
        spans = [
            slice(None) if size == 1 else slice(s.start, s.stop) for size, s in zip(sizes, (rows, columns), strict=True)
        ]
        inside = 0 <= rows.start <= rows.stop <= m and 0 <= columns.start <= columns.stop <= n
        if not inside or self.t.ndim == 0 or type(self) is not TensorBias:
            return None
        cut = self.t[(..., *spans[-min(self.t.ndim, 2) :])]
        return self if cut.shape == self.t.shape else TensorBias(cut)

    def check(self, q: Tensor, k: Tensor, heads: int) -> None:
        self._copies.forget(self.t)
        # Only tokens of four axes or more have heads; theirs is axis -3.
        batch_stop = -2 if max(q.ndim, k.ndim) < 4 else -3
        batch = torch.broadcast_shapes(q.shape[:batch_stop], k.shape[:batch_stop]).numel()
        whole = (batch, heads, q.shape[-2], k.shape[-2])
        sizes = (1,) * (4 - self.t.ndim) + tuple(self.t.shape)
        if all(is_one_or(size, full) for size, full in zip(sizes, whole, strict=True)):
            return
        rule = "the tensor of TensorBias() must broadcast to (batch, heads, m, n)."
        found = f"{tuple(self.t.shape)} in t, (batch, heads, m, n) = {whole}"
        fix = "t.unsqueeze(1) if its first axis is the batch and it has no heads."
        raise ShapeError(
            rule, found, fix, arguments={"t": self.t, "q (..., m, d)": q, "k (..., n, d)": k}, where="attend()"
        )

    def extra_repr(self) -> str:
        return f"t={tuple(self.t.shape)}"


def cells_of(t: Tensor, at: Tile) -> Tensor:
    """Return the cells of a tile in a tensor (batch, heads, m, n), where a size of 1 stands for every place."""
    t = _part_of_axis(_part_of_axis(t, 2, at.rows, at.row_index), 3, at.columns, at.column_index)
    return heads_of(t, at)


def heads_of(t: Tensor, at: Tile) -> Tensor:
    """Return the part of a tensor (batch, heads, ...) for the batches and heads of a tile; an axis of size 1 stays."""
    for axis, ids in ((0, at.batch_ids), (1, at.head_ids)):
        if t.shape[axis] != 1 and not (tracing() and t.shape[axis] == len(ids)):
            # The ids are few, on the CPU, and nearly always in a row: then the part is a view.
            first = int(ids[0]) if len(ids) else 0
            span = range(first, first + len(ids))
            t = _part_of_axis(t, axis, span, None if ids.tolist() == list(span) else ids)
    return t


def _part_of_axis(t: Tensor, axis: int, span: range, index: Tensor | None) -> Tensor:
    """Return a part of one axis: a view for a range, a copy for an index tensor; an axis of size 1 stays as it is."""
    if t.shape[axis] == 1:
        return t
    if index is not None:
        return t.index_select(axis, to_device(index, t.device))
    return t.narrow(axis, span.start, len(span))


def _distances_in_tile(at: Tile) -> Tensor:
    """Return each distance ``j - i'`` that occurs in a tile of neighbouring rows and columns, in ascending order.

    A query i is aligned with key ``i' = i + n - m``. There are rows + columns - 1 distances.
    """
    first = at.columns.start - (at.rows.stop - 1) - (at.n - at.m)
    return torch.arange(first, first + max(len(at.rows) + len(at.columns) - 1, 0), device=at.device)


def _paper_slopes(heads: int) -> Tensor:
    """Return the slopes of the ALiBi paper for so many heads, shape (heads,), float64.

    A power of 2 gives a geometric sequence; other counts add every other slope of the doubled one. See `Alibi`, Notes.
    """
    power = 1 << (heads.bit_length() - 1) if heads else 1
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * h / power) for h in range(1, 2 * (heads - power) + 1, 2)]
    return torch.tensor(slopes[:heads], dtype=torch.float64, device="cpu")


def _checked_slopes(slopes: object) -> Tensor:
    """Return slopes given by the user as a tensor of shape (heads,); raise unless all are finite floats."""
    value = as_floats(slopes)
    if not value.is_floating_point():
        rule = "slopes must be a number of heads, or a floating-point number for each head."
        found = str(value.dtype).removeprefix("torch.") if isinstance(slopes, Tensor) else kind(slopes)
        fix = "give Alibi(8) for the slopes of the paper, or one float for each head."
        raise DtypeError(rule, found, fix, slopes=slopes)
    if value.ndim != 1 or not (tracing() or bool(value.detach().isfinite().all())):
        found = f"{value.ndim} axes" if value.ndim != 1 else "a slope that is not finite"
        fix = "give Alibi(8) for the slopes of the paper, or a tensor of shape (heads,)."
        raise ShapeError("slopes must be one finite number for each head.", found, fix, slopes=slopes)
    return value


def _check_buckets(buckets: int, max_distance: int, bidirectional: bool) -> None:
    """Raise a ShapeError where buckets cannot be divided into those of one distance and those of ranges, as in T5."""
    side = buckets // 2 if bidirectional else buckets
    if side < 2 or (bidirectional and buckets % 2):
        rule = "buckets must be 4 or more and even when bidirectional, else 2 or more."
        found, fix = f"buckets = {buckets}", "give buckets=32, as in T5."
    elif max_distance <= side // 2:
        rule = "max_distance must be above the distances that have a bucket of their own."
        found = f"max_distance = {max_distance}, {side // 2} such distances"
        fix = f"give max_distance={4 * buckets}, or leave buckets out."
    else:
        return
    raise ShapeError(rule, found, fix)


def _check_heads(name: str, what: str, given: int, heads: int, q: Tensor, fix: str) -> None:
    """Raise a ShapeError where a score has numbers for another count of heads than q has."""
    if given == heads:
        return
    rule = f"{name} must have one {what} for each head of q."
    fix = heads_of_three_axes(given, tuple(q.shape[:-2])) or fix
    found = f"{counted(heads, 'head')} in q, {given} in {name}"
    raise ShapeError(rule, found, fix, arguments={"q (..., m, d)": q}, where="attend()")
