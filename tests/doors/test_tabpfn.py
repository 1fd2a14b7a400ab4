"""Which training rows a prediction of TabPFN rests on, lazy: its decoder is attention pooling over training rows."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.doors.pages import example, run_page
from torch import Tensor

import attlas
from attlas import stats
from attlas.errors import AttlasError
from attlas.recording import TabPFNBackend

architectures = pytest.importorskip(
    "tabpfn.architectures.tabpfn_v3_5", reason="tabpfn 9.2 is not installed; `make test-doors` has it"
)
for alias in [name for name in sys.modules if name.startswith("tabpfn.model.")]:
    del sys.modules[alias]  # old names, which warn whenever torch looks through the loaded modules
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
DECODER = "heads.many_class_decoder"
TRAIN, TEST, CLASSES = 40, 15, 3


def model() -> Any:
    """Return a TabPFN 3.5 with random weights."""
    config = architectures.TabPFNV3p5Config(
        embed_dim=16, dist_embed_num_blocks=1, dist_embed_num_heads=2, dist_embed_num_inducing_points=4,
        feat_agg_num_blocks=1, feat_agg_num_heads=2, feat_agg_num_cls_tokens=2, nlayers=2, icl_num_heads=2,
        decoder_head_dim=8, decoder_num_heads=2, max_num_classes=5, num_buckets=10,
    )  # fmt: skip
    found = architectures.TabPFNV3p5(config=config).eval().requires_grad_(False)
    for name, weights in found.named_parameters():
        if name.startswith(f"{DECODER}.") and "projection" in name:
            weights *= 4
    return found


@pytest.fixture
def backend() -> Iterator[TabPFNBackend]:
    """Register attlas with TabPFN for one test."""
    from tabpfn.architectures.shared import attention_backends as registry

    found = TabPFNBackend()
    registry.register_attention_backend(found)
    yield found
    registry.unregister_attention_backend(found.name)


def predicted(tabpfn: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of the test rows, labels of the training rows, and the decoder's own dense weights."""
    torch.manual_seed(1)
    x, y = torch.randn(TRAIN + TEST, 1, 4), torch.randint(0, CLASSES, (TRAIN, 1)).float()
    given: list[Tensor] = []
    decoder = tabpfn.get_submodule(DECODER)
    handle = decoder.register_forward_pre_hook(lambda _, args: given.extend(args[:2]))
    out = tabpfn(x, y, "multiclass")
    handle.remove()
    return out[:, 0], y[:, 0].long(), decoder.attention_weights(*given)


def check(atlas: Any, logits: Tensor, labels: Tensor, weights: Tensor) -> None:
    """Compare what a recording says with the weights and predictions of TabPFN."""
    assert float(weights.std()) > 0.005
    rests = atlas.mean([DECODER], over_heads=True)
    assert rests.shape == (1, 1, TEST, TRAIN)
    torch.testing.assert_close(rests.to_dense()[:, 0], weights, rtol=0, atol=1e-5)
    best = stats.topk(rests, 5)
    torch.testing.assert_close(best.values[0, 0], weights[0].topk(5).values, rtol=0, atol=1e-5)
    votes = (rests @ torch.nn.functional.one_hot(labels).float())[0, 0]
    torch.testing.assert_close(torch.log(votes.clamp(min=1e-5) + 3e-5), logits[:, :CLASSES], rtol=0, atol=1e-4)


def test_rows_of_a_prediction_by_torchs_function() -> None:
    tabpfn = model()
    with attlas.record(tabpfn, layers=[DECODER], patch_sdpa=True) as atlas:
        logits, labels, weights = predicted(tabpfn)
    check(atlas, logits, labels, weights)


def test_rows_of_a_prediction_by_the_registered_backend(backend: TabPFNBackend) -> None:
    tabpfn = model()
    expected, *_ = predicted(tabpfn)
    with attlas.record(tabpfn) as atlas:
        logits, labels, weights = predicted(tabpfn)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    check(atlas, logits, labels, weights)
    # Attention in context too: rows of the test, which look at training rows with one key head.
    assert atlas.entry("icl_blocks.1.icl_attention#1").shape[-2:] == (TEST, TRAIN)
    assert not backend.is_preferred(None)


def test_without_keys_it_is_refused() -> None:
    with pytest.raises(AttlasError, match="keys and values as tensors"):
        TabPFNBackend().run(torch.ones(1, 2, 1, 4), None, None)


def test_the_example_and_the_page_run() -> None:
    assert example("tabpfn_rows")["error"] < 1e-4
    run_page("tabpfn")
