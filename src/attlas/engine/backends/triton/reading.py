"""What is wanted of a matrix, from as few passes as it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attlas.engine.backends.triton import launch
from attlas.engine.backends.triton.operands import Operands
from attlas.engine.outputs import NEEDS_LSE


def found_by(
    operands: Operands, wanted: Mapping[str, Any], v: Tensor | None, lse: Tensor | None, budget: int, *, complete: bool
) -> dict[str, Tensor] | None:
    """Return the wanted numbers, and the log-sum-exp; None where they take too much memory.

    Without the log-sum-exp, one pass gives it, the output and the numbers of rows; the rest needs another. A further
    one picks the largest weights.

    A floor is a logit that the `top` largest of a row reach: with it, the pass that picks them takes few others.

    Parameters
    ----------
    of : Operands
        What is read.
    wanted : mapping
        Names of `attlas.engine.outputs`, and what goes with them.
    v : Tensor, optional, shape (batch, value heads, n, e)
        Values, for ``out``.
    lse : Tensor, optional, shape (batch, heads, m)
        The exact log-sum-exp, if it is known.
    budget : int
        Numbers of scratch memory.
    complete : bool
        Whether the weights of a row sum to 1, or to 0 where it sees no key.
    """
    rest = {name: value for name, value in wanted.items() if name not in ("lse", "largest", "out")}
    top, floor = int(wanted.get("largest", 0)), None
    several = top if top > 1 else 0  # one is found at once: no floor is needed
    found: dict[str, Tensor] = {}
    has_mass = complete and rest.pop("mass", False)
    if lse is None or v is not None:
        names = [name for name in rest if name in launch.ROW_NAMES]
        first = launch.online(operands, names, v, several)
        lse, floor = with_row(operands, first.lse) if lse is None else lse, first.floor
        found |= first.results
        rest = {name: value for name, value in rest.items() if name in NEEDS_LSE}
    plain = launch.without_row(operands, lse)
    several = several if floor is None else 0
    if rest or several:
        second = launch.weighed(operands, rest, plain, several, budget)
        if second is None:
            return None
        found |= second.results
        floor = second.floor if floor is None else floor
    if top:
        found["top_values"], found["top_keys"] = launch.largest(operands, top, plain, floor)
    if has_mass:
        found["mass"] = (lse > -math.inf).float()
    return found | {"lse": lse}


def with_row(operands: Operands, lse: Tensor) -> Tensor:
    """Add the constant of each row, which the kernels do not see, to a log-sum-exp."""
    return lse if operands.row is None else lse + operands.row
