"""A corpus as a picture: the scatter of all its heads, and the card that says what was found."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import attlas
from attlas.cli.card import attention_sentence, evidence_of_kind
from attlas.cli.formatting import percent, plural
from attlas.cli.terminal import Terminal, UsageError
from attlas.heads import MIXED, PATTERNS
from attlas.heads.telling import shows_kind
from attlas.pictures.card import BETWEEN, scatter_card
from attlas.pictures.scatter import KIND_COLOURS, Axis, Points, scatter
from attlas.view.corpus_measures import START, measures
from attlas.view.known_heads import KnownHead, heads_of_corpus
from attlas.view.sentences import WORDS, headline, over_texts

if TYPE_CHECKING:  # a command that opens no corpus loads no pyarrow
    from matplotlib.figure import Figure

    from attlas.corpus import Corpus, Sample

_OTHER_COLOUR = "#f0d9a8"  # of a kind that this attlas does not know
_LEAST_WEIGHT = 0.05  # of the cell that is the example
_NEAR_BEST = 0.8  # share of the largest weight from which on words are preferred to other tokens
_CONTEXT = 8  # tokens before a query that should be readable
_WORD = 3  # letters from which on a token counts as a word
_FEW_TEXTS = 20  # texts below which a spread is over all of them, and not over 90 %
_ENDS = 0.05, 0.95  # shares of the texts between which 90 % are


def draw_corpus(arguments: Namespace, terminal: Terminal) -> Figure:
    """Draw the scatter of all heads of a corpus, or with `--card` the card with its story.

    Raises
    ------
    UsageError
        If there is no such head.
    RecordingError
        If the folder is no whole corpus.
    """
    with terminal.step(f"opening {arguments.atlas.name}"):
        story = _Story(attlas.load(arguments.atlas), arguments.atlas.resolve().name)
    chosen = story.chosen(arguments.layer, arguments.head)
    is_about_head = arguments.layer is not None or arguments.head is not None
    if arguments.card:
        with terminal.step("drawing the card"):
            return story.card(chosen, is_about_head=is_about_head)
    with terminal.step(f"drawing {plural(len(story.places), 'head')}"):
        title = BETWEEN.join((*story.title(), plural(len(story.places), "head")))
        return scatter(story.points(chosen if is_about_head else None), title=title)


class _Spread(NamedTuple):
    """The distribution of a number over texts: how many there are, and its ends."""

    texts: int
    low: float
    high: float


class _Story:
    """What a corpus says of its heads.

    Parameters
    ----------
    corpus : Corpus
        The corpus.
    name : str
        What it is called.
    """

    def __init__(self, corpus: Corpus, name: str) -> None:
        self._corpus, self._name = corpus, name
        self._table: Mapping[str, list[Any]] = corpus.table("arrow").to_pydict()
        self.places: list[tuple[int, int]] = list(zip(self._table["layer"], self._table["head"], strict=True))
        self._known = heads_of_corpus(self._table, name).heads

    # ------------------------------------------------------------------------------------------------ which head

    def chosen(self, layer: str | None, head: int | None) -> int:
        """Return the row of the most telling head, of all or of those that are named.

        Raises
        ------
        UsageError
            If there is none.
        """
        layers = sorted({place[0] for place in self.places})
        wanted = layers if layer is None else [_layer_of(layer, layers)]
        rows = [row for row, place in enumerate(self.places) if place[0] in wanted]
        named = [row for row in rows if head is None or self.places[row][1] == head]
        if not named:
            there = sorted({self.places[row][1] for row in rows})
            found = f"--head {head}; there are {there[0]} to {there[-1]}"
            raise UsageError("--head must be one of the corpus.", found, f"--head {there[0]}")
        return max(named, key=self._prominence)

    def _prominence(self, row: int) -> tuple[bool, bool, float, float]:
        """Return the sort key for the most telling head: a known kind, the measure of it, and the largest weights."""
        known = self._known.get(self.places[row])
        (is_induction, share) = (False, 0.0) if known is None else known.prominence
        return is_induction, share > 0, share, self._value("mean_max_activation", row) or 0.0

    def _value(self, name: str, row: int) -> float | None:
        """Return a number of a head; None where it is not known."""
        value = self._table[name][row] if name in self._table else None
        return float(value) if value is not None and math.isfinite(value) else None

    # ---------------------------------------------------------------------------------------------------- the words

    def title(self) -> list[str]:
        """Return what was read by what, and how much of it."""
        config = self._corpus.config
        model, counts, most = config["model"]["name"], config["counts"], config["settings"].get("texts")
        texts = plural(counts["texts"], "text")
        if not config["complete"]:
            texts = f"so far {counts['texts']:,} of at most {most:,} texts" if most else f"so far {texts}"
        names = (self._name,) if not model or model in self._name else (self._name, model)
        return [BETWEEN.join(names), f"{texts}, {plural(counts['tokens'], 'token')}"]

    def card(self, row: int, *, is_about_head: bool) -> Figure:
        """Draw the card about a head, or about all of them with this one as the example."""
        (layer, head), known = self.places[row], self._known.get(self.places[row])
        words = f"Layer {layer}, head {head}"
        if known is None:
            if not is_about_head:
                words = plural(len(self.places), "head")
            return scatter_card(self.points(row), title=self.title(), headline=words, sentences=[self._plain(row)])
        kind = known.pattern
        proof, spread = evidence_of_kind(kind, known.share), self._spread_sentence(known, row)
        if is_about_head:
            words = f"{words}\n{WORDS[kind.name]['headline']}"
        else:
            count = self._table["kind"].count(kind.name)
            words = headline(kind, count, len(self.places))
            subject = "The clearest is" if count > 1 else "It is"
            if kind is MIXED:
                subject = "The largest weights are those of"
            if len(self.places) > 1:
                proof = f"{subject} layer {layer}, head {head}. {proof}"
        paragraphs = [proof, spread] if over_texts(kind)[1] else [f"{proof} {spread}".rstrip()]
        sentences = [*filter(None, [*paragraphs, self._example_sentence(known, row)])]
        return scatter_card(self.points(row), title=self.title(), headline=words, sentences=sentences)

    def _plain(self, row: int) -> str:
        """Return a sentence with the numbers of a head of no known kind."""
        keys, distance = (self._value(name, row) for name in ("effective_keys", "qk_distance"))
        kind = self._table["kind"][row] if "kind" in self._table else "no kind"
        words = f"Layer {self.places[row][0]}, head {self.places[row][1]} is called {kind}."
        if keys is None or distance is None:
            return words
        return f"{words} It looks at {keys:,.3g} tokens, {distance:,.3g} tokens back on average."

    def _spread_sentence(self, known: KnownHead, row: int) -> str:
        """Return a sentence on how much the number of a head varies over the texts; "" where that is not known."""
        name, clause = over_texts(known.pattern)
        column = "mean_max_activation" if name == "max_activation" else name  # that name is of the largest of all texts
        spread, mean = self._spread(name, row), self._value(column, row)
        if spread is None or (clause and mean is None):
            return ""
        which = f"in each of the {spread.texts:,} texts" if spread.texts < _FEW_TEXTS else "in 90 % of the texts"
        low, high = percent(spread.low), percent(spread.high)
        between = low if low == high else f"between {low} and {high}"
        if clause and mean is not None:
            return f"{clause.format(percent(mean))}; {which} {between}."
        return f"{which.capitalize()} it is {between}."

    def _spread(self, name: str, row: int) -> _Spread | None:
        """Return the spread of a number of a head over the texts; None where it is not known, or of one text."""
        found = self._corpus.head(*self.places[row]).distributions.get(name)
        if found is None or found["texts"] < 2:
            return None
        ends = [found["min"], found["max"]]
        levels = self._corpus.config["quantiles"]
        if found["texts"] >= _FEW_TEXTS:
            ends = [found["quantiles"][levels.index(end)] for end in _ENDS]
        return _Spread(found["texts"], *ends) if all(map(math.isfinite, ends)) else None

    # --------------------------------------------------------------------------------------------------- the example

    def _example_sentence(self, known: KnownHead, row: int) -> str:
        """Return a sentence about the place of the sampled texts that shows best what a head does; "" for none."""
        kind = known.pattern
        if kind.measure == "breadth":  # no key stands out
            return ""
        places = (_best_place(sample, kind.name) for sample in self._corpus.samples(*self.places[row]))
        found = [place for place in places if place is not None]
        best = max((weight for _, _, weight in found), default=0.0)
        good = [place for place in found if place[2] >= max(_LEAST_WEIGHT, _NEAR_BEST * best)]
        if not good:
            return ""
        sample, query, _ = max(good, key=lambda place: (_clarity(place[0], place[1]), place[2]))
        kept = sample.keys[query] >= 0
        keys, weights = (rows[query][kept].tolist() for rows in (sample.keys, sample.weights))
        return attention_sentence(sample.tokens, torch.tensor(sample.ids), query, keys, weights)

    # ---------------------------------------------------------------------------------------------------- the points

    def points(self, ringed: int | None) -> Points:
        """Return all heads as the page of the corpus opens with them."""
        columns = {column["name"]: column for column in measures(self._table, (), {})}

        def axis(field: str) -> Axis:
            """Return the measure that the page has for an axis or for the size at first."""
            name = str(START[field])
            column = columns.get(name, {"label": name, "unit": ""})
            label, unit = column["label"], column["unit"]
            title = f"{label} ({unit})" if unit and not label.lower().endswith(unit) else label
            values = [self._value(name, row) for row in range(len(self.places))]
            return Axis(title, values, bool(START.get(f"{field}log")))

        kinds: list[str] = self._table.get("kind", [MIXED.name] * len(self.places))
        names = [kind.name for kind in (*PATTERNS, MIXED)]
        colours = dict(zip(names, KIND_COLOURS, strict=True))
        return Points(
            axis("x"),
            axis("y"),
            [f"{layer}·{head}" for layer, head in self.places],
            kinds,
            colours | dict.fromkeys(sorted({*kinds} - {*names}), _OTHER_COLOUR),
            axis("size"),
            ringed,
        )


def _layer_of(given: str, layers: Sequence[int]) -> int:
    """Return the layer that an option names; a negative number counts from the end."""
    number = int(given) if given.removeprefix("-").isdecimal() else None
    if number is not None and -len(layers) <= number < 0:
        return layers[number]
    if number is None or number not in layers:
        found = f"--layer {given}; there are {layers[0]} to {layers[-1]}"
        raise UsageError("--layer must be one of the corpus.", found, f"--layer {layers[-1]}")
    return number


def _best_place(sample: Sample, kind: str) -> tuple[Sample, int, float] | None:
    """Return the query of a text that shows best what a head of a kind does, with its largest weight; None for none."""
    if not sample.keys.size:
        return None
    keys, weights = torch.from_numpy(sample.keys[:, 0]).long(), torch.from_numpy(sample.weights[:, 0])
    shown = shows_kind(kind, torch.tensor(sample.ids), keys, weights)
    shown[0] = False  # it sees itself alone
    weights = weights.where(shown, 0.0)
    best = float(weights.max())
    near = (weights >= max(_NEAR_BEST * best, _LEAST_WEIGHT)).nonzero()[:, 0].tolist()
    if not near:
        return None
    query = max(near, key=lambda each: (_clarity(sample, each), float(weights[each])))
    return sample, query, float(weights[query])


def _clarity(sample: Sample, query: int) -> int:
    """Return how well query, key and what stands before the query can be read: whole words best."""
    words = [sample.tokens[query], sample.tokens[int(sample.keys[query, 0])]]
    before = "".join(sample.tokens[max(0, query - _CONTEXT) : query + 1])
    is_whole = "\N{REPLACEMENT CHARACTER}" not in before + words[1]
    signs = [sum(character.isalpha() for character in word) for word in words]
    return 4 * is_whole + sum((count > 0) + (count >= _WORD) for count in signs)
