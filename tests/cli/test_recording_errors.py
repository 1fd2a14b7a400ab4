"""What record, stats, picture and report say when something cannot be done: the whole text, exit status 2."""

import builtins
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import attlas
from attlas.cli import generation, main, record


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(word) for word in arguments]) == 2
    return capsys.readouterr().err.split("attlas: ", 1)[1]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run.atlas"


@pytest.fixture(scope="module")
def numbers_only(model_folder: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of a few statistics and nothing else."""
    out = tmp_path_factory.mktemp("recordings") / "few.atlas"
    given = ["--model", str(model_folder), "--text", str(text_file), "--tokens", "64", "--keep", "statistics"]
    assert main(["record", *given, "--statistics", "entropy,picture", "-o", str(out)]) == 0
    return out


# ------------------------------------------------------------------------------------------------------------ record


def test_texts_that_cannot_be_read(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "record", "--text", "nowhere.txt", "-o", out) == (
        "record: --text must be a file that can be read.\n"
        "  found: No such file or directory: nowhere.txt\n"
        "  fix: --text FILE, with a file that exists\n"
    )
    old, empty = tmp_path / "old.txt", tmp_path / "empty.txt"
    old.write_bytes(b"caf\xe9 au lait")
    empty.write_text("\n \n")
    assert complaint(capsys, "record", "--text", old, "-o", out) == (
        "record: --text must be UTF-8.\n"
        f"  found: byte 0xe9 at place 3 of {old}\n"
        f"  fix: iconv -f latin1 -t utf-8 {old} > text.txt\n"
    )
    assert complaint(capsys, "record", "--text", empty, "-o", out) == (
        "record: --text must not be empty.\n"
        f"  found: {empty} has no text\n"
        "  fix: --text FILE, with some pages of text\n"
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"", "record: --text must not be empty.\n  found: standard input has no text\n  fix: --text FILE, with some"),
        (
            b"\xff",
            "record: --text must be UTF-8.\n  found: byte 0xff at place 0 of standard input\n  fix: iconv -f lat",
        ),
    ],
)
def test_pipes_that_cannot_be_read(
    given: bytes, message: str, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pipe:
        class buffer:  # noqa: N801 - the name that a text stream has
            read = staticmethod(lambda: given)

    monkeypatch.setattr("attlas.cli.files.sys.stdin", Pipe)
    assert complaint(capsys, "record", "--text", "-", "-o", out).startswith(message)


def test_texts_that_do_not_fit(
    model_folder: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "long.txt"
    text.write_text("x" * 300)
    given = ("record", "--model", model_folder, "--text", text, "-o", out)
    assert complaint(capsys, *given) == (
        "record: the text must fit into the context of the model, 256 tokens.\n"
        "  found: 301 tokens\n"
        "  fix: --tokens 256\n"
    )
    assert complaint(capsys, *given, "--tokens", 250, "--generate", 10) == (
        "record: the text must fit into the context of the model, 256 tokens.\n"
        "  found: 250 tokens and 10 to generate\n"
        "  fix: --tokens 246\n"
    )
    text.write_text("x")
    assert complaint(capsys, *given) == (
        "record: the text must have at least 3 tokens.\n  found: 2 tokens\n  fix: --text FILE, with more text\n"
    )
    assert complaint(capsys, *given, "--tokens", 100) == (
        "record: the text must have at least 100 tokens.\n  found: 2 tokens\n  fix: --text FILE, with more text\n"
    )
    assert complaint(capsys, *given, "--tokens", 1) == (
        "record: --tokens must be at least 3.\n  found: --tokens 1\n  fix: --tokens 64\n"
    )
    assert complaint(capsys, *given, "--chunk", 0) == (
        "record: --chunk must be at least 1.\n  found: --chunk 0\n  fix: --chunk 64\n"
    )
    assert complaint(capsys, *given, "--generate", -1) == (
        "record: --generate must be at least 0.\n  found: --generate -1\n  fix: --generate 64\n"
    )
    assert not out.exists()


def test_models_that_are_not_there(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = "record: --model must be a folder that a Hugging Face model was saved in.\n"
    fix = "  fix: model.save_pretrained(folder); tokenizer.save_pretrained(folder)\n"
    missing = tmp_path / "missing"
    assert complaint(capsys, "record", "--model", missing, "-o", out) == f"{rule}  found: no folder {missing}\n{fix}"
    assert complaint(capsys, "record", "--model", tmp_path, "-o", out) == (
        f"{rule}  found: no config.json in {tmp_path}\n{fix}"
    )


def test_a_name_that_the_hub_does_not_have(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(name: str, **given: object) -> None:
        assert (given["local_files_only"], given["trust_remote_code"]) == (False, False)
        raise OSError(f"{name} is not a local folder and is not a valid model identifier\nmore")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unreachable)
    assert complaint(capsys, "record", "--model", "nobody/nothing", "-o", out) == (
        "record: --model must be a causal language model that transformers can load, with its tokenizer.\n"
        "  found: OSError: nobody/nothing is not a local folder and is not a valid model identifier\n"
        "  fix: --model DIR, a folder that the model was saved in, or its full name on huggingface.co, owner/name\n"
    )


def test_pickled_weights_are_not_read(model_folder: Path, tmp_path: Path, out: Path, text_file: Path) -> None:
    folder = tmp_path / "pickled"
    transformers.AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert main(["record", "--model", str(folder), "--text", str(text_file), "-o", str(out)]) == 2
    assert not out.exists()


def test_without_transformers(out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: object, **more: object) -> object:
        if name == "transformers":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert complaint(capsys, "record", "-o", out) == (
        "record: transformers must be installed to run a model.\n"
        "  found: no module named transformers\n"
        "  fix: pip install 'attlas[hf]'\n"
    )


def test_folders_that_are_there(
    model_folder: Path, text_file: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("record", "--model", model_folder, "--text", text_file, "--tokens", 64, "--keep", "statistics", "-o", out)
    assert main([str(word) for word in given]) == 0
    before = (out / "atlas.json").read_bytes()
    assert complaint(capsys, *given) == (
        f"record: -o must be a new folder.\n  found: an atlas is there: {out}\n  fix: --overwrite, or another folder\n"
    )
    assert (out / "atlas.json").read_bytes() == before
    for keep, tokens in (("disk", 70), ("statistics", 80)):
        words = ("--overwrite", "--keep", keep, "--tokens", tokens)
        assert main([str(word) for word in (*given, *words)]) == 0
        assert attlas.load(out).ids.shape == (1, tokens)
    assert [path.name for path in tmp_path.iterdir()] == ["run.atlas"]
    foreign = tmp_path / "mine"
    foreign.mkdir()
    (foreign / "letter.txt").write_text("keep me")
    assert complaint(capsys, "record", "-o", foreign, "--overwrite") == (
        "record: -o must be a new folder, or an atlas to be replaced.\n"
        f"  found: no atlas: {foreign}\n"
        "  fix: -o run.atlas\n"
    )
    assert (foreign / "letter.txt").read_text() == "keep me"
    assert complaint(capsys, "record", "-o", tmp_path / "no" / "run.atlas") == (
        "record: -o must lie in a folder that can be written.\n"
        f"  found: No such file or directory: {tmp_path / 'no'}\n"
        "  fix: -o ./run.atlas\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--layers", "a"),
            "record: --layers must be whole numbers with commas between them.\n"
            "  found: --layers a\n"
            "  fix: --layers 0,2\n",
        ),
        (
            ("--statistics", "entropy,beauty"),
            "record: --statistics must be some of entropy, effective_keys, max_weight, max_logit, logit_moments, "
            "column_mass, offsets, top_k, picture, kinds, arg_max, column_arg_max, column_max, coverage, row_mass.\n"
            "  found: --statistics entropy,beauty\n"
            "  fix: --statistics entropy,max_logit\n",
        ),
        (
            ("--layers", "0,7"),
            "record: each layer must be one of the model's attentions.\n"
            "  attentions: self.0 to self.1\n"
            "  modules: transformer.h.0.attn, transformer.h.1.attn\n"
            "  found: layer 7\n"
            "  fix: --layers takes numbers of the attentions above.\n",
        ),
        (
            ("--heads", "5"),
            "record: each head must be one of the layer's.\n"
            "  layer: self.0 (transformer.h.0.attn)\n"
            "  found: head 5, the layer has 3\n"
            "  fix: use heads from 0 to 2, or from -3 to -1.\n",
        ),
    ],
)
def test_what_there_is_not(
    words: tuple[str, ...],
    message: str,
    model_folder: Path,
    text_file: Path,
    out: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ("record", "--model", model_folder, "--text", text_file, "--tokens", 64, "-o", out)
    assert complaint(capsys, *given, *words) == message
    assert list(out.parent.iterdir()) == []


def test_a_device_that_there_is_not(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = complaint(capsys, "record", "--device", "toaster", "-o", out)
    assert text.startswith("record: --device must be one that torch can use here.\n  found: --device toaster: ")
    assert text.endswith("\n  fix: --device cpu\n")


def save(model: transformers.PreTrainedModel, tokenizer: Path, folder: Path) -> Path:
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def test_a_model_with_no_way_out(
    model_folder: Path, text_file: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.BloomConfig(vocab_size=257, hidden_size=8, n_layer=1, n_head=1)
    folder = save(transformers.BloomForCausalLM(config), model_folder, tmp_path / "bloom")
    text = complaint(capsys, "record", "--model", folder, "--text", text_file, "--tokens", 64, "-o", out)
    assert text == (
        "record: an attention that computes its weights by itself cannot be recorded, and this model has no other.\n"
        "  model: BloomForCausalLM\n"
        "  found: BloomAttention at transformer.h.0.self_attention\n"
        '  fix: read its weights with attn_implementation="eager" and output_attentions=True, where the model has that,'
        " or let the module call attlas.recording.offer().\n"
    )
    assert not out.exists()


def test_a_model_that_is_recorded_with_patch_sdpa(
    model_folder: Path, text_file: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.FalconConfig(vocab_size=257, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    folder = save(transformers.FalconForCausalLM(config), model_folder, tmp_path / "falcon")
    given = ("record", "--model", folder, "--text", text_file, "--tokens", 64, "-o", out)
    text = complaint(capsys, *given)
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
    model_folder: Path,
    text_file: Path,
    out: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ["record", "--model", str(model_folder), "--text", str(text_file), "-o", str(out), "--keep", keep]
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
    model_folder: Path, text_file: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = generation.run_model

    def interrupted(model: torch.nn.Module, ids: torch.Tensor, *given: Any, **options: Any) -> Any:
        if len(ids) < 30:  # the last chunk
            assert any(out.parent.iterdir())
            raise KeyboardInterrupt
        return run(model, ids, *given, **options)

    monkeypatch.setattr(generation, "run_model", interrupted)
    words = ["--model", model_folder, "--text", text_file, "--tokens", 80, "--chunk", 30, "-o", out]
    assert main(["record", *map(str, words)]) == 130
    assert list(out.parent.iterdir()) == []


# --------------------------------------------------------------------------------------------- stats, picture, report


@pytest.mark.parametrize("command", ["stats", "picture", "report"])
def test_folders_without_an_atlas(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = {"stats": (), "picture": ("-o", tmp_path / "x.png"), "report": ("-o", tmp_path / "x.html")}[command]
    missing = tmp_path / "missing"
    text = complaint(capsys, command, missing, *words)
    assert str(missing) in text
    assert "Traceback" not in text
    assert text.splitlines()[-1].startswith("  fix: ")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "atlas.json").write_text(json.dumps({"format": "something else"}))
    assert complaint(capsys, command, broken, *words).splitlines()[-1].startswith("  fix: ")


def test_columns_and_layers_that_are_not_there(numbers_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "stats", numbers_only, "--sort", "beauty") == (
        "stats: --sort must be one of layer, head, kind, name, call, queries, keys, entropy.\n"
        "  found: --sort beauty\n"
        "  fix: --sort head\n"
    )
    assert complaint(capsys, "stats", numbers_only, "--top", 0) == (
        "stats: --top must be at least 1.\n  found: --top 0\n  fix: --top 5\n"
    )
    for command in (("stats",), ("picture", "-o", numbers_only.parent / "a.png")):
        assert complaint(capsys, command[0], numbers_only, *command[1:], "--layer", 9) == (
            f"{command[0]}: --layer must be one of the recording.\n"
            "  there are: self: layers 0 to 1; modules transformer.h.0.attn, transformer.h.1.attn\n"
            "  found: --layer 9\n"
            "  fix: --layer 1\n"
        )
    assert complaint(capsys, "stats", numbers_only, "--sort", "entropi").endswith("  fix: --sort entropy\n")


def test_what_a_recording_of_one_statistic_is_good_for(
    model_folder: Path, text_file: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(model_folder), "--text", str(text_file), "--tokens", "64", "--keep", "statistics"]
    assert main(["record", *given, "--statistics", "entropy", "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"  attlas stats {out}\n" in said
    assert "attlas view" not in said, "there is nothing to make tiles of"
    assert "attlas report" not in said, "it could not be written"
    assert complaint(capsys, "picture", out, "-o", tmp_path / "a.png") == (
        "picture: a picture is made from queries and keys, or was recorded.\n"
        "  found: neither of transformer.h.0.attn\n"
        "  fix: attlas record --keep disk, or --statistics with picture among them\n"
    )


def test_folders_that_are_no_recordings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for command in (("stats",), ("picture", "-o", tmp_path / "a.png"), ("report", "-o", tmp_path / "a.html")):
        name = command[0]
        for target, found, new in (("none", "nothing there", tmp_path / "none"), ("file", "no folder", "run.atlas")):
            assert complaint(capsys, name, tmp_path / target, *command[1:]) == (
                f"{name}: FOLDER must be what attlas record has written.\n"
                f"  found: {found}: {tmp_path / target}\n"
                f"  fix: attlas record -o {new}\n"
            )
        said = complaint(capsys, name, tmp_path / "empty", *command[1:])
        assert said.startswith(f"{name}: the folder must hold a recording.\n")
        assert "  found: no recording in this folder" in said


@pytest.mark.skipif(os.name != "posix", reason="there is no mkfifo")
def test_a_pipe_in_the_place_of_a_file(numbers_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "a.png")
    assert complaint(capsys, "picture", numbers_only, "-o", tmp_path / "a.png") == (
        f"picture: -o must be a file.\n  found: a device or a pipe: {tmp_path / 'a.png'}\n  fix: give another name\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--head", "1"),
            "picture: --head goes with --layer.\n  found: --head 1 without --layer\n  fix: --layer 0 --head 0\n",
        ),
        (
            ("--layer", "1", "--head", "3"),
            "picture: --head must be one of the layer's.\n  found: --head 3; there are 0, 1, 2\n  fix: --head 0\n",
        ),
        (
            ("--rows", "90:"),
            "picture: --rows must be a part of the 64 there are, A:B.\n  found: --rows 90:\n  fix: --rows 0:64\n",
        ),
        (
            ("--columns", "a"),
            "picture: --columns must be a part of the 64 there are, A:B.\n"
            "  found: --columns a\n"
            "  fix: --columns 0:64\n",
        ),
        (
            ("--size", "0"),
            "picture: --size must be between 1 and 8192.\n  found: --size 0\n  fix: --size 1024\n",
        ),
        (
            ("--rows", "3:9"),
            "picture: another window or pool is computed from queries and keys, and these were not kept.\n"
            "  found: a recording of statistics only, with a picture of the whole matrix, --pool max\n"
            "  fix: leave --rows, --columns and --pool out, or attlas record --keep disk\n",
        ),
    ],
)
def test_pictures_of_what_is_not_there(
    words: tuple[str, ...], message: str, numbers_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint(capsys, "picture", numbers_only, *words, "-o", tmp_path / "x.png") == message
    assert list(tmp_path.iterdir()) == []


def test_files_of_another_kind(numbers_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "picture", numbers_only, "-o", tmp_path / "x.gif") == (
        "picture: -o must be a file that ends in .png, .svg, .pdf.\n"
        f"  found: -o {tmp_path / 'x.gif'}\n"
        "  fix: -o x.png\n"
    )
    assert complaint(capsys, "report", numbers_only, "-o", tmp_path / "x.txt") == (
        f"report: -o must be a file that ends in .html, .htm.\n  found: -o {tmp_path / 'x.txt'}\n  fix: -o x.html\n"
    )


def test_a_report_of_too_few_statistics(numbers_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "report", numbers_only, "-o", tmp_path / "x.html") == (
        "report: a page needs weights, or a recorded picture of them.\n"
        "  found: neither\n"
        '  fix: attlas record without --statistics, or keep="disk"\n'
    )
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - names only
