"""A recording of the shipped model: text of any script, kinds of its heads, and what the record keeps for them."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.view.cases import facts, numbers

import attlas
from attlas import models, stats
from attlas.recording.atlas import Atlas, Entry
from attlas.recording.metadata import token_bytes
from attlas.view import Service

TEXT = "x = '日本語 😀 é'  # ÿ\nprint(x)\n"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Atlas:
    transformers = pytest.importorskip("transformers", reason="a model is recorded; transformers is in the extra `hf`")
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.path())
    model = transformers.AutoModelForCausalLM.from_pretrained(models.path())
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad(), attlas.record(model, tokens=tokenizer, keep="cpu") as atlas:
        model(ids)
    folder = tmp_path_factory.mktemp("recorded") / "run.atlas"
    atlas.save(folder)
    return attlas.load(folder)


@pytest.fixture
def service(recorded: Atlas) -> Iterator[Service]:
    with closing(Service(recorded)) as opened:
        yield opened


def test_text_of_any_script(service: Service) -> None:
    length = facts(service, "info")["text_length"]
    found = facts(service, "tokens", start=0, stop=length)
    shown, joined = found["tokens"], found["joined"]
    assert len(shown) == length
    assert "\ufffd" not in "".join(shown)
    assert [text for *_, text in joined] == ["日", "本", "語", "😀", "é", "ÿ"]
    written = ""
    place = 0
    while place < length:
        group = next((g for g in joined if g[0] == place), (place, place + 1, shown[place]))
        written, place = written + group[2], group[1]
    assert written == TEXT
    for start, stop, text in joined:
        digits = "".join(shown[start:stop]).replace("⟨", "").replace("⟩", "").replace(" ", "")
        assert bytes.fromhex(digits).decode() == text
    (match,), total = facts(service, "search", text="本語 😀").values()
    assert total == 1
    assert match == [joined[1][0], joined[3][1]]


def test_a_stretch_of_the_text_knows_the_characters_that_it_cuts(service: Service) -> None:
    start, stop, text = facts(service, "tokens", start=0, stop=30)["joined"][0]
    part = facts(service, "tokens", start=start + 1, stop=start + 1)
    assert (part["tokens"], part["joined"]) == ([], [])
    part = facts(service, "tokens", start=start + 1, stop=start + 2)
    assert part["joined"] == [[start, stop, text]]


def test_every_head_gets_its_numbers_and_kinds(service: Service, recorded: Atlas) -> None:
    early = facts(service, "heads")
    assert early["progress"] == 0
    entries = len(recorded.entries)
    heads = recorded.entries[0].shape[1]
    of_layers = [(e, h) for e in range(entries) for h in range(heads)]
    rollouts = [(entries, depth) for depth in range(entries)]
    assert [(row["entry"], row["head"]) for row in early["rows"]] == [*of_layers, *rollouts]
    while (found := facts(service, "heads"))["progress"] < 1:
        pass
    names = [column["name"] for column in found["columns"]]
    assert {"entropy", "effective_keys", "max_weight", "first_key_mass", "previous", "first", "near"} <= set(names)
    assert not {"induction", "duplicate"} & set(names), "they need a run on random tokens"
    assert all(
        column["label"] and set(column) == {"name", "label", "unit", "description"} for column in found["columns"]
    )
    assert all(row["kinds"] == [] and row["values"]["entropy"] > 0 for row in found["rows"][len(of_layers) :])
    for row in found["rows"][: len(of_layers)]:
        assert row["kinds"]
        assert list(row["values"]) == names
        A = recorded.entries[row["entry"]].need_matrix()[0, row["head"]]
        assert row["values"]["entropy"] == pytest.approx(float(stats.entropy(A).mean()), rel=1e-5)
    assert "entropy" not in recorded.entries[0].statistics, "the recording is as it was"


def make_entry(A: attlas.AttentionMatrix | None, shape: Any, results: dict[str, Any], kind: str = "self") -> Entry:
    return Entry("attn", 0, kind, 0, tuple(range(shape[1])), (0, shape[2]), 0, shape, A, results)


def test_statistics_alone_can_be_shown_and_nothing_else() -> None:
    torch.manual_seed(0)
    A = attlas.attend(torch.randn(1, 2, 12, 4), torch.randn(1, 2, 12, 4), mask=attlas.Causal())
    results = dict(zip(("entropy", "column_mass"), A.collect(stats.Entropy(), stats.ColumnMass()), strict=True))
    service = Service(Atlas([make_entry(None, (1, 2, 12, 12), results)], tokens=list("abcdefghijkl")))
    (entry,) = facts(service, "info")["entries"]
    assert not entry["readable"]
    table = facts(service, "heads")
    assert table["progress"] == 1
    assert [column["name"] for column in table["columns"]] == ["entropy", "first_key_mass"]
    assert table["rows"][1]["values"]["entropy"] == pytest.approx(float(results["entropy"][0, 1].mean()))
    assert facts(service, "search", text="CD")["matches"] == [[2, 4]]
    for name, parameters in (
        ("tile", {"level": "0", "y": "0", "x": "0"}),
        ("row", {"i": "0"}),
        ("track", {"name": "entropy"}),
    ):
        assert service.answer(name, {"entry": "0", "head": "0", **parameters}).status == 409
    assert service.answer("row", {"entry": "0", "head": "2", "i": "0"}).status == 404
    service.close()


def test_cross_attention_and_numbers_of_your_own() -> None:
    torch.manual_seed(0)
    A = attlas.attend(torch.randn(2, 2, 12, 4), torch.randn(2, 2, 30, 4))
    mine = {"my_number": torch.tensor([[[1.0] * 12, [3.0] * 12], [[2.0] * 12, [float("nan")] * 12]])}
    service = Service(Atlas([make_entry(A, (2, 2, 12, 30), mine, "cross")]))
    while (table := facts(service, "heads"))["progress"] < 1:
        pass
    assert table["columns"][-1] == {
        "name": "my_number",
        "label": "my number",
        "unit": "",
        "description": "A statistic of the recording, mean over the queries.",
    }
    assert [row["values"]["my_number"] for row in table["rows"]] == [1.5, None]
    assert all(row["kinds"] == [] for row in table["rows"])
    assert facts(service, "info")["text_length"] == 30
    row = numbers(service, "row", entry=0, batch=1, head=1, i=3)
    np.testing.assert_allclose(row, A[1, 1, 3, :], rtol=1e-5)
    service.close()


def test_an_empty_recording() -> None:
    service = Service(Atlas([], model="none"))
    assert facts(service, "info")["entries"] == []
    table = facts(service, "heads")
    assert (table["progress"], table["columns"], table["rows"], table["telling"]) == (1.0, [], [], None)
    assert service.answer("tile", {"entry": "0"}).status == 404
    assert facts(service, "tokens", start=0, stop=0)["tokens"] == []
    service.close()


def test_something_else_cannot_be_shown() -> None:
    with pytest.raises(attlas.errors.DtypeError, match="there must be an atlas or a matrix to show"):
        Service(torch.zeros(3, 3))  # type: ignore[arg-type]


class Bytes:
    """A tokenizer that falls back on bytes, as sentencepiece does."""

    names = ("<0xE6>", "<0x97>", "▁a", "?")

    def decode(self, ids: list[int]) -> str:
        return ["\ufffd", "\ufffd", " a", "\ufffd"][ids[0]]

    def convert_ids_to_tokens(self, number: int) -> str:
        return ("<0xE6>", "<0x97>", "▁a", "日")[number]


def test_bytes_of_tokens() -> None:
    assert token_bytes(Bytes(), [2, 0, 1, 3, 0]) == {"1": "e6", "2": "97", "4": "e6"}
    assert token_bytes(None, [1, 2]) == {}
    assert token_bytes(["a"], [1]) == {}


def test_the_command_line_records_the_bytes(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="a model is recorded; transformers is in the extra `hf`")
    from attlas.cli import main

    (tmp_path / "text.py").write_text(TEXT, encoding="utf-8")
    folder = tmp_path / "run.atlas"
    assert not main(["record", "--text", str(tmp_path / "text.py"), "-o", str(folder), "--statistics", "entropy"])
    service = Service(attlas.load(folder))
    joined = facts(service, "tokens", start=0, stop=20)["joined"]
    assert [text for *_, text in joined] == ["日", "本", "語", "😀", "é", "ÿ"][: len(joined)]
    assert len(joined) >= 4
    service.close()
