"""The classes of errors, each with an exit code for the shell and an errno for a system call.

    MonarchError            1  EIO     any other failure
      Refused               1  (own)   a system call that must be refused
      UsageError            2  EINVAL  a command line that cannot be executed
        ConfigError         2  EINVAL  mistakes in a configuration file, all of them at once
      MountPointError       3  EINVAL  the mount point cannot be used
      SourceError           4  (own)   the source answered with an error
        SourceChanged       4  ESTALE  the source differs from the snapshot
      SnapshotError         5  EIO     a snapshot that cannot be used
        NewerSnapshot       5  EIO     written by a newer Monarch
      TierError             6  EIO     a tier or the state directory cannot be used
      LockedError           7  EBUSY   another daemon uses the tier or the state
      FuseError             8  EIO     the kernel or fusermount3 refused, or the daemon died
      NotMountedError       9  ENOTCONN  no Monarch daemon answers there
      BusyError            10  EBUSY   files are open; nothing was done
      NotDrainedError      13  EBUSY   not all written files are at the source
      PackError            14  EIO     a pack cannot be used, or cannot be written
        NewerPack          14  EIO     written by a newer Monarch
      CheckpointError       1  EIO     a checkpoint, or a data order, that cannot be used
      LmdbError             1  EIO     an LMDB file, or its index, that cannot be read

Exit code 0 is success. 1 is also the answer "they differ" of ``snapshot verify`` and ``diff``, and
"something is wrong" of ``fsck``, ``ckpt verify`` and ``pack verify``. 11 and 12 are the answers
"degraded" and "failing" of ``status --check``; 130 is an interrupt from the keyboard.
"""

from __future__ import annotations

import errno as errno_
import os
import sys

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup


class MonarchError(Exception):
    """A failure described in one line: what failed and where; ``hint`` says what to do."""

    exit_code = 1
    errno = errno_.EIO

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message: str = self.args[0]
        return f"{message}; {self.hint}" if self.hint else message


class Refused(MonarchError):
    """A system call that must fail with ``errno``, as on any file system.

    Its caller gets the error; it is not logged.
    """

    def __init__(self, errno: int) -> None:
        super().__init__(os.strerror(errno))
        self.errno = errno


class Unanswered(Refused):
    """A disk of Monarch's own does not answer. Nothing was changed: the call may come again."""

    def __init__(self) -> None:
        super().__init__(errno_.ETIMEDOUT)


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
    """The source failed with ``errno``, which the system call of the reader returns."""

    exit_code = 4

    def __init__(self, message: str, *, errno: int = errno_.EIO, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errno = errno


def source_remedy(number: int | None, path: str) -> str:
    """The remedy for a source that fails with errno ``number``."""
    if number in (errno_.EACCES, errno_.EPERM):
        return (
            f"mount as a user who may read it (this one is uid {os.geteuid()}), or have its owner"
            f" grant the permission: ls -ld {path}"
        )
    return "check the path, and that its file system is mounted"


class SourceChanged(SourceError):
    """A source file differs from its entry in the snapshot."""

    def __init__(self, message: str) -> None:
        super().__init__(message, errno=errno_.ESTALE)


class SnapshotError(MonarchError):
    exit_code = 5


class NewerSnapshot(SnapshotError):
    """A snapshot in a format of a newer Monarch."""


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
    """Files written through a mount are not at the source before the timeout."""

    exit_code = 13
    errno = errno_.EBUSY


class PackError(MonarchError):
    """A pack is damaged, incomplete or hostile, or it cannot be written."""

    exit_code = 14


class NewerPack(PackError):
    """A file of a pack is in a format of a newer Monarch."""


class CheckpointError(MonarchError):
    """A checkpoint, or the state of a data order, cannot be used; raised in the trainer."""


class LmdbError(MonarchError):
    """An LMDB file, or the index of one, cannot be read; raised in the trainer."""


def error_of(exit_code: int, message: str, *, hint: str = "") -> MonarchError:
    """The error with which another Monarch process ended, from its exit code."""
    kinds = (kind for kind in MonarchError.__subclasses__() if kind.exit_code == exit_code != 1)
    return next(kinds, MonarchError)(message, hint=hint)


def sole_cause(error: BaseException) -> BaseException:
    """``error``, or the error in a group of one, as a nursery raises it."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
