"""Lets circuitsvis draw lazy matrices."""

from __future__ import annotations

import functools
from typing import Any

from attlas.errors import BackendError, ShapeError, import_extra, public
from attlas.matrix.protocol import LazyTensor
from attlas.matrix.tensor import check_list_size

_CONVERTER_MODULE = "circuitsvis.utils.convert_props"


@public("pictures.accept_in_circuitsvis()")
def accept_in_circuitsvis() -> None:
    """Let functions of circuitsvis take lazy matrices from now on, in this process.

    Raises
    ------
    MissingExtraError
        If circuitsvis is not installed.
    BackendError
        If this circuitsvis converts its arguments in another way.

    Notes
    -----
    ``circuitsvis.attention.attention_heads(A[0], tokens)`` and the others then take an `AttentionMatrix` with the axes
    (heads, m, n) or (m, n), and write its numbers into their page. More than 2^20 numbers, a page of 20 MB, are refused
    by a `TooLargeError` when it is drawn. A second call changes nothing.

    Examples
    --------
    >>> from attlas import pictures
    >>> pictures.accept_in_circuitsvis()  # doctest: +SKIP
    """
    rule = "circuitsvis must be installed to draw with it."
    module = import_extra(_CONVERTER_MODULE, rule, "pip install circuitsvis")
    convert: Any = getattr(module, "convert_prop_type", None)
    if convert is None:
        rule = "circuitsvis must convert its arguments by convert_prop_type, as version 1.43 does."
        raise BackendError(rule, f"no convert_prop_type in {_CONVERTER_MODULE}", "pip install 'circuitsvis==1.43.3'")
    if hasattr(convert, "attlas"):
        return

    @functools.wraps(convert)
    def convert_prop_type(prop: Any) -> Any:
        return _numbers_as_lists(prop) if isinstance(prop, LazyTensor) else convert(prop)

    convert_prop_type.attlas = True  # type: ignore[attr-defined]  # ours
    module.convert_prop_type = convert_prop_type


@public("circuitsvis")
def _numbers_as_lists(matrix: LazyTensor) -> Any:
    """Return the numbers of a matrix that circuitsvis can draw, as lists."""
    given = {matrix.label: f"shape {tuple(matrix.shape)}"}
    if matrix.ndim > 3:
        rule = "circuitsvis draws matrices with the axes (heads, m, n) or (m, n)."
        raise ShapeError(rule, f"{matrix.ndim} axes", "A[0], one sequence of the batch.", arguments=given)
    check_list_size(matrix)
    return matrix.detach().to_dense().tolist()
