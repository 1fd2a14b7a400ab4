# What the package holds, for type checkers: `attlas.lazily` imports it when it is asked for.
from attlas import atlas as atlas
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
from attlas import view as view
from attlas.public import *  # noqa: F403
from attlas.public import __all__ as __all__

__version__: str
