"""``python -m attlas``, as ``torchrun -m attlas corpus`` starts it."""

import sys

from attlas.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
