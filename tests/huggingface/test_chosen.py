"""Models whose indexer chooses the keys of each query: all equals ``eager``, with texts in which the choice bites."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tests.huggingface.conftest import both
from tests.huggingface.test_families import EXPERTS, HEADS, LATENT, compare, in_pieces, make, texts
from torch import Tensor, nn

import attlas
from attlas import interventions as iv
from attlas.errors import BackendError
from attlas.huggingface import attention_forward
from attlas.masks import Selected

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

INDEXER = LATENT | {"index_topk": 3, "index_n_heads": 2, "index_head_dim": 8} | {"moe_intermediate_size": 16}
INDEXER |= {"num_experts_per_tok": 2}
SHARED = {"indexer_types": ["full", "shared"]}  # the second layer has the choice of the first
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v32": INDEXER,
    "axk2": INDEXER,
    "glm_moe_dsa": INDEXER | SHARED,
    "hy_v4": INDEXER | SHARED,
    "mistral_large4_text": INDEXER | SHARED | {"head_dim": 8},
    "dots3_note_text": INDEXER | {"layer_types": ["full_attention", "full_attention"]},
    # Blocks of keys for each group of heads. A later layer would choose by the keys of padding, whose rows see no key:
    # eager attends to all keys there, attlas to none.
    "minimax_m3_vl_text": EXPERTS
    | {"layer_types": ["minimax_m3_sparse", "full_attention"], "index_block_size": 2, "index_topk_blocks": 2}
    | {"index_n_heads": 2, "index_head_dim": 8, "dense_intermediate_size": 48, "shared_intermediate_size": 16},
    # These two put the choice into the mask themselves.
    "deepseek_v4": HEADS
    | {"num_key_value_heads": 1, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "n_routed_experts": 4}
    | {"layer_types": ["compressed_sparse_attention", "sliding_attention"], "sliding_window": 4, "index_topk": 1}
    | {"index_n_heads": 2, "index_head_dim": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "qwen4_exp_text": EXPERTS
    | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "ngram_vocab_size_base": 200, "ple_layer_ids": []}
    | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4}
    | {"indexer_compress_ratio": 2},
}
BY_KEYWORD = ("deepseek_v32", "minimax_m3_vl_text")


def build(kind: str) -> nn.Module:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers does not have the model")
    whole = kind != "mistral_large4_text"
    return make(kind, MODELS[kind], transformers.AutoModelForCausalLM if whole else transformers.AutoModel)


@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_weights_equal_eager(kind: str) -> None:
    """With padding on each side; and a prompt in two pieces, then two steps, with a cache."""
    model, tokens = build(kind), 12
    for side in ("left", "right"):
        ids, mask = texts(side, tokens)
        ours, theirs = both(model, input_ids=ids, attention_mask=mask)
        compare(ours, theirs, mask.bool())
        seen = min(int((weights[0, 0, tokens - 1] > 0).sum()) for weights in theirs.attentions)
        assert seen < 7, "the choice leaves no key out"
    ids, mask = texts("left", tokens)
    pieces = [8, 2, 1, 1]
    found, wanted = [], []
    for implementation, into in (("attlas", found), ("eager", wanted)):
        model.set_attn_implementation(implementation)
        into += in_pieces(model, ids, mask, pieces)
    for start, size, one, other in zip([0, 8, 10, 11], pieces, found, wanted, strict=True):
        compare(one, other, mask[:, start : start + size].bool())


@torch.no_grad()
def generate(model: nn.Module, kind: str, implementation: str) -> Any:
    model.set_attn_implementation(implementation)
    # With padding on the left, MiniMax chooses by positions that are not those of the keys: tokens see no key at all.
    ids, mask = texts("left", 9, missing=0 if kind == "minimax_m3_vl_text" else 4)
    given = {"attention_mask": mask, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    return model.generate(ids, **given, output_attentions=True, return_dict_in_generate=True)


@pytest.mark.parametrize("kind", BY_KEYWORD)
def test_generation_is_recorded_as_one_matrix(kind: str, tmp_path: Any) -> None:
    model = build(kind)
    wanted = generate(model, kind, "eager")
    with attlas.record(model) as atlas:
        found = generate(model, kind, "attlas")
    assert torch.equal(found.sequences, wanted.sequences)
    atlas.save(tmp_path / "a.atlas")
    again = attlas.load(tmp_path / "a.atlas")
    for layer, (recorded, loaded) in enumerate(zip(atlas.entries, again.entries, strict=True)):
        assert recorded.shape == (2, 4, 12, 12)
        whole = recorded.matrix.to_dense()
        assert torch.equal(loaded.matrix.to_dense(), whole)
        row = 0
        for step in wanted.attentions:
            weights = step[layer]
            m, n = weights.shape[-2:]
            ours = whole[..., row : row + m, :n]
            seen = ours.sum(-1, keepdim=True) > 0.5
            torch.testing.assert_close(ours, weights * seen, atol=1e-4, rtol=1e-4)
            assert not whole[..., row : row + m, n:].any()
            row += m
        assert row == 12


@pytest.mark.parametrize("kind", BY_KEYWORD)
@torch.no_grad()
def test_changed_attention_keeps_the_choice(kind: str) -> None:
    """Hidden keys are hidden as well, and the keys that were not chosen stay hidden."""
    model = build(kind)
    ids, mask = texts("right", 12)
    given = {"input_ids": ids, "attention_mask": mask}
    model.set_attn_implementation("eager")
    wanted = model(**given, output_attentions=True)
    with attlas.intervene(model, [iv.Temperature(1.0)]):  # changes nothing, by the way of changes
        same = model(**given).logits
    torch.testing.assert_close(same[mask.bool()], wanted.logits[mask.bool()], atol=1e-4, rtol=1e-4)
    with attlas.intervene(model, [iv.Suppress(keys=[0])]), attlas.record(model) as atlas:
        model(**given)
    recorded, weights = atlas.entry(0).matrix.to_dense(), wanted.attentions[0].clone()
    weights[..., 0] = 0
    left = weights.sum(-1, keepdim=True)
    weights = torch.where(left > 1e-6, weights / left.clamp(min=1e-6), 0.0)
    torch.testing.assert_close(recorded[0], weights[0], atol=1e-4, rtol=1e-4)


def tokens(m: int = 6, n: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, 4, m, 8), torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)


def test_a_choice_without_a_mask_of_the_model() -> None:
    """Causality is a keyword then; one query is a path of its own."""
    q, k, v = tokens()
    indices = torch.tensor([[[0, 4], [1, 0], [-1, 2], [0, 3], [4, 4], [1, 9]]])
    found, A = attention_forward(nn.Identity(), q, k, v, None, indices=indices, is_causal=True)
    wanted = attlas.attend(q, k, mask=Selected(indices[:, None]) & attlas.Causal())
    torch.testing.assert_close(A.to_dense(), wanted.to_dense())
    torch.testing.assert_close(found.transpose(1, 2), wanted @ v)
    step, row = attention_forward(nn.Identity(), q[:, :, -1:], k, v, None, indices=indices[:, -1:])
    assert row.to_dense().count_nonzero() == 4
    torch.testing.assert_close(step.transpose(1, 2), row @ v)


class Layer(nn.Module):
    def __init__(self, **config: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)


@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_one_graph_has_the_choice(mask: str) -> None:
    torch._dynamo.reset()
    q, k, v = tokens()
    given = {"indices": torch.tensor([[[0, 4], [1, 0], [-1, 2], [0, 3], [4, 4], [1, 9]]]), "is_causal": mask == "none"}
    given["block_indices"] = torch.tensor([[[[0, 1]] * 6, [[2, -1]] * 6]])
    allowed = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    dense = {"none": None, "bool": allowed, "additive": torch.zeros(1, 1, 6, 6).masked_fill(~allowed, -torch.inf)}[mask]
    layer = Layer(index_block_size=2)
    run = torch.compile(attention_forward, fullgraph=True, backend="eager")
    (found, weights), (wanted, A) = (call(layer, q, k, v, dense, **given) for call in (run, attention_forward))
    torch.testing.assert_close(weights, A.to_dense())
    torch.testing.assert_close(found, wanted)
    assert A.to_dense().count_nonzero(dim=-1)[0].amax(-1).tolist() == [2, 2, 1, 1]


def test_what_cannot_be_read_of_a_choice_is_refused() -> None:
    q, k, v = tokens()
    with pytest.raises(BackendError, match="index_block_size"):
        attention_forward(Layer(), q, k, v, None, block_indices=torch.zeros(1, 2, 6, 1, dtype=torch.int64))
    with pytest.raises(BackendError, match="groups divide the heads"):
        attention_forward(Layer(), q, k, v, None, indices=torch.zeros(1, 3, 6, 1, dtype=torch.int64))
