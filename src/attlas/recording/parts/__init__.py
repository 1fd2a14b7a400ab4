"""What the parts of queries and keys are made of: the residual stream of a recorded model as a sum, piece by piece."""

from attlas.recording.parts.stream import Projection, Reader, Rotation, Scaling, Stream, Write

__all__ = ["Projection", "Reader", "Rotation", "Scaling", "Stream", "Write"]
