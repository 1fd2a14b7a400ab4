"""GPT-2 against transformers: attention layer and model, logits and gradients, caches and text."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

import attlas
from attlas.nn import GPT2, GPT2Attention, GPT2Config, KVCache

transformers = pytest.importorskip("transformers", reason="transformers is in the extra `hf`")
from transformers.models.gpt2 import modeling_gpt2  # noqa: E402

SIZES = {"vocab_size": 61, "n_positions": 64, "n_embd": 24, "n_layer": 3, "n_head": 4}
SETTINGS = [
    {},
    {"scale_attn_by_inverse_layer_idx": True},
    {"scale_attn_weights": False},
    {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
    {"activation_function": "relu", "n_inner": 40, "layer_norm_epsilon": 1e-3},
    {"tie_word_embeddings": False},
    {"add_cross_attention": True},
]
each_setting = pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: ",".join(s) or "plain")


def config(implementation="eager", **settings):
    drops = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    made = transformers.GPT2Config(**SIZES, **{**drops, **settings}, bos_token_id=0, eos_token_id=60)
    made._attn_implementation = implementation
    return made


def models(tmp_path, **settings):
    """Return transformers' model and ours, with the same weights, read from its folder."""
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config(**settings)).train()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    theirs.save_pretrained(tmp_path)
    return theirs, GPT2.from_pretrained(tmp_path).train()


def gradients(module):
    return {name.removeprefix("transformer."): p.grad for name, p in module.named_parameters() if p.grad is not None}


