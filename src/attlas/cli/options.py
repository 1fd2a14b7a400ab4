"""The options of every command. They are known before torch is loaded, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
import inspect
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attlas
from attlas import models
from attlas.cli.terminal import Help

DISTRIBUTIONS = ("normal", "uniform", "rademacher", "laplace")  # those of attlas.scaling
DTYPES = ("float32", "float64", "bfloat16", "float16")
KERNELS = ("gaussian", "laplace", "epanechnikov", "triangular", "boxcar")
KEYS, QUERIES = 512, 256
SIDE = 1024  # blocks along a side of one head, at most
STATISTICS = ("entropy", "effective_keys", "max_weight", "max_logit", "logit_moments", "column_mass", "offsets",
              "top_k", "picture", "kinds", "arg_max", "column_arg_max", "column_max", "coverage",
              "row_mass")  # fmt: skip  # up to the kinds of heads, those that are recorded where none is named


# What several options have in common.
_NUMBER_OPTION: dict[str, Any] = {"type": int, "metavar": "N"}
_FILE_OPTION: dict[str, Any] = {"type": Path, "metavar": "FILE"}
_DIR_OPTION: dict[str, Any] = {"type": Path, "metavar": "DIR"}
_FOLDER_OPTION: dict[str, Any] = {"type": Path, "metavar": "FOLDER"}
_FLAG_OPTION: dict[str, Any] = {"action": "store_true"}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line, with the whole line as `command`; exit where it names no command."""
    top = parser()
    arguments, unknown = top.parse_known_args(argv)
    if unknown:
        getattr(arguments, "error", top.error)(f"unrecognized arguments: {' '.join(unknown)}")
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
    for add_options, short in (
        (_options_of_demo, "say what every head of a small trained model does"),
        (_options_of_record, "run a model on a text, and keep what its heads attend to"),
        (_options_of_corpus, "say what every head does over many texts"),
        (_options_of_join, "put corpora of several machines together"),
        (_options_of_view, "open a recording or a corpus in the browser"),
        (_options_of_stats, "print what every head of a recording does"),
        (_options_of_picture, "draw a head of a recording, or all of them, or a corpus"),
        (_options_of_why, "say why a head looks where it looks"),
        (_options_of_report, "write a recording or a corpus as one HTML file"),
        (_options_of_scaling, "show why the dot product is divided by sqrt(d)"),
        (_options_of_regress, "predict a column of a table by kernel regression"),
        (_options_of_bench, "measure this machine, beside SDPA and FlexAttention"),
        (_options_of_doctor, "say which kernels are right and fast on this machine"),
    ):
        name = add_options.__name__.removeprefix("_options_of_")
        description, _, examples = (inspect.getdoc(add_options) or "").partition("Examples\n--------\n")
        epilog = examples and f"examples:\n{textwrap.indent(examples, '  ')}"
        command = commands.add_parser(
            name, help=short, description=description, epilog=epilog, formatter_class=Help, allow_abbrev=False
        )
        command.set_defaults(module=name, error=command.error)  # whose usage an unknown option is shown
        add_options(command)
    commands.choices["export"] = commands.choices["report"]  # another name, which the list does not show
    return top


def _add_recording_folder(command: argparse.ArgumentParser) -> None:
    """Add the folder of a recording to the arguments of a command."""
    command.add_argument("atlas", **_FOLDER_OPTION, help="what attlas record has written")


_SAMPLE_TEXT = "timeit.py of the standard library"


def _options_of_demo(command: argparse.ArgumentParser) -> None:
    """Run a trained model on a text, say what each of its heads does, and write a report and pictures."""
    option = command.add_argument
    option("--text", **_FILE_OPTION, help=f"text to read, UTF-8 (default: {_SAMPLE_TEXT})")
    folder = Path("demo-output")
    results = "folder for the report (default: %(default)s)"
    option("-o", "--output", dest="out", **_DIR_OPTION, default=folder, help=results)
    option("--tokens", **_NUMBER_OPTION, help="how many tokens to read (default: up to 2048)")
    option("--model", **_DIR_OPTION, help="folder of a Hugging Face causal model (default: the shipped GPT-2)")
    option("--no-browser", **_FLAG_OPTION, help="do not open the run in the browser at the end")


