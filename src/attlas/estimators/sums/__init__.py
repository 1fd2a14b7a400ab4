"""Sums of a kernel over keys: numerator and denominator of kernel regression."""

from attlas.estimators.sums.choose import SumsPlan
from attlas.estimators.sums.entry import kernel_sums, plan_sums
from attlas.estimators.sums.result import Moments, Sums

__all__ = ["Moments", "Sums", "SumsPlan", "kernel_sums", "plan_sums"]
