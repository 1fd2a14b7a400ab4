"""The mask of one forward pass: a tensor that holds no numbers, made of a mask function of transformers."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from attlas.errors import BackendError
from attlas.foundation.arguments import arguments_of, with_arguments
from attlas.foundation.compat import (
    MASK_PARTS,
    TO_COPY,
    mask_function,
    mask_module,
    wrapper,
)
from attlas.huggingface.chosen import whole_of
from attlas.huggingface.ranks import world
from attlas.masks import Causal, Documents, Mask, Padding, Window, from_function, from_tensor

# A rule of transformers: batch, head, query and key, counted from the start of the text, to True or False.
Rule = Callable[[Any, Any, Any, Any], Any]

#: The mask functions of transformers, as far as this version has them.
MASKING: Any = mask_module(transformers)
causal_mask_function = mask_function(MASKING, "causal_mask_function")
bidirectional_mask_function = mask_function(MASKING, "bidirectional_mask_function")
_and_masks, _or_masks = (mask_function(MASKING, name) for name in ("and_masks", "or_masks"))
_chunked_overlay = mask_function(MASKING, "chunked_overlay")
_packed_sequence = mask_function(MASKING, "packed_sequence_mask_function")

_ATEN_OPS = torch.ops.aten
_THEIR_MODULE = causal_mask_function.__module__


class LazyMask(Tensor):
    """A mask of attlas that looks like an additive tensor of shape (batch, 1, m, n).

    Models hand masks on, slice and move them; nearly none computes with them. So this tensor holds no
    numbers. Where a model does compute with it, it is written out as ``eager`` would have it: 0 where a
    pair may attend, the smallest number of the dtype elsewhere.

    Parameters
    ----------
    mask : Mask or None
        Which pairs may attend; None allows all.
    shape : tuple of int
        Shape that the model sees.
    dtype : torch.dtype
        Floating point dtype that the model sees.
    device : torch.device or str
        Device that the model sees.
    first_query, first_key : int, default 0
        Absolute position of the first query and of the first key in the text; they differ with a cache. Kept
        through copies and slices, for whoever records where a matrix stands in its text.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.huggingface import LazyMask
    >>> mask = LazyMask(attlas.Causal(), (1, 1, 3, 3), torch.float32, "cpu")
    >>> (mask == 0).int()[0, 0]
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """

    mask: Mask | None
    first_query: int
    first_key: int
    _row: Tensor | None

    @staticmethod
    def __new__(
        cls,
        mask: Mask | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        first_query: int = 0,
        first_key: int = 0,
    ) -> LazyMask:
        # A tensor of no numbers, which carries a mask.
        tensor: LazyMask = wrapper(cls, shape, dtype, torch.device(device))
        tensor.mask = mask
        tensor.first_query = first_query
        tensor.first_key = first_key
        tensor._row = None
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Tensor has one that takes nothing
        super().__init__()

    def __repr__(self, **_: object) -> str:  # type: ignore[override]  # torch passes the contents, and there are none
        name = "everything" if self.mask is None else self.mask.name()
        return f"LazyMask({name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def _same_mask(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LazyMask:
        """Return a new object with the same mask: autograd needs one from each operation."""
        return LazyMask(self.mask, shape, dtype, device, self.first_query, self.first_key)

    def allowed(self) -> Tensor:
        """Return the whole mask, True where a pair may attend; m · n bytes for each batch."""
        batch, _, m, n = self.shape
        if self.mask is None:
            return torch.ones(self.shape, dtype=torch.bool, device=self.device)
        return whole_of(self.mask, (batch, 1, m), n, self.device).expand(self.shape)

    def row(self, n: int) -> Tensor:
        """Return the first row of each batch up to key n, True where the key may be seen; kept for the next layer."""
        if self._row is None:
            self._row = LazyMask.allowed(self)[:, :, :1]
        return self._row[..., :n]

    def additive(self) -> Tensor:
        """Return the whole mask as ``eager`` writes it."""
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        if self.mask is None:
            return zeros
        m, n = self.shape[-2:]
        allowed = self.row(n) if m == 1 else self.allowed()
        return zeros.masked_fill(~allowed, torch.finfo(self.dtype).min)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates it loosely
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Copy or cut a mask without numbers; for any other operation, write it out first."""
        kwargs = dict(kwargs or {})
        if func in (_ATEN_OPS.detach.default, _ATEN_OPS.alias.default, _ATEN_OPS.clone.default, TO_COPY):
            dtype, device = kwargs.get("dtype") or args[0].dtype, kwargs.get("device") or args[0].device
            if dtype.is_floating_point:
                return args[0]._same_mask(tuple(args[0].shape), dtype, device)
        if func is _ATEN_OPS.slice.Tensor and not kwargs:
            part = _leading_part(*args)
            if part is not None:
                return args[0]._same_mask(part, args[0].dtype, args[0].device)
        masks = arguments_of(LazyMask, args, kwargs)
        args, kwargs = with_arguments(LazyMask, _written_out, args, kwargs)
        return _with_positions_of(func(*args, **kwargs), masks[0])


