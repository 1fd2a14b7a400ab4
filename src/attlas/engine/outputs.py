"""Numbers that a backend can read of a matrix without tiles, by name, and the statistics that are made from them.

`Statistic.outputs` asks for them: a name, and a value that goes with it. `Backend.read` gives them. All results have
the axes (batch, heads) first; their dtype is that of the sums, but for the log-sum-exp (float64), and for keys and
numbers of keys (int64). Of a row that sees no key ``max_logit`` and ``lse`` are -inf (with a sink, ``lse`` is the
sink), and all else is 0. Where a row sees fewer keys than k, the last of ``top_keys`` are -1.

=============== ================================ ==============================================================
name            value                            results, with their further axes
=============== ================================ ==============================================================
``out``         values, (batch, heads, n, e)     ``out`` (m, e): the product of the weights with the values
``lse``         True                             ``lse`` (m,): log-sum-exp of each row, with the sink
``entropy``     True                             ``entropy`` (m,): ``-Σ_j A_ij ln A_ij``
``squares``     True                             ``squares`` (m,): ``Σ_j A_ij²``
``mass``        True                             ``mass`` (m,): ``Σ_j A_ij``
``max_logit``   True                             ``max_logit`` (m,): largest logit of the allowed keys
``mean``        True                             ``mean`` (m,): mean of the logits of the allowed keys
``variance``    True                             ``variance`` (m,): their mean squared deviation from it
``largest``     k                                ``top_values``, ``top_keys`` (m, k): the largest weights, in
                                                 descending order, and their keys
``column_mass`` True                             ``column_mass`` (n,): ``Σ_i A_ij``
``column_max``  True                             ``column_max`` (n,): ``max_i A_ij``
``offsets``     True                             ``offsets`` (m + n - 1,): sum of each diagonal, from ``j - i = 1 - m``
``picture_sum`` edges of blocks (`Blocks`)       ``picture_sum`` (blocks of rows, of columns): sum of each block
``picture_max`` edges of blocks (`Blocks`)       ``picture_max`` (the same): largest weight of each block
``coverage``    shares of the mass               ``coverage`` (m, shares): how many of the largest weights hold each
=============== ================================ ==============================================================
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attlas.engine.problem import Problem
from attlas.engine.statistic import Statistic

#: Stands in a list of results for a statistic that a backend does not compute.
MISSING = object()

#: Edges of blocks along rows and along columns, ascending: the first place of each, and the end of the last.
Blocks: TypeAlias = tuple[Sequence[int], Sequence[int]]

#: Computes the results that are wanted by these names, with values and the log-sum-exp where given. Returns None where
#: the tokens are not finite.
Read: TypeAlias = Callable[[Mapping[str, Any], Tensor | None, Tensor | None], Mapping[str, Tensor] | None]


class Collected(NamedTuple):
    """What comes from one read.

    Parameters
    ----------
    results : list
        One for each statistic, `MISSING` for those that must see the tiles or need other names.
    lse : Tensor, shape (batch, heads, m)
        Log-sum-exp of each row.
    out : Tensor or None, shape (batch, heads, m, e)
        The product of the weights with the values that were given beside the statistics.
    """

    results: list[Any]
    lse: Tensor
    out: Tensor | None


class Output(NamedTuple):
    """One result of a name.

    Parameters
    ----------
    name : str
        Its own name.
    shape : callable, optional
        Gives its axes after (batch, heads) from m, n and the value that was asked with; by default there is one, m.
    dtype : torch.dtype, optional
        Its dtype, by default that of the sums.
    """

    name: str
    shape: Callable[[int, int, Any], tuple[int, ...]] | None = None
    dtype: torch.dtype | None = None


def _axes_of_columns(m: int, n: int, value: Any) -> tuple[int, ...]:
    """Return the axes after (batch, heads) of a result with one number per key.

    The signature is that of `Output.shape`.
    """
    return (n,)


def _axes_of_blocks(m: int, n: int, value: Blocks) -> tuple[int, ...]:
    """Return the axes after (batch, heads) of a result with one number per block of a picture."""
    return len(value[0]) - 1, len(value[1]) - 1


_ROW_NUMBERS = ("entropy", "squares", "mass", "max_logit", "mean", "variance")
_PICTURE_OUTPUTS = ("picture_sum", "picture_max")

#: The results of each name: see the table above.
OUTPUTS: Mapping[str, tuple[Output, ...]] = {
    "out": (Output("out", lambda m, n, value: (m, value.shape[-1])),),
    "lse": (Output("lse", dtype=torch.float64),),
    **{name: (Output(name),) for name in _ROW_NUMBERS},
    "largest": (
        Output("top_values", lambda m, n, value: (m, value)),
        Output("top_keys", lambda m, n, value: (m, value), torch.int64),
    ),
    "column_mass": (Output("column_mass", _axes_of_columns),),
    "column_max": (Output("column_max", _axes_of_columns),),
    "offsets": (Output("offsets", lambda m, n, value: (m + n - 1,)),),
    **{name: (Output(name, _axes_of_blocks),) for name in _PICTURE_OUTPUTS},
    "coverage": (Output("coverage", lambda m, n, value: (m, len(value)), torch.int64),),
}

#: Names whose results need the log-sum-exp of each row before the first weight is read.
NEEDS_LSE = frozenset({"column_mass", "column_max", "offsets", "coverage", *_PICTURE_OUTPUTS})


def zeros(problem: Problem, wanted: Mapping[str, Any], m: int | None = None) -> dict[str, Tensor]:
    """Return a tensor of zeros in the place of each wanted result, for the first `m` rows, by default for all."""
    batch, heads, rows, n = problem.shape
    m = rows if m is None else m
    found = {}
    for asked, value in wanted.items():
        for name, shape, dtype in OUTPUTS[asked]:
            sizes = (m,) if shape is None else shape(m, n, value)
            found[name] = torch.zeros(batch, heads, *sizes, dtype=dtype or problem.dtype, device=problem.device)
    return found


def collect(
    problem: Problem,
    read: Read,
    statistics: Sequence[Statistic],
    lse: Tensor | None,
    names: Collection[str] = OUTPUTS,
    v: Tensor | None = None,
) -> Collected | None:
    """Compute the statistics that ask for outputs, and the product with `v` if it is given, all in one read.

    Returns None where no statistic asks for outputs, or `read` gives None.

    Parameters
    ----------
    problem : Problem
        The matrix.
    read : callable
        `Backend.read` of a backend, for one request.
    statistics : sequence of Statistic
        What is computed.
    lse : Tensor, optional, shape (batch, heads, m)
        Log-sum-exp of each row, if it is known.
    names : collection of str
        The names that `read` gives, by default all.
    v : Tensor, optional, shape (batch, value heads, n, e)
        Values, if no statistic has some.
    """
    # A read takes one set of values: `v`, or those of one statistic. Of a part of a matrix it takes none, since
    # backends would normalize the weights over the keys of the part alone.
    asked = asked_outputs(problem, statistics, names, takes_values=v is None and not problem.partial)
    made = [outputs for outputs in asked if outputs is not None]
    if not made:
        return None
    merged = _merge_wanted(made, problem.shape[2:])
    values = merged.pop("out", v)
    if lse is None:
        merged["lse"] = True
    found = read(merged, values, lse)
    if found is None:
        return None
    if lse is None:
        lse = found["lse"]
    results = [
        MISSING if outputs is None else statistic.from_outputs(_own_outputs(found, outputs, merged), problem)
        for statistic, outputs in zip(statistics, asked, strict=True)
    ]
    return Collected(results, lse, None if v is None else found["out"])


def asked_outputs(
    problem: Problem, statistics: Sequence[Statistic], names: Collection[str] = OUTPUTS, *, takes_values: bool = False
) -> list[Mapping[str, Any] | None]:
    """Return the outputs that each statistic asks for; None for one that must see the tiles, or needs other names.

    What a statistic asks for are names, each with a value that goes with it, such as ``{"largest": 5}``. `takes_values`
    says whether one of them may ask for a product with its values.
    """
    asked: list[Mapping[str, Any] | None] = []
    levels: object = None
    for statistic in statistics:
        outputs = statistic.outputs(problem) if statistic.describes("outputs") else None
        if outputs is not None and not all(map(names.__contains__, outputs)):
            outputs = None
        if outputs is not None and "coverage" in outputs:
            levels = outputs["coverage"] if levels is None else levels
            outputs = outputs if outputs["coverage"] == levels else None  # one set of levels in one pass
        if outputs is not None and "out" in outputs:
            outputs, takes_values = outputs if takes_values else None, False
        asked.append(outputs)
    return asked


def _merge_wanted(asked: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> dict[str, Any]:
    """Merge what several statistics ask for: the largest k, and blocks that the blocks of all can be pooled from.

    The blocks cover the whole matrix, as the kernels need it, even if every statistic looks at a window.
    """
    merged: dict[str, Any] = {}
    for outputs in asked:
        for name, value in outputs.items():
            merged[name] = max(merged.get(name, 0), value) if name == "largest" else value
    blocks = [outputs[name] for outputs in asked for name in _PICTURE_OUTPUTS if name in outputs]
    if blocks:
        fine = tuple(sorted({0, size}.union(*own)) for own, size in zip(zip(*blocks, strict=True), sizes, strict=True))
        merged |= {name: fine for name in _PICTURE_OUTPUTS if name in merged}
    return merged


def _own_outputs(
    found: Mapping[str, Tensor], outputs: Mapping[str, Any], merged: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the outputs that one statistic asked for, cut from those that all statistics asked for together."""
    own = dict(found)
    if "largest" in outputs:
        own["top_values"] = found["top_values"][..., : outputs["largest"]]
        own["top_keys"] = found["top_keys"][..., : outputs["largest"]].clone()
    for name in _PICTURE_OUTPUTS:
        if name in outputs:
            own[name] = _pool_blocks(found[name], merged[name], outputs[name], name == "picture_max")
    return own


def _pool_blocks(table: Tensor, fine: Blocks, coarse: Blocks, largest: bool) -> Tensor:
    """Pool blocks into larger ones whose edges are among theirs; what lies outside of those is left out.

    The largest of several is the largest by its size: of weights that are not negative, simply the largest.
    """
    for axis, have, want in ((-2, fine[0], coarse[0]), (-1, fine[1], coarse[1])):
        if list(have) == list(want):
            continue
        places = [bisect_left(have, edge) for edge in want]
        inside = table.narrow(axis, places[0], places[-1] - places[0])
        parts = inside.split([stop - start for start, stop in pairwise(places)], dim=axis)
        table = torch.stack([_largest_magnitude(part, axis) if largest else part.sum(axis) for part in parts], dim=axis)
    return table


def _largest_magnitude(x: Tensor, axis: int) -> Tensor:
    """Return the number of largest absolute value along an axis, with its sign."""
    high, low = x.amax(axis), x.amin(axis)
    return torch.where(-low > high, low, high)
