"""The kinds of weights that are stored, by the names that files have for them."""

from __future__ import annotations

from attlas.matrix.kinds.chained import ChainedWeights
from attlas.matrix.kinds.combination import Combination
from attlas.matrix.kinds.diagonal import DiagonalWeights
from attlas.matrix.kinds.joint import JointNorms
from attlas.matrix.kinds.output_shares import OutputShares
from attlas.matrix.kinds.pointwise import PointwiseWeights
from attlas.matrix.kinds.stacked import StackedWeights
from attlas.matrix.kinds.stick_breaking import StickBreakingWeights
from attlas.matrix.transport.weights import TransportWeights
from attlas.matrix.weights import Weights

#: Softmax is not among them: a file describes its problem.
STORED_KINDS: dict[str, type[Weights]] = {
    kind.__name__: kind
    for kind in (
        ChainedWeights, Combination, DiagonalWeights, JointNorms, OutputShares, PointwiseWeights, StackedWeights,
        StickBreakingWeights, TransportWeights,
    )
}  # fmt: skip
