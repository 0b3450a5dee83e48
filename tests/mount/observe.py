"""Helpers to use and observe a mount: epochs, copies, and the counters of the daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch.control.client import call
from monarch.frameworks.announce import Inodes
from monarch.tiers.hierarchy import owner_of
from monarch.tiers.ownership import own_directory
from tests.conftest import Mounted, below, contents, trouble
from tests.equipment.waiting import wait_until

PATIENCE_S = 60.0
# After that a young file has been checked again, with ample time for a machine under load.
RESTED_S = 3.5


def account(mounted: Mounted) -> dict[str, Any]:
    """What the daemon says of itself, as ``monarch status --json`` shows it."""
    return call(mounted.state / "control.sock", "status", {})


def settled(mounted: Mounted, *, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
    """Wait until nothing is on its way to a tier; the account then."""
    report: dict[str, Any] = {}

    def quiet() -> bool:
        report.update(account(mounted))
        copies = report["copies"]
        return not (copies["queued"] or copies["running"] or report["residency"]["wanted"])

    wait_until(quiet, "no copy is under way", timeout_s=timeout_s)
    return report


def list_late(mounted: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library lists no directory before the mount has handled the first files of an order."""
    listed = Inodes._listed

    def wait(inodes: Inodes, directory: bytes) -> dict[bytes, int]:
        wait_until(
            lambda: account(mounted)["foresight"]["announced"]["entries"] == 16,
            "the mount has the first files",
        )
        settled(mounted)
        return listed(inodes, directory)

    monkeypatch.setattr(Inodes, "_listed", wait)


def ended(pid: int) -> bool:
    """Whether a process is over, or waits for nothing but its parent's look."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def forget_pages(fd: int) -> None:
    """The next read is asked of the file system again, not answered from memory."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_through(path: Path) -> bytes:
    """One open, and the whole file; none of its pages stays in memory for the next reader."""
    with path.open("rb", buffering=0) as file:
        content = file.readall()
        forget_pages(file.fileno())
        return content


def error_of(path: Path) -> int:
    """The errno with which reading a file fails."""
    with pytest.raises(OSError) as failed:
        read_through(path)
    assert failed.value.errno is not None
    return failed.value.errno


@contextmanager
def asked_for(mounted: Mounted, name: str) -> Iterator[None]:
    """A file is open; or where no open is reported, another process waits for its first bytes."""
    path = mounted.path / name
    if mounted.cli.mode != "no_open":
        with path.open("rb", buffering=0):
            yield
        return
    command = [sys.executable, "-c", "import sys; open(sys.argv[1], 'rb').read(1)", str(path)]
    reader = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        reader.wait(PATIENCE_S)


def warnings(mounted: Mounted) -> list[str]:
    """The lines of the log that report a failure."""
    return [line for line in mounted.log_text.splitlines() if trouble(line)]


def files(count: int = 10, size: int = 10_000, *, step: int = 0) -> dict[str, bytes]:
    """Contents by name; each file is ``step`` bytes larger than the one before it."""
    names = [f"{number:03d}.jpg" for number in range(count)]
    return {name: contents(name, size + step * number) for number, name in enumerate(names)}


def epoch(mounted: Mounted, content: Mapping[str, bytes], order: Iterable[str] = ()) -> None:
    """Read each file once and compare it with what it must hold."""
    for name in order or content:
        assert read_through(mounted.path / name) == content[name], f"wrong bytes in {name}"


def copies(mounted: Mounted) -> dict[str, dict[int, Path]]:
    """The committed copies by tier and by inode number, as they lie on the disk."""
    owner = owner_of(mounted.state)
    found: dict[str, dict[int, Path]] = {}
    for name, tier in mounted.tiers.items():
        paths: list[Path] | None = None
        while paths is None:
            # The daemon may remove a directory while it is listed.
            with suppress(FileNotFoundError):
                paths = list(own_directory(tier, owner).glob("copies-*/*/*"))
        found[name] = {int(path.name): path for path in paths if path.name.isdecimal()}
    return found


def copy_of(mounted: Mounted, name: str) -> Path:
    """Where the only copy of a file lies."""
    ino = (mounted.path / name).stat().st_ino
    found = [tier[ino] for tier in copies(mounted).values() if ino in tier]
    assert len(found) == 1, f"{name} has {len(found)} copies"
    return found[0]


def resident(mounted: Mounted, names: Iterable[str]) -> dict[str, str]:
    """The tier of each file that has a copy there."""
    tiers = {name: mounted.xattr(name) for name in names}
    return {name: tier for name, tier in tiers.items() if tier != "source"}


@contextmanager
def as_a_disk_does(path: Path) -> Iterator[None]:
    """What is changed in a file meanwhile leaves its times alone, as a failing disk does."""
    before = path.stat()
    yield
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip_bit(path: Path, offset: int = 0) -> None:
    """Damage one byte in place; size, name and times stay."""
    with as_a_disk_does(path), path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def accounts_agree(mounted: Mounted) -> None:
    """The bytes that the daemon counts as used and resident are those of the files in its tiers."""
    report = settled(mounted)
    on_disk = copies(mounted)
    for tier in report["tiers"]:
        files = on_disk[tier["name"]]
        assert tier["files"] == len(files), tier["name"]
        assert tier["used"] == sum(path.stat().st_size for path in files.values()), tier["name"]
        assert tier["reserved"] == 0, tier["name"]
        assert tier["free"] == tier["capacity"] - tier["used"], tier["name"]
    assert report["residency"]["files"] == sum(len(files) for files in on_disk.values())
    assert mounted.stages() == []


def objects_in(tier: Path) -> list[Path]:
    """Files that a tier has absorbed. Empty ones may have been made ahead of theirs."""
    found = []
    for path in below(tier, "absorbed-*/??/*"):
        with suppress(FileNotFoundError):
            if path.stat().st_size > 0:
                found.append(path)
    return found


def open_objects(mounted: Mounted) -> set[str]:
    """Those that the daemon has open."""
    objects = {str(path) for tier in mounted.tiers.values() for path in objects_in(tier)}
    return objects & {file.path for file in psutil.Process(mounted.pid).open_files()}
