"""The scripts that train models: the small hybrid, at a reduced size."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import attlas

SCRIPT = Path(__file__).resolve().parents[1] / "training" / "hybrid.py"


@pytest.fixture(scope="module")
def hybrid() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hybrid", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hybrid"] = module
    spec.loader.exec_module(module)
    return module


def test_texts_are_copied_and_recalled(hybrid: ModuleType) -> None:
    ids, wanted = hybrid.texts(10, torch.Generator().manual_seed(0), 6, 20)
    first, second = ids[:, :6], ids[:, 7:]
    assert (ids[:, 6] == 20).all()
    assert torch.equal(first[:5], second[:5])
    assert all(len(set(row)) == 6 for row in first.tolist())
    for row in range(5, 10):
        assert sorted(second[row].view(3, 2).tolist()) == sorted(first[row].view(3, 2).tolist())
    assert wanted[0].tolist() == [False] * 8 + [True] * 5
    assert wanted[9].tolist() == [False] * 8 + [True, False] * 2 + [True]
    for row in range(10):  # what is wanted followed the token before, the first time
        queries, answers = hybrid.places(ids[row])
        known = dict(zip(queries.tolist(), ids[row, answers].tolist(), strict=True))
        assert all(known[place - 1] == ids[row, place] for place in wanted[row].nonzero().flatten().tolist())


def test_a_reduced_hybrid_learns_and_its_layers_are_matrices(
    hybrid: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = hybrid.train(40, length=4, symbols=8)
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] - 0.2
    ids, _ = hybrid.texts(2, torch.Generator().manual_seed(1), 4, 8)
    atlas = hybrid.record(model, ids[0])
    assert atlas.layers() == [0, 1, 2, 3]
    assert [atlas[layer].weights.are_signed for layer in range(4)] == [True, True, True, False]
    heard = {}
    handles = [
        mixer.register_forward_hook(lambda module, given, out: heard.update({module: (given[0], out)}))
        for mixer in model.mixers
    ]
    with torch.no_grad():
        model(ids[:1])
        for layer, mixer in enumerate(model.mixers[:3]):
            given, out = heard[mixer]
            v = mixer.convolved(given).unflatten(-1, (3, hybrid.HEADS, -1))[:, :, 2].transpose(1, 2)
            pooled = mixer.out((atlas[layer] @ v).transpose(1, 2).flatten(2))
            torch.testing.assert_close(pooled, out, atol=1e-5, rtol=1e-4)
    for handle in handles:
        handle.remove()
    found = hybrid.evaluate(model, length=4, symbols=8)
    assert len(found["heads"]) == 4 * hybrid.HEADS
    for head in found["heads"]:
        assert 0 <= head["answer"] + head["before"] + head["itself"] <= 1.001
    assert attlas.view.export(atlas, tmp_path / "page.html").stat().st_size > 0
