"""Maps of pictures are the rows of eager attention, placed by hand on the grid of each model."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests import image_models
from tests.image_models import IMAGE, made
from torch import Tensor, nn

import attlas
from attlas.errors import DtypeError, OutOfRangeError, RecordingError, ShapeError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
LAYER, HEAD = 1, 2


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Record a model, and return with the atlas the weights that eager attention gives, by module and pass."""

    paths: dict[nn.Module, str] = {}
    dense: dict[str, list[Tensor]] = {}

    def run(make: Callable[[], Any], **options: Any) -> tuple[attlas.Atlas, dict[str, list[Tensor]], dict[str, Any]]:
        model, given = made(make)
        with attlas.record(model, **options) as atlas, torch.no_grad():
            model(**given)
        paths.update({module: path for path, module in model.named_modules()})
        dense.clear()
        for name in {type(module).__module__ for module in model.modules()}:
            eager = getattr(sys.modules[name], "eager_attention_forward", None)
            if eager is not None and not hasattr(eager, "heard"):

                def heard(module: nn.Module, *args: Any, eager: Any = eager, **kwargs: Any) -> Any:
                    out = eager(module, *args, **kwargs)
                    dense.setdefault(paths[module], []).append(out[1].double())
                    return out

                heard.heard = True  # type: ignore[attr-defined]
                monkeypatch.setattr(sys.modules[name], "eager_attention_forward", heard)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            model(**given)
        return atlas, dict(dense), given

    return run


def rows_of(atlas: attlas.Atlas, dense: dict[str, list[Tensor]], key: Any, call: int = 0) -> Tensor:
    """Return the eager weights of the head that is looked at, shape (batch, m, n)."""
    return dense[atlas.entry(key).name][call][:, HEAD]


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("make", "prefix"), [(image_models.vit, 1), (image_models.dinov2_with_registers, 4)])
def test_a_vision_encoder(make: Any, prefix: int, recorded: Any) -> None:
    atlas, dense, _ = recorded(make)
    A = rows_of(atlas, dense, LAYER)
    on_grid = A[:, :, prefix:].unflatten(-1, (4, 4))
    close(atlas.image_map(LAYER, HEAD, query="class", image=1).weights, on_grid[1, 0])
    close(atlas.image_map(LAYER, HEAD, query=(2, 3)).weights, on_grid[0, prefix + 11])
    close(atlas.image_map(LAYER, HEAD, query=range(2, 5)).weights, on_grid[0, 2:5].mean(0))
    every = dense[atlas.entry(LAYER).name][0][0, :, 0, prefix:].unflatten(-1, (4, 4)).mean(0)
    found = atlas.image_map(LAYER, query="class")
    close(found.weights, every)
    assert found.share == pytest.approx(float(every.sum()), abs=1e-5)


def test_two_towers(recorded: Any) -> None:
    atlas, dense, _ = recorded(image_models.clip)
    close(
        atlas.image_map(3, HEAD, query="class", image=1).weights,
        rows_of(atlas, dense, 3)[1, 0, 1:].unflatten(-1, (4, 4)),
    )
    with pytest.raises(RecordingError, match=r"no patch is a token of self.0"):
        atlas.image_map(0, HEAD, query=-1)


def test_llava(recorded: Any) -> None:
    atlas, dense, _ = recorded(image_models.llava)
    A = rows_of(atlas, dense, LAYER)
    for image in range(2):
        found = atlas.image_map(LAYER, HEAD, query=-1, image=image)
        close(found.weights, A[image, -1, 3:19].unflatten(-1, (4, 4)))
        answer = atlas.image_map(LAYER, HEAD, query=slice(20, None), image=image)
        close(answer.weights, A[image, 20:, 3:19].mean(0).unflatten(-1, (4, 4)))
    T = rows_of(atlas, dense, "encoder.1")
    close(atlas.image_map("encoder.1", HEAD, query=(1, 2), image=1).weights, T[1, 7, 1:].unflatten(-1, (4, 4)))


