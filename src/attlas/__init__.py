"""Exact attention whose weights you can look at, at any length.

``A = attlas.attend(q, k)`` is softmax(score(q, k)) as a lazy matrix that is never stored: ``A @ v`` runs at
the speed of a fused kernel, and any cell, row, tile, statistic or picture of A is computed on demand.
"""

from attlas.lazily import __dir__, __getattr__  # noqa: F401  (PEP 562: the package asks these two)

__version__ = "0.1.0"
