"""What a text is made of: functions and classes of code; sections, paragraphs and sentences of prose."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["class", "function", "section", "paragraph", "sentence"]

_LEAST_CODE = 0.3  # share of a text in functions and classes from which on it is code and nothing else
_LEAST_PROSE = 0.4  # share of the paragraphs in sentences from which on a text is prose
_LEAST_LETTERS = 0.6  # share of letters among the characters of a sentence that are no spaces
_LEAST_LINES = 0.8  # share of lines that end a sentence, where each line is a paragraph
_NAME_LENGTH = 48  # characters of a name


class Part(NamedTuple):
    """A named part of a text: its characters from `start` to `stop` - 1."""

    start: int
    stop: int
    kind: Kind
    name: str


def parts_of(text: str) -> list[Part]:
    r"""Return the named parts of a text, in the order of their first characters, outer ones first.

    Notes
    -----
    Any two parts are apart, or one lies within the other. Of code these are functions and classes, found by their
    ``def`` and ``class`` lines and indentation, or by their braces. Of prose they are sections below headings of
    Markdown and Wikipedia, paragraphs and sentences, where there are two or more. A text of neither has no parts.

    Examples
    --------
    >>> from attlas.view.structure import parts_of
    >>> parts_of("def f(x):\n    return x\n")
    [Part(start=0, stop=22, kind='function', name='f')]
    >>> [part.name for part in parts_of("It rains. We stay at home.")]
    ['It rains.', 'We stay at home.']
    >>> parts_of("1 2 3 4")
    []
    """
    code = max((_python_parts(text), _brace_parts(text)), key=_covered_length)
    if _covered_length(code) >= _LEAST_CODE * len(text.strip()):
        return code
    prose = [part for part in _prose_parts(text) if not any(_do_cross(part, other) for other in code)]
    inner = [part for part in prose if not any(other.start <= part.start < other.stop for other in code)]
    return sorted([*code, *inner], key=lambda part: (part.start, -part.stop))


def shortened(text: str) -> str:
    """Return the first words of a text as a name: at most 48 characters, spaces as single ones."""
    words = " ".join(text[: 4 * _NAME_LENGTH].split())
    return words if len(words) <= _NAME_LENGTH else f"{words[: _NAME_LENGTH - 1].rstrip()}…"


def _covered_length(parts: Sequence[Part]) -> int:
    """Return how many characters lie in some part."""
    covered = end = 0
    for part in parts:
        covered += max(0, part.stop - max(end, part.start))
        end = max(end, part.stop)
    return covered


def _do_cross(a: Part, b: Part) -> bool:
    """Return whether two parts share characters and each has some that the other has not."""
    return a.start < b.start < a.stop < b.stop or b.start < a.start < b.stop < a.stop


# ----------------------------------------------------------------------------------------------------------------- code

_STRINGS = r""""(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?"""
_PYTHON_TEXTS = re.compile(
    rf'''"""(?:\\.|[^\\])*?(?:"""|\Z)|\'\'\'(?:\\.|[^\\])*?(?:\'\'\'|\Z)|{_STRINGS}|\#[^\n]*''', re.S
)
_PYTHON_LINE = re.compile(r"(?:async[ \t]+)?(def)[ \t]+(\w+)[ \t]*[(\[]|(class)[ \t]+(\w+)[ \t]*[:(\[]")

_BRACE_TEXTS = re.compile(rf"/\*(?:[^*]|\*(?!/))*(?:\*/|\Z)|//[^\n]*|{_STRINGS}|`(?:\\.|[^`\\])*(?:`|\Z)", re.S)
_ARGUMENTS = r"\((?:[^;{}]|\{(?:[^;{}]|\{[^;{}]{0,80}\}){0,200}\}){0,400}\)"
_BRACE_LINE = re.compile(
    rf"""^[ \t]*(?:
      (?:[\w.@]+[ \t]+)*? (?:class|struct|interface|enum|trait|impl|namespace) [ \t]+
        (?P<type>[A-Za-z_$][\w$]*) [^;{{}}()]{{0,300}}
    | (?:\w+[ \t]+)*? (?:const|let|var) [ \t]+ (?P<variable>[A-Za-z_$][\w$]*) [^=;{{}}\n]{{0,100}} = [ \t]*
        (?:async[ \t]*)? (?:function\b[^;{{}}(]{{0,60}}{_ARGUMENTS} | {_ARGUMENTS}[^;{{}}()=]{{0,100}}=>
          | [\w$]+[ \t]*=>) \s*
    | (?:[\w$<>\[\],:*&~?.]+[ \t]+)*? (?:\([^();{{}}\n]{{0,80}}\)[ \t]*)? [*&\#]?
        (?P<function>(?!func\b)[A-Za-z_$][\w$]*) [ \t]*
        (?:<[^;{{}}()]{{0,100}}>)? {_ARGUMENTS} [^;{{}}()=]{{0,120}}
    )\{{""",
    re.M | re.X,
)
_STATEMENTS = frozenset(
    ("if", "for", "while", "switch", "catch", "return", "function", "else", "do", "with", "sizeof", "new", "await",
     "throw", "typeof", "match", "loop", "unsafe", "foreach", "using", "lock", "elif", "until", "defer", "go")
)  # fmt: skip


