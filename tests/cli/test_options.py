"""The options of the commands: known at once, and the same words as in the modules that run them."""

import json
import subprocess
import sys

import pytest
import torch

from attlas import scaling
from attlas.cli import head_statistics, options
from attlas.estimators.sums import task
from attlas.recording.atlas.entry import statistic_names

COMMANDS = ["demo", "record", "view", "stats", "picture", "report", "scaling", "regress", "doctor"]


PROGRAM = """
import contextlib, io, json, sys
from attlas.cli import main
told = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main(words)
        except SystemExit as end:
            told.append((end.code, out.getvalue()))
print(json.dumps([told, sorted(sys.modules)]))
"""


def test_help_and_version_load_neither_torch_nor_numpy() -> None:
    asked = [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)]
    command = [sys.executable, "-W", "error", "-c", PROGRAM, json.dumps(asked)]
    told, modules = json.loads(subprocess.check_output(command, text=True))
    assert not {"torch", "numpy"} & set(modules)
    assert [status for status, _ in told] == [0] * len(asked)
    (_, version), (_, whole), *each = told
    assert version.startswith("attlas ")
    assert whole.startswith("usage: attlas")
    assert len(whole.splitlines()) <= 25  # one line for each command
    for name, (_, text) in zip(COMMANDS, each, strict=True):
        assert f"  {name} " in whole
        assert name in ("demo", "scaling") or f"  attlas {name} " in text.partition("examples:")[2]


def test_words_of_options_are_those_of_their_modules() -> None:
    made = head_statistics.selected(",".join(options.STATISTICS), torch.arange(3), 1)
    assert {"kinds", *statistic_names(made)} == {*options.STATISTICS, "head_scores"}
    assert tuple(scaling.DISTRIBUTIONS) == options.DISTRIBUTIONS
    assert sorted(task.KERNELS) == sorted(options.KERNELS)


def test_export_is_another_name_of_report() -> None:
    words, parser = ["run.atlas", "-o", "page.html"], options.parser()
    assert vars(parser.parse_args(["export", *words])) == vars(parser.parse_args(["report", *words]))


def test_an_unknown_option_shows_the_options_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["stats", "run.atlas", "--sorted", "keys"])
    told = capsys.readouterr().err
    assert told.startswith("usage: attlas stats ")
    assert "attlas stats: error: unrecognized arguments: --sorted keys" in told
