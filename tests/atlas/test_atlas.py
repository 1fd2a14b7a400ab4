"""Layers by number, kind, path and pass; errors that list what there is."""

from dataclasses import replace
from functools import partial

import torch
from tests.atlas.conftest import make_entry
from tests.messages import refusal

import attlas
from attlas import DtypeError, OutOfRangeError, RecordingError, ShapeError, stats
from attlas.recording.atlas import Atlas, Entry
from attlas.recording.atlas.entry import statistic_names


def test_layers_are_named_in_every_way(atlas) -> None:
    entries = atlas.entries
    assert atlas[0] is entries[0].matrix
    assert atlas[1] is entries[2].matrix, "the last pass is meant"
    assert atlas[1, 0] is entries[1].matrix
    assert atlas[1, -2] is entries[1].matrix
    assert atlas["cross.1"] is entries[3].matrix
    assert atlas["cross.-1"] is entries[3].matrix
    assert atlas["layers.1.cross"] is entries[3].matrix
    assert atlas["self.2"] is atlas[2] is entries[4].matrix
    assert atlas["layers.1.attn", 0] is entries[1].matrix
    assert atlas.entry(-1) is entries[5]
    assert atlas[2][0, 1].shape == (12, 12)


def test_size_and_order(atlas) -> None:
    assert len(atlas) == 4
    atlas.entries.pop()
    assert [matrix.shape for matrix in atlas] == [(2, 4, 6, 9), (2, 4, 6, 9), (1, 2, 12, 12)]
    assert atlas.layers("cross") == [1]
    assert atlas.kinds == ("self", "cross")
    assert len(Atlas()) == 0
    assert list(Atlas()) == []


def test_main_kind_is_the_only_one_there_is() -> None:
    only = Atlas([make_entry(kind="cross", layer=5)])
    assert only[5] is only[-1] is only.entries[0].matrix
    assert Atlas([make_entry(kind="cross"), make_entry(kind="encoder")]).entry(0).kind == "encoder"


def test_recorded_layers_keep_their_numbers() -> None:
    atlas = Atlas([make_entry(layer=3), make_entry(layer=7)])
    assert atlas[-1] is atlas[7]
    assert atlas[-2] is atlas[3]


def test_repr(atlas) -> None:
    assert repr(atlas) == (
        """Atlas of tiny: 4 layers × 2 to 4 heads, 3 tokens, 13.7 kB
  self: layers 0 to 3, 2 to 4 heads, 6 to 12 queries × 9 to 12 keys, 2 passes, q and k of 4 kept
  cross: layer 1, 4 heads, 6 queries × 9 keys, q and k kept
  statistics: entropy, logit_moments, top_k, column_mass
  spans: system"""
    )
    assert repr(Atlas(model="tiny")) == "Atlas of tiny: empty"
    few = Atlas([replace(make_entry(layer=layer), matrix=None) for layer in (1, 4)])
    assert repr(few) == (
        """Atlas: 2 layers × 4 heads, 0 bytes
  self: layers 1, 4, 4 heads, 6 queries × 9 keys, statistics only"""
    )
    assert repr(atlas.entries[-1]) == (
        "Entry('layers.3.attn', self.3, call 0, heads (0, 1, 2, 3), 6 queries × 9 keys, statistics only, entropy)"
    )


def text_of(error: type[Exception], atlas: Atlas, key: object) -> str:
    return refusal(error, lambda: atlas[key])


def test_missing_layer_lists_what_there_is(atlas) -> None:
    known = "self: layers 0 to 3; cross: layer 1"
    modules = "modules layers.0.attn, layers.1.attn, layers.1.cross, layers.2.attn, layers.3.attn"
    assert text_of(OutOfRangeError, atlas, 9) == f"atlas[...]: {known}; {modules}"
    for key in (-5, "cross.0", "encoder.0", "layers.9.attn", "self.x", "", "cross.²"):
        assert text_of(OutOfRangeError, atlas, key) == f"atlas[...]: {known}; {modules}"
    assert text_of(OutOfRangeError, Atlas(), 0) == "atlas[...]: an empty atlas"


def test_missing_pass(atlas) -> None:
    assert text_of(OutOfRangeError, atlas, (1, 5)) == "atlas[...]: passes 0, 1 of self.1"


def test_wrong_kinds_of_keys(atlas) -> None:
    assert text_of(DtypeError, atlas, 1.5) == "atlas[...]: a float"
    for key in (True, None, slice(0, 2), (0, "x"), (0, 1, 2), (0, True)):
        assert text_of(DtypeError, atlas, key).startswith("atlas[...]: a")


def test_statistics_only(atlas) -> None:
    found = 'statistics only: entropy; read them as atlas.entry("self.3").statistics'
    assert text_of(RecordingError, atlas, 3) == f"atlas[...]: {found}"


def test_entries_that_do_not_fit() -> None:
    A = attlas.attend(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
    facts = {"heads": (0, 1), "queries": (0, 5), "shape": (1, 2, 5, 5), "matrix": A}
    wrong = [
        ({"heads": (0,)}, "1 heads in heads, 2 in shape"),
        ({"queries": (0, 4)}, "places 0 to 4 in queries, m = 5 in shape"),
        ({"shape": (1, 2, 5, 6)}, "(1, 2, 5, 5) in matrix, (1, 2, 5, 6) in shape"),
    ]
    for change, found in wrong:
        make = partial(Entry, "attn", 0, "self", 0, first_key=0, **(facts | change))
        assert refusal(ShapeError, make) == f"Entry(): {found}"
    unknown = partial(Entry, "attn", 0, "decoder", 0, first_key=0, **facts)
    assert refusal(DtypeError, unknown) == "Entry(): kind = 'decoder'"


def test_names_of_statistics() -> None:
    given = [stats.TopK(1), stats.ColumnArgMax(), stats.TopK(2), stats.EffectiveKeys(), stats.TopK(3)]
    assert statistic_names(given) == ["top_k", "column_arg_max", "top_k_2", "effective_keys", "top_k_3"]
