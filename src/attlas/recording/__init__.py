"""Record the attentions of a model while it runs: q, k and lse, or only the numbers drawn from them."""

from attlas.matrix.handwritten import DenseUse, DenseUses
from attlas.recording.handwritten import Lazily, lazily
from attlas.recording.hooks import offer, pooled
from attlas.recording.recording import Recording, record
from attlas.recording.tabpfn import TabPFNBackend

__all__ = ["DenseUse", "DenseUses", "Lazily", "Recording", "TabPFNBackend", "lazily", "offer", "pooled", "record"]
