"""The demo from end to end on a tiny model: what is printed, what is written, and that the numbers are right."""

import importlib.util
import json
import re
import timeit
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from tests.cli.conftest import Run
from tests.pages import data_of
from torch.nn import functional

import attlas
from attlas import models
from attlas.cli import main
from attlas.cli.card import attention_sentence, example_sentence
from attlas.cli.loading import load, texts
from attlas.cli.terminal import Terminal
from attlas.foundation.installation import install_command
from attlas.heads import Head
from attlas.heads.classification import measure_entry
from attlas.heads.telling import telling_query
from attlas.recording.atlas import Atlas


def heads_of(atlas: Atlas) -> list[Head]:
    return [head for entry in atlas.entries for head in measure_entry(atlas, entry)]


def hide_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))


def test_writes_report_pictures_and_recording(demo_folder: Path) -> None:
    assert sorted(file.name for file in demo_folder.iterdir()) == ["atlas.png", "head.png", "report.html", "run.atlas"]
    for name in ("atlas.png", "head.png"):
        assert (demo_folder / name).read_bytes().startswith(b"\x89PNG")


def test_tells_its_story_in_few_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model_and_text: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    hide_matplotlib(monkeypatch)
    monkeypatch.chdir(tmp_path)
    status = main(["demo", *model_and_text, "-o", "d", "--tokens", "100"])
    out, err = capsys.readouterr()
    assert status == 0
    lines = out.splitlines()
    assert len(lines) <= 14
    assert lines[0].startswith("tiny, 2 layers × 3 heads, reads 100 tokens of greet <b>.py (")
    head = max(heads_of(attlas.load(tmp_path / "d" / "run.atlas")), key=lambda head: head.prominence)
    assert lines[1].startswith(f"  Head {head.layer}·{head.head} ({head.patterns[0].name}) ")
    assert re.search(r"^  All 6 heads: \d ", out, flags=re.M)
    assert "6 matrices of 100 × 100 would take 234 KiB; attlas kept" in out
    assert re.search(r"^  d/report.html  .+ can be opened now$", out, flags=re.M)
    assert f"  no pictures: matplotlib is not installed:\n  {install_command('plot')}\n" in out
    assert lines[-2].startswith("  attlas stats d/run.atlas  ")
    assert lines[-1].startswith("  attlas view d/run.atlas  ")
    assert sorted(file.name for file in (tmp_path / "d").iterdir()) == ["report.html", "run.atlas"]
    assert "\x1b" not in out + err  # piped: no colours, no moving line
    assert "reading 100 tokens" in err


