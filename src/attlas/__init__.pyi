# The public names of attlas and the modules that they are imported from: `__init__.py` reads this list.
from attlas import distributed as distributed
from attlas import errors as errors
from attlas import estimators as estimators
from attlas import heads as heads
from attlas import huggingface as huggingface
from attlas import interventions as interventions
from attlas import masks as masks
from attlas import models as models
from attlas import nn as nn
from attlas import pictures as pictures
from attlas import recording as recording
from attlas import scaling as scaling
from attlas import scores as scores
from attlas import stats as stats
from attlas import testing as testing
from attlas import view as view
from attlas.corpus import corpus as corpus
from attlas.corpus import join as join
from attlas.corpus.loading import load as load
from attlas.engine.plan import Plan as Plan
from attlas.errors import AttlasError as AttlasError
from attlas.errors import BackendError as BackendError
from attlas.errors import CheckpointError as CheckpointError
from attlas.errors import DeviceError as DeviceError
from attlas.errors import DtypeError as DtypeError
from attlas.errors import GradientError as GradientError
from attlas.errors import ModifiedError as ModifiedError
from attlas.errors import OutOfRangeError as OutOfRangeError
from attlas.errors import RecordingError as RecordingError
from attlas.errors import ShapeError as ShapeError
from attlas.errors import TooLargeError as TooLargeError
from attlas.foundation.tiles import Tile as Tile
from attlas.interventions import intervene as intervene
from attlas.masks import BlockState as BlockState
from attlas.masks import Causal as Causal
from attlas.masks import Dilated as Dilated
from attlas.masks import Documents as Documents
from attlas.masks import Heads as Heads
from attlas.masks import Mask as Mask
from attlas.masks import Padding as Padding
from attlas.masks import Prefix as Prefix
from attlas.masks import Window as Window
from attlas.masks import from_function as from_function
from attlas.masks import from_tensor as from_tensor
from attlas.matrix import AttentionMatrix as AttentionMatrix
from attlas.matrix.attend import attend as attend
from attlas.matrix.attend import attention as attention
from attlas.matrix.compiled.exporting import export_operators as export_operators
from attlas.matrix.divergence import divergence as divergence
from attlas.matrix.explain import explain as explain
from attlas.matrix.eye import eye as eye
from attlas.matrix.kinds.pointwise import Pointwise as Pointwise
from attlas.matrix.transport.function import transport as transport
from attlas.recording import atlas as atlas
from attlas.recording import lazily as lazily
from attlas.recording import record as record
from attlas.recording.atlas import Atlas as Atlas
from attlas.recording.atlas import Entry as Entry
from attlas.scores import Additive as Additive
from attlas.scores import Alibi as Alibi
from attlas.scores import Bilinear as Bilinear
from attlas.scores import Boxcar as Boxcar
from attlas.scores import Cosine as Cosine
from attlas.scores import Epanechnikov as Epanechnikov
from attlas.scores import Forget as Forget
from attlas.scores import Gaussian as Gaussian
from attlas.scores import Laplace as Laplace
from attlas.scores import PaTH as PaTH
from attlas.scores import RelativeBias as RelativeBias
from attlas.scores import ScaledDot as ScaledDot
from attlas.scores import Score as Score
from attlas.scores import ScoreMod as ScoreMod
from attlas.scores import SoftCap as SoftCap
from attlas.scores import TensorBias as TensorBias
from attlas.scores import Triangular as Triangular

__all__ = [
    "Additive", "Alibi", "Atlas", "AttentionMatrix", "AttlasError", "BackendError", "Bilinear", "BlockState", "Boxcar",
    "Causal", "CheckpointError", "Cosine", "DeviceError", "Dilated", "Documents", "DtypeError", "Entry", "Epanechnikov",
    "Forget", "Gaussian", "GradientError", "Heads", "Laplace", "Mask", "ModifiedError", "OutOfRangeError", "PaTH",
    "Padding", "Plan", "Pointwise", "Prefix", "RecordingError", "RelativeBias", "ScaledDot", "Score", "ScoreMod",
    "ShapeError", "SoftCap", "TensorBias", "Tile", "TooLargeError", "Triangular", "Window", "attend", "attention",
    "corpus", "divergence", "explain", "export_operators", "eye", "from_function", "from_tensor", "intervene", "join",
    "lazily", "load", "record", "stats", "testing", "transport",
]  # fmt: skip

__version__: str