def test_llava_next_has_tiles_a_thumbnail_and_ends_of_rows(recorded: Any) -> None:
    atlas, dense, given = recorded(image_models.llava_next)
    row = rows_of(atlas, dense, LAYER)[0, -2]
    assert (given["input_ids"][0, 3:55] == IMAGE).all()
    thumbnail, tiles = row[3:19].unflatten(-1, (4, 4)), row[19:55].unflatten(-1, (4, 9))[:, :8]
    found = atlas.image_map(LAYER, HEAD, query=-2)
    # Each patch of the thumbnail is as high as a patch of the tiles, and as wide as two.
    close(found.weights, tiles + thumbnail.repeat_interleave(2, dim=1) / 2)
    assert [part.name for part in found.parts] == ["picture", "thumbnail"]
    close(found.parts[0].weights, tiles)
    close(found.parts[1].weights, thumbnail)
    assert found.share == pytest.approx(float(tiles.sum() + thumbnail.sum()), abs=1e-5)
    T = rows_of(atlas, dense, "encoder.1")[:, :, 1:].unflatten(-1, (4, 4))
    of_patch = atlas.image_map("encoder.1", HEAD, query=(1, 5))  # the second tile, patch (1, 1)
    close(of_patch.parts[0].weights, torch.cat([torch.zeros(4, 4), T[2, 1 + 5]], dim=1).double())
    assert not of_patch.parts[1].weights.any()
    of_class = atlas.image_map("encoder.1", HEAD, query="class")
    close(of_class.parts[0].weights, torch.cat([T[1, 0], T[2, 0]], dim=1) / 3)
    close(of_class.parts[1].weights, T[0, 0] / 3)


def test_llava_next_without_the_rows_of_its_padding(recorded: Any) -> None:
    atlas, dense, _ = recorded(lambda: image_models.llava_next(5, 20))
    row = rows_of(atlas, dense, LAYER)[0, -1]
    found = atlas.image_map(LAYER, HEAD, query=-1)
    close(found.parts[0].weights, row[19:37].unflatten(-1, (2, 9))[:, :8])
    close(found.weights.sum(), row[3:19].sum() + row[19:37].unflatten(-1, (2, 9))[:, :8].sum())
    assert found.box == pytest.approx((0, 0, 1, 1))  # 5 × 20 is 2 × 8 patches exactly
    atlas, *_ = recorded(lambda: image_models.llava_next(10, 22))
    found = atlas.image_map(LAYER, HEAD, query=-1)
    margin = (4 - 40 / 11) / 2 / (40 / 11)  # of the 4 rows of patches, the picture covers 40 / 11
    assert found.box == pytest.approx((-margin, 0, 1 + margin, 1))
    close(found.weights.sum(), sum(part.weights.double().sum() for part in found.parts))


def test_internvl_is_told_the_picture(recorded: Any) -> None:
    pictures = [torch.rand(20, 30, 3), torch.rand(8, 8, 3)]
    atlas, dense, _ = recorded(image_models.internvl, images=pictures)
    row = rows_of(atlas, dense, LAYER)[0, -1]
    tiles = row[3:27].view(2, 3, 2, 2).transpose(1, 2).reshape(4, 6)
    thumbnail = row[27:31].view(2, 2)
    found = atlas.image_map(LAYER, HEAD, query=-1)
    spread = thumbnail.repeat_interleave(2, 0).repeat_interleave(3, 1) / 6
    close(found.weights, tiles + spread)
    close(atlas.image_map(LAYER, HEAD, query=-1, image=1).weights, row[34:38].view(2, 2))
    assert tuple(found.picture.shape) == (20, 30, 3)
    T = rows_of(atlas, dense, "encoder.1")[:, :, 1:].unflatten(-1, (4, 4))
    of_patch = atlas.image_map("encoder.1", HEAD, query=(5, 9)).parts[0].weights  # tile 5, patch (1, 1)
    close(of_patch[4:, 8:], T[5, 1 + 5])
    assert not of_patch[:4].any()
    assert not of_patch[:, :8].any()
    model, given = made(image_models.internvl)
    with attlas.record(model) as atlas, torch.no_grad():
        model(**given)
    with pytest.raises(RecordingError, match=r"an image of 7 tiles, whose arrangement"):
        atlas.image_map(LAYER, HEAD, query=-1)
    assert atlas.image_map(LAYER, HEAD, query=-1, image=1).weights.shape == (2, 2)


