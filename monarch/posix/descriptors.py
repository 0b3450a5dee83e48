"""File descriptors that are closed at the end of a block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Gives ``fd``, and closes it at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)
