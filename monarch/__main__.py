"""``python -m monarch``: the command line without its entry point installed."""

from __future__ import annotations

import sys

from monarch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
