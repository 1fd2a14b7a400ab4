"""The search for bandwidths: a grid of one shared scale, then L-BFGS on the logarithm of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

from attlas.estimators.loo import Objective

Floats = NDArray[np.float64]

# Multiples of the starting bandwidth that are looked at, and those between which a search may move. A bandwidth at
# the upper end gives all neighbours one weight: its feature is left out, as it should be where it tells nothing.
_SCALES = 2.0 ** np.linspace(-5.0, 5.0, 26)
_LOWEST, _HIGHEST = np.log(2.0**-9), np.log(2.0**11)
_JUMP = 1.0  # standard deviation of the logarithms of random starts
_COARSE = 100.0  # how much less exact the searches before the last one may be


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
class Found:
    """What a search found, and the way there.

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
    def nothing(cls, features: int) -> Found:
        """Return what a search finds that has nothing to look at."""
        none = np.empty(0)
        return cls(np.zeros(features), 0, none, none, np.empty((0, features)), none)

    def as_path(self, start: Floats) -> dict[str, Floats]:
        """Return the way there in the units of the features, from the bandwidths that it started with."""
        visited = np.exp(self.visited) * start
        return {"scale": self.grid, "loss": self.grid_loss, "bandwidth": visited, "bandwidth_loss": self.visited_loss}


class _Descent:
    """One search from one start, with a record of what it looked at."""

    def __init__(self, objective: Objective, settings: Settings, tol: float, name: str) -> None:
        self.objective, self.settings, self.tol, self.name = objective, settings, tol, name
        self.points: list[Floats] = []
        self.losses: list[float] = []

    def run(self, start: Floats) -> Any:
        """Return scipy's result; its `x` is the best point seen, whatever the search ended with."""
        start = np.clip(start, _LOWEST, _HIGHEST)
        bounds = [(_LOWEST, _HIGHEST)] * len(start)
        if self.settings.smooth:
            options: dict[str, Any] = {"maxiter": self.settings.max_iter, "ftol": self.tol, "gtol": 1e-9}
            result = minimize(self._loss_and_slope, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        else:
            simplex = np.vstack([start, start + 0.4 * np.eye(len(start))])
            options = {
                "maxiter": self.settings.max_iter, "fatol": self.tol, "xatol": 1e-2,
                "initial_simplex": np.clip(simplex, _LOWEST, _HIGHEST),
            }  # fmt: skip
            result = minimize(self._loss, start, method="Nelder-Mead", bounds=bounds, options=options)
        best = int(np.argmin(self.losses))
        result.x, result.fun = self.points[best], self.losses[best]
        return result

    def _evaluate(self, point: Floats, *, gradient: bool) -> tuple[float, Floats]:
        loss, slope = self.objective.value(torch.from_numpy(point.copy()), gradient=gradient)
        self.points.append(point.copy())
        self.losses.append(loss)
        self.settings.report(f"{self.name}, evaluation {len(self.losses)}, leave-one-out loss {min(self.losses):.4g}")
        return loss, slope.numpy()

    def _loss_and_slope(self, point: Floats) -> tuple[float, Floats]:
        loss, slope = self._evaluate(point, gradient=True)
        # scipy compares decreases with 1: losses are given in units of the first.
        unit = self.losses[0] if self.losses[0] > 0 else 1.0
        return loss / unit, slope / unit

    def _loss(self, point: Floats) -> float:
        return self._evaluate(point, gradient=False)[0]


def search(stages: Sequence[Objective], features: int, settings: Settings, warm: Floats | None = None) -> Found:
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
            f"grid of {len(_SCALES)} scales for {features} {'bandwidth' if features == 1 else 'bandwidths'}"
        )
        grid, losses = _SCALES.copy(), stages[0].grid(torch.from_numpy(_SCALES)).numpy()
        starts = _starts(losses, features, settings)
        if not losses.max() > 0:  # nothing to learn: every bandwidth predicts without an error
            return Found(starts[0], 1, grid, losses, starts[0][None], losses[:1])
        best, steps = _best_end(stages[0], starts, settings)
        stages, name = stages[1:] or stages, "last search"
    for stage in stages:
        last = _Descent(stage, settings, settings.tol, name)
        end = last.run(best)
        best, steps = end.x, steps + int(end.nit)
    return Found(best, max(1, steps), grid, losses, np.stack(last.points), np.asarray(last.losses))


def _best_end(objective: Objective, starts: list[Floats], settings: Settings) -> tuple[Floats, int]:
    """Return the best point that coarse descents from several starts end at, and their iterations together."""
    ends = [
        _Descent(objective, settings, settings.tol * _COARSE, f"start {number} of {len(starts)}").run(start)
        for number, start in enumerate(starts, 1)
    ]
    return min(ends, key=lambda end: float(end.fun)).x, sum(int(end.nit) for end in ends)


def _starts(losses: Floats, features: int, settings: Settings) -> list[Floats]:
    """Return where descents start, the best first."""
    padded = np.concatenate([[np.inf], losses, [np.inf]])
    valleys = np.flatnonzero((losses <= padded[:-2]) & (losses <= padded[2:]))
    # Of equal losses the one nearest to the rule of thumb comes first.
    order = sorted(valleys.tolist(), key=lambda place: (losses[place], abs(np.log(_SCALES[place]))))
    found = [np.full(features, np.log(_SCALES[place])) for place in order[:2]]
    if features > 1:
        jumps = settings.random.normal(scale=_JUMP, size=(settings.n_restarts, features))
        found += [found[0] + jump for jump in jumps]
    return found
