"""Which queries of a text show what a head of a kind does."""

import pytest
import torch

from attlas.heads import MIXED, PATTERNS
from attlas.heads.telling import shows_kind

IDS = torch.tensor([7, 5, 6, 7, 5, 6, 7, 5])


@pytest.mark.parametrize(
    ("kind", "keys", "shown"),
    [
        ("induction", [0, 0, 1, 1, 2, 3, 4, 2], [3, 4, 5, 6, 7]),
        ("duplicate token", [0, 0, 1, 0, 1, 1, 3, 7], [3, 4, 6]),
        ("previous token", [0, 0, 1, 2, 2, 4, 5, 7], [1, 2, 3, 5, 6]),
        ("first-token sink", [0, 0, 0, 2, 0, 4, 0, 1], [2, 4, 6]),
        ("current token", [0, 1, 1, 3, 4, 4, 6, 6], [1, 3, 4, 6]),
        ("local", [0, 0, 2, 3, -1, 4, 0, 1], [1, 5, 6, 7]),
        ("fixed distance", [0, 0, 0, 1, 2, 1, 4, 5], [3, 4, 6, 7]),  # two back gets most
        ("one token", [0, 0, 1, 1, 1, 4, 3, 4], [2, 3, 4, 5, 7]),  # token 5 gets most
        ("broad", [0, 0, 1, -1, 4, 4, 0, 1], [2, 5, 7]),
        ("mixed", [0, 0, 1, -1, 4, 4, 0, 1], [2, 5, 7]),
    ],
)
def test_queries_whose_key_is_of_the_kind(kind: str, keys: list[int], shown: list[int]) -> None:
    assert kind in {each.name for each in (*PATTERNS, MIXED)}
    found = shows_kind(kind, IDS, torch.tensor(keys), torch.ones(len(IDS)))
    assert found.nonzero()[:, 0].tolist() == shown


def test_no_query_shows_a_kind_where_no_key_is_known() -> None:
    for kind in (*PATTERNS, MIXED):
        assert not shows_kind(kind.name, IDS, torch.full((8,), -1), torch.zeros(8)).any(), kind.name
