"""TransformerLens: hooks and the cache have lazy patterns and scores, equal to its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

import attlas
from attlas.matrix.tensor import MatrixTensor

transformers = pytest.importorskip("transformers", reason="transformers is in the extra `hf`")
bridge = pytest.importorskip(
    "transformer_lens.model_bridge", reason="TransformerLens is not installed: make test-doors"
)

TOKENS = torch.arange(24)[None]
SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def booted(folder: Path, model: Any) -> Any:
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(attlas.models.path()).save_pretrained(folder)
    return bridge.TransformerBridge.boot_transformers(str(folder)).eval()


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Bert", "GPTNeoX"])
def test_cached_patterns_and_scores_are_lazy_and_equal(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    extra = {"num_key_value_heads": 2, "head_dim": 8} if family in ("Llama", "Gemma2") else {}
    extra |= {"sliding_window": 8} if family == "Gemma2" else {}
    kind = "ForMaskedLM" if family == "Bert" else "ForCausalLM"
    config = getattr(transformers, f"{family}Config")(**SIZES, **extra)
    model = booted(tmp_path, getattr(transformers, family + kind)(config))
    with torch.no_grad():
        logits, wanted = model.run_with_cache(TOKENS)
        with attlas.lazily(model) as block, attlas.huggingface.weights_as_tensors():
            found_logits, found = model.run_with_cache(TOKENS)
    torch.testing.assert_close(found_logits, logits, rtol=1e-5, atol=1e-5)
    assert not block.dense_uses
    for layer in range(2):
        for name in ("pattern", "attn_scores"):
            ours, theirs = found[name, layer], wanted[name, layer]
            is_tensor = isinstance(ours, torch.Tensor)
            assert is_tensor or name == "attn_scores"
            assert not is_tensor or isinstance(ours, MatrixTensor)
            seen = theirs > -1e30
            for part in ((0, 3, -1), (slice(None), 1, slice(2, 5), slice(0, 9))):
                torch.testing.assert_close(ours[part][seen[part]], theirs[part][seen[part]], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            found["pattern", layer].matrix.to_dense(), wanted["pattern", layer], rtol=1e-5, atol=1e-5
        )


def test_hooks_see_lazy_weights_and_may_change_them() -> None:
    model = bridge.TransformerBridge.boot_transformers(str(attlas.models.path())).eval()
    shapes: dict[str, tuple[int, ...]] = {}

    def look(t: Any, hook: Any) -> None:
        shapes[hook.name] = tuple(t.shape)

    def ablate(t: Any, hook: Any) -> Any:
        keep = torch.ones(1, 6, 1, 1)
        keep[:, 2] = 0
        return t * keep

    hooks = [("blocks.1.attn.hook_pattern", look), ("blocks.1.attn.hook_attn_scores", look)]
    hooks += [("blocks.1.attn.hook_pattern", ablate)]
    with torch.no_grad():
        wanted = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
        shapes.clear()
        with attlas.lazily(model) as block:
            found = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
            _, cache = model.run_with_cache(TOKENS, remove_batch_dim=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert set(shapes.values()) == {(1, 6, 24, 24)}
    assert len(shapes) == 2
    assert not block.dense_uses
    assert cache["pattern", 0].shape == cache["attn_scores", 0].shape == (6, 24, 24)
    assert cache["attn_scores", 0][1, 3].shape == (24,)
