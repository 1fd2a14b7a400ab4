"""The attentions of a whole model, by layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

import attlas
from attlas.errors import DtypeError, OutOfRangeError, RecordingError, kind, listed, public
from attlas.matrix import AttentionMatrix
from attlas.matrix.handwritten.scope import DenseUses, uses_from
from attlas.recording.atlas.averaging import mean_of
from attlas.recording.atlas.bookmarks import Bookmark
from attlas.recording.atlas.deserialization import read
from attlas.recording.atlas.entry import KINDS, Entry, statistic_names
from attlas.recording.atlas.images.maps import ImageMap, Query, Relative, image_map
from attlas.recording.atlas.images.pictures import pictures_of, shrunk
from attlas.recording.atlas.layers import layers_of, ranges, unrecorded_of
from attlas.recording.atlas.serialization import UserScores
from attlas.recording.atlas.storage import Writer
from attlas.recording.atlas.table import frame, records, token_records
from attlas.recording.parts.stream import Stream
from attlas.stats import Statistic

FIRST_CALLS = "first_calls"  # of `details`: which pass of an attention is the first over the text of the atlas


class Atlas:
    """The attentions of a recorded model: each layer's lazy matrix, its statistics, the text.

    ``atlas[3]`` is the matrix of layer 3, ``atlas[3][0, 5]`` that of batch 0 and head 5. ``atlas["cross.3"]``
    and ``atlas["encoder.0"]`` name the other kinds, ``atlas["model.layers.3.self_attn"]`` the module, and
    ``atlas[3, 0]`` the first of several passes; without it the last one is meant.

    Parameters
    ----------
    entries : iterable of Entry
        One for each pass of each attention; more may be appended to `entries`.
    model : str
        Name of the model.
    ids : Tensor, optional, shape (batch, n)
        Token ids of the text.
    tokens : list of str, or list of such, optional
        Text of each token of a single sequence, or of sequence 0; or a list for each sequence of the batch.
    encoder_texts : list of list of str, optional
        Of an encoder that feeds a decoder: text of each token of every sequence; `tokens` are those of the decoder.
    spans : mapping, optional
        Named stretches of the text, ``{"system": (0, 12)}``.
    details : mapping, optional
        Plain facts of the model, such as JSON can hold.
    bookmarks : iterable of Bookmark, optional
        Named views, which the viewer offers and shows one after another as a tour.
    images : sequence of pictures, optional
        The pictures that the model was shown, in their order in the text; None for one that is not kept.
    parts : iterable of Stream, optional
        What ``record(model, parts=True)`` keeps for `attlas.heads.explain`.

    Attributes
    ----------
    entries : list of Entry
        The attentions, in the order of the model.
    texts : list of list of str, or None
        Text of each token of every sequence of the batch, padding included; `tokens` is the first of them.
    encoder_texts : list of list of str, or None
        The same for the encoder of a decoder; `texts_of` says which texts an entry is about.
    divided : bool
        Whether other processes recorded further heads of the same layers (tensor parallelism).

    See Also
    --------
    attlas.load : an atlas from a folder.

    Notes
    -----
    Main kind, which a plain number means: ``"self"`` where there is one, else ``"encoder"``, else ``"cross"``. Of
    layers with two mixers, ``atlas["linear.3"]`` is the linear one, beside the softmax ``atlas[3]``.
    A negative number counts from the last recorded layer of the main kind.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.recording.atlas import Atlas, Entry
    >>> q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    >>> A = attlas.attend(q, k, mask=attlas.Causal())
    >>> atlas = Atlas(
    ...     [Entry(f"layers.{l}", l, "self", 0, (0, 1), (0, 5), 0, (1, 2, 5, 5), A) for l in (0, 1)]
    ... )
    >>> atlas[1][0, 1, 4, :2].shape, len(atlas)
    (torch.Size([2]), 2)
    >>> atlas
    Atlas: 2 layers × 2 heads, 1.3 kB
      self: layers 0 to 1, 2 heads, 5 queries × 5 keys, q and k kept
    """

    def __init__(
        self,
        entries: Iterable[Entry] = (),
        *,
        model: str = "",
        ids: Tensor | None = None,
        tokens: list[str] | list[list[str]] | None = None,
        encoder_texts: list[list[str]] | None = None,
        spans: Mapping[str, tuple[int, int]] | None = None,
        details: Mapping[str, Any] | None = None,
        bookmarks: Iterable[Bookmark] = (),
        images: Any = None,
        parts: Iterable[Stream] = (),
    ) -> None:
        self.entries = list(entries)
        self.model = model
        self.ids = ids
        self.bookmarks = list(bookmarks)
        self.divided = False
        self.texts: list[list[str]] | None = None
        if tokens and isinstance(tokens[0], list):
            self.texts = [list(text) for text in tokens]
        else:
            self.tokens = cast("list[str] | None", tokens)
        self.encoder_texts = encoder_texts
        self.spans: dict[str, tuple[int, int]] = dict(spans or {})
        self.details: dict[str, Any] = dict(details or {})
        self.parts: list[Stream] = list(parts)
        self._images: list[Tensor | None] = []
        if images is not None:
            self.images = images

    @property
    def images(self) -> list[Tensor | None]:
        """Pictures that the model was shown: uint8 of shape (height, width, 3), at most 1,024 pixels a side.

        Any form may be assigned, as of ``record(model, images=...)``.
        """
        return self._images

    @images.setter
    @public("atlas.images")
    def images(self, images: Any) -> None:
        self._images = [None if picture is None else shrunk(picture) for picture in pictures_of(images)]

    @property
    def tokens(self) -> list[str] | None:
        """Text of each token of sequence 0; `texts` has all sequences of a batch."""
        return self.texts[0] if self.texts else None

    @tokens.setter
    def tokens(self, tokens: list[str] | None) -> None:
        self.texts = None if tokens is None else [tokens]

    @property
    def facts(self) -> dict[str, Any]:
        """What a saved atlas holds beside its entries and bookmarks: plain data, the token ids and the pictures."""
        facts: dict[str, Any] = {"model": self.model, "tokens": None if self.tokens is None else list(self.tokens)}
        if self.texts is not None and len(self.texts) > 1:
            facts["texts"] = self.texts
        if self.encoder_texts is not None:
            facts["encoder_texts"] = self.encoder_texts
        spans = {name: list(span) for name, span in self.spans.items()}
        images = {"images": self.images} if self.images else {}
        images |= {"parts": self.parts} if self.parts else {}
        return {**facts, **images, "ids": self.ids, "spans": spans, "details": self.details}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of attention that were recorded; the first is the main one."""
        kinds = {entry.kind for entry in self.entries}
        return tuple(name for name in KINDS if name in kinds)

    def layers(self, kind: str | None = None) -> list[int]:
        """Return the numbers of the recorded layers of a kind, the main one by default, ascending."""
        name = self._main() if kind is None else kind
        return sorted({entry.layer for entry in self.entries if entry.kind == name})

    @property
    def dense_uses(self) -> DenseUses:
        """What ``record(model, handwritten=True)`` had to compute densely: module, its class, operation, times."""
        return uses_from(self.details)

    def missing_layers(self, kind: str | None = None) -> list[int]:
        """Return the numbers of the model's layers of which there is no attention of a kind, ascending.

        Parameters
        ----------
        kind : str, optional
            Kind of attention; the main one by default.

        Returns
        -------
        list of int
            Layers that were not chosen, and those without attention weights: linear attention, convolutions,
            state-space layers; `unrecorded` names the modules of these. Empty where it is not known how many layers
            the model has. Layers with attention of another kind only (the cross-attention layers of Llama 3.2 Vision)
            are not missing.

        Examples
        --------
        >>> from attlas.recording.atlas import Atlas, Entry
        >>> entry = Entry("layers.3.attn", 3, "self", 0, (0,), (0, 4), 0, (1, 1, 4, 4))
        >>> Atlas([entry], details={"layer_counts": {"self": 5}}).missing_layers()
        [0, 1, 2, 4]
        """
        name = self._main() if kind is None else kind
        return sorted(layers_of(self.details, name, self.kinds) - {*self.layers(name)})

    def _main(self) -> str:
        """Return the main kind of attention, which a plain number of a layer means."""
        return (*self.kinds, "self")[0]

    def __len__(self) -> int:
        return len(self.layers())

    def __iter__(self) -> Iterator[AttentionMatrix]:
        return (self[layer] for layer in self.layers())

    @public("atlas[...]")
    def __getitem__(self, key: Any) -> AttentionMatrix:
        return self.entry(key).need_matrix()

    @public("atlas[...]")
    def entry(self, key: Any) -> Entry:
        """Return the entry of a layer.

        Parameters
        ----------
        key : int, str or tuple
            A layer of the main kind, ``"cross.3"``, the path of a module, or one of these with the number
            of a pass, ``(3, 0)``.

        Returns
        -------
        Entry

        Raises
        ------
        OutOfRangeError
            If there is no such entry; the text lists what there is.
        DtypeError
            If `key` is of another type.
        """
        name, call = key if isinstance(key, tuple) and len(key) == 2 else (key, -1)
        for part, types in ((name, (int, str)), (call, (int,))):
            if not isinstance(part, types) or isinstance(part, bool):
                rule = "an attention is named by its layer or its path, and a pass by its number."
                fix = 'atlas[3], atlas["cross.3"], or atlas[3, 0] for the first pass; atlas[3][0, 5] for a head.'
                raise DtypeError(rule, kind(part), fix, key=repr(key)[:80])
        passes = self._passes(name)
        numbers = sorted(entry.call for entry in passes)
        if call < 0 and -call <= len(numbers):
            call = numbers[call]
        for entry in passes:
            if entry.call == call:
                return entry
        found = f"passes {listed(numbers)} of {passes[0].path}"
        fix = f"atlas[{name!r}] for the last pass; atlas[{name!r}][0, {call}] for head {call} of batch 0."
        raise OutOfRangeError("the second number names a pass of the layer.", found, fix, key=repr(key))

    def _passes(self, name: int | str) -> list[Entry]:
        """Return all passes of the attention that a layer or a path names."""
        family, number = self._main(), name
        if isinstance(name, str):
            family, _, digits = name.rpartition(".")
            number = int(digits) if family in KINDS and digits.removeprefix("-").isdecimal() else name
        if isinstance(number, int):
            layers = self.layers(family)
            layer = layers[number] if number < 0 and -number <= len(layers) else number
            passes = [entry for entry in self.entries if entry.kind == family and entry.layer == layer]
        else:
            passes = [entry for entry in self.entries if entry.name == name]
        if passes:
            return passes
        rule = "there must be such an attention in the recording."
        fix = f"atlas[{self._example()}]" if self.entries else "run the model inside `with attlas.record(model)`."
        raise OutOfRangeError(rule, self._contents(), fix, key=repr(name)[:80], where="atlas[...]")

    def _example(self) -> str:
        """Return a key of the first entry, as a user types it."""
        entry = self.entries[0]
        return str(entry.layer) if entry.kind == self._main() else repr(entry.path)

    def _contents(self) -> str:
        """Return in words the layers of each kind and the first modules, for an error."""
        if not self.entries:
            return "an empty atlas"
        parts = [f"{name}: {_layers(self.layers(name))}" for name in self.kinds]
        return "; ".join([*parts, f"modules {listed(dict.fromkeys(entry.name for entry in self.entries))}"])

    @public("atlas.mean()")
    def mean(self, layers: Iterable[Any] | None = None, *, over_heads: bool = False) -> AttentionMatrix:
        """Return the mean of the matrices of some layers, head by head, as a lazy matrix.

        Parameters
        ----------
        layers : iterable of int, str or tuple, optional
            The layers, as ``atlas[...]`` takes them; the default is all of the main kind.
        over_heads : bool, default False
            Whether the mean is taken over the heads, too, those of each layer first: the matrix has one head. Needed
            where layers have different numbers of heads.

        Returns
        -------
        AttentionMatrix, shape (batch, heads, m, n)
            A sum of matrices: weights of linear layers may be negative.

        Raises
        ------
        ShapeError
            If the shapes of the matrices differ, or there is no layer.
        DeviceError
            If they are on several devices.
        OutOfRangeError
            If there is no such layer.
        RecordingError
            If a layer keeps no matrix.

        Notes
        -----
        Nothing is computed. A product or a statistic costs that of each layer, and with `over_heads` of each head. For
        layers with two mixers, ``atlas.mean([3, "linear.3"], over_heads=True)`` is the mean of both, which
        `attlas.heads.rollout` takes in their place.

        Examples
        --------
        >>> import torch, attlas
        >>> from attlas.recording.atlas import Atlas, Entry
        >>> A = attlas.attend(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))
        >>> B = attlas.attend(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))
        >>> atlas = Atlas(
        ...     [Entry(f"{l}", l, "self", 0, (0, 1), (0, 5), 0, (1, 2, 5, 5), W) for l, W in enumerate((A, B))]
        ... )
        >>> bool(torch.allclose(atlas.mean().to_dense(), (A.to_dense() + B.to_dense()) / 2))
        True
        >>> atlas.mean([0, 1], over_heads=True).shape
        torch.Size([1, 1, 5, 5])
        """
        keys = self.layers() if layers is None else list(layers)
        return mean_of([self[key] for key in keys], [str(key) for key in keys], over_heads=over_heads)

    @public("atlas.image_map()")
    def image_map(
        self,
        layer: Any,
        head: int | None = None,
        *,
        query: Query,
        image: int = 0,
        without_sinks: bool | float = False,
        relative_to: Atlas | None = None,
        relative: Relative = "ratio",
        relative_query: Query | None = None,
        grid: tuple[int, int] | None = None,
        tokens: Any = None,
        sequence: int = 0,
    ) -> ImageMap:
        """Return where in a picture a head looks: the weights of some queries on the patch grid of an image.

        Parameters
        ----------
        layer : int, str or tuple
            The attention, as ``atlas[layer]`` takes it: of a language model with pictures, or ``"encoder.3"`` of its
            vision encoder.
        head : int, optional
            The head, as the model counts it; the default is the mean over the recorded heads.
        query : int, slice, range, sequence of int, (row, column) or "class"
            Who looks: a position in the text (negative ones count from its end), or several, such as those of an
            answer, of which the mean is taken; a tuple for the patch in this row and column of the picture; "class" for
            the class token of a vision encoder.
        image : int, default 0
            Which picture, in the order of the texts.
        without_sinks : bool or float, default False
            Whether keys that are sinks of the head are left out, as `attlas.heads.sink_keys` finds them. A number is
            its threshold in place of 0.3. The weights are then those of a softmax over the other keys.
        relative_to : Atlas, optional
            A second recording of the same picture, with a neutral prompt: its map is divided out, or subtracted.
        relative : {"ratio", "difference"}
            How the two are set in relation. A ratio of two weights of 0 is 1.
        relative_query : as `query`, optional
            The queries of the second recording, by default the same.
        grid : (int, int), optional
            Rows and columns of the patches, where the recording does not know them; with `tokens`.
        tokens : (start, stop), slice or sequence of int, optional
            Positions of the patches, row by row.
        sequence : int, default 0
            With `grid`: which sequence of the batch.

        Returns
        -------
        ImageMap
            Its `weights` are a tensor of shape (rows, columns); ``save("map.png")`` writes them over the picture.

        Raises
        ------
        RecordingError
            If the recording does not know which tokens are the patches of the image, or has no q and k of the layer.
        OutOfRangeError
            If there is no such layer, head, image, query or patch, or the query is padding.
        ShapeError
            If `grid` and `tokens` do not fit together, or the grids of two recordings differ.
        DtypeError
            If `query` or `tokens` are no whole numbers.

        See Also
        --------
        attlas.record : ``images=`` keeps the pictures.

        Notes
        -----
        The grids of ViT, DeiT, BEiT, DINOv2, DINOv3, CLIP, SigLIP, LLaVA, LLaVA-Next, Qwen2-VL, Qwen2.5-VL, Qwen3-VL
        and InternVL are known; class tokens and registers are left out. A picture in tiles and a thumbnail has one
        grid, that of the tiles, on which each patch of the thumbnail spreads its weight evenly: the sum of the map is
        the share of the weight on the picture. `ImageMap.parts` has both apart. Which tiles InternVL has cut of a
        picture is known where ``record(images=...)`` was given it.
        Cost: the rows of the queries, m_q · n cells, and O(n) memory; with `without_sinks` one pass over each head.

        Examples
        --------
        >>> import torch, attlas
        >>> from attlas.recording.atlas import Atlas, Entry
        >>> A = attlas.attend(torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 4))
        >>> atlas = Atlas([Entry("attn", 0, "self", 0, (0,), (0, 8), 0, (1, 1, 8, 8), A)])
        >>> atlas.image_map(0, 0, query=-1, grid=(2, 3), tokens=(1, 7)).weights
        tensor([[0.1250, 0.1250, 0.1250],
                [0.1250, 0.1250, 0.1250]])
        """
        return image_map(
            self,
            layer,
            head,
            query=query,
            image=image,
            without_sinks=without_sinks,
            relative_to=relative_to,
            relative=relative,
            relative_query=relative_query,
            grid=grid,
            tokens=tokens,
            sequence=sequence,
        )

    @public("atlas.table()")
    def table(self, data: str = "records", *, join_steps: bool = False) -> Any:
        """Return one record for each recorded head, with each statistic as one number.

        Parameters
        ----------
        data : {"records", "pandas", "polars"}, default "records"
            A list of dicts, or a data frame of a library that is installed.
        join_steps : bool, default False
            Whether the entries of one attention whose queries follow each other make one record, as the steps of a
            generation with T5, of which each is an entry. ``call`` is that of the first.

        Returns
        -------
        list of dict, or data frame
            Where the head stands (layer, head, kind, name, call, queries, keys), then a column for each
            statistic that was recorded; None where an entry lacks it. Where the atlas does not have all layers of
            the model, ``layers`` says how many there are of the kind.

        Raises
        ------
        ShapeError
            If `data` is something else.
        MissingExtraError
            If the library is not installed.

        Notes
        -----
        A column is the mean over batch and queries: ``entropy``, ``effective_keys``, ``max_weight``,
        ``tail_mass``, ``logit_mean`` and ``logit_variance``, ``coverage_1`` and so on for each level,
        ``top_k_mass`` (mass of the k largest), and any row statistic of your own under its name. Two are no
        means: ``max_logit`` is the largest, and ``first_key_mass``, from the column mass, is the share of the
        first token in all mass. Queries of padding (`Entry.query_mask`) and rows without an allowed key count
        nowhere: a mean is one over the tokens of all sequences. From a column mass of padded texts,
        ``first_key_mass`` may need q and k, and is None without them. Steps are joined exactly: a mean is one over the
        queries of all steps, and a column that some step lacks is None.

        Examples
        --------
        >>> import torch, attlas
        >>> from attlas import stats
        >>> from attlas.recording.atlas import Atlas, Entry
        >>> A = attlas.attend(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8))
        >>> atlas = Atlas([Entry("attn", 0, "self", 0, (0,), (0, 4), 0, (1, 1, 4, 4), A)])
        >>> atlas.collect(stats.EffectiveKeys(), stats.ColumnMass())
        >>> atlas.table()[0]["effective_keys"], atlas.table()[0]["first_key_mass"]
        (4.0, 0.25)
        """
        table = records(self.entries, join_steps=join_steps)
        if any(map(self.missing_layers, self.kinds)):
            counts = {name: len(self.layers(name)) + len(self.missing_layers(name)) for name in self.kinds}
            table = [record | {"layers": counts[record["kind"]]} for record in table]
        return frame(table, data)

    @public("atlas.token_table()")
    def token_table(self, key: Any, head: int, sequence: int = 0, data: str = "records") -> Any:
        """Return one record for each token of a head: how it attends, and what it receives.

        Parameters
        ----------
        key : int, str or tuple
            The attention, as ``atlas[key]`` takes it.
        head : int
            The head, as the model counts it.
        sequence : int, default 0
            Which sequence of the batch.
        data : {"records", "pandas", "polars"}, default "records"
            A list of dicts, or a data frame of a library that is installed.

        Returns
        -------
        list of dict, or data frame
            For each query that is a token and has an allowed key: ``position`` in the text, ``token``, ``entropy``
            (in nats), ``effective_keys``, position, text and weight of the largest key (``top_key``, ``top_token``,
            ``top_weight``), and ``mass_received``, the sum of the weights that the tokens of the text give to this
            one. Texts are None where they are not known (another text, or no tokens recorded), and so is
            ``mass_received`` in cross-attention and for a token that is no key.

        Raises
        ------
        OutOfRangeError
            If there is no such attention, head or sequence.
        RecordingError
            If its q and k were not kept.
        ShapeError
            If `data` is something else.
        MissingExtraError
            If the library is not installed.

        See Also
        --------
        table : one record for each head.

        Notes
        -----
        Cost: one pass over the matrix of this head, O(m + n) memory.

        Examples
        --------
        >>> import torch, attlas
        >>> from attlas.recording.atlas import Atlas, Entry
        >>> q = k = torch.tensor([[[[3.0], [-3.0], [2.0]]]])
        >>> A = attlas.attend(q, k, mask=attlas.Causal())
        >>> atlas = Atlas(
        ...     [Entry("attn", 0, "self", 0, (0,), (0, 3), 0, (1, 1, 3, 3), A)], tokens=["a", "b", "c"]
        ... )
        >>> for row in atlas.token_table(0, head=0):
        ...     print(
        ...         row["token"], "→", row["top_token"], f"{row['top_weight']:.3f}, {row['mass_received']:.3f}"
        ...     )
        a → a 1.000, 1.881
        b → b 1.000, 1.000
        c → a 0.881, 0.119
        """
        entry = self.entry(key)
        queries, keys = (
            texts[sequence] if texts and 0 <= sequence < len(texts) else None for texts in self.texts_of(entry)
        )
        return frame(token_records(entry, head, sequence, queries, keys), data)

    def has_text(self, entry: Entry) -> bool:
        """Return whether `ids` and `texts` are those of the queries of an entry.

        They are those of the last text of a recording, as the main kind of attention read it: not those of an encoder
        that feeds a decoder, and not those of entries of earlier texts.

        Parameters
        ----------
        entry : Entry
            An entry of the atlas.

        Examples
        --------
        >>> from attlas.recording.atlas import Atlas, Entry
        >>> entry = Entry("attn", 0, "self", 0, (0,), (0, 4), 0, (1, 1, 4, 4))
        >>> Atlas([entry]).has_text(entry), Atlas([entry], details={"first_calls": {"attn": 1}}).has_text(entry)
        (True, False)
        """
        main = self._main()
        beside = main == "self" and entry.kind in ("cross", "linear")
        return (entry.kind == main or beside) and self._is_of_last_text(entry)

    def texts_of(self, entry: Entry) -> tuple[list[list[str]] | None, list[list[str]] | None]:
        """Return the texts of the queries and of the keys of an entry, each with a list for every sequence.

        Parameters
        ----------
        entry : Entry
            An entry of the atlas.

        Returns
        -------
        queries, keys : list of list of str, or None
            Text of each token, by its position in the sequence, padding included; None where it is not known. In
            cross-attention the queries are tokens of the decoder, and the keys are tokens of the encoder.

        Examples
        --------
        >>> from attlas.recording.atlas import Atlas, Entry
        >>> entry = Entry("attn", 0, "cross", 0, (0,), (0, 1), 0, (1, 1, 1, 2))
        >>> Atlas([entry], tokens=["ja"], encoder_texts=[["yes", "."]]).texts_of(entry)
        ([['ja']], [['yes', '.']])
        """
        known = self.texts if self.has_text(entry) else None
        if entry.kind in ("self", "linear") or entry.kind == self._main() != "cross":
            return known, known
        encoder = (self.texts if self._main() == "encoder" else self.encoder_texts) or []
        batch, _, _, n = entry.shape
        beams = max(len(encoder) // max(batch, 1), 1)  # a text is there for each beam, and the encoder reads it once
        keys = encoder[::beams]
        # An encoder reads whole texts: others are not those of the keys.
        fits = [text for text in keys for _ in range(beams)] == encoder and [len(text) for text in keys] == [n] * batch
        known_keys = keys if fits and self._is_of_last_text(entry) else None
        return (known if entry.kind == "cross" else known_keys), known_keys

    def _is_of_last_text(self, entry: Entry) -> bool:
        """Return whether an entry is about the text of `ids`, which is the last one that the model read."""
        calls = self.details.get(FIRST_CALLS)
        first = calls.get(entry.name, 0) if isinstance(calls, dict) else 0
        return not (isinstance(first, int) and entry.call < first)

    @public("atlas.collect()")
    def collect(self, *statistics: Statistic, progress: Callable[[int, int], object] | None = None) -> None:
        """Compute statistics of every entry that keeps q and k, and keep the results in the entries.

        Parameters
        ----------
        *statistics : Statistic
            Statistics of `attlas.stats`, or your own; all in one pass over each matrix.
        progress : callable, optional
            Called with the number of entries done and their total.

        Raises
        ------
        DtypeError
            If an argument is no Statistic.
        RecordingError
            If no entry keeps q and k.

        Notes
        -----
        A result of the same name is replaced. Layers of linear attention get the statistics that they have: an entropy
        is none of them. Cost: that of `AttentionMatrix.collect` for each entry; a loaded atlas is read from disk one
        entry at a time.

        Examples
        --------
        >>> import torch, attlas
        >>> from attlas import stats
        >>> from attlas.recording.atlas import Atlas, Entry
        >>> A = attlas.attend(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8))
        >>> atlas = Atlas([Entry("attn", 0, "self", 0, (0,), (0, 4), 0, (1, 1, 4, 4), A)])
        >>> atlas.collect(stats.TopK(2))
        >>> atlas.entry(0).statistics["top_k"].values.shape
        torch.Size([1, 1, 4, 2])
        """
        names = statistic_names(statistics)
        kept = [(entry, entry.matrix) for entry in self.entries if entry.matrix is not None]
        if self.entries and not kept:
            # Raises the error of an entry without q and k.
            self.entries[0].need_matrix()
        asked = dict(zip(names, statistics, strict=True))
        if kept and all(entry.is_linear for entry, _ in kept):
            kept[0][1].weights.check_statistics(statistics)  # which nobody has
        for done, (entry, matrix) in enumerate(kept):
            own = {name: s for name, s in asked.items() if not entry.is_linear or matrix.weights.has(s)}
            entry.statistics.update(zip(own, matrix.collect(*own.values()), strict=True))
            if progress is not None:
                progress(done + 1, len(kept))

    @public("save()")
    def save(
        self,
        folder: str | os.PathLike[str],
        overwrite: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Write everything to a folder, from which `attlas.load` makes the same atlas.

        Parameters
        ----------
        folder : str or Path
            Where it goes; ``run.atlas`` is a good name. It appears when it is complete, or not at all.
        overwrite : bool, default False
            Whether an atlas that is there already is replaced.
        progress : callable, optional
            Called with the number of entries done and their total.

        Raises
        ------
        RecordingError
            If the folder is there, or cannot be written, or other processes have further heads of the layers.
        DtypeError
            If something in the atlas cannot be stored.

        See Also
        --------
        attlas.distributed.save : one folder of what several processes recorded.

        Notes
        -----
        Scores and masks of attlas are stored by their settings. A mask that is a function is stored as what
        it allows, exactly: every pair is asked for once. A score of your own must be given again on load. A
        log-sum-exp that is not known yet is computed, one pass over the matrix.
        """
        if self.divided:
            rule = "the atlas must have all heads of its layers, or all that were chosen."
            fix = "attlas.distributed.save(atlas, folder, mesh, [Shard(1)]) on all ranks."
            raise RecordingError(rule, "tensor parallelism: other ranks have further heads", fix)
        with Writer(folder, overwrite) as writer:
            writer.finish(self.entries, self.facts, self.bookmarks, progress)

    def view(self, **options: Any) -> Any:
        """Open the viewer: in a notebook in the output of the cell, elsewhere in the browser.

        See `attlas.view.show` for the options.

        Returns
        -------
        attlas.view.widget.Viewer or None
        """
        return attlas.view.show(self, **options)

    def export(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the viewer's page as one HTML file that needs no server.

        See `attlas.view.export` for the options.

        Returns
        -------
        Path
        """
        return attlas.view.export(self, path, **options)

    def _repr_html_(self) -> str:
        # Notebooks call it.
        return attlas.view.preview(self)

    def __repr__(self) -> str:
        title = f"Atlas of {self.model}" if self.model else "Atlas"
        if not self.entries:
            return f"{title}: empty"
        heads, missing = _heads([e for e in self.entries if e.kind == self._main()]), len(self.missing_layers())
        layers = f"{len(self)} of {len(self) + missing} layers" if missing else _many(str(len(self)), "layer")
        size = _bytes(sum(entry.nbytes for entry in self.entries))
        batch = len(self.texts or ())
        tokens = "" if self.tokens is None else f", {f'{batch} × ' if batch > 1 else ''}{len(self.tokens):,} tokens"
        lines = [f"{title}: {layers} × {heads}{tokens}, {size}"]
        lines += [f"  {self._line(name)}" for name in self.kinds]
        lines += [f"  not recorded: {'; '.join(self.unrecorded)}"] if self.unrecorded else []
        statistics = dict.fromkeys(name for entry in self.entries for name in entry.statistics)
        lines += [f"  statistics: {', '.join(statistics)}"] if statistics else []
        lines += [f"  spans: {', '.join(self.spans)}"] if self.spans else []
        return "\n".join(lines)

    @property
    def unrecorded(self) -> list[str]:
        """Which layers have no weights, or none that attlas could record: ``["layers 0 to 2 (JambaMambaMixer)"]``."""
        lines = []
        for name in dict.fromkeys((*self.kinds, *KINDS)):
            for module, places in unrecorded_of(self.details, name):
                family = "" if name == self._main() else f"{name} "
                numbers = all(isinstance(place, int) for place in places)
                what = f"{family}{'layer' if len(places) == 1 else 'layers'} " if numbers else ""
                lines.append(f"{what}{ranges(places)} ({module})")
        return lines

    def _line(self, name: str) -> str:
        """Return one line about the attentions of one kind, for `repr`."""
        entries = [entry for entry in self.entries if entry.kind == name]
        m, n = (_between([entry.shape[axis] for entry in entries]) for axis in (2, 3))
        passes = max(entry.call for entry in entries) + 1
        kept = sum(entry.matrix is not None for entry in entries)
        keeps = "q and k kept" if kept == len(entries) else "statistics only" if not kept else f"q and k of {kept} kept"
        keeps = "q, k and v kept" if all(entry.values is not None for entry in entries) else keeps
        again = f", {passes} passes" if passes > 1 else ""
        layers = _layers(self.layers(name))
        return f"{name}: {layers}, {_heads(entries)}, {m} queries × {n} keys{again}, {keeps}"


def _many(count: str, name: str) -> str:
    """Return a count with its noun: "1 head", "4 heads"."""
    return f"{count} {name}" if count == "1" else f"{count} {name}s"


def _heads(entries: list[Entry]) -> str:
    """Return in words how many heads entries have: "4 heads", "2 to 8 heads"."""
    return _many(_between([len(entry.heads) for entry in entries]), "head")


def _layers(numbers: list[int]) -> str:
    """Return numbers of layers in words, as a range where they are one."""
    return f"{'layer' if len(numbers) == 1 else 'layers'} {ranges(numbers)}"


def _between(numbers: list[int]) -> str:
    """Return the smallest and the largest of some numbers in words: "4", or "2 to 8"."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _bytes(count: int) -> str:
    """Return a number of bytes in words, in the unit that suits it."""
    size = float(count)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def load(folder: str | os.PathLike[str], *, verify: bool = True, score: UserScores = None) -> Atlas:
    """Return the atlas that was saved in a folder; q and k stay on disk until they are read.

    Parameters
    ----------
    folder : str or Path
        The folder of `Atlas.save`, or of a recording with ``keep="disk"``.
    verify : bool, default True
        Whether the checksum of every file is computed. Without it the checksum of ``atlas.json``, and the
        sizes and headers of all files, are still looked at.
    score : Score or mapping, optional
        A score of your own that the recording used; several by the name of their class. It is not stored, but
        for what its `to_dict` gives: then the class itself will do.

    Returns
    -------
    Atlas

    Raises
    ------
    RecordingError
        If the folder is not one that attlas wrote, was changed or cut off, or is of a newer format.

    See Also
    --------
    Atlas.save : the way there.

    Notes
    -----
    Nothing in the folder is executed: numbers come from safetensors, the rest is JSON of known words.
    Time: reading every file once, about 1 GB a second and core; ``verify=False`` takes milliseconds.
    Memory: none for q and k, which are mapped and not read. Changing a loaded tensor does not change its
    file; changing the file under a loaded atlas does change the atlas.

    Examples
    --------
    >>> import tempfile, torch, attlas
    >>> from attlas.recording.atlas import Atlas, Entry, load
    >>> A = attlas.attend(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), mask=attlas.Causal())
    >>> atlas = Atlas([Entry("attn", 0, "self", 0, (0, 1), (0, 5), 0, (1, 2, 5, 5), A)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     atlas.save(f"{folder}/run.atlas")
    ...     bool((load(f"{folder}/run.atlas")[0].to_dense() == A.to_dense()).all())
    True
    """
    return Atlas(**read(Path(folder), verify=verify, score=score))