def _options_of_record(command: argparse.ArgumentParser) -> None:
    """Run a Hugging Face model on a text and record the attention of every head.

    Queries, keys and one number per row are kept, in linear memory, with exact statistics of every cell.

    Examples
    --------
    attlas record --text book.txt -o run.atlas
    cat *.py | attlas record --model ./my-model --text - --tokens 4096 --keep statistics -o run.atlas
    """
    option = command.add_argument
    name = "folder of a Hugging Face model, or its name on the hub (default: shipped)"
    option("--model", metavar="DIR_OR_ID", help=name)
    option("--text", **_FILE_OPTION, help="text to read, UTF-8; - reads a pipe (default: timeit.py of Python)")
    option("--tokens", **_NUMBER_OPTION, help="read the first N tokens only")
    option("--generate", **_NUMBER_OPTION, default=0, help="let the model write N tokens more")
    chunk = "read N tokens at a time: less memory where heads share keys (default: all at once)"
    option("--chunk", **_NUMBER_OPTION, help=chunk)
    option = command.add_argument_group("what is recorded").add_argument
    option("--layers", metavar="L,L,...", help="layers, from 0; negative from the end (default: all)")
    option("--heads", metavar="H,H,...", help="heads of each layer (default: all)")
    names = f"of {', '.join(STATISTICS)} (default: what stats, picture and report show)"
    option("--statistics", metavar="NAME,NAME,...", help=names)
    keep = "disk: queries and keys too, for any question later; statistics: the numbers only (default: disk)"
    option("--keep", choices=("disk", "statistics"), default="disk", help=keep)
    values = "values too: all, or their norms alone, for pictures of ‖A v‖ (default: neither)"
    option("--values", choices=("all", "norms"), help=values)
    option("--parts", **_FLAG_OPTION, help="what logits are made of too, for attlas why and Why? in attlas view")
    option = command.add_argument_group("how the model is run").add_argument
    option("--dtype", choices=DTYPES, default="float32", help="type of the weights (default: float32)")
    option("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: cpu)")
    option("--patch-sdpa", **_FLAG_OPTION, help="record a model that calls scaled_dot_product_attention by itself")
    option = command.add_argument_group("result").add_argument
    option("-o", "--output", dest="out", **_FOLDER_OPTION, required=True, help="where it goes, run.atlas")
    option("--overwrite", **_FLAG_OPTION, help="replace an atlas that is there")


def _options_of_corpus(command: argparse.ArgumentParser) -> None:
    """Read many texts with a Hugging Face model and keep exact sums, distributions and sampled texts of every head.

    Stopped at any moment, the same command goes on where it was; with new texts in SOURCE it reads them, too.

    Examples
    --------
    attlas corpus ./my-model books/ -o books.corpus
    attlas corpus shipped "src/**/*.py" -o code.corpus --length 2048
    torchrun --nproc-per-node 4 -m attlas corpus ./my-model texts.parquet --column text -o run.corpus
    attlas corpus run.corpus --export headvis -o tree
    """
    option = command.add_argument
    option("model", metavar="MODEL", help="folder of a model, its name on the hub, or shipped; for --export a corpus")
    source = "folder, file or pattern: text, .jsonl, .parquet, .arrow; - reads a pipe"
    option("source", nargs="?", metavar="SOURCE", help=source)
    option("-o", "--output", dest="out", **_DIR_OPTION, help="where the result goes, and an unfinished one is found")
    option("--export", choices=("headvis",), help="write a corpus as the tree of HeadVis, to -o")
    option = command.add_argument_group("what is read").add_argument
    option("--column", metavar="NAME", help="column of rows (default: text, input_ids, ids or content)")
    option("--length", **_NUMBER_OPTION, help="tokens of a text (default: 4096, or the model's context)")
    option("--stride", **_NUMBER_OPTION, help="tokens from text to text in a document (default: length)")
    option("--texts", **_NUMBER_OPTION, default=16384, help="texts at most (default: %(default)s)")
    option("--failures", type=float, metavar="SHARE", default=0.1, help="texts that may fail (default: %(default)s)")
    option = command.add_argument_group("how the model is run").add_argument
    option("--batch", **_NUMBER_OPTION, default=1, help="texts at once, of one length (default: %(default)s)")
    option("--seed", **_NUMBER_OPTION, default=0, help="seed of the sampled texts (default: %(default)s)")
    option("--samples", **_NUMBER_OPTION, default=32, help="texts kept for all heads (default: %(default)s)")
    option("--dtype", choices=DTYPES, default="float32", help="type of the weights (default: float32)")
    option("--device", default="cpu", help="cpu, cuda, cuda:1, mps; cuda is that of LOCAL_RANK (default: cpu)")
    option("--patch-sdpa", **_FLAG_OPTION, help="a model that calls scaled_dot_product_attention by itself")


