"""What ``attlas bench`` measures: the limits of the processor, and attention in four ways."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attlas
from attlas import stats
from attlas.engine.limits import Limits

Cases = dict[str, Callable[[], Any]]

_BEST_OF = 20  # a limit is the best of so many


def limits(tick: Callable[[], None]) -> Limits:
    """Measure this processor: `tick` is called six times."""

    def best(run: Callable[[], Any]) -> float:
        """Return the least seconds of several runs, and tick."""
        run()
        seconds = min(run_once(run) for _ in range(_BEST_OF))
        tick()
        return seconds

    products = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        square = torch.randn(1024, 1024).to(dtype)
        products[str(dtype).removeprefix("torch.")] = 1024**3 / best(functools.partial(torch.mm, square, square))
    # Where bfloat16 is much faster, a float32 product is six of its products, and a float16 product three.
    products["float32"] = max(products["float32"], products["bfloat16"] / 6)
    products["float16"] = max(products["float32"], products["bfloat16"] / 3)
    products["bfloat16"] = max(products["bfloat16"], products["float32"])
    return Limits(products, _exponentials_per_second(best), _copied_bytes_per_second(best))


def _exponentials_per_second(best: Callable[[Callable[[], Any]], float]) -> float:
    """Return exponentials per second: torch's in the cache, or those of attlas's kernels where they are faster."""
    numbers = torch.randn(torch.get_num_threads(), 32768)
    result = torch.empty_like(numbers)
    by_torch = 32 * numbers.numel() / best(lambda: [torch.exp(numbers, out=result) for _ in range(32)])
    q, k = torch.randn(8, 1024, 4), torch.randn(8, 1024, 4)
    in_kernel = 8 * 1024**2 / best(lambda: attlas.attend(q, k).lse)
    return max(by_torch, in_kernel)


def _copied_bytes_per_second(best: Callable[[Callable[[], Any]], float]) -> float:
    """Return bytes per second of a copy that no cache holds."""
    source = torch.ones(1 << 26)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best(lambda: target.copy_(source))


def eager(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Return attention by the formula, with the whole matrix in memory."""
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(future, -math.inf)
    return torch.softmax(logits, -1) @ v


def flex_attention(q: Tensor, k: Tensor, v: Tensor) -> dict[bool, Callable[[], Tensor]] | str:
    """Compile FlexAttention, and return calls of it by whether they are causal; or why it does not run here."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    try:
        compiled: Any = torch.compile(flex_attention)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[-2], k.shape[-2], device="cpu")
        calls: dict[bool, Callable[[], Tensor]] = {
            False: lambda: compiled(q, k, v),
            True: lambda: compiled(q, k, v, block_mask=mask),
        }
        for call in calls.values():
            call()
    except Exception as error:  # noqa: BLE001  (a compiler may be missing, and says so in many ways)
        return type(error).__name__
    return calls


def output(
    q: Tensor, k: Tensor, v: Tensor, flex: dict[bool, Callable[[], Tensor]] | str
) -> Iterator[tuple[str, Cases]]:
    """Yield a title and its cases, of which the first is torch's kernel: all pairs, and causal."""
    rows = (stats.Entropy(), stats.TopK(min(8, k.shape[-2])), stats.LogitMoments(), stats.MaxLogit())
    every = (
        *rows,
        stats.ColumnMass(),
        stats.ColumnMax(),
        stats.Offsets(),
        stats.Picture(min(256, q.shape[-2]), min(256, k.shape[-2])),
    )
    for causal in (False, True):
        cases: Cases = {
            "SDPA": functools.partial(sdpa, q, k, v, is_causal=causal),
            "eager (stores the matrix)": functools.partial(eager, q, k, v, causal=causal),
        }
        if not isinstance(flex, str):
            cases["FlexAttention, compiled"] = flex[causal]
        mask = attlas.Causal() if causal else None
        cases["attlas: A @ v"] = functools.partial(attlas.attention, q, k, v, mask=mask)
        for kind, statistics in (("row", rows), ("all", every)):
            collect = functools.partial(_collected_statistics, q, k, mask, stats.Pooled(v), *statistics)
            cases[f"attlas: A @ v and {kind} statistics"] = collect
        yield "causal" if causal else "all pairs", cases


def _collected_statistics(q: Tensor, k: Tensor, mask: attlas.Mask | None, *statistics: stats.Statistic) -> Any:
    """Return the statistics of ``softmax(q k^T)`` by one pass over the tiles."""
    return attlas.attend(q, k, mask=mask).collect(*statistics)


def forward_and_backward(q: Tensor, k: Tensor, v: Tensor) -> Cases:
    """Return the cases of the output with its three gradients, all pairs."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    slope = torch.randn_like(v)

    def gradients(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Any]:
        """Return a call that computes an attention and its gradients in q, k and v."""
        return lambda: torch.autograd.grad(attention(*leaves), leaves, slope)

    return {
        "SDPA": gradients(sdpa),
        "eager (stores the matrix)": gradients(functools.partial(eager, causal=False)),
        "attlas: A @ v": gradients(lambda q, k, v: attlas.attend(q, k) @ v),
    }


@dataclass(frozen=True)
class Ratio:
    """The time of one case, and its quotients by that of the base: one per round.

    Parameters
    ----------
    seconds : float
        Median time.
    median, least, most : float
        Of the quotients.
    """

    seconds: float
    median: float
    least: float
    most: float


def ratios(cases: Cases, rounds: int, tick: Callable[[], None], most_seconds: float) -> dict[str, Ratio]:
    """Time cases in turn, round by round, after a run of each that is not counted.

    Each round runs all of them, so that a drifting machine slows all alike.

    Parameters
    ----------
    cases : Mapping of str to callable
        What is timed; the others are divided by the first.
    rounds : int
        How often each runs.
    tick : callable
        Called after each round, the first included that is not counted.
    most_seconds : float
        No round begins after this time, except the first two that count.
    """
    begin = time.perf_counter()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        if number > 2 and time.perf_counter() - begin > most_seconds:
            break
        for name, run in cases.items():
            seconds[name].append(run_once(run))
        tick()
    base, out = next(iter(seconds.values()))[1:], {}
    for name, (_, *own) in seconds.items():
        quotients = [a / b for a, b in zip(own, base, strict=True)]
        out[name] = Ratio(median(own), median(quotients), min(quotients), max(quotients))
    return out


def run_once(run: Callable[[], Any]) -> float:
    """Return the seconds that a function takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
