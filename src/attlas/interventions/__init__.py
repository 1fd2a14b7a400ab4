"""Interventions on the attention of a model: suppress a span, scale logits, replace weights, leave out a head."""

from attlas.interventions.edits import (
    Ablate,
    DetachWeights,
    Intervention,
    ReplaceWeights,
    ScaleLogits,
    Suppress,
    Temperature,
)
from attlas.interventions.intervening import Intervening, intervene

__all__ = [
    "Ablate", "DetachWeights", "Intervening", "Intervention", "ReplaceWeights", "ScaleLogits", "Suppress",
    "Temperature", "intervene",
]  # fmt: skip
