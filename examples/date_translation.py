"""Sequence to sequence with additive attention: dates as people write them become dates as computers sort them.

"monday the 3rd of june 2019", "jun 3, 2019" and "3.6.19" all become "2019-06-03". The pairs are made on the spot; a
GRU reads the letters, another writes the answer, and before each letter it looks back over what was read with
Bahdanau's additive score (attlas.nn.AdditiveAttention). The weights are the alignment: which letters each letter came
from.

    python examples/date_translation.py               # trains until it is right, at most a minute; writes a picture
    python examples/date_translation.py --seconds 15  # stops earlier
    python examples/date_translation.py --guide 0.3   # guides each letter of the answer to the letters it comes from
"""

import argparse
import datetime as dt
import math
import random
import time
from pathlib import Path
from string import Formatter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attlas
from attlas import pictures
from attlas.nn import AdditiveAttention

MONTHS = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
]
DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 ,./-"
CODE = {letter: i + 1 for i, letter in enumerate(LETTERS)}  # 0 is padding
ANSWER = "0123456789-"
START = len(ANSWER)
LENGTH = len("2019-06-03")
FIRST, LAST = dt.date(1950, 1, 1), dt.date(2049, 12, 31)


def ordinal(day: int) -> str:
    """Return 1st, 2nd, 3rd, 4th, 11th."""
    ending = "th" if 11 <= day % 100 <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


STYLES = (
    "{day} {month} {year}",
    "{month} {day}, {year}",
    "{month:.3} {day}, {year}",
    "{weekday} {day} {month:.3} {year}",
    "{weekday} the {ordinal} of {month} {year}",
    "{weekday:.3} {month:.3} {day} {year}",
    "{day}.{number}.{year}",
    "{number:02}/{day:02}/{year}",
)


def fields(date: dt.date) -> dict[str, str | int]:
    """Return what a style may write of a date."""
    names = {"month": MONTHS[date.month - 1], "weekday": DAYS[date.weekday()], "ordinal": ordinal(date.day)}
    return names | {"day": date.day, "number": date.month, "year": date.year}


def written(date: dt.date, style: int) -> str:
    """Write a date as people do, in one of eight ways."""
    return STYLES[style].format(**fields(date))


def sources(date: dt.date, style: int) -> list[range]:
    """Return the letters of the text that each of the ten letters of the answer comes from; none for its dashes."""
    places, end = {}, 0
    for literal, name, form, _ in Formatter().parse(STYLES[style]):
        start = end + len(literal)
        end = start + len(format(fields(date)[name], form)) if name else start
        places["day" if name == "ordinal" else name] = range(start, end)

    def digits(place: range, count: int) -> list[range]:
        """Return the letters of a number, the first of which may be left out in the text."""
        return [range(place[max(i, 0)], place[max(i, 0)] + 1) for i in range(len(place) - count, len(place))]

    day = places["day"][: len(str(date.day))] if "ordinal" in STYLES[style] else places["day"]
    month = [places["month"]] * 2 if "month" in places else digits(places["number"], 2)
    return [*digits(places["year"], 4), range(0), *month, range(0), *digits(day, 2)]


