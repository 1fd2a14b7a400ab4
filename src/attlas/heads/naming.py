"""Names the heads of a model: runs it on a text and on random tokens that occur twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from attlas.errors import RecordingError, ShapeError, public
from attlas.foundation.checks import whole_number
from attlas.heads.classification import (
    BLOCK_MEASURES,
    Head,
    measure_block,
    measure_entry,
    repeated_block,
    text_statistics,
)
from attlas.heads.evaluation import checked_ids, embeddings_that_read, evaluating, read, text_config
from attlas.recording import record
from attlas.recording.atlas import Entry

_MOST_BLOCK_TOKENS = 128


@public("heads.name()")
def name(
    model: nn.Module,
    ids: Tensor,
    *,
    layers: Any = None,
    vocabulary: int | None = None,
    period: int | None = None,
    patch_sdpa: bool = False,
) -> tuple[Head, ...]:
    """Measure and name every head of a model, on a text and on random tokens that occur twice.

    Parameters
    ----------
    model : nn.Module
        A model that `attlas.record` records: of transformers, or one of your own that is called with token ids, shape
        (batch, n), and attends causally.
    ids : Tensor of int, shape (n,) or (batch, n)
        Tokens of the text, at least three.
    layers
        Which attentions, as in `attlas.record`. The default is all.
    vocabulary : int, optional
        Number of tokens that random ones are drawn from. The default is that of the model's configuration, or the
        size of the ``nn.Embedding`` that reads the ids.
    period : int, optional
        Length of the random block. The default is 128, or half of the longest text that the model reads: by its
        configuration, or as long as `ids`.
    patch_sdpa : bool, default False
        As in `attlas.record`, for models that call torch's ``scaled_dot_product_attention``.

    Returns
    -------
    tuple of Head
        Layer by layer; ``head.patterns[0].name`` is the name. Of a batch, the means over its texts.

    Raises
    ------
    DtypeError, ShapeError
        If `ids` are no tokens of a text, or `vocabulary` or `period` is no whole number above 0 or not known.
    RecordingError
        If the model cannot be recorded, or no layer of it is causal self-attention over the whole text.

    See Also
    --------
    block_scores : what a saved recording needs besides, so that ``attlas stats`` names its heads.
    measure : the same for the matrices of one layer.

    Notes
    -----
    Layers that are not causal, or see another text, are left out. The model is in evaluation mode for the time.
    Cost: one pass over the text and one over four random blocks.

    Examples
    --------
    >>> import torch, attlas.models
    >>> from attlas import heads
    >>> from transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained(attlas.models.path())
    >>> found = heads.name(model, torch.arange(300))
    >>> [(head.layer, head.head) for head in found if head.patterns[0].name == "induction"]
    [(2, 4), (3, 2)]
    """
    ids = checked_ids(ids, 3)
    statistics = text_statistics(ids)
    with evaluating(model), embeddings_that_read(model, ids) as sizes:
        with record(
            model, layers=layers, statistics=statistics, keep="statistics", patch_sdpa=patch_sdpa, linear=False
        ) as atlas:
            read(model, ids)
        # `sizes`: of the embeddings that looked up the ids in this pass.
        size = getattr(text_config(model), "vocab_size", None) if vocabulary is None else vocabulary
        size = min(sizes, default=None) if size is None else size
        if size is None:
            rule = "it must be known how many tokens the model has: no nn.Embedding of it reads the ids."
            raise ShapeError(rule, "no vocabulary", "vocabulary=tokenizer.vocab_size", model=type(model).__name__)
        longest = getattr(text_config(model), "max_position_embeddings", None) or ids.shape[1]
        period = min(_MOST_BLOCK_TOKENS, longest // 2) if period is None else period
        block = block_scores(model, size, period=period, layers=layers, patch_sdpa=patch_sdpa)
    atlas.details |= {} if block is None else {"block": block}
    causal = [entry for entry in atlas.entries if entry.kind == atlas.kinds[0]]
    named = tuple(head for entry in causal for head in measure_entry(atlas, entry))
    if block is None or not named:
        rule = "heads are named in layers of causal self-attention, which see the whole text."
        found = ", ".join(f"{entry.name}: {entry.shape[2]} × {entry.shape[3]}" for entry in atlas.entries[:2])
        fix = "heads.scores(A, ids) of a matrix, or layers=, for those that do."
        raise RecordingError(rule, found, fix, model=type(model).__name__)
    return named


@public("heads.block_scores()")
def block_scores(
    model: nn.Module, vocabulary: int, *, period: int = _MOST_BLOCK_TOKENS, layers: Any = None, patch_sdpa: bool = False
) -> dict[str, Any] | None:
    """Measure every head on a block of random tokens that occurs twice, for ``atlas.details["block"]``.

    Parameters
    ----------
    model : nn.Module
        As in `name`.
    vocabulary : int
        Number of tokens that random ones are drawn from.
    period : int, default 128
        Length of the block; the model reads twice as many tokens.
    layers, patch_sdpa
        As in `attlas.record`.

    Returns
    -------
    dict or None
        ``"period"``, and for each of ``"induction"`` and ``"duplicate"`` a list of the heads' numbers for each layer;
        nothing for a layer that was not chosen. None where a layer does not see the whole block.

    Raises
    ------
    ShapeError
        If `vocabulary` or `period` is no whole number above 0.
    RecordingError
        If the model cannot be recorded.

    See Also
    --------
    name : names of heads without a recording.

    Examples
    --------
    >>> import attlas, attlas.models
    >>> from attlas import heads
    >>> from transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained(attlas.models.path())
    >>> with attlas.record(model) as atlas:
    ...     output = model(heads.repeated_block(4096, period=30, blocks=1))
    >>> atlas.details["block"] = heads.block_scores(
    ...     model, 4096
    ... )  # then atlas.save(folder), and attlas stats folder
    >>> round(atlas.details["block"]["induction"][2][4], 1)
    0.7
    """
    whole_number("vocabulary", vocabulary, "vocabulary=tokenizer.vocab_size")
    whole_number("period", period, "period=64")
    with evaluating(model), record(model, layers=layers, patch_sdpa=patch_sdpa, linear=False) as atlas:
        read(model, repeated_block(vocabulary, period))
    layers_of_text = [entry for entry in atlas.entries if entry.kind == "self"]
    if any(entry.shape[2:] != (2 * period, 2 * period) for entry in layers_of_text):
        return None
    return block_table(layers_of_text, period)


@public("heads.block_scores()")
def block_table(entries: Iterable[Entry], period: int) -> dict[str, Any]:
    """Return the details of a recording that say what its heads do on random tokens that occur twice.

    Parameters
    ----------
    entries : iterable of Entry, shape (blocks, heads, 2 * period, 2 * period)
        Layers that saw the block, with their matrices, in the order of their numbers.
    period : int
        Length of the block.

    Returns
    -------
    dict
        As `block_scores` returns it.
    """
    tables: dict[str, list[list[float]]] = {measure: [] for measure in BLOCK_MEASURES}
    for entry in entries:
        for measure, scores in measure_block(entry.need_matrix(), period).items():
            tables[measure] += [[] for _ in range(len(tables[measure]), entry.layer)]
            tables[measure].append(scores.tolist())
    return {"period": period} | tables
