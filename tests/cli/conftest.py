"""A tiny random model with a tokenizer of bytes, in a folder, as a user would have it."""

from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, pre_tokenizers

import attlas.huggingface  # noqa: F401 - before transformers saves a model of its own
from attlas.cli import main

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
def demo_folder(model_folder: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that one run of the demo has filled."""
    out = tmp_path_factory.mktemp("demo")
    assert main(["demo", "--model", str(model_folder), "--text", str(text_file), "--out", str(out)]) == 0
    return out
