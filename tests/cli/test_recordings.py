"""record, stats, picture and report from end to end: what is kept is right, and what is shown is what was kept."""

import csv
import functools
import io
import json
import re
import shutil
import sys
import timeit
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.atlases import atlas_of
from tests.cli.conftest import Run
from tests.pages import data_of, heads_in

import attlas
from attlas import models, pictures, stats
from attlas.cli import main
from attlas.cli.formatting import secondary_patterns
from attlas.cli.head_statistics import selected
from attlas.cli.loading import load
from attlas.heads.classification import measure_entry


@pytest.fixture(scope="session")
def numbers_only(tmp_path_factory: pytest.TempPathFactory, model_and_text: tuple[str, ...]) -> Path:
    out = tmp_path_factory.mktemp("recordings") / "numbers.atlas"
    given = [*model_and_text, "--tokens", "120", "--keep", "statistics"]
    assert main(["record", *given, "-o", str(out)]) == 0
    return out


def eager(model_folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager")
    with torch.no_grad():
        return torch.stack(model(ids, output_attentions=True).attentions)


def test_weights_are_those_of_eager_attention(recorded: Path, model_folder: Path) -> None:
    atlas = attlas.load(recorded)
    weights = eager(model_folder, atlas.ids)
    for layer, A in enumerate(atlas):
        torch.testing.assert_close(A.to_dense(), weights[layer], atol=1e-5, rtol=1e-4)
    assert atlas.model == "tiny"
    assert len(atlas.tokens) == 120
    assert atlas.details["source"] == "greet <b>.py"
    assert atlas.details["command"].startswith("attlas record --model ")


@pytest.mark.parametrize("kept", ["recorded", "numbers_only"])
def test_statistics_are_those_of_eager_attention(kept: str, model_folder: Path, request: pytest.FixtureRequest) -> None:
    atlas = attlas.load(request.getfixturevalue(kept))
    weights = eager(model_folder, atlas.ids)
    for layer in atlas.layers():
        entry, A = atlas.entry(layer), weights[layer]
        assert (entry.matrix is None) is (kept == "numbers_only")
        found = entry.statistics
        entropy = -(A * A.clamp_min(1e-30).log()).sum(-1)
        for name, expected in (
            ("entropy", entropy),
            ("effective_keys", entropy.exp()),
            ("max_weight", A.amax(-1)),
            ("column_mass", A.sum(-2)),
        ):
            torch.testing.assert_close(found[name].float(), expected, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(found["top_k"].values, A.topk(8).values, atol=1e-5, rtol=1e-4)
        assert found["picture"].shape == (1, 3, 120, 120)


def test_generated_text_is_that_of_the_model(
    model_folder: Path, tmp_path: Path, model_and_text: tuple[str, ...], said: Run
) -> None:
    out = tmp_path / "run.atlas"
    given = (*model_and_text, "--tokens", 40, "--generate", 6)
    printed = said("record", *given, "-o", out)
    atlas = attlas.load(out)
    loaded = load(model_folder)
    ids = atlas.ids[:, :40]
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, loaded.model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(atlas.ids, ids)
    assert atlas.spans == {"text": (0, 40), "generated": (40, 46)}
    assert "it wrote: " in printed
    assert atlas[0].shape == (1, 3, 46, 46)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of the model reads, those of the random block aside."""
    found: list[int] = []
    plain = transformers.GPT2LMHeadModel.forward

    @functools.wraps(plain)
    def forward(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found.extend([input_ids.shape[1]] if len(input_ids) == 1 else [])
        return plain(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", forward)
    return found


def test_each_token_is_read_once(tmp_path: Path, calls: list[int], model_and_text: tuple[str, ...], said: Run) -> None:
    given = (*model_and_text, "--tokens", 40, "--statistics", "entropy")
    said("record", *given, "--generate", 6, "-o", tmp_path / "written.atlas")
    assert calls == [40, 1, 1, 1, 1, 1, 1]
    calls.clear()
    said("record", *given, "--chunk", 16, "-o", tmp_path / "chunks.atlas")
    assert calls == [16, 16, 8]
    calls.clear()
    said("record", *given, "--chunk", 16, "--generate", 2, "-o", tmp_path / "both.atlas")
    assert calls == [16, 16, 8, 1, 1]
    calls.clear()
    said("record", *given, "--chunk", 40, "-o", tmp_path / "whole.atlas")
    assert calls == [40]


def flat(number: Any) -> list[torch.Tensor]:
    return [number] if isinstance(number, torch.Tensor) else list(number)


@pytest.mark.parametrize("keep", ["disk", "statistics"])
@pytest.mark.parametrize("steps", [("--chunk", 50), ("--chunk", 1), ("--chunk", 119, "--generate", 2)])
def test_steps_give_what_the_whole_gives(
    steps: tuple[Any, ...], keep: str, model_folder: Path, tmp_path: Path, model_and_text: tuple[str, ...], said: Run
) -> None:
    given = (*model_and_text, "--keep", keep)
    said("record", *given, "--tokens", 110, *steps, "-o", tmp_path / "steps.atlas")
    found = attlas.load(tmp_path / "steps.atlas")
    n = len(found.tokens)
    assert n == 110 + (2 if "--generate" in steps else 0)
    loaded = load(model_folder)
    with attlas.record(loaded.model, statistics=selected(None, found.ids[0], 6)) as wanted, torch.no_grad():
        loaded.model(found.ids, use_cache=False)
    assert found.details["keep"] == keep
    for one, other in zip(found.entries, wanted.entries, strict=True):
        assert (one.name, one.queries, one.first_key, one.shape) == (other.name, (0, n), 0, (1, 3, n, n))
        assert (one.matrix is None) == (keep == "statistics")
        assert list(one.statistics) == list(other.statistics)
        for name, number in one.statistics.items():
            for a, b in zip(flat(number), flat(other.statistics[name]), strict=True):
                if a.is_floating_point():  # which of two equal weights is the larger is a matter of rounding
                    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4, equal_nan=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.atlas"]


@pytest.mark.parametrize("steps", [("--generate", 3), ("--chunk", 20)])
def test_a_model_whose_steps_are_no_whole_is_read_again(
    steps: tuple[Any, ...],
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_and_text: tuple[str, ...],
    said: Run,
) -> None:
    plain = transformers.GPT2LMHeadModel.forward

    @functools.wraps(plain)
    def forgetful(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs | {"use_cache": False, "past_key_values": None})

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", forgetful)
    out = tmp_path / "run.atlas"
    said("record", *model_and_text, "--tokens", 40, *steps, "-o", out)
    atlas, n = attlas.load(out), 43 if "--generate" in steps else 40
    assert [entry.shape for entry in atlas.entries] == [(1, 3, n, n)] * 2
    assert atlas.ids.shape == (1, n)
    assert "picture" in atlas.entries[0].statistics
    weights = eager(model_folder, atlas.ids)
    for layer, A in enumerate(atlas):
        torch.testing.assert_close(A.to_dense(), weights[layer], atol=1e-5, rtol=1e-4)


def test_layers_heads_and_statistics_that_are_asked_for(
    tmp_path: Path, model_and_text: tuple[str, ...], said: Run
) -> None:
    out = tmp_path / "run.atlas"
    given = (*model_and_text, "--tokens", 64, "--layers", "-1", "--heads", "0,2")
    said("record", *given, "--statistics", "max_logit,coverage", "--keep", "statistics", "-o", out)
    atlas = attlas.load(out)
    assert atlas.layers() == [1]
    assert atlas.entry(1).heads == (0, 2)
    assert list(atlas.entry(1).statistics) == ["max_logit", "coverage"]
    table = said("stats", out)
    assert " ".join(table.splitlines()[2].split()) == "layer head max logit coverage"


def test_reads_a_pipe(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Run) -> None:
    given = io.TextIOWrapper(io.BytesIO("\ufeffdef f(x):\r\n    return x\r\n".encode() * 4), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", given)
    out = tmp_path / "p.atlas"
    said("record", "--model", model_folder, "--text", "-", "--keep", "statistics", "-o", out)
    atlas = attlas.load(out)
    assert "".join(atlas.tokens[1:]) == "def f(x):\n    return x\n" + "\ufeffdef f(x):\n    return x\n" * 3
    assert atlas.details["source"] == "standard input"


def test_a_standard_input_that_is_closed_is_named(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complaint: Run
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it where the shell closed it
    found = complaint("record", "--model", model_folder, "--text", "-", "-o", tmp_path / "p.atlas")
    assert "it is closed" in str(found)
    assert "it is closed" in str(complaint("corpus", model_folder, "-", "-o", tmp_path / "p.corpus"))


def test_a_model_without_finite_weights_is_named(model_folder: Path, tmp_path: Path, complaint: Run) -> None:
    broken = tmp_path / "model"
    shutil.copytree(model_folder, broken)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[0, 0] = torch.nan
    model.save_pretrained(broken)
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 9)
    found = complaint("record", "--model", broken, "--text", tmp_path / "text.txt", "-o", tmp_path / "a.atlas")
    assert "NaN in layer 1" in str(found)
    assert not (tmp_path / "a.atlas").exists()


def test_a_kept_picture_has_the_size_that_it_has(model_folder: Path, tmp_path: Path, said: Run, refusal: Run) -> None:
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 9)
    folder, picture = tmp_path / "a.atlas", tmp_path / "a.png"
    given = ["record", "--model", model_folder, "--text", tmp_path / "text.txt", "--tokens", 90]
    said(*given, "--keep", "statistics", "-o", folder)
    size = attlas.load(folder).entry(0).statistics["picture"].shape[-1]
    for more in ([], ["--layer", 1, "--head", 2]):
        assert f"--size {size}" in refusal("picture", folder, *more, "--size", size // 2, "-o", picture)
        said("picture", folder, *more, "--size", size, "-o", picture)


def test_the_table_has_the_patterns_of_each_head(recorded: Path, said: Run) -> None:
    rows, atlas = json.loads(said("stats", recorded, "--json"))["rows"], attlas.load(recorded)
    heads = [head for entry in atlas.entries for head in measure_entry(atlas, entry)]
    assert len(rows) == len(heads) == 6
    for row, head in zip(rows, heads, strict=True):
        assert (row["layer"], row["head"]) == (head.layer, head.head)
        assert row["what"] == ", ".join((head.patterns[0].name, *secondary_patterns(head)))
        for name in ("entropy", "first", "previous", "near", "induction", "duplicate", "induction_text", "favourite"):
            assert row[name] == pytest.approx(getattr(head, name), rel=1e-4, abs=1e-6), name


def test_json_and_csv_say_the_same(recorded: Path, said: Run) -> None:
    found = json.loads(said("stats", recorded, "--json", "--sort", "entropy", "--top", 4))
    assert (found["model"], found["tokens"], found["source"]) == ("tiny", 120, "greet <b>.py")
    rows = list(csv.DictReader(io.StringIO(said("stats", recorded, "--csv", "--sort", "entropy", "--top", 4))))
    assert len(rows) == len(found["rows"]) == 4
    for row, known in zip(rows, found["rows"], strict=True):
        assert list(row) == list(known)
        assert float(row["entropy"]) == known["entropy"]
    entropy = [row["entropy"] for row in found["rows"]]
    assert entropy == sorted(entropy, reverse=True)
    up = json.loads(said("stats", recorded, "--json", "--sort", "+entropy"))["rows"]
    assert [row["entropy"] for row in up] == sorted(row["entropy"] for row in up)
    last = json.loads(said("stats", recorded, "--json", "--layer", "-1"))["rows"]
    assert {row["layer"] for row in last} == {1}


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal(width: int, recorded: Path, monkeypatch: pytest.MonkeyPatch, said: Run) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = said("stats", recorded).splitlines()
    assert lines[0] == "tiny, 2 layers × 3 heads, reads 120 tokens of greet <b>.py"
    assert " ".join(lines[2].split()).startswith("layer head entropy keys first previous induction")
    assert lines[2].endswith("what it is")
    assert max(map(len, lines[:9])) <= width
    rows = [line.split()[:2] for line in lines if re.match(r" +\d +\d +\d+\.\d\d ", line)]
    assert rows == [[str(layer), str(head)] for layer in range(2) for head in range(3)]


def test_pictures_of_one_head_and_of_all(
    recorded: Path, numbers_only: Path, tmp_path: Path, said: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    grid = pictures.grid

    def drawn(*given: object, **options: object) -> object:
        titles.append(options["title"])
        return grid(*given, **options)

    monkeypatch.setattr(pictures, "grid", drawn)
    head = ("--layer", "-1", "--head", 2)
    for number, (folder, options) in enumerate(
        [
            (recorded, ()),
            (recorded, ("--rows", "0:4")),
            (numbers_only, ()),
            (recorded, ("--columns", "100:")),
            (recorded, (*head, "--size", 50, "--pool", "mean", "--scale", "linear")),
            (recorded, (*head, "--rows", "10:40", "--columns", "10:40")),
            (recorded, ("--layer", "self.0", "--rows", "60:", "--columns", ":60")),
            (numbers_only, head),
        ]
    ):
        out = tmp_path / f"{number}{'.svg' if number % 3 == 1 else '.png'}"
        assert said("picture", folder, *options, "-o", out) == f"{out}\n"
        assert out.read_bytes().startswith(b"<?xml" if out.suffix == ".svg" else b"\x89PNG")
    assert titles[:4] == [
        *("tiny: 120 queries × 120 keys", "tiny: 4 queries (0:4) × 120 keys"),
        *("tiny: 120 queries × 120 keys", "tiny: 120 queries × 20 keys (100:120)"),
    ]


@pytest.mark.parametrize("options", [(), ("--layer", 0, "--head", 1), ("--layer", 0, "--head", 1, "--rows", "0:4")])
def test_pictures_say_which_sequence_they_show(options: tuple[object, ...], tmp_path: Path, said: Run) -> None:
    A = attlas.attend(torch.randn(3, 2, 60, 8), torch.randn(3, 2, 60, 8), mask=attlas.Causal())
    atlas_of(A, model="tiny", tokens=[["a"] * 60] * 3).save(tmp_path / "batch.atlas")
    said("picture", tmp_path / "batch.atlas", *options, "--columns", "0:4", "-o", tmp_path / "out.svg")
    assert "sequence 0 of 3" in (tmp_path / "out.svg").read_text(encoding="utf-8")  # also where it is drawn as shapes


def test_heads_of_a_short_text_are_not_named_by_a_short_block(
    model_and_text: tuple[str, ...], tmp_path: Path, said: Run
) -> None:
    out = tmp_path / "short.atlas"
    printed = said("record", *model_and_text, "--tokens", 3, "--layers", 0, "--heads", 1, "-o", out)
    assert "1 layer × 1 head of tiny" in printed
    assert attlas.load(out).details["block"]["period"] == 128


@pytest.mark.parametrize("kept", ["recorded", "numbers_only"])
def test_report_holds_what_was_recorded(kept: str, tmp_path: Path, request: pytest.FixtureRequest, said: Run) -> None:
    folder, out = request.getfixturevalue(kept), tmp_path / "report.html"
    assert said("report", folder, "-o", out).startswith(f"{out}  ")
    data, atlas = data_of(out), attlas.load(folder)
    ascii_only = [token for token in atlas.tokens if token.isascii() and token]
    assert [token for token in data["texts"]["0"]["tokens"] if token.isascii()] == ascii_only
    assert len(heads_in(data)) == 6
    first = data["packed"][0]
    assert first["exact"] is (kept == "recorded")
    # It opens at the head that the table of heads calls the most telling one, with one of its queries in colour.
    measured = [head for layer in atlas.layers() for head in measure_entry(atlas, atlas.entry(layer))]
    best = max(measured, key=lambda head: head.prominence)
    assert (first["entry"], first["head"]) == (best.layer, best.head)
    assert 0 <= data["state"]["pointed"]["i"] < 120


def test_heads_of_a_report_can_be_chosen(recorded: Path, tmp_path: Path, said: Run, refusal: Run) -> None:
    out = tmp_path / "report.html"
    said("report", recorded, "--heads", "1.0, 0·2", "-o", out)
    assert [(each["entry"], each["head"]) for each in data_of(out)["packed"] if each["exact"]] == [(1, 0), (0, 2)]
    wrong = refusal("report", recorded, "--heads", "1.0,1-0", "-o", out)
    assert "--heads must name a head as LAYER.HEAD.\n  found: --heads 1.0,1-0\n  fix: --heads 2.4" in wrong
    assert "found: layer 1, head 7" in refusal("report", recorded, "--heads", "1.7", "-o", out)


def test_a_recording_from_python_is_completed(model_folder: Path, tmp_path: Path, said: Run) -> None:
    loaded = load(model_folder)
    ids = torch.arange(1, 101)[None]
    with attlas.record(loaded.model, tokens=loaded.tokenizer, statistics=[stats.Entropy()]) as atlas, torch.no_grad():
        loaded.model(ids)
    atlas.save(tmp_path / "run.atlas")
    rows = json.loads(said("stats", tmp_path / "run.atlas", "--json"))["rows"]
    assert "induction" not in rows[0]  # there was no repeated block
    expected = eager(model_folder, ids)
    for row in rows:
        A = expected[row["layer"], 0, row["head"]]
        assert row["previous"] == pytest.approx(float(A.diagonal(-1).mean()), rel=1e-3)
        assert row["max_weight"] == pytest.approx(float(A.amax(-1).mean()), rel=1e-3)
    said("report", tmp_path / "run.atlas", "-o", tmp_path / "report.html")
    assert len(heads_in(data_of(tmp_path / "report.html"))) == 6


def test_an_encoder_is_recorded_too(model_folder: Path, tmp_path: Path, said: Run) -> None:
    folder, text = tmp_path / "bert", tmp_path / "text.txt"
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=257, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    text.write_text("some words of a text, " * 4)
    said("record", "--model", folder, "--text", text, "-o", tmp_path / "run.atlas")
    lines = said("stats", tmp_path / "run.atlas").splitlines()
    assert " ".join(lines[2].split()).startswith("layer head entropy keys first key max logit largest")
    assert main(["report", str(tmp_path / "run.atlas"), "-o", str(tmp_path / "report.html")]) == 0
    said("picture", tmp_path / "run.atlas", "--layer", 0, "--head", 1, "-o", tmp_path / "head.png")


def test_the_shipped_model_has_a_name() -> None:
    assert load("shipped").name == load(models.path()).name


def test_the_shipped_model_is_the_default(tmp_path: Path, said: Run) -> None:
    said("record", "--text", timeit.__file__, "--tokens", 64, "--keep", "statistics", "-o", tmp_path / "a.atlas")
    rows = json.loads(said("stats", tmp_path / "a.atlas", "--json"))["rows"]
    assert {"induction", "previous token"} <= {row["what"].split(",")[0] for row in rows}


@pytest.mark.parametrize(("rows", "columns", "labels"), [(":", ":", False), ("1:3", "2:", True), ("4:5", ":", False)])
def test_a_picture_of_cross_attention_has_the_tokens_of_both_texts(
    rows: str, columns: str, labels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    A = attlas.attend(torch.randn(2, 1, 5, 4), torch.randn(2, 1, 6, 4))
    entry = attlas.Entry("decoder.cross", 0, "cross", 0, (0,), (0, 5), 0, tuple(A.shape), A)
    texts = [
        [["ja", " wir", " sind", " da"], list("wxyz")],
        [["yes", " we", " are", " there", ".", "</s>"], list("abcdef")],
    ]
    attlas.Atlas([entry], tokens=texts[0], encoder_texts=texts[1]).save(tmp_path / "run.atlas")
    drawn: list[Any] = []
    plot = pictures.plot

    def kept(*given: Any, **options: Any) -> Any:
        drawn.append(options["labels"])
        return plot(*given, **options)

    monkeypatch.setattr(pictures, "plot", kept)
    given = ["--layer", "cross.0", "--head", "0", "--rows", rows, "--columns", columns, "-o", str(tmp_path / "a.svg")]
    assert main(["picture", str(tmp_path / "run.atlas"), *given]) == 0
    i, j = (slice(*(int(end) if end else None for end in text.split(":"))) for text in (rows, columns))
    assert drawn == ([(texts[0][0][i], texts[1][0][j])] if labels else [])  # the last query has no known text
