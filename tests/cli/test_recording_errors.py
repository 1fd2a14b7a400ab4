"""What record, stats, picture and report say when something cannot be done; exit status 2."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.cli.conftest import Run

import attlas
from attlas.cli import generation, main, record


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run.atlas"


@pytest.fixture(scope="module")
def numbers_only(tmp_path_factory: pytest.TempPathFactory, model_and_text: tuple[str, ...]) -> Path:
    """A recording of a few statistics and nothing else."""
    out = tmp_path_factory.mktemp("recordings") / "few.atlas"
    given = [*model_and_text, "--tokens", "64", "--keep", "statistics"]
    assert main(["record", *given, "--statistics", "entropy,picture", "-o", str(out)]) == 0
    return out


# ------------------------------------------------------------------------------------------------------------ record


@pytest.mark.parametrize(
    ("given", "message"),
    [(b"", "record: standard input has no text"), (b"\xff", "record: byte 0xff at place 0 of standard input")],
)
def test_pipes_that_cannot_be_read(
    given: bytes, message: str, out: Path, monkeypatch: pytest.MonkeyPatch, complaint: Run
) -> None:
    class Pipe:
        class buffer:  # noqa: N801 - the name that a text stream has
            read = staticmethod(lambda: given)

    monkeypatch.setattr("attlas.cli.files.sys.stdin", Pipe)
    assert complaint("record", "--text", "-", "-o", out).startswith(message)


def test_texts_that_do_not_fit(model_folder: Path, tmp_path: Path, out: Path, complaint: Run) -> None:
    text = tmp_path / "long.txt"
    text.write_text("x" * 300)
    given = ("record", "--model", model_folder, "--text", text, "-o", out)
    assert complaint(*given) == "record: 301 tokens"
    assert complaint(*given, "--tokens", 250, "--generate", 10) == "record: 250 tokens and 10 to generate"
    assert complaint(*given, "--generate", 300) == "record: 301 tokens and 300 to generate"
    own = given[:3] + given[5:]  # timeit.py, of which as much is read as there is room for
    for more in (254, 256, 3000):
        assert complaint(*own, "--generate", more) == f"record: 3 tokens and {more:,} to generate"
    text.write_text("x")
    assert complaint(*given) == "record: 2 tokens"
    assert complaint(*given, "--tokens", 100) == "record: 2 tokens"
    assert complaint(*given, "--tokens", 1) == "record: --tokens 1"
    assert complaint(*given, "--chunk", 0) == "record: --chunk 0"
    assert complaint(*given, "--generate", -1) == "record: --generate -1"
    assert not out.exists()


def test_models_that_are_not_there(tmp_path: Path, out: Path, complaint: Run) -> None:
    missing = tmp_path / "missing"
    assert complaint("record", "--model", missing, "-o", out) == f"record: no folder {missing}"
    assert complaint("record", "--model", tmp_path, "-o", out) == f"record: no config.json in {tmp_path}"


def test_a_name_that_the_hub_does_not_have(out: Path, monkeypatch: pytest.MonkeyPatch, complaint: Run) -> None:
    def unreachable(name: str, **given: object) -> None:
        assert (given["local_files_only"], given["trust_remote_code"]) == (False, False)
        raise OSError(f"{name} is not a local folder and is not a valid model identifier\nmore")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unreachable)
    assert (
        complaint("record", "--model", "nobody/nothing", "-o", out)
        == "record: OSError: nobody/nothing is not a local folder and is not a valid model identifier"
    )


@pytest.mark.parametrize("name", ["./nosuch", "nosuch", "../no/such", "no/such/folder"])
def test_a_misspelt_folder_is_said_without_the_network(
    name: str, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complaint: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    assert complaint("record", "--model", name, "-o", out).startswith(f"record: no folder {name.removeprefix('./')}")


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
NO_LANGUAGE: dict[str, tuple[Any, str]] = {
    "images": (
        lambda: transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=8, patch_size=4)),
        "no language model: ViTModel reads pixel_values",
    ),
    "no tokenizer": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, vocab_size=20)),
        "no tokenizer in {folder}",
    ),
    "no tokenizer, which transformers makes up": (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20)),
        "no tokenizer in {folder}",
    ),
}


@pytest.mark.parametrize("name", NO_LANGUAGE)
def test_folders_that_are_no_language_model(name: str, tmp_path: Path, out: Path, complaint: Run) -> None:
    make, found = NO_LANGUAGE[name]
    folder = tmp_path / "model"
    make().save_pretrained(folder)
    assert complaint("record", "--model", folder, "-o", out) == f"record: {found.format(folder=folder)}"


def test_the_error_of_transformers_is_not_cut_at_a_colon(
    model_folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch, complaint: Run
) -> None:
    def fail(name: str, **given: object) -> None:
        raise ValueError("Couldn't make it from one of:\n(1) a file,\n(2) another file." + " more" * 200)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    text = complaint("record", "--model", model_folder, "-o", out)
    assert text.startswith("record: ValueError: Couldn't make it from one of: (1) a file, (2) another file. more more")
    assert text.endswith(" more ...")
    assert len(text) < 350


def test_pickled_weights_are_not_read(model_folder: Path, tmp_path: Path, out: Path, text_file: Path) -> None:
    folder = tmp_path / "pickled"
    transformers.AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert main(["record", "--model", str(folder), "--text", str(text_file), "-o", str(out)]) == 2
    assert not out.exists()


def test_without_transformers(out: Path, monkeypatch: pytest.MonkeyPatch, complaint: Run) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert complaint("record", "-o", out) == "record: no module named transformers"


def test_folders_that_are_there(tmp_path: Path, out: Path, model_and_text: tuple[str, ...], complaint: Run) -> None:
    given = ("record", *model_and_text, "--tokens", 64, "--keep", "statistics", "-o", out)
    assert main([str(word) for word in given]) == 0
    before = (out / "atlas.json").read_bytes()
    assert complaint(*given) == (f"record: an atlas is there: {out}")
    assert (out / "atlas.json").read_bytes() == before
    for keep, tokens in (("disk", 70), ("statistics", 80)):
        words = ("--overwrite", "--keep", keep, "--tokens", tokens)
        assert main([str(word) for word in (*given, *words)]) == 0
        assert attlas.load(out).ids.shape == (1, tokens)
    assert [path.name for path in tmp_path.iterdir()] == ["run.atlas"]
    foreign = tmp_path / "mine"
    foreign.mkdir()
    (foreign / "letter.txt").write_text("keep me")
    assert complaint("record", "-o", foreign, "--overwrite") == (f"record: no atlas: {foreign}")
    assert (foreign / "letter.txt").read_text() == "keep me"
    assert complaint("record", "-o", tmp_path / "no" / "run.atlas") == (
        f"record: No such file or directory: {tmp_path / 'no'}"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--layers", "a"), "record: --layers a"),
        (("--statistics", "entropy,beauty"), "record: --statistics entropy,beauty"),
        (("--layers", "0,7"), "record: layer 7"),
        (("--heads", "5"), "record: head 5, the layer has 3"),
    ],
)
def test_what_there_is_not(
    words: tuple[str, ...], message: str, out: Path, model_and_text: tuple[str, ...], complaint: Run
) -> None:
    given = ("record", *model_and_text, "--tokens", 64, "-o", out)
    assert complaint(*given, *words) == message
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("command", [("record",), ("corpus", "shipped", "texts")])
def test_a_device_that_there_is_not(out: Path, complaint: Run, command: tuple[str, ...]) -> None:
    assert complaint(*command, "--device", "toaster", "-o", out).startswith(f"{command[0]}: device = 'toaster': ")


def save(model: transformers.PreTrainedModel, tokenizer: Path, folder: Path) -> Path:
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def test_a_model_with_no_way_out(
    model_folder: Path, text_file: Path, tmp_path: Path, out: Path, complaint: Run
) -> None:
    config = transformers.BloomConfig(vocab_size=257, hidden_size=8, n_layer=1, n_head=1)
    folder = save(transformers.BloomForCausalLM(config), model_folder, tmp_path / "bloom")
    text = complaint("record", "--model", folder, "--text", text_file, "--tokens", 64, "-o", out)
    assert text == "record: BloomAttention at transformer.h.0.self_attention"
    assert not out.exists()


def test_a_model_that_is_recorded_with_patch_sdpa(
    model_folder: Path, text_file: Path, tmp_path: Path, out: Path, refusal: Run
) -> None:
    config = transformers.FalconConfig(vocab_size=257, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    folder = save(transformers.FalconForCausalLM(config), model_folder, tmp_path / "falcon")
    given = ("record", "--model", folder, "--text", text_file, "--tokens", 64, "-o", out)
    text = refusal(*given)
    assert text.startswith("record: an attention that computes its weights by itself cannot be recorded, and this ")
    assert text.endswith("\n  fix: attlas record --patch-sdpa\n")
    assert not out.exists()
    assert main([*map(str, given), "--patch-sdpa"]) == 0
    assert len(attlas.load(out)) == 2


@pytest.mark.parametrize("keep", ["disk", "statistics"])
@pytest.mark.parametrize("there", [False, True])
def test_control_c_leaves_nothing(
    keep: str,
    there: bool,
    out: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model_and_text: tuple[str, ...],
) -> None:
    given = ["record", *model_and_text, "-o", str(out), "--keep", keep]
    if there:
        assert main([*given, "--tokens", "70"]) == 0
    run = record.run_model

    def interrupted(model: torch.nn.Module, ids: torch.Tensor) -> None:
        run(model, ids)
        if ids.ndim == 1:  # the text, and not the random block before it
            raise KeyboardInterrupt

    monkeypatch.setattr(record, "run_model", interrupted)
    assert main([*given, "--tokens", "80", "--overwrite"]) == 130
    assert capsys.readouterr().err.endswith("attlas: stopped.\n")
    assert list(out.parent.iterdir()) == ([out] if there else [])
    if there:
        assert attlas.load(out).ids.shape == (1, 70)


def test_control_c_between_two_chunks_leaves_nothing(
    out: Path, monkeypatch: pytest.MonkeyPatch, model_and_text: tuple[str, ...]
) -> None:
    run = generation.run_model

    def interrupted(model: torch.nn.Module, ids: torch.Tensor, *given: Any, **options: Any) -> Any:
        if len(ids) < 30:  # the last chunk
            assert any(out.parent.iterdir())
            raise KeyboardInterrupt
        return run(model, ids, *given, **options)

    monkeypatch.setattr(generation, "run_model", interrupted)
    words = [*model_and_text, "--tokens", 80, "--chunk", 30, "-o", out]
    assert main(["record", *map(str, words)]) == 130
    assert list(out.parent.iterdir()) == []


# --------------------------------------------------------------------------------------------- stats, picture, report


def test_columns_and_layers_that_are_not_there(numbers_only: Path, refusal: Run, complaint: Run) -> None:
    assert complaint("stats", numbers_only, "--sort", "beauty") == "stats: --sort beauty"
    assert complaint("stats", numbers_only, "--top", 0) == "stats: --top 0"
    for command in (("stats",), ("picture", "-o", numbers_only.parent / "a.png")):
        assert complaint(command[0], numbers_only, *command[1:], "--layer", 9) == (f"{command[0]}: --layer 9")
    assert refusal("stats", numbers_only, "--sort", "entropi").endswith("  fix: --sort entropy\n")


def test_what_a_recording_of_one_statistic_is_good_for(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model_and_text: tuple[str, ...], complaint: Run
) -> None:
    given = [*model_and_text, "--tokens", "64", "--keep", "statistics"]
    assert main(["record", *given, "--statistics", "entropy", "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"  attlas stats {out}\n" in said
    assert "attlas view" not in said, "there is nothing to make tiles of"
    assert "attlas report" not in said, "it could not be written"
    assert complaint("picture", out, "-o", tmp_path / "a.png") == "picture: neither of transformer.h.0.attn"


def test_folders_that_are_no_recordings(tmp_path: Path, complaint: Run) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "atlas.json").write_text(json.dumps({"format": "something else"}))
    for command in (("stats",), ("picture", "-o", tmp_path / "a.png"), ("report", "-o", tmp_path / "a.html")):
        name = command[0]
        for target, found in (("none", "nothing there"), ("file", "no folder")):
            assert complaint(name, tmp_path / target, *command[1:]) == f"{name}: {found}: {tmp_path / target}"
        found = complaint(name, tmp_path / "empty", *command[1:])
        assert found == f"{name}: no recording in this folder: it has no atlas.json"
        found = complaint(name, tmp_path / "other", *command[1:])
        assert found.startswith(f"{name}: JSON, but not of the format")


@pytest.mark.skipif(os.name != "posix", reason="there is no mkfifo")
def test_a_pipe_in_the_place_of_a_file(numbers_only: Path, tmp_path: Path, complaint: Run) -> None:
    os.mkfifo(tmp_path / "a.png")
    assert complaint("picture", numbers_only, "-o", tmp_path / "a.png") == (
        f"picture: a device or a pipe: {tmp_path / 'a.png'}"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--head", "1"), "picture: --head 1 without --layer"),
        (("--layer", "1", "--head", "3"), "picture: --head 3; there are 0, 1, 2"),
        (("--card", "--head", "3"), "picture: --head 3; there are 0, 1, 2"),
        (("--card", "--rows", "0:4"), "picture: --rows 0:4 and --card"),
        (("--card", "--scale", "log"), "picture: --scale log and --card"),
        (("--rows", "90:"), "picture: --rows 90:"),
        (("--columns", "a"), "picture: --columns a"),
        (("--size", "0"), "picture: --size 0"),
        (
            ("--rows", "3:9"),
            "picture: a recording of statistics only, with a picture of the whole matrix, --pool max, --size 64",
        ),
    ],
)
def test_pictures_of_what_is_not_there(
    words: tuple[str, ...], message: str, numbers_only: Path, tmp_path: Path, complaint: Run
) -> None:
    assert complaint("picture", numbers_only, *words, "-o", tmp_path / "x.png") == message
    assert list(tmp_path.iterdir()) == []


def test_files_of_another_kind(numbers_only: Path, tmp_path: Path, complaint: Run) -> None:
    assert complaint("picture", numbers_only, "-o", tmp_path / "x.gif") == (f"picture: -o {tmp_path / 'x.gif'}")
    assert complaint("report", numbers_only, "-o", tmp_path / "x.txt") == (f"report: -o {tmp_path / 'x.txt'}")


def test_a_report_of_too_few_statistics(numbers_only: Path, tmp_path: Path, complaint: Run) -> None:
    assert complaint("report", numbers_only, "-o", tmp_path / "x.html") == "report: neither"
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - names only
