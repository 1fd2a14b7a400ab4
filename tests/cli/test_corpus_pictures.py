"""attlas picture of a corpus: its card and its scatter say what is in the folder, and nothing lies over anything."""

import dataclasses
import json
import math
import re
import shutil
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.figures import faults_of

import attlas
from attlas import models, pictures
from attlas.cli import main
from attlas.cli.formatting import percent
from attlas.heads import MIXED, PATTERNS

pytest.importorskip("pyarrow", reason="pyarrow is in the extra `corpus`")
pytest.importorskip("matplotlib", reason="matplotlib is in the extra `plot`")
transformers = pytest.importorskip("transformers", reason="transformers is in the extra `hf`")

from attlas.corpus import Corpus, Sample  # noqa: E402
from attlas.pictures.scatter import KIND_COLOURS, Axis, Points, scatter  # noqa: E402

LIBRARY = Path(sysconfig.get_path("stdlib"))
CHINESE = ["注意力", "机器", "学习", "的", "大语言模型推理能力评测基准数据集", "词元", "，", "“"]
LONG = ["x" * 90, "_" * 80, "-----BEGIN CERTIFICATE-----", *(f"pneumonoultramicroscopic{i}" for i in range(9))]
Draw = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a corpus of the shipped model, over 24 texts that it did not see in training."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models.path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.path())
    made = tmp_path_factory.mktemp("corpora") / "library.corpus"
    attlas.corpus(
        model, [LIBRARY / "timeit.py", LIBRARY / "argparse.py"], made, tokenizer=tokenizer, length=200, limit=24
    )
    return made


