"""The options of every command. They are known before torch is loaded, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attlas
from attlas import models
from attlas.cli.terminal import Help

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["DISTRIBUTIONS", "DTYPES", "KERNELS", "KEYS", "QUERIES", "SIDE", "STATISTICS", "parse", "parser"]

DISTRIBUTIONS = ("normal", "uniform", "rademacher", "laplace")  # those of attlas.scaling
DTYPES = ("float32", "float64", "bfloat16", "float16")
KERNELS = ("gaussian", "laplace", "epanechnikov", "triangular", "boxcar")
KEYS, QUERIES = 512, 256
SIDE = 1024  # blocks along a side of one head, at most
STATISTICS = ("entropy", "effective_keys", "max_weight", "max_logit", "logit_moments", "column_mass", "offsets",
              "top_k", "picture", "kinds", "arg_max", "column_arg_max", "column_max", "coverage",
              "row_mass")  # fmt: skip  # those of attlas.cli.head_statistics


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line, with the whole line as `command`; exit where it names no command."""
    top = parser()
    arguments = top.parse_args(argv)
    if not hasattr(arguments, "module"):
        top.print_help(sys.stderr)
        top.exit(2)
    arguments.command = shlex.join(["attlas", *argv])
    return arguments


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; ``module`` is the module of attlas.cli that runs a command."""
    top = argparse.ArgumentParser(
        prog="attlas",
        description="Exact attention whose weights you can look at, at any length.",
        epilog="attlas COMMAND --help says what a command takes.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"attlas {attlas.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for add in (_demo, _record, _corpus, _join, _view, _stats, _picture, _report, _scaling, _regress, _bench):
        add(commands)
    return top


def _add(
    commands: _SubParsersAction[argparse.ArgumentParser],
    name: str,
    short: str,
    description: str,
    examples: str = "",
    aliases: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """Add a command; `short` is its line in the list of commands, which names no alias."""
    command = commands.add_parser(
        name, help=short, description=description, epilog=examples, formatter_class=Help, allow_abbrev=False
    )
    commands.choices.update(dict.fromkeys(aliases, command))
    command.set_defaults(module=name)
    return command


def _atlas(command: argparse.ArgumentParser) -> None:
    """Add the folder of a recording to the arguments of a command."""
    command.add_argument("atlas", type=Path, metavar="FOLDER", help="what attlas record has written")


_SAMPLE = "timeit.py of the standard library"


def _demo(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``attlas demo``."""
    about = "Run a trained model on a text, say what each of its heads does, and write a report and pictures."
    option = _add(commands, "demo", "say what every head of a small trained model does", about).add_argument
    option("--text", type=Path, metavar="FILE", help=f"text to read, UTF-8 (default: {_SAMPLE})")
    folder = Path("demo-output")
    option("-o", "--out", type=Path, metavar="DIR", default=folder, help="folder for the report (default: %(default)s)")
    option("--tokens", type=int, metavar="N", help="how many tokens to read (default: up to 2048)")
    option(
        "--model", type=Path, metavar="DIR", help="folder of a Hugging Face causal model (default: the shipped GPT-2)"
    )
    option("--no-browser", action="store_true", help="do not open the run in the browser at the end")


_RECORD_EXAMPLES = """\
examples:
  attlas record --text book.txt -o run.atlas
  cat *.py | attlas record --model ./my-model --text - --tokens 4096 --keep statistics -o run.atlas
"""


