"""``attlas join``: put several corpora together."""

from __future__ import annotations

from argparse import Namespace

import attlas
from attlas.cli.corpus import say
from attlas.cli.terminal import Terminal


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Join, and say what there is now."""
    with terminal.step("joining"):
        found = attlas.join(arguments.folders, arguments.out)
    say(found, terminal)
