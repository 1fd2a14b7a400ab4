"""The numbers of a model's layers: their places in its lists of layers, with and without attention."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn


@dataclass
class LayerNumbers:
    """The numbers of the attentions of one kind.

    Attributes
    ----------
    of_path : dict of str to int
        Number of the layer of each attention, by its path.
    first_of_list : dict of str to int
        Number of the first layer of each list of layers, by its path.
    count : int
        Number of layers, those without an attention of this kind included.
    """

    of_path: dict[str, int] = field(default_factory=dict)
    first_of_list: dict[str, int] = field(default_factory=dict)
    count: int = 0


def layer_lists(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Return the lists of a model that may be its layers, by their paths.

    A sequence of unlike modules (an embedding, two blocks, a head) is no list of layers, and neither is that of one.
    """
    return {
        path: module
        for path, module in modules
        if isinstance(module, nn.ModuleList)
        or (isinstance(module, nn.Sequential) and len(module) > 1 and len({type(element) for element in module}) == 1)
    }


def number_layers(paths: Sequence[str], lists: Mapping[str, nn.Module]) -> LayerNumbers:
    """Return the numbers of some attentions: their places in the lists of layers, one list after the other.

    Parameters
    ----------
    paths : sequence of str
        Paths of the attentions of one kind, in the order of the model.
    lists : mapping of str to nn.Module
        As `layer_lists` gives them.

    Notes
    -----
    The list of an attention is the outermost one whose elements have one attention of the kind at most: of blocks in
    stages, the blocks of each stage. An attention outside of such a list is a layer of its own.
    """
    held: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for path in paths:
        for name, element in places(path, lists):
            held[name][element] += 1
    numbers = LayerNumbers()
    for path in paths:
        fitting = [(name, place) for name, place in places(path, lists) if max(held[name].values()) == 1]
        if not fitting:
            numbers.of_path[path] = numbers.count
            numbers.count += 1
            continue
        name, place = fitting[0]
        if name not in numbers.first_of_list:
            numbers.first_of_list[name] = numbers.count
            numbers.count += len([*lists[name].children()])
        numbers.of_path[path] = numbers.first_of_list[name] + place
    return numbers


def places(path: str, lists: Mapping[str, nn.Module]) -> Iterator[tuple[str, int]]:
    """Yield each list of layers that a path leads through, and the index of the path's element in it.

    Outermost first.
    """
    parts = path.partition("#")[0].split(".")  # the number of an attention within its module is no part of its place
    for depth, part in enumerate(parts):
        name = ".".join(parts[:depth])
        if name in lists:
            yield name, [child for child, _ in lists[name].named_children()].index(part)


def without_attention(
    numbers: LayerNumbers, lists: Mapping[str, nn.Module], attentions: Iterable[str]
) -> dict[int, str]:
    """Return the layers that have no attention of any kind: number to what they have in its place.

    Parameters
    ----------
    numbers : LayerNumbers
        The layers.
    lists : mapping of str to nn.Module
        The lists that they are counted in.
    attentions : iterable of str
        Paths of all attentions of the model.
    """
    # The modules that are an attention, or hold one.
    holders = {
        ".".join(parts[:depth])
        for parts in (path.split(".") for path in attentions)
        for depth in range(1, len(parts) + 1)
    }
    found = {}
    for name, first in numbers.first_of_list.items():
        elements = [(f"{name}.{child}".lstrip("."), element) for child, element in lists[name].named_children()]
        attending = {path for path, _ in elements if path in holders}
        beside = {  # what layers with attention have beside it: norms, feed-forward layers
            part
            for path, element in elements
            if path in attending
            for part, _ in element.named_children()
            if f"{path}.{part}" not in holders
        }
        # In place of an attention: the classes of what layers with one do not have beside it.
        for place, (path, element) in enumerate(elements):
            if path not in attending:
                own = {
                    name
                    for part, child in element.named_children()
                    if part not in beside
                    for name in _class_names(child)
                }
                found[first + place] = " and ".join(sorted(own)) or type(element).__name__
    return found


def _class_names(module: nn.Module) -> Iterator[str]:
    """Yield the name of the class of a module; of a list, those of its elements."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        for element in module:
            yield from _class_names(element)
    else:
        yield type(module).__name__
