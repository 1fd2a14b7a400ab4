"""Errors and warnings of a recording; whole texts where the advice depends on the model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.messages import refusal, said
from tests.recording.test_traps import Windows, albert
from tests.tiny_models import FALCON, VOCABULARY, lively
from torch import Tensor, nn

import attlas
from attlas import stats
from attlas.recording import offer, record

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def model() -> nn.Sequential:
    return nn.Sequential(Windows(), Windows())


class Silent(nn.Module):
    """An attention that tells nobody."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class SilentAttention(Silent):
    """One that is called so."""


class CallsAttention(nn.Module):
    """One that calls torch's function."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


class NotAnAttention(Windows):
    """A class that nobody would take for one."""


x = torch.randn(1, 2, 4, 4)
listen: Any = record  # as someone calls it who has no type checker
BAD: dict[str, tuple[type[Exception], Callable[[], object], str]] = {
    "no module": (attlas.DtypeError, lambda: listen("gpt2"), "a str"),
    "keep": (attlas.ShapeError, lambda: listen(model(), keep="gpu"), "keep = 'gpu'"),
    "a class": (attlas.DtypeError, lambda: listen(model(), statistics=[stats.Entropy]), "the class Entropy"),
    "only statistics, and none": (attlas.ShapeError, lambda: listen(model(), keep="statistics"), "no statistic"),
    "no disk": (attlas.ShapeError, lambda: listen(model(), folder="a"), "folder = 'a', keep = 'device'"),
    "a kind of layer": (attlas.DtypeError, lambda: listen(model(), layers=[0, 1.5]), "a float"),
    "a kind of head": (attlas.DtypeError, lambda: listen(model(), heads=["a"]), "a list"),
    "no head": (attlas.DtypeError, lambda: listen(model(), heads=[]), "no head"),
    "no tokens": (attlas.DtypeError, lambda: listen(model(), tokens="abc"), "a str"),
    "a step": (attlas.ShapeError, lambda: listen(model(), queries=range(0, 9, 2)), "queries = range(0, 9, 2)"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments(name: str) -> None:
    kind, call, text = BAD[name]
    assert refusal(kind, call).endswith(f": {text}")


def run(given: nn.Module, *args: Tensor, **options: Any) -> attlas.AttlasError:
    """Record one pass and return the error."""
    with pytest.raises(attlas.AttlasError) as error, torch.no_grad(), record(given, **options):
        given(*(args or (x,)))
    return error.value


def test_a_layer_that_is_not_there(llama: nn.Module) -> None:
    with pytest.raises(attlas.OutOfRangeError) as error:
        record(llama, layers=[0, 3])
    modules = ", ".join(f"model.layers.{i}.self_attn" for i in range(3))
    assert error.value.arguments == {"attentions": "self.0 to self.2", "modules": modules}
    assert said(error.value) == "record(): layer 3"
    assert error.value.fix == "layers=[2], layers=['model.layers.2.self_attn'] or layers=['self.2']"
    with pytest.raises(attlas.OutOfRangeError, match=r"found: layer 'cross\.0'"):
        record(llama, layers="cross.0")
    with pytest.raises(attlas.OutOfRangeError, match=r"found: layer -4"):
        record(llama, heads={-4: [0]})


# Advice that names what the model has, which is known when it has run.
ABSENT = [
    ({"layers": [2]}, "layer 2", "layers=[1], layers=['1'] or layers=['self.1']"),
    ({"heads": [0, 2]}, "head 2, the layer has 2", "use heads from 0 to 1, or from -2 to -1."),
    ({"queries": slice(50, 60)}, "and no call had such a query", "queries=slice(-32, None) for the last 32."),
    ({"keep": "statistics", "statistics": [stats.TopK(9)]}, "k = 9, n = 4 when", "TopK(4), or a longer text."),
]


@pytest.mark.parametrize(("options", "found", "fix"), ABSENT)
def test_what_the_model_or_the_text_does_not_have(options: dict[str, Any], found: str, fix: str) -> None:
    error = run(model(), **options)
    assert found in error.found
    assert error.fix == fix


def test_a_recording_is_entered_once() -> None:
    recording = record(given := model())
    with recording:
        given(x)
        again = refusal(attlas.RecordingError, recording.__enter__)
    assert again == "record(): the same recording in a second `with`"


def test_a_model_that_does_not_run() -> None:
    with pytest.raises(attlas.RecordingError) as error, record(model()):
        pass
    assert said(error.value) == "record(): no call of the model, and no attention"


EAGER, PATCH, OFFER = (
    'attn_implementation="eager"',
    "attlas.record(model, patch_sdpa=True)",
    "attlas.attention(q, k, v)",
)
BY_HAND = "attlas.record(model, handwritten=True)"
SILENT: dict[str, tuple[Callable[[], nn.Module], bool, str, tuple[str, ...]]] = {
    "computes by itself": (SilentAttention, False, "SilentAttention at 0", (BY_HAND, OFFER)),
    "computes by itself, patched": (SilentAttention, True, "SilentAttention at 0", (BY_HAND, OFFER)),
    "calls torch's function": (CallsAttention, False, "CallsAttention at 0", (PATCH,)),
    "no attention by name": (Silent, False, "no module that is called an attention", (PATCH, "State-space")),
    "no attention by name, patched": (Silent, True, "no module that is called an attention", ("State-space",)),
}


@pytest.mark.parametrize("name", SILENT)
def test_an_attention_that_nobody_hears(name: str) -> None:
    kind, patched, found, advice = SILENT[name]
    error = run(nn.Sequential(kind(), nn.Identity()), patch_sdpa=patched)
    assert error.arguments == {"model": "Sequential"}
    assert error.found == found
    assert all(words in error.fix for words in advice)
    assert (PATCH in error.fix) is (PATCH in advice)


def test_many_attentions_are_counted() -> None:
    found = run(nn.Sequential(*(CallsAttention() for _ in range(6)))).found
    assert found == ", ".join(f"CallsAttention at {i}" for i in range(4)) + " and 2 more"


def test_multihead_attention_that_is_not_asked_for_weights() -> None:
    class Layer(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs, need_weights=False)

    error = run(Layer(4, 2), *[torch.randn(3, 1, 4)] * 3)
    assert error.found == "Layer at the model itself"
    assert error.fix == PATCH


@pytest.mark.parametrize("patch_sdpa", [False, True])
def test_a_model_whose_eager_code_nobody_hears(ids: Tensor, patch_sdpa: bool) -> None:
    config = transformers.FalconConfig(**FALCON | {"num_hidden_layers": 1})
    falcon = lively(transformers.FalconForCausalLM._from_config(config, attn_implementation="eager"))
    fix = run(falcon, ids, patch_sdpa=patch_sdpa).fix
    assert 'attn_implementation="sdpa"' in fix
    assert PATCH in fix
    falcon = lively(transformers.FalconForCausalLM._from_config(config, attn_implementation="sdpa"))
    with record(falcon, patch_sdpa=True) as atlas, torch.no_grad():
        falcon(ids)
    assert len(atlas) == 1


def test_a_layer_that_ignores_its_configuration(llama: nn.Module, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kosmos-2.5 always runs eager: to set another function does not help."""
    from transformers.models.llama import modeling_llama

    class Eager(dict):
        def get_interface(self, name: str, default: Any) -> Any:
            return default

    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Eager())
    assert EAGER in run(llama, ids).fix


