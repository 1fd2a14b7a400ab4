"""What is embedded in a page of the viewer that needs no server."""

import json
import re
from pathlib import Path
from typing import Any


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'id="attlas-data"[^>]*>(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])
