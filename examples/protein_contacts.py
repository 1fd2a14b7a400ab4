"""Which residues of a long protein touch? The contact head of ESM without its stack of dense matrices.

ESM's own head takes layers x heads x n x n numbers. Here one number for each head and residue is kept, and any cell
is computed when it is asked for. The model is ESM's own, tiny and with random weights: nothing is downloaded.

    python examples/protein_contacts.py --residues 3000
"""

import argparse

import torch
from transformers import EsmConfig, EsmForMaskedLM

import attlas
from attlas import heads


def model(residues: int) -> EsmForMaskedLM:
    """Return an ESM-2 with random weights."""
    config = EsmConfig(
        vocab_size=33, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=residues + 4, position_embedding_type="rotary", pad_token_id=1, mask_token_id=32,
    )  # fmt: skip
    esm = EsmForMaskedLM(config).eval()
    with torch.no_grad():
        for name, weights in esm.named_parameters():
            if "query" in name or "key" in name:
                weights *= 6
        esm.esm.contact_head.regression.weight *= 40
    return esm


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--residues", type=int, default=600, help="length of the protein (default: %(default)s)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    esm, ids = model(options.residues), torch.randint(4, 24, (1, options.residues + 2))
    ids[:, 0], ids[:, -1] = 0, 2  # start and end
    with torch.no_grad(), attlas.record(esm) as atlas:
        esm(ids)
    found = heads.contacts(atlas, esm.esm.contact_head)
    print(f"  {found}")
    probabilities, first, second = found.largest(5)
    for p, i, j in zip(probabilities.tolist(), first.tolist(), second.tolist(), strict=True):
        print(f"  residues {i:5} and {j:5}: {p:.4f}")
    row = found.tile((10, 11))[0, 0]
    return {"largest": float(probabilities[0]), "of_row": float(row.max()), "residues": float(len(row))}


if __name__ == "__main__":
    main()
