"""Train the tokenizer on the training part, then write both parts as streams of token ids.

Usage: python training/prepare.py [--work DIR]
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import documents

VOCABULARY = 4096
END = "<|endoftext|>"
PARTS = {"train": False, "held_out": True}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE, GPT-2's pre-tokenizer: every string has tokens, and decoding gives back the same bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """One stream: each document after one end-of-text token, which also serves as its beginning."""
    end = tokenizer.token_to_id(END)
    pieces = [np.array([end, *tokenizer.encode(text).ids], dtype=np.uint16) for text in texts]
    return np.concatenate([*pieces, np.array([end], dtype=np.uint16)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(__file__).parent / "work")
    work: Path = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)

    tokenizer = train_tokenizer(documents(held_out=False))
    unfinished = work / "tokenizer.json.tmp"
    tokenizer.save(str(unfinished), pretty=False)
    unfinished.replace(work / "tokenizer.json")

    for part, held_out in PARTS.items():
        texts = list(documents(held_out))
        ids = encode(tokenizer, texts)
        unfinished = work / f"{part}.tmp.npy"
        np.save(unfinished, ids)
        unfinished.replace(work / f"{part}.npy")
        size = sum(len(text.encode()) for text in texts)
        print(f"{part}: {len(texts)} files, {size:,} bytes, {len(ids):,} tokens, {size / len(ids):.2f} bytes per token")


if __name__ == "__main__":
    main()
