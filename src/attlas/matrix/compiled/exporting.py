"""Whether operators may stand in a program that torch.export writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_blocks_lock = threading.Lock()
_open_blocks = 0  # open blocks of `export_operators`; a plain number, which torch's tracer reads


@contextmanager
def export_operators() -> Iterator[None]:
    """Let torch.export keep attlas's operators in programs, for the time of a ``with`` block.

    Without it an exported program has torch's own operations alone, so that it runs where attlas is not installed: a
    window, a sink, a soft cap, a kernel or a statistic then computes the whole matrix. With it each of these is one
    operator, as inside torch.compile, in linear memory. A plain product, which torch's own function computes, stays
    that function in both.

    Yields
    ------
    None
        The block in which `torch.export.export` is called.

    Notes
    -----
    The process that loads or runs the program must have called ``import attlas.matrix`` before, which registers the
    operators. The operators that a program names are those of the attlas that wrote it. The block counts in all
    threads of the process.

    Examples
    --------
    >>> import torch
    >>> import attlas
    >>> class Local(torch.nn.Module):
    ...     def forward(self, q, k, v):
    ...         return attlas.attention(q, k, v, mask=attlas.Window(64, 0))
    >>> given = tuple(torch.randn(1, 2, 128, 16) for _ in range(3))
    >>> with attlas.export_operators():
    ...     program = torch.export.export(Local(), given)
    >>> "attlas.pool" in str(program.graph)
    True
    >>> torch.allclose(program.module()(*given), Local()(*given), atol=1e-6)
    True
    """
    global _open_blocks  # noqa: PLW0603
    with _blocks_lock:
        _open_blocks += 1
    try:
        yield
    finally:
        with _blocks_lock:
            _open_blocks -= 1


def keeps_operators() -> bool:
    """Return whether operators may stand in the program that torch.export writes."""
    return _open_blocks > 0
