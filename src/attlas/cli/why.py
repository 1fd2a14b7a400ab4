"""``attlas why``: why a head looks where it looks, from a recording with parts."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

from attlas import pictures
from attlas.cli.checks import check_target, layer_and_head
from attlas.cli.files import entry_of, open_folder
from attlas.cli.formatting import PART_OF_CHARACTER
from attlas.cli.terminal import Terminal, UsageError
from attlas.heads.classification import measure_entry
from attlas.heads.explanation.summary import map_summary, summary
from attlas.pictures.why import part_label
from attlas.recording.atlas import Atlas, Entry

_BAR = 24  # characters of the longest bar
_SHOWN = 6  # parts that have a line of their own


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Say why, and draw it where asked for.

    Raises
    ------
    UsageError
        If the head or the cell is none of the recording, or it has no parts.
    RecordingError
        If the folder is no recording.
    """
    if arguments.out is not None:
        check_target(arguments.out, "-o", (".png", ".svg", ".pdf"))
        pictures.sheet(1, 1)  # without matplotlib, say so now
    atlas = open_folder(arguments.atlas)
    layer, head = layer_and_head(arguments.head, "--head")
    rule = "--head must be a layer and one of its recorded heads."
    if atlas.entries and layer not in atlas.layers():
        other = atlas.entry(atlas.layers()[-1])
        raise UsageError(rule, f"--head {arguments.head}", f"--head {other.layer}.{other.heads[0]}")
    entry = entry_of(atlas, layer)
    if head not in entry.heads:
        raise UsageError(rule, f"--head {arguments.head}", f"--head {entry.layer}.{entry.heads[0]}")
    cell = None if arguments.at is None else _cell(arguments.at, entry)
    if not atlas.parts:
        rule, fix = "the recording must have parts of logits.", "attlas record --parts -o run.atlas"
        raise UsageError(rule, f"none in {arguments.atlas}", fix)
    if cell is None:
        _explain_map(atlas, entry, head, arguments, terminal)
        return
    query, key = cell
    at = query - entry.queries[0], key - entry.first_key
    if entry.need_matrix().logits[0, entry.heads.index(head)][at] == -math.inf:
        rule, found = "--at must be a query and a key that it may see.", f"--at {arguments.at}, which the mask hides"
        raise UsageError(rule, found, f"--at {max(cell)},{min(cell)}")
    with terminal.step("computing"):
        told = summary(atlas, (entry.name, entry.call), head, cell=at, names=_names(atlas, entry))
    queries, keys = (texts[0] if texts else [] for texts in atlas.texts_of(entry))
    _say(told, queries, keys, (query, key), terminal)
    if arguments.out is not None:
        words = keys or [str(place) for place in range(entry.first_key + entry.shape[3])]
        title = f"Head {entry.layer}·{head} at {_quoted(queries, query)} looks at {_quoted(keys, key)}: why?"
        figure = pictures.why(told, words, query=query, key=key, title=title, theme=arguments.theme)
        terminal.files([(pictures.save(figure, arguments.out), "the same as a picture")])


def _explain_map(atlas: Atlas, entry: Entry, head: int, arguments: Namespace, terminal: Terminal) -> None:
    """Say what pairs of parts add where a head looks, and draw the table where asked for."""
    with terminal.step("computing"):
        told = map_summary(atlas, (entry.name, entry.call), head, names=_names(atlas, entry))
    above = f"{told['total']:+.1f} above the mean of the keys"
    terminal.say(f"Where head {entry.layer}·{head} looks, its logits lie {above}", "bold")
    table, queries, keys = told["table"], told["queries"], told["keys"]
    for name, parts, others in (("keys", keys, told["others"][1]), ("queries", queries, told["others"][0])):
        terminal.say(f"\n  What each part of the {name} adds:")
        joined = told["total"] - sum(part["logit"] for part in parts)
        _bars(sorted(parts, key=lambda part: -abs(part["logit"])), terminal, others=(others, joined))
    pairs = [(table[i][j], query, key) for i, query in enumerate(queries) for j, key in enumerate(keys)]
    terminal.say("\n  Largest pairs, part of the query -> part of the key:")
    for value, query, key in sorted(pairs, key=lambda pair: -abs(pair[0]))[:5]:
        terminal.say(f"    {value:+6.2f}  {part_label(query)} -> {part_label(key)}")
    terminal.say()
    weighted = "Means over all queries, weighted by the attention weights."
    terminal.prose(f"{weighted} This explains logits, not what the model answers.", "dim")
    for text in told["notes"]:
        terminal.prose(f"{text[0].upper()}{text[1:]}.", "dim")
    if arguments.out is not None:
        title = f"Head {entry.layer}·{head}: which part of the query meets which of the key"
        figure = pictures.why_map(told, title=title, theme=arguments.theme)
        terminal.files([(pictures.save(figure, arguments.out), "the table of pairs")])