def _options_of_join(command: argparse.ArgumentParser) -> None:
    """Put corpora of one model and of different texts together; every number is that of one run."""
    option = command.add_argument
    option("folders", nargs="+", **_DIR_OPTION, help="what attlas corpus has written")
    option("-o", "--output", dest="out", **_DIR_OPTION, required=True, help="where the result goes")


def _options_of_view(command: argparse.ArgumentParser) -> None:
    """Open a recording in the browser: pan and zoom through the whole matrix of every head.

    Or open a corpus: all heads as points, and a page for each. The page is served to this machine only, until Ctrl-C.

    Examples
    --------
    attlas view run.atlas
    attlas view --text book.txt --tokens 4096
    attlas view --model ./my-model --text book.txt -o run.atlas
    attlas view stdlib.corpus
    attlas view first.corpus second.corpus
    """
    known = "what attlas record or attlas corpus has written; several corpora are shown side by side"
    command.add_argument("atlas", nargs="*", **_FOLDER_OPTION, help=known)
    option = command.add_argument_group("a model that reads a text now, and texts typed on the page").add_argument
    option("--model", metavar="DIR_OR_ID", help="model, as of attlas record (default: shipped)")
    option("--text", **_FILE_OPTION, help="text to read, UTF-8; - reads a pipe")
    option("--tokens", **_NUMBER_OPTION, help="read the first N tokens only")
    option("--generate", **_NUMBER_OPTION, help="let the model write N tokens more")
    option("-o", "--output", dest="out", **_FOLDER_OPTION, help="keep the recording there (default: drop it)")
    option = command.add_argument_group("the viewer").add_argument
    option("--port", **_NUMBER_OPTION, help="port of 127.0.0.1 (default: the next free from 8750 on)")
    option("--no-browser", **_FLAG_OPTION, help="print the address and open nothing")
    option("--compare", **_FOLDER_OPTION, help="another recording of as many tokens, head by head")
    option("--at", metavar="LINK", help="where to open: a link copied from the viewer, or the part after its #")


def _options_of_stats(command: argparse.ArgumentParser) -> None:
    """Print a table of all recorded heads: exact means over every query of the text, and what each head is.

    Examples
    --------
    attlas stats run.atlas
    attlas stats run.atlas --sort induction --top 5
    attlas stats run.atlas --json | jq '.rows[] | select(.first > 0.5) | [.layer, .head]'
    attlas stats run.atlas --csv > heads.csv
    """
    _add_recording_folder(command)
    option = command.add_argument
    option("--layer", type=int, metavar="L", help="one layer only; negative counts from the end")
    option("--sort", metavar="COLUMN", help="largest first; with a + before the name, smallest first")
    option("--top", **_NUMBER_OPTION, help="the first N heads only")
    option = command.add_mutually_exclusive_group().add_argument
    option("--json", **_FLAG_OPTION, help="print all numbers as JSON")
    option("--csv", **_FLAG_OPTION, help="print all numbers as CSV")


def _options_of_picture(command: argparse.ArgumentParser) -> None:
    """Draw the weights of one head, pooled into blocks, or an overview of all layers and heads.

    Of a corpus, draw all heads as points. With --card it is a picture to share, with a headline and its evidence.

    Examples
    --------
    attlas picture run.atlas -o all.png
    attlas picture run.atlas --layer 2 --head 4 -o head.png
    attlas picture run.atlas --card -o card.png
    attlas picture run.corpus --card -o card.png
    attlas picture run.atlas --layer 2 --head 4 --rows 480:512 --columns 480:512 -o close.svg
    """
    known = "what attlas record or attlas corpus has written"
    command.add_argument("atlas", **_FOLDER_OPTION, help=known)
    option = command.add_argument
    option("--layer", metavar="L", help="a layer, or a name such as cross.3 (default: all)")
    option("--head", type=int, metavar="H", help="a head of it (default: all)")
    option("--rows", metavar="A:B", help="queries A to B - 1 only, as in Python")
    option("--columns", metavar="A:B", help="keys A to B - 1 only")
    option("--size", **_NUMBER_OPTION, help=f"blocks along a side, at most (default: {SIDE})")
    option("--theme", choices=("light", "dark"), help="colours of the picture (default: light)")
    option(
        "--pool",
        choices=("max", "mean"),
        help="what stands for a block (default: max, or mean where maxima would be dark)",
    )
    option("--scale", choices=("log", "linear"), help="scale of the colours (default: log)")
    shared = (
        "1200 × 630 pixels to share: what was found in words, and the cells, or the heads of a corpus, that show it"
    )
    option("--card", **_FLAG_OPTION, help=shared)
    option("-o", "--output", dest="out", **_FILE_OPTION, required=True, help="head.png, .svg or .pdf")


