"""What texts are made of, by their tokens: functions, sections, paragraphs, sentences, documents."""

import ast
import json
import random
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.atlases import atlas_of, random_matrix

import attlas
from attlas.masks import Mask, runs_of
from attlas.view import Service
from attlas.view.outline import Stretch, outline_of
from attlas.view.structure import parts_of
from attlas.view.tokens import Text

PYTHON = '''"""A module: def hidden(x): pass"""
import os


@decorated(
    1,
)
def first(
    a,
):
    """Doc.

def not_a_function():
    """
    text = "class Fake:"
    return a  # def nothing():


class Shape(Base):
    size = {
        "a": 1,
    }

    def area(self):
        def inner():
            return 1

        return inner()

    # a comment

    async def grow(self): return 2


x = 1
'''

JAVASCRIPT = """// function nothing() {}
import { a } from "./a.js";

export async function first({ one, two = {} }, three) {
  if (one) {
    return `class Fake { ${two} }`;
  }
}

export class Shape extends Base {
  static #size = 1;

  area(factor) {
    return [1, 2].map((each) => {
      return each * factor;
    });
  }
}

const draw = async (context) => {
  for (const each of context) {
    first(each, 1);
  }
};
describe("a test", () => {
  it("runs", () => {});
});
"""

RUST = """impl Shape for Circle {
    fn area(&self) -> f64 {
        self.radius * 2.0
    }
}
"""

ENGLISH = """Dr. Brown met Mrs. Smith at 3.14 p.m. in the U.S. embassy. "Where were you?" he asked her, e.g. last night!
She did not know... It was late.

The second paragraph has one sentence about J. R. Tolkien.

And a third one (it is short.) Then it ends"""

CHINESE = """清晨，老人打开了门。“你从哪里来？”他问。孩子没有回答！

第二段只有一句话，讲的是门外的那条河。"""


def names(text: str, kind: str) -> list[str]:
    return [part.name for part in parts_of(text) if part.kind == kind]


def tokens_of(text: str) -> list[str]:
    """Cut a text as tokenizers of code do: words with the space before them, other characters alone."""
    return re.findall(r" ?\w+|\n[ ]*|.", text)


def apart_or_within(parts: Sequence[Any]) -> bool:
    """Return whether no two parts cross, and each comes after those that it lies within."""
    opened: list[Any] = []
    for part in parts:
        while opened and opened[-1].stop <= part.start:
            opened.pop()
        if part.start >= part.stop or (opened and part.stop > opened[-1].stop):
            return False
        opened.append(part)
    return [part.start for part in parts] == sorted(part.start for part in parts)


def test_python_by_its_lines_and_indentation() -> None:
    parts = parts_of(PYTHON)
    assert [(part.kind, part.name) for part in parts] == [
        ("function", "first"), ("class", "Shape"), ("function", "area"), ("function", "inner"), ("function", "grow"),
    ]  # fmt: skip
    text = {part.name: PYTHON[part.start : part.stop] for part in parts}
    assert text["first"].startswith("@decorated(")
    assert text["first"].endswith("# def nothing():")
    assert text["area"].endswith("return inner()")
    assert text["inner"] == "def inner():\n            return 1"
    assert text["grow"] == "async def grow(self): return 2"
    assert text["Shape"].endswith(text["grow"])


def test_python_agrees_with_its_parser() -> None:
    source = Path(typing.__file__).read_text("utf-8")
    lines = source.split("\n")
    kinds = {ast.ClassDef: "class", ast.FunctionDef: "function", ast.AsyncFunctionDef: "function"}
    expected = {
        (
            kinds[type(node)],
            node.name,
            min([node.lineno, *(one.lineno for one in node.decorator_list)]),
            node.end_lineno,
        )
        for node in ast.walk(ast.parse(source))
        if type(node) in kinds
    }
    found = {
        (part.kind, part.name, source.count("\n", 0, part.start) + 1, source.count("\n", 0, part.stop) + 1)
        for part in parts_of(source)
    }
    assert len(expected) > 200

    def ends_in_a_comment(start: int, stop: int) -> bool:
        return all(not line.strip() or line.strip()[0] == "#" for line in lines[start:stop])

    ends = {place[:3]: place[3] for place in expected}
    assert {place[:3] for place in found} == set(ends)
    assert all(
        stop == ends[rest] or ends_in_a_comment(ends[rest], stop) for *rest, stop in found for rest in [tuple(rest)]
    )


