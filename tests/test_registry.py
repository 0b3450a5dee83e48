"""The list of a user's mounts after a killed daemon, after damage, and with unusual names."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from monarch.cli import status, umount
from monarch.control import registry as registries
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


class Node:
    """A node of several that share the directory of the records, as in a home."""

    def __init__(self, root: Path, name: str, boot: str, change: pytest.MonkeyPatch) -> None:
        self.name = name
        change.setattr(registries, "_this_node", lambda: [name, boot])
        self.registry = Registry(root)

    def record(self, mountpoint: str, **changes: object) -> MountRecord:
        return record(mountpoint, node=self.name, **changes)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Node]:
    def made(name: str, boot: str = "") -> Node:
        return Node(tmp_path, name, boot or f"boot of {name}", monkeypatch)

    return made


@pytest.mark.promise(113)
def test_nodes_that_share_a_home_have_records_of_their_own(node: Callable[..., Node]) -> None:
    """The processes of another node cannot be seen: its mounts look dead."""
    one, two = node("one"), node("two")
    # The same mount point on all nodes, as in a job.
    of_one, of_two = one.record("/mnt/data", pid=1), two.record("/mnt/data", pid=2)
    one.registry.add(of_one)
    two.registry.add(of_two)
    alone = one.record("/mnt/one")
    one.registry.add(alone)
    assert one.registry.all() == [of_one, alone]
    assert two.registry.all() == [of_two]
    assert one.registry.elsewhere() == [of_two]
    assert two.registry.elsewhere() == [of_one, alone]
    with pytest.raises(NotMountedError):
        two.registry.find(Path("/mnt/one/x"))
    # Nothing on one node removes a record of another one.
    two.registry.remove("/mnt/one")
    two.registry.remove_own(alone)
    two.registry.remove("/mnt/data")
    assert (one.registry.all(), two.registry.all()) == ([of_one, alone], [])


def test_a_node_leaves_the_temporary_files_of_others(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that writes one there cannot be seen here."""
    one, two = node("one"), node("two")
    rename = Path.rename

    def meanwhile(staged: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        monkeypatch.setattr(registries, "process_started", lambda pid: None)
        two.registry.add(two.record("/mnt/data"))
        return rename(staged, target)

    monkeypatch.setattr(Path, "rename", meanwhile)
    one.registry.add(one.record("/mnt/data"))
    assert [each.node for each in two.registry.elsewhere()] == ["one"]


@pytest.mark.parametrize(
    ("name", "boot"),
    [("one", "the next one"), ("renamed", "boot of one")],
    ids=["started again", "another name"],
)
def test_a_node_knows_its_records_after_a_start_and_with_another_name(
    node: Callable[..., Node], name: str, boot: str
) -> None:
    before = node("one")
    old = before.record("/mnt/data", pid=1)
    before.registry.add(old)
    now = node(name, boot)
    assert (now.registry.all(), now.registry.elsewhere()) == ([old], [])
    new = now.record("/mnt/data", pid=2)
    now.registry.add(new)
    assert (now.registry.all(), before.registry.all()) == ([new], [new])
    now.registry.remove_own(new)
    assert now.registry.all() == []


def test_records_of_earlier_versions_are_of_this_node(
    node: Callable[..., Node], tmp_path: Path
) -> None:
    one = node("one")
    old = record("/mnt/data", pid=1)
    one.registry.add(old)
    (file,) = (tmp_path / "mounts").iterdir()
    earlier = file.with_name(f"{file.name.partition('-')[0]}.json")
    file.rename(earlier)
    assert one.registry.all() == [old]
    new = one.record("/mnt/data", pid=2)
    one.registry.add(new)
    assert (one.registry.all(), earlier.exists()) == ([new], False)


@pytest.mark.promise(113)
def test_status_shows_mounts_of_other_nodes_as_such(
    node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        other = node(f"n{number}")
        other.registry.add(other.record("/mnt/data", pid=1, pid_started=1))
    node("here")
    monkeypatch.setenv("MONARCH_STATE_ROOT", os.fspath(tmp_path))
    monkeypatch.setattr(registries, "mount_table", list)

    def shown(*options: str) -> str:
        result = CliRunner().invoke(status.status, [*options], standalone_mode=False)
        assert result.return_value == 0, result.output
        return result.output

    text = shown()
    assert "/mnt/data on n0, " in text and "/mnt/data on n4, 2 more;" in text
    assert "dead" not in text and "ended" not in text
    found = json.loads(shown("--json"))
    assert found["mounts"] == []
    assert [each["node"] for each in found["elsewhere"]] == [f"n{number}" for number in range(7)]
    assert shown("--check") == ""


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


def test_a_dead_daemon_whose_number_another_user_has_now_is_not_alive(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If /proc is mounted with hidepid=1, the kernel lets no other user read the process."""
    theirs = record("/mnt/a", pid=4711)
    registry.add(theirs)
    (file,) = registry._directory.iterdir()
    stage = file.with_name(f"{file.name}.4711.part")
    stage.touch()

    def refuse(pid: int) -> int | None:
        raise PermissionError(errno.EPERM, "Operation not permitted", f"/proc/{pid}/stat")

    monkeypatch.setattr("monarch.control.registry.process_started", refuse)
    assert not alive(theirs)
    registry.add(theirs)
    assert not stage.exists()


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