def test_a_narrow_terminal_has_no_longer_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch, model_and_text: tuple[str, ...]
) -> None:
    """Sentences are broken, columns of the table give way and are named; `attlas stats` needs nothing computed."""
    monkeypatch.setenv("COLUMNS", "80")
    hide_matplotlib(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *model_and_text, "-o", "d", "--tokens", "100"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert main(["stats", "d/run.atlas", "--sort", "induction", "--top", "1"]) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80
    header = next(line for line in out.splitlines() if "entropy" in line)
    assert " ".join(header.split()).startswith("layer head entropy keys first previous induction on text")
    assert re.search(r"not shown for want of room: [a-z, ]*distance", out)
    assert err == "", "the demo keeps what it has computed"


def test_the_example_has_the_weights_of_the_head(tmp_path: Path, said: Run) -> None:
    out = said("demo", "--model", models.path(), "--text", timeit.__file__, "--tokens", 300, "--output", tmp_path)
    atlas = attlas.load(tmp_path / "run.atlas")
    head = max(heads_of(atlas), key=lambda head: head.prominence)
    query = telling_query(atlas, head.layer, head.head)
    row = atlas[head.layer][0, head.head, query, :]
    shown = re.findall(r"\"((?:[^\"\\]|\\.)+)\" \(([\d.]+) %\)", " ".join(out.split()))
    assert 1 <= len(shown) <= 3
    for (word, weight), value, key in zip(shown, *row.topk(len(shown)), strict=True):
        assert json.loads(f'"{word}"').split() == atlas.tokens[key].split()
        assert float(weight) == pytest.approx(100 * float(value), abs=0.51)
        assert (atlas.ids[0, key - 1] == atlas.ids[0, query]) == (", each after an earlier" in " ".join(out.split()))


def test_an_example_names_no_earlier_copy_where_there_is_none() -> None:
    """Of four tokens "a b a c", the last one attends to the two in the middle."""
    ids, tokens = torch.tensor([0, 1, 0, 2]), ("a", " b", "a", "\n")
    values = torch.tensor([0.7, 0.26, 0.03, 0.01]).expand(1, 1, 4, 4)
    top = SimpleNamespace(values=values, indices=torch.tensor([1, 2, 0, 3]).expand(1, 1, 4, 4))
    entry = SimpleNamespace(statistics={"top_k": top}, heads=(5,))
    head = SimpleNamespace(head=5)
    text = example_sentence(tokens, ids[None], entry, head, 3)
    assert text == r'After "a ba\n" it attends to " b" (70 %), "a" (26 %).'
    assert example_sentence(tokens, torch.tensor([[2, 2, 2, 2]]), entry, head, 3).endswith(
        r'" b" (70 %), "a" (26 %), each after an earlier "\n".'
    )


def test_the_example_of_one_key_says_where_it_is() -> None:
    tokens = ["The", "  ", "  ", " cat", " sat", "x" * 40]
    ids = torch.tensor([0, 1, 1, 2, 3, 4])
    parts = ["<s>", "", "字", "", "字"]  # two characters, each in two tokens
    told = attention_sentence(parts, torch.tensor([0, 1, 2, 1, 2]), 3, [2], [0.9])
    assert told == 'After "<s>字" it attends to "字" (90 %), after an earlier copy of this token.'
    assert "attends to a part of a character (90 %)" in attention_sentence(parts, None, 4, [3], [0.9])
    said = [attention_sentence(tokens, ids, 3, [key], [0.9]) for key in (3, 2, 1, 0)]
    assert said[0] == 'After "The cat" it attends to " cat" (90 %), the token itself.'
    assert [text.rpartition(", ")[2] for text in said[1:]] == [
        "the token before.",
        "2 tokens back.",
        "the first token.",
    ]
    assert attention_sentence(tokens, torch.tensor([0, 1, 1, 2, 0, 4]), 4, [1], [0.9]).endswith(
        ', after an earlier " sat".'
    )
    assert f'After "{"x" * 11}…{"x" * 12}" it attends' in attention_sentence(tokens, ids, 5, [3], [0.5])


def test_report_is_named_before_the_other_texts_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_corpus(loaded: object, out: Path, terminal: Terminal) -> None:
        assert (tmp_path / "report.html").is_file()
        terminal.say("reading 64 texts")

    monkeypatch.setattr("attlas.cli.demo.write_demo", read_corpus)
    monkeypatch.setattr("attlas.cli.demo.picture.draw", lambda *_: None)
    assert main(["demo", "--tokens", "80", "--output", str(tmp_path), "--no-browser"]) == 0
    told = "".join(capsys.readouterr().out.split())  # a line may end within a long path
    before, _, _ = told.partition("reading64texts")
    assert f"{tmp_path / 'report.html'}" in before
    assert "canbeopenednow" in before


def test_numbers_equal_those_of_full_matrices(demo_folder: Path, model_folder: Path) -> None:
    """What patterns are is held to its definition by the tests of attlas.heads."""
    atlas = attlas.load(demo_folder / "run.atlas")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager")
    with torch.no_grad():
        weights = torch.stack(model(atlas.ids, output_attentions=True).attentions)[:, 0]
    n = weights.shape[-1]
    place, causal = torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril()
    entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)
    distance = (place[:, None] - place).clamp_min(0)
    ids = atlas.ids[0]
    follows = torch.cat([torch.zeros(n, 1, dtype=torch.bool), ids[:, None] == ids[:-1]], 1) & causal
    chance = (follows.sum(-1) / (place + 1))[follows.any(-1)].mean()
    for head in heads_of(atlas):
        A, rows = weights[head.layer, head.head], entropy[head.layer, head.head]
        found = (head.entropy, head.effective_keys, head.distance, head.chance)
        expected = (rows.mean(), rows.exp().mean(), (A * distance).sum(-1).mean(), chance)
        assert found == pytest.approx([float(value) for value in expected], rel=2e-4, abs=1e-6)
    top = weights.topk(8)
    values = torch.stack([entry.statistics["top_k"].values[0] for entry in atlas.entries])
    torch.testing.assert_close(values, top.values, atol=1e-5, rtol=1e-4)


def test_report_escapes_the_text(demo_folder: Path) -> None:
    text = (demo_folder / "report.html").read_text("utf-8")
    assert text.count("</script>") == 2  # the two elements that the page itself has
    assert "<b>tag" not in text
    assert "<title>greet &lt;b&gt;.py" in text
    data = data_of(demo_folder / "report.html")
    assert 'and a </script><b>tag</b> & "quotes"' in "".join(data["texts"]["0"]["tokens"])
    assert [text for text in ("é", "日", "🦊") if text in {whole for *_, whole in data["texts"]["0"]["joined"]}] == [
        "é",
        "日",
        "🦊",
    ]


def test_tokens_inside_a_character_have_no_text(model_folder: Path) -> None:
    loaded = load(model_folder)
    ids = torch.tensor(loaded.tokenizer("a🦊é\n  b", add_special_tokens=False)["input_ids"])
    assert texts(loaded.tokenizer, ids) == ("a", "", "", "", "🦊", "", "é", "\n", " ", " ", "b")
    cut = texts(loaded.tokenizer, ids[:3])
    assert cut[0] == "a"
    assert "".join(cut[1:]) in ("", "\N{REPLACEMENT CHARACTER}")


def test_the_shipped_model_has_the_heads_that_the_demo_is_about(tmp_path: Path, said: Run) -> None:
    text = Path(timeit.__file__)
    out = said("demo", "--model", models.path(), "--text", text, "--tokens", 512, "--output", tmp_path)
    atlas = attlas.load(tmp_path / "run.atlas")
    heads = heads_of(atlas)
    most_telling = max(heads, key=lambda head: head.prominence)
    assert most_telling.patterns[0].name == "induction"
    assert most_telling.induction > 0.5
    assert most_telling.induction_text > 10 * most_telling.chance
    assert {"induction", "previous token"} <= {head.patterns[0].name for head in heads}
    loss = float(re.search(r"\((\d\.\d\d)\s+nats\s+per\s+token\)", out)[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(models.path())
    with torch.no_grad():
        logits = model(atlas.ids).logits[0]
    assert loss == pytest.approx(float(functional.cross_entropy(logits[:-1], atlas.ids[0, 1:])), abs=0.01)
    assert loss < 4.5
