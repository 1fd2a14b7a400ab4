"""circuitsvis draws lazy matrices, as far as a page can hold them."""

import json
import re
import sys
from types import ModuleType

import pytest
import torch

import attlas
from attlas import pictures
from attlas.errors import BackendError, MissingExtraError, ShapeError, TooLargeError


def matrix(n: int, heads: int = 2) -> attlas.AttentionMatrix:
    torch.manual_seed(0)
    return attlas.attend(torch.randn(1, heads, n, 8), torch.randn(1, heads, n, 8), mask=attlas.Causal())


def test_pages_hold_the_numbers_of_the_dense_tensor() -> None:
    attention = pytest.importorskip("circuitsvis.attention", reason="circuitsvis is not installed: make test-doors")
    pictures.accept_in_circuitsvis()
    pictures.accept_in_circuitsvis()
    A, tokens = matrix(5), list("attla")
    for draw, lazy in ((attention.attention_heads, A[0]), (attention.attention_pattern, A[0].as_tensor()[1])):
        found, wanted = (
            json.loads(
                re.search(r"\{\"attention\".*?\}|\{\"tokens\".*?\}", draw(attention=t, tokens=tokens).show_code())[0]
            )
            for t in (lazy, lazy.to_dense() if isinstance(lazy, attlas.AttentionMatrix) else lazy.detach().clone())
        )
        torch.testing.assert_close(torch.tensor(found["attention"]), torch.tensor(wanted["attention"]))
    with pytest.raises(ShapeError, match="4 axes"):
        attention.attention_heads(attention=A, tokens=tokens)
    with pytest.raises(TooLargeError, match="1,048,576"):
        attention.attention_heads(attention=matrix(1100, 1)[0], tokens=tokens)


def test_another_circuitsvis_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "circuitsvis.utils.convert_props", ModuleType("another"))
    with pytest.raises(BackendError, match="no convert_prop_type"):
        pictures.accept_in_circuitsvis()
    monkeypatch.setitem(sys.modules, "circuitsvis.utils.convert_props", None)
    with pytest.raises(MissingExtraError, match="circuitsvis"):
        pictures.accept_in_circuitsvis()
