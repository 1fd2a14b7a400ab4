"""GPT-2, whole: embedding, blocks, final norm, tied head; and how it chooses the next token from its logits."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from attlas.errors import ShapeError
from attlas.foundation.compat import tracing
from attlas.masks import Mask
from attlas.matrix import AttentionMatrix
from attlas.nn import checkpoint
from attlas.nn.cache import KVCache
from attlas.nn.gpt2_attention import Conv1D, GPT2Attention, causal_mask, mask_of_keys
from attlas.nn.gpt2_config import GPT2Config

_ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
}


class GPT2Output(NamedTuple):
    """What a call of `GPT2` gives.

    Parameters
    ----------
    logits : Tensor, shape (batch, m, vocab_size)
        Log-probabilities of the next token, up to a constant; m = 1 with ``last_only=True``.
    loss : Tensor, optional
        Mean negative log-likelihood of the labels, in nats.
    attentions, cross_attentions : tuple of AttentionMatrix
        The lazy matrix of each layer.

    Examples
    --------
    >>> import torch
    >>> from attlas.nn import GPT2, GPT2Config
    >>> model = GPT2(GPT2Config(vocab_size=10, n_positions=8, n_embd=4, n_layer=1, n_head=2)).eval()
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 10])
    """

    logits: Tensor
    loss: Tensor | None = None
    attentions: tuple[AttentionMatrix | None, ...] = ()
    cross_attentions: tuple[AttentionMatrix | None, ...] = ()


class _FeedForward(nn.Module):
    """The two layers of a block's feed-forward network, and the activation between them."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = Conv1D(inner, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, inner)
        self.dropout = nn.Dropout(config.resid_pdrop)
        self.activation = config.activation_function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(_ACTIVATION_FUNCTIONS[self.activation](self.c_fc(x)))
        return self.dropout(out) if self.training else out


class _TransformerBlock(nn.Module):
    """One block: self-attention, cross-attention where the model has it, feed-forward; each behind a norm."""

    def __init__(self, config: GPT2Config, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, layer_idx=layer_idx)
        if config.add_cross_attention:
            self.crossattention = GPT2Attention(config, is_cross_attention=True, layer_idx=layer_idx)
            self.ln_cross_attn = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = _FeedForward(config)

    def forward(
        self, x: Tensor, cache: KVCache | None, mask: Mask | None, encoded: Tensor | None, encoded_mask: Tensor | None
    ) -> tuple[Tensor, AttentionMatrix | None, AttentionMatrix | None]:
        """Return the hidden states, and the weights of self-attention and of cross-attention."""
        attended, weights = self.attn(self.ln_1(x), cache, mask)
        x, cross = x + attended, None
        if encoded is not None:
            attended, cross = self.crossattention(self.ln_cross_attn(x), cache, None, encoded, encoded_mask)
            x = x + attended
        return x + self.mlp(self.ln_2(x)), weights, cross


