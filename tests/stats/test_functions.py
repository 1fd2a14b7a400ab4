"""The functions that are made of statistics: their names, signatures and docstrings are those of the class."""

import inspect
import pickle
import re
import typing
from pathlib import Path

import numpy as np
import pytest
import torch

import attlas
from attlas import heads, stats
from attlas.stats.functions import function_of

ROOT = Path(__file__).resolve().parent.parent.parent


def class_of(function: typing.Any) -> typing.Any:
    """Return the statistic whose name, written small and without underscores, is that of a function."""
    package = heads if ".heads." in function.__module__ else stats
    names = {name.lower(): getattr(package, name) for name in package.__all__ if not name.islower()}
    return names[function.__name__.replace("_", "")]


MADE = [
    function
    for package in (stats, heads)
    for function in (getattr(package, name) for name in package.__all__)
    if getattr(function, "__code__", None) is stats.entropy.__code__  # one code for all
]


def test_all_are_looked_at() -> None:
    assert len(MADE) == 24


@pytest.mark.parametrize("function", MADE, ids=lambda function: function.__name__)
def test_is_the_class_with_a_matrix_in_front(function: typing.Any) -> None:
    made_of = class_of(function)
    own = inspect.signature(function).parameters
    assert next(iter(own)) == "A"
    assert dict(list(own.items())[1:]) == dict(inspect.signature(made_of).parameters)
    assert set(typing.get_type_hints(function)) == {*own, "return"}
    assert function.__name__ == function.__qualname__
    assert function.__module__ == made_of.__module__
    assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize("function", MADE, ids=lambda function: function.__name__)
def test_docstring_describes_the_call(function: typing.Any) -> None:
    made_of, text = class_of(function), inspect.getdoc(function)
    summary = inspect.getdoc(made_of).partition("\n")[0]
    assert text.startswith(f"{summary} See `{made_of.__name__}`.\n\nParameters\n----------\nA : ")
    assert re.search(rf"^>>> .*\b{function.__name__}\(A", text, flags=re.M)
    assert "Notes\n" not in text
    result = typing.get_type_hints(function)["return"].__name__
    assert f"\nReturns\n-------\n{result}, " in text


def test_arguments_reach_the_class() -> None:
    A = attlas.attend(torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 4), mask=attlas.Causal())
    assert A.lse.isfinite().all()  # known to both: backends round it in their own ways
    assert torch.equal(stats.topk(A=A, k=2).values, A.collect(stats.TopK(2))[0].values)
    assert torch.equal(stats.offsets(A, mean=True), A.collect(stats.Offsets(True))[0])
    both = stats.entropy((A, A[0]))
    assert [one.shape for one in both] == [(2, 3, 6), (3, 6)]
    np.testing.assert_allclose(heads.previous_token(A), heads.diagonal(A, 1))
    for wrong in (
        lambda: stats.topk(A),
        lambda: stats.entropy(A, 2),
        stats.entropy,
        lambda: stats.spans(A, row=3),
    ):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(attlas.DtypeError, match=r"stats\.Entropy: it is a statistic of"):
        stats.entropy("a word")


def test_works_without_docstrings() -> None:
    class Bare(stats.RowMass):
        pass

    Bare.__doc__ = None
    assert function_of(Bare, torch.Tensor, "shape (..., m)").__name__ == "bare"


def test_pages_show_signature_and_text() -> None:
    griffe = pytest.importorskip("griffe")
    extension = griffe.load_extensions(str(ROOT / "docs/_build/functions.py"))
    loaded = griffe.load(
        "attlas.stats.largest", search_paths=[ROOT / "src"], extensions=extension, docstring_parser="numpy"
    )
    function = loaded["topk"]
    assert function.is_function
    assert [(parameter.name, str(parameter.annotation)) for parameter in function.parameters] == [
        ("A", "MatrixLike"),
        ("k", "int"),
    ]
    assert str(function.returns) == "Largest"
    assert {section.kind.value for section in function.docstring.parsed} >= {
        "text",
        "parameters",
        "returns",
        "examples",
    }
