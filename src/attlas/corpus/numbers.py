"""The numbers of a corpus: which sums and counts each is made of, and what it means."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Sums of a head over the rows of a text, and counts of the rows (or texts) that they are over.
SUMS = (
    "entropy", "effective_keys", "max_weight", "diagonal", "subdiagonal", "current", "previous", "near", "first",
    "breadth", "induction_text", "duplicate_text", "induction", "mass", "distance", "distance_squared",
    "max_activation",
)  # fmt: skip
COUNTS = (
    "rows", "later_rows", "current", "previous", "near", "first", "breadth", "induction_text", "duplicate_text",
    "repeated", "texts",
)  # fmt: skip
# Measured once, on a random block that occurs twice.
BLOCK = ("induction", "duplicate")


class Number(NamedTuple):
    """One number of a head: a sum over a count, or over another sum.

    Parameters
    ----------
    name : str
        Name of the column.
    above, below : str
        The sum, and the count (or sum, for the two distances) that divides it.
    sketch : str
        How its distribution over texts is kept: ``"unit"``, equal bins from 0 to 1, or ``"log"``.
    definition : str
        Its meaning, in one sentence.
    """

    name: str
    above: str
    below: str
    sketch: str
    definition: str


NUMBERS = (
    Number("entropy", "entropy", "rows", "log", "Shannon entropy of a row in nats, mean over rows"),
    Number("effective_keys", "effective_keys", "rows", "log", "1 / sum of squared weights of a row, mean over rows"),
    Number("max_weight", "max_weight", "rows", "unit", "largest weight of a row, mean over rows"),
    Number("self_attention_score", "diagonal", "rows", "unit", "weight on the diagonal, mean over all rows"),
    Number(
        "prev_token_score",
        "subdiagonal",
        "later_rows",
        "unit",
        "weight on the token before, mean over rows but the first",
    ),
    Number(
        "induction_score",
        "induction",
        "repeated",
        "unit",
        "weights from 0.01 on at the positions after earlier copies of the token, mean over rows with an earlier copy",
    ),
    Number("qk_distance", "distance", "mass", "log", "mean of |q - k| weighted by attention"),
    Number("qk_distance_variance", "distance_squared", "mass", "log", "variance of |q - k| weighted by attention"),
    Number("current", "current", "current", "unit", "weight on the row's own position, over rows with another key"),
    Number("previous", "previous", "previous", "unit", "weight on the key before, over rows with another key"),
    Number("near", "near", "near", "unit", "weight on keys less than 16 away, over rows with keys further away"),
    Number("first", "first", "first", "unit", "weight on the first key, over rows with another key"),
    Number("breadth", "breadth", "breadth", "unit", "effective keys as a share of the keys that a row may see"),
    Number(
        "induction_text",
        "induction_text",
        "induction_text",
        "unit",
        "weight on the positions after earlier copies of the token, over rows with the choice",
    ),
    Number(
        "duplicate_text",
        "duplicate_text",
        "duplicate_text",
        "unit",
        "weight on earlier copies of the token, over rows with the choice",
    ),
    Number("max_activation", "max_activation", "texts", "unit", "largest weight of a text without query 0 and key 0"),
)


def values(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Return every number from its sums and counts; NaN where a count is 0.

    Parameters
    ----------
    sums : array, shape (heads, len(SUMS))
    counts : array, shape (heads, len(COUNTS))

    Returns
    -------
    dict of str to array, shape (heads,)
    """
    found = {}
    with np.errstate(invalid="ignore", divide="ignore"):
        for number in NUMBERS:
            of_sums = number.below == "mass"
            below = sums[:, SUMS.index("mass")] if of_sums else counts[:, COUNTS.index(number.below)]
            found[number.name] = np.where(below > 0, sums[:, SUMS.index(number.above)] / below, np.nan)
    found["qk_distance_variance"] = np.maximum(found["qk_distance_variance"] - found["qk_distance"] ** 2, 0.0)
    return found
