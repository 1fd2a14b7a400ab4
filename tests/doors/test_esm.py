"""Contacts of proteins, lazy, beside the contact heads of transformers and of fair-esm."""

from typing import Any

import pytest
import torch
from tests.doors.pages import example
from torch import Tensor, nn

import attlas
from attlas import heads
from attlas.errors import AttlasError


def sequences(n: int, start: int = 0, end: int = 2, padding: int = 1) -> Tensor:
    """Return token ids of two proteins, of n residues and of n less 40, with start, end and padding."""
    ids = torch.randint(4, 24, (2, n + 2))
    ids[:, 0], ids[:, -1], ids[1, -41], ids[1, -40:] = start, end, end, padding
    return ids


def with_contrast(model: nn.Module, head: Any) -> None:
    """Make attention far from uniform, and contacts more or less probable."""
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights *= 4
        head.regression.weight.normal_(0, 3)
        head.regression.bias.fill_(-1.0)


def check(found: heads.Contacts, expected: Tensor) -> None:
    """Compare all that contacts can be asked for with dense ones."""
    n = expected.shape[-1]
    assert found.shape == tuple(expected.shape)
    assert float(expected.std()) > 0.001
    torch.testing.assert_close(found.to_dense(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.tile((3, 40), slice(-90, None)), expected[:, 3:40, n - 90 :], rtol=0, atol=1e-5)
    i, j = torch.tensor([0, 5, n - 3, -1]), torch.tensor([7, 99, 0, 2])
    torch.testing.assert_close(found.cells(i, j), expected[:, i, j], rtol=0, atol=1e-5)
    probabilities, first, second = found.largest(25, separation=6, sequence=1)
    allowed = expected[1, : n - 40, : n - 40][torch.triu(torch.ones(n - 40, n - 40), 6).bool()]
    torch.testing.assert_close(probabilities, allowed.topk(25).values, rtol=0, atol=1e-5)
    torch.testing.assert_close(expected[1, first, second], probabilities, rtol=0, atol=1e-5)
    assert int((second - first).min()) >= 6


def test_contacts_of_transformers_at_500_residues() -> None:
    transformers = pytest.importorskip("transformers", reason="the model is one of transformers")
    config = transformers.EsmConfig(
        vocab_size=33, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=600, position_embedding_type="rotary", pad_token_id=1, mask_token_id=32,
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.EsmForMaskedLM(config).eval()
    with_contrast(model, model.esm.contact_head)
    ids = sequences(500)
    mask = (ids != 1).long()
    with torch.no_grad():
        expected = model.predict_contacts(ids, mask)
        with attlas.record(model) as atlas:
            model(ids, attention_mask=mask)
    check(heads.contacts(atlas, model.esm.contact_head), expected)
    with attlas.record(model, layers=[0, 2]) as some, torch.no_grad():
        model(ids, attention_mask=mask)
    with pytest.raises(AttlasError, match="every layer and head"):
        heads.contacts(some, model.esm.contact_head)


def test_contacts_of_fair_esm_at_500_residues() -> None:
    pytest.importorskip("esm.model.esm2", reason="fair-esm is not installed")
    import esm

    alphabet = esm.Alphabet.from_architecture("ESM-1b")
    model = esm.ESM2(num_layers=3, embed_dim=32, attention_heads=4, alphabet=alphabet, token_dropout=False).eval()
    with_contrast(model, model.contact_head)
    ids = sequences(500, alphabet.cls_idx, alphabet.eos_idx, alphabet.padding_idx)
    with torch.no_grad():
        expected = model.predict_contacts(ids)
        with attlas.record(model, handwritten=True) as atlas:
            model(ids)
    residues = (ids != alphabet.padding_idx) & (ids != alphabet.eos_idx)
    check(heads.contacts(atlas, model.contact_head, residues=residues), expected)


@pytest.mark.slow
def test_contacts_at_30000_residues() -> None:
    # Tokens are of four kinds, and weights depend on the kinds alone: all sums follow from how many there are of each.
    n, logits = 30_002, 2 * torch.randn(4, 4)
    kinds = torch.randint(4, (n,))
    codes = torch.eye(4)[kinds].view(1, 1, n, 4)
    A = attlas.attend((logits @ codes.mT).mT.contiguous(), codes, attlas.ScaledDot(1.0))
    found = heads.contacts([A], torch.tensor([20_000.0]), bias=-0.5)
    exps, whole, inside = logits.T.double().exp(), kinds.bincount(), kinds[1:-1].bincount()
    weights = exps / (exps @ whole.double()).unsqueeze(-1)  # of a query of one kind on a key of another
    both = weights + weights.T
    sums = both @ inside.double()
    total = (sums * inside).sum()
    expected = torch.sigmoid(20_000.0 * (both - torch.outer(sums, sums) / total) - 0.5)
    assert float(expected.std()) > 0.05
    i, j = torch.tensor([0, 100, 29_999]), torch.tensor([29_990, 20_000, 3])
    cells = expected[kinds[i + 1], kinds[j + 1]]
    torch.testing.assert_close(found.cells(i, j)[0].double(), cells, rtol=0, atol=1e-4)
    row = expected[kinds[101]][kinds[1:-1]]
    torch.testing.assert_close(found.tile((100, 101))[0, 0].double(), row, rtol=0, atol=1e-4)


def layer(queries: int = 12) -> attlas.AttentionMatrix:
    """Return attention to 12 tokens, of 2 heads."""
    return attlas.attend(torch.randn(1, 2, queries, 4), torch.randn(1, 2, 12, 4))


@pytest.mark.parametrize(
    ("matrices", "arguments", "text"),
    [
        (list, {"head": torch.ones(2)}, "a layer"),
        (
            lambda: [attlas.attend(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 12, 4))],
            {"head": torch.ones(2)},
            "self-attention of whole",
        ),
        (lambda: [layer().to_dense()], {"head": torch.ones(2)}, "AttentionMatrix"),
        (lambda: [layer()], {"head": torch.ones(3)}, "3 weights, 2 heads"),
        (lambda: [layer()], {"head": "head"}, "contact head"),
        (lambda: [layer()], {"head": nn.Linear(2, 1), "bias": 1.0}, "has its own"),
        (lambda: [layer()], {"head": torch.ones(2), "bias": float("nan")}, "finite"),
        (lambda: [layer()], {"head": torch.ones(2), "residues": torch.ones(12)}, "bool"),
    ],
)
def test_wrong_arguments_are_refused(matrices: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(AttlasError, match=text):
        heads.contacts(matrices(), **arguments)


def test_wrong_questions_are_refused() -> None:
    found = heads.contacts([layer()], torch.ones(2))
    for text, ask in (("rows", lambda: found.tile((0, 11))), ("a column for each", lambda: found.cells([1], [2, 3])),
                      ("among the 10", lambda: found.cells([10], [0])), ("whole number", lambda: found.largest(0)),
                      ("separation", lambda: found.largest(1, 0)), ("sequence", lambda: found.largest(1, sequence=1)),
                      ("whole numbers", lambda: found.cells(torch.ones(2), [1, 2]))):  # fmt: skip
        with pytest.raises(AttlasError, match=text):
            ask()


def test_the_example_runs() -> None:
    pytest.importorskip("transformers", reason="the model is one of transformers")
    found = example("protein_contacts", "--residues", "200")
    assert found["residues"] == 200
    assert found["largest"] >= 0.4
