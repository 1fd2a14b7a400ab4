"""One attention of a recorded model: its module, its matrix, its statistics."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attlas.errors import DtypeError, RecordingError, ShapeError, public
from attlas.foundation.trees import tensors_in
from attlas.matrix import AttentionMatrix
from attlas.matrix.kinds.combination import Combination, Term
from attlas.matrix.protocol import check_are_statistics
from attlas.matrix.sweep import each_once
from attlas.matrix.value_weighted import value_weighted
from attlas.stats import Statistic

KINDS = ("self", "encoder", "cross", "linear")
VALUES = ("values", "value_norms", "output_norms", "gates")  # fields with what was kept of the values


@dataclass(frozen=True, eq=False)
class Entry:
    """One pass of one attention of a model: its module, its lazy matrix, its statistics.

    Parameters
    ----------
    name : str
        Path of the attention module in ``model.named_modules()``.
    layer : int
        Number among the model's attentions of this kind, in the order of the model.
    kind : {"self", "encoder", "cross", "linear"}
        Self-attention of a decoder (or of a model that has no other), self-attention of an encoder that
        feeds a decoder, or cross-attention. In a model with layers that have two mixers side by side, a softmax and a
        linear attention (Falcon-H1, Zamba2), the linear ones are of a kind of their own.
    call : int
        Which pass of the module, 0 for the first. The steps of one generation are one pass.
    heads : tuple of int
        The heads that were recorded, as the model counts them.
    queries : tuple of int
        Positions of the queries in the text, ``(first, last + 1)``.
    first_key : int
        Position of key 0 in the text; not 0 where a sliding cache has dropped the first keys.
    shape : tuple of int
        Sizes of the matrix: batch, recorded heads, m, n.
    matrix : AttentionMatrix, optional, shape (batch, recorded heads, m, n)
        The lazy matrix; None where only statistics were kept.
    statistics : dict
        Result of each statistic under its name (``"entropy"``, ``"column_mass"``, ``"top_k"``): a Tensor
        or a tuple of Tensors, with the leading axes batch and recorded heads.
    values : Tensor, optional, shape (batch, value heads, n, e)
        What the weights pool: ``matrix @ values`` is the output of the heads. Only with ``record(values=True)``.
    value_norms : Tensor, optional, shape (batch, value heads, n)
        Norm of each value, ``‖v_j‖``.
    output_norms : Tensor, optional, shape (batch, recorded heads, n)
        Norm of each value behind the head's part of the output projection, ``‖v_j W_O^h‖``.
    gates : Tensor, optional, shape (batch, recorded heads, m)
        Factor of each query and head by which the layer multiplies its output, with ``record(gates=True)``; NaN where
        it multiplies each channel by a factor of its own, or normalizes them.
    query_mask : Tensor of bool, optional, shape (batch, m)
        False for a query that is padding, from the ``attention_mask`` of the call, the mask of the matrix, or
        because the query has no allowed key; None where every query is a token. Means leave padding out.

    Raises
    ------
    ShapeError
        If the sizes of the parts do not agree.
    DtypeError
        If `kind` is unknown.

    See Also
    --------
    Atlas : the entries of a whole model.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.recording.atlas import Entry
    >>> A = attlas.attend(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))
    >>> Entry("layers.0.attn", 0, "self", 0, (0, 1), (0, 5), 0, (1, 2, 5, 5), A)
    Entry('layers.0.attn', self.0, call 0, heads (0, 1), 5 queries × 5 keys, q and k kept)
    """

    name: str
    layer: int
    kind: str
    call: int
    heads: tuple[int, ...]
    queries: tuple[int, int]
    first_key: int
    shape: tuple[int, int, int, int]
    matrix: AttentionMatrix | None = None
    statistics: dict[str, Any] = field(default_factory=dict)
    query_mask: Tensor | None = None
    values: Tensor | None = field(default=None, kw_only=True)
    value_norms: Tensor | None = field(default=None, kw_only=True)
    output_norms: Tensor | None = field(default=None, kw_only=True)
    gates: Tensor | None = field(default=None, kw_only=True)

    @public("Entry()")
    def __post_init__(self) -> None:
        # Raise an error where the fields do not fit each other.
        if self.kind not in KINDS:
            rule = "kind must be one of " + ", ".join(repr(name) for name in KINDS) + "."
            raise DtypeError(rule, f"kind = {self.kind!r}", 'kind="self"')
        rule, found, fix = "", "", "give the sizes of the matrix: batch, recorded heads, m, n."
        if len(self.heads) != self.shape[1]:
            rule = "there must be a number of each recorded head."
            found = f"{len(self.heads)} heads in heads, {self.shape[1]} in shape"
        elif self.queries[1] - self.queries[0] != self.shape[2]:
            rule = "the places of the queries must be as many as the queries."
            found = f"places {self.queries[0]} to {self.queries[1]} in queries, m = {self.shape[2]} in shape"
        elif self.matrix is not None and tuple(self.matrix.shape) != tuple(self.shape):
            rule = "the matrix must have the stated sizes, (batch, recorded heads, m, n)."
            found = f"{tuple(self.matrix.shape)} in matrix, {tuple(self.shape)} in shape"
        elif self.query_mask is not None and (
            tuple(self.query_mask.shape) != (self.shape[0], self.shape[2]) or self.query_mask.dtype is not torch.bool
        ):
            rule = "query_mask must be a tensor of bool of shape (batch, m)."
            found = f"{self.query_mask.dtype} of shape {tuple(self.query_mask.shape)}, {tuple(self.shape)} in shape"
            fix = "query_mask=attention_mask.bool(), the part that belongs to these queries."
        elif found := self._wrong_values():
            rule = "values must be (batch, value heads, n, e), norms (batch, heads or value heads, n), gates (..., m)."
            fix = "give the values of all keys; as many heads as the matrix has, or grouped ones."
        if rule:
            raise ShapeError(rule, found, fix, name=self.name)

    def _wrong_values(self) -> str:
        """Describe values or norms that do not belong to a matrix of this shape; "" where they do."""
        batch, heads, _, n = self.shape
        for name, t in self.values_and_norms.items():
            count = t.shape[1] if t.ndim > 1 else 0
            # These have all heads; values and their norms may have fewer, which several heads share.
            whole = name in ("output_norms", "gates")
            fits = heads == count if whole or not count else heads % count == 0
            length = self.shape[2] if name == "gates" else n
            if t.ndim != (4 if name == "values" else 3) or (t.shape[0], t.shape[2]) != (batch, length) or not fits:
                return f"{name} of shape {tuple(t.shape)}, {tuple(self.shape)} in shape"
        return ""

    @property
    def values_and_norms(self) -> dict[str, Tensor]:
        """What was kept of the values, by the names of the fields."""
        return {name: t for name in VALUES if (t := getattr(self, name)) is not None}

    @public("Entry.value_weighted()")
    def value_weighted(self, output: bool = False) -> AttentionMatrix:
        """Return each weight times the norm of its value, as a lazy matrix.

        Parameters
        ----------
        output : bool, default False
            Whether the norm is that of the value behind the output projection.

        Returns
        -------
        AttentionMatrix, shape (batch, recorded heads, m, n)
            ``‖A_ij v_j‖``, or with `output` ``‖A_ij v_j W_O^h‖``, the size of what key j adds to the residual
            stream at query i through head h. Its rows do not sum to 1: entropy, effective keys and divergences of
            shares raise a ShapeError; other statistics and pictures can be asked of it. It has no gradient.

        Raises
        ------
        RecordingError
            If the recording does not have these norms.

        See Also
        --------
        attlas.record : ``values=True``, or ``values="norms"``, keeps them.

        Notes
        -----
        Weights of linear attention keep their signs, ``A_ij ‖v_j‖``; `output` is refused there, since a norm and a gate
        come before the output projection. Cost: that of the same read of the weights. A gate behind the attention is
        not counted.

        Examples
        --------
        >>> import torch, attlas
        >>> from attlas.recording.atlas import Entry
        >>> A = attlas.attend(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))
        >>> entry = Entry(
        ...     "attn", 0, "self", 0, (0,), (0, 2), 0, (1, 1, 2, 2), A, value_norms=torch.tensor([[[5.0, 1.0]]])
        ... )
        >>> entry.value_weighted().to_dense()[0, 0].tolist()
        [[2.5, 0.5], [2.5, 0.5]]
        """
        field = "output_norms" if output else "value_norms"
        matrix, norms = self.need_matrix(), getattr(self, field)
        if norms is not None:
            return value_weighted(matrix, norms)
        rule, fix = "the norms of the values must have been recorded.", 'record(model, values=True), or values="norms".'
        if output and self.value_norms is not None:
            rule, fix = "the output projection of the layer must be known.", "value_weighted(output=False)"
        raise RecordingError(rule, f"no {field}", fix, entry=self._name_in_words)

    @property
    @public("Entry.gated")
    def gated(self) -> AttentionMatrix:
        """The matrix that reaches the output projection, lazy: each row times the output gate of its query and head.

        Raises
        ------
        RecordingError
            If the gates were not recorded, or the layer has a factor for each channel, or a norm: what reaches its
            projection is then no matrix of tokens times the values.

        See Also
        --------
        attlas.record : ``values=True, gates=True`` records them.

        Notes
        -----
        Without a gate it is the matrix itself. Cost: that of the same read of the weights.

        Examples
        --------
        >>> import torch, attlas
        >>> from attlas.recording.atlas import Entry
        >>> A = attlas.attend(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))
        >>> gates = torch.tensor([[[1.0, 0.5]]])
        >>> Entry("attn", 0, "self", 0, (0,), (0, 2), 0, (1, 1, 2, 2), A, gates=gates).gated.to_dense()[0, 0]
        tensor([[0.5000, 0.5000],
                [0.2500, 0.2500]])
        """
        matrix, gates = self.need_matrix(), self.gates
        if gates is None:
            rule = "the gates must have been recorded, in one call of the model outside of a program."
            fix = "record(model, values=True, gates=True)"
            raise RecordingError(rule, "no gates", fix, entry=self._name_in_words)
        if bool(gates.isnan().any()):
            rule = "the output gate must be one factor for each query and head."
            found = "a factor for each channel, or a norm: what reaches the output projection is no matrix times values"
            fix = "entry.matrix @ entry.values is exact before the gate, and so is entry.value_weighted()."
            raise RecordingError(rule, found, fix, entry=self._name_in_words)
        factors = gates.to(matrix.device, matrix.dtype).unsqueeze(-1)
        return AttentionMatrix(Combination([Term(factors, matrix.weights)]), matrix.axes)

    @property
    def path(self) -> str:
        """Kind and layer as `Atlas` takes them, ``"cross.3"``."""
        return f"{self.kind}.{self.layer}"

    @property
    def is_linear(self) -> bool:
        """Whether its matrix is kept and is that of a layer of linear attention, whose weights may be negative."""
        return self.matrix is not None and self.matrix.weights.softmax is None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that this entry holds: queries, keys, values, norms, statistics."""
        weights = None if self.matrix is None else self.matrix.weights
        tokens = [] if weights is None else each_once(weights.inputs)
        return sum(t.nbytes for t in tensors_in((tokens, self.values_and_norms, self.statistics, self.query_mask)))

    @property
    def _name_in_words(self) -> str:
        """Kind, layer, module and pass in words, for an error."""
        return f"{self.path} ({self.name}), call {self.call}"

    def __repr__(self) -> str:
        _, _, m, n = self.shape
        kept = "q and k kept" if self.matrix is not None else "statistics only"
        kept = kept if self.values is None else "q, k and v kept"
        numbers = f", {', '.join(self.statistics)}" if self.statistics else ""
        return (
            f"Entry({self.name!r}, {self.path}, call {self.call}, heads {self.heads}, {m} queries × {n} keys, "
            f"{kept}{numbers})"
        )

    def need_matrix(self) -> AttentionMatrix:
        """Return the matrix; raise an error that lists the statistics if only those were kept.

        Raises
        ------
        RecordingError
            If only statistics were kept.
        """
        if self.matrix is not None:
            return self.matrix
        names = ", ".join(self.statistics) or "no statistic"
        rule = "the weights of a layer are made from its q and k, and these were not kept."
        found = f'statistics only: {names}; read them as atlas.entry("{self.path}").statistics'
        raise RecordingError(
            rule, found, 'record with keep="disk" (or "cpu") to keep q and k.', entry=self._name_in_words
        )


def statistic_names(statistics: Iterable[Statistic]) -> list[str]:
    """Return the names under which an entry keeps the results of some statistics.

    Parameters
    ----------
    statistics : iterable of Statistic
        The statistics, in order.

    Returns
    -------
    list of str
        The class in snake case; the second of a class gets ``_2``, and so on.

    Raises
    ------
    DtypeError
        If one is no Statistic, an object and not its class.

    Examples
    --------
    >>> from attlas import stats
    >>> from attlas.recording.atlas.entry import statistic_names
    >>> statistic_names([stats.Entropy(), stats.TopK(8), stats.TopK(1)])
    ['entropy', 'top_k', 'top_k_2']
    """
    names: list[str] = []
    statistics = list(statistics)
    try:
        check_are_statistics(statistics)
    except DtypeError as error:
        raise error.replaced(where="statistics") from None
    for statistic in statistics:
        # TopK becomes top_k; a second one of the same class top_k_2.
        plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(statistic).__name__).lower().strip("_")
        count = sum(re.fullmatch(re.escape(plain) + r"(_\d+)?", name) is not None for name in names)
        names.append(f"{plain}_{count + 1}" if count else plain)
    return names
