"""Tells recordings of an attention in a program of torch.compile: operators in its graph, which call Python.

A mask is told of once, where the model makes it, and each attention names it by a number. So a recording has the same
mask as without a compiler where the model is causal or sees all tokens; any other is a copy of its booleans.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attlas.errors import BackendError, RecordingError
from attlas.foundation.compat import in_backward
from attlas.huggingface.calls import mask_of_call, settings_of_call
from attlas.huggingface.chosen import chosen_keys
from attlas.huggingface.masks import LazyMask, Rule, bidirectional_mask_function, causal_mask_function, lazy_mask
from attlas.masks import Causal, Mask, from_tensor
from attlas.matrix.attend import attend
from attlas.recording.hooks import is_recording, offer, takes_values
from attlas.recording.parallel import runs_ulysses
from attlas.recording.traced import LOG, TAGS, module_of, number_of

_MASK_RULES: dict[str, Rule] = {"causal": causal_mask_function, "bidirectional": bidirectional_mask_function}
_NUMBER_OF_MASK = "attlas_noted"  # of a dense mask: the number by which it was told of, as a tensor
_MOST_NOTED_MASKS = 256  # masks that a thread remembers; a pass makes one for each kind of layer


class _NotedMasks(threading.local):
    """The last masks that programs of this thread have made, by number."""

    def __init__(self) -> None:
        self.masks: OrderedDict[int, LazyMask] = OrderedDict()
        self.count = 0


_noted_masks = _NotedMasks()

# ------------------------------------------------------------------------------------------- while torch.compile traces


def note_mask(written: Tensor, arguments: dict[str, Any]) -> None:
    """Put the operator into the program that tells of a mask; the dense mask remembers its number."""
    rule, first = arguments["mask_function"], arguments["q_offset"]
    kind = "causal" if rule is causal_mask_function else "bidirectional" if rule is bidirectional_mask_function else ""
    sizes = [arguments["batch_size"], arguments["q_length"], arguments["kv_length"], arguments["kv_offset"]]
    where = first if isinstance(first, Tensor) else None
    padding = arguments["attention_mask"]
    allowed = written if kind == "" else None
    number = made_mask(LOG, allowed, padding, where, 0 if isinstance(first, Tensor) else first, sizes, kind)
    written.attlas_noted = number  # type: ignore[attr-defined]  # ours


def tell(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    *,
    causal: bool,
    others: tuple[Tensor | None, ...],
) -> None:
    """Put the operator into the program that tells of one attention; none for a module that nobody follows.

    Parameters
    ----------
    module, query, key, value, attention_mask, scaling, softcap
        As `attlas.huggingface.attention_forward` takes them.
    causal : bool
        What holds where there is no mask.
    others : tuple of Tensor or None
        Its further tensors: ``s_aux``, ``sinks``, ``position_bias``, ``indices``, ``block_indices``.
    """
    layer = number_of(module)
    if layer is None:
        return
    number = getattr(attention_mask, _NUMBER_OF_MASK, None)
    dense = attention_mask.detach() if attention_mask is not None and number is None else None
    tensors = [t.detach() for t in others if t is not None]
    names = "".join(["0" if t is None else "1" for t in others])
    q, k, v = query.detach(), key.detach(), value.detach()
    heard(LOG, layer, q, k, v, dense, number, tensors, names, scaling, softcap, causal)


# ------------------------------------------------------------------------------------------------------ while it runs


@torch.library.custom_op("attlas::made_mask", mutates_args=("log",), tags=TAGS)
def made_mask(
    log: Tensor,
    allowed: Tensor | None,
    padding: Tensor | None,
    where: Tensor | None,
    first_query: int,
    sizes: Sequence[int],
    kind: str,
) -> Tensor:
    """Note a mask, and return the number by which each attention names it."""
    number = _noted_masks.count
    if is_recording() and not in_backward():
        batch, m, n, first_key = sizes
        first_query = first_query if where is None else int(where)
        if allowed is None:
            padding = None if padding is None else padding.clone()
            device = "cpu" if padding is None else padding.device
            mask = lazy_mask((batch, m, n), first_query, first_key, _MASK_RULES[kind], padding, device)
        else:
            own = _copied_mask(allowed, first_query - first_key)
            mask = LazyMask(own, (batch, 1, m, n), torch.float32, allowed.device, first_query, first_key)
        _noted_masks.masks[number] = mask
        if len(_noted_masks.masks) > _MOST_NOTED_MASKS:
            _noted_masks.masks.popitem(last=False)
        _noted_masks.count += 1
    return torch.tensor(number, device="cpu")


@made_mask.register_fake
def _(
    log: Tensor,
    allowed: Tensor | None,
    padding: Tensor | None,
    where: Tensor | None,
    first_query: int,
    sizes: Sequence[int],
    kind: str,
) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _copied_mask(allowed: Tensor, shift: int) -> Mask:
    """Return a mask with a copy of the given booleans, shape (batch, 1, m, n); one that is causal says so.

    A static cache has room for more keys, and a recording leaves out those that a causal mask hides from all queries.
    """
    mask, (m, n) = from_tensor(allowed.clone()), allowed.shape[-2:]
    causal = torch.ones(m, n, dtype=torch.bool, device=allowed.device).tril(shift)
    return mask if bool((allowed & ~causal).any()) else Causal(offset=shift) & mask


@torch.library.custom_op("attlas::heard", mutates_args=("log",), tags=TAGS)
def heard(
    log: Tensor,
    layer: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense: Tensor | None,
    number: Tensor | None,
    tensors: Sequence[Tensor],
    names: str,
    scaling: float | None,
    softcap: float | None,
    causal: bool,
) -> None:
    """Offer one attention to the recordings of this thread, as copies: a program uses the memory of its tensors again.

    `names` says which of the further tensors are there, a digit for each.
    """
    module = module_of(layer)
    if module is None or not is_recording() or in_backward():
        return
    given = iter(tensors)
    s_aux, sinks, bias, indices, blocks = (next(given).clone() if there == "1" else None for there in names)
    if number is None:
        if dense is None and runs_ulysses():
            fix = "record the model without torch.compile."
            raise BackendError("without a mask, Ulysses says by positions what is seen.", "a compiled model", fix)
        mask = None if dense is None else dense.clone()
    else:
        mask = _noted_masks.masks.get(int(number))
        if mask is None:
            fix = "begin the recording before the pass, and make the masks of a pass in it."
            raise RecordingError("a compiled model makes its masks in the pass that is recorded.", "another", fix)
    q, k = q.clone(), k.clone()
    chosen = chosen_keys(module, q.shape[1], indices, blocks)
    own = mask_of_call(mask, q, k, causal=causal)
    score, whole, sink = settings_of_call(q, k, own, scaling, softcap, s_aux, sinks, bias, chosen)
    A = attend(q, k, score=score, mask=whole, sink=sink)
    first_query, first_key = getattr(mask, "first_query", None), getattr(mask, "first_key", None)
    values = v.clone() if takes_values() else None
    offer(module, A, first_query=first_query, first_key=first_key, values=values)


@heard.register_fake
def _(
    log: Tensor,
    layer: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense: Tensor | None,
    number: Tensor | None,
    tensors: Sequence[Tensor],
    names: str,
    scaling: float | None,
    softcap: float | None,
    causal: bool,
) -> None:
    return None
