"""A folder is whole or not there, and a changed one is refused or right: never wrong, and nothing in it is run."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.atlas.conftest import assert_same, make_atlas, make_entry
from tests.messages import refusal as raised
from tests.messages import said

import attlas
from attlas import AttlasError, DtypeError, RecordingError, stats
from attlas.recording.atlas import Atlas, load
from attlas.recording.atlas.storage import Writer

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


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header of a tensor file, and what follows it."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_header(path: Path, header: dict[str, Any], rest: bytes, more: int = 0) -> None:
    """Write a tensor file, with a length of the header that may be wrong."""
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes((len(raw) + more).to_bytes(8, "little") + raw + rest)


def reseal_tensors(path: Path) -> None:
    """Give a tensor file a right checksum."""
    facts = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    reseal(path.parent, lambda content: content["files"].update({path.name: facts}))


def header(folder: Path, dice: random.Random, *, seal: bool = False) -> None:
    """Change a word or a number in the header of a tensor file."""
    path = dice.choice(sorted(folder.glob("*.safetensors")))
    text, rest = read_header(path)
    entry, more = text[dice.choice(sorted(text))], 0
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
            more = dice.choice([-8, 8, 2**40])
    write_header(path, text, rest, more)
    if seal:
        reseal_tensors(path)


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


HONEST = [flip, cut, swap, remove, add, header, words]
MALICIOUS = [partial(words, seal=True), partial(words, seal=True), partial(header, seal=True)]


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


def attempt(folder: Path) -> Atlas | str:
    """Load a folder, or return the text of the error; no other exception may come out."""
    try:
        return load(folder)
    except AttlasError as error:
        return str(error)


def mutated(good: Path, folder: Path, mutations: list[Any], seeds: range) -> Iterator[Atlas | str]:
    """Yield for each seed what a changed copy of a folder is loaded as."""
    for seed in seeds:
        dice = random.Random(seed)
        shutil.copytree(good, folder)
        dice.choice(mutations)(folder, dice)
        yield attempt(folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize("part", range(5))
def test_mutated_folders(good: Path, tmp_path: Path, part: int) -> None:
    """500 folders: an error of attlas, or the right answer."""
    before, folder, refused = load(good), tmp_path / "x", 0
    for after in mutated(good, folder, HONEST, range(100 * part, 100 * part + 100)):
        if isinstance(after, Atlas):
            assert_same(before, after)
        else:
            refused += 1
            assert str(folder) in after
    assert refused > 60


@pytest.mark.parametrize("part", range(3))
def test_folders_changed_on_purpose(good: Path, tmp_path: Path, part: int) -> None:
    """300 folders whose checksums are right again: an error of attlas on load, or an atlas that can be read."""
    folder, refused = tmp_path / "x", 0
    for atlas in mutated(good, folder, MALICIOUS, range(7000 + 100 * part, 7100 + 100 * part)):
        if isinstance(atlas, Atlas):
            read_all(atlas)
        else:
            refused += 1
            assert str(folder) in atlas or "a score of your own" in atlas
    assert refused > 40


# --------------------------------------------------------------------------------------------------------- error texts


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / NAME))


def refusal(folder: Path, file: str, found: str, fix: str = "save the atlas again, or copy the folder again.") -> None:
    """Ask for the parts of the error that loading a folder raises."""
    with pytest.raises(RecordingError) as error:
        load(folder)
    assert said(error.value) == f"load(): {found}"
    assert error.value.arguments == {"folder": str(folder), "file": file}
    assert error.value.fix == fix


def test_no_atlas_at_all(tmp_path: Path) -> None:
    assert raised(RecordingError, lambda: load(tmp_path / "x")) == "load(): no such folder"
    (tmp_path / "x").write_text("x")
    with pytest.raises(RecordingError, match="found: a file, and no folder"):
        load(tmp_path / "x")
    with pytest.raises(RecordingError, match="found: no recording in this folder"):
        load(tmp_path)


def test_foreign_and_newer_folders(folder: Path) -> None:
    (folder / "atlas.json").write_text('{"format": "other", "version": 1}')
    refusal(folder, "atlas.json", "JSON, but not of the format 'attlas-atlas'")
    (folder / "atlas.json").write_text("[1]")
    refusal(folder, "atlas.json", "JSON, but not of the format 'attlas-atlas'")
    (folder / "atlas.json").write_text('{"format": "attlas-atlas", "version": 6, "new": "words"}')
    text = "load(): format version 6, this attlas reads up to 5"
    assert raised(RecordingError, lambda: load(folder)) == text


def test_changed_numbers_are_found(folder: Path) -> None:
    text = (folder / "atlas.json").read_bytes()
    (folder / "atlas.json").write_bytes(text.replace(b'"offset":null', b'"offset":0   ', 1))
    refusal(folder, "atlas.json", "a checksum that is not that of its text: it was changed, or cut off")
    (folder / "atlas.json").write_bytes(text)
    path = folder / "0000.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refusal(folder, path.name, "a checksum that is not the one that was written: its contents were changed")
    load(folder, verify=False)  # sizes and headers are right
    path.write_bytes(data[:-1])
    refusal(folder, path.name, f"{len(data) - 1:,} bytes, and {len(data):,} were written")
    with pytest.raises(RecordingError):
        load(folder, verify=False)


ABSURD = [
    ("{" * 100_000, r"Expecting property name.*|too many parts within parts"),
    ("[" * 100_000, "too many parts within parts"),
    ('{"format":"attlas-atlas","version":1,"version":1}', "a name that stands twice in one object"),
    ('{"format":"attlas-atlas","version":NaN}', "NaN, which is no number of JSON"),
    ('{"format":"attlas-atlas","version":true}', "format version True without a checksum"),
    ('{"format":"attlas-atlas","version":2}', "format version 2 without a checksum"),
    ('{"format": "attlas-atlas", "version": 2, "sha256": "00"}', "its text is not the one that attlas wrote.*"),
    ('{"format":"attlas-atlas","version":1' + "0" * 5000 + "}", "Exceeds the limit.*"),
    ("\xff\xfe", "its text is not the one that attlas wrote, which is ASCII"),
    ("", "Expecting value.*"),
]


@pytest.mark.parametrize(("text", "found"), ABSURD, ids=range(len(ABSURD)))
def test_absurd_json(folder: Path, text: str, found: str) -> None:
    (folder / "atlas.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RecordingError) as error:
        load(folder)
    assert re.search(rf"^  found: ({found})$", str(error.value), re.M), str(error.value)


@pytest.mark.parametrize("options", [{}, {"indent": 2}, {"ensure_ascii": False}, {"sort_keys": True}])
def test_json_that_another_program_has_written_again(folder: Path, options: dict[str, Any]) -> None:
    path = folder / "atlas.json"
    text = json.dumps(json.loads(path.read_text("ascii")), **options).encode(errors="surrogatepass")
    path.write_bytes(text)
    ending = ": another program has written the JSON again" if text.isascii() else ", which is ASCII"
    refusal(folder, "atlas.json", f"its text is not the one that attlas wrote{ending}")


def test_json_of_absurd_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attlas.recording.atlas.manifest._MOST_MANIFEST_BYTES", 100)
    size = (folder / "atlas.json").stat().st_size
    refusal(folder, "atlas.json", f"{size:,} bytes, more than 100")


def first(content: dict[str, Any]) -> dict[str, Any]:
    return content["entries"][0]


def deep(content: dict[str, Any]) -> None:
    mask = {"class": "Causal", "offset": None}
    for _ in range(250):
        mask = {"class": "Not", "inner": mask}
    first(content)["matrix"]["mask"] = mask


def put(**parts: Any) -> Callable[[dict[str, Any]], object]:
    """Change parts of the first matrix."""
    return lambda content: first(content)["matrix"].update(parts)


def of(path: str, **parts: Any) -> Callable[[dict[str, Any]], object]:
    """Change what lies at a path of names."""

    def change(content: dict[str, Any]) -> None:
        place = content
        for name in path.split():
            place = place[int(name)] if name.isdecimal() else place[name]
        place.update(parts)

    return change


DOT = {"class": "ScaledDot", "scale": 1}
STEP = {"class": "Dilated", "left": 1, "right": 1, "step": 0, "offset": 0}
UNKNOWN = "{}() got an unexpected keyword argument '{}'"
TOP, Q = "entries 0 statistics top_k", "entries 0 matrix q"
KEYS = "k (2, 2, 9, 8) float32 of a matrix of shape"
ON_PURPOSE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda c: c["files"].update({"../x": {}}), "a file named '../x', not 0000.safetensors"),
    (lambda c: c["files"].update({"/etc/passwd": {}}), "a file named '/etc/passwd', not 0000.safetensors"),
    (of(Q, file="../0000.safetensors"), "a file named '../0000.safetensors', not 0000.safetensors"),
    (lambda c: c["files"].pop("0000.safetensors"), "tensors of 0000.safetensors, which is not among its files"),
    (of(Q, tensor="z"), "a tensor 'z' that 0000.safetensors does not have"),
    (of("entries 0", layer=1.0), "layer = 1.0, not an int"),
    (of("entries 0", layer=True), "layer = True, not an int"),
    (of("entries 0", call=-1), "call = -1"),
    (of("entries 0", kind="x"), "kind = 'x'"),
    (of("entries 0", shape=[2**40, 2**40, 6, 9]), "a matrix of shape (1099511627776, 1099511627776, 6, 9)"),
    (of("entries 0", shape=[2, 4, 6, 8]), f"q (2, 4, 6, 8) float32 and {KEYS} (2, 4, 6, 8)"),
    (of(Q, own=[2, 4, 48, 1], shape=[2, 4, 48, 8]), f"q (2, 4, 48, 8) float32 and {KEYS} (2, 4, 6, 9)"),
    (of(Q, own=[2, 4, 6, 8, 1], shape=[2, 4, 6, 8, 9]), f"q (2, 4, 6, 8, 9) float32 and {KEYS} (2, 4, 6, 9)"),
    (
        lambda c: put(lse=first(c)["matrix"]["q"])(c),
        "lse (2, 4, 6, 8) float32 of a matrix of shape (2, 4, 6, 9) and q (2, 4, 6, 8) float32",
    ),
    (put(head_ids=[0, 1, 2]), "2 batch_ids and 3 head_ids of a matrix of shape (2, 4, 6, 9)"),
    (put(score={"class": "ScaledDot", "scale": 1e999}), "Infinity, which is no number of JSON"),
    (put(score={"class": "ScaledDot", "scale": "1"}), "scale = '1'"),
    (put(score={"class": "SoftCap", "cap": -1, "score": DOT}), "cap = -1"),
    (put(score={"class": "ScaledDot", "scale": [1]}), "scale = [1], not a finite number or a text"),
    (put(score={"class": "ScaledDot", "scale": None, "eval": "1"}), UNKNOWN.format("ScaledDot.__init__", "eval")),
    (put(score={"class": "Dot", "scale": 1}), "an unknown score, 'Dot'"),
    (put(mask={"class": "FunctionMask", "mask_mod": "print"}), "a str, which cannot be called"),
    (put(score={"class": "builtins.eval"}), "an unknown score, 'builtins.eval'"),
    (put(mask={"class": "attlas.masks.Causal"}), "an unknown mask, 'attlas.masks.Causal'"),
    (put(mask=STEP), "step = 0"),
    (deep, "more than 200 parts within parts"),
    (of(TOP, parts=[]), "0 parts of Largest"),
    (of(TOP, **{"class": "deque"}), "an unknown result, 'deque'"),
    (of("spans", x=[3, 1]), "span 'x' = [3, 1], not the first and the last + 1"),
    (of("", tokens=[1]), "tokens = 1, not a str"),
    (lambda c: c["entries"].append(first(c)), "self.0, call 0, twice"),
]


@pytest.mark.parametrize(("change", "found"), ON_PURPOSE, ids=range(len(ON_PURPOSE)))
def test_json_changed_on_purpose(folder: Path, change: Callable[[dict[str, Any]], object], found: str) -> None:
    reseal(folder, change)
    refusal(folder, "atlas.json", found)


def test_parts_that_do_not_fit_the_matrix_are_found_on_load(folder: Path) -> None:
    """A table that is read outside its ends raises on load, and not in a later read."""
    entries = json.loads((folder / "atlas.json").read_text())["entries"]
    runs, alibi = entries[4]["matrix"]["mask"], entries[6]["matrix"]["score"]["left"]["right"]
    assert (runs["class"], alibi["class"]) == ("Runs", "Alibi")
    wrong: list[tuple[int, dict[str, Any]]] = [
        (4, {"mask": runs | {"n": 11}}),
        (6, {"mask": {"class": "Documents", "ids": entries[6]["matrix"]["mask"]["left"]["left"]["lengths"]}}),
        (6, {"head_ids": [0, 1, 2, 9], "score": alibi}),
        (6, {"score": {"class": "TensorBias", "learn": False, "t": entries[6]["statistics"].get("x", runs["first"])}}),
    ]
    text = (folder / "atlas.json").read_bytes()
    for place, parts in wrong:
        (folder / "atlas.json").write_bytes(text)
        reseal(folder, of(f"entries {place} matrix", **parts))
        with pytest.raises(RecordingError, match=r"^load\(\): atlas.json must be as attlas wrote it\."):
            load(folder)


def test_overlapping_tensors(folder: Path) -> None:
    path = folder / "0000.safetensors"
    header, rest = read_header(path)
    header["q"]["data_offsets"] = header["k"]["data_offsets"]
    write_header(path, header, rest)
    reseal_tensors(path)
    with pytest.raises(RecordingError, match=r"found: Error while deserializing header: .*"):
        load(folder)


def test_links_are_not_followed(folder: Path) -> None:
    path = folder / "0001.safetensors"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")
    refusal(folder, path.name, "a symbolic link")


# ------------------------------------------------------------------------------------------------------------- writing


def test_nothing_is_replaced_unasked(folder: Path, atlas: Atlas) -> None:
    assert raised(RecordingError, lambda: atlas.save(folder)) == "save(): an atlas"
    (folder / "thesis.tex").write_text("x")
    assert raised(RecordingError, lambda: atlas.save(folder, overwrite=True)) == "save(): thesis.tex"
    file, empty = folder.parent / "file", folder.parent / "empty"
    file.touch(), empty.mkdir()
    with pytest.raises(RecordingError, match="found: no folder"):
        atlas.save(file, overwrite=True)
    atlas.save(empty)  # an empty folder is as good as none
    load(empty)


def test_what_cannot_be_stored(tmp_path: Path) -> None:
    A = make_entry().matrix
    assert A is not None
    wrong: list[tuple[Atlas, str]] = [
        (Atlas([make_entry(A, statistics={"x": 3.0})]), "found: a float"),
        (Atlas([make_entry(A, statistics={"x": torch.zeros(2, dtype=torch.complex64)})]), "found: complex64 strided"),
        (Atlas(details={"x": object()}), "found: Object of type object is not JSON serializable"),
        (Atlas(details={"x": float("nan")}), "found: Out of range float values are not JSON compliant"),
        (Atlas(tokens=[b"x"]), "found: Object of type bytes is not JSON serializable"),  # type: ignore[list-item]
    ]
    for atlas, found in wrong:
        with pytest.raises(DtypeError) as error:
            atlas.save(tmp_path / NAME)
        assert found in str(error.value)
    twice = Atlas([make_entry(A), make_entry(A, name="other")])
    assert raised(RecordingError, lambda: twice.save(tmp_path / NAME)) == "save(): both are self.0, call 0"
    assert list(tmp_path.iterdir()) == [], "what was begun is removed"


def test_a_disk_that_cannot_be_written(tmp_path: Path, fill_disk: Callable[[], None], atlas: Atlas) -> None:
    fill_disk()
    assert raised(RecordingError, lambda: atlas.save(tmp_path / NAME)) == "save(): No space left on device"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RecordingError, match=r"found: (Not a directory|File exists)"):
        (tmp_path / "file").touch()
        atlas.save(tmp_path / "file" / "x")


def test_a_failed_replacement_leaves_the_old_one(folder: Path, atlas: Atlas, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load(folder)
    rename = Path.rename

    def broken(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(RecordingError, match="found: Input/output error"):
        atlas.save(folder, overwrite=True)
    assert_same(before, load(folder))
    assert [path.name for path in folder.parent.iterdir()] == [NAME]


def test_leftovers(folder: Path, atlas: Atlas) -> None:
    """A dead writer's leftovers go with the next writer, a living one's stay, and a set-aside atlas comes back."""
    parent = folder.parent
    (parent / f".{NAME}.partial-00000000").mkdir()
    folder.rename(parent / f".{NAME}.old-00000000")
    fix = r"a writer was stopped as it replaced the folder; rename \.run\.atlas\.old-00000000 to run\.atlas\."
    with pytest.raises(RecordingError, match=f"fix: {fix}"):
        load(folder)
    with Writer(parent / NAME, overwrite=True) as one, Writer(parent / NAME, overwrite=True) as other:
        assert sorted(path.name for path in parent.iterdir()) == sorted([NAME, one.partial.name, other.partial.name])
        load(folder)
        other.finish(atlas.entries, atlas.facts, [])
    assert [path.name for path in parent.iterdir()] == [NAME]
    assert_same(atlas, load(folder))
    assert (
        raised(RecordingError, lambda: other.finish(atlas.entries, atlas.facts, []))
        == "Writer.finish(): a closed writer"
    )


KILLED = """
import os, random, select, shutil, signal, sys, time
from pathlib import Path
import torch
import attlas
from attlas.recording.atlas import Atlas, Entry, load
from attlas.recording.atlas.storage import Writer

