"""One record per recorded head: its layer and number, and each statistic as one number."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from attlas.errors import OutOfRangeError, import_extra
from attlas.foundation.checks import check_sequence, has_float64, one_of
from attlas.recording.atlas.entry import Entry
from attlas.recording.atlas.padding import included_rows
from attlas.stats import ArgMax, ColumnMass, EffectiveKeys, Entropy, MaxWeight

Record: TypeAlias = "dict[str, Any]"
_HEAD_COLUMNS = ("layer", "head", "kind", "name", "call", "queries", "keys")


class Column(NamedTuple):
    """A statistic as one number per head.

    Parameters
    ----------
    value : Tensor, shape (heads,)
        The numbers.
    weight : Tensor, shape (heads,), optional
        What each number weighs in a mean over several entries; None where the largest is meant.
    """

    value: Tensor
    weight: Tensor | None


def records(entries: Iterable[Entry], *, join_steps: bool = False) -> list[Record]:
    """Return one record for each head of each entry, all with the same keys.

    Parameters
    ----------
    entries : iterable of Entry
        The entries.
    join_steps : bool, default False
        Whether the entries of one attention whose queries follow each other make one record.

    Returns
    -------
    list of dict
        A statistic that an entry does not have is None.
    """
    groups = _entries_of_each_text(entries) if join_steps else [[entry] for entry in entries]
    tables = [(group, _joined_columns([_weighted_columns(entry) for entry in group])) for group in groups]
    names = dict.fromkeys(name for _, columns in tables for name in columns)
    table: list[Record] = []
    for group, columns in tables:
        entry, keys = group[0], max(one.first_key + one.shape[3] for one in group) - group[0].first_key
        queries = sum(one.shape[2] for one in group)
        for index, head in enumerate(entry.heads):
            fields = (entry.layer, head, entry.kind, entry.name, entry.call, queries, keys)
            numbers = {name: columns[name][index] if name in columns else None for name in names}
            table.append(dict(zip(_HEAD_COLUMNS, fields, strict=True)) | numbers)
    return table


def _entries_of_each_text(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Return the entries of each attention whose queries follow each other: the steps of one text."""
    groups: list[list[Entry]] = []
    for entry in entries:
        if groups and _continues_entry(groups[-1][-1], entry):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return groups


def _continues_entry(before: Entry, entry: Entry) -> bool:
    """Return whether an entry goes on where the one before ended."""
    same = ("name", "layer", "kind", "heads")
    if any(getattr(before, name) != getattr(entry, name) for name in same) or before.shape[0] != entry.shape[0]:
        return False
    if entry.kind == "cross" and (before.first_key, before.shape[3]) != (entry.first_key, entry.shape[3]):
        return False
    return entry.call == before.call + 1 and entry.queries[0] == before.queries[1]


def _joined_columns(tables: list[dict[str, Column]]) -> dict[str, list[float]]:
    """Return the columns of entries whose queries follow each other: means over all queries, or the largest."""
    joined = {}
    tables = [table for table in tables if table] or tables  # an entry without a query has no column
    for name in [name for name in tables[0] if all(name in table for table in tables)]:
        parts = [table[name] for table in tables]
        values, weights = torch.stack([part.value for part in parts]), [part.weight for part in parts]
        known = [weight for weight in weights if weight is not None]
        if len(parts) == 1 or not known:
            joined[name] = values.amax(0).tolist()
            continue
        share = torch.stack(known)
        joined[name] = ((values * share).sum(0) / share.sum(0).clamp(min=torch.finfo(share.dtype).tiny)).tolist()
    return joined


def columns_of(entry: Entry) -> dict[str, list[float]]:
    """Return each statistic of an entry as one number a head.

    Parameters
    ----------
    entry : Entry
        The entry.

    Returns
    -------
    dict of list of float
        Columns by name; each list has one number for each recorded head. Statistics that are no number of
        a row or a head (pictures, spans, places) have no column.
    """
    return _joined_columns([_weighted_columns(entry)])


def _weighted_columns(entry: Entry) -> dict[str, Column]:
    """Return the columns of an entry in float64 on the CPU, with what they weigh in a mean over several entries."""
    if not entry.statistics or entry.shape[0] * entry.shape[2] == 0:
        return {}
    rows = included_rows(entry)
    columns: dict[str, Column] = {}
    for name, result in entry.statistics.items():
        columns |= _columns_of_statistic(name, result, entry, rows)
    return {
        name: Column(value.cpu().double(), None if weight is None else weight.cpu().double())
        for name, (value, weight) in columns.items()
    }


