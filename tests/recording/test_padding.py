"""Batches with padding: numbers of a recording are those of the texts alone, wherever they are kept."""

import math

import pytest
import torch
import transformers
from tests.atlas.conftest import make_entry
from tests.recording.conftest import Tokenizer
from tests.tiny_models import FALCON, T5, lively
from tests.tiny_models import SIZES as TINY
from torch import nn

import attlas
import attlas.models
from attlas import heads, stats
from attlas.recording.atlas.padding import included_rows
from attlas.recording.atlas.storage import Writer

TEXTS = (15, 4)
STATISTICS = (
    stats.Entropy(),
    stats.EffectiveKeys(),
    stats.MaxWeight(),
    stats.MaxLogit(),
    stats.LogitMoments(),
    stats.ColumnMass(),
    stats.TopK(2),
    stats.Coverage(),
)


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(attlas.models.path()).eval()


@pytest.fixture(scope="module")
def words() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(5, 60, (1, n), generator=generator) for n in TEXTS]


def padded(words, side, *, positions=True):
    """Return the arguments of a call with both texts, the shorter one padded."""
    width = max(TEXTS)
    ids, mask = (torch.zeros(len(words), width, dtype=torch.int64) for _ in range(2))
    for row, text in enumerate(words):
        n = text.shape[1]
        span = slice(0, n) if side == "right" else slice(width - n, width)
        ids[row, span], mask[row, span] = text[0], 1
    call = {"input_ids": ids, "attention_mask": mask}
    return call | {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if positions else call


def record(model, call, **settings):
    with attlas.record(model, statistics=STATISTICS, **settings) as atlas, torch.no_grad():
        model(**call)
    return atlas


@pytest.mark.parametrize("keep", ["device", "cpu", "disk", "statistics"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_table_is_the_mean_over_the_tokens_of_the_texts_alone(gpt2, words, side, keep, tmp_path) -> None:
    folder = tmp_path / "run.atlas" if keep == "disk" else None
    both = record(gpt2, padded(words, side), keep=keep, folder=folder)
    alone = [record(gpt2, {"input_ids": text}).table() for text in words]
    for found, *parts in zip(both.table(), *alone, strict=True):
        for name in list(found)[7:]:
            numbers = [part[name] for part in parts]
            wanted = sum(x * n for x, n in zip(numbers, TEXTS, strict=True)) / sum(TEXTS)
            wanted = max(numbers) if name == "max_logit" else wanted
            if name == "first_key_mass" and (keep, side) == ("statistics", "right"):
                assert found[name] is None if name in found else True
                continue
            assert found[name] == pytest.approx(wanted, abs=1e-5, rel=1e-5), (name, found["layer"], found["head"])
    queries = both.entry(0).query_mask
    assert torch.equal(queries, padded(words, side)["attention_mask"].bool())


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_mask_of_the_queries_is_saved(gpt2, words, side, tmp_path) -> None:
    atlas = record(gpt2, padded(words, side))
    atlas.save(tmp_path / "run.atlas")
    again = attlas.load(tmp_path / "run.atlas")
    assert torch.equal(again.entry(2).query_mask, atlas.entry(2).query_mask)
    assert again.table() == atlas.table()
    assert record(gpt2, {"input_ids": words[0]}).entry(0).query_mask is None


def test_a_recording_of_before_is_read_by_its_mask(gpt2, words, tmp_path, monkeypatch) -> None:
    atlas = record(gpt2, padded(words, "right"))
    whole = Writer._entry_as_record

    def older(self, entry):
        spec = whole(self, entry)
        del spec["query_mask"]
        return spec

    monkeypatch.setattr(Writer, "_entry_as_record", older)
    atlas.save(tmp_path / "run.atlas")
    again = attlas.load(tmp_path / "run.atlas")
    assert again.entry(0).query_mask is None
    assert again.table() == atlas.table()


@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_of_heads_are_those_of_the_text_alone(gpt2, words, side) -> None:
    call = padded(words, side)
    both = record(gpt2, call)
    for row, text in enumerate(words):
        alone = record(gpt2, {"input_ids": text})
        for layer in range(len(both)):
            found = heads.scores(both[layer][row], call["input_ids"][row])
            wanted = heads.scores(alone[layer][0], text[0])
            for name, score in wanted.items():
                torch.testing.assert_close(found[name], score, atol=1e-5, rtol=1e-5, msg=name)


def test_scores_of_a_bare_matrix_leave_padding_out() -> None:
    q = torch.randn(2, 3, 12, 8)
    A = attlas.attend(q, q, mask=attlas.Causal() & attlas.Padding([12, 5]))
    B = attlas.attend(q[1:, :, :5], q[1:, :, :5], mask=attlas.Causal())
    ids = torch.arange(12) % 4
    found, wanted = heads.scores(A[1], ids), heads.scores(B[0], ids[:5])
    for name, score in wanted.items():
        torch.testing.assert_close(found[name], score, msg=name)
    # Keys of another text tell nothing about the queries.
    cross = attlas.attend(q[:, :, :7], q, mask=attlas.Padding([12, 5]))
    torch.testing.assert_close(heads.broad(cross), heads.broad(cross, query_mask=torch.ones(7, dtype=torch.bool)))


@pytest.mark.parametrize("side", ["left", "right"])
def test_rollout_of_padded_texts(gpt2, words, side) -> None:
    both = record(gpt2, padded(words, side))
    for row, text in enumerate(words):
        alone = record(gpt2, {"input_ids": text})
        n = text.shape[1]
        span = slice(0, n) if side == "right" else slice(15 - n, 15)
        last = heads.rollout(both)[row]
        torch.testing.assert_close(last[:, span], heads.rollout(alone)[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(last.sum(), torch.tensor(1.0))
        first = heads.flow(both)[row]
        torch.testing.assert_close(first[span], heads.flow(alone)[0], atol=1e-5, rtol=1e-4)
        assert float(first.sum() - first[span].sum()) == 0.0


def test_generation_goes_on_after_padding(words) -> None:
    config = transformers.LlamaConfig(**TINY)
    model = lively(transformers.LlamaForCausalLM(config))
    call = padded(words, "left", positions=False)
    with attlas.record(model, statistics=STATISTICS[:2]) as atlas:
        model.generate(**call, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    mask = atlas.entry(0).query_mask
    assert torch.equal(mask[:, :15], call["attention_mask"].bool())
    assert bool(mask[:, 15:].all())
    assert mask.shape == (2, 18)


def test_an_encoder_and_what_attends_to_it(words) -> None:
    config = transformers.T5Config(**T5 | {"num_layers": 1})
    model = lively(transformers.T5ForConditionalGeneration(config))
    call = padded(words, "right", positions=False)
    answers = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 0]])
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    atlas = record(model, call | {"decoder_input_ids": answers, "decoder_attention_mask": real})
    assert torch.equal(atlas.entry("encoder.0").query_mask, call["attention_mask"].bool())
    assert torch.equal(atlas.entry("self.0").query_mask, real.bool())
    assert torch.equal(atlas.entry("cross.0").query_mask, real.bool())
    # As many keys as queries, and yet the keys are those of another text.
    atlas = record(model, {"input_ids": call["input_ids"][:, :4], "attention_mask": real, "decoder_input_ids": answers})
    assert atlas.entry("cross.0").query_mask is None
    assert included_rows(atlas.entry("cross.0")) is None


def test_a_model_that_calls_torch_itself(words) -> None:
    torch.manual_seed(1)
    config = transformers.FalconConfig(**FALCON, alibi=False, pad_token_id=0)
    model = lively(transformers.FalconForCausalLM._from_config(config, attn_implementation="sdpa"))
    call = padded(words, "right")
    both = record(model, call, patch_sdpa=True)
    assert torch.equal(both.entry(0).query_mask, call["attention_mask"].bool())
    alone = [record(model, {"input_ids": text}, patch_sdpa=True).table() for text in words]
    for found, *parts in zip(both.table(), *alone, strict=True):
        wanted = sum(part["entropy"] * n for part, n in zip(parts, TEXTS, strict=True)) / sum(TEXTS)
        assert found["entropy"] == pytest.approx(wanted, abs=1e-5)


def test_a_mask_that_is_about_something_else_is_not_taken() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.Identity()

        def forward(self, q, attention_mask=None):
            A = attlas.attend(q, q)  # the image, which nothing pads
            attlas.recording.offer(self.attention, A)
            return A @ q

    model, real = Pair(), torch.tensor([[1, 1, 1], [1, 1, 0]])
    with attlas.record(model, patch_sdpa=True) as atlas:
        model(torch.randn(2, 1, 3, 4), attention_mask=real)
    assert atlas.entry(0).query_mask is None


def test_rows_without_a_key_are_left_out_with_a_sink_too(words) -> None:
    q = torch.randn(2, 2, 6, 4)
    mask = attlas.Causal() & attlas.Padding([6, 2], side="left")
    A = attlas.attend(q, q, mask=mask, sink=torch.randn(2))
    atlas = attlas.Atlas([make_entry(A)])
    atlas.collect(stats.MaxWeight(), stats.ColumnMass())
    weights = A.to_dense().double()
    rows = torch.tensor([[1] * 6, [0, 0, 0, 0, 1, 1]]).bool()
    wanted = weights.amax(-1).transpose(0, 1)[:, rows].mean(-1)
    found = torch.tensor([row["max_weight"] for row in atlas.table()], dtype=torch.float64)
    torch.testing.assert_close(found, wanted)
    first = torch.stack([weights[0, :, :, 0].sum(-1), weights[1, :, :, 4].sum(-1)]).sum(0)
    share = torch.tensor([row["first_key_mass"] for row in atlas.table()], dtype=torch.float64)
    torch.testing.assert_close(share, first / weights.sum((0, 2, 3)), atol=1e-6, rtol=1e-5)
    assert not math.isnan(float(share.sum()))


@pytest.mark.parametrize("side", ["left", "right"])
def test_other_numbers_of_heads_leave_padding_out(side) -> None:
    q = torch.randn(2, 3, 12, 8)
    q[1, :, 5:] *= 40 if side == "right" else 1  # padding that would be seen
    mask = attlas.Causal() & attlas.Padding([12, 5], side=side)
    A = attlas.attend(q, q, mask=mask)[1]
    own = q[1, :, :5] if side == "right" else q[1, :, 7:]
    B = attlas.attend(own, own, mask=attlas.Causal())
    torch.testing.assert_close(heads.qk_clip(A).max_logit, heads.qk_clip(B).max_logit)
    for rows in (None, slice(0, 12)):
        torch.testing.assert_close(
            heads.EntropyAlarm(rows=rows).check(A).share, heads.EntropyAlarm(rows=None).check(B).share
        )
    found, wanted = heads.by_distance(A), heads.by_distance(B)
    torch.testing.assert_close(found.weight[:, :5], wanted.weight)
    torch.testing.assert_close(found.share[:, :5], wanted.share)
    assert float(found.share[:, 5:].abs().sum()) == 0.0


def test_texts_of_every_sequence(gpt2, words, tmp_path) -> None:
    call = padded(words, "right")
    atlas = record(gpt2, call, tokens=Tokenizer())
    assert atlas.texts == [[f"<{token}>" for token in row] for row in call["input_ids"].tolist()]
    assert atlas.tokens == atlas.texts[0]
    assert "2 × 15 tokens" in repr(atlas)
    atlas.save(tmp_path / "run.atlas")
    assert attlas.load(tmp_path / "run.atlas").texts == atlas.texts
    given = [["a"] * 15, ["b"] * 15]
    assert record(gpt2, call, tokens=given).texts == given
    alone = record(gpt2, {"input_ids": words[0]}, tokens=Tokenizer())
    assert len(alone.texts) == 1
    assert alone.tokens == [f"<{token}>" for token in words[0][0].tolist()]


@pytest.mark.parametrize("queries", [None, slice(-3, None), slice(9, 13)])
@pytest.mark.parametrize("keep", ["device", "statistics"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_share_of_the_first_token_is_that_of_the_first_token(gpt2, words, side, keep, queries) -> None:
    call = padded(words, side)
    atlas = record(gpt2, call, keep=keep, queries=queries)
    with torch.no_grad():
        gpt2.set_attn_implementation("eager")
        weights = gpt2(**call, output_attentions=True).attentions
    for row in atlas.table():
        found, dense = row.get("first_key_mass"), weights[row["layer"]][:, row["head"]].double()
        part, real = dense[:, queries or slice(None)], call["attention_mask"].bool()[:, queries or slice(None)]
        first = call["attention_mask"].argmax(-1)
        share = float(part[torch.arange(2), :, first][real].sum() / part[real].sum())
        unknown = keep == "statistics" and (side == "right" or queries is not None)
        assert (unknown and found is None) or found == pytest.approx(share, abs=1e-5)


def test_the_share_of_the_first_token_of_an_encoder_padded_on_the_left(words) -> None:
    model = lively(transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)))
    call = padded(words, "left", positions=False)
    call["decoder_input_ids"] = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 1]])
    atlas = record(model, call)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        answer = model(**call, output_attentions=True)
    real, first = call["attention_mask"].bool(), call["attention_mask"].argmax(-1)
    every = torch.ones(2, 4, dtype=torch.bool)
    expected = {"encoder": (answer.encoder_attentions, real), "cross": (answer.cross_attentions, every)}
    for row in atlas.table():
        if row["kind"] in expected:
            weights, rows = expected[row["kind"]]
            dense = weights[row["layer"]][:, row["head"]].double()
            share = float(dense[torch.arange(2), :, first][rows].sum() / dense[rows].sum())
            assert row["first_key_mass"] == pytest.approx(share, abs=1e-5)


