"""The monitor logs what the dense weights say, on its steps alone, and leaves nothing behind."""

import copy
import gc
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tests.messages import refusal
from tests.tiny_models import T5
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

import attlas
from attlas import RecordingError, ShapeError
from attlas.huggingface import AttentionMonitor
from attlas.recording import hooks
from attlas.recording.sequences import RecordedSequences

needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="Trainer needs accelerate: pip install accelerate"
)


@pytest.fixture
def gpt2(gpt2: nn.Module) -> nn.Module:
    gpt2.set_attn_implementation("sdpa")
    return gpt2


class Loop:
    """A training loop that calls a callback where Trainer does."""

    def __init__(self, model: nn.Module, monitor: AttentionMonitor, main: bool = True) -> None:
        self.model, self.monitor = model, monitor
        self.state = TrainerState(is_world_process_zero=main)
        self.call("on_train_begin")

    def call(self, event: str) -> None:
        getattr(self.monitor, event)(None, self.state, TrainerControl(), model=self.model)

    def step(self, *batches: tuple[Tensor, Tensor]) -> None:
        self.call("on_step_begin")
        for i, (ids, mask) in enumerate(batches):
            self.model(ids, attention_mask=mask, labels=ids).loss.backward()
            if i < len(batches) - 1:
                self.call("on_substep_end")
        self.state.global_step += 1
        self.call("on_step_end")


def batch(size: int = 2, n: int = 9, seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 61, (size, n), generator=torch.Generator().manual_seed(seed))
    return ids, torch.ones_like(ids)


def expected(model: nn.Module, *batches: tuple[Tensor, Tensor], rows: slice = slice(None)) -> dict[str, float]:
    """Return the numbers from eager's weights and from dense logits, text by text."""
    eager, lazy = copy.deepcopy(model).double().eval(), copy.deepcopy(model).double().eval()
    eager.set_attn_implementation("eager")
    lazy.set_attn_implementation("attlas")
    found: dict[tuple[int, int], list[Tensor]] = {}
    for ids, mask in batches:
        options = {"attention_mask": mask, "output_attentions": True}
        pairs = zip(eager(ids, **options).attentions, lazy(ids, **options).attentions, strict=True)
        for layer, (weights, A) in enumerate(pairs):
            logits = A.logits.to_dense().detach()
            for b in range(len(ids)):
                real = [i for i in range(ids.shape[1])[rows] if mask[b, i]]
                for head in range(weights.shape[1]):
                    w = weights[b, head, real].detach()
                    numbers = (
                        logits[b, head, real].amax(-1),
                        -torch.special.xlogy(w, w).sum(-1),
                        1 / w.square().sum(-1),
                    )
                    found.setdefault((layer, head), []).append(torch.stack(numbers))
    out, everything = {}, []
    for (layer, head), parts in found.items():
        joined = torch.cat(parts, dim=-1)
        everything.append(joined)
        out |= named(f"layer_{layer}/head_{head}/", joined)
    layers = {layer for layer, _ in found}
    for layer in layers:
        out |= named(f"layer_{layer}/", torch.cat([p for (at, _), ps in found.items() if at == layer for p in ps], -1))
    return out | named("", torch.cat(everything, dim=-1))


def named(path: str, rows: Tensor) -> dict[str, float]:
    logit, entropy, effective = rows
    return {
        f"attention/{path}max_logit": float(logit.max()),
        f"attention/{path}entropy": float(entropy.mean()),
        f"attention/{path}effective_keys": float(effective.mean()),
    }


def agree(found: dict[str, float], right: dict[str, float]) -> None:
    assert found == {name: pytest.approx(right[name], rel=1e-4, abs=1e-5) for name in found}


@pytest.mark.parametrize("side", ["left", "right"])
def test_micro_batches_with_padding(gpt2: nn.Module, padded: Callable, side: str) -> None:
    monitor = AttentionMonitor(every=1)
    batches = (padded(side), batch(3, 17, seed=4), batch(2, 5, seed=5))
    right = expected(gpt2, *batches)
    loop = Loop(gpt2, monitor)
    loop.step(*batches)
    agree(monitor.last, right)
    (logged,) = loop.state.log_history
    assert logged == monitor.last | {"step": 1, "epoch": 0}