class GPT2(nn.Module):
    """GPT-2: reads tokens, gives the logits of the next one; loads, trains and writes.

    Parameters
    ----------
    config : GPT2Config
        Sizes and settings.

    Attributes
    ----------
    wte, wpe : nn.Embedding
        Embeddings of tokens and of places.
    h : nn.ModuleList
        The blocks.
    ln_f : nn.LayerNorm
        The final norm.

    Raises
    ------
    ShapeError
        If the settings do not fit together.

    See Also
    --------
    GPT2Attention : what each block attends with.
    KVCache : what makes a new token cost one row.

    Notes
    -----
    The same function as transformers' GPT2LMHeadModel, and names of parameters as in its GPT2Model. The head
    is the embedding of tokens. The weights of every layer come with each call, lazy.

    References
    ----------
    .. [1] Radford et al., "Language models are unsupervised multitask learners", 2019.

    Examples
    --------
    >>> import torch, attlas.models
    >>> from attlas.nn import GPT2
    >>> model = GPT2.from_pretrained(attlas.models.path())
    >>> ids = torch.tensor([[5, 6, 7, 8]])
    >>> model(ids, labels=ids).logits.shape
    torch.Size([1, 4, 4096])
    >>> model.generate(ids, max_new_tokens=3, stop=()).shape
    torch.Size([1, 7])
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        if config.activation_function not in _ACTIVATION_FUNCTIONS:
            rule = "activation_function must be one of " + ", ".join(_ACTIVATION_FUNCTIONS) + "."
            fix = 'GPT2Config(activation_function="gelu_new")'
            raise ShapeError(rule, f"activation_function = {config.activation_function!r}", fix, where="GPT2()")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(_TransformerBlock(config, i) for i in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """Draw the weights as GPT-2 does: normal, smaller for the layers that add to the residual stream."""
        std = self.config.initializer_range
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):  # two in each block add to the residual stream
                nn.init.normal_(p, std=std / (2 * max(self.config.n_layer, 1)) ** 0.5)
            elif p.ndim == 2:
                nn.init.normal_(p, std=std)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        position_ids: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        last_only: bool = False,
    ) -> GPT2Output:
        """Return the logits of each next token, and the loss where labels are given.

        Parameters
        ----------
        input_ids : Tensor of int, shape (batch, m)
            Tokens; after a cache, the new ones.
        attention_mask : Tensor, optional, shape (batch, n)
            0 for padding, over the cache and the new tokens.
        labels : Tensor of int, optional, shape (batch, m)
            What should have come: the tokens themselves, -100 where it does not count. Shifted here.
        cache : KVCache, optional
            The tokens before; this call appends its own.
        position_ids : Tensor of int, optional, shape (batch, m) or (m,)
            Places of the tokens; the default counts on from the cache.
        encoder_hidden_states : Tensor, optional, shape (batch, n, n_embd)
            Tokens of an encoder, where ``add_cross_attention``.
        encoder_attention_mask : Tensor, optional, shape (batch, n)
            0 for padding of the encoder.
        last_only : bool
            Whether only the logits of the last token are computed.

        Raises
        ------
        ShapeError
            If `input_ids` or a mask of padding has another shape, or the text is longer than ``n_positions``.
        """
        _check_ids(input_ids)
        past = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            self._check_length(past + input_ids.shape[1])
            position_ids = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(position_ids)
        x = self.drop(x) if self.training else x
        mask = self._shared_mask(attention_mask, input_ids.shape[1], cache)
        weights, cross = [], []
        for block in self.h:
            x, own, others = block(x, cache, mask, encoder_hidden_states, encoder_attention_mask)
            weights.append(own)
            cross.append(others)
        x = self.ln_f(x[:, -1:] if last_only else x)
        logits = functional.linear(x, self.wte.weight if self.config.tie_word_embeddings else self.lm_head.weight)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return GPT2Output(logits, loss, tuple(weights), () if encoder_hidden_states is None else tuple(cross))

    def _shared_mask(self, padding: Tensor | None, m: int, cache: KVCache | None) -> Mask | None:
        """Return the mask that all blocks share, for m new tokens after those in the cache.

        `padding` is 0 where a token is padding.
        """
        if padding is None or (not tracing() and bool((padding != 0).all())):
            return causal_mask(m, None, cache)
        n = m if cache is None else cache.get_seq_length() + m
        if cache is not None and cache.window is not None:
            n = min(n, cache.window - 1 + m)  # keys that the cache returns: those that some new token may see
        return causal_mask(m, mask_of_keys(padding, n, cache), cache)

    def _check_length(self, length: int) -> None:
        """Raise a ShapeError where a text has more tokens than the model has positions."""
        if length > self.config.n_positions:
            rule = "a text must not be longer than the places that the model knows."
            fix = f"input_ids[:, -{self.config.n_positions}:], or fewer new tokens."
            raise ShapeError(rule, f"{length} tokens, n_positions = {self.config.n_positions}", fix, where="GPT2()")

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 64,
        *,
        attention_mask: Tensor | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: int | Sequence[int] | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Write on: each step reads one token and computes the logits of one.

        Parameters
        ----------
        input_ids : Tensor of int, shape (batch, tokens)
            The beginning; shorter ones of a batch are padded on the left.
        max_new_tokens : int
            Most tokens that are written. The default is 64.
        attention_mask : Tensor, optional, shape (batch, tokens)
            0 for padding.
        temperature : float
            0, the default, takes the likeliest token; 1 draws from the model; more is wilder.
        top_k : int, optional
            Draw among the k likeliest tokens.
        top_p : float, optional
            Draw among the fewest tokens whose probability is at least p together.
        seed : int, optional
            Makes drawing repeatable; the default is torch's own generator.
        stop : int or sequence of int, optional
            Tokens that end a text; the default is ``eos_token_id``, ``()`` is none.
        cache : KVCache, optional
            One for a sliding window, or one that has read the first of these tokens already; the default is new.

        Returns
        -------
        Tensor of int, shape (batch, tokens + new)
            The beginnings and what was written; a text that ended is filled with the padding token.

        Raises
        ------
        ShapeError
            If it would be longer than ``n_positions``, or a setting is out of range.
        """
        _check_ids(input_ids)
        _check_rule("temperature", temperature, 0.0 <= temperature < math.inf, "0 or more", "temperature=0.8")
        _check_rule("top_k", top_k, top_k is None or top_k >= 1, "1 or more", "top_k=50")
        _check_rule("top_p", top_p, top_p is None or 0.0 < top_p <= 1.0, "above 0 and at most 1", "top_p=0.95")
        generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed)
        stop = self.config.eos_token_id if stop is None else stop
        ends = [] if stop is None else [stop] if isinstance(stop, int) else list(stop)
        stops = torch.tensor(ends, dtype=torch.int64, device=input_ids.device)
        batch, begun = input_ids.shape
        self._check_length(begun + max_new_tokens - 1)  # the last token is written and not read
        cache = KVCache(capacity=begun + max_new_tokens) if cache is None else cache
        first, end = cache.get_seq_length(), begun
        if first >= begun:
            rule = "input_ids must hold what the cache has read, and at least one token more."
            given, fix = {"input_ids": input_ids}, "pass the whole text so far, or cache.crop(-1) first."
            raise ShapeError(rule, f"{begun} tokens, {first} in the cache", fix, arguments=given, where="generate()")
        padded = attention_mask is not None and not bool(attention_mask.all())
        ids = functional.pad(input_ids, (0, max_new_tokens))
        seen = functional.pad(attention_mask, (0, max_new_tokens), value=1) if attention_mask is not None else ids
        filling = self.config.pad_token_id
        filling = int(stops[0]) if filling is None and len(stops) else filling or 0
        done = torch.zeros(batch, dtype=torch.bool, device=ids.device)
        was_training = self.training
        self.eval()
        while end < begun + max_new_tokens:
            places = (seen[:, :end].long().cumsum(-1) - 1).clamp_min_(0)[:, first:] if padded else None
            mask = seen[:, :end] if padded else None
            step = self(ids[:, first:end], mask, cache=cache, position_ids=places, last_only=True)
            chosen = _next_tokens(step.logits[:, -1], temperature, top_k, top_p, generator)
            ids[:, end] = torch.where(done, filling, chosen) if len(stops) else chosen
            first, end = end, end + 1
            if len(stops):
                done |= torch.isin(chosen, stops)
                if bool(done.all()):
                    break
        self.train(was_training)
        return ids[:, :end]

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> GPT2:
        """Load a GPT-2 from a Hugging Face folder: ``config.json`` and safetensors, one file or several.

        Parameters
        ----------
        folder : str or PathLike
            The folder. Nothing is downloaded, and no pickle is read.
        dtype : torch.dtype, optional
            Dtype of the parameters; the default is what ``config.json`` says, else that of the files.
        device : torch.device or str
            Where the parameters are put.

        Returns
        -------
        GPT2
            Ready to be used, in evaluation mode.

        Raises
        ------
        CheckpointError
            If files are missing, or names and shapes are not those of the configuration.
        """
        settings = checkpoint.read_config(Path(folder))
        config = GPT2Config.from_dict(settings)
        with torch.device("meta"):
            model = cls(config)
        found = checkpoint.read_weights(Path(folder), str(device))
        checkpoint.fill(model, found, Path(folder), tied=config.tie_word_embeddings)
        dtype = checkpoint.dtype_of(settings) if dtype is None else dtype
        return (model if dtype is None else model.to(dtype)).eval()

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json`` and ``model.safetensors``, as transformers reads them."""
        settings = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **asdict(self.config)}
        state = {n if n == "lm_head.weight" else f"transformer.{n}": t for n, t in self.state_dict().items()}
        checkpoint.write(Path(folder), json.dumps(settings, indent=2) + "\n", state)


def _check_ids(input_ids: Tensor) -> None:
    """Raise a ShapeError unless token ids have the shape (batch, tokens)."""
    if input_ids.ndim != 2:
        rule = "input_ids must have the shape (batch, tokens)."
        raise ShapeError(rule, f"{input_ids.ndim} axes", "input_ids[None]", input_ids=input_ids, where="GPT2()")


def _next_tokens(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Return a token for each row of logits, shape (batch,): the likeliest at temperature 0, else one that is drawn."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if top_p is not None:  # the likeliest tokens up to the one with which their probability reaches p
        ordered, index = logits.sort(dim=-1)
        unlikely = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        unlikely[..., -1] = False
        logits = logits.masked_fill(unlikely.scatter(-1, index, unlikely), -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)


def _check_rule(name: str, value: float | None, fine: bool, rule: str, fix: str) -> None:
    """Raise a ShapeError with the rule of an argument, unless `fine`."""
    if not fine:
        raise ShapeError(f"{name} must be {rule}.", f"{name} = {value!r}", fix, where="generate()")
