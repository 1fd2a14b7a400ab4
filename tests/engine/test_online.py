"""Running softmax: any split and any order of keys gives the same rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attlas.engine import online


def state_of(logits: Tensor, values: Tensor, sink: Tensor | None = None) -> online.Running:
    start = online.empty(tuple(logits.shape[:-1]), values.shape[-1], like=logits, sink=sink)
    return online.absorb(start, logits.clone(), values)


def numbers(seed: int, holes: float = 0.3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(2, 3, 4, 12, generator=generator, dtype=torch.float64)
    logits[torch.rand(logits.shape, generator=generator) < holes] = -math.inf
    logits[0, 0, 0] = -math.inf
    return logits, torch.randn(2, 3, 12, 2, generator=generator, dtype=torch.float64)


def expected(logits: Tensor, values: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    every = logits
    if sink is not None:
        every = torch.cat([logits, sink.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
    weights = torch.softmax(every, -1).nan_to_num()[..., : logits.shape[-1]]
    return weights @ values, torch.logsumexp(every, -1)


def close(state: online.Running, wanted: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(online.finish(state), wanted, strict=True):
        torch.testing.assert_close(a, b)


@given(st.integers(0, 50), st.lists(st.integers(1, 11), unique=True, max_size=5).map(sorted), st.booleans())
def test_any_split_gives_the_same(seed: int, cuts: list[int], with_sink: bool) -> None:
    logits, values = numbers(seed)
    sink = torch.randn(3, dtype=torch.float64) if with_sink else None
    state = online.empty((2, 3, 4), 2, like=logits, sink=sink)
    for first, last in zip([0, *cuts], [*cuts, 12], strict=True):
        state = online.absorb(state, logits[..., first:last].clone(), values[..., first:last, :])
    close(state, expected(logits, values, sink))


def joined(*parts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join outputs and log-sum-exps from left to right."""
    (out, lse), *rest = parts
    for part, part_lse in rest:
        lse, old, new = online.merge(lse, part_lse)
        out = out * old.unsqueeze(-1) + part * new.unsqueeze(-1)
    return out, lse


@given(st.integers(0, 50), st.permutations(range(4)))
def test_merge_is_commutative_and_associative(seed: int, order: list[int]) -> None:
    logits, values = numbers(seed, holes=0.6)
    a, b, c, d = (
        online.finish(state_of(logits[..., 3 * i : 3 * i + 3], values[..., 3 * i : 3 * i + 3, :])) for i in order
    )
    wanted = expected(logits, values)
    for merged in (joined(a, b, c, d), joined(a, joined(b, joined(c, d))), joined(joined(d, c), joined(b, a))):
        for found, right in zip(merged, wanted, strict=True):
            torch.testing.assert_close(found, right)


def test_merge_with_nothing_changes_nothing() -> None:
    logits, values = numbers(1)
    state = online.finish(state_of(logits, values))
    nothing = online.finish(online.empty((2, 3, 4), 2, like=logits))
    for merged in (joined(state, nothing), joined(nothing, state)):
        for found, right in zip(merged, expected(logits, values), strict=True):
            torch.testing.assert_close(found, right)
    out, lse = joined(nothing, nothing)
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


def test_without_values() -> None:
    logits, _ = numbers(2)
    state = online.absorb(online.empty((2, 3, 4), 0, like=logits), logits.clone(), None)
    out, lse = online.finish(state)
    assert out.shape == (2, 3, 4, 0)
    torch.testing.assert_close(lse, torch.logsumexp(logits, -1))


@pytest.mark.parametrize("shift", [-1e300, -700.0, 700.0, 1e300])
def test_huge_logits(shift: float) -> None:
    logits, values = numbers(3, holes=0.0)
    state = state_of(logits + shift, values)
    out, lse = online.finish(state)
    assert bool(out.isfinite().all())
    torch.testing.assert_close(lse, torch.logsumexp(logits + shift, -1))


def test_dropout_acts_on_the_pooled_sum_alone() -> None:
    logits, values = numbers(4, holes=0.0)
    logits[0, 0, 0] = 0.0
    keep = 2.0 * (torch.rand(logits.shape, dtype=torch.float64) > 0.5)
    state = online.absorb(online.empty((2, 3, 4), 2, like=logits), logits.clone(), values, keep)
    close(state, ((torch.softmax(logits, -1) * keep) @ values, torch.logsumexp(logits, -1)))
