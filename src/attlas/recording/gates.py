"""The output gates of recorded attentions, measured: what enters the output projection over what the heads computed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from attlas.matrix import observers
from attlas.recording.atlas import Entry
from attlas.recording.discovery import AttentionSite
from attlas.recording.values import output_projection

# How far an output may be from its gate times what the heads computed, relative to the largest: by bytes of a number.
_GATE_TOLERANCE = {2: 3e-2, 4: 2e-5, 8: 1e-10}


class GateRecorder:
    """What enters the output projections of a model, pass by pass.

    Parameters
    ----------
    model : nn.Module
        The model.
    sites : iterable of AttentionSite
        Its attentions.
    device : torch.device, optional
        Where it is kept.
    """

    def __init__(self, model: nn.Module, sites: Iterable[AttentionSite], device: torch.device | None) -> None:
        self._model, self._device = model, device
        self._paths: dict[int, str] = {}
        self._known: set[str] = set()  # paths of the attentions whose projection was looked for
        self._inputs: dict[str, list[Tensor]] = {}
        self.modules = [module for site in sites for module in self.add(site)]

    def add(self, site: AttentionSite) -> list[nn.Module]:
        """Return the output projection of an attention, if there is one that was not known before."""
        if site.path in self._known:
            return []
        self._known.add(site.path)
        module = output_projection(self._model, site.module)
        if module is None or id(module) in self._paths:
            return []
        self._paths[id(module)] = site.path
        return [module]

    def hear(self, module: nn.Module, x: Tensor) -> None:
        """Keep a copy of the input of an output projection, shape (batch, m, heads * e)."""
        x = x.detach()
        x = x.clone() if self._device is None else x.to(self._device, copy=True)
        self._inputs.setdefault(self._paths[id(module)], []).append(x)

    @torch.no_grad()
    def completed(self, entries: list[Entry]) -> list[Entry]:
        """Return the entries with their gates: those of one attention have read the calls one after the other."""
        calls = {path: list(inputs) for path, inputs in self._inputs.items()}
        return [self._entry_with_gates(entry, calls.get(entry.name, [])) for entry in entries]

    def _entry_with_gates(self, entry: Entry, calls: list[Tensor]) -> Entry:
        """Return an entry with its gates, and take its calls from the list; as it is where they do not fit.

        `calls` are inputs of the output projection, (batch, tokens, heads * e); a gate g is that in ``x = g (A @ v)``.
        """
        batch, _, m, _ = entry.shape
        own: list[Tensor] = []
        while calls and sum(x.shape[1] for x in own) < m and calls[0].ndim == 3 and len(calls[0]) == batch:
            own.append(calls.pop(0))
        if entry.matrix is None or entry.values is None or sum(x.shape[1] for x in own) != m:
            return entry
        x, size = torch.cat(own, dim=1), entry.values.shape[-1]
        count = x.shape[-1] // size
        if x.shape[-1] % size or max(entry.heads) >= count:
            return entry
        x = x.unflatten(-1, (count, size)).transpose(1, 2)[:, list(entry.heads)]
        with observers.unheard():
            return replace(entry, gates=_gate_of_rows(x, entry.matrix @ entry.values))


def _gate_of_rows(x: Tensor, out: Tensor) -> Tensor:
    """Return the gate of each row and head, ``x = gate * out``, shape (batch, heads, m).

    NaN where it is not one factor.
    """
    tolerance = _GATE_TOLERANCE[x.dtype.itemsize]
    x, out = x.float(), out.float()
    size = out.square().sum(-1)
    gates = torch.where(size > 0, (x * out).sum(-1) / torch.where(size > 0, size, 1.0), 0.0)
    error = (x - gates.unsqueeze(-1) * out).abs().amax()
    return gates if bool(error <= tolerance * x.abs().amax()) else torch.full_like(gates, math.nan)
