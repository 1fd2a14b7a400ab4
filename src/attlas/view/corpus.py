"""Every question that the page of a corpus asks, answered: the same for HTTP and for the file that works offline."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import attlas
from attlas import heads
from attlas.errors import RecordingError
from attlas.recording import record
from attlas.view.codes import Array, finite_or_none
from attlas.view.corpus_measures import START, measures
from attlas.view.exact import Wanted
from attlas.view.known_heads import heads_of_corpus
from attlas.view.parameters import Parameters, QuestionError
from attlas.view.service import Answer, Service, answered, json_answer, refusal

if TYPE_CHECKING:
    from attlas.corpus import Corpus, Sample


Loader = Callable[[], Any]  # loads the model of a corpus

# Why no full map can be opened; the page translates these sentences.
WITHOUT_MODEL = "This page was opened without the model of the corpus."
NO_PLACE = "The corpus does not say where its model is: attlas view DIR --model FOLDER."
NOT_THERE = "The model is not there: {0}. attlas view DIR --model FOLDER says where it is."
NO_TRANSFORMERS = "The model needs transformers: {0}."
OTHER_MODEL = "The model in {0} is not the one that the corpus was made with: attlas view DIR --model FOLDER."
_BOX_SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)  # shares of the texts below the marks of a box
_DISTRIBUTION_BINS = 128  # of a distribution, between its least and its largest number
_MOST_HEADS_KEPT = 32  # heads whose samples stay in memory
_MOST_OPEN_TEXTS = 8  # texts whose maps stay open
_MOST_RECORDED = 1_000_000  # heads × tokens up to which all layers of a text are recorded, and not that of one head


class NoModelError(QuestionError):
    """The model of a corpus cannot be loaded.

    Parameters
    ----------
    text : str
        Why, with {0} in the place of the value.
    value : str
        A folder, say.
    """

    def __init__(self, text: str, value: str = "") -> None:
        self.reason = text, value
        super().__init__(409, text.format(value), reason=self.reason)


class CorpusService:
    """Answers everything that the page asks about one or more corpora.

    Parameters
    ----------
    corpora : sequence of Corpus
        What `attlas.corpus` has made; they are shown side by side.
    titles : sequence of str, optional
        What they are called; the default is the names of their folders.
    loaders : sequence of callable or NoModelError, optional
        For each corpus: what loads its model, so that the full map of a text can be opened, or why that is impossible.

    See Also
    --------
    Service : answers for one recording, as here for each text that is opened.

    Notes
    -----
    Any number of threads may ask. The numbers of all heads are read once; a head is read when it is asked for, and the
    last 32 stay in memory. A text that is opened costs one forward pass of its model; the last 8 stay open.

    Examples
    --------
    >>> import attlas
    >>> from attlas.view import CorpusService
    >>> service = CorpusService([attlas.load("stdlib.corpus")])  # doctest: +SKIP
    >>> service.answer("info", {}).status  # doctest: +SKIP
    200
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        *,
        titles: Sequence[str] | None = None,
        loaders: Sequence[Loader | NoModelError] | None = None,
    ) -> None:
        self._corpora = list(corpora)
        self._titles = list(titles or (corpus.folder.resolve().name for corpus in corpora))
        self._loaders = list(loaders or [NoModelError(WITHOUT_MODEL)] * len(corpora))
        self._tables = [corpus.table("arrow").to_pydict() for corpus in corpora]
        # By the number in their address: what was recorded (corpus, text, layer), and the service that shows it.
        self._opened: OrderedDict[int, tuple[tuple[int, ...], Service]] = OrderedDict()
        self._models: dict[int, Any] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._questions = {
            "info": self._answer_info,
            "head": self._answer_head,
            "sample": self._answer_sample,
            "open": self._answer_open,
        }
        self.samples = lru_cache(_MOST_HEADS_KEPT)(self._samples_of_head)

    @property
    def titles(self) -> list[str]:
        """What the corpora are called."""
        return self._titles

    def answer(self, name: str, parameters: Mapping[str, str], wanted: Wanted = None) -> Answer:
        """Answer one question, as `Service.answer` does.

        Parameters
        ----------
        name : {"info", "head", "sample", "open"}
            What is asked.
        parameters : mapping of str to str
            Its parameters, as texts.
        wanted : callable, optional
            Returns whether somebody still waits.

        Returns
        -------
        Answer
        """
        question = self._questions.get(name)
        if question is None:
            return refusal(404, f"no such question: {name[:40]!a}")
        return answered(lambda: json_answer(question(Parameters(parameters)), final=name != "open"))

    def ask(self, name: str, **parameters: int) -> dict[str, Any]:
        """Return an answer as it is, for a file that holds all answers; what fails raises."""
        return self._questions[name](Parameters({field: str(value) for field, value in parameters.items()}))

    def opened(self, number: int) -> Service | None:
        """Return the service of a text that was opened; None where it is closed again."""
        found = self._opened.get(number)
        return None if found is None else found[1]

    def close(self) -> None:
        """Close the texts that were opened."""
        with self._lock:
            while self._opened:
                self._opened.popitem()[1][1].close()

    # --------------------------------------------------------------------------------------------- what there is

    def _answer_info(self, given: Parameters) -> dict[str, Any]:
        """Answer with everything that the page shows before a head is chosen."""
        shown = [self._facts_of_corpus(at) for at in range(len(self._corpora))]
        names = {measure["name"] for measure in shown[0]["measures"]} | {"kind"}
        initial = {field: value for field, value in START.items() if not isinstance(value, str) or value in names}
        return {"key": _content_key(self._corpora), "corpora": shown, "initial": initial}

    def _facts_of_corpus(self, at: int) -> dict[str, Any]:
        """Return what the page knows of one corpus: model, settings, and a table of all heads, column by column."""
        corpus, table, loader = self._corpora[at], self._tables[at], self._loaders[at]
        config = corpus.config
        model, counts, settings = config["model"], config["counts"], config["settings"]
        numbers = [name for name, values in table.items() if any(isinstance(value, float) for value in values)]
        layers, texts = len(model["layers"]), counts["texts"]
        words = {name: each["definition"] for name, each in config["numbers"].items()}
        rows = {name: table[name] for name in ("layer", "head", "kind") if name in table}
        rows |= {name: [finite_or_none(value) for value in table[name]] for name in numbers}
        return {
            "title": self._titles[at],
            "model": model["name"],
            "texts": texts,
            "tokens": counts["tokens"],
            "intervals": config["n_intervals"],
            "open": loader.reason if isinstance(loader, NoModelError) else None,
            "counts": {
                "layers": layers,
                "length": settings["length"],
                "complete": config["complete"],
                "failed": counts["failed"],
            },
            "facts": {
                "type": model["type"],
                "dtype": model["dtype"],
                "source": config["source"],
                "made": config["attlas"],
                "shown": attlas.__version__,
            },
            "kinds": [(kind.name, kind.does) for kind in (*heads.PATTERNS, heads.MIXED)],
            "measures": measures(numbers, config["numbers"], words),
            "rows": rows,
        }

    def _answer_head(self, given: Parameters) -> dict[str, Any]:
        """Answer with the distributions, tokens and sampled texts of one head."""
        at, row = self._corpus_and_row(given)
        page = self._corpora[at].head(*self.place(at, row))
        samples: list[Sample] = self.samples(at, row)
        config = self._corpora[at].config
        peaks = page.distributions.get("max_activation")
        return {
            "distributions": {
                name: _binned_distribution(found, config["quantiles"]) for name, found in page.distributions.items()
            },
            "distance": _weight_by_distance(page.distances),
            "tokens": {side: _token_shares(pairs, side, page.distances) for side, pairs in page.tokens.items()},
            "intervals": None if peaks is None else _equal_share_intervals(peaks, config["n_intervals"]),
            "samples": [_card_of_sample(sample) for sample in samples],
        }

    def _answer_sample(self, given: Parameters) -> dict[str, Any]:
        """Answer with the kept weights of one sampled text."""
        at, row = self._corpus_and_row(given)
        samples = self.samples(at, row)
        sample = samples[given.whole("index", 0, len(samples))]
        return _weights_in_window(sample, range(len(sample.tokens)))

    def _corpus_and_row(self, given: Parameters) -> tuple[int, int]:
        """Return the number of the corpus and the row in its table that a question names."""
        at = given.whole("corpus", 0, len(self._corpora))
        return at, given.whole("row", 0, len(self._tables[at]["layer"]))

    def _samples_of_head(self, at: int, row: int) -> list[Sample]:
        return self._corpora[at].samples(*self.place(at, row))

    def place(self, at: int, row: int) -> tuple[int, int]:
        """Return layer and head of a row of a corpus."""
        table = self._tables[at]
        return table["layer"][row], table["head"][row]

    # ------------------------------------------------------------------------------------------------- full maps

    def _answer_open(self, given: Parameters) -> dict[str, Any]:
        """Record a text, and return where its page is; a text that is open already is not recorded again."""
        at, row = self._corpus_and_row(given)
        text = given.whole("text", 0, 1 << 62)
        layer, head = self.place(at, row)
        sample = next((each for each in self.samples(at, row) if each.text == text), None)
        if sample is None:
            raise QuestionError(404, f"this head has no sample of text {text}")
        model = self._corpora[at].config["model"]
        whole = len(self._tables[at]["layer"]) * len(sample.ids) <= _MOST_RECORDED
        key = (at, text) if whole else (at, text, layer)  # a long text is recorded once for each layer that is opened
        with self._lock:  # one text at a time: a model is no thing for two threads
            number = next((each for each, found in self._opened.items() if found[0] == key), None)
            if number is None:
                number = self._count = self._count + 1
                title = f"{sample.source}, text {text} of {self._titles[at]}"
                known = heads_of_corpus(self._tables[at], self._titles[at])
                service = Service(
                    self._recording_of_text(at, sample, None if whole else layer), title=title, known=known
                )
                self._opened[number] = (key, service)
                while len(self._opened) > _MOST_OPEN_TEXTS:
                    self._opened.popitem(last=False)[1][1].close()
        entries = self._opened[number][1].source.entries
        entry = next(index for index, shown in enumerate(entries) if shown.entry.layer == layer)
        query = given.whole("query", 0, len(sample.ids), default=0)
        column = given.whole("key", 0, len(sample.ids), default=0)
        shown = f"e={entry}&h={entries[entry].entry.heads.index(head)}"
        place = f"r={query + 0.5}&c={column + 0.5}&z=4&pin={query}.{column}"
        return {"path": f"text/{number}/#{shown}&{place}", "model": model["name"]}

    def _recording_of_text(self, at: int, sample: Sample, layer: int | None) -> Any:
        """Return a recording of one sampled text, of one layer or of all; the model is loaded once."""
        loader = self._loaders[at]
        if isinstance(loader, NoModelError):
            raise loader
        if at not in self._models:
            self._models[at] = loader()
        model = self._models[at]
        with torch.no_grad(), record(model, layers=None if layer is None else [layer]) as atlas:
            model(torch.tensor([sample.ids], device=model.device))
        if not atlas.entries:
            raise RecordingError("the model must run its attention.", "nothing recorded", "see above", where="view")
        atlas.tokens = list(sample.tokens)
        atlas.model = self._corpora[at].config["model"]["name"]
        atlas.details["block"] = self._scores_on_block(at)
        return atlas

    def _scores_on_block(self, at: int) -> dict[str, list[list[float]]]:
        """Return the scores on repeated random tokens by layer and head, so that heads have the same names there."""
        table = self._tables[at]
        found: dict[str, list[list[float]]] = {}
        for name in ("induction", "duplicate"):
            found[name] = [[] for _ in range(max(table["layer"]) + 1)]
            for layer, value in zip(table["layer"], table[name], strict=True):
                found[name][layer].append(value)
        return found