def same_gradients(ours, theirs):
    left, right = gradients(ours), gradients(theirs)
    assert left.keys() == right.keys()
    for name in left:
        # A small gradient is a sum whose terms are as large as the largest one: float32 rounds those. Against float64
        # each of the two is off by up to 1.3 of its units in the last place (2.6e-5 ours, 3.0e-5 theirs, of 196).
        rounding = 3 * torch.finfo(torch.float32).eps * float(right[name].abs().max())
        atol = max(1e-5, rounding)
        torch.testing.assert_close(left[name], right[name], atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


# ------------------------------------------------------------------------------------------------------ the layer


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("layer_idx", [0, 2])
@each_setting
def test_attention_equals_transformers(settings, cross, layer_idx):
    torch.manual_seed(0)
    theirs = modeling_gpt2.GPT2Attention(config(**settings), is_cross_attention=cross, layer_idx=layer_idx)
    ours = GPT2Attention(config(**settings), is_cross_attention=cross, layer_idx=layer_idx)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert ours.scaling == theirs.scaling
    x, y = torch.randn(2, 6, 24), torch.randn(2, 9, 24)
    n = 9 if cross else 6
    causal = torch.zeros(6, n) if cross else torch.full((6, 6), -torch.inf).triu(1)
    padded = causal.expand(2, 1, -1, -1).clone()
    padded[1, :, :, 4:5] = torch.finfo(torch.float32).min
    bias = torch.randn(2, 4, 6, n) + causal
    for mask in (causal.expand(1, 1, 6, n), padded, bias):
        results = []
        for layer in (theirs, ours):
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            kwargs = {"encoder_hidden_states": y, "encoder_attention_mask": mask} if cross else {"attention_mask": mask}
            out, weights = layer(leaf, **kwargs)
            (out * torch.linspace(0, 1, 24)).sum().backward()
            results.append((out, weights, leaf.grad))
        (out, weights, grad), (our_out, our_weights, our_grad) = results
        torch.testing.assert_close(our_out, out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(our_grad, grad, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(our_weights.to_dense(), weights.detach(), atol=1e-5, rtol=1e-5)
        same_gradients(ours, theirs)


def test_attention_masks_mean_what_they_say():
    torch.manual_seed(0)
    layer = GPT2Attention(config())
    x = torch.randn(2, 6, 24)
    causal = layer(x)[0]
    torch.testing.assert_close(layer(x, attention_mask=attlas.Causal())[0], causal)
    torch.testing.assert_close(
        layer(x, attention_mask=torch.ones(6, 6, dtype=torch.bool).tril()[None, None])[0], causal
    )
    torch.testing.assert_close(layer(x, attention_mask=torch.ones(2, 6))[0], causal)
    left = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    out, weights = layer(x, attention_mask=left)
    torch.testing.assert_close(out[0, 2:], layer(x[:1, 2:])[0][0])
    assert weights[0, 0, 3].tolist()[:2] == [0, 0]
    assert weights[0, 0, 0].eq(0).all()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_stands_in_a_transformers_model(implementation):
    torch.manual_seed(0)
    made = config(implementation, add_cross_attention=True)
    theirs = transformers.GPT2LMHeadModel(made).eval()
    ids, encoded = torch.randint(60, (2, 7)), torch.randn(2, 5, 24)
    padding = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])

    def run():
        first = theirs(ids[:, :5], attention_mask=padding[:, :5], encoder_hidden_states=encoded, use_cache=True)
        second = theirs(ids[:, 5:], attention_mask=padding, encoder_hidden_states=encoded,
                        past_key_values=first.past_key_values)  # fmt: skip
        return torch.cat([first.logits, second.logits], 1)

    want = run()
    for i, block in enumerate(theirs.transformer.h):
        for name in ("attn", "crossattention"):
            layer = GPT2Attention(made, is_cross_attention=name != "attn", layer_idx=i).eval()
            layer.load_state_dict(getattr(block, name).state_dict())
            setattr(block, name, layer)
    seen = padding.bool()
    torch.testing.assert_close(run()[seen], want[seen], atol=1e-5, rtol=1e-5)


def test_dropouts_are_for_training():
    torch.manual_seed(0)
    layer = GPT2Attention(config(attn_pdrop=0.5, resid_pdrop=0.0))
    x = torch.randn(1, 9, 24)
    torch.manual_seed(1)
    first = layer(x)[0]
    torch.manual_seed(1)
    assert torch.equal(layer(x)[0], first)
    assert not torch.allclose(layer(x)[0], first)
    assert torch.equal(layer.eval()(x)[0], layer(x)[0])
    residual = GPT2Attention(config(attn_pdrop=0.0, resid_pdrop=0.5))
    assert residual(x)[0].eq(0).float().mean() > 0.3


# ------------------------------------------------------------------------------------------------------ the model


@each_setting
def test_model_equals_transformers(tmp_path, settings):
    theirs, ours = models(tmp_path, **settings)
    ids = torch.randint(60, (2, 11))
    padding = torch.ones(2, 11, dtype=torch.int64)
    padding[1, 8:] = 0
    labels = ids.masked_fill(padding == 0, -100)
    kwargs = {}
    if "add_cross_attention" in settings:
        kwargs = {"encoder_hidden_states": torch.randn(2, 5, 24),
                  "encoder_attention_mask": torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])}  # fmt: skip
    want = theirs(ids, attention_mask=padding, labels=labels, **kwargs)
    found = ours(ids, padding, labels, **kwargs)
    torch.testing.assert_close(found.logits, want.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.loss, want.loss, atol=1e-5, rtol=1e-5)
    assert len(found.attentions) == 3
    assert len(found.cross_attentions) == (3 if kwargs else 0)
    want.loss.backward()
    found.loss.backward()
    same_gradients(ours, theirs)


@each_setting
@pytest.mark.parametrize("steps", [[11], [4, 1, 1, 5], [1] * 11])
def test_cached_steps_equal_the_whole(tmp_path, settings, steps):
    theirs, ours = models(tmp_path, **settings)
    ids = torch.randint(60, (2, 11))
    padding = torch.ones(2, 11, dtype=torch.int64)
    padding[0, :2] = 0
    places = (padding.cumsum(-1) - 1).clamp(min=0)
    kwargs = {"encoder_hidden_states": torch.randn(2, 5, 24)} if "add_cross_attention" in settings else {}
    want = theirs(ids, attention_mask=padding, position_ids=places, **kwargs).logits
    cache, parts, done = KVCache(capacity=2), [], 0
    for m in steps:
        end = done + m
        step = ours(ids[:, done:end], padding[:, :end], cache=cache, position_ids=places[:, done:end], **kwargs)
        parts.append(step.logits)
        done = end
    real = padding.bool()
    found = torch.cat(parts, 1)
    torch.testing.assert_close(found[real], want[real], atol=1e-5, rtol=1e-5)
    found[real].sum().backward()
    want[real].sum().backward()
    same_gradients(ours, theirs)


