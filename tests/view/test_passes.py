"""The background pass: progressive, exact, stored, cancelled, and never in the way."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.view.cases import ask, facts, numbers, wait

import attlas
from attlas.recording.atlas import Atlas, Entry
from attlas.view import Service
from attlas.view import passes as passes_module
from attlas.view import pyramid as pyramid_module
from attlas.view.codes import PENDING, decode
from attlas.view.exact import Head, UnwantedError
from attlas.view.passes import PassJob
from attlas.view.pyramid import band_height, layout, levels_of
from attlas.view.store import Store
from attlas.view.worker import Worker

SIZE = 9000  # six levels: the last one comes from a pass


@pytest.fixture(scope="module")
def long() -> attlas.AttentionMatrix:
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, SIZE, 4), torch.randn(1, 2, SIZE, 4)
    A = attlas.attend(q, k, mask=attlas.Causal())
    A.lse  # noqa: B018 (kept from now on)
    return A


@pytest.fixture
def service(long: attlas.AttentionMatrix) -> Iterator[Service]:
    with closing(Service(long)) as opened:
        yield opened


def coarse(service: Service, level: int = 6, head: Any = 0, **more: Any) -> Any:
    return ask(service, "tile", entry=0, head=head, level=level, y=0, x=0, **more)


def complete(service: Service, **parameters: Any) -> np.ndarray:
    wait(lambda: coarse(service, **parameters).final)
    return np.frombuffer(coarse(service, **parameters).body, "<u2").reshape(256, 256)


def pooled(A: attlas.AttentionMatrix, head: int, sizes: tuple[int, ...]) -> dict[tuple[str, int], np.ndarray]:
    """Pool a causal head by blocks of several sizes, each a multiple of the first, some rows at a time in float64."""
    least, sums, counts, most = sizes[0], [], [], []
    starts = np.arange(0, SIZE, least)
    for start in starts:
        rows = A[0, head, start : start + least, :].double().numpy()
        cells = np.arange(SIZE) <= np.arange(start, start + len(rows))[:, None]
        sums.append(np.add.reduceat(rows.sum(0), starts))
        counts.append(np.add.reduceat(cells.sum(0), starts))
        most.append(np.maximum.reduceat(rows.max(0), starts))

    def joined(parts: list[np.ndarray], by: np.ufunc, size: int) -> np.ndarray:
        every = np.arange(0, len(parts), size // least)
        return by.reduceat(by.reduceat(np.stack(parts), every, 0), every, 1)

    return {("max", size): joined(most, np.maximum, size) for size in sizes} | {
        ("mean", size): joined(sums, np.add, size) / np.maximum(joined(counts, np.add, size), 1) for size in sizes
    }


def test_a_coarse_picture_fills_in_and_is_exact_in_the_end(service: Service, long: attlas.AttentionMatrix) -> None:
    levels = facts(service, "info")["entries"][0]["levels"]
    assert levels == levels_of(SIZE, SIZE) == 7
    first = coarse(service)
    assert first.progress < 1
    assert not first.final
    codes = np.frombuffer(first.body, "<u2").reshape(256, 256)
    blocks = -(-SIZE // 64)
    assert (codes[:blocks, :blocks] == PENDING).mean() == pytest.approx(1 - first.progress)
    seen = [first.progress]

    def done() -> bool:
        seen.append(coarse(service).progress)
        return seen[-1] == 1

    wait(done)
    assert seen == sorted(seen)
    exact = pooled(long, 0, (32, 64))
    allowed = {level: np.tri(-(-SIZE // (1 << level)), dtype=bool) for level in (5, 6)}
    for pool in ("mean", "max"):
        for level, cells in allowed.items():
            expected, found = exact[pool, 1 << level], whole(service, level, pool)
            assert ((found > 0) == cells).all()
            np.testing.assert_allclose(decode(found)[cells], expected[cells], rtol=5e-4)


def whole(service: Service, level: int, pool: str) -> np.ndarray:
    """Put the tiles of a level together."""
    count, size = -(-SIZE // (256 << level)), -(-SIZE // (1 << level))
    tiles = [
        [
            numbers(service, "tile", entry=0, head=0, pool=pool, level=level, y=y, x=x).reshape(256, 256)
            for x in range(count)
        ]
        for y in range(count)
    ]
    return np.block(tiles)[:size, :size]


def test_tracks_fill_in_with_the_pass(service: Service, long: attlas.AttentionMatrix) -> None:
    early = ask(service, "track", entry=0, head=1, name="entropy")
    assert early.progress < 1
    wait(lambda: ask(service, "track", entry=0, head=1, name="entropy").final)
    entropy, mass, most = long[0, 1].collect(
        attlas.stats.Entropy(), attlas.stats.ColumnMass(), attlas.stats.ColumnMax()
    )
    for name, expected in (("entropy", entropy), ("column_mass", mass), ("column_max", most)):
        np.testing.assert_allclose(
            numbers(service, "track", entry=0, head=1, name=name), expected, rtol=1e-4, atol=1e-5
        )
    cell = facts(service, "cell", entry=0, head=1, i=SIZE - 1, j=3)
    assert cell["column_mass"] == pytest.approx(float(mass[3]), rel=1e-4)


def test_what_a_pass_does_not_know_yet_is_not_a_number(long: attlas.AttentionMatrix) -> None:
    store = Store()
    job = PassJob(Head(long[:, :1]), store, "a", {})
    job.row = SIZE
    assert job.step()
    last = job.result.rows_of(len(job.result.done) - 1)
    for name in ("entropy", "effective_keys", "max_weight"):
        known = np.isfinite(job.result.track(name))
        assert known[last.start :].all()
        assert not known[: last.start].any()
    for name in ("column_mass", "column_max"):
        assert np.isnan(job.result.track(name)).all()
    while job.step():
        pass
    assert all(np.isfinite(job.result.track(name)).all() for name in pyramid_module.TRACKS)
    job.close()
    store.close()


def test_what_is_looked_at_comes_first(long: attlas.AttentionMatrix) -> None:
    head = Head(long[:, :1])
    store = Store()
    job = PassJob(head, store, "a", {})
    job.row = SIZE * 0.7
    order = []
    while not job.result.complete:
        before = job.result.done.copy()
        job.step()
        order.append(int(np.flatnonzero(before != job.result.done)[0]))
    distance = [abs((band + 0.5) * job.result.height - job.row) for band in order]
    assert distance == sorted(distance)
    assert not job.step()
    assert job.told["seconds_left"] == 0
    store.close()


def test_bands_hold_whole_blocks() -> None:
    for n in (1, 1000, 100_000, 10**7):
        for heads in (1, 12):
            assert band_height(n, heads) % 32 == band_height(n, heads, dense=True) % 32 == 0


def test_the_mean_of_heads_has_a_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of several heads are written out, some rows at a time, and pooled like those of one."""
    torch.manual_seed(4)
    A = attlas.attend(torch.randn(1, 3, 700, 4), torch.randn(1, 3, 600, 4), mask=attlas.Window(100, 0, offset=-50))
    monkeypatch.setattr(pyramid_module, "_BAND_ROWS", 64)
    head = Head(A)
    store = Store()
    job = PassJob(head, store, "a", {})
    while job.step():
        pass
    weights = A.to_dense()[0].double().mean(0).numpy()
    starts = [np.arange(0, size, 32) for size in (700, 600)]
    total = np.add.reduceat(np.add.reduceat(weights, starts[0], 0), starts[1], 1)
    most = np.maximum.reduceat(np.maximum.reduceat(weights, starts[0], 0), starts[1], 1)
    np.testing.assert_allclose(job.result.arrays["sum"], total, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(job.result.arrays["max"], most, rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(job.result.track("column_mass"), weights.sum(0), rtol=1e-5, atol=1e-7)
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(1)
    known = job.result.track("entropy")
    seen = weights.sum(1) > 0
    # The only weight of a row is 1 up to float32's rounding, and the entropy of its mean 0 up to the same.
    np.testing.assert_allclose(known[seen], entropy[seen], rtol=1e-4, atol=1e-7)
    assert np.isnan(known[~seen]).all()
    assert not seen.all()
    store.close()


def test_the_mean_of_heads_shows_its_sums_first() -> None:
    """Sums of blocks and columns are means of those of the heads, which need not be written out."""
    torch.manual_seed(4)
    A = attlas.attend(torch.randn(1, 3, 9000, 4), torch.randn(1, 3, 9000, 4), mask=attlas.Window(300, 0))
    service = Service(A)
    codes = complete(service, head="mean")
    wait(lambda: facts(service, "status")["jobs"] == [])
    head = Head(A)
    table = head.blocks(range(64 * 100), range(64 * 100), 64)
    part, seen = codes[:100, :100], table.cells > 0
    assert ((part > 0) == seen).all()
    np.testing.assert_allclose(decode(part)[seen], table.pooled("mean")[seen], rtol=5e-4)
    mass = numbers(service, "track", entry=0, head="mean", name="column_mass")
    np.testing.assert_allclose(mass, A.collect(attlas.stats.ColumnMass())[0][0].mean(0), rtol=1e-4)
    answer = ask(service, "track", entry=0, head="mean", name="entropy")
    assert not answer.final, "this needs the weights of all heads"
    assert not ask(service, "tile", entry=0, head="mean", level=6, y=0, x=0, pool="max").final
    service.close()


# ------------------------------------------------------------------------------------------------------------- stored


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Atlas, Path]:
    """Return a recording, and the folder beside it; every pass is then one of several bands."""
    monkeypatch.setattr(pyramid_module, "_BAND_ROWS", 256)
    torch.manual_seed(1)
    A = attlas.attend(torch.randn(1, 2, 600, 4), torch.randn(1, 2, 600, 4), mask=attlas.Causal())
    atlas = Atlas([Entry("attn", 0, "self", 0, (0, 1), (0, 600), 0, (1, 2, 600, 600), A)])
    atlas.save(tmp_path / "run.atlas")
    return attlas.load(tmp_path / "run.atlas"), tmp_path / "run.atlas.view"


def track(atlas: Atlas, store: Path | None, **parameters: Any) -> np.ndarray:
    service = Service(atlas, store=store)
    found = numbers(service, "track", entry=0, head=0, name="column_mass", **parameters)
    service.close()
    return found


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """Return the bands that were computed, and not read."""
    bands: list[range] = []
    plain = Head.band

    def band(self: Head, rows: range, size: int, wanted: Any = None) -> Any:
        bands.append(rows)
        return plain(self, rows, size, wanted)

    monkeypatch.setattr(Head, "band", band)
    return bands


def test_a_pass_is_found_again(saved: tuple[Atlas, Path], computed: list[range]) -> None:
    atlas, folder = saved
    first = track(atlas, folder)
    assert len(computed) == 3
    (stored,) = folder.iterdir()
    assert {file.name for file in stored.iterdir()} == {"pass.json", *(f"{key}.npy" for key in layout(1, 1))}
    assert (track(attlas.load(folder.with_name("run.atlas")), folder) == first).all()
    assert len(computed) == 3
    track(atlas, folder, variant="nosink")
    assert len(computed) == 6
    assert len(list(folder.iterdir())) == 2


def test_a_memory_mapped_pass_cannot_be_written(saved: tuple[Atlas, Path]) -> None:
    atlas, folder = saved
    track(atlas, folder)
    service = Service(atlas, store=folder)
    numbers(service, "track", entry=0, head=0, name="entropy")
    (job,) = service._passes._jobs.values()
    assert not job.result.arrays["sum"].flags.writeable
    assert isinstance(job.result.arrays["sum"], np.memmap)
    service.close()


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def _change(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _other(file: Path) -> None:
    np.save(file, np.zeros((3, 3), dtype=np.float32))


def _object(file: Path) -> None:
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)


@pytest.mark.parametrize("damage", [_cut, _change, _empty, _other, _object, Path.unlink])
@pytest.mark.parametrize("name", ["sum.npy", "columns.npy"])
def test_what_is_broken_is_made_again(
    saved: tuple[Atlas, Path], computed: list[range], damage: Callable[[Path], object], name: str
) -> None:
    atlas, folder = saved
    first = track(atlas, folder)
    (stored,) = folder.iterdir()
    damage(stored / name)
    assert (track(atlas, folder) == first).all()
    assert len(computed) == 6
    assert (track(atlas, folder) == first).all()
    assert len(computed) == 6, "it was stored anew"
    assert [path.name for path in folder.iterdir()] == [stored.name]


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", '{"checksums": 3}', '{"checksums": {}, "format": 99}', "[" * 100_000]
)
def test_facts_of_something_else_are_not_believed(saved: tuple[Atlas, Path], computed: list[range], text: str) -> None:
    atlas, folder = saved
    first = track(atlas, folder)
    (stored,) = folder.iterdir()
    (stored / "pass.json").write_text(text)
    assert (track(atlas, folder) == first).all()
    assert len(computed) == 6


def test_other_weights_are_another_pass(saved: tuple[Atlas, Path], computed: list[range]) -> None:
    atlas, folder = saved
    track(atlas, folder)
    A = atlas[0].problem
    other = attlas.attend(A.q.clone() + 1.0, A.k.clone(), mask=attlas.Causal())
    entry = atlas.entries[0]
    track(Atlas([Entry(*[getattr(entry, key) for key in (
        "name", "layer", "kind", "call", "heads", "queries", "first_key", "shape")], other)]), folder)  # fmt: skip
    assert len(computed) == 6
    assert len(list(folder.iterdir())) == 2


def test_what_is_not_ours_stays(saved: tuple[Atlas, Path], computed: list[range]) -> None:
    atlas, folder = saved
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    first = track(atlas, folder)
    stored = next(path for path in folder.iterdir() if path.is_dir())
    shutil.rmtree(stored)
    stored.write_text("a file where the pass goes")
    assert (track(atlas, folder) == first).all()
    assert stored.read_text() == "a file where the pass goes"
    assert (folder / "notes.txt").read_text() == "mine"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_folder_that_cannot_be_made_does_not_matter(saved: tuple[Atlas, Path], tmp_path: Path) -> None:
    atlas, _ = saved
    (tmp_path / "file").write_text("")
    for store in (tmp_path / "file", tmp_path / "no" / "such" / "folder"):
        assert np.isfinite(track(atlas, store)).all()
    assert (tmp_path / "file").read_text() == ""
    assert not (tmp_path / "no").exists()


def test_a_temporary_folder_goes(saved: tuple[Atlas, Path]) -> None:
    service = Service(saved[0])
    folder = service._store.folder
    numbers(service, "track", entry=0, head=0, name="entropy")
    assert any(folder.iterdir())
    service.close()
    assert not folder.exists()


def test_a_pass_that_was_not_finished_leaves_nothing(long: attlas.AttentionMatrix, tmp_path: Path) -> None:
    service = Service(long, store=tmp_path / "here")
    coarse(service)
    assert any((tmp_path / "here").iterdir())
    service.close()
    assert not any((tmp_path / "here").iterdir())


def test_a_full_disk_does_not_matter(saved: tuple[Atlas, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attlas.view.store.os.posix_fallocate", full)
    atlas, folder = saved
    assert np.isfinite(track(atlas, folder)).all()
    assert not any(folder.iterdir())


# --------------------------------------------------------------------------------------------------- threads, stopping


def test_closing_ends_the_work(long: attlas.AttentionMatrix) -> None:
    service = Service(long)
    coarse(service)
    threads = [thread for thread in threading.enumerate() if thread.name == "attlas-view"]
    assert threads
    service.close()
    assert not any(thread.is_alive() for thread in threads)
    answer = service.answer("info", {})
    assert (answer.status, answer.final) == (503, False)
    service.close()


def test_nobody_waits_any_more(service: Service, long: attlas.AttentionMatrix) -> None:
    for name, parameters in (
        ("tile", {"level": "0", "y": "20", "x": "0", "variant": "nosink"}),
        ("top", {"k": "3", "variant": "nosink"}),
        ("column", {"j": "5", "variant": "nosink"}),
        ("row", {"i": "5", "variant": "nosink"}),
        ("region", {"r0": "0", "r1": "9", "c0": "0", "c1": "9", "variant": "nosink"}),
    ):
        answer = service.answer(name, {"entry": "0", "head": "0", **parameters}, wanted=lambda: False)
        assert answer.status == 499, name
        assert json.loads(answer.body) == {"error": "nobody waits for the answer"}
    calls = iter([True, True, False])
    head = Head(long[:, :1], skip_first=True)
    with pytest.raises(UnwantedError):
        head.lse(range(SIZE), lambda: next(calls))
    assert head._block_has_lse.sum() == 2, "what was found before stays"


def test_many_threads_get_the_same_answers(long: attlas.AttentionMatrix) -> None:
    alone = Service(long)
    questions = [
        ("tile", {"level": str(level), "y": str(y), "x": "0", "pool": pool, "head": head})
        for level, y in ((0, 3), (2, 5), (4, 1))
        for pool in ("mean", "max")
        for head in ("0", "1")
    ]
    questions += [("row", {"i": str(i), "head": "1"}) for i in (0, 4000, SIZE - 1)]
    questions += [("cell", {"i": "8000", "j": str(j), "head": "0"}) for j in (0, 7000)]
    questions += [("search", {"text": "x"}), ("info", {}), ("thumbnail", {"head": "0", "size": "16"})]
    expected = {}
    for number, (name, parameters) in enumerate(questions):
        expected[number] = alone.answer(name, {"entry": "0", **parameters})
        assert expected[number].status == 200
    info = expected[len(questions) - 2]
    alone.close()
    service, wrong = Service(long), []

    def tab(seed: int) -> None:
        for number in np.random.default_rng(seed).permutation(len(questions)).tolist():
            name, parameters = questions[number]
            answer = service.answer(name, {"entry": "0", **parameters})
            if name != "thumbnail" and answer != expected[number]:
                wrong.append((name, parameters, answer))
            coarse(service, head=seed % 2)

    threads = [threading.Thread(target=tab, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert service.answer("info", {}) == info
    for head in (0, 1):
        assert complete(service, head=head).any()
    service.close()


def test_work_waits_for_questions_but_not_for_ever() -> None:
    worker, times = Worker(), []

    class Steps:
        def step(self) -> bool:
            times.append(time.monotonic())
            return len(times) < 3

    with worker.question():
        begin = time.monotonic()
        worker.ask("a", Steps())
        wait(lambda: len(times) == 3)
        assert times[0] - begin > 0.2, "it let the question go first"
    worker.close()
    assert not worker.jobs


def test_the_last_one_asked_for_goes_first() -> None:
    worker, order = Worker(), []
    gate = threading.Event()

    class Named:
        def __init__(self, name: str, steps: int) -> None:
            self.name, self.steps = name, steps

        def step(self) -> bool:
            gate.wait()
            order.append(self.name)
            self.steps -= 1
            return self.steps > 0

    worker.ask("first", Named("first", 3))
    wait(lambda: bool(worker.jobs))
    worker.ask("idle", Named("idle", 1), urgent=False)
    worker.ask("second", Named("second", 2))
    time.sleep(0.05)
    gate.set()
    wait(lambda: not worker.jobs)
    # Of the first one a step may have begun before the second was there.
    assert order in (["first", "second", "second", "first", "first", "idle"],
                     ["second", "second", "first", "first", "first", "idle"])  # fmt: skip
    worker.close()


def test_as_many_jobs_wait_as_the_queue_holds() -> None:
    worker, gate = Worker(), threading.Event()

    class Waiting:
        def step(self) -> bool:
            gate.wait()
            return False

    for number in range(20):
        worker.ask(number, Waiting())
        assert set(worker.jobs) == set(range(max(number - 15, 0), number + 1))
    gate.set()
    worker.close()


def test_a_pass_that_fails_says_so(
    service: Service, long: attlas.AttentionMatrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the device has gone\nwith a long story")

    monkeypatch.setattr(Head, "band", broken)
    wait(lambda: service.answer("tile", {"entry": "0", "head": "0", "level": "6", "y": "0", "x": "0"}).status == 500)
    answer = service.answer("track", {"entry": "0", "head": "0", "name": "entropy"})
    assert answer.status == 500
    assert json.loads(answer.body) == {"error": "the device has gone"}
    wait(lambda: facts(service, "status")["jobs"] == [])


def test_status_tells_what_is_being_done(service: Service) -> None:
    coarse(service)
    jobs = facts(service, "status")["jobs"]
    assert [(job["entry"], job["batch"], job["head"], job["variant"]) for job in jobs] == [(0, 0, 0, "plain")]
    assert 0 <= jobs[0]["done"] < jobs[0]["total"] == -(-SIZE // band_height(SIZE))
    wait(lambda: facts(service, "status")["jobs"] == [])


def test_passes_that_nobody_looks_at_are_let_go(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(np.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout(SIZE, SIZE).values())
    monkeypatch.setattr(passes_module, "_OPEN_BYTES", int(2.5 * size))
    for head, variant in ((0, "plain"), (1, "plain"), (0, "nosink"), (1, "nosink")):
        coarse(service, head=head, variant=variant)
    assert service._passes.nbytes <= 2.5 * size
    assert complete(service, head=1, variant="nosink").any()
    assert complete(service, head=0).any()


class Counted(attlas.Score):
    """A dot product that counts the cells that are computed."""

    scratch = 1
    finite = True
    position_free = True

    def __init__(self) -> None:
        super().__init__()
        self.cells = 0

    def forward(self, q: torch.Tensor, k: torch.Tensor, at: Any) -> torch.Tensor:
        cells = q.shape[-2] * k.shape[-2] * q.shape[0] * q.shape[1]
        self.cells += cells if cells > 256 else 0  # on a few it is run to find the tensors that it reads
        return q @ k.mT


@pytest.mark.parametrize(
    "mask", [None, attlas.Causal(), attlas.Window(40, 0), attlas.Documents(torch.arange(5000) // 9)]
)
def test_the_first_answers_take_no_pass_over_a_long_matrix(mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "attlas.view.statistics._MOST_CELLS_FOR_PLAIN", (0, 0)
    )  # it is long: no statistic is computed unasked
    score, n = Counted(), 5000
    q = torch.randn(1, 3, n, 4, generator=torch.Generator().manual_seed(1))
    service = Service(attlas.attend(q, q, score=score, mask=mask))
    try:
        assert facts(service, "info")["entries"][0]["m"] == n
        table = facts(service, "heads")
        assert (table["progress"], len(table["rows"])) == (1, 3)
        assert score.cells == 0
        facts(service, "pooling", entry=0, head=0)  # from a sample of the queries
        assert 0 < score.cells <= 2 * 256 * n
    finally:
        service.close()
