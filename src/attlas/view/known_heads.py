"""What the heads of a model are, where that was measured elsewhere than on the text that is shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from attlas.errors import AttlasError
from attlas.heads import MIXED, PATTERNS, Head, Pattern, classify
from attlas.heads.classification import (
    BLOCK_MEASURES,
    measure_entry,
    repeated_block,
    text_statistics,
)
from attlas.heads.naming import block_table
from attlas.recording import record
from attlas.recording.atlas import Atlas, Entry

_MOST_BLOCK_TOKENS = 128  # tokens of the random block that occurs twice, at most
_SAME_MEASURE = 2e-3  # measures of one model on one block differ by less, whatever the processor
_BY_NAME = {pattern.name: pattern for pattern in (*PATTERNS, MIXED)}


class KnownHead(NamedTuple):
    """The kinds of one head, the most telling first, and its measures by the names that `Pattern.measure` has."""

    kinds: tuple[str, ...]
    measures: dict[str, float]

    @classmethod
    def measured(cls, head: Head) -> KnownHead:
        """Return the kinds of a head, from its measures."""
        kinds = tuple(pattern.name for pattern in head.patterns)
        return cls(kinds, {pattern.measure: head.of(pattern) for pattern in PATTERNS})

    @property
    def pattern(self) -> Pattern:
        """The first kind."""
        return _BY_NAME[self.kinds[0]]

    @property
    def share(self) -> float:
        """The value of the measure that decides about the first kind; 0 for a mixed head."""
        return self.measures.get(self.pattern.measure, 0.0)

    @property
    def prominence(self) -> tuple[bool, float]:
        """Sort key for the most telling head, as that of `Head`."""
        return self.pattern.measure == "induction", self.share


@dataclass(frozen=True)
class KnownHeads:
    """What the heads of a model are, whatever text is shown.

    Parameters
    ----------
    on : {"text", "corpus", "random"}
        What it was measured on: another text, the texts of a corpus, or random tokens that occur twice.
    name : str
        What the text or the corpus is called.
    heads : mapping of (int, int) to KnownHead
        By layer and head.
    """

    on: Literal["text", "corpus", "random"]
    name: str = ""
    heads: Mapping[tuple[int, int], KnownHead] = field(default_factory=dict)

    def of(self, entry: Entry, index: int) -> KnownHead | None:
        """Return the kinds of a head of an entry; None for cross-attention and for heads that were not measured."""
        return self.heads.get((entry.layer, entry.heads[index])) if entry.kind == "self" else None


def heads_of_text(atlas: Atlas, name: str) -> KnownHeads | None:
    """Return the kinds of the heads of a recording on its own text; None where they are not known of all."""
    entries = [entry for entry in atlas.entries if entry.kind == "self" and not entry.is_linear]
    measured = [head for entry in entries for head in measure_entry(atlas, entry)]
    if not measured or len(measured) < sum(len(entry.heads) for entry in entries):
        return None
    return KnownHeads("text", name, _scores_by_place(measured))


def heads_of_corpus(columns: Mapping[str, list[Any]], name: str) -> KnownHeads:
    """Return the kinds of the heads of a corpus, over all of its texts.

    Parameters
    ----------
    columns : mapping of str to list
        The table of the corpus.
    name : str
        What the corpus is called.
    """
    measures = set(Head.__dataclass_fields__) - {"layer", "head", "tokens"}
    found = {}
    for row, place in enumerate(zip(columns["layer"], columns["head"], strict=True)):
        numbers = {name: _finite_number(columns[name][row]) if name in columns else 0.0 for name in measures}
        length = round(columns["queries"][row] / max(columns["texts"][row], 1))
        head = Head(layer=place[0], head=place[1], tokens=length, **numbers)
        kind = columns["kind"][row]
        if kind in _BY_NAME:  # what the page of the corpus says comes first
            others = [pattern.name for pattern in classify(head) if pattern.measure and pattern.name != kind]
            found[place] = KnownHead((kind, *others), KnownHead.measured(head).measures)
    return KnownHeads("corpus", name, found)


class OnBlock(NamedTuple):
    """The heads of a model on a random block that occurs twice: what they are, and the details of a recording."""

    known: KnownHeads
    details: dict[str, Any]


def heads_on_block(model: nn.Module, forward: Callable[[Tensor], object]) -> OnBlock | None:
    """Measure every head of a model on a random block of tokens that occurs twice.

    Parameters
    ----------
    model : nn.Module
        A model of transformers.
    forward : callable
        Runs the model on token ids, shape (blocks, 2 * period).

    Returns
    -------
    OnBlock or None
        None where the model cannot read such a block, or its layers do not see all of it.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return None
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or 2 * _MOST_BLOCK_TOKENS
    period = min(_MOST_BLOCK_TOKENS, limit // 2)
    ids = repeated_block(config.vocab_size, period)
    try:
        with record(model, statistics=text_statistics(ids), linear=False) as atlas:
            forward(ids)  # `atlas` records it; the output is not needed
    except (AttlasError, RuntimeError, ValueError, TypeError):
        return None
    entries = [entry for entry in atlas.entries if entry.kind == "self"]
    if not entries or any(entry.shape[2:] != (2 * period, 2 * period) or entry.matrix is None for entry in entries):
        return None
    details = block_table(entries, period)
    atlas.details["block"] = details
    measured = [head for entry in entries for head in measure_entry(atlas, entry)]
    return OnBlock(KnownHeads("random", heads=_scores_by_place(measured)), details)


def is_of_same_model(atlas: Atlas, details: Mapping[str, Any]) -> bool:
    """Return whether a recording is of the model that gave these measures on the random block."""
    block = atlas.details.get("block")
    if not isinstance(block, dict) or block.get("period") != details["period"]:
        return False
    for name in BLOCK_MEASURES:
        recorded, wanted = block.get(name), details[name]
        try:
            same = torch.allclose(torch.tensor(recorded), torch.tensor(wanted), atol=_SAME_MEASURE, rtol=0.0)
        except (TypeError, ValueError, RuntimeError):  # no table of numbers, or one of another size
            return False
        if not same:
            return False
    return True


def _scores_by_place(heads: Iterable[Head]) -> dict[tuple[int, int], KnownHead]:
    return {(head.layer, head.head): KnownHead.measured(head) for head in heads}


def _finite_number(value: float | None) -> float:
    return float(value) if value is not None and math.isfinite(value) else 0.0