def _with_positions_of(out: Any, mask: LazyMask) -> Any:
    """Copy the positions of the first query and key from a mask to what a model computed from it for the same queries.

    Models hide what an indexer did not choose (Qwen4), or append further keys (DeepSeek-V4).
    """
    if isinstance(out, Tensor) and out.ndim == 4 and out.shape[-2] == mask.shape[-2]:
        out.first_query, out.first_key = mask.first_query, mask.first_key  # type: ignore[attr-defined]  # ours
    return out


def _written_out(mask: LazyMask) -> Tensor:
    """Return a mask as the tensor of numbers that it stands for."""
    if mask.mask is None or mask._row is not None:  # no rule is called
        return mask.additive()
    # Below __torch_dispatch__ torch has switched vmap off for this thread, and a rule may need it: use another one.
    with ThreadPoolExecutor(1) as other:
        return other.submit(mask.additive).result()


def _leading_part(
    mask: LazyMask, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[int, ...] | None:
    """Return the shape of a slice that starts at 0, so that positions stay as they are; None for another slice."""
    if (start or 0) != 0 or step != 1:
        return None
    size = mask.shape[dim]
    shape = list(mask.shape)
    shape[dim] = size if end is None else min(end, size) if end >= 0 else max(size + end, 0)
    return tuple(shape)


def mask_of(t: Tensor, n: int) -> Mask | None:
    """Return the mask that a tensor with four axes stands for.

    Parameters
    ----------
    t : Tensor, shape (batch, 1 or heads, m, n or more)
        A `LazyMask`, or a boolean or additive tensor that the user made.
    n : int
        Number of keys; what a static cache has beyond is cut off.
    """
    if isinstance(t, LazyMask):
        return t.mask
    t = t[..., :n]
    if t.dtype is torch.bool:
        return from_tensor(t)
    # "Forbidden" is the smallest number of the dtype in transformers, and a row of nothing else must stay empty.
    allowed = t > torch.finfo(t.dtype).min
    # A learned bias that is 0 everywhere, as in a new Swin or BEiT, is no mask of booleans: it has a gradient.
    if not t.requires_grad and bool((t.masked_fill(~allowed, 0) == 0).all()):
        return from_tensor(allowed)
    return from_tensor(t.masked_fill(~allowed, float("-inf")))


def lazy_mask(
    sizes: tuple[int, int, int],
    first_query: int,
    first_key: int,
    rule: Rule,
    padding: Tensor | None,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    broadcasts: bool = True,
) -> LazyMask:
    """Return the mask of one forward pass.

    Parameters
    ----------
    sizes : tuple of int
        Batch, queries and keys.
    first_query, first_key : int
        Positions of the first query and of the first key.
    rule : callable
        Which pairs may attend.
    padding : Tensor, optional, shape (batch, tokens)
        True for text, False for padding.
    device, dtype
        Of the tensor that the mask stands for.
    broadcasts : bool
        Whether the rule takes tensors.
    """
    batch, m, n = sizes
    position = _MatrixPosition(first_query, first_key, m, n, broadcasts=broadcasts)
    mask = _mask_of_rule(rule, position)
    if m == 1 and isinstance(mask, Causal | Window) and _sees_all(mask, position):
        mask = None
    mask = both(mask, None if padding is None else _padding_mask(padding, n, first_key))
    return LazyMask(mask, (batch, 1, m, n), dtype, device, first_query, first_key)


def both(a: Mask | None, b: Mask | None) -> Mask | None:
    """Return the mask of what two masks allow; None allows everything."""
    return b if a is None else a if b is None else a & b


def mask_of_all_ranks(rule: Rule, text: Any, sizes: tuple[int, int, int, int]) -> Mask | None:
    """Return the mask of a text whose tokens are divided over ranks, at the positions of the whole text."""
    m, n, first_query, first_key = sizes
    if m != n or first_query or first_key:
        found = f"{m} queries from {first_query} on, {n} keys from {first_key} on"
        raise text.refused("each rank must have the keys of its queries and no cache.", found, "use_cache=False")
    whole = _with_all_tokens(rule, text)
    if text.documents is not None:
        text.check_documents(_inside_packed(rule) is not None)
        whole = _inside_documents(whole, text.positions, text.documents)
    padding = None if text.padding is None else _padding_mask(text.padding, text.n, 0)
    return both(_mask_of_rule(whole, _MatrixPosition(0, 0, text.n, text.n, broadcasts=True)), padding)


def _inside_documents(rule: Rule, positions: Tensor, documents: Tensor) -> Rule:
    """Return the rule inside each of several texts in one row, as this version of transformers builds it."""
    if hasattr(MASKING, "packed_sequence_compatibility_function"):
        return MASKING.packed_sequence_compatibility_function(rule, positions, documents)  # type: ignore[no-any-return]
    # Before transformers 5.23, chunks are counted from the start of the row and not of the text.
    return _and_masks(_packed_sequence(documents), rule)  # type: ignore[no-any-return]


def _with_all_tokens(rule: Rule, text: Any) -> Rule:
    """Return a rule of one rank's tokens as one of all tokens."""
    if _is_of_distance(rule):
        return rule
    name, closure = _rule_source(rule)
    if name in ("and_masks", "or_masks"):
        inside = _inside_packed(rule)
        if inside is not None:  # documents are those of all ranks
            return _with_all_tokens(inside, text)
        return (_and_masks if name == "and_masks" else _or_masks)(  # type: ignore[no-any-return]
            *(_with_all_tokens(part, text) for part in closure["mask_functions"])
        )
    if name == "chunked_overlay":
        return _chunked_overlay(closure["chunk_size"], text.left_padding)  # type: ignore[no-any-return]
    shown = name or getattr(rule, "__qualname__", repr(rule))
    known = "causal, sliding windows, chunks, packed texts and padding are known at positions of the whole text."
    raise text.refused(known, f"a mask made by {shown}", "run the model on one process.")


class _MatrixPosition(NamedTuple):
    """Positions of a matrix in its text, and whether the rules of its mask broadcast."""

    first_query: int
    first_key: int
    m: int
    n: int
    broadcasts: bool

    @property
    def shift(self) -> int:
        """Position of query 0 minus position of key 0."""
        return self.first_query - self.first_key

    def queries(self, t: Tensor) -> Tensor:
        """Return the part of a tensor over the whole text that belongs to the queries."""
        return t[:, self.first_query : self.first_query + self.m]

    def keys(self, t: Tensor) -> Tensor:
        """Return the part of a tensor over the whole text that belongs to the keys."""
        return t[:, self.first_key : self.first_key + self.n]


def _sees_all(mask: Causal | Window, position: _MatrixPosition) -> bool:
    """Return whether the one query of a decoding step sees every key."""
    left, right = mask.left, mask.right
    return (left is None or left >= position.shift) and (right is None or position.n - 1 <= position.shift + right)


def _mask_of_rule(rule: Rule, position: _MatrixPosition) -> Mask | None:
    """Return the mask of attlas for a mask function of transformers; None where it allows everything.

    Functions that transformers builds are translated to masks of attlas, so that whole tiles are skipped. Other
    functions are evaluated for each pair.
    """
    if rule is causal_mask_function:
        return Causal(offset=position.shift)
    if rule is bidirectional_mask_function:
        return None
    name, closure = _rule_source(rule)
    if name == "and_masks":
        return _all_of(closure["mask_functions"], position)
    if name == "or_masks":
        parts = [_mask_of_rule(part, position) for part in closure["mask_functions"]]
        return None if None in parts else reduce(operator.or_, parts)
    make = _MASK_OF_OVERLAY.get(name)
    mask = None if make is None else make(closure, position)
    if mask is not None:
        return mask
    # A rule takes positions in the text, a mask takes rows and columns of the matrix.
    first_query, first_key = position.first_query, position.first_key
    return from_function(lambda b, h, i, j: rule(b, h, i + first_query, j + first_key), broadcasts=position.broadcasts)


def _all_of(rules: tuple[Rule, ...], position: _MatrixPosition) -> Mask | None:
    """Return the mask of rules that must all hold."""
    if len(rules) == 2 and rules[1] is causal_mask_function:
        name, closure = _rule_source(rules[0])
        if name == "sliding_window_overlay" and closure["sliding_window"] > 0:
            return Window(closure["sliding_window"] - 1, 0, offset=position.shift)
    inner = _rule_in_packed_texts(rules, position)
    return reduce(both, [_mask_of_rule(part, position) for part in (rules if inner is None else (rules[0], inner))])


def _rule_in_packed_texts(rules: tuple[Rule, ...], position: _MatrixPosition) -> Rule | None:
    """Return the rule inside packed texts where it may be asked for places instead of positions in each text.

    Positions grow by one inside a text, so a rule of the distance between query and key says the same of both.
    """
    if not _are_packed_rules(rules):
        return None
    (_, closure), (_, inner) = map(_rule_source, rules)
    positions, ids = inner["position_ids"], closure["packed_sequence_mask"]
    rule: Rule = inner["mask_function"]
    grows = ((positions.diff(dim=-1) == 1) | (ids.diff(dim=-1) != 0)).all()
    return rule if _is_of_distance(rule) and position.shift == 0 and bool(grows) else None


def _are_packed_rules(rules: tuple[Rule, ...]) -> bool:
    """Return whether two rules together are what transformers makes for packed texts."""
    names = [_rule_source(rule)[0] for rule in rules]
    return names == ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]


