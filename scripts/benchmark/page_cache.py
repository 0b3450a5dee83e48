"""Drops the page cache of this machine."""

from __future__ import annotations

import os
from pathlib import Path

_DROP = Path("/proc/sys/vm/drop_caches")


def can_drop() -> bool:
    return os.geteuid() == 0 and os.access(_DROP, os.W_OK)


def drop_pages() -> None:
    """Have the kernel forget the contents of all files; names and attributes stay."""
    os.sync()
    _DROP.write_text("1")


def drop_all() -> None:
    """Have the kernel forget contents, names and attributes."""
    os.sync()
    _DROP.write_text("3")
