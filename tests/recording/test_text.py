"""Token ids and texts of a recording are those that its queries read, or are not known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.recording.conftest import SIZES, Tokenizer, causal_model
from torch import Tensor, nn

import attlas
from attlas.heads.classification import text_ids
from attlas.recording import record

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def written(atlas: attlas.Atlas, key: Any, sequence: int = 0) -> list[str | None]:
    return [row["token"] for row in atlas.token_table(key, 0, sequence)]


def words(ids: Tensor) -> list[str]:
    return [f"<{number}>" for number in ids.tolist()]


def generate(model: nn.Module, ids: Tensor, **options: Any) -> Any:
    return model.generate(ids, do_sample=False, eos_token_id=None, pad_token_id=0, **options)


def test_a_decoder_that_makes_its_ids_by_itself(t5: nn.Module, bart: nn.Module, ids: Tensor) -> None:
    for model, options in ((t5, {"labels": ids[:, :5].contiguous()}), (bart, {})):
        with record(model, tokens=Tokenizer()) as atlas:
            model(ids, **options)
        assert (atlas.ids, atlas.texts) == (None, None)
        assert set(written(atlas, 0)) == {None}


def test_decoder_ids_by_position(t5: nn.Module, ids: Tensor) -> None:
    with record(t5) as atlas:
        t5(ids, None, ids[:, 3:7])
    assert torch.equal(atlas.ids, ids[:, 3:7])


def test_an_encoder_alone_has_the_text_of_the_encoder(bart: nn.Module, ids: Tensor) -> None:
    with record(bart, layers="encoder", tokens=Tokenizer()) as atlas:
        bart(ids, decoder_input_ids=ids[:, 3:7])
    assert written(atlas, 0, 1) == words(ids[1])
    with record(bart, tokens=Tokenizer()) as atlas:
        bart(ids, decoder_input_ids=ids.flip(1))
    assert written(atlas, "cross.0") == words(ids[0].flip(0))
    assert text_ids(atlas, atlas.entry(0)) is atlas.ids
    assert text_ids(atlas, atlas.entry("encoder.0")) is text_ids(atlas, atlas.entry("cross.0")) is None
    with record(bart.model.encoder, tokens=Tokenizer()) as atlas:
        bart.model.encoder(ids)
    assert written(atlas, 0) == words(ids[0])


def test_both_texts_of_an_encoder_and_a_decoder(bart: nn.Module, ids: Tensor, tmp_path: Path) -> None:
    written_ids = ids[:, 3:9].flip(1).contiguous()
    with record(bart, tokens=Tokenizer()) as atlas:
        bart(ids, decoder_input_ids=written_ids)
    atlas.save(tmp_path / "run.atlas")
    decoder, encoder = ([words(text) for text in each] for each in (written_ids, ids))
    for each in (atlas, attlas.load(tmp_path / "run.atlas")):
        assert each.texts_of(each.entry(0)) == (decoder, decoder)
        assert each.texts_of(each.entry("encoder.0")) == (encoder, encoder)
        assert each.texts_of(each.entry("cross.0")) == (decoder, encoder)
        rows = each.token_table("cross.0", 0, 1)
        keys = each.entry("cross.0").matrix[1, 0].argmax(-1).tolist()
        assert [row["top_token"] for row in rows] == [encoder[1][key] for key in keys]
        assert {row["mass_received"] for row in rows} == {None}
    with record(bart, tokens=decoder) as atlas:  # the text of the encoder is not known
        bart(ids, decoder_input_ids=written_ids)
    assert atlas.texts_of(atlas.entry("cross.0")) == (decoder, None)
    assert atlas.texts_of(atlas.entry("encoder.0")) == (None, None)
    with record(bart, layers=["encoder", "cross"], tokens=Tokenizer()) as atlas:
        bart(ids, decoder_input_ids=written_ids)
    assert atlas.kinds == ("encoder", "cross")
    assert atlas.texts_of(atlas.entry("cross.0")) == (None, encoder)
    assert atlas.texts_of(atlas.entry("encoder.0")) == (encoder, encoder)


def test_another_text_of_the_encoder_is_not_that_of_earlier_entries(bart: nn.Module, ids: Tensor) -> None:
    with record(bart, tokens=Tokenizer()) as atlas:
        bart(ids, decoder_input_ids=ids[:, :4])
        bart(ids.flip(1), decoder_input_ids=ids[:, :4])
    assert atlas.texts_of(atlas.entry(("cross.0", 0))) == (None, None)
    assert atlas.texts_of(atlas.entry(("cross.0", 1)))[1] == [words(text) for text in ids.flip(1)]


def test_the_output_of_an_encoder_that_is_given_has_no_known_text(bart: nn.Module, ids: Tensor) -> None:
    output = bart.model.encoder(ids.flip(1))
    with record(bart, tokens=Tokenizer()) as atlas:
        bart(ids, encoder_outputs=output, decoder_input_ids=ids[:, :4])
    assert atlas.texts_of(atlas.entry("cross.0")) == ([words(text) for text in ids[:, :4]], None)
    embedded = bart.get_input_embeddings()(ids)
    with record(bart, tokens=Tokenizer()) as atlas:
        generate(bart, None, inputs_embeds=embedded, max_new_tokens=4)
    assert atlas.texts_of(atlas.entry("cross.0"))[1] is atlas.texts_of(atlas.entry("encoder.0"))[1] is None
    atlas.encoder_texts = [words(text) for text in ids]
    assert (
        atlas.texts_of(atlas.entry("cross.0"))[1] == atlas.texts_of(atlas.entry("encoder.0"))[0] == atlas.encoder_texts
    )


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_generation_knows_the_text_of_the_encoder(
    family: str, beams: int, ids: Tensor, request: pytest.FixtureRequest
) -> None:
    model, mask = request.getfixturevalue(family), torch.ones_like(ids)
    mask[1, -3:] = 0
    with record(model, tokens=Tokenizer()) as atlas:
        for text in (ids.flip(1), ids):
            generate(model, text, attention_mask=mask, max_new_tokens=4, num_beams=beams)
    encoder = [words(text) for text in ids]
    entry, cross = atlas.entry("encoder.1"), atlas.entry("cross.1")
    assert atlas.texts_of(entry) == (encoder, encoder)
    assert torch.equal(entry.query_mask, mask.bool())
    assert cross.shape[0] == 2 * beams
    assert atlas.texts_of(cross)[1] == [text for text in encoder for _ in range(beams)]
    assert atlas.texts_of(atlas.entry(("encoder.1", 0))) == atlas.texts_of(atlas.entry(("cross.1", 0))) == (None, None)


def test_generation_from_the_output_of_an_encoder(bart: nn.Module, ids: Tensor) -> None:
    output = bart.model.encoder(ids.flip(1))
    with record(bart, tokens=Tokenizer()) as atlas:
        bart.model.encoder(ids)
        generate(bart, ids, encoder_outputs=output, max_new_tokens=4)
    assert atlas.texts_of(atlas.entry("encoder.0")) == (None, None)
    assert atlas.texts_of(atlas.entry("cross.0"))[1] is None


@pytest.mark.parametrize("first", [True, False])
def test_a_module_that_runs_by_itself_has_no_text(bart: nn.Module, llama: nn.Module, ids: Tensor, first: bool) -> None:
    for model, part, key in ((bart, bart.model.encoder, "encoder.0"), (llama, llama.model, 0)):
        with record(model, tokens=Tokenizer()) as atlas:
            for run in (part, model) if first else (model, part):
                run(ids if run is model else ids.flip(1))
        alone, whole = (atlas.entry((key, call)) for call in ((0, 1) if first else (1, 0)))
        encoder = [words(text) for text in ids.flip(1)]  # an encoder by itself reads a text, a part of a model none
        known = (encoder, encoder) if model is bart and not first else (None, None)
        assert atlas.texts_of(alone) == known
        if first and model is llama:
            assert atlas.texts_of(whole)[0] == [words(text) for text in ids]


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_beams_have_the_ids_that_their_keys_are_of(
    family: str, ids: Tensor, eager: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(family)
    with record(model, tokens=Tokenizer()) as atlas:
        answer = generate(model, ids, num_beams=3, num_return_sequences=3, max_new_tokens=6)
    parts = [atlas.entry((0, call)) for call in range(atlas.entry(0).call + 1)]
    assert len(parts) > 1  # some beam was reordered
    assert atlas.ids.shape[1] == answer.shape[1] - 1
    if family == "llama":
        whole = eager(model, atlas.ids).attentions
    else:
        whole = eager(model, ids.repeat_interleave(3, 0), decoder_input_ids=atlas.ids).cross_attentions
        assert len(parts) == atlas.entry("cross.0").call + 1
    last = atlas.entry(1 if family == "llama" else "cross.1")
    dense = whole[1][:, :, last.queries[0] : last.queries[1]]
    torch.testing.assert_close(last.matrix.to_dense(), dense, atol=1e-5, rtol=1e-4)
    assert written(atlas, 0, 4) == words(atlas.ids[4, parts[-1].queries[0] :])
    assert written(atlas, (0, 0), 4) == [None] * parts[0].shape[2]


def test_rejected_tokens_of_a_draft_are_cut_off(llama: nn.Module, ids: Tensor) -> None:
    draft = causal_model(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 1}))
    with record(llama) as atlas:
        text = generate(llama, ids[:1], assistant_model=draft, max_new_tokens=10)
    assert torch.equal(atlas.ids, text[:, : atlas.ids.shape[1]])
    assert atlas.ids.shape[1] == atlas.entry(0).shape[3] > 11


def test_a_cache_of_before_the_recording(llama: nn.Module, ids: Tensor) -> None:
    cache = llama(ids[:, :6], use_cache=True).past_key_values
    with record(llama, tokens=Tokenizer()) as atlas:
        llama(ids[:, 6:], past_key_values=cache)
    assert atlas.ids is None
    assert set(written(atlas, 0)) == {None}
    with record(llama) as atlas:
        llama.generate(inputs_embeds=llama.get_input_embeddings()(ids), max_new_tokens=3, eos_token_id=None)
    assert atlas.ids is None


def test_texts_are_those_of_the_last_text(llama: nn.Module, ids: Tensor, tmp_path: Path) -> None:
    other = ids.flip(1)
    with record(llama, tokens=Tokenizer()) as atlas:
        llama(ids)
        llama(other)
        llama(other)
    atlas.save(tmp_path / "run.atlas")
    for each in (atlas, attlas.load(tmp_path / "run.atlas")):
        assert written(each, (0, 0)) == [None] * 11
        assert written(each, (0, 1)) == written(each, (0, 2)) == words(other[0])
        assert text_ids(each, each.entry((0, 0))) is None


def test_steps_that_are_entries_have_one_text(t5: nn.Module, ids: Tensor) -> None:
    with record(t5, tokens=Tokenizer()) as atlas:
        text = generate(t5, ids, max_new_tokens=5)[:, :-1]
    assert torch.equal(atlas.ids, text)
    assert [written(atlas, (0, call), 1) for call in range(text.shape[1])] == [[word] for word in words(text[1])]


def test_patches_of_an_image_have_no_text(ids: Tensor) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    text = sizes | {"vocab_size": 61, "max_position_embeddings": 20, "eos_token_id": 2}
    image = sizes | {"image_size": 16, "patch_size": 4}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=image)).eval()
    with record(model, tokens=Tokenizer()) as atlas:
        model(input_ids=ids, pixel_values=torch.randn(2, 3, 16, 16))
    assert written(atlas, 0) == words(ids[0])
    assert atlas.entry(1).shape[2] == 17
    assert set(written(atlas, 1)) == {None}
