"""Models that attend in chunks of their own: one matrix per layer, equal to what their code computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import BART, SIZES, T5, VOCABULARY, lively
from torch import Tensor, nn

import attlas
from attlas.errors import RecordingError
from attlas.interventions import Suppress
from attlas.recording import record

LENGTH, WINDOW, RADIUS, BLOCK = 45, 4, 5, 4
ENCODER_DECODER: Any = BART
T5_SIZES: Any = T5
BERT: Any = {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
LED: Any = {name: value for name, value in BART.items() if name != "max_position_embeddings"}
STILL: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS: dict[str, tuple[type[nn.Module], Any]] = {
    "longformer": (
        transformers.LongformerModel,
        lambda: transformers.LongformerConfig(
            attention_window=2 * WINDOW, sep_token_id=2, **BERT | {"max_position_embeddings": 100, "pad_token_id": 1}
        ),
    ),
    "led": (
        transformers.LEDModel,
        lambda: transformers.LEDConfig(
            attention_window=2 * WINDOW, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64, **LED
        ),
    ),
    "bigbird": (
        transformers.BigBirdModel,
        lambda: transformers.BigBirdConfig(
            block_size=BLOCK, num_random_blocks=2, sep_token_id=2, **BERT | STILL | {"max_position_embeddings": 100}
        ),
    ),
    "bigbird_pegasus": (
        transformers.BigBirdPegasusModel,
        lambda: transformers.BigBirdPegasusConfig(
            block_size=BLOCK, num_random_blocks=2, dropout=0.0, **ENCODER_DECODER
        ),
    ),
    "longt5 local": (
        transformers.LongT5EncoderModel,
        lambda: transformers.LongT5Config(
            encoder_attention_type="local", local_radius=RADIUS, dropout_rate=0.0, **T5_SIZES
        ),
    ),
    "longt5 global": (
        transformers.LongT5EncoderModel,
        lambda: transformers.LongT5Config(
            encoder_attention_type="transient-global",
            local_radius=RADIUS,
            global_block_size=6,
            dropout_rate=0.0,
            **T5_SIZES,
        ),
    ),
}


def make(name: str) -> Any:
    torch.manual_seed(4)
    kind, config = CONFIGS[name]
    # In float64, gradients of Longformer's own code are not finite: it takes the softmax in float32.
    return lively(kind(config())).to(torch.float32 if name in ("longformer", "led") else torch.float64)


def inputs(name: str, *, padded: bool, with_global: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 40:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if name in ("longformer", "led") and with_global:
        given["global_attention_mask"] = torch.zeros_like(ids)
        given["global_attention_mask"][0, [0, 7]] = 1
        given["global_attention_mask"][1, 20] = 1
    if name in ("led", "bigbird_pegasus"):
        given["decoder_input_ids"] = ids[:, :6]
    return given


def of_windows(band: Tensor, of_global: Tensor | None, is_global: Tensor) -> Tensor:
    """Return Longformer's weights as (batch, heads, query, key): its band, and the keys and rows of global tokens."""
    batch, heads, n, _ = band.shape
    dense = band.new_zeros(batch, heads, n, n)
    first = 0 if of_global is None else int(is_global.sum(1).max())
    for i in range(n):
        for place in range(2 * WINDOW + 1):
            if 0 <= i - WINDOW + place < n:
                dense[:, :, i, i - WINDOW + place] += band[:, :, i, first + place]
    for number in range(0 if of_global is None else batch):
        assert of_global is not None
        places = is_global[number].nonzero()[:, 0]
        for rank, place in enumerate(places):
            dense[number, :, :, place] += band[number, :, :, rank]
        for rank, place in enumerate(places):
            dense[number, :, place] = of_global[number, :, :n, rank]
    return dense


def of_blocks_of_three(weights: Tensor, n: int) -> Tensor:
    """From (batch, blocks, heads, size, 3 size + g), to (batch, heads, query, n keys and g blocks)."""
    size = RADIUS + 1
    further = weights.shape[-1] - 3 * size
    dense = weights.new_zeros(weights.shape[0], weights.shape[2], n, n + further)
    for i in range(n):
        block, row = divmod(i, size)
        for place in range(3 * size):
            if 0 <= (block - 1) * size + place < n:
                dense[:, :, i, (block - 1) * size + place] = weights[:, block, :, row, place]
        dense[:, :, i, n:] = weights[:, block, :, row, 3 * size :]
    return dense


def dense_of(entry: Any) -> Tensor:
    """Return the weights of an entry of an atlas."""
    found: Tensor = entry.matrix.to_dense()
    return found


