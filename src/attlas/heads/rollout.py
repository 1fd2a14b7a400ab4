"""From the outputs of a model back to its inputs, and from an input to where it goes: products with every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from attlas.errors import ShapeError, public
from attlas.foundation.autocast import without_autocast
from attlas.foundation.checks import one_of
from attlas.heads.targets import check_layers, check_matrices
from attlas.matrix import AttentionMatrix
from attlas.recording.atlas import Atlas
from attlas.recording.atlas.layers import ranges, unrecorded_of
from attlas.recording.atlas.padding import token_queries

_VECTORS_PER_PRODUCT = 64  # vectors that one product carries

Missing = Literal["refuse", "identity"]


@without_autocast
@public("rollout()")
def rollout(
    matrices: Iterable[AttentionMatrix],
    rows: Sequence[int] | Tensor | None = None,
    residual: float = 0.5,
    heads: Tensor | None = None,
    layers: bool = False,
    missing: Missing = "refuse",
) -> Tensor:
    """Return how much of each input token the layers together bring to some output tokens: attention rollout.

    Parameters
    ----------
    matrices : iterable of AttentionMatrix, each of shape (..., heads, n, n)
        Self-attention of every layer, the first layer first. An `Atlas` is such an iterable.
    rows : sequence of int or Tensor of int, optional
        The output tokens; negative ones count from the end. The default is the last, of each text its own.
    residual : float, default 0.5
        Share of the residual connection, from 0 to 1.
    heads : Tensor, shape (heads,) or (layers, heads), optional
        Weight of each head, made to sum to 1; the default is the mean of the heads.
    layers : bool, default False
        Whether the result of every depth is returned: only the last layer, the last two, and so on.
    missing : {"refuse", "identity"}, default "refuse"
        What to do where layers of the model are not there, because they were not recorded or have no attention weights
        (state-space layers with one matrix for each channel), or have a linear attention beside the softmax (Falcon-H1,
        Zamba2): raise an error, or let what is not of the main kind leave each token where it is.

    Returns
    -------
    Tensor, shape (..., len(rows), n), with `layers` (number of layers, ..., len(rows), n)
        Rows of the product of all layers; each sums to 1 where no weight goes to a learned sink.

    Raises
    ------
    ShapeError
        If there is no matrix, if one is not square, has no heads or is of another size than the others, if
        a row lies outside, if `residual` or `heads` do not fit, or if layers of the model are missing.
    DtypeError
        If something in `matrices` is no AttentionMatrix.

    See Also
    --------
    flow : columns of the same product.

    Notes
    -----
    ``R = Ã_L ··· Ã_1`` with ``Ã_l = (1 - r) Ā_l + r I`` and Ā the mean over heads [1]_ (section 3, with
    r = 1/2). Here no matrix is multiplied with a matrix: row i of R is ``e_iᵀ Ã_L ··· Ã_1``, one product
    with the transpose of each layer, and the mean over heads is taken of the products. A query that may see
    no key has weights 0 and keeps its residual share alone. Padding gives and receives nothing: its rows and
    columns are 0.

    A maximum over heads, as some programs use, is no linear map and cannot be had in this way. The other
    method of [1]_, attention flow, is a maximum flow through the graph of all cells and needs them at once:
    it is not offered.

    The product says where information comes from only if it has every layer that mixes tokens. An atlas knows the
    layers of its model, and ``outputs.attentions`` their numbers; other matrices are taken for all layers.

    Of layers with two mixers, the recording does not say how much of each reaches the residual stream, which scales,
    norms and gates decide; so they are refused. Weights of linear attention may be negative and need not sum to 1:
    then neither do the rows.

    Cost: for 64 rows, one pass over each layer; memory of a few vectors a head.

    References
    ----------
    .. [1] Abnar and Zuidema, "Quantifying attention flow in transformers", 2020.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), mask=attlas.Causal())
    >>> heads.rollout([A, A], rows=[2])
    tensor([[[0.3194, 0.2361, 0.4444]]])
    """
    return _rolled_through_layers("rows", matrices, rows, residual, heads, layers, missing, back=True)


@without_autocast
@public("flow()")
def flow(
    matrices: Iterable[AttentionMatrix],
    columns: Sequence[int] | Tensor | None = None,
    residual: float = 0.5,
    heads: Tensor | None = None,
    layers: bool = False,
    missing: Missing = "refuse",
) -> Tensor:
    """Return where the information of some input tokens goes: how much of them each output token holds.

    Parameters
    ----------
    matrices : iterable of AttentionMatrix, each of shape (..., heads, n, n)
        Self-attention of every layer, the first layer first. An `Atlas` is such an iterable.
    columns : sequence of int or Tensor of int, optional
        The input tokens; negative ones count from the end. The default is the first, of each text its own.
    residual : float, default 0.5
        Share of the residual connection, from 0 to 1.
    heads : Tensor, shape (heads,) or (layers, heads), optional
        Weight of each head, made to sum to 1; the default is the mean of the heads.
    layers : bool, default False
        Whether the result after every layer is returned: after the first, after the second, and so on.
    missing : {"refuse", "identity"}, default "refuse"
        What to do where layers of the model are not there: raise an error, or let them leave each token where it is.

    Returns
    -------
    Tensor, shape (..., n, len(columns)), with `layers` (number of layers, ..., n, len(columns))
        Columns of the product of all layers; each number lies between 0 and 1.

    Raises
    ------
    ShapeError
        If there is no matrix, if one is not square, has no heads or is of another size than the others, if
        a column lies outside, if `residual` or `heads` do not fit, or if layers of the model are missing.
    DtypeError
        If something in `matrices` is no AttentionMatrix.

    See Also
    --------
    rollout : rows of the same product, with its definition.

    Notes
    -----
    Column j of the rollout matrix of [1]_, ``Ã_L ··· Ã_1 e_j``: one product with each layer, from the first
    to the last. This is the forward flow of a linear mixing, and not the maximum flow that the same paper
    calls attention flow. Cost: for 64 columns, the time of one fused forward of each layer; memory of a few
    vectors a head.

    References
    ----------
    .. [1] Abnar and Zuidema, "Quantifying attention flow in transformers", 2020.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), mask=attlas.Causal())
    >>> heads.flow([A, A], columns=[0])[0, :, 0]
    tensor([1.0000, 0.4375, 0.3194])
    """
    return _rolled_through_layers("columns", matrices, columns, residual, heads, layers, missing, back=False)


@torch.no_grad()
def _rolled_through_layers(
    name: str,
    source: Iterable[AttentionMatrix],
    tokens: Sequence[int] | Tensor | None,
    residual: float,
    heads: Tensor | None,
    layers: bool,
    missing: Missing,
    *,
    back: bool,
) -> Tensor:
    """Return what `rollout` does with ``back=True``, and `flow` without; `name` is what errors call the tokens.

    Each token is a column of `x`, shape (..., 1, n, tokens), which is multiplied by one layer after the other.
    """
    matrices = list(source)
    n = _check_matrices(matrices)
    _check_missing(missing, source, matrices)
    if not isinstance(residual, int | float) or not 0.0 <= residual <= 1.0:
        raise ShapeError("residual must lie between 0 and 1.", f"residual = {residual!r}", "residual=0.5")
    positions = _checked_positions(name, [n - 1 if back else 0] if tokens is None else tokens, n)
    real = _token_mask(source, matrices)
    shares = [_head_weights(heads, layer, A, len(matrices)) for layer, A in enumerate(matrices)]
    steps = list(zip(matrices, shares, strict=True))
    chunks = []
    for some in positions.split(_VECTORS_PER_PRODUCT):
        first = matrices[0]
        x = torch.zeros(*first.shape[:-3], 1, n, len(some), dtype=first.dtype, device=first.device)
        # Column t is 1 at its own token.
        x[..., some.to(x.device), torch.arange(len(some), device=x.device)] = 1.0
        if real is not None:
            real = real.to(x)
            x = _end_of_texts(real, back=back) if tokens is None else x * real
        depths = []
        for A, share in reversed(steps) if back else steps:
            x = x.to(device=A.device, dtype=A.dtype)
            wide = A.full_precision()
            product = wide.mT @ x if back else wide @ x
            mixed = product.mean(dim=-3, keepdim=True) if share is None else (product * share).sum(-3, keepdim=True)
            # (1 - residual) * mixed + residual * x.
            x = torch.lerp(mixed, x, residual)
            x = x if real is None else x * real.to(x)
            depths.append(x.squeeze(-3))
        chunks.append(torch.stack([d.to(depths[-1]) for d in depths]) if layers else depths[-1])
    out = torch.cat(chunks, dim=-1)
    return out.mT if back else out


def _token_mask(source: Iterable[AttentionMatrix], matrices: list[AttentionMatrix]) -> Tensor | None:
    """Return 1 for each token and 0 for padding, shape (..., 1, n, 1); None where there is no padding."""
    masks = [token_queries(A.weights) for A in matrices]
    if isinstance(source, Atlas):
        masks += [source.entry(layer).query_mask for layer in source.layers()]
    first = matrices[0]
    for queries in masks:
        if queries is not None:
            lead = first.shape[:-3]
            return queries.expand(lead.numel(), -1).reshape(*lead, 1, -1, 1).to(first.device, first.dtype)
    return None


def _end_of_texts(real: Tensor, *, back: bool) -> Tensor:
    """Return 1 at the last token of each text with `back`, else at the first; 0 elsewhere, `real` is 0 at padding."""
    reached = (real.flip(-2) if back else real).cumsum(-2)
    reached = reached.flip(-2) if back else reached
    return real * (reached == 1)


def _check_matrices(matrices: list[AttentionMatrix]) -> int:
    """Return the number of tokens, or raise an error where a layer is no self-attention of the same text."""
    rule = "matrices must be AttentionMatrix objects, one for each layer."
    check_matrices("matrices", matrices, rule, "output.attentions of a model with attn_implementation='attlas'.")

    def fits(A: AttentionMatrix) -> bool:
        """Return whether a matrix is square, with the batch and the tokens of the first one; heads may differ."""
        first = matrices[0].shape
        same = (A.shape[:-3], A.shape[-1]) == (first[:-3], first[-1])
        return A.ndim == len(first) >= 3 and A.shape[-2] == A.shape[-1] and same

    rule = "every layer must be the self-attention of one whole text: (..., heads, n, n), of one batch and n."
    fix = "run the text in one forward pass, without a cache, and keep the head axis: A[0], not A[0, 3]."
    check_layers(matrices, fits, rule, fix)
    return int(matrices[0].shape[-1])


def _check_missing(missing: Missing, source: Iterable[AttentionMatrix], matrices: list[AttentionMatrix]) -> None:
    """Raise a ShapeError where layers of the model are not among the matrices, unless that is wanted."""
    one_of("missing", missing, get_args(Missing), 'missing="identity"')
    if isinstance(source, Atlas):
        absent, details = source.missing_layers(), "; ".join(source.unrecorded)
        if missing == "refuse":
            _check_mixers(source)
    else:
        numbers = [A.layer for A in matrices if A.layer is not None]
        known = len({*numbers}) == len(matrices)  # each matrix says of which layer it is
        absent, details = sorted({*range(max(numbers) + 1)} - {*numbers}) if known else [], ""
    if absent and missing == "refuse":
        rule = "every layer of the model must be there, since the others move information between tokens, too."
        found = f"no weights of {'layer' if len(absent) == 1 else 'layers'} {ranges(absent)}"
        fix = 'missing="identity" lets them leave each token where it is; record all layers that have weights.'
        raise ShapeError(rule, found, fix, arguments={"not recorded": details} if details else {})


def _check_mixers(atlas: Atlas) -> None:
    """Raise a ShapeError where layers have a second mixer: how much of each reaches the residual is not recorded."""
    unrecorded = (layer for _, layers in unrecorded_of(atlas.details, "linear") for layer in layers)
    both = sorted({*atlas.layers("linear"), *unrecorded}, key=str)
    if both:
        rule = "each layer must have one mixer: how much of each of two reaches the residual is not recorded."
        found = f"a softmax and a linear attention in {'layer' if len(both) == 1 else 'layers'} {ranges(both)}"
        fix = (
            'rollout([atlas.mean([3, "linear.3"], over_heads=True), ...]), or missing="identity" for the softmax alone.'
        )
        raise ShapeError(rule, found, fix)


def _checked_positions(name: str, tokens: Sequence[int] | Tensor, n: int) -> Tensor:
    """Return tokens as positions from 0 to n - 1, on the CPU."""
    positions = torch.as_tensor(tokens, device="cpu").reshape(-1)
    whole = not positions.is_floating_point() and positions.dtype != torch.bool
    if len(positions) and whole and bool(((positions >= -n) & (positions < n)).all()):
        return positions.to(torch.int64) % n
    rule, found = f"{name} must be whole numbers that name tokens of the text.", f"{name} = {positions.tolist()}"
    raise ShapeError(rule, f"{found}, n = {n} tokens", f"{name}=[0, -1]")


def _head_weights(heads: Tensor | None, layer: int, A: AttentionMatrix, layers: int) -> Tensor | None:
    """Return the weight of each head of a layer, shape (heads, 1, 1); None for the mean."""
    if heads is None:
        return None
    count = A.shape[-3]
    if isinstance(heads, Tensor) and heads.shape in ((count,), (layers, count)):
        own = (heads if heads.ndim == 1 else heads[layer]).to(device=A.device, dtype=A.dtype)
        if bool((own >= 0).all()) and bool(own.sum() > 0):
            return (own / own.sum()).view(-1, 1, 1)
    rule = "heads must weigh each head of each layer, with numbers from 0 on that are not all 0."
    found, given = (
        f"{layers} layers, {count} heads in layer {layer}",
        heads if isinstance(heads, Tensor) else repr(heads),
    )
    fix = f"a tensor of shape ({count},) or ({layers}, {count}); leave heads out for their mean."
    raise ShapeError(rule, found, fix, heads=given)
