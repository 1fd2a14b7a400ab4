"""Logits as sums over parts: every layout of models, cells, maps, deletion, and what is refused."""

from __future__ import annotations

import inspect
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_models import SIZES, T5, lively
from torch import Tensor, nn

import attlas
import attlas.huggingface
import attlas.models
from attlas import DtypeError, OutOfRangeError, RecordingError, ShapeError, heads
from attlas.heads.explanation.logits import dot_of
from attlas.interventions import RemovePart
from attlas.nn import GPT2

transformers = pytest.importorskip("transformers", reason="models of transformers have the layouts")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

ENCODER = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
OLD = {"vocab_size": 61, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
EXPERTS = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
# Type of model: its settings, how it is recorded, and whether its own norms compute in float64.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "gpt2": (OLD, {}, True),  # pre-norm layer norms, learned positions
    "opt": (ENCODER | {"ffn_dim": 48, "word_embed_proj_dim": 32}, {}, True),
    "llama": (SIZES, {}, False),  # RMS norms, RoPE, grouped heads
    "qwen3": (SIZES, {}, False),  # a norm of queries and keys
    "olmo2": (SIZES, {}, False),  # norms behind the branches, one norm of all heads
    "gpt_neox": (ENCODER, {}, True),  # parallel, RoPE of some coordinates, q, k and v of a head together
    "phi": (SIZES, {}, True),  # parallel, one norm
    "cohere": (SIZES, {}, False),  # neighbouring coordinates are turned
    "gptj": (OLD | {"rotary_dim": 4}, {"handwritten": True}, False),  # which attends in float32
    "gemma2": (SIZES | {"sliding_window": 32, "attn_logit_softcapping": 0.5}, {}, False),  # sandwich norms, a soft cap
    "granite": (SIZES | {"residual_multiplier": 0.3}, {}, False),
    "mixtral": (EXPERTS, {}, False),
    "bloom": ({"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}, {"handwritten": True}, True),  # ALiBi
    "t5": (T5, {}, False),  # a learned bias
    "bert": (ENCODER, {}, True),  # norms of the whole stream
}


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a small model whose attention is far from uniform."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **LAYOUTS[name][0])
    kind = {"t5": "AutoModelForSeq2SeqLM", "bert": "AutoModel"}.get(name, "AutoModelForCausalLM")
    model = lively(getattr(transformers, kind).from_config(config)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases that are not trivial
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def recorded(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> attlas.Atlas:
    model = made(name, dtype)
    ids = torch.randint(5, 60, (2, 14), generator=torch.Generator().manual_seed(1))
    more = {"decoder_input_ids": ids[:, :12]} if name == "t5" else {}
    with torch.no_grad(), attlas.record(model, parts=True, **LAYOUTS[name][1], **settings) as atlas:
        model(ids, **more)
    return atlas


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_sum_to_the_logit(name: str, dtype: torch.dtype) -> None:
    if name == "mixtral" and dtype is torch.float64:
        pytest.skip("its experts do not compute in float64")
    atlas = recorded(name, dtype)
    readers = [reader for stream in atlas.parts for reader in stream.readers]
    assert len(readers) == sum(entry.kind != "cross" for entry in atlas.entries)
    limit = 1e-5 if dtype is torch.float32 or not LAYOUTS[name][2] else 1e-12
    for reader in readers:
        logits = atlas[reader.name].logits.to_dense()
        largest = float(logits.where(logits > -torch.inf, 0.0).abs().max())
        for head in (0, 3):
            for cell in ((9, 4), (11, 0)):
                for norms in (1, None):
                    why = heads.explain(atlas, reader.name, head, cell=cell, sequence=1, norms=norms)
                    assert why.logit == pytest.approx(float(logits[1, head, *cell]), abs=1e-5)
                    assert abs(why.remainder) <= limit * max(largest, float(why.table.abs().max()))
                    assert why.table.shape == (len(why.query_parts), len(why.key_parts))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bloom", "bert"])
def test_maps_sum_to_the_mean_logit(name: str) -> None:
    atlas = recorded(name)
    A = atlas[1][0, 2]
    why = heads.explain(atlas, 1, 2)
    assert abs(why.remainder) <= 1e-5 * float(why.table.abs().max())
    if name != "gemma2":
        logits = A.logits.to_dense()
        mean = (A.to_dense() * logits.where(logits > -torch.inf, 0.0)).sum(-1).mean()
        assert why.logit == pytest.approx(float(mean), abs=1e-5)
    else:
        assert any("cap" in note for note in why.notes)


def test_every_layer_writes_named_parts() -> None:
    names = [part.name for part in heads.explain(recorded("llama"), 1, 0, cell=(9, 4)).key_parts]
    assert names == ["token", "head 0·0", "head 0·1", "head 0·2", "head 0·3", "MLP 0"]
    names = [part.name for part in heads.explain(recorded("gpt2"), 0, 0, cell=(9, 4)).query_parts]
    assert names == ["token", "position", "bias of q"]
    cross = heads.explain(recorded("t5"), 1, 0, cell=(9, 4))
    assert "cross head 0·3" in cross.by_key
    assert cross.key_parts[-1].name == "position bias"


def test_what_cannot_be_followed_is_said() -> None:
    atlas = recorded("bert")
    near, far = (heads.explain(atlas, 1, 0, cell=(9, 4), norms=norms) for norms in (1, None))
    assert [part.name for part in near.key_parts][:2] == ["stream in front of MLP 0", "MLP 0"]
    assert "head 0·0" in far.by_key
    assert "1 norm of the whole stream" in near.notes[0]
    assert "one part" in near.notes[0]
    assert "3 norms" in far.notes[0]
    assert "cap" in heads.explain(recorded("gemma2"), 1, 0, cell=(9, 4)).notes[0]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bloom"])
def test_above_the_mean_of_its_row_is_what_the_logits_say(name: str) -> None:
    """Also under a cap, which leaves less of large logits than of small ones."""
    atlas = recorded(name)
    for head, cell in ((0, (9, 4)), (2, (11, 0))):
        above = heads.explain(atlas, 1, head, cell=cell).relative()
        row = atlas[1][0, head].logits.to_dense()[cell[0]].double()
        expected = float(row[cell[1]] - row[row > -torch.inf].mean())
        assert above.logit == pytest.approx(expected, abs=1e-6)
        assert float(above.table.sum()) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("side", ["key", "query"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_prediction_is_that_of_the_logits_that_are_left(name: str, side: Any) -> None:
    """Also under a cap: what it leaves of a logit depends on the logit."""
    atlas = recorded(name)
    dot = dot_of(atlas.entry(1))
    for head in (0, 3):
        why = heads.explain(atlas, 1, head, cell=(11, 4))
        located = why._located
        own = located.key if side == "key" else located.query
        problem = located.A.softmax_weights.problem
        q, k = problem.q[0, 0, 11].double(), problem.k[0, 0, :12].double()
        for index, part in enumerate(own.parts):
            x = own.one(index, torch.arange(12)).double()
            products = dot.scale * ((k - x) @ q if side == "key" else k @ (q - x[11]))
            logits = dot.cap * (products / dot.cap).tanh() if dot.cap else products
            told = why.without(part.name, side)
            assert told.logit == pytest.approx(float(logits[4]), abs=1e-5)
            assert told.weight == pytest.approx(float(logits.softmax(0)[4]), abs=1e-5)
            assert told.change == pytest.approx(told.logit - why.logit, abs=1e-6)
            assert abs(told.logit) <= (dot.cap or float("inf"))


def test_bands_of_a_rotary_embedding() -> None:
    atlas = recorded("llama")
    why = heads.explain(atlas, 1, 2, cell=(11, 4))
    bands = why.bands()
    assert float(bands.logits.sum()) + bands.rest == pytest.approx(why.logit, abs=1e-5)
    assert bands.at(7) == pytest.approx(why.logit, abs=1e-5)
    # The same contents at another distance: turned by the model's own frequencies.
    model = made("llama")
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(14)[None])
    q, k = atlas[1].problem.q[0, 2, 11], atlas[1].problem.k[0, 1, 4]

    def turned(x: Tensor, by: int, back: int) -> Tensor:
        for at, sign in ((back, -1), (by, 1)):
            x = x * cos[0, at] + sign * torch.cat((-x[4:], x[:4])) * sin[0, at]
        return x

    expected = float(q @ turned(k, 9, 4)) / 8**0.5
    assert bands.at(2) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(OutOfRangeError):
        bands.at(12)
    with pytest.raises(RecordingError):
        heads.explain(recorded("gpt2"), 1, 0, cell=(9, 4)).bands()


# ------------------------------------------------------------------------------------------------- the shipped model


@pytest.fixture(scope="module")
def shipped() -> GPT2:
    return GPT2.from_pretrained(attlas.models.path()).eval()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(attlas.models.path())
    found: Tensor = tokenizer(inspect.getsource(string), return_tensors="pt").input_ids[:, :1200]
    return found


@pytest.fixture(scope="module")
def atlas(shipped: GPT2, ids: Tensor) -> attlas.Atlas:
    with torch.no_grad(), attlas.record(shipped, parts=True) as found:
        shipped(ids)
    return found


@pytest.fixture(scope="module")
def cells(atlas: attlas.Atlas, ids: Tensor) -> list[tuple[int, int]]:
    """Cells of both induction heads on a token that followed an earlier copy of the query's token."""
    least = torch.stack([atlas[layer][0, head].to_dense() for layer, head in ((2, 4), (3, 2))]).amin(0)
    pairs = (least > 0.35).nonzero().tolist()
    return [(i, j) for i, j in pairs if 1 <= j <= i - 3 and ids[0, j - 1] == ids[0, i]]


def test_an_induction_cell(atlas: attlas.Atlas, cells: list[tuple[int, int]]) -> None:
    i, j = (1058, 1051)
    assert (i, j) in cells
    why = heads.explain(atlas, 2, 4, cell=(i, j), names={(0, 0): "previous token"})
    assert why.logit == pytest.approx(17.86, abs=0.01)
    assert str(why.pairs(1)[0].key) == "head 0·0 (previous token)"
    above = why.relative()
    assert max(above.by_key, key=above.by_key.__getitem__) == "head 0·0"
    assert above.by_key["bias of k"] == 0
    assert abs(above.remainder) < 1e-4
    row = atlas[2].logits[0, 4, i, : i + 1]
    assert above.logit == pytest.approx(float(row[j] - row.mean()), abs=1e-4)
    given = why.sources("head 0·0")
    assert float(given.sum()) == pytest.approx(why.by_key["head 0·0"], abs=1e-4)
    assert int(given.argmax()) == j - 1
    assert float(given[j - 1]) > 0.99 * float(given.sum())


def test_prediction_and_truth_of_a_deletion(
    shipped: GPT2, ids: Tensor, atlas: attlas.Atlas, cells: list[tuple[int, int]]
) -> None:
    """Without head 0·0 in its keys an induction head loses its cells; controls are all other heads of that layer."""
    assert len(cells) > 100
    i, j = torch.tensor(cells).T
    for layer, head in ((2, 4), (3, 2)):
        before = atlas[layer][0, head]
        kept, explained = before.to_dense()[i, j], [heads.explain(atlas, layer, head, cell=cell) for cell in cells[::8]]
        told, true = {}, {}
        for source in (f"head 0·{number}" for number in range(6)):
            removal = RemovePart(source, target=(layer, head))
            with torch.no_grad(), attlas.intervene(shipped, removal), attlas.record(shipped, layers=[layer]) as without:
                shipped(ids)
            after, predicted = without[layer][0, head], [why.without(source) for why in explained]
            weights, truth = torch.tensor([one.weight for one in predicted]), after.to_dense()[i, j]
            told[source], true[source] = float(weights.mean()), float(truth.mean())
            if source == "head 0·0":
                changes = torch.tensor([one.change for one in predicted])
                moved = (after.logits.to_dense()[i, j] - before.logits.to_dense()[i, j])[::8]
                assert float(torch.corrcoef(torch.stack([changes, moved]))[0, 1]) > 0.9
                assert float(torch.corrcoef(torch.stack([weights, truth[::8]]))[0, 1]) > 0.9
        assert true["head 0·0"] < 0.4 * float(kept.mean())
        controls = [mean for source, mean in true.items() if source != "head 0·0"]
        assert min(controls) > 1.5 * true["head 0·0"]
        assert sum(controls) / len(controls) > 0.8 * float(kept.mean())
        # A head of the same layer is a control where the explanation says that it wrote little: then nothing falls.
        idle = [source for source, mean in told.items() if mean > 0.9 * float(kept[::8].mean())]
        assert len(idle) >= 4
        assert all(true[source] > 0.9 * float(kept.mean()) for source in idle)


def test_tables_equal_the_dense_computation(shipped: GPT2, ids: Tensor) -> None:
    with torch.no_grad(), attlas.record(shipped, parts=True) as atlas:
        shipped(ids[:, :512])
    head = heads.explain(atlas, 3, 2)
    weights = atlas[3][0, 2].to_dense().double()
    # The parts of every row, from cells of the diagonal and of the first column of windows.
    located = head._located
    q, k = (side.at(slice(None)).double() for side in (located.query, located.key))
    even = torch.ones(512, 512, dtype=torch.float64).tril()
    even = even / even.sum(1, keepdim=True)
    scale = 32**-0.5

    def dense(weights: Tensor, rows: Any = slice(None), columns: Any = slice(None)) -> Tensor:
        part = weights[rows, columns]
        return scale * torch.einsum("ij,cid,ejd->ce", part, q[:, rows], k[:, columns]) / len(part)

    table = dense(weights)
    assert float((head.table - table).abs().max()) < 1e-6 * max(1.0, float(table.abs().max()))
    assert float((head.above_uniform - (table - dense(even))).abs().max()) < 2e-6
    logits = scale * q.sum(0) @ k.sum(0).mT
    mean = (weights * logits).sum(1, keepdim=True)
    for part, share in zip(k, head.variance.values(), strict=True):
        own = scale * q.sum(0) @ part.mT
        expected = (weights * (logits - mean) * own).sum(1).mean()
        assert share == pytest.approx(float(expected), abs=1e-5)
    for name, sums in (("by_key", table.sum(0)), ("by_query", table.sum(1))):
        assert list(getattr(head, name).values()) == pytest.approx(sums.tolist(), abs=1e-5)
    window = heads.explain(atlas, 3, 2, rows=slice(400, 512), columns=slice(100, 300))
    assert float((window.table - dense(weights, slice(400, 512), slice(100, 300))).abs().max()) < 1e-6
    rows = [3, 100, 500]
    assert float((heads.explain(atlas, 3, 2, rows=rows).table - dense(weights, rows)).abs().max()) < 1e-5
    layers = heads.explain(atlas, 3, 2, groups=("layer", None))
    assert [part.name for part in layers.query_parts] == [
        "token", "position", "layer 0", "layer 1", "layer 2", "biases", "bias of q",
    ]  # fmt: skip
    assert float((layers.table.sum(0) - table.sum(0)).abs().max()) < 1e-5
    by_hand = heads.explain(atlas, 3, 2, groups=(None, lambda part: "all"))
    assert list(by_hand.by_query.values()) == pytest.approx(table.sum(1).tolist(), abs=1e-5)


# -------------------------------------------------------------------------------------------------------- recordings


@pytest.mark.parametrize("settings", [{"keep": "cpu"}, {"keep": "disk"}, {"parts": [4, 9]}, {"parts": slice(4, 10)}])
def test_parts_are_the_same_wherever_they_are_kept(settings: dict[str, Any]) -> None:
    model, ids = made("qwen3"), torch.randint(5, 60, (2, 14), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), attlas.record(model, **({"parts": True} | settings)) as atlas:
        model(ids)
    own, expected = (heads.explain(a, 1, 3, cell=(9, 4), sequence=1) for a in (atlas, recorded("qwen3")))
    assert torch.equal(own.table, expected.table)


@pytest.mark.parametrize("name", ["qwen3", "bert", "t5"])
def test_parts_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    atlas = recorded(name)
    atlas.save(tmp_path / "run.atlas")
    loaded = attlas.load(tmp_path / "run.atlas")
    for entry in atlas.entries:
        if entry.kind != "cross":
            own, expected = (heads.explain(a, entry.path, 3, cell=(9, 4), sequence=1) for a in (loaded, atlas))
            torch.testing.assert_close(own.table, expected.table)
            assert own.parts == expected.parts


def test_a_generation_is_one_text() -> None:
    model = made("llama")
    with torch.no_grad(), attlas.record(model, parts=True) as atlas:
        model.generate(torch.arange(5, 15)[None], max_new_tokens=6, do_sample=False)
    assert atlas.parts[0].count == atlas[1].shape[-1]
    for cell in ((13, 4), (11, 11), (5, 3)):
        assert abs(heads.explain(atlas, 1, 2, cell=cell).remainder) < 1e-5


def test_rows_take_little_memory() -> None:
    model = made("llama")
    ids = torch.randint(5, 60, (1, 2048))
    with torch.no_grad(), attlas.record(model, parts=[100, 2000]) as few:
        model(ids)
    with torch.no_grad(), attlas.record(model, parts=True) as every:
        model(ids)
    assert few.parts[0].nbytes * 500 < every.parts[0].nbytes
    assert torch.equal(*(heads.explain(a, 1, 0, cell=(2000, 100)).table for a in (few, every)))


# ---------------------------------------------------------------------------------------------------------- errors


class Doubling(nn.Module):
    """A layer norm that is none: its output is not linear in its input, whatever its scale."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def test_a_layout_that_is_not_known_is_refused_by_name(ids: Tensor) -> None:
    model = GPT2.from_pretrained(attlas.models.path()).eval()
    model.h[1].ln_1 = Doubling()
    with (
        pytest.raises(RecordingError, match=r"h\.1\.attn does not show"),
        torch.no_grad(),
        attlas.record(model, parts=True),
    ):
        model(ids[:, :50])
    model = GPT2.from_pretrained(attlas.models.path()).eval()
    hook = model.h[2].register_forward_hook(lambda module, args, out: (2 * out[0], *out[1:]))
    with pytest.raises(RecordingError, match="another sum"), torch.no_grad(), attlas.record(model, parts=True):
        model(ids[:, :50])
    hook.remove()
    model.h[3].register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
    with torch.no_grad(), attlas.record(model, parts=True) as atlas:  # what comes between layers is a part by name
        model(ids[:, :50])
    assert "between layers, before 3" in heads.explain(atlas, 3, 0, cell=(9, 4)).by_key


def test_weights_that_changed_are_noticed(ids: Tensor) -> None:
    model = GPT2.from_pretrained(attlas.models.path()).eval()
    with torch.no_grad(), attlas.record(model, parts=True) as atlas:
        model(ids[:, :50])
        model.h[2].attn.c_attn.weight.mul_(1.1)
    with pytest.raises(RecordingError, match="record the model again"):
        heads.explain(atlas, 2, 4, cell=(9, 4))
    with pytest.raises(RecordingError, match="record the model again"):
        heads.explain(atlas, 2, 4)


def test_latent_attention_is_refused() -> None:
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    more = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2, "num_key_value_heads": 4}
    config = transformers.AutoConfig.for_model("deepseek_v3", **ENCODER | sizes | more)
    model = lively(transformers.AutoModelForCausalLM.from_config(config))
    with (
        pytest.raises(RecordingError, match="DeepseekV3ForCausalLM"),
        torch.no_grad(),
        attlas.record(model, parts=True),
    ):
        model(torch.arange(5, 15)[None])


def test_bad_arguments(atlas: attlas.Atlas, shipped: GPT2, ids: Tensor) -> None:
    with torch.no_grad(), attlas.record(shipped) as plain:
        shipped(ids[:, :20])
    with pytest.raises(RecordingError, match="parts=True"):
        heads.explain(plain, 2, 4, cell=(9, 4))
    with torch.no_grad(), attlas.record(shipped, parts=[4, 9]) as few:
        shipped(ids[:, :20])
    with pytest.raises(OutOfRangeError, match="row 5"):
        heads.explain(few, 2, 4, cell=(9, 5))
    with pytest.raises(OutOfRangeError):
        heads.explain(few, 2, 4, cell=(9, 4)).relative()
    for bad in ((9, 2000), (3, 9), (-2000, 0)):
        with pytest.raises(OutOfRangeError):
            heads.explain(atlas, 2, 4, cell=bad)
    for wrong in (3, (1, 2, 3), (1.0, 2)):
        with pytest.raises(DtypeError):
            heads.explain(atlas, 2, 4, cell=wrong)
    why = heads.explain(atlas, 2, 4, cell=(1058, 1051))
    for call in (why.sources, why.without):
        with pytest.raises(OutOfRangeError, match="head 0·0"):
            call("head 9·9")
    with pytest.raises(RecordingError, match="MLP"):
        why.sources("MLP 0")
    with pytest.raises(OutOfRangeError):
        why.without("head 0·0", side="value")
    with pytest.raises(OutOfRangeError):
        heads.explain(atlas, 2, 9, cell=(9, 4))
    with pytest.raises(OutOfRangeError):
        heads.explain(atlas, 2, 4, cell=(9, 4), sequence=1)
    with pytest.raises(ShapeError):
        heads.explain(atlas, 2, 4, cell=(9, 4), groups="layer")
    with pytest.raises(ShapeError):
        heads.explain(atlas, 2, 4, groups="token")
    with pytest.raises(OutOfRangeError):
        heads.explain(atlas, 2, 4, rows=[5000])
    with pytest.raises(DtypeError):
        heads.explain(atlas, 2, 4, rows=[0.5])
    with pytest.raises(ShapeError):
        heads.explain(atlas, 2, 4, columns=[1])
    with pytest.raises(ShapeError):
        heads.explain(atlas, 2, 4, norms=-1)
    with pytest.raises(DtypeError):
        heads.explain(shipped, 2, 4)
    for parts in ([-1], [], slice(None, None, 2)):
        with pytest.raises(ShapeError):
            attlas.record(shipped, parts=parts)
    for parts in ("all", [0.5], 3.0):
        with pytest.raises(DtypeError):
            attlas.record(shipped, parts=parts)
    with pytest.raises(ShapeError):
        attlas.record(shipped, parts=True, queries=slice(-4, None))


def test_parts_that_cannot_be_removed(shipped: GPT2, ids: Tensor) -> None:
    for arguments in (("head 0·0", 3), (3, (2, 4)), ("head 0·0", (2, "a"))):
        with pytest.raises(DtypeError):
            RemovePart(*arguments)
    with pytest.raises(OutOfRangeError):
        RemovePart("head 0·0", (2, 4), side="value")
    late = RemovePart("head 3·0", (2, 4))
    with pytest.raises(OutOfRangeError, match="head 0·0"), torch.no_grad(), attlas.intervene(shipped, late):
        shipped(ids[:, :20])
    bert = made("bert")
    with (
        pytest.raises(RecordingError, match="norm"),
        torch.no_grad(),
        attlas.intervene(bert, RemovePart("token", (1, 0))),
    ):
        bert(ids[:, :20] % 60)


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2", "gpt_neox", "gemma2"])
@pytest.mark.parametrize("side", ["key", "query"])
def test_removing_everything_leaves_nothing(name: str, side: str) -> None:
    """Without the token, the first layer reads a stream of zeros: all its logits are those of its biases."""
    model, ids = made(name), torch.randint(5, 60, (1, 14))
    with torch.no_grad(), attlas.intervene(model, RemovePart("token", (0, 1), side)), attlas.record(model) as atlas:
        model(ids)
    own = (
        atlas[0].problem.q[0, 1]
        if side == "query"
        else atlas[0].problem.k[0, 1 if atlas[0].problem.k.shape[1] > 2 else 0]
    )
    if name == "gpt_neox":
        assert not torch.equal(own, atlas[0].problem.q[0, 0])
    else:
        assert float(own.abs().max()) < 1e-5
