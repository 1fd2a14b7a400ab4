"""Attention pooling with a kernel, a dot product, or a small network that scores query and key together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from attlas.errors import DtypeError
from attlas.masks import Mask
from attlas.nn.layer import PoolingLayer
from attlas.scores import Additive, Gaussian, ScaledDot, Score


class AttentionPooling(PoolingLayer):
    """Kernel regression as a layer, ``f(x) = Σ_i softmax_i(-½ ‖(x - x_i) / h‖²) y_i``.

    Parameters
    ----------
    bandwidth : float, sequence of float, or Tensor of shape () or (d,)
        h, the width of the kernel, for all coordinates or for each. The default is 1.
    learn : bool
        Whether h is learned by gradient (parametric pooling); False is the Nadaraya-Watson estimator. The
        default is True. The learned ``w`` of the textbooks is ``1 / h``.
    kernel : type
        Another kernel that takes ``(bandwidth, learn=...)``: ``attlas.Laplace``, ``attlas.Triangular``.

    Attributes
    ----------
    score : Score
        The kernel; ``score.bandwidth`` is h.
    weights : AttentionMatrix
        The weights of the last call, lazy.

    Raises
    ------
    DtypeError, ShapeError
        If `bandwidth` is not positive numbers, or `kernel` is no score.

    See Also
    --------
    attlas.Gaussian : the score, with the formula and its limits.
    DotProductAttention : pooling by dot product.

    Notes
    -----
    Called with queries of shape (..., m, d), keys (..., n, d) and values (..., n, e), the result has shape
    (..., m, e). For numbers on a line, queries (m,), keys (n,) and values (n,) give (m,). `valid_lens` has
    shape (batch,) or (batch, m); `mask` is any mask of attlas. Leaving each training point out of its own
    estimate, as parametric pooling is usually trained, is a mask: see the example. A query without a key in
    reach gives 0. Cost: ``O(m n d)`` time, linear memory.

    References
    ----------
    .. [1] Nadaraya, "On estimating regression", 1964. Watson, "Smooth regression analysis", 1964.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.nn import AttentionPooling
    >>> x = torch.linspace(0, 5, 50)
    >>> y = 2 * x.sin() + x**0.8
    >>> pool = AttentionPooling(bandwidth=1.0)
    >>> others = attlas.from_function(lambda b, h, i, j: i != j)
    >>> optimizer = torch.optim.Adam(pool.parameters(), lr=0.1)
    >>> for _ in range(50):
    ...     optimizer.zero_grad()
    ...     loss = (pool(x, x, y, mask=others) - y).square().mean()
    ...     loss.backward()
    ...     _ = optimizer.step()
    >>> bool(pool.score.bandwidth < 0.3)
    True
    """

    def __init__(
        self, bandwidth: float | Sequence[float] | Tensor = 1.0, learn: bool = True, kernel: type[Score] = Gaussian
    ) -> None:
        if not (isinstance(kernel, type) and issubclass(kernel, Score)):
            rule, fix = "kernel must be a class of score that takes (bandwidth, learn=...).", "kernel=attlas.Laplace"
            raise DtypeError(rule, f"a {type(kernel).__name__}", fix, kernel=repr(kernel), where="AttentionPooling()")
        make: Callable[..., Score] = kernel
        super().__init__(make(bandwidth, learn=learn))

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Tensor | None = None,
        mask: Mask | Tensor | Callable[..., Any] | None = None,
    ) -> Tensor:
        """Pool the values of the keys near each query."""
        if queries.ndim == 1 and keys.ndim == 1:  # numbers on a line
            queries, keys = queries.unsqueeze(-1), keys.unsqueeze(-1)
        return super().forward(queries, keys, values, valid_lens, mask)


class DotProductAttention(PoolingLayer):
    """Scaled dot-product attention as a layer, ``softmax(Q Kᵀ / sqrt(d)) V``; it has no parameters.

    Parameters
    ----------
    dropout : float
        Probability that a weight is dropped in training. The default is 0.
    scale : float, optional
        Factor of the dot product; the default is ``1 / sqrt(d)``.

    Attributes
    ----------
    weights : AttentionMatrix
        The weights of the last call, lazy.

    Raises
    ------
    ShapeError
        If `dropout` is no probability, or `scale` is not finite.

    See Also
    --------
    AdditiveAttention : for queries and keys of different sizes.
    MultiHeadAttention : with projections and heads.

    Notes
    -----
    Called with queries of shape (..., m, d), keys (..., n, d) and values (..., n, e). `valid_lens`, of shape
    (batch,) or (batch, m), says how many of the first keys are real, for each sequence or for each query;
    `mask` is any mask of attlas, or a tensor of bool, True where a query may see a key. A query without a
    key gives 0 (a softmax over keys that were filled with a large negative number gives their mean).
    Cost: that of torch's fused kernel.

    Examples
    --------
    >>> import torch
    >>> from attlas.nn import DotProductAttention
    >>> attention = DotProductAttention()
    >>> queries, keys, values = torch.randn(2, 1, 2), torch.ones(2, 10, 2), torch.randn(2, 10, 4)
    >>> attention(queries, keys, values, valid_lens=torch.tensor([2, 6])).shape
    torch.Size([2, 1, 4])
    >>> attention.weights[0, 0, :4]
    tensor([0.5000, 0.5000, 0.0000, 0.0000])
    """

    def __init__(self, dropout: float = 0.0, scale: float | None = None) -> None:
        super().__init__(ScaledDot(scale), dropout)


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
