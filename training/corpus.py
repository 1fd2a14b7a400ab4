"""Which files the model sees, and which it never sees.

The corpus is the Python source of the standard library of the interpreter that runs this script.
The split is by whole module (``argparse``, ``collections``, ...) and depends only on the module's name,
so that it is the same on every machine. The tests of a held-out module are left out of the training part too.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

STDLIB = Path(sysconfig.get_paths()["stdlib"])

# Not prose and not code: tables of characters, generated text, and files made to be broken.
LEFT_OUT = (
    "site-packages",
    "encodings",
    "pydoc_data",
    "bad_coding.py",
    "bad_coding2.py",
    "cjkencodings",
    "encoded_modules",
)
HELD_OUT_SHARE = 16  # one module in 16
MAX_BYTES = 300_000


def is_held_out(module: str) -> bool:
    """Whether a top-level module belongs to the evaluation part; decided by a hash of its name."""
    digest = hashlib.sha256(module.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_SHARE == 0


def module_of(path: Path) -> str:
    """The top-level module that a file is about: ``json/decoder.py`` and ``test/test_json/...`` are both ``json``."""
    parts = path.relative_to(STDLIB).with_suffix("").parts
    if parts[0] != "test":
        return parts[0]
    return parts[min(1, len(parts) - 1)].removeprefix("test_")


def files(held_out: bool) -> Iterator[Path]:
    """Files of one part, in a fixed order. The evaluation part has no tests: only the modules themselves."""
    for path in sorted(STDLIB.rglob("*.py")):
        inside = path.relative_to(STDLIB).parts
        if any(name in LEFT_OUT for name in inside) or not 0 < path.stat().st_size <= MAX_BYTES:
            continue
        if held_out and inside[0] == "test":
            continue
        if is_held_out(module_of(path)) == held_out:
            yield path


def documents(held_out: bool) -> Iterator[str]:
    """Text of each file of one part. The few test files that are not UTF-8 are passed over."""
    for path in files(held_out):
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def held_out_modules() -> list[str]:
    """Names of the modules in the evaluation part."""
    return sorted({module_of(path) for path in files(held_out=True)})
