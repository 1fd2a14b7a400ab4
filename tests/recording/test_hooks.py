"""Where matrices are handed over: to whom, in which thread, at what cost."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from tests.recording.conftest import two_layers
from torch import nn

import attlas
from attlas.recording import hooks
from attlas.recording.hooks import AttentionCall, is_recording, offer, subscribed


class Heard:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_attention(self, call: AttentionCall) -> None:
        self.calls.append(call[:4])


def matrix() -> attlas.AttentionMatrix:
    return attlas.attend(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4))


def test_nested_listeners_both_get_it() -> None:
    outer, inner, module, A = Heard(), Heard(), nn.Identity(), matrix()
    offer(module, A)
    with subscribed(outer):
        offer(module, A, first_query=3)
        with subscribed(inner):
            offer(module, A, first_query=4, first_key=1)
        offer(module, A)
    offer(module, A)
    assert outer.calls == [(module, A, 3, None), (module, A, 4, 1), (module, A, None, None)]
    assert inner.calls == [(module, A, 4, 1)]
    assert not is_recording()
    assert hooks._active_recordings == 0


def test_other_threads_are_not_recorded() -> None:
    heard = Heard()
    with subscribed(heard):
        thread = threading.Thread(target=offer, args=(nn.Identity(), matrix()))
        thread.start()
        thread.join()
        assert not heard.calls
        assert is_recording(heard)
        assert not is_recording(Heard())


def test_nothing_is_left_in_a_compiled_graph() -> None:
    module, A = nn.Identity(), matrix()

    def step(q: torch.Tensor) -> torch.Tensor:
        offer(module, A, first_query=getattr(None, "first_query", None))
        return q + 1

    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))
    assert len(graphs) == 1
    assert [node.op for node in graphs[0].graph.nodes] == ["placeholder", "call_function", "output"]
    # Somebody listens now: the same function runs again, with a break where it hands over.
    heard = Heard()
    with subscribed(heard):
        torch.compile(step, backend=backend)(torch.zeros(2))
    assert len(heard.calls) == 1


@pytest.mark.parametrize("settings", [{}, {"parts": True}, {"patch_sdpa": True}], ids=["plain", "parts", "sdpa"])
def test_a_copy_made_in_a_block_is_not_recorded(settings: dict[str, Any]) -> None:
    """As a running average or the best model so far, which trainers copy."""
    model, ids = two_layers().eval(), torch.arange(7)[None]
    with torch.no_grad(), attlas.record(model, **settings) as atlas:
        model(ids)
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        copied(ids)
        pickled(ids)
    assert [entry.layer for entry in atlas.entries] == [0, 1]
    with torch.no_grad():
        expected = model(ids).logits
        for other in (copied, pickled):
            torch.testing.assert_close(other(ids).logits, expected)
            with attlas.record(other) as found:
                other(ids)
            assert len(found.entries) == 2
            with attlas.intervene(other, attlas.interventions.Temperature(2.0)):
                changed = copy.deepcopy(other)
                assert not torch.allclose(other(ids).logits, expected)
            torch.testing.assert_close(changed(ids).logits, expected)
