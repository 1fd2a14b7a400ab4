"""Layers by number, kind, path and pass; errors that list what there is."""

from dataclasses import replace

import pytest
import torch
from tests.atlas.conftest import make_entry

import attlas
from attlas import DtypeError, OutOfRangeError, RecordingError, ShapeError, stats
from attlas.atlas import Atlas, Entry
from attlas.atlas.entry import statistic_names


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
    with pytest.raises(error) as caught:
        atlas[key]
    return str(caught.value)


def test_missing_layer_lists_what_there_is(atlas) -> None:
    assert text_of(OutOfRangeError, atlas, 9) == (
        """atlas[...]: there must be such an attention in the recording.
  key: 9
  found: self: layers 0 to 3; cross: layer 1; modules layers.0.attn, layers.1.attn, layers.1.cross, layers.2.attn, \
layers.3.attn
  fix: atlas[0]"""
    )
    for key in (-5, "cross.0", "encoder.0", "layers.9.attn", "self.x", "", "cross.²"):
        assert "there must be such an attention" in text_of(OutOfRangeError, atlas, key)
    assert text_of(OutOfRangeError, Atlas(), 0) == (
        """atlas[...]: there must be such an attention in the recording.
  key: 0
  found: an empty atlas
  fix: run the model inside `with attlas.record(model)`."""
    )


def test_missing_pass(atlas) -> None:
    assert text_of(OutOfRangeError, atlas, (1, 5)) == (
        """atlas[...]: the second number names a pass of the layer.
  key: (1, 5)
  found: passes 0, 1 of self.1
  fix: atlas[1] for the last pass; atlas[1][0, 5] for head 5 of batch 0."""
    )


def test_wrong_kinds_of_keys(atlas) -> None:
    assert text_of(DtypeError, atlas, 1.5) == (
        """atlas[...]: an attention is named by its layer or its path, and a pass by its number.
  key: 1.5
  found: a float
  fix: atlas[3], atlas["cross.3"], or atlas[3, 0] for the first pass; atlas[3][0, 5] for a head."""
    )
    for key in (True, None, slice(0, 2), (0, "x"), (0, 1, 2), (0, True)):
        assert "is named by its layer" in text_of(DtypeError, atlas, key)


def test_statistics_only(atlas) -> None:
    assert text_of(RecordingError, atlas, 3) == (
        """atlas[...]: the weights of a layer are made from its q and k, and these were not kept.
  entry: self.3 (layers.3.attn), call 0
  found: statistics only: entropy; read them as atlas.entry("self.3").statistics
  fix: record with keep="disk" (or "cpu") to keep q and k."""
    )


def test_entries_that_do_not_fit() -> None:
    A = attlas.attend(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
    facts = {"heads": (0, 1), "queries": (0, 5), "shape": (1, 2, 5, 5), "matrix": A}
    wrong = [
        ({"heads": (0,)}, "1 heads in heads, 2 in shape"),
        ({"queries": (0, 4)}, "places 0 to 4 in queries, m = 5 in shape"),
        ({"shape": (1, 2, 5, 6)}, "(1, 2, 5, 5) in matrix, (1, 2, 5, 6) in shape"),
    ]
    for change, found in wrong:
        with pytest.raises(ShapeError) as error:
            Entry("attn", 0, "self", 0, first_key=0, **(facts | change))
        assert f"  found: {found}\n" in str(error.value)
    with pytest.raises(DtypeError) as error:
        Entry("attn", 0, "decoder", 0, first_key=0, **facts)
    assert str(error.value) == (
        """Entry(): kind must be one of 'self', 'encoder', 'cross'.
  found: kind = 'decoder'
  fix: kind="self\""""
    )


def test_names_of_statistics() -> None:
    given = [stats.TopK(1), stats.ColumnArgMax(), stats.TopK(2), stats.EffectiveKeys(), stats.TopK(3)]
    assert statistic_names(given) == ["top_k", "column_arg_max", "top_k_2", "effective_keys", "top_k_3"]
