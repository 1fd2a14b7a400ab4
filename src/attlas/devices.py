"""Devices of torch, checked before the work."""

from __future__ import annotations

import torch

from attlas.errors import DeviceError


def usable_device(where: str, device: str | torch.device) -> torch.device:
    """Return a device, or raise a DeviceError where torch has no such one here."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        rule = "the device must be one that torch can use here."
        reason = (str(error).splitlines() or [""])[0]
        raise DeviceError(where, rule, found=f"device = {str(device)!r}: {reason}", fix='device="cpu"') from None
    return found