torch.set_num_threads(1)
os.fsync = lambda handle: None  # a process is killed here and no plug pulled: what was written stays
folder = Path(sys.argv[1])


def entries(number):
    for layer in range(2):
        t = torch.full((1, 1, 40, 64), float(number))
        A = attlas.attend(t, t, mask=attlas.Causal())
        yield Entry("attn", layer, "self", 0, (0,), (0, 40), 0, (1, 1, 40, 40), A, {"number": t[..., 0]})


def record(number, folder, times):
    for number in range(number, number + times):
        os.write(begun, b".")
        with Writer(folder, overwrite=True) as writer:
            atlas = Atlas(map(writer.add, entries(number)), details={"number": number})
            writer.finish(atlas.entries, atlas.facts, [])


def whole():
    atlas = load(folder)
    number = atlas.details["number"]
    good = len(atlas) == 2 and all(bool((A.problem.q == number).all() and (A.problem.k == number).all()) for A in atlas)
    return good and all(bool((entry.statistics["number"] == number).all()) for entry in atlas.entries)


# Moments are counted in the time that one recording takes here and now.
told, begun = os.pipe()
record(0, folder.parent / "other", 3)
start = time.perf_counter()
record(0, folder.parent / "other", 5)
took = (time.perf_counter() - start) / 5
os.read(told, 100)
dice = random.Random(4)
seen = partial = loaded = aside = 0
for kill in range(30):
    if kill % 5 == 0 and folder.exists():
        shutil.rmtree(folder)
        seen = 0
    child = os.fork()
    if child == 0:
        record(1000 * kill, folder, 1000)
    for _ in range(dice.choice([1, 2, 2, 3])):  # so many recordings begin
        os.read(told, 1)
    time.sleep(dice.uniform(0.0, 1.5 * took))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while told in select.select([told], [], [], 0)[0]:
        os.read(told, 100)
    names = [path.name for path in folder.parent.iterdir()]
    partial += any(".partial-" in name for name in names)
    if folder.exists():
        if not whole():
            sys.exit(f"kill {kill}: wrong numbers")
        loaded += 1
        seen = 1
    elif seen and not any(".old-" in name for name in names):
        sys.exit(f"kill {kill}: an atlas was lost")
    else:
        aside += seen
