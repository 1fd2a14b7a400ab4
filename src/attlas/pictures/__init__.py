"""Pictures of attention: heat maps of one head or of many, as matplotlib figures and as files."""

from attlas.pictures.circuitsvis import accept_in_circuitsvis
from attlas.pictures.maps import (
    ACCENT,
    DEPTH,
    FLOOR,
    INK,
    LAND,
    SOFT,
    blocks,
    color_norm,
    depth,
    draw,
    grid,
    label,
    palette,
    plot,
    save,
    scale,
    sheet,
    weight_words,
)
from attlas.pictures.over_image import over_image
from attlas.pictures.why import why, why_map

__all__ = [
    "ACCENT", "DEPTH", "FLOOR", "INK", "LAND", "SOFT", "accept_in_circuitsvis", "blocks", "color_norm", "depth", "draw",
    "grid", "label", "over_image", "palette", "plot", "save", "scale", "sheet", "weight_words",
    "why", "why_map",
]  # fmt: skip
