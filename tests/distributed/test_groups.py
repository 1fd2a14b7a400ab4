"""Keys and values gathered for some heads at a time: the same results, from less memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.contracts.conftest import Sizes, build
from tests.distributed.test_context import IDS, LEFT, N, part
from tests.distributed.test_equality import (
    GRID,
    LINE,
    STATISTICS,
    TOKENS,
    Whole,
    differences,
    gap,
    shard,
    statistics_of,
)  # fmt: skip
from tests.distributed.test_traffic import Memory, Traffic, peak
from tests.recording.conftest import two_layers
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import attlas
from attlas import stats
from attlas.distributed import context_parallel, head_tail_order
from attlas.engine.backends.native import library
from attlas.errors import ModifiedError

pytestmark = pytest.mark.filterwarnings("ignore")
OnRanks = Callable[..., list[Any]]
WITH_MODES = pytest.mark.skipif(torch.__version__ < (2, 9), reason="modes of torch 2.8 fail in several threads")

ONE = attlas.Plan(gathered_bytes=1)  # one key head of one text at a time
CASES = {
    "grouped heads": build("ScaledDot", "Documents & Causal", Sizes(19, 23), sink=True),
    "more values": build("ScaledDot", "bool tensor(heads)", Sizes(19, 23, batch=3, key_heads=2, value_heads=4)),
    "more keys": build("ScaledDot", "additive", Sizes(19, 23, key_heads=4, value_heads=2)),
    "one key head": build("ScaledDot", "Window", Sizes(19, 23, batch=3, key_heads=1, value_heads=1), sink=True),
    "six heads": build("ScaledDot", "Padding", Sizes(5, 9, batch=1, heads=6, key_heads=3, value_heads=3), sink=True),
    "bias of heads": build("TensorBias", "Causal", Sizes(19, 23)),
    "slopes": build("Alibi(leaf)", "none", Sizes(19, 23)),
    "projected": build("Additive", "Causal", Sizes(19, 23)),
    "fewer queries than ranks": build("ScaledDot", "Causal", Sizes(2, 5), sink=True),
}


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_one_process(on_ranks: OnRanks, name: str, shape: tuple[int, ...]) -> None:
    case, known = CASES[name], Whole(CASES[name])
    pair = LINE[0] if len(shape) == 1 else GRID[0] if list(CASES).index(name) % 2 else GRID[4]
    two = attlas.Plan(gathered_bytes=2 * 2 * case.k[0, 0].numel() * 8)  # two heads at a time
    plans = [ONE] if len(shape) == 2 else [ONE, two]

    def job(rank: int, world: int) -> list[tuple[Any, str, float]]:
        mesh = init_device_mesh("cpu", shape)
        found = [(plan, differences(mesh, known, *pair, plan)) for plan in plans]
        return [(plan, what, error) for plan, errors in found for what, error in errors.items() if not error < 1e-12]

    assert not [wrong for rank in on_ranks(math.prod(shape), job) for wrong in rank]


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
def test_statistics_and_products(on_ranks: OnRanks, shape: tuple[int, ...]) -> None:
    case = build("ScaledDot", "Documents & Causal", Sizes(37, 41), sink=True)
    A = case.matrix()
    known, x = A.detach().collect(*STATISTICS), case.sizes.random(2, 4, 37, 3, seed=5).requires_grad_()
    asked = [stats.Entropy(), stats.ColumnMass(), stats.Offsets()]
    sums = [A.mT @ x, *A.collect(*asked), A[:, [3, 1], 30:34, ::2]]
    leaves = [case.q, case.k, case.sink]
    wanted = torch.autograd.grad([t.square().sum() for t in sums], leaves)

    def job(rank: int, world: int) -> list[Any]:
        mesh, wrong = init_device_mesh("cpu", shape), []
        for q_to, k_to in GRID[:1] if len(shape) == 2 else LINE[:1]:
            wrong += statistics_of(mesh, case, known, q_to, k_to, 1e-12, ONE)
            q, k, mine = shard(case.q, mesh, q_to), shard(case.k, mesh, k_to), shard(x, mesh, q_to)
            B = attlas.attend(q, k, mask=case.mask, sink=case.sink, plan=ONE)
            found = [B.mT @ mine, *B.collect(*asked), B[:, [3, 1], 30:34, ::2]]
            slopes = torch.autograd.grad(found, [q, k, case.sink], [2 * t.detach() for t in found])
            wrong += [gap(a, b) for a, b in zip([*found, *slopes], [*sums, *wanted], strict=True) if gap(a, b) > 1e-12]
        return wrong

    assert not [text for texts in on_ranks(math.prod(shape), job) for text in texts]


def test_gradients_of_gradients_and_an_order(on_ranks: OnRanks) -> None:
    case, order = build("ScaledDot", "Causal", Sizes(24, 24), sink=True), head_tail_order(24, 3)
    leaves = [case.q, case.k, case.v, case.sink]

    def second(out: Tensor, leaves: list[Any]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(out, leaves, out, create_graph=True)
        return torch.autograd.grad(first[1:3], leaves, first[1:3])

    wanted = second(case.matrix() @ case.v, leaves)

    def job(rank: int, world: int) -> list[float]:
        mesh = init_device_mesh("cpu", (world,))
        mine = [shard(t[:, :, order], mesh, [TOKENS]) for t in leaves[:3]]
        B = attlas.distributed.attend(*mine[:2], mask=case.mask, sink=case.sink, plan=ONE, order=order)
        found = second(B @ mine[2], [*mine, case.sink])
        pairs = zip([t.full_tensor()[:, :, order.argsort()] for t in found[:3]] + [found[3]], wanted, strict=True)
        return [gap(a, b) for a, b in pairs]

    assert max(max(errors) for errors in on_ranks(3, job)) < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_has_the_bits_that_it_has_alone(on_ranks: OnRanks, dtype: torch.dtype) -> None:
    """Torch's own products of several heads have other bits than those of one."""
    slack = 0.0 if library.available() else 32 * torch.finfo(dtype).eps
    q, k, v = (torch.randn(2, heads, 200, 16).to(dtype) for heads in (4, 2, 2))

    def job(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))

        def found(plan: attlas.Plan | None, at: int) -> list[Any]:
            one = [t[:1, at : at + 1] for t in (k, v)] if plan is None else [k, v]
            mine = [
                shard(t.requires_grad_(), mesh, [TOKENS])
                for t in (q[:1, 2 * at : 2 * at + 2] if plan is None else q, *one)
            ]
            A = attlas.attend(*mine[:2], mask=attlas.Causal(), plan=plan)
            out = A @ mine[2]
            results = [out, *torch.autograd.grad(out, mine, out.detach()), A.lse]
            with torch.no_grad():
                return [t.full_tensor() for t in (*results, *A.collect(stats.Entropy(), stats.ColumnMass()))]

        whole = found(ONE, 0)
        for at in range(2):
            for a, b in zip(whole, found(None, at), strict=True):
                each = b.shape[1]
                torch.testing.assert_close(a[:1, at * each : (at + 1) * each], b, rtol=slack, atol=slack)

    on_ranks(3, job)