with Writer(folder, overwrite=True) as writer:
    writer.finish([], Atlas(details={"number": 0}).facts, [])
sys.stdout.write(f"{loaded} {partial} {aside} {sorted(path.name for path in folder.parent.iterdir())}")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """SIGKILL 30 times: nothing, or a folder that loads right; never one that loads wrong."""
    command = [sys.executable, "-W", "error", "-c", KILLED, str(tmp_path / NAME)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded, partial, _, names = done.stdout.split(" ", 3)
    assert int(loaded) >= 6, done.stdout
    assert int(partial) >= 6, f"too few were killed while they wrote: {done.stdout}"
    assert names == f"['other', '{NAME}']"


# -------------------------------------------------------------------------------------------------------------- memory


def resident() -> int:
    """Return the bytes of this process that are in memory, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_tokens_stay_on_disk_until_they_are_read(tmp_path: Path) -> None:
    k = torch.randn(1, 1, 1 << 17, 64)
    Atlas([make_entry(attlas.attend(k[:, :, :4], k), queries=(0, 4))]).save(tmp_path / NAME)
    before = resident()
    atlas = load(tmp_path / NAME)
    after = resident()
    assert after - before < 4e6, f"loading took {after - before:,} bytes"
    assert torch.equal(atlas[0].problem.k, k)
    assert resident() - after > 24e6, "this test would not see it"
    atlas[0].problem.k.zero_()  # a private copy: the file stays as it is
    assert torch.equal(load(tmp_path / NAME)[0].problem.k, k)


def test_writing_takes_a_slice_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attlas.recording.atlas import tensors

    monkeypatch.setattr(tensors, "_SLICE_BYTES", 1 << 10)
    t = torch.randn(3, 50, 20).transpose(1, 2)
    sizes = [len(part) for part in tensors._byte_slices(t)]
    assert max(sizes) <= 1 << 10
    assert b"".join(bytes(part) for part in tensors._byte_slices(t)) == t.contiguous().numpy().tobytes()
    atlas = make_atlas()
    atlas.save(tmp_path / NAME)
    assert_same(atlas, load(tmp_path / NAME))
