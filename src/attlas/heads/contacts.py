"""Which residues of a protein touch, from the attention of a language model of proteins: the contact head of ESM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attlas.errors import DtypeError, OutOfRangeError, RecordingError, ShapeError, kind, public
from attlas.foundation.autocast import without_autocast
from attlas.foundation.checks import check_sequence, whole_number
from attlas.heads.targets import ATLAS_OR_MATRICES, check_layers, check_matrices
from attlas.matrix import AttentionMatrix
from attlas.recording.atlas import Atlas
from attlas.stats.spans import Span, place_span

_CELLS_AT_ONCE = 2**23  # cells of a layer that are computed at a time
_FEW_KEYS = 16  # keys whose columns cost less than a product with the matrix


@dataclass(frozen=True, eq=False, repr=False)
class Contacts:
    """The probabilities that pairs of residues touch, lazy; `contacts` returns them.

    Parameters
    ----------
    matrices : tuple of AttentionMatrix, each of shape (batch, heads, n, n)
        Self-attention of every layer.
    weights : tuple of Tensor, each of shape (heads,)
        Weight of each head in the regression.
    bias : float
        What the regression adds.
    residues : Tensor of bool, shape (batch, n)
        Which tokens are residues.
    sums : tuple of Tensor, each of shape (batch, heads, n)
        Row sums of ``A + Aᵀ`` between residues; 0 for other tokens.

    Attributes
    ----------
    shape : tuple of int
        Batch, and the number of tokens less 2, twice: without the first and the last, as ESM returns them.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 8))
    >>> heads.contacts([A], torch.nn.Linear(2, 1))
    Contacts(1 sequence, 10 × 10 residues, 2 heads of 1 layer)
    """

    matrices: tuple[AttentionMatrix, ...]
    weights: tuple[Tensor, ...]
    bias: float
    residues: Tensor
    sums: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, residues, residues."""
        batch, n = self.residues.shape
        return batch, n - 2, n - 2

    @torch.no_grad()
    @public("Contacts.tile()")
    def tile(self, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        """Return the probabilities of some residues with some others.

        Parameters
        ----------
        rows, columns : slice, range or (start, stop), optional
            The residues, counted from the first behind the start token; the default is all.

        Returns
        -------
        Tensor, shape (batch, len(rows), len(columns))

        Raises
        ------
        ShapeError
            If a span lies outside.

        Notes
        -----
        Two windows of each layer, of all heads at a time and some 32 MiB of them; memory of the result beside.

        Examples
        --------
        >>> import torch, attlas
        >>> from attlas import heads
        >>> A = attlas.attend(torch.zeros(1, 2, 12, 8), torch.zeros(1, 2, 12, 8))
        >>> found = heads.contacts([A], torch.tensor([1.0, 1.0]), bias=-1.0)
        >>> found.tile((0, 2), (5, 8)).shape
        torch.Size([1, 2, 3])
        """
        batch, n, _ = self.shape
        down, across = place_span("rows", rows, n, "residues"), place_span("columns", columns, n, "residues")
        out = torch.empty(batch, len(down), len(across), dtype=self.sums[0].dtype, device=self.residues.device)
        heads = max(A.shape[1] for A in self.matrices)
        size = max(_CELLS_AT_ONCE // max(batch * heads * len(across), 1), 1)
        for start in range(down.start, down.stop, size):
            some = range(start, min(start + size, down.stop))
            out[:, some.start - down.start : some.stop - down.start] = self._tile_probabilities(some, across)
        return out

    def _tile_probabilities(self, rows: range, columns: range) -> Tensor:
        """Return the probabilities of one tile."""
        i, j = slice(rows.start + 1, rows.stop + 1), slice(columns.start + 1, columns.stop + 1)
        first = self.sums[0]
        shape = (self.shape[0], len(rows), len(columns))
        logits = torch.zeros(shape, dtype=first.dtype, device=first.device)
        for A, weights in zip(self.matrices, self.weights, strict=True):
            W = A.full_precision()
            logits += torch.einsum("bhij,h->bij", W[..., i, j].to_dense(), weights).to(logits)
            logits += torch.einsum("bhji,h->bij", W[..., j, i].to_dense(), weights).to(logits)
        touching = self.residues[:, i, None] & self.residues[:, None, j]
        logits = torch.where(touching, logits, 0.0)
        for weights, sums in zip(self.weights, self.sums, strict=True):
            total = sums.sum(dim=-1, keepdim=True)
            scaled = torch.where(total > 0, weights.unsqueeze(-1) * sums / total, 0.0)
            logits -= torch.einsum("bhi,bhj->bij", sums[..., i], scaled[..., j]).to(logits)
        return (logits + self.bias).sigmoid_()

    @torch.no_grad()
    @public("Contacts.cells()")
    def cells(self, rows: Iterable[int] | Tensor, columns: Iterable[int] | Tensor) -> Tensor:
        """Return the probabilities of pairs of residues.

        Parameters
        ----------
        rows, columns : sequence of int, or Tensor of int, shape (pairs,)
            First and second residue of each pair; negative ones count from the end.

        Returns
        -------
        Tensor, shape (batch, pairs)

        Raises
        ------
        ShapeError
            If there are not as many rows as columns.
        OutOfRangeError
            If a residue lies outside.

        Notes
        -----
        Two cells of each head for a pair, from queries, keys and log-sum-exp.

        Examples
        --------
        >>> import torch, attlas
        >>> from attlas import heads
        >>> A = attlas.attend(torch.zeros(1, 2, 12, 8), torch.zeros(1, 2, 12, 8))
        >>> heads.contacts([A], torch.tensor([1.0, 1.0]), bias=0.0).cells([0, 3], [5, -1]).shape
        torch.Size([1, 2])
        """
        n = self.shape[1]
        i, j = _residue_positions("rows", rows, n), _residue_positions("columns", columns, n)
        if len(i) != len(j):
            rule = "there must be a row and a column for each pair."
            raise ShapeError(rule, f"{len(i)} rows, {len(j)} columns", "rows=[0, 3], columns=[7, 9]")
        i, j = i.to(self.residues.device) + 1, j.to(self.residues.device) + 1
        logits = torch.zeros(self.shape[0], len(i), dtype=self.sums[0].dtype, device=self.residues.device)
        for A, weights, sums in zip(self.matrices, self.weights, self.sums, strict=True):
            W = A.full_precision()
            both = (W[..., i, j] + W[..., j, i]) * (self.residues[:, i] & self.residues[:, j]).unsqueeze(1)
            total = sums.sum(dim=-1, keepdim=True)
            expected = torch.where(total > 0, sums[..., i] * sums[..., j] / total, 0.0)
            logits += torch.einsum("bhp,h->bp", both - expected, weights).to(logits)
        return (logits + self.bias).sigmoid_()

    @public("Contacts.to_dense()")
    def to_dense(self) -> Tensor:
        """Return all probabilities.

        Returns
        -------
        Tensor, shape (batch, residues, residues)

        Notes
        -----
        ``n²`` numbers for a sequence: 3.6 GB for 30,000 residues. `tile` and `largest` need no such memory.

        Examples
        --------
        >>> import torch, attlas
        >>> from attlas import heads
        >>> A = attlas.attend(torch.zeros(1, 2, 12, 8), torch.zeros(1, 2, 12, 8))
        >>> heads.contacts([A], torch.tensor([1.0, 1.0]), bias=0.0).to_dense().shape
        torch.Size([1, 10, 10])
        """
        return self.tile()

    @public("Contacts.largest()")
    def largest(self, k: int, separation: int = 6, sequence: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pairs of residues that touch most probably.

        Parameters
        ----------
        k : int
            How many pairs; fewer where there are fewer.
        separation : int, default 6
            Least distance of two residues in the sequence; 1 takes all pairs of two residues.
        sequence : int, default 0
            Which sequence of the batch.

        Returns
        -------
        probabilities : Tensor, shape (k,)
            Largest first.
        rows, columns : Tensor of int, shape (k,)
            First and second residue of each pair.

        Raises
        ------
        ShapeError
            If `k` or `separation` is no whole number above 0.
        OutOfRangeError
            If there is no such sequence.

        Notes
        -----
        One pass over the pairs, in tiles: the time of all cells of all heads, and memory of one tile and k pairs.

        Examples
        --------
        >>> import torch, attlas
        >>> from attlas import heads
        >>> A = attlas.attend(torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 8))
        >>> probabilities, i, j = heads.contacts([A], torch.tensor([1.0, 1.0]), bias=0.0).largest(3)
        >>> bool((j - i >= 6).all())
        True
        """
        batch, n, _ = self.shape
        whole_number("k", k)
        whole_number("separation", separation, "separation=6")
        check_sequence(sequence, batch)
        alone = self._contacts_of_sequence(sequence)
        best = [torch.empty(0, dtype=self.sums[0].dtype), *(torch.empty(0, dtype=torch.int64) for _ in range(2))]
        for rows, columns in _upper_tiles(n, separation, max(A.shape[1] for A in self.matrices)):
            found = alone.tile(rows, columns)[0].cpu()
            i, j = torch.tensor(list(rows)).unsqueeze(-1), torch.tensor(list(columns))
            kept = (j - i >= separation) & (alone.residues[0].cpu()[i + 1] & alone.residues[0].cpu()[j + 1])
            new = found[kept], i.expand_as(found)[kept], j.expand_as(found)[kept]
            joined = [torch.cat(pair) for pair in zip(best, new, strict=True)]
            chosen = joined[0].topk(min(k, len(joined[0]))).indices
            best = [t[chosen] for t in joined]
        return best[0], best[1], best[2]

    def _contacts_of_sequence(self, b: int) -> Contacts:
        """Return the contacts of one sequence of the batch."""
        one = slice(b, b + 1)
        matrices = tuple(A[one] for A in self.matrices)
        return Contacts(matrices, self.weights, self.bias, self.residues[one], tuple(sums[one] for sums in self.sums))

    def __repr__(self) -> str:
        batch, n, _ = self.shape
        heads, layers = sum(map(len, self.weights)), len(self.matrices)
        sequences = f"{batch} sequence{'s' * (batch != 1)}"
        return f"Contacts({sequences}, {n} × {n} residues, {heads} heads of {layers} layer{'s' * (layers != 1)})"


@without_autocast
@torch.no_grad()
@public("contacts()")
def contacts(
    source: Atlas | Iterable[AttentionMatrix],
    head: nn.Module | Tensor,
    bias: float | None = None,
    residues: Tensor | None = None,
) -> Contacts:
    """Return which residues of a protein touch, by the contact head of ESM, as a lazy matrix of probabilities.

    Parameters
    ----------
    source : Atlas, or iterable of AttentionMatrix, each of shape (batch, heads, n, n)
        A recording of the model, all layers and heads; or the self-attention of every layer, the first layer first.
    head : nn.Module or Tensor
        The contact head: ``model.esm.contact_head`` of transformers, ``model.contact_head`` of fair-esm, an
        ``nn.Linear``, or its weights alone, one for each head of each layer.
    bias : float, optional
        What the regression adds, with weights alone; the default is 0.
    residues : Tensor of bool, shape (n,) or (batch, n), optional
        Which tokens are residues. The default is all but the first and the last, padding, and, if `source` knows the
        ids of the tokens and `head` that of the end token, the end token.

    Returns
    -------
    Contacts
        Probabilities of shape (batch, n - 2, n - 2), without the first and the last token, as ESM returns them.

    Raises
    ------
    ShapeError
        If there is no matrix, if one is not square or of another size than the first, if `head` has not one weight for
        each head, or if `residues` do not fit.
    DtypeError
        If something in `source` is no AttentionMatrix, or `head` is no head.
    RecordingError
        If a recording does not have all layers and heads, or not their matrices.

    See Also
    --------
    attlas.record : records a model; without ``output_attentions``, which ``predict_contacts`` needs.

    Notes
    -----
    ``p_ij = σ(Σ_k w_k (S_ij - r_i r_j / t) + b)`` over all heads k, with ``S = A + Aᵀ`` of each, r its row sums and t
    their sum (the average product correction) [1]_. Row sums of S are row mass and column mass of A, two products with
    a vector; then any cell needs two cells of each head, and no matrix is ever stored. Equal to the heads of
    transformers and of fair-esm, which take ``layers * heads * n²`` numbers: 2.4 TB for the 660 heads of
    ``esm2_t33_650M`` at 30,000 residues.

    Tokens that are no residues have the probability ``σ(b)``, as in ESM.

    Cost: a pass over each matrix (two with padding), and memory of a number for each head and token: 30,000 residues
    take 0.5 GB.

    References
    ----------
    .. [1] Rao et al., "Transformer protein language models are unsupervised structure learners", 2020.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> layers = [attlas.attend(torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 8)) for _ in range(3)]
    >>> found = heads.contacts(layers, torch.nn.Linear(6, 1))
    >>> found.shape, found.tile((0, 2)).shape
    ((1, 10, 10), torch.Size([1, 2, 10]))
    """
    matrices = _matrices_of_layers(source)
    batch, n = matrices[0].shape[0], matrices[0].shape[-1]
    weight, added = _weights_and_bias(head, bias, [A.shape[1] for A in matrices])
    device = matrices[0].device
    chosen = _chosen_residues(residues, source, head, batch, n).to(device)
    sums = [_symmetric_sums(A.full_precision(), chosen).to(device) for A in matrices]
    parts = weight.to(device, sums[0].dtype).split([A.shape[1] for A in matrices])
    return Contacts(tuple(matrices), tuple(parts), added, chosen, tuple(sums))


def _symmetric_sums(A: AttentionMatrix, chosen: Tensor) -> Tensor:
    """Return the row sums of ``A + Aᵀ`` among the chosen tokens, shape (batch, heads, n); 0 for the others."""
    x = chosen[:, None, :, None].to(A.device, A.dtype).expand(-1, A.shape[1], -1, -1)
    others = (~chosen).any(dim=0).nonzero().squeeze(-1).to(A.device)
    whole = A.weights.rows_with_keys() if A.weights.are_shares and not A.weights.counts_other_keys else None
    if whole is not None and len(others) <= _FEW_KEYS:  # a row sums to 1, of which the other keys have a part
        rows = whole.to(A.device, A.dtype) - (A[..., others] * (1.0 - x[..., others, :].mT)).sum(dim=-1)
    else:
        rows = (A @ x).squeeze(-1)
    return (rows + (A.mT @ x).squeeze(-1)) * x.squeeze(-1)


def _matrices_of_layers(source: Atlas | Iterable[AttentionMatrix]) -> list[AttentionMatrix]:
    """Return the self-attention of every layer, or raise an error where something is missing."""
    if isinstance(source, Atlas):
        absent = source.missing_layers()
        entries = [source.entry(layer) for layer in source.layers()]
        partial = [entry for entry in entries if entry.heads != tuple(range(len(entry.heads)))]
        if absent or partial:
            rule = "every layer and head of the model must be recorded: each has a weight in the contact head."
            found = f"no layers {absent}" if absent else f"heads {partial[0].heads} of layer {partial[0].layer}"
            raise RecordingError(rule, found, "attlas.record(model)")
        matrices = [entry.need_matrix() for entry in entries]
    else:
        matrices = list(source)
    fix = "with attlas.record(model) as atlas: model(**inputs), then heads.contacts(atlas, head)."
    check_matrices("source", matrices, ATLAS_OR_MATRICES, fix)

    def fits(A: AttentionMatrix) -> bool:
        """Return whether a matrix is square, with the batch and the tokens of the first one."""
        first = matrices[0].shape
        same = (A.shape[0], A.shape[-1]) == (first[0], first[-1])
        return A.ndim == len(first) == 4 and same and A.shape[-2] == A.shape[-1] > 2

    rule = "every layer must be the self-attention of whole sequences: (batch, heads, n, n), of one batch and n."
    check_layers(matrices, fits, rule, "keep all axes, A and not A[0]; n counts a start token and an end token, too.")
    return matrices


def _weights_and_bias(head: nn.Module | Tensor, bias: float | None, heads: list[int]) -> tuple[Tensor, float]:
    """Return the weight of each head of all layers, and what is added."""
    linear = getattr(head, "regression", head)
    fix = "model.esm.contact_head, or a tensor of one weight for each head of each layer."
    if isinstance(linear, nn.Linear):
        if bias is not None:
            rule = "bias belongs to weights alone: a contact head has its own."
            raise ShapeError(rule, f"bias = {bias!r}", "leave out bias.")
        weight = linear.weight.detach()
        added = 0.0 if linear.bias is None else float(linear.bias.detach().sum())
    elif isinstance(linear, Tensor):
        weight, added = linear.detach(), 0.0 if bias is None else bias
    else:
        raise DtypeError("head must be a contact head, an nn.Linear or a tensor of weights.", kind(head), fix)
    if isinstance(added, bool) or not isinstance(added, int | float) or not math.isfinite(added):
        raise ShapeError("bias must be a finite number.", f"bias = {added!r}", "bias=0.0")
    if weight.numel() != sum(heads):
        rule = "head must have one weight for each head of each layer."
        raise ShapeError(rule, f"{weight.numel()} weights, {sum(heads)} heads of {len(heads)} layers", fix)
    return weight.reshape(-1), float(added)


def _chosen_residues(residues: Tensor | None, source: Any, head: Any, batch: int, n: int) -> Tensor:
    """Return which tokens are residues, shape (batch, n)."""
    if residues is not None:
        fits = isinstance(residues, Tensor) and residues.dtype is torch.bool
        if not fits or tuple(residues.shape) not in ((n,), (batch, n)):
            rule = "residues must be a tensor of bool with one entry for each token, for all sequences or for each."
            given = residues if isinstance(residues, Tensor) else repr(residues)[:80]
            fix = f"a tensor of bool of shape ({batch}, {n})."
            raise ShapeError(rule, f"a batch of {batch}, n = {n}", fix, residues=given)
        chosen = residues.expand(batch, n).clone()
    else:
        chosen = torch.ones(batch, n, dtype=torch.bool)
        if isinstance(source, Atlas):
            entry, end = source.entry(source.layers()[0]), getattr(head, "eos_idx", None)
            if entry.query_mask is not None:
                chosen &= entry.query_mask.cpu()
            if end is not None and source.ids is not None and tuple(source.ids.shape) == (batch, n):
                chosen &= source.ids.cpu() != end
    chosen[:, [0, -1]] = False
    return chosen


def _residue_positions(name: str, positions: Iterable[int] | Tensor, n: int) -> Tensor:
    """Return positions of residues as a tensor; raise an error where one lies outside."""
    given = positions if isinstance(positions, Tensor) else torch.tensor(list(positions), dtype=torch.int64)
    if given.ndim != 1 or given.is_floating_point() or given.dtype is torch.bool:
        rule, fix = f"{name} must be one axis of whole numbers.", f"{name}=[0, 3]"
        raise ShapeError(rule, f"{given.dtype} of shape {tuple(given.shape)}", fix)
    if len(given) and not -n <= int(given.min()) <= int(given.max()) < n:
        rule = f"{name} must lie among the {n} residues."
        raise OutOfRangeError(rule, f"{int(given.min())} to {int(given.max())}", f"{name}=[0, {n - 1}]")
    return torch.where(given < 0, given + n, given).cpu()


def _upper_tiles(n: int, separation: int, heads: int) -> Iterator[tuple[range, range]]:
    """Yield tiles that hold all pairs with the second residue at least `separation` behind the first."""
    side = max(math.isqrt(_CELLS_AT_ONCE // heads), 1)
    for start in range(0, n - separation, side):
        rows = range(start, min(start + side, n - separation))
        for first in range(rows.start + separation, n, side):
            yield rows, range(first, min(first + side, n))
