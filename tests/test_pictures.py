"""Pictures: what is drawn, the palette, files that are whole or not there."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import attlas
from attlas import pictures
from attlas.errors import MissingExtraError, ShapeError


def matrix(*leading: int, m: int = 40, n: int = 40, mask: attlas.Mask | None = None) -> attlas.AttentionMatrix:
    return attlas.attend(torch.randn(*leading, m, 8), torch.randn(*leading, n, 8), mask=mask or attlas.Causal())


def images(figure: object) -> list[np.ndarray]:
    return [ax.images[0].get_array() for ax in figure.axes if ax.images]


def test_draws_the_weights_cell_by_cell() -> None:
    A = matrix()
    (image,) = images(A.plot())
    allowed = torch.ones(40, 40, dtype=torch.bool).tril().numpy()
    assert (image.mask == ~allowed).all()
    np.testing.assert_allclose(image.data[allowed], A.to_dense().clamp(pictures.FLOOR, 1).numpy()[allowed], atol=1e-6)


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_blocks_are_pooled(pool: str) -> None:
    A = matrix(m=60, n=60)
    (image,) = images(A.plot(size=20, pool=pool))
    dense = A.to_dense().unflatten(0, (20, 3)).unflatten(2, (20, 3)).movedim(1, 2)
    allowed = torch.ones(60, 60).tril().unflatten(0, (20, 3)).unflatten(2, (20, 3)).movedim(1, 2).sum((2, 3))
    expected = dense.amax((2, 3)) if pool == "max" else dense.sum((2, 3)) / allowed.clamp_min(1)
    seen = (allowed > 0).numpy()
    np.testing.assert_allclose(image.data[seen], expected.clamp(pictures.FLOOR, 1).numpy()[seen], atol=1e-6)
    assert (image.mask == ~seen).all()


@pytest.mark.parametrize(("leading", "maps"), [((), 1), ((3,), 3), ((2, 3), 6), ((1, 4), 4), ((1, 1, 2, 2), 4)])
def test_one_map_for_each_head_and_one_scale(leading: tuple[int, ...], maps: int) -> None:
    figure = matrix(*leading, m=30, n=50, mask=attlas.Window(3, 3)).plot(size=16, title="all $heads$")
    assert len(images(figure)) == maps
    assert len(figure.axes) == maps + 1
    limits = {ax.images[0].get_clim() for ax in figure.axes if ax.images}
    assert limits == {(pictures.FLOOR, 1.0)}


def test_a_part_that_is_a_tensor_has_labels() -> None:
    labels = ["def", "␣f", "(", "$x$", "\n", "🦊", ")", "\N{REPLACEMENT CHARACTER}"]
    figure = pictures.plot(matrix()[10:18, 10:18], labels=labels)
    figure.canvas.draw()  # no warning about characters that the font does not have
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert shown[:5] == [*labels[:4], "↵"]
    assert shown[5] == "\N{WHITE SQUARE}"


def test_a_picture_of_a_long_matrix_takes_little_memory() -> None:
    A = matrix(m=20_000, n=20_000)  # 1.6 GB, if it were stored
    (image,) = images(A.plot(size=50))
    assert image.shape == (50, 50)


def test_the_palette_falls_in_lightness() -> None:
    colours = pictures.depth()(np.linspace(0, 1, 256))[:, :3]
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    lightness = np.where(luminance > 0.008856, 116 * np.cbrt(luminance) - 16, 903.3 * luminance)
    steps = -np.diff(lightness)
    assert (steps > 0).all()
    assert steps.max() < 3 * steps.mean()  # no sudden jumps: equal steps look about equal
    assert tuple(round(255 * c) for c in colours[0]) == (0xF4, 0xF8, 0xF6)


def test_pyplot_is_not_touched() -> None:
    matrix().plot()
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    figure = matrix().plot()
    for name in ("a.png", "a.svg", "a.pdf"):
        assert pictures.save(figure, tmp_path / name, dpi=50).stat().st_size > 1000
    before = (tmp_path / "a.png").read_bytes()

    def broken(name: str, **_: object) -> None:
        Path(name).write_bytes(b"half")
        raise OSError("disk full")

    figure.savefig = broken
    with pytest.raises(OSError, match="disk full"):
        pictures.save(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.pdf", "a.png", "a.svg"]


def message(call: object) -> str:
    with pytest.raises(ShapeError) as error:
        call()
    return str(error.value)


def test_messages() -> None:
    A = matrix(2, 3)
    assert message(lambda: A.plot(pool="median")) == (
        'plot(): pool must be "max" or "mean".\n  found: pool = \'median\'\n  fix: leave pool out for max.'
    )
    assert message(lambda: A.plot(size=0)) == (
        "plot(): size must be a whole number above 0.\n  found: size = 0\n  fix: size=256"
    )
    assert message(lambda: matrix(2, 2, 2).plot()) == (
        "plot(): at most two leading axes can be drawn, with 1024 heads in all and no empty axis.\n"
        "  A: shape (2, 2, 2, 40, 40)\n"
        "  found: 8 heads in axes (2, 2, 2)\n"
        "  fix: pick some first: A[0].plot() or A[0, 3].plot()."
    )
    assert message(lambda: matrix().plot(labels=["a"])) == (
        "plot(): labels need one head of at most 64 × 64 cells, and one label for each token.\n"
        "  A: shape (40, 40)\n"
        "  labels: 1 labels\n"
        "  found: 1 labels, 40 queries, 40 keys, 1 heads\n"
        "  fix: A[0, 3, :40, :40] is a tensor that can be drawn with labels=tokens[:40]."
    )


def test_missing_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError) as error:
        matrix().plot()
    assert str(error.value) == (
        "attlas.pictures: matplotlib must be installed to draw.\n"
        "  found: no module named matplotlib\n"
        "  fix: pip install 'attlas[plot]'"
    )
