"""Record the attentions of a model while it runs: q, k and lse, or only the numbers drawn from them."""

from attlas.recording.record import Recording, record
from attlas.recording.tap import offer

__all__ = ["Recording", "offer", "record"]
