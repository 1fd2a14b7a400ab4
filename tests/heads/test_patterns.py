"""Every pattern's score is its definition, query by query, on matrices of every kind."""

from collections.abc import Callable

import pytest
import torch
from tests.stats.definitions import allowed_by_mask
from torch import Tensor

import attlas
from attlas import heads

close = torch.testing.assert_close


def copies(case: object, lag: int) -> Tensor:
    """Return which keys stand `lag` places behind an earlier copy of the query's token, (batch, m, n)."""
    m, n = case.weights.shape[-2:]
    out = torch.zeros(len(case.ids), m, n, dtype=torch.bool)
    for b, ids in enumerate(case.ids.tolist()):
        for i in range(m):
            for j in range(lag, n):
                copy = j - lag
                out[b, i, j] = ids[copy] == ids[i + n - m] and copy < i + n - m
    return out


TARGETS = {
    "previous_token": lambda case: case.places == 1,
    "current_token": lambda case: case.places == 0,
    "local": lambda case: case.places.abs() < 16,
    "duplicate_token": lambda case: copies(case, 0),
    "induction": lambda case: copies(case, 1),
    "separator": lambda case: ((case.ids == 2) | (case.ids == 4)).unsqueeze(1),
}


def test_scores_are_their_definitions(make: Callable, kind: str) -> None:
    case = make(kind)
    found = heads.scores(case.A, case.ids, separators=[2, 4])
    for name, targets in TARGETS.items():
        close(found[name], case.score(targets(case)), msg=lambda text, name=name: f"{name}: {text}")
    seen = case.allowed.sum(-1)
    effective = case.weights.sum(-1).square() / case.weights.square().sum(-1).clamp(min=1e-300)
    breadth = [
        torch.stack([(e / s)[s > 1].mean() if (s > 1).any() else s.new_zeros((), dtype=torch.float64)
                     for e, s in zip(*row, strict=True)])
        for row in zip(effective, seen, strict=True)
    ]  # fmt: skip
    close(found["broad"], torch.stack(breadth))
    first = case.allowed[:, 0].any(-2).int().argmax(-1)
    n = case.weights.shape[-1]
    close(found["first_token"], case.score((torch.arange(n) == first[:, None])[:, None]))
    for value in found.values():
        assert value.shape == (2, 4)
    assert all(
        float(value.min()) >= 0 and float(value.max()) <= 1 for name, value in found.items() if name != "distance"
    )


def test_the_fixed_distance_is_the_one_with_most_weight(make: Callable, kind: str) -> None:
    case = make(kind)
    found = heads.fixed_distance(case.A)
    n = case.weights.shape[-1]
    choice = case.allowed.sum(-1, keepdim=True) > 1
    weights = torch.where(choice & case.allowed, case.weights, 0.0)
    away = [d for d in range(1 - n, n) if d not in (0, 1) and bool((case.places == d).any())]
    totals = torch.stack([weights[..., case.places == d].sum(-1) for d in away] or [torch.zeros(2, 4).double()])
    for b in range(2):
        for h in range(4):
            if not float(totals[:, b, h].max()):
                assert float(found.score[b, h]) == 0
                continue
            distance = away[int(totals[:, b, h].argmax())]
            assert int(found.distance[b, h]) == distance
            close(found.score[b, h], case.score(case.places == distance)[b, h])


@pytest.mark.parametrize("distance", [-2, 3])
def test_a_diagonal_is_known_by_its_distance(make: Callable, kind: str, distance: int) -> None:
    case = make(kind)
    close(heads.diagonal(case.A, distance), case.score(case.places == distance))


def test_each_function_is_its_class(make: Callable) -> None:
    case = make("causal")
    found = heads.scores(case.A, case.ids, separators=[2, 4])
    for name in ("previous_token", "current_token", "first_token", "local", "broad"):
        close(getattr(heads, name)(case.A), found[name])
    close(heads.duplicate_token(case.A, case.ids), found["duplicate_token"])
    close(heads.induction(case.A, case.ids), found["induction"])
    close(heads.separator(case.A, case.ids, [2, 4]), found["separator"])
    close(heads.fixed_distance(case.A).distance, found["distance"])
    assert set(heads.scores(case.A)) == {"previous_token", "current_token", "first_token", "local", "broad",
                                         "fixed_distance", "distance"}  # fmt: skip


def test_queries_of_filling_on_the_right_are_left_out(make: Callable) -> None:
    case = make("causal")
    query_mask = torch.arange(29) < torch.tensor([[29], [12]])
    found = heads.scores(case.A, case.ids, [2, 4], query_mask=query_mask)
    for name, targets in TARGETS.items():
        close(found[name], case.score(targets(case), query_mask))
    cut = heads.scores(case.A, case.ids, [2, 4], query_mask=query_mask[1])
    half = attlas.attend(case.A.problem.q[1:, :, :12], case.A.problem.k[1:, :, :12], mask=attlas.Causal())
    alone = heads.scores(half, case.ids[1:, :12], [2, 4])
    for name in alone:
        close(cut[name][1], alone[name][0])
        close(found[name][1], alone[name][0])


