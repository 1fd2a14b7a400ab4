"""The table of the model types of transformers: a verdict and a reason for each, and the documents say its counts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ROWS: list[dict[str, Any]] = json.loads((RESULTS / "sweep.json").read_text(encoding="utf-8"))["results"]
STATES = Counter(row["state"] for row in ROWS)
# transformers cannot build these, or a library that they need has no wheel: README.md counts them.
NOT_RUN = {"dinat", "layoutlmv2", "gemma4_assistant", "gemma4_unified_assistant"}


def test_each_type_has_one_row() -> None:
    assert len({row["type"] for row in ROWS}) == len(ROWS) == 804


def test_each_row_has_numbers_or_a_reason() -> None:
    for row in ROWS:
        measured = row["state"] == "equal" and max(row["outputs"], row["weights"]) <= 1e-4
        assert measured or row.get("reason") or row.get("weights of text", 1.0) <= 1e-4, row["type"]


def test_only_named_types_did_not_run() -> None:
    without = {row["type"] for row in ROWS if row["state"] in ("not built", "not run on eager", "library missing")}
    assert without == NOT_RUN


@pytest.mark.parametrize("name", ["README.md", "docs/guides/any-model.md", "docs/zh/guides/any-model.md"])
def test_the_documents_say_the_counts(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    counts = [STATES["equal"], STATES["no attention"]]
    counts += [STATES["different"] + STATES["explained"]] if name == "README.md" else [STATES["different"]]
    for count in counts:
        assert str(count) in text


def test_the_page_has_the_rows() -> None:
    page = (RESULTS / "sweep.md").read_text(encoding="utf-8")
    for state, count in STATES.items():
        assert f"| {state} | {count} |" in page
