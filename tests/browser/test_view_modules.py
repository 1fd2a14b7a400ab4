"""The viewer's modules that need no page, under Node: colours, state and links, the queue, geometry, search."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import attlas

STATIC = Path(attlas.__file__).parent / "view" / "static"
MODULES = sorted((Path(__file__).parent / "modules").glob("*.test.mjs"))


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules beside a package.json that says what they are: Node reads .js files as scripts otherwise."""
    folder = tmp_path_factory.mktemp("static") / "modules"
    shutil.copytree(STATIC, folder)
    (folder / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    return folder


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.name.removesuffix(".test.mjs"))
def test_module(file: Path, static: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    major = int(version[1:].split(".")[0])
    if major < 20:
        pytest.skip(f"needs Node 20, found {version}")
    told = subprocess.run(
        [node, "--test", "--test-reporter=tap", str(file)],
        env={**os.environ, "STATIC": static.as_uri()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "# fail 0" in told.stdout
    assert "# pass 0" not in told.stdout