def encode(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Return letters as numbers, padded, and the length of each text."""
    lengths = torch.tensor([len(text) for text in texts])
    codes = torch.zeros(len(texts), int(lengths.max()), dtype=torch.long)
    for row, text in enumerate(texts):
        codes[row, : len(text)] = torch.tensor([CODE[letter] for letter in text])
    return codes, lengths


def encode_answers(dates: list[dt.date]) -> Tensor:
    """Return answers as numbers, shape (batch, 10)."""
    return torch.tensor([[ANSWER.index(letter) for letter in date.isoformat()] for date in dates])


class Translator(nn.Module):
    """Encoder, additive attention, decoder; the decoder's state asks, the encoder's states answer."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS) + 1, 32)
        self.encoder = nn.GRU(32, size, batch_first=True, bidirectional=True)
        self.start = nn.Linear(2 * size, size)
        self.answers = nn.Embedding(len(ANSWER) + 1, 32)
        self.decoder = nn.GRUCell(32 + 2 * size, size)
        self.attention = AdditiveAttention(size, 2 * size, hidden_size=size // 2)
        self.out = nn.Sequential(nn.Linear(3 * size, size), nn.Tanh(), nn.Linear(size, len(ANSWER)))

    def read(self, codes: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, attlas.Mask]:
        """Return what each letter became, the decoder's first state, and the mask that hides padding."""
        packed = nn.utils.rnn.pack_padded_sequence(self.letters(codes), lengths, batch_first=True, enforce_sorted=False)
        memory, last = self.encoder(packed)
        memory, _ = nn.utils.rnn.pad_packed_sequence(memory, batch_first=True)
        return memory, torch.tanh(self.start(torch.cat([last[0], last[1]], dim=-1))), attlas.Padding(lengths)

    def aligned(self, codes: Tensor, lengths: Tensor, states: Tensor, spans: list[list[range]]) -> Tensor:
        """Return the weight of each letter of the answer on the letters that it comes from, without its dashes.

        That is a sum over cells, and it carries a gradient as any other read: shape (batch, 8).
        """
        memory, _, mask = self.read(codes, lengths)
        A = attlas.attend(states, memory, score=self.attention.score, mask=mask)
        origin = torch.zeros(A.shape)
        for text, letters in zip(origin, spans, strict=True):
            for row, span in zip(text, letters, strict=True):
                row[span.start : span.stop] = 1.0
        return (A * origin).sum(-1)[:, [0, 1, 2, 3, 5, 6, 8, 9]]

    def forward(self, codes: Tensor, lengths: Tensor, truth: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits (batch, 10, letters) and the decoder's states; without `truth` it goes on with its own."""
        memory, state, mask = self.read(codes, lengths)
        before = torch.full((len(codes),), START)
        logits, states = [], []
        for step in range(LENGTH):
            states.append(state)
            context = self.attention(state.unsqueeze(1), memory, memory, mask=mask).squeeze(1)
            state = self.decoder(torch.cat([self.answers(before), context], dim=-1), state)
            logits.append(self.out(torch.cat([state, context], dim=-1)))
            before = logits[-1].argmax(-1) if truth is None else truth[:, step]
        return torch.stack(logits, dim=1), torch.stack(states, dim=1)

    @torch.no_grad()
    def alignment(self, text: str) -> tuple[str, attlas.AttentionMatrix]:
        """Translate one text; returns the answer and the weights of its letters as a lazy matrix (10, letters)."""
        codes, lengths = encode([text])
        logits, states = self(codes, lengths)
        memory, _, _ = self.read(codes, lengths)
        answer = "".join(ANSWER[i] for i in logits[0].argmax(-1).tolist())
        self.attention(states, memory, memory)  # all steps at once: their weights are one matrix
        return answer, self.attention.weights[0]


@torch.no_grad()
def aligned_weight(model: Translator, dates: list[dt.date], styles: list[int]) -> float:
    """Share of the weight of all letters but dashes that lies on the letters which they come from."""
    codes, lengths = encode([written(date, style) for date, style in zip(dates, styles, strict=True)])
    spans = [sources(date, style) for date, style in zip(dates, styles, strict=True)]
    _, states = model(codes, lengths, encode_answers(dates))
    return float(model.aligned(codes, lengths, states, spans).mean())


def accuracy(model: Translator, dates: list[dt.date], styles: list[int]) -> float:
    """Share of dates whose answer is right to the last letter."""
    codes, lengths = encode([written(date, style) for date, style in zip(dates, styles, strict=True)])
    with torch.no_grad():
        logits, _ = model(codes, lengths)
    return float((logits.argmax(-1) == encode_answers(dates)).all(-1).double().mean())


def train(
    model: Translator,
    dates: list[dt.date],
    seconds: float,
    steps: float,
    held: list[dt.date],
    rate: float,
    guide: float,
) -> None:
    """Train until the time or the steps are over, or what was held out is all right; guided alignment has a weight."""
    chance = random.Random(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    styles = [chance.randrange(8) for _ in held]
    begin, step = time.process_time(), 0  # the time that this process computes, whatever else the machine does
    while (gone := max((spent := time.process_time() - begin) / seconds, step / steps)) < 1.0:
        for group in optimizer.param_groups:  # warm up, then down towards nothing at the end
            group["lr"] = rate * min(1.0, (step + 1) / 20) * (1.0 - 0.9 * gone)
        batch = chance.choices(dates, k=64)
        kinds = [chance.randrange(8) for _ in batch]
        codes, lengths = encode([written(date, style) for date, style in zip(batch, kinds, strict=True)])
        answers = encode_answers(batch)
        logits, states = model(codes, lengths, answers)
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        if guide:
            spans = [sources(date, style) for date, style in zip(batch, kinds, strict=True)]
            loss = loss - guide * model.aligned(codes, lengths, states, spans).clamp(min=1e-6).log().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            right = accuracy(model, held[:400], styles[:400])
            print(
                f"  {spent:4.0f} s  step {step:4}  loss {float(loss.detach()):.3f}  held-out dates right {right:6.1%}"
            )
            if right == 1.0 and float(loss.detach()) < 0.01:
                break


def show(answer: str, text: str, weights: Tensor) -> None:
    """Print the alignment: for each letter of the answer, how dark each letter of the text is."""
    shades = " ·░▒▓█"
    print(f"\n     {text}")
    for letter, row in zip(answer, weights, strict=True):
        print(f"  {letter}  {''.join(shades[min(5, int(6 * weight))] for weight in row.tolist())}")


def draw(model: Translator, texts: list[str], out: Path) -> Path:
    """Draw the alignment of some texts as a picture."""
    figure = pictures.sheet(9.6, 2.5 * len(texts))
    axes = figure.subplots(len(texts), 1, squeeze=False)[:, 0]
    for ax, text in zip(axes, texts, strict=True):
        answer, A = model.alignment(text)
        pictures.draw(ax, A[:, :])
        ax.set_box_aspect(None)
        ax.set_aspect("auto")
        ax.set_xticks(range(len(text)), [letter if letter != " " else "␣" for letter in text], family="monospace")
        ax.set_yticks(range(LENGTH), list(answer), family="monospace")
        ax.tick_params(length=0, labelsize=9)
        ax.set_ylabel("written", fontsize=8.5, color=pictures.SOFT)
    axes[-1].set_xlabel("read", fontsize=8.5, color=pictures.SOFT)
    pictures.scale(figure, list(axes))
    figure.suptitle("Where each letter of the date came from", x=0.01, ha="left", fontsize=12, color=pictures.INK)
    return pictures.save(figure, out, dpi=160)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("date-translation.png"), help="picture (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=45.0, help="longest processor time to train (default: %(default)s)"
    )
    parser.add_argument("--rate", type=float, default=8e-3, help="largest learning rate (default: %(default)s)")
    parser.add_argument("--steps", type=float, default=math.inf, help="most steps to train (default: no limit)")
    parser.add_argument(
        "--checked", type=int, default=2000, help="held-out dates that are checked (default: %(default)s)"
    )
    parser.add_argument("--guide", type=float, default=0.0, help="weight of guided alignment (default: %(default)s)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)

    dates = [FIRST + dt.timedelta(days=i) for i in range((LAST - FIRST).days + 1)]
    random.Random(0).shuffle(dates)
    held, seen = dates[:2000], dates[2000:]
    model = Translator()
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(seen):,} dates to learn from, {len(held):,} held out, eight ways to write each; {count:,} parameters")
    train(model, seen, options.seconds, options.steps, held, options.rate, options.guide)

    held = held[: options.checked]
    styles = [i % 8 for i in range(len(held))]
    right = accuracy(model, held, styles)
    print(f"  held-out dates right to the last letter: {right:.1%} of {len(held):,}")
    share = aligned_weight(model, held, styles)
    print(f"  weight of the letters on those that they come from: {share:.0%}")
    samples = [written(held[0], 4), written(held[1], 2), written(held[2], 6)]
    for text in samples[:2]:
        answer, A = model.alignment(text)
        show(answer, text, A[:, :])
    print(f"\n  {draw(model, samples, options.out)}")
    return {"accuracy": right, "aligned": share}


if __name__ == "__main__":
    main()
