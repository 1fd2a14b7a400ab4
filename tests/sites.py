"""The built pages of docs/, as `make docs` builds them, once for all processes of a test session."""

import warnings
from pathlib import Path

import pytest
from filelock import FileLock

__all__ = ["built_site"]

ROOT = Path(__file__).resolve().parents[1]


def built_site(factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built pages; the first process that asks builds it, and others wait."""
    pytest.importorskip("mkdocstrings", reason="the site is built with mkdocs-material and mkdocstrings")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    base = factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-gw") else base  # workers of pytest-xdist have one each
    folder, done = shared / "site", shared / "site.done"
    with FileLock(shared / "site.lock"):
        if not done.exists():
            with warnings.catch_warnings():  # those of Python; mkdocs' own end a strict build
                warnings.simplefilter("ignore")
                config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder))
                config.plugins.on_startup(command="build", dirty=False)
                build(config)
                config.plugins.on_shutdown()
            done.touch()
    return folder
