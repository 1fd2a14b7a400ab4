"""Every pattern keeps the contract of a statistic; those of the previous and the current token are diagonals."""

import pytest
import torch

import attlas
from attlas import heads

IDS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 3, 1, 2, 0, 4, 5, 1, 2, 0, 1])
QUERIES = torch.tensor([0, 2, 1, 1, 5, 4, 0, 2, 3, 0, 1, 2, 0])
PATTERNS = [
    heads.Diagonal(2),
    heads.Diagonal(1, shift=0),
    heads.Local(3),
    heads.FixedDistance(),
    heads.FirstToken(),
    heads.Broad(),
    heads.DuplicateToken(IDS),
    heads.Induction(IDS),
    heads.Induction(IDS, QUERIES),
    heads.Separator(IDS, [0, 4]),
    heads.SinkKeys(0.1),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: type(pattern).__name__)
def test_patterns_keep_the_contract_of_a_statistic(pattern: attlas.stats.Statistic) -> None:
    attlas.testing.check_statistic(pattern)
