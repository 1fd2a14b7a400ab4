"""The command that adds an extra is one that works for this installation."""

import json
import shlex
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from attlas.foundation import installation
from attlas.foundation.installation import install_command

Installed = Callable[[Any], None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Let attlas be installed in a folder of packages; the argument is what pip has noted of where it comes from."""

    def install(origin: Any) -> None:
        package = tmp_path / "site-packages" / "attlas"
        package.mkdir(parents=True)
        monkeypatch.setattr(installation, "__file__", str(package / "foundation" / "installation.py"))

        class Distribution:
            def read_text(self, name: str) -> str | None:
                assert name == "direct_url.json"
                return origin if isinstance(origin, str | None) else json.dumps(origin)

        monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())

    return install


def test_clone_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a folder whose name a shell would take apart; in the clone itself, the command is short."""
    clone = tmp_path / "my clone"
    package = clone / "src" / "attlas"
    package.mkdir(parents=True)
    (clone / "pyproject.toml").touch()
    monkeypatch.setattr(installation, "__file__", str(package / "foundation" / "installation.py"))
    assert shlex.split(install_command("view")) == ["pip", "install", "-e", f"{clone}[view]"]
    monkeypatch.chdir(clone)
    assert install_command("hf,plot") == "pip install -e '.[hf,plot]'"


def test_clone_that_was_copied_into_the_environment(
    tmp_path: Path, installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    installed({"url": clone.as_uri(), "dir_info": {}})
    assert shlex.split(install_command("view")) == ["pip", "install", f"{clone}[view]"]
    monkeypatch.chdir(clone)
    assert install_command("view") == "pip install '.[view]'"


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'attlas[view]'"),
        ("no JSON", "pip install 'attlas[view]'"),
        ([], "pip install 'attlas[view]'"),
        (
            {"url": "file:///tmp/attlas-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'attlas[view] @ file:///tmp/attlas-0.1.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://example.org/attlas.git", "vcs_info": {"vcs": "git", "commit_id": "0"}},
            "pip install 'attlas[view] @ git+https://example.org/attlas.git'",
        ),
    ],
)
def test_file_address_and_index(origin: Any, command: str, installed: Installed) -> None:
    installed(origin)
    assert install_command("view") == command


def test_no_installation(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    installed(None)
    monkeypatch.setattr(metadata, "distribution", missing)
    assert install_command("plot") == "pip install 'attlas[plot]'"


def test_no_message_names_an_extra_by_itself() -> None:
    """A text of the package that names an extra is made by `install_command`."""
    package = Path(installation.__file__).parent
    texts = [file for suffix in ("py", "js", "html") for file in package.rglob(f"*.{suffix}")]
    assert not [file.name for file in texts if "install 'attlas[" in file.read_text("utf-8")]
