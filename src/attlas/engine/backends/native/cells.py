"""Statistics of weights that are handed over tile by tile: one pass over each tile, signed weights too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attlas.engine.backends.native import library
from attlas.engine.problem import Problem
from attlas.foundation.tiles import Tile

_C_DTYPES = {torch.float32: "FLOAT32", torch.float64: "FLOAT64"}
_SUMS_OF_KERNEL = ("mass", "column_mass", "offsets", "picture_sum")


class CellSums:
    """Sums, maxima and largest weights over all tiles so far.

    A picture is the matrix in blocks, with one sum or one maximum for each.

    Parameters
    ----------
    problem : Problem
        The matrix.
    wanted : mapping
        Names of `attlas.engine.given.NAMES` and what they need; the blocks of both pictures are the same.

    Notes
    -----
    Sums over tiles are in float64.
    """

    def __init__(self, problem: Problem, wanted: Mapping[str, Any]) -> None:
        self.kernels = library.current()
        self.problem, self.k = problem, wanted.get("largest", 0)
        batch, heads, m, n = problem.shape
        edges = wanted.get("picture_sum", wanted.get("picture_max", ([0], [0])))
        self.edges = [torch.tensor(list(own), dtype=torch.int64) for own in edges]
        blocks = tuple(len(own) - 1 for own in self.edges)

        def filled(value: float, *sizes: int, dtype: torch.dtype = problem.dtype) -> Tensor:
            return torch.full((batch, heads, *sizes), value, dtype=dtype)

        self.found = {"mass": filled(0.0, m, dtype=torch.float64)}
        if "largest" in wanted:
            self.found["top_values"] = filled(-torch.inf, m, self.k)
            self.found["top_keys"] = filled(-1, m, self.k, dtype=torch.int32)
        if "column_max" in wanted:
            self.found["column_max"] = filled(-torch.inf, n)
        if "picture_max" in wanted:
            self.found["picture_max"] = filled(0.0, *blocks)
        for name, sizes in (("column_mass", (n,)), ("offsets", (max(m + n - 1, 0),)), ("picture_sum", blocks)):
            if name in wanted:
                self.found[name] = filled(0.0, *sizes, dtype=torch.float64)

    @staticmethod
    def unsupported(problem: Problem) -> str | None:
        """Return why no kernel sums these weights; None where one does."""
        if problem.device.type != "cpu" or problem.dtype not in _C_DTYPES:
            return "there is no kernel for their device or dtype"
        return library.current().why_not

    def add(self, at: Tile, cells: Tensor | tuple[Tensor, Tensor]) -> bool:
        """Add a tile; those of some rows come from left to right. False where a weight is NaN or infinite.

        Parameters
        ----------
        at : Tile
            Its place.
        cells : Tensor, or pair of Tensor
            The weights, shape (batches, heads, rows, columns), or two factors ``(left, right)`` with the weights
            ``left @ right.mT``.
        """
        if isinstance(cells, Tensor):
            return self._call_kernel(at, at.columns, cells=cells)
        return self._call_kernel(at, at.columns, left=cells[0], right=cells[1])

    def end_rows(self, at: Tile, seen: Sequence[range]) -> None:
        """End some rows: the columns that no tile had, which are all but those that were seen, have weights 0."""
        unseen, last = [], 0
        for columns in (*seen, range(at.n, at.n)):
            unseen += [range(last, columns.start)] if columns.start > last else []
            last = columns.stop
        b, h, _ = at.place
        if "column_max" in self.found:
            for columns in unseen:
                self.found["column_max"][b, h, columns.start : columns.stop].clamp_(min=0.0)
        if self.k and unseen:
            # Among the k largest of a row may be such zeros: the first k unseen keys are enough for that.
            keys = torch.cat([torch.arange(own.start, min(own.stop, own.start + self.k)) for own in unseen])
            empty = torch.empty(len(at.batches), len(at.heads), len(at.rows), 0, dtype=self.problem.dtype)
            self._call_kernel(at, range(0), keys[: self.k].to(torch.int32), cells=empty)

    def results(self) -> dict[str, Tensor]:
        """Return what was found of all tiles, by the names of results."""
        found = {name: t.to(self.problem.dtype) if name in _SUMS_OF_KERNEL else t for name, t in self.found.items()}
        return {name: t.to(torch.int64) if name == "top_keys" else t for name, t in found.items()}

    def _call_kernel(self, at: Tile, columns: range, zero_keys: Tensor | None = None, **tensors: Tensor) -> bool:
        """Call the kernel on one tile; return False where a weight is NaN or infinite.

        `zero_keys` are keys that no tile had, whose weights are 0.
        """
        _, heads, m, n = self.problem.shape
        for name, t in tensors.items():
            t = t.expand(len(at.batches), len(at.heads), -1, -1)
            tensors[name] = t if t.stride(-1) == 1 or t.shape[-1] < 2 else t.contiguous()
        first = at.batches.start * heads + at.heads.start
        # Each result from the tile's first batch and head on; the kernel adds to what it holds.
        places = {name: t.data_ptr() + first * t.stride(1) * t.element_size() for name, t in self.found.items()}
        status = self.kernels.call(
            "cell_sums",
            **self.kernels.tensors4(**tensors),
            **places,
            batch=len(at.batches), heads=len(at.heads), rows=len(at.rows), columns=len(columns),
            d=tensors["left"].shape[-1] if "left" in tensors else 0,
            type=self.kernels.codes[_C_DTYPES[self.problem.dtype]], threads=torch.get_num_threads(),
            all_heads=heads, m=m, n=n, first_row=at.rows.start, first_column=columns.start, k_largest=self.k,
            row_edges=self.edges[0].data_ptr(), column_edges=self.edges[1].data_ptr(),
            picture_rows=len(self.edges[0]) - 1, picture_columns=len(self.edges[1]) - 1,
            zero_keys=None if zero_keys is None else zero_keys.data_ptr(),
            zeros=0 if zero_keys is None else len(zero_keys),
        )  # fmt: skip
        return status == self.kernels.codes["DONE"]
