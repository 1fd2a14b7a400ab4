"""Pictures in a recording: the patch grid of each image, and the weights that a query gives to its patches."""

from attlas.recording.atlas.images.maps import ImageMap, MapPart

__all__ = ["ImageMap", "MapPart"]
