"""Record a small trained GPT-2 while it reads and writes code, save the recording, and say what its heads do.

The model ships with attlas. It reads the beginning of a Python file and goes on writing; all steps of a layer become
one lazy matrix. The recording is written to a folder, opened again, and everything is computed from the folder.

    python examples/record_a_model.py                          # writes record-a-model.png
    python examples/record_a_model.py --keep run.atlas         # keeps the recording
    python examples/record_a_model.py --text FILE --tokens 40  # another text, more of it written
"""

import argparse
import inspect
import tempfile
import textwrap
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import attlas
import attlas.models
from attlas import heads, pictures, stats

# The first of these that reaches 0.4 names a head: who looks one token back is local, of course.
PATTERNS = ("previous_token", "fixed_distance", "current_token", "induction", "broad", "local")
PROMPT = 600  # tokens that are read


def record(folder: Path, text: str, written: int) -> str:
    """Let the model read a text and go on with it, recorded to a folder; returns what it wrote."""
    model = AutoModelForCausalLM.from_pretrained(attlas.models.path())
    tokenizer = AutoTokenizer.from_pretrained(attlas.models.path())
    ids = tokenizer(text, truncation=True, max_length=PROMPT, return_tensors="pt").input_ids
    numbers = [stats.Entropy(), stats.EffectiveKeys(), stats.ColumnMass()]
    with attlas.record(model, statistics=numbers, keep="disk", folder=folder, tokens=tokenizer) as atlas:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=written, do_sample=False, pad_token_id=0
        )
        atlas.spans |= {"prompt": (0, ids.shape[1]), "written": (ids.shape[1], out.shape[1] - 1)}
    return str(tokenizer.decode(out[0, ids.shape[1] :]))


def pattern_of(scores: dict[str, torch.Tensor], head: int) -> str:
    """Return the pattern that a head shows, with its score."""
    for name in PATTERNS:
        if float(scores[name][head]) >= 0.4:
            return f"{name.replace('_', ' ')} {float(scores[name][head]):.2f}"
    return "none of these"


def draw(atlas: attlas.Atlas, place: tuple[int, int], out: Path) -> Path:
    """Draw one head, and what reaches the last token through all layers."""
    layer, head = place
    figure = pictures.sheet(9.6, 4.4)
    left, right = figure.subplots(1, 2)
    A = atlas[layer][0, head]
    pictures.draw(left, pictures.blocks(A, 200, "mean"), extent=(0, A.shape[-1], A.shape[-2], 0))
    left.set_title(f"layer {layer}, head {head}", fontsize=11, loc="left", color=pictures.INK)
    brought = heads.rollout(atlas, rows=[-1])[0, 0]
    right.plot(brought.cumsum(0), color=pictures.ACCENT, linewidth=1.8)
    right.set_title("rollout: what reaches the last token", fontsize=11, loc="left", color=pictures.INK)
    right.set(xlabel="token", ylabel="share of tokens up to here", ylim=(0, 1.02))
    return pictures.save(figure, out, dpi=130)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("record-a-model.png"), help="picture (default: %(default)s)")
    parser.add_argument("--text", type=Path, help="file to read (default: Python's own textwrap.py)")
    parser.add_argument("--tokens", type=int, default=12, help="tokens to write (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder for the recording (default: a temporary one)")
    options = parser.parse_args(argv)
    text = options.text.read_text(encoding="utf-8") if options.text else inspect.getsource(textwrap)

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary) / "run.atlas"
        wrote = record(folder, text, options.tokens)
        atlas = attlas.load(folder)
        print(atlas)
        print(f"the model wrote {wrote!r}\n")

        assert atlas.ids is not None
        scores = [heads.scores(A[0], atlas.ids[0]) for A in atlas]
        print("layer  head  entropy   keys  pattern")
        for row in atlas.table():
            pattern = pattern_of(scores[row["layer"]], row["head"])
            print(f"{row['layer']:5d} {row['head']:5d} {row['entropy']:8.2f} {row['effective_keys']:6.1f}  {pattern}")

        induction = torch.stack([layer["induction"] for layer in scores])
        best = divmod(int(induction.argmax()), induction.shape[1])
        weight = heads.span_table(atlas, atlas.spans).weight[:, 0, :, 1, 0]  # from what was written to the prompt
        print(f"\nwhat was written gives the prompt {float(weight.mean()):.2f} of its weight, in the mean over heads")
        print(draw(atlas, best, options.out))
        return {
            "layers": len(atlas),
            "queries": atlas[0].shape[-2],
            "previous": float(max(layer["previous_token"].max() for layer in scores)),
            "induction": float(induction.max()),
            "on_prompt": float(weight.mean()),
            "error": max(A.check() for A in atlas),
        }


if __name__ == "__main__":
    main()
