"""Parts of a tensor in one buffer, and comparison bit for bit."""

import pytest
import torch

from attlas.recording.growing import GrowingTensor
from attlas.recording.snapshot import fingerprint, same_bits

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool]


def grown(parts: list[torch.Tensor], axis: int = 2) -> GrowingTensor:
    tensor = GrowingTensor(axis)
    for part in parts:
        tensor.append(part)
    return tensor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [1, 2])
def test_the_parts_are_those_that_were_added(dtype: torch.dtype, axis: int) -> None:
    whole = (torch.randn(2, 300, 300, 3) > 0 if dtype is torch.bool else torch.randn(2, 300, 300, 3)).to(dtype)
    parts = list(whole.split([7] + [1] * 200 + [60, 33], dim=axis))
    tensor = grown(parts, axis)
    assert tensor.parts[0].data_ptr() == whole.data_ptr()  # a whole prompt is not copied
    assert len(tensor.parts) == 2
    assert tensor.equals(whole, 0)
    some = whole.narrow(axis, 5, 290)
    assert tensor.equals(some, 5)
    assert not tensor.equals(some, 4)
    joined = tensor.joined()
    assert torch.equal(joined, whole)
    assert joined.is_contiguous()
    assert joined.untyped_storage().nbytes() == whole.nbytes
    tensor.append(parts[0])
    assert torch.equal(tensor.joined(), torch.cat([whole, parts[0]], dim=axis))


def test_one_number_makes_a_difference() -> None:
    whole = torch.randn(2, 3, 40, 6)
    tensor = grown(list(whole.split(10, dim=2)))
    for place in (3, 39):
        other = whole.clone()
        other[1, 2, place, 5] += 1
        assert not tensor.equals(other, 0)
        assert tensor.equals(other[:, :, :place], 0)


def test_a_part_may_have_more_digits_and_no_other_sizes() -> None:
    first, later = torch.randn(1, 2, 3, 4).bfloat16(), torch.randn(1, 2, 1, 4)
    tensor = grown([first, first[:, :, :1], later])
    assert torch.equal(tensor.joined(), torch.cat([first.float(), first[:, :, :1].float(), later], dim=2))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        tensor.append(torch.randn(1, 2, 1, 1))


def test_what_is_written_to_disk_is_compared_as_well() -> None:
    whole = torch.randn(1, 2, 90, 4)
    tensor = GrowingTensor()
    for number, part in enumerate(whole.split(1, dim=2)):
        tensor.append(part)
        if number % 40 == 39:
            tensor.store(torch.clone)
            assert tensor.bytes_in_memory == 0
    assert [part.shape[2] for part in tensor.parts] == [40, 40, 10]
    assert tensor.equals(whole, 0)
    assert torch.equal(tensor.joined(), whole)


def test_a_text_goes_on_outside_of_inference_mode() -> None:
    whole = torch.randn(1, 2, 6, 4)
    tensor = GrowingTensor()
    with torch.inference_mode():
        for part in whole.clone().split(2, dim=2)[:2]:
            tensor.append(part)
    tensor.append(whole[:, :, 4:])
    assert torch.equal(tensor.joined(), whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [8, 6, 3])
def test_bits_are_compared(dtype: torch.dtype, d: int) -> None:
    a = torch.randn(2, 3, 5, d, dtype=dtype)
    a[0, 0, 0, 0] = torch.nan
    views = (a, a.clone(), a.transpose(1, 2).contiguous().transpose(1, 2), a.mT.contiguous().mT)
    assert all(same_bits(a, b) for b in views)
    assert same_bits(a[:, :, 1:, 1:], a.clone()[:, :, 1:, 1:])
    zero = torch.zeros_like(a)
    assert not same_bits(zero, -zero)
    assert not same_bits(a, a.to(torch.float16))
    assert not same_bits(a, a[:1])
    for place in range(d):
        b = a.clone()
        b[1, 2, 4, place] = 9
        assert not same_bits(a, b)


def test_fingerprints_of_many_keys_take_no_more_calls() -> None:
    k = torch.randn(1, 1, 40_000, 2)
    whole = fingerprint(k)
    assert torch.equal(whole, torch.cat([fingerprint(part) for part in k.split(999, dim=2)], dim=1))
    with torch.autograd.profiler.profile() as profile:
        fingerprint(k)
    assert sum(event.name == "aten::sum" for event in profile.function_events) <= 8
