"""What layers of linear attention compute: a call of a function of transformers, read as queries, keys and gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from attlas.errors import ShapeError
from attlas.foundation.compat import LIGHTNING, RNN_SCAN
from attlas.masks import Causal
from attlas.matrix import AttentionMatrix
from attlas.matrix.attend import attend
from attlas.matrix.kinds.combination import Combination
from attlas.matrix.transport.function import transport
from attlas.matrix.transport.weights import TransportWeights
from attlas.scores import Alibi, RelativeBias, ScaledDot

_NORM_EPSILON = 1e-6  # added to the squared norm of queries and keys, as the functions do


class LinearCall(NamedTuple):
    """What a layer of linear attention computes in one call.

    Parameters
    ----------
    tokens : dict of str to Tensor
        Queries, keys and gates with axes (batch, own heads, n, ...), and (heads,) for what no token changes, by the
        names of the arguments of `matrix`.
    scale : float
        Factor of the queries.
    values : Tensor, shape (batch, heads, n, e)
        What the matrix is multiplied with.
    before, after : Tensor, optional
        The state that the call began with, and the one that it ended with; None where there was none, or none was kept.
    begins : bool
        Whether there was no token before those of this call.
    channels : int, optional
        Where each channel has a matrix of its own: how many there are. `values` has all of them, `tokens` none.
    choose : callable, optional
        From the places of some of these channels to their `tokens`.
    matrix : callable
        What makes the matrix of the tokens and the scale.
    """

    tokens: dict[str, Tensor]
    scale: float
    values: Tensor
    before: Tensor | None
    after: Tensor | None
    begins: bool
    channels: int | None = None
    choose: Callable[[Tensor], dict[str, Tensor]] | None = None
    matrix: Callable[..., AttentionMatrix] = transport


def read_matrix(matrix: AttentionMatrix, values: Tensor) -> LinearCall:
    """Return what a module computes that multiplies values with a matrix which is no softmax.

    The tokens are those of `attlas.transport`, with the factor of each row where the rows have one. Of other kinds
    there are none, and the call has the matrix itself.
    """
    weights, found = matrix.weights, LinearCall({}, 1.0, values, None, None, begins=True)
    factor: Any = 1.0
    if isinstance(weights, Combination) and len(weights.terms) == 1 and not weights.terms[0].transposed:
        factor, weights, _ = weights.terms[0]
    of_rows = {"factor": factor} if isinstance(factor, Tensor) and factor.shape[3] == 1 else {}
    if not isinstance(weights, TransportWeights) or not (of_rows or factor == 1.0):
        kept = AttentionMatrix(matrix.weights)
        return found._replace(matrix=lambda scale: kept)
    n = weights.tokens.n
    if (weights.rows, weights.columns) != (range(n), range(n)):
        rule = "a linear attention layer must be recorded with all of its tokens."
        shape = tuple(matrix.weights.shape)
        raise ShapeError(rule, f"a window of {n} tokens", "pooled(self, A, v) of the whole matrix", A=f"shape {shape}")
    return found._replace(tokens=weights.tokens.tensors | of_rows, scale=weights.tokens.scale, matrix=_matrix_of_tokens)


def _matrix_of_tokens(
    p: Tensor | None = None, r: Tensor | None = None, factor: Tensor | None = None, **tokens: Any
) -> AttentionMatrix:
    """Return the matrix of the tokens that `read_matrix` gives."""
    whole: Any = transport(**tokens | ({} if p is None else {"erase": (p, r)}))
    made: AttentionMatrix = whole if factor is None else whole * factor
    return made


def _heads_first(t: Tensor) -> Tensor:
    """Return (batch, n, heads, ...) as (batch, heads, n, ...)."""
    return t.transpose(1, 2)


def _is_empty_state(state: Tensor | None) -> bool:
    """Return whether no token was written into a state yet."""
    return state is None or not bool(state.any())


def _unit_vectors(t: Tensor) -> Tensor:
    """Return vectors divided by their Euclidean norm."""
    return t * torch.rsqrt((t * t).sum(-1, keepdim=True) + _NORM_EPSILON)


def _delta_rule(args: dict[str, Any], result: Any, before: Tensor | None) -> LinearCall:
    """Read a call of a gated delta rule, whose decay is one number a token, or one for each channel (KDA)."""
    q, k, v = (_heads_first(args[name]) for name in ("query", "key", "value"))
    decay, beta = _heads_first(args["g"]), _heads_first(args["beta"])
    if decay.ndim == 4:  # of each channel: these functions take norms of float32 numbers
        q, k = q.float(), k.float()
    if args.get("use_qk_l2norm_in_kernel"):
        q, k = _unit_vectors(q), _unit_vectors(k)
    tokens = {"q": q, "k": k, "decay": decay, "write": beta, "erase": beta}
    state = args.get("initial_state")
    return LinearCall(tokens, float(q.shape[-1]) ** -0.5, v, state, result[1], begins=_is_empty_state(state))


def _read_mamba2_scan(args: dict[str, Any], result: Any, before: Tensor | None) -> LinearCall:
    """Read a call of the scan of Mamba-2: keys are B, queries C, and each token has a step width dt."""
    low, high = args.get("dt_limit", (0.0, float("inf")))
    widths = _step_widths(args["dt"], args).clamp(low, high)
    x, B, C, dt = (_heads_first(t) for t in (args["hidden_states"], args["B"], args["C"], widths))
    state = args.get("initial_states")
    after = result[1] if isinstance(result, tuple) else None
    return _call_of_scan(x, B, C, dt, args["A"], args.get("D"), state, after, begins=_is_empty_state(state))


def _scan_step(args: dict[str, Any], result: Any, before: Tensor | None) -> LinearCall:
    """Read a call for one token of Mamba-2, which changes its state in place."""
    widths = _step_widths(args["dt"], args)[..., 0]
    x, B, C, dt = (t.unsqueeze(2) for t in (args["hidden_states"], args["B"], args["C"], widths))
    D = args.get("D")
    D = D if D is None or D.ndim == 1 else D[:, 0]
    return _call_of_scan(
        x, B, C, dt, args["A"][:, 0, 0], D, before, args["state"].clone(), begins=_is_empty_state(before)
    )


def _step_widths(dt: Tensor, args: dict[str, Any]) -> Tensor:
    """Return the step widths dt of a call: its bias added, and softplus applied, if it has them."""
    bias = args.get("dt_bias")
    dt = dt if bias is None else dt + bias
    return functional.softplus(dt) if args.get("dt_softplus") else dt


def _call_of_scan(
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
    """Return a call of Mamba-2 from its tensors, with tokens on the third axis; its decay is ``exp(dt A)``, one a head.

    `before` and `after` are its states, `begins` says whether no token came before these.
    """
    tokens = {"q": C, "k": B, "decay": dt * A.reshape(-1, 1), "write": dt}
    if D is not None:
        tokens["diagonal"] = D
    return LinearCall(tokens, 1.0, x, before, after, begins)


def _read_lightning(args: dict[str, Any], result: Any, before: Tensor | None) -> LinearCall:
    """Read a call of a layer of lightning attention, whose decay is one number a head."""
    layer, mask = args["self"], args["attention_mask"]
    x = layer.act_fn(args["heard"])
    x = x if mask is None else (x * mask.unsqueeze(-1)).to(x.dtype)
    x = x.reshape(*x.shape[:2], layer.num_attention_heads, -1)
    q, k, v = (_heads_first(t) for t in x.split(layer.head_dim, dim=-1))
    tokens = {"q": q, "k": k, "decay": -layer.slope_rate.reshape(-1)}
    return LinearCall(tokens, 1.0, v, before, result[1], begins=before is None)


def _lightning_state(args: dict[str, Any]) -> Tensor | None:
    """Return the state in the cache of the layer before the call; None without a cache."""
    cache = args.get("past_key_values")
    return None if cache is None else cache.get_linear_cache(args["self"].layer_idx)


def _copy_of_state(args: dict[str, Any]) -> Tensor | None:
    """Return a copy of a state that is changed in place."""
    state = args.get("state")
    return None if state is None else state.clone()


def _joined_states(args: dict[str, Any]) -> Tensor | None:
    """Return the parts of a state as one tensor."""
    parts = args.get("state")
    return None if parts is None else torch.stack([t.float() for t in parts])


def _selective_scan(args: dict[str, Any], result: Any, before: Tensor | None) -> LinearCall:
    """Read a call of the scan of Mamba-1: each channel has a decay for each number of its state."""
    x, dt, B, C = args["hidden_states"], args["dt"], args["B"].mT, args["C"].mT  # (batch, channels or size, n)
    after = result[1] if isinstance(result, tuple) else None
    return _call_of_channels(x, dt, args["A"], B, C, args.get("D"), "delta", args, None, after)  # it begins anew


def _selective_step(args: dict[str, Any], result: Any, before: Tensor | None) -> LinearCall:
    """Read a call for one token of Mamba-1, which changes its state in place."""
    x, dt = args["hidden_states"].unsqueeze(-1), args["dt"].unsqueeze(-1)
    B, C = args["B"].unsqueeze(1), args["C"].unsqueeze(1)
    return _call_of_channels(x, dt, args["A"], B, C, args.get("D"), "dt", args, before, args["state"].clone())


def _call_of_channels(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    name: str,
    args: dict[str, Any],
    before: Tensor | None,
    after: Tensor | None,
) -> LinearCall:
    """Return a call of Mamba-1, given (batch, channels, n) of values and step widths, (batch, n, size) of B and C.

    Its state: ``h_t = exp(w_t A) h_{t-1} + w_t B_t x_t``, its output ``C_t h_t + D x_t``. The step widths w are `dt`,
    plus a bias and through softplus where `args` has ``{name}_bias`` and ``{name}_softplus``.
    """
    bias, softplus = args.get(f"{name}_bias"), args.get(f"{name}_softplus")

    def choose(channels: Tensor) -> dict[str, Tensor]:
        """Return the tokens of some channels, as arguments of `transport`."""
        widths = dt[:, channels]
        widths = widths if bias is None else widths + bias[channels].to(widths.dtype).unsqueeze(-1)
        widths = functional.softplus(widths) if softplus else widths
        decay = widths.unsqueeze(-1) * A[channels].unsqueeze(1)
        tokens = {"q": C.unsqueeze(1), "k": B.unsqueeze(1), "decay": decay, "write": widths}
        return tokens if D is None else tokens | {"diagonal": D[channels]}

    return LinearCall({}, 1.0, x.unsqueeze(-1), before, after, _is_empty_state(before), x.shape[1], choose)


def _rnn_scan(args: dict[str, Any], result: Any, before: Tensor | None) -> LinearCall:
    """Read a call of RG-LRU, whose state has one number a channel."""
    x, reset = args["hidden_states"], args["reset"]
    gates = args["recurrent_gate"] * ~reset
    begins = _is_empty_state(before) or bool(reset[:, 0].all())

    def choose(channels: Tensor) -> dict[str, Tensor]:
        """Return the tokens of some channels, as arguments of `transport`."""
        decay = gates[..., channels].float().log().mT.unsqueeze(-1)
        one = torch.ones_like(decay[:, :1])
        return {"q": one, "k": one, "decay": decay}

    return LinearCall({}, 1.0, x.mT.unsqueeze(-1), before, result[1], begins, x.shape[-1], choose)


def _read_wkv(args: dict[str, Any], result: Any, before: Tensor | None) -> LinearCall:
    """Read a call of RWKV-4, which is a softmax over keys of one number, with a decay and a bonus for each channel."""
    key, after = args["key"], result[1]
    begins = before is None or not bool(before[1].any())  # the denominator

    def choose(channels: Tensor) -> dict[str, Tensor]:
        """Return keys, decays and bonuses of some channels, as arguments of `_wkv_matrix`."""
        rates, bonus = (args[name][channels].float() for name in ("time_decay", "time_first"))
        return {"k": key[..., channels].mT.unsqueeze(-1).float(), "slopes": rates.exp(), "bonus": bonus}

    after = None if after is None else torch.stack([t.float() for t in after])
    values = args["value"].mT.unsqueeze(-1)
    return LinearCall({}, 1.0, values, before, after, begins, key.shape[-1], choose, _wkv_matrix)


def _wkv_matrix(k: Tensor, slopes: Tensor, bonus: Tensor, scale: float) -> AttentionMatrix:
    """Return the weights of RWKV-4: logits ``k_j - (i - 1 - j) slope``, and ``k_i + bonus`` of a token with itself."""
    # A row is the same where all its logits are: here each is less by one slope.
    own = RelativeBias(len(slopes), max_distance=1, bidirectional=False).requires_grad_(False).to(k.device)
    own.weight.copy_(torch.stack([torch.zeros_like(bonus), bonus - slopes]))
    return attend(torch.ones_like(k), k, ScaledDot(scale) + Alibi(slopes) + own, Causal())


class Reader(NamedTuple):
    """How the calls of a function are read.

    Parameters
    ----------
    read : callable
        From the arguments by their names, the result, and the state before the call, to what was computed.
    before : callable
        From the arguments to the state before the call, which the call does not change.
    one_token : bool
        Whether the result has no axis of tokens before that of its heads.
    projection : str
        A module of the layer that is ``self``, whose output is read as the argument ``"heard"``.
    norm : str
        A module of that layer whose input is what the heads computed, where the result is not.
    """

    read: Callable[[dict[str, Any], Any, Tensor | None], LinearCall]
    before: Callable[[dict[str, Any]], Tensor | None] = _copy_of_state
    one_token: bool = False
    projection: str = ""
    norm: str = ""


#: By the name that a file of a model has for it, a function, or a method with its class. Each file has the same few.
OF_HEADS = {
    "torch_chunk_gated_delta_rule": Reader(_delta_rule),
    "torch_recurrent_gated_delta_rule": Reader(_delta_rule),
    "chunk_kimi_delta_attention": Reader(_delta_rule),
    "recurrent_kimi_delta_attention": Reader(_delta_rule),
    "mamba2_chunk_scan": Reader(_read_mamba2_scan),
    "mamba2_selective_state_update": Reader(_scan_step, one_token=True),
    LIGHTNING: Reader(_read_lightning, _lightning_state, projection="qkv_proj", norm="norm"),
}
#: Those of layers with one matrix for each channel.
OF_CHANNELS = {
    "mamba_selective_scan": Reader(_selective_scan),
    "mamba_selective_state_update": Reader(_selective_step),
    RNN_SCAN: Reader(_rnn_scan, lambda args: args["recurrent_states"]),
    "rwkv_linear_attention": Reader(_read_wkv, _joined_states),
}
