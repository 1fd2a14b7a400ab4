"""A folder is whole or not there, and a changed one is refused or right: never wrong, and nothing in it is run."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.atlas.conftest import assert_same, make_atlas, make_entry

import attlas
from attlas import AttlasError, stats
from attlas.atlas import Atlas, load

NAME = "run.atlas"


def sealed(content: dict[str, Any]) -> bytes:
    """Return JSON with a right checksum of its own, as somebody would who changes a folder on purpose."""
    text = json.dumps(content | {"sha256": "0" * 64}, separators=(",", ":")).encode()
    return text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode(), 1)


def reseal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the JSON says, and give it a right checksum."""
    content = json.loads((folder / "atlas.json").read_text())
    change(content)
    (folder / "atlas.json").write_bytes(sealed(content))


def read_all(atlas: Atlas) -> None:
    """Read everything that an atlas gives."""
    for entry in atlas.entries:
        if entry.matrix is not None:
            entry.matrix.to_dense(limit=1 << 24)
            entry.matrix.collect(stats.Entropy(), stats.ColumnMass())
    atlas.table()
    repr(atlas)


# ----------------------------------------------------------------------------------------------------------- mutations


def flip(folder: Path, dice: random.Random) -> None:
    """Change a few bytes of a file."""
    path = dice.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    for _ in range(dice.choice([1, 1, 8])):
        place = dice.randrange(len(data)) if dice.random() < 0.5 else dice.randrange(min(200, len(data)))
        data[place] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def cut(folder: Path, dice: random.Random) -> None:
    """Cut a file off, or append to it."""
    path = dice.choice(sorted(folder.iterdir()))
    data = path.read_bytes()
    path.write_bytes(data[: dice.randrange(len(data))] if dice.random() < 0.7 else data + b"\0" * dice.randrange(1, 9))


