"""`explain()`: why a weight is where it is, as an exact sum over pairs of parts."""

from __future__ import annotations

from typing import Any

import torch

from attlas.errors import DtypeError, OutOfRangeError, kind, public
from attlas.foundation.checks import is_integer
from attlas.heads.explanation.cell import CellExplanation
from attlas.heads.explanation.located import Located
from attlas.heads.explanation.logits import dot_of, terms_of
from attlas.heads.explanation.parts import Names
from attlas.recording.atlas import Atlas


@torch.no_grad()
@public("heads.explain()")
def explain(
    atlas: Atlas, layer: Any, head: int, *, cell: tuple[int, int], sequence: int = 0, names: Names | None = None
) -> CellExplanation:
    """Explain a logit of a head as the sum of what each part of the query and each part of the key add to it."""
    if not isinstance(atlas, Atlas):
        fix = "with attlas.record(model, parts=True) as atlas: model(ids)"
        raise DtypeError("parts are those of a recording.", kind(atlas), fix)
    located = Located(atlas, layer, head, sequence, names or {})
    i, j = _checked_cell(cell, located.A.shape[-2:])
    return CellExplanation(located, i, j, terms_of(located.A, located.entry, dot_of(located.entry), i, j))


def _checked_cell(cell: Any, shape: torch.Size) -> tuple[int, int]:
    """Return query and key of a cell; negative ones count from the end.

    Raises
    ------
    DtypeError, OutOfRangeError
        If it is none of the matrix.
    """
    fix = "cell=(1058, 1051), the query and the key"
    if not (isinstance(cell, tuple | list) and len(cell) == 2 and all(map(is_integer, cell))):
        raise DtypeError("cell must be the positions of a query and of a key.", f"cell = {cell!r}"[:80], fix)
    i, j = (int(at) + (size if at < 0 else 0) for at, size in zip(cell, shape, strict=True))
    if not (0 <= i < shape[0] and 0 <= j < shape[1]):
        raise OutOfRangeError(
            "the cell must lie in the matrix.", f"cell = {tuple(cell)}, {shape[0]} queries, {shape[1]} keys", fix
        )
    return i, j
