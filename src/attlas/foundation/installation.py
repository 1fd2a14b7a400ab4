"""How this attlas was installed, for the command that adds what is missing."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation: of a clone, of a file or address, or of an index.

    Parameters
    ----------
    extra : str
        Name of the extra, or several with commas between them.

    Examples
    --------
    >>> from attlas.foundation.installation import install_command
    >>> install_command("view").startswith("pip install ")
    True
    """
    clone = Path(__file__).resolve().parents[3]
    if (clone / "pyproject.toml").is_file() and (clone / "src" / "attlas").is_dir():
        return f"pip install -e {_quoted_folder(clone, extra)}"
    origin = _install_record()
    address = str(origin.get("url", ""))
    if "dir_info" in origin and address.startswith("file:"):
        return f"pip install {_quoted_folder(Path(url2pathname(urlsplit(address).path)), extra)}"
    if "vcs_info" in origin:
        address = f"{origin['vcs_info'].get('vcs', 'git')}+{address}"
    wanted = f"attlas[{extra}] @ {address}" if address else f"attlas[{extra}]"
    return f"pip install {shlex.quote(wanted)}"


def _install_record() -> dict[str, Any]:
    """Return pip's record of where attlas was installed from (PEP 610); empty where it came from an index."""
    from importlib import metadata  # not with `attlas --help`: it takes longer than the rest

    try:
        origin = json.loads(metadata.distribution("attlas").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}


def _quoted_folder(folder: Path, extra: str) -> str:
    """Return a folder with an extra, quoted for a shell; the current folder as ``'.[view]'``."""
    try:
        shown = "." if folder.samefile(Path.cwd()) else str(folder)
    except OSError:  # the folder, or the present one, is gone
        shown = str(folder)
    return shlex.quote(f"{shown}[{extra}]")
