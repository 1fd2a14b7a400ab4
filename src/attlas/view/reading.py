"""A text that the user types: a model reads it in a thread, generates further tokens, and the page shows the result."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from attlas.errors import AttlasError
from attlas.recording import record
from attlas.recording.atlas import Atlas
from attlas.recording.metadata import token_bytes
from attlas.view.cached_text import CachedText, is_same_reading, keeps_cache, likeliest_token
from attlas.view.exact import UnwantedError, Wanted
from attlas.view.known_heads import KnownHeads, OnBlock, heads_of_text, heads_on_block, is_of_same_model
from attlas.view.parameters import QuestionError
from attlas.view.read_text import MOST_CHARACTERS, ReadText, check_text, first_words, token_ids
from attlas.view.service import Answer, Service, answered, json_answer, refusal
from attlas.view.trials import TRIALS, Trials, after_each_part, trial
from attlas.view.typed_parts import TypedParts

# Returns a model of transformers and its tokenizer.
ModelLoader = Callable[[], "tuple[Any, Any]"]

_MOST_TOKENS = 8192  # tokens that are read at most, of a model that could read more
_MOST_NEW = 256  # tokens that are written at once, at most
_MOST_TEXTS = 16  # that are kept beside the first recording; each is a small recording
_RETIRED = 3  # recordings of texts that have grown since, which pages have shown and may still ask about
_NO_LONGER_KEPT = "this text is no longer kept; reload the page"
_OF_PARTS = ("why", "why_map")  # questions that a text without parts has no answer to
_CLOSING_SECONDS = 2.0  # that the end waits for the model: loading one takes longer, and cannot be stopped
_GROWTH_SECONDS = 0.4  # in which written tokens are shown together: a page stands at least as long
_MOST_CACHE_BYTES = 1 << 30  # of the keys and values that are kept until the text is written on
_MOST_MEASURED = 1 << 24  # weights of all heads up to which their statistics are computed before the text is shown,
_MOST_MEASURED_MEANWHILE = 1 << 20  # and before a page is told of a version that is still written


class _StoppedError(Exception):
    """The user has stopped the model."""


@dataclass
class _ReadingProgress:
    """How far the model is: the page asks for it repeatedly."""

    doing: str = ""  # "loading", "measuring", "reading" or "writing"; "" when it does nothing
    done: int = 0
    total: int = 0
    error: str = ""


class ReadingService:
    """Answers what `Service` answers, about a text that the user can replace.

    Parameters
    ----------
    service : Service
        What is shown until a text was read.
    loader : callable
        Loads the model and its tokenizer, when the first text is to be read.
    name : str
        What the model is called.

    See Also
    --------
    Service : answers for one recording.

    Notes
    -----
    One thread reads; what was shown before stays until the new recording is complete, and also if the model fails. A
    text is one forward pass, with queries, keys and norms of values kept in memory, and so is each token that is
    written: over itself alone, with the cache of the text, whose recording goes on. Where the model keeps no cache, or
    one that gives other weights than the text read whole (which the first token that is written tells), each written
    token is a pass over the whole text. The cache of the text that was read or written last is kept, up to 1 GiB.
    Tokens that are written within 0.4 seconds are shown together. Where the recording that was shown first has parts,
    values are kept too, and parts up to 1 GiB for all texts.

    Every text is kept, under a number that its page names: 0 is the recording that was shown first. Those that were
    read first go when there are too many.

    Before the first text the model reads random tokens that occur twice, once. What a head is called comes from there,
    and from the recording that was shown first where that is of the same model: it does not change with the text.

    Examples
    --------
    >>> from attlas.view.reading import ReadingService
    >>> from attlas.view import Service
    >>> import attlas, torch
    >>> shown = Service(attlas.attend(torch.zeros(5, 8), torch.zeros(5, 8)))
    >>> service = ReadingService(shown, lambda: (None, None), name="tiny")
    >>> service.post("read", {"text": ""}).status
    400
    >>> service.close()
    """

    def __init__(self, service: Service, loader: ModelLoader, *, name: str) -> None:
        self._loader, self._name = loader, name
        # By number, in the order in which they were read: 0 is the recording that is shown first.
        self._texts = {0: ReadText(service, service.source.title, ids=token_ids(service.source.atlas))}
        self._last = 0  # the number of the text that was read last
        self._retired: list[Service] = []
        self._shown: WeakSet[Service] = WeakSet()  # those that a page was told of
        self._loaded: Any = None  # the model and its tokenizer, once a text was read
        self._on_block: OnBlock | None = None  # what its heads do on random tokens; None before, and where it cannot
        self._known_heads: KnownHeads | None = None  # what its heads are
        self._is_measured = False
        self._cached: CachedText | None = None  # the text that was read or written last, where its cache is kept
        self._has_cache: bool | None = None  # whether the model keeps one that can be trusted; None before it is known
        self._progress = _ReadingProgress()
        self._lock = threading.Lock()
        self._keeping = threading.Lock()  # held while a text is replaced, and while a page is told of it
        self._loading = threading.Lock()  # held while the model is loaded and measured
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._closed = False
        self._trials = Trials(self._load, self._tokenize)
        self._parts = TypedParts(service.source.atlas)

    @property
    def source(self) -> Any:
        """The recording of the text that was read last."""
        return self._texts[self._last].service.source

    def answer(self, name: str, parameters: Mapping[str, str], wanted: Wanted = None) -> Answer:
        """Answer one question, as `Service.answer` does, about the text whose key is given as ``v``, else the last one.

        "info" and "reading" take the number of a text instead; "reading" says how far the model is.
        """
        if name in ("info", "reading"):
            number = self._number(parameters.get("text"))
            if name == "reading":
                return self._progress_answer(number, self._texts[number])
            with self._keeping:  # what is replaced from now on stays for the page
                text = self._texts[number]
                is_new = text.service not in self._shown
                self._shown.add(text.service)
            if number and is_new:
                _measure_short(text.service, _MOST_MEASURED_MEANWHILE)
            info = text.service.answer("info", {}, wanted)
            return self._progress_answer(number, text, info) if info.status == 200 else info
        key, number = parameters.get("v"), self._number(parameters.get("text"))
        if name in TRIALS:
            return answered(lambda: self._try(name, self._text_of(key, number), parameters, wanted))
        service = self._service_of(key, number)
        if service is None:
            return refusal(409, _NO_LONGER_KEPT)
        reason = self._parts.reason(service.source.atlas) if name in _OF_PARTS else None
        if reason is not None:
            return refusal(409, reason[0].format(*reason[1:]), reason=reason)
        return service.answer(name, parameters, wanted)

    def _number(self, asked: str | None) -> int:
        """Return the number of a text that is asked for: the last one by default, the first one where it is gone."""
        if asked is None:
            return self._last
        number = int(asked) if asked.isascii() and asked.isdecimal() else 0
        return number if number in self._texts else 0

    def _service_of(self, key: str | None, number: int) -> Service | None:
        """Return what answers about the recording of a key, else of a number; None where it is no longer kept."""
        if key is None:
            return self._texts[number].service
        services = [*(text.service for text in self._texts.values()), *self._retired]
        return next((service for service in services if service.source.key == key), None)

    def _text_of(self, key: str | None, number: int) -> ReadText:
        """Return the text whose recording has a key, else that of a number; raise a QuestionError where it is gone."""
        if key is None:
            return self._texts[number]
        for text in list(self._texts.values()):
            if text.service.source.key == key:
                return text
        raise QuestionError(409, _NO_LONGER_KEPT)

    def _progress_answer(self, number: int, text: ReadText, info: Answer | None = None) -> Answer:
        """Return how far the model is, alone or added to the answer to "info"."""
        facts: dict[str, Any] = {"model": self._name, "text": text.text, "tokens": len(text.ids), "number": number}
        facts |= {"characters": MOST_CHARACTERS, "last": self._last}
        facts |= {"parts": self._parts.facts(text.service.source.atlas)}
        if info is not None:
            texts = [{"number": each, "name": kept.name} for each, kept in list(self._texts.items())]
            reading = facts | {"more": _MOST_NEW, "texts": texts}
            return json_answer(json.loads(info.body) | {"reading": reading}, final=False)
        more = {"key": text.service.source.key, "trial": self._trials.share}
        return json_answer(vars(self._progress) | facts | more, final=False)

    def _try(self, name: str, text: ReadText, parameters: Mapping[str, str], wanted: Wanted) -> Answer:
        """Answer what is different in a text without some heads, or with other words."""
        if self._closed:
            raise QuestionError(503, "the viewer was closed")
        if self._is_reading:
            raise QuestionError(409, "the model is still reading; stop it first")
        self._cached = None  # its memory is for the texts that are read now

        def still_wanted() -> bool:
            return not self._closed and (wanted is None or wanted())

        try:
            found = trial(self._trials, name, text.service.source, text.ids, parameters, still_wanted)
        except (QuestionError, UnwantedError):
            raise
        except Exception as failed:  # whatever a model raises is shown on the page, and not tried again
            raise QuestionError(409, _reason(failed)) from failed
        return json_answer(found, final=name == "without")

    def _is_writing(self) -> bool:
        """Whether the model writes."""
        return self._progress.doing == "writing"

    @property
    def _is_reading(self) -> bool:
        """Whether the model reads or writes."""
        return self._thread is not None and self._thread.is_alive()

    def _load(self) -> tuple[Any, Any]:
        """Return the model and its tokenizer, which are loaded once; wait where they are being loaded and measured."""
        with self._loading:
            self._loaded = self._loaded or self._loader()
            return self._loaded  # type: ignore[no-any-return]

    def post(self, name: str, content: Any) -> Answer:
        """Read a text, write further tokens, or stop.

        Parameters
        ----------
        name : str
            "read"; "second" for a text that "other" compares with the present one; others are for the recording that
            is shown.
        content : dict
            ``{"text": "...", "more": n, "of": number}``: the text, or None for that of a number (the last one by
            default), and how many tokens the model writes after it; ``{"load": True}`` loads the model before it is
            needed; ``{"stop": True}`` ends what is being done. Bookmarks name their recording as ``v``.

        Returns
        -------
        Answer
            409 while the model reads another one, 503 after `close`.
        """
        if name == "second":
            return answered(lambda: self._take_second(content))
        if name != "read":
            key = content.get("v") if isinstance(content, dict) else None
            service = self._service_of(key if isinstance(key, str) else None, self._last)
            if service is None:
                return refusal(409, _NO_LONGER_KEPT)
            return service.post(name, content)
        return answered(lambda: self._start_or_stop(content))

    def _start_or_stop(self, content: Any) -> Answer:
        """Check a request, and start a thread that reads and generates, or stop it."""
        request = content if isinstance(content, dict) else {}
        if request.get("stop") is True:
            self._stopped.set()
            return json_answer({}, final=False)
        if request.get("load") is True:
            return self._start_loading()
        text, more, of = request.get("text"), request.get("more", 0), request.get("of", self._last)
        if text is not None:
            check_text(text)
        if type(more) is not int or not 0 <= more <= _MOST_NEW or (text is None and not more):
            raise QuestionError(400, f"more must be a number of tokens from 1 to {_MOST_NEW}")
        if type(of) is not int or of not in self._texts:
            raise QuestionError(409, _NO_LONGER_KEPT)
        with self._lock:
            if self._closed:
                raise QuestionError(503, "the viewer was closed")
            if self._is_reading or self._trials.busy:
                raise QuestionError(409, "the model is still reading; stop it first")
            self._stopped.clear()
            self._progress = _ReadingProgress("loading" if self._loaded is None else "reading")
            self._thread = threading.Thread(
                target=self._read_and_generate, args=(text, more, of), name="attlas-read", daemon=True
            )
            self._thread.start()
        return json_answer({}, final=False)

    def _start_loading(self) -> Answer:
        """Start a thread that loads and measures the model; a text that is sent meanwhile waits for it."""
        with self._lock:
            is_busy = self._closed or self._is_measured or self._is_reading or self._trials.busy
            if not is_busy and not self._loading.locked():
                self._stopped.clear()
                threading.Thread(target=self._prepare_early, name="attlas-load", daemon=True).start()
        return json_answer({}, final=False)

    def _take_second(self, content: Any) -> Answer:
        """Keep the text that is compared with the present one."""
        text = content.get("text") if isinstance(content, dict) else None
        self._trials.second = check_text(text)
        return json_answer({}, final=False)

    def close(self) -> None:
        """Stop the model and close what is shown. No text is read afterwards."""
        with self._lock:  # which a start clears the event under
            self._closed = True
            self._stopped.set()
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSING_SECONDS)
        for service in [*(text.service for text in self._texts.values()), *self._retired]:
            service.close()

    # ------------------------------------------------------------------------------------------- in the thread

    def _prepare_early(self) -> None:
        """Load and measure the model before a text is sent; what fails is said when there is one."""
        with contextlib.suppress(Exception):
            self._prepare()
        with self._lock:
            if not self._is_reading:
                self._progress = _ReadingProgress()

    def _prepare(self) -> None:
        """Load and measure the model, once."""
        with self._loading:
            if self._loaded is None:
                self._progress = _ReadingProgress("loading")
                self._loaded = self._loader()
            if self._stopped.is_set():
                raise _StoppedError
            if not self._is_measured:
                self._measure_heads()

    def _read_and_generate(self, text: str | None, more: int, number: int) -> None:
        """Read a text, if there is one, and generate tokens; the progress ends with the error, if any."""
        error = ""
        try:
            self._prepare()
            if text is not None:
                self._progress = _ReadingProgress("reading")
                number = self._read(self._tokenize(text), None)
            self._write(number, more)
        except _StoppedError:
            pass
        except QuestionError as refused:
            error = refused.text
        except Exception as failed:  # noqa: BLE001 - whatever a model raises is shown on the page
            error = _reason(failed)
        if self._cached is not None and self._cached.nbytes > _MOST_CACHE_BYTES:
            self._cached = None
        self._progress = _ReadingProgress(error=error)

    def _write(self, number: int, more: int) -> None:
        """Let the model write tokens after a text: with the cache of the text, or reading it whole each time."""
        done = 0
        while done < more:
            self._progress = _ReadingProgress("writing", done, more)
            if self._stopped.is_set():
                raise _StoppedError
            text, cached, self._cached = self._texts[number], self._cached, None
            if not number or cached is None or cached.ids != text.ids:  # the first recording stays as it is
                cached = None
            if cached is not None and self._parts.may_grow(cached.atlas, len(text.ids) + 1):
                done += self._write_with_cache(cached, number, done, more)
            else:
                number = self._read([*text.ids, self._next_token(text)], number, is_last=done + 1 == more)
                done += 1

    def _write_with_cache(self, cached: CachedText, number: int, done: int, more: int) -> int:
        """Write tokens in one block of the recording, show them, and return how many; 0 where the cache cannot be used.

        `done` of the `more` tokens of the request were written before. The first one is shown at once, later ones
        together.
        """
        before, start, end = cached.atlas, len(cached.ids), time.monotonic() + (_GROWTH_SECONDS if done else 0.0)
        refused: QuestionError | None = None

        def goes_on() -> bool:
            """Return whether one more token is written before those that there are are shown."""
            nonlocal refused
            count = len(cached.ids) - start
            is_enough = self._stopped.is_set() or self._has_cache is None or time.monotonic() >= end
            if done + count == more or (count and is_enough):
                return False
            self._progress.done = done + count
            try:
                self._check_next(cached.next_token, len(cached.ids))
            except QuestionError as error:
                refused = error
            return refused is None and self._parts.may_grow(before, len(cached.ids) + 1)

        try:
            fits = cached.write(goes_on)
        except Exception:  # noqa: BLE001 - read whole, the text is shown, or its error
            fits = False
        count = len(cached.ids) - start
        is_last = done + count == more or refused is not None or self._stopped.is_set()
        if fits and count and self._has_cache is None:
            fits = self._is_same_read_whole(cached)
        if not fits:
            self._has_cache = False
            if count:
                self._read(cached.ids, number, is_last=is_last)
            return count
        if count:
            self._has_cache = True
            self._parts.grown(before, cached.atlas)
            self._show(cached.atlas, cached.ids, cached.next_token, number, is_last=is_last)
        self._cached = cached
        if refused is not None:
            raise refused
        return count

    def _is_same_read_whole(self, cached: CachedText) -> bool:
        """Return whether a text that was read with a cache is, to rounding, what it is when it is read whole."""
        model, _ = self._loaded
        with record(model, values="norms") as whole:
            output = self._model_output(torch.tensor([cached.ids]))
        return is_same_reading(cached, whole, output)

    def _measure_heads(self) -> None:
        """Learn what the heads of the model are, once; this begins again if it is stopped."""
        self._progress = _ReadingProgress("measuring")
        model, _ = self._loaded
        self._on_block = heads_on_block(model, self._model_output)
        if self._on_block is not None:
            first = self._texts[0].service.source
            name = Path(str(first.atlas.details.get("source") or first.title)).name
            is_same = is_of_same_model(first.atlas, self._on_block.details)
            self._known_heads = (heads_of_text(first.atlas, name) if is_same else None) or self._on_block.known
        self._is_measured = True

    def _tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text; before it the beginning-of-text token, where a generating model has one."""
        model, tokenizer = self._loaded
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        first = getattr(tokenizer, "bos_token_id", None)
        if model.can_generate() and first is not None and ids[:1] != [first]:
            ids = [first, *ids]
        self._check_length(len(ids), "the text has")
        return ids

    def _check_length(self, count: int, subject: str) -> None:
        """Raise a QuestionError, which begins with `subject`, if the model cannot read so many tokens."""
        model, _ = self._loaded
        config = model.config.get_text_config()
        limit = min(getattr(config, "max_position_embeddings", None) or _MOST_TOKENS, _MOST_TOKENS)
        if count > limit:
            raise QuestionError(400, f"{subject} {count:,} tokens; {self._name} reads at most {limit:,} here")

    def _next_token(self, text: ReadText) -> int:
        """Return the id of the likeliest token after a text; raise a QuestionError where the text ends."""
        model, _ = self._loaded
        if not model.can_generate():
            raise QuestionError(400, f"{self._name} writes no text")
        if not text.ids:
            raise QuestionError(400, "type a text first")
        if text.next_token is None:
            text.next_token = likeliest_token(self._model_output(torch.tensor([text.ids])))
        return self._check_next(text.next_token, len(text.ids))

    def _check_next(self, next_token: int | None, count: int) -> int:
        """Return the id of a token that is written after `count` others; raise a QuestionError where the text ends."""
        _, tokenizer = self._loaded
        if next_token is None or next_token == getattr(tokenizer, "eos_token_id", None):
            raise QuestionError(400, f"{self._name} ends the text here")
        self._check_length(count + 1, "with the next one there are")
        return next_token

    def _read(self, ids: list[int], number: int | None, *, is_last: bool = True) -> int:
        """Let the model read these tokens as a new text, or in place of one that was typed; return its number."""
        model, tokenizer = self._loaded
        read = torch.tensor([ids], device=model.device)
        options = {"use_cache": True} if self._has_cache is not False and keeps_cache(model) else {}

        def run() -> Any:
            return self._model_output(read, **options)

        self._cached = None
        recording, output = self._parts.record(model, len(ids), run, tokens=tokenizer)
        if options and getattr(output, "past_key_values", None) is not None:
            self._cached = CachedText(model, recording, output, ids)
        next_token = likeliest_token(output) if model.can_generate() else None
        return self._show(recording.atlas, ids, next_token, number, is_last=is_last)

    def _show(self, atlas: Atlas, ids: list[int], next_token: int | None, number: int | None, *, is_last: bool) -> int:
        """Show a recording as a new text, or in place of one that was typed; return its number.

        One that is `is_last`, and not replaced soon, is measured now if it is not long; a short one where a page asks.
        """
        _, tokenizer = self._loaded
        atlas.model = self._name
        atlas.details |= {"token_bytes": token_bytes(tokenizer, ids)}
        atlas.details |= {} if self._on_block is None else {"block": self._on_block.details}
        written = str(tokenizer.decode(ids, skip_special_tokens=True))
        name = first_words(written) or self._name
        waits = None if is_last else self._is_writing
        service = Service(atlas, title=name, known=self._known_heads, waits=waits)
        if is_last:
            _measure_short(service, _MOST_MEASURED)
        text = ReadText(service, name, written, list(ids), next_token)
        return self._keep(text, number or None)  # what grows the first recording is a text of its own

    def _keep(self, text: ReadText, number: int | None) -> int:
        """Keep a text under a number, or a new one, and drop what is too much; return the number."""
        with self._keeping:
            texts = dict(self._texts)
            dropped = []
            if number is None or number not in texts:
                number = max(self._last, *texts) + 1
                dropped = [texts.pop(each).service for each in [*texts][1 : 1 + max(0, len(texts) - _MOST_TEXTS)]]
            else:
                self._retired.append(texts[number].service)
                texts[number].service.rest()  # a page that stands asks again for what it lacks
                self._parts.release(texts[number].service.source.atlas)
            texts[number] = text
            # A page may stand while many tokens are written: recordings that none has shown are not kept for it.
            kept = [service for service in self._retired if service in self._shown][-_RETIRED:]
            dropped += [service for service in self._retired if service not in kept]
            self._texts, self._last, self._retired = texts, number, kept  # at once: questions come in other threads
        for service in dropped:
            service.close()
        return number

    @torch.no_grad()
    def _model_output(self, ids: Tensor, **options: Any) -> Any:
        """Return the output of the model for some ids, and count its layers as progress."""
        model, _ = self._loaded
        with self._counting_progress(model):
            return model(ids.to(model.device), **options)

    @contextlib.contextmanager
    def _counting_progress(self, model: nn.Module) -> Iterator[None]:
        """Count the leaf modules that have run; between two of them the user may stop the model."""
        if self._progress.doing != "writing":
            doing = "measuring" if self._progress.doing == "measuring" else "reading"
            self._progress = _ReadingProgress(doing)
        progress = self._progress

        def ran(done: int, total: int) -> None:
            """Note how many modules ran; stop where that was asked for."""
            if self._stopped.is_set():
                raise _StoppedError
            if progress.doing != "writing":
                progress.done, progress.total = done, total

        with after_each_part(model, ran):
            yield


def _measure_short(service: Service, most: int) -> None:
    """Compute the statistics of a text of at most so many weights, so that a page shows them with the text."""
    if sum(math.prod(entry.shape) for entry in service.source.atlas.entries) <= most:
        service.measure()


def _reason(failed: Exception) -> str:
    """Return what a model raised as one line."""
    error = failed.found if isinstance(failed, AttlasError) and failed.found else str(failed)
    return f"the model failed: {(error.strip().splitlines() or [type(failed).__name__])[0][:300]}"