def _record(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``attlas record``."""
    about = (
        "Run a Hugging Face model on a text and record the attention of every head: queries, keys and one "
        "number a row, in linear memory, with exact statistics of every cell."
    )
    command = _add(
        commands, "record", "run a model on a text, and keep what its heads attend to", about, _RECORD_EXAMPLES
    )
    option = command.add_argument
    name = "folder of a Hugging Face model, or its name on the hub (default: shipped)"
    option("--model", metavar="DIR_OR_ID", help=name)
    text = "text to read, UTF-8; - reads a pipe (default: timeit.py of Python)"
    option("--text", type=Path, metavar="FILE", help=text)
    option("--tokens", type=int, metavar="N", help="read the first N tokens only")
    option("--generate", type=int, metavar="N", default=0, help="let the model write N tokens more")
    chunk = "read N tokens at a time: less memory where heads share keys (default: all at once)"
    option("--chunk", type=int, metavar="N", help=chunk)
    option = command.add_argument_group("what is recorded").add_argument
    option("--layers", metavar="L,L,...", help="layers, from 0; negative from the end (default: all)")
    option("--heads", metavar="H,H,...", help="heads of each layer (default: all)")
    names = f"of {', '.join(STATISTICS)} (default: what stats, picture and report show)"
    option("--statistics", metavar="NAME,NAME,...", help=names)
    keep = "disk: queries and keys too, for any question later; statistics: the numbers only (default: disk)"
    option("--keep", choices=("disk", "statistics"), default="disk", help=keep)
    values = "values too: all, or their norms alone, for pictures of ‖A v‖ (default: neither)"
    option("--values", choices=("all", "norms"), help=values)
    option = command.add_argument_group("how the model is run").add_argument
    option("--dtype", choices=DTYPES, default="float32", help="type of the weights (default: float32)")
    option("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: cpu)")
    patch = "record a model that calls scaled_dot_product_attention by itself"
    option("--patch-sdpa", action="store_true", help=patch)
    option = command.add_argument_group("result").add_argument
    option("-o", "--out", type=Path, required=True, metavar="FOLDER", help="where it goes, run.atlas")
    option("--overwrite", action="store_true", help="replace an atlas that is there")


_CORPUS_EXAMPLES = """\
examples:
  attlas corpus ./my-model books/ -o books.corpus
  attlas corpus shipped "src/**/*.py" -o code.corpus --length 2048
  torchrun --nproc-per-node 4 -m attlas corpus ./my-model texts.parquet --column text -o run.corpus
  attlas corpus run.corpus --export headvis tree
"""


def _corpus(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``attlas corpus``."""
    about = (
        "Read many texts with a Hugging Face model and keep exact sums, distributions and sampled texts of every head. "
        "Stopped at any moment, the same command goes on where it was."
    )
    command = _add(commands, "corpus", "say what every head does over many texts", about, _CORPUS_EXAMPLES)
    option = command.add_argument
    option("model", metavar="MODEL", help="folder of a model, its name on the hub, or shipped; for --export a corpus")
    source = "folder, file or pattern: text, .jsonl, .parquet, .arrow; - reads a pipe"
    option("source", nargs="?", metavar="SOURCE", help=source)
    option("-o", "--out", type=Path, metavar="DIR", help="where the result goes, and an unfinished one is found")
    option("--export", nargs=2, metavar=("headvis", "OUT"), help="write a corpus as the tree of HeadVis")
    option = command.add_argument_group("what is read").add_argument
    option("--column", metavar="NAME", help="column of rows (default: text, input_ids, ids or content)")
    option("--length", type=int, metavar="N", help="tokens of a text (default: 4096, or the model's context)")
    option("--stride", type=int, metavar="N", help="tokens from text to text in a document (default: length)")
    option("--texts", type=int, metavar="N", default=16384, help="texts at most (default: %(default)s)")
    option("--failures", type=float, metavar="SHARE", default=0.1, help="texts that may fail (default: %(default)s)")
    option = command.add_argument_group("how the model is run").add_argument
    option("--batch", type=int, metavar="N", default=1, help="texts at once, of one length (default: %(default)s)")
    option("--seed", type=int, metavar="N", default=0, help="seed of the sampled texts (default: %(default)s)")
    option("--samples", type=int, metavar="N", default=32, help="texts kept for all heads (default: %(default)s)")
    option("--dtype", choices=DTYPES, default="float32", help="type of the weights (default: float32)")
    option("--device", default="cpu", help="cpu, cuda, cuda:1, mps; cuda is that of LOCAL_RANK (default: cpu)")
    option("--patch-sdpa", action="store_true", help="a model that calls scaled_dot_product_attention by itself")


def _join(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``attlas join``."""
    about = "Put corpora of one model and of different texts together; every number is that of one run."
    option = _add(commands, "join", "put corpora of several machines together", about).add_argument
    option("folders", nargs="+", type=Path, metavar="DIR", help="what attlas corpus has written")
    option("-o", "--out", type=Path, metavar="DIR", required=True, help="where the result goes")


_VIEW_EXAMPLES = """\
examples:
  attlas view run.atlas
  attlas view --text book.txt --tokens 4096
  attlas view --model ./my-model --text book.txt -o run.atlas
  attlas view stdlib.corpus
  attlas view first.corpus second.corpus
  attlas view stdlib.corpus --export heads.html
"""


def _view(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``attlas view``."""
    about = (
        "Open a recording in the browser: pan and zoom through the whole matrix of every head. Or open a "
        "corpus: all heads as points, and a page for each. The page is served to this machine only, until Ctrl-C."
    )
    command = _add(commands, "view", "open a recording or a corpus in the browser", about, _VIEW_EXAMPLES)
    known = "what attlas record or attlas corpus has written; several corpora are shown side by side"
    command.add_argument("atlas", nargs="*", type=Path, metavar="FOLDER", help=known)
    option = command.add_argument_group("a model that reads a text now, and texts typed on the page").add_argument
    option("--model", metavar="DIR_OR_ID", help="model, as of attlas record (default: shipped)")
    option("--text", type=Path, metavar="FILE", help="text to read, UTF-8; - reads a pipe")
    option("--tokens", type=int, metavar="N", help="read the first N tokens only")
    option("--generate", type=int, metavar="N", help="let the model write N tokens more")
    option("-o", "--out", type=Path, metavar="FOLDER", help="keep the recording there (default: drop it)")
    option = command.add_argument_group("the viewer").add_argument
    option("--port", type=int, metavar="N", help="port of 127.0.0.1 (default: the next free from 8750 on)")
    option("--no-browser", action="store_true", help="print the address and open nothing")
    option("--compare", type=Path, metavar="FOLDER", help="another recording of as many tokens, head by head")
    option("--at", metavar="LINK", help="open at this place: a copied link, or what stands behind its #")
    option("--export", type=Path, metavar="FILE", help="write the page of a corpus as one HTML file instead")


_STATS_EXAMPLES = """\
examples:
  attlas stats run.atlas
  attlas stats run.atlas --sort induction --top 5
  attlas stats run.atlas --json | jq '.rows[] | select(.first > 0.5) | [.layer, .head]'
  attlas stats run.atlas --csv > heads.csv
"""


def _stats(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``attlas stats``."""
    about = "Print a table of all recorded heads: exact means over every query of the text, and what each head is."
    command = _add(commands, "stats", "print what every head of a recording does", about, _STATS_EXAMPLES)
    _atlas(command)
    option = command.add_argument
    option("--layer", type=int, metavar="L", help="one layer only; negative counts from the end")
    option("--sort", metavar="COLUMN", help="largest first; with a + before the name, smallest first")
    option("--top", type=int, metavar="N", help="the first N heads only")
    option = command.add_mutually_exclusive_group().add_argument
    option("--json", action="store_true", help="print all numbers as JSON")
    option("--csv", action="store_true", help="print all numbers as CSV")


_PICTURE_EXAMPLES = """\
examples:
  attlas picture run.atlas -o all.png
  attlas picture run.atlas --layer 2 --head 4 -o head.png
  attlas picture run.atlas --layer 2 --head 4 --rows 480:512 --columns 480:512 -o close.svg
"""


def _picture(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``attlas picture``."""
    about = "Draw the weights of one head, pooled into blocks, or an overview of all layers and heads."
    command = _add(commands, "picture", "draw a head of a recording, or all of them", about, _PICTURE_EXAMPLES)
    _atlas(command)
    option = command.add_argument
    option("--layer", metavar="L", help="a layer, or a name such as cross.3 (default: all)")
    option("--head", type=int, metavar="H", help="a head of it (default: all)")
    option("--rows", metavar="A:B", help="queries A to B - 1 only, as in Python")
    option("--columns", metavar="A:B", help="keys A to B - 1 only")
    option("--size", type=int, metavar="N", help=f"blocks along a side, at most (default: {SIDE})")
    option("--pool", choices=("max", "mean"), default="max", help="what stands for a block")
    option("--scale", choices=("log", "linear"), default="log", help="scale of the colours")
    option("-o", "--out", type=Path, required=True, metavar="FILE", help="head.png, .svg or .pdf")


_REPORT_EXAMPLES = """\
examples:
  attlas report run.atlas -o report.html
  attlas report run.atlas --heads 2.4,3.2 -o report.html
"""


def _report(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``attlas report``."""
    about = (
        "Write the page of the viewer as one HTML file that needs no server: every head, the text and what "
        "each token looks at. It opens at the most telling head, and loads nothing from anywhere."
    )
    command = _add(commands, "report", "write a recording as one HTML file", about, _REPORT_EXAMPLES, ("export",))
    _atlas(command)
    heads = "layer and head of those in detail (default: the most telling head)"
    command.add_argument("--heads", metavar="L.H,...", help=heads)
    command.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="report.html")


def _scaling(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``attlas scaling``."""
    about = (
        "Compare variance of q·k, entropy, largest weight and slope of softmax with what theory predicts: "
        "for random vectors of growing size, without and with the scale, or for every head of a model."
    )
    command = _add(commands, "scaling", "show why the dot product is divided by sqrt(d)", about)
    option = command.add_argument_group("random vectors").add_argument
    option("--sizes", metavar="D,D,...", help="sizes of queries and keys (default: 8,16,...,512)")
    option("--keys", type=int, metavar="N", help=f"keys of each query (default: {KEYS})")
    option("--queries", type=int, metavar="N", help=f"queries that are drawn (default: {QUERIES})")
    option("--distribution", metavar="NAME", help=f"{', '.join(DISTRIBUTIONS)} (default: the first)")
    option("--seed", type=int, metavar="N", help="seed of the draw (default: 0)")
    option = command.add_argument_group("a model").add_argument
    folder = "folder of a Hugging Face causal model (without DIR: the shipped GPT-2)"
    option("--model", type=Path, nargs="?", const=models.path(), metavar="DIR", help=folder)
    option("--text", type=Path, metavar="FILE", help=f"text to read, UTF-8 (default: {_SAMPLE})")
    option("--tokens", type=int, metavar="N", help="how many tokens to read (default: up to 2048)")
    target = "what the suggested factor of the logits is to reach: variance=1 (the default), or entropy=NATS"
    option("--target", metavar="WHAT=VALUE", help=target)
    option = command.add_argument_group("files").add_argument
    option("--plot", type=Path, metavar="FILE", help="draw the numbers: .png, .svg or .pdf")
    option("--json", type=Path, metavar="FILE", help="write the numbers")


_REGRESS_EXAMPLES = """\
examples:
  attlas regress cars.csv --target price
  attlas regress cars.csv --target price --features age,km --plot price.png
  attlas regress cars.csv --target price --predict new.csv -o prices.csv --std
  attlas regress cars.csv --target price --save price.safetensors
  attlas regress --load price.safetensors --predict new.csv -o prices.csv
  zcat log.csv.gz | attlas regress - --target seconds --bandwidth scott --json
"""


def _regress(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``attlas regress``."""
    about = (
        "Predict one column of a table from others by kernel regression with a bandwidth per feature; "
        "its leave-one-out error stands beside those of the mean and of a linear model."
    )
    short = "predict a column of a table by kernel regression"
    command = _add(commands, "regress", short, about, _REGRESS_EXAMPLES)
    option = command.add_argument
    option("data", type=Path, nargs="?", metavar="FILE", help="CSV or Parquet; - reads CSV from a pipe")
    option("--target", metavar="COLUMN", help="the column to predict")
    option("--features", metavar="A,B,...", help="the columns to predict it from (default: all others)")
    option("--weights", metavar="COLUMN", help="weight of each row; only ratios matter (default: all equal)")
    option = command.add_argument_group("the regression").add_argument
    option("--kernel", choices=KERNELS, metavar="NAME", help=f"{', '.join(KERNELS)} (default: the first)")
    bandwidth = "loo (least leave-one-out error), scott, silverman, a number, or numbers with commas (default: loo)"
    option("--bandwidth", metavar="H", help=bandwidth)
    option("--degree", type=int, choices=(0, 1), help="0: local mean, 1: local line (default: 0)")
    option("--outside", choices=("nan", "nearest"), help="prediction for rows out of reach (default: nan, none)")
    option = command.add_argument_group("the table").add_argument
    option("--delimiter", metavar="SIGN", help="between cells: , ; | tab space, or another sign (default: detected)")
    option("--decimal", choices=(".", ","), default=".", metavar="SIGN", help="decimal sign, . or , (default: .)")
    option("--thousands", choices=(".", ","), metavar="SIGN", help="separator of thousands, . or , (default: none)")
    text = "whether the first line has names; columns without are 1, 2, ... (auto: no if it is all numbers)"
    option("--header", choices=("auto", "yes", "no"), default="auto", help=text)
    option("--drop-missing", action="store_true", help="leave out rows with a missing value")
    option = command.add_argument_group("result").add_argument
    option("--predict", type=Path, metavar="FILE", help="rows to predict for; needs -o")
    option("-o", "--out", type=Path, metavar="FILE", help="these rows with predictions: .csv, .tsv or .parquet")
    option("--std", action="store_true", help="add the standard deviation of the target around the prediction")
    option("--plot", type=Path, metavar="FILE", help="draw the fit, or the effect of each feature: .png .svg .pdf")
    option("--save", type=Path, metavar="FILE", help="keep the fit, for --load: .safetensors")
    option("--load", type=Path, metavar="FILE", help="predict with a fit that --save kept")
    option("--json", action="store_true", help="print all numbers as JSON")


def _bench(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``attlas bench``."""
    about = (
        "Print the time of attlas, FlexAttention and eager attention divided by that of PyTorch's fused "
        "kernel (SDPA), and the limits of this processor. The limits are measured once and kept in the user's cache "
        "folder; attlas.explain(A) compares with them. Takes about a minute, on a machine that does nothing else."
    )
    option = _add(commands, "bench", "measure this machine, beside SDPA and FlexAttention", about).add_argument
    option("--tokens", type=int, default=4096, metavar="N", help="queries and keys (default: %(default)s)")
    option("--heads", type=int, default=8, metavar="N", help="heads (default: %(default)s)")
    option("--size", type=int, default=64, metavar="D", help="size of each head (default: %(default)s)")
    dtypes = f"{', '.join(DTYPES)} (default: the first)"
    option("--dtype", default=DTYPES[0], choices=DTYPES, metavar="NAME", help=dtypes)
    option("--seconds", type=float, default=40.0, metavar="S", help="time for the three tables (default: 40)")
    option("--again", action="store_true", help="measure the limits of the processor again")
