"""The numbers of the report, packed small enough for one file."""

from __future__ import annotations

import base64
import json
import math

import torch
from torch import Tensor

from attlas.cli.reading import Reading
from attlas.cli.words import count, others, percent, visible
from attlas.heads import NEAR, Head
from attlas.pictures import DEPTH

__all__ = ["FLOOR", "pack", "payload"]

_WORTH_A_LINE = 0.01  # share of the weight
_LINES = 6
FLOOR = 1e-4  # weights below it have the palest colour


def payload(reading: Reading) -> str:
    """Return the data of a reading as JSON that can stand inside a script element.

    Notes
    -----
    Weights of the text are kept with 16 bits (an error of at most 1e-5), those of maps as one byte of
    logarithm. Memory: 4 · k bytes a token and head, and one byte a block of a map.
    """
    telling = reading.telling
    data = {
        "n": len(reading.tokens),
        "shown": [[part.start, part.stop] for part in reading.shown],
        "tokens": [token for part in reading.shown for token in reading.tokens[part.start : part.stop]],
        "elsewhere": _elsewhere(reading),
        "perLayer": reading.per_layer,
        "heads": [_facts(reading, i) for i in range(len(reading.heads))],
        "telling": telling.layer * reading.per_layer + telling.head,
        "heroView": hero_view(reading),
        "k": reading.values.shape[-1],
        "values": _words((reading.values.double() * 65535).round(), wide=False),
        "indices": _words(reading.indices, _wide(reading)),
        "wide": _wide(reading),
        "received": _bytes(_relative(reading.received)),
        "maps": pack(reading.maps),
        "side": reading.maps.shape[-1],
        "block": block(reading),
        "closeups": pack(reading.closeups),
        "exact": reading.exact,
        "query": reading.query,
        "window": [reading.window.start, reading.window.stop],
        "repeats": pack(reading.repeats),
        "repeatSide": reading.repeats.shape[-1],
        "period": reading.period,
        "floor": FLOOR,
        "palette": DEPTH,
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Inside <script> only these can end it or start a comment; JSON may write any character as a number.
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def hero_view(reading: Reading) -> str:
    """Return which map of the most telling head shows best what it does."""
    shows = reading.period > 0 and reading.telling.kinds[0].measure in ("induction", "duplicate")
    return "repeat" if shows else "text"


def block(reading: Reading) -> str:
    """Return the side of a block of the whole map, in cells."""
    return count(-(-len(reading.tokens) // reading.maps.shape[-1]))


def _facts(reading: Reading, i: int) -> dict[str, object]:
    head = reading.heads[i]
    kind = head.kinds[0]
    return {
        "layer": head.layer,
        "head": head.head,
        "kind": kind.name,
        "short": kind.short,
        "measure": kind.measure or "mixed",
        "also": others(head),
        "value": percent(head.of(kind)) if kind.measure else "",
        "does": kind.does,
        "evidence": _evidence(head, reading.favourites[i]),
    }


def _evidence(head: Head, favourites: tuple[tuple[str, float], ...]) -> list[tuple[str, str, float | None]]:
    """Return where the weight of a head goes: what made its name first, then what else is worth a line."""
    shares = [
        ("induction", "on what came next, random tokens twice", head.induction),
        ("", f"on what came next, this text (chance {percent(head.chance)})", head.induction_text),
        ("duplicate", "on the copy, random tokens twice", head.duplicate),
        ("", f"on earlier copies, this text (chance {percent(head.chance)})", head.duplicate_text),
        ("previous", "on the token before", head.previous),
        ("fixed", f"on the token {head.fixed_distance:.0f} back", head.fixed),
        ("current", "on itself", head.current),
        ("near", f"on the last {NEAR} tokens", head.near),
        ("first", "on the first token", head.first),
        *(("favourite", f"on every {visible(token)}", share) for token, share in favourites[:3]),
    ]
    named = head.kinds[0].measure or "none"
    shares.sort(key=lambda row: (row[0] != named, -row[2]))
    kept = [row for i, row in enumerate(shares) if i == 0 or row[2] >= _WORTH_A_LINE][:_LINES]
    rows: list[tuple[str, str, float | None]] = [(label, percent(share), share) for _, label, share in kept]
    return [
        *rows,
        ("effective keys", f"{head.effective_keys:,.1f}", None),
        ("mean distance, tokens", f"{head.distance:,.0f}", None),
    ]


def pack(weights: Tensor) -> str:
    """Return weights as base64: 0 for NaN (nothing may attend), else 1 to 255 for the log from `FLOOR` to 1."""
    depth = 1.0 - weights.double().clamp(FLOOR, 1.0).log() / math.log(FLOOR)
    return _bytes((1 + 254 * depth).round().nan_to_num(0.0))


def _relative(received: Tensor) -> Tensor:
    """Shade what each key receives against the most that a key of its head receives; the first key aside."""
    most = received[..., 1:].amax(-1, keepdim=True) if received.shape[-1] > 1 else received
    return (255 * (received / most.clamp_min(1e-12)).clamp(0, 1).sqrt()).round()


def _bytes(values: Tensor) -> str:
    return base64.b64encode(values.to(torch.uint8).cpu().contiguous().numpy().tobytes()).decode("ascii")


def _words(values: Tensor, wide: bool) -> str:
    """Pack whole numbers with 16 bits each, or with 32."""
    kind = "<u4" if wide else "<u2"
    return base64.b64encode(values.cpu().contiguous().numpy().astype(kind).tobytes()).decode("ascii")


def _wide(reading: Reading) -> bool:
    return len(reading.tokens) > 65536


def _elsewhere(reading: Reading) -> dict[int, str]:
    """Return the texts of keys that are named and lie outside what is shown."""
    if not reading.excerpts:
        return {}
    inside = torch.zeros(len(reading.tokens), dtype=torch.bool)
    for part in (*reading.excerpts,):
        inside[part.start : part.stop] = True
    named = reading.indices.unique().cpu()
    return {i: reading.tokens[i] for i in named[~inside[named]].tolist()}
