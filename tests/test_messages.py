"""Whole texts of errors at every public door: the rule, what was given, what disagrees, one thing to type."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import attlas
from attlas import (
    AttlasError,
    BackendError,
    DeviceError,
    DtypeError,
    OutOfRangeError,
    Plan,
    ShapeError,
    TooLargeError,
    stats,
)
from attlas.errors import explain, kind

zeros = torch.zeros
q, k, v = zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 3)
A = attlas.attend(q, k)
long = zeros(1, 16, 1, 8).expand(1, 16, 100_000, 8)
big = attlas.attend(long, long)


class Square(attlas.Score):
    """A score of a user's own that forgets the sizes of its tile."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, at: attlas.Tile) -> torch.Tensor:
        return zeros(3, 3)


@dataclass(frozen=True)
class Case:
    """One wrong call, the class of its error and the whole text."""

    name: str
    error: type[AttlasError]
    call: Callable[[], Any]
    text: str


CASES = [
    Case(
        "a score of a wrong shape",
        ShapeError,
        lambda: attlas.attend(q, k, score=Square()) @ v,
        """Square(): forward() must return log-weights that broadcast to (batches, heads, rows, columns).
  returned: (3, 3) float32 cpu
  found: shape (3, 3) for a tile of (2, 4, 5, 7)
  fix: attlas.testing.check_score(score) asks it for tiles of all kinds.""",
    ),
    Case(
        "q list",
        DtypeError,
        lambda: attlas.attend([[1.0]], k),
        """attend(): q must be a torch.Tensor.
  q (..., m, d): list
  found: a list
  fix: torch.as_tensor(q)""",
    ),
    Case(
        "k array",
        DtypeError,
        lambda: attlas.attend(q, k.numpy()),
        """attend(): k must be a torch.Tensor.
  k (..., n, d): ndarray
  found: an ndarray
  fix: torch.as_tensor(k)""",
    ),
    Case(
        "q int",
        DtypeError,
        lambda: attlas.attend(q.long(), k.long()),
        """attend(): q must be float64, float32, float16 or bfloat16.
  q (..., m, d): (2, 4, 5, 8) int64 cpu
  k (..., n, d): (2, 2, 7, 8) int64 cpu
  found: q is int64
  fix: q.float()""",
    ),
    Case(
        "q complex",
        DtypeError,
        lambda: attlas.attend(q.to(torch.complex64), k),
        """attend(): q must be float64, float32, float16 or bfloat16.
  q (..., m, d): (2, 4, 5, 8) complex64 cpu
  k (..., n, d): (2, 2, 7, 8) float32 cpu
  found: q is complex64
  fix: q.float()""",
    ),
    Case(
        "dtypes that differ",
        DtypeError,
        lambda: attlas.attend(q, k.half()),
        """attend(): q and k must have the same dtype.
  q (..., m, d): (2, 4, 5, 8) float32 cpu
  k (..., n, d): (2, 2, 7, 8) float16 cpu
  found: float32 and float16
  fix: k.to(torch.float32)""",
    ),
    Case(
        "devices that differ",
        DeviceError,
        lambda: attlas.attend(q, k.to("meta")),
        """attend(): q and k must be on the same device.
  q (..., m, d): (2, 4, 5, 8) float32 cpu
  k (..., n, d): (2, 2, 7, 8) float32 meta
  found: cpu and meta
  fix: k.to('cpu')""",
    ),
    Case(
        "tokens without a size",
        ShapeError,
        lambda: attlas.attend(zeros(5), zeros(7)),
        """attend(): q needs at least two axes, tokens and size.
  q (..., m, d): (5,) float32 cpu
  k (..., n, d): (7,) float32 cpu
  found: shape (5,) in q
  fix: q.unsqueeze(-1) for tokens of size 1.""",
    ),
    Case(
        "a number for keys",
        ShapeError,
        lambda: attlas.attend(zeros(5, 3), zeros(())),
        """attend(): k needs at least two axes, tokens and size.
  q (..., m, d): (5, 3) float32 cpu
  k (..., n, d): () float32 cpu
  found: shape () in k
  fix: k.unsqueeze(-1) for tokens of size 1.""",
    ),
    Case(
        "sizes that differ",
        ShapeError,
        lambda: attlas.attend(q, zeros(2, 2, 7, 9)),
        """attend(): q and k must have the same last axis when score is ScaledDot().
  q (..., m, d): (2, 4, 5, 8) float32 cpu
  k (..., n, d): (2, 2, 7, 9) float32 cpu
  found: d = 8 in q, d = 9 in k
  fix: project both to one size, or use score=Additive(8, 9, hidden_size).""",
    ),
    Case(
        "heads that do not divide",
        ShapeError,
        lambda: attlas.attend(zeros(2, 4, 5, 8), zeros(2, 3, 7, 8)),
        """attend(): the heads of k must divide the heads of q (grouped heads).
  q (..., m, d): (2, 4, 5, 8) float32 cpu
  k (..., n, d): (2, 3, 7, 8) float32 cpu
  found: 4 query heads, 3 key heads
  fix: give k a number of heads that divides 4; the axes are (batch, heads, tokens, size).""",
    ),
    Case(
        "more key heads",
        ShapeError,
        lambda: attlas.attend(zeros(2, 2, 5, 8), zeros(2, 4, 7, 8)),
        """attend(): the heads of k must divide the heads of q (grouped heads).
  q (..., m, d): (2, 2, 5, 8) float32 cpu
  k (..., n, d): (2, 4, 7, 8) float32 cpu
  found: 2 query heads, 4 key heads
  fix: give k a number of heads that divides 2; the axes are (batch, heads, tokens, size).""",
    ),
    Case(
        "no key heads",
        ShapeError,
        lambda: attlas.attend(zeros(2, 4, 5, 8), zeros(2, 0, 7, 8)),
        """attend(): the heads of k must divide the heads of q (grouped heads).
  q (..., m, d): (2, 4, 5, 8) float32 cpu
  k (..., n, d): (2, 0, 7, 8) float32 cpu
  found: 4 query heads, 0 key heads
  fix: give k a number of heads that divides 4; the axes are (batch, heads, tokens, size).""",
    ),
    Case(
        "batches that differ",
        ShapeError,
        lambda: attlas.attend(zeros(2, 4, 5, 8), zeros(3, 4, 7, 8)),
        """attend(): the batch axes of k must fit those of the queries: equal, or 1.
  q (..., m, d): (2, 4, 5, 8) float32 cpu
  k (..., n, d): (3, 4, 7, 8) float32 cpu
  found: batch axes (2,) and (3,)
  fix: pass tensors as (batch, heads, tokens, size) of one batch.""",
    ),
    Case(
        "batch 1 axis",
        ShapeError,
        lambda: attlas.attend(zeros(2, 5, 8), zeros(3, 7, 8)),
        """attend(): the batch axes of k must fit those of the queries: equal, or 1.
  q (..., m, d): (2, 5, 8) float32 cpu
  k (..., n, d): (3, 7, 8) float32 cpu
  found: batch axes (2,) and (3,)
  fix: pass tensors as (batch, heads, tokens, size) of one batch.""",
    ),
    Case(
        "score class",
        DtypeError,
        lambda: attlas.attend(q, k, score=attlas.ScaledDot),
        """attend(): score must be an attlas.Score.
  score: ScaledDot
  found: the class ScaledDot
  fix: score=ScaledDot(), an object and not its class.""",
    ),
    Case(
        "score str",
        DtypeError,
        lambda: attlas.attend(q, k, score="cosine"),
        """attend(): score must be an attlas.Score.
  score: str
  found: a str
  fix: make it a class: class MyScore(attlas.Score) with forward(self, q, k, at).""",
    ),
    Case(
        "score+scale",
        ShapeError,
        lambda: attlas.attend(q, k, score=attlas.Cosine(), scale=0.5),
        """attend(): scale belongs to the default score; a score of your own has its own.
  score: Cosine
  scale: 0.5
  found: both score and scale
  fix: score=0.5 * score, or ScaledDot(0.5).""",
    ),
    Case(
        "scale nan",
        ShapeError,
        lambda: attlas.attend(q, k, scale=math.nan),
        """ScaledDot(): scale must be a finite number.
  found: scale = nan
  fix: leave scale out for 1 / sqrt(d).""",
    ),
    Case(
        "scale str",
        ShapeError,
        lambda: attlas.attend(q, k, scale="a"),
        """ScaledDot(): scale must be a finite number.
  found: scale = 'a'
  fix: leave scale out for 1 / sqrt(d).""",
    ),
    Case(
        "mask str",
        DtypeError,
        lambda: attlas.attend(q, k, mask="causal"),
        """attend(): mask must be a Mask, a bool or float tensor, or a function mask_mod(b, h, i, j).
  mask: str
  found: a str
  fix: mask=attlas.Causal()""",
    ),
    Case(
        "mask class",
        DtypeError,
        lambda: attlas.attend(q, k, mask=attlas.Causal),
        """attend(): mask must be a Mask, a bool or float tensor, or a function mask_mod(b, h, i, j).
  mask: Causal
  found: the class Causal
  fix: mask=attlas.Causal()""",
    ),
    Case(
        "mask int tensor",
        DtypeError,
        lambda: attlas.attend(q, k, mask=torch.ones(5, 7).long()),
        """from_tensor(): a mask tensor must be bool (True = may attend) or floating point (added to the scores).
  t: (5, 7) int64 cpu
  found: int64
  fix: from_tensor(t.bool()), if 1 means that the query may attend.""",
    ),
    Case(
        "mask size",
        ShapeError,
        lambda: attlas.attend(q, k, mask=torch.ones(5, 8).bool()),
        """attend(): the mask tensor must have the sizes of the matrix, or 1.
  mask: (5, 8) bool cpu
  matrix (batch, heads, m, n): (2, 4, 5, 7)
  found: n = 8 in mask, 7 in matrix
  fix: use a mask of shape (m, n), (batch, m, n) or (batch, heads, m, n).""",
    ),
    Case(
        "mask pad",
        ShapeError,
        lambda: attlas.attend(q, k, mask=torch.ones(2, 7).bool()),
        """attend(): the mask tensor must have the sizes of the matrix, or 1.
  mask: (2, 7) bool cpu
  matrix (batch, heads, m, n): (2, 4, 5, 7)
  found: m = 2 in mask, 5 in matrix
  fix: for a padding mask of shape (batch, n): from_tensor(t[:, None, None, :]).""",
    ),
    Case(
        "mask heads",
        ShapeError,
        lambda: attlas.attend(q, k, mask=torch.ones(4, 5, 7).bool()),
        """attend(): the mask tensor must have the sizes of the matrix, or 1.
  mask: (4, 5, 7) bool cpu
  matrix (batch, heads, m, n): (2, 4, 5, 7)
  found: batch = 4 in mask, 2 in matrix
  fix: for one mask a head: from_tensor(t[None]).""",
    ),
    Case(
        "mask heads 3",
        ShapeError,
        lambda: attlas.attend(q, k, mask=torch.ones(2, 3, 5, 7).bool()),
        """attend(): the mask tensor must have the sizes of the matrix, or 1.
  mask: (2, 3, 5, 7) bool cpu
  matrix (batch, heads, m, n): (2, 4, 5, 7)
  found: heads = 3 in mask, 4 in matrix
  fix: use a mask of shape (m, n), (batch, m, n) or (batch, heads, m, n).""",
    ),
    Case(
        "mask 1d",
        ShapeError,
        lambda: attlas.attend(q, k, mask=torch.ones(7).bool()),
        """from_tensor(): a mask tensor must have the axes (m, n), (batch, m, n) or (batch, heads, m, n).
  t: (7,) bool cpu
  found: 1 axes
  fix: t[None, :] for one row of keys that all queries share.""",
    ),
    Case(
        "padding count",
        ShapeError,
        lambda: attlas.attend(q, k, mask=attlas.Padding([1, 2, 3])),
        """attend(): Padding() must have one entry for each sequence of the batch, or one for all.
  lengths: (3,)
  batch: (2,)
  found: 3 entries, 2 sequences
  fix: give 2 numbers, or one for all.""",
    ),
    Case(
        "padding long",
        ShapeError,
        lambda: attlas.attend(q, k, mask=attlas.Padding([7, 8])),
        """attend(): the lengths of Padding() must be at most the number of keys.
  mask: Padding([7, 8])
  keys: n = 7
  found: a length of 8, n = 7
  fix: count the real keys only: Padding(lengths.clamp(max=7)).""",
    ),
    Case(
        "documents",
        ShapeError,
        lambda: attlas.attend(q, k, mask=attlas.Documents([0, 0, 1])),
        """attend(): Documents() must have one id for each key, and one for each query.
  ids: (3,)
  found: 3 ids for n = 7 keys and m = 5 queries
  fix: use Documents(ids, query_ids) with shapes (n,) and (m,).""",
    ),
    Case(
        "mask_mod numbers",
        DtypeError,
        lambda: attlas.attend(q, k, mask=lambda b, h, i, j: i * 1.0).lse,
        """from_function(<lambda>): mask_mod must return True or False.
  returned: (5, 1) float32 cpu
  found: numbers
  fix: compare: return scores > 0. Numbers that are added belong into a score.""",
    ),
    Case(
        "mask_mod if",
        ShapeError,
        lambda: attlas.attend(q, k, mask=lambda b, h, i, j: i > j and j > 2).lse,
        """from_function(<lambda>): mask_mod must return one True or False for a batch, head, query and key.
  tile: (2, 4, 5, 7)
  found: RuntimeError: Boolean value of Tensor with more than one value is ambiguous
  fix: write it without `if`, `and`, `or`: use torch.where, &, |, and index with i and j.""",
    ),
    Case(
        "mask_mod args",
        ShapeError,
        lambda: attlas.attend(q, k, mask=lambda i, j: i > j).lse,
        """from_function(<lambda>): mask_mod must return one True or False for a batch, head, query and key.
  tile: (2, 4, 5, 7)
  found: TypeError: <lambda>.<locals>.<lambda>() takes 2 positional arguments but 4 were given
  fix: write it without `if`, `and`, `or`: use torch.where, &, |, and index with i and j.""",
    ),
    Case(
        "sink size",
        ShapeError,
        lambda: attlas.attend(q, k, sink=zeros(3)),
        """attend(): sink must hold one logit for each query head.
  sink (heads,): (3,) float32 cpu
  q (batch, heads, m, d): (2, 4, 5, 8) float32 cpu
  found: shape (3,), 4 heads
  fix: pass a tensor of shape (4,).""",
    ),
    Case(
        "sink 2d",
        ShapeError,
        lambda: attlas.attend(q, k, sink=zeros(4, 1)),
        """attend(): sink must hold one logit for each query head.
  sink (heads,): (4, 1) float32 cpu
  q (batch, heads, m, d): (2, 4, 5, 8) float32 cpu
  found: shape (4, 1), 4 heads
  fix: pass a tensor of shape (4,).""",
    ),
    Case(
        "sink int",
        DtypeError,
        lambda: attlas.attend(q, k, sink=zeros(4).long()),
        """attend(): sink must be a floating point tensor with one logit for each head.
  sink (heads,): (4,) int64 cpu
  found: integers
  fix: torch.as_tensor(sink, dtype=q.dtype, device=q.device)""",
    ),
    Case(
        "sink list",
        DtypeError,
        lambda: attlas.attend(q, k, sink=[0.0, 0.0, 0.0, 0.0]),
        """attend(): sink must be a floating point tensor with one logit for each head.
  sink (heads,): list
  found: a list
  fix: torch.as_tensor(sink, dtype=q.dtype, device=q.device)""",
    ),
    Case(
        "sink device",
        DeviceError,
        lambda: attlas.attend(q, k, sink=zeros(4, device="meta")),
        """attend(): sink must be on the device of q.
  sink (heads,): (4,) float32 meta
  q (batch, heads, m, d): (2, 4, 5, 8) float32 cpu
  found: meta and cpu
  fix: sink.to(q.device)""",
    ),
    Case(
        "plan str",
        DtypeError,
        lambda: attlas.attend(q, k, plan="tiled"),
        """attend(): plan must be an attlas.Plan.
  plan: str
  found: a str
  fix: plan=attlas.Plan(backend='tiled')""",
    ),
    Case(
        "plan backend",
        ShapeError,
        lambda: Plan("flash"),
        """Plan(): backend must be one of 'auto', 'native', 'reference', 'sdpa', 'tiled'.
  found: backend = 'flash'
  fix: leave backend out; attlas.explain(A) tells what runs.""",
    ),
    Case(
        "plan rows",
        ShapeError,
        lambda: Plan(rows=0),
        """Plan(): rows must be a whole number above 0.
  found: rows = 0
  fix: leave rows out for the size that suits this device.""",
    ),
    Case(
        "plan columns",
        ShapeError,
        lambda: Plan(columns=2.5),
        """Plan(): columns must be a whole number above 0.
  found: columns = 2.5
  fix: leave columns out for the size that suits this device.""",
    ),
    Case(
        "plan cells",
        ShapeError,
        lambda: Plan(cells=True),
        """Plan(): cells must be a whole number above 0.
  found: cells = True
  fix: leave cells out for the size that suits this device.""",
    ),
    Case(
        "sdpa dropout",
        BackendError,
        lambda: attlas.attention(q, k, v, dropout_p=0.1, plan=Plan("sdpa")),
        """A @ v: the plan asks for a backend that cannot run this problem.
  plan: Plan(backend='sdpa', rows=None, columns=None, cells=None)
  score: ScaledDot
  found: sdpa does not run: dropout has to be the same when it is recomputed
  fix: leave the plan out, or Plan(backend='tiled').""",
    ),
    Case(
        "sdpa additive",
        BackendError,
        lambda: attlas.attend(q, k, score=attlas.Additive(8, 8, 4), plan=Plan("sdpa")) @ v,
        """A @ v: the plan asks for a backend that cannot run this problem.
  plan: Plan(backend='sdpa', rows=None, columns=None, cells=None)
  score: Additive
  found: sdpa does not run: the score is not a dot product, or not accurate as one here
  fix: leave the plan out, or Plan(backend='tiled').""",
    ),
    Case(
        "sdpa explain",
        BackendError,
        lambda: attlas.explain(attlas.attend(q, k, score=attlas.Laplace(), plan=Plan("sdpa"))),
        """A @ v: the plan asks for a backend that cannot run this problem.
  plan: Plan(backend='sdpa', rows=None, columns=None, cells=None)
  score: Laplace
  found: sdpa does not run: the score is not a dot product, or not accurate as one here
  fix: leave the plan out, or Plan(backend='tiled').""",
    ),
    Case(
        "sdpa empty",
        BackendError,
        lambda: attlas.attend(q[:, :, :0], k, plan=Plan("sdpa")) @ v,
        """A @ v: the plan asks for a backend that cannot run this problem.
  plan: Plan(backend='sdpa', rows=None, columns=None, cells=None)
  score: ScaledDot
  found: sdpa does not run: there is nothing to compute
  fix: leave the plan out, or Plan(backend='tiled').""",
    ),
    Case(
        "dropout 2",
        ShapeError,
        lambda: attlas.attention(q, k, v, dropout_p=2.0),
        """attention(): dropout_p must be a probability, from 0 to 1.
  found: dropout_p = 2.0
  fix: dropout_p=0.1""",
    ),
    Case(
        "dropout nan",
        ShapeError,
        lambda: attlas.attention(q, k, v, dropout_p=math.nan),
        """attention(): dropout_p must be a probability, from 0 to 1.
  found: dropout_p = nan
  fix: dropout_p=0.1""",
    ),
    Case(
        "dropout str",
        ShapeError,
        lambda: attlas.attention(q, k, v, dropout_p="0.1"),
        """attention(): dropout_p must be a probability, from 0 to 1.
  found: dropout_p = '0.1'
  fix: dropout_p=0.1""",
    ),
    Case(
        "v rows",
        ShapeError,
        lambda: A @ zeros(2, 2, 6, 3),
        """A @ v: there must be one row of v for each key.
  key tokens (batch, heads, n, d): (2, 2, 7, 8) float32 cpu
  v (..., n, e): (2, 2, 6, 3) float32 cpu
  found: 6 rows in v, n = 7
  fix: pass v as (..., 7, e).""",
    ),
    Case(
        "v lead",
        ShapeError,
        lambda: A @ zeros(3, 2, 7, 3),
        """A @ v: the leading axes of v must fit those of the matrix; its heads divide the query heads.
  v (..., n, e): (3, 2, 7, 3) float32 cpu
  A: leading axes (2, 4)
  found: leading axes (3, 2) in v, (2, 4) in the matrix
  fix: pass v as (2, 4, 7, e), or (7, e) for all.""",
    ),
    Case(
        "v heads",
        ShapeError,
        lambda: A @ zeros(2, 3, 7, 3),
        """A @ v: the leading axes of v must fit those of the matrix; its heads divide the query heads.
  v (..., n, e): (2, 3, 7, 3) float32 cpu
  A: leading axes (2, 4)
  found: leading axes (2, 3) in v, (2, 4) in the matrix
  fix: pass v as (2, 4, 7, e), or (7, e) for all.""",
    ),
    Case(
        "v too many axes",
        ShapeError,
        lambda: A @ zeros(1, 2, 2, 7, 3),
        """A @ v: the leading axes of v must fit those of the matrix; its heads divide the query heads.
  v (..., n, e): (1, 2, 2, 7, 3) float32 cpu
  A: leading axes (2, 4)
  found: leading axes (1, 2, 2) in v, (2, 4) in the matrix
  fix: pass v as (2, 4, 7, e), or (7, e) for all.""",
    ),
    Case(
        "v dtype",
        DtypeError,
        lambda: A @ v.double(),
        """A @ v: key and v must have the same dtype.
  key tokens (batch, heads, n, d): (2, 2, 7, 8) float32 cpu
  v (..., n, e): (2, 2, 7, 3) float64 cpu
  found: float32 and float64
  fix: v.to(torch.float32)""",
    ),
    Case(
        "v int",
        DtypeError,
        lambda: A @ v.long(),
        """A @ v: v must be float64, float32, float16 or bfloat16.
  key tokens (batch, heads, n, d): (2, 2, 7, 8) float32 cpu
  v (..., n, e): (2, 2, 7, 3) int64 cpu
  found: v is int64
  fix: v.float()""",
    ),
    Case(
        "v list",
        DtypeError,
        lambda: A @ [1.0],
        """A @ v: v must be a torch.Tensor.
  v (..., n, e): list
  found: a list
  fix: torch.as_tensor(v)""",
    ),
    Case(
        "v device",
        DeviceError,
        lambda: A @ v.to("meta"),
        """A @ v: key and v must be on the same device.
  key tokens (batch, heads, n, d): (2, 2, 7, 8) float32 cpu
  v (..., n, e): (2, 2, 7, 3) float32 meta
  found: cpu and meta
  fix: v.to('cpu')""",
    ),
    Case(
        "v 0d",
        ShapeError,
        lambda: A @ zeros(()),
        """A @ v: v needs at least two axes, tokens and size.
  key tokens (batch, heads, n, d): (2, 2, 7, 8) float32 cpu
  v (..., n, e): () float32 cpu
  found: shape () in v
  fix: v.unsqueeze(-1) for tokens of size 1.""",
    ),
    Case(
        "v vector",
        ShapeError,
        lambda: A @ zeros(6),
        """A @ v: there must be one row of v for each key.
  key tokens (batch, heads, n, d): (2, 2, 7, 8) float32 cpu
  v (..., n, e): (6, 1) float32 cpu
  found: 6 rows in v, n = 7
  fix: pass v as (..., 7, e).""",
    ),
    Case(
        "v part",
        ShapeError,
        lambda: A[0, 1] @ zeros(2, 7, 3),
        """A @ v: the leading axes of v must fit those of the matrix; its heads divide the query heads.
  v (..., n, e): (2, 7, 3) float32 cpu
  A: leading axes ()
  found: leading axes (2,) in v, () in the matrix
  fix: pass v as (7, e).""",
    ),
    Case(
        "mT rows",
        ShapeError,
        lambda: A.mT @ zeros(7, 3),
        """A.mT @ x: there must be one row of x for each query.
  query tokens (batch, heads, m, d): (2, 4, 5, 8) float32 cpu
  x (..., m, e): (7, 3) float32 cpu
  found: 7 rows in x, m = 5
  fix: pass x as (..., 5, e).""",
    ),
    Case(
        "mT dtype",
        DtypeError,
        lambda: A.mT @ zeros(5, 3).half(),
        """A.mT @ x: query and x must have the same dtype.
  query tokens (batch, heads, m, d): (2, 4, 5, 8) float32 cpu
  x (..., m, e): (5, 3) float16 cpu
  found: float32 and float16
  fix: x.to(torch.float32)""",
    ),
    Case(
        "mT lead",
        ShapeError,
        lambda: A.mT @ zeros(2, 3, 5, 3),
        """A.mT @ x: the leading axes of x must fit those of the matrix; its heads divide the query heads.
  x (..., m, e): (2, 3, 5, 3) float32 cpu
  A: leading axes (2, 4)
  found: leading axes (2, 3) in x, (2, 4) in the matrix
  fix: pass x as (2, 4, 5, e), or (5, e) for all.""",
    ),
    Case(
        "mT list",
        DtypeError,
        lambda: A.mT @ [1],
        """A.mT @ x: x must be a torch.Tensor.
  x (..., m, e): list
  found: a list
  fix: torch.as_tensor(x)""",
    ),
    Case(
        "idx range 0",
        OutOfRangeError,
        lambda: A[2],
        """A[...]: an index lies outside its axis.
  A: shape (2, 4, 5, 7)
  found: index 2 on axis 0 of size 2
  fix: use an index from -2 to 1.""",
    ),
    Case(
        "idx range neg",
        OutOfRangeError,
        lambda: A[-3],
        """A[...]: an index lies outside its axis.
  A: shape (2, 4, 5, 7)
  found: index -3 on axis 0 of size 2
  fix: use an index from -2 to 1.""",
    ),
    Case(
        "idx range heads",
        OutOfRangeError,
        lambda: A[0, 4],
        """A[...]: an index lies outside its axis.
  A: shape (2, 4, 5, 7)
  found: index 4 on axis 1 of size 4
  fix: use an index from -4 to 3.""",
    ),
    Case(
        "idx range row",
        OutOfRangeError,
        lambda: A[0, 0, 5],
        """A[...]: an index lies outside its axis.
  A: shape (2, 4, 5, 7)
  found: index 5 on axis 2 of size 5
  fix: use an index from -5 to 4.""",
    ),
    Case(
        "idx range col",
        OutOfRangeError,
        lambda: A[0, 0, 0, -8],
        """A[...]: an index lies outside its axis.
  A: shape (2, 4, 5, 7)
  found: index -8 on axis 3 of size 7
  fix: use an index from -7 to 6.""",
    ),
    Case(
        "idx range list",
        OutOfRangeError,
        lambda: A[0, 0, [1, 9]],
        """A[...]: an index lies outside its axis.
  A: shape (2, 4, 5, 7)
  found: index 9 on axis 2 of size 5
  fix: use an index from -5 to 4.""",
    ),
    Case(
        "idx after idx",
        OutOfRangeError,
        lambda: A[0][4],
        """A[...]: an index lies outside its axis.
  A: shape (4, 5, 7)
  found: index 4 on axis 0 of size 4
  fix: use an index from -4 to 3.""",
    ),
    Case(
        "idx too many",
        ShapeError,
        lambda: A[0, 0, 0, 0, 0],
        """A[...]: there are more indices than axes.
  A: shape (2, 4, 5, 7)
  found: 5 indices, 4 axes
  fix: A[0, 3, 17, :] for one row of one head.""",
    ),
    Case(
        "idx 2 dots",
        ShapeError,
        lambda: A[..., 0, ...],
        """A[...]: there is at most one Ellipsis.
  A: shape (2, 4, 5, 7)
  found: 2 of them
  fix: A[..., 17, :] for one row of all heads.""",
    ),
    Case(
        "idx float",
        DtypeError,
        lambda: A[1.0],
        """A[...]: an index is an integer, a slice, or a list of integers.
  index: 1.0
  found: a float
  fix: A[0, 3, 5:9, :] or A[..., [2, 5], :].""",
    ),
    Case(
        "idx float tensor",
        DtypeError,
        lambda: A[torch.tensor(1.0)],
        """A[...]: an index is an integer, a slice, or a list of integers.
  index: () float32 cpu
  found: a Tensor
  fix: A[0, 3, 5:9, :] or A[..., [2, 5], :].""",
    ),
    Case(
        "idx bool",
        DtypeError,
        lambda: A[True],
        """A[...]: an index is an integer, a slice, or a list of integers.
  index: True
  found: a bool
  fix: index with mask.nonzero().flatten().""",
    ),
    Case(
        "idx bool tensor",
        DtypeError,
        lambda: A[:, torch.ones(4).bool()],
        """A[...]: an index is an integer, a slice, or a list of integers.
  index: (4,) bool cpu
  found: a Tensor
  fix: index with mask.nonzero().flatten().""",
    ),
    Case(
        "idx bool list",
        DtypeError,
        lambda: A[:, [True, False, True, True]],
        """A[...]: an index is an integer, a slice, or a list of integers.
  index: [True, False, True, True]
  found: a list
  fix: index with mask.nonzero().flatten().""",
    ),
    Case(
        "idx none",
        DtypeError,
        lambda: A[None],
        """A[...]: an index is an integer, a slice, or a list of integers.
  index: None
  found: a NoneType
  fix: A[0, 3, 5:9, :] or A[..., [2, 5], :].""",
    ),
    Case(
        "idx str",
        DtypeError,
        lambda: A["a"],
        """A[...]: an index is an integer, a slice, or a list of integers.
  index: 'a'
  found: a str
  fix: A[0, 3, 5:9, :] or A[..., [2, 5], :].""",
    ),
    Case(
        "idx 2d",
        DtypeError,
        lambda: A[torch.zeros(2, 2).long()],
        """A[...]: an index is an integer, a slice, or a list of integers.
  index: (2, 2) int64 cpu
  found: a Tensor
  fix: A[0, 3, 5:9, :] or A[..., [2, 5], :].""",
    ),
    Case(
        "idx pairs",
        ShapeError,
        lambda: A[..., [0, 1, 2], [1, 2]],
        """A[...]: two lists of indices name cells in pairs and must have the same length.
  A: shape (2, 4, 5, 7)
  found: 3 rows, 2 columns
  fix: A[..., rows, :][..., columns] for every row with every column.""",
    ),
    Case(
        "idx two lists",
        ShapeError,
        lambda: A[[0, 1], :, [1, 2]],
        """A[...]: lists of indices may stand on one axis, or on rows and columns, where they name cells in pairs.
  A: shape (2, 4, 5, 7)
  found: lists on axes 0, 2
  fix: A[[0, 2]][:, [1, 3]], one axis after the other.""",
    ),
    Case(
        "idx nested",
        DtypeError,
        lambda: A[[[0, 1]]],
        """A[...]: an index is an integer, a slice, or a list of integers.
  index: [[0, 1]]
  found: a list
  fix: A[0, 3, 5:9, :] or A[..., [2, 5], :].""",
    ),
    Case(
        "idx empty axis",
        OutOfRangeError,
        lambda: attlas.attend(zeros(0, 8), zeros(3, 8))[0],
        """A[...]: an index lies outside its axis.
  A: shape (0, 3)
  found: index 0 on axis 0 of size 0
  fix: this axis is empty.""",
    ),
    Case(
        "logits idx",
        OutOfRangeError,
        lambda: A.logits[0, 0, 9],
        """A[...]: an index lies outside its axis.
  A: shape (2, 4, 5, 7)
  found: index 9 on axis 2 of size 5
  fix: use an index from -5 to 4.""",
    ),
    Case(
        "the whole matrix",
        TooLargeError,
        big.to_dense,
        """A.to_dense(): the whole matrix would be larger than the limit.
  A: shape (1, 16, 100000, 100000) float32
  found: 640,000,000,000 bytes, the limit is 1,073,741,824
  fix: read a part, A[..., :64, :], take A.topk(8) or stats.picture(A, 512, 512); limit=None insists.""",
    ),
    Case(
        "dense limit",
        TooLargeError,
        lambda: A.to_dense(limit=100),
        """A.to_dense(): the whole matrix would be larger than the limit.
  A: shape (2, 4, 5, 7) float32
  found: 1,120 bytes, the limit is 100
  fix: read a part, A[..., :64, :], take A.topk(8) or stats.picture(A, 512, 512); limit=None insists.""",
    ),
    Case(
        "dense logits",
        TooLargeError,
        lambda: A.logits.to_dense(limit=100),
        """A.logits.to_dense(): the whole matrix would be larger than the limit.
  A: shape (2, 4, 5, 7) float32
  found: 1,120 bytes, the limit is 100
  fix: read a part, A.logits[..., :64, :], take A.topk(8) or stats.picture(A, 512, 512); limit=None insists.""",
    ),
    Case(
        "amax 7",
        ShapeError,
        lambda: A.amax(7),
        """A.amax(): dim must be an axis of the matrix, or several.
  A: shape (2, 4, 5, 7)
  found: dim = 7
  fix: A.amax(-1) over keys, A.amax(-2) over queries, A.amax(1) over heads.""",
    ),
    Case(
        "argmax str",
        ShapeError,
        lambda: A.argmax("rows"),
        """A.argmax(): dim must be an axis of the matrix, or several.
  A: shape (2, 4, 5, 7)
  found: dim = 'rows'
  fix: A.argmax(-1) over keys, A.argmax(-2) over queries, A.argmax(1) over heads.""",
    ),
    Case(
        "sum of heads and 4",
        ShapeError,
        lambda: A.sum((1, 4)),
        """A.sum(): dim must be an axis of the matrix, or several.
  A: shape (2, 4, 5, 7)
  found: dim = 4
  fix: A.sum(-1) over keys, A.sum(-2) over queries, A.sum(1) over heads.""",
    ),
    Case(
        "mean over no heads",
        ShapeError,
        lambda: A[0, 0].mean(2),
        """A.mean(): dim must be an axis of the matrix, or several.
  A: shape (5, 7)
  found: dim = 2
  fix: A.mean(-1) over keys, A.mean(-2) over queries.""",
    ),
    Case(
        "mean over heads, large",
        TooLargeError,
        lambda: big.mean(1),
        """A.mean(): over leading axes it is a whole matrix, and that would be larger than the limit.
  A: shape (1, 16, 100000, 100000) float32
  dim: (1,)
  found: 40,000,000,000 bytes, the limit is 1,073,741,824
  fix: stats.picture(A, 512, 512).mean(1), or a window of queries, A[..., :64, :].mean(1).""",
    ),
    Case(
        "large matrices in a function of torch",
        TooLargeError,
        lambda: torch.stack([big, big]),
        """torch.stack(): it needs whole matrices, and they would be larger than the limit.
  A: shape (1, 16, 100000, 100000) float32
  matrices: 2
  found: 1,280,000,000,000 bytes, the limit is 1,073,741,824
  fix: take parts, A[..., :64, :], numbers, A.sum(-2), or A.to_dense(limit=None) to insist.""",
    ),
    Case(
        "logits mean",
        ShapeError,
        lambda: A.logits.mean(-2),
        """A.logits.mean(): log-weights are reduced over the keys of a row.
  A: shape (2, 4, 5, 7)
  found: dim = -2
  fix: A.logits.mean(-1)""",
    ),
    Case(
        "logits var",
        ShapeError,
        lambda: A.logits.var(0),
        """A.logits.var(): log-weights are reduced over the keys of a row.
  A: shape (2, 4, 5, 7)
  found: dim = 0
  fix: A.logits.var(-1)""",
    ),
    Case(
        "topk 8",
        ShapeError,
        lambda: A.topk(8),
        """TopK(): k cannot be larger than the number of keys.
  A: 5 queries × 7 keys
  found: k = 8, n = 7
  fix: TopK(7)""",
    ),
    Case(
        "topk 0",
        ShapeError,
        lambda: A.topk(0),
        """TopK(): k must be a whole number above 0.
  found: k = 0
  fix: k=8""",
    ),
    Case(
        "topk float",
        ShapeError,
        lambda: A.topk(1.5),
        """TopK(): k must be a whole number above 0.
  found: k = 1.5
  fix: k=8""",
    ),
    Case(
        "collect class",
        DtypeError,
        lambda: A.collect(stats.Entropy),
        """collect(): every argument must be a Statistic, an object and not its class.
  statistic: Entropy
  found: the class Entropy
  fix: A.collect(Entropy())""",
    ),
    Case(
        "collect str",
        DtypeError,
        lambda: A.collect("entropy"),
        """collect(): every argument must be a Statistic, an object and not its class.
  statistic: 'entropy'
  found: a str
  fix: A.collect(stats.Entropy(), stats.TopK(8))""",
    ),
    Case(
        "check 0",
        ShapeError,
        lambda: A.check(rows=0),
        """A.check(): rows must be a whole number above 0.
  found: rows = 0
  fix: A.check(rows=64)""",
    ),
    Case(
        "bandwidth nan",
        ShapeError,
        lambda: attlas.Gaussian(math.nan),
        """Gaussian(): every bandwidth must be a finite number above 0.
  found: bandwidth = nan
  fix: give the distance at which a weight should have fallen, such as bandwidth=1.0.""",
    ),
    Case(
        "bandwidth 0",
        ShapeError,
        lambda: attlas.Gaussian([1.0, 0.0]),
        """Gaussian(): every bandwidth must be a finite number above 0.
  found: bandwidth = 0.0
  fix: give the distance at which a weight should have fallen, such as bandwidth=1.0.""",
    ),
    Case(
        "bandwidth str",
        DtypeError,
        lambda: attlas.Gaussian("a"),
        """Gaussian(): bandwidth must be a number, a sequence of numbers or a floating-point tensor.
  bandwidth: a
  found: a str
  fix: give a float, such as bandwidth=1.0, or tensor.float().""",
    ),
    Case(
        "bandwidth size",
        ShapeError,
        lambda: attlas.attend(q, k, score=attlas.Gaussian([1.0, 2.0])),
        """attend(): bandwidth of Gaussian() must be one number, or one for each coordinate of q and k.
  q (..., m, d): (2, 4, 5, 8) float32 cpu
  k (..., n, d): (2, 2, 7, 8) float32 cpu
  found: d = 8 in q and k, 2 bandwidths
  fix: give 8 bandwidths, or one number for all coordinates.""",
    ),
    Case(
        "window neg",
        ShapeError,
        lambda: attlas.Window(-3, 0),
        """Window(): left must be 0 or more, or None for no limit.
  found: left = -3
  fix: use left=3: distances to both sides are counted from the query, without a sign.""",
    ),
    Case(
        "window float",
        DtypeError,
        lambda: attlas.Window(1.5, 0),
        """Window(): left must be a whole number.
  found: left = 1.5 (float)
  fix: give an int: left=4.""",
    ),
    Case(
        "causal float",
        DtypeError,
        lambda: attlas.Causal(0.5),
        """Causal(): offset must be a whole number.
  found: offset = 0.5 (float)
  fix: leave offset out, or give an int.""",
    ),
    Case(
        "alibi heads",
        ShapeError,
        lambda: attlas.attend(q, k, score=attlas.ScaledDot() + attlas.Alibi(3)),
        """attend(): Alibi() must have one slope for each head of q.
  found: 4 heads in q, 3 in Alibi()
  fix: use score=Alibi(4).""",
    ),
    Case(
        "relative heads",
        ShapeError,
        lambda: attlas.attend(q, k, score=attlas.RelativeBias(3, 8)),
        """attend(): RelativeBias() must have one row of biases for each head of q.
  found: 4 heads in q, 3 in RelativeBias()
  fix: use score=RelativeBias(4, ...).""",
    ),
    Case(
        "additive size",
        ShapeError,
        lambda: attlas.attend(q, k, score=attlas.Additive(4, 4, 8)),
        """attend(): the last axes of q and k must be 4 and 4 when score is Additive(4, 4, 8).
  q (..., m, d): (2, 4, 5, 8) float32 cpu
  k (..., n, dk): (2, 2, 7, 8) float32 cpu
  found: 8 in q, 8 in k
  fix: use score=Additive(8, 8, 8).""",
    ),
    Case(
        "bilinear size",
        ShapeError,
        lambda: attlas.attend(q, k, score=attlas.Bilinear(4, 4)),
        """attend(): the last axes of q and k must be 4 and 4 when score is Bilinear(4, 4).
  q (..., m, d): (2, 4, 5, 8) float32 cpu
  k (..., n, dk): (2, 2, 7, 8) float32 cpu
  found: 8 in q, 8 in k
  fix: use score=Bilinear(8, 8).""",
    ),
    Case(
        "tensorbias size",
        ShapeError,
        lambda: attlas.attend(q, k, score=attlas.TensorBias(zeros(5, 8))),
        """attend(): the tensor of TensorBias() must broadcast to (batch, heads, m, n).
  t: (5, 8) float32 cpu
  q (..., m, d): (2, 4, 5, 8) float32 cpu
  k (..., n, d): (2, 2, 7, 8) float32 cpu
  found: (5, 8) in t, (batch, heads, m, n) = (2, 4, 5, 7)
  fix: t.unsqueeze(1) if its first axis is the batch and it has no heads.""",
    ),
    Case(
        "softcap",
        ShapeError,
        lambda: attlas.SoftCap(attlas.ScaledDot(), 0),
        """SoftCap(): cap must be a finite number above 0.
  found: cap = 0
  fix: leave SoftCap out if the scores need no bound.""",
    ),
    Case(
        "softcap score",
        DtypeError,
        lambda: attlas.SoftCap("dot", 5.0),
        """SoftCap(): score must be an attlas.Score.
  score: 'dot'
  found: a str
  fix: attlas.SoftCap(attlas.ScaledDot(), 50.0)""",
    ),
    Case(
        "score add",
        DtypeError,
        lambda: attlas.ScaledDot() + 1,
        """score + other: both sides must be scores.
  other: int
  found: an int on the right
  fix: add a Score; a constant shift of all log-weights changes no weight.""",
    ),
    Case(
        "score mul",
        DtypeError,
        lambda: attlas.ScaledDot() * "a",
        """score * factor: a score is multiplied by one finite number.
  factor: str
  found: factor = 'a'
  fix: multiply by a Python float: 0.5 * score.""",
    ),
    Case(
        "score mul tensor",
        DtypeError,
        lambda: attlas.ScaledDot() * torch.tensor(2.0),
        """score * factor: a score is multiplied by one finite number.
  factor: Tensor
  found: factor = tensor(2.)
  fix: multiply by a Python float: 0.5 * score.""",
    ),
    Case(
        "mask and",
        DtypeError,
        lambda: attlas.Causal() & torch.ones(5, 5).bool(),
        """mask & other: both sides must be masks of attlas.
  other: Tensor
  found: a Tensor on one side
  fix: wrap it first: attlas.from_tensor(t) or attlas.from_function(mask_mod).""",
    ),
    Case(
        "mask not",
        ShapeError,
        lambda: ~attlas.from_tensor(torch.randn(5, 7)),
        """~ of masks: an additive mask can be combined with & only, since its numbers are added to the scores.
  mask: from_tensor(float32 (5, 7))
  found: an additive mask beside ~
  fix: make it boolean first: attlas.from_tensor(t > -float('inf')) before ~.""",
    ),
    Case(
        "picture 0",
        ShapeError,
        lambda: stats.picture(A, 0, 4),
        """Picture(): height must be a whole number above 0.
  found: height = 0
  fix: height=8""",
    ),
    Case(
        "picture pool",
        ShapeError,
        lambda: stats.picture(A, 2, 2, pool="median"),
        """Picture(): pool must be "mean" or "max".
  found: pool = 'median'
  fix: pool=\"mean\"""",
    ),
    Case(
        "picture big",
        ShapeError,
        lambda: stats.picture(A, 100, 100),
        """Picture(): a picture cannot have more blocks than the window has rows or columns.
  window: 5 queries × 7 keys
  found: height = 100, width = 100
  fix: Picture(5, 7)""",
    ),
    Case(
        "spans",
        ShapeError,
        lambda: stats.spans(A, [(0, 9)], [(0, 1)]),
        """Spans(): rows[0] must lie within the 5 queries of the matrix, and start before it stops.
  found: rows[0] = (0, 9)
  fix: rows[0]=slice(0, 5)""",
    ),
    Case(
        "rows slice",
        ShapeError,
        lambda: stats.column_mass(A, rows=slice(3, 99)),
        """ColumnMass(): rows must lie within the 5 queries of the matrix, and start before it stops.
  found: rows = slice(3, 99, None)
  fix: rows=slice(0, 5)""",
    ),
    Case(
        "spans2",
        ShapeError,
        lambda: stats.spans(A, [3], [(0, 1)]),
        """Spans(): rows[0] must be a slice, a range or a pair (start, stop) of whole numbers, without a step.
  found: rows[0] = 3
  fix: rows[0]=slice(0, 64)""",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_text(case: Case) -> None:
    with pytest.raises(AttlasError) as caught:
        case.call()
    assert type(caught.value) is case.error
    assert str(caught.value) == case.text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_form(case: Case) -> None:
    """Where and rule in one sentence, then indented facts, then what was found, then what to type."""
    first, *facts = case.text.split("\n")
    assert ": " in first
    assert first.endswith(".")
    assert all(fact.startswith("  ") and not fact.startswith("   ") for fact in facts)
    assert [fact.split(":")[0].strip() for fact in facts[-2:]] == ["found", "fix"]
    assert len(facts) <= 5
    assert " a a" not in case.text
    assert " a e" not in case.text


def test_names_of_the_cases_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_classes_of_errors_are_those_of_python_too() -> None:
    assert issubclass(ShapeError, ValueError)
    assert issubclass(OutOfRangeError, IndexError)
    assert issubclass(OutOfRangeError, ShapeError)
    assert issubclass(DtypeError, TypeError)
    assert issubclass(DeviceError, ValueError)
    assert issubclass(BackendError, RuntimeError)
    assert issubclass(TooLargeError, MemoryError)
    assert issubclass(attlas.RecordingError, AttlasError)
    for name in attlas.__all__:
        item = getattr(attlas, name)
        if isinstance(item, type) and issubclass(item, Exception):
            assert issubclass(item, AttlasError)


def test_explain_words_what_it_is_given() -> None:
    assert explain("f()", "x must be y.", {"t": zeros(2, 3), "x": 3, "w": "word"}, found="3", fix="y") == (
        "f(): x must be y.\n  t: (2, 3) float32 cpu\n  x: 3\n  w: word\n  found: 3\n  fix: y"
    )
    assert explain("f()", "r.", found="3", fix="y") == "f(): r.\n  found: 3\n  fix: y"


@pytest.mark.parametrize(
    ("value", "words"),
    [(1, "an int"), (1.5, "a float"), ([], "a list"), (np.zeros(1), "an ndarray"), (int, "the class int")],
)
def test_kind(value: object, words: str) -> None:
    assert kind(value) == words


def test_an_index_error_ends_a_loop() -> None:
    """Python's own protocol of iteration stops at an IndexError; ours is one."""
    parts = []
    for i in range(100):
        try:
            parts.append(A[i])
        except IndexError:
            break
    assert len(parts) == 2
