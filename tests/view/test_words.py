"""The texts of the page in Chinese: each there, none left over, each with the values of the English one."""

import json
import re
from importlib import resources
from pathlib import Path

from attlas.view import typed_parts
from attlas.view.about import SENTENCES
from attlas.view.corpus import NO_PLACE, NO_TRANSFORMERS, NOT_THERE, OTHER_MODEL, WITHOUT_MODEL
from attlas.view.corpus_measures import _KNOWN_MEASURES
from attlas.view.corpus_offline import OFFLINE
from attlas.view.rolled import REASONS
from attlas.view.sentences import WORDS
from attlas.view.statistics import _COLUMN_DESCRIPTIONS, _UNKNOWN_DESCRIPTION

STATIC = Path(str(resources.files("attlas.view").joinpath("static")))
USED = re.compile(r'\bt\(\s*("(?:[^"\\]|\\.)*")')


def chinese() -> dict[str, str]:
    def each_once(pairs: list[tuple[str, str]]) -> dict[str, str]:
        assert len(dict(pairs)) == len(pairs), "a text twice"
        return dict(pairs)

    return json.loads((STATIC / "words" / "zh.json").read_text("utf-8"), object_pairs_hook=each_once)


def texts_in_the_code() -> set[str]:
    files = [*STATIC.rglob("*.js")]
    return {json.loads(text) for file in files for text in USED.findall(file.read_text("utf-8"))}


def texts_of_the_server() -> set[str]:
    """Names and descriptions of statistics, of heads and of parts of logits, and what is known of a recording."""
    columns = {text for column in _COLUMN_DESCRIPTIONS for text in (column.label, column.unit, column.description)}
    fields = ("short", "does", "definition", "headline", "evidence", "on_text")
    kinds = {str(kind[field]) for kind in WORDS.values() for field in fields} | set(WORDS)
    measures = {text for column in _KNOWN_MEASURES for text in (column.label, column.unit, column.description)}
    about = {"Recorded", "Memory", "Again", "Made with"}
    parts = {"token", "position", "embedding", "stream", "biases", "bias of q", "bias of k", "position bias"}
    reasons = {NO_PLACE, NO_TRANSFORMERS, NOT_THERE, OTHER_MODEL, WITHOUT_MODEL, OFFLINE}
    reasons |= {text for name, text in vars(typed_parts).items() if name.isupper() and isinstance(text, str)}
    reasons |= {*REASONS}
    return (columns | measures | kinds | about | parts | reasons | {_UNKNOWN_DESCRIPTION, *SENTENCES}) - {""}


def test_every_text_is_there_and_none_is_left_over() -> None:
    texts = chinese()
    needed = texts_in_the_code() | texts_of_the_server()
    assert needed - set(texts) == set()
    # Those that the code passes on by a name: names of axes and of statistics that tracks share.
    assert set(texts) - needed == {"query", "key"} - needed


def test_every_text_has_the_values_of_the_english_one() -> None:
    for english, text in chinese().items():
        assert sorted(re.findall(r"\{\d\}", text)) == sorted(re.findall(r"\{\d\}", english)), english
