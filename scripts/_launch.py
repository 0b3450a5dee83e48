"""Starts a script of this directory under the checkout's own Python, where there is one."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(module: str) -> None:
    """Run ``main(arguments)`` of ``module`` and exit with what it returns.

    Outside of a virtual environment the checkout's (or MONARCH_VENV) takes over, so that a script
    works by its name alone after scripts/test or scripts/demo ran once.
    """
    python = Path(os.environ.get("MONARCH_VENV", ROOT / ".venv")) / "bin" / "python"
    if sys.prefix == sys.base_prefix and python.exists():
        os.execv(python, [str(python), *sys.argv])
    sys.path.insert(0, str(ROOT))
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
