"""What may be wrong with the words of a figure: cut off, or over each other."""

import itertools
from typing import Any

__all__ = ["faults_of"]


def faults_of(figure: Any) -> list[str]:
    """List the texts of a figure that leave it, or lie over another one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(200)
    canvas.draw()
    width, height = canvas.get_width_height()
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in figure.findobj(Text)]
    boxes = [(text, box) for text, box in boxes if text.strip()]
    found = [text for text, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]
    for (a, one), (b, other) in itertools.combinations(boxes, 2):
        across = min(one.x1, other.x1) - max(one.x0, other.x0)
        if across > 1 and min(one.y1, other.y1) - max(one.y0, other.y0) > 2:
            found.append(f"{a} | {b}")
    return found
