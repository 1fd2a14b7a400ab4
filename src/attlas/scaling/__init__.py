"""Why divide by sqrt(d): variance of logits and what softmax makes of it, for random vectors and a model's heads.

`study` measures random vectors, `heads` the heads of a model, `expected` says what independent Gaussian logits
would give, and `temperature` finds the factor of the logits at which variance or entropy meet a target.
"""

from attlas.scaling.gaussian import Expected, expected, limit
from attlas.scaling.heads import Heads, HeadScaling, heads
from attlas.scaling.jacobian import Jacobian, JacobianSize, jacobian
from attlas.scaling.temperature import Temperature, temperature
from attlas.scaling.vectors import DISTRIBUTIONS, Estimate, Measured, Study, study

__all__ = [
    "DISTRIBUTIONS", "Estimate", "Expected", "HeadScaling", "Heads", "Jacobian", "JacobianSize", "Measured", "Study",
    "Temperature", "expected", "heads", "jacobian", "limit", "study", "temperature",
]  # fmt: skip
