"""Kernel regression as scikit-learn estimators, and the fast sums beneath them."""

from attlas.errors import MissingExtraError
from attlas.foundation.installation import install_command

try:
    import sklearn as sklearn
except ImportError as error:
    raise MissingExtraError(
        "scikit-learn must be installed for its estimators.",
        "no module named sklearn",
        install_command("sklearn"),
        where="attlas.estimators",
    ) from error

from attlas.estimators.classifier import AttentionClassifier
from attlas.estimators.regressor import AttentionRegressor
from attlas.estimators.sums import Moments, Sums, SumsPlan, kernel_sums, plan_sums

__all__ = ["AttentionClassifier", "AttentionRegressor", "Moments", "Sums", "SumsPlan", "kernel_sums", "plan_sums"]
