"""attlas beside what else computes attention weights or kernel regression, as ratios inside one run.

Run with ``python benchmarks/peers.py``. Peers that are not installed are left out: transformers, statsmodels,
scikit-learn, pykeops. docs/comparison.md quotes the results. One thread, so that nobody gains from more cores.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attlas
from attlas import stats
from harness import extra_peak_bytes, ratios, save


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def plain(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    n = q.shape[-2]
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    return torch.softmax((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf), dim=-1)


def output(tokens: int) -> dict[str, Any]:
    """Return times of the output of causal attention, 8 heads of 64."""
    q, k, v = (torch.randn(1, 8, tokens, 64) for _ in range(3))
    cases: dict[str, Callable[[], Any]] = {
        "SDPA": lambda: sdpa(q, k, v, is_causal=True),
        "attlas, A @ v": lambda: attlas.attend(q, k, mask=attlas.Causal()) @ v,
        "plain formula": lambda: plain(q, k) @ v,
    }
    try:
        flex = torch.compile(flex_attention)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device="cpu")
        flex(q, k, v, block_mask=mask)
        cases["FlexAttention, compiled"] = lambda: flex(q, k, v, block_mask=mask)
    except Exception as error:  # noqa: BLE001  # a compiler may be missing, and says so in many ways
        print(f"FlexAttention does not run here: {type(error).__name__}")
    return ratios(cases, "SDPA")


def weights(tokens: int) -> dict[str, Any]:
    """Return times and memory of entropy and column mass of causal attention, 8 heads of 64."""
    q, k = (torch.randn(1, 8, tokens, 64) for _ in range(2))

    def dense() -> tuple[torch.Tensor, torch.Tensor]:
        a = plain(q, k)
        return -torch.special.xlogy(a, a).sum(-1), a.sum(-2)

    def lazy() -> tuple[Any, ...]:
        return attlas.attend(q, k, mask=attlas.Causal()).collect(stats.Entropy(), stats.ColumnMass())

    return timed_with_memory({"plain formula": dense, "attlas": lazy}, "plain formula")


def model(tokens: int) -> dict[str, Any]:
    """Return times and memory of a GPT-2 of 4 layers and 8 heads that gives its attention weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    import attlas.huggingface  # noqa: F401  # registers the name that is set below

    config = GPT2Config(vocab_size=512, n_positions=tokens, n_embd=512, n_layer=4, n_head=8)
    config.bos_token_id = config.eos_token_id = 0
    ids = torch.randint(512, (1, tokens))
    eager, lazy = (GPT2LMHeadModel(copy.deepcopy(config)).eval() for _ in range(2))
    lazy.load_state_dict(eager.state_dict())
    eager.set_attn_implementation("eager")
    lazy.set_attn_implementation("attlas")

    def run(net: Any, read: Callable[[Any], Any]) -> Callable[[], Any]:
        return lambda: [read(a) for a in net(ids, output_attentions=True).attentions]

    def of_tensor(a: torch.Tensor) -> torch.Tensor:
        return -torch.special.xlogy(a, a).sum(-1)

    cases = {
        "transformers eager, entropy of all heads": run(eager, of_tensor),
        "attlas, entropy of all heads": run(lazy, stats.entropy),
        "attlas, one row of each head": run(lazy, lambda a: a[..., -1, :]),
    }
    return timed_with_memory(cases, "transformers eager, entropy of all heads")


def regression(n: int) -> dict[str, Any]:
    """Return times of Gaussian kernel regression on n readings of 3 coordinates, asked at n places."""
    x, y, new = torch.rand(n, 3), torch.rand(n, 1), torch.rand(n, 3)
    h = 0.1
    a64, b64, c64 = (t.double().numpy() for t in (x, y, new))
    cases: dict[str, Callable[[], Any]] = {
        "attlas": lambda: attlas.attention(new, x, y, score=attlas.Gaussian(h)),
        "attlas, float64": lambda: attlas.attention(new.double(), x.double(), y.double(), score=attlas.Gaussian(h)),
    }
    if installed("statsmodels"):
        from statsmodels.nonparametric.kernel_regression import KernelReg

        peer = KernelReg(b64[:, 0], a64, "ccc", reg_type="lc", bw=[h] * 3)
        few = c64[: n // 20]  # a twentieth of the places: it takes one at a time
        cases["statsmodels KernelReg, 1/20 of the places"] = lambda: peer.fit(few)
        assert np.allclose(peer.fit(few)[0], cases["attlas, float64"]()[: len(few), 0], atol=1e-8)
    if installed("sklearn"):
        from sklearn.neighbors import KNeighborsRegressor

        near = KNeighborsRegressor(50, weights=lambda d: np.exp(-0.5 * (d / h) ** 2)).fit(a64, b64)
        cases["scikit-learn, 50 nearest neighbours only"] = lambda: near.predict(c64)
    if installed("pykeops"):
        try:
            from pykeops.torch import LazyTensor

            def keops() -> torch.Tensor:
                gap = LazyTensor(new[:, None] / h).sqdist(LazyTensor(x[None] / h))
                return (-gap / 2).sumsoftmaxweight(LazyTensor(y[None]), dim=1)

            torch.testing.assert_close(keops(), cases["attlas"](), atol=1e-4, rtol=1e-4)
            cases["KeOps"] = keops
        except Exception as error:  # noqa: BLE001  # it compiles its kernels when first used
            print(f"KeOps does not run here: {type(error).__name__}: {error}")
    return ratios(cases, "attlas")


def timed_with_memory(cases: dict[str, Callable[[], Any]], base: str) -> dict[str, Any]:
    out = ratios(cases, base, rounds=3)
    for name, run in cases.items():
        out[name]["extra_peak_MB"] = round(extra_peak_bytes(run) / 1e6, 1)
        print(f"{name:58s} {out[name]['extra_peak_MB']:9.1f} MB", flush=True)
    return out


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "output, causal, 1 x 8 x 4096 x 64": output(4096),
        "entropy and column mass, causal, 1 x 8 x 4096 x 64": weights(4096),
    }
    if installed("transformers"):
        results["GPT-2, 4 layers, 8 heads, 2048 tokens"] = model(2048)
    results["Gaussian kernel regression, 5000 readings, 5000 places"] = regression(5000)
    save("peers", results)


if __name__ == "__main__":
    main()
