"""The search for bandwidths: a grid of one shared scale, then L-BFGS on the logarithm of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

from attlas.estimators.loo import Objective

Floats = NDArray[np.float64]

# Multiples of the starting bandwidth in the grid, and those between which a search may move. A bandwidth at
# the upper end gives all neighbours one weight: its feature is left out, as it should be where it tells nothing.
_GRID_SCALES = 2.0 ** np.linspace(-5.0, 5.0, 26)
_LOWEST_LOG, _HIGHEST_LOG = np.log(2.0**-9), np.log(2.0**11)
_START_DEVIATION = 1.0  # standard deviation of the logarithms of random starts
_COARSE_FACTOR = 100.0  # how much less exact the searches before the last one may be


@dataclass(frozen=True)
class Settings:
    """How long to search.

    Attributes
    ----------
    max_iter : int
        Iterations of L-BFGS from each start.
    tol : float
        Relative decrease of the loss below which a search stops.
    n_restarts : int
        Random starts beside the best points of the grid.
    random : numpy.random.RandomState
        Where random starts come from.
    smooth : bool
        Whether the loss has a gradient; a search of Nelder and Mead takes its place else.
    report : callable, optional
        Called with a text before the grid and after each evaluation.
    """

    max_iter: int
    tol: float
    n_restarts: int
    random: np.random.RandomState
    smooth: bool = True
    report: Callable[[str], object] = lambda text: None


@dataclass(frozen=True)
class SearchResult:
    """The bandwidths that a search found, and every loss that it computed.

    Attributes
    ----------
    log_scale : ndarray, shape (d,)
        Logarithm of the multiple of each starting bandwidth.
    iterations : int
        Iterations from all starts together.
    grid, grid_loss : ndarray, shape (g,)
        Shared multiples, and their loss.
    visited, visited_loss : ndarray, shape (k, d) and (k,)
        Every point that the last search looked at.
    """

    log_scale: Floats
    iterations: int
    grid: Floats
    grid_loss: Floats
    visited: Floats
    visited_loss: Floats

    @classmethod
    def empty(cls, features: int) -> SearchResult:
        """Return the result of a search without anything to search."""
        none = np.empty(0)
        return cls(np.zeros(features), 0, none, none, np.empty((0, features)), none)

    def as_path(self, start: Floats) -> dict[str, Floats]:
        """Return grid and visited points in the units of the features, given the starting bandwidths."""
        visited = np.exp(self.visited) * start
        return {"scale": self.grid, "loss": self.grid_loss, "bandwidth": visited, "bandwidth_loss": self.visited_loss}


class _DescentEnd(NamedTuple):
    """Where a descent ended: the best point that it has seen, its loss, and the iterations of scipy."""

    point: Floats
    loss: float
    iterations: int


def _descend_from(
    objective: Objective, start: Floats, settings: Settings, tol: float, name: str
) -> tuple[_DescentEnd, list[Floats], list[float]]:
    """Search from one start; also return every point that was looked at, and its loss."""
    points: list[Floats] = []
    losses: list[float] = []
    smooth = settings.smooth

    def evaluate(point: Floats) -> Any:
        """Return the loss at a point, with its gradient where it is smooth, as scipy asks for it; note the loss."""
        loss, slope = objective.value(torch.from_numpy(point.copy()), gradient=smooth)
        points.append(point.copy())
        losses.append(loss)
        settings.report(f"{name}, evaluation {len(losses)}, leave-one-out loss {min(losses):.4g}")
        # scipy compares decreases with 1: losses are given in units of the first.
        unit = losses[0] if losses[0] > 0 else 1.0
        return (loss / unit, slope.numpy() / unit) if smooth else loss

    start = np.clip(start, _LOWEST_LOG, _HIGHEST_LOG)
    if smooth:
        options: dict[str, Any] = {"ftol": tol, "gtol": 1e-9}
    else:
        # Corners 0.4 apart: half as wide again in bandwidth (a point holds logarithms).
        simplex = np.vstack([start, start + 0.4 * np.eye(len(start))])
        options = {
            "fatol": tol,
            "xatol": 1e-2,
            "initial_simplex": np.clip(simplex, _LOWEST_LOG, _HIGHEST_LOG),
        }
    end = minimize(
        evaluate, start, jac=smooth, method="L-BFGS-B" if smooth else "Nelder-Mead",
        bounds=[(_LOWEST_LOG, _HIGHEST_LOG)] * len(start), options={"maxiter": settings.max_iter, **options},
    )  # fmt: skip
    best = int(np.argmin(losses))
    return _DescentEnd(points[best], losses[best], int(end.nit)), points, losses


def search(stages: Sequence[Objective], features: int, settings: Settings, warm: Floats | None = None) -> SearchResult:
    """Return the bandwidths of least loss that a grid and several descents find.

    Parameters
    ----------
    stages : sequence of Objective
        Losses from that of few rows in little precision, which is looked at often, to the one that is minimised.
    features : int
        Number of bandwidths.
    settings : Settings
        How long to search.
    warm : ndarray, shape (features,), optional
        Logarithms from which the last descent starts; grid and other starts are then left out.

    Notes
    -----
    The loss has several local minima. Descents start at the best point of the grid, at its second-best local minimum
    and at `n_restarts` random points about the best; the best of all is where the last descent starts.
    """
    if warm is not None:
        grid = losses = np.empty(0)
        best, steps, stages, name = warm, 0, stages[-1:], "warm start"
    else:
        settings.report(
            f"grid of {len(_GRID_SCALES)} scales for {features} {'bandwidth' if features == 1 else 'bandwidths'}"
        )
        grid, losses = _GRID_SCALES.copy(), stages[0].grid(torch.from_numpy(_GRID_SCALES)).numpy()
        starts = _starts_of_descents(losses, features, settings)
        if not losses.max() > 0:  # nothing to learn: every bandwidth predicts without an error
            return SearchResult(starts[0], 1, grid, losses, starts[0][None], losses[:1])
        ends = [
            _descend_from(
                stages[0], start, settings, settings.tol * _COARSE_FACTOR, f"start {number} of {len(starts)}"
            )[0]
            for number, start in enumerate(starts, 1)
        ]
        best, steps = min(ends, key=lambda end: end.loss).point, sum(end.iterations for end in ends)
        stages, name = stages[1:] or stages, "last search"
    for stage in stages:
        end, points, visited = _descend_from(stage, best, settings, settings.tol, name)
        best, steps = end.point, steps + end.iterations
    return SearchResult(best, max(1, steps), grid, losses, np.stack(points), np.asarray(visited))


def _starts_of_descents(losses: Floats, features: int, settings: Settings) -> list[Floats]:
    """Return where descents start, the best first: the two best valleys of the grid, `losses`, and random points."""
    padded = np.concatenate([[np.inf], losses, [np.inf]])
    valleys = np.flatnonzero((losses <= padded[:-2]) & (losses <= padded[2:]))
    # Of equal losses the one nearest to the rule of thumb comes first.
    order = sorted(valleys.tolist(), key=lambda index: (losses[index], abs(np.log(_GRID_SCALES[index]))))
    starts = [np.full(features, np.log(_GRID_SCALES[index])) for index in order[:2]]
    if features > 1:
        jumps = settings.random.normal(scale=_START_DEVIATION, size=(settings.n_restarts, features))
        starts += [starts[0] + jump for jump in jumps]
    return starts
