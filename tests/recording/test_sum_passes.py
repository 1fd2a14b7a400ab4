"""Statistics of several passes are added up while they are recorded."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attlas
from attlas import stats
from attlas.errors import AttlasError
from attlas.recording.atlas import Atlas


@pytest.fixture
def model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def maps(model: nn.Module, texts: list[Tensor], **options: Any) -> Atlas:
    """Return a recording of the weights on two keys."""
    options = {"keep": "statistics", "statistics": [stats.KeyMaps([1, -1]), stats.Entropy()], **options}
    with torch.no_grad(), attlas.record(model, patch_sdpa=True, **options) as atlas:
        for x in texts:
            model(x)
    return atlas


@pytest.mark.parametrize("count", [1, 2, 5])
def test_passes_are_summed_each_with_its_own(model: nn.Module, count: int) -> None:
    texts = [torch.randn(1, 6, 16) for _ in range(4)]
    single, summed = maps(model, texts), maps(model, texts, sum_passes=count)
    assert len(single.entries) == 8
    assert len(summed.entries) == 2 * min(count, 4)
    for entry in summed.entries:
        for name, found in entry.statistics.items():
            passes = [single.entry((entry.layer, i)).statistics[name] for i in range(entry.call, 4, count)]
            torch.testing.assert_close(found, torch.stack(passes).sum(0))


def test_equal_texts_are_passes_too(model: nn.Module) -> None:
    x = torch.randn(1, 6, 16)
    single, summed = maps(model, [x]), maps(model, [x, x, x], sum_passes=1)
    torch.testing.assert_close(summed.entry(1).statistics["key_maps"], 3 * single.entry(1).statistics["key_maps"])


@pytest.mark.parametrize(
    ("options", "text"),
    [({"sum_passes": -1}, "sum_passes"), ({"sum_passes": 1.0}, "sum_passes"),
     ({"sum_passes": 1, "keep": "cpu"}, "keep = 'cpu'"),
     ({"sum_passes": 1, "statistics": [stats.TopK(2)]}, "tensors of floats")],
)  # fmt: skip
def test_what_cannot_be_summed_is_refused(model: nn.Module, options: dict[str, Any], text: str) -> None:
    with pytest.raises(AttlasError, match=text):
        maps(model, [torch.randn(1, 6, 16)], **options)


def test_passes_of_other_sizes_are_refused(model: nn.Module) -> None:
    with pytest.raises(AttlasError, match="same sizes"):
        maps(model, [torch.randn(1, 6, 16), torch.randn(1, 7, 16)], sum_passes=1)
