"""For training loops: factors that keep logits down, and an alarm for heads whose entropy collapses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attlas import stats
from attlas.errors import DtypeError, ShapeError, kind, public
from attlas.heads.retrieval import rows_in_blocks
from attlas.heads.targets import check_query_mask, mean_of_rows
from attlas.matrix import AttentionMatrix
from attlas.stats.rows import AllowedKeys


class ClipFactors(NamedTuple):
    """What the projections of each head are multiplied with after a step; made by `qk_clip`.

    Parameters
    ----------
    gamma : Tensor, shape (heads,)
        ``min(1, threshold / max_logit)``: what the logits of the head are multiplied with in all. It is also
        the factor of the rotary part of the queries in latent attention, whose keys all heads share.
    query : Tensor, shape (heads,)
        Factor of the rows of W_q that make the queries of the head.
    key : Tensor, shape (key heads,)
        Factor of the rows of W_k that make the keys of the key head.
    max_logit : Tensor, shape (heads,)
        Largest logit of the head.

    Examples
    --------
    >>> import torch
    >>> from attlas import heads
    >>> factors = heads.qk_clip(torch.tensor([50.0, 400.0]), threshold=100.0)
    >>> factors.gamma, factors.query, factors.key
    (tensor([1.0000, 0.2500]), tensor([1.0000, 0.5000]), tensor([1.0000, 0.5000]))
    """

    gamma: Tensor
    query: Tensor
    key: Tensor
    max_logit: Tensor

    @torch.no_grad()
    def apply_(self, query_weight: Tensor, key_weight: Tensor) -> None:
        """Scale the rows of two projections in place, (heads * d, ...) and (key heads * d, ...); biases too."""
        for name, weight, factor in (("query", query_weight, self.query), ("key", key_weight, self.key)):
            if not weight.ndim or weight.shape[0] % len(factor):
                rule = f"the rows of the {name} projection must be those of its heads, head by head."
                given, fix = {f"{name}_weight": weight}, "pass torch.nn.Linear's weight, of shape (heads * d, size)."
                raise ShapeError(rule, f"{len(factor)} heads", fix, arguments=given, where="apply_()")
            of_rows = factor.to(weight).repeat_interleave(weight.shape[0] // len(factor))
            weight.mul_(of_rows.view(-1, *[1] * (weight.ndim - 1)))


@torch.no_grad()
@public("qk_clip()")
def qk_clip(
    A: AttentionMatrix | Tensor, threshold: float = 100.0, key_heads: int | None = None, alpha: float = 0.5
) -> ClipFactors:
    """Return the QK-clip factors of each head: by how much queries and keys shrink so that logits stay in bounds.

    Parameters
    ----------
    A : AttentionMatrix, shape (..., heads, m, n), or Tensor, shape (heads,) or (..., heads, m)
        The attention of the last step; or the largest logit of each head; or that of each row, as
        `attlas.stats.MaxLogit` gives it.
    threshold : float, default 100.0
        The logit above which a head is clipped (tau).
    key_heads : int, optional
        Key heads, where several query heads share one; by default as many as the matrix has, or one for
        each query head.
    alpha : float, default 0.5
        Share of the factor that goes to the queries: ``gamma ** alpha``, the rest to the keys.

    Returns
    -------
    ClipFactors

    Raises
    ------
    DtypeError
        If `A` is neither a matrix nor a tensor.
    ShapeError
        If `threshold` is not above 0, if `alpha` is not between 0 and 1, if there is no head axis, or if
        `key_heads` does not divide the heads.

    Notes
    -----
    QK-clip of MuonClip [1]_ (section 2.1): with S the largest logit of a head over the batch,
    ``γ = min(1, τ / S)``, ``W_q ← γ^α W_q`` and ``W_k ← γ^(1-α) W_k`` after the optimizer's step, for that
    head alone. In latent attention (MLA) the parts of queries and keys that belong to the head take
    ``query`` and ``key``, the rotary part of the queries takes ``gamma``, and the rotary keys, which all
    heads share, stay. Grouped heads (GQA, MQA) are treated here as those rotary keys are: a key head that
    serves several query heads stays, and the queries take the whole factor.

    S is the largest logit that a query may see, after scaling, and after a cap or a bias where there is
    one: only logits that are a product of queries and keys shrink by exactly γ. In distributed training
    take the maximum of ``max_logit`` over ranks first, and pass that. A head without a logit, or with none
    above 0, has γ = 1. Cost: for a matrix one pass, for a tensor nothing.

    References
    ----------
    .. [1] Kimi Team, "Kimi K2: open agentic intelligence", 2025.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> q, k = torch.ones(2, 5, 16), torch.ones(2, 5, 16)
    >>> A = attlas.attend(q * torch.tensor([1.0, 50.0]).view(2, 1, 1), k)  # logits 4 and 200
    >>> heads.qk_clip(A).gamma
    tensor([1.0000, 0.5000])
    """
    if not threshold > 0:
        raise ShapeError("threshold must be above 0.", f"threshold = {threshold}", "threshold=100.0")
    _check_share("alpha", alpha)
    if not isinstance(A, AttentionMatrix | torch.Tensor):
        rule, fix = "A must be an AttentionMatrix, or a tensor of largest logits.", "qk_clip(atlas[3])"
        raise DtypeError(rule, kind(A), f"{fix} takes the matrix of layer 3.")
    if isinstance(A, AttentionMatrix):
        largest = stats.max_logit(A) if A.ndim > 2 else None
        query_mask = check_query_mask(None, A.weights)
        if largest is not None and query_mask is not None:  # padding is left out
            largest = largest.masked_fill(~query_mask.expand(A.weights.shape[:3]).reshape(largest.shape), -math.inf)
        key_heads = A.weights.key_heads if key_heads is None and A.ndim > 2 else key_heads
    else:
        largest = A if A.ndim else None
    if largest is None:
        fix = "A[:, 3:4] keeps the axis of head 3."
        raise ShapeError("there must be a head axis.", "no leading axis", fix, A=f"shape {tuple(A.shape)}")
    if largest.ndim > 1:
        largest = largest.amax(dim=-1) if largest.shape[-1] else largest.new_full(largest.shape[:-1], -math.inf)
        largest = largest.reshape(-1, largest.shape[-1]).amax(dim=0)
    heads = len(largest)
    key_heads = heads if key_heads is None else key_heads
    if key_heads < 1 or heads % key_heads:
        fix = "key_heads=model.config.num_key_value_heads"
        raise ShapeError("key heads must divide the query heads.", f"{key_heads} key heads, {heads} query heads", fix)
    gamma = torch.where(largest > threshold, threshold / largest, torch.ones_like(largest))
    if key_heads != heads:
        return ClipFactors(gamma, gamma, torch.ones_like(gamma[:key_heads]), largest)
    return ClipFactors(gamma, gamma**alpha, gamma ** (1.0 - alpha), largest)


class Collapse(NamedTuple):
    """The entropy of each head, and which heads are too low; made by `EntropyAlarm`.

    Parameters
    ----------
    entropy : Tensor, shape (heads,)
        Mean entropy of the rows, nats.
    share : Tensor, shape (heads,)
        The same as a share of what uniform weights would have, ``ln`` of the keys that a query may see.
    collapsed : Tensor of bool, shape (heads,)
        Heads that raise the alarm.

    Examples
    --------
    >>> import torch
    >>> from attlas.heads import Collapse
    >>> Collapse(torch.ones(2), torch.ones(2), torch.tensor([False, True])).heads
    [1]
    """

    entropy: Tensor
    share: Tensor
    collapsed: Tensor

    @property
    def heads(self) -> list[int]:
        """The heads that raise the alarm."""
        numbers: list[int] = self.collapsed.nonzero().flatten().tolist()
        return numbers


@dataclass(frozen=True)
class EntropyAlarm:
    """Which heads have collapsed: rows that put nearly everything on one key.

    Parameters
    ----------
    share : float, default 0.02
        A head has collapsed where its mean entropy is below this share of that of uniform weights.
    drop : float, optional
        With an earlier `Collapse` at hand, a head has collapsed too where its share fell below ``1 - drop``
        of what it was then.
    rows : int, slice, or Tensor of int, optional
        Queries that are looked at: so many spread evenly over the text, the last always among them; or a
        window; or a list. The default is all.

    Raises
    ------
    ShapeError
        If a number is out of its range.

    Notes
    -----
    Entropy collapse, rows whose entropy falls towards 0, goes with instability of training [1]_. Means are
    over the queries that may see two keys or more, and over the batch. Some healthy heads (previous token,
    sinks) live near entropy 0: `drop` asks for a fall in place of a level, from a result that you keep.
    The alarm itself has no state: it can be asked at any step, for any layer, on any rank.

    Cost: with all rows one pass over the matrix; with r rows ``3 r n`` scores per head, whatever m is, exact for
    those rows: on a CPU, for 32 of 8,192 rows, a twelfth of the time of the layer's fused attention.

    References
    ----------
    .. [1] Zhai et al., "Stabilizing transformer training by preventing attention entropy collapse", 2023.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.heads import EntropyAlarm
    >>> q = torch.randn(2, 64, 8)
    >>> A = attlas.attend(q * torch.tensor([1.0, 1000.0]).view(2, 1, 1), q, mask=attlas.Causal())
    >>> EntropyAlarm(rows=16).check(A).heads
    [1]
    """

    share: float = 0.02
    drop: float | None = None
    rows: int | slice | Tensor | None = None

    @public("EntropyAlarm()")
    def __post_init__(self) -> None:
        for name, value in (("share", self.share), ("drop", 0.5 if self.drop is None else self.drop)):
            _check_share(name, value)
        if isinstance(self.rows, int) and self.rows < 1:
            raise ShapeError("rows must be above 0.", f"rows = {self.rows}", "rows=32")

    @torch.no_grad()
    @public("EntropyAlarm()")
    def check(self, A: AttentionMatrix, before: Collapse | None = None) -> Collapse:
        """Return the entropy of each head of a matrix (..., heads, m, n), and which heads have collapsed.

        Parameters
        ----------
        A : AttentionMatrix, shape (..., heads, m, n)
            The attention of a layer, in this step.
        before : Collapse, optional
            The result of an earlier step, for `drop`.

        Returns
        -------
        Collapse
        """
        rows = None if self.rows is None else self._sampled_queries(A.shape[-2])
        entropy, keys = A.collect(stats.Entropy(), AllowedKeys()) if rows is None else _of_rows(A, rows)
        choice = keys > 1
        query_mask = check_query_mask(None, A.weights)
        if query_mask is not None:  # padding is left out
            query_mask = query_mask.expand(A.weights.shape[:3]).reshape(*A.shape[:-2], -1)
            choice &= query_mask if rows is None else query_mask[..., rows.to(query_mask.device)]
        uniform = keys.clamp(min=2.0).log()
        if entropy.ndim == 1:
            entropy, choice, uniform = (t.unsqueeze(0) for t in (entropy, choice, uniform))
        # (heads, rows of all texts)
        flat = [t.transpose(0, -2).flatten(1) for t in (entropy, entropy / uniform, choice)]
        level, share = (mean_of_rows(t, flat[2], None) for t in flat[:2])
        collapsed = (share < self.share) & flat[2].any(dim=-1)
        if self.drop is not None and before is not None:
            collapsed |= share < (1.0 - self.drop) * before.share.to(share)
        return Collapse(level, share, collapsed)

    def _sampled_queries(self, m: int) -> Tensor:
        """Return the numbers of the queries that are looked at, of m."""
        if isinstance(self.rows, slice):
            return torch.arange(m)[self.rows]
        if isinstance(self.rows, Tensor):
            return self.rows
        count = min(int(self.rows or m), m)
        # The ends of `count` equal parts of the text.
        positions: Tensor = torch.linspace(0, m - 1, count + 1).round().to(torch.int64).unique()
        return positions[-count:]


def _of_rows(A: AttentionMatrix, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return entropy and allowed keys of some rows, each of shape (..., rows)."""
    blocks = []
    for some, weights in rows_in_blocks(A, rows):
        keys = (A.logits[..., some, :] > -math.inf).sum(dim=-1)
        blocks.append((-torch.special.xlogy(weights, weights).sum(dim=-1), keys.to(weights.dtype)))
    entropy, counts = (torch.cat(parts, dim=-1) for parts in zip(*blocks, strict=True))
    return entropy.clamp_(min=0.0), counts


def _check_share(name: str, value: float) -> None:
    """Raise a ShapeError unless a value lies from 0 to 1."""
    if not 0.0 <= value <= 1.0:
        raise ShapeError(f"{name} must lie from 0 to 1.", f"{name} = {value}", f"{name}=0.5")
