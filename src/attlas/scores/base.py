"""What a score is: how alike a query and a key are, as a log-weight before softmax."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from attlas.errors import DtypeError, ShapeError, counted, kind, public
from attlas.foundation.checks import check_floating, heads_of_three_axes, is_one_or
from attlas.foundation.compat import tracing
from attlas.foundation.devices import DeviceCopies, to_device
from attlas.foundation.stored import Stored
from attlas.foundation.tables import of_heads
from attlas.foundation.tiles import Tile
from attlas.scores.bias import Bias, added, scaled

# What a score keeps of its queries (or keys) between `project` and `forward`: one tensor, or for a sum of
# scores a tuple with the tokens of each part. Each tensor has shape (batch, heads, tokens, size).
_ScoreType = TypeVar("_ScoreType", bound="Score")
Tokens: TypeAlias = "Tensor | tuple[Tokens, ...]"
# What a score says of itself, and what is made of scores takes from them.
_INHERITED_PROPERTIES = ("finite", "positional", "position_free", "rounds_tokens")


@dataclass(frozen=True, eq=False)
class Dot:
    """A score written as ``scale * q · k + row + bias``, the form that fused kernels compute.

    With a cap it is ``cap * tanh(scale * q · k / cap) + bias``, and has no `row`.

    Parameters
    ----------
    q, k : Tensor, shape (batch, heads, m, d) and (batch, key heads, n, d)
        Tokens of the dot product, with a graph to the score's parameters where they have one.
    scale : float
        Factor of the dot product.
    row : Tensor, optional, shape (batch, heads, m)
        A constant of each query. Softmax does not see it; the log-sum-exp does.
    bias : Score, optional
        A score of positions alone that is added.
    cap : float
        Bound of the score without its bias, 0 for none.
    """

    q: Tensor
    k: Tensor
    scale: float
    row: Tensor | None = None
    bias: Score | None = None
    cap: float = 0.0

    def scaled(self, factor: float) -> Dot:
        """Return `factor` times this score."""
        row = None if self.row is None else self.row * factor
        bias = None if self.bias is None else self.bias * factor
        # factor * cap * tanh(x / cap) is c * tanh(factor * x / c) with the cap c = |factor| * cap.
        return Dot(self.q, self.k, self.scale * factor, row, bias, abs(factor) * self.cap)


class Score(Stored, nn.Module):
    """How alike queries and keys are: a tile of each in, a tile of log-weights (nats) out.

    A score of your own is one class with one method, `forward`. Everything else has a default.

    Attributes
    ----------
    scratch : int
        Numbers that `forward` holds for each cell of a tile. A score that broadcasts over hidden units
        says how many, so that the engine takes smaller tiles. The default is 1.
    finite : bool
        Whether finite tokens always give finite log-weights. A kernel of bounded support says False.
    positional : bool
        Whether the score looks at places alone (``at``) and never at the tokens. The default is False.
    position_free : bool
        Whether the score looks at the tokens alone and never at ``at``: the log-weight of a pair is then the same
        wherever the pair stands, and steps of a generation are recorded as one matrix. The default is False. A score
        that looks at both has neither.
    rounds_tokens : bool
        Whether ``torch.autocast`` rounds the tokens to 16 bits, as those of a dot product. The default is False:
        tokens are then float32, as those of ``torch.cdist``.
    stored : tuple of str, optional
        Names of the attributes that `to_dict` gives and its class takes, for a score that a recording can store.

    Examples
    --------
    >>> import torch, attlas
    >>> class Cauchy(attlas.Score):
    ...     scratch = 4
    ...
    ...     def forward(self, q, k, at):
    ...         return -torch.log1p((q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1))
    >>> q, k = torch.randn(5, 4), torch.randn(7, 4)
    >>> attlas.attend(q, k, score=Cauchy()).shape
    torch.Size([5, 7])
    """

    scratch: int = 1
    finite: bool = False
    positional: bool = False
    position_free: bool = False
    rounds_tokens: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Reset claims that a new `forward` may break, and check the type that `as_dot` returns.
        super().__init_subclass__(**kwargs)
        # A class that defines `forward` does not inherit these: they describe the formula of its parent.
        if "forward" in vars(cls):
            for name in {"position_free", "rounds_tokens", "bias"} - vars(cls).keys():
                setattr(cls, name, getattr(Score, name))
        if "as_dot" in vars(cls) and not cls.__module__.startswith("attlas."):
            cls.as_dot = _checked_dot(cls.as_dot)  # type: ignore[method-assign]

    __call__: Callable[..., Tensor]

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        """Return the log-weights of one tile.

        Parameters
        ----------
        q : Tensor, shape (batches, heads, rows, d)
            Queries of the tile, as `project` returned them.
        k : Tensor, shape (batches, heads, columns, d)
            Keys of the tile; key heads are already repeated to match the query heads.
        at : Tile
            The place of the tile, for scores that depend on position, batch or head.

        Returns
        -------
        Tensor, broadcastable to (batches, heads, rows, columns)
        """
        raise TypeError(f"{type(self).__name__} must define forward(self, q, k, at).")

    def project(self, q: Tensor, k: Tensor) -> tuple[Tokens, Tokens]:
        """Transform queries and keys once per token, before `forward` sees them in pairs; by default, return them."""
        return q, k

    def as_dot(self, q: Tensor, k: Tensor) -> Dot | None:
        """Return this score as a dot product of the projected tokens, or None where it is none.

        Parameters
        ----------
        q, k : Tensor, shape (batch, heads, m, d) and (batch, key heads, n, d)
            Queries and keys as `project` returned them.

        Returns
        -------
        attlas.scores.Dot or None
            ``attlas.scores.Dot(q, k, scale=2.0)`` is the score ``2 q · k``, which fused kernels then compute. It must
            equal what `forward` gives. None is always right, and the default.
        """
        return None

    def bias(self, at: Tile) -> Bias | None:
        """Return what this score of places adds to the logits, in a form that fused kernels read; else None.

        Parameters
        ----------
        at : Tile
            Neighbouring rows and columns: the whole matrix, or the places of a window in the matrix of this score.

        Returns
        -------
        attlas.scores.Bias or None
            It must equal what `forward` gives, with a graph to the same tensors: learned ones get their gradients
            through it. None is always right, and the default: the logits are then computed tile by tile.
        """
        return None

    def translate(self, rows: range, columns: range, m: int, n: int) -> Score | None:
        """Return this score for a window of its matrix, or for a larger matrix that contains it.

        Parameters
        ----------
        rows, columns : range
            Positions of the other matrix's queries and keys in the matrix of this score. They may lie outside of it.
        m, n : int
            Sizes of the matrix of this score.

        Returns
        -------
        Score or None
            The result must hold in all cells of the other matrix. None is always right: attlas then
            evaluates this score at its original positions. The default is None unless `position_free`.
        """
        return self if self.position_free else None

    def check(self, q: Tensor, k: Tensor, heads: int) -> None:
        """Raise a ShapeError if tokens of these sizes cannot be scored; `attend` calls it once.

        Parameters
        ----------
        q, k : Tensor, shape (..., m, d) and (..., n, dk)
            Queries and keys as the user gave them.
        heads : int
            Number of query heads.
        """

    def __add__(self, other: Score) -> Score:
        # The sum of two scores.
        if not isinstance(other, Score):
            tensor = isinstance(other, Tensor) and other.ndim
            given, found = {"other": other if tensor else type(other).__name__}, f"{kind(other)} on one side"
            fix = "add a Score; a constant shift of all log-weights changes no weight."
            if tensor:
                fix = "score + attlas.TensorBias(t) adds a tensor of log-weights."
            raise DtypeError("both sides must be scores.", found, fix, arguments=given, where="score + other")
        return Sum(self, other)

    def __radd__(self, other: object) -> Score:
        # `sum(scores)` starts with 0 + score.
        return self if not isinstance(other, Tensor) and other == 0 else self + other  # type: ignore[operator]

    def __sub__(self, other: Score) -> Score:
        return self + -1.0 * other

    def __mul__(self, factor: float | Tensor) -> Score:
        # The score times one number, or times a tensor of one number, or one for each head.
        if isinstance(factor, Tensor):
            return ScaledByTensor(self, factor)
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not math.isfinite(factor):
            rule = "a score is multiplied by one finite number, or by a tensor with one or one for each head."
            fix = "0.5 * score; nn.Parameter(torch.tensor(0.5)) * score learns it."
            raise DtypeError(rule, f"factor = {factor!r}", fix, factor=type(factor).__name__, where="score * factor")
        return Scaled(self, float(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float | Tensor) -> Score:
        return self * (1 / divisor)

    def __neg__(self) -> Score:
        return self * -1.0


def _checked_dot(as_dot: Callable[..., Any]) -> Callable[..., Dot | None]:
    """Wrap an `as_dot` that a user wrote, so that it raises a DtypeError where it returns anything but Dot or None."""

    @wraps(as_dot)
    def run(self: Score, *tokens: Any) -> Dot | None:
        """Call it, and check what it returns."""
        dot = as_dot(self, *tokens)
        if dot is None or isinstance(dot, Dot):
            return dot
        where, fix = f"{type(self).__name__}.as_dot()", "return attlas.scores.Dot(q, k, scale=1.0)"
        raise DtypeError("it must return an attlas.scores.Dot, or None.", kind(dot), fix, where=where)

    return run


class Sum(Score):
    """The sum of two scores; made by ``score + score``."""

    stored = ("left", "right")

    def __init__(self, left: Score, right: Score) -> None:
        super().__init__()
        self.left = left
        self.right = right
        self.scratch = max(left.scratch, right.scratch) + 1
        for name in _INHERITED_PROPERTIES:  # what a score says of itself, such as `finite`: a sum where both parts do
            setattr(self, name, getattr(left, name) and getattr(right, name))

    def project(self, q: Tensor, k: Tensor) -> tuple[Tokens, Tokens]:
        # A score of places has no tokens, and the other part may then keep its own tensor.
        left_q, left_k = ((), ()) if self.left.positional else self.left.project(q, k)
        right_q, right_k = ((), ()) if self.right.positional else self.right.project(q, k)
        return (left_q, right_q), (left_k, right_k)

    def forward(self, q: Any, k: Any, at: Tile) -> Tensor:  # a sum has a tuple of tokens
        if self.positional:  # no part looks at tokens, and there may be none to take apart
            return self.left(q, k, at) + self.right(q, k, at)
        return self.left(q[0], k[0], at) + self.right(q[1], k[1], at)

    def as_dot(self, q: Any, k: Any) -> Dot | None:
        """Return the dot product of one part with the other part as its bias.

        None unless exactly one part is positional.
        """
        if self.left.positional == self.right.positional:
            return None
        # `side` is the place of the dot product's tokens in the pairs that `project` has made.
        side, of_tokens, bias = (1, self.right, self.left) if self.left.positional else (0, self.left, self.right)
        dot = of_tokens.as_dot(q[side], k[side])
        return None if dot is None else replace(dot, bias=bias if dot.bias is None else dot.bias + bias)

    def bias(self, at: Tile) -> Bias | None:
        # None where one of the two has no such form, or both have a number for each pair.
        return added(self.left.bias(at), self.right.bias(at))

    def check(self, q: Tensor, k: Tensor, heads: int) -> None:
        self.left.check(q, k, heads)
        self.right.check(q, k, heads)


class Derived(Score):
    """A score computed from another one, `inner`, whose tokens it uses as they are."""

    inner: Score

    def __init__(self, inner: Score) -> None:
        super().__init__()
        self.inner = inner
        self.scratch = inner.scratch + 1
        for name in _INHERITED_PROPERTIES:  # what a score says of itself, such as `finite`
            setattr(self, name, getattr(inner, name))

    def project(self, q: Tensor, k: Tensor) -> tuple[Tokens, Tokens]:
        return self.inner.project(q, k)

    def check(self, q: Tensor, k: Tensor, heads: int) -> None:
        self.inner.check(q, k, heads)


class Scaled(Derived):
    """A score times a number; made by ``factor * score``."""

    stored = ("factor", "inner")

    def __init__(self, inner: Score, factor: float) -> None:
        super().__init__(inner)
        self.factor = factor

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        # A factor of 0 or below would turn -inf into NaN or inf.
        logits = self.inner(q, k, at)
        if self.finite or self.factor > 0.0:
            return logits * self.factor
        # A pair that the score forbids stays forbidden.
        return torch.where(logits == -math.inf, logits, logits * self.factor)

    def as_dot(self, q: Tensor, k: Tensor) -> Dot | None:
        dot = self.inner.as_dot(q, k)
        return None if dot is None or self.factor == 0.0 else dot.scaled(self.factor)

    def bias(self, at: Tile) -> Bias | None:
        return scaled(self.inner.bias(at), self.factor)

    def extra_repr(self) -> str:
        return f"factor={self.factor}"


class ScaledByTensor(Derived):
    """A score times a tensor, a temperature that can be learned; made by ``tensor * score``.

    Parameters
    ----------
    inner : Score
        The score that is multiplied.
    factor : Tensor, shape () or (heads,)
        One number, or one for each head. A parameter is learned with the model.

    Raises
    ------
    DtypeError
        If `factor` is no floating-point tensor.
    ShapeError
        If it has another shape; at `attend`, if its length is not the number of heads.

    Examples
    --------
    >>> import torch, attlas
    >>> sharpness = torch.nn.Parameter(torch.tensor([0.5, 2.0]))
    >>> q, k = torch.ones(1, 2, 1, 4), torch.ones(1, 2, 3, 4)
    >>> attlas.attend(q, k, score=sharpness * attlas.ScaledDot()).logits.amax().flatten()
    tensor([1., 4.], grad_fn=<...>)
    """

    factor: Tensor
    stored = ("inner", "factor")

    @public("tensor * score")
    def __init__(self, inner: Score, factor: Tensor) -> None:
        super().__init__(inner)
        check_floating("the factor must be of floating point.", "factor", factor, "factor.float()")
        if factor.ndim > 1:
            rule = "the factor is one number, or one for each head."
            raise ShapeError(rule, f"{factor.ndim} axes", "factor.flatten()", factor=factor)
        self.factor, self._copies = factor, DeviceCopies()

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        # The log-weights of a tile.
        logits = self.inner(q, k, at)
        factor = of_heads(self.factor, at, logits.dtype, self._copies).reshape(-1, 1, 1)
        if self.finite:
            return logits * factor
        # -inf stays, and adds nothing to the gradient of the factor: 0 times -inf is NaN.
        forbidden = logits == -math.inf
        return torch.where(forbidden, logits, logits.masked_fill(forbidden, 0.0) * factor)

    def as_dot(self, q: Tensor, k: Tensor) -> Dot | None:
        # The score as a dot product, which fused kernels compute; None where it is none.
        dot = self.inner.as_dot(q, k)
        if dot is None or self.factor.numel() > 1 or dot.bias is not None or dot.cap:
            return None  # a factor per head needs the heads of a tile; a bias and a cap would have to be scaled, too
        # A learned factor keeps its graph, and to read the number of another device the program would wait for it: such
        # a factor stays a tensor and is multiplied into the queries.
        if tracing() or self.factor.device.type != "cpu" or (torch.is_grad_enabled() and self.factor.requires_grad):
            factor = to_device(self.factor.reshape(()), dot.q.device, dot.q.dtype)
            return Dot(dot.q * factor, dot.k, dot.scale, None if dot.row is None else dot.row * factor)
        return dot.scaled(float(self.factor))

    def bias(self, at: Tile) -> Bias | None:
        return scaled(self.inner.bias(at), of_heads(self.factor, at, at.dtype, self._copies))

    def check(self, q: Tensor, k: Tensor, heads: int) -> None:
        # Raise a ShapeError where tokens of these sizes cannot be scored.
        super().check(q, k, heads)
        if not is_one_or(self.factor.numel(), heads):
            rule = "the factor of a score is one number, or one for each head."
            found = f"{counted(self.factor.numel(), 'number')}, {counted(heads, 'head')}"
            fix = heads_of_three_axes(len(self.factor), tuple(q.shape[:-2])) or f"a tensor of shape () or ({heads},)."
            raise ShapeError(rule, found, fix, arguments={"factor": self.factor, "q (..., m, d)": q}, where="attend()")

    def extra_repr(self) -> str:
        return f"factor={tuple(self.factor.shape)}"


def with_parameters(make: Callable[[], _ScoreType], parameters: dict[str, Tensor]) -> _ScoreType:
    """Return the score that `make` creates, with its parameters replaced by these.

    It is created on the meta device, so that this takes no memory and draws no random number.
    """
    with torch.device("meta"):
        score = make()
    score.load_state_dict(parameters, assign=True)
    return score


def check_same_size(name: str, q: Tensor, k: Tensor, fix: str) -> None:
    """Raise a ShapeError where queries and keys differ in the size of their last axis."""
    if q.shape[-1] != k.shape[-1]:
        rule = f"q and k must have the same last axis when score is {name}."
        found = f"d = {q.shape[-1]} in q, d = {k.shape[-1]} in k"
        raise ShapeError(rule, found, fix, arguments={"q (..., m, d)": q, "k (..., n, d)": k}, where="attend()")


def check_sizes(name: str, q: Tensor, k: Tensor, sizes: tuple[int, int], fix: str) -> None:
    """Raise a ShapeError where the last axes of q and k differ from `sizes`, those that a score was made for."""
    if (q.shape[-1], k.shape[-1]) != sizes:
        rule = f"the last axes of q and k must be {sizes[0]} and {sizes[1]} when score is {name}."
        found = f"{q.shape[-1]} in q, {k.shape[-1]} in k"
        raise ShapeError(rule, found, fix, arguments={"q (..., m, d)": q, "k (..., n, dk)": k}, where="attend()")
