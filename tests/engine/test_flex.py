"""FlexAttention without its compiler against the definition in float64, for every mask and score.

No GPU was there: what torch compiles was not run. What is compared is what attlas makes for it.
"""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from tests.flex_cases import (
    HEADS,
    MASKS,
    NOT_MASKS,
    NOT_SCORES,
    SCORES,
    C,
    M,
    N,
    checkers,
    distance,
    eager,
    random,
    tokens,
)
from torch import Tensor, nn
from torch.nn.attention import flex_attention as module

import attlas
from attlas import masks, scores
from attlas.engine import operations
from attlas.engine.backend import Request
from attlas.engine.backends.flex import backend, blocks, programs
from attlas.engine.backends.flex.places import Untranslatable
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem, spread_heads


def forward_agrees(problem: Problem, v: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare output and log-sum-exp, without a trace of the functions."""
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    monkeypatch.setattr(module, "_validate_device", lambda *tokens: None)
    with torch.no_grad():
        out, lse = backend.computed(Request(problem, problem.tokens, Plan()), v, eager)
        dense = operations.dense(problem)
        torch.testing.assert_close(out, dense.weights @ spread_heads(v, problem.shape[1]), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(lse, dense.lse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tokens()
    forward_agrees(attlas.attend(q, k, mask=MASKS[name]()).problem, v, monkeypatch)


@pytest.mark.parametrize("name", SCORES)
def test_score(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tokens()
    forward_agrees(attlas.attend(q, k, score=SCORES[name](), mask=attlas.Window(100, 5)).problem, v, monkeypatch)


def test_every_exported_mask_and_score_is_here() -> None:
    used = set()
    for table in (MASKS, NOT_MASKS, SCORES, NOT_SCORES):
        for make in table.values():
            used |= {type(part).__name__ for part in _parts(make())}
    exported = {name for package in (masks, scores) for name in package.__all__ if name[0].isupper()}
    no_mask_or_score = {"BlockState", "Mask", "Score", "Dot", "Bias", "Tokens"}
    assert exported - no_mask_or_score - used == set()


def _parts(owner: Any) -> list[Any]:
    """Return a mask or score and all that it is made of; a tensor or function stands for the mask of it."""
    if isinstance(owner, Tensor):
        return [attlas.from_tensor(owner)]
    if callable(owner) and not isinstance(owner, nn.Module):
        return [attlas.from_function(owner)]
    if owner is None:
        return []
    inner = [one for value in vars(owner).values() for one in (value if isinstance(value, tuple) else (value,))]
    inner += list(owner.children()) if isinstance(owner, nn.Module) else []
    kinds = attlas.Mask, attlas.Score
    return [owner, *itertools.chain.from_iterable(_parts(one) for one in inner if isinstance(one, kinds))]


@pytest.mark.parametrize("name", NOT_MASKS)
def test_not_every_mask(name: str) -> None:
    q, k, v = tokens()
    problem = attlas.attend(q, k, mask=NOT_MASKS[name]()).problem
    with pytest.raises(Untranslatable, match="no function of one pair"):
        backend.computed(Request(problem, problem.project(), Plan()), v, eager)


@pytest.mark.parametrize("name", NOT_SCORES)
def test_not_every_score(name: str) -> None:
    q, k, v = tokens()
    problem = attlas.attend(q.float(), k.float(), score=NOT_SCORES[name]()).problem
    with pytest.raises(Untranslatable, match=r"no function of a dot product|no table"):
        backend.computed(Request(problem, problem.project(), Plan()), v.float(), eager)


PARTS = ["Heads", "Padding", "Documents", "bool(heads)", "function", "Runs(heads)", "Bits", "Placed"]


@pytest.mark.parametrize("name", [*PARTS, "Selected(groups, blocks) & Causal"])
def test_part_of_the_batch_and_of_the_heads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tokens()
    score = attlas.ScoreMod(distance) + attlas.Alibi(HEADS)
    A = attlas.attend(q, k, score=score, mask=MASKS[name]())[1:, [3, 1]]
    forward_agrees(A.problem, v[1:, [1, 0]], monkeypatch)


@pytest.mark.parametrize("m", [1, 128, 256, 257])
@pytest.mark.parametrize("n", [1, 128, 300])
def test_sizes_around_a_block(m: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random(1, 2, m, 4), random(1, 2, n, 4, seed=1), random(1, 2, n, 3, seed=2)
    for mask in (C, attlas.Window(100, 20), attlas.Window(None, None)):
        forward_agrees(attlas.attend(q, k, mask=mask).problem, v, monkeypatch)


@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
def test_no_block_with_an_allowed_pair_is_skipped(name: str) -> None:
    q, k, _ = tokens()
    problem = attlas.attend(q, k, mask=MASKS[name]()).problem
    made = blocks.block_mask_of(problem)[1]
    cells = problem.mask.allows(problem.tile(*map(range, problem.shape))).expand(problem.shape)
    edges = (0, -N % 128, 0, -M % 128)
    cut = nn.functional.pad(cells, edges).unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
    some, every = cut.any(-1).any(-2), cut.all(-1).all(-2)
    seen = made.to_dense().expand(2, HEADS, -1, -1).bool()
    assert bool((~some | seen).all())
    full = torch.zeros_like(seen)
    for b, h, row in torch.cartesian_prod(*map(torch.arange, seen.shape[:3])).tolist():
        batches, heads = made.full_kv_num_blocks.shape[:2]
        place = b if batches > 1 else 0, h if heads > 1 else 0, row
        full[b, h, row, made.full_kv_indices[place][: made.full_kv_num_blocks[place]].long()] = True
    assert bool((~full | every).all())


def test_long_masks_are_asked_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    local = attlas.Causal.coverage
    monkeypatch.setattr(attlas.Causal, "coverage", lambda self, at: asked.append(1) or local(self, at))
    long = torch.zeros(1, 1, 1, 1).expand(2, 8, 128 * 128, 1)
    mask = attlas.Causal() & attlas.from_function(checkers)
    problem = attlas.attend(long, long, mask=mask).problem
    made = blocks.block_mask_of(problem)[1]
    assert len(asked) < 8 * 128 + 64  # of 16,384 blocks
    assert made.kv_num_blocks.flatten().tolist() == list(range(1, 129))
    assert not made.full_kv_num_blocks.any()
    assert blocks.block_mask_of(problem)[1] is made  # kept with the mask
    assert blocks.block_mask_of(attlas.attend(long, long, mask=mask).problem)[1] is made


def test_what_is_kept_of_a_mask_follows_its_changes_and_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tokens()
    lengths, cells = torch.tensor([300, 170]), random(M, N) > 0.3
    mask = attlas.Padding(lengths) & attlas.from_tensor(cells)
    forward_agrees(attlas.attend(q, k, mask=mask).problem, v, monkeypatch)
    lengths[0] = 20
    cells[:, :15] = False
    forward_agrees(attlas.attend(q, k, mask=mask).problem, v, monkeypatch)
    count = len(blocks._blocks_of_masks)
    assert mask in blocks._blocks_of_masks
    del mask
    gc.collect()
    assert len(blocks._blocks_of_masks) < count


def test_programs_have_code_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(torch, "compile", lambda f, **settings: made.append(f) or f)
    programs.compiled(0, None)
    programs.compiled(1, True)
    assert made[0].__code__ is not made[1].__code__
