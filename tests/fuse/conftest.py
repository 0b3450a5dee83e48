"""The source that can be slow, fail and hang, as the tests of a mount have it."""

from tests.mount.conftest import slow as slow
