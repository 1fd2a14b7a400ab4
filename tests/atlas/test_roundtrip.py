"""What is saved comes back to the bit: every score, mask, dtype, stride and size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.atlas.conftest import assert_same, make_atlas, make_entry, parts_of, same
from tests.messages import refusal
from torch import Tensor, nn

import attlas
from attlas import RecordingError, stats
from attlas.masks import Mask
from attlas.recording.atlas import Atlas, load
from attlas.recording.atlas.storage import Writer


def back(tmp_path: Path, A: attlas.AttentionMatrix, **options: Any) -> attlas.AttentionMatrix:
    """Save a matrix, load it, and compare."""
    before = Atlas([make_entry(A)])
    before.save(tmp_path / "run.atlas", overwrite=True)
    after = load(tmp_path / "run.atlas", **options)
    assert_same(before, after)
    return after[0]


class Cauchy(attlas.Score):
    """A score of a user's own."""

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return -torch.log1p((q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1))


# What the contracts of stored scores and masks do not store.
SCORES = {
    "Additive with bias": lambda: attlas.Additive(8, 8, 5, bias=True).double(),
    "Alibi of slopes": lambda: attlas.ScaledDot() + attlas.Alibi(torch.tensor(0.5).expand(4)),
    "learned TensorBias": lambda: attlas.TensorBias(nn.Parameter(torch.randn(6, 9))) + attlas.ScaledDot(),
    "sums": lambda: 2.5 * (attlas.ScaledDot() + 0.1 * attlas.Cosine()) + attlas.SoftCap(-attlas.Laplace(), 3),
    "own": lambda: Cauchy() + attlas.Alibi(),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, tmp_path: Path) -> None:
    A = attlas.attend(torch.randn(2, 4, 6, 8), torch.randn(2, 2, 9, 8), score=SCORES[name](), mask=attlas.Causal())
    state = torch.random.get_rng_state()
    back(tmp_path, A, score=Cauchy())
    assert torch.equal(state, torch.random.get_rng_state()), "loading drew random numbers"


class Wide(Cauchy):
    """A score with a number that only the object has."""

    def __init__(self, width: float) -> None:
        super().__init__()
        self.width = width

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return super().forward(q / self.width, k / self.width, at)


@pytest.mark.parametrize("of", ["a sum of scores", "a sum of matrices", "a function"])
def test_two_scores_of_one_own_class_are_refused_unless_their_settings_are_stored(of: str, tmp_path: Path) -> None:
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 9, 8)
    if of == "a sum of matrices":
        A = attlas.attend(q, k, score=Wide(1.0)) - 0.5 * attlas.attend(q, k, score=Wide(3.0))
    else:
        modify = [attlas.scores.ScoreMod(lambda s, b, h, i, j, n=n: s * n) for n in (1, 2)]
        left, right = modify if of == "a function" else (Wide(1.0), Wide(3.0))
        A = attlas.attend(q, k, score=left + right)
    with pytest.raises(attlas.DtypeError, match=r"two scores of one class"):
        back(tmp_path, A)
    twice = Wide(2.0)
    back(tmp_path, attlas.attend(q, k, score=twice + 0.5 * twice), score=twice)


