"""What the pages say of a column of numbers."""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """A column of numbers: its name in the data, what the page calls it, its unit, and what it says."""

    name: str
    label: str
    unit: str
    description: str
