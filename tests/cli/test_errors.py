"""What the command line says when something cannot be done: one message, exit status 2, no traceback."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from attlas.cli import main
from attlas.cli.terminal import Terminal


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["demo", *map(str, arguments)]) == 2
    return capsys.readouterr().err.split("attlas: ", 1)[1]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_missing_text(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "--text", "nowhere.py", "--out", out) == (
        "demo: --text must be a file that can be read.\n"
        "  found: No such file or directory: nowhere.py\n"
        "  fix: --text FILE, with a file that exists\n"
    )
    assert not out.exists()


def test_text_that_is_a_folder(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "--text", tmp_path, "--out", out) == (
        "demo: --text must be a file that can be read.\n"
        f"  found: Is a directory: {tmp_path}\n"
        "  fix: --text FILE, with a file that exists\n"
    )


def test_text_that_is_not_utf8(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "old.txt"
    file.write_bytes(b"caf\xe9 au lait")
    assert complaint(capsys, "--text", file, "--out", out) == (
        "demo: --text must be UTF-8.\n"
        f"  found: byte 0xe9 at place 3 of {file}\n"
        f"  fix: iconv -f latin1 -t utf-8 {file} > text.txt\n"
    )


def test_empty_text(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "empty.txt"
    file.write_text(" \n\n")
    assert complaint(capsys, "--text", file, "--out", out) == (
        f"demo: --text must not be empty.\n  found: {file} has no text\n  fix: --text FILE, with some pages of text\n"
    )


def test_out_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "taken"
    file.touch()
    assert complaint(capsys, "--out", file) == (
        f"demo: --out must be a folder that can be written.\n  found: File exists: {file}\n  fix: --out ./attlas-demo\n"
    )


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_out_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert "found: Permission denied" in complaint(capsys, "--out", tmp_path / "out")


def test_too_few_tokens(tmp_path: Path, model_folder: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "short.txt"
    file.write_text("a few words")
    assert complaint(capsys, "--text", file, "--model", model_folder, "--out", out) == (
        "demo: the text must have at least 64 tokens.\n"
        "  found: 12 tokens\n"
        "  fix: --text FILE, with some pages of text\n"
    )


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (10, "demo: --tokens must be at least 64.\n  found: --tokens 10\n  fix: --tokens 64\n"),
        (-1, "demo: --tokens must be at least 64.\n  found: --tokens -1\n  fix: --tokens 64\n"),
        (
            257,
            "demo: --tokens must fit into the context of the model, 256 tokens.\n"
            "  found: --tokens 257\n"
            "  fix: --tokens 256\n",
        ),
    ],
)
def test_tokens_out_of_range(
    tokens: int, message: str, model_folder: Path, text_file: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--text", text_file, "--model", model_folder, "--out", out, "--tokens", tokens)
    assert complaint(capsys, *arguments) == message


def test_more_tokens_than_the_text_has(
    tmp_path: Path, model_folder: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.txt"
    file.write_text("x" * 99)
    assert complaint(capsys, "--text", file, "--model", model_folder, "--out", out, "--tokens", 200) == (
        "demo: the text must have at least 200 tokens.\n  found: 100 tokens\n  fix: --tokens 100\n"
    )


def test_folder_without_a_model(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "--model", tmp_path, "--out", out) == (
        "demo: --model must be a folder that a Hugging Face model was saved in.\n"
        f"  found: no config.json in {tmp_path}\n"
        "  fix: model.save_pretrained(folder); tokenizer.save_pretrained(folder)\n"
    )


def test_folder_with_a_broken_model(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    text = complaint(capsys, "--model", tmp_path, "--out", out)
    assert text.startswith("demo: --model must be a causal language model that transformers can load, with its")
    assert len(text.splitlines()) == 3


def test_model_without_the_interface(
    model_folder: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.BloomConfig(vocab_size=257, hidden_size=8, n_layer=1, n_head=1)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    text = complaint(capsys, "--model", tmp_path, "--out", out)
    assert "Bloom" in text
    assert "Traceback" not in text


def test_help_is_short_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0
    assert "demo" in text
    assert len(text.splitlines()) <= 23  # one line for each command


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("attlas ")


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--nonsense"], ["demo", "--tokens", "many"]])
def test_wrong_arguments_have_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage: attlas" in capsys.readouterr().err


def test_control_c_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attlas.cli.demo.load", interrupted)
    assert main(["demo", "--out", str(out)]) == 130
    assert capsys.readouterr().err.endswith("attlas: stopped.\n")


class FakeTerminal:
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours_only_where_they_are_wanted(no_color: str, coloured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    out, err = FakeTerminal(), FakeTerminal()
    terminal = Terminal(out, err)
    terminal.say(terminal.style("entropy", "bold"))
    with terminal.step("reading", 2) as tick:
        tick()
    assert ("\x1b[1m" in out.text) is coloured
    assert "1/2" in err.text
    assert err.text.rsplit("\x1b[K", 1)[1].startswith("  reading")


@pytest.mark.parametrize(("quiet", "lines"), [(0.0, ["  reading  1/2", "  reading  0"]), (1e9, ["  reading  0"])])
def test_a_log_hears_of_long_work(quiet: float, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attlas.cli.terminal._QUIET", quiet)
    err = io.StringIO()
    with Terminal(io.StringIO(), err).step("reading", 2) as tick:
        tick()
        tick()
    assert [line.split(".")[0] for line in err.getvalue().splitlines()] == lines


def test_module_runs_and_a_closed_pipe_is_no_error(model_folder: Path, text_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attlas.cli", "demo", "--model", str(model_folder), "--text", str(text_file)]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        complaints = process.stderr.read()
    assert process.returncode in (0, 141)
    assert "Traceback" not in complaints
