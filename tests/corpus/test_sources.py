"""Where texts come from: files of every kind, rows and tokens; and what cannot be read."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.own_models import LanguageModel, Twice, some_ids

import attlas
from attlas.corpus.sources import Cutter, Document, documents


class Letters:
    """A tokenizer that makes a token of each letter, and puts one in front."""

    name_or_path = "letters"

    def __call__(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        ids = [ord(letter) % 11 + 1 for letter in text]
        return {"input_ids": [0, *ids] if add_special_tokens else ids}

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{number}>" for number in ids)


def read(source: Any, column: str | None = None) -> list[tuple[str, Any]]:
    """Return the names and contents of all documents."""
    found = [(one.source, one.content) for one in documents(source, column)]
    return [(name, content.tolist() if isinstance(content, np.ndarray) else content) for name, content in found]


def test_folder_of_files_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second", encoding="utf-8")
    (tmp_path / "sub" / "a.py").write_text("täxt", encoding="utf-8")
    (tmp_path / ".hidden").write_text("not read")
    (tmp_path / "d.jsonl").write_text('{"text": "x"}\n\n{"text": "y"}\n')
    pq.write_table(pa.table({"n": [1, 2], "text": ["p", "q"]}), tmp_path / "e.parquet")
    with (
        pa.OSFile(str(tmp_path / "f.arrow"), "wb") as file,
        pa.ipc.new_stream(file, pa.schema([("text", pa.string())])) as out,
    ):
        out.write_batch(pa.RecordBatch.from_pydict({"text": ["stream"]}))
    with (
        pa.OSFile(str(tmp_path / "g.arrow"), "wb") as file,
        pa.ipc.new_file(file, pa.schema([("text", pa.string())])) as out,
    ):
        out.write_batch(pa.RecordBatch.from_pydict({"text": ["file"]}))
    np.save(tmp_path / "h.npy", np.array([3, 1, 2]))
    assert read(tmp_path) == [
        ("b.txt", "second"),
        ("d.jsonl#0", "x"),
        ("d.jsonl#2", "y"),
        ("e.parquet#0", "p"),
        ("e.parquet#1", "q"),
        ("f.arrow#0", "stream"),
        ("g.arrow#0", "file"),
        ("h.npy", [3, 1, 2]),
        ("sub/a.py", "täxt"),
    ]
    assert [name for name, _ in read(str(tmp_path / "*.txt"))] == [(tmp_path / "b.txt").as_posix()]


def test_several_paths_have_different_names(tmp_path: Path) -> None:
    """By what the paths do not have in common; a name that is no text is written as one."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
    (tmp_path / "b" / "r.jsonl").write_text('{"text": "row"}\n')
    a, b = tmp_path / "a", tmp_path / "b"
    assert [name for name, _ in read([a / "x.txt", b / "x.txt", b / "r.jsonl"])] == [
        "a/x.txt",
        "b/x.txt",
        "b/r.jsonl#0",
    ]
    assert [name for name, _ in read([a, b])] == ["a/x.txt", "b/r.jsonl#0", "b/x.txt"]
    assert [name for name, _ in read([a / "x.txt"])] == ["x.txt"]
    assert [name for name, _ in read(path for path in (a / "x.txt", b / "x.txt"))] == [
        (tmp_path / name / "x.txt").as_posix() for name in ("a", "b")
    ]
    try:
        Path(os.fsdecode(os.fsencode(a) + b"/\xff.txt")).write_text("named in another encoding")
    except OSError:
        pytest.skip("the file system takes names in UTF-8 only")
    assert [name for name, _ in read(a)] == ["\\udcff.txt", "x.txt"]


