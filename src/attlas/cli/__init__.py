"""The ``attlas`` command: one command in each file."""

from attlas.cli.command import main

__all__ = ["main"]
