"""The models of a pipeline of diffusers that make a picture or a film, and sums of statistics over their steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from attlas.errors import RecordingError
from attlas.foundation.trees import tensors_in
from attlas.recording.atlas import Entry

# Names by which pipelines of diffusers hold the models that run at each step. Wan 2.2 has two transformers.
_DENOISER_NAMES = ("unet", "transformer", "transformer_2", "prior", "decoder")


def denoiser_of(pipe: Any) -> nn.Module | None:
    """Return the model of a pipeline that runs at each step; of several, all in one; None where there is none.

    Parameters
    ----------
    pipe : Any
        A pipeline of diffusers: an object with `components`, a mapping of names to models and others.
    """
    components = getattr(pipe, "components", None)
    if not isinstance(components, Mapping):
        return None
    found = {name: model for name in _DENOISER_NAMES if isinstance(model := components.get(name), nn.Module)}
    return nn.ModuleDict(found) if len(found) > 1 else next(iter(found.values()), None)


class SummedEntries:
    """Adds the statistics of later passes of an attention to those of the first passes.

    Parameters
    ----------
    entries : list of Entry
        Where the sums are kept.
    count : int
        How many passes of each attention are kept; pass i is added to pass ``i % count``.
    """

    def __init__(self, entries: list[Entry], count: int) -> None:
        self._entries, self._count = entries, count
        self._places: dict[tuple[str, int, int], int] = {}

    def append(self, entry: Entry) -> None:
        """Add one pass."""
        for name, result in entry.statistics.items():
            if not isinstance(result, Tensor) or not result.is_floating_point():
                rule = "statistics that are summed over passes must be tensors of floats, such as masses and maps."
                raise RecordingError(rule, name, "statistics=[stats.KeyMaps([2, 5])]", where="record()")
        key = (entry.name, entry.layer, entry.call % self._count)
        if key not in self._places:
            self._places[key] = len(self._entries)
            self._entries.append(replace(entry, call=key[2]))
            return
        so_far = self._entries[self._places[key]]
        sizes = [[t.shape for t in tensors_in(one.statistics)] for one in (so_far, entry)]
        if so_far.shape != entry.shape or sizes[0] != sizes[1]:
            rule = "passes that are summed must have the same sizes."
            found = f"{so_far.shape} in pass {so_far.call}, {entry.shape} in pass {entry.call}"
            raise RecordingError(rule, found, "sum_passes=0", where="record()", entry=entry.name)
        sums = {name: so_far.statistics[name] + result for name, result in entry.statistics.items()}
        self._entries[self._places[key]] = replace(so_far, statistics=sums)
