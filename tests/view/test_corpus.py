"""What answers the page of a corpus, against the folder; and the command that opens it."""

import json
from contextlib import closing
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from tests.view.declared import check_fields

import attlas
from attlas.cli import main
from attlas.cli import view as cli_view

pytest.importorskip("pyarrow", reason="pyarrow is in the extra `corpus`")
pytest.importorskip("starlette", reason="starlette is in the extra `view`")
transformers = pytest.importorskip("transformers", reason="transformers is in the extra `hf`")

from attlas.view import CorpusService, Server, export_corpus  # noqa: E402
from attlas.view.corpus import NOT_THERE, NoModelError  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    size = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 30, "n_positions": 300}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)).eval()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 30, (size,), generator=generator).tolist() for size in (300, 40, 90, 17, 60, 80)]
    made = tmp_path_factory.mktemp("corpus") / "small.corpus"
    attlas.corpus(model, texts, made, samples=6)
    return made


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Any:
    return attlas.load(folder)


def ask(service: CorpusService, name: str, status: int = 200, **given: object) -> Any:
    answer = service.answer(name, {field: str(value) for field, value in given.items()})
    found = json.loads(answer.body)
    assert answer.status == status, found
    return found


def test_the_table_is_that_of_the_folder(corpus: Any) -> None:
    found = ask(CorpusService([corpus]), "info")["corpora"][0]
    table = corpus.table()
    assert found["title"] == "small.corpus"
    for measure in found["measures"]:
        values = np.array(found["rows"][measure["name"]], dtype=float)
        np.testing.assert_array_equal(values, table[measure["name"]])
    assert {measure["name"] for measure in found["measures"]} == set(table.select_dtypes("float64"))
    assert all(measure["description"] and measure["label"] for measure in found["measures"])


def test_the_answers_are_what_the_page_declares(corpus: Any) -> None:
    service = CorpusService([corpus])
    info, head = ask(service, "info"), ask(service, "head", corpus=0, row=3)
    check_fields("CorporaInfo", info)
    check_fields("CorpusInfo", info["corpora"][0])
    for measure in info["corpora"][0]["measures"]:
        check_fields("Measure", measure)
    check_fields("HeadAnswer", head)
    for distribution in head["distributions"].values():
        check_fields("Distribution", distribution)
    check_fields("SampleFacts", head["samples"][0])
    check_fields("SampleText", ask(service, "sample", corpus=0, row=3, index=0))


def test_distributions_distances_and_tokens_keep_their_sums(corpus: Any) -> None:
    found, page = ask(CorpusService([corpus]), "head", corpus=0, row=3), corpus.head(1, 1)
    for name, each in found["distributions"].items():
        whole = page.distributions[name]
        assert sum(each["counts"]) == pytest.approx(whole["texts"], rel=1e-3)
        assert (each["min"], each["max"]) == (whole["min"], whole["max"])
        assert each["box"][2] == whole["quantiles"][5]
    distance = found["distance"]
    assert distance["edges"][:5] == [0, 1, 2, 4, 8]
    for low, high, value in zip(distance["edges"][:-1], distance["edges"][1:], distance["values"], strict=True):
        inside = [each["weight"] for each in page.distances if low <= each["lower"] < high]
        assert value == pytest.approx(sum(inside))
    kept, all_of_it = (sum(each[name] for each in page.distances) for name in ("kept_weight", "weight"))
    for side, total in (("query", kept), ("key", kept), ("key_mass", all_of_it)):
        shares = {token: weight / total for token, weight in page.tokens[side]}
        assert dict(found["tokens"][side]) == pytest.approx(shares)
    ends = found["intervals"]
    assert len(ends) == 5
    assert all(a[1] == b[0] for a, b in pairwise(ends))


def test_a_sample_has_its_weights_and_its_peak(corpus: Any) -> None:
    service = CorpusService([corpus])
    described = ask(service, "head", corpus=0, row=0)["samples"]
    for index, sample in enumerate(corpus.samples(0, 0)):
        found = ask(service, "sample", corpus=0, row=0, index=index)
        kept = sample.keys >= 0
        assert found["counts"] == kept.sum(1).tolist()
        assert found["keys"] == sample.keys[kept].tolist()
        np.testing.assert_allclose(found["weights"], sample.weights[kept], rtol=1e-3)
        query, key = described[index]["query"], described[index]["key"]
        assert query > 0 < key
        at = sample.keys[query].tolist().index(key)
        assert sample.weights[query, at] == pytest.approx(sample.max_activation, rel=1e-5)


