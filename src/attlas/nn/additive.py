"""Additive attention: a small network scores query and key together."""

from __future__ import annotations

from attlas.nn.layer import PoolingLayer
from attlas.scores import Additive


class AdditiveAttention(PoolingLayer):
    """Additive attention as a layer, ``softmax(w_vᵀ tanh(W_q q + W_k k)) V``, for tokens of any two sizes.

    Parameters
    ----------
    query_size, key_size : int
        Sizes of the tokens.
    hidden_size : int
        Number of hidden units.
    dropout : float
        Probability that a weight is dropped in training. The default is 0.
    bias : bool
        Whether the hidden units have a bias. The default is no, as in the paper.

    Attributes
    ----------
    score : Additive
        The score, with the parameters `W_q`, `W_k` and `w_v`.
    weights : AttentionMatrix
        The weights of the last call, lazy.

    Raises
    ------
    ShapeError
        If a size is not a whole number above 0, or `dropout` is no probability.

    See Also
    --------
    attlas.Additive : the score, with its cost.
    DotProductAttention : faster, for tokens of one size.

    Notes
    -----
    Called with queries of shape (..., m, query_size), keys (..., n, key_size) and values (..., n, e); see
    `DotProductAttention` for `valid_lens` and `mask`. The hidden tensor of shape (..., m, n, hidden_size)
    that a broadcast makes is never whole in memory, forward or backward.

    References
    ----------
    .. [1] Bahdanau et al., "Neural machine translation by jointly learning to align and translate", 2015,
       appendix A.1.2.

    Examples
    --------
    >>> import torch
    >>> from attlas.nn import AdditiveAttention
    >>> attention = AdditiveAttention(query_size=20, key_size=2, hidden_size=8, dropout=0.1).eval()
    >>> queries, keys, values = torch.randn(2, 1, 20), torch.ones(2, 10, 2), torch.randn(2, 10, 4)
    >>> attention(queries, keys, values, valid_lens=torch.tensor([2, 6])).shape
    torch.Size([2, 1, 4])
    >>> attention.weights[1, 0, :8]
    tensor([0.1667, 0.1667, 0.1667, 0.1667, 0.1667, 0.1667, 0.0000, 0.0000])
    """

    def __init__(
        self, query_size: int, key_size: int, hidden_size: int, dropout: float = 0.0, bias: bool = False
    ) -> None:
        super().__init__(Additive(query_size, key_size, hidden_size, bias=bias), dropout)