def test_rows_in_memory() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    assert read(datasets.Dataset.from_dict({"ids": [[1, 2], [3]]})) == [("#0", [1, 2]), ("#1", [3])]
    assert read(["ab", [1, 2], torch.tensor([4, 5]), {"own": "row"}], "own") == [
        ("#0", "ab"),
        ("#1", [1, 2]),
        ("#2", [4, 5]),
        ("#3", "row"),
    ]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for data, expected in (
        (b"a text\nof lines", [("stdin", "a text\nof lines")]),
        (b'{"text": "row"}\n{"text": "two"}', [("stdin#0", "row"), ("stdin#1", "two")]),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert read("-") == expected


def test_column_by_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["1"], "b": ["2"]}), tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet", "b") == [("t.parquet#0", "2")]
    with pytest.raises(attlas.ShapeError, match="columns a, b"):
        read(tmp_path / "t.parquet")
    with pytest.raises(attlas.ShapeError, match="'c'"):
        read(tmp_path / "t.parquet", "c")


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = pa.table({"text": ["long enough a text"] * 1000})
    pq.write_table(good, tmp_path / "t.parquet")
    data = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(attlas.AttlasError, match=r"t\.parquet"):
        read(tmp_path)
    (tmp_path / "t.parquet").unlink()
    (tmp_path / "a.txt").write_text("text")

    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(attlas.AttlasError, match=r"Permission denied[^$]*goes on where it was") as error:
        read(tmp_path)
    assert "a.txt" in str(error.value)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(attlas.ShapeError, match="no file"):
        read(tmp_path)
    with pytest.raises(attlas.ShapeError, match="several texts"):
        read(3)


@pytest.mark.parametrize(
    ("n", "stride", "starts"),
    [(3, 7, [0]), (7, 7, [0]), (8, 7, [0, 7]), (20, 7, [0, 7, 14]), (20, 3, [0, 3, 6, 9, 12, 15])],
)
def test_cut(n: int, stride: int, starts: list[int]) -> None:
    """Every token of a document is read, and none twice where the stride is the length."""
    cutter = Cutter(Letters(), 8, stride, 12)  # a text is 7 letters and the token in front
    text = "".join(chr(97 + i) for i in range(n))
    found = list(cutter.cut(Document("d", text)))
    assert [one.start for one in found] == starts
    ids = Letters()(text, add_special_tokens=False)["input_ids"]
    for one in found:
        assert one.ids is not None
        assert one.ids.tolist() == [0, *ids[one.start : one.start + 7]]
    assert found[-1].start + 7 >= n


def test_texts_that_fail_are_named(model: torch.nn.Module, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"\xff\xfe broken")
    (tmp_path / "in" / "b.txt").write_text("a good text")
    (tmp_path / "in" / "c.txt").write_text("")
    (tmp_path / "in" / "d.jsonl").write_text('{"text": 5}\nnot json\n{"ids": [1, 99]}\n')
    with pytest.raises(attlas.ShapeError, match="columns ids"):
        attlas.corpus(model, tmp_path / "in", tmp_path / "wrong", tokenizer=Letters(), column="text")
    (tmp_path / "in" / "d.jsonl").write_text('{"text": 5}\nnot json\n{"text": [1, 99]}\n')
    found = attlas.corpus(model, tmp_path / "in", tmp_path / "out", tokenizer=Letters(), column="text")
    assert found is not None
    reasons = {row["source"]: row["reason"] for row in found.failed()}
    assert reasons.keys() == {"a.txt", "c.txt", "d.jsonl#0", "d.jsonl#1", "d.jsonl#2"}
    assert "UTF-8" in reasons["a.txt"]
    assert "fewer than 2 tokens" in reasons["c.txt"]
    assert "token 99" in reasons["d.jsonl#2"]
    assert found.config["counts"] == {"texts": 1, "tokens": 12, "failed": 5}
    assert found.samples(0, 0)[0].tokens[:2] == ["<0>", "<10>"]


def test_a_text_on_which_the_model_fails(model: torch.nn.Module, texts: list[list[int]], tmp_path: Path) -> None:
    """The batch is read again one by one; NaN and errors of the model are named, and others of the batch stay."""
    real = model.transformer.wte.forward

    def embed(ids: torch.Tensor) -> torch.Tensor:
        if ids.shape[0] < 4 and (ids[:, :3] == 7).all(dim=1).any():
            raise RuntimeError("out of luck\nmore")
        out = real(ids)
        return out * torch.where((ids[:, :1] == 8), torch.nan, 1.0).unsqueeze(-1)

    model.transformer.wte.forward = embed
    try:
        corpus = attlas.corpus(
            model, [[1, 2, 3], [7, 7, 7], [8, 1, 2], [4, 5, 6]], tmp_path / "out", batch=3, failures=0.6
        )
    finally:
        model.transformer.wte.forward = real
    assert corpus is not None
    assert {row["text"]: row["reason"] for row in corpus.failed()} == {
        1: "RuntimeError: out of luck",
        2: "weights must be finite. found: NaN",
    }
    assert corpus.texts()["text"].to_pylist() == [0, 3]


