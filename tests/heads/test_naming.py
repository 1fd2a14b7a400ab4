"""heads.name(): every head of a model, of transformers or of plain modules, on a text and on random tokens."""

import csv
import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.own_models import SIZE, VOCABULARY, LanguageModel, Twice, some_ids
from torch import Tensor, nn

import attlas
import attlas.models
from attlas import cli, heads
from attlas.errors import DtypeError, RecordingError, ShapeError

IDS = some_ids(40, 2)


class Positions(nn.Module):
    """A language model with a table of 20 positions, which is larger than that of its 12 tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.positions, self.tokens, self.model = nn.Embedding(20, SIZE), nn.Embedding(12, SIZE), model

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.model.blocks:
            x = block(x)
        return x


def expected(model: nn.Module, ids: Tensor, vocabulary: int, period: int) -> list[Any]:
    """Measure each layer by itself, from its recorded matrices."""
    with torch.no_grad(), attlas.record(model) as text:
        model(ids)
    with torch.no_grad(), attlas.record(model) as block:
        model(heads.repeated_block(vocabulary, period))
    return [
        head
        for layer, (A, R) in enumerate(zip(text, block, strict=True))
        for head in heads.measure(A, ids, R, period, layer)
    ]


def same(found: list[Any], wanted: list[Any]) -> bool:
    """Compare heads: numbers may differ in their last bits, since statistics are found beside the outputs or later."""

    def numbers(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: numbers(value) for name, value in part.items()}
        if isinstance(part, list | tuple):
            return [numbers(value) for value in part]
        return pytest.approx(part, rel=1e-5, abs=1e-7) if isinstance(part, float) else part

    return [asdict(head) for head in found] == [numbers(asdict(head)) for head in wanted]


def test_heads_of_a_model_of_plain_modules() -> None:
    model = LanguageModel(kind=Twice).eval()
    assert same(list(heads.name(model, IDS)), expected(model, IDS, VOCABULARY, 20))
    some = heads.name(model, IDS[0], layers=["blocks.1.attn#1"], vocabulary=9, period=5)
    assert same(list(some), expected(model, IDS[:1], 9, 5)[12:])


def test_tokens_and_length_are_those_that_the_model_takes() -> None:
    """Random tokens come from the embedding that reads the ids, and are no more than the text."""
    model = Positions(LanguageModel()).eval()
    ids = torch.randint(12, (20,))
    assert same(list(heads.name(model, ids)), expected(model, ids[None], 12, 10))


def test_heads_of_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(attlas.models.path())
    ids = torch.randint(4096, (90,), generator=torch.Generator().manual_seed(0))
    found = heads.name(model, ids, layers=[2, 3])
    assert [(head.layer, head.head) for head in found if head.patterns[0].name == "induction"] == [(2, 4), (3, 2)]
    assert same(list(found), expected(model, ids[None], 4096, 128)[12:])


def test_model_is_left_as_it_was() -> None:
    """Also where a part of a model in training mode is frozen in evaluation mode."""
    model = LanguageModel(dropout=0.5)
    model.blocks[0].eval()
    first = heads.name(model, IDS)
    assert first == heads.name(model, IDS)  # nothing is dropped
    heads.effect(model, IDS[:, :4], layers=1)
    assert [part.training for part in (model, *model.blocks)] == [True, False, True]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_saved_recording_with_block_scores_has_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = LanguageModel().eval()
    with attlas.record(model) as atlas:
        model(IDS[:1])
    atlas.details["block"] = heads.block_scores(model, VOCABULARY, period=20)
    atlas.save(tmp_path / "own.atlas")
    assert cli.main(["stats", str(tmp_path / "own.atlas"), "--csv"]) == 0
    shown = [float(row["induction"]) for row in csv.DictReader(io.StringIO(capsys.readouterr().out))]
    assert shown == pytest.approx([head.induction for head in heads.name(model, IDS[0])])


class Bag(nn.Module):
    """Reads its tokens without an nn.Embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Parameter(torch.randn(30, SIZE)), LanguageModel().blocks[0]

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(self.table[ids])


class Open(LanguageModel):
    """Attends to all tokens."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)[:, None]
        return attlas.attention(x, x, x)


def test_what_cannot_be_named() -> None:
    with pytest.raises(ShapeError, match="vocabulary=tokenizer"):
        heads.name(Bag(), IDS % 30)
    assert len(heads.name(Bag(), IDS % 30, vocabulary=30)) == 4
    with pytest.raises(RecordingError, match="causal self-attention"):
        heads.name(Open(), IDS)
    with pytest.raises(ShapeError, match="at least three tokens"):
        heads.name(LanguageModel(), IDS[:, :2])
    with pytest.raises(DtypeError, match="must be a tensor of integers"):
        heads.name(LanguageModel(), IDS.float())
    for wrong in ({"vocabulary": 0}, {"period": -1}):
        with pytest.raises(ShapeError, match="must be a whole number above 0"):
            heads.block_scores(LanguageModel(), **{"vocabulary": 5} | wrong)
    with pytest.raises(RecordingError, match=r"attlas\.attention"):
        heads.name(nn.Sequential(nn.Embedding(VOCABULARY, 4)), IDS)
