"""What would be different: a text is read again without some heads, with tokens hidden, or with other words."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attlas.errors import AttlasError
from attlas.heads.differences import Changes, aligned, changes
from attlas.heads.evaluation import evaluating
from attlas.interventions import Ablate, Intervention, Suppress, intervene
from attlas.recording import record
from attlas.recording.atlas import Atlas
from attlas.recording.metadata import token_bytes
from attlas.view.codes import finite_or_none
from attlas.view.exact import Wanted, check_wanted
from attlas.view.parameters import Parameters, QuestionError
from attlas.view.source import Source
from attlas.view.tokens import Text, pieces_from

TRIALS = ("without", "other")  # questions about a text that is read again
_CELLS = 1 << 26  # cells of both recordings that are compared at most; of longer texts a sample of the queries
_LISTED = 24  # heads that are named, with
_NAMED_CELLS = 3  # pairs of tokens of each
_LIKELIEST = 3  # tokens that may come next, of which probabilities are told
_CONTINUED = 12  # tokens that are written on
_LOGITS = 1 << 24  # that are brought to float32 at a time
_READ, _WRITTEN = 0.35, 0.5  # shares of the progress after the first text was read, and after the second one was
_PATIENCE = 0.1  # seconds between two looks whether somebody still waits


@dataclass(frozen=True)
class Reading:
    """One text as a model read it.

    Parameters
    ----------
    atlas : Atlas
        The recording.
    ids : list of int
        Its tokens.
    probabilities : list of float
        Of each token given those before it; that of the first is NaN.
    likeliest : list of (int, float)
        Tokens that may come next, with their probabilities.
    written : list of int
        The likeliest continuation.
    """

    atlas: Atlas
    ids: list[int]
    probabilities: list[float]
    likeliest: list[tuple[int, float]]
    written: list[int]


@contextlib.contextmanager
def after_each_part(model: nn.Module, ran: Callable[[int, int], object]) -> Iterator[None]:
    """Call a function after each module without children, with how many have run and how many there are."""
    parts = [module for module in model.modules() if not any(module.children())]
    count = 0

    def note(*_: Any) -> None:
        """Count one module."""
        nonlocal count
        count = min(count + 1, len(parts))
        ran(count, len(parts))

    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.callback(part.register_forward_hook(note).remove)
        yield


@torch.no_grad()
def read(model: Any, ids: Sequence[int], what: Intervention | None, tell: Callable[[float], object]) -> Reading:
    """Return how a model reads a text and goes on, with an intervention or as it is.

    Parameters
    ----------
    model : nn.Module
        A language model of transformers.
    ids : sequence of int
        Token ids of the text.
    what : Intervention, optional
        What is changed; the continuation is written with it, too.
    tell : callable
        Is told the share that is done, from 0 to 1; what it raises ends the reading.

    Raises
    ------
    QuestionError
        409 if the model predicts no next token, or its attention cannot be changed.
    """
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise QuestionError(409, "this model does not say how likely each next token is")
    text = torch.tensor([list(ids)], device=model.device)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(evaluating(model))
            stack.enter_context(intervene(model, [] if what is None else [what]))
            with after_each_part(model, lambda done, total: tell(0.8 * done / total)), record(model) as atlas:
                output = model(text, use_cache=True)
            last = output.logits[0, -1].float().softmax(dim=-1)
            top = last.topk(min(_LIKELIEST, len(last)))
            likeliest = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            written = _continuation(model, int(last.argmax()), output, tell)
    except AttlasError as error:
        raise QuestionError(409, f"{error.rule} {error.found}".strip() or str(error)) from error
    atlas.ids = text.cpu()
    return Reading(atlas, list(ids), _probabilities(output.logits[0], text[0]), likeliest, written)


def _probabilities(logits: Tensor, ids: Tensor) -> list[float]:
    """Return the probability of each token given those before it, NaN for the first."""
    found = [math.nan]
    step = max(_LOGITS // logits.shape[-1], 1)
    for start in range(0, len(ids) - 1, step):
        stop = min(start + step, len(ids) - 1)
        loss = functional.cross_entropy(logits[start:stop].float(), ids[start + 1 : stop + 1], reduction="none")
        found += (-loss).exp().tolist()
    return found


def _continuation(model: Any, first: int, output: Any, tell: Callable[[float], object]) -> list[int]:
    """Return the likeliest tokens after a text, given the output for it; one alone where the model keeps no cache."""
    written, past = [first], getattr(output, "past_key_values", None)
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = set(ends if isinstance(ends, list) else [ends])
    while past is not None and len(written) < _CONTINUED and written[-1] not in ends:
        tell(0.8 + 0.2 * len(written) / _CONTINUED)
        step = model(torch.tensor([written[-1:]], device=model.device), past_key_values=past, use_cache=True)
        past = getattr(step, "past_key_values", None)
        written.append(int(step.logits[0, -1].argmax()))
    return written


class Trials:
    """Answers what a text would be like without some heads, or with other words.

    Parameters
    ----------
    loaded : callable
        Returns the model and its tokenizer.
    tokenized : callable
        Returns the ids of a text; raises a QuestionError where it is too long.

    Notes
    -----
    One question is computed at a time. The two readings of a text as it is that came last are kept, so that a second
    question about it costs one reading.
    """

    def __init__(self, loaded: Callable[[], tuple[Any, Any]], tokenized: Callable[[str], list[int]]) -> None:
        self._loaded, self._tokenized = loaded, tokenized
        self._plain: OrderedDict[tuple[int, ...], Reading] = OrderedDict()
        self._lock = threading.Lock()
        self.share: float | None = None  # how far the question is that is computed; None while there is none
        self.second = ""  # the text that the page sent last, to be compared with the one that is shown

    @property
    def busy(self) -> bool:
        """Whether a question is computed."""
        return self._lock.locked()

    def without(self, source: Source, ids: Sequence[int], params: Parameters, wanted: Wanted) -> dict[str, Any]:
        """Return what changes without the heads and the tokens of a question.

        Parameters
        ----------
        source : Source
            What the page shows.
        ids : sequence of int
            Its tokens.
        params : Parameters
            ``heads``, as in "0.3,2.4": entry and head; `start` and `stop`: tokens that later ones do not see.
        wanted : callable, optional
            Returns whether somebody still waits.
        """
        chosen = _heads_of(source, params)
        span = params.span("start", "stop", len(ids)) if params.has("start") else None
        if span is not None and not len(span):
            raise QuestionError(400, "name at least one token to hide")
        if span is not None and span.stop >= len(ids):
            raise QuestionError(400, "no token comes after the last one that is hidden")
        what: Intervention
        if span is not None:
            what = Suppress(heads=chosen or None, queries=slice(span.stop, None), keys=(span.start, span.stop))
        elif chosen:
            what = Ablate(heads=chosen)
        else:
            raise QuestionError(400, "choose a head or tokens first")
        with self._one_at_a_time(wanted) as tell:
            before = self._read_plain(ids, lambda share: tell(_READ * share))
            model, tokenizer = self._loaded()
            after = read(model, ids, what, lambda share: tell(_READ + (_WRITTEN - _READ) * share))
            return self._told(source, tokenizer, before, after, tell)

    def other(self, source: Source, ids: Sequence[int], wanted: Wanted) -> dict[str, Any]:
        """Return what changes with the words of the text that the page sent last, `second`."""
        if not self.second.strip():
            raise QuestionError(400, "type a text first")
        with self._one_at_a_time(wanted) as tell:
            before = self._read_plain(ids, lambda share: tell(_READ * share))
            _, tokenizer = self._loaded()
            second = self._tokenized(self.second)
            after = self._read_plain(second, lambda share: tell(_READ + (_WRITTEN - _READ) * share))
            return self._told(source, tokenizer, before, after, tell)

    @contextlib.contextmanager
    def _one_at_a_time(self, wanted: Wanted) -> Iterator[Callable[[float], None]]:
        """Wait for the question before; give the function that notes the progress, and ends a question nobody needs."""
        while not self._lock.acquire(timeout=_PATIENCE):
            check_wanted(wanted)

        def tell(share: float) -> None:
            check_wanted(wanted)
            self.share = share

        try:
            tell(0.0)
            yield tell
        finally:
            self.share = None
            self._lock.release()

    def _read_plain(self, ids: Sequence[int], tell: Callable[[float], object]) -> Reading:
        """Return how the model reads a text as it is."""
        key = tuple(ids)
        if len(key) < 2:
            raise QuestionError(409, "the text must have two tokens")
        if key not in self._plain:
            self._plain[key] = read(self._loaded()[0], ids, None, tell)
        self._plain.move_to_end(key)
        while len(self._plain) > 2:
            self._plain.popitem(last=False)
        return self._plain[key]

    def _told(
        self, source: Source, tokenizer: Any, before: Reading, after: Reading, tell: Callable[[float], object]
    ) -> dict[str, Any]:
        """Return the differences of two readings as plain data."""
        sizes = [math.prod(entry.shape) for entry in before.atlas.entries if entry.matrix is not None]
        every = max(-(-2 * sum(sizes) // _CELLS), 1)
        try:
            found = changes(before.atlas, after.atlas, every=every, progress=lambda s: tell(_WRITTEN + 0.5 * s))
        except AttlasError as error:
            raise QuestionError(409, error.found or str(error)) from error

        def word(token: int) -> str:
            return str(tokenizer.decode([token]))

        def following(reading: Reading) -> dict[str, Any]:
            likeliest = [[word(token), finite_or_none(probability)] for token, probability in reading.likeliest]
            return {"likeliest": likeliest, "text": str(tokenizer.decode(reading.written))}

        def shown(ids: list[int]) -> list[str]:
            return Text(list(map(word, ids)), pieces_from(token_bytes(tokenizer, ids))).shown

        return {
            "tokens": [shown(before.ids), shown(after.ids)],
            "pairs": [list(pair) for pair in aligned(before.ids, after.ids)],
            "before": list(map(finite_or_none, before.probabilities)),
            "after": list(map(finite_or_none, after.probabilities)),
            "next": [following(before), following(after)],
            "every": every,
            "heads": _moved_heads(source, found),
        }


def _heads_of(source: Source, params: Parameters) -> dict[int | str, list[int]]:
    """Return the heads that a question names, by the attention of the model."""
    chosen: dict[int | str, list[int]] = {}
    for name in params.text("heads", 20_000).split(",") if params.has("heads") else []:
        entry, _, head = name.partition(".")
        place = Parameters({"entry": entry, "head": head})
        shown = source.entries[place.whole("entry", 0, len(source.entries))].entry
        number = shown.heads[place.whole("head", 0, len(shown.heads))]
        chosen.setdefault(f"{shown.kind}.{shown.layer}", []).append(number)
    return chosen


def _moved_heads(source: Source, found: Changes) -> list[dict[str, Any]]:
    """Return the heads that changed most as the page counts them, with the pairs of tokens where they did."""
    places = {
        (shown.entry.name, shown.entry.call, head): (number, index)
        for number, shown in enumerate(source.entries)
        for index, head in enumerate(shown.entry.heads)
        if not shown.recording
    }
    told: list[dict[str, Any]] = []
    for record_ in found.records():
        place = places.get((record_["name"], record_["call"], record_["head"]))
        if place is None or record_["moved"] <= 0 or len(told) == _LISTED:
            continue
        cells = found.cells(record_["name"], record_["head"], _NAMED_CELLS)
        told.append({"entry": place[0], "head": place[1], "moved": record_["moved"], "cells": [list(c) for c in cells]})
    return told


def trial(
    trials: Trials, name: str, source: Source, ids: Sequence[int], parameters: Mapping[str, str], wanted: Wanted
) -> dict[str, Any]:
    """Return the answer to "without" or "other"."""
    if not ids:
        raise QuestionError(409, "the tokens of this recording are not known; let the model read a text first")
    if name == "other":
        return trials.other(source, ids, wanted)
    return trials.without(source, ids, Parameters(parameters), wanted)
