"""The private names of torch, transformers and einops that attlas uses are there, and do what is asked of them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import attlas
from attlas.foundation import compat

SOURCE = Path(attlas.__file__).parent

NAMES = [
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.ops.aten._to_copy.default",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    *(f"torch.ops.aten._scaled_dot_product_{name}_attention.default" for name in ("flash", "efficient", "cudnn")),
    "torch._fused_sdp_choice",
    "torch.Tensor._version",
    "torch.Tensor._is_view",
    "torch.Tensor._make_wrapper_subclass",
    "torch._C._current_graph_task_id",
    "torch._C._dispatch_tls_local_exclude_set",
    "torch._C._dispatch_tls_local_include_set",
    "torch._C._ForceDispatchKeyGuard",
    "torch._C.DispatchKeySet",
    "torch._C._nn._parse_to",
    "torch._C._are_functorch_transforms_active",
    "torch.autograd.forward_ad._current_level",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    "torch.distributed.tensor.experimental._context_parallel._attention._replaced_functions"
    " or torch.distributed.tensor.experimental._attention._replaced_functions",
    "einops._backends.TorchBackend",
    "transformers.PreTrainedConfig._attn_implementation",
    "transformers.PreTrainedConfig.__class_validators__",
    "transformers.PreTrainedConfig.validate_output_attentions",
    "transformers.PreTrainedModel._can_set_attn_implementation",
    "transformers.masking_utils.AttentionMaskInterface.register",
    "transformers.masking_utils.causal_mask_function",
    "transformers.masking_utils.bidirectional_mask_function",
    "transformers.masking_utils.sdpa_mask",
    "transformers.models.minimax.modeling_minimax.MiniMaxLightningAttention.forward",
    "transformers.models.recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRglru._rnn_scan",
    "transformers.models.longformer.modeling_longformer.LongformerModel._pad_to_window_size",
    "transformers.models.led.modeling_led.LEDEncoder._pad_to_window_size",
    "transformers.models.big_bird.modeling_big_bird.BigBirdModel._pad_to_block_size",
    "transformers.models.bigbird_pegasus.modeling_bigbird_pegasus.BigBirdPegasusEncoder._pad_to_block_size",
    *(
        f"transformers.models.big_bird.modeling_big_bird.BigBirdBlockSparseAttention.{name}"
        for name in ("_bigbird_block_rand_mask_with_head", "_bigbird_block_rand_mask", "_get_rand_attn_plan")
    ),
    "transformers.models.longt5.modeling_longt5._make_global_fixed_block_ids",
    "transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
]
# Private names that stand elsewhere than in compat, by the package that they stand in.
ELSEWHERE = {
    "engine": {"_version", "_is_view", "_scaled_dot_product_flash_attention_for_cpu",
               "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention",
               "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_fused_sdp_choice"},
}  # fmt: skip


def found_at(path: str) -> object:
    """Return what a dotted name stands for: the longest module of it, and attributes from there."""
    path, _, other = path.partition(" or ")
    if other:
        with contextlib.suppress(ImportError, AttributeError):
            return found_at(path)
        return found_at(other)
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing: object = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            thing = inspect.getattr_static(thing, part) if isinstance(thing, type) else getattr(thing, part)
        return thing
    raise ImportError(path)


@pytest.mark.parametrize("path", NAMES)
def test_the_name_is_there(path: str) -> None:
    library = path.partition(".")[0]
    pytest.importorskip(library)
    if "distributed" in path and not torch.distributed.is_available():
        pytest.skip("this torch has no distributed tensors")
    try:
        found_at(path)
    except (ImportError, AttributeError):
        version = importlib.import_module(library).__version__
        pytest.fail(f"{library} {version} has no {path} any more: mend what attlas.foundation.compat asks of it.")


def test_every_private_name_stands_in_compat() -> None:
    strange = []
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0]
        if path.name == "compat.py" or package == "view":
            continue
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"(?:torch|aten|ATEN|transformers|einops)\b[\w.]*?\.(_[a-z]\w*)", text)
        names += re.findall(r"\._(?:version|is_view|make_wrapper_subclass|attn_implementation\w*)\b", text)
        names += re.findall(r"\"(_attn_implementation\w*|_can_set_attn_implementation|_output_attentions)\"", text)
        allowed = ELSEWHERE.get(package, set())
        strange += [f"{path.relative_to(SOURCE)}: {name}" for name in names if name.lstrip(".") not in allowed]
    assert not strange, "name it in attlas.foundation.compat, with what is asked of it"


def test_torch_answers_as_it_is_asked() -> None:
    t = torch.zeros(3)
    before = compat.changes(t)
    t.add_(1)
    assert compat.changes(t) == before + 1
    assert compat.parse_to("cpu", torch.float64) == (torch.device("cpu"), torch.float64)
    assert compat.parse_to(torch.ones(1, dtype=torch.int8)) == (torch.device("cpu"), torch.int8)
    asked = []

    def same(x: torch.Tensor) -> torch.Tensor:
        asked.append(compat.transforming())
        return x

    same(t)
    torch.func.vmap(same)(t)
    with torch.autograd.forward_ad.dual_level():
        asked.append(compat.transforming())
    assert asked == [False, True, True]
    assert not compat.in_backward()
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: asked.append(compat.in_backward()))
    x.sum().backward()
    assert asked[-1]
    assert compat.tree_leaves(compat.tree_map_only(int, float, {"a": [1, "b"]})) == [1.0, "b"]
    assert list(compat.replaced_by_context_parallel()) == []


def test_hooks_are_called_as_torch_registers_them() -> None:
    module, seen = torch.nn.Identity(), []
    module.register_forward_pre_hook(lambda *_: seen.append("torch's"))
    hooks: list[tuple[str, Any, dict[str, bool]]] = [
        ("a", lambda _, args, __: seen.append(("first", len(args))), {"before": True, "first": True}),
        ("a", lambda *out: seen.append(("always", out[2] is not None)), {"before": False, "always": True}),
        ("b", lambda *_: seen.append("after"), {"before": False}),
    ]
    for key, hook, when in hooks:
        compat.add_hooks([module], key, hook, **when)
    module(torch.ones(1))
    assert seen == [("first", 1), "torch's", ("always", True), "after"]
    module.forward = lambda x: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    seen.clear()
    with contextlib.suppress(ZeroDivisionError):
        module(torch.ones(1))
    assert seen == [("first", 1), "torch's", ("always", False)]
    for key in ("a", "b"):
        compat.remove_hooks([module], key)
    assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (1, 0)
    assert not module._forward_pre_hooks_with_kwargs
    assert not module._forward_hooks_always_called


def newer(masking: ModuleType) -> set[str]:
    """Return the functions that an older transformers has not got: packed texts are built otherwise since 5.23."""
    older = not hasattr(masking, "packed_sequence_compatibility_function")
    return {"remap_positions_for_packed_sequence"} if older else set()


def test_transformers_answers_as_it_is_asked() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    masking = importlib.import_module("transformers.masking_utils")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9)
    model = transformers.GPT2Model(config)
    assert getattr(model, compat.CAN_SWITCH)()
    model.set_attn_implementation("eager")
    for name in (compat.ATTENTION, compat.ATTENTION_STORED):
        assert getattr(model.config, name) == "eager"
    model.config.output_attentions = True
    assert getattr(model.config, compat.OUTPUT_ATTENTIONS_STORED) is True
    assert vars(transformers.PreTrainedConfig)[compat.VALIDATORS]
    assert compat.causal_models(transformers)["gpt2"] == "GPT2LMHeadModel"
    missing = [name for name in compat.MASK_PARTS.keys() - newer(masking) if not hasattr(masking, name)]
    assert not missing, "masks made of these are asked for each pair now: slower, and right"


def test_mask_functions_close_over_what_is_read() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    masking = importlib.import_module("transformers.masking_utils")
    for name, wanted in compat.MASK_PARTS.items():
        if name in newer(masking):
            continue
        make = getattr(masking, name)
        inside = [code for code in make.__code__.co_consts if inspect.iscode(code)]
        assert any(set(code.co_freevars) >= wanted for code in inside), f"{name} closes over other names than {wanted}"


class Meeting:
    """Two objects whose property is computed only where the other's is computed at the same time."""

    both = threading.Barrier(2, timeout=20)

    @compat.cached_property
    def met(self) -> int:
        """Wait for the other object."""
        self.both.wait()
        return 1


def test_threads_compute_properties_of_two_objects_at_the_same_time() -> None:
    first, second = Meeting(), Meeting()
    other = threading.Thread(target=lambda: second.met)
    other.start()
    assert first.met == 1
    other.join()
    assert (vars(first), vars(second)) == ({"met": 1}, {"met": 1})
    texts = {path.relative_to(SOURCE): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    locked = [str(path) for path, text in texts.items() if re.search(r"functools import .*cached_property", text)]
    assert locked == [str(Path("foundation/compat.py"))]
