"""Peak memory of the process, where the system reports it."""

from __future__ import annotations

from pathlib import Path


class Peak:
    """Bytes that the process grew by, at most, since this object was made.

    Notes
    -----
    Linux only: the kernel's high-water mark of resident memory is reset and read again. Elsewhere `bytes` is None.
    """

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # 5 resets the high-water mark
        except OSError:
            self._before: int | None = None
        else:
            self._before = _status("VmRSS")

    @property
    def bytes(self) -> int | None:
        """Growth until now, or None where the system does not tell."""
        peak = None if self._before is None else _status("VmHWM")
        return None if peak is None or self._before is None else max(peak - self._before, 0)


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
