"""Why a weight is where it is: logits as exact sums over the parts of queries and keys."""

from attlas.heads.explanation.cell import Bands, CellExplanation, Prediction
from attlas.heads.explanation.explain import explain
from attlas.heads.explanation.maps import MapExplanation
from attlas.heads.explanation.parts import Part
from attlas.heads.explanation.table import PairOfParts

__all__ = ["Bands", "CellExplanation", "MapExplanation", "PairOfParts", "Part", "Prediction", "explain"]