# --------------------------------------------------------------------------------------------------- traffic and memory

RANKS, LENGTH, SIZE, KEY_HEADS = 4, 512, 32, 8
HEAD = LENGTH * SIZE * 4  # bytes of the keys of one head


def tokens(rank: int, *, requires_grad: bool = False) -> tuple[list[DTensor], list[Tensor]]:
    """Return q, k, v that are divided over the ranks, and what one rank has of them after the gather."""
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = [torch.randn(1, heads, LENGTH, SIZE) for heads in (16, KEY_HEADS, KEY_HEADS)]
    many = [shard(t.requires_grad_(requires_grad), mesh, [Shard(2)]) for t in whole]
    return many, [whole[0].detach().chunk(RANKS, dim=2)[rank].clone(), *(t.detach() for t in whole[1:])]


class Gathers(TorchDispatchMode):
    """Lists the bytes of what is gathered and of what is reduce-scattered, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        name = func._schema.name.partition("::")[2]
        out = func(*args, **(kwargs or {}))
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            large = out if name.startswith("all") else args[0]
            self.seen.append((name.split("_")[1], large.numel() * large.element_size()))
        return out


@WITH_MODES
def test_what_is_sent(on_ranks: OnRanks) -> None:
    """As many bytes as at once, in more messages; a backward gathers once more, and scatters before the next gather."""

    def job(rank: int, world: int) -> None:
        q, k, v = tokens(rank, requires_grad=True)[0]

        def sent(plan: attlas.Plan | None, work: Callable[[Any], Any]) -> tuple[float, list[tuple[str, int]]]:
            with Traffic() as traffic, Gathers() as gathers:
                work(attlas.attend(q, k, plan=plan))
            return traffic.sent, gathers.seen

        pair = [("gather", HEAD)] * 2
        two = attlas.Plan(gathered_bytes=2 * 2 * HEAD)
        with torch.no_grad():
            at_once = sent(None, lambda A: A @ v)
            assert at_once[1] == [("gather", KEY_HEADS * HEAD)] * 2
            assert sent(ONE, lambda A: A @ v) == (at_once[0], pair * KEY_HEADS)
            assert sent(two, lambda A: A @ v)[1] == [("gather", 2 * HEAD)] * KEY_HEADS
            assert sent(attlas.Plan(gathered_bytes=2 * KEY_HEADS * HEAD), lambda A: A @ v) == at_once
            columns = sent(None, lambda A: A.collect(stats.ColumnMass()))[0]
            assert sent(ONE, lambda A: A.collect(stats.ColumnMass())) == (columns, [("gather", HEAD)] * KEY_HEADS)
            assert sent(ONE, lambda A: A[0, 5, 3])[1] == [("gather", HEAD)]  # one head is asked for
        scattered = [("scatter", HEAD)] * 2
        out = attlas.attend(q, k, plan=ONE) @ v
        with Gathers() as gathers:
            torch.autograd.grad(out, [q, k, v], out.detach())
        assert gathers.seen == (pair + scattered) * KEY_HEADS

    on_ranks(RANKS, job)


def test_memory_is_that_of_one_group(on_ranks: OnRanks) -> None:
    def job(rank: int, world: int) -> None:
        many, one = tokens(rank)

        def product(q: Any, k: Any, v: Any, plan: attlas.Plan | None = None) -> Any:
            return attlas.attend(q, k, plan=plan) @ v

        def gradients(q: Any, k: Any, v: Any, plan: attlas.Plan | None = None) -> Any:
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            out = product(*leaves, plan)
            return torch.autograd.grad(out, leaves, out.detach())

        def collected(q: Any, k: Any, v: Any, plan: attlas.Plan | None = None) -> Any:
            return attlas.attend(q, k, plan=plan).collect(stats.Entropy(), stats.ColumnMass())

        for work, most in ((product, 3.5), (collected, 1.1)):
            # What is gathered of one head, and for a time a copy of this rank's part of it.
            with torch.no_grad():
                extra = peak(lambda work=work: work(*many, ONE)) - peak(lambda work=work: work(*one))
            assert extra <= most * HEAD, (work.__name__, extra / HEAD)
        assert peak(lambda: gradients(*many, ONE)) <= 32 * HEAD  # 88 of them at once
        leaves = [t.detach().requires_grad_() for t in many]
        with Memory() as memory:
            out = product(*leaves, ONE)
        left = sum(size for reference, size in memory.made.values() if not reference.expired())
        assert left <= 1.1 * out.to_local().nbytes, left / HEAD  # nothing that was gathered is kept for the backward

    on_ranks(RANKS, job)


# --------------------------------------------------------------------------------------------------------------- errors


class FailsLater(attlas.Score):
    """A score that rank 1 cannot compute for some heads, from some call on."""

    def __init__(self, head: int, calls: int) -> None:
        super().__init__()
        self.head, self.left = head, [calls]

    def forward(self, q: Tensor, k: Tensor, at: Any) -> Tensor:
        a_few_cells = at.row_index is not None  # on which it is run to find the tensors that it reads
        if distributed.get_rank() == 1 and bool(q.any()) and self.head in at.head_ids.tolist() and not a_few_cells:
            self.left[0] -= 1
            if self.left[0] < 0:
                raise MemoryError("none is left")
        return q @ k.mT


@pytest.mark.parametrize("calls", [0, 1])  # the second is the backward's
def test_all_ranks_raise_where_one_cannot_compute_a_group(on_ranks: OnRanks, calls: int) -> None:
    def job(rank: int, world: int) -> bool:
        mesh = init_device_mesh("cpu", (world,))
        q, k, v = (shard(torch.ones(1, 4, 8, 6, requires_grad=True), mesh, [TOKENS]) for _ in range(3))
        score, computed = FailsLater(2, calls), False
        with pytest.raises(MemoryError, match="none is left"):
            out = attlas.attend(q, k, score=score, plan=attlas.Plan("tiled", gathered_bytes=1)) @ v
            computed = True
            out.sum().backward()
        return computed

    assert on_ranks(2, job, 20) == [calls == 1] * 2


def test_keys_that_change_are_refused(on_ranks: OnRanks) -> None:
    def job(rank: int, world: int) -> None:
        q, k, v = tokens(rank)[0]
        for plan in (ONE, None):
            A = attlas.attend(q, k, plan=plan)
            if rank == 1:
                k.to_local().add_(1)
            with pytest.raises(ModifiedError, match="after attend"):
                A @ v

    on_ranks(RANKS, job, 20)


@WITH_MODES
def test_a_model_gathers_by_groups(on_ranks: OnRanks) -> None:
    model = two_layers(window=13).double()
    model.set_attn_implementation("attlas")
    wanted = model(IDS, use_cache=False, attention_mask=LEFT).logits
    wanted[LEFT > 0].square().sum().backward()
    true = [p.grad for p in model.parameters()]
    model.zero_grad()

    def job(rank: int, world: int) -> list[Tensor]:
        mine, mask = copy.deepcopy(model), part(LEFT, rank, world)
        with context_parallel(init_device_mesh("cpu", (world,)), mine, plan=ONE), Gathers() as gathers:
            logits = mine(part(IDS, rank, world), attention_mask=mask).logits
        config = model.config
        heads = len(IDS) * config.num_key_value_heads * config.num_hidden_layers
        assert gathers.seen == [("gather", N * config.head_dim * 8)] * 2 * heads
        torch.testing.assert_close(logits, part(wanted, rank, world))
        logits[mask > 0].square().sum().backward()
        return [p.grad for p in mine.parameters()]

    for gradient, *parts in zip(true, *on_ranks(2, job), strict=True):
        torch.testing.assert_close(sum(parts), gradient)