def block(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i + 3) & ((j // 4 != h) | (i == b))


class Even(Mask):
    """A mask of a user's own."""

    def allows(self, at: attlas.Tile) -> Tensor:
        return at.j % 2 == 0


LENGTHS = torch.tensor([9, 5])
MASKS = {
    "Padding of one": lambda: attlas.Padding(7),
    "expanded tensor": lambda: attlas.from_tensor((torch.rand(2, 1, 1, 9) > 0.4).expand(2, 1, 6, 9)),
    "two additive": lambda: attlas.from_tensor(torch.randn(6, 9)) & attlas.from_tensor(torch.randn(1, 4, 6, 9)),
    "function": lambda: attlas.from_function(block),
    "function and more": lambda: (attlas.from_function(block) & attlas.Causal()) | attlas.Prefix(1),
    "own": Even,
    "runs": lambda: attlas.masks.runs_of(attlas.from_function(block), 2, 4, 6, 9),
    "bits": lambda: attlas.masks.runs._packed_bits(attlas.from_function(block), 2, 4, 6, 9),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, tmp_path: Path) -> None:
    A = attlas.attend(torch.randn(2, 4, 6, 8), torch.randn(2, 2, 9, 8), mask=MASKS[name]())
    B = back(tmp_path, A)
    if name not in ("function", "function and more", "own"):
        first, second = parts_of(A), parts_of(B)
        assert first.keys() == second.keys()
        assert all(same(first[key], second[key]) for key in first)
    if name == "function and more":
        assert B.problem.mask is not None
        assert B.problem.mask.name().endswith(" runs) & Causal() | Prefix(1))")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_and_strides(dtype: torch.dtype, tmp_path: Path) -> None:
    q = torch.randn(6, 2, 8, 4).to(dtype).permute(1, 3, 0, 2)
    k = torch.randn(2, 1, 18, 8).to(dtype)[:, :, ::2].expand(2, 4, 9, 8)
    q[0, 0, 0, 0], q[1, 1, 1, 1] = -0.0, torch.nan
    A = attlas.attend(q, k, sink=torch.randn(1).to(dtype).expand(4), mask=attlas.Causal())
    back(tmp_path, A)
    stored = sum(path.stat().st_size for path in (tmp_path / "run.atlas").glob("*.safetensors"))
    numbers = (q.numel() + k[:, :1].numel() + 4) * dtype.itemsize + 48 * A.dtype.itemsize
    assert stored < numbers + 800, "expanded keys were written out"


@pytest.mark.parametrize("sizes", [(1, 1, 0, 5), (1, 2, 5, 0), (0, 2, 5, 5), (1, 1, 1, 1)], ids=str)
def test_sizes_of_zero_and_one(sizes: tuple[int, ...], tmp_path: Path) -> None:
    batch, heads, m, n = sizes
    back(tmp_path, attlas.attend(torch.randn(batch, heads, m, 4), torch.randn(batch, heads, n, 4)))


def test_some_batches_and_heads(tmp_path: Path) -> None:
    score = attlas.ScaledDot() + attlas.Alibi()
    mask = attlas.from_function(block) & attlas.Padding(LENGTHS)
    A = attlas.attend(torch.randn(2, 8, 6, 8), torch.randn(2, 4, 9, 8), score=score, mask=mask)
    back(tmp_path, A[1:2][:, [1, 6, 3]])


def test_graph_and_parameters_are_left_behind(tmp_path: Path) -> None:
    q = torch.randn(1, 1, 5, 8, requires_grad=True)
    A = back(tmp_path, attlas.attend(q * 2, q, sink=torch.randn(1, requires_grad=True)))
    assert not A.problem.q.requires_grad


def test_whole_atlas(atlas: Atlas, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    atlas.save(tmp_path / "run.atlas", progress=lambda done, total: steps.append((done, total)))
    assert steps == [(done, 6) for done in range(1, 7)]
    for verify in (True, False):
        loaded = load(tmp_path / "run.atlas", verify=verify)
        assert_same(atlas, loaded)
        assert repr(loaded.entries) == repr(atlas.entries)
        assert isinstance(loaded.entries[0].statistics["top_k"], stats.Largest)
    loaded.save(tmp_path / "again")
    assert_same(atlas, load(tmp_path / "again"))
    loaded.save(tmp_path / "run.atlas", overwrite=True)  # onto the files that it is mapped from
    assert_same(loaded, load(tmp_path / "run.atlas"))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["again", "run.atlas"]


def test_writer_gives_entries_that_live_in_files(atlas: Atlas, tmp_path: Path) -> None:
    with Writer(tmp_path / "run.atlas") as writer:
        written = [writer.add(entry) for entry in atlas.entries]
        assert not (tmp_path / "run.atlas").exists()
        early = Atlas(
            written, model="tiny", ids=atlas.ids, tokens=atlas.tokens, spans=atlas.spans, details=atlas.details
        )
        assert_same(atlas, early)
        matrix = written[1].matrix
        assert matrix is not None
        (mass,) = matrix.collect(stats.ColumnMass())
        written[1].statistics["column_mass"] = mass
        del written[0].statistics["top_k"]
        early.entries.append(make_entry(name="late", layer=9))
        writer.finish(early.entries, early.facts, early.bookmarks)
    late = load(tmp_path / "run.atlas")
    assert_same(early, late)
    assert same(late.entries[1].statistics["column_mass"], mass)


def test_equal_masks_are_stored_once(tmp_path: Path) -> None:
    bias = torch.randn(1, 4, 60, 90)
    q, k = torch.randn(1, 4, 60, 8), torch.randn(1, 4, 90, 8)
    matrices = [attlas.attend(q, k, mask=attlas.from_tensor(bias[..., :90])) for _ in range(3)]
    entries = [make_entry(A, layer=layer) for layer, A in enumerate(matrices)]
    Atlas(entries).save(tmp_path / "run.atlas")
    stored = sum(path.stat().st_size for path in (tmp_path / "run.atlas").iterdir())
    assert bias.numel() * 4 < stored < bias.numel() * 8
    assert_same(Atlas(entries), load(tmp_path / "run.atlas"), masks=True)


def test_a_function_is_asked_once_for_all_layers(tmp_path: Path) -> None:
    asked = []

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        asked.append(i.shape)
        return j <= i

    mask = attlas.from_function(rule)
    entries = []
    for layer in range(4):
        A = attlas.attend(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), mask=mask & attlas.Causal())
        entries.append(make_entry(A, layer=layer))
        assert A.lse.shape == (1, 2, 5)
    asked.clear()
    Atlas(entries).save(tmp_path / "run.atlas")
    assert len(asked) == 1


def test_own_score_must_be_given_again(tmp_path: Path) -> None:
    A = attlas.attend(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), score=2.0 * Cauchy())
    atlas = Atlas([make_entry(A)])
    atlas.save(tmp_path / "run.atlas")
    assert refusal(RecordingError, lambda: load(tmp_path / "run.atlas")) == "load(): no score"
    for score in (Cauchy(), {"Cauchy": Cauchy(), "Other": attlas.Alibi()}):
        assert_same(atlas, load(tmp_path / "run.atlas", score=score))
    with pytest.raises(RecordingError, match="found: score = Alibi"):
        load(tmp_path / "run.atlas", score=attlas.Alibi())
    with Writer(tmp_path / "other") as writer:
        assert torch.equal(Atlas([writer.add(atlas.entries[0])])[0].to_dense(), A.to_dense())


texts = st.text(max_size=5)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=20)
@given(data=st.data())
def test_any_plain_facts_and_any_result(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("any") / data.draw(st.sampled_from(["run.atlas", "a b", "[x]*?", "é"]))
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.int8, torch.int16, torch.uint8]
    dtype = data.draw(st.sampled_from(dtypes))
    shape = data.draw(st.lists(st.integers(0, 3), max_size=4))
    t = torch.randint(0, 2, shape).to(dtype)
    result = data.draw(st.sampled_from([t, (t,), (), (t, (t, t)), stats.Moments(t, t)]))
    numbers = st.integers(0, 2**40)
    first = data.draw(numbers)
    entry = make_entry(
        None,
        name=data.draw(texts),
        layer=data.draw(numbers),
        kind=data.draw(st.sampled_from(["self", "cross", "encoder"])),
        call=data.draw(numbers),
        heads=tuple(data.draw(st.lists(numbers, min_size=4, max_size=4))),
        queries=(first, first + 6),
        first_key=data.draw(numbers),
        statistics={data.draw(texts): result},
    )
    atlas = Atlas(
        [entry],
        model=data.draw(texts),
        tokens=data.draw(st.none() | st.lists(texts, max_size=3)),
        spans=data.draw(st.dictionaries(texts, st.just((1, 2)), max_size=2)),
        details=data.draw(st.dictionaries(texts, plain, max_size=3)),
    )
    atlas.save(folder, overwrite=True)
    assert_same(atlas, load(folder))


