"""The table of the guide to kernel regression is what the benchmark has measured, in both languages."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOUND = json.loads((ROOT / "benchmarks" / "results" / "regression-quality.json").read_text("utf-8"))["results"]


def cells(line: str) -> list[str]:
    return [cell.strip(" *`") for cell in line.strip("| \n").split("|")]


@pytest.mark.parametrize("page", ["docs/guides/regression.md", "docs/zh/guides/regression.md"])
def test_the_page_quotes_what_was_measured(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = {cells(line)[0]: cells(line)[1:] for line in re.findall(r"^\| `\w+` \|.*$", text, flags=re.M)}
    rows = {name: row for name, row in rows.items() if name in FOUND["data"]}
    assert list(rows) == list(FOUND["data"])
    for name, (size, *scores) in rows.items():
        data = FOUND["data"][name]
        assert size == f"{data['rows']} × {data['features']}"
        # The mean is left out of the table: its R² is 0 by definition.
        told = [score["r2"] for model, score in data["r2"].items() if model != "mean"]
        assert [float(score) for score in scores] == [round(r2, 2) for r2 in told]
        best = max(told)
        line = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        bold = [float(score) for score in re.findall(r"\*\*([\d.]+)\*\*", line)]
        assert bold
        assert all(score == round(best, 2) for score in bold)
