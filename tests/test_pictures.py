"""Pictures: what is drawn, the palette, files that are whole or not there."""

import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.figures import faults_of
from tests.messages import refusal

import attlas
from attlas import pictures
from attlas.errors import MissingExtraError, ShapeError


def matrix(*leading: int, m: int = 40, n: int = 40, mask: attlas.Mask | None = None) -> attlas.AttentionMatrix:
    return attlas.attend(
        torch.randn(*leading, m, 8), torch.randn(*leading, n, 8), mask=attlas.Causal() if mask is None else mask
    )


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


def looks_at(key: int, m: int, n: int) -> attlas.AttentionMatrix:
    """Return a matrix with all weight on one key."""
    k = torch.zeros(n, 1)
    k[key] = 80.0
    return attlas.attend(torch.ones(m, 1), k, scale=1.0)


def drawn_columns(figure: object) -> tuple[list[int], float, float]:
    """Return the dark columns of a single map, its left edge and the width of a column as matplotlib draws them."""
    (ax,) = [ax for ax in figure.axes if ax.images]
    left, right, bottom, top = ax.images[0].get_extent()
    assert (bottom, top) == (ax.get_ylim()[0], ax.get_ylim()[1])
    (image,) = images(figure)
    return np.flatnonzero(image[0] > 0.5).tolist(), left, (right - left) / image.shape[1]


