"""How a problem is computed: never what. A plan changes speed and memory, not the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attlas.errors import ShapeError, public
from attlas.foundation.checks import whole_number

#: The backend of each name, and the types of the devices that it exists for; None for all. It is the module or package
#: of this name in `attlas.engine.backends`, whose tuple `BACKENDS` holds its objects, and is imported when a problem on
#: such a device is first computed.
BACKENDS: Mapping[str, frozenset[str] | None] = {
    "native": frozenset({"cpu"}),
    "sdpa": None,
    "flex": frozenset({"cuda", "xpu"}),
    "triton": frozenset({"cuda"}),
    "reference": None,
    "tiled": None,
}


@dataclass(frozen=True)
class Plan:
    """How to compute: backend and tile size. The result does not depend on it.

    Parameters
    ----------
    backend : {"auto", "native", "sdpa", "flex", "triton", "tiled", "reference"}, default "auto"
        ``"auto"`` takes the fastest that runs; a named backend that cannot run raises, it never falls back.
        ``"native"``, the compiled kernels of attlas for dot products on a CPU, counts for reads too: those
        that the kernels do not compute are done tile by tile, exact as well.
        ``"flex"``, torch's FlexAttention, exists on GPUs only, and is compiled for each kind of mask and score when
        it is first needed. ``"triton"``, the kernels of attlas for GPUs, counts for reads too, as ``"native"``.
        A plan is refused for the problem, never for its numbers: where NaN or infinity is more than a kernel
        can sum, tiles give what ``"reference"`` gives, whichever backend is named.
    rows, columns : int, optional
        Size of a tile in queries and keys. The default fits tile and scratch memory to `cells`.
    cells : int, optional
        Numbers of scratch memory that one step may hold, some four tiles. The default is 16 Mi on a CPU
        (64 MiB in float32), 64 Mi elsewhere.
    gathered_bytes : int, optional
        Memory for the keys and values that a rank gathers at a time, where queries are divided over ranks. Where all
        heads take more, they are gathered and released one group of heads at a time. The default is 8 GiB.

    Raises
    ------
    ShapeError
        If `backend` is unknown or a size is not above 0.

    See Also
    --------
    attlas.explain : says which backend runs and why the others do not.

    Notes
    -----
    Tiles as wide as a row are fastest on a CPU: one product gives log-sum-exp and weights at once. The
    kernels of attlas choose their own tiles. The environment variable ``ATTLAS_NATIVE`` names the
    instruction set that they use: ``baseline``, ``avx2``, ``avx512``, ``amx``, or ``none`` to do without.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k = torch.randn(100, 8), torch.randn(300, 8)
    >>> small = attlas.attend(q, k, plan=attlas.Plan(backend="tiled", rows=7, columns=11))
    >>> bool(torch.allclose(small.lse, attlas.attend(q, k).lse, atol=1e-5))
    True
    """

    backend: str = "auto"
    rows: int | None = None
    columns: int | None = None
    cells: int | None = None
    gathered_bytes: int | None = None

    @public("Plan()")
    def __post_init__(self) -> None:
        # Raise a ShapeError for an unknown backend, or a size that is no count.
        if self.backend not in ("auto", *BACKENDS):
            *names, last = BACKENDS
            rule = "backend must be 'auto', " + ", ".join(map(repr, names)) + f" or {last!r}."
            fix = "leave backend out; attlas.explain(A) tells what runs."
            raise ShapeError(rule, f"backend = {self.backend!r}", fix)
        for name in ("rows", "columns", "cells", "gathered_bytes"):
            size = getattr(self, name)
            if size is not None:
                whole_number(name, size, f"leave {name} out for the size that suits this device.")

    def budget(self, device_type: str) -> int:
        """Return how many numbers one step may hold on this kind of device."""
        return self.cells or (16 << 20 if device_type == "cpu" else 64 << 20)
