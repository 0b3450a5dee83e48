"""A directory on a real ext4 whose disk is capped: the bandwidth of a busy parallel file system.

A loop device under cgroup v1 blkio. The cap holds for every process that joins, buffered or direct,
and is exact to a few per cent over a second. The cap applies to the process that *submits* a read:
start the daemon inside the group, and with kernel passthrough also the reader. Metadata in memory
is not delayed; for latency per call use ``slowfs``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_BLKIO = Path("/sys/fs/cgroup/blkio")


def unavailable() -> str | None:
    """Why a capped disk cannot be had here, in words for ``pytest.skip``; None if it can."""
    if os.geteuid() != 0:
        return "a capped disk needs root"
    if not Path("/dev/loop-control").exists():
        return "this machine has no loop devices"
    if not (_BLKIO / "blkio.throttle.read_bps_device").exists():
        return "this machine has no cgroup v1 blkio"
    for command in ("losetup", "mkfs.ext4"):
        if shutil.which(command) is None:
            return f"{command} is not installed"
    return None


class CappedDisk:
    """An empty ext4 of ``size_bytes`` at ``mountpoint`` for the length of a ``with`` block.

    Its image is a sparse file beside the mount point. There is no cap until ``limit``.
    """

    def __init__(self, mountpoint: Path, *, size_bytes: int) -> None:
        self.path = mountpoint
        self._size_bytes = size_bytes
        self._image = mountpoint.with_name(f"{mountpoint.name}.img")
        self._group = _BLKIO / f"monarch-test-{os.getpid()}-{mountpoint.name}"
        self._loop = ""

    def __enter__(self) -> CappedDisk:
        self.path.mkdir(parents=True, exist_ok=True)
        with self._image.open("wb") as image:
            image.truncate(self._size_bytes)
        try:
            # Direct I/O below, or the image's page cache would answer instead of the cap.
            self._loop = _output("losetup", "-f", "--show", "--direct-io=on", str(self._image))
            _output("mkfs.ext4", "-q", self._loop)
            _output("mount", self._loop, str(self.path))
            self._group.mkdir()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def limit(self, *, read_bps: int = 0, write_bps: int = 0, read_iops: int = 0) -> None:
        """Cap the disk for the processes of the group; 0 is no cap, 1 byte/s is a hang."""
        device = Path(f"/sys/block/{Path(self._loop).name}/dev").read_text().strip()
        for name, value in (
            ("read_bps", read_bps),
            ("write_bps", write_bps),
            ("read_iops", read_iops),
        ):
            (self._group / f"blkio.throttle.{name}_device").write_text(f"{device} {value}\n")

    def join(self, pid: int) -> None:
        """Put a process under the cap, with the children it will have."""
        (self._group / "cgroup.procs").write_text(f"{pid}\n")

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` under the cap from its first instruction."""
        joining = 'echo $$ >"$0/cgroup.procs" && exec "$@"'
        return ["bash", "-c", joining, str(self._group), *command]

    def forget_cached_pages(self) -> None:
        """Drop this disk's clean pages: what is read next comes from the device."""
        os.sync()
        for directory, _, names in os.walk(self.path):
            for name in names:
                fd = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)

    def close(self) -> None:
        """Unmount, free the loop device and the group. May be called twice."""
        if self._group.exists():
            if self._loop:
                self.limit()  # a call that waits for the cap continues, or the unmount waits for it
            for pid in (self._group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):  # it ended meanwhile
                    (_BLKIO / "cgroup.procs").write_text(pid)
            self._group.rmdir()
        if os.path.ismount(self.path):
            for _ in range(50):
                if subprocess.run(["umount", str(self.path)], capture_output=True).returncode == 0:
                    break
                time.sleep(0.1)
            else:
                subprocess.run(["umount", "-l", str(self.path)], check=True)
        if self._loop:
            _output("losetup", "-d", self._loop)
            self._loop = ""
        self._image.unlink(missing_ok=True)


def _output(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()
