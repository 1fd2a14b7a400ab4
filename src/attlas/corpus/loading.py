"""Opens what attlas wrote: a recording, or a corpus."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from attlas.recording import atlas
from attlas.recording.atlas.serialization import UserScores


def load(folder: str | os.PathLike[str], *, verify: bool = True, score: UserScores = None) -> Any:
    """Open the folder of a recording, or that of a corpus.

    Parameters
    ----------
    folder : str or Path
        What `Atlas.save`, a recording with ``keep="disk"`` or `attlas.corpus` wrote.
    verify : bool, default True
        Whether the checksum of every file is computed.
    score : Score or mapping, optional
        A score of your own that a recording used; several by the name of their class.

    Returns
    -------
    Atlas or Corpus
        A corpus that is not finished yet is opened as it was at the last commit; its ``config["complete"]`` is False.
        One that more texts are read into is that of before until they are.

    Raises
    ------
    RecordingError
        If the folder is not one that attlas wrote, was changed or cut off, or is of a newer format; or a corpus in it
        has just begun.
    MissingExtraError
        For a corpus, if pyarrow is not installed.

    See Also
    --------
    attlas.recording.atlas.load : the same for recordings alone.
    attlas.corpus : makes a corpus.

    Notes
    -----
    Nothing in the folder is executed. Time: reading every file once; ``verify=False`` takes milliseconds.

    Examples
    --------
    >>> import tempfile, torch, attlas
    >>> A = attlas.attend(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), mask=attlas.Causal())
    >>> atlas = attlas.Atlas([attlas.Entry("attn", 0, "self", 0, (0, 1), (0, 5), 0, (1, 2, 5, 5), A)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     atlas.save(f"{folder}/run.atlas")
    ...     len(attlas.load(f"{folder}/run.atlas"))
    1
    """
    path = Path(folder)
    if not (path / "atlas.json").exists() and ((path / "config.json").is_file() or (path / "parts").is_dir()):
        from attlas.corpus.sources import check_installed

        check_installed()
        from attlas.corpus.folder import open_folder

        return open_folder(path, verify=verify)
    return atlas.load(path, verify=verify, score=score)
