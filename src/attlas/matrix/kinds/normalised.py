"""What else than a softmax makes weights of logits, by the names that `attend` takes."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from attlas.errors import DtypeError, ShapeError, kind
from attlas.foundation.checks import one_of
from attlas.matrix.kinds.pointwise import Function, Pointwise, PointwiseWeights
from attlas.matrix.kinds.stick_breaking import StickBreakingWeights
from attlas.matrix.weights import Weights

Normalise: TypeAlias = Literal["softmax", "stick-breaking"] | Function | Pointwise


def normalised(A: Any, normalise: Any) -> Weights:
    """Return the weights that are made of the logits of a softmax matrix; raise where nothing has that name.

    Parameters
    ----------
    A : AttentionMatrix
        The matrix.
    normalise : str or Pointwise
        Any but "softmax".
    """
    if isinstance(normalise, str):
        one_of("normalise", normalise, ("softmax", "stick-breaking", *get_args(Function)))
    elif not isinstance(normalise, Pointwise):
        rule = "normalise must be a name or an attlas.Pointwise."
        raise DtypeError(rule, kind(normalise), 'normalise="sigmoid"', normalise=type(normalise).__name__)
    if A.sink is not None:
        rule = "a sink is one more logit of a softmax, and nothing else has it."
        found = normalise.function if isinstance(normalise, Pointwise) else normalise
        raise ShapeError(rule, f"a sink, and normalise = {found!r}", "leave the sink out")
    weights = A.softmax_weights
    if normalise == "stick-breaking":
        return StickBreakingWeights(weights)
    function = normalise if isinstance(normalise, Pointwise) else Pointwise(normalise)
    return PointwiseWeights(weights, function, weights.shape[3])
