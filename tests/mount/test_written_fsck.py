"""``fsck`` and ``doctor`` of a mount with written files: what they find, repair and leave alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch.checks.fsck import check_state
from monarch.checks.preflight import Check
from monarch.checks.preflight_writes import check_writing
from monarch.config.settings import MountSettings, TierSettings
from monarch.control.client import call
from monarch.control.registry import Registry
from monarch.writeback.objects import Objects
from tests.conftest import MonarchCommand, Mounted, contents
from tests.equipment.slowfs import SlowSource
from tests.mount.command import needs_fuse, needs_root
from tests.mount.observe import wait_until

pytestmark = [needs_fuse, pytest.mark.modes("auto")]


def check(mounted: Mounted, *, repair: bool = False) -> dict[str, tuple[str, bool]]:
    """What fsck finds: kind to the last part of the path, and whether it was mended."""
    socket = mounted.state / "control.sock"
    if socket.exists():
        report = call(socket, "fsck", {"repair": repair}, timeout=60)
    else:
        registry = Registry(Path(mounted.cli.environment()["MONARCH_STATE_ROOT"]))
        report = check_state(
            mounted.state,
            registry=registry,
            digests=False,
            repair=repair,
            progress=lambda progress: None,
        ).to_dict()
    return {f["kind"]: (f["path"].split("/")[-1], f["repaired"]) for f in report["findings"]}


def settings(mounted: Mounted, source: Path, **changes: Any) -> MountSettings:
    tier = TierSettings(name="fast", path=mounted.tiers["fast"])
    known: dict[str, Any] = {
        "name": "m",
        "source": source,
        "mountpoint": mounted.path,
        "tiers": (tier,),
        "absorb": ("ckpt/**",),
    }
    return MountSettings(**{**known, **changes})


def messages_of(checks: list[Check], status: str) -> str:
    return "\n".join(f"{c.detail}; {c.advice}" for c in checks if c.status == status)


def test_fsck_holds_the_journal_against_the_objects_and_never_touches_a_record(
    slow: SlowSource, monarch: MonarchCommand
) -> None:
    monarch.expects_log("draining to the source has stopped")
    (slow.root / "ckpt").mkdir()
    mounted = monarch.mount(slow.path, tiers={"fast": "64MiB"}, options=("absorb=ckpt/**",))
    slow.rules("err create EIO .", "err write EIO .")
    for name in ("a", "b", "c"):
        (mounted.path / "ckpt" / name).write_bytes(contents(name, 3000))
    with open(mounted.path / "ckpt/a", "ab") as file:
        os.fsync(file.fileno())
    assert check(mounted) == {}
    wait_until(lambda: "the source has stopped" in mounted.log_text, "the drain has failed")
    mounted.umount("--abandon")
    (directory,) = mounted.tiers["fast"].glob("monarch/absorbed-*")
    assert check(mounted) == {}
    at = {number: directory / f"{number:02x}" / str(number) for number in (1, 2, 3)}
    assert at[1].read_bytes() == contents("a", 3000)
    journal = (directory / "journal").read_bytes()

    # Left by a daemon that was killed, or by another program.
    (directory / "09").mkdir(mode=0o700, exist_ok=True)
    os.close(Objects(directory).create(10))
    (directory / "09/9").write_bytes(b"unknown")
    (directory / "journal.part").write_bytes(b"half")
    directory.chmod(0o755)
    at[2].rename(directory / "kept")
    found = {
        "written-unknown": ("9", False),
        "stage": ("journal.part", False),
        "directory-mode": (directory.name, False),
        "written-missing": ("b", False),
    }
    assert check(mounted) == found
    mended = {kind: (name, kind != "written-missing") for kind, (name, _) in found.items()}
    assert check(mounted, repair=True) == mended
    (directory / "kept").rename(at[2])
    assert check(mounted) == {} and (directory / "journal").read_bytes() == journal

    # What doctor says of the tier of this mount, and of another source's that is to have it.
    checks = list(check_writing(settings(mounted, slow.path), []))
    assert "3 files, 8.79 KiB, written earlier, are not at the source yet" in messages_of(
        checks, "warn"
    )
    checks = list(check_writing(settings(mounted, monarch.directory), []))
    assert f"written for {slow.path}, are not there yet" in messages_of(checks, "warn")

    # A line that was whole once: no object is removed that the line may have named.
    lines = journal.splitlines(keepends=True)
    (directory / "journal").write_bytes(b"".join([*lines[:3], b"x" + lines[3][1:], *lines[4:]]))
    (directory / "09/9").write_bytes(b"unknown")
    assert check(mounted, repair=True) == {"journal": (directory.name, False)}
    checks = list(check_writing(settings(mounted, slow.path), []))
    assert "line 4: the record is damaged" in messages_of(checks, "fail")
    (directory / "09/9").unlink()
    (directory / "journal").write_bytes(journal)
    slow.rules()
    again = monarch.mount(slow.path, tiers={"fast": "64MiB"}, options=("absorb=ckpt/**",))
    call(again.state / "control.sock", "drain", {"timeout": 30})
    assert {p.name: p.read_bytes() for p in (slow.root / "ckpt").iterdir()} == {
        name: contents(name, 3000) for name in ("a", "b", "c")
    }
    assert check(again) == {}


@pytest.fixture
def planned(source: Path, tmp_path: Path) -> Callable[..., list[Check]]:
    """What doctor says of a mount that is not there yet."""

    def checks(**changes: Any) -> list[Check]:
        path = changes.pop("tier", tmp_path / "tier")
        known: dict[str, Any] = {
            "name": "m",
            "source": source,
            "mountpoint": tmp_path / "mnt",
            "tiers": (TierSettings(name="fast", path=path),),
            "absorb": ("ckpt/**", "runs/*/logs"),
        }
        return list(check_writing(MountSettings(**{**known, **changes}), []))

    return checks


def test_doctor_shows_whether_written_files_can_be_drained_and_are_safe_meanwhile(
    planned: Callable[..., list[Check]], source: Path
) -> None:
    (source / "ckpt").mkdir()
    checks = planned()
    assert {check.status for check in checks} == {"ok"}
    assert [check.detail for check in checks] == [
        f"{source} can be written by the drain",
        f"{source}/ckpt can be written by the drain",
    ]
    assert planned(absorb=()) == []
    memory = Path("/dev/shm")
    if os.path.ismount(memory):
        warned = messages_of(planned(tier=memory / "monarch-not-there"), "warn")
        assert "survives a crash of the daemon, not of the machine" in warned
    failed = planned(writeback={"tier": "none"})
    assert "there is no tier 'none'; there are: fast" in messages_of(failed, "fail")
    short = planned(writeback={"reserve": "8000TiB"})
    assert "reserved for writing" in messages_of(short, "warn")


@needs_root
def test_doctor_sees_that_the_source_is_read_only(
    planned: Callable[..., list[Check]], source: Path
) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(source)], check=True)
    try:
        assert f"{source} is on a read-only file system" in messages_of(planned(), "fail")
    finally:
        subprocess.run(["umount", "-l", str(source)], check=True)
