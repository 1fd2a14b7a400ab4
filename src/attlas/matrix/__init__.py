"""The lazy matrix: `AttentionMatrix`, the weights that it computes from, and what torch and numpy may ask of it."""

from attlas.matrix.matrix import AttentionMatrix, softmax_matrix
from attlas.matrix.softmax import SoftmaxWeights
from attlas.matrix.weights import Weights

__all__ = ["AttentionMatrix", "SoftmaxWeights", "Weights", "softmax_matrix"]
