"""Which texts were read before, and whether they are the same now: 17 bytes per text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from attlas.corpus.sampling import hash_of
from attlas.corpus.sources import Text
from attlas.errors import RecordingError

_ENTRY_DTYPE = np.dtype([("key", "<u8"), ("identity", "<u8"), ("read", "?")])


def identity_of(source: str, start: int, content: str = "") -> int:
    """Return 64 bits that stand for a text: its place in the source, and what is there.

    Parameters
    ----------
    source, start : str and int
        Where the text is from.
    content : str
        The hash of its tokens, or why it has none; nothing for the place alone.
    """
    data = json.dumps([source, start, content]).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def content_of(text: Text, seed: int) -> str:
    """Return the hash of the tokens of a text, or why it has none."""
    return text.reason if text.ids is None else f"{hash_of(text.ids, seed):016x}"


def row_identity(row: Mapping[str, Any]) -> int:
    """Return the identity of a text that was read, or that failed."""
    return identity_of(row["source"], row["start"], row.get("hash") or row["reason"])


def changed(folder: Path, source: str, start: int, found: str) -> RecordingError:
    """Return the error for a text that is not the one that was read."""
    rule = "texts that were read must stay as they were; new ones may be added."
    fix = "another folder for the texts as they are now, or put this one back. attlas join adds up folders."
    return RecordingError(rule, f"{source}, token {start}: {found}", fix, folder=str(folder), where="corpus()")


class KnownTexts:
    """The texts that were read before.

    Parameters
    ----------
    keys : array of uint64, shape (n,)
        What a text is found by: its number, or the identity of its place. A text that failed and was then read is
        there twice.
    identities : array of uint64, shape (n,)
        What was there.
    read : array of bool, shape (n,)
        Whether it was read; otherwise it failed.

    Attributes
    ----------
    seen : array of bool, shape (n,)
        Those that were asked for.
    """

    def __init__(self, keys: NDArray[np.uint64], identities: NDArray[np.uint64], read: NDArray[np.bool_]) -> None:
        # Sorted by key, so that `is_known` finds a text by bisection.
        order = np.argsort(keys, kind="stable")
        self.keys, self.identities, self.read = keys[order], identities[order], read[order]
        self.seen = np.zeros(len(keys), dtype=bool)

    @classmethod
    def of(cls, entries: Iterable[tuple[int, int, bool]]) -> Self:
        """Return texts of which key, identity and whether they were read are given."""
        found = np.fromiter(entries, dtype=_ENTRY_DTYPE)
        return cls(found["key"], found["identity"], found["read"])

    @classmethod
    def together(cls, several: Sequence[KnownTexts]) -> Self:
        """Return the texts of several."""
        nothing = cls.of(())
        names = ("keys", "identities", "read")
        return cls(*(np.concatenate([getattr(one, name) for one in (nothing, *several)]) for name in names))

    def __len__(self) -> int:
        return len(self.keys)

    def is_known(self, key: int, identity: int) -> bool:
        """Tell whether a text was read, or has failed, as it is; one that has failed may be another one now.

        Raises
        ------
        ChangedTextError
            If another text was read.
        """
        start, stop = (
            np.searchsorted(self.keys, np.uint64(key), "left"),
            np.searchsorted(self.keys, np.uint64(key), "right"),
        )
        # `keys` stand for places in the source, sorted; `seen` are those that were asked for.
        self.seen[start:stop] = True
        if (self.identities[start:stop] == np.uint64(identity)).any():
            return True
        if self.read[start:stop].any():
            raise ChangedTextError
        return False

    def count(self, identities: NDArray[np.uint64], first: int) -> int:
        """Return how many of the texts ``first``, ``first + 1``, ... are known, with `identities` as theirs."""
        inside = (self.keys >= first) & (self.keys < first + len(identities))
        places = (self.keys[inside] - np.uint64(first)).astype(np.int64)
        return len(np.unique(places[self.identities[inside] == identities[places]]))


class ChangedTextError(Exception):
    """Another text was read in the place of one."""
