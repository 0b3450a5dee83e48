"""``python -m monarch``: the command line, also if its entry point is not installed."""

from __future__ import annotations

import sys

from monarch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
