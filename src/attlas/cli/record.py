"""``attlas record``: run a model on a text and keep what its heads attend to, in a folder."""

from __future__ import annotations

import math
import shlex
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import attlas
from attlas import models
from attlas.cli import head_statistics
from attlas.cli.checks import check_folder, check_least
from attlas.cli.files import read_text
from attlas.cli.formatting import in_bytes, plural
from attlas.cli.generation import ProgressListener, read_and_generate, run_model
from attlas.cli.loading import LoadedModel, load, texts, tokenize
from attlas.cli.terminal import Terminal, UsageError
from attlas.errors import AttlasError, OutOfRangeError, RecordingWarning
from attlas.foundation.files import replace_folder
from attlas.heads import block_scores
from attlas.recording.atlas import Atlas
from attlas.recording.atlas import load as load_atlas
from attlas.recording.atlas.entry import statistic_names
from attlas.recording.hooks import subscribed
from attlas.recording.metadata import token_bytes
from attlas.stats import Statistic

_MOST_BLOCK_TOKENS = 128  # length of the random block that occurs twice, at most


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Record, and say what there is now."""
    _print_recorded(write(arguments, terminal), arguments, terminal)


def write(arguments: Namespace, terminal: Terminal) -> Atlas:
    """Load, generate if asked, read the text once, give the folder its name, and return what is in it.

    Raises
    ------
    UsageError
        If what was asked for cannot be done.
    """
    check_out(arguments.out, overwrite=arguments.overwrite)
    for name, least in (("tokens", 3), ("generate", 0), ("chunk", 1)):
        check_least(name, getattr(arguments, name), least, max(least, 64))
    source, text = read_text(arguments.text)
    head_statistics.selected(arguments.statistics, torch.arange(3), 1)  # an unknown name is an error before the work
    layers, heads = (_comma_separated(name, getattr(arguments, name)) for name in ("layers", "heads"))
    with terminal.step("loading the model"):
        loaded = load(
            models.path() if arguments.model is None else arguments.model,
            attention="sdpa" if arguments.patch_sdpa else None,
            dtype=getattr(torch, arguments.dtype),
            device=arguments.device,
        )
    name = type(loaded.model).__name__
    if loaded.model.config.is_encoder_decoder:
        rule = "the model must read one text; an encoder with a decoder reads two."
        raise UsageError(rule, name, "with attlas.record(model) as atlas: model(...), in Python")
    whole = arguments.text is not None
    ids = tokenize(loaded, text, arguments.tokens, least=3, whole=whole, more=arguments.generate)
    if arguments.generate and not loaded.model.can_generate():
        raise UsageError("--generate needs a model that writes.", name, "leave --generate out")
    values: Any = True if arguments.values == "all" else arguments.values or False
    options = {"layers": layers, "heads": heads, "patch_sdpa": arguments.patch_sdpa, "values": values}
    if arguments.parts:
        options["parts"] = True
    details = {"source": source, "command": arguments.command}
    return record_text(loaded, ids, options, details, arguments, terminal)


def record_text(
    loaded: LoadedModel,
    ids: Tensor,
    options: dict[str, Any],
    details: dict[str, Any],
    arguments: Namespace,
    terminal: Terminal,
) -> Atlas:
    """Record a text into the folder that the arguments name, and return what is in it.

    Parameters
    ----------
    loaded : LoadedModel
        Model and tokenizer.
    ids : Tensor of int, shape (n,)
        Tokens of the text.
    options : dict
        Further arguments of `attlas.record`.
    details : dict
        What the recording notes of where it comes from.
    arguments : Namespace
        Those of ``attlas record``.
    terminal : Terminal
        Where progress is shown.

    Raises
    ------
    RecordingError
        If the attention of the model cannot be recorded.
    """
    begin, prompt_length, steps = time.perf_counter(), len(ids), None
    keep_tensors, details = arguments.keep == "disk", details | {"keep": arguments.keep}
    with (
        _reworded_errors(terminal),
        _output_folder(arguments.out.absolute()) as folder,
        TemporaryDirectory(prefix=f".{folder.name}.steps-", dir=folder.parent, ignore_cleanup_errors=True) as beside,
    ):
        # What the statistics are depends on the whole text, and some of them on whole matrices: they come afterwards.
        if arguments.generate or (arguments.chunk or prompt_length) < prompt_length:
            steps, ids = _record_steps(loaded, ids, Path(beside) / "steps.atlas", options, arguments, terminal)
        statistics = _recorded_statistics(loaded, ids, options, arguments.statistics)
        words = list(texts(loaded.tokenizer, ids))
        if "head_scores" in statistic_names(statistics) and not arguments.patch_sdpa:
            with terminal.step("running it on random tokens, twice"):
                vocabulary = loaded.model.config.get_text_config().vocab_size
                period = min(_MOST_BLOCK_TOKENS, (loaded.context or 2 * _MOST_BLOCK_TOKENS) // 2)
                details["block"] = block_scores(loaded.model, vocabulary, period=period)
            _check_finite(details["block"])

        def add_metadata(atlas: Atlas) -> None:
            """Add the metadata that the matrices do not contain."""
            atlas.tokens, atlas.model = words, loaded.name
            pieces = token_bytes(loaded.tokenizer, ids.tolist())
            atlas.details |= details | ({"token_bytes": pieces} if pieces else {})
            atlas.details["seconds"] = time.perf_counter() - begin
            if arguments.generate:
                atlas.spans = {"text": (0, prompt_length), "generated": (prompt_length, len(ids))}

        if steps is not None:
            with terminal.step("computing the statistics", len(steps.entries)) as tick:
                steps.collect(*statistics, progress=tick)
            if not keep_tensors:
                steps.entries = [replace(entry, matrix=None) for entry in steps.entries]
            add_metadata(steps)
            steps.save(folder)
        else:
            recording = attlas.record(
                loaded.model,
                statistics=statistics,
                keep=arguments.keep,
                folder=folder if keep_tensors else None,
                tokens=words,
                **options,
            )
            layers = loaded.model.config.get_text_config().num_hidden_layers
            reading = terminal.step(f"reading {len(ids):,} tokens", layers)
            with reading as tick, recording as atlas, subscribed(ProgressListener(tick)):
                run_model(loaded.model, ids)  # `atlas` records it; the output is not needed
                add_metadata(atlas)
            if not keep_tensors:
                atlas.save(folder)
    return load_atlas(arguments.out)


def _record_steps(
    loaded: LoadedModel, ids: Tensor, folder: Path, options: dict[str, Any], arguments: Namespace, terminal: Terminal
) -> tuple[Atlas | None, Tensor]:
    """Record a text that is read in chunks or goes on into what the model writes, each token once.

    Returns
    -------
    Atlas or None
        Queries and keys without statistics; None where a model's steps are no whole: it keeps no keys, or its scores
        look at places. Its text is read again then, at once.
    Tensor of int
        The text with what was written.
    """
    more, pad = arguments.generate, loaded.tokenizer.eos_token_id or 0
    label = f"reading {len(ids):,} tokens" + (f" and writing {more:,}" if more else "")
    recording = attlas.record(loaded.model, keep="disk", folder=folder, **options)
    with terminal.step(label, more) as tick, recording as atlas:
        ids = read_and_generate(loaded.model, ids, arguments.chunk, more, pad, tick)
    whole = all(entry.call == 0 and entry.shape[2] == len(ids) for entry in atlas.entries)
    return atlas if whole else None, ids


def _recorded_statistics(
    loaded: LoadedModel, ids: Tensor, options: dict[str, Any], names: str | None
) -> list[Statistic]:
    """Return the statistics of a recording; the sizes of some depend on the number of heads."""
    shape = loaded.model.config.get_text_config()
    layers = shape.num_hidden_layers if options.get("layers") is None else len(options["layers"])
    heads = shape.num_attention_heads if options.get("heads") is None else len(options["heads"])
    return head_statistics.selected(names, ids, layers * heads)


def check_out(out: Path, *, overwrite: bool) -> None:
    """Raise a UsageError unless a recording can be written there."""
    if out.exists() or out.is_symlink():
        if not (out / "atlas.json").is_file():
            raise UsageError("-o must be a new folder, or an atlas to be replaced.", f"no atlas: {out}", "-o run.atlas")
        if not overwrite:
            raise UsageError("-o must be a new folder.", f"an atlas is there: {out}", "--overwrite, or another folder")
    check_folder(out.absolute().parent, "-o must lie in a folder that can be written.", "-o ./run.atlas")


@contextmanager
def _output_folder(out: Path) -> Iterator[Path]:
    """Give the folder to write; where a recording is replaced, one beside it that takes its place at the end."""
    if not out.exists():
        yield out
        return
    with TemporaryDirectory(prefix=f".{out.name}.new-", dir=out.parent) as beside:
        folder = Path(beside) / out.name
        yield folder
        replace_folder(folder, out)


def _check_finite(block: dict[str, Any] | None) -> None:
    """Raise a UsageError where the weights of a head on the block of random tokens are no numbers."""
    for layer, heads in enumerate([] if block is None else block["induction"]):
        if not all(map(math.isfinite, heads)):
            rule, fix = "the model must attend with finite weights.", "--dtype float32, or a model without NaN"
            raise UsageError(rule, f"NaN in layer {layer}, and maybe in others", fix)


@contextmanager
def _reworded_errors(terminal: Terminal) -> Iterator[None]:
    """Print warnings of record(), and give its errors a fix for the command line."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        except AttlasError as error:
            raise _error_for_terminal(error) from error
    for warning in heard:
        if isinstance(warning.message, RecordingWarning):
            terminal.complain(str(_error_for_terminal(warning.message.args[0])))


