"""Laws of all that carries a gradient: nothing is kept, a mask is the same in every form, and no NaN appears."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.contracts import test_gradients as tables
from torch import Tensor

import attlas
from attlas import Plan, stats
from attlas.stats import Statistic

STATISTICS: dict[str, Callable[[Tensor], Statistic]] = {
    name: make
    for table in (tables.CLOSED, tables.OF_TILES, tables.REPLAYED, tables.OF_ONE_CELL)
    for name, (make, _) in table.items()
}
COUNTED = (stats.ArgMax, stats.ColumnArgMax, stats.Coverage)  # whole numbers, which have no gradient
READS: dict[str, Callable[[Any, Tensor], Any]] = {
    name: lambda A, v, make=make: A.collect(make(v)) for name, make in STATISTICS.items()
} | {
    "positions and numbers": lambda A, v: A.collect(*(make() for make in COUNTED), stats.Entropy()),
    "two": lambda A, v: A.collect(stats.Entropy(), stats.EffectiveKeys()),
    "the same twice": lambda A, v: A.collect(stats.Entropy(), stats.Entropy(), stats.RowMass()),
    "all": lambda A, v: A.collect(*(make(v) for make in STATISTICS.values())),
    "output": lambda A, v: A @ v,
    "transposed output": lambda A, v: A.mT @ v[:, :, : A.shape[-2]],
    "output of a head": lambda A, v: A[0, 1] @ v[0, 0],
    "matrix times matrix": lambda A, v: A @ attlas.attend(v, v),
    "lse": lambda A, v: A.lse,
    "cell": lambda A, v: A[0, 1, 2, 3],
    "rows": lambda A, v: A[:, :, 2:7, :],
    "pairs": lambda A, v: A[..., [1, 2, 1], [3, 4, 3]],
    "dense": lambda A, v: A.to_dense(),
    "logits": lambda A, v: A.logits[:, 1, 2:4, ::3],
    "moments of logits": lambda A, v: (A.logits.mean(), A.logits.var(-1)),
    "sums": lambda A, v: (A.sum(-1), A.sum(-2), A.mean((-1, -2)), A.sum(0), A.sum(1)),
    "maxima": lambda A, v: (A.amax(-1), A.amax(-2), A.max(-1), A.amax(1), A.logits.amax(-1)),
    "topk": lambda A, v: A.topk(3),
    "moments": lambda A, v: (A.var(-1), A.std(), A.norm()),
    "function of each weight": lambda A, v: ((A * 2.0).square().sum(-1), (A - 0.2).clamp(min=0).sum()),
    "divergence": lambda A, v: attlas.divergence(A, attlas.attend(A.problem.k[:, :, : A.shape[-2]], A.problem.k)),
    "diagonal": lambda A, v: A.diagonal(0, -2, -1),
    "retained gradient": lambda A, v: (A.retain_grad(), A @ v)[1],
}
SCORES: dict[str, Callable[[], Any]] = {
    "ScaledDot": lambda: None,
    "Gaussian": lambda: attlas.Gaussian(1.0, learn=True).double(),
    "score_mod": lambda: lambda s, b, h, i, j: s - 0.1 * (i - j).abs(),
}


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> Iterator[None]:
    """Let the collector look at what these tests make, and not at all modules."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [t for part in result for t in tensors(part)] if isinstance(result, list | tuple) else []


def test_every_statistic_has_a_line() -> None:
    exported = [getattr(stats, name) for name in stats.__all__]
    classes = {one for one in exported if isinstance(one, type) and issubclass(one, Statistic)} - {Statistic}
    values = torch.zeros(1, 2, 9, 4)
    assert classes <= {type(make(values)) for make in STATISTICS.values()} | set(COUNTED)


