"""Watch the attention of every head while transformers' Trainer trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from attlas import stats
from attlas.errors import public
from attlas.foundation.checks import one_of, whole_number
from attlas.huggingface.ranks import Layers, Ranks, Sums, world
from attlas.recording import Recording
from attlas.recording.selection import Selection
from attlas.stats import Statistic

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

    from attlas.recording.atlas import Entry
    from attlas.recording.hooks import AttentionCall

Per: TypeAlias = Literal["head", "layer", "model"]
Numbers: TypeAlias = dict[str, float]


class AttentionMonitor(TrainerCallback):
    """Log the largest logit, the entropy and the effective keys of each head every so many training steps.

    Parameters
    ----------
    every : int, default 100
        The first step is looked at, so that a model that cannot be recorded says so at once, and then each
        step whose number is a multiple of this.
    per : {"head", "layer", "model"}, default "head"
        How fine the numbers are; those of the whole model are always logged.
    queries : slice or range, optional
        Queries that are looked at; the default is all. ``slice(-32, None)`` are the last 32 of each text.
    layers : sequence of int or str, optional
        Which attentions, as for `attlas.recording.record`; the default is all.
    prefix : str, default "attention"
        What the names of the numbers begin with.

    Attributes
    ----------
    last : dict of str to float
        The numbers of the last step that was looked at.

    Raises
    ------
    ShapeError
        If `every` is below 1, or `per` is no such word.

    See Also
    --------
    attlas.heads.EntropyAlarm : an alarm for a loop of your own.
    attlas.heads.qk_clip : what to do about large logits.

    Notes
    -----
    Logged are ``attention/layer_3/head_0/max_logit`` and likewise ``entropy`` (nats) and ``effective_keys``,
    ``attention/layer_3/max_logit`` with ``per="layer"``, and ``attention/max_logit``; ``encoder_3`` and
    ``cross_3`` stand in place of ``layer_3`` for other attentions. The largest logit is the maximum over
    the step's texts and queries, the others are means over the queries that see a key; padding, by the
    ``attention_mask`` of the call, is left out. With gradient accumulation all micro-batches of the step count,
    and what gradient checkpointing computes again does not. Growing logits and falling entropy announce
    instability [1]_ [2]_. In distributed training all ranks look, and the numbers are those of all texts and
    heads, by one all-reduce a step. If a rank cannot record a step, all raise its error at the end of the step.

    A step that an error or an interrupt breaks off stays recorded until the next training begins, or until
    ``monitor.close()``; an error of the recording itself ends it at once, and the model is as it was before.

    ``Trainer(callbacks=[monitor])`` puts the numbers into ``trainer.state.log_history`` and nowhere else: the
    callbacks that report to other programs (TensorBoard, Weights & Biases) do not get them.
    ``monitor.attach(trainer)``, in place of ``callbacks``, logs through the trainer and reaches them; the
    trainer's own logs, the loss among them, come as they would without it.

    Cost: on other steps, the comparison of two numbers. On a step that is looked at, the model attends with
    attlas, and one pass of three statistics over each matrix is added (with `queries`, over those rows);
    no graph and no token is kept. Memory: three numbers for each query and head until the step ends.

    References
    ----------
    .. [1] Dehghani et al., "Scaling vision transformers to 22 billion parameters", 2023, section 3.
    .. [2] Zhai et al., "Stabilizing transformer training by preventing attention entropy collapse", 2023.

    Examples
    --------
    >>> from attlas.huggingface import AttentionMonitor
    >>> monitor = AttentionMonitor(every=50, per="layer")
    >>> # trainer = Trainer(model, ..., callbacks=[monitor]), or monitor.attach(trainer)
    >>> monitor.last
    {}
    """

    @public("AttentionMonitor()")
    def __init__(
        self,
        every: int = 100,
        per: Per = "head",
        queries: slice | range | None = None,
        layers: Iterable[int | str] | None = None,
        prefix: str = "attention",
    ) -> None:
        one_of("per", per, ("head", "layer", "model"), 'per="layer"')
        self.every = whole_number("every", every, "every=100")
        self.per = per
        self.queries = queries
        self.layers = None if layers is None else list(layers)
        self.prefix = prefix
        self.last: Numbers = {}
        self._ranks = Ranks()
        self._log: Callable[[Numbers], None] | None = None
        self._open_recording: Recording | None = None
        self._failed: Exception | None = None

    def attach(self, trainer: Trainer) -> AttentionMonitor:
        """Add this callback to a trainer and log through it, so that its reports have the numbers too.

        Parameters
        ----------
        trainer : transformers.Trainer
            The trainer, without this callback among its ``callbacks``.

        Returns
        -------
        AttentionMonitor
            This object.
        """
        trainer.add_callback(self)
        self._log = trainer.log
        return self

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Leave what a training that broke off has left open."""
        self.close()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to record where it is the turn of this step."""
        step = state.global_step + 1
        if step % self.every and step > 1:
            return
        # Ends a recording that a step before left open.
        self.close()
        numbers = (stats.MaxLogit(), stats.Entropy(), stats.EffectiveKeys())
        try:
            recording = _StepRecording(kwargs["model"], Selection(self.layers, None, self.queries), numbers)
            recording.__enter__()
            self._open_recording = recording
        except Exception as error:
            if world() == 1:
                raise
            self._failed = error  # the other ranks hear of it when the step ends

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log what was recorded in this step."""
        if self._open_recording is None and self._failed is None:
            return
        self.last = self._logged_numbers(self._ranks.joined(self._sums_of_layers))
        if self._log is not None:
            # The log event ends the trainer's own turn to log, which comes after this one.
            due = control.should_log
            self._log(dict(self.last))
            control.should_log = due
            return
        epoch = {} if state.epoch is None else {"epoch": state.epoch}
        state.log_history.append(self.last | epoch | {"step": state.global_step})

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave a step that was begun and not ended."""
        self.close()

    def close(self) -> None:
        """Stop recording a step that was begun and not ended; a new training does so by itself."""
        if self._open_recording is not None:
            recording, self._open_recording = self._open_recording, None
            # As an error leaves it: what was recorded of half a step is not wanted.
            recording.__exit__(GeneratorExit, GeneratorExit(), None)

    def _sums_of_layers(self) -> Layers:
        """End the recording, and return the sums of each layer's heads, by its name in the log."""
        error, self._failed = self._failed, None
        if self._open_recording is None:
            raise error or RuntimeError("no step was begun.")
        recording, self._open_recording = self._open_recording, None
        recording.__exit__(None, None, None)
        layers: Layers = {}
        for entry in recording.atlas.entries:
            name = f"{'layer' if entry.kind == 'self' else entry.kind}_{entry.layer}"
            layer_sums = _sums_of_entry(entry)
            layers[name] = (entry.heads, layers[name][1].join(layer_sums) if name in layers else layer_sums)
        return layers

    def _logged_numbers(self, layers: Layers) -> Numbers:
        """Return the numbers of a step by the names that are logged: of each head, of each layer, of the model."""
        out: Numbers = {}
        for name, (heads, sums) in layers.items():
            if self.per == "head":
                for index, head in enumerate(heads):
                    out |= self._numbers_of_layer(f"{name}/head_{head}/", sums.of_head(index))
            elif self.per == "layer":
                out |= self._numbers_of_layer(f"{name}/", sums)
        if layers:
            whole = Sums(*(torch.cat(parts) for parts in zip(*(sums for _, sums in layers.values()), strict=True)))
            out |= self._numbers_of_layer("", whole)
        return out

    def _numbers_of_layer(self, path: str, sums: Sums) -> Numbers:
        """Return largest logit and means over rows, by the names that are logged; nothing where no row saw a key."""
        rows = float(sums.rows.sum())
        if not rows:
            return {}
        numbers = {
            "max_logit": float(sums.max_logit.max()),
            "entropy": float(sums.entropy.sum()) / rows,
            "effective_keys": float(sums.effective_keys.sum()) / rows,
        }
        return {f"{self.prefix}/{path}{name}": value for name, value in numbers.items()}


