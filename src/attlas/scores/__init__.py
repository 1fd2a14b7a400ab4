"""How alike are a query and a key? Scores are log-weights, before softmax."""

from attlas.scores import additive, bilinear, dot, forget, function, kernel, path, position
from attlas.scores.additive import *
from attlas.scores.base import Dot, Scaled, ScaledByTensor, Score, Sum, Tokens
from attlas.scores.bias import Bias
from attlas.scores.bilinear import *
from attlas.scores.dot import *
from attlas.scores.forget import *
from attlas.scores.function import *
from attlas.scores.kernel import *
from attlas.scores.path import *
from attlas.scores.position import *

__all__ = ["Bias", "Dot", "Scaled", "ScaledByTensor", "Score", "Sum", "Tokens"]
__all__ += additive.__all__
__all__ += bilinear.__all__
__all__ += dot.__all__
__all__ += forget.__all__
__all__ += function.__all__
__all__ += kernel.__all__
__all__ += path.__all__
__all__ += position.__all__
