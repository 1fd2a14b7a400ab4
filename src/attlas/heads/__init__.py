"""What heads do: a score for each known pattern, tables, rollout, and what a training loop needs of them.

``heads.scores(A, ids)`` gives every pattern's score in one pass; each pattern is a statistic too, so that
``A.collect(heads.PreviousToken(), heads.Induction(ids))`` computes those that are wanted beside others.
`name` names the heads of a model, `measure` those of a layer.
"""

from attlas.heads.alignment import Alignment, alignment
from attlas.heads.chosen_keys import missed
from attlas.heads.classification import MIXED, PATTERNS, Head, Pattern, by_token, classify, measure, repeated_block
from attlas.heads.contacts import Contacts, contacts
from attlas.heads.contributions import contributions
from attlas.heads.differences import ChangedCell, Changes, changes
from attlas.heads.distance import DistanceProfile, Fixed, FixedDistance, by_distance, fixed_distance
from attlas.heads.effects import effect
from attlas.heads.explanation import Bands, CellExplanation, MapExplanation, PairOfParts, Part, Prediction, explain
from attlas.heads.naming import block_scores, name
from attlas.heads.patterns import (
    NEAR,
    CurrentToken,
    Diagonal,
    DuplicateToken,
    Induction,
    Local,
    PreviousToken,
    Separator,
    current_token,
    diagonal,
    duplicate_token,
    induction,
    local,
    previous_token,
    separator,
)
from attlas.heads.retrieval import Retrieval, retrieval_score
from attlas.heads.rollout import flow, rollout
from attlas.heads.scores import scores
from attlas.heads.sinks import Broad, FavouriteToken, FirstToken, SinkKeys, broad, first_token, sink_keys
from attlas.heads.tables import SpanTable, span_table
from attlas.heads.targets import Agreement
from attlas.heads.training import ClipFactors, Collapse, EntropyAlarm, qk_clip

__all__ = [
    "MIXED", "NEAR", "PATTERNS", "Agreement", "Alignment", "Bands", "Broad", "CellExplanation", "ChangedCell",
    "Changes", "ClipFactors", "Collapse", "Contacts", "CurrentToken", "Diagonal", "DistanceProfile", "DuplicateToken",
    "EntropyAlarm", "FavouriteToken", "FirstToken", "Fixed", "FixedDistance", "Head", "Induction", "Local",
    "MapExplanation", "PairOfParts", "Part", "Pattern", "Prediction", "PreviousToken", "Retrieval", "Separator",
    "SinkKeys", "SpanTable", "alignment", "block_scores", "broad", "by_distance", "by_token", "changes", "classify",
    "contacts", "contributions", "current_token", "diagonal", "duplicate_token", "effect", "explain", "first_token",
    "fixed_distance", "flow", "induction", "local", "measure", "missed", "name", "previous_token", "qk_clip",
    "repeated_block", "retrieval_score", "rollout", "scores", "separator", "sink_keys", "span_table",
]  # fmt: skip
