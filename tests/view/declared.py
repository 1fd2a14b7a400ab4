"""What the page's declarations of types say of the objects that Python sends it."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from attlas.view import bundle

TYPES = Path(bundle.__file__).parent / "types"
INTERFACE = re.compile(r"^interface (\w+)(?:<[^{]*?>)?(?: extends ([\w, ]+))? \{\n(.*?)^\}", re.M | re.S)
FIELD = re.compile(r"^  (?:readonly )?(\w+)(\??):", re.M)


@cache
def interfaces() -> dict[str, tuple[str, dict[str, bool]]]:
    """Each interface: what it extends, and its fields with whether they may be missing."""
    text = "\n".join(file.read_text("utf-8") for file in sorted(TYPES.glob("*.d.ts")))
    found = {}
    for name, extended, body in INTERFACE.findall(text):
        found[name] = extended, {field: bool(optional) for field, optional in FIELD.findall(body)}
    return found


def check_fields(name: str, told: dict[str, Any], *elsewhere: str) -> None:
    """Compare the fields of an object with those of an interface; those `elsewhere` the page does not read."""
    extended, fields = interfaces()[name]
    for base in filter(None, extended.split(", ")):
        fields = interfaces()[base][1] | fields
    assert set(told) - set(elsewhere) <= set(fields), f"{name} does not declare these"
    assert {field for field, optional in fields.items() if not optional} <= set(told), f"{name} declares more"
