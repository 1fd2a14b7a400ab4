"""Exact attention whose weights you can look at, at any length.

``A = attlas.attend(q, k)`` is softmax(score(q, k)) as a lazy matrix that is never stored: ``A @ v`` runs at
the speed of a fused kernel, and any cell, row, tile, statistic or picture of A is computed on demand.
"""

from attlas import stats, testing
from attlas.atlas import Atlas, Entry, load
from attlas.attend import attend, attention
from attlas.attend import explain_choice as explain
from attlas.engine.plan import Plan
from attlas.errors import (
    AttlasError,
    BackendError,
    CheckpointError,
    DeviceError,
    DtypeError,
    GradientError,
    ModifiedError,
    OutOfRangeError,
    RecordingError,
    ShapeError,
    TooLargeError,
)
from attlas.lazily import __dir__, __getattr__  # noqa: F401  (PEP 562: the package asks these two)
from attlas.masks import (
    Causal,
    Coverage,
    Dilated,
    Documents,
    Mask,
    Padding,
    Prefix,
    Window,
    from_function,
    from_tensor,
)
from attlas.matrix import AttentionMatrix
from attlas.recording import record
from attlas.scores import (
    Additive,
    Alibi,
    Bilinear,
    Boxcar,
    Cosine,
    Epanechnikov,
    Gaussian,
    Laplace,
    RelativeBias,
    ScaledDot,
    Score,
    ScoreMod,
    SoftCap,
    TensorBias,
    Triangular,
)
from attlas.tiles import Tile

__version__ = "0.1.0"

__all__ = [
    "Additive",
    "Alibi",
    "Atlas",
    "AttentionMatrix",
    "AttlasError",
    "BackendError",
    "Bilinear",
    "Boxcar",
    "Causal",
    "CheckpointError",
    "Cosine",
    "Coverage",
    "DeviceError",
    "Dilated",
    "Documents",
    "DtypeError",
    "Entry",
    "Epanechnikov",
    "Gaussian",
    "GradientError",
    "Laplace",
    "Mask",
    "ModifiedError",
    "OutOfRangeError",
    "Padding",
    "Plan",
    "Prefix",
    "RecordingError",
    "RelativeBias",
    "ScaledDot",
    "Score",
    "ScoreMod",
    "ShapeError",
    "SoftCap",
    "TensorBias",
    "Tile",
    "TooLargeError",
    "Triangular",
    "Window",
    "attend",
    "attention",
    "explain",
    "from_function",
    "from_tensor",
    "load",
    "record",
    "stats",
    "testing",
]
