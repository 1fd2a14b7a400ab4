"""KVCache: what it returns, what it copies, and its file."""

import math

import pytest
import torch

import attlas
from attlas.nn import KVCache


def tokens(n, batch=2, heads=3, d=4):
    return torch.randn(batch, heads, n, d), torch.randn(batch, heads, n, d + 1)


@pytest.mark.parametrize("steps", [[1] * 20, [5, 1, 1, 7, 1, 1, 1], [30]])
@pytest.mark.parametrize("window", [None, 1, 4, 50])
def test_returns_all_that_may_be_seen(steps, window):
    torch.manual_seed(0)
    cache, keys, values = KVCache(window, capacity=3), [], []
    for i, m in enumerate(steps):
        k, v = tokens(m)
        keys.append(k)
        values.append(v)
        n = sum(steps[: i + 1]) if window is None else min(sum(steps[: i + 1]), window - 1 + m)
        found = cache.update(k, v)
        torch.testing.assert_close(found[0], torch.cat(keys, 2)[:, :, -n:])
        torch.testing.assert_close(found[1], torch.cat(values, 2)[:, :, -n:])
        assert cache.seen == cache.get_seq_length() == sum(steps[: i + 1])


@pytest.mark.parametrize("window", [None, 64])
def test_the_past_is_not_copied_at_each_step(window):
    """Space is made a few times, and in between the returned tokens stay where they are."""
    cache = KVCache(window, capacity=16)
    places, moved = [], 0
    for _ in range(2000):
        k, _ = cache.update(*tokens(1, 1, 1))
        place = k.storage_offset() + (k.shape[2] - 1) * k.stride(2), k.untyped_storage().data_ptr()
        if places and (place[1] != places[-1][1] or place[0] != places[-1][0] + k.stride(2)):
            moved += 1
        places.append(place)
    assert moved <= (math.ceil(math.log2(2000 / 16)) if window is None else 2000 // 63 + 1)
    space = cache._layers[0].keys.shape[2]
    assert space < 4100 if window is None else space <= 4 * 64


def test_keeps_the_graph_where_autograd_records():
    cache = KVCache()
    (k, v), (k2, v2) = tokens(3), tokens(1)
    leaves = [t.requires_grad_() for t in (k, v, k2, v2)]
    cache.update(k, v)
    keys, values = cache.update(k2, v2)
    (keys.sum() + values.sum()).backward()
    assert all(t.grad is not None and t.grad.eq(1).all() for t in leaves)


@pytest.mark.parametrize("window", [None, 4])
def test_reorder_crop_and_go_on(window):
    torch.manual_seed(0)
    k, v = tokens(7)
    cache = KVCache(window)
    cache.update(k, v)
    cache.once(0, lambda: tokens(2))
    cache.reorder(torch.tensor([1, 1, 0]))
    cache.crop(-2)
    assert cache.seen == 5
    new = tokens(1, batch=3)
    keys, _ = cache.update(*new)
    want = torch.cat([k[[1, 1, 0], :, :5], new[0]], 2)
    torch.testing.assert_close(keys, want if window is None else want[:, :, -4:])
    assert cache.once(0, tokens)[0].shape[0] == 3
    space = cache._layers[0].keys
    cache.reorder(torch.arange(3))
    assert cache._layers[0].keys is space


def test_crop_refuses_what_the_window_let_go():
    cache = KVCache(window=2, capacity=2)
    for _ in range(40):
        cache.update(*tokens(1))
    with pytest.raises(attlas.ShapeError, match="the window of what is left must still be there"):
        cache.crop(3)
    with pytest.raises(attlas.ShapeError, match="at most the number of tokens seen"):
        cache.crop(41)


@pytest.mark.parametrize("window", [None, 4])
def test_save_and_load(tmp_path, window):
    cache = KVCache(window)
    for _ in range(9):
        for layer in range(2):
            cache.update(*tokens(1), layer)
    fixed = cache.once(1, lambda: tokens(3))
    cache.save(tmp_path / "cache.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]
    other = KVCache.load(tmp_path / "cache.safetensors")
    assert (other.seen, other.window, len(other)) == (9, window, 2)
    assert torch.equal(other.once(1, tokens)[0], fixed[0])
    new = tokens(1)
    for layer in range(2):
        for a, b in zip(cache.update(*new, layer), other.update(*new, layer), strict=True):
            assert torch.equal(a, b)
    assert repr(other) == f"KVCache(2 layers, 10 tokens seen{'' if window is None else ', window=4'})"


def test_load_refuses_other_files(tmp_path):
    (tmp_path / "text").write_text("no cache")
    for name in ("text", "absent"):
        with pytest.raises(attlas.RecordingError, match=r"must be a file that KVCache.save\(\) wrote"):
            KVCache.load(tmp_path / name)


def test_errors_say_what_to_type():
    with pytest.raises(attlas.ShapeError, match="window = 0"):
        KVCache(window=0)
    cache = KVCache()
    cache.update(*tokens(3))
    with pytest.raises(attlas.ShapeError, match="keys must continue those before"):
        cache.update(*tokens(1, batch=1))
    with pytest.raises(attlas.ShapeError, match="keys must continue those before"):
        cache.update(*(t.double() for t in tokens(1)))
