"""``attlas record``: run a model on a text and keep what its heads attend to, in a folder."""

from __future__ import annotations

import argparse
import shlex
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attlas
from attlas import models
from attlas.atlas import Atlas
from attlas.atlas import load as load_atlas
from attlas.atlas.entry import statistic_names
from attlas.cli import head_statistics
from attlas.cli.files import read_text
from attlas.cli.formatting import count, in_bytes
from attlas.cli.generation import ProgressListener, read_and_generate, run_model
from attlas.cli.loading import LoadedModel, load, texts
from attlas.cli.peak_memory import Peak
from attlas.cli.terminal import Terminal, UsageError
from attlas.errors import AttlasError, OutOfRangeError, RecordingError, RecordingWarning
from attlas.files import replace_folder
from attlas.heads import repeated_block
from attlas.heads.classification import measure_block
from attlas.recording.hooks import subscribed
from attlas.recording.metadata import token_bytes

__all__ = ["run", "write"]

_PERIOD = 128  # length of the random block that occurs twice
_MOST = 2048  # tokens of the text that is read when none is given


def run(arguments: argparse.Namespace, terminal: Terminal) -> None:
    """Record, and say what there is now."""
    _report(write(arguments, terminal), arguments, terminal)


def write(arguments: argparse.Namespace, terminal: Terminal) -> Atlas:
    """Load, generate if asked, read the text once, give the folder its name, and return what is in it.

    Raises
    ------
    UsageError
        If what was asked for cannot be done.
    """
    check_folder(arguments.out, overwrite=arguments.overwrite)
    _check_sizes(arguments)
    device = _device(arguments.device)
    file, text = read_text(arguments.text, "record")
    head_statistics.selected(
        arguments.statistics, torch.arange(3), 1, "record"
    )  # nobody wants to hear it after the work
    layers, heads = (_list(name, getattr(arguments, name)) for name in ("layers", "heads"))
    with terminal.step("loading the model"):
        loaded = load(
            models.path() if arguments.model is None else arguments.model,
            "record",
            attention="sdpa" if arguments.patch_sdpa else None,
            dtype=getattr(torch, arguments.dtype),
            device=device,
        )
    if loaded.model.config.is_encoder_decoder:
        raise _error(
            "the model must read one text; an encoder with a decoder reads two.",
            f"{type(loaded.model).__name__}",
            "with attlas.record(model) as atlas: model(...), in Python",
        )
    ids = tokens_of(loaded, text, arguments)
    if arguments.generate and not loaded.model.can_generate():
        raise _error("--generate needs a model that writes.", type(loaded.model).__name__, "leave --generate out")
    with _reworded_errors(terminal), _output_folder(arguments) as folder:
        return _record(loaded, ids, layers, heads, file.name, folder, arguments, terminal)


