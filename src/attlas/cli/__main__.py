"""``python -m attlas.cli``, for an installation whose scripts are not on the path."""

import sys

from attlas.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