def swap(folder: Path, dice: random.Random) -> None:
    """Swap two files."""
    one, other = dice.sample(sorted(folder.iterdir()), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def remove(folder: Path, dice: random.Random) -> None:
    """Remove a file, or put something else in its place."""
    path = dice.choice(sorted(folder.iterdir()))
    path.unlink()
    match dice.randrange(5):
        case 0:
            path.symlink_to("/etc/hostname")
        case 1:
            path.mkdir()
        case 2:
            path.write_bytes(b"")
        case 3:
            os.mkfifo(path)


def add(folder: Path, dice: random.Random) -> None:
    """Add a file, or a folder."""
    path = folder / dice.choice(["0099.safetensors", ".DS_Store", "code.py", "atlas.json.tmp"])
    path.write_bytes(dice.randbytes(20)) if dice.random() < 0.7 else path.mkdir()


def header(folder: Path, dice: random.Random, *, seal: bool = False) -> None:
    """Change a word or a number in the header of a tensor file."""
    path = dice.choice(sorted(folder.glob("*.safetensors")))
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    text = json.loads(data[8 : 8 + size])
    entry = text[dice.choice(sorted(text))]
    match dice.randrange(5):
        case 0:
            entry["dtype"] = dice.choice(["F64", "I64", "BOOL", "F16", "X1", 7])
        case 1:
            entry["shape"] = dice.choice([[2**62, 4], [-1], [], [1, 1, 1], "x", [float("nan")]])
        case 2:
            entry["data_offsets"] = dice.choice([[0, 8], [8, 0], [0, 2**63], [-8, 0], None])
        case 3:
            text[dice.choice(["extra", "__metadata__"])] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        case 4:
            size += dice.choice([-8, 8, 2**40])
    raw = json.dumps(text).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes((size if size > len(data) else len(raw)).to_bytes(8, "little") + raw + data[8 + size :])
    if seal:
        facts = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        reseal(folder, lambda content: content["files"].update({path.name: facts}))


STRANGE = [None, -1, 0, 1, 3, 2**31, 2**70, 1.5, True, "", "x", "../../etc/passwd", [], {}, [[]], [1, 2], [0, 0, 0, 0],
           {"class": "Causal", "offset": 2**60}, {"class": "os.system", "name": "echo"}, {"class": "own", "name": "X"},
           {"class": "Alibi", "slopes": None}, {"class": "Window", "left": 1, "right": 2, "offset": None},
           {"class": "Not", "inner": {"class": "Not", "inner": {}}}]  # fmt: skip


def places_of(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in JSON as a container and a key."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, part in pairs for place in [(value, key), *places_of(part)]]


def words(folder: Path, dice: random.Random, *, seal: bool = False) -> None:
    """Change, remove or exchange values of the JSON."""
    content = json.loads((folder / "atlas.json").read_text())
    for _ in range(dice.choice([1, 1, 2])):
        places = places_of(content)
        container, key = dice.choice(places)
        other, other_key = dice.choice(places)
        match dice.randrange(4):
            case 0 if isinstance(container, dict):
                del container[key]
            case 1:
                container[key] = json.loads(json.dumps(other[other_key]))
            case 2 if isinstance(container[key], int):
                container[key] += dice.choice([-1, 1])
            case _:
                container[key] = json.loads(json.dumps(dice.choice(STRANGE)))
    data = sealed(content) if seal else json.dumps(content, separators=(",", ":")).encode()
    (folder / "atlas.json").write_bytes(data)


def sealed_words(folder: Path, dice: random.Random) -> None:
    """Change the JSON, and give it a right checksum."""
    words(folder, dice, seal=True)


def sealed_header(folder: Path, dice: random.Random) -> None:
    """Change a header, and give everything a right checksum."""
    header(folder, dice, seal=True)


HONEST = [flip, cut, swap, remove, add, header, words]
MALICIOUS = [sealed_words, sealed_words, sealed_header]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / NAME
    atlas = make_atlas()
    A = attlas.attend(
        torch.randn(1, 4, 5, 8),
        torch.randn(1, 4, 5, 8),
        score=attlas.Additive(8, 8, 3) + attlas.Alibi() + 2.0 * attlas.Gaussian(torch.ones(8)),
        mask=attlas.Padding([5]) & attlas.Documents([0, 0, 1, 1, 1]) & ~attlas.from_tensor(torch.rand(5, 5) > 0.9),
    )
    atlas.entries.append(make_entry(A, layer=8))
    atlas.save(folder)
    return folder


@pytest.mark.parametrize("part", range(5))
def test_mutated_folders(good: Path, tmp_path: Path, part: int) -> None:
    """500 folders: an error of attlas, or the right answer."""
    before = load(good)
    refused = 0
    for number in range(100 * part, 100 * part + 100):
        dice = random.Random(number)
        folder = tmp_path / str(number)
        shutil.copytree(good, folder)
        mutate = dice.choice(HONEST)
        mutate(folder, dice)
        try:
            after = load(folder)
        except AttlasError as error:
            refused += 1
            assert str(folder) in str(error), f"{number}: {error}"
        else:
            assert_same(before, after)
        shutil.rmtree(folder)
    assert refused > 60


@pytest.mark.parametrize("part", range(3))
def test_folders_changed_on_purpose(good: Path, tmp_path: Path, part: int) -> None:
    """300 folders whose checksums are right again: an error of attlas on load, or an atlas that can be read."""
    refused = 0
    for number in range(100 * part, 100 * part + 100):
        dice = random.Random(7000 + number)
        folder = tmp_path / str(number)
        shutil.copytree(good, folder)
        dice.choice(MALICIOUS)(folder, dice)
        try:
            atlas = load(folder)
        except AttlasError as error:
            refused += 1
            assert str(folder) in str(error) or "a score of your own" in str(error), f"{number}: {error}"
        else:
            read_all(atlas)
        shutil.rmtree(folder)
    assert refused > 40
