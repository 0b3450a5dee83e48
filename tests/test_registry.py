"""The list of a user's mounts after a killed daemon, after damage, and with unusual names."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from monarch.cli import umount
from monarch.control.registry import MountRecord, Registry, alive, process_started
from monarch.errors import NotMountedError, TierError
from monarch.posix.mounts import is_dead


def record(mountpoint: str, **changes: object) -> MountRecord:
    pid = os.getpid()
    started = process_started(pid)
    assert started is not None
    made = MountRecord(
        mountpoint=mountpoint,
        source="/pfs/imagenet",
        pid=pid,
        pid_started=started,
        socket="/state/control.sock",
        state="/state",
        log="/state/daemon.log",
        started_ns=1,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "state" / "root")


def test_without_a_directory_there_are_no_mounts(registry: Registry) -> None:
    assert registry.all() == []
    registry.remove("/mnt/data")


def test_a_record_comes_back_and_goes(registry: Registry) -> None:
    first, second = record("/mnt/a"), record(os.fsdecode(b"/mnt/\xff\n"))
    registry.add(second)
    registry.add(first)
    assert registry.all() == [first, second]
    registry.remove("/mnt/a/")
    assert registry.all() == [second]


def test_a_daemon_that_ends_leaves_the_record_of_the_next_one(registry: Registry) -> None:
    old, new = record("/mnt/a"), record("/mnt/a", pid=1)
    registry.add(new)
    registry.remove_own(old)
    assert registry.all() == [new]
    registry.remove_own(new)
    registry.remove_own(new)
    assert registry.all() == []


def test_umount_leaves_the_record_of_a_daemon_that_begins_while_it_waits(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next daemon needs the lock of the one that ends, and no more."""
    old = record(os.fspath(tmp_path / "mnt"), pid_started=1)
    new = record(old.mountpoint)
    registry.add(old)
    monkeypatch.setenv("MONARCH_STATE_ROOT", os.fspath(tmp_path / "state" / "root"))
    monkeypatch.setattr(umount, "_wait_for_end", lambda _: registry.add(new))
    result = CliRunner().invoke(umount.umount, [old.mountpoint])
    assert result.exit_code == 0, result.output
    assert registry.all() == [new]


def test_a_new_mount_takes_the_place_of_the_dead_one(registry: Registry) -> None:
    registry.add(record("/mnt/a", pid=1))
    registry.add(record("/mnt/a", pid=2))
    assert [r.pid for r in registry.all()] == [2]


def test_other_users_cannot_read_the_records(registry: Registry, tmp_path: Path) -> None:
    registry.add(record("/mnt/a"))
    directory = tmp_path / "state" / "root" / "mounts"
    (file,) = directory.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_record_that_cannot_be_written_says_where(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file in the way")
    with pytest.raises(TierError, match=r"mounts: Not a directory; the state directory"):
        registry.add(record("/mnt/a"))


@pytest.mark.parametrize(
    ("path", "mountpoint"),
    [
        ("/mnt/a", "/mnt/a"),
        ("/mnt/a/", "/mnt/a"),
        ("/mnt/a/train/../val/x", "/mnt/a"),
        ("/mnt/a/inner/x", "/mnt/a/inner"),
        ("/mnt/ab", "/mnt/ab"),
    ],
)
def test_the_innermost_mount_is_found_by_names(
    registry: Registry, path: str, mountpoint: str
) -> None:
    for known in ("/mnt/a", "/mnt/ab", "/mnt/a/inner"):
        registry.add(record(known))
    assert registry.find(Path(path)).mountpoint == mountpoint


def test_a_relative_path_is_taken_from_where_we_are(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.add(record(str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    assert registry.find(Path("train/x")).mountpoint == str(tmp_path)


@pytest.mark.parametrize("path", ["/mnt", "/mnt/abc", "/mnt/b", "/", "/mnt/a/../\udcff"])
def test_elsewhere_is_not_mounted(registry: Registry, path: str) -> None:
    registry.add(record("/mnt/a"))
    with pytest.raises(NotMountedError, match="`monarch status` lists the mounts"):
        registry.find(Path(path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        b"null",
        b"[]",
        b"[" * 60_000,
        b"{}",
        b'{"mountpoint": "/mnt/a"}',
        json.dumps({**dataclasses.asdict(record("/mnt/x")), "pid": "1"}).encode(),
        json.dumps({**dataclasses.asdict(record("/mnt/x")), "pid": True}).encode(),
        json.dumps({**dataclasses.asdict(record("/mnt/x")), "extra": 1}).encode(),
        json.dumps({**dataclasses.asdict(record("/mnt/x")), "source": "y" * 100_000}).encode(),
    ],
    ids=range(11),
)
def test_a_corrupt_record_is_passed_over_with_a_warning(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    good = record("/mnt/a")
    registry.add(good)
    bad = tmp_path / "state" / "root" / "mounts" / "bad.json"
    bad.write_bytes(content)
    assert registry.all() == [good]
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert str(bad) in caplog.text


def test_a_directory_in_a_records_place_is_passed_over(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state" / "root" / "mounts" / "odd.json").mkdir(parents=True)
    assert registry.all() == []
    assert "Is a directory" in caplog.text


def test_this_process_is_alive_and_a_reused_pid_is_not() -> None:
    mine = record("/mnt/a")
    assert alive(mine)
    assert not alive(dataclasses.replace(mine, pid_started=mine.pid_started - 1))


def test_a_dead_and_an_unreaped_process_are_not_alive() -> None:
    child = subprocess.Popen(["sleep", "60"])
    started = process_started(child.pid)
    assert started is not None
    theirs = record("/mnt/a", pid=child.pid, pid_started=started)
    assert alive(theirs)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not alive(theirs)
    child.wait()
    assert not alive(theirs)


def test_a_process_with_a_hostile_name_is_recognised(tmp_path: Path) -> None:
    program = tmp_path / ") Z 1 (x"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(program), "60"])
    try:
        started, mine = process_started(child.pid), process_started(os.getpid())
        assert started is not None
        assert mine is not None
        assert started >= mine
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("number", "dead"),
    [(errno.ENOTCONN, True), (errno.ECONNABORTED, True), (errno.EACCES, False)],
)
def test_a_mount_is_dead_whose_daemon_ends_before_or_during_the_question(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, dead: bool
) -> None:
    def statvfs(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert is_dead(tmp_path) is dead
