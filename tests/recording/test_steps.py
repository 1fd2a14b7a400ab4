"""What one step of a generation costs does not grow with the tokens before it."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attlas
from attlas import stats
from attlas.recording import record
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


class Kernels(TorchDispatchMode):
    """Counts the operations that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def write(tokens: int, watched: dict[int, Any], **options: Any) -> Atlas:
    """Record a text of some tokens, one at a time; count what happens at those that are named."""
    model = Writer()
    with record(model, **options) as atlas, torch.no_grad():
        model(torch.arange(PROMPT).view(1, -1))
        for token in range(PROMPT, tokens):
            ids = torch.tensor([[token % 50]])
            if token in watched:
                with watched[token]:
                    model(ids)
            else:
                model(ids)
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


@pytest.mark.usefixtures("other_device")
def test_a_pass_waits_once_for_the_answers_of_all_layers(llama: nn.Module, ids: Tensor) -> None:
    cache, calls = transformers.DynamicCache(config=llama.config), Calls()
    with record(llama) as atlas, torch.no_grad():
        llama(ids[:, :6], past_key_values=cache)
        with calls:
            llama(ids[:, 6:7], past_key_values=cache)
    assert [entry.shape[2:] for entry in atlas.entries] == [(7, 7)] * 3
    assert calls.names["TensorBase.tolist"] == 1
    assert calls.names["_VariableFunctionsClass.equal"] == 3  # those of the text, and none of a layer


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
