"""Attention of TabPFN by attlas, through its registry of attention backends."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attlas.errors import ShapeError, public
from attlas.matrix.attend import attention
from attlas.recording.hooks import is_recording


class TabPFNBackend:
    """Computes the attention of TabPFN with attlas while a model is recorded, so that `attlas.record` hears it.

    See Also
    --------
    attlas.record : records a model for the time of a ``with`` block.

    Notes
    -----
    TabPFN chooses a backend for each call: FlashAttention 3, MLX or others, or else torch's
    ``scaled_dot_product_attention``. ``record(model, patch_sdpa=True)`` hears the last. A registered `TabPFNBackend` is
    asked first, and takes the calls of a recording on every device; outside of recordings it takes none. Grouped heads
    stay grouped. Linear memory, as without it.

    Examples
    --------
    >>> import torch
    >>> from attlas.recording import TabPFNBackend
    >>> backend = TabPFNBackend()  # register_attention_backend(backend), of tabpfn.architectures.shared
    >>> backend.is_preferred(None)  # nothing is recorded
    False
    >>> q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 7, 2, 8)  # batch, rows, heads, size
    >>> backend.run(q, k, k).shape
    torch.Size([1, 5, 2, 8])
    """

    name = "attlas"

    def is_preferred(self, spec: Any) -> bool:
        """Return whether a recording runs in this thread.

        Parameters
        ----------
        spec : AttentionSpec
            The sizes of the call, which do not matter here.

        Returns
        -------
        bool

        Examples
        --------
        >>> from attlas.recording import TabPFNBackend
        >>> TabPFNBackend().is_preferred(None)
        False
        """
        return is_recording()

    @public("TabPFNBackend.run()")
    def run(self, q: Tensor, k: Tensor | None, v: Tensor | None, **_: Any) -> Tensor:
        """Return the output of one attention.

        Parameters
        ----------
        q : Tensor, shape (batch, m, heads, size)
            Queries.
        k, v : Tensor, shape (batch, n, key heads, size)
            Keys and values.

        Returns
        -------
        Tensor, shape (batch, m, heads, size)

        Raises
        ------
        ShapeError
            If there are no keys or values, or their sizes do not fit.

        Examples
        --------
        >>> import torch
        >>> from attlas.recording import TabPFNBackend
        >>> x = torch.randn(1, 5, 2, 8)
        >>> TabPFNBackend().run(x, x, x).shape
        torch.Size([1, 5, 2, 8])
        """
        if k is None or v is None:
            rule = "TabPFN must give keys and values as tensors, as it does for backends that read no quantized cache."
            raise ShapeError(rule, "no keys or no values", "fit_mode='fit_preprocessors'")
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
