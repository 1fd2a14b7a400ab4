"""Products and statistics on a device: how often the host waits for it, for each score, mask and statistic.

The device is pretended, see `tests.pretend`: its numbers are those of the CPU.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.pretend import PretendDevice
from torch import Tensor

import attlas
from attlas import Plan, stats
from attlas.engine.held import parts_and_tensors, tensors_of
from attlas.masks.custom import _StoredCells
from attlas.masks.placed import Block, Concatenated, OutsideRectangle, Positions, Stacked
from attlas.masks.runs import Bits, RunPerRow, runs_of
from attlas.masks.selected import Selected
from attlas.recording.stacking import same_settings

# What may wait once. A function of the user is compared with itself, pair by pair, when it is first asked. The formula
# of a Gaussian of wide tokens is chosen by their numbers. Of a tensor on the device, the host reads which blocks it
# forbids.
OF_FUNCTIONS = {"ScoreMod", "function", "Heads(function) & Padding"}
OF_WIDE_TOKENS = {"Gaussian(wide)", "Gaussian(wide, learn)", "Gaussian(wide, leaf)", "Multiple"}
OF_TENSORS = {"bool tensor", "bool tensor(heads)", "additive", "additive & Causal"}

PLANS = [Plan("tiled", rows=10, columns=14), Plan("tiled", rows=5, columns=7)]  # four times as many tiles
STATISTICS: dict[str, Callable[[], stats.Statistic]] = {
    "ArgMax": stats.ArgMax,
    "ColumnArgMax": stats.ColumnArgMax,
    "ColumnMass": lambda: stats.ColumnMass(slice(2, 17), mean=True),
    "ColumnMax": lambda: stats.ColumnMax(slice(3, None)),
    "Coverage": lambda: stats.Coverage((0.5, 0.9)),
    "EffectiveKeys": stats.EffectiveKeys,
    "Entropy": stats.Entropy,
    "KeyMaps": lambda: stats.KeyMaps([0, 5, -1]),
    "LogitMoments": stats.LogitMoments,
    "MaxLogit": stats.MaxLogit,
    "MaxWeight": stats.MaxWeight,
    "Offsets": lambda: stats.Offsets(mean=True),
    "Picture": lambda: stats.Picture(4, 6),
    "Pooled": lambda: stats.Pooled(torch.zeros(23, 1)),  # its values are set where the matrix is
    "RowMass": stats.RowMass,
    "Spans": lambda: stats.Spans([slice(0, 9), (4, 29)], [slice(0, 3), slice(2, 23)], mean=True),
    "TailMass": lambda: stats.TailMass(3),
    "TopK": lambda: stats.TopK(5),
}


def test_every_statistic_has_a_line() -> None:
    classes = {name for name in stats.__all__ if isinstance(getattr(stats, name), type)}
    assert set(STATISTICS) == {n for n in classes if issubclass(getattr(stats, n), stats.Statistic)} - {"Statistic"}


def move(device: PretendDevice, score: attlas.Score, mask: Any, *, tables: bool) -> None:
    """Put a score on a device, as ``score.to(device)`` does; with its `tables`, the tensors of the user as well."""
    device.put(score)
    if isinstance(score, attlas.ScoreMod):
        device.put(score.score_mod.table)
    if not tables:
        return
    for t in tensors_of(score):
        device.put(t)
    if isinstance(mask, Tensor):
        device.put(mask)
    for part in parts_and_tensors(mask)[0] if isinstance(mask, attlas.Mask) else ():
        if isinstance(part, _StoredCells):
            device.put(part.tensor)
        if isinstance(part, Selected):
            device.put(part.entries)


def on_device(case: Any, mask: Any, plan: Plan, run: Callable[..., Any], *, tables: bool) -> tuple[Any, PretendDevice]:
    """Compute on a pretended GPU; return the result, and what was counted from `attend` on."""
    device, score = PretendDevice("cuda"), copy.deepcopy(case.score)
    q, k, v = (t.detach().clone() for t in (case.q, case.k, case.v))
    with device, torch.no_grad():
        for t in (q, k, v):
            device.put(t)
        move(device, score, mask, tables=tables)
        device.forget()
        found = run(attlas.attend(q, k, score=score, mask=mask, plan=plan), v)
    assert device.holds(found)
    return found, device


def compare(
    case: Any, make_mask: Callable[[], Any], run: Callable[..., Tensor], most: int, *, tables: bool = True
) -> None:
    """Compare results with those of the CPU, and count waits, with few tiles and with many."""
    seen = []
    for plan in PLANS:
        with torch.no_grad():
            score = copy.deepcopy(case.score)
            wanted = run(attlas.attend(case.q, case.k, score=score, mask=make_mask(), plan=plan), case.v)
        found, device = on_device(case, make_mask(), plan, run, tables=tables)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)
        assert not device.mixed, device.report()
        assert sum(device.waits.values()) <= most, device.report()
        seen.append(device.waits)
    assert seen[0] == seen[1], "waits grow with the tiles"


def product(A: Any, v: Tensor) -> Tensor:
    return A @ v


@pytest.mark.parametrize("tables", [True, False], ids=["tables there", "tables on the CPU"])
def test_product_with_each_score(score_name: str, tables: bool, make: Callable[..., Any], sizes: Any) -> None:
    case = make(score_name, "Causal", sizes(29, 23))
    most = 1 if score_name in OF_FUNCTIONS | OF_WIDE_TOKENS else 0
    compare(case, attlas.Causal, product, most, tables=tables)


@pytest.mark.parametrize("tables", [True, False], ids=["tables there", "tables on the CPU"])
def test_product_with_each_mask(mask_name: str, tables: bool, make: Callable[..., Any], sizes: Any) -> None:
    case = make("ScaledDot", mask_name, sizes(29, 23))
    reads = mask_name in OF_FUNCTIONS or (tables and mask_name in OF_TENSORS)
    compare(case, lambda: case.mask_case.make(case.sizes), product, 1 if reads else 0, tables=tables)


@pytest.mark.parametrize("mask", ["none", "Causal", "Prefix | Causal", "Documents", "Padding", "bool tensor"])
@pytest.mark.parametrize("name", list(STATISTICS))
def test_each_statistic(name: str, mask: str, make: Callable[..., Any], sizes: Any) -> None:
    case = make("ScaledDot", mask, sizes(29, 23))

    def collect(A: Any, v: Tensor) -> Tensor:
        found = A.collect(with_values(STATISTICS[name](), v))[0]
        return found if isinstance(found, Tensor) else found[0]

    compare(case, lambda: case.mask_case.make(case.sizes), collect, 2)


def with_values(statistic: stats.Statistic, v: Tensor) -> stats.Statistic:
    """Return a statistic that has the values of a case."""
    if isinstance(statistic, stats.Pooled):
        statistic.v = v
    return statistic


@pytest.mark.parametrize("name", [name for name, make in STATISTICS.items() if make().differentiable])
def test_gradient_of_each_statistic_mixes_no_devices(name: str, make: Callable[..., Any], sizes: Any) -> None:
    def gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        A = attlas.attend(q, k, mask=attlas.Window(6, 2), plan=PLANS[1])
        found = A.collect(with_values(STATISTICS[name](), v))[0]
        (found if isinstance(found, Tensor) else found[0]).nan_to_num(0.0).square().sum().backward()
        return q.grad  # type: ignore[return-value]

    case = make("ScaledDot", "none", sizes(29, 23))
    wanted = gradient(*(t.detach().clone().requires_grad_() for t in (case.q, case.k, case.v)))
    device = PretendDevice()
    with device:
        found = gradient(*(device.put(t.detach().clone().requires_grad_()) for t in (case.q, case.k, case.v)))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert not device.mixed, device.report()
    assert not [place for _, place in device.waits if place.startswith(("stats/", "masks/", "scores/"))]


def test_no_score_makes_float64_on_mps(score_name: str, make: Callable[..., Any], sizes: Any) -> None:
    case = make(score_name, "Causal", sizes(29, 23))
    assert no_float64(case, case.score.float(), attlas.Causal(), lambda A, v: A @ v)


def test_no_mask_makes_float64_on_mps(mask_name: str, make: Callable[..., Any], sizes: Any) -> None:
    case = make("ScaledDot", mask_name, sizes(29, 23))
    mask = case.mask.float() if isinstance(case.mask, Tensor) and case.mask.is_floating_point() else case.mask
    assert no_float64(case, case.score, mask, lambda A, v: A @ v)


@pytest.mark.parametrize("name", list(STATISTICS))
def test_no_statistic_makes_float64_on_mps(name: str, make: Callable[..., Any], sizes: Any) -> None:
    case = make("ScaledDot", "Causal", sizes(29, 23))
    assert no_float64(
        case, case.score, case.mask, lambda A, v: A.collect(with_values(STATISTICS[name](), v), stats.Picture(4, 6))
    )


def no_float64(case: Any, score: attlas.Score, mask: Any, run: Callable[..., Any]) -> bool:
    """Return whether no score, mask or statistic makes a tensor of float64 on a pretended mps."""
    device = PretendDevice("mps")
    with device, torch.no_grad():
        q, k, v = (device.put(t.detach().float()) for t in (case.q, case.k, case.v))
        for t in score.parameters():
            device.put(t)
        if isinstance(score, attlas.ScoreMod):
            score.score_mod.table = None
            score = attlas.ScoreMod(lambda s, b, h, i, j: s + (i - j))
        run(attlas.attend(q, k, score=score, mask=mask, plan=PLANS[1]), v)
    own = ("scores/", "masks/", "stats/", "foundation/")
    return not [p for _, p in device.float64 if p.startswith(own)]


HELD: dict[str, Callable[[], attlas.Mask]] = {
    "Runs": lambda: runs_of(attlas.Dilated(9, 0, 2), 2, 4, 29, 23),
    "Bits": lambda: Bits(torch.arange(29 * 3).view(1, 1, 29, 3).to(torch.uint8), 23),
    "RunPerRow": lambda: RunPerRow(torch.arange(29) // 2, torch.arange(29) // 2 + 5),
    "Stacked": lambda: Stacked(
        [Block(attlas.Causal(), range(11), range(12)), Block(attlas.Window(4, 0), range(11, 29), range(3, 23))]
    ),
    "Concatenated": lambda: Concatenated([attlas.Padding(9), None, attlas.from_function(tilted)], [1, 1, 2], axis=1),
    "OutsideRectangle": lambda: OutsideRectangle(Positions((3, 9, 14, 20)), Positions((2, 5, 11, 30)), 0, 0),
    "Heads": lambda: attlas.masks.Heads({0: attlas.Padding([9, 20]), 3: attlas.Padding([9, 20])}, attlas.Causal()),
    "Documents, both": lambda: attlas.Documents([[0] * 9 + [1] * 14, [0] * 20 + [1] * 3], [[0] * 29, [1] * 29]),
}


def tilted(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i + h > j


@pytest.mark.parametrize("name", list(HELD))
def test_product_with_masks_that_hold_tables(name: str, make: Callable[..., Any], sizes: Any) -> None:
    case = make("ScaledDot", "none", sizes(29, 23))
    compare(case, HELD[name], product, 1 if name == "Concatenated" else 0)


@pytest.mark.parametrize("name", ["bool tensor", "additive"])
def test_a_tensor_on_the_device_is_read_once(name: str, make: Callable[..., Any], sizes: Any) -> None:
    case = make("ScaledDot", name, sizes(150, 130))
    device = PretendDevice()
    with device, torch.no_grad():
        q, k, v = (device.put(t.detach()) for t in (case.q, case.k, case.v))
        mask = attlas.from_tensor(device.put(case.mask))
        device.forget()
        for _ in range(2):
            for plan in (Plan("tiled", rows=64, columns=64), Plan("tiled", rows=70, columns=130)):
                attlas.attend(q, k, mask=mask, plan=plan) @ v
        assert sum(device.waits.values()) == 1, device.report()
        mask.tensor.fill_(True if name == "bool tensor" else 0.0)
        found = attlas.attend(q, k, mask=mask) @ v
    torch.testing.assert_close(found, attlas.attend(case.q, case.k).detach() @ case.v.detach())


def test_lengths_and_documents_on_the_device_are_read_when_the_mask_is_made() -> None:
    device = PretendDevice()
    with device, torch.no_grad():
        q = device.put(torch.randn(2, 1, 8, 4))
        lengths, ids = device.put(torch.tensor([5, 8])), device.put(torch.tensor([[0] * 8, [0] * 4 + [1] * 4]))
        device.forget()
        mask = attlas.Padding(lengths) & attlas.Documents(ids)
        assert sum(device.waits.values()) == 2
        device.forget()
        for _ in range(3):
            A = attlas.attend(q, q, mask=mask, plan=Plan("tiled", rows=2, columns=3))
            A @ q
            A.collect(stats.ColumnMass(mean=True))
        assert not [p for _, p in device.waits if p.startswith("masks/")], device.report()


def test_tables_that_change_in_place_are_seen_and_copies_do_not_grow() -> None:
    score = attlas.Alibi([0.5, 0.25])
    q, found = torch.randn(1, 2, 6, 4), []
    for number in range(5):
        device = PretendDevice()
        wanted = (attlas.attend(q, q, score=score) @ q).clone()
        with device:
            there = device.put(q.clone())
            found.append(attlas.attend(there, there, score=score, plan=Plan("tiled", rows=2, columns=3)) @ there)
        torch.testing.assert_close(found[-1], wanted)
        score.slopes.mul_(2.0)
        assert len(score._copies._known) == 1, number
    assert not torch.equal(found[0], found[1])


def test_copies_made_in_inference_mode_serve_a_gradient() -> None:
    score = attlas.RelativeBias(2, 4) + attlas.Alibi(2)
    mask = attlas.Padding([3, 5])
    device, run = PretendDevice(), Plan("tiled", rows=2, columns=3)
    with device:
        device.put(score)
        q = device.put(torch.randn(2, 2, 5, 4))
        with torch.inference_mode():
            attlas.attend(q, q, score=score, mask=mask, plan=run) @ q
        (attlas.attend(q, q, score=score, mask=mask, plan=run) @ q).sum().backward()
    assert score.left.weight.grad is not None


def test_copies_of_a_mask_are_not_stored_with_it() -> None:
    mask, device = attlas.Padding([3, 5]), PretendDevice()
    with device:
        q = device.put(torch.randn(2, 2, 5, 4))
        attlas.attend(q, q, mask=mask, plan=Plan("tiled")) @ q
    assert mask._copies._known
    assert same_settings(mask, attlas.Padding([3, 5]))
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert not other._copies._known
        assert other.lengths.tolist() == [3, 5]


def test_keys_that_a_layer_appends() -> None:
    layer, device = attlas.nn.MultiHeadAttention(8, 2, add_zero_attn=True, batch_first=True), PretendDevice()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        wanted = layer(x, x, x, attn_mask=attlas.Window(2, 0), need_weights=False)[0]
        with device:
            device.put(layer)
            there = device.put(x.clone())
            found = layer(there, there, there, attn_mask=attlas.Window(2, 0), need_weights=False)[0]
    torch.testing.assert_close(found, wanted)
    assert not [place for _, place in device.waits if place.startswith(("nn/", "masks/"))], device.report()
