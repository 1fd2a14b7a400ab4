"""What every head of a model does over many texts: exact sums, distributions, and sampled texts.

``attlas.corpus(model, texts, folder)`` makes a corpus, ``attlas.join`` puts several together, and ``attlas.load``
opens one.
"""

import importlib
from typing import TYPE_CHECKING, Any

from attlas.corpus.building import corpus
from attlas.corpus.joining import join

if TYPE_CHECKING:
    from attlas.corpus.folder import Corpus, HeadPage, Sample

__all__ = ["Corpus", "HeadPage", "Sample", "corpus", "join"]


def __getattr__(name: str) -> Any:
    """Return a class that needs pyarrow, which is imported when the first one is asked for."""
    if name in __all__:
        return getattr(importlib.import_module("attlas.corpus.folder"), name)
    raise AttributeError(f"module 'attlas.corpus' has no attribute {name!r}")
