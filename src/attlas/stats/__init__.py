"""Numbers from an attention matrix: each statistic is one small class, and several cost one pass.

``A.collect(stats.Entropy(), stats.TopK(8))`` computes both at once; ``stats.entropy(A)`` is short for one.
"""

from attlas.engine.gradient import CellGradient
from attlas.engine.statistic import Part, Statistic
from attlas.stats.columns import ColumnArgMax, ColumnMass, ColumnMax, column_mass, column_max
from attlas.stats.largest import ArgMax, Coverage, Largest, TailMass, TopK, coverage, tail_mass, topk
from attlas.stats.maps import KeyMaps, key_maps
from attlas.stats.pooled import Offsets, Picture, offsets, picture
from attlas.stats.rows import (
    EffectiveKeys,
    Entropy,
    LogitMoments,
    MaxLogit,
    MaxWeight,
    Moments,
    Pooled,
    RowMass,
    effective_keys,
    entropy,
    logit_moments,
    max_logit,
    max_weight,
    row_mass,
)
from attlas.stats.spans import Spans, spans

__all__ = [
    "ArgMax", "CellGradient", "ColumnArgMax", "ColumnMass", "ColumnMax", "Coverage", "EffectiveKeys", "Entropy",
    "KeyMaps", "Largest", "LogitMoments", "MaxLogit", "MaxWeight", "Moments", "Offsets", "Part", "Picture", "Pooled",
    "RowMass", "Spans", "Statistic", "TailMass", "TopK", "column_mass", "column_max", "coverage", "effective_keys",
    "entropy", "key_maps", "logit_moments", "max_logit", "max_weight", "offsets", "picture", "row_mass", "spans",
    "tail_mass", "topk",
]  # fmt: skip
