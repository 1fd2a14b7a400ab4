"""``attlas scaling`` end to end: the table, the files, and whole error texts with exit status 2."""

import json
import re
from pathlib import Path

import pytest
from tests.cli.conftest import Run

from attlas import scaling
from attlas.cli import main

SMALL = ["scaling", "--sizes", "4,32", "--keys", "16", "--queries", "8"]


def test_prints_a_table_that_pipes_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out
    assert "drawing random queries and keys" in err
    lines = out.splitlines()
    plain, scaled = lines.index("  without a scale: q·k"), lines.index("  divided by sqrt(d)")
    rows = [re.findall(r"[\d.]+", line) for line in (*lines[plain + 1 : plain + 3], *lines[scaled + 1 : scaled + 3])]
    assert [row[0] for row in rows] == ["4", "32", "4", "32"]
    found = scaling.study([4, 32], keys=16, queries=8).rows
    for row, measured in zip(rows, (found[0], found[2], found[1], found[3]), strict=True):
        assert row[1] == f"{measured.variance.value:.2f}"
        assert row[-1] == f"{measured.frobenius.value:.3f}"
    assert len({len(line) for line in lines[plain + 1 : plain + 3]}) == 1, "columns stand below each other"


def test_errors_are_shown_where_there_is_room(monkeypatch: pytest.MonkeyPatch, said: Run) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert " ± " in said(*SMALL)
    monkeypatch.setenv("COLUMNS", "80")
    assert " ± " not in said(*SMALL)


def test_writes_numbers_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "scaling.png"
    words = [*SMALL, "--distribution", "laplace", "--seed", "3", "-o", str(plot)]
    assert main([*words, "--json"]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    data = json.loads(capsys.readouterr().out)
    rows = data.pop("rows")
    assert data == {"distribution": "laplace", "keys": 16, "queries": 8, "seed": 3}
    assert rows == scaling.study([4, 32], keys=16, queries=8, distribution="laplace", seed=3).table()
    assert [file.name for file in tmp_path.iterdir()] == ["scaling.png"]
    assert main(words) == 0
    assert str(plot) in capsys.readouterr().out


def test_sizes_may_go_on_by_themselves(said: Run) -> None:
    numbers = json.loads(said("scaling", "--sizes", "2,4,...,32", "--keys", "4", "--queries", "2", "--json"))
    assert [row["d"] for row in numbers["rows"][::2]] == [2, 4, 8, 16, 32]


@pytest.mark.parametrize("target", ["variance=2", "entropy=1.5"])
def test_measures_a_model(tmp_path: Path, target: str, said: Run, model_and_text: tuple[str, ...]) -> None:
    plot = tmp_path / "heads.svg"
    arguments = [*model_and_text, "--tokens", "100", "--target", target]
    out = said("scaling", *arguments, "-o", plot)
    assert "tiny reads 100 tokens of greet <b>.py; heads of size 8" in out
    assert plot.read_text("utf-8").startswith("<?xml")
    data = json.loads(said("scaling", *arguments, "--json"))
    assert [(row["layer"], row["head"]) for row in data["rows"]] == [(la, h) for la in range(2) for h in range(3)]
    for row in data["rows"]:
        assert row["entropy"] == pytest.approx(row["entropy_predicted"], abs=0.3)  # a random model is independent
        if target == "variance=2":
            assert row["factor"] ** 2 * row["variance"] == pytest.approx(2.0)
        else:
            assert row["factor"] > 1.0


def test_an_entropy_that_no_head_can_have(refusal: Run, model_and_text: tuple[str, ...]) -> None:
    told = refusal("scaling", *model_and_text, "--tokens", "100", "--target", "entropy=99")
    assert told.startswith("scaling: the entropy must lie between 0 and the mean of ln(allowed keys).")
    assert "  fix: --target entropy=" in told


ERRORS = [
    (["--sizes", "8,x"], "--sizes 8,x"),
    (["--sizes", "1000000"], "512 keys of size 1,000,000: 512,000,000 numbers"),
    (["--keys", "1"], "--keys 1"),
    (["--queries", "0"], "--queries 0"),
    (["-o", "a.gif"], "-o a.gif"),
    (["-o", "none/a.png"], "No such file or directory: none"),
    (["--text", "a.txt"], "--text without --model"),
    (["--model", "x", "--keys", "4"], "--keys and --model"),
    (["--model", "x", "--target", "entropy"], "--target entropy"),
    (["--model", "x", "--text", "none.txt"], "No such file or directory: none.txt"),
    (["--model", "x"], "no folder x"),
]


@pytest.mark.parametrize(("words", "found"), ERRORS, ids=[" ".join(words) for words, _ in ERRORS])
def test_what_is_refused(
    words: list[str], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complaint: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    assert complaint("scaling", *words) == f"scaling: {found}"
    assert not list(tmp_path.iterdir())


def test_the_advice_fits_the_sizes(refusal: Run) -> None:
    assert refusal("scaling", "--sizes", "1000000").endswith("\n  fix: --keys 268\n")