@pytest.mark.parametrize("read", READS)
def test_a_graph_is_freed(read: str) -> None:
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 2, 9, 4, dtype=torch.float64)
    alive: list[weakref.ref[Any]] = []
    for score in SCORES.values():
        for backward, mask in ((True, None), (False, None), (True, torch.ones(9, 9).tril().bool())):
            q, k, v = (x @ weight for _ in range(3))
            A = attlas.attend(q, k, score=score(), mask=mask)
            found = tensors(READS[read](A, v))
            recorded = [t for t in found if t.requires_grad]
            if backward and recorded:
                torch.stack([t.nan_to_num(0.0, 0.0, 0.0).double().sum() for t in recorded]).sum().backward()
            alive += [weakref.ref(t) for t in (q, k, v, A, *found)]
            del q, k, v, A, found, recorded
    weight.grad = None
    gc.collect()
    assert not [r() for r in alive if r() is not None]


M, N = 70, 140  # more than a block of the tensors of masks, so that some tiles are known to be seen whole
MASKS: dict[str, attlas.Mask] = {
    "all": attlas.Padding(N),
    "causal, empty rows": attlas.Causal(-4),
    "window": attlas.Window(9, 5),
    "dilated": attlas.Dilated(None, 0, 3),
    "padding": attlas.Padding([100]),
    "documents that come back": attlas.Documents(torch.arange(N) // 30 % 2),
    "prefix": attlas.Prefix(80) | attlas.Causal(),
    "hole": ~attlas.Window(2, 2),
    "one hole in a corner": ~(attlas.Prefix(3) & attlas.Causal(-100)),
    "heads": attlas.masks.Heads({1: attlas.Dilated(None, 0, 2)}),
    "chosen": attlas.masks.Selected(torch.arange(2 * M * 5).view(1, 2, M, 5) * 37 % N) & attlas.Causal(60),
    "nothing": ~attlas.Padding(N),
}


def forms(mask: attlas.Mask) -> dict[str, Any]:
    """Return one mask in every form that it can have."""
    A = attlas.attend(torch.zeros(1, 2, M, 1), torch.zeros(1, 2, N, 1), mask=mask)
    cells = mask.allows(A.problem.tile(*map(range, A.problem.shape))).expand(1, 2, M, N).clone()
    zeros = torch.zeros(1, 2, M, N, dtype=torch.float64).masked_fill(~cells, -torch.inf)
    return {
        "rule": mask,
        "tensor": cells,
        "additive": zeros,
        "mask_mod": lambda b, h, i, j: cells[b, h, i, j],
        "turned around": ~attlas.from_tensor(~cells),
        "runs": attlas.masks.runs_of(mask, 1, 2, M, N),
        "bits": attlas.masks.Bits(torch.from_numpy(np.packbits(cells.numpy(), axis=-1, bitorder="little")), N),
    }


def numbers(A: Any, v: Tensor) -> dict[str, list[Tensor]]:
    """Return the results of every statistic, and of other reads, that can have a gradient."""
    found = dict(zip(STATISTICS, A.collect(*(make(v) for make in STATISTICS.values())), strict=True))
    found["logits"] = [A.logits.mean(-1), A.logits.var(-1), A.logits.amax(-1)]
    found["reads"] = [(A * 2.0).square().sum(-1), A.sum(-2), A.lse, A @ v, A.mT @ v[:, :, :M]]
    return {name: [t.nan_to_num(0.0, 0.0, 0.0) for t in tensors(result) if t.is_floating_point()]
            for name, result in found.items()}  # fmt: skip


def kinds(mask: attlas.Mask) -> set[type]:
    """Return the class of a mask, and those of the masks that it is made of."""
    return {type(mask)}.union(*map(kinds, getattr(mask, "parts", ())))


def test_every_mask_has_a_line() -> None:
    exported = [getattr(attlas.masks, name) for name in attlas.masks.__all__]
    classes = {one for one in exported if isinstance(one, type) and issubclass(one, attlas.Mask)} - {attlas.Mask}
    given = [form for form in forms(MASKS["hole"]).values() if isinstance(form, attlas.Mask)]
    of_user = {attlas.masks.AdditiveMask, attlas.masks.FunctionMask}  # made of tensors and functions, as `forms` gives
    assert classes - of_user <= set().union(*map(kinds, (*MASKS.values(), *given)))


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_in_every_form_gives_the_same_gradients(mask: str) -> None:
    random = torch.Generator().manual_seed(3)
    leaves = [torch.randn(1, 2, t, 3, generator=random, dtype=torch.float64).requires_grad_() for t in (M, N, N)]
    q, k, v = leaves
    slopes: dict[str, list[Tensor]] = {}

    def gradients(found: dict[str, list[Tensor]]) -> list[Tensor]:
        loss = torch.stack([(t * s).sum() for name in found for t, s in zip(found[name], slopes[name], strict=True)])
        kinds = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return list(torch.autograd.grad(loss.sum(), leaves, **kinds))

    known, wanted = {}, []
    for form, given in forms(MASKS[mask]).items():
        plan = Plan("tiled", rows=32, columns=64) if form == "additive" else Plan()
        found = numbers(attlas.attend(q, k, mask=given, plan=plan), v)
        if form == "rule":
            slopes = {name: [torch.randn(t.shape, generator=random, dtype=t.dtype) for t in own]
                      for name, own in found.items()}  # fmt: skip
            known, wanted = found, gradients(found)
        if all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(gradients(found), wanted, strict=True)):
            continue
        for name in found:  # which of them it is
            for a, b in zip(gradients({name: found[name]}), gradients({name: known[name]}), strict=True):
                torch.testing.assert_close(a, b, msg=lambda text, at=f"{name}, {form}": f"{at}: {text}")
        pytest.fail(f"the gradients together differ: {form}")


