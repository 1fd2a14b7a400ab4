"""Masks of the user's own: a function of places, or a tensor."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attlas.errors import DtypeError, ShapeError, kind, public
from attlas.foundation.checks import as_plain, has_float64
from attlas.foundation.compat import cached_property, tracing
from attlas.foundation.devices import DeviceCopies, changes_of, to_device
from attlas.foundation.pairwise import TileFunction
from attlas.foundation.tiles import Tile, cut
from attlas.masks.base import BlockState, Mask
from attlas.scores.base import Score
from attlas.scores.position import TensorBias, cells_of, heads_of

__all__ = ["AdditiveMask", "FunctionMask", "TensorMask", "from_function", "from_tensor"]

_BLOCK_SIDE = 64  # rows and columns of the blocks whose coverage is kept
_CELLS_AT_ONCE = 1 << 26  # cells on a device that are judged at a time


class _StoredCells(Mask):
    """What `TensorMask` and `AdditiveMask` share: the tensor, the cells of a tile, and coverage by blocks of 64 x 64.

    Parameters
    ----------
    t : Tensor, shape (m, n), (batch, m, n) or (batch, heads, m, n)
        Booleans or numbers, from which `rule` says what is allowed; an axis of size 1 stands for every place.
    """

    @public("from_tensor()")
    def __init__(self, t: Tensor) -> None:
        t = as_plain("t", t)
        if t.ndim < 2:
            rule = "a mask tensor must have the axes (m, n), (batch, m, n) or (batch, heads, m, n)."
            raise ShapeError(rule, f"{t.ndim} axes", "t[None, :] for one row of keys that all queries share.", t=t)
        self.tensor = t
        self.axes = tuple(t.shape)
        # (batch, heads, m, n), where a size of 1 stands for every place.
        self.cells = t[None, None] if t.ndim == 2 else t[:, None] if t.ndim == 3 else t.flatten(0, -4)
        # Blocks of 64 x 64 cells by row of blocks: (any, all), each (batch, heads, blocks of columns), on the CPU.
        self._block_rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._changes = changes_of(t)
        self._copies = DeviceCopies()

    def to_dict(self) -> dict[str, Any]:
        return {"t": self.tensor}

    @classmethod
    def batch_axis(cls, t: Tensor) -> int | None:
        return 0 if t.ndim in (3, 4) else None

    @abstractmethod
    def rule(self, t: Tensor) -> Tensor:
        """Return which entries of the tensor allow their pair: a bool tensor of the same shape."""

    def allows(self, at: Tile) -> Tensor:
        lacks = self.tensor.dtype is torch.float64 and not has_float64(at.device)
        if lacks and not tracing():  # what numbers of float64 forbid is decided by them
            return to_device(cells_of(self._copies.for_tiles(self._allowed_cells, at.device), at), at.device)
        return to_device(self.rule(cells_of(self._copies.for_tiles(self.cells, at.device), at)), at.device)

    @cached_property
    def _allowed_cells(self) -> Tensor:
        """Which cells are allowed, where the tensor is."""
        return self.rule(_without_repeats(self.cells))

    def coverage(self, at: Tile) -> BlockState:
        # Less than a block is as quickly computed as judged; a list of places has no block.
        if at.scattered or len(at.rows) < _BLOCK_SIDE or len(at.columns) < _BLOCK_SIDE:
            return BlockState.PARTIAL
        height, width = self.cells.shape[2:]
        columns = (
            slice(0, 1) if width == 1 else slice(at.columns.start // _BLOCK_SIDE, -(-at.columns.stop // _BLOCK_SIDE))
        )
        block_rows = range(1) if height == 1 else range(at.rows.start // _BLOCK_SIDE, -(-at.rows.stop // _BLOCK_SIDE))
        found = False  # whether any cell of the tile is allowed
        whole = True  # whether all are
        for block_row in block_rows:
            some, every = (heads_of(table[..., columns], at) for table in self._block_row(block_row))
            found = found or bool(some.any())
            whole = whole and bool(every.all())
            if found and not whole:
                return BlockState.PARTIAL
        return BlockState.FULL if whole else BlockState.EMPTY

    def translate(self, rows: range, columns: range, m: int, n: int) -> TensorMask | None:
        # The mask for a window of its matrix, or a larger one; None where it has to be evaluated at its original
        # places.
        if not (0 <= rows.start <= rows.stop <= m and 0 <= columns.start <= columns.stop <= n):
            return None
        # What an additive mask adds is part of the score by now; what is left is where it forbids.
        cells = self.cells if self.cells.shape[2] == 1 else self.cells[:, :, rows.start : rows.stop]
        cells = cells if cells.shape[3] == 1 else cells[..., columns.start : columns.stop]
        return TensorMask(self.rule(cells))

    def padding(self, at: Tile) -> Tensor | None:
        # One row of keys for all heads and queries is what a padding mask is.
        return ~self.allows(at)[:, 0, 0] if at.m > 1 and self.cells.shape[1:3] == (1, 1) else None

    def _drop_computed(self) -> None:
        """Drop what was computed from the tensor, since the user has changed it in place."""
        self._block_rows, self._changes = {}, changes_of(self.tensor)
        for name in ("_block_facts", "_allowed_cells"):
            vars(self).pop(name, None)

    def _block_row(self, block_row: int) -> tuple[Tensor, Tensor]:
        """Return which blocks of a row of blocks allow any cell, and which allow all, shape (batch, heads, blocks)."""
        if self.cells.device.type != "cpu":
            some, every, _ = self._block_facts
            return some[:, :, block_row], every[:, :, block_row]
        if block_row not in self._block_rows:
            allowed = self.rule(
                _without_repeats(self.cells)[:, :, block_row * _BLOCK_SIDE : (block_row + 1) * _BLOCK_SIDE]
            )
            some, every = allowed.any(dim=2), allowed.all(dim=2)
            edge = -some.shape[-1] % _BLOCK_SIDE  # columns that the last block lacks: filled with what changes nothing
            some = torch.nn.functional.pad(some, (0, edge), value=False).unflatten(-1, (-1, _BLOCK_SIDE)).any(-1)
            every = torch.nn.functional.pad(every, (0, edge), value=True).unflatten(-1, (-1, _BLOCK_SIDE)).all(-1)
            self._block_rows[block_row] = some, every
        return self._block_rows[block_row]

    @cached_property
    def _block_facts(self) -> tuple[Tensor, Tensor, bool]:
        """What a device is asked once, and waited for: which blocks allow any cell, which all; whether 0 is added.

        The blocks have the shape (batch, heads, rows of blocks, blocks of columns).
        """
        own = _without_repeats(self.cells).detach()
        parts: list[tuple[Tensor, Tensor]] = []
        boolean = torch.ones((), dtype=torch.bool, device=own.device)
        for rows in cut(
            own.shape[2], max(_CELLS_AT_ONCE // max(own[:, :, 0].numel(), 1) // _BLOCK_SIDE, 1) * _BLOCK_SIDE
        ):
            cells = own[:, :, rows.start : rows.stop]
            allowed = self.rule(cells)
            boolean = boolean & ((cells == 0) | ~allowed).all()
            # The last blocks are filled up, for `any` with False and for `all` with True.
            edges = (0, -allowed.shape[3] % _BLOCK_SIDE, 0, -allowed.shape[2] % _BLOCK_SIDE)
            some, every = (
                torch.nn.functional.pad(allowed, edges, value=value)
                .unflatten(-1, (-1, _BLOCK_SIDE))
                .unflatten(2, (-1, _BLOCK_SIDE))
                for value in (False, True)
            )
            parts.append((some.any(-1).any(3), every.all(-1).all(3)))
        some, every = (torch.cat(blocks, dim=2) for blocks in zip(*parts, strict=True))
        # All three are one tensor for the copy, so that the host waits once.
        *both, last = (
            torch.cat([some.flatten(), every.flatten(), boolean.view(1)]).cpu().split([some.numel()] * 2 + [1])
        )
        return both[0].view(some.shape), both[1].view(some.shape), bool(last)

    def check(self, batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
        # Raise an error where the mask does not fit a matrix of these sizes.
        if self._changes != changes_of(self.tensor):  # between two matrices it may change
            self._drop_computed()
        self._copies.forget(self.tensor)
        wanted = (math.prod(batch), heads, m, n)
        # Which sizes differ, as text for the error.
        wrong = [
            f"{label} = {size} in mask, {full} in matrix"
            for label, size, full in zip(("batch", "heads", "m", "n"), self.cells.shape, wanted, strict=True)
            if size != 1 and size != full  # torch.compile finds a size that varies in no tuple
        ]
        per_head = len(self.axes) == 3 and self.axes[0] == heads
        if wrong:
            rule, found = "the mask tensor must have the sizes of the matrix, or 1.", ", ".join(wrong)
            fix = "use a mask of shape (m, n), (batch, m, n) or (batch, heads, m, n)."
            if self.axes == (wanted[0], n):
                fix = "for a padding mask of shape (batch, n): from_tensor(t[:, None, None, :])."
            elif per_head:
                fix = "for one mask a head: from_tensor(t[None])."
        elif per_head and heads == wanted[0] > 1:
            rule = "the first axis of a mask of three axes must be the batch's or the heads', not both."
            found = f"{heads} sequences and {heads} heads"
            fix = "t[:, None] for a mask per sequence, t[None] for one per head as in torch."
        else:
            return
        given = {"mask": self.tensor, "matrix (batch, heads, m, n)": f"{wanted}"}
        raise ShapeError(rule, found, fix, arguments=given, where="attend()")

    def size(self) -> tuple[int | None, int | None]:
        m, n = self.cells.shape[2:]
        return None if m == 1 else m, None if n == 1 else n

    def name(self) -> str:
        return f"from_tensor({str(self.tensor.dtype).removeprefix('torch.')} {self.axes})"


class TensorMask(_StoredCells):
    """Pairs where a tensor of bool is True; made by `from_tensor`.

    Parameters
    ----------
    t : Tensor of bool, shape (m, n), (batch, m, n) or (batch, heads, m, n)
        True where the query may see the key; axes of size 1 stand for every place.

    Raises
    ------
    ShapeError
        If it has fewer than two axes; at `attend`, if its sizes are not those of the matrix.

    See Also
    --------
    from_tensor : the public function, with the rules.

    Examples
    --------
    >>> import torch
    >>> from attlas.masks import TensorMask
    >>> TensorMask(torch.ones(2, 1, 4, 4, dtype=torch.bool)).name()
    'from_tensor(bool (2, 1, 4, 4))'
    """

    def rule(self, t: Tensor) -> Tensor:
        return t


class AdditiveMask(_StoredCells):
    """Log-weights that are added to the scores, and forbid where they are ``-inf``; made by `from_tensor`.

    Parameters
    ----------
    t : Tensor of floating point, shape (m, n), (batch, m, n) or (batch, heads, m, n)
        Numbers that are added; ``-inf``, or ``torch.finfo(t.dtype).min``, where the query may not see the
        key. Axes of size 1 stand for every place.

    Raises
    ------
    ShapeError
        If it has fewer than two axes; at `attend`, if its sizes are not those of the matrix.

    See Also
    --------
    from_tensor : the public function, with the rules.

    Notes
    -----
    A tensor that holds 0 for every allowed pair is found to be boolean when first used, in one pass: it
    then adds nothing, and combines with ``|`` and ``~``. A tensor that requires a gradient always adds.

    Examples
    --------
    >>> import torch
    >>> from attlas.masks import AdditiveMask
    >>> AdditiveMask(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])).log_weights()
    ()
    """

    def __init__(self, t: Tensor) -> None:
        super().__init__(t)
        self._weights: tuple[Score, ...] | None = None

    def rule(self, t: Tensor) -> Tensor:
        # NaN is not below: it is allowed, and reaches the scores, as in the formula.
        return ~(t.detach() <= torch.finfo(t.dtype).min)

    def log_weights(self) -> tuple[Score, ...]:
        if self._weights is None:
            self._weights = () if self._is_boolean() else (TensorBias(self.cells),)
        return self._weights

    def _drop_computed(self) -> None:
        super()._drop_computed()
        self._weights = None

    def _is_boolean(self) -> bool:
        """Return whether all numbers are 0 or forbid their cell, so that there is nothing to add to the scores."""
        if self.tensor.requires_grad or tracing():
            return False
        own = _without_repeats(self.cells)
        if own.device.type != "cpu":
            return not own.numel() or self._block_facts[2]
        for rows in cut(own.shape[2], _BLOCK_SIDE):  # some rows at a time: no copy of the whole tensor
            cells = own[:, :, rows.start : rows.stop]
            if not bool(((cells == 0) | ~self.rule(cells)).all()):
                return False
        return True


def _without_repeats(cells: Tensor) -> Tensor:
    """Return the cells without repetitions: a batch or head axis made by `expand` (stride 0) becomes one of size 1."""
    for axis in (0, 1):
        if cells.stride(axis) == 0 and cells.shape[axis] > 1:
            cells = cells.narrow(axis, 0, 1)
    return cells


MaskFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def from_function(mask_mod: MaskFunction, broadcasts: bool = True) -> FunctionMask:
    """Make a mask of a FlexAttention ``mask_mod(b, h, i, j)``, as it is.

    Parameters
    ----------
    mask_mod : callable
        Takes batch, head, query and key as integer tensors and returns True where the query may see the
        key. It is written as for one pair; comparisons, arithmetic, ``&``, ``|``, `torch.where` and
        indexing of tensors work, Python's ``if``, ``and`` and ``or`` do not.
    broadcasts : bool, optional
        Whether to call it with whole tiles first, and with single pairs under `torch.vmap` only where that
        fails. The default is True; False always takes `torch.vmap`.

    Returns
    -------
    FunctionMask

    Raises
    ------
    DtypeError
        If `mask_mod` cannot be called; at the first tile, if it returns numbers.
    ShapeError
        At the first tile, if it fails or returns a wrong shape in both ways.
    DeviceError
        At the first tile, if `mask_mod` holds tensors of a GPU and the matrix is not there.

    See Also
    --------
    from_tensor : a mask that is stored.
    attlas.masks.Mask : a class of your own can also skip whole tiles.

    Notes
    -----
    The meaning is that of one pair at a time. A call with a whole tile is one call for all its pairs and
    asks for the memory of a few tiles; on the first tile a few pairs are compared with `torch.vmap`, and
    where the two differ (a reduction such as ``.any()`` inside) `torch.vmap` is taken. No tile is skipped:
    combine with a mask that knows its coverage, as in ``Causal() & from_function(f)``.

    References
    ----------
    .. [1] Dong et al., "FlexAttention: a programming model for generating optimized attention kernels",
       2024.

    Examples
    --------
    >>> import attlas
    >>> def checkers(b, h, i, j):
    ...     return (i + j) % 2 == 0
    >>> print(attlas.Window(3, 0) & attlas.from_function(checkers))
    Window(3, 0) & from_function(checkers)
      ■ · · · · · · ·
      · ■ · · · · · ·
      ■ · ■ · · · · ·
      · ■ · ■ · · · ·
      · · ■ · ■ · · ·
      · · · ■ · ■ · ·
      · · · · ■ · ■ ·
      · · · · · ■ · ■
      8 queries × 8 keys
    """
    return FunctionMask(mask_mod, broadcasts)


def from_tensor(t: Tensor) -> TensorMask | AdditiveMask:
    """Make a mask of a tensor: booleans, or numbers that are added to the scores.

    Parameters
    ----------
    t : Tensor, shape (m, n), (batch, m, n) or (batch, heads, m, n)
        Axes of size 1 stand for every place. More leading axes are those of the batch. Boolean: True where
        the query may see the key. Floating point: log-weights that are added to the scores, ``-inf`` (or
        the smallest number of the dtype) where it may not. The tensor is kept, not copied: do not change it.

    Returns
    -------
    TensorMask or AdditiveMask

    Raises
    ------
    DtypeError
        If `t` is not a tensor of bool or floating point numbers.
    ShapeError
        If it has fewer than two axes; at `attend`, if its sizes are not those of the matrix.

    See Also
    --------
    from_function : a mask that is computed, and needs no memory.
    attlas.TensorBias : numbers that are added to the scores and forbid nothing.

    Notes
    -----
    The conventions are those of ``attn_mask`` of torch's `scaled_dot_product_attention`. Values at or below
    ``torch.finfo(dtype).min`` count as ``-inf``: that is what the masks of transformers hold, and a row of
    nothing else has weights 0 here, not 1/n. A padding mask of shape (batch, n) is ``t[:, None, None, :]``.
    Cost: the tensor itself, m · n numbers where no axis has size 1; a byte for each 64 × 64 cells, made as
    tiles ask, from which whole tiles are skipped. A tensor on a GPU is read for these at once, and the host waits for
    it one time; one on the CPU beside queries on a GPU is copied once, but tile by tile where it takes more than
    256 MiB and more than a quarter of the GPU's free memory.

    Examples
    --------
    >>> import torch, attlas
    >>> print(attlas.from_tensor(torch.ones(4, 6).tril(1).bool()))
    from_tensor(bool (4, 6))
      ■ ■ · · · ·
      ■ ■ ■ · · ·
      ■ ■ ■ ■ · ·
      ■ ■ ■ ■ ■ ·
      4 queries × 6 keys
    """
    if isinstance(t, Tensor) and t.dtype == torch.bool:
        return TensorMask(t)
    if isinstance(t, Tensor) and t.is_floating_point():
        return AdditiveMask(t)
    if isinstance(t, Tensor):
        found, fix = str(t.dtype).removeprefix("torch."), "from_tensor(t.bool()), if 1 means that the query may attend."
    else:
        found, fix = type(t).__name__, "from_tensor(torch.as_tensor(t)), or from_function(mask_mod) for a function."
    rule = "a mask tensor must be bool (True = may attend) or floating point (added to the scores)."
    raise DtypeError(rule, found, fix, t=t if isinstance(t, Tensor) else found, where="from_tensor()")


class FunctionMask(Mask):
    """Pairs for which a function says True; made by `from_function`.

    Parameters
    ----------
    mask_mod : callable
        A FlexAttention ``mask_mod(b, h, i, j)``.
    broadcasts : bool, optional
        Whether to call it with whole tiles first.

    Raises
    ------
    DtypeError
        If `mask_mod` cannot be called, or takes other arguments.

    See Also
    --------
    from_function : makes it, and has the rules.

    Examples
    --------
    >>> from attlas.masks import FunctionMask
    >>> FunctionMask(lambda b, h, i, j: i > j).name()
    'from_function(<lambda>)'
    """

    def __init__(self, mask_mod: MaskFunction, broadcasts: bool = True) -> None:
        self._function = TileFunction(mask_mod, _constructor_text(mask_mod), ("b", "h", "i", "j"), broadcasts)

    @property
    def mask_mod(self) -> MaskFunction:
        """The function."""
        return self._function.f

    def allows(self, at: Tile) -> Tensor:
        # True where the query may see the key, broadcastable to the tile.
        if 0 in at.shape:  # the user's function need not be able to compute without cells
            return torch.ones(at.shape, dtype=torch.bool, device=at.device)
        allowed = self._function(at)
        if isinstance(allowed, bool):
            return torch.full((1, 1), allowed, device=at.device)
        if isinstance(allowed, Tensor) and not (allowed.is_floating_point() or allowed.is_complex()):
            return allowed.bool()
        given = {"returned": allowed if isinstance(allowed, Tensor) else type(allowed).__name__}
        found = "numbers" if isinstance(allowed, Tensor) else kind(allowed)
        fix = "compare: return scores > 0. Numbers that are added belong into a score."
        raise DtypeError("mask_mod must return True or False.", found, fix, arguments=given, where=self.name())

    def name(self) -> str:
        return _constructor_text(self.mask_mod)


def _constructor_text(function: object) -> str:
    """Return how a mask made of this function is written: "from_function(name)"."""
    return f"from_function({getattr(function, '__name__', type(function).__name__)})"
