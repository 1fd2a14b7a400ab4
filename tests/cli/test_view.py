"""attlas view: what it refuses, that it serves, and that it ends; the end of the demo."""

import contextlib
import http.client
import io
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from tests.cli.conftest import Run

import attlas
from attlas.cli import demo, main, view
from attlas.cli.terminal import Terminal
from attlas.foundation.installation import install_command
from attlas.recording.atlas import Atlas
from attlas.view.server import store_beside

ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/[\w-]{32}/(#\S+)?")


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    out = tmp_path / "temporary"
    out.mkdir()
    return out


class Command:
    """The command line in a process of its own."""

    def __init__(self, *words: object, temporary: Path | None = None, stdin: int = subprocess.DEVNULL) -> None:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | ({"TMPDIR": str(temporary)} if temporary else {})
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "attlas", *map(str, words)],
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, bufsize=0,
        )  # fmt: skip

    def address(self) -> str:
        """Wait for the line that says it."""
        line = ""
        until = time.monotonic() + 300
        while not ADDRESS.search(line) and time.monotonic() < until and self.process.poll() is None:
            if select.select([self.process.stdout], [], [], 1)[0]:
                line = self.process.stdout.readline().decode()
        found = ADDRESS.search(line)
        assert found, self.process.communicate(timeout=20)
        return found[0]

    def end(self, number: int) -> tuple[int, str, str]:
        """Send a signal, and return the exit status and what was written since."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out.decode(), err.decode()


@contextlib.contextmanager
def command(*words: object, **more: object) -> Iterator[Command]:
    found = Command(*words, **more)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.communicate()


def get(address: str, path: str) -> tuple[int, bytes]:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    connection.request("GET", parts.path + path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


# ---------------------------------------------------------------------------------------------------------- it serves


def test_it_serves_a_folder_until_it_is_told_to_stop(recorded: Path, tmp_path: Path) -> None:
    """With another recording to compare with, and opened at a place."""
    other = tmp_path / "other.atlas"
    shutil.copytree(recorded, other)
    link = "http://127.0.0.1:8750/old/#e=1&h=2&pin=5.3"
    with command("view", recorded, "--no-browser", "--port", 0, "--compare", other, "--at", link) as viewer:
        address = viewer.address()
        assert address.endswith("/#e=1&h=2&pin=5.3")
        status, body = get(address, "api/info")
        assert status == 200
        info = json.loads(body)
        # The two layers of each recording, and their rollout.
        assert [len(entry["heads"]) for entry in info["entries"]] == [3, 3, 2] * 2
        assert [bool(entry["recording"]) for entry in info["entries"]] == [False] * 3 + [True] * 3
        assert info["text_length"] == 120
        assert info["title"].startswith("greet <b>.py · tiny")
        assert get(address, "")[0] == 200
        assert get(address, "../etc/passwd")[0] == 404
        status, out, err = viewer.end(signal.SIGINT)
    assert status == 0
    assert "http://" not in out  # the address was written once
    assert out.strip() == "2 layers × 3 heads of tiny, 120 tokens; Ctrl-C closes it"
    assert err.splitlines()[-1] == "attlas: the viewer is closed."
    assert "Traceback" not in err
    assert "uvicorn" not in out + err


def test_the_overviews_are_kept_beside_the_folder(tmp_path: Path) -> None:
    assert store_beside(tmp_path / "own.atlas") == store_beside(Path(f"{tmp_path}/own.atlas/"))
    assert store_beside(tmp_path / "own.atlas") == tmp_path / "own.atlas.view"


def test_it_records_first_and_leaves_nothing(
    model_folder: Path,
    temporary: Path,
    model_and_text: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def served(service: Any, **settings: object) -> None:
        info = json.loads(service.answer("info", {}).body)
        assert info["text_length"] == 64
        assert info["reading"]["model"] == model_folder.name  # which reads texts typed on the page
        assert list(temporary.iterdir())

    monkeypatch.setattr("attlas.view.server.serve_until_stopped", served)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert main(["view", *model_and_text, "--tokens", "64", "--no-browser"]) == 0
    assert "reading 64 tokens" in capsys.readouterr().err
    assert not list(temporary.iterdir())


def test_it_does_not_wait_for_a_long_step(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, left = threading.Event(), []

    class Busy:
        def __init__(self, atlas: Atlas, **settings: object) -> None:
            self.settings = settings

        def close(self) -> None:
            go.wait(60)

    monkeypatch.setattr("attlas.view.service.Service", Busy)
    monkeypatch.setattr("attlas.view.server.serve_until_stopped", lambda service, **settings: None)
    monkeypatch.setattr(view, "_SHUTDOWN_SECONDS", 0.1)
    monkeypatch.setattr(view.os, "_exit", left.append)
    assert main(["view", str(recorded)]) == 0
    assert left == [0]
    go.set()
    assert main(["view", str(recorded)]) == 0
    assert left == [0]  # where nothing is computed any more, the process ends as usual


def test_it_can_be_ended_while_it_records(model_folder: Path, temporary: Path) -> None:
    given = ("view", "--model", model_folder, "--text", "-")  # a pipe from which nothing comes
    with command(*given, temporary=temporary, stdin=subprocess.PIPE) as viewer:
        until = time.monotonic() + 300
        while not list(temporary.glob("attlas-view-*")) and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.2)
        viewer.process.send_signal(signal.SIGTERM)
        _, err = viewer.process.communicate(timeout=30)
    assert viewer.process.returncode == 128 + signal.SIGTERM
    assert b"Traceback" not in err
    assert not list(temporary.iterdir())


def test_a_recording_can_be_kept(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_and_text: tuple[str, ...]
) -> None:
    shown = []
    monkeypatch.setattr(view, "show", lambda *given: shown.append(given) or True)
    out = tmp_path / "kept.atlas"
    given = [*model_and_text, "--tokens", "64", "--generate", "4", "-o", str(out)]
    assert main(["view", *given, "--port", "1234"]) == 0
    ((folder, _, arguments, model),) = shown
    assert (folder, arguments.port, arguments.no_browser, model) == (out, 1234, False, str(model_folder))
    atlas = attlas.load(out)
    assert len(atlas.tokens) == 68
    assert atlas.spans["generated"] == (64, 68)


@pytest.mark.parametrize("named", [(), ("--model", "shipped")])
def test_the_shipped_model_is_read_with_its_parts(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch, named: tuple[str, ...]
) -> None:
    monkeypatch.setattr(view, "show", lambda *given: True)
    out = tmp_path / "kept.atlas"
    assert main(["view", *named, "--text", str(text_file), "--tokens", "16", "-o", str(out)]) == 0
    assert attlas.load(out).parts  # for Why?


# ---------------------------------------------------------------------------------------------------------- refusals


def test_what_is_not_said_or_said_twice(complaint: Run) -> None:
    assert complaint("view") == "view: neither"
    assert complaint("view", "run.atlas", "--tokens", 100) == "view: run.atlas and --tokens"


def test_folders_that_are_none(tmp_path: Path, text_file: Path, complaint: Run) -> None:
    missing = tmp_path / "missing.atlas"
    assert complaint("view", missing) == f"view: nothing there: {missing}"
    assert complaint("view", text_file) == f"view: no folder: {text_file}"
    assert "atlas.json" in complaint("view", tmp_path)
    Atlas(model="nobody").save(tmp_path / "empty.atlas")
    assert complaint("view", tmp_path / "empty.atlas").endswith(f"view: none in {tmp_path / 'empty.atlas'}")


def test_what_cannot_be_recorded_is_said_of_view(model_folder: Path, complaint: Run) -> None:
    assert complaint("view", "--text", "nowhere.txt") == "view: No such file or directory: nowhere.txt"
    assert complaint("view", "--model", model_folder, "--tokens", 5000).startswith("view: ")


def test_ports(recorded: Path, complaint: Run) -> None:
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert complaint("view", recorded, "--port", port, "--no-browser") == f"view: port {port} is taken"
    assert complaint("view", recorded, "--port", 70_000) == "view: port 70000"
    started = set(threading.enumerate()) - before
    assert not [thread for thread in started if thread.name.startswith("attlas-view")]


def test_without_the_extra(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, complaint: Run
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert complaint("view", recorded) == "view: no module named uvicorn"
    view.open_if_attended(recorded, Terminal(), browser=True)
    assert capsys.readouterr().out == f"  attlas view '{recorded}'  needs:\n  {install_command('view')}\n"


# --------------------------------------------------------------------------------------------- the end of the demo


def test_the_demo_saves_its_run(demo_folder: Path) -> None:
    atlas = attlas.load(demo_folder / "run.atlas")
    assert (len(atlas), atlas.entries[0].shape) == (2, (1, 3, len(atlas.tokens), len(atlas.tokens)))
    assert atlas.details["source"] == "greet <b>.py"
    assert "".join(atlas.tokens[1:]).startswith("def greet(name):")
    assert float(atlas[1][0, 2].sum(-1).sub(1).abs().max()) < 1e-5
    assert atlas.ids.dtype == torch.int64


def test_the_demo_says_how_to_open_it_and_never_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model_and_text: tuple[str, ...]
) -> None:
    given = ["demo", *model_and_text, "--output", str(tmp_path / "out")]
    assert main(given) == 0  # nobody sits here
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"  attlas view {tmp_path / 'out' / 'run.atlas'}  pans and zooms through every cell, in the browser"
    before = (tmp_path / "out" / "run.atlas" / "atlas.json").stat().st_mtime_ns
    assert main([*given, "--tokens", "100"]) == 0  # the run takes the place of the older one
    assert (tmp_path / "out" / "run.atlas" / "atlas.json").stat().st_mtime_ns > before
    assert attlas.load(tmp_path / "out" / "run.atlas").ids.shape == (1, 100)


def test_the_demo_replaces_nothing_but_a_run(tmp_path: Path, complaint: Run) -> None:
    letter = tmp_path / "run.atlas" / "letter.txt"
    letter.parent.mkdir()
    letter.write_text("keep me")
    assert complaint("demo", "--output", tmp_path) == f"demo: no atlas: {letter.parent}"
    assert letter.read_text() == "keep me"


class Attended(Terminal):
    """A terminal before which somebody sits."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.opened: list[Path] = []


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> Attended:
    terminal = Attended()
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(terminal.out, "isatty", lambda: True)
    monkeypatch.setattr(view.sys, "stdin", terminal.out)
    monkeypatch.setattr("attlas.view.server.has_browser", lambda: True)
    monkeypatch.setattr(view, "show", lambda folder, terminal, *_: terminal.opened.append(folder) or True)
    return terminal


def test_the_demo_opens_the_viewer_where_somebody_sits_and_nothing_elsewhere(
    attended: Attended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view.open_if_attended(tmp_path, attended, browser=False)
    with monkeypatch.context() as patch:
        patch.setenv("CI", "true")
        view.open_if_attended(tmp_path, attended, browser=True)
    with monkeypatch.context() as patch:
        patch.setattr("attlas.view.server.has_browser", lambda: False)
        view.open_if_attended(tmp_path, attended, browser=True)
    with monkeypatch.context() as patch:
        patch.setattr(view.sys, "stdin", None)
        view.open_if_attended(tmp_path, attended, browser=True)
    with monkeypatch.context() as patch:
        patch.setattr(attended.out, "isatty", lambda: False)
        view.open_if_attended(tmp_path, attended, browser=True)
    assert attended.opened == []
    assert attended.out.getvalue().count("attlas view") == 5
    view.open_if_attended(tmp_path, attended, browser=True)
    assert attended.opened == [tmp_path]
    assert demo.open_if_attended is view.open_if_attended
