"""The pages of docs/guides about other libraries: their code runs where the library is installed."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"


@pytest.mark.parametrize("page", sorted(GUIDES.glob("with-*.md")), ids=lambda page: page.stem)
def test_code_of_pages_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), flags=re.M | re.S)
    program = tmp_path / "page.py"  # nnsight reads the file of a trace
    program.write_text("\n".join(blocks), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(program))
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed: make test-doors")
