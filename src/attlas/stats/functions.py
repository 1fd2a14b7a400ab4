"""A function for each statistic: ``stats.entropy(A)`` is short for ``stats.Entropy()(A)``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar, get_type_hints

from attlas.engine.dense import MatrixLike
from attlas.engine.statistic import Statistic

P = ParamSpec("P")
R = TypeVar("R", covariant=True)

_MATRIX_DOC = """\
A : AttentionMatrix or Tensor, shape (..., m, n), or a tuple of them
    The matrix; of several, the result is a tuple.
"""


class FunctionOfMatrix(Protocol[P, R]):
    """A function of a matrix and of the arguments of a class."""

    def __call__(self, A: MatrixLike, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return a statistic of the matrix."""


def function_of(statistic: Callable[P, Statistic], result: type[R], form: str) -> FunctionOfMatrix[P, R]:
    """Return the function that computes a statistic of a matrix: its arguments are A and those of the class.

    Its name is that of the class in small letters, `max_weight` of `MaxWeight`, and its docstring is made of that of
    the class. Tools that read the source see neither: for the pages, `docs/_build/functions.py` imports the function.

    Parameters
    ----------
    statistic : type[Statistic]
        The class.
    result : type
        What the function returns, of one matrix.
    form : str
        Shape of the result, for the docstring.
    """

    def function(A: MatrixLike, *args: P.args, **kwargs: P.kwargs) -> R:
        return statistic(*args, **kwargs)(A)

    signature = inspect.signature(statistic)
    first = inspect.Parameter("A", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="MatrixLike")
    signature = signature.replace(parameters=[first, *signature.parameters.values()], return_annotation=result.__name__)
    function.__signature__ = signature  # type: ignore[attr-defined]  # inspect.signature() reads it
    hints = get_type_hints(statistic.__init__)
    function.__annotations__ = {"A": MatrixLike, **hints, "return": result}
    function.__module__ = statistic.__module__
    function.__name__ = function.__qualname__ = _function_name(statistic.__name__)
    function.__doc__ = _function_docstring(statistic, f"{result.__name__}, {form}")
    return function


def _function_name(name: str) -> str:
    """Return the name of a class in small letters: ``MaxWeight`` becomes ``max_weight``, ``TopK`` ``topk``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name).lower()


def _function_docstring(statistic: Callable[..., Statistic], result: str) -> str:
    """Return the docstring of a function: the sections of the class that are about a call, and A and the result."""
    summary, *parts = re.split(r"^(\w[\w ]+)\n-{3,}\n", inspect.getdoc(statistic) or "", flags=re.M)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    sections["Parameters"] = _MATRIX_DOC + sections.get("Parameters", "")
    sections["Returns"] = result
    told = [f"{summary.strip()} See `{statistic.__name__}`."]
    for title in ("Parameters", "Returns", "Raises", "Examples"):
        if title in sections:
            told.append(f"{title}\n{'-' * len(title)}\n{sections[title].strip()}")
    return "\n\n".join(told) + "\n"
