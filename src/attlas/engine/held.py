"""The tensors of a score or a mask: those that it holds, and those that a function of the user reads elsewhere."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attlas.errors import DeviceError, GradientError
from attlas.foundation.compat import tracing
from attlas.foundation.devices import to_device
from attlas.foundation.pairwise import few_of
from attlas.foundation.read_tensors import ReadTensors
from attlas.foundation.tiles import Tile
from attlas.masks.base import Mask
from attlas.masks.custom import FunctionMask
from attlas.scores.base import Score
from attlas.scores.function import ScoreMod

_MOST_CELLS_ASKED_WHOLE = 1 << 16  # cells of a matrix that is asked for whole, where a function takes no part of it


def tensors_of(owner: nn.Module | Mask) -> list[Tensor]:
    """Return the tensors that a score or a mask and its parts hold, each once."""
    return parts_and_tensors(owner)[1]


def parts_and_tensors(owner: nn.Module | Mask) -> tuple[list[nn.Module | Mask], list[Tensor]]:
    """Return a score or a mask with the modules and masks that it is made of, and the tensors of all, each once.

    A part that is shared comes several times.
    """
    parts = [owner]
    tensors: dict[int, Tensor] = {}  # torch.compile follows no call of dict[int, Tensor]
    for part in parts:  # the list grows meanwhile
        for name, value in vars(part).items():
            if name in _MODULE_SETTINGS or type(value) in _NO_TENSORS:
                continue
            if isinstance(value, dict):
                entries: Iterable[Any] = value.values()
            else:
                entries = value if isinstance(value, (list, tuple)) else (value,)
            for entry in entries:
                if isinstance(entry, Tensor):
                    tensors[id(entry)] = entry
                elif isinstance(entry, (nn.Module, Mask)):
                    parts.append(entry)
    return parts, list(tensors.values())


# Hooks and settings that every module has.
_MODULE_SETTINGS = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}
_NO_TENSORS = {type(None), bool, int, float, str}


def holds_all(owner: nn.Module | Mask) -> bool:
    """Return whether the attributes of a score or a mask are all that it reads.

    That is so for the classes of attlas and of torch, but for those that call a function of the user. What code of the
    user reads is found only by running it.
    """
    return all(map(_reads_its_own, parts_and_tensors(owner)[0]))


def _reads_its_own(part: nn.Module | Mask) -> bool:
    """Return whether a part of a score or a mask reads no tensor but its attributes.

    Code of the user may read others.
    """
    if isinstance(part, (ScoreMod, FunctionMask)) or not type(part).__module__.startswith(("attlas.", "torch.nn.")):
        return False
    # Hooks of a module are functions of the user, too.
    return not (isinstance(part, nn.Module) and (part._forward_hooks or part._forward_pre_hooks))


def runs_of_rows(mask: Mask, at: Tile) -> tuple[Tensor, Tensor] | None:
    """Return the runs of keys that a mask allows in the rows of a tile, on its device, which is not the CPU.

    They are found on the CPU where the mask is all of attlas: it may have to look at them, and a device would be waited
    for.
    """
    if tracing() or not holds_all(mask):
        return mask.allowed_runs(at)
    found = mask.allowed_runs(replace(at, device=torch.device("cpu")))
    return None if found is None else (to_device(found[0], at.device), to_device(found[1], at.device))


def without_graph(score: Score) -> Score:
    """Return a copy of a score whose tensors share their numbers with it, without a graph."""
    return copy.deepcopy(score, {id(t): _without_graph(t) for t in tensors_of(score)})


def _without_graph(t: Tensor) -> Tensor:
    """Return a tensor with the same numbers and without a graph; a parameter stays an nn.Parameter."""
    return nn.Parameter(t.detach(), requires_grad=False) if isinstance(t, nn.Parameter) else t.detach()


def held_and_read(
    owner: nn.Module | Mask,
    run: Callable[[Tile], Any],
    shape: tuple[int, int, int, int],
    tile: Callable[..., Tile],
    given: Sequence[Tensor] = (),
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Return the tensors that a score or a mask and its parts hold, and those that it reads elsewhere.

    Parameters
    ----------
    owner : Score or Mask
        What its functions read elsewhere is found by running it on a few cells; where the attributes hold all that it
        reads, it is not run.
    run : callable
        Runs it on a tile.
    shape : tuple of int
        Sizes of the matrix: batch, heads, m, n.
    tile : callable
        Returns the tile of some batches, heads, rows and columns.
    given : sequence of Tensor
        Tensors that it is given, and that do not count.

    Returns
    -------
    held : list of Tensor
        Each once.
    read : tuple of Tensor
        None where the code fails: it will fail again at the first tile.
    """
    parts, held = parts_and_tensors(owner)
    if 0 in shape or all(map(_reads_its_own, parts)):
        return held, ()
    return held, _tensors_read_by(run, shape, tile, (*given, *held))


@torch.no_grad()
def _tensors_read_by(
    run: Callable[[Tile], Any],
    shape: tuple[int, int, int, int],
    tile: Callable[..., Tile],
    known: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Return the tensors besides those known that code of the user reads on a few cells.

    `_probe_tiles` yields lists of tiles: the first list counts in which the code runs on some tile.
    """
    for tiles in _probe_tiles(shape, tile):
        found: dict[int, Tensor] = {}
        done = False
        for at in tiles:
            places = [t for t in (at.batch_ids, at.head_ids, at.row_index, at.column_index) if t is not None]
            with ReadTensors([*known, *places]) as read, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # vmap warns where it is slow: not for a few pairs
                done = _runs_without_error(run, at) or done
            found.update((id(t), t) for t in read.found)
        if done:
            return tuple(found.values())
    return ()


def check_leaves(name: str, result: Tensor, known: Sequence[Tensor]) -> None:
    """Raise a GradientError where autograd would carry a gradient to a tensor that is not among those known.

    A function that reads other tensors in some tiles than on a few cells would leave these without a gradient.

    Parameters
    ----------
    name : str
        The class of the score.
    result : Tensor
        The log-weights of a tile.
    known : sequence of Tensor
        The tensors whose gradients are asked for.
    """
    leaves = {id(t) for t in known}
    seen = {t.grad_fn for t in known} | {None}
    nodes: list[Any] = [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in leaves:
            rule = "a score must read the same learned tensors in every tile."
            found = f"a tensor of shape {tuple(leaf.shape)} that it did not read on a few cells"
            fix = "hold it as an attribute of a class of your own: class MyScore(attlas.Score)."
            raise GradientError(rule, found, fix, where=f"the gradient of {name}")
        nodes += [other for other, _ in node.next_functions]


def _runs_without_error(run: Callable[[Tile], Any], at: Tile) -> bool:
    """Run a score or a mask on a tile; return False where the user's code raises an error."""
    try:
        run(at)
    except DeviceError:
        raise
    except Exception:  # noqa: BLE001 - whatever the user's code raises, it raises again at the first tile
        return False
    return True


def _probe_tiles(shape: tuple[int, int, int, int], tile: Callable[..., Tile]) -> Iterator[list[Tile]]:
    """Yield tiles to ask code for: a few cells, else one cell of each head, else the whole of a small matrix.

    A function may pick a tensor by the number of the head, or take nothing but whole rows.
    """
    batch, heads, m, n = shape
    whole = tile(*map(range, shape))
    yield [few_of(whole)]
    one = range(1)
    yield [few_of(tile(range(b, b + 1), range(h, h + 1), one, one)) for b in {0, batch - 1} for h in range(heads)]
    if m * n <= _MOST_CELLS_ASKED_WHOLE:
        yield [whole]
