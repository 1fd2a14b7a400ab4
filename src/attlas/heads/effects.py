"""What each head, or each span of a text, does to a model: the loss, or a logit, without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from attlas.errors import DtypeError, ShapeError, kind, public
from attlas.foundation.checks import whole_number
from attlas.foundation.progress import Progress
from attlas.heads.evaluation import checked_ids, evaluating
from attlas.interventions import Intervention, Suppress, intervene
from attlas.interventions.edits import Call
from attlas.recording.atlas.table import frame
from attlas.recording.hooks import Pool
from attlas.stats.spans import Span, place_span

Target: TypeAlias = "tuple[int, int] | Callable[[Tensor], Tensor] | None"
Record: TypeAlias = "dict[str, Any]"

_LOGITS_AT_ONCE = 1 << 26  # logits that are computed at once, 256 MB of float32
_MOST_COPIES = 16  # copies of a text that are read together


@torch.no_grad()
@public("heads.effect()")
def effect(
    model: nn.Module,
    ids: Tensor,
    *,
    layers: Any = None,
    heads: Any = None,
    spans: Mapping[str, Span] | None = None,
    target: Target = None,
    positions: Span | None = None,
    patch_sdpa: bool = False,
    batch_size: int | None = None,
    data: str = "records",
    verbose: bool = False,
) -> Any:
    """Return by how much the loss or a logit changes without each head, or without each span of a text.

    Parameters
    ----------
    model : nn.Module
        A language model that `attlas.intervene` can change: called with `ids`, it gives logits, or an object with
        ``logits``, shape (batch, n, vocabulary).
    ids : Tensor of int, shape (n,) or (batch, n)
        Tokens of the text.
    layers, heads
        Which heads, as in `attlas.record`; the default is all. With `spans`, the heads that stop attending to them.
    spans : mapping of str to slice, range or (start, stop), optional
        Named spans of the text. Each is suppressed for all later queries, in place of heads.
    target : (int, int) or callable, optional
        What is measured. The default is the loss, in nats per token. A pair is a position and a token: the logit of
        the token as the one that follows the position. A function takes the logits, shape (batch, n, vocabulary), and
        gives one number per sequence, shape (batch,).
    positions : slice, range or (start, stop), optional
        Tokens whose loss counts. The default is all but the first.
    patch_sdpa : bool, default False
        As in `attlas.intervene`.
    batch_size : int, optional
        Heads that are left out in one forward pass, each in a copy of the text of its own. The default is as many as
        give 67 million logits, at most 16.
    data : {"records", "pandas", "polars"}, default "records"
        A list of dicts, or a data frame of a library that is installed.
    verbose : bool, default False
        Whether progress is written to the standard error.

    Returns
    -------
    list of dict, or data frame
        For each head ``layer``, ``head``, ``kind`` and ``name``; for each span ``span``, ``start`` and ``stop``. Then
        ``value``, what was measured without it, and ``effect``, what it was more than with it.

    Raises
    ------
    DtypeError
        If `ids` are no tensor of integers, or the model gives no logits.
    ShapeError
        If a span or a position lies outside the text, or `target`, `batch_size` or `data` cannot be used.
    OutOfRangeError
        If the model lacks a layer or a head.
    RecordingError
        If the attention of the model cannot be changed.

    See Also
    --------
    attlas.intervene : interventions of one's own.
    measure : what kind of head each is.

    Notes
    -----
    A head is left out by setting its output to 0 (`attlas.interventions.Ablate`), a span by a mask before softmax
    (`attlas.interventions.Suppress`), for queries after the span only: its own tokens read it as before. The model is
    in evaluation mode for the time. Effects of several heads do not add up: others may take over what one did [1]_.

    Heads of linear layers count, but not channels. Where a linear layer divides by the sum of a row, a span cannot be
    hidden from it: name the others by `layers`.

    Cost: a forward pass for each head, several in one batch, or for each span.

    References
    ----------
    .. [1] Wang et al., "Interpretability in the wild: a circuit for indirect object identification in GPT-2 small",
       2023.

    Examples
    --------
    >>> import torch, attlas.models
    >>> from attlas import heads
    >>> from transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained(attlas.models.path())
    >>> ids = heads.repeated_block(4096, period=32, blocks=1)
    >>> table = heads.effect(model, ids, layers=0, positions=(32, 64))
    >>> len(table), max(table, key=lambda record: record["effect"])["head"]
    (6, 0)
    >>> rows = heads.effect(model, ids, spans={"first copy": (0, 32)}, positions=(33, 64))
    >>> rows[0]["effect"] > 1
    True
    """
    ids = checked_ids(ids, 2)
    n = ids.shape[1]
    if batch_size is not None:
        whole_number("batch_size", batch_size, "batch_size=8")
    places = {name: place_span(name, span, n, "tokens") for name, span in (spans or {}).items()}
    measure = _measure_function(target, positions, n)
    probe = _HeadListing(layers, heads)

    def run(intervention: Intervention, copies: int) -> Tensor:
        """Return the mean of `measure` for each copy of the text, which `intervention` may change differently."""
        with (block := intervene(model, [intervention], patch_sdpa=patch_sdpa)):
            logits = _logits_of_output(model(ids.repeat(copies, 1)))
        # The probe changes nothing, and notes the heads that it is asked about.
        if intervention is probe:
            # Attentions that are found later in the pass may shift the number of a layer.
            for record in probe.found:
                record["layer"] = block.final_layer(record["site"], record["layer"])
        found: Tensor = measure(logits, ids.repeat(copies, 1)).double().unflatten(0, (copies, -1)).mean(-1)
        return found

    with evaluating(model), Progress("heads.effect()", verbose) as report:
        plain = float(run(probe, 1)[0])
        steps: list[tuple[list[Record], Intervention]] = []  # records of one forward pass, and what it leaves out
        # `_OneEach` leaves out another head in each copy of the text.
        if spans is None:
            size = batch_size or max(min(_LOGITS_AT_ONCE // max(probe.numbers(ids, model), 1), _MOST_COPIES), 1)
            some = (probe.found[first : first + size] for first in range(0, len(probe.found), size))
            steps = [(records, _OneEach(records)) for records in some]
        for name, span in places.items():
            records = [{"span": name, "start": span.start, "stop": span.stop}]
            later = slice(span.stop, None)
            # No query can attend to an empty span: then nothing is left out.
            steps.append((records, Suppress(layers, heads, queries=later, keys=span) if len(span) else probe))
        table: list[Record] = []
        unit, count = "head" if spans is None else "span", sum(len(records) for records, _ in steps)
        for records, intervention in steps:
            report(f"{unit} {len(table) + 1} of {count}")
            values = run(intervention, len(records)).tolist()
            for record, value in zip(records, values, strict=True):
                named = {name: part for name, part in record.items() if name != "site"}
                table.append(named | {"value": value, "effect": value - plain})
    return frame(table, data)


class _HeadListing(Intervention):
    """Changes nothing, and notes which heads there are."""

    label = "heads.effect()"

    def __init__(self, layers: Any, heads: Any) -> None:
        super().__init__(layers, heads)
        self.found: list[Record] = []

    def pool(self, pool: Pool, call: Call) -> Pool:
        site = call.site
        if any(record["site"] == site for record in self.found):  # the same weights, multiplied with other values
            return pool
        self.found += [
            {"layer": site.layer, "head": head, "kind": site.kind, "name": site.path, "site": site}
            for head in call.numbers
        ]
        return pool

    def linear_output(self, out: Tensor, call: Call, read: Any) -> Tensor:
        self.pool(lambda A, values: values, call)
        return out

    def numbers(self, ids: Tensor, model: nn.Module) -> int:
        """Return how many logits the model gives for a text."""
        vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
        return ids.numel() * (vocabulary if isinstance(vocabulary, int) else 1 << 15)  # a guess, where it is not known


class _OneEach(Intervention):
    """Leaves out one head in each copy of a text."""

    def __init__(self, records: Sequence[Record]) -> None:
        super().__init__()
        self.records = records

    def pool(self, pool: Pool, call: Call) -> Pool:
        return lambda A, values: self.linear_output(pool(A, values), call, None)

    def linear_output(self, out: Tensor, call: Call, read: Any) -> Tensor:
        """Return the output, in each copy of the batch with the head of its record set to 0."""
        chosen = torch.zeros(len(self.records), out.shape[1], dtype=torch.bool)
        for copy, record in enumerate(self.records):
            if record["site"] == call.site and record["head"] in call.numbers:
                chosen[copy, call.heads[call.numbers.index(record["head"])]] = True
        copies = chosen.repeat_interleave(len(out) // len(chosen), dim=0).to(out.device)
        return out.masked_fill(copies[:, :, None, None], 0.0)


def _logits_of_output(output: Any) -> Tensor:
    """Return the logits of what a model returned, shape (batch, n, vocabulary), or raise an error."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, Tensor) and logits.ndim == 3:
        return logits
    fix = "pass a model with a head of logits: AutoModelForCausalLM."
    raise DtypeError("the model must give logits, shape (batch, n, vocabulary).", kind(output), fix)