class _StepRecording(Recording):
    """A recording of the statistics of one step, which no ``with`` block ends: its own error does so."""

    def __init__(self, model: nn.Module, selection: Selection, statistics: tuple[Statistic, ...]) -> None:
        super().__init__(model, selection, statistics, "statistics", None, False, None, False)

    def _begin_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a pass as `Recording` does; an error also ends the recording."""
        with self._ended_by_error():
            super()._begin_pass(args, kwargs)

    def on_attention(self, call: AttentionCall) -> None:
        with self._ended_by_error():
            super().on_attention(call)

    def _end_pass(self) -> None:
        """End a pass as `Recording` does; an error also ends the recording."""
        with self._ended_by_error():
            super()._end_pass()

    @contextmanager
    def _ended_by_error(self) -> Iterator[None]:
        """Put everything back that the recording has changed, if an error is raised."""
        try:
            yield
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise


def _sums_of_entry(entry: Entry) -> Sums:
    """Return largest logit and sums over rows of each head, for one pass of one layer; one transfer from the device."""
    results = [entry.statistics[name] for name in ("max_logit", "entropy", "effective_keys")]
    # Sums are taken in float64, which Apple's GPUs do not have.
    logit, entropy, effective = (t.cpu() if t.device.type == "mps" else t for t in results)
    seen = logit > -math.inf
    if entry.query_mask is not None:
        seen = seen & entry.query_mask.unsqueeze(1).to(seen.device)
        logit = logit.masked_fill(~seen, -math.inf)
    largest = logit.double().transpose(0, 1).flatten(1)
    largest = largest.amax(dim=-1) if largest.shape[-1] else largest.new_full(largest.shape[:1], -math.inf)
    parts = [torch.where(seen, t, 0.0).double().sum(dim=(0, 2)) for t in (entropy, effective)]
    return Sums(*torch.stack([largest, *parts, seen.double().sum(dim=(0, 2))]).cpu())