def test_an_opened_text_is_the_exact_map(corpus: Any, model: Any) -> None:
    loads = []
    with closing(CorpusService([corpus], loaders=[lambda: loads.append(1) or model])) as service:
        sample = corpus.samples(1, 0)[0]
        answer = ask(service, "open", corpus=0, row=2, text=sample.text, query=5, key=2)
        assert answer["path"] == "text/1/#e=1&h=0&r=5.5&c=2.5&z=4&pin=5.2"
        again = ask(service, "open", corpus=0, row=3, text=sample.text, query=5, key=2)
        assert again["path"] == "text/1/#e=1&h=1&r=5.5&c=2.5&z=4&pin=5.2"  # the same recording, another head
        other = next(each.text for each in corpus.samples(0, 0) if each.text != sample.text)
        assert ask(service, "open", corpus=0, row=0, text=other)["path"].startswith("text/2/")
        assert len(loads) == 1
        block = service.opened(1).source.atlas.details["block"]
        assert block["induction"] == corpus.table().induction.to_numpy().reshape(2, 2).tolist()
        with torch.no_grad(), attlas.record(model) as atlas:
            model(torch.tensor([sample.ids]))
        row = np.frombuffer(
            service.opened(1).answer("row", {"entry": "1", "head": "0", "i": "7"}).body, dtype=np.float32
        )
        np.testing.assert_allclose(row, atlas.entries[1].matrix[0, 0, 7].numpy(), rtol=1e-5, atol=1e-7)
    assert service.opened(1) is None


def test_an_opened_text_says_of_the_heads_what_the_corpus_says(corpus: Any, model: Any) -> None:
    table = corpus.table()
    with closing(CorpusService([corpus], loaders=[lambda: model])) as service:
        ask(service, "open", corpus=0, row=2, text=corpus.samples(1, 0)[0].text)
        shown = service.opened(1)
        found = json.loads(shown.answer("heads", {}).body)
        assert found["on"] == {"what": "corpus", "name": "small.corpus"}
        for _ in range(2):  # at once, and when the numbers of this text are there
            *rows, rollout, _ = found["rows"]  # behind the heads those of the rollouts up to each layer
            assert rollout["kinds"] == []
            for row, (_, wanted) in zip(rows, table.iterrows(), strict=True):
                assert (row["entry"], row["head"]) == (wanted["layer"], wanted["head"])
                assert row["kinds"][0] == wanted["kind"]
                measure = found["kinds"][wanted["kind"]]["measure"]
                assert row["share"] == (wanted[measure] if measure else 0)
            shown.measure()
            found = json.loads(shown.answer("heads", {}).body)
        assert found["progress"] == 1


