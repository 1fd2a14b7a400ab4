"""``attlas scaling`` end to end: the table, the files, and whole error texts with exit status 2."""

import json
import re
from pathlib import Path

import pytest

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


def test_errors_are_shown_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(SMALL) == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    assert main(SMALL) == 0
    narrow = capsys.readouterr().out
    assert " ± " in wide
    assert " ± " not in narrow


def test_writes_numbers_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, numbers = tmp_path / "scaling.png", tmp_path / "scaling.json"
    assert main([*SMALL, "--distribution", "laplace", "--seed", "3", "--plot", str(plot), "--json", str(numbers)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    data = json.loads(numbers.read_text("utf-8"))
    rows = data.pop("rows")
    assert data == {"distribution": "laplace", "keys": 16, "queries": 8, "seed": 3}
    assert rows == scaling.study([4, 32], keys=16, queries=8, distribution="laplace", seed=3).table()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["scaling.json", "scaling.png"]
    assert str(plot) in capsys.readouterr().out


def test_sizes_may_go_on_by_themselves(tmp_path: Path) -> None:
    numbers = tmp_path / "sizes.json"
    assert main(["scaling", "--sizes", "2,4,...,32", "--keys", "4", "--queries", "2", "--json", str(numbers)]) == 0
    assert [row["d"] for row in json.loads(numbers.read_text("utf-8"))["rows"][::2]] == [2, 4, 8, 16, 32]


@pytest.mark.parametrize("target", ["variance=2", "entropy=1.5"])
def test_measures_a_model(
    model_folder: Path, text_file: Path, tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, numbers = tmp_path / "heads.svg", tmp_path / "heads.json"
    arguments = ["--model", str(model_folder), "--text", str(text_file), "--tokens", "100", "--target", target]
    assert main(["scaling", *arguments, "--plot", str(plot), "--json", str(numbers)]) == 0
    out = capsys.readouterr().out
    assert "tiny reads 100 tokens of greet <b>.py; heads of size 8" in out
    assert plot.read_text("utf-8").startswith("<?xml")
    data = json.loads(numbers.read_text("utf-8"))
    assert [(row["layer"], row["head"]) for row in data["rows"]] == [(la, h) for la in range(2) for h in range(3)]
    for row in data["rows"]:
        assert row["entropy"] == pytest.approx(row["entropy_predicted"], abs=0.3)  # a random model is independent
        if target == "variance=2":
            assert row["factor"] ** 2 * row["variance"] == pytest.approx(2.0)
        else:
            assert row["factor"] > 1.0


def test_an_entropy_that_no_head_can_have(
    model_folder: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(model_folder), "--text", str(text_file), "--tokens", "100", "--target", "entropy=99"]
    assert main(["scaling", *arguments]) == 2
    err = capsys.readouterr().err
    assert "attlas: scaling: the entropy must lie between 0 and the mean of ln(allowed keys)." in err
    assert "  fix: --target entropy=" in err


ERRORS = [
    (
        ["--sizes", "8,x"],
        "scaling: --sizes must be whole numbers above 0 with commas between.\n"
        "  found: --sizes 8,x\n"
        "  fix: --sizes 8,64,512\n",
    ),
    (
        ["--sizes", "1000000"],
        "scaling: the keys of one query must not be more than 268,435,456 numbers.\n"
        "  found: 512 keys of size 1,000,000: 512,000,000 numbers\n"
        "  fix: --keys 268\n",
    ),
    (["--keys", "1"], "scaling: --keys must be at least 2.\n  found: --keys 1\n  fix: --keys 512\n"),
    (["--queries", "0"], "scaling: --queries must be at least 2.\n  found: --queries 0\n  fix: --queries 256\n"),
    (
        ["--distribution", "cauchy"],
        "scaling: --distribution must be one of normal, uniform, rademacher, laplace.\n"
        "  found: --distribution cauchy\n"
        "  fix: --distribution normal\n",
    ),
    (
        ["--plot", "a.gif"],
        "scaling: --plot must be a file that ends in .png, .svg, .pdf.\n  found: --plot a.gif\n  fix: --plot a.png\n",
    ),
    (
        ["--json", "none/a.json"],
        "scaling: --json must lie in a folder that can be written.\n"
        "  found: No such file or directory: none\n"
        "  fix: --json a.json\n",
    ),
    (
        ["--text", "a.txt"],
        "scaling: --text goes with --model.\n  found: --text without --model\n  fix: --model DIR --text ...\n",
    ),
    (
        ["--model", "x", "--keys", "4"],
        "scaling: --keys is for random vectors.\n  found: --keys and --model\n  fix: leave --keys out\n",
    ),
    (
        ["--model", "x", "--target", "entropy"],
        "scaling: --target must be variance=VALUE or entropy=NATS, with a value above 0.\n"
        "  found: --target entropy\n"
        "  fix: --target entropy=2.0\n",
    ),
    (
        ["--model", "x", "--text", "none.txt"],
        "scaling: --text must be a file that can be read.\n"
        "  found: No such file or directory: none.txt\n"
        "  fix: --text FILE, with a file that exists\n",
    ),
    (
        ["--model", "x"],
        "scaling: --model must be a folder that a Hugging Face model was saved in.\n"
        "  found: no folder x\n"
        "  fix: model.save_pretrained(folder); tokenizer.save_pretrained(folder)\n",
    ),
]


@pytest.mark.parametrize(("arguments", "text"), ERRORS, ids=[" ".join(arguments) for arguments, _ in ERRORS])
def test_errors_say_what_to_type(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["scaling", *arguments]) == 2
    err = capsys.readouterr().err
    assert err[err.index("attlas: ") :] == f"attlas: {text}"
    assert not list(tmp_path.iterdir())
