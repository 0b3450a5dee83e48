"""The one tree of errors. Each class has an errno for a system call and an exit code for the shell.

    MonarchError            1  EIO     anything that has no better name
      Refused               1  (own)   a system call that cannot be carried out
      UsageError            2  EINVAL  a command line that cannot be carried out
        ConfigError         2  EINVAL  mistakes in a configuration file, all of them at once
      MountPointError       3  EINVAL  the mount point cannot be used
      SourceError           4  (own)   the source answered with an error
        SourceChanged       4  ESTALE  the source is not what the snapshot says
      SnapshotError         5  EIO     a snapshot that cannot be used
        NewerSnapshot       5  EIO     written by a newer Monarch
      TierError             6  EIO     a tier or the state directory cannot be used
      LockedError           7  EBUSY   another daemon has the tier or the state
      FuseError             8  EIO     the kernel or fusermount3 would not mount; the daemon died
      NotMountedError       9  ENOTCONN  no Monarch daemon answers there
      BusyError            10  EBUSY   files are open; nothing was done
      NotDrainedError      13  EBUSY   what was written is not all at the source
      CheckpointError       1  EIO     a checkpoint, or a data order, that cannot be used

Exit code 0 is success; 1 is also the answer "they differ" of ``snapshot verify`` and ``diff``, and
"something is wrong" of ``fsck`` and ``ckpt verify``;
11 and 12 are the answers "degraded" and "failing" of ``status --check``; 130 is an interrupt from
the keyboard.
"""

from __future__ import annotations

import errno as errno_
import os


class MonarchError(Exception):
    """A failure to be told in one line: what, where, and in ``hint`` what to do about it."""

    exit_code = 1
    errno = errno_.EIO

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message: str = self.args[0]
        return f"{message}; {self.hint}" if self.hint else message


class Refused(MonarchError):
    """A system call asks for what cannot be, as on any file system: its caller's ``errno``.

    The caller is told and nobody else: it is no line of a log.
    """

    def __init__(self, errno: int) -> None:
        super().__init__(os.strerror(errno))
        self.errno = errno


class UsageError(MonarchError):
    exit_code = 2
    errno = errno_.EINVAL


class ConfigError(UsageError):
    """All mistakes of a configuration, one line each: ``file:line: what; what to do``."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class MountPointError(MonarchError):
    exit_code = 3
    errno = errno_.EINVAL


class SourceError(MonarchError):
    """The source failed; ``errno`` is its own, and the caller's system call gets it."""

    exit_code = 4

    def __init__(self, message: str, *, errno: int = errno_.EIO, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errno = errno


def source_remedy(number: int | None, path: str) -> str:
    """What to do about a source that fails with that errno."""
    if number in (errno_.EACCES, errno_.EPERM):
        return (
            f"mount as a user who may read it (this one is uid {os.geteuid()}), or have its owner"
            f" give the right: ls -ld {path}"
        )
    return "check the path, and that its file system is mounted"


class SourceChanged(SourceError):
    """A source file is not the one that the snapshot describes."""

    def __init__(self, message: str) -> None:
        super().__init__(message, errno=errno_.ESTALE)


class SnapshotError(MonarchError):
    exit_code = 5


class NewerSnapshot(SnapshotError):
    """A snapshot in a format that this Monarch does not know yet."""


class TierError(MonarchError):
    exit_code = 6


class LockedError(MonarchError):
    exit_code = 7
    errno = errno_.EBUSY


class FuseError(MonarchError):
    exit_code = 8


class NotMountedError(MonarchError):
    exit_code = 9
    errno = errno_.ENOTCONN


class BusyError(MonarchError):
    exit_code = 10
    errno = errno_.EBUSY


class NotDrainedError(MonarchError):
    """What was written through a mount did not come to the source in the time given."""

    exit_code = 13
    errno = errno_.EBUSY


class CheckpointError(MonarchError):
    """To a trainer, which is another process than the daemon."""


_BY_EXIT_CODE: dict[int, type[MonarchError]] = {
    kind.exit_code: kind
    for kind in (
        UsageError,
        MountPointError,
        SourceError,
        SnapshotError,
        TierError,
        LockedError,
        FuseError,
        NotMountedError,
        BusyError,
        NotDrainedError,
    )
}


def error_of(exit_code: int, message: str, *, hint: str = "") -> MonarchError:
    """The error that another process of Monarch ended with, by its exit code."""
    return _BY_EXIT_CODE.get(exit_code, MonarchError)(message, hint=hint)
