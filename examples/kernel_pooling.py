"""Kernel pooling learned by gradient: attention with a Gaussian score is regression, and its bandwidth can be trained.

Points (x, y) are keys and values, a new x is a query, and softmax(-½ ‖(q - k) / h‖²) @ y is the Nadaraya-Watson
estimate. The bandwidth h decides everything. Here it starts far too wide, and gradient descent finds it on the error
of leaving one out: each point is predicted from all others, by a mask that hides the point itself.

    python examples/kernel_pooling.py                 # learns h, writes kernel-pooling.png
    python examples/kernel_pooling.py --quick         # fewer steps
"""

import argparse
from pathlib import Path

import torch

import attlas
from attlas import pictures, stats

START = 0.5  # the fixed bandwidth that the learned one is compared with
NOISE = 0.4


def truth(x: torch.Tensor) -> torch.Tensor:
    """What the points come from: steep at first, then a slow wave."""
    return 2.0 * torch.sin(x) + x.pow(0.8)


def data(points: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw places and noisy heights, shapes (points, 1)."""
    generator = torch.Generator().manual_seed(seed)
    x = 5.0 * torch.rand(points, 1, generator=generator).sort(dim=0).values
    return x, truth(x) + NOISE * torch.randn(points, 1, generator=generator)


def left_out_error(score: attlas.Score, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean squared error where each point is predicted from all others: the diagonal is masked."""
    others = attlas.from_function(lambda b, h, i, j: i != j)
    return (attlas.attention(x, x, y, score=score, mask=others) - y).square().mean()


def learn(x: torch.Tensor, y: torch.Tensor, steps: int) -> tuple[attlas.Gaussian, list[float]]:
    """Fit the bandwidth; returns the score and the error at each step."""
    score = attlas.Gaussian(START, learn=True)
    optimizer = torch.optim.Adam(score.parameters(), lr=0.1)
    errors = []
    for _ in range(steps):
        loss = left_out_error(score, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(float(loss.detach()))
    return score, errors


def bandwidth(score: attlas.Gaussian) -> float:
    """Return h as a number."""
    return float(score.bandwidth.detach())


def draw(x: torch.Tensor, y: torch.Tensor, scores: dict[str, attlas.Gaussian], out: Path) -> Path:
    """Draw fit and weights for each bandwidth, one above the other."""
    grid = torch.linspace(0, 5, 120).unsqueeze(1)
    figure = pictures.sheet(10.4, 7.6)
    axes = figure.subplots(2, len(scores), squeeze=False)
    for column, (name, score) in enumerate(scores.items()):
        A = attlas.attend(grid, x, score=score).detach()
        top, below = axes[0, column], axes[1, column]
        top.scatter(x, y, s=13, facecolors="none", edgecolors=pictures.SOFT, linewidths=0.9, label="points")
        top.plot(grid, truth(grid), color=pictures.SOFT, linestyle=(0, (4, 3)), linewidth=1.2, label="truth")
        top.plot(grid, A @ y, color=pictures.ACCENT, linewidth=2.2, label="kernel pooling")
        top.set_title(f"{name}: h = {bandwidth(score):.3f}", fontsize=11, loc="left", color=pictures.INK)
        top.set_xlabel("x", fontsize=9)
        top.legend(fontsize=8, frameon=False, loc="lower right")
        top.tick_params(labelsize=8, colors=pictures.SOFT)
        pictures.draw(below, A[:, :], extent=(0, len(x), 5, 0))
        below.set_box_aspect(0.75)
        keys = float(stats.effective_keys(A).mean())
        below.set_title(f"weights: {keys:.1f} effective keys a query", fontsize=9.5, loc="left", color=pictures.INK)
        below.set_xlabel("key: the points in order of x", fontsize=8.5)
        below.set_ylabel("query x", fontsize=8.5)
    pictures.scale(figure, list(axes[1]))
    return pictures.save(figure, out, dpi=160)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("kernel-pooling.png"), help="picture (default: %(default)s)")
    parser.add_argument("--points", type=int, default=100, help="points to learn from (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    options = parser.parse_args(argv)
    torch.manual_seed(0)

    x, y = data(options.points, seed=0)
    score, errors = learn(x, y, 80 if options.quick else 150)
    fixed = attlas.Gaussian(START)

    # The judge: the best of a fine grid, by the same error, and the distance to the truth, which training never saw.
    grid = torch.logspace(-2, 0.5, 80)
    by_grid, best = min(
        ((h, float(left_out_error(attlas.Gaussian(h), x, y))) for h in grid.tolist()), key=lambda pair: pair[1]
    )
    new = torch.linspace(0.05, 4.95, 500).unsqueeze(1)
    distance = {
        name: float((attlas.attention(new, x, y, score=s) - truth(new)).square().mean().sqrt().detach())
        for name, s in (("fixed", fixed), ("learned", score))
    }

    print(f"{len(x)} noisy points; bandwidth learned by gradient on the error of leaving one out")
    print(f"  bandwidth        {START:.3f} -> {bandwidth(score):.3f}   (best of a grid of 80: {by_grid:.3f})")
    print(f"  left-out error   {errors[0]:.3f} -> {errors[-1]:.3f}   (there: {best:.3f}; noise alone: {NOISE**2:.3f})")
    print(f"  off the truth    {distance['fixed']:.3f} -> {distance['learned']:.3f}   (root mean square, new places)")
    print(f"  {draw(x, y, {'fixed': fixed, 'learned': score}, options.out)}")
    return {
        "bandwidth": bandwidth(score),
        "grid": by_grid,
        "best": best,
        "first": errors[0],
        "last": errors[-1],
        **distance,
    }


if __name__ == "__main__":
    main()
