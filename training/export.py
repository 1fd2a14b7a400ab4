"""Write a checkpoint as a Hugging Face folder that transformers loads without any code of ours.

Usage: python training/export.py [--work DIR] [--folder src/attlas/models/python-gpt2]
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from model import Gpt2, Shape
from prepare import END

FOLDER = Path(__file__).parent.parent / "src/attlas/models/python-gpt2"
LIMIT = 8_000_000  # bytes, whole folder: it travels inside the package


def load(path: Path) -> Gpt2:
    """The averaged weights of a checkpoint, with GPT-2's own GELU."""
    weights = torch.load(path, weights_only=True)["average"]
    model = Gpt2(Shape())
    model.load_state_dict({name.removeprefix("module."): w for name, w in weights.items() if name != "n_averaged"})
    for block in model.blocks:
        block.gelu = "tanh"
    return model.eval()


def configuration(shape: Shape, end: int) -> GPT2Config:
    """The same sizes in transformers' words. Dropout was not used."""
    return GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.context,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        activation_function="gelu_new",
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=end,
        dtype="float32",
        architectures=["GPT2LMHeadModel"],
    )


@torch.no_grad()
def tensors(model: Gpt2) -> dict[str, Tensor]:
    """Weights under GPT-2's names; its Conv1D stores the transpose of a Linear. The head is tied: not stored twice."""
    named = {
        "wte.weight": model.tokens.weight,
        "wpe.weight": model.positions.weight,
        "ln_f.weight": model.ln_f.weight,
        "ln_f.bias": model.ln_f.bias,
    }
    for i, block in enumerate(model.blocks):
        a = block.attention
        joined = (a.query, a.key, a.value)
        named |= {
            f"h.{i}.ln_1.weight": block.ln_1.weight,
            f"h.{i}.ln_1.bias": block.ln_1.bias,
            f"h.{i}.attn.c_attn.weight": torch.cat([f.weight for f in joined]).T,
            f"h.{i}.attn.c_attn.bias": torch.cat([f.bias for f in joined]),
            f"h.{i}.attn.c_proj.weight": a.out.weight.T,
            f"h.{i}.attn.c_proj.bias": a.out.bias,
            f"h.{i}.ln_2.weight": block.ln_2.weight,
            f"h.{i}.ln_2.bias": block.ln_2.bias,
            f"h.{i}.mlp.c_fc.weight": block.up.weight.T,
            f"h.{i}.mlp.c_fc.bias": block.up.bias,
            f"h.{i}.mlp.c_proj.weight": block.down.weight.T,
            f"h.{i}.mlp.c_proj.bias": block.down.bias,
        }
    return {f"transformer.{name}": w.contiguous() for name, w in named.items()}


@torch.no_grad()
def check_same_function(model: Gpt2, exported: GPT2LMHeadModel) -> float:
    """Largest difference between the logits of the two models, which must be rounding and nothing else."""
    ids = torch.randint(model.shape.vocabulary, (1, 512), generator=torch.Generator().manual_seed(0))
    ours = model(ids, torch.arange(ids.shape[1])) @ model.tokens.weight.T
    difference = (exported.eval()(ids).logits - ours).abs().max().item()
    if difference > 1e-3:
        raise ValueError(f"export.py: logits differ by {difference:.2g} from the model that was trained")
    return difference


def rewrite(path: Path, changes: dict[str, str], **layout: object) -> None:
    """Write a JSON file again with some values changed and another layout."""
    content = json.loads(path.read_text("utf-8")) | changes
    path.write_text(json.dumps(content, ensure_ascii=False, **layout) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(__file__).parent / "work")
    parser.add_argument("--name", default="checkpoint")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()

    model = load(options.work / f"{options.name}.pt")
    tokenizer = Tokenizer.from_file(str(options.work / "tokenizer.json"))
    config = configuration(model.shape, tokenizer.token_to_id(END))
    weights = tensors(model)

    exported = GPT2LMHeadModel(config)
    exported.load_state_dict(weights | {"lm_head.weight": weights["transformer.wte.weight"]})
    print(
        f"logits agree with the model that was trained: largest difference {check_same_function(model, exported):.1e}"
    )

    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder.parent) as unfinished:
        # Stored in half the bytes; config.json says float32, so that transformers computes in float32.
        save_file({name: w.half() for name, w in weights.items()}, f"{unfinished}/model.safetensors", {"format": "pt"})
        config.save_pretrained(unfinished)
        exported.generation_config.save_pretrained(unfinished)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=END,
            eos_token=END,
            unk_token=None,
            model_max_length=model.shape.context,
            clean_up_tokenization_spaces=False,
        ).save_pretrained(unfinished)
        # Without indentation, which is more than half of the file; and under the class name older versions know too.
        rewrite(Path(unfinished, "tokenizer.json"), {}, separators=(",", ":"))
        rewrite(Path(unfinished, "tokenizer_config.json"), {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2)
        for file in sorted(Path(unfinished).iterdir()):
            file.chmod(0o644)
            file.replace(options.folder / file.name)

    loaded = AutoModelForCausalLM.from_pretrained(options.folder)
    text = "def f(x):\n    return x + 1  # naïve\n"
    words = AutoTokenizer.from_pretrained(options.folder)
    if loaded.dtype != torch.float32 or words.decode(words(text).input_ids) != text:
        raise ValueError("export.py: transformers does not read the folder back as float32 and the same text")
    size = sum(file.stat().st_size for file in options.folder.iterdir())
    if size > LIMIT:
        raise ValueError(f"export.py: the folder has {size:,} bytes, more than {LIMIT:,}")
    print(f"{options.folder}: {size:,} bytes, {loaded.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
