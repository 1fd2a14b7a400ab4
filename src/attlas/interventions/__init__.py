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
from attlas.interventions.parts import RemovePart

__all__ = [
    "Ablate", "DetachWeights", "Intervening", "Intervention", "RemovePart", "ReplaceWeights", "ScaleLogits", "Suppress",
    "Temperature", "intervene",
]  # fmt: skip
