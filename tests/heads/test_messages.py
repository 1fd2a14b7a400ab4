"""Errors of attlas.heads: where they are raised, and what was found."""

from collections.abc import Callable

import pytest
import torch
from tests.messages import refusal

import attlas
from attlas import DtypeError, ShapeError, heads

A = attlas.attend(torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6, 4), mask=attlas.Causal())
CROSS = attlas.attend(torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 5, 4))
SHORT = attlas.attend(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
IDS = torch.arange(6)

CASES = [
    (ShapeError, lambda: heads.previous_token(CROSS), "PreviousToken(): m = 6 queries, n = 5 keys"),
    (ShapeError, lambda: heads.induction(A, torch.arange(7)), "Induction(): 6 keys and a batch of 1"),
    (DtypeError, lambda: heads.broad(A, query_mask=torch.ones(6, dtype=torch.int64)), "Broad(): int64"),
    (ShapeError, lambda: heads.local(A, width=0), "Local(): width = 0"),
    (DtypeError, lambda: heads.diagonal(A, 1.5), "Diagonal(): distance = 1.5"),
    (ShapeError, lambda: heads.Agreement(IDS[:4], IDS)(A), "Agreement(): 6 queries and a batch of 1"),
    (ShapeError, lambda: heads.Agreement(IDS, IDS.repeat(2))(A), "Agreement(): 6 keys and a batch of 1"),
    (ShapeError, lambda: heads.scores(A, separators=[1, 2]), "scores(): no ids"),
    (ShapeError, lambda: heads.by_distance(A, bins="ten"), "by_distance(): bins = 'ten'"),
    (ShapeError, lambda: heads.retrieval_score(A, (2, 2), (3, 5), IDS), "retrieval_score(): needle = (2, 2)"),
    (ShapeError, lambda: heads.retrieval_score(A, (2, 9), (3, 5), IDS), "retrieval_score(): needle = (2, 9)"),
    (ShapeError, lambda: heads.retrieval_score(A, (1, 2), (3, 5), IDS[:4]), "retrieval_score(): n = 6 keys"),
    (
        ShapeError,
        lambda: heads.retrieval_score(A, (1, 2), (3, 6), IDS),
        "retrieval_score(): rows 3 to 5 write tokens 4 to 6 of 6",
    ),
    (ShapeError, lambda: heads.retrieval_score(A, (1, 2), (3, 6), IDS, written=IDS[:2]), "retrieval_score(): 3 rows"),
    (ShapeError, lambda: heads.rollout([]), "rollout(): no matrix"),
    (DtypeError, lambda: heads.flow([A.to_dense()]), "flow(): a Tensor"),
    (ShapeError, lambda: heads.rollout([A, CROSS]), "rollout(): a layer of shape (1, 2, 6, 5)"),
    (ShapeError, lambda: heads.rollout([A], residual=1.5), "rollout(): residual = 1.5"),
    (ShapeError, lambda: heads.rollout([A], rows=[6]), "rollout(): rows = [6], n = 6 tokens"),
    (ShapeError, lambda: heads.flow([A], columns=[]), "flow(): columns = [], n = 6 tokens"),
    (ShapeError, lambda: heads.flow([A], heads=torch.zeros(2)), "flow(): 1 layers, 2 heads in layer 0"),
    (ShapeError, lambda: heads.span_table([A, SHORT], {"all": (0, 5)}), "span_table(): a layer of shape (1, 2, 5, 5)"),
    (ShapeError, lambda: heads.span_table([], {"all": (0, 5)}), "span_table(): no matrix"),
    (ShapeError, lambda: heads.span_table(A, {"user": 3}), "span_table(): user = 3"),
    (ShapeError, lambda: heads.qk_clip(A, threshold=0.0), "qk_clip(): threshold = 0.0"),
    (ShapeError, lambda: heads.qk_clip(A, alpha=1.5), "qk_clip(): alpha = 1.5"),
    (ShapeError, lambda: heads.qk_clip(A[0, 1]), "qk_clip(): no leading axis"),
    (ShapeError, lambda: heads.qk_clip(torch.ones(4), key_heads=3), "qk_clip(): 3 key heads, 4 query heads"),
    (ShapeError, lambda: heads.qk_clip(torch.ones(4)).apply_(torch.ones(8, 3), torch.ones(6, 3)), "apply_(): 4 heads"),
    (ShapeError, lambda: heads.EntropyAlarm(share=2.0), "EntropyAlarm(): share = 2.0"),
    (ShapeError, lambda: heads.EntropyAlarm(rows=0), "EntropyAlarm(): rows = 0"),
]


@pytest.mark.parametrize(("error", "call", "text"), CASES, ids=[case[-1] for case in CASES])
def test_the_error_says(error: type[Exception], call: Callable[[], object], text: str) -> None:
    assert refusal(error, call) == text
