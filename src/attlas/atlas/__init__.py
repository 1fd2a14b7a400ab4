"""A recording of a whole model: its attentions by layer, their statistics as a table, saved and loaded."""

from attlas.atlas.atlas import Atlas
from attlas.atlas.bookmarks import Bookmark
from attlas.atlas.entry import Entry
from attlas.atlas.loading import load

__all__ = ["Atlas", "Bookmark", "Entry", "load"]
