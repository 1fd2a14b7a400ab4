"""Checks before the work: options, optional packages, and the files and folders that a command will write."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tempfile
from argparse import Namespace
from pathlib import Path

from attlas.cli.terminal import UsageError
from attlas.errors import MissingExtraError

_HEAD_PATTERN = re.compile(r"(\d+)[.·](\d+)", re.ASCII)


def need(module: str, purpose: str, install: str, library: str = "") -> None:
    """Raise a MissingExtraError unless a module is installed; `install` is the command that does it."""
    if importlib.util.find_spec(module) is None:
        rule = f"{library or module} must be installed for {purpose}."
        raise MissingExtraError(rule, f"no module named {module}", install)


def check_least(name: str, value: int | None, least: int, example: int) -> None:
    """Raise a UsageError if an option is given and smaller than `least`."""
    if value is not None and value < least:
        raise UsageError(f"--{name} must be at least {least}.", f"--{name} {value}", f"--{name} {example}")


def check_positive(arguments: Namespace, *names: str) -> None:
    """Raise a UsageError if an option of these names is given and not more than 0."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise UsageError(f"--{name} must be more than 0.", f"--{name} {value:g}", f"leave --{name} out")


def layer_and_head(text: str, option: str, given: str | None = None) -> tuple[int, int]:
    """Return layer and head of a text such as 2.4; an error quotes `given`, the whole option, if it names several."""
    match = _HEAD_PATTERN.fullmatch(text.strip())
    if match is None:
        rule, found = f"{option} must name a head as LAYER.HEAD.", text if given is None else given
        raise UsageError(rule, f"{option} {found}", f"{option} 2.4")
    return int(match[1]), int(match[2])


def check_folder(folder: Path, rule: str, fix: str) -> None:
    """Raise a UsageError with this rule and fix unless files can be written in a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(rule, f"{error.strerror or error}: {folder}", fix) from None


def check_target(path: Path, option: str, suffixes: tuple[str, ...]) -> None:
    """Raise a UsageError unless a file with one of these suffixes can be written."""
    suggestion = path.with_suffix(suffixes[0]).name if path.name else f"result{suffixes[0]}"
    fix = f"{option} {shlex.quote(suggestion)}"
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{option} must be a file that ends in {', '.join(suffixes)}.", f"{option} {path}", fix)
    check_folder(path.parent, f"{option} must lie in a folder that can be written.", fix)
    if path.is_dir():
        raise UsageError(
            f"{option} must be a file.", f"a folder: {path}", f"{option} {shlex.quote(str(path / suggestion))}"
        )
    if path.exists() and not path.is_file():
        raise UsageError(f"{option} must be a file.", f"a device or a pipe: {path}", "give another name")
