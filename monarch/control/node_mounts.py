"""The Monarch mounts of this node, found in the mount table and in the registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from monarch.control import registry
from monarch.control.registry import MountRecord, Registry
from monarch.posix.bounded_calls import PATIENCE_S
from monarch.posix.mounts import MountedFileSystem, is_dead, mount_table
from monarch.text import escape_text

FUSE_TYPE = "fuse.monarch"

MountState = Literal["served", "stale", "leftover", "foreign"]


@dataclass(frozen=True, slots=True)
class SeenMount:
    """A mount point of the mount table or the registry.

    ``served``: its daemon runs. ``stale``: mounted, the daemon is dead. ``leftover``: the record of
    a dead daemon without a mount. ``foreign``: mounted and answering, by a daemon of another user
    or with another state directory.
    """

    mountpoint: str
    state: MountState
    record: MountRecord | None

    @property
    def advice(self) -> str:
        where = escape_text(self.mountpoint)
        if self.state == "stale":
            return f"`monarch umount {where}` removes it, and so does mounting it again"
        if self.state == "leftover":
            return f"mount it again, or `monarch umount {where}` to forget it"
        if self.state == "foreign":
            return (
                "a mount of another user, or of another MONARCH_STATE_ROOT: `monarch status"
                f" {where}` shows its public figures"
            )
        return ""


def seen_mounts(
    records: Registry, mounts: Sequence[MountedFileSystem] | None = None
) -> list[SeenMount]:
    """All Monarch mounts of this node, and records of dead ones, by mount point."""
    table = mount_table() if mounts is None else mounts
    mounted = {str(m.mount_point) for m in table if m.kind == FUSE_TYPE}
    seen: list[SeenMount] = []
    for record in records.all():
        state: MountState = "stale" if record.mountpoint in mounted else "leftover"
        if registry.alive(record):
            state = "served"
        seen.append(SeenMount(record.mountpoint, state, record))
    for mountpoint in mounted - {s.mountpoint for s in seen}:
        state = "stale" if is_dead(mountpoint, wait_s=PATIENCE_S) else "foreign"
        seen.append(SeenMount(mountpoint, state, None))
    return sorted(seen, key=lambda s: s.mountpoint)
