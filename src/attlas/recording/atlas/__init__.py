"""A recording of a whole model: its attentions by layer, their statistics as a table, saved and loaded."""

from attlas.recording.atlas.atlas import Atlas, load
from attlas.recording.atlas.bookmarks import Bookmark
from attlas.recording.atlas.entry import Entry
from attlas.recording.atlas.images import ImageMap, MapPart

__all__ = ["Atlas", "Bookmark", "Entry", "ImageMap", "MapPart", "load"]
