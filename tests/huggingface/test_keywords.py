"""Keywords of the attention interface: each one that transformers passes is used, or known to change nothing."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import SIZES
from torch import Tensor, nn
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.utils.generic import TransformersKwargs

from attlas.errors import BackendError
from attlas.huggingface import attention_forward
from attlas.huggingface.keywords import WITHOUT_EFFECT

USED = {name for name in inspect.signature(attention_forward).parameters if name != "kwargs"}
REGISTRY = "ALL_ATTENTION_FUNCTIONS"
# How layers find their attention function; one asks an attribute of the registry, and gets eager's each time.
LOOKED_UP = re.compile(rf"^ *(\w+)(?:: \w+)? = (?:getattr\(\s*)?{REGISTRY}\b", flags=re.M)
FILES = [
    path
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/*.py"))
    if not path.name.startswith("modular_") and REGISTRY in path.read_text("utf-8")
]


def call_at(text: str, start: int) -> ast.Call:
    """The call whose name begins at `start`: up to the bracket that closes it."""
    for stop in (match.end() for match in re.finditer(r"\)", text[start:])):
        try:
            found = ast.parse(text[start : start + stop]).body[0]
        except SyntaxError:
            continue
        assert isinstance(found, ast.Expr)
        assert isinstance(found.value, ast.Call)
        return found.value
    raise AssertionError(text[start : start + 80])


def keywords_of(text: str) -> Iterator[str]:
    """The names of the keywords of every call of an attention function in a file."""
    names = set(re.findall(LOOKED_UP, text))
    for name in names:
        for match in re.finditer(rf"(?<![\w.]){name}\(", text):
            for keyword in call_at(text, match.start()).keywords:
                if keyword.arg is not None:
                    yield keyword.arg
                elif ast.unparse(keyword.value) != "kwargs":  # a dictionary that the layer makes
                    made = re.findall(rf"^ *{ast.unparse(keyword.value)} = (\{{.*\}})$", text, flags=re.M)
                    assert made, ast.unparse(keyword)
                    yield from (key.value for one in made for key in ast.parse(one, mode="eval").body.keys)  # type: ignore[attr-defined]


@pytest.mark.parametrize("half", [0, 1])
def test_every_keyword_that_transformers_passes_is_known(half: int) -> None:
    """A new keyword fails here, by its name: `attention_forward` must use it, or `WITHOUT_EFFECT` say why not."""
    assert len(FILES) > 300
    unknown = {
        (keyword, path.parent.name)
        for path in FILES[half::2]
        for keyword in keywords_of(path.read_text("utf-8"))
        if keyword not in USED and keyword not in WITHOUT_EFFECT
    }
    assert not unknown


def test_the_attention_function_is_looked_up_in_known_forms() -> None:
    """The walk above would pass over a call in another form."""
    other = []
    for path in FILES:
        code = re.sub(r'""".*?"""|#.*', "", path.read_text("utf-8"), flags=re.S)
        code = re.sub(rf"^(?:from .* import .*|{REGISTRY}.*)$", "", code, flags=re.M)  # a registry of its own, too
        if REGISTRY in re.sub(LOOKED_UP, "", code):
            other.append(path.parent.name)
    assert not other


def test_what_eager_attention_takes_is_known() -> None:
    """Its parameters, and what it looks up in its keywords."""
    unknown = set()
    for path in FILES:
        text = path.read_text("utf-8")
        for head in re.finditer(r"^def \w*eager\w*attention\w*\(.*?\n(?=\S)(?!\))", text, flags=re.M | re.S):
            function = ast.parse(head[0]).body[0]
            assert isinstance(function, ast.FunctionDef)
            own = {a.arg.removesuffix("_states") for a in (*function.args.args, *function.args.kwonlyargs)}
            own |= set(re.findall(r"kwargs(?:\.get\(|\.pop\(|\[)['\"](\w+)", head[0]))
            unknown |= {(name, path.parent.name) for name in own if name not in USED and name not in WITHOUT_EFFECT}
    assert not unknown


def test_what_transformers_lets_its_users_pass_is_known() -> None:
    named = {*TransformersKwargs.__annotations__, *FlashAttentionKwargs.__annotations__}
    assert not named - USED - WITHOUT_EFFECT.keys()


def test_used_and_without_effect_are_apart() -> None:
    assert not USED & WITHOUT_EFFECT.keys()


# ------------------------------------------------------------------------------------------------------------ refusing


def eager_attention_forward(module: nn.Module, query: Tensor, head_scale: Any = None, **kwargs: Any) -> Any:
    """What a model file has beside its layers: it computes with a keyword that the layer only hands on."""


class Layer(nn.Module):
    """A layer of a future model."""

    def forward(self, q: Tensor, choice: Any, **kwargs: Any) -> Tensor:
        return attention_forward(self, q, q, q, None, scaling=1.0, top_choice=choice, **kwargs)[0]


class OfAUser(Layer):
    def forward(self, q: Tensor, choice: Any, **kwargs: Any) -> Tensor:
        return super().forward(q, choice, **kwargs)


@pytest.fixture
def q() -> Tensor:
    return torch.randn(1, 2, 5, 8)


@pytest.mark.parametrize("layer", [Layer, OfAUser])
@pytest.mark.parametrize("value", [torch.zeros(1, 5, 2), False, 0.0])
def test_a_keyword_that_a_layer_names_is_refused(layer: type[nn.Module], value: Any, q: Tensor) -> None:
    with pytest.raises(BackendError, match="top_choice") as caught:
        layer()(q, value)
    assert layer.__name__ in str(caught.value)
    assert __name__ in str(caught.value)
    assert 'set_attn_implementation("eager")' in caught.value.fix


def test_a_keyword_that_eager_attention_takes_is_refused(q: Tensor) -> None:
    with pytest.raises(BackendError, match="head_scale"):
        Layer()(q, None, head_scale=torch.ones(2))


def test_pages_of_a_cache_are_refused(q: Tensor) -> None:
    with pytest.raises(BackendError, match="continuous batching"):
        Layer()(q, None, cache=object())


def test_what_is_none_or_named_by_no_layer_changes_nothing(q: Tensor) -> None:
    wanted = Layer()(q, None)
    given = dict.fromkeys(WITHOUT_EFFECT, 3) | {
        "a_column_of_the_data": torch.ones(3),
        "head_scale": None,
        "cache": None,
    }
    assert torch.equal(Layer()(q, None, **given), wanted)


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_users_may_pass_what_no_layer_knows(compiled: bool) -> None:
    torch._dynamo.reset()
    config = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 1})
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="attlas").eval()
    ids = torch.arange(3, 12)[None]
    wanted = model(ids, use_cache=False).logits
    run = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    given = {"output_router_logits": False, "num_items_in_batch": torch.tensor(9), "row_number": torch.tensor([3])}
    torch.testing.assert_close(run(ids, use_cache=False, **given).logits, wanted)
