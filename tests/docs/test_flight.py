"""The animation of the README: how it is encoded, and that the one that is there is small and moves."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def flight() -> ModuleType:
    pytest.importorskip("PIL", reason="Pillow comes with matplotlib, in the extra `plot`")
    spec = importlib.util.spec_from_file_location("flight", ROOT / "docs" / "_build" / "flight.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_film_of_the_readme_moves_and_is_small(flight: ModuleType) -> None:
    file = ROOT / "docs" / "images" / flight.NAME
    assert file.stat().st_size <= flight.BYTES
    with flight.Image.open(file) as film:
        assert film.size == flight.SIZE
        assert film.info["loop"] == 0  # for ever
        assert film.n_frames >= 30
    first, middle, last = flight.marks_of(file)
    spread = [len(frame.resize((80, 50)).getcolors(4000)) for frame in (first, middle, last)]
    assert first.tobytes() != middle.tobytes() != last.tobytes()
    assert min(spread) > 8  # none is empty
    for name in ("README.md", "README.zh-CN.md"):
        assert f"docs/images/{flight.NAME}" in (ROOT / name).read_text(encoding="utf-8")


def test_stops_are_held_and_fewer_frames_are_as_long(flight: ModuleType, tmp_path: Path) -> None:
    base = flight.Image.linear_gradient("L").resize(flight.SIZE).convert("RGB")
    frames = []
    for at in range(17):
        frame = base.copy()
        frame.paste((200, 66, 26), (20 * at, 100, 20 * at + 60, 160))
        frames.append(frame)
    for rate, colours in ((8, 32), (4, 16)):
        file = tmp_path / f"{rate}.gif"
        file.write_bytes(flight.encode(frames, rate, colours))
        with flight.Image.open(file) as film:
            durations = []
            for at in range(film.n_frames):
                film.seek(at)
                durations.append(film.info["duration"])
        assert (durations[0], durations[-1]) == flight.HOLD
        assert sum(durations[1:-1]) == pytest.approx(2000, abs=300)
        shown = flight.marks_of(file)
        for frame, own in zip(shown, flight.pick(frames), strict=True):
            assert abs(frame.getpixel((700, 400))[0] - own.getpixel((700, 400))[0]) < 20


def test_a_film_that_shows_the_same_is_kept(
    flight: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [flight.Image.new("RGB", flight.SIZE, (10 * at, 90, 90)) for at in range(20)]
    monkeypatch.setattr(flight, "take_frames", lambda browser, address, times: frames)
    asked: list[int] = []
    flight.film(None, "", tmp_path / "a.gif", lambda first, other: False)
    content = (tmp_path / "a.gif").read_bytes()
    (tmp_path / "a.gif").write_bytes(content)
    frames = frames[::-1]
    flight.film(None, "", tmp_path / "a.gif", lambda first, other: asked.append(1) or False)
    assert (tmp_path / "a.gif").read_bytes() == content
    assert len(asked) == 3
    flight.film(None, "", tmp_path / "a.gif", lambda first, other: True)
    assert (tmp_path / "a.gif").read_bytes() != content
    monkeypatch.setattr(flight, "BYTES", 10)
    with pytest.raises(RuntimeError, match="larger than 10 bytes"):
        flight.film(None, "", tmp_path / "b.gif", lambda first, other: True)
