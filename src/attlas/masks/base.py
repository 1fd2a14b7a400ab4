"""The base class of masks: a mask says which pairs of query and key may attend."""

from __future__ import annotations

import enum
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attlas.errors import DtypeError, ShapeError, kind
from attlas.foundation.compat import tracing
from attlas.foundation.stored import Stored
from attlas.foundation.tiles import Tile
from attlas.masks.drawing import picture

if TYPE_CHECKING:
    from attlas.scores.base import Score


class BlockState(enum.Enum):
    """How much of a tile a mask allows; ``PARTIAL`` is always a safe answer.

    Attributes
    ----------
    EMPTY
        No pair of the tile may attend: the engine skips it.
    PARTIAL
        Some pairs may, or the mask cannot tell without asking for every cell.
    FULL
        Every pair may attend: the engine does not ask for the cells.

    See Also
    --------
    Mask.coverage : the method that answers with one of these.

    Examples
    --------
    >>> [state.name for state in BlockState]
    ['EMPTY', 'PARTIAL', 'FULL']
    """

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


class Mask(Stored, ABC):
    """Which pairs may attend, evaluated one tile at a time and never stored whole.

    A subclass defines `allows`. It may define `coverage`, if it can tell cheaply that a whole tile is allowed
    (``BlockState.FULL``) or forbidden (``BlockState.EMPTY``): the engine skips forbidden tiles. Masks combine with
    ``&``, ``|`` and ``~``.

    See Also
    --------
    BlockState : what `coverage` answers with.
    attlas.from_function : a mask from one function, without a class.
    attlas.testing.check_mask : the contract that every mask keeps.

    Notes
    -----
    A mask is evaluated in tiles, so it costs the memory of one tile. `coverage` must not wait for a GPU: it is
    called for every tile of the matrix, and computes on the CPU.

    Examples
    --------
    >>> from attlas.masks import Causal, Mask
    >>> class Even(Mask):
    ...     def allows(self, at):
    ...         return at.j % 2 == 0
    >>> print(Causal() & Even())
    Causal() & Even()
      ■ · · · · · · ·
      ■ · · · · · · ·
      ■ · ■ · · · · ·
      ■ · ■ · · · · ·
      ■ · ■ · ■ · · ·
      ■ · ■ · ■ · · ·
      ■ · ■ · ■ · ■ ·
      ■ · ■ · ■ · ■ ·
      8 queries × 8 keys
    """

    @abstractmethod
    def allows(self, at: Tile) -> Tensor:
        """Return True where the pair may attend.

        Parameters
        ----------
        at : Tile
            The tile asked about; ``at.b``, ``at.h``, ``at.i`` and ``at.j`` broadcast to its cells.

        Returns
        -------
        Tensor of bool, broadcastable to (batches, heads, rows, columns)
        """

    def coverage(self, at: Tile) -> BlockState:
        """Return how much of the tile is allowed; without a better rule, ``PARTIAL``.

        Parameters
        ----------
        at : Tile
            The tile asked about; its index tensors may live on a GPU, and reading them here would wait
            for it.

        Returns
        -------
        BlockState
            ``EMPTY`` only if `allows` is False everywhere, ``FULL`` only if it is True everywhere.
        """
        return BlockState.PARTIAL

    def allowed_runs(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        """Return the run of keys that each row may see, as its first key and the key after its last.

        Parameters
        ----------
        at : Tile
            Rows that are asked about, with all columns of the matrix.

        Returns
        -------
        first, stop : Tensor of int64, broadcastable to (batches, heads, rows)
            A row with ``first >= stop`` sees no key; both may lie outside of the matrix. None if some row sees
            more than one run, or if this is not known.
        """
        return None

    def first_query(self, m: int, n: int) -> int | None:
        """Return the position of query 0 among the keys; None if this mask does not determine it."""
        return None

    @property
    def is_causal(self) -> bool:
        """Whether no query may see a key after its own position; False if this is not known."""
        return False

    def translate(self, rows: range, columns: range, m: int, n: int) -> Mask | None:
        """Return this mask for a window of its matrix, or for a larger matrix that contains it.

        Parameters
        ----------
        rows, columns : range
            Positions of the other matrix's queries and keys in the matrix of this mask. They may lie outside of it.
        m, n : int
            Sizes of the matrix of this mask.

        Returns
        -------
        Mask or None
            The result must hold in all cells of the other matrix. None is always right, and the default:
            attlas then evaluates this mask at its original positions.
        """
        return None

    def padding(self, at: Tile) -> Tensor | None:
        """Return True where a key is padding and no token of its text, shape (batches or 1, n).

        Parameters
        ----------
        at : Tile
            All rows and columns of the matrix.

        Returns
        -------
        Tensor of bool, or None
            None where this mask does not tell padding from text.
        """
        return None

    def check(self, batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
        """Raise a ShapeError if this mask cannot belong to a matrix of these sizes."""

    def log_weights(self) -> tuple[Score, ...]:
        """Return the scores that an additive mask adds to the logits; none for a boolean mask."""
        return ()

    def size(self) -> tuple[int | None, int | None]:
        """Return the number of queries and of keys of this mask, None where it fits any number."""
        return None, None

    def reach(self) -> int:
        """Return the length of this mask's pattern in tokens, from which its picture takes its size."""
        return 0

    def __and__(self, other: Mask) -> Mask:
        return And(self, _mask_operand(other, "&"))

    def __or__(self, other: Mask) -> Mask:
        return Or(_boolean_operand(self, "|"), _boolean_operand(_mask_operand(other, "|"), "|"))

    def __invert__(self) -> Mask:
        return Not(_boolean_operand(self, "~"))

    def __bool__(self) -> bool:
        rule = "a mask is neither true nor false: `and`, `or` and `not` would drop one of two masks."
        fix = "combine masks with &, | and ~; ask for `mask is None`."
        raise DtypeError(rule, f"the truth of {self.name()}", fix, where="a mask")

    def __repr__(self) -> str:
        return f"{self.name()}\n{picture(self)}"

    def name(self) -> str:
        """Return the expression that makes this mask, without the picture."""
        return type(self).__name__ + "()"


def _mask_operand(value: object, operator: str) -> Mask:
    """Return the operand of a mask operator; raise a DtypeError where it is not a mask."""
    if isinstance(value, Mask):
        return value
    rule, found = "both sides must be masks of attlas.", f"{kind(value)} on one side"
    fix = "wrap it first: attlas.from_tensor(t) or attlas.from_function(mask_mod)."
    raise DtypeError(rule, found, fix, other=f"{type(value).__name__}", where=f"mask {operator} other")


def _boolean_operand(mask: Mask, operator: str) -> Mask:
    """Return a mask; raise where it is additive, which no operator but ``&`` allows."""
    if not mask.log_weights():
        return mask
    rule = "an additive mask can be combined with & only, since its numbers are added to the scores."
    fix = f"make it boolean first: attlas.from_tensor(t > -float('inf')) before {operator}."
    raise ShapeError(rule, f"an additive mask beside {operator}", fix, mask=mask.name(), where=f"{operator} of masks")


class Combined(Mask):
    """A mask that is made of other masks, which are its settings (`to_dict`)."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks that it is made of, each once."""
        return tuple(dict.fromkeys((self.to_dict() or {}).values()))

    def check(self, batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
        for part in self.parts:
            part.check(batch, heads, m, n)

    def size(self) -> tuple[int | None, int | None]:
        # A part may leave a size open (None): the first part that gives it decides.
        m, n = zip(*(part.size() for part in self.parts), strict=True)
        return next((a for a in m if a is not None), None), next((b for b in n if b is not None), None)

    def translate(self, rows: range, columns: range, m: int, n: int) -> Mask | None:
        # Translate each part; None where one of them cannot be.
        moved = {part: part.translate(rows, columns, m, n) for part in self.parts}
        settings = {name: moved[part] for name, part in (self.to_dict() or {}).items()}
        return None if None in moved.values() else self.from_dict(settings)

    def reach(self) -> int:
        return max(part.reach() for part in self.parts)


class _PairOfMasks(Combined):
    """Two masks that are combined, pair by pair."""

    stored = ("left", "right")
    combine: Callable[[Tensor, Tensor], Tensor]  # of what the two masks allow
    absorbing: BlockState  # a tile in this state for one mask is in it for both combined

    def __init__(self, left: Mask, right: Mask) -> None:
        self.left = left
        self.right = right

    def allows(self, at: Tile) -> Tensor:
        # Skip a mask that has no effect on this tile.
        neutral = _OPPOSITE_STATE[self.absorbing]  # where one mask has this state, the other alone decides
        if tracing():  # a state may ask for numbers that a program does not have while it is traced
            return self.combine(self.left.allows(at), self.right.allows(at))
        if self.left.coverage(at) is neutral:
            return self.right.allows(at)
        if self.right.coverage(at) is neutral:
            return self.left.allows(at)
        return self.combine(self.left.allows(at), self.right.allows(at))

    def coverage(self, at: Tile) -> BlockState:
        # The answer follows from the states of the two masks; the right one is asked only where it matters.
        left = self.left.coverage(at)
        if left is self.absorbing:
            return left
        right = self.right.coverage(at)
        # A left mask that is neither absorbing nor partial is neutral: then the right one decides.
        return right if right is self.absorbing or left is not BlockState.PARTIAL else left

    def allowed_runs(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        left, right = self.left.allowed_runs(at), self.right.allowed_runs(at)
        return None if left is None or right is None else self.combined_runs(*left, *right)

    @abstractmethod
    def combined_runs(
        self, first: Tensor, stop: Tensor, other_first: Tensor, other_stop: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return one run for each row, combined from a run of each mask, or None where a row has two.

        Runs go from `first` up to `stop` (not included).
        """


class And(_PairOfMasks):
    """Pairs that both masks allow; made by ``left & right``.

    Parameters
    ----------
    left, right : Mask
        The masks that are combined; either may be additive.

    See Also
    --------
    Or, Not

    Notes
    -----
    A tile is skipped where either mask allows nothing, and only one mask is asked where the other allows
    everything. The numbers of additive masks add up.

    Examples
    --------
    >>> from attlas.masks import Causal, Window
    >>> (Causal() & Window(2, 2)).name()
    'Causal() & Window(2, 2)'
    """

    combine = staticmethod(operator.and_)
    absorbing = BlockState.EMPTY

    def combined_runs(
        self, first: Tensor, stop: Tensor, other_first: Tensor, other_stop: Tensor
    ) -> tuple[Tensor, Tensor]:
        # The intersection of two runs: from the later start to the earlier stop (empty where stop <= start).
        return torch.maximum(first, other_first), torch.minimum(stop, other_stop)

    @property
    def is_causal(self) -> bool:
        return self.left.is_causal or self.right.is_causal

    def first_query(self, m: int, n: int) -> int | None:
        # The left mask decides, unless it leaves the place open.
        left = self.left.first_query(m, n)
        return self.right.first_query(m, n) if left is None else left

    def padding(self, at: Tile) -> Tensor | None:
        # A key is padding if either mask says so; None: a mask knows of no padding.
        left, right = self.left.padding(at), self.right.padding(at)
        return left if right is None else right if left is None else left | right

    def log_weights(self) -> tuple[Score, ...]:
        return self.left.log_weights() + self.right.log_weights()

    def name(self) -> str:
        return f"{self.left.name()} & {self.right.name()}"


class Or(_PairOfMasks):
    """Pairs that one mask or the other allows; made by ``left | right``.

    Parameters
    ----------
    left, right : Mask
        The masks that are combined; neither may be additive.

    See Also
    --------
    And, Not

    Notes
    -----
    Only one mask is asked in tiles where the other allows nothing.

    Examples
    --------
    >>> from attlas.masks import Causal, Prefix
    >>> (Causal() | Prefix(2)).name()
    '(Causal() | Prefix(2))'
    """

    combine = staticmethod(operator.or_)
    absorbing = BlockState.FULL

    def combined_runs(
        self, first: Tensor, stop: Tensor, other_first: Tensor, other_stop: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        # One run where the two touch, or one of them is empty: then the other alone counts.
        none, other_none = first >= stop, other_first >= other_stop
        if not bool((none | other_none | ((first <= other_stop) & (other_first <= stop))).all()):
            return None
        low, high = torch.minimum(first, other_first), torch.maximum(stop, other_stop)
        low, high = torch.where(other_none, first, low), torch.where(other_none, stop, high)
        return torch.where(none, other_first, low), torch.where(none, other_stop, high)

    def name(self) -> str:
        return f"({self.left.name()} | {self.right.name()})"


class Not(Combined):
    """Pairs that a mask forbids; made by ``~mask``.

    Parameters
    ----------
    inner : Mask
        The mask that is turned around; it may not be additive.

    See Also
    --------
    And, Or

    Examples
    --------
    >>> from attlas.masks import Causal
    >>> (~Causal()).name()
    '~Causal()'
    """

    stored = ("inner",)

    def __init__(self, inner: Mask) -> None:
        self.inner = inner

    def allows(self, at: Tile) -> Tensor:
        return ~self.inner.allows(at)

    def coverage(self, at: Tile) -> BlockState:
        # FULL becomes EMPTY, EMPTY becomes FULL.
        return _OPPOSITE_STATE[self.inner.coverage(at)]

    def name(self) -> str:
        inner = self.inner.name()
        return f"~({inner})" if isinstance(self.inner, And) else f"~{inner}"


def edges(at: Tile) -> tuple[int, int, int, int] | None:
    """Return the first and last row, then the first and last column of a tile.

    Returns
    -------
    tuple of int, or None
        None where the tile is empty, where an index lies on a GPU and reading it would wait, and where torch traces
        the program, which has no numbers then.
    """
    rows, columns = _first_and_last(at.rows, at.row_index), _first_and_last(at.columns, at.column_index)
    return None if rows is None or columns is None else rows + columns


def _first_and_last(span: range, index: Tensor | None) -> tuple[int, int] | None:
    """Return the first and last position of a tile along one axis; None where it has none, or they lie on a GPU."""
    if index is None:
        return (span.start, span.stop - 1) if len(span) else None
    return (
        None if index.device.type != "cpu" or not index.numel() or tracing() else (int(index.min()), int(index.max()))
    )


_OPPOSITE_STATE = dict(zip(BlockState, reversed(BlockState), strict=True))
