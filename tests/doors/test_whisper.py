"""Cross-attention of speech and translation models of transformers: rows while generating, heads, word times."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.doors.pages import example
from tests.tiny_models import BART, lively
from torch import Tensor

import attlas
from attlas import heads
from attlas.errors import AttlasError
from attlas.heads.alignment import first_keys
from attlas.recording.atlas import Atlas

transformers = pytest.importorskip("transformers", reason="the models are those of transformers")

FRAMES = [120, 90]  # of the features: two for each key
GIVEN = [[0, 1], [1, 2], [1, 3]]


def whisper() -> Any:
    """Return a Whisper of two layers with random weights."""
    config = transformers.WhisperConfig(
        vocab_size=100, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=60,
        max_target_positions=40, decoder_start_token_id=1, pad_token_id=0, eos_token_id=2, bos_token_id=3,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights *= 4  # so that no text ends early, and weights are far from uniform
    settings = model.generation_config
    settings.alignment_heads, settings.no_timestamps_token_id, settings.is_multilingual = GIVEN, 99, False
    settings.max_length, settings.max_new_tokens, settings.min_new_tokens = None, 20, 20
    return model


def codes(places: Tensor, n: int, sharpness: float) -> tuple[Tensor, Tensor]:
    """Return queries and keys of a head whose query i looks at keys near places[i]."""
    distance = (places[:, None] - torch.arange(n)).double().square()
    return (-distance / sharpness).float(), torch.eye(n)


def head_kinds(m: int, n: int) -> attlas.AttentionMatrix:
    """Return one layer of heads: a sink, one that moves on, uniform, random places, one that moves on and is wide."""
    diagonal, random = torch.arange(m) * n // m, torch.randint(n, (m,))
    kinds = [codes(torch.zeros(m), n, 1.0), codes(diagonal, n, 1.0), codes(diagonal, n, 1e9), codes(random, n, 1.0),
             codes(diagonal, n, 12.0)]  # fmt: skip
    q, k = (torch.stack(some).unsqueeze(0) for some in zip(*kinds, strict=True))
    return attlas.attend(q, k, attlas.ScaledDot(1.0))


# transformers calls functions of numpy with tensors.
@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
def test_word_times_are_those_of_transformers() -> None:
    model = whisper()
    features, mask = torch.randn(2, 8, FRAMES[0]), torch.ones(2, FRAMES[0], dtype=torch.long)
    mask[1, FRAMES[1] :] = 0
    with attlas.record(model, layers="cross") as atlas:
        model.generate(features, attention_mask=mask)
    expected = model.generate(
        features, attention_mask=mask, return_token_timestamps=True, return_dict_in_generate=True
    )["token_timestamps"]
    # The prompt has two tokens; the last token has the time of the one before it.
    found = heads.alignment(atlas, rows=(2, 21), keys=torch.tensor(FRAMES) // 2, heads=GIVEN)
    assert found.heads == ((0, 1), (1, 2), (1, 3))
    assert not found.scores
    torch.testing.assert_close(found.times().float(), expected[:, 2:-1], rtol=0, atol=1e-6)
    assert found.times().diff(dim=-1).min() >= 0
    assert found.times().unique().numel() > 6  # and they are no constant
    words = found.words([3, 1, 2], sequence=1)
    times = expected[1, 2:].double()
    torch.testing.assert_close(words, torch.stack([times[[0, 3, 4]], times[[3, 4, 6]]], dim=-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("m", "n", "seed"), [(1, 1, 0), (1, 6, 0), (7, 1, 0), (5, 9, 1), (12, 4, 2), (20, 31, 3)])
def test_the_path_is_that_of_transformers_with_ties_too(m: int, n: int, seed: int) -> None:
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    for cost in (np.random.default_rng(seed).normal(size=(m, n)),
                 np.random.default_rng(seed).integers(-2, 2, (m, n)).astype(float)):  # fmt: skip
        texts, times = _dynamic_time_warping(cost)
        jumps = np.pad(np.diff(texts), (1, 0), constant_values=1).astype(bool)
        assert first_keys(cost).tolist() == times[jumps].tolist()


def test_heads_that_move_on_are_found_among_sinks_and_random_ones() -> None:
    layers = [head_kinds(30, 90), head_kinds(30, 90)[:, [0, 2, 1, 3, 4]]]
    found = heads.alignment(layers, count=4)
    assert set(found.heads) == {(0, 1), (1, 2), (0, 4), (1, 4)}
    assert found.scores[0, 1] > 0.8
    assert found.scores[0, 4] > 0.5
    assert found.scores[0, 3] < 0.45
    assert abs(found.scores[0, 0]) < 1e-6
    assert abs(found.scores[0, 2]) < 1e-6
    assert list(found.scores.values()) == sorted(found.scores.values(), reverse=True)
    true = torch.arange(30) * 3
    assert (found.starts[0] - true).abs().max() <= 3
    assert found.ends[0, -1] == 90


def test_scores_are_their_definition() -> None:
    A, length = head_kinds(7, 20)[:, [1, 3]], 17
    found = heads.alignment([A], rows=(1, 7), keys=length, count=2)
    for head, weights in enumerate(A.to_dense()[0, :, 1:].double()):
        above = (weights - weights.mean(0))[:, :length]
        near = torch.stack([above[:, max(j - 3, 0) : j + 4].sum(-1) for j in range(length)], dim=-1)
        best = near[0]
        for row in near[1:]:
            best = torch.stack([best[: j + 1].max() + row[j] for j in range(length)])
        assert found.scores[0, head] == pytest.approx(float(best.max()) / 6, abs=1e-7)


def test_rows_of_a_translation_are_those_of_eager_attention() -> None:
    model = lively(transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)).eval())
    ids, settings = torch.randint(3, 60, (2, 11)), {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": 1}
    with attlas.record(model, layers="cross") as atlas:
        model.generate(ids, **settings)
    model.set_attn_implementation("eager")
    expected = model.generate(ids, return_dict_in_generate=True, output_attentions=True, **settings).cross_attentions
    for layer in (0, 1):
        rows = torch.cat([step[layer] for step in expected], dim=2)
        torch.testing.assert_close(atlas[f"cross.{layer}"].to_dense(), rows)
    assert len(heads.alignment(atlas, count=3).heads) == 3


@pytest.mark.parametrize(
    ("arguments", "name", "text"),
    [
        ({"rows": (2, 2)}, "ShapeError", "rows"),
        ({"keys": 21}, "ShapeError", "keys"),
        ({"keys": [3, 4]}, "ShapeError", "a batch of 1"),
        ({"heads": []}, "ShapeError", "pairs"),
        ({"heads": [3]}, "ShapeError", "pairs"),
        ({"heads": [(0, 9)]}, "OutOfRangeError", "head 9 of layer 0"),
        ({"count": 0}, "ShapeError", "count"),
        ({"median": 4}, "ShapeError", "odd"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], name: str, text: str) -> None:
    with pytest.raises(AttlasError, match=text) as caught:
        heads.alignment([head_kinds(7, 20)], **arguments)
    assert type(caught.value).__name__ == name


def test_wrong_sources_are_refused() -> None:
    A = head_kinds(7, 20)
    with pytest.raises(AttlasError, match="AttentionMatrix"):
        heads.alignment([A.to_dense()])  # type: ignore[list-item]
    with pytest.raises(AttlasError, match="every layer"):
        heads.alignment([A, head_kinds(8, 20)])
    with pytest.raises(AttlasError, match="must be cross-attention"):
        heads.alignment(Atlas())
    found = heads.alignment([A], count=1)
    with pytest.raises(AttlasError, match="each word"):
        found.words([4, 4])
    with pytest.raises(AttlasError, match="sequence"):
        found.words([1], sequence=1)
    with pytest.raises(AttlasError, match="seconds"):
        found.times(0.0)


def test_the_example_runs() -> None:
    found = example("word_times")
    assert found["heads"] == 3
    assert found["end"] == pytest.approx(1.2)
