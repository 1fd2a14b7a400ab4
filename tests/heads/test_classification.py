"""Heads that do one thing on purpose are called what they are."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attlas
from attlas.heads import MIXED, PATTERNS, Agreement, Head, by_token, measure, repeated_block

N = 300
PERIOD = 50


def sharp(target: Tensor) -> attlas.AttentionMatrix:
    """Return a causal matrix, shape (batch, 1, n, n), in which query i gives nearly all its weight to key target[i]."""
    n = target.shape[-1]
    codes = torch.eye(n)
    return attlas.attend(codes[target].unsqueeze(1), codes.expand(*target.shape[:-1], 1, n, n), attlas.ScaledDot(30.0),
                         attlas.Causal())  # fmt: skip


def last_time(ids: Tensor, shift: int) -> Tensor:
    """Return where each token of (batch, n) occurred last, `shift` places on; the query itself where it did not."""
    out = torch.arange(ids.shape[-1]).expand_as(ids).clone()
    for b, row in enumerate(ids.tolist()):
        seen: dict[int, int] = {}
        for i, token in enumerate(row):
            if token in seen:
                out[b, i] = seen[token] + shift
            seen[token] = i
    return out


def places(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[-1]).expand_as(ids)


TARGETS = {
    "induction": lambda ids: last_time(ids, 1),
    "duplicate token": lambda ids: last_time(ids, 0),
    "previous token": lambda ids: (places(ids) - 1).clamp_min(0),
    "fixed distance": lambda ids: (places(ids) - 3).clamp_min(0),
    "current token": places,
    "first-token sink": torch.zeros_like,
    "local": lambda ids: (places(ids) - 4 - places(ids) % 3).clamp_min(0),
    "one token": lambda ids: (places(ids) // 50 * 50 + 1).minimum(places(ids)),
    "mixed": lambda ids: places(ids) * 2 // 3,
}


def head_of(name: str) -> Head:
    ids = torch.randint(400, (1, N), generator=torch.Generator().manual_seed(0))
    if name == "one token":
        ids[0, 1::50] = 401
    block = repeated_block(1000, PERIOD)
    A = sharp(TARGETS[name](ids))
    return measure(A, ids[0], sharp(TARGETS[name](block)), PERIOD)[0]


@pytest.mark.parametrize("name", TARGETS)
def test_a_head_made_on_purpose_is_called_by_its_name(name: str) -> None:
    assert head_of(name).patterns[0].name == name


def test_who_looks_one_back_is_not_called_local_too() -> None:
    head = head_of("previous token")
    assert head.near == pytest.approx(1, abs=1e-3)
    assert [kind.name for kind in head.patterns] == ["previous token"]


def test_a_mixed_head_says_what_it_comes_near_to() -> None:
    nothing = replace(head_of("mixed"), **{k.measure: 0.0 for k in PATTERNS})
    assert nothing.nearest is None
    assert replace(nothing, induction=0.3).nearest.name == "induction"
    assert replace(nothing, induction=0.3, first=0.4).nearest.name == "first-token sink"
    assert replace(nothing, induction=0.6).nearest is None


def test_uniform_weights_are_broad() -> None:
    block = repeated_block(1000, PERIOD)
    zeros = torch.zeros(4, 1, 2 * PERIOD, 8)
    A = attlas.attend(torch.zeros(1, 1, N, 8), torch.zeros(1, 1, N, 8), mask=attlas.Causal())
    head = measure(A, torch.arange(N), attlas.attend(zeros, zeros, mask=attlas.Causal()), PERIOD)[0]
    assert head.patterns[0].name == "broad"
    assert head.breadth == pytest.approx(1, abs=1e-3)
    assert head.effective_keys == pytest.approx((N + 1) / 2, rel=1e-4)
    assert head.induction == pytest.approx(float((1 / torch.arange(PERIOD + 1, 2 * PERIOD + 1)).mean()), rel=1e-4)
    assert block.shape == (4, 2 * PERIOD)


def test_perfect_heads_score_one() -> None:
    assert head_of("induction").induction == pytest.approx(1, abs=1e-3)
    assert head_of("induction").induction_text == pytest.approx(1, abs=0.35)  # only the last copy, of several
    assert head_of("fixed distance").fixed == pytest.approx(1, abs=1e-3)
    assert head_of("fixed distance").fixed_distance == 3
    assert head_of("duplicate token").duplicate_text == pytest.approx(1, abs=0.35)
    assert head_of("duplicate token").duplicate == pytest.approx(1, abs=1e-3)
    assert head_of("previous token").previous == pytest.approx(1, abs=1e-3)
    assert head_of("previous token").distance == pytest.approx((N - 1) / N, abs=1e-3)
    assert head_of("first-token sink").first == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("kind", PATTERNS, ids=lambda kind: kind.name)
def test_thresholds_are_reached_from_their_value_on(kind: object) -> None:
    nothing = replace(head_of("mixed"), **{k.measure: 0.0 for k in PATTERNS})
    assert nothing.patterns == (MIXED,)
    assert replace(nothing, **{kind.measure: kind.threshold}).patterns == (kind,)
    assert replace(nothing, **{kind.measure: kind.threshold - 1e-6}).patterns == (MIXED,)


@pytest.mark.parametrize("plan", [None, attlas.Plan(backend="tiled", rows=7, columns=11)])
def test_agreement_is_the_mass_on_equal_labels(plan: attlas.Plan | None) -> None:
    queries, keys = torch.randint(5, (40,)), torch.randint(5, (60,))
    A = attlas.attend(torch.randn(2, 4, 40, 8), torch.randn(2, 2, 60, 8), mask=attlas.Causal(), plan=plan)
    (found,) = A.collect(Agreement(queries, keys))
    expected = (A.to_dense() * (queries[:, None] == keys)).sum(-1)
    torch.testing.assert_close(found, expected)
    own = torch.arange(60) == torch.arange(20, 60)[:, None]  # the last query is at the last key
    others = (A.to_dense() * ((queries[:, None] == keys) & ~own)).sum(-1)
    torch.testing.assert_close(A.collect(Agreement(queries.expand(2, -1), keys, gap=1))[0], others)


def test_mass_is_added_up_by_token() -> None:
    totals, tokens = by_token(torch.tensor([[9.0, 1, 2, 3, 4]]), torch.tensor([7, 5, 7, 5, 6]))
    assert tokens.tolist() == [5, 6, 7]
    assert totals.tolist() == [[4.0, 4.0, 2.0]]


def test_random_blocks_are_the_same_every_time() -> None:
    block = repeated_block(50, 10)
    assert torch.equal(block, repeated_block(50, 10))
    assert torch.equal(block[:, :10], block[:, 10:])