def _measure_function(target: Target, positions: Span | None, n: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that is measured: of logits and tokens, one number per sequence."""
    span = place_span("positions", positions, n, "tokens")
    span = range(max(span.start, 1), span.stop)  # nothing tells of the first token
    if target is None:
        if not len(span):
            rule = "positions must hold a token that has one before it."
            raise ShapeError(rule, f"positions = {positions!r}", f"positions=(1, {n})")

        def loss(logits: Tensor, ids: Tensor) -> Tensor:
            # The logits that predict the tokens of `span` stand one place before them.
            before = logits[:, span.start - 1 : span.stop - 1].float()
            return functional.cross_entropy(before.mT, ids[:, span.start : span.stop], reduction="none").mean(-1)

        return loss
    if isinstance(target, tuple) and len(target) == 2 and all(isinstance(part, int) for part in target):
        position, token = target
        if not -n <= position < n:
            rule = "the position of a logit must lie within the text."
            raise ShapeError(rule, f"position {position}, {n} tokens", f"target=({n - 1}, {token})")
        return lambda logits, ids: logits[:, position, token]
    if callable(target):
        return lambda logits, ids: target(logits)
    rule = "target must be a pair (position, token), or a function of the logits."
    raise ShapeError(rule, f"target = {target!r}"[:80], "target=(-1, token), or leave it out for the loss.")
