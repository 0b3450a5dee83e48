"""Runs a command of the checkout under the checkout's own Python, where there is one."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(module: str) -> None:
    """Run ``main(arguments)`` of ``module`` and exit with what it returns.

    Outside of a virtual environment the Python of the checkout's (or of MONARCH_VENV) takes over,
    so that a command works by its name alone once scripts/test or scripts/demo has run.
    """
    python = Path(os.environ.get("MONARCH_VENV", ROOT / ".venv")) / "bin" / "python"
    if sys.prefix == sys.base_prefix and python.exists():
        os.execv(python, [str(python), *sys.argv])
    # In place of the launcher's directory, whose packages would have two names.
    sys.path[0] = str(ROOT)
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        name = Path(sys.argv[0]).name
        sys.exit(f"{name}: Python has no {error.name}; run scripts/demo once, it installs all")
    try:
        status = main(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
