"""Private and undocumented names of torch, transformers and einops, in one place.

Each comment says what attlas asks of the name, and which public name is missing. `tests/test_compat.py` fails with a
sentence when one disappears. The engine has a few more of torch's, which the same test lists.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

# Sees each operation of torch, also those inside of its own functions. torch documents it, and gives no public name.
from torch.utils._python_dispatch import TorchDispatchMode

# Tensors in nested arguments, found and replaced. torch.utils.pytree is public in newer versions than 2.6 only.
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property(functools.cached_property):  # noqa: N801 - it stands for the one of Python
        """That of Python 3.11 holds one lock for all objects of a class: threads wait for each other, even forever."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            # The first access stores the value in the object, where later ones find it first.
            if instance is None:
                return self
            values = vars(instance)
            if self.attrname not in values:
                values[self.attrname] = self.func(instance)
            return values[self.attrname]


try:
    # Subclasses of a backend are the only way to tell einops of a tensor of one's own; there is no register().
    from einops._backends import TorchBackend as EinopsBackend
except ImportError:
    EinopsBackend = None  # type: ignore[assignment, misc]

__all__ = [
    "ATTENTION",
    "ATTENTION_STORED",
    "BLOCK_IDS",
    "CAN_SWITCH",
    "FP32_PRECISION",
    "LIGHTNING",
    "MASK_PARTS",
    "OUTPUT_ATTENTIONS_STORED",
    "PADS_TO_BLOCKS",
    "PADS_TO_WINDOWS",
    "RANDOM_BLOCKS",
    "RANDOM_BLOCKS_OF_PAPER",
    "RANDOM_PLAN",
    "RNN_SCAN",
    "SET_FP32_PRECISION",
    "TO_COPY",
    "VALIDATORS",
    "EinopsBackend",
    "TorchDispatchMode",
    "add_hooks",
    "autograd_in_operator",
    "base_of_configurations",
    "cached_property",
    "causal_models",
    "changes",
    "collector_of_outputs",
    "constant_to_compiler",
    "graph_task",
    "in_backward",
    "local_part",
    "mask_function",
    "mask_module",
    "parse_to",
    "registered",
    "remove_hooks",
    "replaced_by_context_parallel",
    "tracing",
    "transforming",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "wrapper",
]  # fmt: skip

# ------------------------------------------------------------------------------------------------------------- torch

# What `.to()` and autograd call below __torch_dispatch__; torch.ops.aten names operations by their signature only.
TO_COPY = torch.ops.aten._to_copy.default