def _options_of_why(command: argparse.ArgumentParser) -> None:
    """Say why a head looks where it looks: what each part of the query and of the key adds to its logits.

    Without --at it is the whole map: what pairs of parts add where the head looks, above the mean of the keys.

    Examples
    --------
    attlas record --parts -o run.atlas
    attlas why run.atlas --head 2.4 --at 1058,1051 -o why.png
    attlas why run.atlas --head 2.4
    """
    _add_recording_folder(command)
    option = command.add_argument
    option("--head", metavar="L.H", required=True, help="layer and head")
    option("--at", metavar="I,J", help="positions of the query and of the key in the text")
    option("-o", "--output", dest="out", **_FILE_OPTION, help="a picture of it: .png, .svg or .pdf")
    option("--theme", choices=("light", "dark"), default="light", help="colours of the picture (default: light)")


def _options_of_report(command: argparse.ArgumentParser) -> None:
    """Write the page of the viewer as one HTML file that needs no server.

    Of a recording it has every head, the text and what each token attends to, and it opens with a tour of up to three
    heads. Of corpora it has all numbers and as many sampled texts as fit. It loads nothing from anywhere.

    Examples
    --------
    attlas report run.atlas -o report.html
    attlas report run.atlas --heads 2.4,3.2 -o report.html
    attlas report stdlib.corpus -o heads.html
    """
    known = "what attlas record or attlas corpus has written"
    command.add_argument("atlas", **_FOLDER_OPTION, help=known)
    command.add_argument("others", nargs="*", **_FOLDER_OPTION, help="more corpora, shown side by side")
    heads = "layer and head of those in detail, with no tour (default: the head of the first step of the tour)"
    command.add_argument("--heads", metavar="L.H,...", help=heads)
    command.add_argument("-o", "--output", dest="out", **_FILE_OPTION, required=True, help="report.html")


def _options_of_scaling(command: argparse.ArgumentParser) -> None:
    """Compare variance of q·k, entropy, largest weight and slope of softmax with what theory predicts.

    It does so for random vectors of growing size, without and with the scale, or for every head of a model.

    Examples
    --------
    attlas scaling -o scaling.png
    attlas scaling --model ./my-model --text book.txt --json > heads.json
    """
    option = command.add_argument_group("random vectors").add_argument
    option("--sizes", metavar="D,D,...", help="sizes of queries and keys (default: 8,16,...,512)")
    option("--keys", **_NUMBER_OPTION, help=f"keys of each query (default: {KEYS})")
    option("--queries", **_NUMBER_OPTION, help=f"queries that are drawn (default: {QUERIES})")
    names = f"{', '.join(DISTRIBUTIONS)} (default: {DISTRIBUTIONS[0]})"
    option("--distribution", choices=DISTRIBUTIONS, metavar="NAME", help=names)
    option("--seed", **_NUMBER_OPTION, help="seed of the draw (default: 0)")
    option = command.add_argument_group("a model").add_argument
    folder = "folder of a Hugging Face causal model (without DIR: the shipped GPT-2)"
    option("--model", type=Path, nargs="?", const=models.path(), metavar="DIR", help=folder)
    option("--text", **_FILE_OPTION, help=f"text to read, UTF-8 (default: {_SAMPLE_TEXT})")
    option("--tokens", **_NUMBER_OPTION, help="how many tokens to read (default: up to 2048)")
    target = "what the suggested factor of the logits is to reach: variance=1 (the default), or entropy=NATS"
    option("--target", metavar="WHAT=VALUE", help=target)
    option = command.add_argument_group("result").add_argument
    option("-o", "--output", dest="out", **_FILE_OPTION, help="draw the numbers: .png, .svg or .pdf")
    option("--json", **_FLAG_OPTION, help="print all numbers as JSON")