def test_a_sliding_window_equals_a_window_mask(tmp_path):
    _, ours = models(tmp_path)
    ids = torch.randint(60, (2, 30))
    with torch.no_grad():
        cache = KVCache(window=5, capacity=4)
        parts = [ours(part, cache=cache).logits for part in ids.split([7, 1, 1, 3, 1, 1, 1, 1, 1, 1, 6, 6], dim=1)]
        for block in ours.h:
            block.attn.forward = lambda x, c, m, f=block.attn.forward: f(x, None, attlas.Window(4, 0))
        torch.testing.assert_close(torch.cat(parts, 1), ours(ids).logits, atol=1e-5, rtol=1e-5)


def test_it_learns(tmp_path):
    torch.manual_seed(0)
    model = GPT2(GPT2Config(**SIZES, attn_pdrop=0.05, resid_pdrop=0.05)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(20).repeat(2, 2)
    first = float(model(ids, labels=ids).loss.detach())
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < first / 3


def test_first_parameters_are_those_of_the_paper():
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=300, n_positions=300, n_embd=120, n_layer=8, n_head=4))
    assert abs(model.wte.weight.std() - 0.02) < 1e-3
    assert abs(model.h[0].attn.c_attn.weight.std() - 0.02) < 1e-3
    assert abs(model.h[0].mlp.c_proj.weight.std() - 0.005) < 3e-4
    assert model.h[0].ln_1.weight.eq(1).all()
    assert model.h[0].attn.c_attn.bias.eq(0).all()


# ----------------------------------------------------------------------------------------------------- generation


