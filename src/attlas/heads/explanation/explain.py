"""`explain()`: why a weight is where it is, as an exact sum over pairs of parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attlas.errors import DtypeError, OutOfRangeError, ShapeError, kind, public
from attlas.foundation.checks import is_integer
from attlas.heads.explanation.cell import CellExplanation
from attlas.heads.explanation.located import Located
from attlas.heads.explanation.logits import dot_of, terms_of
from attlas.heads.explanation.maps import Groups, MapExplanation
from attlas.heads.explanation.parts import Names
from attlas.recording.atlas import Atlas

Rows: TypeAlias = "slice | Sequence[int] | Tensor | None"


@public("heads.explain()")
def explain(
    atlas: Atlas,
    layer: Any,
    head: int,
    *,
    cell: tuple[int, int] | None = None,
    rows: Rows = None,
    columns: slice | None = None,
    groups: Groups = None,
    sequence: int = 0,
    names: Names | None = None,
    norms: int | None = 1,
) -> Any:
    """Explain logits of a head as sums of what each part of the query and each part of the key add to them.

    The residual stream that a layer reads is a sum of parts: tokens, positions, what each earlier head and each earlier
    MLP wrote, biases. Behind a norm with the scale that it had, queries and keys are sums of such parts, and a logit is
    exactly the sum over all pairs of them.

    Parameters
    ----------
    atlas : Atlas
        A recording of ``attlas.record(model, parts=True)``.
    layer : int, str or tuple
        The attention, as ``atlas[layer]`` takes it.
    head : int
        The head, as the model counts it.
    cell : (int, int), optional
        A query and a key, as indices of the matrix; negative ones count from the end. Without it the whole map is
        explained: the mean over its cells, weighted by the attention weights.
    rows : slice, sequence of int, or Tensor of int or bool, optional
        Of a map: the queries, such as those of one class of tokens. The default is all.
    columns : slice, optional
        Of a map: the keys. The default is all.
    groups : {"head", "layer", "kind"}, callable, or pair of such, optional
        Of a map: how parts are joined: not at all, by the layer that wrote them, by their kind, or by the text that a
        function returns of a `Part`. A pair says it of queries and of keys.
    sequence : int, default 0
        Which sequence of the batch.
    names : mapping of (int, int) to str, optional
        What heads do, by layer and head, ``{(0, 0): "previous token"}``: the names of parts then say so.
    norms : int, optional
        In a model that normalizes its whole stream (BERT): how many of these norms parts are followed through, back
        from the attention. What was written before is one part. None follows them to the embeddings: the sum stays
        exact, but all these scales count as kept.

    Returns
    -------
    CellExplanation or MapExplanation
        Of a cell, and of a map.

    Raises
    ------
    RecordingError
        If the recording has no parts, or none of this attention, or the score is no dot product.
    OutOfRangeError
        If there is no such layer, head, sequence or cell, the query may not see the key, or a row was not kept.
    ShapeError, DtypeError
        If settings do not fit together, or are of a wrong type.

    See Also
    --------
    attlas.record : ``parts=True`` keeps what this needs.
    attlas.interventions.RemovePart : takes a part out of the running model.

    Notes
    -----
    A logit is explained, not what the model returns, and not the weight: a softmax is not linear. What is the same for
    all keys of a row moves no weight; ``relative()`` and ``above_uniform`` leave it out. Norms keep the scale that they
    had (so does a norm of queries or keys), which is exact for the sum; a model without a part has other scales. An MLP
    is one part, a mixture of experts too, and what cannot be split has a name of its own. A soft cap is a factor.

    The cell costs two rows of what every layer wrote. The map costs a product with the matrix for each part (or group)
    of the side that has fewer, n · d numbers for each of these, and one part at a time of the other side.

    References
    ----------
    .. [1] Elhage et al., "A mathematical framework for transformer circuits", 2021.

    Examples
    --------
    >>> import torch, attlas, attlas.models
    >>> from attlas import heads
    >>> model = attlas.nn.GPT2.from_pretrained(attlas.models.path()).eval()
    >>> ids = torch.tensor([[90, 17, 40, 8, 90, 17, 40, 8]])
    >>> with torch.no_grad(), attlas.record(model, parts=True) as atlas:
    ...     out = model(ids)
    >>> why = heads.explain(atlas, 2, 4, cell=(4, 1), names={(0, 0): "previous token"})
    >>> max(why.relative().by_key, key=why.relative().by_key.get)
    'head 0·0'
    >>> given = why.sources("head 0·0")  # from which tokens that head took it
    >>> int(given.abs().argmax())
    0
    """
    if not isinstance(atlas, Atlas):
        fix = "with attlas.record(model, parts=True) as atlas: model(ids)"
        raise DtypeError("parts are those of a recording.", kind(atlas), fix)
    if cell is not None and (rows, columns, groups) != (None, None, None):
        rule = "a cell has no rows, columns or groups: these are of a map."
        raise ShapeError(rule, "cell, and one of these", "leave out cell, or the others.")
    if norms is not None and not (is_integer(norms) and norms >= 0):
        raise ShapeError("norms must be a number of norms, or None for all.", f"norms = {norms!r}", "norms=1")
    located = Located(atlas, layer, head, sequence, names or {}, norms)
    m, n = located.A.shape[-2:]
    dot = dot_of(located.entry)
    if cell is None:
        return MapExplanation(located, dot, _checked_rows(rows, m), _checked_columns(columns, n), groups)
    i, j = _checked_cell(cell, located.A.shape[-2:])
    return CellExplanation(located, i, j, terms_of(located.A, located.entry, dot, i, j))


def _checked_rows(rows: Rows, m: int) -> Tensor:
    """Return the rows of a map as indices, ascending.

    Raises
    ------
    DtypeError, OutOfRangeError
        If they are none, or there is none.
    """
    if rows is None or isinstance(rows, slice):
        found = torch.arange(m)[rows or slice(None)]
    else:
        try:
            found = torch.as_tensor(rows)
        except (TypeError, ValueError, RuntimeError):
            found = torch.zeros(0)
        if found.dtype is torch.bool and found.shape == (m,):
            found = found.nonzero().flatten()
        if found.ndim != 1 or found.is_floating_point() or found.dtype is torch.bool:
            rule = "rows must be a slice, positions of queries, or True and False for each query."
            raise DtypeError(rule, f"rows = {rows!r}"[:80], "rows=slice(0, 100)")
    if not len(found) or int(found.min()) < 0 or int(found.max()) >= m:
        raise OutOfRangeError("rows must be queries of the matrix.", f"rows = {rows!r}"[:80], f"rows=slice(0, {m})")
    return found.long().unique()


def _checked_columns(columns: slice | None, n: int) -> range:
    """Return the columns of a map.

    Raises
    ------
    ShapeError
        If they are no slice, or there is none.
    """
    if columns is None or isinstance(columns, slice):
        found = range(n)[columns or slice(None)]
        if len(found) and found.step == 1:
            return found
    raise ShapeError("columns must be a slice of the keys.", f"columns = {columns!r}"[:80], f"columns=slice(0, {n})")


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
