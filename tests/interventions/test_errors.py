"""Bad input gets an error of attlas that names what is wrong, and what to type."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attlas
from attlas import AttlasError, DtypeError, OutOfRangeError, RecordingError, ShapeError
from attlas.interventions import Ablate, ReplaceWeights, ScaleLogits, Suppress, Temperature
from attlas.recording import offer, pooled

IDS = torch.arange(12).view(1, 12) + 2
MATRIX = attlas.attend(torch.zeros(1, 4, 5, 8), torch.zeros(1, 4, 5, 8))


def codes(batch: int, n: int, d: int) -> attlas.AttentionMatrix:
    return attlas.attend(torch.zeros(batch, 4, n, d), torch.zeros(batch, 4, n, d))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (Suppress, ShapeError, "keys, queries or pairs must say what is suppressed"),
        (lambda: Suppress(keys=-1), OutOfRangeError, "found: position -1"),
        (lambda: Suppress(keys=(5, -2)), OutOfRangeError, "found: position -2"),
        (lambda: Suppress(keys=slice(0, 9, 2)), ShapeError, "a span or a list of positions"),
        (lambda: Suppress(keys=[0.5]), ShapeError, "found: keys = [0.5]"),
        (lambda: Suppress(keys=(1, 2, 3)), ShapeError, "keys=(3, 9) for the same span"),
        (lambda: Suppress(queries="all"), ShapeError, "queries must be a position"),
        (lambda: Suppress(keys=3, when="during"), ShapeError, "when = 'during'"),
        (lambda: Suppress(pairs=torch.zeros(3, 3) + 0.5), ShapeError, "an additive mask"),
        (lambda: Suppress(pairs=3), DtypeError, "mask must be a Mask"),
        (lambda: Suppress(keys=3, heads=[]), DtypeError, "Suppress(): heads must be whole numbers"),
        (lambda: Suppress(keys=3, layers=1.5), DtypeError, "Suppress(): layers must be numbers or names"),
        (lambda: ScaleLogits(float("nan")), ShapeError, "factor must be a finite number"),
        (lambda: Temperature(0.0), ShapeError, "temperature must be a finite number above 0"),
        (lambda: Ablate(value=torch.zeros(2, 2, 2)), ShapeError, "shape (e,) or (chosen heads, e)"),
        (lambda: Ablate(value="mean"), ShapeError, "value must be a finite number"),
        (lambda: ReplaceWeights(torch.zeros(3)), DtypeError, "an Atlas, one of its entries, or an AttentionMatrix"),
    ],
)
def test_what_makes_no_intervention(make: Callable[[], Any], error: type[AttlasError], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        make()


@pytest.mark.parametrize(
    ("intervention", "error", "words"),
    [
        (Suppress(keys=3, layers=7), OutOfRangeError, "found: layer 7"),
        (Suppress(keys=3, heads=[4]), OutOfRangeError, "found: head 4, the layer has 4"),
        (Suppress(keys=(3, 13)), OutOfRangeError, "found: position 12, the longest text has 12 tokens"),
        (Suppress(queries=[2, 40], keys=0), OutOfRangeError, "queries must lie within the text"),
        (Suppress(pairs=torch.ones(5, 5, dtype=torch.bool)), ShapeError, "m = 5 in mask, 12 in matrix"),
        (Ablate(heads=[0, 1], value=torch.zeros(2, 7)), ShapeError, "(2, 7) for 2 heads of size 8"),
        (Ablate(heads=[0, 1, 2], value=torch.zeros(2, 8)), ShapeError, "(2, 8) for 3 heads of size 8"),
        (Ablate(heads=[2], value=torch.zeros(4, 8)), ShapeError, "(4, 8) for 1 heads of size 8"),
        (ReplaceWeights(MATRIX, layers=0), ShapeError, "the recording must have all queries and keys of the attention"),
        (ReplaceWeights(codes(3, 12, 8)), ShapeError, "found: 3 recorded, 1 in the text"),
        (ReplaceWeights(codes(1, 12, 4)), ShapeError, "found: d = 4 and 8"),
        (ReplaceWeights(codes(1, 14, 8)), ShapeError, "a longer one must be causal"),
        (ReplaceWeights(MATRIX[:, :2], layers=0, heads=3), OutOfRangeError, "found: head 3, recorded are (0, 1)"),
        (ReplaceWeights(attlas.Atlas(), layers=0), RecordingError, "found: 0 entries"),
        (
            ReplaceWeights(
                attlas.attend(torch.zeros(1, 4, 12, 8), torch.zeros(1, 4, 12, 8), score=attlas.Gaussian(1.0))
            ),
            ShapeError,
            "the recording must have the score of the attention",
        ),
    ],
)
def test_what_the_model_lacks(intervention: Any, error: type[AttlasError], words: str, tiny: Any) -> None:
    model = tiny("llama")
    before = model(IDS).logits
    with pytest.raises(error) as raised, attlas.intervene(model, intervention):
        model(IDS)
    assert words in str(raised.value)
    assert "record()" not in str(raised.value)
    assert torch.equal(model(IDS).logits, before)


def test_open_spans_may_begin_where_the_prompt_ends(tiny: Any) -> None:
    model = tiny("llama")
    with attlas.intervene(model, Suppress(queries=slice(12, None), keys=(2, 4))):
        model.generate(IDS, max_new_tokens=3, do_sample=False)
    # The last token of a text is written, and not read.
    with pytest.raises(OutOfRangeError), attlas.intervene(model, Suppress(keys=(0, 15))):
        model.generate(IDS, max_new_tokens=3, do_sample=False)
    with attlas.intervene(model, Suppress(keys=(0, 14))):
        model.generate(IDS, max_new_tokens=3, do_sample=False)


def test_recordings_of_other_weights(tiny: Any) -> None:
    model = tiny("llama")
    cut = Suppress(keys=2, when="after")
    with attlas.intervene(model, cut), attlas.record(model, statistics=[attlas.stats.Entropy()]) as partial:
        model(IDS)
    with pytest.raises(ShapeError, match="must sum to 1"), attlas.intervene(model, ReplaceWeights(partial)):
        model(IDS)
    with attlas.record(model, statistics=[attlas.stats.Entropy()], keep="statistics") as numbers:
        model(IDS)
    with pytest.raises(RecordingError, match="statistics only"), attlas.intervene(model, ReplaceWeights(numbers)):
        model(IDS)
    with attlas.record(model) as two:
        model(IDS)
        model(IDS)
    with pytest.raises(RecordingError, match="found: 2 entries"), attlas.intervene(model, ReplaceWeights(two)):
        model(IDS)


class Offering(nn.Module):
    """A module that pools by itself, and only offers its weights."""

    def forward(self, x: Tensor) -> Tensor:
        A = attlas.attend(x, x)
        offer(self, A)
        return A @ x


class Pooling(nn.Module):
    """A module that lets interventions change what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return pooled(self, attlas.attend(x, x), x)[0]


