"""The residual stream of a recorded model: what was written to it, in order, and how each attention reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from attlas.errors import OutOfRangeError, listed


@dataclass(frozen=True, eq=False)
class Scaling:
    """A norm whose factor of each row is kept: ``y = factor * (x - mean(x)) * gain + bias``, linear in x.

    Parameters
    ----------
    factors : Tensor, shape (batch, n, ...)
        The factor of each row.
    gain, bias : Tensor, optional, shape (size,)
        What follows it.
    centered : bool
        Whether the mean is subtracted: a layer norm, not an RMS norm.

    Examples
    --------
    >>> import torch
    >>> from attlas.recording.parts import Scaling
    >>> norm = Scaling(torch.full((1, 1), 2.0), None, None, centered=True)
    >>> norm.folded(torch.eye(2)).tolist()
    [[0.5, -0.5], [-0.5, 0.5]]
    """

    factors: Tensor
    gain: Tensor | None
    bias: Tensor | None
    centered: bool

    def folded(self, weight: Tensor) -> Tensor:
        """Return a map (size, out) of what the norm gives as a map of what it is given, without the factor of a row."""
        if self.gain is not None:
            weight = self.gain.to(weight).unsqueeze(-1) * weight
        return weight - weight.mean(0) if self.centered else weight


@dataclass(frozen=True, eq=False)
class Write:
    """One addition to the residual stream.

    Parameters
    ----------
    name : str
        What a person reads: "token", "MLP 3"; of heads the start of their names.
    kind : str
        "token", "position", "embedding", "head", "cross head", "attention", "MLP", "mixer", "other"; "norm" for a norm
        that the whole stream passes.
    layer : int
        Number of the layer; -1 for what comes before all layers.
    x : Tensor, optional, shape (batch, n, size)
        What was added; of heads what enters their output projection. None for a norm.
    weight : Tensor, optional, shape (out, size)
        The output projection of heads.
    bias : Tensor, optional, shape (out,)
        Its bias.
    heads : int
        Number of heads; 0 for what is not split.
    scale : float
        Factor by which it is multiplied before it is added.
    norm : Scaling, optional
        A norm that it passes first; of kind "norm" the norm of the whole stream.

    Examples
    --------
    >>> import torch
    >>> from attlas.recording.parts import Write
    >>> Write("MLP 0", "MLP", 0, torch.zeros(1, 4, 8)).heads
    0
    """

    name: str
    kind: str
    layer: int
    x: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    heads: int = 0
    scale: float = 1.0
    norm: Scaling | None = None


@dataclass(frozen=True, eq=False)
class Projection:
    """How queries (or keys) are made of what an attention reads: a linear map, and a norm with a kept factor.

    Parameters
    ----------
    weight : Tensor, shape (out, size)
        The weight of the linear map.
    channels : Tensor of int, shape (heads, d)
        Which of its rows are which coordinates of which head.
    bias : Tensor, optional, shape (out,)
        Its bias.
    scale : float
        Factor of all heads.
    norm : Scaling, optional
        The norm of each head, whose factors have the shape (batch, n, heads), or of all heads together, (batch, n, 1).

    Examples
    --------
    >>> import torch
    >>> from attlas.recording.parts import Projection
    >>> Projection(torch.ones(4, 8), torch.arange(4).view(2, 2)).of_head(1)[0].shape
    torch.Size([8, 2])
    """

    weight: Tensor
    channels: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    norm: Scaling | None = None

    def of_head(self, head: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return weight (size, d) and bias (d,) of one head, behind its norm but without the factor of each row."""
        own, norm = self.channels[head], self.norm
        of_all = norm is not None and norm.factors.shape[-1] == 1 and len(self.channels) > 1
        rows = self.channels.flatten() if of_all else own
        weight = self.weight[rows].to(dtype or self.weight.dtype)
        bias = weight.new_zeros(len(rows)) if self.bias is None else self.bias[rows].to(weight)
        if norm is not None:
            folded = norm.folded(torch.eye(len(rows), dtype=weight.dtype, device=weight.device))
            folded = folded[:, head * own.numel() : (head + 1) * own.numel()] if of_all else folded
            weight, bias = folded.mT @ weight, folded.mT @ bias
        return weight.mT * self.scale, bias * self.scale

    def added(self, head: int) -> Tensor | None:
        """Return the bias of the norm of one head, shape (d,); None without one."""
        if self.norm is None or self.norm.bias is None:
            return None
        bias = self.norm.bias
        size = self.channels.shape[1]
        return self.scale * (bias if bias.numel() == size else bias[head * size : (head + 1) * size])

    def factors(self, head: int) -> Tensor | None:
        """Return the factor of each row of one head, shape (batch, n); None without a norm."""
        return None if self.norm is None else self.norm.factors[..., min(head, self.norm.factors.shape[-1] - 1)]


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotary embedding: the first coordinates of each query and key are turned in pairs.

    Parameters
    ----------
    turns : Tensor, shape (batch, n, pairs, 2)
        Cosine and sine of each pair at each row.
    interleaved : bool
        Whether pairs are neighbours (0 and 1), and not the halves (0 and pairs).

    Examples
    --------
    >>> import torch
    >>> from attlas.recording.parts import Rotation
    >>> quarter = Rotation(torch.tensor([[[[0.0, 1.0]]]]), interleaved=False)
    >>> quarter.turned(torch.tensor([[1.0, 0.0, 5.0]]), quarter.turns[0])
    tensor([[0., 1., 5.]])
    """

    turns: Tensor
    interleaved: bool

    def turned(self, x: Tensor, turns: Tensor) -> Tensor:
        """Return vectors (..., n, d) turned by (n, pairs, 2); coordinates beyond the pairs stay."""
        size = 2 * turns.shape[-2]
        a, b = self.pairs(x)
        cos, sin = turns.to(x.dtype).unbind(-1)
        return torch.cat([self.joined(a * cos - b * sin, a * sin + b * cos), x[..., size:]], dim=-1)

    def pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the second coordinates of the pairs, each (..., n, pairs)."""
        half = self.turns.shape[-2]
        front = x[..., : 2 * half]
        return (front[..., ::2], front[..., 1::2]) if self.interleaved else (front[..., :half], front[..., half:])

    def joined(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the coordinates (..., n, 2 * pairs) of first and second ones."""
        return torch.stack([a, b], dim=-1).flatten(-2) if self.interleaved else torch.cat([a, b], dim=-1)


@dataclass(frozen=True, eq=False)
class Reader:
    """How one attention reads the stream.

    Parameters
    ----------
    name : str
        Path of the attention, as of its `Entry`.
    layer : int
        Number of its layer.
    count : int
        How many writes the stream holds that it reads.
    norm : Scaling, optional
        The norm in front of it.
    q, k : Projection
        How queries and keys are made.
    rotation : Rotation, optional
        How they are turned.

    Examples
    --------
    >>> import torch
    >>> from attlas.recording.parts import Projection, Reader
    >>> made = Projection(torch.ones(2, 8), torch.arange(2).view(1, 2))
    >>> Reader("attn", 0, 1, None, made, made).rotation is None
    True
    """

    name: str
    layer: int
    count: int
    norm: Scaling | None
    q: Projection
    k: Projection
    rotation: Rotation | None = None


@dataclass(frozen=True, eq=False)
class Stream:
    """One residual stream: that of a decoder, or of an encoder, over one text.

    Parameters
    ----------
    writes : list of Write
        What was added, in order.
    readers : list of Reader
        The attentions that read it.
    first : int
        Position of its first row in the text.
    count : int
        Number of rows of the text.
    rows : Tensor of int, optional, shape (rows,)
        Positions of the rows that were kept; None for all.

    See Also
    --------
    attlas.heads.explain : what it is for.

    Examples
    --------
    >>> from attlas.recording.parts import Stream
    >>> Stream([], [], 0, 4).nbytes
    0
    """

    writes: list[Write] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    first: int = 0
    count: int = 0
    rows: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept beside the weights of the model."""
        return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in row_tensors(self)}.values())

    def reader(self, name: str) -> Reader | None:
        """Return how an attention reads it, by its path; None for an attention that does not."""
        return next((reader for reader in self.readers if reader.name == name), None)

    def places(self, positions: Tensor) -> Tensor:
        """Return the indices of positions in the text among the rows that were kept.

        Raises
        ------
        OutOfRangeError
            If one was not kept.
        """
        if self.rows is None:
            return positions - self.first
        found = self.rows.to(positions.device).unsqueeze(0) == positions.unsqueeze(1)
        missing = positions[~found.any(1)].tolist()
        if missing:
            rule = "the parts of each row that is asked for must have been kept."
            kept = self.rows.tolist()
            wanted = f"parts={sorted({*kept, *missing})}" if len(kept) + len(missing) < 12 else "parts=True"
            found_rows = f"row {missing[0]}, and {listed(kept)} were kept"
            raise OutOfRangeError(rule, found_rows, f"attlas.record(model, {wanted})")
        return found.to(torch.int8).argmax(1)


_OF_ROWS = {Write: ("x",), Scaling: ("factors",), Rotation: ("turns",)}


def row_tensors(thing: Any) -> list[Tensor]:
    """Return the tensors of a stream, or of a part of one, that have one line for each row of the text."""
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        """Keep a tensor."""
        found.append(t)
        return t

    mapped_rows(note, thing)
    return found


def mapped_rows(change: Callable[..., Tensor], thing: Any, *others: Any) -> Any:
    """Return a stream, or a part of one, whose tensors of rows are ``change(t, ...)``, with those of others like it.

    The weights stay.
    """
    if isinstance(thing, list):
        return [mapped_rows(change, *parts) for parts in zip(thing, *others, strict=True)]
    own = _OF_ROWS.get(type(thing), ())
    made = {}
    for f in fields(thing):
        values = [getattr(one, f.name) for one in (thing, *others)]
        if f.name in own and values[0] is not None:
            made[f.name] = change(*values)
        elif isinstance(values[0], list) or hasattr(values[0], "__dataclass_fields__"):
            made[f.name] = mapped_rows(change, *values)
    return replace(thing, **made)