def token_records(
    entry: Entry, head: int, sequence: int, queries: list[str] | None, keys: list[str] | None
) -> list[Record]:
    """Return one record for each token that attends in one head, as `Atlas.token_table` says.

    Parameters
    ----------
    entry : Entry
        The attention.
    head : int
        The head, as the model counts it.
    sequence : int
        Which sequence of the batch.
    queries, keys : list of str, optional
        Texts of the tokens by their position, of the queries and of the keys.
    """
    batch, _, m, n = entry.shape
    if head not in entry.heads:
        found = f"heads {', '.join(map(str, entry.heads))} of {entry.path}"
        fix = f"head={entry.heads[0]}" if entry.heads else "record that head."
        raise OutOfRangeError("the head must be one that was recorded.", found, fix, head=head)
    check_sequence(sequence, batch)
    index = entry.heads.index(head)
    matrix = entry.need_matrix()[sequence : sequence + 1, index : index + 1]
    if not m * n:
        return []
    included = included_rows(entry)
    rows = torch.ones(1, dtype=torch.bool) if included is None else included.cpu()
    rows = rows.expand(entry.shape[:3])[sequence]
    attending = rows[index]
    tokens = rows.any(0) if entry.query_mask is None else entry.query_mask[sequence].cpu()
    # Runs of tokens: queries of padding give no mass.
    spans = functional.pad(tokens.int(), (1, 1)).diff().nonzero().view(-1, 2).tolist()
    row_statistics = (Entropy(), EffectiveKeys(), MaxWeight(), ArgMax())
    results = matrix.collect(*row_statistics, *(ColumnMass(rows=(start, stop)) for start, stop in spans))
    entropy, effective, weight, top = (t[0, 0].tolist() for t in results[: len(row_statistics)])
    mass = (
        torch.stack([t[0, 0] for t in results[len(row_statistics) :]]).cpu().double().sum(0).tolist() if spans else []
    )
    records_of_tokens: list[Record] = []
    for row in attending.nonzero().flatten().tolist():
        position, key = entry.queries[0] + row, entry.first_key + top[row]
        own = position - entry.first_key
        records_of_tokens.append({
            "position": position,
            "token": _token_text(queries, position),
            "entropy": entropy[row],
            "effective_keys": effective[row],
            "top_key": key,
            "top_token": _token_text(keys, key),
            "top_weight": weight[row],
            "mass_received": mass[own] if entry.kind != "cross" and 0 <= own < n else None,
        })  # fmt: skip
    return records_of_tokens


def _token_text(tokens: list[str] | None, position: int) -> str | None:
    """Return the text of the token at a position; None where it is not known."""
    return tokens[position] if tokens is not None and position < len(tokens) else None


def _columns_of_statistic(name: str, result: Any, entry: Entry, query_mask: Tensor | None) -> dict[str, Column]:
    """Return the columns that one statistic gives, by name, each of shape (heads,); none where it gives none."""
    # `query_mask` has the rows that means include. A number at the end of a name, as in top_k_2, counts statistics of
    # the same class.
    shape, rows = entry.shape, entry.shape[:3]
    plain = re.sub(r"_\d+$", "", name)
    if isinstance(result, tuple):
        parts = dict(zip(getattr(result, "_fields", ()), result, strict=False))
        if plain == "logit_moments" and all(_is_tensor_of(part, rows) for part in parts.values()):
            prefix = name.replace("logit_moments", "logit")
            return {f"{prefix}_{part}": _mean_of_queries(t, query_mask) for part, t in parts.items()}
        values = parts.get("values")
        if plain == "top_k" and isinstance(values, Tensor) and values.shape[:-1] == rows:
            return {f"{name}_mass": _mean_of_queries(values.sum(-1), query_mask)}
        return {}
    if not isinstance(result, Tensor) or result.is_complex():
        return {}
    if plain == "column_mass" and _is_tensor_of(result, (*shape[:2], shape[3])) and shape[3]:
        share = _first_key_share(result, entry, query_mask)
        return {} if share is None else {name.replace("column_mass", "first_key_mass"): Column(*share)}
    if plain.startswith("column_") or plain in ("arg_max", "head_scores"):
        return {}
    if plain == "coverage" and result.shape[:-1] == rows:
        return {
            f"{name}_{level + 1}": _mean_of_queries(result[..., level], query_mask) for level in range(result.shape[-1])
        }
    if not _is_tensor_of(result, rows):
        return {}
    if plain == "max_logit":
        return {name: Column(_with_rows_masked(result, query_mask, -math.inf).amax((0, 2)), None)}
    return {name: _mean_of_queries(result, query_mask)}


def _is_tensor_of(result: Any, shape: tuple[int, ...]) -> bool:
    """Return whether something is a tensor of this shape."""
    return isinstance(result, Tensor) and tuple(result.shape) == shape


