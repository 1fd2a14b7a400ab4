"""Every model type that transformers can build from a small configuration: eager beside attlas.

Run with ``make sweep``, or ``python benchmarks/sweep.py --only llama,t5``. Each type runs in a process of its own
with a limit of time and memory, so that a crash ends one row of the table and not the run. One random model of a type,
its texts padded on the left, runs twice with the same weights: on ``attlas`` and on ``eager``. The texts are longer
than every window, chunk and number of chosen keys, so that these hide keys. Compared are every floating point output at
places of text, and the weights of every call of the attention function, rows that see no key aside. What differs is run
again without padding, and on torch's own ``sdpa``, and must have a reason in `REASONS`; the run fails where one has
none.

Some types need more libraries, which attlas itself does not: ``pip install --no-deps timm==1.0.31 torchvision==0.28.0
torchaudio==2.11.0 einops scipy``. The wheels of torchvision and torchaudio are built for a torch with CUDA:
`sweep_models` declares the operators that torchvision misses, and the folder ``torchaudio/lib`` must be removed. They
belong into an environment of their own, since transformers cannot be imported beside them outside of the sweep. Sizes
and inputs of types that no rule makes small are in `sweep_cases`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import re
import resource
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sweep_cases import CASES, Case
from sweep_models import NAMES_ONLY, PARTS_OF, configuration_auto, first_line, models_of, transformers

# isort: split
# Only now, since the module above looks after torchvision.
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

import attlas
from attlas.huggingface import attention_forward, modules_without_interface
from harness import RESULTS, save
from sweep_inputs import first_that_runs, fresh, inputs_for

TOLERANCE = 1e-4
LINEAR = "## Layers of linear attention"
SECONDS = 300
LONGEST = 12.0
MEMORY = 12 * 2**30
LEAST_EQUAL = 300
GRADIENT_TOLERANCE = 1e-3

NO_ATTENTION = "no attention at all"
OWN_NAMES = re.compile("attention|attn", re.IGNORECASE)
_NO_SINK = "eager returns weights without the sink, which its output counts; attlas counts it in both (outputs equal)"
_INVERTED = (
    "eager is not finite: these layers take its additive mask, 0 where a key is allowed, for a boolean one and hide "
    "what is allowed; attlas is handed the same mask (right on sdpa only)"
)
_CHOSEN_BY_PADDING = (
    "the indexer scores the keys of padding, too, whose rows see no key: eager gives these uniform weights over all, "
    "sdpa and attlas none, and other blocks are chosen; equal to sdpa, and to eager without padding"
)
_ADDED = (
    "eager adds the mask of booleans of the text to the logits, as 0 and 1, which hides nothing; sdpa and attlas read"
    " it as a mask, and agree on the text to 1e-6 (then the choice of the best proposals differs, too)"
)
_RECURRENT = "rounding: softmax is float32 on eager, and 128 calls in a row enlarge its 1e-7; equal to sdpa bit for bit"
_VOCODER = (
    "rounding: the vocoder enlarges it: other parameters by 1e-7 change eager's own gradients by 7e-3; it makes tensors"
    " of float32, and cannot run in float64"
)
REASONS: dict[str, str] = {
    "fastspeech2_conformer_with_hifigan": _VOCODER,
    "hrm_text": _RECURRENT,
    "minimax_m3_vl": _CHOSEN_BY_PADDING,
    "minimax_m3_vl_text": _CHOSEN_BY_PADDING,
    "grounding-dino": _ADDED,
    "mm-grounding-dino": _ADDED,
    "granite_swa": _NO_SINK,
    "granitemoe_swa": _NO_SINK,
    "nemotron3_5_asr": _INVERTED,
    "nemotron_asr_streaming": _INVERTED,
    "nemotron_asr_streaming_encoder": _INVERTED,
}
# Why a type fails.
FAILURES = {
    "informer": "its encoder halves the series between layers and takes no mask of the old size; where nothing hides"
    " a key, eager gives it none, attlas a lazy one",
}
# Libraries that a type needs and no test of it can do without, and why they may be missing.
LIBRARIES = {
    "dinat": ("natten", "releases from 0.20 on have no natten2dqkrpb, which it calls; older ones have no wheel"),
    "layoutlmv2": ("detectron2", "PyPI has neither a wheel nor a source of it"),
}
# Types that transformers itself cannot build, whatever the sizes.
_SHARED_KEYS = "its configuration demands that all layers share keys, and the text configuration in it refuses that"
UNBUILT = dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _SHARED_KEYS)


def watch(model: nn.Module, given: dict[str, Tensor], implementation: str) -> tuple[list[Tensor], list[Any]]:
    """Run a model on an implementation; return its outputs, and the weights of each call in order."""
    weights: list[Any] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            found = function(module, *args, **kwargs)
            weights.append(found[1])
            return found

        return run

    AttentionInterface.register("attlas", watched(attention_forward))
    eager = {}
    for name in {type(module).__module__ for module in model.modules()}:
        scope = vars(sys.modules[name])
        for key in [key for key in scope if "eager" in key and key.endswith("forward")]:
            eager[name, key] = scope[key]
            scope[key] = watched(scope[key])
    try:
        model.set_attn_implementation(implementation)
        torch.manual_seed(11)
        with torch.no_grad():
            outputs = model(**fresh(given))
    finally:
        for (name, key), function in eager.items():
            setattr(sys.modules[name], key, function)
    return list(tensors(outputs)), weights


def tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point():
            yield outputs
    elif isinstance(outputs, dict):
        for name, part in outputs.items():
            if not any(part in str(name) for part in ("past_key_values", "cache", "attentions")):
                yield from tensors(part)
    elif isinstance(outputs, tuple | list):
        for part in outputs:
            yield from tensors(part)


def distance(found: list[Tensor], wanted: list[Tensor], text: Tensor | None) -> float:
    """Return the largest difference of outputs at places of text, relative to the largest number there or 1."""
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        if text is not None and b.shape[:2] == text.shape:
            a, b = a[text], b[text]
        if not b.numel():
            continue
        if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            return float("inf")
        a, b = (torch.where(torch.isfinite(t), t, 0.0).double() for t in (a, b))
        worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1.0)))
    return worst


def weight_distance(found: list[Any], wanted: list[Any], text: Tensor | None) -> tuple[float, int]:
    """Return the largest difference of a weight in rows that see a key, and how many calls were compared.

    With `text`, queries on padding are left out as well.
    """
    worst, compared = 0.0, 0
    if len(found) != len(wanted):
        return float("inf"), 0
    for A, weights in zip(found, wanted, strict=True):
        if not isinstance(weights, Tensor):
            continue
        seen = (A.lse > -torch.inf).reshape(weights.shape[:-1])
        if text is not None and seen.ndim == 3 and seen.shape[::2] == text.shape:
            seen = seen & text[:, None]
        difference = (A.to_dense().reshape(weights.shape) - weights).abs()[seen]
        worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
        compared += 1
    return worst, compared


def fewest_keys(weights: list[Any]) -> str:
    """Return how many keys the last query of a text sees at least, in any call, of how many there are."""
    found = [
        (int((w[0] > 0).sum(-1)[:, -1].min()), w.shape[-1]) for w in weights if isinstance(w, Tensor) and w.ndim == 4
    ]
    return "{} of {}".format(*min(found)) if found else ""


def compare(kind: str) -> dict[str, Any]:
    """Return one row of the table."""
    if kind in PARTS_OF:
        return {"state": "part", "reason": f"a part of {PARTS_OF[kind]}, in whose row it is compared"}
    if kind in NAMES_ONLY:
        return {"state": "no model", "reason": NAMES_ONLY[kind]}
    library, why = LIBRARIES.get(kind, ("", ""))
    if library and importlib.util.find_spec(library) is None:
        return {"state": "library missing", "reason": f"needs {library}: {why}"}
    reference = CASES.get(kind, Case()).reference
    failures: list[str] = []
    built: list[tuple[str, str]] = []
    start = time.process_time()
    for model in models_of(kind, failures):
        # Of each class, the errors of what it is called with.
        said: list[str] = []
        try:
            way, (wanted, weights) = first_that_runs(
                model, lambda given, model=model: watch(model, given, reference), said
            )
        except LookupError:
            built.append((type(model).__name__, said[0] if said else ""))
            if time.process_time() - start > LONGEST:
                break
            continue
        return {"class": type(model).__name__, **judged(kind, model, way, wanted, weights, reference)}
    if built:
        return {"class": built[0][0], "state": "not run on eager", "reason": built[0][1]}
    reason = "; ".join(filter(None, (UNBUILT.get(kind), *failures[:1]))) or "no class of transformers for it"
    return {"state": "not built", "reason": reason[:400]}


def judged(
    kind: str,
    model: nn.Module,
    way: tuple[str, ...],
    wanted: list[Tensor],
    their_weights: list[Any],
    reference: str = "eager",
) -> dict[str, Any]:
    """Return the row of a model that runs on eager: its outputs, weights and gradients beside those of attlas.

    With another `reference`, which returns no weights, outputs and gradients alone are compared.
    """
    given, text = inputs_for(model, True, way)
    row: dict[str, Any] = {"inputs": list(given), "not captured": len(modules_without_interface(model))}
    try:
        found, weights = watch(model, given, "attlas")
    except Exception as error:  # noqa: BLE001  # the row must say what happened
        if their_weights:
            reason = "; ".join(filter(None, (FAILURES.get(kind), f"{type(error).__name__}: {first_line(error)}")))
            return row | {"state": "failed on attlas", "reason": reason}
        found, weights = [], []  # attention of its own that takes no mask of the interface
    if not any(isinstance(A, attlas.AttentionMatrix) for A in weights):
        weights = []  # none, or dense ones of an eager function that is called on every implementation
        row |= by_hand(model, given, text)
    else:
        row["calls"] = len(weights)
        row["keys"] = fewest_keys(their_weights)
        row["outputs"] = distance(found, wanted, text)
        row["weights"], row["compared"] = 0.0, 0
        if reference == "eager":
            row["weights"], row["compared"] = weight_distance(weights, their_weights, None)
        else:
            row["reason"] = f"transformers has no eager for it: compared with {reference}, which returns no weights"
        if text is not None:
            row["weights of text"] = weight_distance(weights, their_weights, text)[0]
        if max(row["outputs"], row["weights"]) <= TOLERANCE:
            row["state"] = "equal"
        elif text is not None and max(row["outputs"], row["weights of text"]) <= TOLERANCE:
            row["state"] = "equal"
            row["reason"] = (
                "rows of padding that see no key in a window see some in a later layer, from what eager made of them"
            )
        else:
            found_more = explained(kind, model, way, row["weights"], reference)
            if found_more["reason"] and reference != "eager":
                found_more["reason"] = f"{row['reason']}; {found_more['reason']}"
            return row | {"state": "different"} | found_more
    if row["state"] == "equal" and weights and row["not captured"]:
        beside = f"beside the calls, {row['not captured']} modules have {why_none(model)}"
        row["reason"] = "; ".join(filter(None, (row.get("reason"), beside)))
    if row["state"] == "equal":
        row["gradients"] = gradient_distance(model, given, text, reference, lazily=not weights)
        if isinstance(row["gradients"], float) and row["gradients"] > GRADIENT_TOLERANCE:
            row |= exact_gradients(model, given, text, lazily=not weights)
            row["reason"] = row["reason"] or REASONS.get(kind, "")
    return row


def exact_gradients(model: nn.Module, given: dict[str, Any], text: Tensor | None, *, lazily: bool) -> dict[str, Any]:
    """Return what the difference of the gradients is in float64, and the reason of it: "" where it is no rounding.

    Where eager computes its softmax in float32 even so, the difference from torch's own `sdpa` says it.
    """
    model.double()
    torch.set_default_dtype(torch.float64)
    exact = {k: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for k, t in given.items()}
    found: dict[str, Any] = {"state": "different", "reason": ""}
    try:
        for name, reference in (("in float64", "eager"), ("in float64, to sdpa", "sdpa")):
            found[name] = gradient_distance(model, exact, text, reference, lazily=lazily)
            if isinstance(found[name], float) and found[name] < 1e-9:
                return found | {"reason": f"rounding: gradients are equal {name}"}
            if lazily:
                break  # a model that writes its attention out has no other
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def gradient_distance(
    model: nn.Module, given: dict[str, Any], text: Tensor | None, reference: str, *, lazily: bool
) -> float | str:
    """Return the largest difference of a gradient of a parameter, or the error that the reference raises in its place.

    It is relative to the largest gradient of the parameter, or to 0.01 of that of the model if this is larger.
    """
    try:
        wanted = gradients(model, given, text, reference)
    except Exception as error:  # noqa: BLE001  # what a family cannot train
        return f"{type(error).__name__}: {first_line(error)}"
    with attlas.lazily(model) if lazily else contextlib.nullcontext():
        found = gradients(model, given, text, "eager" if lazily else "attlas")
    largest = max((float(g.abs().max()) for g in wanted.values() if g.numel()), default=0.0)
    if largest == 0.0:
        return "no gradient"
    worst = 0.0
    for name in wanted.keys() | found.keys():
        a, b = found.get(name), wanted.get(name)
        if a is None or b is None:
            present = b if a is None else a
            worst = max(worst, float(present.abs().max()) / largest)
        elif b.numel():
            worst = max(worst, float((a - b).abs().max() / max(float(b.abs().max()), 0.01 * largest)))
    return worst if worst == worst else float("inf")


def gradients(model: nn.Module, given: dict[str, Any], text: Tensor | None, implementation: str) -> dict[str, Tensor]:
    """Return the gradients of a fixed sum of all outputs at places of text, by the name of the parameter."""
    if implementation == "attlas":
        AttentionInterface.register("attlas", attention_forward)
    model.set_attn_implementation(implementation)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(11)
    total = torch.zeros(())
    for output in tensors(model(**fresh(given))):
        if output.requires_grad:
            kept = output[text] if text is not None and output.shape[:2] == text.shape else output
            kept = torch.where(torch.isfinite(kept) & (kept.abs() < 1e6), kept, 0.0)
            signs = torch.arange(kept.numel()).reshape(kept.shape) * 0.7
            total = total + (kept * signs.cos()).sum() / max(kept.numel(), 1) ** 0.5
    if not total.requires_grad:
        return {}
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def by_hand(model: nn.Module, given: dict[str, Any], text: Tensor | None) -> dict[str, Any]:
    """Return the rest of the row of a type without the interface: its attention, written by hand, recorded lazily."""
    wanted, weights = run_by_hand(model, given)
    with attlas.lazily(model) as block:
        found, lazy = run_by_hand(model, given, lazily=True)
    uses = {f"{use.kind}: {use.operation}" for use in block.dense_uses}
    row: dict[str, Any] = {"outputs": distance(found, wanted, text), "dense": "; ".join(sorted(uses))}
    try:
        with warnings.catch_warnings(), torch.no_grad(), attlas.record(model, handwritten=True) as atlas:
            torch.manual_seed(11)
            model(**fresh(given))
        row["calls"] = len(atlas.entries)
    except attlas.RecordingError:
        row["calls"] = 0
    worst, row["compared"] = lazy_distance(lazy, weights, text)
    row["weights"] = worst
    reason = why_none(model)
    if row["calls"] == 0 and reason == NO_ATTENTION and row["outputs"] <= TOLERANCE:
        return row | {"state": "no attention", "reason": reason}
    if row["calls"] == 0 and not uses and row["outputs"] <= TOLERANCE:
        return row | {"state": "explained", "reason": f"no softmax of a product of queries and keys; {reason}"}
    if max(row["outputs"], worst) > TOLERANCE:
        reason = REASONS.get(model.config.model_type, "")
        if not reason:
            model.double()
            exact = {
                name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in given.items()
            }
            wanted, weights = run_by_hand(model, exact)
            with attlas.lazily(model):
                found, lazy = run_by_hand(model, exact, lazily=True)
            row["in float64"] = max(distance(found, wanted, text), lazy_distance(lazy, weights, text)[0])
            reason = "rounding: equal in float64" if row["in float64"] < 1e-9 else ""
        return row | {"state": "different", "reason": reason}
    if row["calls"] == 0:
        return row | {"state": "explained", "reason": f"computed densely, as before: {row['dense']}"}
    return row | {"state": "equal", "reason": f"in part computed densely, as before: {row['dense']}" if uses else ""}


def lazy_distance(lazy: list[Any], weights: list[Any], text: Tensor | None) -> tuple[float, int]:
    """Return the largest difference of a weight of lazy matrices, and how many of these there are."""
    worst, compared = 0.0, 0
    for A, dense in zip(lazy, weights, strict=True):
        if not isinstance(A, attlas.AttentionMatrix):
            continue
        seen = (A.lse > -torch.inf) & torch.isfinite(dense).all(-1)
        if text is not None and seen.ndim == 3 and seen.shape[::2] == text.shape:
            seen = seen & text[:, None]
        own = A.to_dense() if A.shape == dense.shape else band(A.to_dense(), dense.shape[-1])
        difference = (own - dense).abs()[seen]
        worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
        compared += 1
    return worst, compared


def band(weights: Tensor, width: int) -> Tensor:
    """Return the weights of the keys around each query, as Longformer and LED do where no token is global."""
    padded = torch.nn.functional.pad(weights, (width // 2, width // 2))
    return padded.unfold(-1, width, 1).diagonal(dim1=2, dim2=3).transpose(-1, -2)


def run_by_hand(model: nn.Module, given: dict[str, Any], *, lazily: bool = False) -> tuple[list[Tensor], list[Any]]:
    """Run a model as it is set, on eager outside of a block; return its outputs, and the weights that it returns."""
    for more in ({"output_attentions": True}, {}):
        try:
            if not lazily:
                model.set_attn_implementation("eager")
            torch.manual_seed(11)
            with torch.no_grad():
                outputs = model(**fresh(given), **more)
            break
        except (TypeError, ValueError):
            if not more:
                raise
    weights: list[Any] = []
    return list(tensors(without_weights(outputs, weights))), weights


def without_weights(outputs: Any, weights: list[Any]) -> Any:
    """Return outputs without attention weights, which are appended to a list."""
    if isinstance(outputs, dict):
        rest = {}
        for name, part in outputs.items():
            if "attentions" in str(name):
                weights.extend(matrices(part))
            else:
                rest[name] = without_weights(part, weights)
        return rest
    if isinstance(outputs, tuple | list):
        return tuple(without_weights(part, weights) for part in outputs)
    return outputs


def matrices(part: Any) -> Iterator[Any]:
    """Yield the tensors and matrices of nested tuples."""
    if isinstance(part, Tensor | attlas.AttentionMatrix):
        yield part
    elif isinstance(part, tuple | list):
        for inner in part:
            yield from matrices(inner)


def below(measured: Any) -> bool:
    return isinstance(measured, float) and measured <= TOLERANCE


def explained(
    kind: str, model: nn.Module, more: tuple[str, ...], weights_of_all: float, reference: str
) -> dict[str, Any]:
    """Return what else can be measured of a difference, and the reason of it, "" where there is none."""
    found: dict[str, Any] = {}
    given, text = inputs_for(model, True, more)
    ours, _ = watch(model, given, "attlas")
    try:
        found["to sdpa"] = distance(ours, watch(model, given, "sdpa")[0], text)
    except Exception as error:  # noqa: BLE001  # a family may refuse it
        found["to sdpa"] = f"{type(error).__name__}: {first_line(error)}"
    plain, text = inputs_for(model, False, more)
    wanted, their_weights = watch(model, plain, reference)
    outputs, weights = watch(model, plain, "attlas")
    blind = any(bool((A.lse == -torch.inf).any()) for A in weights)
    found["without padding"] = distance(outputs, wanted, text)
    if their_weights:
        found["without padding"] = max(found["without padding"], weight_distance(weights, their_weights, None)[0])
    model.double()
    exact = {name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in plain.items()}
    torch.set_default_dtype(torch.float64)
    try:
        wanted, their_weights = watch(model, exact, reference)
        outputs, weights = watch(model, exact, "attlas")
        found["in float64"] = distance(outputs, wanted, text)
        if their_weights:
            found["in float64"] = max(found["in float64"], weight_distance(weights, their_weights, None)[0])
    except Exception as error:  # noqa: BLE001  # as above
        found["in float64"] = f"{type(error).__name__}: {first_line(error)}"
    finally:
        torch.set_default_dtype(torch.float32)
    reason = REASONS.get(kind, "")
    if reason:
        return found | {"reason": reason}
    if below(found["without padding"]) and (below(found["to sdpa"]) or below(weights_of_all)):
        reason = "an output is taken from a row of padding, which sees no key: eager gives it uniform weights over all"
        reason += " keys, sdpa and attlas none; every weight of a row that sees a key is equal, and all without padding"
    elif below(found["to sdpa"]) and blind:
        reason = "rows that see no key, even without padding: eager gives them uniform weights over all keys, sdpa and"
        reason += " attlas none, and later layers see what comes of it; equal to sdpa"
    elif isinstance(found["in float64"], float) and found["in float64"] < 1e-9:
        reason = "rounding: equal in float64"
    return found | {"reason": reason}


def why_none(model: nn.Module) -> str:
    """Say what a model has in place of the interface."""
    alone = {type(model.get_submodule(name)).__name__ for name in modules_without_interface(model)}
    names = sorted(alone or {type(m).__name__ for m in model.modules() if OWN_NAMES.search(type(m).__name__)})
    return f"attention of its own: {', '.join(names[:3])}" if names else NO_ATTENTION


def work(kind: str, answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        answer.send(compare(kind))
    except BaseException as error:  # noqa: BLE001  # the row must say what happened
        answer.send({"state": "failed on attlas", "reason": f"{type(error).__name__}: {first_line(error)}"})


def one(kind: str) -> dict[str, Any]:
    """Compare one type in a process of its own."""
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=work, args=(kind, there))
    start = time.perf_counter()
    process.start()
    there.close()
    try:
        row = here.recv() if here.poll(SECONDS) else {"state": "not built", "reason": f"more than {SECONDS} s"}
    except EOFError:
        process.join()
        row = {"state": "not built", "reason": f"the process ended with {process.exitcode}"}
    process.kill()
    process.join()
    return {"type": kind, **row, "seconds": round(time.perf_counter() - start, 1), "commit": COMMIT}


def commit() -> str:
    """Return the commit that is checked out."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=9", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


