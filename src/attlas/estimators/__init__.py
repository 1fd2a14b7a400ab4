"""Kernel regression as scikit-learn estimators, and the fast sums beneath them."""

from attlas.estimators.sums import Moments, Sums, kernel_sums

__all__ = ["Moments", "Sums", "kernel_sums"]
