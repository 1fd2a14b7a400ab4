"""Every public name of the package attlas, which hands them out when the first one is asked for."""

from attlas import stats, testing
from attlas.atlas import Atlas, Entry
from attlas.attend import attend, attention
from attlas.corpus import corpus, join
from attlas.divergences import divergence
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
from attlas.interventions import intervene
from attlas.loading import load
from attlas.masks import (
    BlockState,
    Causal,
    Dilated,
    Documents,
    Heads,
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
from attlas.work import explain_choice as explain

__all__ = [
    "Additive", "Alibi", "Atlas", "AttentionMatrix", "AttlasError", "BackendError", "Bilinear", "BlockState", "Boxcar",
    "Causal", "CheckpointError", "Cosine", "DeviceError", "Dilated", "Documents", "DtypeError", "Entry", "Epanechnikov",
    "Gaussian", "GradientError", "Heads", "Laplace", "Mask", "ModifiedError", "OutOfRangeError", "Padding", "Plan",
    "Prefix", "RecordingError", "RelativeBias", "ScaledDot", "Score", "ScoreMod", "ShapeError", "SoftCap", "TensorBias",
    "Tile", "TooLargeError", "Triangular", "Window", "attend", "attention", "corpus", "divergence", "explain",
    "from_function", "from_tensor", "intervene", "join", "load", "record", "stats", "testing",
]  # fmt: skip