def _inside_packed(rule: Rule) -> Rule | None:
    """Return the rule that holds inside each of several texts in one row; None where it is not a rule for those."""
    name, closure = _rule_source(rule)
    if name != "and_masks":
        return None
    rules: tuple[Rule, ...] = closure["mask_functions"]
    if _are_packed_rules(rules):
        inside: Rule = _rule_source(rules[1])[1]["mask_function"]
        return inside
    # Before transformers 5.23, the texts are the second of two rules.
    older = not hasattr(MASKING, "packed_sequence_compatibility_function")
    second = [_rule_source(part)[0] for part in rules[1:]]
    return rules[0] if older and second == ["packed_sequence_mask_function"] else None


def _is_of_distance(rule: Rule) -> bool:
    """Return whether a rule depends on the distance between query and key alone, as far as it is known."""
    if rule in (causal_mask_function, bidirectional_mask_function):
        return True
    name, closure = _rule_source(rule)
    if name in ("and_masks", "or_masks"):
        return all(map(_is_of_distance, closure["mask_functions"]))
    return name in ("sliding_window_overlay", "sliding_window_bidirectional_overlay")


def _rule_source(rule: Rule) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the transformers function that made a rule, and its closure; "" for another function."""
    if getattr(rule, "__module__", "") != _THEIR_MODULE or not inspect.isfunction(rule):
        return "", {}
    name, closure = rule.__qualname__.partition(".<locals>")[0], inspect.getclosurevars(rule).nonlocals
    # Another version may have changed what is inside: then it is a function like any other.
    return (name, closure) if closure.keys() >= MASK_PARTS.get(name, {name}) else ("", {})


def _chunked_mask(closure: Mapping[str, Any], position: _MatrixPosition) -> Mask | None:
    """Return the mask of attention within chunks of fixed size (Llama 4)."""
    if closure["chunk_size"] < 1:
        return None
    start = closure["left_padding"].reshape(-1, 1).cpu()
    last = max(position.first_query + position.m, position.first_key + position.n)
    # Chunk of each position: floor((position - left padding) / chunk_size). Pairs of one chunk may attend.
    chunk = torch.div(torch.arange(last) - start, closure["chunk_size"], rounding_mode="floor")
    return Documents(position.keys(chunk), position.queries(chunk))


def _packed_texts_mask(closure: Mapping[str, Any], position: _MatrixPosition) -> Mask | None:
    """Return the mask of several texts packed into one row; None with a cache, for which there is no such mask."""
    ids = closure["packed_sequence_mask"]
    fits = position.m == position.n == ids.shape[-1] and position.first_query == position.first_key == 0
    return Documents(ids) if fits else None


def _image_blocks_mask(closure: Mapping[str, Any], position: _MatrixPosition) -> Mask | None:
    """Return the mask of blocks, such as images, within which attention goes both ways."""
    ids = closure["block_sequence_ids"]
    if ids.shape[-1] < max(position.first_query + position.m, position.first_key + position.n):
        return None
    # Text has a number below 0 and belongs to no block: two numbers that never meet.
    return Documents(position.keys(ids.where(ids >= 0, -2)), position.queries(ids.where(ids >= 0, -1)))


def _not_padding(closure: Mapping[str, Any], position: _MatrixPosition) -> Mask | None:
    """Return the mask of the keys that are no padding, by the tensor of the model."""
    keep = closure["padding_mask"]
    whole = keep.shape[-1] >= position.first_key + position.n
    return from_tensor(position.keys(keep.bool())[:, None, None, :]) if whole else None


def _sliding_window_mask(closure: Mapping[str, Any], position: _MatrixPosition) -> Mask | None:
    """Return the mask of a sliding window to the left."""
    width = closure["sliding_window"]  # some models make the mask of a window of 0, and never use it
    return Window(width - 1, None, offset=position.shift) if width > 0 else None


def _window_to_both_sides(closure: Mapping[str, Any], position: _MatrixPosition) -> Mask | None:
    """Return the mask of a sliding window to both sides."""
    width = closure["sliding_window"]
    return Window(width, width, offset=position.shift) if width >= 0 else None


def _offset_rule(closure: Mapping[str, Any], position: _MatrixPosition) -> Mask | None:
    """Return the mask of a rule whose queries and keys begin at later positions."""
    first_query, first_key = position.first_query + closure["q_offset"], position.first_key + closure["kv_offset"]
    return _mask_of_rule(closure["mask_function"], position._replace(first_query=first_query, first_key=first_key))


_MASK_OF_OVERLAY: dict[str, Callable[[Mapping[str, Any], _MatrixPosition], Mask | None]] = {
    "sliding_window_overlay": _sliding_window_mask,
    "sliding_window_bidirectional_overlay": _window_to_both_sides,
    "chunked_overlay": _chunked_mask,
    "packed_sequence_mask_function": _packed_texts_mask,
    "blockwise_overlay": _image_blocks_mask,
    "padding_mask_function": _not_padding,
    "add_offsets_to_mask_function": _offset_rule,
}


def _padding_mask(attention_mask: Tensor, n: int, first_key: int) -> Mask | None:
    """Return the mask of a (batch, tokens) tensor of text and padding; None where all is text."""
    missing = n + first_key - attention_mask.shape[-1]
    keep = functional.pad(attention_mask.to(torch.bool), (0, max(missing, 0)))[:, first_key : first_key + n]
    if bool(keep.all()):
        return None
    count = keep.sum(-1)
    before = (keep.cumsum(-1) == 0).sum(-1)  # padding on the left
    after = (keep.flip(-1).cumsum(-1) == 0).sum(-1)
    if not bool((before + count + after == n).all()):  # padding between text, or nothing but padding
        return from_tensor(keep[:, None, None, :])
    # `Padding` takes the number of keys that are left without the padding of one side.
    if not bool(after.any()):
        return Padding(count, side="left")
    return Padding(n - after) if not bool(before.any()) else Padding(n - after) & Padding(n - before, side="left")


_CAUSAL_LAYERS = {"full_attention", "sliding_attention", None}


def mask_of_positions(module: nn.Module, query: Tensor, key: Tensor, given: dict[str, Any]) -> Mask:
    """Return the mask of a layer by its window and the positions of all tokens.

    Parameters
    ----------
    module : nn.Module
        The attention layer.
    query, key : Tensor, shape (batch, heads, n, d)
        Tokens of the whole text, and heads of one rank.
    given : dict
        What the layer passes on: ``position_ids`` of shape (1 or batch, n), which begin again with each document, and
        ``sliding_window``.

    Raises
    ------
    BackendError
        If these do not say what the mask is.
    """
    config, number, n = getattr(module, "config", None), getattr(module, "layer_idx", None), key.shape[2]
    layers = getattr(config, "layer_types", None)
    kind = layers[number] if layers and number is not None else None
    window = given.get("sliding_window", getattr(module, "sliding_window", None))
    if window is None and kind is None:
        window = getattr(config, "sliding_window", None)
    positions = given.get("position_ids")
    heads = query.shape[1] if world() > 1 else None
    for found, wrong in (
        ("a layer that is not causal", not getattr(module, "is_causal", False)),
        (f"a layer of {kind}", kind not in _CAUSAL_LAYERS or (kind == "sliding_attention" and window is None)),
        ("chunks", kind is None and getattr(config, "attention_chunk_size", None) is not None),
        (f"all {heads} heads, which it divides", heads == getattr(config, "num_attention_heads", 0)),
        (f"{query.shape[2]} queries and {n} keys", query.shape[2] != n),
        (f"no position_ids of {n} tokens", not isinstance(positions, Tensor) or positions.shape[-1] != n),
    ):
        if wrong:
            rule = "without a mask, a layer must be causal and have the positions of all tokens, as under Ulysses."
            fix = "attlas.distributed.context_parallel(mesh, model), which keeps the masks of the model."
            raise BackendError(rule, found, fix, layer=type(module).__name__)
    positions = torch.as_tensor(positions).reshape(-1, n)
    document = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
    mask: Mask = Causal() if window is None else Window(window - 1, 0)
    return mask & Documents(document) if bool(document.any()) else mask
