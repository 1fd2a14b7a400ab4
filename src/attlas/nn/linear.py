"""Linear attention and the gated delta rule as layers: pooling whose state has one size at any length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attlas.errors import DtypeError, RecordingError, kind, public
from attlas.foundation.checks import finite_number, instance_of
from attlas.foundation.compat import tracing, transforming
from attlas.matrix import AttentionMatrix
from attlas.matrix.transport.function import transport
from attlas.recording import pooled


class _TransportLayer(nn.Module):
    """What the layers share: the weights of the last call.

    Parameters
    ----------
    scale : float, optional
        Factor of the queries; None is ``1 / sqrt(d)``.
    """

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale = None if scale is None else finite_number("scale", scale, "scale=1.0")
        self._last_matrix: AttentionMatrix | None = None

    @property
    def weights(self) -> AttentionMatrix:
        """Weights of the last call, a lazy matrix without a graph.

        The layer holds the queries, keys and gates of that call, not their graph, until the next call or ``forget()``.

        Raises
        ------
        RecordingError
            If there was no call.
        """
        if self._last_matrix is None:
            rule = "the layer must have been called, outside of torch.compile, torch.export and torch.func."
            fix = "out = layer(queries, keys, values); layer.weights[..., :64, :]"
            raise RecordingError(rule, "no call that can be read", fix, where=f"{type(self).__name__}.weights")
        return self._last_matrix

    def forget(self) -> None:
        """Let go of the queries, keys and gates of the last call."""
        self._last_matrix = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or a pickle, of the layer is its settings, not the tokens of a call.
        return {**self.__dict__, "_last_matrix": None}

    def _dot_factor(self, queries: Tensor) -> float:
        """Return the factor of ``q · k``: `scale`, or 1 / sqrt(d)."""
        return queries.shape[-1] ** -0.5 if self.scale is None else self.scale

    def _pool_values(self, weights: AttentionMatrix, values: Tensor) -> Tensor:
        """Return ``A @ v``, told to recordings, and keep the weights."""
        out, matrix = pooled(self, weights, values)
        # What torch records or transforms are stand-ins, which mean nothing after the call.
        self._last_matrix = None if tracing() else matrix.detach()
        return out


class LinearAttention(_TransportLayer):
    """Linear attention as a layer, ``o_i = Σ_{j ≤ i} φ(q_i)ᵀ φ(k_j) v_j``, with decays; it has no parameters.

    Parameters
    ----------
    feature_map : callable, optional
        φ, a function of a tensor of queries or keys that may change its last axis; the default changes nothing.
    normalize : bool, default False
        Whether each output is divided by the sum of its weights, as of a feature map that is positive: then the weights
        of a row sum to 1.
    scale : float, optional
        Factor of the queries, after the feature map; the default is ``1 / sqrt(d)`` of their last axis.

    Attributes
    ----------
    weights : AttentionMatrix
        The weights of the last call, lazy.

    Raises
    ------
    DtypeError, ShapeError
        If `feature_map` is no function, `normalize` no bool, or `scale` not finite.

    See Also
    --------
    attlas.transport : the matrix, with the arguments of each kind of layer.
    GatedDelta : the state is corrected before it is written.

    Notes
    -----
    Called with queries and keys of shape (..., n, d) and values (..., n, e), the result has shape (..., n, e). `decay`
    and `write` are those of `attlas.transport`: RetNet has one decay a head, Mamba-2 one a token, GLA one a channel.
    Cost: ``O(n d (d + e))`` time, linear memory.

    References
    ----------
    .. [1] Katharopoulos et al., "Transformers are RNNs: fast autoregressive transformers with linear attention", 2020.

    Examples
    --------
    >>> import torch
    >>> from attlas.nn import LinearAttention
    >>> attention = LinearAttention(lambda x: torch.nn.functional.elu(x) + 1, normalize=True)
    >>> queries, keys, values = torch.randn(3, 2, 4, 100, 8).unbind()
    >>> attention(queries, keys, values).shape
    torch.Size([2, 4, 100, 8])
    >>> bool(torch.allclose(attention.weights.sum(-1), torch.ones(2, 4, 100)))
    True
    """

    @public()
    def __init__(
        self,
        feature_map: Callable[[Tensor], Tensor] | None = None,
        normalize: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__(scale)
        if feature_map is not None and (not callable(feature_map) or isinstance(feature_map, type)):
            rule, fix = "feature_map must be a function of queries and keys.", "feature_map=torch.nn.ReLU()"
            raise DtypeError(rule, kind(feature_map), fix)
        instance_of("normalize", normalize, bool, "True or False", "normalize=True")
        self.feature_map, self.normalize = feature_map, normalize

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        decay: float | Tensor | None = None,
        write: float | Tensor | None = None,
    ) -> Tensor:
        """Pool the values of each query's token and of those before it.

        Parameters
        ----------
        queries, keys : Tensor, shape (..., n, d)
            Queries and keys.
        values : Tensor, shape (..., n, e)
            Values.
        decay, write : float or Tensor, optional
            Gates, as of `attlas.transport`.

        Returns
        -------
        Tensor, shape (..., n, e)
        """
        if self.feature_map is not None:
            queries, keys = self.feature_map(queries), self.feature_map(keys)
        weights: Any = transport(queries, keys, decay, write, scale=self._dot_factor(queries))
        if not self.normalize:
            return self._pool_values(weights, values)
        total = weights.sum(-1, keepdim=True)
        share = torch.where(total == 0, 1.0, 1 / torch.where(total == 0, 1.0, total))
        if transforming():  # nobody hears it, and a transform has no lazy multiple
            self._last_matrix = None
            out: Tensor = ((weights @ values) * share).to(values.dtype)
            return out
        return self._pool_values(weights * share, values)


class GatedDelta(_TransportLayer):
    """The gated delta rule as a layer: each token corrects what the state holds at its key; it has no parameters.

    Parameters
    ----------
    normalize : bool, default True
        Whether queries and keys are divided by their norms, ``sqrt(Σ x² + 1e-6)``.
    scale : float, optional
        Factor of the queries; the default is ``1 / sqrt(d)``.

    Attributes
    ----------
    weights : AttentionMatrix
        The weights of the last call, lazy.

    Raises
    ------
    DtypeError, ShapeError
        If `normalize` is no bool, or `scale` is not finite.

    See Also
    --------
    attlas.transport : the matrix, with the arguments of each kind of layer.

    Notes
    -----
    The state S is what a token reads: ``S ← exp(decay_t) S``, ``S ← S + beta_t k_t (v_t - Sᵀ k_t)ᵀ``, ``o_t = Sᵀ q_t``.
    Without decay it is DeltaNet, with one of shape (..., n) the gated delta rule of Qwen3-Next, with one of shape
    (..., n, d) that of Kimi Linear. Keys are near norm 1, so that a beta between 0 and 2 keeps the state bounded. Under
    ``normalize=True`` the norms, and the weights, are computed in float32 for tokens of 16 bits, as transformers does.
    Cost: ``O(n d (d + e))`` time, linear memory.

    References
    ----------
    .. [1] Yang et al., "Gated delta networks: improving Mamba2 with delta rule", 2024.

    Examples
    --------
    >>> import torch
    >>> from attlas.nn import GatedDelta
    >>> layer = GatedDelta()
    >>> queries, keys, values = torch.randn(3, 2, 4, 100, 8).unbind()
    >>> layer(queries, keys, values, beta=torch.rand(2, 4, 100), decay=-torch.rand(2, 4, 100)).shape
    torch.Size([2, 4, 100, 8])
    >>> layer.weights[0, 0, 99, 90:].shape
    torch.Size([10])
    """

    @public()
    def __init__(self, normalize: bool = True, scale: float | None = None) -> None:
        super().__init__(scale)
        instance_of("normalize", normalize, bool, "True or False", "normalize=True")
        self.normalize = normalize

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        beta: float | Tensor = 1.0,
        decay: float | Tensor | None = None,
    ) -> Tensor:
        """Pool the values of each query's token and of those before it.

        Parameters
        ----------
        queries, keys : Tensor, shape (..., n, d)
            Queries and keys; their heads may be fewer than those of the values, which they then divide.
        values : Tensor, shape (..., n, e)
            Values.
        beta : float or Tensor, default 1.0
            How much of what the state holds at a key is replaced, one number for each token, as `write` and `erase` of
            `attlas.transport`.
        decay : float or Tensor, optional
            Logarithms of the decay, as of `attlas.transport`.

        Returns
        -------
        Tensor, shape (..., n, e)
        """
        factor = self._dot_factor(queries)
        if self.normalize:
            queries, keys = _unit_vectors(queries), _unit_vectors(keys)
        weights = transport(queries, keys, decay, write=beta, erase=beta, scale=factor)
        return self._pool_values(weights, values.to(keys.dtype)).to(values.dtype)


def _unit_vectors(x: Tensor) -> Tensor:
    """Return vectors of norm 1; those of 16 bits become float32."""
    x = x.float() if x.dtype.itemsize < 4 else x
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
