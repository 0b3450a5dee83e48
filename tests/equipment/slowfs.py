"""A source or a tier that follows rules: latencies, errors, hangs, wrong bytes, and counters.

The file system is ``slowfs.c``, a loopback over a directory; the comment at its top lists the
rules. It counts the calls that it receives; no code under test can change the counters.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from tests.equipment.mounts import is_mounted

_CODE = Path(__file__).with_name("slowfs.c")
_STATS = ".slowfs-stats"
_WAIT_S = 60.0
# Counters that do not count calls.
_NO_CALLS = ("read_bytes", "write_bytes", "hanging", "loads")


def unavailable() -> str | None:
    """Why a slow source cannot be had here, in words for ``pytest.skip``; None if it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened"
    for command in ("gcc", "pkg-config", "fusermount3"):
        if shutil.which(command) is None:
            return f"{command} is not installed"
    return None


def compiled() -> Path:
    """The program, compiled once for each version of its text."""
    key = hashlib.sha256(_CODE.read_bytes()).hexdigest()[:16]
    build_dir = Path(__file__).parents[2] / ".cache"
    try:
        build_dir.mkdir(exist_ok=True)
    except OSError:  # a checkout that only root may write
        build_dir = Path(tempfile.gettempdir()) / f"monarch-equipment-{os.getuid()}"
        build_dir.mkdir(mode=0o700, exist_ok=True)
    program = build_dir / f"slowfs-{key}"
    if program.exists():
        return program
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], check=True, capture_output=True, text=True
    ).stdout.split()
    staged = build_dir / f"{program.name}.{os.getpid()}"
    subprocess.run(
        ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", str(_CODE), "-o", str(staged), *flags, "-lm"],
        check=True,
    )
    staged.rename(program)  # two test runs may compile at once
    return program


class SlowSource:
    """``root`` seen through slowfs at ``mountpoint``, for the length of a ``with`` block.

    ``attribute_s`` is how long the kernel may keep attributes and names: 0 makes each stat a call
    that is counted. With ``flush`` each close of a file is a call, too. ``background`` is
    the number of reads of pages that the kernel sends at the same time; 0: as for any FUSE mount,
    12.
    """

    def __init__(
        self,
        root: Path,
        mountpoint: Path,
        *,
        attribute_s: float = 1.0,
        flush: bool = False,
        background: int = 0,
    ) -> None:
        self.root = root
        self.path = mountpoint
        self._attribute_s = attribute_s
        self._flush = flush
        self._background = background
        self._control_dir: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SlowSource:
        self.path.mkdir(parents=True, exist_ok=True)
        self._control_dir = tempfile.TemporaryDirectory(prefix="slowfs-")
        self._start()
        return self

    def _start(self) -> None:
        options = "max_threads=512,max_idle_threads=512,fsname=slowfs,subtype=slowfs"
        if os.geteuid() == 0:
            options += ",allow_other"
        self._process = subprocess.Popen(
            [str(compiled()), str(self.path), "-f", "-o", options],
            env={
                **os.environ,
                "SLOW_ROOT": str(self.root),
                "SLOW_CTL": str(self._control_file),
                "SLOW_ATTR_S": str(self._attribute_s),
                "SLOW_BACKGROUND": str(self._background),
                **({"SLOW_FLUSH": "1"} if self._flush else {}),
            },
            stdin=subprocess.DEVNULL,
        )
        try:
            self._wait_until_mounted()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def rules(self, *lines: str) -> None:
        """Replace all rules (see ``slowfs.c``); returns when they hold. No lines: no rules.

        Calls that hang continue once their rule is gone.
        """
        before = self.counters()["loads"]
        staged = self._control_file.with_suffix(".new")
        staged.write_text("".join(f"{line}\n" for line in lines))
        staged.rename(self._control_file)
        deadline = time.monotonic() + _WAIT_S
        while self.counters()["loads"] == before:
            if time.monotonic() > deadline:
                raise TimeoutError(f"slowfs at {self.path} does not read {self._control_file}")
            time.sleep(0.01)
        # A call that slept when the rules changed checks them again after 50 ms.
        time.sleep(0.06)

    def counters(self) -> dict[str, int]:
        """Calls of each operation since the start, with ``read_bytes`` and ``loads``."""
        # In one read: each is answered with the counts of its moment, and two do not fit together.
        fd = os.open(self.path / _STATS, os.O_RDONLY)
        try:
            lines = os.read(fd, 1 << 16).decode().splitlines()
        finally:
            os.close(fd)
        return {name: int(count) for name, count in (line.split() for line in lines)}

    def calls(self) -> int:
        """All calls since the start."""
        counters = self.counters()
        return sum(count for name, count in counters.items() if name not in _NO_CALLS)

    def kill(self) -> None:
        """The source dies: its mount answers ENOTCONN until ``restart`` or the block's end."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Mounted anew at the same place, without rules, as after the death of its client."""
        if is_mounted(self.path):
            subprocess.run(["umount", "-l", str(self.path)], check=True)
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._control_file.write_text("")
        self._start()

    def close(self) -> None:
        """Unmount and end the process, whatever state both are in. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        # A call that hangs by a rule would keep the process in its unmount.
        with contextlib.suppress(OSError):
            self._control_file.write_text("")
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if is_mounted(self.path):
            subprocess.run(["umount", "-l", str(self.path)], check=True)
        if self._control_dir is not None:
            self._control_dir.cleanup()

    @property
    def _control_file(self) -> Path:
        assert self._control_dir is not None
        return Path(self._control_dir.name) / "rules"

    def _wait_until_mounted(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _WAIT_S
        while not is_mounted(self.path):
            if self._process.poll() is not None:
                raise RuntimeError(f"slowfs ended with {self._process.returncode} at its start")
            if time.monotonic() > deadline:
                raise TimeoutError(f"slowfs did not mount {self.path} in {_WAIT_S:.0f} s")
            time.sleep(0.005)
