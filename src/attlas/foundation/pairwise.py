"""A function of one pair of query and key, such as FlexAttention takes, asked for a whole tile at once."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attlas.errors import AttlasError, DeviceError, DtypeError, ShapeError, kind
from attlas.foundation.compat import tracing
from attlas.foundation.read_tensors import ReadTensors, watched
from attlas.foundation.reasons import in_one_line
from attlas.foundation.tiles import Tile

# What a function raises that is not written for whole tiles, or not for vmap.
_CALL_FAILURES = (RuntimeError, IndexError, TypeError, ValueError)
_MOST_COMPARED_ROWS = 8  # rows, and columns, on which both ways of asking are compared


class TileFunction:
    """A function ``f(*cells, b, h, i, j)`` of one pair, evaluated on tiles.

    A call with a whole tile is one call for all its pairs. On the first tile a few pairs are compared with
    `torch.vmap`, and where the two differ (a reduction such as ``.any()`` inside) `torch.vmap` is taken.

    Parameters
    ----------
    f : callable
        The function: numbers of the pair, then batch, head, query and key as integer tensors.
    name : str
        What an error calls it.
    arguments : tuple of str
        Names of all its arguments.
    broadcasts : bool
        Whether to call it with whole tiles at all.

    Raises
    ------
    DtypeError
        If `f` cannot be called, or not with so many arguments.
    """

    def __init__(
        self, f: Callable[..., Tensor], name: str, arguments: tuple[str, ...], broadcasts: bool = True
    ) -> None:
        self.f = f
        self.name = name
        self._tiles = broadcasts
        self._compared = False
        self._devices: set[str] = set()  # types of device on which the tensors that it reads were looked at
        if callable(f) and (
            tracing() or _takes_arguments(f, len(arguments))
        ):  # a program that is traced calls it at once
            return
        names = ", ".join(arguments)
        if callable(f):
            found, fix = f"{getattr(f, '__name__', kind(f))}{inspect.signature(f)}", f"a function that takes ({names})."
        else:
            found, fix = f"{kind(f)}, which cannot be called", f"lambda {names}: ..."
        raise DtypeError(f"it must be a function of ({names}).", found, fix, f=type(f).__name__, where=name)

    def __deepcopy__(self, memo: dict[int, Any]) -> TileFunction:
        # As functions are not copied, what they are bound to is not: it may be a whole model. A module is a part of its
        # score.
        copied = copy.copy(self)
        copied.f = copy.deepcopy(self.f, memo) if isinstance(self.f, nn.Module) else self.f
        copied._devices = set(self._devices)
        return copied

    def __call__(self, at: Tile, *cells: Tensor) -> Tensor:
        """Return the function's value for each pair of a tile, broadcastable to (batches, heads, rows, columns).

        Raises
        ------
        ShapeError
            If it fails or returns a wrong shape in both ways of asking.
        DeviceError
            If it holds tensors of a GPU and the matrix is not there.
        """
        if torch.compiler.is_compiling():  # there are no numbers that could be compared
            return self._values_by_vmap(at, cells)
        watch = None if tracing() else watched()  # a caller is listing the tensors that the function reads
        if watch is not None:
            return self._values_while_watched(at, cells, watch)  # type: ignore[no-any-return]
        first: Exception | None = None
        if self._tiles:
            try:
                if self._compared or self._calls_agree(at, cells):
                    found = self._values_of_whole_tile(at, cells)
                    if not isinstance(found, Tensor):
                        return found  # type: ignore[no-any-return]
                    if _fits_tile(found, at):
                        self._compared = True
                        return found
            except AttlasError:
                raise
            except _CALL_FAILURES as error:
                first = error
            self._tiles = False
        elif at.device.type not in self._devices and not tracing():
            self._values_of_few_cells(
                at, cells, self._values_by_vmap
            )  # only to check where the tensors are that it reads
        return self._values_by_vmap(at, cells, first)

    def _values_of_whole_tile(self, at: Tile, cells: tuple[Tensor, ...]) -> Any:
        """Return what the function returns when it is called once, with tensors for the whole tile."""
        return self.f(*cells, at.b, at.h, at.i, at.j)

    def _values_of_few_cells(
        self, at: Tile, cells: tuple[Tensor, ...], ask: Callable[[Tile, tuple[Tensor, ...]], Any]
    ) -> Any:
        """Return the function's values for a few cells of a tile; None where it raises an error, as it will for all.

        `ask` is the way to call it, `_values_of_whole_tile` or `_values_by_vmap`. Raises a DeviceError before an
        operation gets a tensor that is neither on the CPU nor where the matrix is.

        What it raises is not told here: the call with the whole tile will raise it again.
        """
        few, some = few_of(at), _few_cells(at, cells)
        found = None
        with torch.no_grad(), ExitStack() as context:
            if not tracing():
                watch = context.enter_context(ReadTensors([*some, few.batch_ids, few.head_ids]))
                context.enter_context(watch.checking(self._check_device(at)))
            try:
                found = ask(few, some)
            except DeviceError:
                raise
            except (*_CALL_FAILURES, AttlasError):
                pass
        self._devices.add(at.device.type)
        return found

    def _check_device(self, at: Tile) -> Callable[[Tensor], None]:
        """Return a function that raises an error for a tensor that is neither on the CPU nor on the tile's device."""

        def check(t: Tensor) -> None:
            if t.device.type in ("cpu", at.device.type):
                return
            # An index out of range on a GPU would end the process.
            rule = "the tensors that the function holds must be where the matrix is."
            held = f"it holds a tensor on {t.device}, the matrix is on {at.device}"
            fix = f"move q, k and v to {t.device.type}, or that tensor to {at.device}."
            raise DeviceError(rule, held, fix, where=self.name)

        return check

    def _values_while_watched(self, at: Tile, cells: tuple[Tensor, ...], watch: ReadTensors) -> Any:
        """Return the function's values for a tile while `watch` notes the tensors that it reads.

        The few cells of this call do not decide whether later calls ask for whole tiles or for pairs. What is no tensor
        is returned as it is.
        """
        with watch.checking(self._check_device(at)):
            if self._tiles:
                try:
                    found = self._values_of_whole_tile(at, cells)
                    if not isinstance(found, Tensor) or _fits_tile(found, at):
                        return found
                except AttlasError:
                    raise
                except _CALL_FAILURES:
                    pass
            return self._values_by_vmap(at, cells)

    def _values_by_vmap(self, at: Tile, cells: tuple[Tensor, ...], first: Exception | None = None) -> Tensor:
        """Return the function's values for a tile, shape (batches, heads, rows, columns), by `torch.vmap` over pairs.

        Raises a ShapeError where that fails too. It names `first`, the error of the call with whole tiles, if any.
        """
        each: Callable[..., Tensor] = self.f
        # The innermost vmap is over keys: along each axis, all cells change and one of b, h, i, j.
        for axis in (3, 2, 1, 0):
            positions = tuple(0 if place == axis else None for place in range(4))
            each = torch.vmap(each, in_dims=(*(0 for _ in cells), *positions))
        try:
            with _IndexByTensor():
                found = each(*cells, at.b.flatten(), at.h.flatten(), at.i.flatten(), at.j.flatten())
            if found.shape != at.shape:
                raise ValueError(f"it returned shape {tuple(found.shape[4:])} for one pair")
        except _CALL_FAILURES as error:
            cause = first or error
            if isinstance(cause, IndexError):
                fix = f"give the tensors that it indexes a position for each of {at.m} queries and {at.n} keys."
            else:
                fix = "write it without `if`, `and`, `or`: use torch.where, &, |, and index with i and j."
            rule = "the function must return one value for a batch, head, query and key."
            raised = in_one_line(cause)
            raise ShapeError(rule, raised, fix, tile=f"{at.shape}", where=self.name) from cause
        return found

    def _calls_agree(self, at: Tile, cells: tuple[Tensor, ...]) -> bool:
        """Return whether a call for a whole tile gives what calls for single pairs give.

        At most 2 × 2 × 8 × 8 pairs are compared.
        """
        whole = self._values_of_few_cells(at, cells, self._values_of_whole_tile)
        few = few_of(at)
        with torch.no_grad():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # vmap warns where it is slow: not for a few pairs
                    pairs = self._values_by_vmap(few, _few_cells(at, cells))
            except ShapeError:
                return True  # it cannot be asked for single pairs, so the tile is all there is
        if not isinstance(whole, Tensor) or not _fits_tile(whole, few):
            return False
        whole = whole.expand(few.shape)
        return torch.allclose(whole, pairs, equal_nan=True) if whole.is_floating_point() else torch.equal(whole, pairs)


