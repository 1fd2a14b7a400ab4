"""What is embedded in a page of the viewer that needs no server."""

import json
import re
from pathlib import Path
from typing import Any


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'id="attlas-data"[^>]*>(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def heads_in(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the heads that a page holds, without its rollouts."""
    kinds = [entry["kind"] for entry in data["info"]["entries"]]
    return [head for head in data["packed"] if kinds[head["entry"]] != "rollout"]
