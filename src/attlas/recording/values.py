"""The values of a recorded attention, and the norms by which its weights can be weighted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from attlas.errors import RecordingError
from attlas.foundation.devices import to_device
from attlas.matrix.value_weighted import norms_of

# Names of the last linear map of an attention: in the module itself, then beside it (BERT).
_PROJECTIONS_INSIDE = (
    "o_proj",
    "out_proj",
    "c_proj",
    "dense",
    "wo",
    "o",
    "proj",
    "out_lin",
    "out",
    "o_attn",
    "linear_out",
    "Wo",
)
_PROJECTIONS_BESIDE = ("output.dense",)


def kept_values(
    model: nn.Module, path: str, values: Tensor, heads: Sequence[int], count: int, keys: slice, *, whole: bool
) -> dict[str, Tensor]:
    """Return the values of some keys, where they are kept, and their norms, by the names of the fields of `Entry`.

    Parameters
    ----------
    model : nn.Module
        The model.
    path : str
        Path of the attention in it.
    values : Tensor, shape (batch, value heads, n, e)
        The values.
    heads : sequence of int
        The query heads that are recorded.
    count : int
        Number of query heads of the layer.
    keys : slice
        The keys whose values are meant.
    whole : bool
        Whether the values themselves are kept, and not only their norms.
    """
    values, group = values[:, :, keys], count // values.shape[1]
    own = values if len(heads) == count else _select_places(values, [head // group for head in heads], axis=1)
    kept = {"values": own} if whole else {}
    kept["value_norms"] = norms_of(own)
    weight = _output_projection(model, path, count * values.shape[-1])
    return kept if weight is None else kept | {"output_norms": _output_norms(values, weight, heads, count)}


def values_of_call(
    model: nn.Module,
    path: str,
    module: str,
    values: Tensor | None,
    heads: tuple[int, ...],
    count: int,
    here: range,
    *,
    whole: bool,
) -> Callable[[slice], dict[str, Tensor]]:
    """Return `kept_values` of one call as a function of the keys; raise where values or heads are missing."""
    if values is None or len(here) < count:
        rule = "values=True needs the values of every recorded attention, all heads in one process."
        found = f"none from {path}" if values is None else f"heads {here.start} to {here.stop - 1} of {count}"
        fix = "attlas.recording.pooled(module, A, v) in that module." if values is None else "values=False"
        raise RecordingError(rule, found, fix, where="record()")
    return partial(kept_values, model, module, values, heads, count, whole=whole)


def output_projection(model: nn.Module, path: str) -> nn.Module | None:
    """Return the linear map behind an attention; None where none is known."""
    module, parent = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    # A layer without parameters leaves its projections to the module around it.
    beside = (
        _PROJECTIONS_BESIDE if any(True for _ in module.parameters()) else _PROJECTIONS_BESIDE + _PROJECTIONS_INSIDE
    )
    for owner, names in ((module, _PROJECTIONS_INSIDE), (parent, beside)):
        for name in names:
            if _weight_of_linear(owner, name) is not None:
                return owner.get_submodule(name)
    return None


def output_map(model: nn.Module, path: str, size: int) -> tuple[Tensor, Tensor | None] | None:
    """Return the linear map behind an attention by heads, shape (heads, size, out), and its bias; None if not known.

    Parameters
    ----------
    model : nn.Module
        The model.
    path : str
        Path of the attention in it, as `Entry.name` has it.
    size : int
        Size of a value.
    """
    try:
        module = output_projection(model, path.partition("#")[0])
    except AttributeError:  # another model
        return None
    weight = None if module is None else _weight_of_linear(module, "")
    if weight is None or weight.shape[1] % size:
        return None
    bias = getattr(module, "bias", None)
    return weight.unflatten(1, (-1, size)).permute(1, 2, 0), bias.detach() if isinstance(bias, Tensor) else None


def _select_places(t: Tensor, places: Sequence[int], axis: int) -> Tensor:
    """Select some indices along an axis, without waiting for a device."""
    return t.index_select(axis, to_device(torch.tensor(places, device="cpu"), t.device))


def _output_projection(model: nn.Module, path: str, width: int) -> Tensor | None:
    """Return the weight of the linear map behind an attention, shape (out, width); None where none is known.

    Parameters
    ----------
    model : nn.Module
        The model.
    path : str
        Path of the attention in it.
    width : int
        Number of query heads times the size of a value: the map must take as many numbers.
    """
    module = model.get_submodule(path)
    parent = model.get_submodule(path.rpartition(".")[0])
    for owner, names in ((module, _PROJECTIONS_INSIDE), (parent, _PROJECTIONS_BESIDE)):
        for name in names:
            weight = _weight_of_linear(owner, name)
            if weight is not None and weight.shape[1] == width:
                return weight
    return None


def _weight_of_linear(owner: nn.Module, name: str) -> Tensor | None:
    """Return the weight of a linear map as (out, in); None where there is none, or it is quantised."""
    try:
        part = owner.get_submodule(name)
    except AttributeError:
        return None
    weight = getattr(part, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    # Conv1D of transformers (GPT-2) keeps the transpose.
    return weight.detach().mT if type(part).__name__ == "Conv1D" else weight.detach()


def _output_norms(values: Tensor, weight: Tensor, heads: Sequence[int], count: int) -> Tensor:
    """Return the norm of what each value adds to the output through each head, shape (batch, heads, n), float32.

    Parameters
    ----------
    values : Tensor, shape (batch, value heads, n, e)
        The values of the layer.
    weight : Tensor, shape (out, query heads * e)
        The linear map behind the attention.
    heads : sequence of int
        The query heads that are recorded.
    count : int
        Number of query heads of the layer.

    Notes
    -----
    With the factor R of ``weight_h = Q R``, ``‖weight_h v‖ = ‖R v‖``: e² instead of ``out * e`` products per key.
    """
    size, group = values.shape[-1], count // values.shape[1]
    factors = _select_places(weight.unflatten(1, (count, size)).transpose(0, 1), heads, axis=0).float()
    if values.shape[2] > size:
        factors = torch.linalg.qr(factors, mode="r").R
    found = [norms_of(values[:, head // group].float() @ factors[at].mT) for at, head in enumerate(heads)]
    return torch.stack(found, dim=1)