COMMIT = commit()
VERDICTS = {
    "equal": "equal",
    "explained": "explained",
    "no attention": "no attention",
    "different": "explained",
    "failed on attlas": "fails on attlas",
    "part": "compared within another type",
    "no model": "no model of its own",
    "not run on eager": "does not run in eager either",
    "not built": "does not run in eager either",
    "library missing": "needs a library that has no wheel",
}

HEAD = """# Every model type of transformers on attlas

transformers {version}, {types} model types. Each is built small and random, and run on eager and on attlas with texts
padded on the left; `benchmarks/sweep.py` says how. *outputs*: largest difference at places of text, relative to the
largest number; *weights*: largest difference of a weight in rows that see a key, over *compared* of all *calls*;
*gradients*: largest difference of a parameter's gradient, relative to the largest one of that parameter, in {gradients}
rows; it is empty where no gradients were compared; *commit*: that of attlas in the run that the row is from (rows of
63bf7a17b are on 40 tokens, and without gradients; all others are on at least 64 tokens, patches or steps where the
type takes so many); *keys*: the fewest keys that the last query of the unpadded text sees in a call, of all; a window,
a chunk or a choice hides the others. Types that write their attention out by hand run in a block of `attlas.lazily`,
and *calls* are the attentions that ``record(model, handwritten=True)`` finds.

"""


