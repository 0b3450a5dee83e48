"""A source that can be slow, fail and hang, below a mount."""

from tests.mount.conftest import slow

__all__ = ["slow"]