@pytest.mark.parametrize("cut", [*range(5, len(PYTHON), 37)])
def test_a_text_that_is_cut_keeps_its_functions(cut: int) -> None:
    before, after = parts_of(PYTHON[:cut]), parts_of(PYTHON[cut:])
    assert apart_or_within(before)
    assert apart_or_within(after)
    whole = [part.name for part in parts_of(PYTHON) if part.stop < cut - 1]
    assert [part.name for part in before if part.name in whole] == whole


def test_a_text_that_begins_in_a_string() -> None:
    assert names('of a docstring.\n"""\ndef f():\n    return 1\n', "function") == ["f"]


def test_code_with_braces() -> None:
    assert [(part.kind, part.name) for part in parts_of(JAVASCRIPT)] == [
        ("function", "first"), ("class", "Shape"), ("function", "area"), ("function", "draw"),
    ]  # fmt: skip
    text = {part.name: JAVASCRIPT[part.start : part.stop] for part in parts_of(JAVASCRIPT)}
    assert text["area"].endswith("});\n  }")
    assert text["draw"].startswith("const draw")
    assert text["first"].endswith("  }\n}")
    assert [(part.kind, part.name) for part in parts_of(RUST)] == [("class", "Shape"), ("function", "area")]
    assert names("func (s *Shape) Area(x int) float64 {\n\treturn 1\n}\n", "function") == ["Area"]
    assert names("static int\nmain(int argc, char **argv) {\n  if (argc) { exit(1); }\n}\n", "function") == ["main"]
    assert parts_of(JAVASCRIPT[:400])[-1].stop == len(JAVASCRIPT[:400].rstrip())  # a text that was cut


def test_english_prose() -> None:
    assert names(ENGLISH, "paragraph") == [
        "Dr. Brown met Mrs. Smith at 3.14 p.m. in the U.…",
        "The second paragraph has one sentence about J.…",
        "And a third one (it is short.) Then it ends",
    ]
    sentences = [ENGLISH[part.start : part.stop] for part in parts_of(ENGLISH) if part.kind == "sentence"]
    assert sentences == [
        "Dr. Brown met Mrs. Smith at 3.14 p.m. in the U.S. embassy.",
        '"Where were you?" he asked her, e.g. last night!',
        "She did not know...",
        "It was late.",
        "The second paragraph has one sentence about J. R. Tolkien.",
        "And a third one (it is short.)",
        "Then it ends",
    ]


def test_chinese_prose() -> None:
    assert names(CHINESE, "paragraph")[1] == "第二段只有一句话，讲的是门外的那条河。"
    sentences = [CHINESE[part.start : part.stop] for part in parts_of(CHINESE) if part.kind == "sentence"]
    assert sentences[:4] == ["清晨，老人打开了门。", "“你从哪里来？”", "他问。", "孩子没有回答！"]


def test_sections_of_markdown_and_of_wikipedia() -> None:
    begin, sub, last = (
        "# One\n\nIt rains. We stay.\n\n```sh\n# no heading\n```",
        "## Two\n\nWe go.",
        "# Three\n\nIt is dry.",
    )
    markdown = f"{begin}\n\n{sub}\n\n{last}\n"
    sections = [markdown[part.start : part.stop] for part in parts_of(markdown) if part.kind == "section"]
    assert sections == [f"{begin}\n\n{sub}", sub, last]
    wiki = " = Title = \n \n It rains . We stay . \n \n = = Part = = \n \n It stops . We go . \n"
    assert names(wiki, "section") == ["Title", "Part"]