def _error_for_terminal(error: AttlasError) -> AttlasError:
    """Return an error of record() with a fix that can be typed on the command line."""
    fix = error.fix
    if fix.endswith("attlas.record(model, patch_sdpa=True)"):
        fix = "attlas record --patch-sdpa"
    elif isinstance(error, OutOfRangeError) and "attentions" in error.arguments:
        fix = "--layers takes numbers of the attentions above."
    return error.replaced(where="record", fix=fix)


def _print_recorded(atlas: Atlas, arguments: Namespace, terminal: Terminal) -> None:
    """Say what was recorded, and with which commands it can be looked at."""
    out = arguments.out
    size = sum(file.stat().st_size for file in out.iterdir())
    terminal.say(f"{terminal.style(str(out), 'bold')}  {in_bytes(size)}")
    shape = f"{plural(len(atlas), 'layer')} × {plural(len(atlas.entries[0].heads), 'head')}"
    terminal.say(f"  {shape} of {atlas.model}")
    if arguments.generate:
        start, stop = atlas.spans["generated"]
        written = "".join((atlas.tokens or [])[start:stop])
        terminal.say(f"  it wrote: {written!r}")
    shown = shlex.quote(str(out))
    lines = [f"attlas stats {shown}"]
    if arguments.statistics is None and atlas.kinds == ("self",):  # what the page is made of
        lines.append(f"attlas report {shown} -o report.html")
    if arguments.keep == "disk":  # tiles are made of queries and keys
        lines.append(f"attlas view {shown}")
    for line in lines:
        terminal.say(f"  {line}", "dim")


def _comma_separated(name: str, text: str | None) -> list[int] | None:
    """Return numbers that stand with commas between them."""
    try:
        return None if text is None else [int(word) for word in text.split(",")]
    except ValueError:
        rule = f"--{name} must be whole numbers with commas between them."
        raise UsageError(rule, f"--{name} {text}", f"--{name} 0,2") from None
