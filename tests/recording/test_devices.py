"""Recordings on a device: at most one wait a pass, copies that nobody waits for, and the same numbers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from tests.pretend import PretendDevice
from torch import Tensor, nn

import attlas.huggingface
from attlas import stats
from attlas.recording import copies, disk, record, sequences, snapshot
from attlas.recording.atlas import Atlas, Entry

STEPS = 5
KEEPS = ("device", "cpu", "disk", "statistics")
RUNS = ("prompt", "padding", "chunks", "dynamic", "static")


class Event:
    """An event of a pretended device: complete when the program has waited for anything after it."""

    count = 0

    def __init__(self, device: PretendDevice) -> None:
        self._device, self._before = device, sum(device.waits.values())
        Event.count += 1

    def query(self) -> bool:
        return sum(self._device.waits.values()) > self._before

    def synchronize(self) -> None:
        self._device.waits["synchronize", "event"] += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendDevice]:
    """Return a pretended GPU, with events, on which nothing was computed."""
    device, Event.count = PretendDevice("cuda"), 0
    monkeypatch.setattr(copies, "_pinned_memory", lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    monkeypatch.setattr(copies, "_event_after_work", lambda _: Event(device))
    snapshot._bit_weights.cache_clear()
    yield device
    snapshot._bit_weights.cache_clear()


@pytest.fixture
def model(llama: nn.Module) -> nn.Module:
    llama.set_attn_implementation(attlas.huggingface.NAME)
    return llama


def run(model: nn.Module, ids: Tensor, name: str, device: PretendDevice | None) -> None:
    """Run some passes of a model; count the waits of the last ones."""
    mask = torch.ones_like(ids)
    if name == "prompt":
        model(ids, attention_mask=mask)
    elif name == "padding":
        mask[0, :3] = 0
        model(ids, attention_mask=mask)
    else:
        static = transformers.StaticCache(config=model.config, max_cache_len=64)
        cache = static if name == "static" else transformers.DynamicCache(config=model.config)
        model(ids, attention_mask=mask, past_key_values=cache)
        if device is not None:
            device.waits.clear()
        for step in range(STEPS):
            new = ids[:, :1].expand(-1, 20) if name == "chunks" and step < 2 else ids[:, step : step + 1]
            model(new, past_key_values=cache)


def recorded(
    model: nn.Module, ids: Tensor, name: str, device: PretendDevice | None, **options: Any
) -> tuple[dict[str, int], Atlas | None]:
    """Return the waits of a run by place, and the atlas where it is recorded; None stands for the CPU."""
    waits: dict[str, int] = {}
    with device or contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the temporary folder
        if device is not None:
            model, ids = device.put(model), device.put(ids.clone())
            device.forget()
        block = record(model, **options) if options else contextlib.nullcontext()
        with block as atlas, torch.no_grad():
            run(model, ids, name, device)
            if device is not None:
                waits = {f"{place} {what}": count for (what, place), count in device.waits.items()}
    return waits, atlas


def settings(keep: str) -> dict[str, Any]:
    return {"keep": keep, "statistics": [stats.Entropy(), stats.ColumnMass()] if keep == "statistics" else []}


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", RUNS)
def test_recording_adds_one_wait_a_pass_and_changes_no_number(
    model: nn.Module, ids: Tensor, cuda: PretendDevice, name: str, keep: str
) -> None:
    alone, _ = recorded(model, ids, name, cuda)
    waits, atlas = recorded(model, ids, name, cuda, **settings(keep))
    passes = 1 if name in ("prompt", "padding") else STEPS
    assert sum(waits.values()) <= sum(alone.values()) + passes, waits
    assert atlas is not None
    assert len(atlas) == 3
    _, expected = recorded(model, ids, name, None, **settings(keep))
    assert expected is not None
    assert torch.equal(atlas.ids, expected.ids)
    for one, other in zip(atlas.entries, expected.entries, strict=True):
        assert (one.path, one.call, one.queries, one.shape) == (other.path, other.call, other.queries, other.shape)
        with cuda:
            found = numbers(one)
        for key, t in numbers(other).items():
            torch.testing.assert_close(found[key], t, rtol=1e-5, atol=1e-5)


def in_blocks(model: nn.Module, ids: Tensor, device: PretendDevice | None, keep: Any) -> list[Atlas]:
    """Record a prompt, and two steps in each of three further blocks; None stands for the CPU."""
    found, cache = [], transformers.DynamicCache(config=model.config)
    with device or contextlib.nullcontext(), torch.no_grad():
        if device is not None:
            model, ids = device.put(model), device.put(ids.clone())
        recording = record(model, keep=keep)
        with recording as atlas:
            model(ids, past_key_values=cache)
        found.append(atlas)
        for _ in range(3):
            with recording.resumed() as atlas:
                for step in range(2):
                    model(ids[:, step : step + 1], past_key_values=cache)
            found.append(atlas)
    return found


@pytest.mark.parametrize("keep", ["device", "cpu"])
def test_each_block_of_a_recording_has_the_numbers_of_the_cpu(
    model: nn.Module, ids: Tensor, cuda: PretendDevice, keep: str
) -> None:
    found, expected = in_blocks(model, ids, cuda, keep), in_blocks(model, ids, None, keep)
    for step, (atlas, other) in enumerate(zip(found, expected, strict=True)):
        assert [entry.shape[2:] for entry in atlas.entries] == [(ids.shape[1] + 2 * step,) * 2] * 3
        assert torch.equal(atlas.ids, other.ids)
        for entry, wanted in zip(atlas.entries, other.entries, strict=True):
            with cuda:
                numbers_found = numbers(entry)
            for key, t in numbers(wanted).items():
                torch.testing.assert_close(numbers_found[key], t, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("held", "waits_more"), [(2**28, 1), (0, 4)])
@pytest.mark.parametrize("name", ["prompt", "padding"])
def test_a_long_prompt_is_written_when_the_pass_has_ended(
    model: nn.Module,
    ids: Tensor,
    cuda: PretendDevice,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    held: int,
    waits_more: int,
) -> None:
    """One wait for all layers; copies of more bytes than may be held are written before."""
    monkeypatch.setattr(disk, "_SMALL_ENTRY_BYTES", 1)
    monkeypatch.setattr(sequences, "_MOST_WAITING_BYTES", held)
    alone, _ = recorded(model, ids, name, cuda)
    waits, atlas = recorded(model, ids, name, cuda, keep="disk", values=True)
    assert sum(waits.values()) == sum(alone.values()) + waits_more, waits
    _, expected = recorded(model, ids, name, None, keep="disk", values=True)
    assert atlas is not None
    assert expected is not None
    for one, other in zip(atlas.entries, expected.entries, strict=True):
        assert (one.path, one.queries, one.shape) == (other.path, other.queries, other.shape)
        for key, t in numbers(other).items():
            torch.testing.assert_close(numbers(one)[key], t, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one.values, other.values)


@pytest.mark.parametrize(("free", "each_pass"), [(2**40, 1), (0, 4)])
def test_a_static_cache_waits_once_a_pass_where_there_is_memory(
    model: nn.Module,
    ids: Tensor,
    cuda: PretendDevice,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    each_pass: int,
) -> None:
    """Its keys are copies; those of more bytes than may be held are decided about before: once for each layer here."""
    monkeypatch.setattr(sequences, "_MOST_WAITING_BYTES", 0)
    monkeypatch.setattr(sequences, "free_bytes", lambda _: free)
    alone, _ = recorded(model, ids, "static", cuda)
    waits, _ = recorded(model, ids, "static", cuda, keep="device")
    assert sum(waits.values()) == sum(alone.values()) + each_pass * STEPS, waits


@pytest.mark.parametrize(("cells", "layers"), [(None, 0), (1000, 3)])
def test_statistics_of_rows_that_fit_no_tile_wait_once_a_layer(
    model: nn.Module, ids: Tensor, cuda: PretendDevice, monkeypatch: pytest.MonkeyPatch, cells: int | None, layers: int
) -> None:
    """They take the log-sum-exp that came with the output, once it is known to be precise: no second pass over rows."""
    ids = ids.repeat(1, 4)
    if cells:
        monkeypatch.setattr(attlas.Plan, "budget", lambda self, device_type: cells)
    alone, _ = recorded(model, ids, "prompt", cuda)
    waits, _ = recorded(model, ids, "prompt", cuda, **settings("statistics"))
    assert sum(waits.values()) == sum(alone.values()) + 1 + layers, waits


def numbers(entry: Entry) -> dict[str, Tensor | None]:
    """Return what an entry holds, on the CPU."""
    found = dict(entry.statistics) | {"query_mask": entry.query_mask}
    if entry.matrix is not None:
        found |= {"dense": entry.matrix.to_dense(), "lse": entry.matrix.lse, "k": entry.matrix.problem.k}
    return {name: None if t is None else t.cpu() for name, t in found.items()}


def test_copies_are_read_when_their_event_is_complete(
    model: nn.Module, ids: Tensor, cuda: PretendDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that copies nothing until it is waited for, into memory that is full of NaN."""
    waiting: list[tuple[Tensor, Tensor]] = []

    def write(self: copies.HostCopies, target: Tensor, t: Tensor) -> None:
        assert target.is_contiguous()
        assert t.is_contiguous()
        assert target.dtype is t.dtype
        target.fill_(torch.nan if t.is_floating_point() else 1)
        waiting.append((target, t.detach().clone()))
        self._streams.add(t.device)

    class Late:
        def __init__(self) -> None:
            self._own, waiting[:] = list(waiting), []

        def query(self) -> bool:
            return not self._own

        def synchronize(self) -> None:
            for target, t in self._own:
                target.copy_(t)
            self._own.clear()

    _, expected = recorded(model, ids, "dynamic", None, keep="cpu", values=True)
    monkeypatch.setattr(copies.HostCopies, "write", write)
    monkeypatch.setattr(copies, "_event_after_work", lambda _: Late())
    _, atlas = recorded(model, ids, "dynamic", cuda, keep="cpu", values=True)
    assert atlas is not None
    assert expected is not None
    for one, other in zip(atlas.entries, expected.entries, strict=True):
        torch.testing.assert_close(one.matrix.problem.q, other.matrix.problem.q)
        torch.testing.assert_close(one.matrix.problem.k, other.matrix.problem.k)
        torch.testing.assert_close(one.values, other.values)
        torch.testing.assert_close(one.matrix.lse, other.matrix.lse)


