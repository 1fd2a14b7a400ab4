"""The drawings of masks, compared whole."""

import time

import pytest
import torch

from attlas.masks import Causal, Documents, Mask, Padding, Window, from_function, from_tensor, picture

PICTURES = {
    "causal": (
        Causal(),
        """Causal()
  ■ · · · · · · ·
  ■ ■ · · · · · ·
  ■ ■ ■ · · · · ·
  ■ ■ ■ ■ · · · ·
  ■ ■ ■ ■ ■ · · ·
  ■ ■ ■ ■ ■ ■ · ·
  ■ ■ ■ ■ ■ ■ ■ ·
  ■ ■ ■ ■ ■ ■ ■ ■
  8 queries × 8 keys""",
    ),
    "padding": (
        Padding([3, 5], side="left"),
        """Padding([3, 5], side='left')
  · · ■ ■ ■
  · · ■ ■ ■
  · · ■ ■ ■
  · · ■ ■ ■
  · · ■ ■ ■
  5 queries × 5 keys""",
    ),
    "documents, fewer queries than keys": (
        Documents([0, 0, 1, 1, 1], [1, 0]) & Causal(0),
        """Documents((5,), query_ids=(2,)) & Causal(offset=0)
  · · · · ·
  ■ ■ · · ·
  2 queries × 5 keys""",
    ),
    "window, pooled": (
        Window(1024, 0),
        """Window(1024, 0)
  ▨ · · · · · · · · · · · · · · ·
  ■ ▨ · · · · · · · · · · · · · ·
  ■ ■ ▨ · · · · · · · · · · · · ·
  ■ ■ ■ ▨ · · · · · · · · · · · ·
  ■ ■ ■ ■ ▨ · · · · · · · · · · ·
  ■ ■ ■ ■ ■ ▨ · · · · · · · · · ·
  ■ ■ ■ ■ ■ ■ ▨ · · · · · · · · ·
  ■ ■ ■ ■ ■ ■ ■ ▨ · · · · · · · ·
  ▨ ■ ■ ■ ■ ■ ■ ■ ▨ · · · · · · ·
  · ▨ ■ ■ ■ ■ ■ ■ ■ ▨ · · · · · ·
  · · ▨ ■ ■ ■ ■ ■ ■ ■ ▨ · · · · ·
  · · · ▨ ■ ■ ■ ■ ■ ■ ■ ▨ · · · ·
  · · · · ▨ ■ ■ ■ ■ ■ ■ ■ ▨ · · ·
  · · · · · ▨ ■ ■ ■ ■ ■ ■ ■ ▨ · ·
  · · · · · · ▨ ■ ■ ■ ■ ■ ■ ■ ▨ ·
  · · · · · · · ▨ ■ ■ ■ ■ ■ ■ ■ ▨
  2,048 queries × 2,048 keys, a cell is 128 × 128, ▨ in part""",
    ),
    "one row of keys": (
        from_tensor(torch.tensor([[True, False]])),
        """from_tensor(bool (1, 2))
  ■ ·
  ■ ·
  2 queries × 2 keys""",
    ),
    "nothing to draw": (
        from_tensor(torch.ones(0, 3)),
        """from_tensor(float32 (0, 3))
  0 queries × 3 keys""",
    ),
    "a function that fails": (
        from_function(lambda b, h, i, j: {}["none"]),
        """from_function(<lambda>)
  (no picture at 8 queries × 8 keys: KeyError: 'none')""",
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_repr(name):
    mask, expected = PICTURES[name]
    assert repr(mask) == expected


def test_size_that_was_asked_for():
    assert picture(Causal(), m=2, n=3) == "  ■ ■ ·\n  ■ ■ ■\n  2 queries × 3 keys"
    assert picture(Causal(), n=1) == "  ■\n  1 query × 1 key"
    assert picture(Causal(), m=33, n=1).endswith("33 queries × 1 key, a cell is 3 × 1, ▨ in part")


@pytest.mark.parametrize(("m", "n"), [(17, 17), (128, 128), (100, 37), (16, 5)])
def test_pooled_cells_are_exact_up_to_128(m, n):
    t = torch.rand(m, n) > 0.1
    t[: m // 2, : n // 2] = False
    t[m // 2 :, n // 2 :] = True
    height, width = -(-m // 16), -(-n // 16)
    lines = []
    for top in range(0, m, height):
        blocks = [t[top : top + height, left : left + width] for left in range(0, n, width)]
        lines.append("  " + " ".join("■" if block.all() else "▨" if block.any() else "·" for block in blocks))
    assert picture(from_tensor(t)).splitlines()[:-1] == lines


def test_a_huge_mask_is_drawn_at_once():
    start = time.perf_counter()
    drawing = picture(Causal(), m=10**12, n=10**12).splitlines()
    assert time.perf_counter() - start < 1
    assert drawing[5] == "  ■ ■ ■ ■ ■ ▨ · · · · · · · · · ·"


def test_a_size_that_does_not_fit_is_said_in_words():
    assert "(no picture at 20 queries × 20 keys: " in picture(from_tensor(torch.ones(3, 3)), m=20, n=20)


def test_a_broken_mask_still_has_a_repr():
    class Broken(Mask):
        def allows(self, at):
            raise KeyError

    assert repr(Broken()) == "Broken()\n  (no picture at 8 queries × 8 keys: KeyError: )"
