"""Monarch: a FUSE file system that serves training data from node-local tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch.datasets.files import open_dataset as open_dataset
    from monarch.frameworks.watch import watch as watch

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Imported when it is used: the command line needs neither numpy nor the extension.
    if name == "open_dataset":
        from monarch.datasets.files import open_dataset

        return open_dataset
    if name == "watch":
        from monarch.frameworks.watch import watch

        return watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