@pytest.fixture
def drawn(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Run the command on the corpus, and return the figure that it saves."""
    kept: list[Any] = []
    save = pictures.save

    def keep(figure: Any, path: Path) -> Path:
        kept.append(figure)
        return save(figure, path)

    monkeypatch.setattr(pictures, "save", keep)

    def draw(*words: str, corpus: Path = folder) -> Any:
        assert main(["picture", str(corpus), *words, "-o", str(tmp_path / "x.png")]) == 0
        return kept[-1]

    return draw


def words_of(figure: Any) -> list[str]:
    """Return the words at the left of a card, line by line."""
    return [text.get_text() for text in figure.texts if text.get_position()[0] < 0.1]


def said_by(figure: Any) -> str:
    return " ".join(words_of(figure))


def points_of(figure: Any) -> tuple[Any, Any]:
    """Return the points and the ring of a scatter; None for no ring."""
    points, *rings = figure.axes[0].collections
    return points, rings[0] if rings else None


def replace_tokens(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """Let the samples of every corpus have other words."""
    samples = Corpus.samples

    def renamed(self: Corpus, layer: int, head: int) -> list[Sample]:
        found = samples(self, layer, head)
        return [dataclasses.replace(one, tokens=[words[i % len(words)] for i in one.ids]) for one in found]

    monkeypatch.setattr(Corpus, "samples", renamed)


def change_table(monkeypatch: pytest.MonkeyPatch, **columns: Callable[[Any], Any]) -> None:
    """Let the table of every corpus have other columns."""
    table = Corpus.table

    def changed(self: Corpus, kind: str = "pandas") -> Any:
        import pyarrow as pa

        found = table(self, "arrow")
        for name, change in columns.items():
            at = found.schema.get_field_index(name)
            found = found.set_column(at, name, pa.array([change(value) for value in found[name].to_pylist()]))
        return found

    monkeypatch.setattr(Corpus, "table", changed)


# --------------------------------------------------------------------------------------------------------- what it says


def test_the_card_says_what_the_corpus_holds(folder: Path, drawn: Draw) -> None:
    corpus = attlas.load(folder)
    table = corpus.table().set_index(["layer", "head"])
    figure = drawn("--card")
    lines, said = words_of(figure), said_by(figure)
    assert lines[:2] == ["library.corpus · python-gpt2", f"24 texts, {corpus.config['counts']['tokens']:,} tokens"]
    count = (table["kind"] == "induction").sum()
    assert 1 < count < 24
    assert f"{count} of 24 heads remember what came next" in said
    layer, head = best = table["induction"].idxmax()
    assert f"The clearest is layer {layer}, head {head}." in said
    assert f"{percent(table.loc[best, 'induction'])} of its attention goes to the token that followed" in said
    spread = corpus.head(layer, head).distributions["induction_text"]
    low, high = (spread["quantiles"][corpus.config["quantiles"].index(share)] for share in (0.05, 0.95))
    assert (
        f"On the texts, {percent(table.loc[best, 'induction_text'])} goes to what followed earlier copies; "
        f"in 90 % of the texts between {percent(low)} and {percent(high)}."
    ) in said
    assert lines[-1] == "attlas"


def test_the_example_is_one_of_the_stored_weights(folder: Path, drawn: Draw) -> None:
    found = re.search(r'it attends to "(.*?)" \((\d+) %\), after an earlier "(.*?)"', said_by(drawn("--card")))
    assert found is not None
    key_text, share, query_text = found.groups()
    table = attlas.load(folder).table().set_index(["layer", "head"])
    places = []
    for sample in attlas.load(folder).samples(*table["induction"].idxmax()):
        for query, key in enumerate(sample.keys[:, 0]):
            texts = sample.tokens[query], sample.tokens[key - 1], sample.tokens[key]
            if key > 0 and texts == (query_text, query_text, key_text):
                places.append(percent(float(sample.weights[query, 0])))
    assert f"{share} %" in places


def test_a_head_that_is_named_is_what_the_card_is_about(folder: Path, drawn: Draw) -> None:
    table = attlas.load(folder).table().set_index(["layer", "head"])
    layer, head = table.index[table["kind"] == "previous token"][0]
    said = said_by(drawn("--card", "--layer", str(layer), "--head", str(head)))
    assert f"Layer {layer}, head {head} looks at the token before" in said
    share = percent(table.loc[(layer, head), "previous"])
    assert f"{share} of its attention goes to the token before. In 90 % of the texts it is " in said
    mixed = table.index[table["kind"] == "mixed"]
    layer, head = mixed[-1]
    said = said_by(drawn("--card", f"--layer={layer - 4}", "--head", str(head)))
    assert f"Layer {layer}, head {head} follows no simple pattern" in said
    mean = percent(table.loc[(layer, head), "mean_max_activation"])
    assert f"Its largest weight in a text is {mean} on average; in 90 % of the texts between " in said


def test_a_layer_or_a_head_alone_means_the_most_telling_of_them(folder: Path, drawn: Draw) -> None:
    table = attlas.load(folder).table()
    for option, column in (("--layer", "layer"), ("--head", "head")):
        rows = table[table[column] == 2].set_index(["layer", "head"])
        layer, head = rows["induction"].idxmax()
        assert f"Layer {layer}, head {head} remembers" in said_by(drawn("--card", option, "2"))


def test_the_scatter_is_that_of_the_page(folder: Path, drawn: Draw) -> None:
    table = attlas.load(folder).table()
    best = table["induction"].idxmax()
    for figure, has_ring in ((drawn("--card"), True), (drawn(), False), (drawn("--layer=2", "--head=4"), True)):
        points, ring = points_of(figure)
        ax = figure.axes[0]
        assert len(points.get_offsets()) == 24
        # Both axes are logarithmic: equal factors are equal distances.
        x, y = np.log(table["effective_keys"]), np.log(table["qk_distance"])
        for axis, wanted in enumerate((x, y)):
            found = np.sort(points.get_offsets()[:, axis])
            assert np.allclose(np.polyval(np.polyfit(np.sort(wanted), found, 1), np.sort(wanted)), found)
        assert {text.get_text() for text in figure.texts} >= {"Effective keys →", "Distance (tokens) →", "Induction"}
        assert {text.get_text() for text in figure.texts} >= {
            f"{count} {kind}" for kind, count in Counter(table["kind"]).items()
        }
        hues = dict(zip((kind.name for kind in (*PATTERNS, MIXED)), KIND_COLOURS, strict=True))
        drawn_hues = Counter(
            "#" + "".join(f"{round(255 * part):02x}" for part in c[:3]) for c in points.get_facecolors()
        )
        assert drawn_hues == Counter(hues[kind] for kind in table["kind"])
        assert (ring is not None) == has_ring
        if ring is not None:
            name = f"{table['layer'][best]}·{table['head'][best]}"
            assert name in [text.get_text() for text in ax.texts if text.get_fontweight() == "bold"]
            assert (ring.get_offsets()[0] == points.get_offsets()).all(axis=1).any()
            share = (x[best] - x.min()) / (x.max() - x.min())
            offsets = points.get_offsets()[:, 0]
            assert ring.get_offsets()[0][0] == pytest.approx(offsets.min() + share * np.ptp(offsets))


def test_kinds_have_the_colours_of_the_page() -> None:
    scales = (resources.files("attlas.view") / "static" / "corpus" / "scales.js").read_text("utf-8")
    light = re.search(r"light: \[(.*?)\]", scales)
    assert light is not None
    assert tuple(re.findall("#[0-9a-f]{6}", light[1])) == KIND_COLOURS


# ------------------------------------------------------------------------------------------------------- other corpora


@pytest.mark.parametrize("tokens", [CHINESE, LONG], ids=["Chinese", "long"])
def test_nothing_is_cut_or_lies_over_anything(
    folder: Path, tokens: list[str], drawn: Draw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_tokens(monkeypatch, tokens)
    is_chinese = tokens is CHINESE
    other = tmp_path / ("语料" if is_chinese else "a-corpus-whose-name-is-far-longer-than-a-line-of-the-card")
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    config["model"]["name"] = 5 * ("一个名字很长的模型" if is_chinese else "Some-Model-70B-Instruct-")
    (other / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for options in (("--card",), ("--card", "--layer=0"), ("--card", "--layer=3"), ()):
        figure = drawn(*options, corpus=other)
        assert faults_of(figure) == []
        if "--card" in options:
            assert "it attends to" in said_by(figure)


def test_a_corpus_of_many_heads_or_of_one(drawn: Draw, tmp_path: Path) -> None:
    for layers, heads, words in ((32, 32, "1,024 heads"), (1, 1, "The only head")):
        torch_size = {"n_embd": heads * 2, "n_layer": layers, "n_head": heads, "vocab_size": 16, "n_positions": 40}
        ids = {"bos_token_id": 0, "eos_token_id": 0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**torch_size, **ids)).eval()
        made = tmp_path / f"{layers}.corpus"
        attlas.corpus(model, [list(range(16)) * 2], made)
        figure = drawn("--card", corpus=made)
        assert words in said_by(figure)
        assert "1 text, 32 tokens" in said_by(figure)
        assert "of the texts" not in said_by(figure), "one text has no spread"
        assert faults_of(figure) == []
        named = [text for text in figure.axes[0].texts if text.get_text()]
        assert len(named) == 1, "the ring alone has a name"


def test_an_unfinished_corpus_says_so(drawn: Draw, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(texts: int, *_: object) -> None:
        if texts >= 7:
            raise StopError

    size = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16, "n_positions": 40}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0)).eval()
    texts = [[(i * j) % 16 for j in range(1, 30)] for i in range(1, 41)]
    made = tmp_path / "begun.corpus"
    with pytest.raises(StopError):
        attlas.corpus(model, texts, made, limit=40, progress=stop)
    lines = words_of(drawn("--card", corpus=made))
    assert re.fullmatch(r"so far \d+ of at most 40 texts, \d+ tokens", lines[1])
    assert lines[0] == "begun.corpus · GPT2LMHeadModel"


def test_a_corpus_without_samples_has_no_example(drawn: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Corpus, "samples", lambda *_: [])
    figure = drawn("--card")
    assert "attends to" not in said_by(figure)
    assert "in 90 % of the texts" in said_by(figure)


def test_heads_of_no_simple_pattern(drawn: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    change_table(
        monkeypatch, kind=lambda _: "mixed", **dict.fromkeys([kind.measure for kind in PATTERNS], lambda _: 0.0)
    )
    said = said_by(drawn("--card"))
    assert "None of 24 heads follows a simple pattern" in said
    assert "The largest weights are those of layer " in said


def test_kinds_and_numbers_that_are_not_known(drawn: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    change_table(monkeypatch, kind=lambda _: "of a later version", effective_keys=lambda _: None)
    figure = drawn("--card", "--layer=1", "--head=3")
    assert "Layer 1, head 3 is called of a later version." in said_by(figure)
    assert not figure.axes[0].collections, "no head has a place"
    assert faults_of(figure) == []
    assert "24 heads" in said_by(drawn("--card"))


# ------------------------------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize("options", [("--card",), ()])
def test_files_of_every_kind(folder: Path, options: tuple[str, ...], tmp_path: Path) -> None:
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        out = tmp_path / f"card{suffix}"
        assert main(["picture", str(folder), *options, "-o", str(out)]) == 0
        assert out.read_bytes().startswith(start)
        if suffix == ".png" and options:
            assert [int.from_bytes(out.read_bytes()[at : at + 4], "big") for at in (16, 20)] == [1200, 630]


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Callable[..., str]]:
    def run(*words: str) -> str:
        out = tmp_path / "not.png"
        assert main(["picture", *words, "-o", str(out)]) == 2
        assert not out.exists()
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    "option", [("--rows", "0:4"), ("--columns", "0:4"), ("--size", "9"), ("--pool", "max"), ("--scale", "log")]
)
def test_options_of_weights_are_refused_by_name(
    folder: Path, option: tuple[str, str], complaint: Callable[..., str]
) -> None:
    for card in ((), ("--card",)):
        told = complaint(str(folder), *option, *card)
        assert f"{option[0]} goes with a picture of the weights of a recording." in told
        assert f"fix: leave {option[0]} out" in told


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--layer", "4"), "--layer 4; there are 0 to 3"),
        (("--layer", "-5"), "--layer -5; there are 0 to 3"),
        (("--layer", "cross.1"), "--layer cross.1; there are 0 to 3"),
        (("--head", "6"), "--head 6; there are 0 to 5"),
        (("--layer", "1", "--head", "-1"), "--head -1; there are 0 to 5"),
    ],
)
def test_heads_that_are_not_there(
    folder: Path, words: tuple[str, ...], found: str, complaint: Callable[..., str]
) -> None:
    assert f"found: {found}" in complaint(str(folder), "--card", *words)
    assert f"found: {found}" in complaint(str(folder), *words)


@pytest.mark.parametrize(("low", "high"), [(1000.1, 1001.9), (64.001, 64.004), (12345.0, 12347.0), (0.2, 0.9), (1, 90)])
@pytest.mark.parametrize("log", [False, True])
def test_numbers_of_an_axis_stand_where_they_say(low: float, high: float, log: bool) -> None:
    """Heads of an untrained model are nearly alike: their numbers need more digits."""
    axis = Axis("keys", [low, high], log)
    figure = scatter(Points(axis, axis, ["0·0", "0·1"], ["local"] * 2, {"local": "red"}))
    (ax,) = figure.axes
    first, last = (float(place) for place in ax.collections[0].get_offsets()[:, 0])
    place = math.log10 if log else float
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert len(labels) == len({*labels}) > 1
    for at, text in zip(ax.get_xticks(), labels, strict=True):
        share = (place(float(text.replace(",", ""))) - place(low)) / (place(high) - place(low))
        assert at == pytest.approx(first + share * (last - first), abs=0.02 * (last - first))


def test_a_broken_corpus_is_told_of_as_one(folder: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    broken = tmp_path / "broken.corpus"
    shutil.copytree(folder, broken)
    (broken / "config.json").write_text((broken / "config.json").read_text()[:200])
    for command in ("picture", "report"):
        assert "a whole corpus" in refusal(
            command, broken, "-o", tmp_path / ("a.png" if command == "picture" else "a.html")
        )
