"""What one step of a generation costs does not grow with the tokens before it."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.pretend import PretendDevice
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attlas
from attlas import stats
from attlas.engine import operations
from attlas.recording import copies, record, snapshot
from attlas.recording.atlas import Atlas

STATISTICS = [stats.Entropy(), stats.TopK(2), stats.ColumnMass(), stats.ColumnMax(), stats.Offsets()]
PROMPT = 5
PLAN = attlas.Plan("tiled")  # with any number of keys


class Writer(nn.Module):
    """One attention with a cache."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.heads = nn.Embedding(50, 8), nn.Linear(8, 24)
        self.k = self.v = torch.zeros(1, 2, 0, 4)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.heads(self.embedding(ids)).unflatten(-1, (6, 4)).transpose(1, 2).split(2, dim=1)
        self.k, self.v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        mask = attlas.Causal() if q.shape[2] > 1 else None
        return attlas.attention(q, self.k, self.v, mask=mask, plan=PLAN)


class Calls(TorchFunctionMode):
    """Counts the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[getattr(func, "__qualname__", str(func))] += 1
        return func(*args, **(kwargs or {}))


class Complete:
    """An event of a device that has done its work."""

    def query(self) -> bool:
        return True


class Kernels(TorchDispatchMode):
    """Counts the operations that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def write(tokens: int, watched: dict[int, Any], put: Callable[[Any], Any] = lambda t: t, **options: Any) -> Atlas:
    """Record a text of some tokens, eight at a time; those that are named and their neighbours come alone.

    What happens at the named ones is counted.
    """
    model = put(Writer())
    model.k, model.v = put(torch.zeros(1, 2, 0, 4)), put(torch.zeros(1, 2, 0, 4))
    alone = {near for token in watched for near in (token - 1, token, token + 1)}
    with record(model, **options) as atlas, torch.no_grad():
        model(put(torch.arange(PROMPT).view(1, -1)))
        token = PROMPT
        while token < tokens:
            stop = min({token + 8, tokens} | {near for near in alone if near > token})
            stop = token + 1 if token in alone else stop
            ids = put((torch.arange(token, stop) % 50).view(1, -1))
            with watched.get(token, nullcontext()):
                model(ids)
            token = stop
    return atlas


SETTINGS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "values": {"values": True, "keep": "cpu"},
    "disk": {"keep": "disk"},
    "statistics": {"keep": "statistics", "statistics": [stats.Entropy(), stats.ColumnMass()]},
    "tokens and statistics": {"statistics": STATISTICS},
    "all statistics": {"keep": "statistics", "statistics": STATISTICS},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_makes_as_many_calls_of_torch_after_1000_tokens(name: str, tmp_path: Path) -> None:
    # The tiles of statistics look for maxima in groups of keys, and treat larger log-sum-exps with more care.
    few = 200 if "statistics" in SETTINGS[name] else 10
    folder = {"folder": tmp_path / "a"} if name == "disk" else {}
    watched = {few: Calls(), 1000: Calls(), few + 1: Kernels(), 1001: Kernels()}
    atlas = write(1002, watched, **SETTINGS[name], **folder)
    assert [entry.shape for entry in atlas.entries] == [(1, 2, 1002, 1002)]
    for early, late in ((few, 1000), (few + 1, 1001)):
        assert watched[early].names.total() > 50
        assert watched[early].names == watched[late].names


# On a pretended device a step takes long. Some buffers grow at powers of two: 128 or 256 is passed.
LATE = {name: 300 if name in ("all statistics", "disk") else 150 for name in SETTINGS}


