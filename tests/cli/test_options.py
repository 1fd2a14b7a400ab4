"""The options of the commands: known at once, and the same words as in the modules that run them."""

import json
import subprocess
import sys

import pytest

from attlas import scaling
from attlas.cli import head_statistics, options

COMMANDS = ["demo", "record", "view", "stats", "picture", "report", "scaling", "regress"]


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_and_version_load_neither_torch_nor_numpy(words: list[str]) -> None:
    code = f"""
import json, sys
from attlas.cli import main
try:
    main({words})
except SystemExit as end:
    print(json.dumps([end.code, sorted(sys.modules)]), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    status, modules = json.loads(done.stderr)
    assert status == 0
    assert done.stdout.startswith(("usage: attlas", "attlas "))
    assert not {"torch", "numpy", "attlas.public"} & set(modules)


def test_words_of_options_are_those_of_their_modules() -> None:
    assert head_statistics.NAMES == options.STATISTICS
    assert tuple(scaling.DISTRIBUTIONS) == options.DISTRIBUTIONS


def test_export_is_another_name_of_report() -> None:
    words = ["run.atlas", "-o", "page.html"]
    assert vars(options.parser().parse_args(["export", *words])) == vars(
        options.parser().parse_args(["report", *words])
    )