def test_a_configuration_that_the_model_does_not_know(llama: nn.Module, ids: Tensor) -> None:
    """X-CLIP's layers over frames hold one: the recording sets it, and puts it back."""
    own = copy.deepcopy(llama.config)
    for layer in llama.model.layers[1:]:
        layer.self_attn.config = own
    with record(llama) as atlas, torch.no_grad():
        llama(ids)
        assert own._attn_implementation == "attlas"
    assert len(atlas) == 3
    assert own._attn_implementation == "sdpa"


def test_a_model_of_transformers_without_the_interface(ids: Tensor) -> None:
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    bloom = lively(transformers.BloomForCausalLM(config))
    calls = []
    bloom.register_forward_hook(lambda *_: calls.append(1))
    error = run(bloom, ids)
    assert error.found == ", ".join(f"BloomAttention at transformer.h.{i}.self_attention" for i in range(2))
    assert BY_HAND in error.fix
    assert calls == [1]  # it was said after the first pass


def test_a_model_that_is_not_switched(llama: nn.Module, ids: Tensor) -> None:
    with pytest.raises(attlas.RecordingError) as error, record(llama), torch.no_grad():
        llama.set_attn_implementation("sdpa")
        llama(ids)
    assert error.value.found == ", ".join(f"LlamaAttention at model.layers.{i}.self_attn" for i in range(3))
    assert 'model.set_attn_implementation("attlas")' in error.value.fix
    assert llama.config._attn_implementation == "sdpa"


def test_some_attentions_that_stay_silent() -> None:
    given = nn.Sequential(Windows(), SilentAttention(), CallsAttention())
    with pytest.warns(UserWarning, match="some attentions") as said, record(given) as atlas:
        given(x)
    (text,) = (str(warning.message) for warning in said)
    assert "found: SilentAttention at 1, CallsAttention at 2\n" in text
    assert text.endswith(f"fix: {PATCH}")
    assert len(atlas) == 1


def test_layers_that_share_a_module_and_are_counted_from_the_end(ids: Tensor) -> None:
    error = run(albert(1), ids, layers=[-1])
    assert error.arguments == {"module": "encoder.albert_layer_groups.0.albert_layers.0.attention"}
    assert error.found == "a negative layer, and a module that is used again in one pass"
    assert error.fix.startswith("layers=[0, 1]")


def test_a_temporary_folder_is_said() -> None:
    given = model()
    with pytest.warns(UserWarning, match="without a folder") as said, record(given, keep="disk") as atlas:
        given(x)
    text = str(said[0].message)
    assert text.startswith('record(): keep="disk" without a folder writes to ')
    assert text.endswith("recording.atlas, which is deleted with the atlas; folder= keeps it.")
    assert said[0].filename == __file__
    assert len(atlas) == 2


def test_classes_met_while_they_run_may_offer_under_any_name() -> None:
    given = nn.Sequential(NotAnAttention())
    with record(given) as atlas:
        given(x)
        offer(nn.Identity(), atlas[0] if len(atlas) else attlas.attend(x, x))
    assert len(atlas) == 1