def number(measured: Any) -> str:
    """Return the cell of a measured number, or of what stands in its place."""
    return f"{measured:.0e}" if isinstance(measured, float) else str(measured or "")[:40]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a page of Markdown."""
    counts = Counter(row["state"] for row in rows)
    verdicts = Counter(VERDICTS.get(row["state"], row["state"]) for row in rows)
    lines = ["| verdict | types |", "| --- | --- |", *(f"| {name} | {n} |" for name, n in verdicts.most_common()), ""]
    lines += ["| state | types |", "| --- | --- |", *(f"| {state} | {n} |" for state, n in counts.most_common()), ""]
    lines += [
        "| type | class | state | calls | compared | keys | outputs | weights | gradients | commit | reason |",
        "| --- " * 11 + "|",
    ]
    for row in sorted(rows, key=lambda row: (-counts[row["state"]], row["state"], row["type"])):
        numbers = [number(row.get(name)) for name in ("outputs", "weights", "gradients")]
        reason = row.get("reason", "").replace("|", "/").replace("\n", " ")
        cells = [row["type"], row.get("class", ""), row["state"]]
        cells += [row.get(name, "") for name in ("calls", "compared", "keys")]
        lines.append("| " + " | ".join(map(str, [*cells, *numbers, row.get("commit", ""), reason])) + " |")
    head = HEAD.format(
        version=transformers.__version__,
        types=len(rows),
        gradients=sum(isinstance(row.get("gradients"), float) for row in rows),
    )
    return head + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="types, divided by commas")
    parser.add_argument("--update", action="store_true", help="with --only: put these rows into the last results")
    parser.add_argument(
        "--journal", type=Path, help="a file of rows: each is appended, and types in it are not run again"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "sweep.md")
    options = parser.parse_args()
    kinds = options.only.split(",") if options.only else sorted(configuration_auto.CONFIG_MAPPING_NAMES)
    rows = []
    if options.journal and options.journal.exists():
        rows = [json.loads(line) for line in options.journal.read_text(encoding="utf-8").splitlines()]
        rows = list({row["type"]: row for row in rows if row["type"] in kinds}.values())
    known = {row["type"] for row in rows}
    for kind in kinds:
        if kind in known:
            continue
        rows.append(one(kind))
        print(json.dumps(rows[-1]), flush=True)
        if options.journal:
            with options.journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(Counter(row["state"] for row in rows))
    if options.only and options.update:
        last = json.loads((RESULTS / "sweep.json").read_text(encoding="utf-8"))["results"]
        done = {row["type"] for row in rows}
        last = [{k: float(v) if v == "inf" else v for k, v in row.items()} for row in last if row["type"] not in done]
        rows = sorted([*last, *rows], key=lambda row: row["type"])
    if not options.only or options.update:
        # JSON has no infinity.
        save("sweep", [{k: "inf" if v == float("inf") else v for k, v in row.items()} for row in rows])
        # The section about layers of linear attention is that of linear_layers.py.
        before = options.out.read_text(encoding="utf-8") if options.out.exists() else ""
        _, mark, section = before.partition(LINEAR)
        options.out.write_text(table(rows) + (f"\n{mark}{section}" if mark else ""), encoding="utf-8")
    equal = sum(row["state"] == "equal" for row in rows)
    if not options.only and equal < LEAST_EQUAL:
        sys.exit(f"{equal} types are equal, {LEAST_EQUAL} were")
    unexplained = [
        row["type"]
        for row in rows
        if row["state"] == "failed on attlas" or (row["state"] == "different" and not row["reason"])
    ]
    if unexplained:
        sys.exit(f"differences without a reason: {', '.join(unexplained)}")


if __name__ == "__main__":
    main()