@pytest.mark.parametrize(
    ("name", "late"), [pytest.param(*both, marks=[pytest.mark.slow] * (both[0] != "values")) for both in LATE.items()]
)
def test_a_step_on_a_device_makes_as_many_calls_after_many_tokens(
    name: str, late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = 80 if "statistics" in SETTINGS[name] else 10
    folder = {"folder": tmp_path / "a"} if name == "disk" else {}
    device, calls, waits = PretendDevice("cuda"), [], []
    monkeypatch.setattr(copies, "_pinned_memory", lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    monkeypatch.setattr(copies, "_event_after_work", lambda _: Complete())

    @contextmanager
    def counted() -> Iterator[None]:
        device.forget()
        yield
        calls.append(device.calls)
        waits.append(sum(count for (_, place), count in device.waits.items() if "recording" in place))

    snapshot._bit_weights.cache_clear()
    with device:
        write(late + 1, {few: counted(), late: counted()}, device.put, **SETTINGS[name], **folder)
    snapshot._bit_weights.cache_clear()
    assert calls[0] == calls[1] > 50
    assert waits == [1, 1]


@pytest.fixture
def other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every tensor as one of a device for whose numbers the program waits."""
    monkeypatch.setattr("attlas.recording.snapshot.answers_later", lambda t: True)


def numbers(atlas: Atlas) -> list[Any]:
    """Return everything that the entries of an atlas hold."""
    return [
        (entry.name, entry.call, entry.queries, entry.shape, entry.statistics["entropy"].tolist())
        + (() if entry.matrix is None else (entry.matrix.to_dense().tolist(), entry.matrix.problem.k.tolist()))
        for entry in atlas.entries
    ]


def generated(model: nn.Module, ids: Tensor, keep: Any, **options: Any) -> Atlas:
    with record(model, keep=keep, statistics=STATISTICS[:1]) as atlas:
        model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, **options)
    return atlas


@pytest.mark.parametrize("keep", ["device", "statistics"])
@pytest.mark.parametrize("beams", [1, 3])
def test_answers_at_the_end_of_a_pass_are_the_same(
    llama: nn.Module, ids: Tensor, keep: Any, beams: int, request: pytest.FixtureRequest
) -> None:
    at_once = numbers(generated(llama, ids, keep, num_beams=beams))
    request.getfixturevalue("other_device")
    assert numbers(generated(llama, ids, keep, num_beams=beams)) == at_once
    assert len(at_once) == 3 if beams == 1 else len(at_once) > 3


@pytest.mark.parametrize("later", [False, True])
def test_a_pass_that_raises_an_error(
    llama: nn.Module, ids: Tensor, later: bool, request: pytest.FixtureRequest
) -> None:
    if later:
        request.getfixturevalue("other_device")
    cache = transformers.DynamicCache(config=llama.config)
    with record(llama) as atlas, torch.no_grad():
        llama(ids[:, :6], past_key_values=cache)
        with pytest.raises(ZeroDivisionError):
            handle = llama.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
            llama(ids[:, 6:7], past_key_values=cache)
        handle.remove()
        first = cache.layers[0]
        first.keys, first.values = first.keys[:, :, :6], first.values[:, :, :6]
        llama(ids[:, 6:8], past_key_values=cache)
    assert [(entry.layer, entry.call, entry.queries) for entry in atlas.entries] == [
        (0, 0, (0, 7)),
        (0, 1, (6, 8)),
        (1, 0, (0, 8)),
        (2, 0, (0, 8)),
    ]


class Masked(Writer):
    """A writer whose steps see other keys each time: every second one hides the key before its own."""

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.heads(self.embedding(ids)).unflatten(-1, (6, 4)).transpose(1, 2).split(2, dim=1)
        self.k, self.v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        n = self.k.shape[2]
        hidden = torch.arange(n) != (n - 2 if n % 2 else -1)
        hidden = hidden.to(q.device)
        mask = attlas.Causal() if q.shape[2] > 1 else attlas.from_tensor(hidden[None])
        return attlas.attention(q, self.k, self.v, mask=mask)


@pytest.mark.parametrize("keep", ["device", "statistics"])
@pytest.mark.parametrize("kind", [Writer, Masked])
def test_steps_on_a_device_are_computed_together(
    kind: type[Writer], keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the tokens stay, a step computes no statistic: the end of the text does, for all."""
    counts: Counter[str] = Counter()
    monkeypatch.setattr(operations, "collect", counted_calls(operations.collect, counts))
    snapshot._bit_weights.cache_clear()
    with PretendDevice("cuda") as device, torch.no_grad():
        model = device.put(kind())
        model.k, model.v = device.put(torch.zeros(1, 2, 0, 4)), device.put(torch.zeros(1, 2, 0, 4))
        with record(model, keep=keep, statistics=STATISTICS[:1]) as atlas:
            model(device.put(torch.arange(PROMPT).view(1, -1)))
            counts.clear()
            for token in range(PROMPT, PROMPT + 8):
                model(device.put(torch.tensor([[token]])))
            at_steps = counts.total()
        (entry,) = atlas.entries
        entropy = entry.statistics["entropy"].cpu()
        weights = None if entry.matrix is None else entry.matrix.to_dense().cpu()
    snapshot._bit_weights.cache_clear()
    assert (at_steps == 0) == (keep == "device")
    assert entropy.shape == (1, 2, PROMPT + 8)
    if weights is not None:
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, PROMPT + 8))
        torch.testing.assert_close(entropy, torch.special.entr(weights).sum(-1))


@pytest.mark.parametrize("keep", ["device", "disk", "cpu"])
def test_steps_whose_output_came_alone_are_computed_together(
    llama: nn.Module, ids: Tensor, keep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    monkeypatch.setattr(operations, "log_sum_exp", counted_calls(operations.log_sum_exp, counts))
    folder = {"folder": tmp_path / "a"} if keep == "disk" else {}
    with record(llama, keep=keep, **folder) as atlas, torch.no_grad():
        cache = transformers.DynamicCache(config=llama.config)
        llama(ids, past_key_values=cache)
        counts.clear()
        for step in range(4):
            llama(ids[:, step : step + 1], past_key_values=cache)
        assert not counts
    for entry in atlas.entries:
        assert entry.matrix.lse.shape == (2, 4, 15)
        assert entry.matrix.check() < 1e-5
        torch.testing.assert_close(entry.matrix.to_dense().sum(-1), torch.ones(2, 4, 15))


def counted_calls(function: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        counts[function.__name__] += 1
        return function(*args, **kwargs)

    return run
