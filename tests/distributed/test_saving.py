"""Recordings of several ranks, joined as they are saved: the folder loads as that of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.conftest import check_same_error
from tests.recording.conftest import share_heads, two_layers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import attlas
from attlas import stats
from attlas.distributed import save
from attlas.distributed.saving import _SharedWriter
from attlas.errors import AttlasError, RecordingError, ShapeError
from attlas.masks import Causal, Heads, Window

pytestmark = pytest.mark.filterwarnings("ignore")
OnRanks = Callable[..., list[Any]]

STATISTICS = (stats.Entropy(), stats.TopK(3), stats.ColumnMass(), stats.LogitMoments(), stats.Picture(3, 4))
IDS = torch.randint(3, 60, (5, 14), generator=torch.Generator().manual_seed(0))
PADDING = torch.ones(5, 14, dtype=torch.int64)
PADDING[1, :3], PADDING[3, :6] = 0, 0


def of_rank(model: nn.Module, mesh: Any = None) -> nn.Module:
    """Return a copy for one rank; with a mesh its heads are shared by the ranks of that mesh."""
    model = copy.deepcopy(model)
    return model if mesh is None else share_heads(model, mesh)


@torch.no_grad()
def recorded(model: nn.Module, rows: slice = slice(None), padding: Tensor | None = PADDING, **options: Any) -> Any:
    with attlas.record(model, statistics=STATISTICS, **options) as atlas:
        model(IDS[rows], attention_mask=None if padding is None else padding[rows])
    return atlas


def tensors(result: Any) -> list[Tensor]:
    return [t for part in result for t in tensors(part)] if isinstance(result, tuple) else [result]


def same(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Compare two atlases, with every number."""
    assert len(found.entries) == len(wanted.entries) > 0
    assert (found.ids is None) == (wanted.ids is None)
    assert found.ids is None or torch.equal(found.ids, wanted.ids)
    assert (found.texts, found.encoder_texts) == (wanted.texts, wanted.encoder_texts)
    for one, true in zip(found.entries, wanted.entries, strict=True):
        for name in ("name", "layer", "kind", "call", "heads", "queries", "first_key", "shape"):
            assert getattr(one, name) == getattr(true, name), name
        assert (one.query_mask is None) == (true.query_mask is None)
        assert one.query_mask is None or torch.equal(one.query_mask, true.query_mask)
        assert one.statistics.keys() == true.statistics.keys()
        for name, result in true.statistics.items():
            assert type(one.statistics[name]) is type(result)
            for a, b in zip(tensors(one.statistics[name]), tensors(result), strict=True):
                torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, equal_nan=True)
        assert (one.matrix is None) == (true.matrix is None)
        if one.matrix is not None:
            torch.testing.assert_close(one.matrix.to_dense(), true.matrix.to_dense(), atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(one.matrix.lse, true.matrix.lse, atol=tolerance, rtol=tolerance)
            assert one.matrix.problem.q.shape == true.matrix.problem.q.shape
            assert one.matrix.problem.k.shape == true.matrix.problem.k.shape
    for one, true in zip(found.table(), wanted.table(), strict=True):
        assert one.keys() == true.keys()
        assert all(a == pytest.approx(b, abs=tolerance) for a, b in zip(one.values(), true.values(), strict=True))


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("ranks", [2, 3])
def test_texts_of_all_ranks(on_ranks: OnRanks, tmp_path: Path, ranks: int, padding: Tensor | None) -> None:
    model = two_layers(window=5)
    whole = recorded(model, padding=padding)

    def job(rank: int, world: int) -> None:
        rows = torch.arange(5).chunk(world)[rank]
        atlas = recorded(of_rank(model), slice(int(rows[0]), int(rows[-1]) + 1), padding)
        save(atlas, tmp_path / "run.atlas", init_device_mesh("cpu", (world,)), [Shard(0)])

    on_ranks(ranks, job)
    assert [path.name for path in tmp_path.iterdir()] == ["run.atlas"]
    found = attlas.load(tmp_path / "run.atlas")
    same(found, whole)
    assert str(found.entries[0].matrix.problem.mask) == str(whole.entries[0].matrix.problem.mask)


@pytest.mark.parametrize("heads", [None, [1, 2, 3], [0]])
def test_heads_of_all_ranks(on_ranks: OnRanks, tmp_path: Path, heads: list[int] | None) -> None:
    model = two_layers()
    whole = recorded(model, heads=heads)

    def job(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        atlas = recorded(of_rank(model, mesh), heads=heads)
        if heads != [0] or rank == 1:  # else it has all that were asked for
            with pytest.raises(RecordingError, match="all heads of its layers"):
                atlas.save(tmp_path / "part.atlas")
        save(atlas, tmp_path / "run.atlas", mesh, [Shard(1)])

    on_ranks(2, job)
    assert [path.name for path in tmp_path.iterdir()] == ["run.atlas"]
    same(attlas.load(tmp_path / "run.atlas"), whole)


def test_texts_and_heads(on_ranks: OnRanks, tmp_path: Path) -> None:
    model = two_layers()
    tokens = [[f"{i}.{j}" for j in range(14)] for i in range(4)]
    whole = recorded(model, slice(0, 4), tokens=tokens)
    whole.encoder_texts = [[f"source {i}"] for i in range(4)]

    def job(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
        first = 2 * mesh["data"].get_local_rank()
        rows = slice(first, first + 2)
        atlas = recorded(of_rank(model, mesh["heads"]), rows, tokens=tokens[rows], keep="disk")
        atlas.encoder_texts = whole.encoder_texts[rows]
        save(atlas, tmp_path / "run.atlas", mesh, [Shard(0), Shard(1)])

    on_ranks(4, job)
    same(attlas.load(tmp_path / "run.atlas"), whole)


@pytest.mark.parametrize("placement", [Shard(1), Replicate()])
def test_the_same_on_all_ranks_is_stored_once(on_ranks: OnRanks, tmp_path: Path, placement: Any) -> None:
    model = two_layers()
    whole = recorded(model, keep="statistics")

    def job(rank: int, world: int) -> None:
        atlas = recorded(of_rank(model), keep="statistics")
        save(atlas, tmp_path / "run.atlas", init_device_mesh("cpu", (2,)), [placement])

    on_ranks(2, job)
    same(attlas.load(tmp_path / "run.atlas"), whole)


def test_generation(on_ranks: OnRanks, tmp_path: Path) -> None:
    model, options = two_layers(window=5), {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}

    def generated(model: nn.Module, rows: slice) -> Any:
        with attlas.record(model, statistics=STATISTICS) as atlas:
            model.generate(IDS[rows], attention_mask=PADDING[rows], **options)
        return atlas

    whole = generated(model, slice(0, 4))

    def job(rank: int, world: int) -> None:
        atlas = generated(of_rank(model), slice(2 * rank, 2 * rank + 2))
        save(atlas, tmp_path / "run.atlas", init_device_mesh("cpu", (2,)), [Shard(0)])

    on_ranks(2, job)
    same(attlas.load(tmp_path / "run.atlas"), whole)


def entry(A: Any, heads: tuple[int, ...], **more: Any) -> Any:
    return attlas.Entry("attn", 0, "self", 0, heads, (0, A.shape[2]), 0, tuple(A.shape), A, **more)


MASKS = {
    "function": (lambda b, h, i, j: j <= i, None),
    "of batches": (lambda b, h, i, j: (j <= i) & (j >= b), 0),
    "of heads": (lambda b, h, i, j: (j <= i) & (j >= 2 * h), 1),
    "tensor": (torch.rand(4, 4, 6, 7, generator=torch.Generator().manual_seed(0)) > 0.3, 0),
    "tensor of heads": (torch.rand(1, 4, 6, 7, generator=torch.Generator().manual_seed(0)) > 0.3, 1),
    "added": (torch.rand(1, 4, 6, 7, generator=torch.Generator().manual_seed(0)), 1),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("axis", [0, 1])
def test_masks(on_ranks: OnRanks, tmp_path: Path, name: str, axis: int) -> None:
    mask, differs = MASKS[name]
    q, k, sink = torch.randn(4, 4, 6, 8), torch.randn(4, 2, 7, 8), torch.randn(4)
    whole = attlas.attend(q, k, mask=mask, sink=sink)

    def job(rank: int, world: int) -> None:
        part, heads = slice(2 * rank, 2 * rank + 2), (0, 1, 2, 3)
        own: Any = mask
        if callable(mask) and differs == axis:  # a rank counts from 0
            own = lambda b, h, i, j: mask(b + 2 * rank * (axis == 0), h + 2 * rank * (axis == 1), i, j)  # noqa: E731
        elif isinstance(mask, Tensor) and mask.shape[axis] == 4:
            own = mask.narrow(axis, part.start, 2)
        if axis == 0:
            A = attlas.attend(q[part], k[part], mask=own, sink=sink)
        else:
            heads = heads[part]
            A = attlas.attend(q[:, part], k[:, rank : rank + 1], mask=own, sink=sink[part])
        save(attlas.Atlas([entry(A, heads)]), tmp_path / "run.atlas", init_device_mesh("cpu", (2,)), [Shard(axis)])

    on_ranks(2, job)
    found = attlas.load(tmp_path / "run.atlas")[0]
    torch.testing.assert_close(found.to_dense(), whole.to_dense())
    torch.testing.assert_close(found @ k.repeat_interleave(2, 1), whole @ k.repeat_interleave(2, 1))


def test_groups_of_different_sizes(on_ranks: OnRanks, tmp_path: Path) -> None:
    q, k = torch.randn(2, 3, 6, 8), torch.randn(2, 2, 7, 8)
    whole = attlas.attend(q, k[:, [0, 0, 1]])

    def job(rank: int, world: int) -> None:
        A = attlas.attend(q[:, :2], k[:, :1]) if rank == 0 else attlas.attend(q[:, 2:], k[:, 1:])
        atlas = attlas.Atlas([entry(A, (0, 1) if rank == 0 else (2,))])
        save(atlas, tmp_path / "run.atlas", init_device_mesh("cpu", (2,)), [Shard(1)])

    on_ranks(2, job)
    torch.testing.assert_close(attlas.load(tmp_path / "run.atlas")[0].to_dense(), whole.to_dense())


@pytest.mark.parametrize("own", [True, False], ids=["window in one head", "function of the head"])
def test_masks_of_heads_are_counted_on_each_rank(on_ranks: OnRanks, tmp_path: Path, own: bool) -> None:
    """Heads that ranks share are numbered from 0 on each, and so are those that a mask names."""
    mask = Heads({0: Window(0, 0)}, Causal()) if own else attlas.from_function(lambda b, h, i, j: j + 2 * h <= i + 2)
    q, k = (torch.randn(1, 4, 6, 3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    parts = [attlas.attend(q[:, heads], k[:, heads], mask=mask) for heads in (slice(2), slice(2, 4))]

    def job(rank: int, world: int) -> None:
        atlas = attlas.Atlas([entry(parts[rank], (2 * rank, 2 * rank + 1))])
        save(atlas, tmp_path / "run.atlas", init_device_mesh("cpu", (world,)), [Shard(1)])

    on_ranks(2, job)
    found = attlas.load(tmp_path / "run.atlas")[0]
    torch.testing.assert_close(found.to_dense(), torch.cat([part.to_dense() for part in parts], dim=1))


# -------------------------------------------------------------------------------------------------------------- errors


def atlas_of(rank: int, **changes: Any) -> Any:
    q = torch.randn(1, 2, 5, 8)
    A = attlas.attend(q, q, mask=attlas.Causal())
    return attlas.Atlas([entry(A, (2 * rank, 2 * rank + 1), **changes)])


def other_length(rank: int, folder: Path, mesh: Any) -> None:
    q = torch.randn(1, 2, 5 + rank, 8)
    save(attlas.Atlas([entry(attlas.attend(q, q), (0, 1))]), folder, mesh, [Shard(0)])


def wrong_axis(rank: int, folder: Path, mesh: Any) -> None:
    save(atlas_of(rank), folder, mesh, [Shard(0)])


def wrong_placements(rank: int, folder: Path, mesh: Any) -> None:
    save(atlas_of(rank), folder, mesh, [Shard(2 * rank)])


def wrong_result(rank: int, folder: Path, mesh: Any) -> None:
    save(atlas_of(rank, statistics={"own": torch.zeros(3)} if rank else {}), folder, mesh, [Shard(1)])


def not_empty(rank: int, folder: Path, mesh: Any) -> None:
    if rank == 0:
        folder.mkdir()
        (folder / "something").touch()
    save(atlas_of(rank), folder, mesh, [Shard(1)])


def full_disk(rank: int, folder: Path, mesh: Any) -> None:
    number = torch.zeros(1, 2)
    save(atlas_of(rank, statistics={"own": Broken(number) if rank == 1 else number}), folder, mesh, [Shard(1)])


class Broken(Tensor):
    """A tensor whose numbers cannot be read."""

    @staticmethod
    def __new__(cls, t: Tensor) -> Any:
        return Tensor._make_subclass(cls, t)

    def cpu(self) -> Any:
        raise OSError(28, "No space left on device")


def score_of_one(rank: int, folder: Path, mesh: Any) -> None:
    q = torch.randn(1, 2, 5, 8)
    A = attlas.attend(q, q, score=attlas.Gaussian(1.0 + rank))
    save(attlas.Atlas([entry(A, (2 * rank, 2 * rank + 1))]), folder, mesh, [Shard(1)])


REFUSED = {
    other_length: (RecordingError, "ranks must have texts of one length"),
    wrong_axis: (RecordingError, r"along Shard\(0\) ranks must have the same heads"),
    wrong_placements: (ShapeError, r"placements must be Shard\(0\), Shard\(1\) or Replicate\(\)"),
    wrong_result: (RecordingError, "must begin with the axes of batch and heads"),
    not_empty: (RecordingError, "only a folder that holds an atlas"),
    full_disk: (RecordingError, "No space left on device"),
    score_of_one: (RecordingError, "a score must be the same on all ranks"),
}


@pytest.mark.parametrize("work", REFUSED, ids=lambda work: work.__name__)
def test_all_ranks_raise_and_nothing_is_left(tmp_path: Path, work: Callable[..., None]) -> None:
    check_same_error(lambda rank: work(rank, tmp_path / "run.atlas", init_device_mesh("cpu", (2,))), *REFUSED[work])
    assert [path.name for path in tmp_path.iterdir()] == (["run.atlas"] if work is not_empty else [])
    with pytest.raises(AttlasError):
        attlas.load(tmp_path / "run.atlas")


def test_a_part_that_is_not_on_disk_is_found(on_ranks: OnRanks, tmp_path: Path, monkeypatch: Any) -> None:
    written = _SharedWriter._write_parts_of_rank

    def lost(self: Any, path: Path, tensors: Any, starts: Any) -> Any:
        marks = written(self, path, tensors, starts)
        if self.rank == 1:  # as on a disk that the other ranks do not see
            with path.open("rb+") as file:
                file.seek(-8, 2)
                file.write(bytes(8))
        return marks

    monkeypatch.setattr(_SharedWriter, "_write_parts_of_rank", lost)

    def job(rank: int, world: int) -> None:
        with pytest.raises(RecordingError, match="a part must be on disk as its rank wrote it"):
            save(atlas_of(rank), tmp_path / "run.atlas", init_device_mesh("cpu", (2,)), [Shard(1)])

    on_ranks(2, job, 20)
    assert list(tmp_path.iterdir()) == []