def test_a_pass_has_one_event(model: nn.Module, ids: Tensor, cuda: PretendDevice) -> None:
    recorded(model, ids, "dynamic", cuda, keep="cpu")
    assert Event.count == 1 + STEPS


GENERATED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "some heads": {"keep": "cpu", "heads": [0, 2]},
    "values": {"values": True},
    "beams on disk": {"num_beams": 3, "keep": "disk"},
}


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_generating_adds_one_wait_a_pass(
    family: str, name: str, ids: Tensor, cuda: PretendDevice, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(family)
    model.set_attn_implementation(attlas.huggingface.NAME)
    options = GENERATED[name] | {"keep": GENERATED[name].get("keep", "device")}
    beams, passes = options.pop("num_beams", 1), []
    model.register_forward_hook(lambda *_: passes.append(1))

    def generate(block: Any) -> int:
        passes.clear()
        with block, warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            cuda.forget()
            given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "min_new_tokens": 6}
            model.generate(ids, **given, do_sample=False, num_beams=beams)
            return sum(cuda.waits.values())

    with cuda:
        cuda.put(model)
        ids = cuda.put(ids.clone())
        alone = generate(contextlib.nullcontext())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the temporary folder
            found = generate(record(model, **options))
    assert found <= alone + len(passes) + (family == "t5"), cuda.report()  # its encoder runs by itself, once


@pytest.mark.parametrize("keep", ["device", "statistics"])
@pytest.mark.parametrize("name", ["padding", "dynamic"])
def test_a_device_without_float64_is_not_asked_for_one(model: nn.Module, ids: Tensor, name: str, keep: str) -> None:
    """What the engine computes is its own; of that, recordings keep the log-sum-exp."""
    mps = PretendDevice("mps")
    numbers = [stats.Entropy(), stats.ColumnMass(), stats.TopK(2), stats.MaxLogit(), stats.LogitMoments()]
    _, atlas = recorded(model, ids, name, mps, keep=keep, statistics=numbers)
    assert atlas is not None
    with mps:
        assert len(atlas.table(data="records", join_steps=True)) == 12
        if keep == "device":
            assert len(atlas.token_table(0, head=0, data="records")) > 0
    made = {
        place
        for _, place in mps.float64
        if place.startswith("recording/" if keep == "statistics" else "recording/atlas")
    }
    assert not made
