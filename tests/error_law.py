"""One law over every error that a test makes attlas raise: it has a rule, what was found, a fix, and a public name.

`ErrorLaw` is registered for the whole session. A test during which an error of attlas breaks the law fails, whatever it
asks for itself. So the tests of single errors need not compare whole texts.
"""

import re
import sys
from collections.abc import Generator
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch

import attlas
from attlas import errors

PACKAGE = str(Path(attlas.__file__).parent)
# A fix is Python where, after at most one of these words, a name comes with a bracket or an equals sign: `A.topk(8)`,
# `give Alibi(8)`, `keep="disk"`. Every other fix is prose, or a command of a shell.
_CODE = re.compile(r"(?:use |give |call |pass )?(?P<code>[A-Za-z_][\w.]*(?:\(|\[|=(?![=,])).*)", re.DOTALL)


def parses(code: str) -> bool:
    """Return whether a text is Python."""
    try:
        compile(code, "fix", "exec", dont_inherit=True)  # ast.parse() of Python 3.11 fails where frames are deep
    except SyntaxError:
        return False
    return True


def code_of(fix: str) -> str | None:
    """Return the Python that a fix is, or begins with, up to a space or comma outside of brackets; None of prose."""
    if (found := _CODE.match(fix)) is None:
        return None
    whole = found["code"]
    code = whole.removesuffix(".")
    if parses(whole) or parses(code):
        return whole if parses(whole) else code
    depth, quote = 0, ""
    for i, sign in enumerate(code):
        if quote or sign in "\"'":
            quote = "" if sign == quote else quote or sign
        elif depth == 0 and sign in " ,;:":
            return code[:i]
        else:
            depth += (sign in "([{") - (sign in ")]}")
    return code


def faults(rule: str, found: str, fix: str) -> list[str]:
    """Return what is wrong with the texts of an error."""
    code = code_of(fix)
    return [
        *(["the rule does not end in a full stop"] if not rule.endswith(".") else []),
        *(["nothing was found"] if not found else []),
        *(["there is no fix"] if not fix else []),
        *([f"the fix is no Python: {code}"] if code is not None and not parses(code) else []),
    ]


# What the errors of the test that runs break.
BROKEN: list[str] = []


def watch(error: errors.AttlasError) -> None:
    """Note what is wrong with an error that was made two frames above."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == errors.__file__ and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(PACKAGE):  # and not one that a test makes up
        BROKEN.extend(f"{fault}, in: {error}" for fault in faults(error.rule, error.found, error.fix))


class ErrorLaw:
    """Watches the errors of attlas, and fails the test in which one breaks the law."""

    def __init__(self) -> None:
        init, raises = errors.AttlasError.__init__, type(pytest.raises(Exception))
        leave: Any = raises.__exit__

        @wraps(init)
        def watched(error: errors.AttlasError, *args: Any, **options: Any) -> None:
            init(error, *args, **options)
            if not torch.compiler.is_dynamo_compiling():  # the compiler follows this function
                watch(error)

        def left(self_: Any, kind: Any, error: BaseException | None, trace: TracebackType | None) -> Any:
            # The command line names its errors by the command, where it prints them.
            if isinstance(error, errors.AttlasError) and not error.where and type(error).__name__ != "UsageError":
                last = error.__traceback__
                while last is not None and last.tb_next is not None:
                    last = last.tb_next
                if last is not None and last.tb_frame.f_code.co_filename.startswith(PACKAGE):
                    BROKEN.append(f"no public function is named, in: {error}")
            return leave(self_, kind, error, trace)

        errors.AttlasError.__init__ = watched  # type: ignore[method-assign]
        raises.__exit__ = left  # type: ignore[method-assign]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Run a test, and fail it where an error of attlas broke the law."""
        BROKEN.clear()
        result = yield
        if BROKEN:
            pytest.fail("\n".join(["an error of attlas breaks the law of tests/error_law.py:", *BROKEN]))
        return result
