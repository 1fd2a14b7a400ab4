"""Finds the attention modules of a model: their kind, their number, and which of them could not be recorded."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType

from torch import nn

from attlas.recording.atlas.entry import KINDS
from attlas.recording.layers import LayerNumbers, layer_lists, number_layers, places, without_attention
from attlas.recording.linear import Place, linear_functions
from attlas.scores import Score

_CROSS = re.compile(r"cross|encoder_?attn|enc_?dec|multihead_attn|src_attn")
_NAMED = re.compile(r"attention|attn", re.IGNORECASE)
_POOLS = re.compile(r"attention_?pool|attn_?pool|pooling_?head", re.IGNORECASE)
_ENCODER = re.compile(r"encoder|vision|visual|audio|image|speech")
# The name by which code of transformers finds its attention function, and torch's own function.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
SDPA = "scaled_dot_product_attention"
_WITH_WEIGHTS = "multi_head_attention_forward"


@dataclass(frozen=True)
class AttentionSite:
    """One attention of a model.

    Parameters
    ----------
    path : str
        Path of its module; the second attention of a module has the path ``"blocks.0.attn#1"``.
    kind : str
        "self", "encoder", "cross" or "linear".
    layer : int
        The number of its layer.
    number : int
        Its number among the attentions of one call of its module.
    """

    path: str
    kind: str
    layer: int
    number: int = 0

    @property
    def module(self) -> str:
        """Path of its module."""
        return self.path.removesuffix(f"#{self.number}") if self.number else self.path

    @property
    def key(self) -> str:
        """Kind and number, as an atlas takes them."""
        return f"{self.kind}.{self.layer}"


def mentions(module: nn.Module | type[nn.Module], name: str) -> bool:
    """Return whether the code of a method of a class (or of a module's class) uses a name.

    Of a whole model of transformers only `forward` counts: it inherits methods that look the attention function up and
    never call it.
    """
    own = module if isinstance(module, type) else type(module)
    whole = hasattr(module, "set_attn_implementation")
    for base in own.__mro__:
        if base is nn.Module:
            break
        methods = vars(base)
        for method in [methods.get("forward")] if whole else methods.values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if isinstance(code, CodeType) and name in _names(code):
                return True
    return False


@cache
def _names(code: CodeType) -> frozenset[str]:
    """Return the global names and attributes that code uses, also within its inner functions."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


def _callers(kinds: Iterable[type[nn.Module]], functions: Iterable[Place]) -> set[type[nn.Module]]:
    """Return the classes of modules whose code names a function, or that inherit the class of a method."""
    found = set()
    for owner, name in functions:
        if isinstance(owner, type):
            found |= {kind for kind in kinds if issubclass(kind, owner)}
        else:
            found |= {kind for kind in kinds if mentions(kind, name)}
    return found


class ModelAttentions:
    """The attentions of a model, in the order of the model.

    Parameters
    ----------
    model : nn.Module
        The model that is recorded.
    patched : bool
        Whether calls of torch's own function count.
    linear : bool, default False
        Whether layers of linear attention count.
    channels : bool, default False
        Whether those with one matrix for each channel count, too.

    Attributes
    ----------
    sites : dict of str to AttentionSite
        The attentions by the paths of their modules.
    counts : dict of str to int
        Number of layers of each kind, those without attention included; 0 where the model has no such attention.
    other_linear : set of type
        The classes of layers of linear attention that do not count here.
    linear_functions : dict
        The functions that the model's layers of linear attention call, by the files that have them.
    of_channels : dict
        Those of layers with one matrix for each channel, whether they count or not.
    has_softmax : bool
        Whether the code of a module is that of an attention with keys, and not of linear attention alone.
    """

    def __init__(self, model: nn.Module, *, patched: bool, linear: bool = False, channels: bool = False) -> None:
        self._modules = list(model.named_modules())
        self._class_names = {path: type(module).__name__ for path, module in self._modules}
        self._lists = layer_lists(self._modules)
        self._paths = {id(module): path for path, module in self._modules}
        self._by_path = dict(self._modules)
        # `_known` attend by their code. Those that are heard join `_classes`, with the attentions of one call.
        one_each = {type(module): module for _, module in self._modules}  # what is asked about a class is asked once
        of_heads, self.of_channels = linear_functions(self._modules)
        self.linear_functions = (of_heads if linear else {}) | (self.of_channels if channels else {})
        self._linear = _callers(one_each, self.linear_functions)
        # Those that do not count here.
        self.other_linear = _callers(one_each, self.of_channels | of_heads) - self._linear
        self._known = {kind for kind, module in one_each.items() if _is_attention(module, patched=patched)}
        self.has_softmax = bool(self._known - self._linear)
        self._known |= self._linear
        self._named = {kind for kind in one_each if _NAMED.search(kind.__name__)}
        # By class: how many attentions one call of it computes.
        self._classes = dict.fromkeys(self._known, 1)
        # Sets `sites` and `counts`.
        self._number()

    def _number(self) -> None:
        """Set `sites` and `counts`: a layer has its number in the model, whether all layers attend or some."""
        # The name of an attention is the path of its module, with "#1", "#2" for further attentions of the same call.
        names = {
            f"{path}#{number}" if number else path: (path, number)
            for path, module in self._modules
            for number in range(self._classes.get(type(module), 0))
        }
        kinds = {name: self._kind(path) for name, (path, _) in names.items()}
        if "self" not in kinds.values():  # an encoder without a decoder is the main kind
            kinds = {name: "self" if kind == "encoder" else kind for name, kind in kinds.items()}
        linear = {
            name
            for name, (path, _) in names.items()
            if type(self._by_path[path]) in self._linear and kinds[name] == "self"
        }
        softmax = [path for name, (path, _) in names.items() if kinds[name] == "self" and name not in linear]
        # Linear attention is a kind of its own only where it stands beside a softmax in one layer.
        if self._share_layers([names[name][0] for name in linear], softmax):
            kinds |= dict.fromkeys(linear, "linear")
        by_kind = {kind: [name for name, own in kinds.items() if own == kind] for kind in KINDS}
        if not by_kind["linear"]:
            del by_kind["linear"]  # few models have layers with two mixers
        self._numbers = {kind: number_layers(own, self._lists) for kind, own in by_kind.items()}
        self.counts = dict.fromkeys(KINDS, 0) | {kind: numbers.count for kind, numbers in self._numbers.items()}
        self.sites = {
            name: AttentionSite(name, kind, self._numbers[kind].of_path[name], names[name][1])
            for name, kind in kinds.items()
        }

    def _is_linear(self, path: str) -> bool:
        """Return whether the module at a path is a layer of linear attention that is recorded."""
        return type(self._by_path[path]) in self._linear

    def _share_layers(self, some: Sequence[str], others: Sequence[str]) -> bool:
        """Return whether a layer has one of some modules and one of others, side by side."""
        if not some or not others:
            return False
        # The list of layers is the outermost whose elements have one of each at most.
        numbers = [number_layers(paths, self._lists) for paths in (some, others)]
        lists = numbers[0].first_of_list.keys() & numbers[1].first_of_list.keys()
        own, other = (
            {(name, place) for path in paths for name, place in places(path, self._lists) if name in lists}
            for paths in (some, others)
        )
        return bool(own & other)

    def blocks(self) -> tuple[list[str], dict[str, int]]:
        """Return the paths of the modules that attend with a softmax, and the lists of their layers.

        A list of layers comes with the number of the first. Of a model whose attentions show only as they run, the
        modules are those that are named like one.
        """
        kinds = [kind for kind in ("self", "encoder") if self.counts.get(kind)]
        if kinds:
            paths = [
                site.module
                for site in self.sites.values()
                if site.kind != "linear" and not self._is_linear(site.module)
            ]
            return paths, {name: first for kind in kinds for name, first in self._numbers[kind].first_of_list.items()}
        named = [path for path, _ in self.candidates()]
        paths = [path for path in named if not any(other.startswith(f"{path}.") for other in named)]
        return paths, number_layers([path for path in paths if self._kind(path) != "cross"], self._lists).first_of_list

    def softmax_layers(self, kind: str) -> list[int]:
        """Return the layers of a kind whose attention is no linear one; those of the main kind for "linear"."""
        kind = "self" if kind == "linear" else kind
        return sorted(s.layer for s in self.sites.values() if s.kind == kind and not self._is_linear(s.module))

    def beside_attention(self) -> dict[str, list[int | str]]:
        """Return the layers with a softmax and a linear attention that does not count, by the class of the latter."""
        numbers, found = self._numbers["self"], dict[str, list[int | str]]()
        attending = {*numbers.of_path.values()}
        for path, module in self._modules:
            if type(module) in self.other_linear:
                for name, place in places(path, self._lists):
                    layer = numbers.first_of_list.get(name, -1 - place) + place
                    if layer in attending:
                        found.setdefault(type(module).__name__, []).append(layer)
        return found

    def _kind(self, path: str) -> str:
        """Return the kind of an attention; a pooling head asks with queries of its own, as cross-attention does."""
        parts = path.split(".")
        owners = (self._class_names.get(".".join(parts[:depth]), "") for depth in range(1, len(parts) + 1))
        return "cross" if any(map(_POOLS.search, owners)) else _kind(path)

    def without_attention(self) -> dict[str, dict[int, str]]:
        """Return the layers of each kind that have no attention at all: number to the class of what they have."""
        found: dict[str, dict[int, str]] = {}
        seen: set[str] = set()
        for kind, numbers in self._numbers.items():
            # Layers with two attentions (of a decoder) are those of the first kind.
            lists = {name: first for name, first in numbers.first_of_list.items() if name not in seen}
            seen |= lists.keys()
            own = LayerNumbers(numbers.of_path, lists, numbers.count)
            found[kind] = without_attention(own, self._lists, self.sites)
        return {kind: layers for kind, layers in found.items() if layers}

    def of_other_kinds(self, empty: Mapping[str, Mapping[int, str]]) -> dict[str, list[int]]:
        """Return the layers of each kind that have an attention of another kind only, as those of Llama 3.2 Vision.

        `empty` are the layers that have no attention at all, as `without_attention` gives them.
        """
        found: dict[str, list[int]] = {}
        for kind, numbers in self._numbers.items():
            own = {*numbers.of_path.values(), *empty.get(kind, ())}
            other = sorted({*range(numbers.count)} - own)
            found |= {kind: other} if other else {}
        return found

    def not_recorded(
        self, empty: Mapping[str, Mapping[int, str]], missed: Iterable[tuple[str, nn.Module]]
    ) -> dict[str, dict[str, list[int | str]]]:
        """Return the layers of each kind that have no weights in a recording, by the class of what they have.

        Parameters
        ----------
        empty : mapping of str to mapping of int to str
            Layers that have no attention, as `without_attention` gives them.
        missed : iterable of (str, nn.Module)
            Attentions that ran and were not recorded, as `unrecorded` gives them.

        Returns
        -------
        dict of str to dict of str to list
            Numbers of layers; paths of modules outside of the model's layers.
        """
        found: dict[str, dict[str, list[int | str]]] = {}
        for kind, layers in empty.items():
            for number, name in layers.items():
                found.setdefault(kind, {}).setdefault(name, []).append(number)
        lists = {f"{name}.".lstrip(".") for numbers in self._numbers.values() for name in numbers.first_of_list}
        for path, module in missed:
            site = self.sites.get(path)
            if site is not None or not path.startswith(tuple(lists)):  # the others are among those without attention
                kind, place = ("self", path) if site is None else (site.kind, site.layer)
                found.setdefault(kind, {}).setdefault(type(module).__name__, []).append(place)
        return found

    def has_module(self, path: str) -> bool:
        """Return whether the model has a module at a path, which may attend by itself."""
        return path.partition("#")[0] in self._paths.values()

    def site(self, module: nn.Module, number: int = 0) -> AttentionSite | None:
        """Return an attention of a module; None where the module is not part of the model.

        If the class of the module was not known to attend, or not so often, all modules of this class do from now on.

        Parameters
        ----------
        module : nn.Module
            The module.
        number : int
            Its number among the attentions of one call of the module.
        """
        path = self._paths.get(id(module))
        if path is None:
            return None
        if self._classes.get(type(module), 0) <= number:
            self._classes[type(module)] = number + 1
            self._number()
        return self.sites[f"{path}#{number}" if number else path]

    def hear_linear(self, module: nn.Module, *, counts: bool) -> None:
        """Note that a module computes linear attention: all modules of its class do from now on.

        Parameters
        ----------
        module : nn.Module
            The module.
        counts : bool
            Whether it is one of the attentions here.
        """
        kind = type(module)
        if not counts:
            self.other_linear.add(kind)
            self._named.discard(kind)
        elif kind not in self._linear:
            self._linear.add(kind)
            if kind in self._classes:
                self._number()

    def candidates(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that attend by their code, or whose class is named like an attention, with their paths."""
        return [(p, m) for p, m in self._modules if type(m) in self._known or type(m) in self._named]

    def watched(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that may attend, with their paths.

        With `attlas.attention`, any but those of torch and scores.
        """
        known = dict(self.candidates())
        return [
            (path, module)
            for path, module in self._modules
            if path in known or not (type(module).__module__.startswith("torch.") or isinstance(module, Score))
        ]

    def unrecorded(self, ran: Iterable[str], recorded: Iterable[str]) -> list[tuple[str, nn.Module]]:
        """Return the attentions that ran and were not recorded, the innermost only.

        Parameters
        ----------
        ran, recorded : iterable of str
            Paths of the modules that ran, and of those whose matrix was recorded.
        """
        recorded, ran = set(recorded), set(ran)
        missed = {
            path: module
            for path, module in self.candidates()
            if path in ran and not any(is_part_of(other, path) or is_part_of(path, other) for other in recorded)
        }
        return [(path, m) for path, m in missed.items() if not any(is_part_of(p, path) for p in missed if p != path)]


def _is_attention(module: nn.Module, *, patched: bool) -> bool:
    """Return whether a module is nn.MultiheadAttention, or its code names the attention interface of transformers.

    Where torch's scaled_dot_product_attention is `patched`, so that its calls are heard, code that names it counts too.
    """
    if isinstance(module, nn.MultiheadAttention) or mentions(module, INTERFACE):
        return True
    return patched and (mentions(module, SDPA) or mentions(module, _WITH_WEIGHTS))


def is_part_of(inner: str, outer: str) -> bool:
    """Return whether the path `inner` is that of the module at `outer`, or of a part of it."""
    return inner == outer or not outer or inner.startswith(outer + ".")


def _kind(path: str) -> str:
    """Return the kind of attention that the path of a module names; "self" where it names none."""
    parts = path.lower().split(".")
    if any(map(_CROSS.search, parts)):
        return "cross"
    # A decoder may be made of what is an encoder elsewhere: the outermost name counts.
    named = (part for part in parts if _ENCODER.search(part) or "decoder" in part)
    return "encoder" if "decoder" not in next(named, "decoder") else "self"
