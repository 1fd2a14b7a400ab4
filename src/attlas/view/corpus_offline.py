"""The page of a corpus as one HTML file that works offline."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attlas.view import offline
from attlas.view.about import project_address
from attlas.view.corpus import CorpusService, NoModelError, excerpt
from attlas.view.packing import packed

if TYPE_CHECKING:
    from attlas.corpus import Corpus, Sample


_TRIED_HEADS = 6  # heads, and texts of each, by whose size the others are judged
_WINDOW_TOKENS = 160  # tokens of a text about its largest weight
OFFLINE = "This file has no model: open the folder of the corpus with attlas view to see full maps."


def export_corpus(
    corpora: Corpus | Sequence[Corpus],
    path: str | os.PathLike[str],
    *,
    titles: Sequence[str] | None = None,
    limit: int = 24_000_000,
    progress: Callable[[float], object] | None = None,
) -> Path:
    """Write the page of one or more corpora as one HTML file that needs no server.

    Parameters
    ----------
    corpora : Corpus or sequence of Corpus
        What `attlas.corpus` has made; several are shown side by side.
    path : str or Path
        The file; one that is there is replaced.
    titles : sequence of str, optional
        What they are called; the default is the names of their folders.
    limit : int, default 24_000_000
        Bytes that the sampled texts may take in the file.
    progress : callable, optional
        Is told the share that is done.

    Returns
    -------
    Path

    See Also
    --------
    attlas.view.serve : the same page with whole texts, from which every full map can be opened.

    Notes
    -----
    The file holds all numbers and distributions of all heads. Of a sampled text it holds 160 tokens about the largest
    weight: of each head the text of the largest weight first, then one of each interval, then the others, as far as
    `limit` reaches by a small sample; the page says how many. Cost: reading the folder once.

    Examples
    --------
    >>> import attlas
    >>> attlas.view.export_corpus(attlas.load("stdlib.corpus"), "page.html")  # doctest: +SKIP
    """
    shown = list(corpora) if isinstance(corpora, Sequence) else [corpora]
    with contextlib.closing(
        CorpusService(shown, titles=titles, loaders=[NoModelError(OFFLINE)] * len(shown))
    ) as service:
        answers = _packed_answers(service, limit, progress or (lambda share: None))
        title = ", ".join(service.titles)
    return offline.write_page({"answers": answers}, path, title, "corpus/offline")


def _packed_answers(service: CorpusService, limit: int, tell: Callable[[float], object]) -> dict[str, Any]:
    """Return the answers to all questions of the page, packed."""
    info = service.ask("info")
    places = [(at, row) for at, corpus in enumerate(info["corpora"]) for row in range(len(corpus["rows"]["layer"]))]
    most = _texts_that_fit(service, places, limit)
    answers: dict[str, Any] = {}
    for done, (at, row) in enumerate(places):
        answer = service.ask("head", corpus=at, row=row)
        samples, described = service.samples(at, row), answer["samples"]
        kept = sorted(_order_of_samples(samples)[:most])
        answer["samples"] = [
            {**described[index], "cut": min(_WINDOW_TOKENS, described[index]["length"])} for index in kept
        ]
        for new, index in enumerate(kept):
            answers[f"sample:{at}:{row}:{new}"] = _pack_answer(excerpt(samples[index], _WINDOW_TOKENS))
        answers[f"head:{at}:{row}"] = _pack_answer(answer)
        tell((done + 1) / (len(places) + 1))
    info["offline"] = {"texts": most, "window": _WINDOW_TOKENS, "project": project_address()}
    return {"info": _pack_answer(info), **answers}


def _texts_that_fit(service: CorpusService, places: Sequence[tuple[int, int]], limit: int) -> int:
    """Return how many texts of each head fit into `limit` bytes of the file, by the mean size of those of some heads.

    `places` has the number of the corpus and the row in its table of each head.
    """
    tried = places[:: max(1, len(places) // _TRIED_HEADS)]
    sizes = [
        len(_pack_answer(excerpt(service.samples(corpus, row)[index], _WINDOW_TOKENS))["text"])
        for corpus, row in tried
        for index in _order_of_samples(service.samples(corpus, row))[:_TRIED_HEADS]
    ]
    return int(limit / (len(places) * max(sum(sizes) / len(sizes), 1))) if sizes else 0


def _order_of_samples(samples: Sequence[Sample]) -> list[int]:
    """Return the samples in the order of what they tell: the largest, then the first of each interval, then others."""
    firsts: dict[int, int] = {}
    for index, sample in enumerate(samples):
        firsts.setdefault(sample.interval, index)
    first = sorted(firsts.values(), key=lambda index: -samples[index].interval)
    return [*first, *(index for index in range(len(samples)) if index not in set(first))]


def _pack_answer(answer: dict[str, Any]) -> dict[str, Any]:
    return packed(json.dumps(answer, allow_nan=False, separators=(",", ":")).encode("ascii"), 1)
