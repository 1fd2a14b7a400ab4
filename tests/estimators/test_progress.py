"""A long search says where it is, on the standard error and only where it is asked to."""

import io
import itertools
import re
import sys

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the estimators are scikit-learn's (attlas[sklearn])")

from attlas.cli import main
from attlas.errors import ShapeError
from attlas.estimators import AttentionClassifier, AttentionRegressor
from attlas.foundation import progress

generator = np.random.default_rng(2)
X = generator.normal(size=(80, 2))
Y = np.sin(X[:, 0]) + 0.1 * generator.normal(size=80)


class Screen(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_log_has_few_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    silent = AttentionRegressor().fit(X, Y)
    assert capsys.readouterr() == ("", "")
    told = AttentionRegressor(verbose=True).fit(X, Y)
    out, err = capsys.readouterr()
    assert out == ""
    first, last = err.splitlines()
    assert first == "  AttentionRegressor: grid of 26 scales for 2 bandwidths, 0 s"
    assert last.startswith("  AttentionRegressor: done, last search, evaluation ")
    np.testing.assert_array_equal(told.bandwidth_, silent.bandwidth_)
    seconds = itertools.count(0.0, 4.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(seconds))
    AttentionClassifier(verbose=1).fit(X, Y > 0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 4
    assert any(re.search(r"AttentionClassifier: start 3 of 4, evaluation \d+", line) for line in lines)
    times = [int(line.rpartition(", ")[2].removesuffix(" s")) for line in lines[:-1]]
    assert min(np.diff(times)) >= 10


def test_a_terminal_has_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Screen())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "_SECONDS_ON_TERMINAL", 0.0)
    AttentionRegressor(verbose=True).fit(X, Y)
    lines = sys.stderr.getvalue().split("\r\x1b[K")
    assert "\n" not in sys.stderr.getvalue()
    assert (lines[0], lines[-1]) == ("", "")
    assert lines[1].startswith("  AttentionRegressor: grid of 26 scales")
    assert any("last search, evaluation 2, leave-one-out loss 0." in line for line in lines)


def test_the_command_tells_on_a_terminal_only(
    tmp_path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.csv"
    np.savetxt(path, np.column_stack([X, Y]), delimiter=",", header="a,b,y", comments="")
    learn = ["regress", str(path), "--target", "y", "--save", str(tmp_path / "fit.safetensors")]
    assert main(learn) == 0
    assert "grid of" not in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", Screen())
    assert main(learn) == 0
    assert "AttentionRegressor: grid of 26 scales" in sys.stderr.getvalue()
    assert AttentionRegressor.load(learn[-1]).verbose is False


def test_verbose_is_checked() -> None:
    with pytest.raises(ShapeError, match="verbose must be a whole number, 0 or more"):
        AttentionRegressor(verbose="yes").fit(X, Y)
