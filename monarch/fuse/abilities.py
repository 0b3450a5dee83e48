"""What this machine and this process can do for a mount."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

from monarch.fuse import datapath
from monarch.posix.cgroups import memory_bytes
from monarch.posix.credentials import can_act_as_others

_CAP_SYS_ADMIN = 21
# The capabilities that let a thread of root take the identity of a user.
IDENTITY_CAPABILITIES = {"CAP_SETGID": 6, "CAP_SETUID": 7}
# The capabilities to set owner, mode and times of written files at the source.
_OF_OTHERS = {"CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_FSETID": 4}
# In these versions of Linux cached listings never expire; 6.13 has the correction.
_STUCK_LISTINGS = ((6, 9), (6, 13))


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities of a machine and of this process. ``release`` is the full release of the
    kernel.

    ``lacking``: capabilities to act for other users that this process of root does not have.
    """

    built: bool
    release: str
    may_pass_through: bool
    memory_bytes: int
    lacking: frozenset[str] = frozenset()

    @classmethod
    def here(cls) -> Abilities:
        held = _effective_capabilities(Path("/proc/self/status").read_text())
        wanted = {**IDENTITY_CAPABILITIES, **_OF_OTHERS} if can_act_as_others() else {}
        return cls(
            built=datapath.built(),
            release=platform.release(),
            may_pass_through=bool(held >> _CAP_SYS_ADMIN & 1),
            memory_bytes=memory_bytes(Path("/")),
            lacking=frozenset(name for name, bit in wanted.items() if not held >> bit & 1),
        )

    @property
    def kernel(self) -> tuple[int, int]:
        found = re.match(r"(\d+)\.(\d+)", self.release)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @property
    def cached_listings_expire(self) -> bool:
        first, corrected = _STUCK_LISTINGS
        return not first <= self.kernel < corrected


def _effective_capabilities(status: str) -> int:
    """The effective capabilities, from the text of ``/proc/self/status``."""
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", status, re.MULTILINE)
    return int(found[1], 16) if found else 0