def test_paragraphs_of_one_line_each() -> None:
    assert names("It rains here.\nWe stay at home.\nThe sun shines. We go.\n", "paragraph") == [
        "It rains here.", "We stay at home.", "The sun shines. We go.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n\n\n",
        "one two three four five",
        "1 2 3 4\n5 6 7 8\n\n9 10 11 12\n",
        "x = 1\ny = x.size\nprint(x, y)\n\nfor each in y:\n    print(each)\n",
        '{"a": [1, 2], "b": {"c": null}}',
        "a,b,c\n1,2,3\n4,5,6\n",
        "".join(f" w{i}" for i in range(100)),
        "One sentence alone.",
        "ACGTACGTTAGC" * 20,
    ],
)
def test_a_text_without_structure_has_no_parts(text: str) -> None:
    assert parts_of(text) == []
    assert outline_of(Text(tokens_of(text)), len(tokens_of(text))) == []


def test_random_characters_take_little_time_and_never_cross() -> None:
    dice = random.Random(0)
    for letters in ("abcD .\n", "{}() \n;=fx", "def f():\n \"'#", "。！“”中 \n", "/*`'\"\\\n{}", "= \n#a."):
        text = "".join(dice.choice(letters) for _ in range(20_000))
        assert apart_or_within(parts_of(text))
        tokens = tokens_of(text)
        assert apart_or_within(outline_of(Text(tokens), len(tokens)))


@pytest.mark.parametrize(
    "text", [PYTHON, JAVASCRIPT, ENGLISH, CHINESE], ids=["python", "javascript", "english", "chinese"]
)
def test_tokens_hold_the_characters_of_their_parts(text: str) -> None:
    tokens = tokens_of(text)
    outline = outline_of(Text(tokens), len(tokens))
    assert apart_or_within(outline)
    distinct = dict.fromkeys(part[:2] for part in parts_of(text))
    assert len(outline) == len(distinct)
    for stretch, (start, stop) in zip(outline, distinct, strict=True):
        assert "".join(tokens[stretch.start : stretch.stop]).strip() == text[start:stop].strip()


def test_a_token_that_two_parts_share_is_of_the_first() -> None:
    outline = outline_of(Text(["It", " rains", ". We", " stay", "."]), 5)
    assert [stretch[:2] for stretch in outline] == [(0, 3), (3, 5)]


def test_words_without_spaces() -> None:
    words = ["It", "rains", ".", "We", "stay", "at", "home", "."]
    assert [(stretch.name, *stretch[:2]) for stretch in outline_of(Text(words), 8)] == [
        ("It rains.", 0, 3), ("We stay at home.", 3, 8),
    ]  # fmt: skip


def test_characters_of_several_tokens() -> None:
    text = Text(["", "你", "好", "。", "他", "来", "了", "。"], {0: b"\xe4", 1: b"\xbd\xa0"})
    assert len(outline_of(text, 8)) == 2


def test_documents_between_tokens_that_begin_and_end_texts() -> None:
    tokens = ["<s>", "one", " two", "</s>", "<s>", "three", "</s>", "<pad>", "<pad>"]
    assert outline_of(Text(tokens), 9) == [Stretch(1, 3, "document", "one two"), Stretch(5, 6, "document", "three")]
    assert outline_of(Text(tokens[:4]), 4) == []  # one text
    ends = ["<|endoftext|>", "a", "<|endoftext|>", "b", "c"]
    assert [stretch[:2] for stretch in outline_of(Text(ends), 5)] == [(1, 2), (3, 5)]


def test_tokens_that_begin_and_end_a_text_are_in_no_name() -> None:
    tokens = ["<|endoftext|>", "It", " rains", ".", " We", " stay", ".", "</s>"]
    assert outline_of(Text(tokens), 8) == [(1, 4, "sentence", "It rains."), (4, 7, "sentence", "We stay.")]