def test_generates_the_same_text_as_transformers(tmp_path):
    theirs, ours = models(tmp_path)
    theirs.eval()
    ids = torch.randint(60, (3, 6))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[2, :1] = 0
    want = theirs.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=60)
    found = ours.generate(ids, 20, attention_mask=mask)
    assert torch.equal(found, want)
    assert ours.training


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 2.0, "top_k": 9, "top_p": 0.8},
    ],
)
def test_draws_the_same_tokens_as_transformers(tmp_path, settings):
    theirs, ours = models(tmp_path)
    ids = torch.randint(60, (2, 4))
    torch.manual_seed(3)
    options = {"do_sample": True, "pad_token_id": 60, "top_k": 0, "top_p": 1.0, **settings}
    want = theirs.eval().generate(ids, max_new_tokens=15, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(ours.generate(ids, 15, seed=3, **settings), want)
    torch.manual_seed(3)
    assert torch.equal(ours.generate(ids, 15, **settings), want)


def test_stops_at_a_token_and_fills(tmp_path):
    _, ours = models(tmp_path)
    ids = torch.randint(60, (2, 4))
    free = ours.generate(ids, 12, stop=())
    assert free.shape == (2, 16)
    stop = int(free[0, 6])
    found = ours.generate(ids, 12, stop=[stop])
    for row, want in zip(found, free, strict=True):
        places = (want[4:] == stop).nonzero()
        end = 4 + int(places[0]) + 1 if len(places) else 16
        assert torch.equal(row[:end], want[:end])
        assert row[end:].eq(stop).all()
    assert torch.equal(ours.generate(ids, 0), ids)


@pytest.mark.parametrize("window", [None, 9])
def test_goes_on_from_a_cache(tmp_path, window):
    _, ours = models(tmp_path)
    ids = torch.randint(60, (2, 5))
    whole = ours.generate(ids, 12, stop=(), cache=KVCache(window))
    cache = KVCache(window)
    part = ours.generate(ids, 4, stop=(), cache=cache)
    assert torch.equal(ours.generate(part, 8, stop=(), cache=cache), whole)
    with pytest.raises(attlas.ShapeError, match="5 tokens, 16 in the cache"):
        ours.generate(ids, 8, cache=cache)


def test_a_step_computes_one_row_and_one_row_of_logits(tmp_path):
    """Counted: the operations of a step are those of one token, 1 x n scores and one row of logits."""
    _, ours = models(tmp_path)
    ours.eval()
    d, layers, vocab = SIZES["n_embd"], SIZES["n_layer"], SIZES["vocab_size"]
    cache = KVCache()
    with torch.no_grad():
        ours(torch.randint(60, (1, 9)), cache=cache, last_only=True)
        for n in range(10, 30):
            with FlopCounterMode(display=False) as counter:
                logits = ours(torch.tensor([[1]]), cache=cache, last_only=True).logits
            products = layers * 2 * (d * 3 * d + d * d + 2 * 4 * d * d) + 2 * d * vocab
            scores = layers * 2 * 2 * n * d
            assert counter.get_total_flops() in (products, products + scores)
            assert logits.shape == (1, 1, vocab)


# -------------------------------------------------------------------------------------------------------- loading


def test_reads_shards_and_names_of_every_kind(tmp_path):
    theirs, ours = models(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    plain = theirs.transformer.state_dict() | {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(3)}
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text((tmp_path / "one" / "config.json").read_text())
    save_file(plain | {"h.0.attn.masked_bias": torch.tensor(-1e4)}, tmp_path / "plain" / "model.safetensors")
    for name in ("many", "plain"):
        other = GPT2.from_pretrained(tmp_path / name)
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), ours.parameters(), strict=True))
        assert all(p.requires_grad for p in other.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_saved_is_read_by_both(tmp_path, tied):
    torch.manual_seed(0)
    model = GPT2(GPT2Config(**SIZES, tie_word_embeddings=tied)).eval()
    model.save_pretrained(tmp_path)
    ids = torch.randint(60, (1, 8))
    again = GPT2.from_pretrained(tmp_path)
    assert again.config == model.config
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    torch.testing.assert_close(theirs(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_dtypes(tmp_path):
    models(tmp_path)
    assert GPT2.from_pretrained(tmp_path).wte.weight.dtype is torch.float32
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        model = GPT2.from_pretrained(tmp_path, dtype=dtype)
        out = model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]]))
        assert out.logits.dtype is dtype
        assert out.loss.isfinite()
        assert model.generate(torch.tensor([[1, 2, 3]]), 4, stop=()).shape == (1, 7)


