"""Hears layers of linear attention: what they hand to the functions that compute them, in files of transformers."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from attlas.foundation.compat import in_backward

_EPSILON = 1e-6  # added to the squared norm of queries and keys, as the functions do


class LinearCall(NamedTuple):
    """What a layer of linear attention computes in one call.

    Parameters
    ----------
    tokens : dict of str to Tensor
        Queries, keys and gates with axes (batch, own heads, n, ...), by the names of the arguments of
        `attlas.transport`.
    scale : float
        Factor of the queries.
    values : Tensor, shape (batch, heads, n, e)
        What the matrix is multiplied with.
    before, after : Tensor, optional
        The state that the call began with, and the one that it ended with; None where there was none, or none was kept.
    begins : bool
        Whether there was no token before those of this call.
    """

    tokens: dict[str, Tensor]
    scale: float
    values: Tensor
    before: Tensor | None
    after: Tensor | None
    begins: bool


# Hears of each call.
Tell: TypeAlias = Callable[[LinearCall], None]


def _heads_first(t: Tensor) -> Tensor:
    """Return (batch, n, heads, ...) as (batch, heads, n, ...)."""
    return t.transpose(1, 2)


def _is_empty(state: Tensor | None) -> bool:
    """Return whether no token was written into a state yet."""
    return state is None or not bool(state.any())


def _unit(t: Tensor) -> Tensor:
    return t * torch.rsqrt((t * t).sum(-1, keepdim=True) + _EPSILON)


def _delta_rule(given: dict[str, Any], result: Any, before: Tensor | None) -> LinearCall:
    """Read a call of a gated delta rule, whose decay is one number a token, or one for each channel (KDA)."""
    q, k, v = (_heads_first(given[name]) for name in ("query", "key", "value"))
    decay, beta = _heads_first(given["g"]), _heads_first(given["beta"])
    if decay.ndim == 4:  # of each channel: these functions take norms of float32 numbers
        q, k = q.float(), k.float()
    if given.get("use_qk_l2norm_in_kernel"):
        q, k = _unit(q), _unit(k)
    tokens = {"q": q, "k": k, "decay": decay, "write": beta, "erase": beta}
    state = given.get("initial_state")
    return LinearCall(tokens, float(q.shape[-1]) ** -0.5, v, state, result[1], begins=_is_empty(state))


def _scan(given: dict[str, Any], result: Any, before: Tensor | None) -> LinearCall:
    """Read a call of the scan of Mamba-2: keys are B, queries C, and each token has a step width dt."""
    low, high = given.get("dt_limit", (0.0, float("inf")))
    widths = _widths(given["dt"], given).clamp(low, high)
    x, B, C, dt = (_heads_first(t) for t in (given["hidden_states"], given["B"], given["C"], widths))
    state = given.get("initial_states")
    after = result[1] if isinstance(result, tuple) else None
    return _of_scan(x, B, C, dt, given["A"], given.get("D"), state, after, begins=_is_empty(state))


def _scan_step(given: dict[str, Any], result: Any, before: Tensor | None) -> LinearCall:
    """Read a call for one token of Mamba-2, which changes its state in place."""
    widths = _widths(given["dt"], given)[..., 0]
    x, B, C, dt = (t.unsqueeze(2) for t in (given["hidden_states"], given["B"], given["C"], widths))
    D = given.get("D")
    D = D if D is None or D.ndim == 1 else D[:, 0]
    return _of_scan(x, B, C, dt, given["A"][:, 0, 0], D, before, given["state"].clone(), begins=_is_empty(before))


def _widths(dt: Tensor, given: dict[str, Any]) -> Tensor:
    bias = given.get("dt_bias")
    dt = dt if bias is None else dt + bias
    return functional.softplus(dt) if given.get("dt_softplus") else dt


def _of_scan(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor | None,
    before: Tensor | None,
    after: Tensor | None,
    *,
    begins: bool,
) -> LinearCall:
    tokens = {"q": C, "k": B, "decay": dt * A.reshape(-1, 1), "write": dt}
    if D is not None:
        tokens["diagonal"] = D.reshape(1, -1, 1).expand(len(x), -1, x.shape[2])
    return LinearCall(tokens, 1.0, x, before, after, begins)


# By the name that a file of a model has for it: what reads a call. Each file has the same few functions.
_FUNCTIONS: dict[str, Callable[[dict[str, Any], Any, Tensor | None], LinearCall]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba2_selective_state_update": _scan_step,
}


class _Replaced:
    """A function of a file in which calls are told of, for as long as anybody listens."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.users = 0


_lock = threading.Lock()
_replaced: dict[tuple[str, str], _Replaced] = {}


def linear_functions(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[ModuleType, str]]:
    """Return the functions of linear attention that the files of the classes of some modules have."""
    files = {sys.modules.get(type(module).__module__) for _, module in modules}
    found = []
    for file in files:
        for name in _FUNCTIONS if file is not None else ():
            if name in vars(file):
                found.append((file, name))
    return found  # type: ignore[return-value]  # none of them is None


@contextmanager
def telling_of_linear_calls(functions: Sequence[tuple[ModuleType, str]], tell: Tell) -> Iterator[None]:
    """Let the linear attention layers of a model tell of their calls, for the time of a ``with`` block.

    Parameters
    ----------
    functions : sequence of (module, str)
        What `linear_functions` found in the files of the model.
    tell : callable
        Called by each call in any thread; it must know which thread it listens to.
    """
    with _lock:
        for file, name in functions:
            key = file.__name__, name
            if key not in _replaced:
                original = getattr(file, name)
                _replaced[key] = _Replaced(original)
                setattr(file, name, _told(original, _FUNCTIONS[name]))
            _replaced[key].users += 1
        _tellers.append(tell)
    try:
        yield
    finally:
        with _lock:
            _tellers.remove(tell)
            for file, name in functions:
                entry = _replaced[file.__name__, name]
                entry.users -= 1
                if not entry.users:
                    setattr(file, name, entry.original)
                    del _replaced[file.__name__, name]


_tellers: list[Tell] = []


def _told(original: Any, read: Callable[[dict[str, Any], Any, Tensor | None], LinearCall]) -> Any:
    """Return a function that computes what the original does, and tells of it."""

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or in_backward():
            return original(*args, **kwargs)
        given = _bound(original, args, kwargs)
        state = given.get("state")
        before = None if state is None else state.clone()  # it is changed in place
        result = original(*args, **kwargs)
        with torch.no_grad():
            call = read(given, result, before)
            for tell in tuple(_tellers):
                tell(call)
        return result

    return run


def _bound(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names, those that the function takes by any name among them."""
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    found = dict(bound.arguments)
    return {**found.pop("kwargs", {}), **found}


@cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(inspect.unwrap(function))
