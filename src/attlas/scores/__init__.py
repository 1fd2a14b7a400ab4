"""How alike are a query and a key? Scores are log-weights, before softmax."""

from attlas.scores.additive import Additive
from attlas.scores.base import Dot, Scaled, ScaledByTensor, Score, Sum, Tokens
from attlas.scores.bilinear import Bilinear
from attlas.scores.dot import Cosine, ScaledDot, SoftCap
from attlas.scores.function import ScoreMod
from attlas.scores.kernel import Boxcar, Epanechnikov, Gaussian, Laplace, Triangular
from attlas.scores.position import Alibi, RelativeBias, TensorBias

__all__ = [
    "Additive", "Alibi", "Bilinear", "Boxcar", "Cosine", "Dot", "Epanechnikov", "Gaussian", "Laplace",
    "RelativeBias", "Scaled", "ScaledByTensor", "ScaledDot", "Score", "ScoreMod", "SoftCap", "Sum", "TensorBias",
    "Tokens", "Triangular",
]  # fmt: skip
