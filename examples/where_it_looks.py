"""Where in a picture does it look? Train an attention pooling on pictures that are drawn here, and see its map.

Each picture is noise with one bright square, and the question is the colour of the square. Nobody tells the model where
the square is: it learns to look there, because the answer is nowhere else. About ten seconds on a CPU.

    python examples/where_it_looks.py                 # learns where to look, writes where-it-looks.png
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import attlas

SIDE, PATCH = 12, 8  # patches of a side of a picture, pixels of a side of a patch
GRID = {"grid": (SIDE, SIDE), "tokens": (0, SIDE**2)}
COLOURS = torch.tensor([[0.95, 0.3, 0.2], [0.2, 0.8, 0.3], [0.25, 0.45, 0.95], [0.95, 0.85, 0.2]])


def pictures(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw pictures, (count, height, width, 3); return the colour of each square and the patch that it fills."""
    drawn = 0.35 + 0.25 * torch.rand(count, SIDE * PATCH, SIDE * PATCH, 3, generator=generator)
    colours = torch.randint(len(COLOURS), (count,), generator=generator)
    places = torch.randint(SIDE, (count, 2), generator=generator)
    for picture, colour, (row, column) in zip(drawn, colours, places.tolist(), strict=True):
        picture[row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] = COLOURS[colour]
    return drawn, colours, places


class Looks(nn.Module):
    """One learned query looks at the patches of a picture, and tells a colour."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, 1, size) / size**0.5)
        self.keys, self.values = nn.Linear(3 * PATCH**2, size), nn.Linear(3 * PATCH**2, size)
        self.tells = nn.Linear(size, len(COLOURS))

    def forward(self, drawn: Tensor) -> Tensor:
        patches = drawn.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2).unsqueeze(1) - 0.5
        query = self.query.expand(len(drawn), -1, -1, -1)
        return self.tells(attlas.attention(query, torch.tanh(self.keys(patches)), self.values(patches))[:, 0, 0])


def on_squares(atlas: attlas.Atlas, places: Tensor) -> float:
    """Return the mean share of the weight of the query that lies on the square of each picture."""
    found = [atlas.image_map(0, 0, query=-1, sequence=each, **GRID).weights for each in range(len(places))]
    return sum(
        float(weights[row, column]) for weights, (row, column) in zip(found, places.tolist(), strict=True)
    ) / len(places)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, record before and after, print and draw what was found."""
    parser = argparse.ArgumentParser(description="Where in a picture does a model look?")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("where-it-looks.png"))
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model, generator = Looks(), torch.Generator().manual_seed(1)
    tested, colours, places = pictures(64, torch.Generator().manual_seed(2))

    def measured() -> tuple[attlas.Atlas, float, float]:
        with attlas.record(model, images=tested[:1]) as atlas, torch.no_grad():
            right = (model(tested).argmax(-1) == colours).float().mean()
        return atlas, float(right), on_squares(atlas, places)

    _, guessed, before = measured()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(options.steps):
        drawn, wanted, _ = pictures(32, generator)
        loss = nn.functional.cross_entropy(model(drawn), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    atlas, right, after = measured()
    print(f"right answers           {guessed:.0%} -> {right:.0%}")
    print(f"weight on the square    {before:.1%} -> {after:.1%}")
    found = atlas.image_map(0, 0, query=-1, **GRID)
    found.save(options.out, atlas.images[0], title="what the trained query looks at")
    return {"guessed": guessed, "right": right, "before": before, "after": after}


if __name__ == "__main__":
    main()
