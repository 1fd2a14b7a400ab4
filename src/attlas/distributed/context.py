"""Models of transformers whose text is divided over ranks: each rank reads its tokens, and attends to all."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from attlas.distributed.agree import agreed, gathered
from attlas.distributed.attend import attend
from attlas.distributed.layout import of_shape
from attlas.distributed.matrix import DistributedMatrix
from attlas.engine.plan import Plan
from attlas.errors import BackendError, DtypeError, ShapeError, kind
from attlas.masks import Mask
from attlas.recording.attn_implementation import attending_with_attlas
from attlas.recording.parallel import sharded_text
from attlas.scores import Score

_ERROR_WHERE = "context_parallel()"
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_RECURRENT_PATTERN = re.compile(r"mamba|rwkv|recurrent|deltanet|linearattention|shortconv", re.IGNORECASE)


@contextmanager
def context_parallel(
    mesh: DeviceMesh, model: nn.Module, *, order: Tensor | None = None, plan: Plan | None = None
) -> Iterator[None]:
    """Let each rank run a model on its part of a text; every attention layer sees the whole text.

    Parameters
    ----------
    mesh : DeviceMesh
        The ranks, of one dimension: a dimension of a larger mesh is ``mesh["name"]``.
    model : nn.Module
        A model of transformers. It attends with attlas for the time of the block.
    order : Tensor, optional, shape (n,)
        Position in the text of each token, where ranks have the tokens in another order than that of the text, such
        as `head_tail_order`.
    plan : Plan, optional
        How each layer attends: its `gathered_bytes` is the memory for the keys and values that a layer gathers at a
        time, and keeps for its backward.

    Yields
    ------
    None
        The block, in which the model is called.

    Raises
    ------
    ShapeError
        In the block, on all ranks, if the parts are not those of ``torch.chunk``, or the mesh has several dimensions.
    DtypeError
        If `model` is no module.
    BackendError
        If the model has layers, positions or masks that mix tokens in another way, or is called with a cache, labels
        without `shift_labels`, or a 4-D mask.

    See Also
    --------
    attend : what each layer does, and what is sent.

    Notes
    -----
    Each rank calls the model with its part of ``input_ids``, ``attention_mask`` and ``position_ids``:
    ``ids.chunk(ranks, dim=1)[rank]``, or the same of ``ids[:, order]``. Without ``position_ids`` the tokens are
    numbered through the whole text. Positions that begin again begin another document, as in transformers, where there
    is no attention mask. Causal masks, sliding windows, chunks, documents and padding hold at positions of the whole
    text. Outputs, logits among them, are those of the rank's tokens; ``outputs.attentions`` are `DistributedMatrix`.

    No cache is kept, so ``model.generate`` is refused. Gradients of parameters are those of the rank's own loss: sum
    them over the ranks if each loss is a sum over its tokens, as DDP and FSDP do up to the factor of their mean. The
    target of the last token is on the next rank, so labels are taken as ``shift_labels`` only.

    Sent: for each forward pass the positions and the mask of all tokens, for each layer the keys and values of all.

    Examples
    --------
    >>> import torch
    >>> from attlas.distributed import context_parallel
    >>> from torch.distributed import HashStore, destroy_process_group, init_process_group
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from transformers import MistralConfig, MistralForCausalLM
    >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 20}
    >>> heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 5}
    >>> model = MistralForCausalLM(MistralConfig(**sizes, **heads))
    >>> ids = torch.arange(12)[None]
    >>> with context_parallel(init_device_mesh("cpu", (1,)), model):
    ...     model(ids.chunk(1, dim=1)[0]).logits.shape
    torch.Size([1, 12, 20])
    >>> destroy_process_group()
    """
    if not isinstance(model, nn.Module):
        raise DtypeError(
            "model must be an nn.Module.", kind(model), "context_parallel(mesh, model)", where=_ERROR_WHERE
        )
    if mesh.ndim != 1:
        fix = 'context_parallel(mesh["name"], model)'
        raise ShapeError("the mesh must have one dimension.", f"{mesh.ndim} dimensions", fix, where=_ERROR_WHERE)
    _check_model(model)
    text = _PassText(mesh, order, plan)
    hooks = [
        model.register_forward_pre_hook(text.begin, with_kwargs=True),
        model.register_forward_hook(text.end),
    ]
    try:
        with sharded_text.held(text), attending_with_attlas(model):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _context_error(rule: str, found: str, fix: str) -> BackendError:
    """Return a BackendError of `context_parallel`."""
    return BackendError(rule, found, fix, where=_ERROR_WHERE)


def _check_model(model: nn.Module) -> None:
    """Raise a BackendError where tokens of a model meet outside its attention, or it numbers positions by itself."""
    one = "run it on one process."
    if hasattr(model, "_orig_mod"):
        raise _context_error("the model must run eagerly.", "torch.compile", "context_parallel(mesh, model._orig_mod)")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        rule = "the model must take position_ids, so that tokens are numbered through the whole text."
        raise _context_error(rule, type(model).__name__, one)
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.RNNBase) or _RECURRENT_PATTERN.search(type(module).__name__):
            rule = "only attention may mix tokens: other layers would see the tokens of one rank."
            raise _context_error(rule, f"{type(module).__name__} at {path}", one)
        config = getattr(module, "config", None)
        strange = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
        if strange:
            raise _context_error("every layer must be one of attention.", ", ".join(sorted(map(str, strange))), one)
        kinds = re.findall(r"'rope_type': '(\w+)'", str(getattr(config, "rope_parameters", "")))
        if {"dynamic", "longrope"} & set(kinds):
            rule = "the rotary embedding must not depend on the largest position of one rank."
            raise _context_error(rule, f"rope_type {kinds}", one)


class _PassText:
    """The text of one forward pass, of which this rank has a part. The attention function and the mask ask it.

    Attributes
    ----------
    n : int
        Number of tokens of the whole text.
    positions : Tensor of int64, shape (batch, n)
        Position ids of all tokens, in the order of the text.
    documents : Tensor of int64 or None, shape (batch, n)
        Number of the document of each token, where several are packed.
    padding : Tensor of bool or None, shape (batch, n)
        Attention mask of all tokens.
    """

    def __init__(self, mesh: DeviceMesh, order: Tensor | None, plan: Plan | None) -> None:
        self.mesh, self.order, self.plan = mesh, order, plan
        # The function that makes errors, for the modules that ask this object.
        self.refused = _context_error
        # Of the pass: sequences, tokens of the whole text, and how many attentions have run.
        self.batch, self.n, self.layers = 0, 0, 0
        self.positions: Tensor = torch.zeros(1, 0, dtype=torch.int64)
        self.documents: Tensor | None = None
        # Whether positions of this rank's tokens jump, as between packed documents.
        self.packs = False
        self.padding: Tensor | None = None

    # ------------------------------------------------------------------------------------------------ a forward pass

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Gather what all ranks must know of the text, and return the arguments of the call; a forward pre-hook."""
        if torch.compiler.is_compiling():
            raise _context_error("the model must run eagerly.", "torch.compile", "call the model that is not compiled.")
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        self.layers = 0

        def own() -> tuple[tuple[int, ...], Tensor | None, Tensor | None]:
            """Return what the other ranks must know of this rank's text."""
            return self._checked_text(given)

        told = list(gathered(self.mesh, own).values())  # of each rank: sizes, positions, mask
        rank, sizes = self.mesh.get_local_rank(), [shape[1] for shape, _, _ in told]
        self.batch, self.n = told[0][0][0], sum(sizes)
        # Raises on all ranks where their batches, masks or positions do not fit together.
        self._raise_unless_one_text(told, sizes)
        every = torch.arange(self.n) if self.order is None else self.order.cpu()
        if told[0][1] is None:
            positions = every[None]
        else:
            positions = torch.cat([part for _, part, _ in told if part is not None], dim=1)
        start = sum(sizes[:rank])
        device = given["input_ids" if given.get("input_ids") is not None else "inputs_embeds"].device
        given["position_ids"] = positions[:, start : start + sizes[rank]].to(device)
        back = slice(None) if self.order is None else every.argsort()  # to the order of the text
        self.positions = positions[:, back].expand(self.batch, -1).to(device)
        masks = [mask for *_, mask in told if mask is not None]
        self.padding = torch.cat(masks, dim=1)[:, back].to(device) if masks else None
        # transformers looks for documents where there is no mask.
        # A position that does not follow the one before begins a document.
        jumps = (self.positions.diff(dim=1, prepend=self.positions[:, :1] - 1) != 1).cumsum(1)
        self.packs = bool((positions[:, start : start + sizes[rank]].diff(dim=1) != 1).any())
        self.documents = jumps if self.padding is None and bool(jumps.any()) else None
        # All arguments by name; a cache would hold the keys of one rank only.
        return (), given | {"use_cache": False}

    def _checked_text(self, given: dict[str, Any]) -> tuple[tuple[int, ...], Tensor | None, Tensor | None]:
        """Return shape, positions and mask of this rank's tokens; raise where the call cannot be divided over ranks."""
        if given.get("past_key_values") is not None or given.get("use_cache"):
            rule = "a cache would have the keys of one rank only, so text is not generated here."
            raise _context_error(
                rule, "use_cache=True, or past_key_values", "use_cache=False, or generate on one process."
            )
        if given.get("labels") is not None and given.get("shift_labels") is None:
            rule, found = "the target of the last token of a rank is on the next rank.", "labels"
            raise _context_error(rule, found, "shift_labels=, the targets of this rank's tokens, beside labels.")
        name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
        tokens, shown = given.get(name), {}
        if not isinstance(tokens, Tensor):
            found = "neither input_ids nor inputs_embeds"
            raise _context_error("the model must be called with its tokens.", found, "input_ids=")
        for name in ("position_ids", "attention_mask"):
            t = given.get(name)
            if t is not None and not (isinstance(t, Tensor) and t.ndim == 2 and t.shape[1] == tokens.shape[1]):
                found = f"{name}: {tuple(t.shape)}" if isinstance(t, Tensor) else f"{name}: {kind(t)}"
                fix = f"{name}.chunk(ranks, dim=1)[rank], with two axes."
                raise _context_error(f"{name} must be that of this rank's {tokens.shape[1]} tokens.", found, fix)
            shown[name] = None if t is None else t.detach().cpu()
        mask = shown["attention_mask"]
        return tuple(tokens.shape[:2]), shown["position_ids"], None if mask is None else mask.bool()

    def _raise_unless_one_text(self, told: list[Any], sizes: list[int]) -> None:
        """Raise, on all ranks, if the parts do not make one text; `told` has what `_checked_text` returned on each."""
        wanted = [len(part) for part in torch.arange(self.n).chunk(len(sizes))]
        if sizes != wanted:
            rule, fix = "each rank must have the tokens of torch.chunk.", "ids.chunk(ranks, dim=1)[rank]"
            raise ShapeError(rule, f"parts of {sizes} tokens, not {wanted}", fix, where=_ERROR_WHERE)
        for which, name in ((0, "sequences"), (1, "position_ids"), (2, "attention_mask")):
            kinds = {part[0][0] if which == 0 else None if part[which] is None else len(part[which]) for part in told}
            if len(kinds) > 1:
                rule = f"all ranks must have the same number of {name}."
                raise ShapeError(rule, f"{kinds}", f"{name} on all ranks, or on none.", where=_ERROR_WHERE)
        if self.order is not None and self.order.shape != (self.n,):
            rule, fix = "order must have one position for each token.", "order=head_tail_order(n, ranks)"
            raise ShapeError(rule, f"{self.n} tokens", fix, order=self.order, where=_ERROR_WHERE)

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """Check that the model has attended with attlas; a forward hook."""
        if not self.layers:
            rule, fix = "the attention layers of the model must ask transformers for their function.", "another model."
            raise _context_error(rule, f"no layer of {type(model).__name__} attended with attlas", fix)

    # -------------------------------------------------------------------------------------------------------- a layer

    @property
    def left_padding(self) -> Tensor:
        """Number of keys before each text, shape (batch,)."""
        if self.padding is None:
            return torch.zeros(self.batch, dtype=torch.int64, device=self.positions.device)
        return (self.padding.cumsum(1) == 0).sum(1)

    def check_documents(self, seen: bool) -> None:
        """Raise, on all ranks, if the model does not look for documents in the positions, as some models do not.

        Parameters
        ----------
        seen : bool
            Whether the mask of this rank's tokens has documents; it must, where positions begin again in them.
        """

        def check() -> None:
            """Raise an error where positions begin again and no mask has divided the documents."""
            if self.packs and not seen:
                rule = "positions begin again, and the model does not take that for another document."
                fix = "give attention_mask=torch.ones_like(input_ids) if it is one text."
                raise _context_error(rule, "a mask without documents", fix)

        agreed(self.mesh, check)

    def check(
        self,
        mask: Tensor | None,
        q: Tensor,
        k: Tensor,
        dropout: float,
        sinks: Tensor | None,
        bias: Tensor | None,
        chosen: Mask | None,
    ) -> None:
        """Raise an error for what a layer asks and context_parallel cannot give.

        The answer is the same on all ranks.
        """
        for found, wrong in (
            ("a layer without a mask", mask is None),
            (f"{q.shape[2]} queries and {k.shape[2]} keys", q.shape[2] != k.shape[2]),
            ("dropout in the attention", dropout > 0),
            ("a sink for each query", sinks is not None),
            ("a bias of positions", bias is not None),
            ("keys that were chosen for each query", chosen is not None),
        ):
            if wrong:
                rule = "a layer must attend to the text itself, with the mask of the model."
                raise _context_error(rule, found, "run the model on one process.")

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, score: Score, mask: Mask | None, sink: Tensor | None
    ) -> tuple[Tensor, DistributedMatrix]:
        """Return the pooled values of this rank's queries, shape (batch, heads, m, e), and the matrix of all."""
        self.layers += 1
        if sink is not None and sink.requires_grad:
            # attend() sums its gradient over the ranks, and so does whoever trains: the same numbers, and a gradient
            # that is divided by the number of ranks.
            sink = sink.detach() + (sink - sink.detach()) / self.mesh.size()
        whole_q, whole_k, whole_v = (self._as_shard(t) for t in (q, k, v))
        A = attend(whole_q, whole_k, score, mask, sink=sink, plan=self.plan, order=self.order)
        return (A @ whole_v).to_local(), A

    def _as_shard(self, t: Tensor) -> DTensor:
        """Return tokens of this rank, (batch, heads, m, d), as its shard of a DTensor of the whole text."""
        return of_shape(t.contiguous(), self.mesh, [Shard(2)], (*t.shape[:2], self.n, t.shape[3]))