def test_modules_of_ones_own() -> None:
    x = torch.randn(1, 2, 6, 4, dtype=torch.float64)
    model = Offering()
    with pytest.raises(RecordingError, match="only offers its weights"), attlas.intervene(model, Suppress(keys=2)):
        model(x)
    model = Pooling()
    with attlas.intervene(model, Suppress(keys=2)), attlas.record(model) as atlas:
        found = model(x)
    others = [0, 1, 3, 4, 5]
    with attlas.intervene(model, Suppress(keys=2)):
        plain = model(x[0, 0])  # two axes
    torch.testing.assert_close(plain, attlas.attend(x[0, 0], x[0, 0, others]) @ x[0, 0, others])
    torch.testing.assert_close(found, attlas.attend(x, x[:, :, others]) @ x[:, :, others])
    assert atlas[0][..., 2].abs().max() == 0


def test_what_is_no_block(tiny: Any) -> None:
    model = tiny("gpt2")
    for wrong in ([3], 3, "keys"):
        with pytest.raises(DtypeError, match="interventions must be objects"):
            attlas.intervene(model, wrong)
    with pytest.raises(DtypeError, match=r"must be an nn\.Module"):
        attlas.intervene("gpt2", Suppress(keys=3))
    block = attlas.intervene(model, Suppress(keys=3))
    with block:
        model(IDS)
    with pytest.raises(RecordingError, match="entered once"), block:
        pass
    with pytest.raises(RecordingError, match="must run inside"), attlas.intervene(model, Suppress(keys=3)):
        pass
    with (
        pytest.raises(RecordingError, match="cannot be changed"),
        attlas.intervene(nn.LSTM(2, 2), Suppress(keys=3)) as m,
    ):
        m(torch.zeros(1, 2))