MASKS = {
    "none": (None, 12),
    "causal": (attlas.Causal(), 9),
    "no keys": (attlas.Causal(), 12),
    "first rows empty": (attlas.Causal() & attlas.Padding([9, 0]), 9),
    "window": (attlas.Window(2, 0), 12),
    "documents": (attlas.Documents(torch.arange(9) // 4) & attlas.Causal(), 9),
    "heads": (attlas.masks.Heads({0: attlas.Causal()}, attlas.Window(1, 0)), 12),
    "table": (attlas.from_tensor(torch.arange(9)[:, None] % 3 > torch.arange(9) % 2), 9),  # not one run of keys a row
}


@pytest.mark.parametrize("score", [attlas.ScaledDot(), attlas.Boxcar(0.8)], ids=["finite", "bounded"])
@pytest.mark.parametrize("name", MASKS)
def test_means_are_over_the_rows_that_may_attend(name, score) -> None:
    mask, m = MASKS[name]
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, 2, size, 3, generator=generator) for size in (m, 9))
    A = attlas.attend(q, k, score=score, mask=mask)
    found = included_rows(make_entry(A, kind="cross"))
    wanted = A.to_dense().sum(-1) > 0.5
    assert torch.equal(wanted, torch.ones_like(wanted) if found is None else found.expand(wanted.shape))
