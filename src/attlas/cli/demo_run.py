"""Runs a model on a text and records it for the demo, in linear memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import attlas
from attlas.atlas import Atlas
from attlas.cli import head_statistics
from attlas.cli.closeup import closeup_window
from attlas.cli.generation import run_on_repeated_block
from attlas.cli.loading import LoadedModel, texts
from attlas.cli.peak_memory import Peak
from attlas.cli.terminal import Terminal
from attlas.heads import Head
from attlas.heads.classification import classify_entry
from attlas.matrix import AttentionMatrix
from attlas.recording.metadata import token_bytes


@dataclass(frozen=True, eq=False)
class DemoResult:
    """The run of one model on one text.

    Parameters
    ----------
    atlas : Atlas
        The recorded run with its statistics.
    ids : Tensor of int, shape (n,)
        Tokens of the text.
    heads : tuple of Head
        Measures of every head, layer by layer.
    repeated : tuple of AttentionMatrix
        The attention of each layer to a random block of tokens that occurs twice.
    loss : float
        Mean negative log likelihood of the text's tokens, nats.
    held : int
        Bytes of the queries, keys and log-sum-exps that are kept.
    """

    atlas: Atlas
    ids: Tensor
    heads: tuple[Head, ...]
    repeated: tuple[AttentionMatrix, ...]
    loss: float
    held: int

    @property
    def title(self) -> str:
        """The model and the text."""
        return f"{self.atlas.model} reads {len(self.atlas.tokens or ()):,} tokens of {self.atlas.details['source']}"

    @property
    def most_telling(self) -> Head:
        """The strongest induction head, or without one the most peculiar head."""
        return max(self.heads, key=lambda head: head.prominence)

    def closeup(self) -> tuple[range, Tensor]:
        """Return a part of the text and the weights of the most telling head there; NaN where nothing may attend."""
        head = self.most_telling
        entry = self.atlas.entry(head.layer)
        window, _ = closeup_window(entry, head.head, self.ids)
        span, A = slice(window.start, window.stop), entry.need_matrix("attlas demo")[0, head.head]
        return window, A[span, span].masked_fill(A.logits[span, span] == -torch.inf, torch.nan).float().cpu()


def read(
    loaded: LoadedModel,
    ids: Tensor,
    source: str,
    command: str,
    terminal: Terminal,
    *,
    held_out: bool = False,
    folder: Path | None = None,
) -> DemoResult:
    """Run the model and record everything that the demo shows.

    Parameters
    ----------
    loaded : LoadedModel
        Model and tokenizer.
    ids : Tensor of int, shape (n,)
        Tokens of the text.
    source : str
        Name of the text.
    command : str
        What was typed.
    terminal : Terminal
        Where progress is shown.
    held_out : bool
        Whether the text was kept out of the model's training.
    folder : Path, optional
        Where the run is saved; a run that is there is replaced.

    Raises
    ------
    RecordingError
        If the attention of the model cannot be recorded.
    """
    begin = time.perf_counter()
    words = list(texts(loaded.tokenizer, ids))
    with terminal.step(f"running {loaded.name} on {len(ids):,} tokens"), torch.no_grad():
        with attlas.record(loaded.model, tokens=words) as atlas:
            logits = loaded.model(ids[None].to(loaded.model.device), use_cache=False).logits[0].cpu()
        loss = float(functional.cross_entropy(logits[:-1].float(), ids[1:]))
        del logits  # the largest thing here; it is not attention's memory
    with terminal.step("running it on random tokens, twice"):
        repeated = run_on_repeated_block(loaded.model, len(ids))
    peak = Peak()
    count = sum(len(entry.heads) for entry in atlas.entries)
    with terminal.step(f"reading {count} heads", len(atlas.entries)) as tick:
        atlas.collect(*head_statistics.selected(None, ids, count), progress=tick)
        pieces = token_bytes(loaded.tokenizer, ids.tolist())
        atlas.details |= {"source": source, "command": command, "unseen": held_out, "token_bytes": pieces}
        atlas.details |= {"block": head_statistics.block_details(repeated), "peak": peak.bytes}
    atlas.details["seconds"] = time.perf_counter() - begin
    atlas.model = loaded.name
    if folder is not None:
        with terminal.step("saving the run"):
            atlas.save(folder, overwrite=True)
    heads = tuple(head for entry in atlas.entries for head in classify_entry(atlas, entry))
    held = sum(t.nbytes for A in atlas for t in (A.problem.q, A.problem.k, A.lse))
    return DemoResult(atlas, ids, heads, repeated, loss, held)