def excerpt(sample: Sample, window: int) -> dict[str, Any]:
    """Return the tokens and weights of a text around its largest weight, at most `window` tokens."""
    start = max(0, min(_largest_weight_place(sample)[0] - window // 2, len(sample.tokens) - window))
    return _weights_in_window(sample, range(start, min(start + window, len(sample.tokens))))


def _card_of_sample(sample: Sample) -> dict[str, Any]:
    """Return the contents of the card of a text before its weights are asked for."""
    query, key = _largest_weight_place(sample)
    return {
        "interval": sample.interval,
        "text": sample.text,
        "name": sample.source,
        "start": sample.start,
        "length": len(sample.tokens),
        "largest": sample.max_activation,
        "query": query,
        "key": key,
    }


def _largest_weight_place(sample: Sample) -> tuple[int, int]:
    """Return query and key of the largest weight, the first token aside, as `max_activation` is defined."""
    weights = np.where(sample.keys > 0, sample.weights, 0)
    weights[0] = 0
    query, column = np.unravel_index(int(weights.argmax()), weights.shape) if weights.size else (0, 0)
    return int(query), max(int(sample.keys[query, column]), 0) if weights.size else 0


def _weights_in_window(sample: Sample, window: range) -> dict[str, Any]:
    """Return the tokens of a window with the kept weights of its queries, and the other tokens that these look at."""
    keys, weights = sample.keys[window.start : window.stop], sample.weights[window.start : window.stop]
    kept = keys >= 0
    flat = keys[kept]
    apart = sorted({int(key) for key in flat} - set(window))
    return {
        "first": window.start,
        "tokens": sample.tokens[window.start : window.stop],
        "others": {key: sample.tokens[key] for key in apart},
        "counts": kept.sum(1).tolist(),
        "keys": flat.tolist(),
        "weights": [float(f"{weight:.4g}") for weight in weights[kept]],
    }


def _binned_distribution(found: Mapping[str, Any], shares: Sequence[float]) -> dict[str, Any]:
    """Return a distribution over texts, its counts in even bins from its least to its largest number."""
    low, high = found["min"], found["max"]
    edges = np.linspace(low, high, _DISTRIBUTION_BINS + 1) if found["texts"] and high > low else np.array([low, high])
    counts = np.diff(_counts_below(found, edges)) if found["texts"] else np.zeros(len(edges) - 1)
    return {
        "texts": found["texts"],
        **{name: finite_or_none(found[name]) for name in ("min", "max", "mean")},
        "box": [finite_or_none(found["quantiles"][shares.index(share)]) for share in _BOX_SHARES],
        "counts": [float(f"{count:.5g}") for count in counts],
    }


def _counts_below(found: Mapping[str, Any], values: Array) -> Array:
    """Return how many texts have less than each of `values`, which ascend from the least to the largest number.

    `found` is a distribution: bins ``lower``, ``upper``, ``count``. The texts of a bin are spread over it evenly.
    """
    lower, upper = (np.clip(found[side], found["min"], found["max"]) for side in ("lower", "upper"))
    total = np.cumsum(found["count"], dtype=np.float64)
    # At the lower edge of a bin are the texts of the bins before it, at its upper edge its own, too. A bin whose edges
    # are one number gets the next number as its upper edge, so that the marks ascend.
    marks = np.stack([lower, np.maximum(upper, np.nextafter(lower, np.inf))], axis=1).ravel()
    below = np.stack([total - found["count"], total], axis=1).ravel()
    result: Array = np.interp(values, marks, below)
    result[np.asarray(values) >= found["max"]] = total[-1]
    result[0] = 0.0 if values[0] <= found["min"] else result[0]
    return result


def _equal_share_intervals(peaks: Mapping[str, Any], count: int) -> list[tuple[float, float]]:
    """Return the ends of `count` intervals of the largest weight, each of which has the same share of the texts.

    `peaks` is the distribution of the largest weight of a text.
    """
    lower, upper = np.asarray(peaks["lower"], np.float64), np.asarray(peaks["upper"], np.float64)
    if not len(lower):
        return []
    total = np.cumsum(peaks["count"], dtype=np.float64)
    marks = np.stack([lower, upper], axis=1).ravel()
    shares = np.stack([total - peaks["count"], total], axis=1).ravel() / total[-1]
    ends = np.clip(np.interp(np.linspace(0, 1, count + 1), shares, marks), peaks["min"], peaks["max"])
    return [(float(a), float(b)) for a, b in pairwise(ends)]


def _weight_by_distance(distances: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the weight by distance in bins that double: 0, 1, 2 to 3, 4 to 7, and so on."""
    last = max((each["upper"] for each in distances), default=1)
    edges = [0, *(1 << k for k in range(max(1, math.ceil(math.log2(max(last, 2))) + 1)))]
    values = [0.0] * (len(edges) - 1)
    for each in distances:
        # Bin b > 0 begins at 2 ** (b - 1), the least number of b bits.
        values[each["lower"].bit_length()] += each["weight"]
    return {"edges": [float(edge) for edge in edges], "values": values}


def _token_shares(
    pairs: Sequence[tuple[str, float]], side: str, distances: Sequence[Mapping[str, Any]]
) -> list[tuple[str, float]]:
    """Return tokens with their weight as a share: of all weight for the side "key_mass", else of the kept weight."""
    total = sum(each["weight" if side == "key_mass" else "kept_weight"] for each in distances)
    return [(token, weight / total) for token, weight in pairs] if total > 0 else []


def _content_key(corpora: Sequence[Corpus]) -> str:
    """Return a word that changes with the content of the corpora."""
    sums = [corpus.config["files"].get("heads.parquet", {}).get("sha256", "") for corpus in corpora]
    return "-".join(each[:12] for each in sums)
