"""Finds the attention modules of a model: their kind, their number, and which of them could not be recorded."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType

from torch import nn

from attlas.atlas.entry import KINDS

_CROSS = re.compile(r"cross|encoder_?attn|enc_?dec|multihead_attn|src_attn")
_ENCODER = re.compile(r"encoder|vision|visual|audio|image|speech")
# The name by which code of transformers finds its attention function, and torch's own function.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
SDPA = "scaled_dot_product_attention"


@dataclass(frozen=True)
class AttentionSite:
    """One attention of a model: path of its module, kind, number among those of its kind."""

    path: str
    kind: str
    layer: int

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


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes that code uses, also within its inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def is_named_attention(module: nn.Module) -> bool:
    """Return whether the class of a module is called an attention."""
    return re.search(r"attention|attn", type(module).__name__, re.IGNORECASE) is not None


class ModelAttentions:
    """The attentions of a model, in the order of the model.

    Parameters
    ----------
    model : nn.Module
        The model that is recorded.
    patched : bool
        Whether calls of torch's own function count.

    Attributes
    ----------
    sites : dict of str to AttentionSite
        The attentions by the paths of their modules.
    counts : dict of str to int
        Number of attentions of each kind.
    """

    def __init__(self, model: nn.Module, *, patched: bool) -> None:
        self._modules = list(model.named_modules())
        self._paths = {id(module): path for path, module in self._modules}
        self._classes = {type(module) for _, module in self._modules if _is_attention(module, patched=patched)}
        self._number()

    def _number(self) -> None:
        """Set `sites` and `counts`: attentions are numbered by kind, in the order of the model."""
        kinds = {path: _kind(path) for path, module in self._modules if type(module) in self._classes}
        only_encoder = "self" not in kinds.values()
        self.counts = dict.fromkeys(KINDS, 0)
        self.sites: dict[str, AttentionSite] = {}
        for path, named_kind in kinds.items():
            kind = "self" if named_kind == "encoder" and only_encoder else named_kind
            self.sites[path] = AttentionSite(path, kind, self.counts[kind])
            self.counts[kind] += 1

    def site(self, module: nn.Module) -> AttentionSite | None:
        """Return the attention that a module is; None where it is not part of the model.

        If the class of the module was not known to be an attention, all modules of this class become attentions.
        """
        path = self._paths.get(id(module))
        if path is None:
            return None
        if path not in self.sites:
            self._classes.add(type(module))
            self._number()
        return self.sites[path]

    def candidates(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that are attentions, or whose class is named like one."""
        return [(p, m) for p, m in self._modules if type(m) in self._classes or is_named_attention(m)]

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
    """Return whether a module calls the attention function of transformers, or, patched, that of torch."""
    if mentions(module, INTERFACE):
        return True
    return patched and (isinstance(module, nn.MultiheadAttention) or mentions(module, SDPA))


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
