"""Masks of the user's own: a function of places, or a tensor."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attlas.errors import AttlasError, DeviceError, DtypeError, ShapeError, explain, kind
from attlas.masks.base import Mask
from attlas.masks.stored import AdditiveMask, TensorMask
from attlas.tiles import Tile

__all__ = ["FunctionMask", "from_function", "from_tensor"]

MaskFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# What a predicate raises that is not written for whole tiles, or not for vmap.
_FAILURES = (RuntimeError, IndexError, TypeError, ValueError)
_FEW = 8  # rows, and columns, on which both ways of asking are compared


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
    raise DtypeError(
        explain(
            "from_tensor()",
            "a mask tensor must be bool (True = may attend) or floating point (added to the scores).",
            {"t": t if isinstance(t, Tensor) else found},
            found=found,
            fix=fix,
        )
    )


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
        If `mask_mod` cannot be called.

    See Also
    --------
    from_function : the door, with the rules.

    Examples
    --------
    >>> from attlas.masks import FunctionMask
    >>> FunctionMask(lambda b, h, i, j: i > j).name()
    'from_function(<lambda>)'
    """

    def __init__(self, mask_mod: MaskFunction, broadcasts: bool = True) -> None:
        if not callable(mask_mod):
            raise DtypeError(
                explain(
                    "from_function()",
                    "mask_mod must be a function of batch, head, query and key.",
                    {"mask_mod": type(mask_mod).__name__},
                    found=f"{kind(mask_mod)}, which cannot be called",
                    fix="from_tensor(t) for a tensor; from_function(lambda b, h, i, j: j <= i) for a function.",
                )
            )
        self.mask_mod = mask_mod
        self._tiles = broadcasts  # whether whole tiles may be passed
        self._compared = False  # with vmap, on a few pairs
        self._device = _held_device(mask_mod)

    def allows(self, at: Tile) -> Tensor:
        if self._device is not None and self._device.type != at.device.type:
            raise DeviceError(
                explain(
                    self.name(),
                    "the tensors that mask_mod holds must be where the matrix is.",
                    found=f"mask_mod holds a tensor on {self._device}, the matrix is on {at.device}",
                    fix=f"move q, k and v to {self._device.type}, or that tensor to {at.device}.",
                )
            )
        if 0 in at.shape:
            return torch.ones(at.shape, dtype=torch.bool, device=at.device)
        first: Exception | None = None
        if self._tiles:
            try:
                allowed = self._whole(at)
                if allowed is not None and (self._compared or self._agree(at)):
                    self._compared = True
                    return allowed
            except AttlasError:
                raise
            except _FAILURES as error:
                first = error
            self._tiles = False
        return self._pairs(at, first)

    def _whole(self, at: Tile) -> Tensor | None:
        """Call with the whole tile; None where the shape shows that it was not taken pair by pair."""
        allowed = self._boolean(self.mask_mod(at.b, at.h, at.i, at.j), at)
        # Places have two axes or four, so fewer mean that pairs were reduced, or picked out.
        fits = 2 <= allowed.ndim <= 4 and all(
            size in (1, full) for size, full in zip(allowed.shape[::-1], at.shape[::-1], strict=False)
        )
        return allowed if fits else None

    def _pairs(self, at: Tile, first: Exception | None = None) -> Tensor:
        each: Callable[..., Tensor] = self.mask_mod
        for axis in (3, 2, 1, 0):
            each = torch.vmap(each, in_dims=tuple(0 if place == axis else None for place in range(4)))
        try:
            with _IndexByTensor():
                allowed = each(at.b.flatten(), at.h.flatten(), at.i.flatten(), at.j.flatten())
            if allowed.shape != at.shape:
                raise ValueError(f"it returned shape {tuple(allowed.shape[4:])} for one pair")
        except _FAILURES as error:
            cause = first or error
            if isinstance(cause, IndexError):
                fix = f"give the tensors that mask_mod indexes a place for each of {at.m} queries and {at.n} keys."
            else:
                fix = "write it without `if`, `and`, `or`: use torch.where, &, |, and index with i and j."
            raise ShapeError(
                explain(
                    self.name(),
                    "mask_mod must return one True or False for a batch, head, query and key.",
                    {"tile": f"{at.shape}"},
                    found=f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}",
                    fix=fix,
                )
            ) from cause
        return self._boolean(allowed, at)

    def _agree(self, at: Tile) -> bool:
        """Compare a whole tile with single pairs, on at most 2 × 2 × 8 × 8 of them."""
        few = replace(
            at,
            batches=at.batches[:2],
            heads=at.heads[:2],
            batch_ids=at.batch_ids[:2],
            head_ids=at.head_ids[:2],
            rows=at.rows[:_FEW],
            columns=at.columns[:_FEW],
            row_index=_few(at.i),
            column_index=_few(at.j),
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # vmap warns where it is slow: not for a few pairs
                pairs = self._pairs(few)
        except ShapeError:
            return True  # it cannot be asked for single pairs, so the tile is all there is
        whole = self._whole(few)
        return whole is not None and torch.equal(whole.expand(few.shape), pairs)

    def _boolean(self, allowed: object, at: Tile) -> Tensor:
        if isinstance(allowed, bool):
            return torch.full((1, 1), allowed, device=at.device)
        if isinstance(allowed, Tensor) and not (allowed.is_floating_point() or allowed.is_complex()):
            return allowed.bool()
        raise DtypeError(
            explain(
                self.name(),
                "mask_mod must return True or False.",
                {"returned": allowed if isinstance(allowed, Tensor) else type(allowed).__name__},
                found="numbers" if isinstance(allowed, Tensor) else kind(allowed),
                fix="compare: return scores > 0. Numbers that are added belong into a score.",
            )
        )

    def name(self) -> str:
        return f"from_function({getattr(self.mask_mod, '__name__', type(self.mask_mod).__name__)})"


class _IndexByTensor(TorchFunctionMode):
    """Let ``ids[i]`` work under vmap, where torch would ask the number i for its value."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            source, index = args
            items = index if isinstance(index, tuple) else (index,)
            kinds = {Tensor if isinstance(item, Tensor) else type(item) for item in items}
            if Tensor in kinds and kinds <= {Tensor, int}:
                places = [torch.as_tensor(item, device=source.device) for item in items]
                return torch.ops.aten.index(source, places)
        return func(*args, **(kwargs or {}))


def _few(places: Tensor) -> Tensor:
    """Return places that are spread over at least one, the first and the last among them."""
    last = places.numel() - 1
    steps = min(last, _FEW - 1)
    return places.flatten()[[last * step // max(steps, 1) for step in range(steps + 1)]]


def _held_device(function: object) -> torch.device | None:
    """Return the GPU of a tensor that a function closes over: indexing it out of range there kills the process."""
    if not inspect.isfunction(function):
        return None
    try:
        held = inspect.getclosurevars(function)
    except ValueError:  # a name that is given its value later
        return None
    for value in (*held.nonlocals.values(), *held.globals.values()):
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return value.device
    return None