def _options_of_regress(command: argparse.ArgumentParser) -> None:
    """Predict one column of a table from others by kernel regression with a bandwidth per feature.

    Its leave-one-out error stands beside those of the mean and of a linear model.

    Examples
    --------
    attlas regress cars.csv --target price
    attlas regress cars.csv --target price --features age,km --plot price.png
    attlas regress cars.csv --target price --predict new.csv -o prices.csv --std
    attlas regress cars.csv --target price --save price.safetensors
    attlas regress --load price.safetensors --predict new.csv -o prices.csv
    zcat log.csv.gz | attlas regress - --target seconds --bandwidth scott --json
    """
    option = command.add_argument
    option("data", type=Path, nargs="?", metavar="FILE", help="CSV or Parquet; - reads CSV from a pipe")
    option("--target", metavar="COLUMN", help="the column to predict")
    features = (
        "the columns to predict it from (default: all others); a name with a comma in double quotes: 'A,\"B, C\"'"
    )
    option("--features", metavar="A,B,...", help=features)
    option("--weights", metavar="COLUMN", help="weight of each row; only ratios matter (default: all equal)")
    option = command.add_argument_group("the regression").add_argument
    option("--kernel", choices=KERNELS, metavar="NAME", help=f"{', '.join(KERNELS)} (default: {KERNELS[0]})")
    bandwidth = "loo (least leave-one-out error), scott, silverman, a number, or numbers with commas (default: loo)"
    option("--bandwidth", metavar="H", help=bandwidth)
    option("--degree", type=int, choices=(0, 1), help="0: local mean, 1: local line (default: 0)")
    option("--outside", choices=("nan", "nearest"), help="prediction for rows out of reach (default: nan, none)")
    option = command.add_argument_group("the table").add_argument
    option("--delimiter", metavar="SIGN", help="between cells: , ; | tab space, or another sign (default: detected)")
    option("--decimal", choices=(".", ","), default=".", metavar="SIGN", help="decimal sign, . or , (default: .)")
    option("--thousands", choices=(".", ","), metavar="SIGN", help="separator of thousands, . or , (default: none)")
    text = "whether the first line has names; columns without are 1, 2, ... (auto: no if it has only numbers)"
    option("--header", choices=("auto", "yes", "no"), default="auto", help=text)
    option("--drop-missing", **_FLAG_OPTION, help="leave out rows with a missing value")
    option = command.add_argument_group("result").add_argument
    option("--predict", **_FILE_OPTION, help="rows to predict for; needs -o")
    option("-o", "--output", dest="out", **_FILE_OPTION, help="these rows with predictions: .csv, .tsv or .parquet")
    option("--std", **_FLAG_OPTION, help="add the standard deviation of the target around the prediction")
    option("--plot", **_FILE_OPTION, help="draw the fit, or the effect of each feature: .png .svg .pdf")
    option("--save", **_FILE_OPTION, help="keep the fit, for --load: .safetensors")
    option("--load", **_FILE_OPTION, help="predict with a fit that --save kept")
    option("--json", **_FLAG_OPTION, help="print all numbers as JSON")


def _options_of_bench(command: argparse.ArgumentParser) -> None:
    """Print the time of attlas, FlexAttention and eager attention divided by that of PyTorch's fused kernel (SDPA).

    The limits of this processor are printed too. They are measured once and kept in the user's cache folder;
    attlas.explain(A) compares with them. Takes about a minute, on a machine that does nothing else.
    """
    option = command.add_argument
    option("--tokens", type=int, default=4096, metavar="N", help="queries and keys (default: %(default)s)")
    option("--heads", type=int, default=8, metavar="N", help="heads (default: %(default)s)")
    option("--size", type=int, default=64, metavar="D", help="size of each head (default: %(default)s)")
    dtypes = f"{', '.join(DTYPES)} (default: {DTYPES[0]})"
    option("--dtype", default=DTYPES[0], choices=DTYPES, metavar="NAME", help=dtypes)
    option("--seconds", type=float, default=40.0, metavar="S", help="time for the three tables (default: 40)")
    option("--again", **_FLAG_OPTION, help="measure the limits of the processor again")


def _options_of_doctor(command: argparse.ArgumentParser) -> None:
    """Say what is installed, which kernels give the right numbers here, how often the host waits, and the times.

    Each backend of the device is compared with the definition in float64 on small problems. What was remembered of the
    kernels of a GPU in the user's cache folder is forgotten first, and written anew. Takes less than two minutes.

    Examples
    --------
    attlas doctor
    attlas doctor --device cpu --json > doctor.json
    """
    option = command.add_argument
    option("--device", metavar="NAME", help="as cpu, cuda or cuda:1 (default: the GPU if there is one)")
    option("--tokens", **_NUMBER_OPTION, help="queries and keys of the table of times (default: 2048; on a GPU 8192)")
    option("--heads", **_NUMBER_OPTION, help="its heads (default: 4; on a GPU 16)")
    option("--size", type=int, metavar="D", help="its size of each head (default: 64; on a GPU 128)")
    option("--seconds", type=float, default=100.0, metavar="S", help="time for all of it (default: 100)")
    option("--json", **_FLAG_OPTION, help="print all of it as JSON")
