"""Small atlases, and what makes two of them equal: every bit of what they were made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attlas
from attlas import stats
from attlas.recording.atlas import Atlas, Entry
from attlas.scores import Score


def make_entry(A: attlas.AttentionMatrix | None = None, *statistics: Any, **settings: Any) -> Entry:
    """Return an entry around a matrix, or around one of 2 × 4 × 6 × 9."""
    if A is None:
        A = attlas.attend(torch.randn(2, 4, 6, 8), torch.randn(2, 2, 9, 8), mask=attlas.Causal())
    results = dict(zip(settings.pop("names", ()), A.collect(*statistics), strict=True))
    batch, heads, m, n = A.shape
    facts: dict[str, Any] = {
        "name": "layers.0.attn",
        "layer": 0,
        "kind": "self",
        "call": 0,
        "heads": tuple(range(heads)),
        "queries": (n - m if n > m else 0, (n - m if n > m else 0) + m),
        "first_key": 0,
        "shape": (batch, heads, m, n),
        "matrix": A,
        "statistics": results,
    }
    return Entry(**(facts | settings))


def make_atlas() -> Atlas:
    """Return an atlas of three layers, two kinds, a second pass, statistics of all shapes."""
    torch.manual_seed(3)
    numbers = (stats.Entropy(), stats.LogitMoments(), stats.TopK(2), stats.ColumnMass())
    names = ("entropy", "logit_moments", "top_k", "column_mass")
    entries = [
        make_entry(None, *numbers, names=names),
        make_entry(None, name="layers.1.attn", layer=1, heads=(0, 2, 5, 7)),
        make_entry(None, name="layers.1.attn", layer=1, call=1),
        make_entry(None, name="layers.1.cross", layer=1, kind="cross"),
    ]
    q, k = torch.randn(1, 2, 12, 4), torch.randn(1, 1, 12, 4).expand(1, 2, 12, 4)
    rule = attlas.from_function(lambda b, h, i, j: (j <= i) & (j // 5 == i // 5))
    A = attlas.attend(q, k, score=attlas.SoftCap(attlas.ScaledDot(), 5.0), mask=rule, sink=torch.randn(2))
    entries.append(make_entry(A, name="layers.2.attn", layer=2))
    few = make_entry(None, stats.Entropy(), names=["entropy"], name="layers.3.attn", layer=3)
    entries.append(replace(few, matrix=None))
    return Atlas(
        entries,
        model="tiny",
        ids=torch.arange(12).view(1, 12),
        tokens=["a", "é", "\ud800"],
        spans={"system": (0, 2)},
        details={"layers": 3, "scale": 0.1, "names": ["x", None, True]},
    )


def parts_of(matrix: attlas.AttentionMatrix) -> dict[str, Any]:
    """Return all that a matrix is made of."""
    problem = matrix.problem
    tensors = {"q": problem.q, "k": problem.k, "lse": matrix.lse, "sink": problem.sink}
    tensors |= {"batch": problem.batch_ids, "heads": problem.head_ids}
    return tensors | held(problem.score, "score") | held(problem.mask, "mask")


def held(thing: object, path: str) -> dict[str, Any]:
    """Return the settings and tensors of a score or mask, by path; functions have become runs and are left out."""
    found: dict[str, Any] = {path: type(thing)}
    if isinstance(thing, Score):
        found |= {f"{path}.{key}": value for key, value in thing.state_dict().items()}
        for key, part in thing.named_children():
            found |= held(part, f"{path}.{key}") if isinstance(part, Score) else {}
    for key, value in vars(thing).items() if thing is not None else ():
        if key == "given" and isinstance(thing, attlas.Mask):
            continue  # what its numbers were copied from
        if isinstance(value, attlas.Mask):
            found |= held(value, f"{path}.{key}")
        elif not key.startswith("_") and key not in ("training", "cells", "keys", "queries"):
            found[f"{path}.{key}"] = value
        elif key in ("keys", "queries"):
            found[f"{path}.{key}"] = value._ids
    return found


def same(a: Any, b: Any) -> bool:
    """Tell whether two values are equal to the bit, types and dtypes included."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.shape != b.shape or a.dtype is not b.dtype:
            return False
        flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*flat)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def facts_of(entry: Entry) -> dict[str, Any]:
    """Return what an entry says beside its matrix."""
    return {key: value for key, value in vars(entry).items() if key != "matrix"}


def assert_same(a: Atlas, b: Atlas, *, masks: bool = False) -> None:
    """Compare two atlases to the bit; masks by what they allow unless asked for their settings."""
    for key in ("model", "ids", "tokens", "spans", "details"):
        assert same(getattr(a, key), getattr(b, key)), key
    assert len(a.entries) == len(b.entries)
    for one, other in zip(a.entries, b.entries, strict=True):
        for key, value in facts_of(one).items():
            assert same(value, getattr(other, key)), f"{one!r}: {key}"
        assert (one.matrix is None) is (other.matrix is None)
        if one.matrix is None or other.matrix is None:
            continue
        first, second = parts_of(one.matrix), parts_of(other.matrix)
        keys = [key for key in first if masks or not key.startswith("mask")]
        wrong = [key for key in keys if key not in second or not same(first[key], second[key])]
        assert not wrong, f"{one!r}: {wrong}"
        # Kernels may sum in another order where strides differ; the numbers they start from are equal to the bit.
        torch.testing.assert_close(one.matrix.to_dense(), other.matrix.to_dense(), equal_nan=True)


@pytest.fixture
def atlas() -> Atlas:
    return make_atlas()