def _blanked(text: str, pattern: re.Pattern[str]) -> str:
    """Return a text with spaces in place of all that matches, line by line."""
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def _python_parts(text: str) -> list[Part]:
    """Return functions and classes by their lines and the indentation below them, with their decorators."""
    if not re.search(r"\b(?:def|class)[ \t]", text):
        return []
    parts = _indented_parts(text, _blanked(text, _PYTHON_TEXTS))
    return parts or _indented_parts(text, text)  # a text that begins within a string: inside and outside are swapped


def _indented_parts(text: str, code: str) -> list[Part]:
    """Return the same, of a text and of its code without strings and comments."""
    parts: list[Part] = []
    opened: list[tuple[int, int, Kind, str]] = []  # indentation, start, kind and name of what goes on
    position = end = depth = 0  # start of the line, end of the last line of code, and open brackets
    decorated: int | None = None  # where the decorators of the next function begin

    def close(indent: int) -> None:
        while opened and opened[-1][0] >= indent:
            _, start, kind, name = opened.pop()
            parts.append(Part(start, end, kind, name))

    for line, bare in zip(text.split("\n"), code.split("\n"), strict=True):
        content = bare.lstrip()
        found = _PYTHON_LINE.match(content)
        depth = 0 if found else depth  # brackets that are never closed end at a definition
        indent = _indentation(line)
        if not content:  # a comment or a string belongs to what it is indented below
            end = position + len(line.rstrip()) if line.strip() and opened and indent > opened[-1][0] else end
        else:
            if not depth:
                close(indent)
                first = position + len(bare) - len(content)
                if found:
                    kind: Kind = "function" if found[1] else "class"
                    opened.append((indent, first if decorated is None else decorated, kind, found[2] or found[4]))
                decorated = (first if decorated is None else decorated) if content[0] == "@" else None
            end = position + len(line.rstrip())
            depth = max(0, depth + sum(map(bare.count, "([{")) - sum(map(bare.count, ")]}")))
        position += len(line) + 1
    close(0)
    return sorted(parts, key=lambda part: (part.start, -part.stop))


def _indentation(line: str) -> int:
    """Return by how many columns a line is indented."""
    wide = line.expandtabs()
    return len(wide) - len(wide.lstrip())


def _brace_parts(text: str) -> list[Part]:
    """Return functions and classes of languages with braces, such as JavaScript, C, Java, Go and Rust."""
    if "{" not in text:
        return []
    code = _blanked(text, _BRACE_TEXTS)
    ends, opened = {}, []
    for brace in re.finditer(r"[{}]", code):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            ends[opened.pop()] = brace.end()
    parts = []
    for found in _BRACE_LINE.finditer(code):
        name = found["type"] or found["variable"] or found["function"]
        if name in _STATEMENTS:
            continue
        start = found.start() + len(found[0]) - len(found[0].lstrip())
        stop = ends.get(found.end() - 1, len(text.rstrip()))  # the end of a text that was cut
        parts.append(Part(start, stop, "class" if found["type"] else "function", name))
    return parts


# ---------------------------------------------------------------------------------------------------------------- prose

_HEADINGS = re.compile(r"^(?:(#{1,6})[ \t]+(\S[^\n]*)| ?((?:= ?){1,6}) ?([^=\s][^=\n]*?)(?: ?=){1,6} *)$", re.M)
_FENCES = re.compile(r"^```[^\n]*\n(?:[^`]|`(?!``))*```", re.M)  # code in Markdown
_BLANK_LINES = re.compile(r"\n[^\S\n]*(?:\n[^\S\n]*)+")
_LINE_ENDS = re.compile(r"\n+")
_ENDS = re.compile(
    r"""(?P<mark>[.!?…]+)["'”’»)\]]*(?=\s+["'“‘«(\[¿¡]*(?:[^\W_a-z]|\Z)|\s*\Z)|[。！？]+[”’」』）》]*""",
)
_ABBREVIATIONS = re.compile(
    r"(?:^|[\s(\[\"'“‘])(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|cf|e\.g|i\.e|No|Fig|Figs|Eq|Sec|Vol|pp|al|approx|Inc|Ltd|Co"
    r"|(?:[A-Za-z]\.)+[A-Za-z])\Z"
)
_LAST_WORD = 12  # characters before a full stop in which an abbreviation is looked for
_BEGINS = re.compile(r"""["'“‘«(\[¿¡「『《*_`-]*\s*(?:[^\W_a-z]|(?<=`).)|.*[。！？][”’」』）》]*\Z""", re.S)