def test_folders_that_cannot_be_read_say_why(tmp_path):
    models(tmp_path / "good")
    weights = load_file(tmp_path / "good" / "model.safetensors")

    def broken(name, state=None, **settings):
        folder = tmp_path / name
        folder.mkdir()
        text = json.loads((tmp_path / "good" / "config.json").read_text()) | settings
        (folder / "config.json").write_text(json.dumps(text))
        if state is not None:
            save_file(state, folder / "model.safetensors")
        return folder

    def message(folder):
        with pytest.raises(attlas.CheckpointError) as error:
            GPT2.from_pretrained(folder)
        return str(error.value)

    bad = dict(weights)
    del bad["transformer.wpe.weight"], bad["transformer.h.0.ln_1.bias"]
    bad["transformer.h.1.attn.c_attn.weight"] = torch.zeros(72, 24)
    bad["transformer.extra"] = torch.zeros(1)
    found = message(broken("bad", bad))
    mismatch = "size mismatch for h.1.attn.c_attn.weight: copying a param with shape torch.Size([72, 24])"
    for part in (
        'Missing key(s) in state_dict: "wpe.weight", "h.0.ln_1.bias"',
        'Unexpected key(s) in state_dict: "extra"',
        mismatch,
    ):
        assert part in found
    assert len(message(broken("short", weights, n_layer=1))) < 1000
    assert "model_type = 'llama'" in message(broken("llama", weights, model_type="llama"))
    pickled = broken("pickled")
    (pickled / "pytorch_model.bin").write_bytes(b"no")
    assert "a pickle can run any code" in message(pickled)
    assert "pytorch_model.bin only" in message(pickled)
    assert "no model.safetensors" in message(broken("none"))
    assert "no config.json" in message(tmp_path / "absent")
    cut = broken("cut")
    (cut / "model.safetensors").write_bytes(b"12345")
    assert "model.safetensors must be a safetensors file" in message(cut)
    away = broken("away")
    (away / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../good/model.safetensors"}}))
    assert "the index must name files of this folder" in message(away)
    (away / "model.safetensors.index.json").write_text("{")
    assert "must be JSON" in message(away)


def test_errors_say_what_to_type(tmp_path):
    _, ours = models(tmp_path)
    with pytest.raises(attlas.ShapeError, match="65 tokens, n_positions = 64"):
        ours(torch.zeros(1, 65, dtype=torch.int64))
    with pytest.raises(attlas.ShapeError, match="n_positions = 64"):
        ours.generate(torch.zeros(1, 60, dtype=torch.int64), 6)
    for settings in ({"temperature": -1}, {"top_k": 0}, {"top_p": 1.5}):
        with pytest.raises(attlas.ShapeError, match=next(iter(settings))):
            ours.generate(torch.zeros(1, 2, dtype=torch.int64), 6, **settings)
    with pytest.raises(attlas.ShapeError, match="activation_function = 'step'"):
        GPT2(GPT2Config(**SIZES, activation_function="step"))
    with pytest.raises(attlas.ShapeError, match="n_embd = 24, n_head = 5"):
        GPT2(GPT2Config(**{**SIZES, "n_head": 5}))
    with pytest.raises(attlas.ShapeError, match="encoder_hidden_states belong to cross-attention"):
        GPT2Attention(config())(torch.ones(1, 2, 24), encoder_hidden_states=torch.ones(1, 2, 24))
    with pytest.raises(attlas.ShapeError, match="found: 1 axes"):
        ours(torch.zeros(3, dtype=torch.int64))
    layer, x, cache = GPT2Attention(config()), torch.ones(1, 6, 24), KVCache()
    for columns in (1, 5, 12):  # the last ones, or the only one, would be taken for all keys
        with pytest.raises(attlas.ShapeError, match=f"found: {columns} columns, 6 keys"):
            layer(x, attention_mask=torch.zeros(1, columns))
    cross = GPT2Attention(config(add_cross_attention=True), is_cross_attention=True)
    with pytest.raises(attlas.ShapeError, match="found: 5 columns, 6 keys"):
        cross(x, encoder_hidden_states=x, encoder_attention_mask=torch.ones(1, 5))
    ours(torch.zeros(1, 6, dtype=torch.int64), cache=cache)
    with pytest.raises(attlas.ShapeError, match="found: 1 columns, 7 keys"):
        ours(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1), cache=cache)


# ------------------------------------------------------------------------------------------------ the shipped model


def test_the_shipped_model_writes_the_same_text():
    models_ = pytest.importorskip("attlas.models")
    tokenizer = transformers.AutoTokenizer.from_pretrained(models_.path())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(models_.path(), attn_implementation="sdpa").eval()
    ours = GPT2.from_pretrained(models_.path())
    for text in ("def area(radius):\n", "import json\n\n\nclass Reader:\n", "for i in range("):
        ids = tokenizer(text, return_tensors="pt").input_ids
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        want = theirs.generate(ids, max_new_tokens=50, **options)
        assert tokenizer.decode(ours.generate(ids, 50)[0]) == tokenizer.decode(want[0])
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=5e-5, rtol=1e-5)
