"""What the findings of docs/ were measured with: the scripts at a reduced size, and the results that are shown."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

FOLDER = Path(__file__).resolve().parents[1] / "training" / "findings"


@pytest.fixture
def induction(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("induction")


def test_texts_repeat_a_block_and_tell_what_is_known(induction: ModuleType) -> None:
    ids, known = induction.texts(50, torch.Generator().manual_seed(0))
    for row, told in zip(ids, known, strict=True):
        period = int((~told).sum())
        assert induction.SHORTEST <= period <= induction.LONGEST
        assert not told[:period].any()
        assert torch.equal(row[period:], row[:-period])


def test_rotary_logits_depend_on_the_distance(induction: ModuleType) -> None:
    small = importlib.import_module("small")
    q, k = torch.randn(2, 8, dtype=torch.float64)
    logits = small.rotated(q.expand(30, 8)) @ small.rotated(k.expand(30, 8)).T
    torch.testing.assert_close(logits[1:, 1:], logits[:-1, :-1])
    torch.testing.assert_close(logits[0, 0], q @ k)
    assert (logits[0] - logits[0, 0]).abs().max() > 0.1


def test_a_reduced_training_lowers_the_loss_and_scores_every_checkpoint(induction: ModuleType) -> None:
    model, history = induction.measure(0, steps=40, every=13, batch=16)
    assert [point["step"] for point in history] == [0, 13, 26, 39]
    assert history[-1]["loss"] < history[0]["loss"] - 0.05
    assert all(point[name].shape == (2, 4) for point in history for name in ("previous", "induction"))
    ids = torch.randint(32, (2, 12)).repeat(1, 2)
    with torch.no_grad():
        found = induction.scores(model, ids)
        x = model.blocks[0].norm(model.embed(ids))
        q, k, _ = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in model.blocks[0].attn.qkv(x).chunk(3, -1))
        small = importlib.import_module("small")
        logits = small.rotated(q) @ small.rotated(k).mT / 4
        weights = logits.masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf).softmax(-1)
    # Query 1 sees a key beside the token before it, as every later one does.
    torch.testing.assert_close(found["previous"][0], weights.diagonal(-1, -2, -1).mean((0, 2)))


def test_results_show_what_the_page_says(induction: ModuleType) -> None:
    runs = json.loads((FOLDER / "induction.json").read_text(encoding="utf-8"))
    assert [run["seed"] for run in runs] == list(induction.SEEDS)
    for run in runs:
        best = {point["step"]: max(point["induction"][1]) for point in run["history"]}
        loss = {point["step"]: point["loss"] for point in run["history"]}
        assert best[0] < 0.065
        assert best[140] < 0.18
        assert best[180] > 0.73
        assert best[490] - best[180] < 0.075
        assert loss[140] > 2.75
        assert loss[180] < 1.15
        assert next(step for step, score in best.items() if score > (best[0] + best[490]) / 2) in (160, 170)


def test_weights_are_those_of_the_last_checkpoint(induction: ModuleType) -> None:
    model = induction.Transformer(induction.SYMBOLS)
    model.load_state_dict(load_file(FOLDER / "induction.safetensors"))
    half = torch.randint(32, (8, 32), generator=torch.Generator().manual_seed(1000))
    found = induction.scores(model, half.repeat(1, 2))
    (last,) = json.loads((FOLDER / "induction.json").read_text(encoding="utf-8"))[0]["history"][-1:]
    for name in ("previous", "induction"):
        torch.testing.assert_close(found[name], torch.tensor(last[name]), atol=0.01, rtol=0)
