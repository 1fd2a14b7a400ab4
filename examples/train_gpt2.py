"""A GPT-2 from scratch, in a minute: reads Python's own standard library letter by letter, then writes some.

The text is on every machine that can run this. The model is attlas.nn.GPT2, the same class that loads any GPT-2 from
a folder. It is judged on modules that it never read, against a bigram model of the same text: the best that anyone
can do who looks back one letter only.

    python examples/train_gpt2.py                     # trains for a minute, writes gpt2-heads.png
    python examples/train_gpt2.py --seconds 12        # stops earlier
"""

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor

from attlas import pictures
from attlas.nn import GPT2, GPT2Config

CONTEXT, BATCH = 128, 12
HELD_OUT = ("timeit.py", "bisect.py", "shelve.py", "textwrap.py")


def texts() -> tuple[str, str]:
    """Return what is learned from and what is held out: modules of the standard library, ASCII only."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(folder.glob("*.py")) if not file.name.startswith("_")]
    read = {file.name: file.read_text(encoding="utf-8", errors="ignore") for file in files}
    plain = {name: "".join(letter for letter in text if letter.isascii()) for name, text in read.items()}
    return "".join(text for name, text in plain.items() if name not in HELD_OUT), "".join(map(plain.get, HELD_OUT))


def bigram(seen: Tensor, held: Tensor, letters: int) -> float:
    """Loss of predicting each letter from the one before it, nats a letter; one is added to each count."""
    counts = torch.ones(letters, letters, dtype=torch.float64)
    counts.index_put_((seen[:-1], seen[1:]), torch.ones(len(seen) - 1, dtype=torch.float64), accumulate=True)
    shares = counts / counts.sum(1, keepdim=True)
    return float(-shares[held[:-1], held[1:]].log().mean())


def loss_on(model: GPT2, held: Tensor) -> float:
    """Loss of the model on text it never read, nats a letter."""
    windows = held[: len(held) // CONTEXT * CONTEXT].view(-1, CONTEXT)[:64]
    model.eval()
    with torch.no_grad():
        loss = model(windows, labels=windows).loss
    model.train()
    return float(loss)


def train(model: GPT2, seen: Tensor, held: Tensor, seconds: float, most: float) -> int:
    """Train for so many seconds of processor time and steps at most; returns the number of steps."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    begin, step, said = time.process_time(), 0, 0.0  # the time that this process computes, whatever else runs
    while (gone := max((spent := time.process_time() - begin) / seconds, step / most)) < 1.0:
        for group in optimizer.param_groups:  # warm up, then down towards nothing
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * (1.0 - 0.95 * gone)
        places = torch.randint(len(seen) - CONTEXT, (BATCH, 1), generator=generator)
        batch = seen[places + torch.arange(CONTEXT)]
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if gone >= said:
            print(
                f"  {spent:4.0f} s  step {step:4}  loss {float(loss.detach()):.3f}  held-out {loss_on(model, held):.3f}"
            )
            said += 1 / 6
    return step


def write_on(model: GPT2, beginning: str, letters: str, length: int = 220) -> str:
    """Return a beginning and what the model makes of it."""
    ids = torch.tensor([[letters.index(letter) for letter in beginning]])
    room = CONTEXT - len(beginning)
    text = model.generate(ids, min(length, room), temperature=0.7, top_k=20, seed=1, stop=())
    return "".join(letters[i] for i in text[0].tolist())


def draw(model: GPT2, held: Tensor, out: Path) -> Path:
    """Draw what every head looks at on the first letters of the held-out text."""
    with torch.no_grad():
        attentions = model(held[None, :CONTEXT]).attentions
    maps = torch.stack([pictures.blocks(A[0], CONTEXT) for A in attentions if A is not None])
    names = [[f"{layer}·{head}" for head in range(maps.shape[1])] for layer in range(maps.shape[0])]
    title = f"What each head of a minute-old GPT-2 looks at: {CONTEXT} letters of {HELD_OUT[0]}"
    return pictures.save(pictures.grid(maps, names, title=title), out, dpi=160)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpt2-heads.png"), help="picture (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="processor time to train (default: %(default)s)")
    parser.add_argument("--steps", type=float, default=math.inf, help="most steps to train (default: no limit)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)

    seen_text, held_text = texts()
    letters = "".join(sorted(set(seen_text) | set(held_text)))
    code = torch.full((128,), 0)
    code[torch.tensor([ord(letter) for letter in letters])] = torch.arange(len(letters))
    seen = code[torch.frombuffer(bytearray(seen_text, "ascii"), dtype=torch.uint8).long()]
    held = code[torch.frombuffer(bytearray(held_text, "ascii"), dtype=torch.uint8).long()]
    baseline = bigram(seen, held, len(letters))

    model = GPT2(
        GPT2Config(
            vocab_size=len(letters), n_positions=CONTEXT, n_embd=96, n_layer=2, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(seen):,} letters of the standard library, {len(held):,} held out; a GPT-2 of {count:,} parameters")
    steps = train(model, seen, held, options.seconds, options.steps)
    loss = loss_on(model, held)
    print(f"  {steps} steps; held-out loss {loss:.3f} nats a letter, bigram model {baseline:.3f}")
    text = write_on(model, "def __init__(self", letters)
    print("\n" + "\n".join(f"  │ {line}" for line in text.splitlines()))
    print(f"\n  {draw(model, held, options.out)}")
    return {"loss": loss, "baseline": baseline, "written": len(text)}


if __name__ == "__main__":
    main()
