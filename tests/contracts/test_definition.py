"""Every score × mask, over backends, sizes, grouped heads and sinks: forward and all gradients equal the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attlas import Plan


def gradients(out: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    if not out.requires_grad:
        return {name: torch.zeros_like(t) for name, t in leaves.items()}
    found = torch.autograd.grad(out, list(leaves.values()), slope, allow_unused=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(leaves.items(), found, strict=True)}


def test_equals_the_formulas(row: tuple[str, ...], make: Any, sizes_of: Any, plans: Any, same: Any) -> None:
    score, mask, plan, shape, group, sink = row
    case = make(score, mask, sizes_of(shape, group), sink=bool(sink))
    logits, weights, lse, out = case.plain()
    leaves = case.leaves()
    wanted = gradients(out, leaves)

    A = case.matrix(plans[plan])
    assert A.shape == weights.shape
    found = A @ case.v
    same(found, out, "output")
    for name, g in gradients(found, leaves).items():
        same(g, wanted[name], f"gradient of {name}")
    same(A.lse, lse, "lse after the product")

    fresh = case.matrix(plans[plan])
    same(fresh[:, :, :, :], weights, "weights")
    same(fresh.logits[:, :, :, :], logits, "logits")
    same(fresh.lse, lse, "lse")


def test_large_matrix_equals_the_formulas(score_name: str, make: Any, sizes: Any, tables: Any, same: Any) -> None:
    """Sizes beyond one segment of columns, so that whole tiles are skipped and strips are merged."""
    place = tables["score"].index(score_name)
    mask = tables["mask"][(5 * place + 1) % len(tables["mask"])]
    m, n = ((64, 1000), (300, 130), (130, 600))[place % 3]
    case = make(score_name, mask, sizes(m, n, batch=1, heads=2, key_heads=1, value_heads=1), sink=place % 2 == 1)
    _, weights, lse, out = case.plain()
    leaves = case.leaves()
    wanted = gradients(out, leaves)
    for plan in (Plan(), (Plan("tiled", rows=100, columns=150), Plan("tiled", cells=30_000))[place % 2]):
        A = case.matrix(plan)
        found = A @ case.v
        same(found, out, f"output, {plan}")
        for name, g in gradients(found, leaves).items():
            same(g, wanted[name], f"gradient of {name}, {plan}")
        same(A.lse, lse, f"lse, {plan}")
        same(case.matrix(plan)[:, :, 20:60, :], weights[:, :, 20:60], f"weights, {plan}")


def test_large_matrix_under_every_mask(mask_name: str, make: Any, sizes: Any, same: Any) -> None:
    case = make("ScaledDot", mask_name, sizes(200, 610, batch=1, heads=2, key_heads=2, value_heads=1))
    _, weights, lse, out = case.plain()
    leaves = case.leaves()
    wanted = gradients(out, leaves)
    for plan in (Plan(), Plan(rows=64, columns=128), Plan("tiled", rows=64, columns=300)):
        found = case.matrix(plan) @ case.v
        same(found, out, f"output, {plan}")
        for name, g in gradients(found, leaves).items():
            same(g, wanted[name], f"gradient of {name}, {plan}")
        fresh = case.matrix(plan)
        same(fresh[0, 1, 3:40, 200:400], weights[0, 1, 3:40, 200:400], f"weights, {plan}")
        same(fresh.lse, lse, f"lse, {plan}")


@pytest.mark.parametrize("factor", ["score", "mask"])
def test_the_rows_meet_every_plan_shape_and_group(factor: str, tables: Any) -> None:
    place = ["score", "mask"].index(factor)
    for other, name in enumerate(("plan", "shape", "group"), start=2):
        met = {(row[place], row[other]) for row in tables["rows"]}
        assert len(met) == len(tables[factor]) * len(tables[name])
