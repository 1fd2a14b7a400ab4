"""Runs a model on a text and collects the statistics of the demo, layer by layer and in linear memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from attlas import pictures, stats
from attlas.atlas import Atlas, Entry
from attlas.atlas.entry import statistic_names
from attlas.cli.demo_result import DemoResult, MemoryCost, closeup_window, most_telling
from attlas.cli.head_statistics import block_details, selected, side_of
from attlas.cli.loading import LoadedModel, texts
from attlas.cli.peak_memory import Peak
from attlas.cli.terminal import Terminal
from attlas.errors import RecordingError
from attlas.heads import Head, repeated_block
from attlas.heads.classification import from_statistics, measure_block
from attlas.heads.from_recording import STATISTIC_NAMES
from attlas.matrix import AttentionMatrix
from attlas.recording.metadata import token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["read"]

_PERIOD = 128  # length of the random block that occurs twice


@dataclass(frozen=True, eq=False)
class _Layer:
    """The part of a `DemoResult` from one layer, on the CPU; the first axis is the heads."""

    heads: tuple[Head, ...]
    statistics: dict[str, Any]
    block: dict[str, Tensor]
    map: Tensor
    repeat: Tensor
    values: Tensor
    indices: Tensor


def read(
    loaded: LoadedModel,
    ids: Tensor,
    source: str,
    command: str,
    terminal: Terminal,
    *,
    held_out: bool = False,
    keep: Path | None = None,
) -> DemoResult:
    """Run the model and collect everything that the demo shows.

    Parameters
    ----------
    loaded : LoadedModel
        Model and tokenizer.
    ids : Tensor of int, shape (n,)
        Tokens of the text.
    source : str
        Name of the text.
    command : str
        What to type to get the same.
    terminal : Terminal
        Where progress is shown.
    unseen : bool
        Whether the text was kept out of the model's training.
    keep : Path, optional
        Folder where the run is saved as an atlas; one that is there is replaced.

    Raises
    ------
    RecordingError
        If the model does not take its attention from transformers' interface.
    """
    begin, n, period = time.perf_counter(), len(ids), min(_PERIOD, len(ids) // 2)
    with terminal.step(f"running {loaded.name} on {n:,} tokens"):
        attentions, logits = _run(loaded.model, ids[None])
        loss = float(functional.cross_entropy(logits[0, :-1].float(), ids[1:]))
    with terminal.step("running it on random tokens, twice"):
        repeats, logits = _run(loaded.model, repeated_block(logits.shape[-1], period))
        del logits  # the largest thing here; it is not attention's memory
    peak = Peak()
    layers: list[_Layer] = []
    count = len(attentions) * attentions[0].shape[1]
    statistics, side = selected(None, ids, count, "demo"), side_of(count)
    with terminal.step(f"reading {count} heads", len(attentions)) as tick:
        for A, R in zip(attentions, repeats, strict=True):
            layers.append(_layer(len(layers), A, R, ids, period, statistics, side))
            tick()
    heads = tuple(head for layer in layers for head in layer.heads)
    values, indices = torch.stack([x.values for x in layers]), torch.stack([x.indices for x in layers])
    shown = most_telling(heads)
    window, _ = closeup_window(values[shown.layer, shown.head], indices[shown.layer, shown.head], ids)
    span = slice(window.start, window.stop)
    closeups = torch.stack([A[0, :, span, span].float().cpu() for A in attentions])
    took, grown = time.perf_counter() - begin, peak.bytes
    tokens = texts(loaded.tokenizer, ids)
    if keep is not None:
        details: dict[str, Any] = {
            "source": source,
            "command": command,
            "seconds": took,
            "peak": grown,
            "unseen": held_out,
        }
        details["token_bytes"] = token_bytes(loaded.tokenizer, ids.tolist())
        details["block"] = block_details([x.block for x in layers], period)
        with terminal.step("saving the run"):
            _atlas(loaded, attentions, [x.statistics for x in layers], ids, tokens, details).save(keep, overwrite=True)
    allowed = torch.stack([A.logits[0, :, span, span].float().cpu() for A in attentions]) > -torch.inf
    return DemoResult(
        model=loaded.name,
        source=source,
        held_out=held_out,
        tokens=tokens,
        layers=len(layers),
        per_layer=len(layers[0].heads),
        heads=heads,
        maps=torch.stack([layer.map for layer in layers]),
        values=values,
        indices=indices,
        window=window,
        closeups=closeups.masked_fill(~allowed, torch.nan),
        period=period,
        repeats=torch.stack([layer.repeat for layer in layers]),
        loss=loss,
        cost=MemoryCost(len(heads), n, len(heads) * n * n * 4, _held(attentions), grown, took),
    )


@torch.no_grad()
def _run(model: PreTrainedModel, ids: Tensor) -> tuple[tuple[AttentionMatrix, ...], Tensor]:
    """Return the lazy attention of each layer, and the logits."""
    output = model(ids.to(model.device), output_attentions=True, use_cache=False)
    attentions = tuple(output.attentions or ())
    if not attentions or not all(isinstance(A, AttentionMatrix) for A in attentions):
        raise RecordingError(
            "demo",
            "the model must take its attention from the interface of transformers.",
            found=f"{type(model).__name__} computes it itself",
            fix="a GPT-2, Llama, Mistral, Qwen or Gemma model",
        )
    return attentions, output.logits.cpu()


def _atlas(
    loaded: LoadedModel,
    attentions: tuple[AttentionMatrix, ...],
    statistics: list[dict[str, Any]],
    ids: Tensor,
    tokens: tuple[str, ...],
    details: dict[str, Any],
) -> Atlas:
    """Return the run as a recording, which other commands can open."""
    n = len(ids)
    heads = tuple(range(attentions[0].shape[1]))
    entries = [
        Entry(f"layers.{layer}", layer, "self", 0, heads, (0, n), 0, (1, len(heads), n, n), A, results)
        for layer, (A, results) in enumerate(zip(attentions, statistics, strict=True))
    ]
    return Atlas(entries, model=loaded.name, ids=ids[None].cpu(), tokens=list(tokens), details=details)


def _layer(
    layer: int,
    A: AttentionMatrix,
    R: AttentionMatrix,
    ids: Tensor,
    period: int,
    statistics: list[stats.Statistic],
    side: int,
) -> _Layer:
    results = dict(zip(statistic_names(statistics), A.collect(*statistics), strict=True))
    block = measure_block(R, period)
    largest = results["top_k"]
    return _Layer(
        heads=from_statistics([results[name] for name in STATISTIC_NAMES], ids, block, layer),
        statistics=results,
        block=block,
        map=results["picture"][0].float().cpu(),
        repeat=pictures.blocks(R[0], side),
        values=largest.values[0].float().cpu(),
        indices=largest.indices[0].cpu(),
    )


def _held(attentions: tuple[AttentionMatrix, ...]) -> int:
    """Return the bytes that lazy matrices keep alive: whole storages, since queries are often views into one."""
    tensors = [t for A in attentions for t in (A.problem.q, A.problem.k, A.lse)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
