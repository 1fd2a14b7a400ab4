"""When is each word said? The alignment heads of a Whisper, found and read while it writes.

A recording keeps the queries and keys of cross-attention while the model generates. `attlas.heads.alignment` compares
all heads, or takes those that are known, and finds the path through text and sound. The model is Whisper's own, tiny
and with random weights, so the words mean nothing; nothing is downloaded. With a real model and sound, replace
`model()` and `features`.

    python examples/word_times.py
"""

import argparse

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.utils import logging

import attlas
from attlas import heads

PROMPT = 2  # tokens that the model is given: the start, and that it shall write no times


def model() -> WhisperForConditionalGeneration:
    """Return a Whisper with random weights, large enough that attention is far from uniform."""
    config = WhisperConfig(
        vocab_size=100, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=60,
        max_target_positions=40, decoder_start_token_id=1, pad_token_id=0, eos_token_id=2, bos_token_id=3,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    whisper = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weights in whisper.parameters():
            weights *= 4
    settings = whisper.generation_config
    settings.no_timestamps_token_id, settings.is_multilingual = 99, False
    return whisper


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=12, help="tokens to write (default: %(default)s)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    whisper, features = model(), torch.randn(1, 8, 120)
    with attlas.record(whisper, layers="cross") as atlas:
        text = whisper.generate(features, max_new_tokens=options.tokens, min_new_tokens=options.tokens)
    found = heads.alignment(atlas, rows=slice(PROMPT, None), count=3)
    for (layer, head), score in list(found.scores.items())[:3]:
        print(f"  head {layer}.{head}: score {score:.3f}")
    words = [2] * (found.starts.shape[1] // 2)  # two tokens make a word here
    for i, (begin, end) in enumerate(found.words(words).tolist()):
        print(f"  word {i}: {begin:5.2f} s to {end:5.2f} s")
    whole = found.words([found.starts.shape[1]])
    return {"heads": float(len(found.heads)), "tokens": float(text.shape[-1]), "end": float(whole[0, 1])}


if __name__ == "__main__":
    main()