def test_too_many_failures_end_the_run(model: torch.nn.Module, tmp_path: Path) -> None:
    good, bad = [[1, 2, 3]] * 60, [[1, 99]] * 30
    with pytest.raises(attlas.RecordingError, match="small share") as error:
        attlas.corpus(model, good + bad, tmp_path / "out", failures=0.1)
    assert error.value.found.endswith("texts failed, the last one: token 99 is not one of the model's 12")
    unfinished = attlas.load(tmp_path / "out")
    assert unfinished.config["counts"]["texts"] == 60
    assert {row["reason"] for row in unfinished.failed()} == {"token 99 is not one of the model's 12"}
    with pytest.raises(attlas.RecordingError, match="small share"):
        attlas.corpus(model, bad[:3], tmp_path / "all")


def test_bad_settings(model: torch.nn.Module, tmp_path: Path) -> None:
    for options in {"length": 33}, {"length": 1}, {"batch": 0}, {"rank": 2, "world": 2}, {"stride": 0}:
        with pytest.raises(attlas.AttlasError):
            attlas.corpus(model, [[1, 2]], tmp_path / "out", **options)
    with pytest.raises(attlas.ShapeError, match="no tokenizer"):
        attlas.corpus(model, ["characters"], tmp_path / "letters")
    with pytest.raises(attlas.DtypeError):
        attlas.corpus("model", [[1, 2]], tmp_path / "out")
    assert json.loads((tmp_path / "letters" / "parts" / "run.json").read_text())["settings"]["length"] == 32


def test_models_that_call_torch_themselves(tmp_path: Path) -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(9, 8)
            self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            return self.attention(x, x, x, need_weights=False)[0]

    found = attlas.corpus(Plain(), [[1, 2, 3, 4]], tmp_path / "out", patch_sdpa=True)
    assert found is not None
    assert found.heads == [(0, 0), (0, 1)]
    with pytest.raises(attlas.RecordingError, match="patch_sdpa=True"):
        attlas.corpus(Plain(), [[1, 2, 3, 4]], tmp_path / "other")


def test_models_with_more_positions_than_tokens(tmp_path: Path) -> None:
    """Random tokens are tokens of the model, and no more of them at once than its texts have."""

    class Short(LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.positions = torch.nn.Embedding(80, self.embedding.embedding_dim)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.seen = max(getattr(self, "seen", 0), ids.shape[1])
            self.positions(torch.arange(ids.shape[1]))
            return super().forward(ids)

    model = Short()
    vocabulary = model.embedding.num_embeddings
    assert vocabulary < 80
    found = attlas.corpus(model, [some_ids(20, 1)[0].tolist()], tmp_path / "out", length=30)
    assert found is not None
    assert model.seen == 30
    assert len(json.loads((tmp_path / "out" / "vocabulary.json").read_text())) == vocabulary


def test_models_that_compute_with_attlas(tmp_path: Path) -> None:
    """Each matrix of a module is an attention, also where several values are multiplied with it."""
    model, texts = LanguageModel(kind=Twice), [some_ids(20, 1), some_ids(31, 1)]
    model.blocks[0].eval()
    found = attlas.corpus(model, [ids[0].tolist() for ids in texts], tmp_path / "out")
    assert found is not None
    assert found.heads == [(layer, head) for layer in range(4) for head in range(4)]
    assert [part.training for part in (model, *model.blocks)] == [True, False, True]  # as it was
    table = found.table()
    assert list(table["module"][::4]) == ["blocks.0.attn", "blocks.0.attn#1", "blocks.1.attn", "blocks.1.attn#1"]
    entropy = torch.zeros(16, dtype=torch.float64)
    for ids in texts:
        with attlas.record(model, statistics=[attlas.stats.Entropy()]) as atlas, torch.no_grad():
            model(ids)
        entropy += torch.cat([entry.statistics["entropy"][0].double().sum(-1) for entry in atlas.entries])
    torch.testing.assert_close(torch.tensor(table["entropy"].tolist()).double(), entropy / 51, rtol=1e-5, atol=1e-6)
