"""The retrieval score is the count of Wu et al., step by step."""

import pytest
import torch

import attlas
from attlas import heads

close = torch.testing.assert_close


def steps(weights: torch.Tensor, needle: range, rows: range, ids: list[int], written: list[int]) -> tuple:
    """Count as the decoding loop of the paper does: one query at a time, its largest weight, the token written."""
    copied, hits, mass = set(), 0, 0.0
    for i, token in zip(rows, written, strict=True):
        mass += float(weights[i, needle.start : needle.stop].sum())
        j = int(weights[i].argmax())
        if j in needle and ids[j] == token:
            hits += 1
            copied.add(j)
    return mass / len(rows), hits / len(rows), len(copied) / len(needle)


@pytest.mark.parametrize("cached", [False, True])
def test_scores_are_those_of_the_decoding_loop(cached: bool) -> None:
    n, needle, places = 60, range(11, 19), range(40, 59)
    ids = torch.randint(6, (n,))
    ids[41:49] = ids[11:19]  # the answer copies the needle
    q, k = torch.randn(2, 4, n, 8).double(), torch.randn(2, 2, n, 8).double()
    q[:, 0], k[:, 0] = 0, 0
    q[:, 0, 40:48, 0], k[:, 0, 11:19] = 0, 0
    for step in range(6):  # head 0 looks where it copies from, for six of the eight tokens
        q[:, 0, 40 + step, step] = 40.0
        k[:, 0, 11 + step, step] = 40.0
    start = 40 if cached else 0
    A = attlas.attend(q[:, :, start:], k, mask=attlas.Causal())
    rows = range(40 - start, 59 - start)
    found = heads.retrieval_score(A, needle, rows, ids)
    given = heads.retrieval_score(A, (11, 19), slice(rows.start, rows.stop), ids, written=ids[41:60])
    weights = attlas.attend(q, k, mask=attlas.Causal()).to_dense()
    for b in range(2):
        for h in range(4):
            mass, share, score = steps(weights[b, h], needle, places, ids.tolist(), ids[41:60].tolist())
            close(float(found.mass[b, h]), mass)
            close(float(found.share[b, h]), share)
            close(float(found.score[b, h]), score)
    assert float(found.score[0, 0]) == 6 / 8
    for a, b in zip(found, given, strict=True):
        close(a, b, atol=0, rtol=0)


def test_rows_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(4, (30,))
    A = attlas.attend(torch.randn(3, 30, 8), torch.randn(3, 30, 8), mask=attlas.Causal())
    whole = heads.retrieval_score(A, (3, 12), (14, 29), ids)
    monkeypatch.setattr("attlas.heads.retrieval._CELLS_AT_ONCE", 200)
    for a, b in zip(heads.retrieval_score(A, (3, 12), (14, 29), ids), whole, strict=True):
        close(a, b)


def test_a_query_that_sees_nothing_copies_nothing() -> None:
    A = attlas.attend(torch.zeros(2, 6, 4), torch.zeros(2, 6, 4), mask=attlas.from_tensor(torch.zeros(6, 6).bool()))
    found = heads.retrieval_score(A, (0, 2), (0, 5), torch.zeros(6, dtype=torch.int64))
    assert all(value.tolist() == [0, 0] for value in found)
