"""Builds with the backend of pyproject.toml, without isolation and without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["build"]


def build(kind: str, sources: Path, out: Path, **environment: str) -> Path:
    """Build a wheel, an editable one or an sdist of a folder; return the file that was written."""
    pytest.importorskip("scikit_build_core", reason="scikit-build-core builds the package; it is in the extra `dev`")
    code = f"import sys; from scikit_build_core import build; print(build.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(out)]
    inherited = {name: value for name, value in os.environ.items() if name not in ("ATTLAS_PURE", "CXXFLAGS")}
    inherited |= environment
    done = subprocess.run(command, cwd=sources, env=inherited, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.split()[-1]