def _cell(text: str, entry: Entry) -> tuple[int, int]:
    """Return the positions of query and key in the text."""
    words = [word.strip() for word in text.split(",")]
    first, stop = entry.queries
    keys = range(entry.first_key, entry.first_key + entry.shape[3])
    if len(words) == 2 and all(word.isdecimal() for word in words):
        query, key = map(int, words)
        if first <= query < stop and key in keys:
            return query, key
    rule = f"--at must be a query from {first} to {stop - 1} and a key from {keys.start} to {keys.stop - 1}."
    raise UsageError(rule, f"--at {text}", f"--at {stop - 1},{keys.start}")


def _names(atlas: Atlas, entry: Entry) -> dict[tuple[int, int], str]:
    """Return what the heads of the layers before an entry are, where they are of a known kind."""
    earlier = [e for e in atlas.entries if (e.kind, e.call) == (entry.kind, entry.call) and e.layer < entry.layer]
    found = [(e.layer, head) for e in earlier for head in measure_entry(atlas, e)]
    return {(layer, head.head): head.patterns[0].name for layer, head in found if head.patterns[0].name != "mixed"}


def _quoted(texts: list[str], place: int) -> str:
    """Return the text of a token in quotation marks; its position where the text is not known."""
    if place < len(texts):
        return f'"{texts[place]}"'.replace("\n", "↵") if texts[place] else PART_OF_CHARACTER
    return f"token {place}"


def _say(told: dict[str, Any], queries: list[str], keys: list[str], cell: tuple[int, int], terminal: Terminal) -> None:
    """Print the sentences, the bars and what they are."""
    query, key = cell
    looks = f"at {_quoted(queries, query)} ({query}) looks at {_quoted(keys, key)} ({key})"
    numbers = f"weight {told['weight']:.2f}, logit {told['logit']:.2f}"
    terminal.say(f"Head {told['layer']}·{told['head']} {looks}: {numbers}", "bold")
    if told["writer"] is not None:
        terminal.prose(" ".join(_sentences(told, keys, key)))
    above = f"{told['above']:+.1f} above the mean of its row" if told["relative"] else f"{told['logit']:+.1f}"
    for side, name in (("keys", "key"), ("queries", "query")):
        terminal.say(f"\n  What each part of the {name} adds to the logit, {above}:")
        _bars(told[side], terminal)
    terminal.say("\n  Largest pairs, part of the query -> part of the key:")
    for pair in told["pairs"][:5]:
        terminal.say(f"    {pair['logit']:+6.2f}  {part_label(pair['query'])} -> {part_label(pair['key'])}")
    terminal.say()
    note = f"All pairs sum to the logit; they differ by {abs(told['remainder']):.0e}."
    terminal.prose(f"{note} This explains a logit, not what the model answers.", "dim")
    for text in told["notes"]:
        terminal.prose(f"{text[0].upper()}{text[1:]}.", "dim")


def _sentences(told: dict[str, Any], keys: list[str], key: int) -> list[str]:
    """Return who wrote most of the key, from where it came, and the cell without it."""
    writer = told["writer"]
    of = f"the {told['above']:+.1f} by which the logit lies above its row" if told["relative"] else "the logit"
    found = [f"Most of it stands in the key: {part_label(writer)} wrote {writer['logit']:+.1f} of {of}."]
    if writer["sources"]:
        at = writer["sources"][0]["at"]
        back = {0: "the token itself", 1: "the token before"}.get(key - at, f"{key - at} tokens earlier")
        found.append(f"It took that from {_quoted(keys, at)} ({at}), {back}.")
    if writer["without"] is not None:
        weight = writer["without"]["weight"]
        found.append(f"Without this part the weight would be {weight:.2f}, if all norms kept their scales.")
    return found


def _bars(parts: list[dict[str, Any]], terminal: Terminal, *, others: tuple[int, float] = (0, 0.0)) -> None:
    """Print a bar for each of the largest parts, and one for all others; some are given by their number and sum."""
    rows = [(part_label(part), part["logit"]) for part in parts[:_SHOWN]]
    count, joined = others
    if len(parts[_SHOWN:]) + count:
        rest = sum(part["logit"] for part in parts[_SHOWN:]) + joined
        rows.append((f"{len(parts[_SHOWN:]) + count} other parts", rest))
    width = max(len(name) for name, _ in rows)
    largest = max(1e-9, *(abs(value) for _, value in rows))
    for name, value in rows:
        bar = "█" * round(_BAR * abs(value) / largest)
        terminal.say(
            f"    {name:<{width}}  {terminal.style(f'{bar:<{_BAR}}', 'red' if value < 0 else 'blue')} {value:+6.2f}"
        )