@pytest.mark.parametrize("read", READS)
def test_second_derivatives_of_rows_with_one_key_are_finite(read: str) -> None:
    """The first row of a causal mask sees one key; the last of these keys are one and the same."""
    random = torch.Generator().manual_seed(4)
    x = torch.randn(1, 2, 6, 3, generator=random, dtype=torch.float64)
    x[:, :, 4:] = x[:, :, 4:5]
    x.requires_grad_()
    for mask in (attlas.Causal(), attlas.Window(0, 0), torch.eye(6).bool(), attlas.Causal(-1)):
        A = attlas.attend(x, x, mask=mask)
        found = [t for t in tensors(READS[read](A, x)) if t.requires_grad]
        loss = sum(t.nan_to_num(0.0, 0.0, 0.0).double().square().sum() for t in found)
        if not isinstance(loss, Tensor):
            continue
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        assert bool(first.isfinite().all())
        if first.requires_grad:
            (second,) = torch.autograd.grad(first.square().sum(), x, allow_unused=True, materialize_grads=True)
            assert bool(second.isfinite().all())


class Twice(stats.Entropy):
    def of(self, part: stats.Part) -> Tensor:
        return 2 * super().of(part)


class Deviation(stats.LogitMoments):
    def finish(self, carry: Any) -> Any:
        mean, variance = super().finish(carry)
        return stats.Moments(3 * mean, (variance + 1.0).sqrt())


@pytest.mark.parametrize("mask", [None, attlas.Causal(), torch.ones(M, N).bool()], ids=["none", "Causal", "tensor"])
def test_a_derived_statistic_has_a_gradient_of_its_own(mask: Any) -> None:
    """A formula that it inherits is about the numbers of the class that it is derived from."""
    random = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, 2, t, 3, generator=random, dtype=torch.float64).requires_grad_() for t in (M, N))
    for plan in (Plan(), Plan("tiled", rows=32, columns=64)):
        A = attlas.attend(q, k, mask=mask, plan=plan)
        entropy, moments = A.collect(stats.Entropy(), stats.LogitMoments())
        twice, own = A.collect(Twice(), Deviation())
        wanted = torch.stack([2 * entropy.sum(), 3 * moments.mean.sum(), (moments.variance + 1.0).sqrt().sum()])
        found = torch.stack([twice.sum(), own.mean.sum(), own.variance.sum()])
        torch.testing.assert_close(found, wanted)
        for a, b in zip(*(torch.autograd.grad(t.sum(), (q, k)) for t in (found, wanted)), strict=True):
            torch.testing.assert_close(a, b)