def _with_rows_masked(t: Tensor, query_mask: Tensor | None, other: float) -> Tensor:
    """Return row statistics with `other` in the rows that are masked out."""
    return t if query_mask is None else torch.where(query_mask.to(t.device), t, other)


def _mean_of_queries(t: Tensor, query_mask: Tensor | None) -> Column:
    """Return the mean over batch and counted queries of each head, and their number; 0 where no query counts."""
    t = t if has_float64(t.device) else t.cpu()
    if query_mask is None:
        number = torch.full(t.shape[1:2], t.shape[0] * t.shape[2], dtype=torch.float64)
        return Column(t.mean((0, 2), dtype=torch.float64), number)
    number = query_mask.to(t.device).expand(t.shape).sum((0, 2))
    return Column(_with_rows_masked(t, query_mask, 0.0).sum((0, 2), dtype=torch.float64) / number.clamp(min=1), number)


def _first_key_share(mass: Tensor, entry: Entry, query_mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return the share of the first token in all mass of counted queries, and this mass; None where it is not known."""
    if entry.matrix is not None and not entry.matrix.weights.are_shares:
        return None
    # `mass` is the result of `ColumnMass`, what each key gets: (batch, heads, n).
    mass = mass.cpu().double()
    if bool((mass < 0).any()):
        return None
    total, first = mass.sum((0, 2)), _first_keys(entry, mass, query_mask)
    if first is None:
        return None
    # The queries that count, (batch, heads, m).
    rows = torch.ones(entry.shape[:3], dtype=torch.bool)
    if query_mask is not None:
        rows = query_mask.expand(entry.shape[:3]).cpu()
    before = rows.any(1).cumsum(-1) == 0  # padding on the left: if causal, these queries have no key, and so no mass
    if bool((rows.any(1) | before).all()) and bool((mass.sum(-1) <= rows.sum(-1) * 1.001).all()):
        return torch.where(total == 0, 0.0, mass[torch.arange(len(mass)), :, first].sum(0) / total), total
    if entry.matrix is None:
        return None
    # Queries of padding have mass in the columns: the column of the first token is made again without them.
    softmax = entry.matrix.weights.softmax
    if softmax is None:
        row_mass = entry.matrix.sum(-1).cpu().double()
    else:
        # The mass of a row is 1, less the weight of a sink, exp(sink - lse).
        row_mass = torch.ones(entry.shape[:3], dtype=torch.float64)
        if softmax.problem.sink is not None:
            row_mass = -torch.expm1(
                softmax.problem.sink.cpu().double().view(1, -1, 1) - entry.matrix.lse.cpu().double()
            )
        row_mass = row_mass * (entry.matrix.lse > -math.inf).cpu()
    if not torch.allclose(row_mass.sum((0, 2)), total, rtol=1e-3, atol=1e-3):
        return None  # the mass of some queries only, and nothing says of which
    column = torch.stack([entry.matrix[b, :, :, int(key)].cpu().double() for b, key in enumerate(first)])
    first_mass, all_mass = (torch.where(rows, t, 0.0).sum((0, 2)) for t in (column, row_mass))
    return torch.where(all_mass == 0, 0.0, first_mass / all_mass), all_mass


def _first_keys(entry: Entry, mass: Tensor, query_mask: Tensor | None) -> Tensor | None:
    """Return the first key of each text that is a token, shape (batch,); None where it is not known."""
    batch, _, m, n = entry.shape
    weights = None if entry.matrix is None else entry.matrix.weights
    if weights is not None and weights.mask is not None:
        padding = weights.mask.padding(weights.tile(range(batch), range(1), range(m), range(n)))
        if padding is not None:
            return (~padding).cpu().int().argmax(-1).expand(batch)
    if m == n and query_mask is not None and entry.kind != "cross":
        return query_mask.any(1).cpu().int().argmax(-1).expand(batch)
    # Nobody attends to padding; a sliding window may not see the first key.
    known = not entry.first_key and bool((mass[..., 0] > 0).any(1).all())
    return torch.zeros(batch, dtype=torch.int64) if known else None


def frame(table: list[Record], library: str) -> Any:
    """Return records as a data frame of pandas or polars.

    Raises
    ------
    ShapeError
        If `library` is neither.
    MissingExtraError
        If it is not installed.
    """
    fix = 'data="records" for a list of dicts.'
    one_of("data", library, ("records", "pandas", "polars"), fix)
    if library == "records":
        return table
    rule = f"{library} must be installed to make its data frame."
    module = import_extra(library, rule, f"pip install {library}, or {fix}")
    return module.DataFrame([{name: _valid_utf8(value) for name, value in record.items()} for record in table])


def _valid_utf8(value: Any) -> Any:
    """Return a text without lone surrogates, which stand for bytes that are no UTF-8: Arrow does not hold them."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