def test_only_some_texts_stay_open(corpus: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attlas.view.corpus._MOST_OPEN_TEXTS", 2)
    with closing(CorpusService([corpus], loaders=[lambda: model])) as service:
        texts = [sample.text for sample in corpus.samples(0, 0)][:3]
        for text in texts:
            ask(service, "open", corpus=0, row=0, text=text)
        assert service.opened(1) is None
        assert service.opened(3) is not None


def test_an_opened_text_takes_bookmarks(corpus: Any, model: Any) -> None:
    marks = [{"name": "a pair", "at": "e=0", "says": ""}]
    with (
        closing(CorpusService([corpus], loaders=[lambda: model])) as service,
        Server(service, port=0) as server,
        closing(HTTPConnection(urlsplit(server.url).netloc)) as client,
    ):

        def post(page: str) -> int:
            headers = {"Content-Type": "application/json", "Origin": f"http://{urlsplit(server.url).netloc}"}
            body = json.dumps({"before": [], "bookmarks": marks})
            client.request("POST", f"{urlsplit(server.url).path}{page}api/bookmarks", body, headers)
            answer = client.getresponse()
            answer.read()
            return answer.status

        ask(service, "open", corpus=0, row=0, text=corpus.samples(0, 0)[0].text)
        assert [post(page) for page in ("", "text/9/", "text/1/")] == [405, 404, 200]
        assert json.loads(service.opened(1).answer("info", {}).body)["bookmarks"] == marks


def test_wrong_questions_are_refused(corpus: Any) -> None:
    service = CorpusService([corpus], loaders=[NoModelError(NOT_THERE, "/models/x")])
    for name, status, given in (
        ("nothing", 404, {}),
        ("head", 400, {"corpus": 0}),
        ("head", 404, {"corpus": 1, "row": 0}),
        ("head", 404, {"corpus": 0, "row": 4}),
        ("sample", 404, {"corpus": 0, "row": 0, "index": 99}),
        ("open", 404, {"corpus": 0, "row": 0, "text": 12345}),
    ):
        assert ask(service, name, status, **given)["error"]
    text = corpus.samples(0, 0)[0].text
    assert ask(service, "open", 409, corpus=0, row=0, text=text)["reason"] == [NOT_THERE, "/models/x"]


def test_a_file_holds_as_many_texts_as_fit(corpus: Any, tmp_path: Path) -> None:
    whole = corpus.export(tmp_path / "whole.html").read_text("utf-8")
    few = export_corpus(corpus, tmp_path / "few.html", limit=16_000).read_text("utf-8")
    none = export_corpus(corpus, tmp_path / "none.html", limit=0).read_text("utf-8")
    counts = [text.count('"sample:') for text in (whole, few, none)]
    assert counts[0] == sum(len(corpus.samples(*head)) for head in corpus.heads)
    assert counts[0] > counts[1] > counts[2] == 0
    assert len(none) < len(few) < len(whole)


def test_the_command_writes_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), str(folder), "-o", str(tmp_path / "page.html")]) == 0
    assert "opens in any browser" in capsys.readouterr().out
    assert '"head:1:3"' in (tmp_path / "page.html").read_text("utf-8")


def test_an_unfinished_corpus_says_so(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the terminal, and in what the page is given."""
    assert attlas.corpus(model, [[1, 2, 3], [4, 5, 6]], tmp_path / "run", rank=0, world=2) is None
    counts = ask(CorpusService([attlas.load(tmp_path / "run")]), "info")["corpora"][0]["counts"]
    assert counts["complete"] is False
    monkeypatch.setattr(
        cli_view, "_serve_until_stopped", lambda service, lines, terminal, _: terminal.say("\n".join(lines))
    )
    assert main(["view", str(tmp_path / "run")]) == 0
    assert "3 tokens in 1 texts\nnot finished: attlas corpus with the same arguments goes on" in capsys.readouterr().out
    assert main(["corpus", str(tmp_path / "run"), "--export", "headvis", "-o", str(tmp_path / "tree")]) == 0
    assert "not finished" in capsys.readouterr().out
    attlas.corpus(model, [[1, 2, 3], [4, 5, 6]], tmp_path / "run")
    assert main(["view", str(tmp_path / "run")]) == 0
    assert "not finished" not in capsys.readouterr().out
    (tmp_path / "begun" / "parts").mkdir(parents=True)
    (tmp_path / "begun" / "parts" / "mutex").touch()
    assert main(["view", str(tmp_path / "begun")]) == 2
    assert "no text yet" in capsys.readouterr().err


def test_the_command_refuses_what_is_no_corpus(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    assert main(["view", str(folder), str(tmp_path / "other")]) == 2
    assert "several folders must be corpora" in capsys.readouterr().err
    assert main(["view", str(folder), "--text", "book.txt"]) == 2
    assert "nothing is recorded" in capsys.readouterr().err
    assert main(["view", str(folder), "-o", "page.html"]) == 2
    assert f"fix: attlas report {folder} -o page.html" in capsys.readouterr().err
    assert main(["report", str(folder), str(tmp_path / "other"), "-o", str(tmp_path / "page.html")]) == 2
    assert f"fix: attlas report {tmp_path / 'other'}" in capsys.readouterr().err
