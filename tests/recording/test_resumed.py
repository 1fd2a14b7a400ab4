"""A recording that goes on in further blocks: each atlas is that of the whole text, and none changes afterwards."""

import threading
from typing import Any

import pytest
import torch
import transformers
from tests import linear_models
from tests.recording.conftest import SIZES, causal_model
from tests.tiny_models import VOCABULARY, lively
from torch import Tensor, nn

import attlas
from attlas import heads, stats
from attlas.errors import RecordingError, ShapeError
from attlas.recording import Recording, record
from attlas.recording.atlas import Atlas

WINDOW = 6
MODELS = {
    "gpt2": lambda: causal_model(transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4)),
    "llama": lambda: causal_model(transformers.LlamaConfig(**SIZES)),
    "mistral": lambda: causal_model(transformers.MistralConfig(**SIZES, sliding_window=WINDOW)),
    "gemma2": lambda: lively(
        transformers.AutoModelForCausalLM.from_config(transformers.Gemma2Config(**SIZES, sliding_window=WINDOW))
    ),
    "qwen3_next": lambda: linear_models.tiny("qwen3_next"),
}
IDS = torch.randint(3, VOCABULARY, (1, 30), generator=torch.Generator().manual_seed(7))
BLOCKS = [9, 10, 13, 14, 30]  # tokens that are read at the end of each block


def whole(model: nn.Module, tokens: int, **options: Any) -> Atlas:
    with record(model, **options) as atlas, torch.no_grad():
        model(IDS[:, :tokens])
    return atlas


def in_blocks(model: nn.Module, recording: Recording) -> tuple[list[Atlas], Any]:
    """Read the prompt, and each further token with the cache, in several blocks; return their atlases and the cache."""
    found, cache = [], None
    for start, stop in zip([0, *BLOCKS], BLOCKS, strict=False):
        with recording if not start else recording.resumed() as atlas, torch.no_grad():
            for ids in [IDS[:, :stop]] if not start else IDS[:, start:stop].split(1, dim=1):
                cache = model(ids, past_key_values=cache, use_cache=True).past_key_values
        found.append(atlas)
    return found, cache


def numbers(atlas: Atlas) -> list[Tensor]:
    found = []
    for entry in atlas.entries:
        found.append(entry.matrix.to_dense())
        found += [t for t in (entry.values, entry.value_norms, entry.output_norms) if t is not None]
    return found


@pytest.mark.parametrize("keep", ["device", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_each_block_gives_the_whole_text_and_what_it_gave_stays(name: str, keep: Any) -> None:
    model, known = MODELS[name](), []
    recording = record(model, keep=keep, values="norms")
    atlases, _ = in_blocks(model, recording)
    for atlas, tokens in zip(atlases, BLOCKS, strict=True):
        wanted = whole(model, tokens, values="norms")
        assert [(e.name, e.call, e.queries, e.shape) for e in atlas.entries] == [
            (e.name, e.call, e.queries, e.shape) for e in wanted.entries
        ]
        assert atlas.ids.tolist() == IDS[:, :tokens].tolist()
        assert atlas.details.keys() == wanted.details.keys()
        torch.testing.assert_close(numbers(atlas), numbers(wanted), rtol=1e-4, atol=1e-5)
        known.append(numbers(atlas))
    # All of it once more, after the last block: bit for bit what it was.
    for atlas, before in zip(atlases, known, strict=True):
        assert all(map(torch.equal, numbers(atlas), before))


def test_what_was_given_stays_while_the_next_token_is_recorded() -> None:
    """An answer is computed in another thread, from a part of the buffer that the step writes behind."""
    model = MODELS["llama"]()
    recording = record(model, values="norms")
    (*_, last), cache = in_blocks(model, recording)
    before = numbers(last)
    storages = {last.entries[0].matrix.softmax_weights.problem.k.untyped_storage().data_ptr()}
    wrong: list[str] = []

    def ask() -> None:
        for _ in range(40):
            if not all(map(torch.equal, numbers(last), before)):
                wrong.append("changed")

    thread = threading.Thread(target=ask)
    thread.start()
    with recording.resumed() as more, torch.no_grad():
        for token in range(3, 13):
            cache = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).past_key_values
    thread.join()
    assert wrong == []
    assert more[0].shape == (1, 4, 40, 40)
    storages.add(more.entries[0].matrix.softmax_weights.problem.k.untyped_storage().data_ptr())
    assert len(storages) == 1  # nothing was copied: there was room


def test_statistics_and_parts_go_on() -> None:
    model = MODELS["gpt2"]()
    statistics = [stats.Entropy(), stats.ColumnMass(), stats.Offsets(), stats.Picture(4, 4)]
    (*_, atlas), _ = in_blocks(model, record(model, parts=True, statistics=statistics))
    wanted = whole(model, BLOCKS[-1], parts=True, statistics=statistics)
    for entry, other in zip(atlas.entries, wanted.entries, strict=True):
        assert entry.statistics.keys() == other.statistics.keys()
        for name, found in entry.statistics.items():
            torch.testing.assert_close(found, other.statistics[name], rtol=1e-4, atol=1e-5, equal_nan=True)
    for cell in ((29, 3), (9, 2), (4, 4)):
        found, expected = (heads.explain(each, 2, 1, cell=cell) for each in (atlas, wanted))
        assert found.logit == pytest.approx(expected.logit, rel=1e-3)


def test_another_text_is_another_pass_and_a_block_may_be_in_another_thread() -> None:
    model = MODELS["llama"]()
    recording, found = record(model), []
    with recording as first, torch.no_grad():
        model(IDS[:, :5])

    def go_on() -> None:
        with recording.resumed() as atlas, torch.no_grad():
            model(IDS[:, :7])
        found.append(atlas)

    thread = threading.Thread(target=go_on)
    thread.start()
    thread.join()
    with recording.resumed() as third, torch.no_grad():
        model(IDS[:, :8])
    assert [len(each.entries) for each in (first, found[0], third)] == [3, 6, 9]
    assert [third[0, call].shape[-1] for call in range(3)] == [5, 7, 8]
    with attlas.record(model) as plain, torch.no_grad():
        model(IDS[:, :7])
    torch.testing.assert_close(found[0][2].to_dense(), plain[2].to_dense())
    assert model.config._attn_implementation == "sdpa"


def test_it_says_when_it_cannot_go_on() -> None:
    model = MODELS["llama"]()
    recording = record(model)
    with pytest.raises(RecordingError, match="no block has ended"):
        recording.resumed()
    with recording, torch.no_grad():
        model(IDS)
    with pytest.raises(RecordingError, match="entered once"), recording:
        pass
    with pytest.raises(ZeroDivisionError), recording.resumed(), torch.no_grad():
        model(IDS)
        raise ZeroDivisionError
    with pytest.raises(RecordingError, match="the last one has failed"):
        recording.resumed()
    for options in ({"keep": "statistics", "statistics": [stats.Entropy()]}, {"gates": True, "values": True}):
        other = record(model, **options)
        with other, torch.no_grad():
            model(IDS)
        with pytest.raises(ShapeError, match=next(iter(options))):
            other.resumed()