@pytest.mark.parametrize(("asked", "count"), [({}, 27), ({"per": "layer"}, 9), ({"per": "model"}, 3)])
def test_numbers_are_those_of_the_dense_weights(gpt2: nn.Module, asked: dict[str, str], count: int) -> None:
    monitor = AttentionMonitor(every=1, **asked)
    right = expected(gpt2, batch())
    Loop(gpt2, monitor).step(batch())
    assert len(monitor.last) == count
    agree(monitor.last, right)


def test_some_queries_of_one_layer_under_a_name(gpt2: nn.Module) -> None:
    monitor = AttentionMonitor(every=1, per="layer", queries=slice(-3, None), layers=[1], prefix="train/attention")
    right = expected(gpt2, batch(), rows=slice(-3, None))
    Loop(gpt2, monitor).step(batch())
    found = {name.removeprefix("train/"): value for name, value in monitor.last.items()}
    assert found.keys() > {"attention/layer_1/entropy", "attention/entropy"}
    assert found["attention/entropy"] == found["attention/layer_1/entropy"]
    agree({name: value for name, value in found.items() if "layer" in name}, right)


def test_only_its_steps_cost_anything(gpt2: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    real = attlas.huggingface.monitor._StepRecording
    monkeypatch.setattr(
        attlas.huggingface.monitor,
        "_StepRecording",
        lambda *args, **kwargs: steps.append(loop.state.global_step + 1) or real(*args, **kwargs),
    )
    monitor = AttentionMonitor(every=3, per="model")
    loop = Loop(gpt2, monitor)
    for seed in range(7):
        turn = loop.state.global_step + 1 in (1, 3, 6)
        loop.call("on_step_begin")
        assert hooks._active_recordings == turn
        assert gpt2.config._attn_implementation == ("attlas" if turn else "sdpa")
        gpt2(batch(seed=seed)[0])
        loop.state.global_step += 1
        loop.call("on_step_end")
        assert hooks._active_recordings == 0
        assert gpt2.config._attn_implementation == "sdpa"
    assert steps == [1, 3, 6]
    assert [logged["step"] for logged in loop.state.log_history] == [1, 3, 6]


def test_every_process_looks(gpt2: nn.Module) -> None:
    monitors = [AttentionMonitor(every=1), AttentionMonitor(every=1)]
    for monitor, main in zip(monitors, (True, False), strict=True):
        Loop(gpt2, monitor, main=main).step(batch())
    assert monitors[0].last == monitors[1].last != {}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_counts_each_pass_once(gpt2: nn.Module, reentrant: bool) -> None:
    gpt2.train()
    plain, checkpointed = copy.deepcopy(gpt2), copy.deepcopy(gpt2)
    for model in (plain, checkpointed):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.config.attn_pdrop = 0.0
        for block in model.transformer.h:
            block.attn.attn_dropout.p = 0.0
    enable = getattr(checkpointed, "activation_checkpointing_enable", checkpointed.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    checkpointed.enable_input_require_grads()
    right = expected(plain, batch())
    plain(batch()[0], labels=batch()[0]).loss.backward()
    monitor = AttentionMonitor(every=1)
    Loop(checkpointed, monitor).step(batch())
    agree(monitor.last, right)
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)


def test_no_matrix_and_no_graph_outlive_the_step(gpt2: nn.Module) -> None:
    gc.collect()
    before = sum(type(thing) is attlas.AttentionMatrix for thing in gc.get_objects())
    monitor = AttentionMonitor(every=1)
    loop = Loop(gpt2, monitor)
    loop.call("on_step_begin")
    gpt2(batch()[0])
    assert all(entry.matrix is None for entry in monitor._open_recording.atlas.entries)
    loop.state.global_step += 1
    loop.call("on_step_end")
    gc.collect()
    after = sum(type(thing) is attlas.AttentionMatrix for thing in gc.get_objects())
    assert after == before
    assert all(isinstance(value, float) and math.isfinite(value) for value in monitor.last.values())


def test_a_training_that_broke_off_leaves_nothing_open(gpt2: nn.Module) -> None:
    monitor = AttentionMonitor(every=1)
    loop = Loop(gpt2, monitor)
    loop.call("on_step_begin")
    gpt2(batch()[0])
    assert gpt2.config._attn_implementation == "attlas"
    for event in ("on_train_begin", "on_train_end"):
        loop.call(event)
        assert hooks._active_recordings == 0
        assert gpt2.config._attn_implementation == "sdpa"
    loop.step(batch())
    agree(monitor.last, expected(gpt2, batch()))


def test_encoder_and_cross_attention_have_names_of_their_own() -> None:
    config = transformers.T5Config(**T5 | {"num_layers": 1})
    monitor = AttentionMonitor(every=1, per="layer")
    model = transformers.T5ForConditionalGeneration(config)
    Loop(model, monitor).step(batch())
    layers = {name.split("/")[1] for name in monitor.last if name.count("/") == 2}
    assert layers == {"encoder_0", "cross_0", "layer_0"}


def test_a_model_that_cannot_be_recorded_says_so_in_its_first_step() -> None:
    loop = Loop(nn.Linear(3, 3), AttentionMonitor(every=100))
    loop.call("on_step_begin")
    with pytest.raises(RecordingError):
        loop.model(torch.zeros(1, 3))
    loop.monitor.close()
    assert hooks._active_recordings == 0


@needs_accelerate
@pytest.mark.parametrize("attached", [False, True])
def test_trainer_logs_the_numbers(gpt2: nn.Module, tmp_path: Path, attached: bool) -> None:
    class Report(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_log(self, args: object, state: TrainerState, control: object, logs: dict, **kwargs: object) -> None:
            if "attention/layer_1/head_3/entropy" in logs:
                self.steps.append(state.global_step)

    report, monitor = Report(), AttentionMonitor(every=2)
    data = [{"input_ids": ids, "labels": ids} for ids in batch(20)[0]]
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=5,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    callbacks = [report] if attached else [report, monitor]
    trainer = transformers.Trainer(gpt2, args, train_dataset=data, callbacks=callbacks)
    if attached:
        assert monitor.attach(trainer) is monitor
    trainer.train()
    looked = [entry for entry in trainer.state.log_history if "attention/entropy" in entry]
    assert [entry["step"] for entry in looked] == [1, 2, 4]
    assert looked[-1] == pytest.approx(monitor.last | {"step": 4, "epoch": looked[-1]["epoch"]})
    assert report.steps == ([1, 2, 4] if attached else [])
    assert hooks._active_recordings == 0


@needs_accelerate
@pytest.mark.parametrize(("every", "logging_steps"), [(1, 1), (2, 2), (3, 2), (100, 500)])
def test_trainer_logs_its_own_loss(gpt2: nn.Module, tmp_path: Path, every: int, logging_steps: int) -> None:
    def losses(how: str) -> list[tuple[int, float]]:
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=6, per_device_train_batch_size=2, logging_steps=logging_steps, report_to=[],
            use_cpu=True, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        data = [{"input_ids": ids, "labels": ids} for ids in batch(12)[0]]
        monitor = AttentionMonitor(every=every)
        callbacks = [monitor] if how == "callbacks" else []
        trainer = transformers.Trainer(copy.deepcopy(gpt2).eval(), args, train_dataset=data, callbacks=callbacks)
        if how == "attach":
            monitor.attach(trainer)
        trainer.train()
        return [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]

    alone = losses("not at all")
    assert [step for step, _ in alone] == [step for step in range(1, 7) if step % logging_steps == 0]
    for how in ("attach", "callbacks"):
        watched = losses(how)
        assert [step for step, _ in watched] == [step for step, _ in alone]
        assert [loss for _, loss in watched] == pytest.approx([loss for _, loss in alone], rel=0.1)


def test_settings_are_checked() -> None:
    assert refusal(ShapeError, lambda: AttentionMonitor(every=0)) == "AttentionMonitor(): every = 0"
    assert refusal(ShapeError, lambda: AttentionMonitor(per="token")) == "AttentionMonitor(): per = 'token'"


@pytest.mark.parametrize("method", ["add", "decide"])
def test_an_error_of_the_recording_ends_it(gpt2: nn.Module, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The model runs as before, and the next step is recorded anew."""
    monitor = AttentionMonitor(every=1)
    loop, before = Loop(gpt2, monitor), hooks._active_recordings
    ids, mask = batch()

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("an error inside the recording")

    with monkeypatch.context() as patched:
        patched.setattr(RecordedSequences, method, fails)
        with pytest.raises(RuntimeError, match="an error inside"):
            loop.step((ids, mask))
    assert hooks._active_recordings == before
    assert gpt2.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in gpt2.modules())
    gpt2(ids, attention_mask=mask)
    loop.step((ids, mask))
    assert monitor.last["attention/max_logit"] == pytest.approx(expected(gpt2, (ids, mask))["attention/max_logit"])