def _record(
    loaded: LoadedModel,
    ids: Tensor,
    layers: list[int] | None,
    heads: list[int] | None,
    source: str,
    folder: Path,
    arguments: argparse.Namespace,
    terminal: Terminal,
) -> Atlas:
    """Record into a folder, and return what is in it."""
    begin, prompt_length, peak = time.perf_counter(), len(ids), Peak()
    values: Any = True if arguments.values == "all" else arguments.values or False
    options = {"layers": layers, "heads": heads, "patch_sdpa": arguments.patch_sdpa, "values": values}
    apart = tempfile.TemporaryDirectory(prefix=f".{folder.name}.steps-", dir=folder.parent, ignore_cleanup_errors=True)
    with apart as beside:
        # What the statistics are depends on the whole text, and some of them on whole matrices: they come afterwards.
        steps = None
        if arguments.generate or (arguments.chunk or prompt_length) < prompt_length:
            steps, ids = _record_steps(loaded, ids, Path(beside) / "steps.atlas", options, arguments, terminal)
        shape = loaded.model.config.get_text_config()
        count_of_heads = shape.num_attention_heads if heads is None else len(heads)
        count_of_heads *= shape.num_hidden_layers if layers is None else len(layers)
        statistics = head_statistics.selected(arguments.statistics, ids, count_of_heads, "record")
        words = list(texts(loaded.tokenizer, ids))
        details: dict[str, Any] = {"source": source, "command": _command(arguments)}
        if "head_scores" in statistic_names(statistics) and not arguments.patch_sdpa:
            with terminal.step("running it on random tokens, twice"):
                details["block"] = _block(loaded, min(_PERIOD, len(ids) // 2))

        def add_metadata(atlas: Atlas) -> None:
            """Add the metadata that the matrices do not contain."""
            atlas.tokens = words
            pieces = token_bytes(loaded.tokenizer, ids.tolist())
            atlas.details |= details | ({"token_bytes": pieces} if pieces else {})
            atlas.details |= {"seconds": time.perf_counter() - begin, "peak": peak.bytes, "keep": arguments.keep}
            atlas.spans = (
                {"text": (0, prompt_length), "generated": (prompt_length, len(ids))} if arguments.generate else {}
            )
            atlas.model = loaded.name

        if steps is not None:
            _collect(steps, statistics, terminal, keep=arguments.keep == "disk")
            add_metadata(steps)
            steps.save(folder)
            return load_atlas(folder)
        recording = attlas.record(
            loaded.model,
            statistics=statistics,
            keep=arguments.keep,
            folder=folder if arguments.keep == "disk" else None,
            tokens=words,
            **options,
        )
        label = f"reading {count(len(ids))} tokens"
        with (
            terminal.step(label, shape.num_hidden_layers) as tick,
            recording as atlas,
            subscribed(ProgressListener(tick)),
        ):
            run_model(loaded.model, ids)
            add_metadata(atlas)
        if arguments.keep == "statistics":
            atlas.save(folder)
        return atlas


def _record_steps(
    loaded: LoadedModel,
    ids: Tensor,
    folder: Path,
    options: dict[str, Any],
    arguments: argparse.Namespace,
    terminal: Terminal,
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
    label = f"reading {count(len(ids))} tokens" + (f" and writing {count(more)}" if more else "")
    recording = attlas.record(loaded.model, keep="disk", folder=folder, **options)
    with terminal.step(label, more) as tick, recording as atlas:
        ids = read_and_generate(loaded.model, ids, arguments.chunk, more, pad, tick if more else lambda: None)
    whole = all(entry.call == 0 and entry.shape[2] == len(ids) for entry in atlas.entries)
    return atlas if whole else None, ids


def _collect(atlas: Atlas, statistics: list[Any], terminal: Terminal, *, keep: bool) -> None:
    """Compute statistics of every matrix of an atlas, and drop its queries and keys unless they are kept."""
    names = statistic_names(statistics)
    with terminal.step("computing the statistics", len(atlas.entries)) as tick:
        for index, entry in enumerate(atlas.entries):
            if entry.matrix is not None:
                results = dict(zip(names, entry.matrix.collect(*statistics), strict=True))
                atlas.entries[index] = replace(entry, statistics=results, matrix=entry.matrix if keep else None)
            tick()


def check_folder(out: Path, *, overwrite: bool) -> None:
    """Raise a UsageError unless an atlas can be written there.

    Raises
    ------
    UsageError
        If the folder is there, and is no atlas that may be replaced; or if its parent cannot be written.
    """
    if out.exists() or out.is_symlink():
        if not (out / "atlas.json").is_file():
            raise _error("-o must be a new folder, or an atlas to be replaced.", f"no atlas: {out}", "-o run.atlas")
        if not overwrite:
            raise _error("-o must be a new folder.", f"an atlas is there: {out}", "--overwrite, or another folder")
    try:
        with tempfile.TemporaryFile(dir=out.absolute().parent):
            pass
    except OSError as error:
        found = f"{error.strerror or error}: {out.absolute().parent}"
        raise _error("-o must lie in a folder that can be written.", found, "-o ./run.atlas") from None


@contextmanager
def _output_folder(arguments: argparse.Namespace) -> Iterator[Path]:
    """Give the folder to write; where an atlas is replaced, one beside it that takes its place at the end."""
    out: Path = arguments.out.absolute()
    if not out.exists():
        yield out
        return
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.new-", dir=out.parent) as beside:
        folder = Path(beside) / out.name
        yield folder
        replace_folder(folder, out)


@contextmanager
def _reworded_errors(terminal: Terminal) -> Iterator[None]:
    """Print warnings of record(), and reword its errors for the command line."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        except RecordingError as error:
            raise error.replaced(where="record", fix=_as_option(error.fix)) from error
        except OutOfRangeError as error:
            fix = "--layers takes numbers of the attentions above." if "attentions" in error.arguments else error.fix
            raise error.replaced(UsageError, where="record", fix=fix) from error
        except AttlasError as error:
            raise error.replaced(UsageError, where="record") from error
    for warning in heard:
        if isinstance(warning.message, RecordingWarning):
            missed: RecordingError = warning.message.args[0]
            terminal.complain(str(missed.replaced(where="record", fix=_as_option(missed.fix))))


def _as_option(fix: str) -> str:
    """Return a fix of record() as it is typed on the command line."""
    return "attlas record --patch-sdpa" if fix.endswith("attlas.record(model, patch_sdpa=True)") else fix


def _check_sizes(arguments: argparse.Namespace) -> None:
    """Refuse sizes that no model can take, before one is loaded."""
    for name, least in (("tokens", 3), ("generate", 0), ("chunk", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise _error(f"--{name} must be at least {least}.", f"--{name} {value}", f"--{name} {max(least, 64)}")


def tokens_of(loaded: LoadedModel, text: str, arguments: argparse.Namespace) -> Tensor:
    """Return the tokens of a text, with the model's token for the beginning where it has one.

    Raises
    ------
    UsageError
        If there are none, or more than the model can read.
    """
    limit, more, size = loaded.context, arguments.generate, arguments.tokens
    if size is None and arguments.text is None:
        size = min(limit or _MOST, _MOST) - more
    cut = text if size is None else text[: 64 * size]
    text_ids = loaded.tokenizer(cut, add_special_tokens=False, verbose=False, return_attention_mask=False)["input_ids"]
    first = loaded.tokenizer.bos_token_id
    ids = torch.tensor(([] if first is None else [first]) + text_ids)[:size]
    if len(ids) < max(size or 3, 3):
        found_words, fix = f"{count(len(ids))} tokens", "--text FILE, with more text"
        raise _error(f"the text must have at least {count(max(size or 3, 3))} tokens.", found_words, fix)
    if limit is not None and len(ids) + more > limit:
        generated = f" and {count(more)} to generate" if more else ""
        fix = f"--tokens {limit - more}" if limit - more >= 3 else f"--generate {limit // 2} --tokens {limit // 2}"
        raise _error(
            f"the text must fit into the context of the model, {count(limit)} tokens.",
            f"{count(len(ids))} tokens{generated}",
            fix,
        )
    return ids


def _block(loaded: LoadedModel, period: int) -> dict[str, Any] | None:
    """Measure every head on random tokens that occur twice: plain numbers."""
    vocabulary = loaded.model.config.get_text_config().vocab_size
    with attlas.record(loaded.model) as atlas:
        run_model(loaded.model, repeated_block(vocabulary, period))
    layers: list[dict[str, Tensor]] = []
    for A in atlas:
        if A.ndim != 4 or A.shape[2:] != (2 * period, 2 * period):
            return None
        layers.append(measure_block(A, period))
    return head_statistics.block_details(layers, period)


def _report(atlas: Atlas, arguments: argparse.Namespace, terminal: Terminal) -> None:
    out = arguments.out
    size = sum(file.stat().st_size for file in out.iterdir())
    terminal.say(f"{terminal.style(str(out), 'bold')}  {in_bytes(size)}")
    terminal.say(f"  {len(atlas)} layers × {len(atlas.entries[0].heads)} heads of {atlas.model}")
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
        terminal.say(terminal.style(f"  {line}", "dim"))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise _error(
            "--device must be one that torch can use here.",
            f"--device {name}: {(str(error).splitlines() or [''])[0]}",
            "--device cpu",
        ) from None
    return device


def _list(name: str, text: str | None) -> list[int] | None:
    """Return numbers that stand with commas between them."""
    if text is None:
        return None
    try:
        values = [int(word) for word in text.split(",")]
    except ValueError:
        raise _error(
            f"--{name} must be whole numbers with commas between them.", f"--{name} {text}", f"--{name} 0,2"
        ) from None
    return values


def _command(arguments: argparse.Namespace) -> str:
    words = ["attlas", "record"]
    for name in ("model", "text", "tokens", "generate", "chunk", "layers", "heads", "statistics"):
        value = getattr(arguments, name)
        if value:
            words += [f"--{name}", shlex.quote(str(value))]
    words += [f"--keep {arguments.keep}"] if arguments.keep != "disk" else []
    words += ["--patch-sdpa"] if arguments.patch_sdpa else []
    return " ".join([*words, "-o", shlex.quote(str(arguments.out))])


def _error(rule: str, found: str, fix: str) -> UsageError:
    return UsageError("record", rule, found=found, fix=fix)
