"""A matplotlib figure that a notebook shows, also where pyplot has not been set up."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure with a picture of its own for IPython.

    Notes
    -----
    IPython draws figures as pictures only after ``%matplotlib`` or pyplot has registered its formatters. Where they
    are registered, they are asked first, and their settings hold.
    """

    def _repr_png_(self) -> bytes:
        """Return the figure as a PNG."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=self.dpi)
        return buffer.getvalue()
