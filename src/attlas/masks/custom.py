"""Masks of the user's own: a function of places, or a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from attlas.errors import DtypeError, kind
from attlas.masks.base import Mask
from attlas.masks.stored import AdditiveMask, TensorMask
from attlas.tiles import Tile
from attlas.tilewise import TileFunction

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
    tiles ask, from which whole tiles are skipped.

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
    raise DtypeError("from_tensor()", rule, {"t": t if isinstance(t, Tensor) else found}, found=found, fix=fix)


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
        self.mask_mod = mask_mod
        self._function = TileFunction(mask_mod, self.name(), ("b", "h", "i", "j"), broadcasts)
        self.held = self._function.held

    def allows(self, at: Tile) -> Tensor:
        if 0 in at.shape:
            return torch.ones(at.shape, dtype=torch.bool, device=at.device)
        allowed = self._function(at)
        if isinstance(allowed, bool):
            return torch.full((1, 1), allowed, device=at.device)
        if isinstance(allowed, Tensor) and not (allowed.is_floating_point() or allowed.is_complex()):
            return allowed.bool()
        given = {"returned": allowed if isinstance(allowed, Tensor) else type(allowed).__name__}
        found = "numbers" if isinstance(allowed, Tensor) else kind(allowed)
        fix = "compare: return scores > 0. Numbers that are added belong into a score."
        raise DtypeError(self.name(), "mask_mod must return True or False.", given, found=found, fix=fix)

    def name(self) -> str:
        return f"from_function({getattr(self.mask_mod, '__name__', type(self.mask_mod).__name__)})"
