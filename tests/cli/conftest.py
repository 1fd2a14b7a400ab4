"""A tiny random model with a tokenizer of bytes, in a folder, as a user would have it."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, pre_tokenizers

import attlas.huggingface  # noqa: F401 - before transformers saves a model of its own
from attlas.cli import main

Run = Callable[..., str]
TEXT = (
    """def greet(name):
    # émigré, 日本語, 🦊 and a </script><b>tag</b> & "quotes" $money$
    return f"hello {name}, hello {name}"


"""
    * 3
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=257, n_positions=256, n_embd=24, n_layer=2, n_head=3, bos_token_id=256, eos_token_id=256
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "<|end|>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|end|>", eos_token="<|end|>")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "greet <b>.py"
    file.write_text(TEXT, encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def model_and_text(model_folder: Path, text_file: Path) -> tuple[str, ...]:
    """The words of a command that let the model read the text."""
    return "--model", str(model_folder), "--text", str(text_file)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory, model_and_text: tuple[str, ...]) -> Path:
    """A recording of 120 tokens."""
    out = tmp_path_factory.mktemp("recordings") / "my run.atlas"
    assert main(["record", *model_and_text, "--tokens", "120", "-o", str(out)]) == 0
    return out


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command, and return what it prints."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that cannot do what it is asked for, and return the text of its error."""

    def run(*words: object) -> str:
        assert main([str(word) for word in words]) == 2
        return capsys.readouterr().err.split("attlas: ", 1)[1]

    return run


@pytest.fixture
def complaint(refusal: Run) -> Run:
    """As `refusal`, and return the command and what it found wrong, after a look at the form of the whole text."""

    def run(*words: object) -> str:
        text = refusal(*words)
        parts = re.fullmatch(r"(\w+): .+\n(?:  .+: .*\n)*  found: (.+)\n  fix: .+\n", text)
        assert parts is not None, text
        return f"{parts[1]}: {parts[2]}"

    return run


@pytest.fixture(scope="session")
def demo_folder(model_and_text: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that one run of the demo has filled."""
    out = tmp_path_factory.mktemp("demo")
    assert main(["demo", *model_and_text, "--output", str(out)]) == 0
    return out