@pytest.mark.parametrize("make", [image_models.qwen2_vl, image_models.qwen2_5_vl, image_models.qwen3_vl])
def test_qwen_vl_merges_patches(make: Any, recorded: Any) -> None:
    atlas, dense, _ = recorded(make)
    A = rows_of(atlas, dense, LAYER)
    close(atlas.image_map(LAYER, HEAD, query=-1).weights, A[0, -1, 3:9].view(2, 3))
    close(atlas.image_map(LAYER, HEAD, query=[18, 20], image=1).weights, A[0, [18, 20], 12:16].mean(0).view(2, 2))
    # In the encoder the four patches of each block stand side by side.
    T = rows_of(atlas, dense, "encoder.1", call=0)[0]
    patches = [(2 * i + a, 2 * j + b) for i in range(2) for j in range(3) for a in range(2) for b in range(2)]
    expected = torch.zeros(4, 6, dtype=torch.float64)
    for token, (row, column) in enumerate(patches):
        expected[row, column] = T[patches.index((3, 1)), token]
    close(atlas.image_map("encoder.1", HEAD, query=(3, 1)).weights, expected)
    assert len(dense[atlas.entry("encoder.1").name]) == 2  # a pass for each picture
    T = rows_of(atlas, dense, "encoder.1", call=1)[0]
    found = atlas.image_map("encoder.1", HEAD, query=(0, 0), image=1).weights
    assert float(found[1, 0]) == pytest.approx(float(T[0, 2]), abs=1e-5)


def test_windows_of_qwen2_5_vl(recorded: Any) -> None:
    atlas, dense, _ = recorded(image_models.qwen2_5_vl)
    passes = dense[atlas.entry("encoder.0").name]
    assert [own.shape[-1] for own in passes] == [16, 8, 16]  # windows of 4 × 4 patches
    found = atlas.image_map("encoder.0", HEAD, query=(3, 5)).weights  # in the second window, the last patch
    T = passes[1][0, HEAD, 7]
    close(found[:, 4:], T.view(2, 2, 2).reshape(4, 2))
    assert not found[:, :4].any()
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(ShapeError, match="by its row and column"):
        atlas.image_map("encoder.0", HEAD, query=3)


@pytest.mark.parametrize("beams", [1, 2])
def test_a_generation_keeps_the_picture(beams: int) -> None:
    model, given = made(image_models.qwen2_vl)
    with attlas.record(model) as atlas, torch.no_grad():
        model.generate(**given, max_new_tokens=3, do_sample=False, num_beams=beams)
    entry = atlas.entry(LAYER)
    assert entry.shape[0] == beams
    assert entry.queries == ((0, 26) if beams == 1 else entry.queries)
    first = max(entry.queries[0], 24)
    found = atlas.image_map(LAYER, HEAD, query=slice(first, None))
    rows = slice(first - entry.queries[0], None)
    close(found.weights, entry.matrix[0, HEAD, rows, 3:9].double().mean(0).view(2, 3))
    assert atlas.image_map("encoder.1", HEAD, query=(0, 0), image=1).weights.shape == (4, 4)


def test_a_new_text_has_its_own_pictures() -> None:
    model, given = made(image_models.llava)
    with attlas.record(model) as atlas, torch.no_grad():
        model(**given)
        later = given["input_ids"][:1].roll(2, dims=1)
        model(input_ids=later, pixel_values=given["pixel_values"][:1])
    A = atlas[LAYER]
    close(atlas.image_map(LAYER, HEAD, query=-1).weights, A[0, HEAD, -1, 5:21].double().view(4, 4))
    close(
        atlas.image_map("encoder.1", HEAD, query="class").weights,
        atlas["encoder.1"][0, HEAD, 0, 1:].double().view(4, 4),
    )
    with pytest.raises(OutOfRangeError, match="1 images"):
        atlas.image_map(LAYER, HEAD, query=-1, image=1)


