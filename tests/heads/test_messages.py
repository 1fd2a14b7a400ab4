"""Whole texts of errors."""

from collections.abc import Callable

import pytest
import torch

import attlas
from attlas import DtypeError, ShapeError, heads

A = attlas.attend(torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6, 4), mask=attlas.Causal())
CROSS = attlas.attend(torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 5, 4))
SHORT = attlas.attend(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
IDS = torch.arange(6)

CASES = [
    (
        "more queries than keys",
        ShapeError,
        lambda: heads.previous_token(CROSS),
        """PreviousToken(): distance needs a place for each query: the last stands at the last key, or shift says where.
  shift: None
  found: m = 6 queries, n = 5 keys
  fix: shift=0 where query 0 stands at key 0.""",
    ),
    (
        "tokens of another text",
        ShapeError,
        lambda: heads.induction(A, torch.arange(7)),
        """Induction(): ids must have one entry for each of the keys, for all texts alike or for each of the batch.
  ids: (7,) int64 cpu
  found: 6 keys and a batch of 1
  fix: a tensor of shape (6,) or (1, 6).""",
    ),
    (
        "query_mask of integers",
        DtypeError,
        lambda: heads.broad(A, query_mask=torch.ones(6, dtype=torch.int64)),
        """Broad(): query_mask must be a tensor of bool, True for a query to include.
  query_mask: (6,) int64 cpu
  found: int64
  fix: query_mask=attention_mask.bool()""",
    ),
    (
        "width",
        ShapeError,
        lambda: heads.local(A, width=0),
        """Local(): width must be a whole number above 0.
  found: width = 0
  fix: Local(width=16)""",
    ),
    (
        "separators without tokens",
        ShapeError,
        lambda: heads.scores(A, separators=[1, 2]),
        """scores(): separators are found by the tokens of the keys.
  separators: (1, 2)
  found: no ids
  fix: scores(A, ids, separators)""",
    ),
    (
        "bins",
        ShapeError,
        lambda: heads.by_distance(A, bins="ten"),
        """by_distance(): bins must be "each" or "log".
  found: bins = 'ten'
  fix: bins="log\"""",
    ),
    (
        "needle without keys",
        ShapeError,
        lambda: heads.retrieval_score(A, (2, 2), (3, 5), IDS),
        """retrieval_score(): needle must hold one of the keys at least.
  found: needle = (2, 2)
  fix: needle=(0, 6)""",
    ),
    (
        "needle outside",
        ShapeError,
        lambda: heads.retrieval_score(A, (2, 9), (3, 5), IDS),
        """retrieval_score(): needle must lie within the 6 keys of the matrix, and start before it stops.
  found: needle = (2, 9)
  fix: needle=slice(0, 6)""",
    ),
    (
        "tokens of a retrieval",
        ShapeError,
        lambda: heads.retrieval_score(A, (1, 2), (3, 5), IDS[:4]),
        """retrieval_score(): ids must hold the token of each key.
  ids: (4,) int64 cpu
  found: n = 6 keys
  fix: a tensor of shape (6,).""",
    ),
    (
        "nobody knows what the last query writes",
        ShapeError,
        lambda: heads.retrieval_score(A, (1, 2), (3, 6), IDS),
        """retrieval_score(): the token that a query writes must be known: the next one of ids, or written.
  found: rows 3 to 5 write tokens 4 to 6 of 6
  fix: leave out the last row, or pass written=.""",
    ),
    (
        "written",
        ShapeError,
        lambda: heads.retrieval_score(A, (1, 2), (3, 6), IDS, written=IDS[:2]),
        """retrieval_score(): written must hold one token for each of the rows.
  written: (2,) int64 cpu
  found: 3 rows
  fix: a tensor of shape (3,).""",
    ),
    (
        "no layer",
        ShapeError,
        lambda: heads.rollout([]),
        """rollout(): there must be a layer.
  found: no matrix
  fix: output.attentions""",
    ),
    (
        "dense weights",
        DtypeError,
        lambda: heads.flow([A.to_dense()]),
        """flow(): matrices must be AttentionMatrix objects, one for each layer.
  matrices[0]: (1, 2, 6, 6) float32 cpu
  found: a Tensor
  fix: output.attentions of a model with attn_implementation='attlas'.""",
    ),
    (
        "cross-attention rolled out",
        ShapeError,
        lambda: heads.rollout([A, CROSS]),
        """rollout(): every layer must be the self-attention of one whole text: (..., heads, n, n), of one batch and n.
  first layer: shape (1, 2, 6, 6)
  found: a layer of shape (1, 2, 6, 5)
  fix: run the text in one forward pass, without a cache, and keep the head axis: A[0], not A[0, 3].""",
    ),
    (
        "residual",
        ShapeError,
        lambda: heads.rollout([A], residual=1.5),
        """rollout(): residual must lie between 0 and 1.
  found: residual = 1.5
  fix: residual=0.5""",
    ),
    (
        "rows outside",
        ShapeError,
        lambda: heads.rollout([A], rows=[6]),
        """rollout(): rows must be whole numbers that name tokens of the text.
  found: rows = [6], n = 6 tokens
  fix: rows=[0, -1]""",
    ),
    (
        "no columns",
        ShapeError,
        lambda: heads.flow([A], columns=[]),
        """flow(): columns must be whole numbers that name tokens of the text.
  found: columns = [], n = 6 tokens
  fix: columns=[0, -1]""",
    ),
    (
        "weights of heads",
        ShapeError,
        lambda: heads.flow([A], heads=torch.zeros(2)),
        """flow(): heads must weigh each head of each layer, with numbers from 0 on that are not all 0.
  heads: (2,) float32 cpu
  found: 1 layers, 2 heads in layer 0
  fix: a tensor of shape (2,) or (1, 2); leave heads out for their mean.""",
    ),
    (
        "layers of a table",
        ShapeError,
        lambda: heads.span_table([A, SHORT], {"all": (0, 5)}),
        """span_table(): the layers of one table must have equal sizes.
  first layer: shape (1, 2, 6, 6)
  found: a layer of shape (1, 2, 5, 5)
  fix: one table for each kind of layer.""",
    ),
    (
        "a table of nothing",
        ShapeError,
        lambda: heads.span_table([], {"all": (0, 5)}),
        """span_table(): there must be a layer.
  found: no matrix
  fix: output.attentions""",
    ),
    (
        "a span that is none",
        ShapeError,
        lambda: heads.span_table(A, {"user": 3}),
        """span_table(): user must be a slice, a range or a pair (start, stop) of whole numbers, without a step.
  found: user = 3
  fix: user=slice(0, 64)""",
    ),
    (
        "threshold",
        ShapeError,
        lambda: heads.qk_clip(A, threshold=0.0),
        """qk_clip(): threshold must be above 0.
  found: threshold = 0.0
  fix: threshold=100.0""",
    ),
    (
        "alpha",
        ShapeError,
        lambda: heads.qk_clip(A, alpha=1.5),
        """qk_clip(): alpha must lie from 0 to 1.
  found: alpha = 1.5
  fix: alpha=0.5""",
    ),
    (
        "one head without its axis",
        ShapeError,
        lambda: heads.qk_clip(A[0, 1]),
        """qk_clip(): there must be a head axis.
  A: shape (6, 6)
  found: no leading axis
  fix: A[:, 3:4] keeps the axis of head 3.""",
    ),
    (
        "key heads",
        ShapeError,
        lambda: heads.qk_clip(torch.ones(4), key_heads=3),
        """qk_clip(): key heads must divide the query heads.
  found: 3 key heads, 4 query heads
  fix: key_heads=model.config.num_key_value_heads""",
    ),
    (
        "a projection of other heads",
        ShapeError,
        lambda: heads.qk_clip(torch.ones(4)).apply_(torch.ones(8, 3), torch.ones(6, 3)),
        """apply_(): the rows of the key projection must be those of its heads, head by head.
  key_weight: (6, 3) float32 cpu
  found: 4 heads
  fix: pass torch.nn.Linear's weight, of shape (heads * d, size).""",
    ),
    (
        "share",
        ShapeError,
        lambda: heads.EntropyAlarm(share=2.0),
        """EntropyAlarm(): share must lie from 0 to 1.
  found: share = 2.0
  fix: share=0.5""",
    ),
    (
        "rows of the alarm",
        ShapeError,
        lambda: heads.EntropyAlarm(rows=0),
        """EntropyAlarm(): rows must be above 0.
  found: rows = 0
  fix: rows=32""",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("error", "call", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_whole_text(error: type[Exception], call: Callable[[], object], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text
