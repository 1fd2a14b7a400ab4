"""The effect of heads and spans on what a model predicts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import attlas
import attlas.models
from attlas import DtypeError, OutOfRangeError, RecordingError, ShapeError, heads
from attlas.interventions import Ablate, Suppress

transformers = pytest.importorskip("transformers", reason="the model is one of transformers")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    found: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(attlas.models.path())
    return found


@pytest.fixture(scope="module")
def block() -> Tensor:
    return heads.repeated_block(4096, period=40, blocks=2)


def loss(model: Any, ids: Tensor, first: int = 1) -> float:
    with torch.no_grad():
        logits = model(ids).logits[:, first - 1 : -1]
    return float(functional.cross_entropy(logits.mT, ids[:, first:]))


@pytest.mark.parametrize("batch_size", [None, 1, 5])
def test_each_head_is_left_out_alone(model: Any, block: Tensor, batch_size: int | None) -> None:
    model.train()
    table = heads.effect(model, block, layers=[1, 2], positions=(41, 80), batch_size=batch_size)
    assert model.training
    model.eval()
    assert [(row["layer"], row["head"]) for row in table] == [(layer, head) for layer in (1, 2) for head in range(6)]
    assert table[0]["name"] == "transformer.h.1.attn"
    plain = loss(model, block, 41)
    for row in table:
        with attlas.intervene(model, Ablate(heads={row["layer"]: [row["head"]]})):
            wanted = loss(model, block, 41)
        assert row["value"] == pytest.approx(wanted, abs=1e-4)
        assert row["effect"] == pytest.approx(wanted - plain, abs=1e-4)


def test_spans_are_suppressed_for_later_queries(model: Any, block: Tensor) -> None:
    table = heads.effect(
        model, block, spans={"first": (0, 40), "start": slice(0, 4), "none": (7, 7)}, positions=(41, 80)
    )
    plain = loss(model, block, 41)
    with attlas.intervene(model, Suppress(queries=slice(40, None), keys=(0, 40))):
        wanted = loss(model, block, 41)
    assert table[0]["value"] == pytest.approx(wanted, abs=1e-4)
    assert table[0]["effect"] > 3.0  # nothing is left to copy from
    assert abs(table[1]["effect"]) < table[0]["effect"]
    assert (table[2]["span"], table[2]["start"], table[2]["stop"], table[2]["effect"]) == ("none", 7, 7, 0.0)
    assert table[2]["value"] == pytest.approx(plain, abs=1e-4)


def test_targets(model: Any, block: Tensor) -> None:
    ids = block[0, :60]
    row = heads.effect(model, ids, heads={2: [4]}, target=(-1, int(block[0, 20])))[0]
    with torch.no_grad(), attlas.intervene(model, Ablate(heads={2: [4]})):
        assert row["value"] == pytest.approx(float(model(ids[None]).logits[0, -1, block[0, 20]]), abs=1e-4)
    assert row["effect"] < 0  # the head raises the logit of the token that it copies
    own = heads.effect(model, ids, heads={2: [4]}, target=lambda logits: logits[:, -1, int(block[0, 20])])[0]
    assert own == row


def test_a_data_frame_and_progress(model: Any, block: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pandas", reason="the table is a data frame of pandas")
    frame = heads.effect(model, block, layers=0, data="pandas", verbose=True)
    assert list(frame.columns) == ["layer", "head", "kind", "name", "value", "effect"]
    assert frame["effect"].idxmax() == 0  # the previous-token head
    assert "heads.effect(): head 1 of 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"ids": torch.randn(3, 4)}, DtypeError, "ids must be a tensor of integers"),
        ({"ids": [3, 4]}, DtypeError, "found: a list"),
        ({"ids": torch.zeros(1, 1, dtype=torch.long)}, ShapeError, "at least two tokens"),
        ({"layers": 4}, OutOfRangeError, "found: layer 4"),
        ({"heads": [6]}, OutOfRangeError, "heads.effect(): each head must be one of the layer's"),
        ({"spans": {"late": (70, 81)}}, ShapeError, "late must lie within the 80 tokens"),
        ({"spans": {"odd": slice(0, 8, 2)}}, ShapeError, "without a step"),
        ({"positions": (0, 1)}, ShapeError, "a token that has one before it"),
        ({"positions": (0, 99)}, ShapeError, "positions must lie within"),
        ({"target": (80, 3)}, ShapeError, "position 80, 80 tokens"),
        ({"target": 3}, ShapeError, "target must be a pair"),
        ({"batch_size": 0}, ShapeError, "batch_size = 0"),
        ({"data": "csv"}, ShapeError, "data = 'csv'"),
    ],
)
def test_bad_input(arguments: dict[str, Any], error: type[Exception], words: str, model: Any, block: Tensor) -> None:
    with pytest.raises(error, match=re.escape(words)):
        heads.effect(model, **({"ids": block, "layers": [0]} | arguments))


def test_models_without_logits(block: Tensor) -> None:
    base = transformers.AutoModel.from_pretrained(attlas.models.path())
    with pytest.raises(DtypeError, match="the model must give logits"):
        heads.effect(base, block)
    with pytest.raises(RecordingError, match="cannot be changed"):
        heads.effect(nn.Embedding(4096, 8), block)
