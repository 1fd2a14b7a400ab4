"""Kernel regression as scikit-learn estimators, and the fast sums beneath them."""

from attlas.estimators.sums import Moments, Sums, SumsPlan, kernel_sums, plan_sums

__all__ = ["Moments", "Sums", "SumsPlan", "kernel_sums", "plan_sums"]
