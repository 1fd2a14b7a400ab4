"""What the command line says when something cannot be done: one message, exit status 2, no traceback."""

import io
import os
import sys
from pathlib import Path

import pytest
import transformers
from tests.cli.conftest import Run

from attlas.cli import main
from attlas.cli.terminal import Terminal


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


WRONG = {
    "no text": (["--text", "nowhere.py"], "No such file or directory: nowhere.py"),
    "a folder": (["--text", "."], "Is a directory: ."),
    "not UTF-8": (["--text", "old.txt"], "byte 0xe9 at place 3 of old.txt"),
    "an empty text": (["--text", "empty.txt"], "empty.txt has no text"),
    "a short text": (["--text", "short.txt"], "12 tokens"),
    "few tokens": (["--tokens", "10"], "--tokens 10"),
    "less than none": (["--tokens", "-1"], "--tokens -1"),
    "more than the context": (["--tokens", "257"], "257 tokens"),
    "more than the text": (["--text", "page.txt", "--tokens", "200"], "100 tokens"),
    "no model": (["--model", "."], "no config.json in ."),
    "no folder": (["--output", "empty.txt"], "File exists: empty.txt"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_demonstrated(
    name: str, complaint: Run, model_and_text: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"old": b"caf\xe9 au lait", "empty": b" \n\n", "short": b"a few words", "page": b"x" * 99}
    for file, text in texts.items():
        Path(f"{file}.txt").write_bytes(text)
    words, found = WRONG[name]
    assert complaint("demo", *model_and_text, "--output", "out", *words) == f"demo: {found}"
    assert name != "no text" or not Path("out").exists()


def test_advice_fits_text_and_model(model_and_text: tuple[str, ...], out: Path, tmp_path: Path, refusal: Run) -> None:
    file = tmp_path / "long.txt"
    file.write_text("x" * 300, encoding="utf-8")
    for command in ("demo", "record"):  # the model reads 256 tokens
        assert "fix: --tokens 256" in refusal(
            command, *model_and_text, "--text", file, "--tokens", 999, "-o", out / command
        )


@pytest.mark.parametrize("link", ["garbage!!", "http://127.0.0.1:8750/token/", "e=1&h"])
def test_a_link_without_a_place_opens_nothing(link: str, complaint: Run) -> None:
    pytest.importorskip("starlette", reason="needs attlas[view]")
    assert complaint("view", "run.atlas", "--at", link) == f"view: --at {link}"


def test_models_that_cannot_be_used(model_folder: Path, tmp_path: Path, out: Path, complaint: Run) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert complaint("demo", "--model", tmp_path, "--output", out)
    config = transformers.BloomConfig(vocab_size=257, hidden_size=8, n_layer=1, n_head=1)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    assert "Bloom" in complaint("demo", "--model", tmp_path, "--output", out)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_out_that_cannot_be_written(tmp_path: Path, refusal: Run) -> None:
    tmp_path.chmod(0o500)
    assert "found: Permission denied" in refusal("demo", "--output", tmp_path / "out")


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
    assert main(["demo", "--output", str(out)]) == 130
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


def test_a_step_that_is_done_may_leave_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, err = FakeTerminal(), FakeTerminal()
    terminal = Terminal(out, err)
    terminal.keeps_steps = False
    with terminal.step("reading", 2) as tick:
        tick()
        before = err.text
        terminal.say("a result")
        assert err.text == f"{before}\r\x1b[K", "the moving line goes before a result is written"
        terminal.say("another one")
        assert err.text == f"{before}\r\x1b[K"
    assert err.text.endswith("\r\x1b[K")
    terminal = Terminal(io.StringIO(), log := io.StringIO())
    terminal.keeps_steps = False
    with terminal.step("reading"):
        pass
    assert log.getvalue().startswith("  reading  "), "a log keeps it"


@pytest.mark.parametrize(("quiet", "lines"), [(0.0, ["  reading  1/2", "  reading  0"]), (1e9, ["  reading  0"])])
def test_a_log_hears_of_long_work(quiet: float, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attlas.cli.terminal._QUIET_SECONDS", quiet)
    err = io.StringIO()
    with Terminal(io.StringIO(), err).step("reading", 2) as tick:
        tick()
        tick()
    assert [line.split(".")[0] for line in err.getvalue().splitlines()] == lines


def test_help_on_a_terminal_of_few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with pytest.raises(SystemExit) as end:
        main(["record", "--help"])
    sys.stdout.flush()
    assert end.value.code == 0
    assert b"pictures of" in raw.getvalue()


def test_without_a_standard_output(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # what Python gives a process whose standard output is closed
    assert main(["stats", str(recorded)]) == 0


def test_a_closed_pipe_is_no_error(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["stats", str(recorded)]) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk(recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("w") as out:  # closing it writes what is left, as the end of a process does
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["stats", str(recorded)]) == 2
    assert capsys.readouterr().err == "attlas: stats: [Errno 28] No space left on device\n"
