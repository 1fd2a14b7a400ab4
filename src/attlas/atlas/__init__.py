"""A recording of a whole model: its attentions by layer, their statistics as a table, saved and loaded."""

from attlas.atlas.atlas import Atlas, load
from attlas.atlas.bookmarks import Bookmark
from attlas.atlas.entry import Entry

__all__ = ["Atlas", "Bookmark", "Entry", "load"]