@pytest.mark.parametrize("n", [300, 384, 1000, 1500, 2000, 3000, 5000])
@pytest.mark.parametrize("size", [256, 1024])
def test_a_key_is_drawn_where_it_is(n: int, size: int) -> None:
    # Each row looks at a key of its own, and no two rows are pooled.
    keys = torch.arange(0, n, n // 40)
    A = attlas.attend(80.0 * torch.eye(n)[keys], torch.eye(n), scale=1.0)
    figure = A.plot(size=size)
    _, left, width = drawn_columns(figure)
    assert width <= -(-n // size)
    dark = images(figure)[0] > 0.5
    assert (dark.sum(1) == 1).all()
    columns = left + dark.argmax(1) * width
    assert ((columns - 1 <= keys.numpy()) & (keys.numpy() <= columns + width)).all()
    if n <= 1500:  # rows are pooled as well
        (column,), left, width = drawn_columns(looks_at(2 * n // 3, n, n).plot(size=size))
        assert left + column * width - 1 <= 2 * n // 3 <= left + (column + 1) * width


@pytest.mark.parametrize(("m", "n"), [(300, 1500), (1500, 300), (1, 5000), (5000, 1)])
def test_sides_are_pooled_apart(m: int, n: int) -> None:
    key = 2 * n // 3
    (column,), left, width = drawn_columns(looks_at(key, m, n).plot(size=256))
    assert left + column * width - 1 <= key <= left + (column + 1) * width
    (image,) = images(looks_at(key, m, n).plot(size=256))
    assert image.shape == tuple(-(-length // -(-length // 256)) for length in (m, n))


def test_equal_weights_are_one_colour() -> None:
    """No block is the largest of more cells than its neighbours: there are no bands that the data do not have."""
    torch.manual_seed(0)
    weights = torch.rand(1500, 1500)
    (image,) = images(pictures.plot(weights, size=1024))
    means = image.mean(axis=0)
    assert abs(float(means[:300].mean() - means[-300:].mean())) < 0.01


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_a_tensor_is_pooled_as_a_matrix_is(pool: str) -> None:
    A = matrix(m=301, n=130)
    allowed = A.logits[:, :] > -torch.inf
    weights = A.to_dense().masked_fill(~allowed, torch.nan)
    torch.testing.assert_close(
        pictures.blocks(weights, 100, pool), pictures.blocks(A, 100, pool), equal_nan=True, atol=1e-6, rtol=1e-5
    )


def test_masked_cells_show_the_axes_behind_them() -> None:
    """The site gives the axes another colour on its dark theme."""
    to_hex = pytest.importorskip("matplotlib.colors").to_hex
    (ax, *_) = matrix().plot().axes
    assert ax.images[0].cmap.get_bad()[3] == 0
    assert to_hex(ax.get_facecolor()) == pictures.LAND


def test_long_matrices_are_not_long_pictures() -> None:
    for m, n in ((3000, 200), (200, 3000), (5000, 1), (1, 5000)):
        width, height = looks_at(0, m, n).plot().get_size_inches()
        assert max(width, height) < 10


def test_a_notebook_shows_the_figure() -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    data, _ = formatters.DisplayFormatter().format(matrix().plot())
    assert data["image/png"].startswith(b"\x89PNG")


def test_options_are_visible() -> None:
    options = [*inspect.signature(matrix().plot).parameters]
    assert options == [*inspect.signature(pictures.plot).parameters][1:]
    assert {"rows", "columns", "log", "cmap", "ax", "labels"} <= {*options}


def test_a_window_keeps_its_positions() -> None:
    A = matrix(m=100, n=100)
    figure = A.plot(rows=slice(-30, None), columns=(10, 50), log=False, cmap="magma")
    (image,) = images(figure)
    torch.testing.assert_close(torch.tensor(image.data), A[70:, 10:50])
    assert list(figure.axes[0].images[0].get_extent()) == [10, 50, 100, 70]
    assert figure.axes[0].images[0].get_clim() == pytest.approx((0.0, float(A[70:, 10:50].max())))
    assert figure.axes[0].images[0].get_cmap().name == "magma"


def test_it_draws_into_given_axes() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert matrix().plot(ax=right, title="mine") is figure
    assert not left.images
    assert len(right.images) == 1
    assert right.get_title(loc="left") == "mine"


def test_a_rectangle_has_labels_of_its_own() -> None:
    A = matrix(m=3, n=5, mask=attlas.Window(9, 9))
    for figure in (
        A.plot(labels=(list("abc"), list("vwxyz"))),
        pictures.plot(A[:, :], labels=(list("abc"), list("vwxyz"))),
    ):
        ax = figure.axes[0]
        assert [text.get_text() for text in ax.get_yticklabels()] == list("abc")
        assert [text.get_text() for text in ax.get_xticklabels()] == list("vwxyz")


def test_other_scripts_take_the_font_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a font of Chinese installed (here, one that claims to be), its characters are not squares."""
    from types import SimpleNamespace

    from matplotlib import font_manager

    monkeypatch.setattr(
        pictures.fonts,
        "_characters_of_font",
        lambda family: frozenset("注意力" if family == "Noto Sans CJK SC" else "abc\u25a1"),
    )
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [SimpleNamespace(name="Noto Sans CJK SC")])
    figure = pictures.plot(torch.rand(3, 3), labels=["注意", "力a", "言"])
    texts = figure.axes[0].get_xticklabels()
    assert [text.get_text() for text in texts] == ["注意", "力a", "\N{WHITE SQUARE}"]
    assert texts[0].get_fontfamily() == ["monospace", "Noto Sans CJK SC"]


def test_the_scale_says_what_the_colours_are() -> None:
    def words(figure: object) -> str:
        return figure.axes[-1].get_ylabel()

    A = matrix(m=60, n=60)
    assert words(A.plot()) == "weight"
    assert words(A.plot(size=20)) == "largest weight in a block of 3 × 3"
    assert words(A.plot(size=20, pool="mean")) == "mean weight in a block of 3 × 3"
    assert words(matrix(2, m=600, n=60).plot()) == "largest weight in a block of 3 × 1"


@pytest.mark.parametrize(("leading", "maps"), [((), 1), ((3,), 3), ((2, 3), 6), ((1, 4), 4), ((1, 1, 2, 2), 4)])
def test_one_map_for_each_head_and_one_scale(leading: tuple[int, ...], maps: int) -> None:
    figure = matrix(*leading, m=30, n=50, mask=attlas.Window(3, 3)).plot(size=16, title="all $heads$")
    assert len(images(figure)) == maps
    assert len(figure.axes) == maps + 1
    limits = {ax.images[0].get_clim() for ax in figure.axes if ax.images}
    assert limits == {(pictures.FLOOR, 1.0)}


def test_a_part_that_is_a_tensor_has_labels() -> None:
    labels = ["def", " f", "(", "$x$", "\n", "🦊", ")", "\N{REPLACEMENT CHARACTER}"]
    figure = pictures.plot(matrix()[10:18, 10:18], labels=labels)
    figure.canvas.draw()  # no warning about characters that the font does not have
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert shown[:5] == ["def", "␣f", "(", "$x$", "↵"]
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


def test_files_of_every_kind(tmp_path: Path) -> None:
    for name in ("a.png", "a.svg", "a.pdf"):
        assert pictures.save(matrix().plot(), tmp_path / name, dpi=50).stat().st_size > 1000


def test_messages() -> None:
    A = matrix(2, 3)
    assert refusal(ShapeError, lambda: A.plot(pool="median")) == "plot(): pool = 'median'"
    assert refusal(ShapeError, lambda: A.plot(size=0)) == "plot(): size = 0"
    assert refusal(ShapeError, lambda: matrix(2, 2, 2).plot()) == "plot(): 8 heads in axes (2, 2, 2)"
    assert (
        refusal(ShapeError, lambda: matrix(m=100, n=100).plot(labels=["a"] * 100))
        == "plot(): 100 queries × 100 keys of one head"
    )
    assert refusal(ShapeError, lambda: matrix(2).plot(ax=object())) == "plot(): 2 heads"
    assert refusal(ShapeError, lambda: matrix().plot(rows=(7, 7))) == "plot(): rows = (7, 7)"
    assert refusal(ShapeError, lambda: matrix().plot(columns=(0, 41))) == "plot(): columns = (0, 41)"
    assert refusal(ShapeError, lambda: pictures.plot(torch.zeros(3))) == "plot(): shape (3,)"
    assert refusal(ShapeError, lambda: pictures.plot([[1.0]])) == "plot(): a list"


def test_missing_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "attlas.pictures.figure", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert refusal(MissingExtraError, lambda: matrix().plot()) == "attlas.pictures: no module named matplotlib"


def test_a_matrix_that_is_trained_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture needs no graph, which a long matrix could not record."""
    monkeypatch.setattr("attlas.engine.autodiff.graph.DENSE_LIMIT", 40)
    q = torch.randn(2, 30, 4, requires_grad=True)
    assert attlas.attend(q, q).plot(size=8).axes
    assert "<" in attlas.attend(q, q)._repr_html_()


# --------------------------------------------------------------------------------------------------------------- cards


@pytest.mark.parametrize(
    "text",
    [
        "Show it random tokens, then the same tokens again: 66 % of its attention goes to the token.",
        "大语言模型推理能力评测基准数据集，“注意力”的权重。" * 3,
        f"after {'x' * 90} it attends to 'y'",
        "one\ntwo",
    ],
)
def test_lines_fit_and_lose_nothing(text: str) -> None:
    from attlas.pictures.fonts import fonts_for_text, text_width, texts_in_fonts, wrapped

    families = fonts_for_text(text, "sans-serif")
    (text,) = texts_in_fonts([text], families)
    lines = wrapped(text, 120.0, 8.0, families)
    assert all(text_width(line, 8.0, families) <= 120.0 for line in lines)
    assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", text)
    assert all(not line.startswith("%") for line in lines), "a number keeps its sign"
    assert len(lines) > 1


def test_chinese_lines_end_between_characters_and_begin_with_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures.fonts, "text_width", lambda text, *_: 10.0 * len(text))
    assert pictures.fonts.wrapped("模型读文本，再读“一遍”。 abc", 50.0, 8.0, []) == [
        "模型读文",
        "本，再读",
        "“一遍”。",
        "abc",
    ]


def test_the_middle_of_a_long_name_is_left_out() -> None:
    from attlas.pictures.fonts import shortened, text_width

    name = "organisation/model-" + "x" * 100 + "-instruct"
    short = shortened(name, 150.0, 7.0, ["sans-serif"])
    assert text_width(short, 7.0, ["sans-serif"]) <= 150.0
    begin, _, end = short.partition("…")
    assert name.startswith(begin)
    assert name.endswith(end)
    assert abs(len(begin) - len(end)) <= 1
    assert shortened("short", 150.0, 7.0, ["sans-serif"]) == "short"


@pytest.mark.parametrize("words", [[" remembered", "x" * 60, "大语言模型推理能力评测基准数据集"], ["a", " b", "("]])
def test_labels_and_words_of_a_card_are_beside_each_other(words: list[str]) -> None:
    from attlas.pictures.card import card

    labels = [words[i % len(words)] for i in range(20)]
    sentences = [f"{word} gets 66 % of the attention, {word} gets the rest of it." for word in words]
    headline = "Layer 2, head 4\nremembers what came next"
    title = "some text with a name · some-organisation/some-model-with-a-long-name-70B-instruct"
    figure = card(torch.rand(20, 20), (labels, labels), (3, 4), title=title, headline=headline, sentences=sentences)
    # Labels of neighbours may touch; words at the left touch nothing.
    assert not [fault for fault in faults_of(figure) if " | " not in fault or "attention" in fault or "Layer" in fault]
    assert "remembers what came next" in [text.get_text() for text in figure.texts], "a line of its own"
    shown = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert len(shown) == 20
    assert all(len(text) < 12 for text in shown)
