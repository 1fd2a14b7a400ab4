"""The public function: transport() makes the lazy matrix of a linear attention layer."""

from __future__ import annotations

from torch import Tensor

from attlas.errors import public
from attlas.foundation.autocast import cast
from attlas.foundation.indexing import Axes
from attlas.matrix.matrix import AttentionMatrix
from attlas.matrix.transport.argument import gated_tokens
from attlas.matrix.transport.weights import TransportWeights


@public("transport()")
def transport(
    q: Tensor,
    k: Tensor,
    decay: float | Tensor | None = None,
    write: float | Tensor | None = None,
    erase: float | Tensor | tuple[Tensor, Tensor] | None = None,
    *,
    diagonal: float | Tensor | None = None,
    scale: float = 1.0,
) -> AttentionMatrix:
    """Return the attention matrix of a linear attention layer without computing it.

    The layer keeps a state, which each token changes, and which its query reads. The output is a product of the values
    with a lower triangular matrix: ``A_ij = scale write_j q_iᵀ M_i M_{i-1} ... M_{j+1} k_j`` for j ≤ i, with
    ``M_t = (I + p_t r_tᵀ) diag(exp(decay_t))``. Its cells may be negative, and its rows need not sum to 1.

    Parameters
    ----------
    q : Tensor, shape (..., n, d)
        Queries. Leading axes are ``()``, ``(batch,)`` or ``(..., heads)``.
    k : Tensor, shape (..., n, d)
        Keys, one for each query. The heads of each tensor divide those of the matrix, which are the most that one has.
    decay : float or Tensor, shape (), (heads,), (..., n) or (..., n, d), optional
        Logarithms of the factors by which the state shrinks before a token is written, at most 0: one for all, for each
        head, each token, or each channel of a token. ``-inf`` forgets everything before the token.
    write : float or Tensor, shape (), (heads,) or (..., n), optional
        Factor of each key, 1 by default.
    erase : float or Tensor, shape (), (heads,) or (..., n), or pair of Tensor, shape (..., n, d), optional
        How much of what the state holds at a key is taken out before the key is written, as the delta rule does:
        ``M_t = (I - erase_t k_t k_tᵀ) diag(exp(decay_t))``. A pair ``(p, r)`` is another rank one part.
    diagonal : float or Tensor, shape (), (heads,) or (..., n), optional
        What is added to the cell of each token with itself.
    scale : float, default 1.0
        Factor of all cells but the diagonal that is added.

    Returns
    -------
    AttentionMatrix, shape (..., n, n)

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the arguments do not fit together, or a decay is above 0.

    See Also
    --------
    attend : the matrix of a softmax.

    Notes
    -----
    ============================== ====================================================================================
    Layer                          Arguments
    ============================== ====================================================================================
    Linear attention               none
    RetNet, lightning attention    ``decay`` of shape (heads,)
    Mamba-2 (SSD)                  q = C, k = B, ``decay`` = Δ A and ``write`` = Δ of shape (..., n), ``diagonal`` = D
    GLA                            ``decay`` of shape (..., n, d)
    DeltaNet                       ``write`` = ``erase`` = β
    Gated delta rule               ``write`` = ``erase`` = β, ``decay`` of shape (..., n)
    KDA                            ``write`` = ``erase`` = β, ``decay`` of shape (..., n, d)
    RWKV-7                         ``decay`` = log w, ``erase`` = (b, a / w), where the state is diag(w) + b aᵀ
    ============================== ====================================================================================

    Normalization of queries and keys, convolutions before the layer, and norms and gates of its output are not part of
    the matrix. A decay on a GPU is not read, so that one above 0 is found on the CPU alone.

    Differentiable in all tensors. Under ``torch.autocast`` queries and keys are cast as those of `attend`. Statistics
    that need shares of a row, such as the entropy, log-weights and the log-sum-exp are refused.

    Cost: some ten microseconds, and one look at `decay`. ``A @ v`` and ``A.mT @ x``, and with them the sums of rows and
    columns, take ``O(n d (d + e))`` time and linear memory, and so do their gradients. A row takes ``O(n d)`` time and
    memory: on a CPU a kernel carries a few rows token by token, in float64. A tile far from the diagonal takes a
    logarithmic number of steps, once the state's transitions over many tokens are known, which are made by the first.
    The tensors are kept, not copied: once one was changed in place, every read raises a ModifiedError.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k = (torch.nn.functional.normalize(torch.randn(2, 4, 300, 16), dim=-1) for _ in range(2))
    >>> v, beta, decay = torch.randn(2, 4, 300, 16), torch.rand(2, 4, 300), -torch.rand(2, 4, 300)
    >>> A = attlas.transport(q, k, decay, write=beta, erase=beta)  # the gated delta rule
    >>> A[0, 1]
    AttentionMatrix(shape=(300, 300), torch.float32, transport, decay of each token, write, erase)
    >>> (A @ v).shape, A[0, 1, 200, 190:].shape, A.sum(-2).shape
    (torch.Size([2, 4, 300, 16]), torch.Size([110]), torch.Size([2, 4, 300]))
    >>> D = attlas.transport(
    ...     torch.ones(3, 1), torch.ones(3, 1), decay=torch.tensor([0.0, -1.0, -torch.inf])
    ... )
    >>> D.to_dense()
    tensor([[1.0000, 0.0000, 0.0000],
            [0.3679, 1.0000, 0.0000],
            [0.0000, 0.0000, 1.0000]])
    """
    q, k = cast(q), cast(k)
    tokens, lead = gated_tokens(q, k, decay, write, erase, diagonal, scale)
    return AttentionMatrix(TransportWeights(tokens), Axes(lead, (True,) * len(lead)))
