"""Largest error against the definition in float64, beside the plain formula in the same dtype.

Run with ``make bench`` or ``python benchmarks/accuracy.py``.
"""

from __future__ import annotations

import torch

import attlas
from harness import save


def main() -> None:
    torch.manual_seed(0)
    results = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k, v = (torch.randn(1, 4, 2048, 64).to(dtype) for _ in range(3))
        exact = torch.softmax(q.double() @ k.double().mT / 8, dim=-1)
        plain = torch.softmax(q @ k.mT / 8, dim=-1)
        a = attlas.attend(q, k)
        name = str(dtype).removeprefix("torch.")
        results[name] = {
            "weights": float((a.to_dense() - exact).abs().max()),
            "weights, plain formula": float((plain - exact).abs().max()),
            "output": float(((a @ v) - exact @ v.double()).abs().max()),
            "output, plain formula": float((plain @ v - exact @ v.double()).abs().max()),
        }
        print(name, *(f"{key} {value:.1e}" for key, value in results[name].items()), sep="   ")
    save("accuracy", results)


if __name__ == "__main__":
    main()
