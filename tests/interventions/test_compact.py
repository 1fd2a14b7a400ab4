"""Products without hidden keys equal those with the mask, and take runs of keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attlas
from attlas import Causal, Documents, Padding, Window
from attlas.interventions import ScaleLogits, Suppress, compact, intervene
from attlas.interventions.compact import Memory, without_hidden_keys
from attlas.interventions.positions import positions_of
from attlas.masks import Heads, Mask
from attlas.masks.placed import OutsideRectangle

M = N = 90


def tokens(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def outside(queries: Any, keys: Any) -> OutsideRectangle:
    return OutsideRectangle(positions_of("queries", queries), positions_of("keys", keys), 0, 0)


BASES: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": Window(20, 0),
    "padding": Padding([90, 71], side="left") & Causal(),
    "documents": Documents([0] * 30 + [1] * 60) & Causal(),
    "holes": attlas.from_function(lambda b, h, i, j: (i + j) % 3 > 0) & Causal(),
}
HIDDEN: dict[str, Mask] = {
    "span": outside(None, (10, 25)),
    "two": outside(None, [3, 4, 50]) & outside(slice(40, None), (0, 7)),
    "rows": outside((20, 64), (5, 18)),
    "all keys": outside((20, 30), None),
    "many rows": outside(list(range(0, 60, 3)), (5, 18)),
    "heads": Heads({0: outside(None, (10, 25)), 3: outside(None, (10, 25)), 2: outside((50, 70), (0, 9))}),
    "heads and rows": Heads({1: outside(None, (60, 90))}) & outside((33, 80), (0, 30)),
}


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("base", BASES)
def test_equals_the_mask(base: str, hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "_FEW_ROWS", 1)
    q, k, v = tokens(2, 4, M, 8, seed=0), tokens(2, 2, N, 8, seed=1), tokens(2, 2, N, 5, seed=2)
    mask = HIDDEN[hidden] if BASES[base] is None else BASES[base] & HIDDEN[hidden]
    for sink in (None, torch.tensor([0.5, -0.5, 1.0, 0.0], dtype=torch.float64, requires_grad=True)):
        runs: list[bool] = []

        def pool(A: attlas.AttentionMatrix, values: Tensor, runs: list[bool] = runs) -> Tensor:
            runs.append(A.mask is None or A.problem.allowed_runs is not None)
            return A @ values

        A = attlas.attend(q, k, mask=mask, sink=sink)
        wanted = A.to_dense() @ v.repeat_interleave(2, dim=1)
        found = without_hidden_keys(pool, Memory())(A, v)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        leaves = [q, k, v] + ([] if sink is None else [sink])
        slope = torch.arange(5.0, dtype=torch.float64)
        for a, b in zip(*(torch.autograd.grad((t * slope).sum(), leaves) for t in (found, wanted)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
        if base != "holes" and hidden != "many rows":
            assert all(runs), "each part has one run of keys per row"


class UpTo(Mask):
    """Keys before a number that may be changed in place."""

    def __init__(self, stop: Tensor) -> None:
        self.stop = stop

    def allows(self, at: attlas.Tile) -> Tensor:
        return at.j < self.stop

    def allowed_runs(self, at: attlas.Tile) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, 1, len(at.rows), dtype=torch.int64), self.stop.expand(1, 1, len(at.rows))


@torch.no_grad()
def test_what_calls_share_is_not_that_of_other_masks_or_other_tokens() -> None:
    memory, stop = Memory(), torch.tensor(70)
    base, pool = UpTo(stop), without_hidden_keys(lambda A, values: A @ values, memory)
    for step, (mask, n) in enumerate([(base, N), (base, N), (base, 80), (Causal(), N), (base & Causal(), N)]):
        q, k, v = tokens(2, 4, M, 8, seed=step), tokens(2, 2, n, 8, seed=7 + step), tokens(2, 2, n, 5, seed=20 + step)
        for hidden in ("span", "two"):
            stop.sub_(3)
            A = attlas.attend(q, k, mask=mask & HIDDEN[hidden])
            wanted = A.to_dense() @ v.repeat_interleave(2, dim=1)
            torch.testing.assert_close(pool(A, v), wanted, rtol=1e-10, atol=1e-12)
    assert set(memory.buffers) == {"keys False", "values False"}


@torch.no_grad()
def test_what_calls_share_is_not_that_of_other_heads_or_batches() -> None:
    base = Heads({0: Causal(), 1: Window(5, 0)}) & Padding([90, 71])
    q, k, v = (tokens(2, 2, n, 8, seed=seed) for seed, n in enumerate((M, N, N)))
    pool = without_hidden_keys(lambda A, values: A @ values, Memory())
    for head in (0, 1):
        A = attlas.attend(q, k, mask=base & Heads({head: HIDDEN["span"]}))
        for part in (A, A[:1], A[1:]):
            own = v if part is A else v[:1]
            torch.testing.assert_close(pool(part, own), part.to_dense() @ own, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_models_give_the_same_with_and_without(name: str, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(name), torch.randint(2, 50, (2, 20), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :15]} if name == "t5" else {})
    block = [Suppress(keys=(3, 6), heads=[0, 1]), ScaleLogits(1.3, heads=2), Suppress(queries=slice(9, None), keys=1),
             Suppress(keys=[8, 9], heads=3, when="after")]  # fmt: skip
    found = []
    for few in (1, 1000):
        monkeypatch.setattr(compact, "_FEW_ROWS", few)
        with intervene(model, block), torch.no_grad():
            found.append(model(**inputs).logits)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-10)
