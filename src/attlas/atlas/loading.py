"""`attlas.load`: opens a saved atlas."""

from __future__ import annotations

import os
from pathlib import Path

from attlas.atlas.atlas import Atlas
from attlas.atlas.deserialization import read
from attlas.atlas.serialization import UserScores


def load(folder: str | os.PathLike[str], *, verify: bool = True, score: UserScores = None) -> Atlas:
    """Return the atlas that was saved in a folder; q and k stay on disk until they are read.

    Parameters
    ----------
    folder : str or Path
        The folder of `Atlas.save`, or of a recording with ``keep="disk"``.
    verify : bool, default True
        Whether the checksum of every file is computed. Without it the checksum of ``atlas.json``, and the
        sizes and headers of all files, are still looked at.
    score : Score or mapping, optional
        A score of your own that the recording used; several by the name of their class. It is not stored, but
        for what its `to_dict` gives: then the class itself will do.

    Returns
    -------
    Atlas

    Raises
    ------
    RecordingError
        If the folder is not one that attlas wrote, was changed or cut off, or is of a newer format.

    See Also
    --------
    Atlas.save : the way there.

    Notes
    -----
    Nothing in the folder is executed: numbers come from safetensors, the rest is JSON of known words.
    Time: reading every file once, about 1 GB a second and core; ``verify=False`` takes milliseconds.
    Memory: none for q and k, which are mapped and not read. Changing a loaded tensor does not change its
    file; changing the file under a loaded atlas does change the atlas.

    Examples
    --------
    >>> import tempfile, torch, attlas
    >>> from attlas.atlas import Atlas, Entry, load
    >>> A = attlas.attend(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), mask=attlas.Causal())
    >>> atlas = Atlas([Entry("attn", 0, "self", 0, (0, 1), (0, 5), 0, (1, 2, 5, 5), A)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     atlas.save(f"{folder}/run.atlas")
    ...     bool((load(f"{folder}/run.atlas")[0].to_dense() == A.to_dense()).all())
    True
    """
    return Atlas(**read(Path(folder), verify=verify, score=score))
