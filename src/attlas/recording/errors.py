"""Errors and warnings of a recording: attentions that ran and could not be recorded, and how to record them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from attlas.errors import RecordingError, RecordingWarning, listed
from attlas.foundation.compat import ATTENTION
from attlas.recording.discovery import INTERFACE, SDPA, AttentionSite, ModelAttentions, mentions

_ASSIGNMENT_IN_FIX = {"record()": " as atlas", "intervene()": ""}
_CALL_IN_FIX = {"record()": "attlas.record(model", "intervene()": "attlas.intervene(model, interventions"}
_EAGER_FIX = (
    'read its weights with attn_implementation="eager" and output_attentions=True, where the model has that, or '
)
# What attlas computes is heard without more.
_OWN_CALL_FIX = "let the module compute with attlas.attention(q, k, v), which needs nothing else"


def no_attention(
    model: nn.Module,
    attentions: ModelAttentions,
    ran: set[str],
    passes: int,
    *,
    patched: bool,
    where: str,
    lazy: bool = False,
) -> RecordingError:
    """Return the error of a block in which no attention was heard of.

    `ran` has the paths of attentions that ran, `passes` is the number of calls of the model; `patched` says whether
    calls of torch's function were heard, `lazy` whether attention written out by hand was.
    """
    arguments = {"model": type(model).__name__}
    if not passes and not ran:
        found = "no call of the model, and no attention"
        fix = f"with {_CALL_IN_FIX[where]}){_ASSIGNMENT_IN_FIX[where]}: model(ids), the same model, in the same thread."
        return RecordingError("the model must run inside the block.", found, fix, arguments=arguments, where=where)
    unrecorded = attentions.unrecorded(ran, ())
    if attentions.of_channels and where == "record()":
        names = listed(name.rpartition(".")[2] for _, name in attentions.of_channels)
        rule = "layers with one matrix for each channel are recorded for chosen channels, and this model has no other."
        return RecordingError(rule, names, "attlas.record(model, channels=[0, 1])", arguments=arguments, where=where)
    found = _first_in_words(unrecorded) if unrecorded else "no module that is called an attention"
    done = "recorded" if where == "record()" else "changed"
    rule = f"an attention that computes its weights by itself cannot be {done}, and this model has no other."
    return RecordingError(
        rule, found, _fix_for(unrecorded, where, patched=patched, lazy=lazy), arguments=arguments, where=where
    )


def some_unrecorded(
    unrecorded: Sequence[tuple[str, nn.Module]], where: str, *, patched: bool, lazy: bool = False
) -> RecordingWarning:
    """Return the warning about attentions that ran and were not heard of."""
    done = "are not in the atlas" if where == "record()" else "were not changed"
    rule = f"some attentions of the model computed their weights by themselves, and {done}."
    error = RecordingError(
        rule, _first_in_words(unrecorded), _fix_for(unrecorded, where, patched=patched, lazy=lazy), where=where
    )
    return RecordingWarning(error)


def _first_in_words(unrecorded: Sequence[tuple[str, nn.Module]]) -> str:
    """Return classes and paths of the first attentions in words."""
    return listed((f"{type(module).__name__} at {path or 'the model itself'}" for path, module in unrecorded), most=4)


def _fix_for(unrecorded: Sequence[tuple[str, nn.Module]], where: str, *, patched: bool, lazy: bool) -> str:
    """Return the fix of an error: how these attentions can be recorded or changed."""
    patch = f"{_CALL_IN_FIX[where]}, patch_sdpa=True)"
    modules = [module for _, module in unrecorded]
    torch_layers = any(isinstance(m, nn.MultiheadAttention) for m in modules)
    callers = [m for m in modules if mentions(m, SDPA) or any(mentions(c, SDPA) for c in type(m).__subclasses__())]
    if any(type(m).__module__.startswith("transformers.") for m in callers):
        # Falcon and SAM have their own code for "eager", which cannot be recorded.
        return f'load the model with attn_implementation="sdpa", then {patch}'
    if not patched and (torch_layers or any(mentions(m, SDPA) for m in callers)):
        return patch
    interface = [getattr(m, "config", None) for m in modules if mentions(m, INTERFACE)]
    if any(getattr(config, ATTENTION, None) != "attlas" for config in interface):
        return 'model.set_attn_implementation("attlas") on the model that holds it, after import attlas.huggingface.'
    if where == "record()" and modules and not lazy and any(mentions(m, "softmax") for m in modules):
        return (
            f"{_CALL_IN_FIX[where]}, handwritten=True), which hears attention that is written out by hand; "
            f"or {_OWN_CALL_FIX}."
        )
    if not modules:
        first = "" if patched else f"{patch}, if it calls scaled_dot_product_attention; or "
        return f"{first}{_OWN_CALL_FIX}. State-space, linear and convolutional layers have no attention weights."
    return f"{_EAGER_FIX}{_OWN_CALL_FIX}."


def no_query_recorded(queries: slice | range | None) -> RecordingError:
    """Return the error of a recording whose queries were never reached."""
    found, fix = f"queries = {queries!r}, and no call had such a query", "queries=slice(-32, None) for the last 32."
    return RecordingError("the queries must lie within the text.", found, fix, where="record()")


def no_layer_attended(named: Sequence[int | str], heard: Sequence[str]) -> RecordingError:
    """Return the error of chosen layers whose modules may attend, and did not."""
    rule, found = "a chosen layer must attend when the model runs.", f"layers={list(named)}: none of them did"
    attended = {"these attended": listed(heard)}
    return RecordingError(rule, found, f"layers=[{heard[-1]!r}]", arguments=attended)


def inside_transform(module: nn.Module) -> RecordingError:
    """Return the error of an attention whose tensors are stand-ins, which hold nothing after the call."""
    rule = "what is recorded must have numbers of its own."
    found, fix = "a transform of torch.func, such as vmap or grad", "record a plain call of the model, model(ids)."
    return RecordingError(rule, found, fix, module=type(module).__name__, where="record()")


def layer_number_changed(site: AttentionSite, attentions: ModelAttentions) -> RecordingError:
    """Return the error of a layer whose number changed when an attention before or after it was found."""
    rule = "the number of a layer must be known when the layer runs."
    found = f"{site.path or 'the model itself'} is {site.key} of {attentions.counts[site.kind]} only since others ran"
    return RecordingError(rule, found, f"name modules: layers=[{site.path!r}].", modules=listed(attentions.sites))


def negative_layer_of_reused_module(site: AttentionSite) -> RecordingError:
    """Return the error of a layer counted from the end, where the number of layers is not known in advance."""
    rule = "layers that share a module are known one by one as they run, so there is no last one to count from."
    found = "a negative layer, and a module that is used again in one pass"
    return RecordingError(rule, found, "layers=[0, 1], counted from the first.", module=site.path)


def part_of_heads(folder: Path) -> RecordingError:
    """Return an error about a folder that would get the heads of one process, and look complete."""
    fix = 'keep="disk" without a folder, then attlas.distributed.save(atlas, folder, mesh, [Shard(1)]).'
    found = f"folder = {str(folder)!r}"
    return RecordingError("a folder must get the heads of all ranks.", found, fix, where="record()")