def test_filling_on_the_left_changes_nothing() -> None:
    q, k = torch.randn(1, 4, 20, 8).double(), torch.randn(1, 2, 20, 8).double()
    ids = torch.randint(5, (1, 20))
    alone = heads.scores(attlas.attend(q[:, :, 6:], k[:, :, 6:], mask=attlas.Causal()), ids[:, 6:], [3])
    padded = attlas.attend(q, k, mask=attlas.Causal() & attlas.Padding([14], side="left"))
    ids[:, :6] = -1
    found = heads.scores(padded, ids, [3])
    for name in alone:
        close(found[name], alone[name])


def test_cross_attention_compares_tokens_and_no_places(make: Callable) -> None:
    q, k = torch.randn(2, 4, 9, 8).double(), torch.randn(2, 4, 6, 8).double()
    A = attlas.attend(q, k)
    ids, query_ids = torch.randint(3, (2, 6)), torch.randint(3, (2, 9))
    same = query_ids[:, :, None] == ids[:, None]
    weights = A.to_dense()
    after = torch.cat([torch.zeros_like(same[..., :1]), same[..., :-1]], dim=-1)
    for found, targets in (
        (heads.duplicate_token(A, ids, query_ids), same),
        (heads.induction(A, ids, query_ids), after),
    ):
        for b in range(2):
            choice = targets[b].any(-1) & ~targets[b].all(-1)
            close(found[b], (weights[b] * targets[b]).sum(-1)[:, choice].mean(-1))
    # Places compare where someone says how.
    close(heads.previous_token(A, shift=0), torch.stack([A[:, :, i + 1, i] for i in range(6)]).mean(0))


def test_a_part_of_the_heads_has_their_scores(make: Callable) -> None:
    case = make("left padding, sinks")
    whole = heads.scores(case.A, case.ids, [2])
    part = heads.scores(case.A[:, 1:3], case.ids, [2])
    one = heads.scores(case.A[1], case.ids[1], [2])
    for name in whole:
        close(part[name], whole[name][:, 1:3])
        close(one[name], whole[name][1])


def test_half_precision_tokens_count_in_float32() -> None:
    q, k = torch.randn(2, 40, 16), torch.randn(2, 40, 16)
    A = attlas.attend(q.bfloat16(), k.bfloat16(), mask=attlas.Causal())
    exact = attlas.attend(q.bfloat16().double(), k.bfloat16().double(), mask=attlas.Causal())
    ids = torch.randint(5, (40,))
    found, expected = heads.scores(A, ids), heads.scores(exact, ids)
    for name in found:
        close(found[name].double(), expected[name].double(), atol=1e-5, rtol=1e-5)


def test_no_query_no_key_no_score() -> None:
    for m, n in ((0, 0), (0, 4)):
        A = attlas.attend(torch.zeros(3, m, 8), torch.zeros(3, n, 8))
        found = heads.scores(A, torch.zeros(n, dtype=torch.int64), [0])
        assert all(value.tolist() == [0, 0, 0] for value in found.values())


@pytest.mark.parametrize("vocabulary", [2, 40, 2000])
@pytest.mark.parametrize("plan", [attlas.Plan("tiled", rows=64, columns=101), None], ids=["tiles", "whole"])
@pytest.mark.parametrize("mask", [None, attlas.Causal(), attlas.Window(60, 20)], ids=["all", "causal", "window"])
def test_common_and_rare_copies_are_counted_alike(vocabulary: int, plan: object, mask: object) -> None:
    n = 301
    ids = torch.randint(vocabulary, (2, n)) * (2**33 // vocabulary)
    A = attlas.attend(torch.randn(2, 2, n, 8).double(), torch.randn(2, 1, n, 8).double(), mask=mask, plan=plan)
    weights = A.to_dense()
    allowed = allowed_by_mask(A.problem)[0, 0]
    i, j = torch.arange(n)[:, None], torch.arange(n)
    same = (ids[:, :, None] == ids[:, None]) & (j < i)
    after = torch.cat([torch.zeros_like(same[..., :1]), same[..., :-1]], dim=-1)
    diagonal = (i - j == 1).expand(2, n, n)
    found = heads.scores(A, ids)
    for name, targets in (("duplicate_token", same), ("induction", after), ("previous_token", diagonal)):
        targets = targets & allowed
        choice = targets.any(-1) & (allowed & ~targets).any(-1)
        mass = (weights * targets[:, None]).sum(-1)
        expected = torch.stack(
            [m[:, c].mean(-1) if c.any() else m.new_zeros(2) for m, c in zip(mass, choice, strict=True)]
        )
        close(found[name], expected, msg=lambda text, name=name: f"{name}: {text}")


def test_negative_tokens_are_like_nothing() -> None:
    ids = torch.tensor([-1, -1, 7, -1, 7, -1])
    A = attlas.attend(torch.zeros(1, 6, 4), torch.zeros(1, 6, 4), mask=attlas.Causal())
    assert float(heads.duplicate_token(A, ids)) == pytest.approx(1 / 5)
    assert float(heads.induction(A, ids)) == pytest.approx(1 / 5)
    cross = attlas.attend(torch.zeros(1, 2, 4), torch.zeros(1, 6, 4))
    assert float(heads.duplicate_token(cross, ids, torch.tensor([-1, 7]))) == pytest.approx(2 / 6)
