"""The file systems that Monarch is compared with, for reading and for writing.

For reading they are set up for data that does not change, as favourably as their manuals allow:
names and attributes may be kept for an hour, and the kernel keeps pages after a close.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from scripts.benchmark.contenders import Contender, Mounted, Server, Source
from scripts.benchmark.programs import checked_output, install, output, program, required
from scripts.benchmark.rows import BenchError
from tests.equipment.waiting import becomes_true

HOUR_S = 3600
# Making a file costs JuiceFS and sqlite a millisecond, so only a part of a large tree is copied.
COPIED_DIRECTORIES = 10
# How long JuiceFS may take to write back what it has in its cache.
WRITE_BACK_S = 1200.0


class PlainPyfuse3(Server):
    name = shares = "pyfuse3"
    fills = False

    def version(self) -> str:
        return f"pyfuse3 {importlib.metadata.version('pyfuse3')}"

    def command(self, source: Source, mountpoint: Path, place: Path) -> list[str]:
        script = Path(__file__).with_name("plain_pyfuse3.py")
        return [sys.executable, str(script), str(source.path), str(mountpoint)]


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
    """Debian 12 has version 2.33, which has the page cache and no passthrough."""

    name = shares = "mergerfs"
    version_argument = "--version"
    fills = False

    def command(self, source: Source, mountpoint: Path, place: Path) -> list[str]:
        options = [
            "cache.files=full,cache.readdir=true",
            f"cache.attr={HOUR_S},cache.entry={HOUR_S}",
            "category.search=ff,func.getattr=ff,fsname=mergerfs",
        ]
        if "passthrough.io" in output(required("mergerfs"), "--help"):
            options.append("passthrough.io=ro")
        return [
            required("mergerfs"),
            "-f",
            "-o",
            ",".join(options),
            str(source.path),
            str(mountpoint),
        ]


class JuiceFS(Server):
    """The data is copied into it first. Its objects and names lie on the local disk."""

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
        checked_output([required("juicefs"), *arguments])


class PassthroughHP(Server):
    """The example of a fast file system in libfuse: it shows a directory and keeps nothing."""

    name = shares = "passthrough_hp"
    fills = False

    def version(self) -> str:
        return f"passthrough_hp of libfuse {output('pkg-config', '--modversion', 'fuse3').strip()}"

    def command(self, source: Source, mountpoint: Path, place: Path) -> list[str]:
        return [required(self.name), "--foreground", str(source.path), str(mountpoint)]


class RcloneWriting(Rclone):
    """Answers fsync at once, and writes a file back one second after it was closed."""

    def command(self, source: Source, mountpoint: Path, place: Path) -> list[str]:
        return [
            *(required("rclone"), "mount", str(source.path), str(mountpoint)),
            *("--config", "", "--cache-dir", str(place / "vfs"), "--vfs-cache-mode", "writes"),
            *("--vfs-write-back", "1s", "--vfs-cache-max-age", "24h", "--dir-cache-time", "24h"),
            *("--no-checksum", "--transfers", "4"),
        ]


class JuiceFSWriting(JuiceFS):
    """Its objects lie at the slow source; with ``--writeback`` they first lie in its cache."""

    def prepare(self, source: Source, place: Path) -> None:
        self._place = place
        place.mkdir(parents=True)
        format_ = ("format", self._names(place), "writes", "--storage", "file")
        self._run(*format_, "--bucket", f"{source.path / 'juicefs'}/", "--trash-days", "0")

    def command(self, source: Source, mountpoint: Path, place: Path) -> list[str]:
        return [
            *(required("juicefs"), "mount", self._names(self._place), str(mountpoint)),
            *("--cache-dir", str(place / "blocks"), "--writeback", "--no-usage-report"),
            *("--no-syslog", "--no-bgjob"),
        ]

    @contextmanager
    def mount(self, source: Source, mountpoint: Path, place: Path) -> Iterator[Mounted]:
        def is_staged() -> bool:
            return any(path.is_file() for path in place.glob("blocks/**/rawstaging/**/*"))

        def settle() -> None:
            if not becomes_true(lambda: not is_staged(), timeout_s=WRITE_BACK_S, step_s=0.05):
                raise BenchError("juicefs does not write back")

        with super().mount(source, mountpoint, place) as mounted:
            yield replace(mounted, settle=settle)


READING: dict[str, Callable[[], Contender]] = {
    "rclone": Rclone,
    "mergerfs": Mergerfs,
    "juicefs": JuiceFS,
}
WRITING: dict[str, Callable[[], Contender]] = {
    "rclone": RcloneWriting,
    "juicefs": JuiceFSWriting,
    "passthrough_hp": PassthroughHP,
}


def available(
    options: argparse.Namespace, modes: Collection[str], peers: Collection[str]
) -> list[str]:
    """The peers that ``--peers`` asks for, or those that are installed; checks ``--modes``, too.

    With ``--install-peers`` they are installed first. Raises BenchError for one that is unknown,
    and for one that was asked for and is not installed.
    """
    asked: list[str] | None = options.peers
    for name in (*(options.modes or []), *(asked or [])):
        if name not in modes and name not in peers:
            raise BenchError(f"there is no {name}; {', '.join(modes)} or {', '.join(peers)}")
    if options.install_peers:
        asked = list(peers) if asked is None else asked
        install(asked)
    for name in asked or []:
        required(name)
    return [name for name in peers if program(name)] if asked is None else asked