def test_sinks_are_left_out() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 20, 8), torch.randn(1, 1, 20, 8)
    q[..., 0], k[..., 0], k[..., 7, 0] = 3.0, 0.0, 4.0
    A = attlas.attend(q, k)
    atlas = attlas.Atlas([attlas.Entry("attn", 0, "self", 0, (0,), (0, 20), 0, (1, 1, 20, 20), A)])
    dense = A.to_dense()[0, 0].double()
    assert attlas.heads.sink_keys(A)[0, 0].nonzero().flatten().tolist() == [7]
    by_hand = {"grid": (3, 4), "tokens": (4, 16)}
    found = atlas.image_map(0, 0, query=18, without_sinks=True, **by_hand)
    rest = dense[18].clone()
    rest[7] = 0
    close(found.weights, (rest / rest.sum())[4:16].view(3, 4))
    assert found.left_out.nonzero().tolist() == [[0, 3]]
    every = torch.softmax(A.logits[0, 0, 18, :].double().masked_fill(torch.arange(20) == 7, -torch.inf), -1)
    close(found.weights, every[4:16].view(3, 4))
    close(atlas.image_map(0, 0, query=18, without_sinks=0.99, **by_hand).weights, dense[18, 4:16].view(3, 4))
    with pytest.raises(ShapeError, match="without_sinks must be"):
        atlas.image_map(0, 0, query=18, without_sinks=2.0, **by_hand)


def test_sink_keys_are_those_that_most_queries_prefer() -> None:
    torch.manual_seed(1)
    q, k = torch.randn(2, 3, 40, 4), torch.randn(2, 3, 40, 4)
    k[1, 2, 5], k[0, 1, 37] = q[1, 2].mean(0) * 60, 40.0
    A = attlas.attend(q, k, mask=attlas.Causal())
    dense = A.to_dense()
    seen = torch.arange(40, 0, -1)
    mean = dense.sum(-2) / seen
    torch.testing.assert_close(attlas.heads.sink_keys(A), (mean >= 0.3) & (seen >= 8))
    assert not attlas.heads.sink_keys(A)[..., 33:].any()  # fewer than 8 queries see them
    torch.testing.assert_close(attlas.heads.sink_keys(A, 0.1), (mean >= 0.1) & (seen >= 8))
    with pytest.raises(ShapeError, match="threshold must be between 0 and 1"):
        attlas.heads.sink_keys(A, 0)


def test_relative_to_a_neutral_prompt(recorded: Any) -> None:
    atlas, dense, _ = recorded(image_models.llava)
    model, given = made(image_models.llava)
    with attlas.record(model) as neutral, torch.no_grad():
        model(input_ids=given["input_ids"][:1, :21], pixel_values=given["pixel_values"][:1])
    own = rows_of(atlas, dense, LAYER)[0, -1, 3:19].view(4, 4)
    other = neutral[LAYER][0, HEAD, -1, 3:19].double().view(4, 4)
    ratio = atlas.image_map(LAYER, HEAD, query=-1, relative_to=neutral)
    torch.testing.assert_close(ratio.weights.double(), own / other, atol=1e-4, rtol=1e-3)
    difference = atlas.image_map(LAYER, HEAD, query=-1, relative_to=neutral, relative="difference", relative_query=-1)
    close(difference.weights, own - other)
    assert (ratio.relative, difference.relative) == ("ratio", "difference")
    with pytest.raises(ShapeError, match='relative must be "ratio" or "difference"'):
        atlas.image_map(LAYER, HEAD, query=-1, relative_to=neutral, relative="quotient")  # type: ignore[arg-type]