def few_of(at: Tile) -> Tile:
    """Return a tile of at most 2 × 2 × 8 × 8 cells of another one, spread over its rows and columns."""
    rows, columns = at.i.flatten(), at.j.flatten()
    rows, columns = (t[_spread_indices(len(t), t.device)] for t in (rows, columns))
    return replace(
        at,
        batches=at.batches[:2],
        heads=at.heads[:2],
        batch_ids=at.batch_ids[:2],
        head_ids=at.head_ids[:2],
        rows=at.rows[: len(rows)],
        columns=at.columns[: len(columns)],
        row_index=rows,
        column_index=columns,
    )


def _few_cells(at: Tile, cells: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the same cells that `few_of` chooses, of tensors with one number for each pair of the whole tile."""
    rows, columns = (_spread_indices(len(span), at.device) for span in (at.rows, at.columns))
    return tuple(t.detach()[:2, :2][:, :, rows][..., columns] for t in cells)


def _fits_tile(found: Tensor, at: Tile) -> bool:
    """Return whether a result's shape broadcasts to a tile's.

    With fewer than two axes, pairs were reduced or picked out.
    """
    sizes = zip(found.shape[::-1], at.shape[::-1], strict=False)
    return 2 <= found.ndim <= 4 and all(size in (1, full) for size, full in sizes)


class _IndexByTensor(TorchFunctionMode):
    """Let ``ids[i]`` work under vmap, where `i` is a tensor whose value torch would ask for."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # torch calls this in the place of each function. An index of tensors goes to the one operation that takes them
        # as they are.
        if func is Tensor.__getitem__:
            source, index = args
            items = index if isinstance(index, tuple) else (index,)
            kinds = {Tensor if isinstance(item, Tensor) else type(item) for item in items}
            if Tensor in kinds and kinds <= {Tensor, int}:
                # A number is made where the tensor is: a copy would wait for a device.
                places = [
                    item.to(source.device) if isinstance(item, Tensor) else torch.full((), item, device=source.device)
                    for item in items
                ]
                return torch.ops.aten.index(source, places)
        return func(*args, **(kwargs or {}))


def _spread_indices(size: int, device: torch.device) -> Tensor:
    """Return at most 8 evenly spaced indices below `size`, with the first and the last."""
    steps = min(size, _MOST_COMPARED_ROWS) - 1
    return torch.arange(steps + 1, device=device) * (size - 1) // max(steps, 1)


def _takes_arguments(f: Callable[..., Any], count: int) -> bool:
    """Return whether a function accepts `count` positional arguments."""
    try:
        inspect.signature(f).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a builtin that does not say what it takes
        return True
    return True
