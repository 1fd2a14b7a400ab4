"""Which training rows does a prediction of TabPFN rest on? Its decoder is attention pooling over training rows.

The decoder's weights, one for each pair of a row to predict and a training row, are never stored: the largest are read
from a recording. The model is TabPFN's own architecture, tiny and with random weights: nothing is downloaded.

    python examples/tabpfn_rows.py
"""

import argparse

import torch
from tabpfn.architectures.tabpfn_v3_5 import TabPFNV3p5, TabPFNV3p5Config

import attlas
from attlas import stats

DECODER = "heads.many_class_decoder"
CLASSES = 3


def model() -> TabPFNV3p5:
    """Return a TabPFN 3.5 with random weights."""
    config = TabPFNV3p5Config(
        embed_dim=16, dist_embed_num_blocks=1, dist_embed_num_heads=2, dist_embed_num_inducing_points=4,
        feat_agg_num_blocks=1, feat_agg_num_heads=2, feat_agg_num_cls_tokens=2, nlayers=2, icl_num_heads=2,
        decoder_head_dim=8, decoder_num_heads=2, max_num_classes=5, num_buckets=10,
    )  # fmt: skip
    return TabPFNV3p5(config=config).eval().requires_grad_(False)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=200, help="training rows (default: %(default)s)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    tabpfn, rows = model(), options.rows
    x, y = torch.randn(rows + 3, 1, 4), torch.randint(0, CLASSES, (rows, 1)).float()
    with attlas.record(tabpfn, layers=[DECODER], patch_sdpa=True) as atlas:
        logits = tabpfn(x, y, "multiclass")[:, 0]
    rests = atlas.mean([DECODER], over_heads=True)  # rows to predict x training rows, a mean over heads
    best = stats.topk(rests, 3)
    for row, (weights, columns) in enumerate(zip(best.values[0, 0].tolist(), best.indices[0, 0].tolist(), strict=True)):
        found = ", ".join(f"{column} ({weight:.4f})" for weight, column in zip(weights, columns, strict=True))
        print(f"  row {row} rests most on training rows {found}")
    votes = (rests @ torch.nn.functional.one_hot(y[:, 0].long()).float())[0, 0]
    error = (votes.clamp(min=1e-5) + 3e-5).log() - logits[:, :CLASSES]
    print(f"  votes of the training rows are the predictions to {float(error.abs().max()):.1e}")
    return {"error": float(error.abs().max()), "largest": float(best.values.max())}


if __name__ == "__main__":
    main()
