"""Takes a part of the residual stream out of the queries or the keys of one head, in the running model."""

from __future__ import annotations

from typing import Any, Literal

from attlas.engine.problem import spread_heads
from attlas.errors import DtypeError, OutOfRangeError, RecordingError, public
from attlas.foundation.checks import is_integer
from attlas.interventions.edits import Call, Intervention, with_problem_fields
from attlas.matrix import AttentionMatrix


class RemovePart(Intervention):
    """One head reads its keys (or queries) from a stream without one part; all else stays as it is.

    Parameters
    ----------
    source : str
        Name of the part, as `attlas.heads.explain` gives them: ``"head 0·0"``, ``"MLP 1"``, ``"token"``.
    target : (int or str, int)
        Layer, as in `attlas.record`, and head that reads without it.
    side : {"key", "query"}, default "key"
        Whether its keys or its queries are made without it.

    Raises
    ------
    DtypeError
        If `source` is no text, or `target` no layer and head.
    OutOfRangeError
        If `side` is neither; in the forward pass, if there is no such part in front of the layer.
    RecordingError
        In the forward pass, if the layout of the model is not known, the text is read with a cache, or the whole
        stream has passed a norm since (BERT).

    See Also
    --------
    attlas.heads.explain : ``explain(...).without(source)`` predicts what it does, with norms that keep their scales.

    Notes
    -----
    The part is subtracted from the stream that the layer reads. Its norm, projection, rotary embedding and the norm of
    queries and keys are computed again, so that the difference to the prediction is that of the norms' scales. Values
    stay as they are, and so do the heads that share its keys. Cost: one projection more; what was written to the stream
    is held for the time of a pass.

    Examples
    --------
    >>> import torch, attlas, attlas.models
    >>> from attlas.interventions import RemovePart
    >>> model = attlas.nn.GPT2.from_pretrained(attlas.models.path()).eval()
    >>> ids = torch.tensor([[90, 17, 40, 8, 90, 17, 40, 8]])
    >>> with torch.no_grad(), attlas.intervene(model, RemovePart("head 0·0", target=(2, 4))):
    ...     with attlas.record(model) as atlas:
    ...         out = model(ids)
    >>> atlas[2][0, 4].shape
    torch.Size([8, 8])
    """

    follows_stream = True

    @public()
    def __init__(self, source: str, target: tuple[Any, int], side: Literal["key", "query"] = "key") -> None:
        fix = 'RemovePart("head 0·0", target=(2, 4))'
        if not isinstance(source, str):
            raise DtypeError("source must be the name of a part.", f"source = {source!r}"[:80], fix)
        if not (isinstance(target, tuple | list) and len(target) == 2 and is_integer(target[1])):
            raise DtypeError("target must be a layer and a head.", f"target = {target!r}"[:80], fix)
        if side not in ("key", "query"):
            raise OutOfRangeError('side must be "key" or "query".', f"side = {side!r}"[:80], 'side="key"')
        super().__init__(target[0], target[1])
        self.source, self.side = source, side

    def matrix(self, A: AttentionMatrix, call: Call) -> AttentionMatrix:
        # The weights of the head with queries or keys that are made again.
        problem = A.problem
        if call.made_without is None or call.first_query or problem.q.shape[2] != problem.k.shape[2]:
            rule = "a part is taken out of a text that is read in one call, without a cache."
            found = f"{problem.q.shape[2]} queries, {problem.k.shape[2]} keys"
            raise RecordingError(rule, found, "model(ids, use_cache=False)", module=call.site.path, where=self.where)
        keys = self.side == "key"
        with public(self.where):
            made = call.made_without(call.site.path, self.source, keys=keys)
        heads = problem.q.shape[1]
        made = spread_heads(made, heads).to(problem.q.dtype) if keys else made.to(problem.q.dtype)
        whole = (spread_heads(problem.k, heads) if keys else problem.q).clone()
        whole[:, list(call.heads)] = made[:, list(call.heads)]
        return with_problem_fields(A, k=whole) if keys else with_problem_fields(A, q=whole)
