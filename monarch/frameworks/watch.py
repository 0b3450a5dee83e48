"""The loader of a training script, as ``monarch analyze run`` measures it.

Without an analysis ``watch`` returns the loader itself, so it costs nothing.
"""

from __future__ import annotations

import os
from typing import TypeVar, cast

from monarch.analysis.plan import VARIABLE, decode_plan

Loader = TypeVar("Loader")


def watch(loader: Loader) -> Loader:
    """``loader``, which is any iterable of batches: ``for batch in monarch.watch(loader):``.

    While ``monarch analyze run`` runs the script, the result yields the same batches, or ready ones
    of them again and again in the run that measures the training alone. It ends the process with
    SystemExit when enough batches are measured. It has the length and the attributes of the loader.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return loader
    # Imported only when something is measured.
    from monarch.frameworks.measured_loader import measured

    return cast(Loader, measured(loader, decode_plan(text)))
