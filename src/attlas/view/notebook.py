"""What `A.view()` and `atlas.view()` do: the page in a notebook cell, or in the browser."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attlas.errors import import_extra, public
from attlas.foundation.installation import install_command
from attlas.matrix import AttentionMatrix
from attlas.recording.atlas import Atlas
from attlas.view.server import serve
from attlas.view.service import Service
from attlas.view.still import preview

if TYPE_CHECKING:
    from attlas.view.widget import Viewer


@public("view()")
def show(
    shown: Atlas | AttentionMatrix,
    *,
    tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
    title: str | None = None,
    height: int = 640,
    **options: Any,
) -> Viewer | None:
    """Show a recording or a matrix: in the output of a notebook cell, elsewhere in the browser.

    Parameters
    ----------
    shown : Atlas or AttentionMatrix
        What is looked at.
    tokens : sequence of str, or of such, optional
        Text of each token of sequence 0, or a list for each sequence; an atlas knows them. A pair, of queries and
        keys, for a matrix of two texts.
    title : str, optional
        What the page is called.
    height : int, default 640
        Height of the output in a notebook, in CSS pixels.
    **options : object
        Those of `attlas.view.serve`, for the browser: `port`, `browser`, `announce`.

    Returns
    -------
    Viewer or None
        The widget in a notebook, which shows itself as the value of a cell; ``close()`` ends it. None in a script,
        where the call returns when Ctrl-C ends the server.

    Raises
    ------
    MissingExtraError
        If anywidget (in a notebook) or starlette and uvicorn (elsewhere) are not installed.

    See Also
    --------
    attlas.view.serve : the browser, everywhere.

    Notes
    -----
    A notebook is any program with a running IPython kernel: Jupyter, VS Code, Colab. There the page talks through
    the kernel's own channel and opens no port, so that it works on remote machines too. Memory and time are those
    of what is looked at: nothing is computed before it is asked for, but for the small picture of `attlas.view.preview`
    that a saved notebook keeps.

    Examples
    --------
    >>> import attlas
    >>> atlas = attlas.load("run.atlas")  # doctest: +SKIP
    >>> atlas.view()  # doctest: +SKIP
    """
    if not in_notebook():
        serve(shown, tokens=tokens, title=title, **options)
        return None
    rule = "anywidget must be installed to show the viewer in a notebook."
    fix = f"{install_command('notebook')}, or attlas.view.serve(...) for a page in the browser."
    import_extra("anywidget", rule, fix)
    from attlas.view.widget import Viewer

    return Viewer(Service(shown, tokens=tokens, title=title or ""), height, still=preview(shown))


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook.

    Returns
    -------
    bool

    Notes
    -----
    IPython at a terminal has no kernel, and counts as a script: it cannot show a page.

    Examples
    --------
    >>> from attlas.view.notebook import in_notebook
    >>> in_notebook()
    False
    """
    ipython = sys.modules.get("IPython")  # a kernel has loaded it
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
