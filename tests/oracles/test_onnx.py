"""The 64 `Attention` cases of the ONNX standard (v1.22.0): outputs, scores at every stage, probabilities, caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attlas

pytestmark = pytest.mark.external

RAW, CAPPED, BIASED, WEIGHTS = range(4)  # qk_matmul_output_mode, as of v1.22
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}
COUNT = 64


@pytest.fixture
def standard(external_data: Path) -> tuple[dict[str, Any], Any]:
    name = external_data / "onnx" / "derived_vectors_v1.22.0.json"
    cases = json.loads(name.read_text(encoding="utf-8"))
    return {k: c for k, c in cases.items() if c["op"] == "Attention"}, np.load(name.with_suffix(".npz"))


def with_heads(t: Tensor, heads: int | None) -> Tensor:
    """Return (batch, heads, tokens, size) of (batch, tokens, heads * size)."""
    return t if t.ndim == 4 or heads is None else t.unflatten(-1, (heads, -1)).transpose(1, 2)


def stretched(mask: Tensor, n: int) -> Tensor:
    """Return a mask that covers n keys: those beyond its end are forbidden, as the standard says."""
    missing = n - mask.shape[-1]
    if not missing:
        return mask
    return torch.nn.functional.pad(mask, (0, missing), value=False if mask.dtype == torch.bool else -torch.inf)


def ask(case: dict[str, Any], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute one case with attlas, and nothing else but concatenation and reshaping."""
    settings = case["attrs"]
    q = with_heads(given["Q"], settings.get("q_num_heads"))
    k, v = (with_heads(given[name], settings.get("kv_num_heads")) for name in "KV")
    past = 0
    if "past_key" in given:
        past = given["past_key"].shape[-2]
        k, v = torch.cat([given["past_key"], k], dim=-2), torch.cat([given["past_value"], v], dim=-2)
    n = k.shape[-2]

    raw: attlas.Score = attlas.ScaledDot(settings.get("scale"))
    score = attlas.SoftCap(raw, settings["softcap"]) if settings.get("softcap") else raw
    mask: attlas.Mask | None = None
    if "attn_mask" in given:
        tensor = stretched(given["attn_mask"], n)
        mask = attlas.from_tensor(tensor if tensor.dtype == torch.bool else tensor.float())
    if "nonpad_kv_seqlen" in given:
        padding = attlas.Padding(given["nonpad_kv_seqlen"])
        mask = padding if mask is None else mask & padding
    if settings.get("is_causal"):
        # Top left: the first query stands at the first key that is not of the past.
        causal = attlas.Causal(past)
        mask = causal if mask is None else mask & causal

    A = attlas.attend(q, k, score=score, mask=mask)
    out = A @ v
    found = {"Y": out if given["Q"].ndim == 4 else out.transpose(1, 2).flatten(-2)}
    if "present_key" in case["outputs"]:
        found |= {"present_key": k, "present_value": v}
    if "qk_matmul_output" in case["outputs"]:
        found["qk_matmul_output"] = {
            RAW: attlas.attend(q, k, score=raw).logits.to_dense,
            CAPPED: attlas.attend(q, k, score=score).logits.to_dense,
            BIASED: A.logits.to_dense,
            WEIGHTS: A.to_dense,
        }[settings.get("qk_matmul_output_mode", RAW)]()
    return found


def read(arrays: Any, name: str, kind: str) -> dict[str, Tensor]:
    prefix = f"{name}/{kind}/"
    return {key.removeprefix(prefix): torch.from_numpy(arrays[key]) for key in arrays.files if key.startswith(prefix)}


def test_all_cases_match(standard: Any) -> None:
    """One test for all: the names are known only where the data is."""
    cases, arrays = standard
    assert len(cases) == COUNT
    failures = {}
    for name, case in cases.items():
        given, wanted = read(arrays, name, "input"), read(arrays, name, "output")
        found = ask(case, given)
        assert found.keys() == wanted.keys() == set(case["outputs"])
        for key, expected in wanted.items():
            tolerance = TOLERANCE[expected.dtype]
            try:
                torch.testing.assert_close(found[key].to(expected.dtype), expected, rtol=tolerance, atol=tolerance)
            except AssertionError as error:
                failures[f"{name}: {key}"] = str(error)
    assert not failures, "\n\n".join(f"{key}\n{text}" for key, text in failures.items())