def test_format_on_disk(tmp_path: Path) -> None:
    """The words of version 2: a change here needs a new version."""
    A = attlas.attend(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), mask=attlas.Causal())
    entry = make_entry(A, stats.Entropy(), names=["entropy"])
    Atlas([entry], model="tiny", ids=torch.tensor([[7]])).save(tmp_path / "x")
    content = json.loads((tmp_path / "x" / "atlas.json").read_text())
    assert len(content.pop("sha256")) == 64
    files = content.pop("files")
    assert list(files) == ["0000.safetensors", "0001.safetensors"]
    assert files["0000.safetensors"].keys() == {"bytes", "sha256"}

    def ref(tensor: str, *shape: int, file: int = 0) -> dict[str, Any]:
        return {"file": f"000{file}.safetensors", "tensor": tensor, "own": list(shape), "shape": list(shape)}

    assert content == {
        "format": "attlas-atlas",
        "version": 2,
        "model": "tiny",
        "tokens": None,
        "ids": ref("ids", 1, 1, file=1),
        "spans": {},
        "details": {},
        "entries": [
            {
                "name": "layers.0.attn",
                "kind": "self",
                "layer": 0,
                "call": 0,
                "first_key": 0,
                "heads": [0],
                "queries": [0, 1],
                "shape": [1, 1, 1, 1],
                "matrix": {
                    "q": ref("q", 1, 1, 1, 2),
                    "k": ref("k", 1, 1, 1, 2),
                    "lse": ref("lse", 1, 1, 1),
                    "sink": None,
                    "score": {"class": "ScaledDot", "scale": None},
                    "mask": {"class": "Causal", "offset": None},
                    "batch_ids": [0],
                    "head_ids": [0],
                },
                "statistics": {"entropy": {"class": "Tensor", "t": ref("entropy", 1, 1, 1)}},
            }
        ],
    }


def test_the_same_atlas_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_atlas().save(tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