def test_a_grid_by_hand_and_what_is_refused() -> None:
    torch.manual_seed(2)
    A = attlas.attend(torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 4))
    entry = attlas.Entry("attn", 0, "self", 0, (1, 3), (0, 9), 0, (2, 2, 9, 9), A)
    atlas = attlas.Atlas([entry])
    hand = {"grid": (2, 3), "tokens": [6, 5, 4, 3, 2, 1]}
    close(atlas.image_map(0, 3, query=8, sequence=1, **hand).weights, A[1, 1, 8, 1:7].double().flip(0).view(2, 3))
    close(atlas.image_map(0, 1, query=(0, 1), **hand).weights, A[0, 0, 5, 1:7].double().flip(0).view(2, 3))
    with pytest.raises(
        RecordingError, match=r"a recording of no image[\s\S]*grid=\(rows, columns\), tokens=\(start, stop\)"
    ):
        atlas.image_map(0, 1, query=8)
    for error, text, options in (
        (ShapeError, "5 tokens, 2 × 3 patches", {"query": 8, "grid": (2, 3), "tokens": (1, 6)}),
        (ShapeError, "belong together", {"query": 8, "grid": (2, 3)}),
        (ShapeError, "rows and columns of the patches", {"query": 8, "grid": 6, "tokens": (1, 7)}),
        (OutOfRangeError, "9 positions", {"query": 9, **hand}),
        (OutOfRangeError, "2 sequences", {"query": 8, "sequence": 2, **hand}),
        (OutOfRangeError, "2 × 3 patches", {"query": (2, 0), **hand}),
        (DtypeError, "query must be whole numbers", {"query": 1.5, **hand}),
        (ShapeError, "there must be a query", {"query": [], **hand}),
    ):
        with pytest.raises(error, match=text):
            atlas.image_map(0, 1, **options)  # type: ignore[arg-type]
    with pytest.raises(OutOfRangeError, match=r"heads \(1, 3\)"):
        atlas.image_map(0, 0, query=8, **hand)


def test_models_whose_patches_are_not_known() -> None:
    import transformers as t

    sizes = image_models.PATCHES | {"decoder_hidden_size": 32, "decoder_num_attention_heads": 4}
    model = t.ViTMAEModel(t.ViTMAEConfig(**sizes)).eval()  # it shuffles its patches
    with attlas.record(model) as atlas, torch.no_grad():
        model(torch.randn(1, 3, 8, 8))
    with pytest.raises(RecordingError, match="a model of type vit_mae"):
        atlas.image_map(0, 0, query=0)


def test_padding_is_no_query() -> None:
    model, given = made(image_models.llava)
    mask = torch.ones_like(given["input_ids"])
    mask[0, 22:] = 0
    with attlas.record(model) as atlas, torch.no_grad():
        model(**given, attention_mask=mask)
    with pytest.raises(OutOfRangeError, match=r"(?s)no padding.*query=21"):
        atlas.image_map(LAYER, HEAD, query=-1)
    assert atlas.image_map(LAYER, HEAD, query=-1, image=1).weights.shape == (4, 4)


def test_pictures_are_kept_saved_and_drawn(tmp_path: Any, recorded: Any) -> None:
    torch.manual_seed(3)
    picture, wide = (torch.rand(40, 60, 3) * 255).to(torch.uint8), torch.rand(8, 3000)
    atlas, *_ = recorded(image_models.llava, images=[picture, wide.numpy()])
    assert [tuple(own.shape) for own in atlas.images] == [(40, 60, 3), (3, 1024, 3)]
    atlas.save(tmp_path / "run.atlas")
    assert sorted(path.name for path in (tmp_path / "run.atlas").glob("*.png")) == ["image-0.png", "image-1.png"]
    again = attlas.load(tmp_path / "run.atlas")
    assert all(torch.equal(a, b) for a, b in zip(atlas.images, again.images, strict=True))
    found = again.image_map(LAYER, HEAD, query=-1, without_sinks=True)
    assert torch.equal(found.weights, atlas.image_map(LAYER, HEAD, query=-1, without_sinks=True).weights)
    assert torch.equal(found.picture, picture)
    found.save(tmp_path / "map.png", title="where it looks")
    from matplotlib.image import imread

    torch.testing.assert_close(
        torch.from_numpy(imread(tmp_path / "run.atlas" / "image-0.png")), picture / 255, atol=1e-6, rtol=0
    )
    assert imread(tmp_path / "map.png").ndim == 3
    again.save(tmp_path / "run.atlas", overwrite=True)
    (tmp_path / "run.atlas" / "image-1.png").write_bytes(b"changed")
    with pytest.raises(RecordingError, match=r"image-1\.png"):
        attlas.load(tmp_path / "run.atlas")
    for wrong, error in (([1], DtypeError), (7, DtypeError), ([torch.zeros(2, 2, 7)], ShapeError)):
        with pytest.raises(error):
            atlas.images = wrong
    with pytest.raises(ShapeError, match="-1 to 1"):
        attlas.record(nn.Linear(1, 1), images=[torch.tensor([[-1.0, 1.0]])])
