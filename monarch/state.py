"""The state directory of a mount: made, ours alone, and locked while a daemon uses it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from monarch.errors import TierError
from monarch.settings import MountSettings
from monarch.tiers.lock import Lock


@contextmanager
def hold_state(settings: MountSettings, state: Path) -> Iterator[None]:
    """Hold the directory ``state`` for this mount. Raises TierError, LockedError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = os.open(state, flags)
    except OSError as error:
        raise TierError(
            f"state directory {os.fspath(state)!r}: {error.strerror}",
            hint="name one that you may write with --state",
        ) from error
    try:
        owner = os.fstat(directory).st_uid
        if owner != os.geteuid():
            raise TierError(
                f"state directory {os.fspath(state)!r} belongs to uid {owner}",
                hint="name another with --state",
            )
        what = f"state directory {os.fspath(state)!r}"
        try:
            os.fchmod(directory, 0o700)
            lock = Lock(directory, what, os.fspath(settings.mountpoint))
        except OSError as error:
            raise TierError(
                f"{what}: {error.strerror}", hint="make room, or name another with --state"
            ) from error
        try:
            yield
        finally:
            lock.release()
    finally:
        os.close(directory)