# How torch multiplies float32: settings by backend and operation, since 2.9; None before. They are public as slower
# attributes, torch.backends.cuda.matmul.fp32_precision. The older public function raises where a program uses these.
FP32_PRECISION: Callable[..., str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
SET_FP32_PRECISION: Callable[..., Any] | None = getattr(torch._C, "_set_fp32_precision_setter", None)


def changes(t: Tensor) -> int:
    """Return how often a tensor was changed in place, as autograd counts it; no public name says so."""
    return t._version


def constant_to_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.compile call a function once, while it traces, and take its result for a constant.

    torch.compiler.assume_constant_result does no more, and loads the whole compiler for it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


#: The number of the backward pass that runs in this thread, -1 where none does.
graph_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread; torch tells it to its own checkpointing only."""
    return bool(torch._C._current_graph_task_id() != -1)


def add_hooks(
    modules: Iterable[nn.Module],
    key: str,
    hook: Callable[..., Any],
    *,
    before: bool,
    first: bool = False,
    always: bool = False,
) -> None:
    """Register a hook of some modules under a name.

    torch numbers the hooks of a process, and a program of torch.compile depends on the numbers: it would be compiled
    again for each recording, with ``register_forward_hook``.

    Parameters
    ----------
    modules : iterable of nn.Module
        The modules.
    key : str
        The name; no other hook of a module has it.
    hook : callable
        It is called with the module, its arguments, and its keywords or its output.
    before : bool
        Whether it is called before the forward, and not after it.
    first : bool
        Whether it is called before all hooks that are registered now.
    always : bool
        Whether it is called after the forward also where that raises an error.
    """
    for module in modules:
        hooks: Any = module._forward_pre_hooks if before else module._forward_hooks
        marks: Any = module._forward_pre_hooks_with_kwargs if before else module._forward_hooks_always_called
        hooks[key] = hook
        if before or always:
            marks[key] = True
        if first:
            hooks.move_to_end(key, last=False)


def remove_hooks(modules: Iterable[nn.Module], key: str) -> None:
    """Remove the hooks that `add_hooks` registered under a name."""
    for module in modules:
        every: list[Any] = [module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs]
        every += [module._forward_hooks, module._forward_hooks_always_called]
        for hooks in every:
            hooks.pop(key, None)


def autograd_in_operator() -> Any:
    """Return a context in which autograd records inside an operator of torch.library.

    torch takes autograd's dispatch keys away there, and grad mode does not bring them back: a gradient that is computed
    inside would be 0, without an error. Nothing public gives them back.
    """
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView"):
        hidden = hidden - torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), hidden)


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Return device and dtype from the arguments of ``Tensor.to``, which has several signatures."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


def tracing() -> bool:
    """Return whether code runs on stand-ins of tensors, whose numbers cannot be read.

    True inside torch.compile, torch.export and the transforms of torch.func.
    """
    return (
        torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )


def transforming() -> bool:
    """Return whether the code runs inside a transform of torch.func (vmap, grad, jvp) or forward-mode differentiation.

    torch.compiler.is_compiling() tells of the compiler; nothing public tells of these.
    """
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def wrapper(kind: type[Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor of a subclass that has a shape, dtype and device, and no numbers.

    torch makes its own subclasses by this method.
    """
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def replaced_by_context_parallel() -> Any:
    """Return the functions that torch's ``context_parallel`` has replaced in this process; it has no public state."""
    folder = "torch.distributed.tensor.experimental"
    # The second is the name of torch 2.8.
    module = sys.modules.get(f"{folder}._context_parallel._attention") or sys.modules.get(f"{folder}._attention")
    return getattr(module, "_replaced_functions", ())


def local_part(shape: tuple[int, ...], mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part of a distributed tensor, and where it begins along each axis.

    A DTensor tells the size of its own part only.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, mesh, placements)


# ------------------------------------------------------------------------------------------------------ transformers

# Of a configuration: the name of the attention function. set_attn_implementation() sets it, no public name reads it.
ATTENTION = "_attn_implementation"
# Where it is stored, to put it back as it was: None where the model had not chosen.
ATTENTION_STORED = "_attn_implementation_internal"
# Of a configuration: where output_attentions is stored, behind a setter that refuses all functions but eager.
OUTPUT_ATTENTIONS_STORED = "_output_attentions"
# Of a class of configurations: the checks that its objects run, one of which is validate_output_attentions.
VALIDATORS = "__class_validators__"
# Of a model: whether set_attn_implementation() works; it logs a warning else, and raises nothing.
CAN_SWITCH = "_can_set_attn_implementation"

# Methods of layers of linear attention that call no function of their own: the whole layer of MiniMax-01, and the
# recurrence of RecurrentGemma. Nothing public tells what such a layer computes with.
LIGHTNING = "MiniMaxLightningAttention.forward"
RNN_SCAN = "RecurrentGemmaRglru._rnn_scan"

# Methods of models that attend in chunks: how Longformer and LED, and BigBird, fill up their texts; how a layer of
# BigBird draws its random blocks; the function of LongT5's module that gives each token its block.
PADS_TO_WINDOWS = "_pad_to_window_size"
PADS_TO_BLOCKS = "_pad_to_block_size"
RANDOM_BLOCKS = "_bigbird_block_rand_mask_with_head"
RANDOM_BLOCKS_OF_PAPER = "_bigbird_block_rand_mask"
RANDOM_PLAN = "_get_rand_attn_plan"
BLOCK_IDS = "_make_global_fixed_block_ids"

# What the mask functions of transformers.masking_utils close over: a rule is taken apart by these names. Where one is
# changed, the rule is asked for each pair, as a function of the user's own is: slower, and right.
MASK_PARTS = {
    "and_masks": {"mask_functions"},
    "or_masks": {"mask_functions"},
    "sliding_window_overlay": {"sliding_window"},
    "sliding_window_bidirectional_overlay": {"sliding_window"},
    "chunked_overlay": {"chunk_size", "left_padding"},
    "blockwise_overlay": {"block_sequence_ids"},
    "padding_mask_function": {"padding_mask"},
    "packed_sequence_mask_function": {"packed_sequence_mask"},
    "remap_positions_for_packed_sequence": {"mask_function", "position_ids"},
    "add_offsets_to_mask_function": {"mask_function", "q_offset", "kv_offset"},
}


def collector_of_outputs(output_capturing: Any) -> Any:
    """Return what this module of transformers collects outputs of layers in; None in versions without it.

    Its `get` gives the outputs of the running model that are asked for, by name, or None for a model that collects
    nothing by it. No public name tells an attention function whether somebody will read its weights.
    """
    return getattr(output_capturing, "_active_collector", None)


def registered(transformers: Any, name: str, attention: Any, mask: Any) -> None:
    """Register attention and mask under a name.

    Before 4.50 the functions are a dictionary, and before 4.53 models make their masks themselves.
    """
    interface = getattr(transformers, "AttentionInterface", None)
    if interface is None:
        transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[name] = attention
    else:
        interface.register(name, attention)
    masking = mask_module(transformers)
    if masking is not None:
        masking.AttentionMaskInterface.register(name, mask)


def mask_module(transformers: Any) -> Any:
    """Return the module of mask functions; None in versions before 4.53, whose models make masks themselves."""
    try:
        return importlib.import_module(f"{transformers.__name__}.masking_utils")
    except ImportError:
        return None


def mask_function(masking: Any, name: str) -> Callable[..., Any]:
    """Return a function of the module of mask functions; in versions without it, one that does the same."""
    own: dict[str, Callable[..., Any]] = {
        "causal_mask_function": lambda b, h, i, j: j <= i,
        "bidirectional_mask_function": lambda b, h, i, j: i >= 0,
    }
    found: Callable[..., Any] | None = getattr(masking, name, own.get(name))
    return found or _placeholder_for(name)


def _placeholder_for(name: str) -> Callable[..., Any]:
    """Return what stands for a function that a version of transformers does not have; nothing there calls it."""

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(name)

    return missing


def base_of_configurations(transformers: Any) -> Any:
    """Return the class of all configurations, which 5.0 spells in another way."""
    return getattr(transformers, "PreTrainedConfig", None) or transformers.PretrainedConfig


def causal_models(transformers: Any) -> Any:
    """Return the class of the language model for each type of configuration, by name; auto classes only raise."""
    return transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