def test_stretches_with_names_of_their_own_come_first() -> None:
    tokens = ["It", " rains", ".", " We", " stay", ".", " They", " go", "."]
    outline = outline_of(Text(tokens), 9, named={"prompt": (0, 4), "answer": (6, 9)})
    assert outline == [
        Stretch(0, 4, "named", "prompt"),
        Stretch(0, 3, "sentence", "It rains."),
        Stretch(6, 9, "named", "answer"),
    ]  # "We stay." crosses the first, "They go." is the second again


IDS = [0] * 5 + [1] * 7 + [2] * 4


@pytest.mark.parametrize(
    ("mask", "starts"),
    [
        (attlas.Documents(IDS), [0, 5, 12]),
        (attlas.Documents(IDS) & attlas.Causal(), [0, 5, 12]),
        (attlas.Causal() & attlas.Window(6, 0) & attlas.Documents(IDS), [0, 5, 12]),
        (attlas.Documents(IDS[::-1]) & attlas.Causal(), [0, 4, 11]),
        (runs_of(attlas.Documents(IDS) & attlas.Causal(), 1, 1, 16, 16), [0, 5, 12]),
        (attlas.Causal(), []),
        (attlas.Window(4, 0), []),
        (attlas.Window(0, 0), []),
        (attlas.Documents([7] * 16), []),
        (runs_of(attlas.Causal(), 1, 1, 16, 16), []),
        (runs_of(attlas.Window(3, 0), 1, 1, 16, 16), []),
    ],
    ids=lambda item: item.name() if isinstance(item, Mask) else "",
)
def test_documents_of_masks(mask: Mask, starts: list[int]) -> None:
    q = torch.randn(1, 2, 16, 4)
    service = Service(attlas.attend(q, q, mask=mask))
    stretches = ask(service)["query"]
    assert [start for start, *_ in stretches] == starts
    assert all(kind == "document" for *_, kind, _ in stretches)
    service.close()


def ask(service: Service, **question: int) -> Any:
    answer = service.answer("outline", {name: str(value) for name, value in ({"entry": 0} | question).items()})
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def test_documents_of_a_batch_whose_layers_see_a_window() -> None:
    ids = torch.tensor([IDS, IDS[::-1]])
    q = torch.randn(2, 1, 16, 4)
    tokens = [[f" w{i}" for i in range(16)], [f" v{i}" for i in range(16)]]
    window = attlas.attend(q, q, mask=attlas.Window(2, 0))
    documents = attlas.attend(q, q, mask=attlas.Documents(ids) & attlas.Causal())
    service = Service(atlas_of(window, documents, tokens=tokens))
    for entry in (0, 1):  # the mask of the second layer says it of the text, which both layers read
        assert [start for start, *_ in ask(service, entry=entry, batch=0)["query"]] == [0, 5, 12]
        assert [start for start, *_ in ask(service, entry=entry, batch=1)["query"]] == [0, 4, 11]
    assert service.answer("outline", {"entry": "0", "batch": "2"}).status == 404
    assert service.answer("outline", {}).status == 400
    service.close()


def test_queries_and_keys_of_two_texts() -> None:
    A = attlas.attend(torch.randn(1, 1, 6, 4), torch.randn(1, 1, 8, 4))
    german, english = (
        ["Er", " geht", ".", " Sie", " bleibt", "."],
        ["He", " goes", " home", ".", " She", " stays", " here", "."],
    )
    service = Service(A, tokens=(german, english))
    outlines = ask(service)
    assert [span[:2] for span in outlines["query"]] == [[0, 3], [3, 6]]
    assert [span[:2] for span in outlines["key"]] == [[0, 4], [4, 8]]
    service.close()


def test_an_offline_page_has_the_outline_of_each_entry_once(tmp_path: Path) -> None:
    tokens = tokens_of(PYTHON)
    atlas = atlas_of(random_matrix(len(tokens)), random_matrix(len(tokens), seed=1), tokens=tokens)
    service = Service(atlas)
    expected = ask(service)
    atlas.export(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.count('"outlines"') == 1
    assert page.count(json.dumps(expected["query"][0], separators=(",", ":"))) == 1
    service.close()