def _prose_parts(text: str) -> list[Part]:
    """Return sections, paragraphs and sentences; nothing where most of a text is not in sentences."""
    text = _blanked(text, _FENCES)
    headings = [
        (found.start(), found.end(), len((found[1] or found[3]).replace(" ", "")), found[2] or found[4])
        for found in _HEADINGS.finditer(text)
    ]
    sections = [*_sections(text, headings)]
    borders = sorted({0, len(text), *(place for start, end, *_ in headings for place in (start, end))})
    titles = {start for start, *_ in headings}
    blocks = [block for a, b in pairwise(borders) if a not in titles for block in _blocks(text, a, b)]
    paragraphs: list[Part] = []
    sentences: list[Part] = []
    for start, stop in blocks:
        found = [*_sentences(text, start, stop)]
        if found:
            paragraphs.append(Part(start, stop, "paragraph", shortened(text[start:stop])))
            sentences += found
    whole = sum(stop - start for start, stop in blocks)
    if len(sentences) < 2 or _covered_length(sentences) < _LEAST_PROSE * whole:
        return []
    parts = [*(sections if len(sections) > 1 else []), *(paragraphs if len(paragraphs) > 1 else []), *sentences]
    return sorted(parts, key=lambda part: (part.start, -part.stop))


def _sections(text: str, headings: Sequence[tuple[int, int, int, str]]) -> Iterator[Part]:
    """Give the part of a text below each heading (start, end, level, title), up to one of its level or above."""
    for number, (start, _, level, title) in enumerate(headings):
        later = (other for other, _, other_level, _ in headings[number + 1 :] if other_level <= level)
        yield Part(start, len(text[: next(later, len(text))].rstrip()), "section", shortened(title))


def _blocks(text: str, start: int, stop: int) -> list[tuple[int, int]]:
    """Return where the paragraphs of a stretch are: between blank lines, or lines where each ends a sentence."""
    found = [*_between(text, start, stop, _BLANK_LINES)]
    if len(found) > 1:
        return found
    lines = [*_between(text, start, stop, _LINE_ENDS)]
    ended = sum(bool(_ENDS.search(text[max(a, b - 6) : b])) for a, b in lines)
    return lines if len(lines) > 1 and ended >= _LEAST_LINES * len(lines) else found


def _between(text: str, start: int, stop: int, separator: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Give what lies between separators, without the spaces about it."""
    place = start
    for found in [*separator.finditer(text, start, stop), None]:
        end = found.start() if found else stop
        piece = text[place:end]
        if piece.strip():
            yield place + len(piece) - len(piece.lstrip()), place + len(piece.rstrip())
        place = found.end() if found else stop


def _sentences(text: str, start: int, stop: int) -> Iterator[Part]:
    """Give the sentences of a paragraph; what follows the last full stop is one where there are others."""
    paragraph, place = text[start:stop], 0
    for found in _ENDS.finditer(paragraph):
        before = paragraph[max(place, found.start() - _LAST_WORD) : found.start()]
        if found["mark"] == "." and _ABBREVIATIONS.search(before):
            continue
        yield from _sentence(paragraph, place, found.end(), start)
        place = found.end()
    if place:
        yield from _sentence(paragraph, place, len(paragraph), start)


def _sentence(paragraph: str, a: int, b: int, start: int) -> Iterator[Part]:
    """Give characters a to b of a paragraph as a sentence if they look like one; the paragraph begins at `start`."""
    words = paragraph[a:b].strip()
    solid = [character for character in words if not character.isspace()]
    letters = sum(character.isalpha() for character in solid)
    if len(solid) > 2 and letters >= _LEAST_LETTERS * len(solid) and (_BEGINS.match(words) or start + a == 0):
        first = start + a + len(paragraph[a:b]) - len(paragraph[a:b].lstrip())
        yield Part(first, first + len(words), "sentence", shortened(words))
