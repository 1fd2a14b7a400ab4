"""Finds how one tensor is made of another, and proves it by numbers: norms, linear maps, rotations, sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from attlas.recording.parts.stream import Rotation, Scaling

# How far two tensors may be apart that should be equal, relative to the largest number: by bytes of a number. Norms of
# transformers compute in float32 also where the model has float64.
_TOLERANCE = {2: 4e-2, 4: 4e-5, 8: 4e-6}
_SAMPLE = 16  # rows by which two tensors are compared


def sampled(count: int, device: torch.device) -> Tensor:
    """Return the rows by which tensors of some rows are compared, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, _SAMPLE), device=device).round().long().unique()


def same(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors hold the same numbers, up to rounding in the coarser of their dtypes."""
    if found.shape != expected.shape:
        return False
    size = min(found.element_size(), expected.element_size())
    found, expected = _wide(found), _wide(expected)
    largest = expected.abs().max() if expected.numel() else expected.new_zeros(())
    return bool((found - expected).abs().max() <= _TOLERANCE[size] * largest) if expected.numel() else True


def _wide(t: Tensor) -> Tensor:
    """Return a tensor in at least float32."""
    return t.float() if t.element_size() < 4 else t


# -------------------------------------------------------------------------------------------------------------- norms


def scaling_of(module: nn.Module, x: Tensor, y: Tensor, at: Tensor) -> Scaling | None:
    """Return the norm that a module is, with the factor of each row; None where it is none.

    The factors are those that give the output: no module need say what it adds to the variance.

    Parameters
    ----------
    module : nn.Module
        A module that may be a norm over the last axis.
    x, y : Tensor, shape (batch, n, ..., size)
        What it was given, and what it returned.
    at : Tensor of int
        Rows by which the two are compared.
    """
    weight, bias = (
        None if t is None else t.detach() for t in (getattr(module, "weight", None), getattr(module, "bias", None))
    )
    if x.shape != y.shape or any(t is not None and t.shape != x.shape[-1:] for t in (weight, bias)):
        return None
    for centered in (False, True):
        for gain in [None] if weight is None else [weight, weight + 1]:
            shaped, plain, factors = _shaped(x[:, at], y[:, at], gain, bias, centered=centered)
            if _same_as(factors.unsqueeze(-1) * shaped, plain, min(x.element_size(), y.element_size())):
                return Scaling(_shaped(x, y, gain, bias, centered=centered)[2], gain, bias, centered)
    return None


def _shaped(
    x: Tensor, y: Tensor, gain: Tensor | None, bias: Tensor | None, *, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x behind a norm without its factors, y without its bias, and the factors by least squares."""
    own, plain = _wide(x.detach()), _wide(y.detach())
    own = own - own.mean(-1, keepdim=True) if centered else own
    own = own if gain is None else own * gain
    plain = plain if bias is None else plain - bias
    size = own.square().sum(-1)
    return own, plain, (own * plain).sum(-1) / torch.where(size > 0, size, 1.0)


def _same_as(found: Tensor, expected: Tensor, size: int) -> bool:
    """Return whether two tensors are the same up to rounding in a dtype of some bytes."""
    return bool((found - expected).abs().max() <= _TOLERANCE[size] * expected.abs().max())


# ------------------------------------------------------------------------------------------------------------- linear


def linear_weight(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Return weight (out, in) and bias of a linear map; None where a module is none, or its numbers are packed."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    if isinstance(module, nn.Embedding) or (bias is not None and not isinstance(bias, Tensor)):
        return None
    weight = weight.detach().mT if type(module).__name__ == "Conv1D" else weight.detach()
    return weight, None if bias is None else bias.detach()


def channels(out: int, heads: int, groups: int, d: int, *, keys: bool, device: torch.device) -> Iterator[Tensor]:
    """Yield the ways in which heads may lie in the output of a linear map: coordinates of each, (heads, d).

    They stand one after the other, in front of keys and values or behind queries; or those of each head (or group of
    heads) stand together with its keys and values.

    Parameters
    ----------
    out : int
        Size of the output.
    heads, groups : int
        Number of query heads, and of key heads.
    d : int
        Size of a head.
    keys : bool
        Whether those of keys are meant.
    device : torch.device
        Where the answer is.
    """
    own, each = (groups if keys else heads), torch.arange(d, device=device)
    found: list[Tensor] = []

    def offer(base: Tensor) -> None:
        """Keep one way, unless it leaves the output or was found before."""
        place = base.unsqueeze(-1) + each
        if int(place.max()) < out and not any(torch.equal(place, one) for one in found):
            found.append(place)

    for start in (0, heads * d) if keys else (0,):
        offer(start + d * torch.arange(own, device=device))
    if out % own == 0 and out // own >= d:  # each head apart
        for start in (0, d) if keys else (0,):
            offer(start + (out // own) * torch.arange(own, device=device))
    if out % groups == 0:
        size, per = out // groups, heads // groups
        group = size * torch.arange(groups, device=device)
        if keys and size > per * d:
            offer(group + per * d)
        elif not keys and size >= per * d:
            offer((group.unsqueeze(-1) + d * torch.arange(per, device=device)).flatten())
    yield from found


def scale_between(made: Tensor, recorded: Tensor) -> float | None:
    """Return the factor between what a projection gives and what was recorded, by the lengths of all vectors.

    A rotation keeps the lengths. None where they do not belong to each other. Shapes are (batch, rows, heads, d).
    """
    own, other = (_wide(t).norm(dim=-1) for t in (made, recorded))
    size = own.square().sum()
    if not bool(size > 0):
        return 1.0 if not bool(other.any()) else None
    scale = float((own * other).sum() / size)
    if not same((own * scale).to(made.dtype), other.to(made.dtype)):
        return None
    return 1.0 if abs(scale - 1) < _TOLERANCE[min(made.element_size(), recorded.element_size())] else scale


# ---------------------------------------------------------------------------------------------------------- rotations


def rotation_between(
    pairs: Sequence[tuple[Tensor, Tensor]], at: Tensor, known: Sequence[Rotation]
) -> tuple[Rotation | None] | None:
    """Return the rotation that turns each first tensor of the pairs into the second; None where there is none.

    A tuple of None says that they are equal. The rotation is the same for all heads of queries and of keys.

    Parameters
    ----------
    pairs : sequence of (Tensor, Tensor), each (batch, n, heads, d)
        Queries and keys as they were made, and as they were recorded.
    at : Tensor of int
        Rows by which they are compared.
    known : sequence of Rotation
        Rotations of other layers, which come first.
    """
    some = [(made[:, at], recorded[:, at]) for made, recorded in pairs]
    if all(same(made, recorded) for made, recorded in some):
        return (None,)
    batch, count, _, d = pairs[0][0].shape
    for rotation in known:
        turns = rotation.turns
        if (
            turns.shape[1] == count
            and turns.shape[0] == batch
            and 2 * turns.shape[2] <= d
            and _turns(rotation, some, turns[:, at])
        ):
            return (rotation,)
    usual = [d, d // 2, d // 4, 2 * (d // 5), 3 * (d // 4)]
    for size in dict.fromkeys(size for size in (*usual, *range(d, 0, -2)) if size > 0 and size % 2 == 0):
        for interleaved in (False, True):
            shape = Rotation(some[0][0].new_zeros(1, 1, size // 2, 2), interleaved)
            if _turns(shape, some, _turns_between(shape, some)):
                return (Rotation(_turns_between(shape, pairs), interleaved),)
    return None


def _turns_between(shape: Rotation, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return cosine and sine of each pair of coordinates at each row, (batch, n, pairs, 2), by least squares."""
    cos: Tensor | float = 0.0
    sin: Tensor | float = 0.0
    size: Tensor | float = 0.0
    for made, recorded in pairs:
        (a, b), (c, d) = shape.pairs(_wide(made)), shape.pairs(_wide(recorded))
        cos = cos + (a * c + b * d).sum(2)
        sin = sin + (a * d - b * c).sum(2)
        size = size + (a * a + b * b).sum(2)
    size = torch.as_tensor(size)
    size = torch.where(size > 0, size, 1.0)
    return torch.stack([cos / size, sin / size], dim=-1)


def _turns(rotation: Rotation, pairs: Sequence[tuple[Tensor, Tensor]], turns: Tensor) -> bool:
    """Return whether turns (batch, rows, pairs, 2) turn each first tensor of the pairs into the second."""
    shape = Rotation(turns, rotation.interleaved)
    return all(
        same(shape.turned(_wide(made).transpose(1, 2), turns.unsqueeze(1)).transpose(1, 2).to(made.dtype), recorded)
        for made, recorded in pairs
    )


# --------------------------------------------------------------------------------------------------------------- sums


def factors_of_sum(target: Tensor, parts: Sequence[Tensor]) -> list[float] | None:
    """Return the factors with which parts sum to a tensor, mostly 1; None where they do not, whatever the factors."""
    if not parts:
        return [] if not bool(target.any()) else None
    wide = [_wide(t).expand_as(target) for t in parts]
    if same(torch.stack(wide).sum(0).to(target.dtype), target):
        return [1.0] * len(parts)
    matrix = torch.stack([t.flatten() for t in wide], dim=1).double().cpu()
    found = torch.linalg.lstsq(matrix, _wide(target).flatten().double().cpu(), driver="gelsd").solution
    rounded = torch.where((found - found.round()).abs() < 1e-5, found.round(), found)
    if not same((matrix @ rounded).view(target.shape).to(target.dtype), target.cpu()):
        return None
    return [float(x) for x in rounded]