def own_weights(name: str, output: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """Return the weights that the model itself returns, as (batch, heads, query, key)."""
    found = output.attentions if "attentions" in output else output.encoder_attentions
    if name in ("longformer", "led"):
        is_global = given.get("global_attention_mask", torch.zeros_like(given["input_ids"])).bool()
        others = output.global_attentions if name == "longformer" else output.encoder_global_attentions
        return [of_windows(t, None if others is None else others[i], is_global) for i, t in enumerate(found)]
    if name.startswith("longt5"):
        return [of_blocks_of_three(t, LENGTH) for t in found]
    return [t[:, :, :LENGTH, :LENGTH] for t in found]


def run(model: nn.Module, given: dict[str, Tensor], text: Tensor) -> tuple[Any, list[Tensor | None]]:
    """Return the outputs, and the gradients of all parameters."""
    model.zero_grad()
    output = model(**given, output_attentions=True)
    states = output.last_hidden_state
    (states if "decoder_input_ids" in given else states[text]).sin().sum().backward()
    return output, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore::attlas.errors.RecordingWarning")  # decoders of LED attend by themselves
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("padded", [False, True])
def test_outputs_weights_and_gradients_are_those_of_the_model(name: str, padded: bool) -> None:
    model, given = make(name), inputs(name, padded=padded)
    text = given["attention_mask"].bool()
    wanted, own = run(model, given, text)
    with record(model) as atlas:
        found, ours = run(model, given, text)
    shown = torch.ones(2, 6, dtype=torch.bool) if "decoder_input_ids" in given else text
    assert float((found.last_hidden_state - wanted.last_hidden_state)[shown].detach().abs().max()) < 1e-5
    for a, b in zip(ours, own, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert float((a - b).abs().max()) < 1e-5 * max(float(b.abs().max()), 1.0)
    entries = [entry for entry in atlas.entries if entry.shape[2] == LENGTH]
    assert len(entries) == 2
    for entry, weights in zip(entries, own_weights(name, wanted, given), strict=True):
        matrix = dense_of(entry).detach().masked_fill(~text[:, None, :, None], 0.0)
        weights = weights.detach().masked_fill(~text[:, None, :, None], 0.0)
        if "bigbird" in name:  # outside of training, each random block is block 0, which counts once more each time
            weights[:, :, BLOCK : LENGTH // BLOCK * BLOCK, :BLOCK] *= 3
        torch.testing.assert_close(matrix, weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bigbird", "bigbird_pegasus"])
def test_random_blocks_of_training_are_those_of_the_model(name: str) -> None:
    model, given = make(name).train(), inputs(name, padded=True)
    text = given["attention_mask"].bool()
    wanted, own = run(model, given, text)
    with record(model) as atlas:
        found, ours = run(model, given, text)
    torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state)
    for a, b in zip(ours, own, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    first = next(entry for entry in atlas.entries if entry.shape[2] == LENGTH)
    matrix = dense_of(first).detach().masked_fill(~text[:, None, :, None], 0.0)
    weights = own_weights(name, wanted, given)[0].detach().masked_fill(~text[:, None, :, None], 0.0)
    torch.testing.assert_close(matrix, weights)
    assert not torch.equal(matrix[:, 0] > 0, matrix[:, 1] > 0)  # each head has blocks of its own


def test_a_block_that_counts_more_than_once_beside_its_query() -> None:
    # As the paper draws them, random blocks of the last rows may be neighbours.
    from attlas.huggingface.chunked.bigbird import mask_of_blocks

    chosen = torch.tensor([[[4, 5], [5, 4], [0, 2], [2, 3], [3, 3], [3, 2]]])
    mask, extra = mask_of_blocks(chosen, 2, 15)
    q, k = torch.randn(1, 1, 15, 4, dtype=torch.float64), torch.randn(1, 1, 15, 4, dtype=torch.float64)
    times = torch.zeros(8, 8, dtype=torch.float64)
    times[[0, 7]] = 1.0
    for row in range(1, 7):
        for block in {0, row - 1, row, row + 1, 7}:
            times[row, block] += 1
        for block in chosen[0, row - 1].tolist():
            times[row, block] += 1
    times = times.repeat_interleave(2, 0).repeat_interleave(2, 1)[:15, :15]
    wanted = torch.softmax(q @ k.mT / 2 + times.log(), -1)
    assert extra is not None
    A = attlas.attend(
        torch.cat([q / 2, extra[0]], -1), torch.cat([k, extra[1]], -1), score=attlas.ScaledDot(scale=1.0), mask=mask
    )
    torch.testing.assert_close(A.to_dense(), wanted)


@pytest.mark.parametrize("name", ["longformer", "bigbird", "longt5 local", "longt5 global"])
def test_the_masks_are_rules_and_recordings_are_saved(name: str, tmp_path: Path) -> None:
    model, given = make(name).float(), inputs(name, padded=True)
    with torch.no_grad(), record(model) as atlas:
        model(**given)
    rule = {"longformer": "Window(4, 4, offset=0)", "bigbird": "Selected("}.get(name, "Window(5, 5, offset=0)")
    assert rule in str(atlas[0].mask)
    atlas.save(tmp_path / "run.atlas")
    again = attlas.load(tmp_path / "run.atlas")
    for layer in range(2):
        torch.testing.assert_close(again[layer].to_dense(), atlas[layer].to_dense().detach())


def test_a_block_of_lazily_computes_nothing_densely_and_returns_matrices() -> None:
    model, given = make("longformer"), inputs("longformer", padded=True)
    with torch.no_grad():
        wanted = model(**given, output_attentions=True)
        with attlas.lazily(model) as block:
            found = model(**given, output_attentions=True)
    assert not block.dense_uses
    assert all(isinstance(A, attlas.AttentionMatrix) for A in found.attentions)
    for a, b in zip(found.global_attentions, wanted.global_attentions, strict=True):
        torch.testing.assert_close(a[0], b[0, :, :LENGTH])
        assert a.shape[-1] == 2
    assert "forward" not in vars(model.encoder.layer[0].attention.self)


def test_an_intervention_changes_what_a_layer_computes() -> None:
    model, given = make("longformer"), inputs("longformer", padded=False)
    with torch.no_grad():
        before = model(**given).last_hidden_state
        with attlas.intervene(model, [Suppress(keys=(7, 8))]), record(model) as atlas:
            after = model(**given).last_hidden_state
    assert not torch.allclose(before, after)
    assert float(atlas[0].to_dense()[:, :, :, 7].abs().max()) == 0.0


def test_blocks_may_overlap_in_any_order() -> None:
    model, given = make("longt5 global"), inputs("longt5 global", padded=False)
    layer = model.encoder.block[0].layer[0].TransientGlobalSelfAttention
    first, second = attlas.lazily(model), attlas.lazily(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert "forward" in vars(layer)
    with torch.no_grad():
        assert isinstance(model(**given, output_attentions=True).attentions[0], attlas.AttentionMatrix)
    second.__exit__(None, None, None)
    assert "forward" not in vars(layer)
    with torch.no_grad():
        assert type(model(**given, output_attentions=True).attentions[0]) is torch.Tensor


def test_values_of_global_tokens_are_refused_by_name() -> None:
    model = make("longformer")
    refused = pytest.raises(RecordingError, match="LongformerSelfAttention with global tokens")
    with torch.no_grad(), refused, record(model, values=True):
        model(**inputs("longformer", padded=False))
    with torch.no_grad(), record(model, values=True) as atlas:
        model(**inputs("longformer", padded=False, with_global=False))
    assert atlas.entries[0].values is not None


MEMORY = """
import resource, sys, torch, attlas
from attlas.recording import record
from tests.huggingface.test_chunked import long_layer
torch.set_num_threads(1)
model, given = long_layer(sys.argv[1], int(sys.argv[2]))
with torch.no_grad(), record(model) as atlas:
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = peak()
    model(**given)
print((peak() - before) / 1024, atlas.entries[0].shape[2])
"""


class OneLayer(nn.Module):
    """A model of transformers that is one attention."""

    def __init__(self, layer: nn.Module, config: Any) -> None:
        super().__init__()
        self.layer, self.config = layer, config

    def forward(self, **inputs: Any) -> Any:
        return self.layer(**inputs)


def long_layer(name: str, n: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model of one attention of a long text, and what it is called with."""
    states = torch.randn(1, n, 32)
    models: Any = transformers.models
    layer: nn.Module
    if name == "longformer":
        sizes = transformers.LongformerConfig(attention_window=[256], sep_token_id=2, **BERT)
        layer = models.longformer.modeling_longformer.LongformerSelfAttention(sizes, 0)
        is_global = torch.zeros(1, n, dtype=torch.bool)
        is_global[:, [0, 500]] = True
        given = {"is_index_masked": ~torch.ones(1, n, dtype=torch.bool), "is_index_global_attn": is_global}
        return OneLayer(layer, sizes).eval(), {"hidden_states": states, "is_global_attn": torch.tensor(True), **given}
    module = models.longt5.modeling_longt5
    config = transformers.LongT5Config(encoder_attention_type="transient-global", local_radius=127, **T5_SIZES)
    layer = module.LongT5TransientGlobalAttention(config, has_relative_attention_bias=True)
    return OneLayer(layer, config).eval(), {"hidden_states": states, "mask": torch.ones(1, n)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["longformer", "longt5 global"])
def test_memory_is_linear_at_8192_tokens(name: str) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, name, "8192"], cwd=root, capture_output=True, text=True, check=True, timeout=500
    )
    megabytes, rows = map(float, done.stdout.split())
    assert rows == 8192
    assert megabytes < 150, done.stdout  # one matrix of 4 heads is 1 GiB
