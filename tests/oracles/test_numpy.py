"""Kernel regression written with numpy alone: Nadaraya-Watson, row by row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import attlas
from attlas import Plan

Array = np.ndarray

KERNELS: dict[str, tuple[Callable[[Array], Array], Callable[[float], attlas.Score]]] = {
    "Gaussian": (lambda u: np.exp(-0.5 * (u**2).sum(-1)), attlas.Gaussian),
    "Laplace": (lambda u: np.exp(-np.abs(u).sum(-1)), attlas.Laplace),
    "Boxcar": (lambda u: (np.linalg.norm(u, axis=-1) < 1).astype(float), attlas.Boxcar),
    "Epanechnikov": (lambda u: np.maximum(1 - (u**2).sum(-1), 0), attlas.Epanechnikov),
    "Triangular": (lambda u: np.maximum(1 - np.linalg.norm(u, axis=-1), 0), attlas.Triangular),
}


def nadaraya_watson(x: Array, points: Array, values: Array, h: float, kernel: Callable[[Array], Array]) -> Array:
    out = np.zeros((len(x), values.shape[1]))
    for row, place in enumerate(x):
        weights = kernel((place - points) / h)
        if weights.sum() > 0:
            out[row] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize("name", list(KERNELS))
@pytest.mark.parametrize(("d", "h"), [(1, 0.4), (3, 1.3), (10, 4.0)])
@pytest.mark.parametrize("plan", [Plan(), Plan("tiled", rows=7, columns=9)], ids=["auto", "tiled"])
def test_nadaraya_watson(name: str, d: int, h: float, plan: Plan) -> None:
    numbers = np.random.default_rng(0)
    x, points, values = numbers.normal(size=(30, d)), numbers.normal(size=(50, d)), numbers.normal(size=(50, 2))
    kernel, score = KERNELS[name]
    wanted = nadaraya_watson(x, points, values, h, kernel)
    found = attlas.attention(*map(torch.from_numpy, (x, points, values)), score=score(h), plan=plan)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-9, atol=1e-12)
    # Leave one out: each point is predicted from the others.
    wanted = np.stack(
        [nadaraya_watson(p[None], np.delete(points, i, 0), np.delete(values, i, 0), h, kernel)[0]
         for i, p in enumerate(points)]
    )  # fmt: skip
    p, y = torch.from_numpy(points), torch.from_numpy(values)
    found = attlas.attention(p, p, y, score=score(h), mask=~attlas.Window(0, 0), plan=plan)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-9, atol=1e-12)


def test_a_bandwidth_for_each_coordinate() -> None:
    numbers = np.random.default_rng(0)
    x, points, values = numbers.normal(size=(30, 3)), numbers.normal(size=(50, 3)), numbers.normal(size=(50, 2))
    h = np.array([0.5, 1.0, 3.0])
    wanted = nadaraya_watson(x / h, points / h, values, 1.0, KERNELS["Gaussian"][0])
    found = attlas.attention(*map(torch.from_numpy, (x, points, values)), score=attlas.Gaussian(h.tolist()))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-9, atol=1e-12)
